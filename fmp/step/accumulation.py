"""Gradient accumulation: one gradient from several microbatches, averaged in float32 or wider."""

from collections.abc import Callable
from typing import Any

import torch

from fmp import random, tree
from fmp.dtypes import full_precision, is_castable
from fmp.step.loss import LossOutput
from fmp.step.measuring import plus

Tree = Any


def accumulate(
    gradient_of: Callable[[Tree, Tree, torch.Tensor], tuple[LossOutput, Tree]],
    batch: Tree,
    *,
    count: int,
    weight_of: Callable[[Tree], torch.Tensor] | None,
    mean: Callable[[torch.Tensor], torch.Tensor],
    buffers: Tree,
    seed: torch.Tensor,
) -> tuple[LossOutput, Tree]:
    """Averages a gradient over microbatches, in float32 or wider.

    A microbatch of weight zero counts for nothing, even if its loss is NaN. Buffers pass from one microbatch to the
    next; those of a microbatch of weight zero do not. Processes average floating-point buffers. Other buffers must come
    out equal on all of them; they change if the microbatch counts on any process.

    Args:
        gradient_of: `gradient_of(microbatch, buffers, seed)`; it may scale gradients by what is the same for all.
        batch: The whole batch; dimension 0 of every tensor with dimensions is split into `count` equal parts.
        count: The number of microbatches.
        weight_of: Gives the weight of a microbatch, for example its number of valid tokens; None for equal weights.
        mean: Averages numbers over all processes that share the batch.
        buffers: The buffers that the first microbatch sees.
        seed: i64[]; each microbatch gets a seed of its own derived from it.

    Returns:
        The weighted mean loss with the last buffers and the auxiliary outputs (tensors stacked along a new dimension
        0, other leaves those of the last microbatch), and the weighted mean of the gradients.
    """
    total_loss: Any = None
    total_grads: Tree = None
    total_weight: Any = float(count)
    excess: torch.Tensor | None = None
    auxes = []
    microbatches = _split(batch, count)
    weights: list[Any] = [None] * count
    counts: list[Any] = [None] * count
    if weight_of is not None:
        weights = [_checked_weight(weight_of(microbatch)) for microbatch in microbatches]
        found = torch.stack(weights)
        total, counts_of = mean(torch.stack((found, (found != 0).to(found.dtype))))
        counts = list((counts_of != 0).unbind())
        # Each process divides its sums by the mean weight, so that their mean is that over all microbatches.
        total_weight = total.sum()
        total_weight = torch.where(total_weight == 0, 1.0, total_weight)
    for index, (microbatch, weight, counts_anywhere) in enumerate(zip(microbatches, weights, counts, strict=True)):
        output, grads = gradient_of(microbatch, buffers, random.fold_in(seed, index))
        buffers = output.buffers if weight is None else _passed(output.buffers, buffers, weight != 0, counts_anywhere)
        auxes.append(output.aux)
        loss = _weighted(output.loss, weight)
        total_loss = loss if total_loss is None else total_loss + loss
        if weight is not None or total_grads is None:
            grads = tree.map(lambda grad, w=weight: None if grad is None else _weighted(grad, w), grads)
        total_grads = grads if total_grads is None else plus(total_grads, grads)[0]
        excess = output.excess  # the same for all
        del grads, output

    grads = tree.map(lambda total: None if total is None else _divided(total, total_weight), total_grads)
    return LossOutput(_divided(total_loss, total_weight), buffers, _stack(auxes), excess), grads


def _weighted(value: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Casts a value to float32 or wider and multiplies it; a weight of zero keeps out even NaN."""
    value = value.to(full_precision(value.dtype))
    return value if weight is None else torch.where(weight == 0, 0.0, value * weight.to(value.dtype))


def _passed(new: Tree, old: Tree, counts: torch.Tensor, counts_anywhere: torch.Tensor) -> Tree:
    """Chooses the buffers that the next microbatch sees."""
    own = tree.select(counts, new, old)
    shared = tree.select(counts_anywhere, new, old)
    return tree.map(lambda mean, same: mean if is_castable(mean) else same, own, shared)


def _divided(total: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
    return total / (weight.to(total.dtype) if isinstance(weight, torch.Tensor) else weight)


def _checked_weight(weight: Any) -> torch.Tensor:
    if not isinstance(weight, torch.Tensor) or weight.ndim:
        raise TypeError(f"microbatch_weight must return a scalar tensor, got {tree.describe(weight)}")
    return weight.to(full_precision(weight.dtype))


def _split(batch: Tree, count: int) -> list[Tree]:
    leaves, spec = tree.flatten(batch)
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    # No set: hashing a size makes the compiler take it for a constant.
    if not sizes or any(size != sizes[0] for size in sizes) or sizes[0] == 0 or sizes[0] % count:
        raise ValueError(
            f"accumulate={count} splits dimension 0 of the batch into equal parts, but the batch is "
            f"{tree.describe(batch)}"
        )
    columns = [leaf.chunk(count) if isinstance(leaf, torch.Tensor) and leaf.ndim else [leaf] * count for leaf in leaves]
    return [tree.unflatten(spec, row) for row in zip(*columns, strict=True)]


def _stack(auxes: list[Tree]) -> Tree:
    return tree.map(lambda *leaves: torch.stack(leaves) if isinstance(leaves[-1], torch.Tensor) else leaves[-1], *auxes)
