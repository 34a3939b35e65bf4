"""Measures fmp next to its peers and prints one table of ratios.

    python -m tests.bench                    # everything, about ten minutes on two cores
    python -m tests.bench --only mlp         # one section; --help lists them
    python -m tests.bench --threads 2

JAX is measured if `jax`, `jmp` and `optax` are installed; nothing else in fmp needs them.
"""

import argparse
import importlib.util
import itertools
import json
import platform
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from tqdm import tqdm

import fmp
from tests.bench import df11_step, record_step, remat_block, zero_bytes
from tests.bench.harness import Contender, race
from tests.bench.measured_peak import measured_errors
from tests.bench.memory_peaks import gradient_peaks, step_peak
from tests.bench.op_overhead import op_microseconds
from tests.distributed.processes import run
from tests.memory import peak_bytes

RESULTS = Path(__file__).parent / "results"
LM, MLP, OPTIMIZER = "tests.bench.lm_step", "tests.bench.mlp_step", "tests.bench.optimizer_step"
REMAT, DF11, RECORD = "tests.bench.remat_block", "tests.bench.df11_step", "tests.bench.record_step"


@dataclass(frozen=True)
class Row:
    """One comparison: the ratio is what fmp is better by, so more is better.

    Attributes:
        allowance: What fmp may take beyond what the target ratio says, in the row's unit.
    """

    what: str
    fmp: float
    peer: float
    unit: str
    ratio: float
    target: float
    allowance: float = 0.0

    @property
    def met(self) -> bool:
        """Whether the ratio reaches its target."""
        return self.ratio >= self.target or self.fmp <= self.peer / self.target + self.allowance

    @property
    def goal(self) -> str:
        """The target as the table shows it."""
        if not self.target:
            return "none"
        return f"{self.target:.2f} x" + (f" + {self.allowance} {self.unit}" if self.allowance else "")


def forms_of_fmp(module: str) -> list[Contender]:
    """The three forms of an fmp step."""
    return [
        Contender("fmp eager", module, "fmp"),
        Contender("fmp donated", module, "fmp-donated"),
        Contender("fmp compiled", module, "fmp-compiled"),
    ]


def lm_rows(arguments: argparse.Namespace) -> list[Row]:
    """The language-model step in bfloat16."""
    contenders = [
        *forms_of_fmp(LM),
        Contender("fmp O1 eager", LM, "fmp-O1"),
        Contender("fmp O1 eager, torch's rules", LM, "fmp-O1-torch"),
        Contender("fmp O1 compiled", LM, "fmp-O1-compiled"),
        Contender("torch.amp eager", LM, "amp"),
        Contender("torch.amp compiled", LM, "amp-compiled"),
    ]
    if all(importlib.util.find_spec(name) for name in ("jax", "jmp", "optax")):
        contenders.append(Contender("JAX + jmp + optax", "tests.bench.jax_lm", "jit"))
    times = race(contenders, threads=arguments.threads, rounds=arguments.rounds, steps=4, report=tqdm.write)
    pairs = [
        ("fmp eager", "torch.amp eager", 0.95),
        ("fmp donated", "torch.amp eager", 0.95),
        ("fmp compiled", "torch.amp eager", 1.5),
        ("fmp compiled", "torch.amp compiled", 1.0),
        ("fmp compiled", "JAX + jmp + optax", 3.0),
        ("fmp O1 eager", "torch.amp eager", 1.0),
        ("fmp O1 eager, torch's rules", "torch.amp eager", 1.0),
        ("fmp O1 compiled", "torch.amp compiled", 1.0),
    ]
    return [row for pair in pairs if (row := compare("LM step, bf16", times, *pair))]


def mlp_rows(arguments: argparse.Namespace) -> list[Row]:
    """The step of a small network in float32."""
    mine = [*forms_of_fmp(MLP), Contender("fmp fused, donated", MLP, "fmp-fused")]
    contenders = [*mine, Contender("torch eager", MLP, "torch")]
    times = race(contenders, threads=1, rounds=arguments.rounds, steps=10, report=tqdm.write)
    return [
        row
        for name in [contender.name for contender in mine]
        if (row := compare("MLP, 20 steps, f32", times, name, "torch eager", 1.0))
    ]


def optimizer_rows(arguments: argparse.Namespace) -> list[Row]:
    """Single updates of optimizers."""
    pairs = [
        ("fmp", "torch foreach"),
        ("fmp", "torch fused"),
        ("fmp fused", "torch fused on copies"),
        ("fmp fused, donated", "torch fused"),
    ]
    forms = {
        "fmp": "fmp",
        "fmp fused": "fmp_fused",
        "fmp fused, donated": "fmp_donated",
        "torch fused": "fused",
        "torch fused on copies": "copied",
        "torch foreach": "foreach",
    }
    rows = []
    for algorithm in ("adamw", "sgd", "lion"):
        # Nobody has a kernel for lion.
        measured = {name: form for name, form in forms.items() if algorithm != "lion" or form in ("fmp", "foreach")}
        contenders = [Contender(name, OPTIMIZER, f"{algorithm}-{form}") for name, form in measured.items()]
        times = race(contenders, threads=1, rounds=arguments.rounds, steps=10, report=tqdm.write)
        what = f"{algorithm}, 100 tensors, 4 M parameters"
        rows += [row for pair in pairs if (row := compare(what, times, *pair, 1.0))]
    return rows


def op_rows(arguments: argparse.Namespace) -> list[Row]:
    """Single ops that need no cast, under the mode that casts op by op."""
    rows = []
    for op, times in op_microseconds(arguments.rounds).items():
        mine = times["fmp.autocast"]
        # torch hands its Python functions to any mode by a slow road; what is left is ours.
        peers = ["torch.autocast", "empty mode"] if op.startswith("F.") else ["torch.autocast"]
        for peer in peers:
            name, ratio = f"{op}: fmp.autocast / {peer}", times[peer] / mine
            rows.append(Row(name, mine, times[peer], "us", ratio, 1.0, allowance=1.5))
    return rows


def memory_rows(arguments: argparse.Namespace) -> list[Row]:
    """The peak memory of a gradient and of a step."""
    found = gradient_peaks()
    mine, reference, func = found["fmp.value_and_grad"], found["torch.autograd.grad"], found["torch.func.grad"]
    donated, kept = step_peak(donate=True), step_peak(donate=False)
    return [
        Row("gradient, peak memory: fmp / torch.autograd.grad", mine, reference, "MiB", reference / mine, 1 / 1.05),
        Row("gradient, peak memory: fmp / torch.func.grad", mine, func, "MiB", func / mine, 2.0),
        Row("O2 bf16 AdamW step, peak memory: donated / not", donated, kept, "B/param", kept / donated, 1.0),
    ]


def remat_rows(arguments: argparse.Namespace) -> list[Row]:
    """Twelve rematerialized transformer blocks, and what a call costs by itself."""
    contenders = [Contender(variant, REMAT, variant) for variant in remat_block.VARIANTS]
    times = race(contenders, threads=1, rounds=arguments.rounds, steps=2, report=tqdm.write)
    peaks: dict[str, float | None] = {
        variant: peak_bytes(remat_block.setup(variant)) / 2**20
        for variant in ("autograd-fmp", "autograd-torch", "func", "func-fmp")
    }
    by_autograd, by_func = "remat, autograd.grad of 12 blocks", "remat, func.grad of 12 blocks"
    rows = [
        compare(f"{by_autograd}, peak", peaks, "autograd-fmp", "autograd-torch", 1 / 1.05, "MiB"),
        compare(f"{by_autograd}", times, "autograd-fmp", "autograd-torch-whole", 1 / 1.05),
        compare(f"{by_func}, peak", peaks, "func-fmp", "func", 4.0, "MiB"),
        compare(f"{by_func}", times, "func-fmp", "func", 1 / 1.4),
        compare("remat, 1600 tiny blocks", times, "tiny-fmp", "tiny-torch", 1 / 1.5),
    ]
    return [row for row in rows if row]


def df11_rows(arguments: argparse.Namespace) -> list[Row]:
    """Adapters that are trained on twelve frozen transformer blocks, weights in bf16 or compressed."""
    one_core, two_cores = ("bf16", "remat", "frozen", "wrapped"), ("wrapped", "wrapped-ahead")
    times = race(
        [Contender(variant, DF11, variant) for variant in one_core],
        threads=1,
        rounds=arguments.rounds,
        steps=1,
        report=tqdm.write,
    )
    on_two = race(
        [Contender(variant, DF11, variant) for variant in two_cores],
        threads=2,
        rounds=arguments.rounds,
        steps=1,
        report=tqdm.write,
    )
    peaks = {variant: df11_step.peak_nbytes(variant) / 2**20 for variant in ("remat", "frozen")}
    weights = df11_step.weights_nbytes("frozen") / 2**20
    sizes: dict[str, float | None] = {
        "frozen": weights + peaks["frozen"],
        "weights + one block + remat": weights + df11_step.block_nbytes() / 2**20 + peaks["remat"],
    }
    what = "LoRA on 12 blocks"
    rows = [
        compare(f"{what}, peak", sizes, "frozen", "weights + one block + remat", 1 / 1.05, "MiB"),
        compare(what, times, "frozen", "remat", 0.0),
        compare(what, times, "frozen", "bf16", 0.0),
        compare(what, times, "wrapped", "bf16", 0.0),
        compare(f"{what}, 2 cores", on_two, "wrapped-ahead", "wrapped", 0.0),
    ]
    return [row for row in rows if row]


def numerics_rows(arguments: argparse.Namespace) -> list[Row]:
    """What it costs to record a step, and how true the peak is that is measured without allocating."""
    contenders = [Contender(variant, RECORD, variant) for variant in record_step.VARIANTS]
    times = race(contenders, threads=arguments.threads, rounds=arguments.rounds, steps=3, report=tqdm.write)
    error: dict[str, float | None] = {"measured": 100 * max(measured_errors().values()), "allowed": 2.0}
    rows = [
        compare("recording, LM step", times, "lm-recorded", "lm-plain", 1 / 1.03),
        compare("recording each leaf, LM step", times, "lm-watched", "lm-plain", 1 / 1.03),
        compare("recording each leaf, ten times as large", times, "large-watched", "large-plain", 1 / 1.03),
        compare("peak of a step on fake tensors, error", error, "measured", "allowed", 1.0, "%"),
    ]
    return [row for row in rows if row]


def distributed_rows(arguments: argparse.Namespace) -> list[Row]:
    """What a step on several processes sends and keeps, next to ZeRO's arithmetic; `zero_bytes` says how it counts."""
    rows = []
    for ranks, zero in itertools.product((2, 4), (0, 1, 3)):
        found = zero_bytes.largest(run(ranks, zero_bytes.measure, zero))
        pairs = [
            ("sent, by collectives", found.collectives, found.least_sent, 1 / 1.01),
            ("sent, by gloo's sockets", found.sockets, found.least_sent, 0.0),  # which is gloo's affair
            ("state", found.state, found.least_state, 1 / 1.01),
        ]
        rows += [
            Row(f"zero={zero}, {ranks} ranks, {what}: fmp / ZeRO", mine, least, "B/param", least / mine, target)
            for what, mine, least, target in pairs
        ]
    return rows


def compare(
    what: str, found: dict[str, float | None], mine: str, peer: str, target: float, unit: str = "ms"
) -> Row | None:
    """Makes a row of two figures, or None where one of them could not be measured."""
    ours, theirs = found.get(mine), found.get(peer)
    if ours is None or theirs is None:
        return None
    return Row(f"{what}: {mine} / {peer}", ours, theirs, unit, theirs / ours, target)


def table(rows: list[Row]) -> str:
    """Writes rows as a Markdown table."""
    lines = ["| what | fmp | peer | better by | target | met |", "| --- | ---: | ---: | ---: | ---: | --- |"]
    lines += [
        f"| {row.what} | {row.fmp:.1f} {row.unit} | {row.peer:.1f} {row.unit} | {row.ratio:.2f} x | {row.goal} "
        f"| {('yes' if row.met else 'no') if row.target else ''} |"
        for row in rows
    ]
    return "\n".join(lines)


def processor() -> str:
    """Names the processor, as far as the system says."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    sections = {
        "memory": memory_rows,
        "ops": op_rows,
        "optimizers": optimizer_rows,
        "mlp": mlp_rows,
        "remat": remat_rows,
        "df11": df11_rows,
        "numerics": numerics_rows,
        "distributed": distributed_rows,
        "lm": lm_rows,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(sections))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", help="keep the table under tests/bench/results by this name")
    arguments = parser.parse_args()

    chosen = [arguments.only] if arguments.only else list(sections)
    rows = [row for name in tqdm(chosen, desc="benchmarks") for row in sections[name](arguments)]
    heading = (
        f"{date.today()}, {processor()}, {arguments.threads} thread(s), "
        f"Python {platform.python_version()}, torch {torch.__version__}, fmp {fmp.__version__}"
    )
    text = f"{heading}\n\n{table(rows)}\n"
    print(f"\n{text}")
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{arguments.save}.md").write_text(text)
        (RESULTS / f"{arguments.save}.json").write_text(
            json.dumps({"heading": heading, "rows": [{**asdict(row), "met": row.met} for row in rows]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
