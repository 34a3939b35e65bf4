"""Peak memory and time of a train step of twelve blocks, by where remat and torch.compile are; prints a table.

python -m tests.bench.remat_step
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import fmp
from tests.bench.remat_block import loss_of, make_batch, make_weights, transformer_block
from tests.memory import peak_bytes

BATCH = 32  # so that it is not the optimizer that needs the most memory
Loss = Callable[..., torch.Tensor]

# What a loss is made of, and whether fmp.train_step compiles the whole step.
ARRANGEMENTS: dict[str, tuple[Callable[[], Loss], bool]] = {
    "eager": (lambda: loss_of(transformer_block), False),
    "eager, remat(block)": (lambda: loss_of(fmp.remat(transformer_block)), False),
    "compile=True": (lambda: loss_of(transformer_block), True),
    "compile=True, remat(block)": (lambda: loss_of(fmp.remat(transformer_block)), True),
    "remat(torch.compile(block))": (lambda: loss_of(fmp.remat(torch.compile(transformer_block))), False),
    "torch.compile(loss)": (lambda: torch.compile(loss_of(transformer_block)), False),
    "torch.compile(loss), remat(block)": (lambda: torch.compile(loss_of(fmp.remat(transformer_block))), False),
    "torch.compile(loss), remat(block, saveable=dots)": (
        lambda: torch.compile(loss_of(fmp.remat(transformer_block, saveable=fmp.saveable.dots))),
        False,
    ),
}


def make_step(arrangement: str) -> Callable[[], Any]:
    """Makes one of the arrangements ready to run."""
    make_loss, compiles = ARRANGEMENTS[arrangement]
    step = fmp.train_step(make_loss(), fmp.optim.sgd(1e-3), compile=compiles)
    state, batch = step.init(make_weights()), make_batch(BATCH)
    return lambda: step(state, batch)


def measure(arrangement: str, repeats: int) -> tuple[float, float]:
    """Returns the peak live MiB of a step, beyond parameters and batch, and its milliseconds of processor time."""
    run = make_step(arrangement)
    for _ in range(2):  # compiles
        run()
    times = []
    for _ in range(repeats):
        start = time.process_time()  # not disturbed by others, on one thread
        run()
        times.append(1e3 * (time.process_time() - start))
    return peak_bytes(run) / 2**20, min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=list(ARRANGEMENTS), nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| step | peak | time |\n| --- | ---: | ---: |", flush=True)
    for arrangement in arguments.only or ARRANGEMENTS:
        torch._dynamo.reset()
        peak, milliseconds = measure(arrangement, arguments.repeats)
        print(f"| {arrangement} | {peak:.0f} MiB | {milliseconds:.0f} ms |", flush=True)


if __name__ == "__main__":
    main()
