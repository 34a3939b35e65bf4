"""The campaign of random programs: rounds of hypothesis, each with a seed of its own, until the time is over."""

import time
import warnings

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.soak.checks import check
from tests.soak.program import Program, programs
from tests.soak.report import Report

_ROUND = 20


def campaign(minutes: float, *, seed: int = 0) -> Report:
    """Runs random programs for some minutes.

    Args:
        minutes: How long; the round that is under way, and the search for the smallest failing example, are ended.
        seed: Of the first round; the others count on from it.

    Returns:
        How many programs were run, and for each round that failed its smallest failing program.
    """
    report, start = Report("programs"), time.monotonic()
    while time.monotonic() - start < 60.0 * minutes:
        failing, count = one_round(seed, _ROUND)
        report.examples += count
        if failing is not None:
            report.findings.append(failing)
        seed += 1
    report.seconds = time.monotonic() - start
    return report


def one_round(seed: int, examples: int, arounds: tuple[str, ...] | None = None) -> tuple[str | None, int]:
    """Runs some programs.

    Returns:
        The smallest program that fails and how it fails, None if none does; and how many were run.
    """
    # Compiling takes as long as a hundred other programs.
    arounds = (*["plain"] * 12, *["vmap"] * 6, *["compile"] * (seed % 8 == 0)) if arounds is None else arounds
    count, last = 0, None

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        phases=[Phase.generate, Phase.shrink],
    )
    @given(programs(arounds))
    def each(program: Program) -> None:
        nonlocal count, last
        count, last = count + 1, program
        run(program)

    try:
        each()
    except Exception as error:
        text = f"{type(error).__name__}: {error}".split("\nFalsifying example")[0]
        return f'{text}\n    replay: python -m tests.soak programs --replay "{last!r}"', count
    return None, count


def run(program: Program) -> None:
    """Runs one program.

    Raises:
        Exception: What it fails with.
    """
    with warnings.catch_warnings():
        # torch maps its fused attention one member after the other.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        warnings.filterwarnings("ignore", ".*Function.*should not be instantiated", DeprecationWarning)
        try:
            check(program)
        finally:
            if program.around == "compile":
                torch.compiler.reset()
