"""How large the gradients of a step are, and whether they are finite: before they are unscaled, where that can wait.

    here         y = g / scale, of which norm and flag are kept, but not y
    then         optimizer.fused(g, inv_scale=1 / scale, clip=..., finite=...)

So gradients in 16 bits stay in 16 bits: they are read once here, and once by the optimizer. For a scale that is a power
of two, as all are that `DynamicLossScale` finds by itself, that changes no bit. For another one, each gradient is the
product with a rounded inverse instead of the quotient: one unit in the last place apart at most.
"""

from typing import Any, NamedTuple

import torch

from fmp import reductions, tree
from fmp.dtypes import full_precision
from fmp.kernels import multi_tensor
from fmp.kernels.eligible import usable
from fmp.scaling import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from fmp.step.config import StepConfig
from fmp.step.loss import unscale

Tree = Any


class Gradients(NamedTuple):
    """The gradients of one group of parameters.

    Attributes:
        values: The gradients, times `scale`.
        norm: f32[] or f64[], the norm of the gradients without the scale; None if it is not known yet.
        scale: f32[], what they are still to be divided by; None for nothing.
    """

    values: Tree
    norm: torch.Tensor | None = None
    scale: torch.Tensor | None = None


def measured(
    config: StepConfig,
    name: str,
    grads: Tree,
    scaler: LossScale | None,
    excess: torch.Tensor | None,
    params: Tree,
) -> tuple[dict[str, Gradients], torch.Tensor]:
    """Unscales the gradients of a loss, at once or in the optimizer, and finds out whether they are finite.

    Args:
        config: The parts of the step.
        name: The loss.
        grads: Its gradients, still scaled.
        scaler: What scaled them; None if they are unscaled already.
        excess: By what they were divided then, as `LossOutput` says.
        params: The parameters.

    Returns:
        The gradients by group, with the norm of those that come from this loss alone; and bool[], whether all of them
        are finite.
    """
    found: dict[str, tuple[Gradients, torch.Tensor]] = {}
    is_double = computes_in_double(config)
    if _can_wait(scaler, excess) and not is_double:
        scale = None if isinstance(scaler, NoOpLossScale) else getattr(scaler, "loss_scale", None)
        for key, part in config.by_group(grads).items():
            numbers = [leaf for leaf in tree.leaves(part) if leaf is not None]
            is_ready = config.optimizers[key].fused is not None and is_alone(config, key)
            if is_ready and usable("scale", numbers, numbers=[scale]):
                norm, finite = multi_tensor.measure(numbers, scale)
                found[key] = Gradients(part, norm, scale), finite
    rest = {key: part for key, part in config.by_group(grads).items() if key not in found}
    if rest:
        grads = rest if found else grads
        grads = grads if scaler is None else unscale(scaler, grads, excess)
        grads = narrowed(grads, params) if is_double else grads
        for key, part in (grads if found else config.by_group(grads)).items():
            if is_alone(config, key):
                norm, finite = reductions.measure(part)
                found[key] = Gradients(part, norm), finite
            else:
                found[key] = Gradients(part), reductions.all_finite(part)
    flags = [finite for _, finite in found.values()]
    is_finite = flags[0] if len(flags) == 1 else torch.stack(flags).all()
    return {key: gradients for key, (gradients, _) in found.items()}, is_finite


def added(left: Gradients, right: Gradients) -> Gradients:
    """Adds the gradients that two losses have in one group."""
    values, norm = plus(left.values, right.values)
    return Gradients(values, norm)


def plus(left: Tree, right: Tree) -> tuple[Tree, torch.Tensor | None]:
    """Adds gradients in float32 or wider; where one is None, the sum is the other.

    Args:
        left: Gradients.
        right: Others, of the same structure.

    Returns:
        The sums; and their norm, f32[], if the kernel that adds has found it.
    """
    leaves, spec = tree.flatten(left)
    sums: list[Any] = list(leaves)
    others: list[Any] = list(spec.flatten_up_to(right))
    pairs = list(zip(sums, others, strict=True))
    places = [place for place, (a, b) in enumerate(pairs) if a is not None and b is not None]
    xs, ys = [sums[place] for place in places], [others[place] for place in places]
    norm = None
    if usable("axpby", xs, ys):
        totals, norm, _ = multi_tensor.axpby(1.0, xs, 1.0, ys)
    else:
        totals = [x.to(full_precision(x.dtype)) + y.to(full_precision(y.dtype)) for x, y in zip(xs, ys, strict=True)]
    alone = [place for place, (a, b) in enumerate(pairs) if (a is None) != (b is None)]
    for place in alone:
        only = sums[place] if others[place] is None else others[place]
        sums[place] = only.to(full_precision(only.dtype))
    for place, total in zip(places, totals, strict=True):
        sums[place] = total
    return tree.unflatten(spec, sums), None if alone else norm


def _can_wait(scaler: LossScale | None, excess: torch.Tensor | None) -> bool:
    """Says whether the quotient is all that a loss has left to do with its gradients."""
    # A scaler of another class may do anything.
    return excess is None and type(scaler) in (StaticLossScale, DynamicLossScale, NoOpLossScale)


def is_alone(config: StepConfig, key: str) -> bool:
    """Says whether only one loss changes a group of parameters."""
    return sum([key in keys for keys in config.uses.values()]) == 1


def computes_in_double(config: StepConfig) -> bool:
    """Says whether the policy computes in float64."""
    return config.policy is not None and config.policy.compute_dtype == torch.float64


def narrowed(grads: Tree, params: Tree) -> Tree:
    """Casts gradients as the optimizer will, so that what overflows then is seen now."""
    dtypes = {path: leaf.dtype for path, leaf in tree.items(params) if leaf is not None}
    return tree.map_with_path(lambda path, g: None if g is None else g.to(full_precision(dtypes[path])), grads)
