"""How processes that share a batch come to the same norms, flags and metrics.

For each loss, there is one collective for the gradients, and one for all the numbers:

    grads  = mean of grads
    totals = sum of (not finite, square of the norm, loss, auxiliary output, buffers)
"""

from collections.abc import Callable
from typing import Any

import torch

from fmp import reductions, tree
from fmp.dtypes import is_castable
from fmp.scaling import LossScale
from fmp.step import equal_parts
from fmp.step.config import ONLY, StepConfig
from fmp.step.loss import LossOutput, unscale
from fmp.step.measuring import Gradients, computes_in_double, is_alone, narrowed

Tree = Any
Tensor = torch.Tensor


def agreed(
    config: StepConfig,
    name: str,
    output: LossOutput,
    grads: Tree,
    scaler: LossScale,
    params: Tree,
    wholes: Tree,
    batch: Tree,
    *,
    is_split: bool,
) -> tuple[LossOutput, dict[str, Gradients], Tensor]:
    """Averages the gradients of a loss over all processes, unscales them, and finds out whether they are finite.

    Args:
        config: The parts of the step.
        name: The loss.
        output: What it gave for this process's part of the batch.
        grads: Its gradients, still scaled.
        scaler: What scaled them.
        params: The parameters.
        wholes: The wholes that the parameters are parts of.
        batch: This process's part of the batch.
        is_split: Whether auxiliary outputs are those of microbatches, stacked.

    Returns:
        What the loss gave for the whole batch, the gradients by group, and bool[], whether all of them are finite; the
        same on every process, but for the gradients, of which each has its parts.

    Raises:
        TypeError: If auxiliary output cannot be shared.
        ValueError: If processes have parts of different sizes, or auxiliary output of different shapes; see
            `fmp.step.equal_parts`.
    """
    place = config.placement
    grads = place.reduce(grads, wholes if ONLY in config.optimizers else {key: wholes[key] for key in grads})
    grads = unscale(scaler, grads, output.excess)
    grads = narrowed(grads, params) if computes_in_double(config) else grads
    by_group, wholes_by_group = config.by_group(grads), config.by_group(wholes)
    found = {key: place.measure(part, wholes_by_group[key]) for key, part in by_group.items()}
    is_bad = ~torch.stack([finite for _, finite in found.values()]).all()
    alone = [key for key in by_group if is_alone(config, key)]

    collected = _Collected(1 if is_split else 0)
    loss = collected.mean(output.loss)
    buffers = tree.map(collected.buffer, output.buffers)
    where = f"aux{config.losses[name].where}"
    aux = tree.map_with_path(lambda path, leaf: collected.output(where, path, leaf), output.aux)
    numbers = []
    if equal_parts.can_be_looked_at(is_bad):
        numbers = [equal_parts.of_shape(path, leaf) for path, leaf in zip(collected.paths, collected.rows, strict=True)]
        if config.microbatch_weight is None:  # parts that count by a weight may differ in size
            numbers.append(equal_parts.of_rows(batch))
    known = equal_parts.sent(numbers)
    first = [is_bad.to(torch.float64), *[found[key][0] for key in alone]]
    sums, collected.means = place.totals([*first, *known, *collected.sums], collected.means)
    collected.sums = sums[len(first) + len(known) :]
    equal_parts.check(numbers, sums[len(first) : len(first) + len(known)])
    collected.rows = place.concatenated(collected.rows, collected.depth)

    norms = {key: _norm(total, by_group[key]) for key, total in zip(alone, sums[1:], strict=False)}
    gradients = {key: Gradients(part, norms.get(key)) for key, part in by_group.items()}
    shared = LossOutput(loss(), tree.map(_called, buffers), tree.map(_called, aux))
    return shared, gradients, sums[0] == 0


def with_norms(config: StepConfig, grads: dict[str, Gradients], wholes: Tree) -> dict[str, Gradients]:
    """Finds the norms that are not known yet, of gradients to which several losses have added."""
    late = [key for key, found in grads.items() if found.norm is None]
    if not late:
        return grads
    place = config.placement
    if not place.is_shared:
        norms = [reductions.global_norm(grads[key].values) for key in late]
    else:
        squares = [place.measure(grads[key].values, config.by_group(wholes)[key])[0] for key in late]
        totals, _ = place.totals(squares, [])
        norms = [_norm(total, grads[key].values) for key, total in zip(late, totals, strict=True)]
    found = dict(zip(late, norms, strict=True))
    return {key: gradients._replace(norm=found.get(key, gradients.norm)) for key, gradients in grads.items()}


class _Collected:
    """What is to be shared, kind by kind; each method takes note of a tensor and says where its result will be.

    Args:
        depth: The dimension along which rows are concatenated.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.sums: list[Tensor] = []
        self.means: list[Tensor] = []
        self.rows: list[Tensor] = []
        self.paths: list[str] = []

    def mean(self, value: Tensor) -> Callable[[], Tensor]:
        """Notes what is to be averaged."""
        self.means.append(value)
        index = len(self.means) - 1
        return lambda: self.means[index]

    def buffer(self, leaf: Any) -> Callable[[], Any]:
        """Notes a buffer: floating-point ones are averaged."""
        return self.mean(leaf) if is_castable(leaf) else lambda: leaf

    def output(self, where: str, path: str, leaf: Any) -> Callable[[], Any]:
        """Notes an auxiliary output."""
        if not isinstance(leaf, Tensor):
            return lambda: leaf
        if leaf.ndim > self.depth:
            self.rows.append(leaf)
            self.paths.append(f"{where}: {path or 'it'}")
            index = len(self.rows) - 1
            return lambda: self.rows[index]
        if leaf.dtype == torch.bool:
            raise TypeError(
                f"{where}: {path or 'it'} is {tree.describe(leaf)}, which processes cannot share: they average "
                "floating-point numbers and add up integers; return it as one of these"
            )
        if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            return self.mean(leaf)
        self.sums.append(leaf)
        index = len(self.sums) - 1
        return lambda: self.sums[index]


def _called(function: Callable[[], Any]) -> Any:
    return function()


def _norm(square: Tensor, grads: Tree) -> Tensor:
    """Computes a norm from its square, in the dtype that `fmp.global_norm` gives it."""
    wide = any(leaf is not None and leaf.dtype in (torch.float64, torch.complex128) for leaf in tree.leaves(grads))
    return square.sqrt().to(torch.float64 if wide else torch.float32)
