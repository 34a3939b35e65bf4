"""What the tests of the forms of parameters share: one step of an optimizer whose parameters are not float32."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from tests.cuda_executor import Module
from tests.kernels import test_adam, test_sgd
from tests.kernels.harness import Buffer, chunks, launch, same, table

Leaves = list[torch.Tensor]
Case = test_adam.Case | test_sgd.Case
CASES = {"adam": test_adam.case, "sgd": test_sgd.case}
ALIGNED = (0, 0, 0, 0, 0)
# Of the gradients, the parameters, what is kept beside them, and the moments.
OFFSETS = [(1, 1, 1, 1, 1), (3, 3, 3, 3, 3), *(tuple(map(int, row)) for row in (*np.eye(5), *2 * np.eye(5)))]


class Step(NamedTuple):
    """What a step leaves behind.

    Attributes:
        params: The parameters in their form.
        rests: What is kept beside them, if anything.
        state: The moments of Adam, or the momentum of SGD.
    """

    params: Leaves
    rests: Leaves
    state: list[Leaves]


def state_of(of: Case) -> list[Leaves]:
    return [of.first, of.second] if isinstance(of, test_adam.Case) else [of.totals]


def run(
    kernels: Module,
    kernel: str,
    of: Case,
    params: Leaves,
    *,
    rests: Leaves | None = None,
    seeds: torch.Tensor | None = None,
    finite: bool | None = True,
    chunk_size: int = 128,
    threads: int = 32,
    offsets: Sequence[int] = ALIGNED,
    before: int = 0,
) -> Step:
    """Makes a step with a kernel; parameters come from `params` and `rests`, all else from the case."""

    def copied(leaves: Leaves, offset: int) -> list[Buffer]:
        return [Buffer(leaf, offset) for leaf in leaves]

    def addresses(column: list[Buffer], there: bool = True) -> list[int]:
        return [buffer.address(before) if there else 0 for buffer in column] or [0] * len(params)

    gradients, narrow, beside = map(copied, (of.gradients, params, rests or []), offsets[:3])
    state = list(map(copied, state_of(of), offsets[3:]))
    sizes = [param.numel() for param in params]
    flags, weights, has_state = _numbers(of)
    rows = table(
        addresses(gradients),
        addresses(narrow),
        *(addresses(column, has_state) for column in state),
        addresses(beside),
        [before + size for size in sizes],
        [flags] * len(sizes),
    )
    entries = chunks(sizes, chunk_size, before)
    scalars = [None if value is None else torch.tensor(value) for value in (of.scale, of.clip, finite)]
    scale, clip, flag = (0 if scalar is None else scalar for scalar in scalars)
    drawn_by = [] if seeds is None else [seeds]
    launch(
        kernels,
        kernel,
        len(entries),
        threads,
        (rows, entries, np.int32(chunk_size), weights, scale, np.int32(of.divide), clip, flag, *drawn_by),
        read=[rows, entries, weights, *scalars, *drawn_by, *gradients],
        written=[*narrow, *beside, *(buffer for column in state for buffer in column)],
    )

    def contents(column: list[Buffer]) -> Leaves:
        return [buffer.tensor for buffer in column]

    return Step(contents(narrow), contents(beside), list(map(contents, state)))


def expected(of: Case, full: Leaves) -> tuple[Leaves, list[Leaves]]:
    """Makes the step of fmp.optim on float32 parameters; returns the new ones and the state."""
    if isinstance(of, test_sgd.Case):
        params, *state = test_sgd.expected(replace(of, params=full))
    else:
        with test_adam.exact_root():
            params, *state = test_adam.expected(replace(of, params=full))
    return params, state


def equal(found: Step, wanted: Step) -> bool:
    columns = zip((found.params, found.rests, *found.state), (wanted.params, wanted.rests, *wanted.state), strict=True)
    return all(same(*pair) for column in columns for pair in zip(*column, strict=True))


def _numbers(of: Case) -> tuple[int, torch.Tensor, bool]:
    if isinstance(of, test_adam.Case):
        decay = test_adam.DECOUPLED if of.decoupled else test_adam.COUPLED
        return decay if of.decay else 0, test_adam.coefficients(of), True
    flags = (test_sgd.DECAY if of.decay else 0) | (test_sgd.NESTEROV if of.nesterov else 0)
    gains = [1.0 - of.dampening if age else 1.0 for age in of.ages]
    weights = torch.tensor([[-of.learning_rate, of.momentum, gain, of.decay] for gain in gains])
    return flags, weights, bool(of.momentum)
