"""Clipping of gradients by the norm of all of them together."""

import math
from typing import Any

import torch

from fmp import tree
from fmp.dtypes import full_precision
from fmp.optim import checks
from fmp.optim.base import GradientTransformation, Scalar

Tree = Any


def clip_by_global_norm(max_norm: Scalar) -> GradientTransformation:
    """Scales all gradients down together where their common Euclidean norm exceeds a bound.

    The factor is exactly `max_norm / max(norm, max_norm)`; `torch.nn.utils.clip_grad_norm_` adds 1e-6 to the norm, so
    its result is up to that much shorter. The norm is taken in float32, or float64 if a gradient has it.

    A norm that is inf or NaN gives the factor 0: finite entries become 0, the others NaN. No finite entry ever turns
    into NaN, the bound holds for what is finite, and a check for finite gradients finds the same afterwards as before,
    except where finite entries alone overflow the norm (beyond 1.8e19 in float32): these are zeros afterwards.

    Args:
        max_norm: The largest norm that passes unchanged; inf clips nothing. A number or a 0-dim tensor.

    Returns:
        The transformation, without state. Clipped gradients have dtype float32 or wider.

    Raises:
        ValueError: If `max_norm` is negative or NaN.

    Example:
        >>> tx = clip_by_global_norm(1.0)
        >>> grads = {"w": torch.tensor([3.0]), "b": torch.tensor([4.0], dtype=torch.float16)}
        >>> tx.update(grads, tx.init(grads), grads)[0]
        {'w': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    if isinstance(max_norm, torch.Tensor) or max_norm != math.inf:
        checks.number("max_norm", max_norm)

    def init(params: Tree) -> tuple[()]:
        return ()

    def update(grads: Tree, state: tuple[()], params: Tree) -> tuple[Tree, tuple[()]]:
        return clip_to_norm(grads, tree.global_norm(grads), max_norm), state

    return GradientTransformation(init, update)


def clip_to_norm(grads: Tree, norm: torch.Tensor, max_norm: Scalar) -> Tree:
    """Scales gradients down whose norm is already known; the arithmetic of `clip_by_global_norm`.

    Args:
        grads: The gradients.
        norm: f32[] or f64[], their norm.
        max_norm: The largest norm that passes unchanged, a number or a 0-dim tensor.

    Returns:
        The gradients times `max_norm / max(norm, max_norm)`, in float32 or wider.
    """
    within = norm <= max_norm
    # A norm of 0 is never a divisor, not even in the branch that is not chosen, so derivatives stay finite.
    ratio = max_norm / torch.where(within, 1.0, norm)
    factor = torch.where(within, 1.0, ratio.nan_to_num(nan=0.0)).to(norm.dtype)

    def clip(grad: Any) -> Any:
        if not isinstance(grad, torch.Tensor) or not (grad.dtype.is_floating_point or grad.dtype.is_complex):
            return grad
        wide = grad.to(full_precision(grad.dtype))
        return wide * factor.to(wide.dtype)

    return tree.map(clip, grads)
