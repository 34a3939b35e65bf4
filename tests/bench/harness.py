"""Measures contenders side by side: each in a process of its own, in turns, and the median of all rounds counts."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        name: What the table calls it.
        module: The module with a function `setup(variant) -> step`, where `step()` does one unit of work.
        variant: Passed to `setup`.
    """

    name: str
    module: str
    variant: str


# Else glibc hands memory back to the system and asks for it again, as often as chance will have it: 9,000 to 19,000
# page faults in a step of the language model, up to 30 ms.
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**35), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


class Worker:
    """A contender in a process of its own, which waits for orders on its standard input."""

    def __init__(self, contender: Contender, threads: int):
        self.contender = contender
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.worker", contender.module, contender.variant, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if os.environ.get("CI") else None,
            text=True,
            env={**os.environ, **_KEEP_MEMORY, "OMP_NUM_THREADS": str(threads), "XLA_FLAGS": _xla_flags(threads)},
        )

    def ask(self, steps: int) -> list[float]:
        """Runs some steps and returns the milliseconds that each took; empty if the contender could not start."""
        try:
            print(steps, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline() if self.process.stdout else ""
        except BrokenPipeError:
            return []
        return json.loads(answer) if answer else []

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def race(
    contenders: Sequence[Contender], *, threads: int, rounds: int, steps: int, report: Callable[[str], Any]
) -> dict[str, float | None]:
    """Times contenders in alternation.

    Args:
        contenders: What to time; setting one up may take long and is not timed.
        threads: The number of threads that each may use; they run one after the other.
        rounds: How often each gets its turn.
        steps: The steps of one turn.
        report: Called with a line of progress now and then.

    Returns:
        The median milliseconds of a step by name; None for a contender that could not be started.
    """
    workers = [Worker(contender, threads) for contender in contenders]
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    try:
        for worker in workers:  # The first turn compiles and warms up, and its times are thrown away.
            start = time.perf_counter()
            worker.ask(3)
            report(f"{worker.contender.name}: ready after {time.perf_counter() - start:.0f} s")
        for _ in range(rounds):
            for worker in workers:
                times[worker.contender.name] += worker.ask(steps)
    finally:
        for worker in workers:
            worker.close()
    return {name: statistics.median(values) if values else None for name, values in times.items()}


def _xla_flags(threads: int) -> str:
    return "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" if threads == 1 else ""
