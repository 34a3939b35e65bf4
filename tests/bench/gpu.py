"""Measures the CUDA kernels on a GPU, next to a copy, to torch's kernels, and to the published DFloat11 decoder.

    python -m tests.bench.gpu                  # everything, some minutes
    python -m tests.bench.gpu --only adam      # one of unscale, add, adam, sgd, df11, step
    python -m tests.bench.gpu --save NAME      # keeps the table under tests/bench/results
    python -m tests.bench.gpu --on-executor    # runs each function once, on tiny tensors and a CPU; measures nothing

The bytes that a pass must move are counted for each number, as `2+4`: two are read, four are written. Divided by the
time they are the gigabytes a second, and those, divided by what a copy of as many bytes reaches on the same card, the
share of a copy's bandwidth.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date

import numpy as np
import torch
from tqdm import tqdm

import fmp
from fmp.kernels import launch
from tests.bench import gpu_df11, gpu_step, gpu_work
from tests.bench.__main__ import RESULTS
from tests.bench.gpu_clock import copy_milliseconds, milliseconds
from tests.bench.gpu_work import Work
from tests.gpu.stand_in import on_executor

MOST_NUMBERS, TINY_NUMBERS = 2**28, 2**12
# Parameters, gradients and moments of an optimizer that makes new ones before it lets the old ones go, and some air.
_BYTES_A_NUMBER = 64


@dataclass(frozen=True)
class Row:
    """What was measured.

    Attributes:
        counted: The bytes that each number needs, as read and written.
        milliseconds: The time; None where nothing was measured.
        gigabytes: The bytes a second, in 10**9; None where there are none to count.
        fraction: That as a share of a copy's; None likewise.
        output: The gigabytes of results a second; None where they are not what the target speaks of.
        goal: The target as the table shows it; empty for none.
        met: Whether it is met; None without one.
    """

    what: str
    by: str
    counted: str
    milliseconds: float | None = None
    gigabytes: float | None = None
    fraction: float | None = None
    output: float | None = None
    goal: str = ""
    met: bool | None = None


def sections(device: torch.device, numbers: int, tiny: bool) -> dict[str, Callable[[], Iterator[Work]]]:
    """The parts of the benchmark; each keeps its tensors no longer than it runs."""
    return {
        "unscale": lambda: gpu_work.unscaling(device, numbers),
        "add": lambda: gpu_work.adding(device, numbers),
        "adam": lambda: gpu_work.adam(device, numbers),
        "sgd": lambda: gpu_work.sgd(device, numbers),
        "df11": lambda: gpu_df11.decoding(device, numbers if tiny else numbers // 4),
        "step": lambda: gpu_step.stepping(device, gpu_step.TINY if tiny else gpu_step.SIZE),
    }


def measured(work: Work, device: torch.device) -> Row:
    """Measures one piece of work; where there is no GPU, does it once."""
    if device.type != "cuda":
        work.run()
        return Row(work.what, work.by, work.counted)
    time = milliseconds(work.run, device)
    if not work.nbytes:
        return Row(work.what, work.by, work.counted, time)
    rate, fraction = work.nbytes / time / 1e6, copy_milliseconds(work.nbytes, device) / time
    if work.output is not None:
        output = work.numbers * work.nbytes_each[-1] / time / 1e6
        goal, met = f"{work.output:.0f} GB/s of output", output >= work.output
        return Row(work.what, work.by, work.counted, time, rate, fraction, output, goal, met)
    goal, met = ("", None) if work.fraction is None else (f"{work.fraction:.0%} of a copy", fraction >= work.fraction)
    return Row(work.what, work.by, work.counted, time, rate, fraction, None, goal, met)


def table(rows: Sequence[Row]) -> str:
    """Writes rows as a Markdown table."""
    lines = [
        "| what | by | bytes a number | ms | GB/s | of a copy | GB/s of output | target | met |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for row in rows:
        time = "" if row.milliseconds is None else f"{row.milliseconds:.3f}"
        rate, output = ("" if value is None else f"{value:,.0f}" for value in (row.gigabytes, row.output))
        fraction = "" if row.fraction is None else f"{row.fraction:.0%}"
        met = "" if row.met is None else "yes" if row.met else "no"
        cells = [row.what, row.by, row.counted, time, rate, fraction, output, row.goal, met]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def heading(device: torch.device, numbers: int) -> str:
    """Names the card and the versions, and what fmp has not done by its kernels although it was asked to."""
    if device.type != "cuda":
        return "On the CPU executor: each function ran once, nothing was measured."
    card = torch.cuda.get_device_properties(device)
    on_cuda = {work: backend for work, backend in fmp.kernels.backends().items() if work.endswith("cuda")}
    refused = [work for work, backend in on_cuda.items() if backend.name != "cuda"]
    return (
        f"{date.today()}, {card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}, "
        f"{numbers:,} numbers, Python {platform.python_version()}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, numpy {np.__version__}, fmp {fmp.__version__}"
        + "".join(f"; NOT BY A KERNEL OF FMP: {work}" for work in refused)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
        0, or 2 if there is nothing to measure on.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["unscale", "add", "adam", "sgd", "df11", "step"])
    parser.add_argument("--numbers", type=int, help="how many numbers each pass goes over")
    parser.add_argument("--save", help="keep the table under tests/bench/results by this name")
    parser.add_argument("--on-executor", action="store_true", help="prove the script on a CPU; measures nothing")
    given = parser.parse_args(arguments)
    if not given.on_executor and (reason := launch.missing("cuda")):
        print(
            f"There is nothing to measure on: {reason}. --on-executor runs everything once on a CPU.", file=sys.stderr
        )
        return 2

    with on_executor() if given.on_executor else nullcontext(torch.device("cuda", 0)) as device:
        if given.on_executor:
            numbers = given.numbers or TINY_NUMBERS
        else:
            numbers = given.numbers or min(MOST_NUMBERS, torch.cuda.mem_get_info(device)[0] // _BYTES_A_NUMBER)
        parts = sections(device, numbers, tiny=given.on_executor)
        chosen = [given.only] if given.only else list(parts)
        rows: list[Row] = []
        for name in tqdm(chosen, desc="benchmarks"):
            rows += [measured(work, device) for work in parts[name]()]
            torch.cuda.empty_cache()
        title = heading(device, numbers)
    text = f"{title}\n\n{table(rows)}\n"
    print(f"\n{text}")
    if given.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{given.save}.md").write_text(text)
        content = {"heading": title, "rows": [asdict(row) for row in rows]}
        (RESULTS / f"{given.save}.json").write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
