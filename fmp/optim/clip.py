"""Clipping of gradients: by the norm of all of them together, or each entry by itself."""

import math
from typing import Any

import torch

from fmp import _compat, reductions, tree
from fmp.dtypes import full_precision, is_castable
from fmp.optim import checks
from fmp.optim.base import GradientTransformation, Scalar, in_dtype
from fmp.tree.wholes import is_dtensor

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
        TypeError: If `max_norm` is neither a number nor a tensor.
        ValueError: If `max_norm` is negative or NaN.

    Example:
        >>> tx = clip_by_global_norm(1.0)
        >>> grads = {"w": torch.tensor([3.0]), "b": torch.tensor([4.0], dtype=torch.float16)}
        >>> tx.update(grads, tx.init(grads), grads)[0]
        {'w': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    _check_bound("max_norm", max_norm)

    @_compat.compiled_on_its_own
    def init(params: Tree) -> tuple[()]:
        return ()

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: tuple[()], params: Tree) -> tuple[Tree, tuple[()]]:
        return clip_to_norm(grads, reductions.global_norm(grads), max_norm), state

    return GradientTransformation(init, update)


def clip_to_norm(grads: Tree, norm: torch.Tensor, max_norm: Scalar) -> Tree:
    """Scales gradients down whose norm is already known; the arithmetic of `clip_by_global_norm`.

    Args:
        grads: The gradients.
        norm: f32[] or f64[], their norm.
        max_norm: The largest norm that passes unchanged, a number or a 0-dim tensor.

    Returns:
        The gradients times `max_norm / max(norm, max_norm)`, in float32 or wider.

    Raises:
        TypeError: If `norm` is not a tensor, or `max_norm` neither a number nor a tensor.
        ValueError: If `norm` has dimensions, or `max_norm` is negative or NaN.

    Example:
        >>> grads = {"w": torch.tensor([3.0, 4.0])}
        >>> clip_to_norm(grads, fmp.global_norm(grads), 1.0)
        {'w': tensor([0.6000, 0.8000])}
    """
    factor = clip_factor(norm, max_norm)
    # A plain tensor beside DTensors, as FSDP2's ignored_params are, takes a plain factor.
    of_plain: Any = factor
    tensors = [leaf for leaf in tree.leaves(grads) if isinstance(leaf, torch.Tensor)]
    if is_dtensor(factor) and not all(map(is_dtensor, tensors)):
        of_plain = of_plain.full_tensor()

    def clip(grad: Any) -> Any:
        if not isinstance(grad, torch.Tensor) or not (grad.dtype.is_floating_point or grad.dtype.is_complex):
            return grad
        wide = grad.to(full_precision(grad.dtype))
        own = factor if is_dtensor(grad) else of_plain
        return wide * own.to(wide.dtype)

    return tree.map(clip, grads)


def clip_factor(norm: torch.Tensor, max_norm: Scalar) -> torch.Tensor:
    """Computes the factor by which gradients are scaled down: `max_norm / max(norm, max_norm)`.

    Args:
        norm: f32[] or f64[], their norm.
        max_norm: The largest norm that passes unchanged, a number or a 0-dim tensor.

    Returns:
        A 0-dim tensor of the norm's dtype, within [0, 1]; 0 for a norm that is inf or NaN.

    Raises:
        TypeError: If `norm` is not a tensor, or `max_norm` neither a number nor a tensor.
        ValueError: If `norm` has dimensions, or `max_norm` is negative or NaN.

    Example:
        >>> clip_factor(torch.tensor(5.0), 1.0), clip_factor(torch.tensor(0.5), 1.0)
        (tensor(0.2000), tensor(1.))
    """
    if not isinstance(norm, torch.Tensor):
        raise TypeError(f"norm must be a 0-dim tensor, as fmp.global_norm returns it, got {norm!r}")
    checks.number("norm", norm)
    _check_bound("max_norm", max_norm)
    within = norm <= max_norm
    # A norm of 0 is never a divisor, not even in the branch that is not chosen, so derivatives stay finite.
    ratio = max_norm / torch.where(within, 1.0, norm)
    return torch.where(within, 1.0, ratio.nan_to_num(nan=0.0)).to(norm.dtype)


def clip_by_value(max_delta: Scalar) -> GradientTransformation:
    """Limits every entry of the gradients to `[-max_delta, max_delta]`.

    Unlike clipping by norm, this changes the direction of the gradient. NaN stays NaN, but inf becomes `max_delta`, so
    a check for finite gradients belongs in front of it (`fmp.train_step` checks before the optimizer).

    Args:
        max_delta: The largest absolute value that passes unchanged; inf clips nothing. A number or a 0-dim tensor.

    Returns:
        The transformation, without state. Clipped gradients have dtype float32 or wider.

    Raises:
        TypeError: If `max_delta` is neither a number nor a tensor, or a gradient is complex (when `update` is called).
        ValueError: If `max_delta` is negative or NaN.

    Example:
        >>> tx = clip_by_value(1.0)
        >>> grads = {"w": torch.tensor([-3.0, 0.5, torch.nan])}
        >>> tx.update(grads, tx.init(grads), grads)[0]
        {'w': tensor([-1.0000,  0.5000,     nan])}
    """
    _check_bound("max_delta", max_delta)

    @_compat.compiled_on_its_own
    def init(params: Tree) -> tuple[()]:
        return ()

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: tuple[()], params: Tree) -> tuple[Tree, tuple[()]]:
        return tree.map_with_path(clip, grads), state

    def clip(path: str, grad: Any) -> Any:
        if isinstance(grad, torch.Tensor) and grad.dtype.is_complex:
            raise TypeError(f"{path}: {tree.describe(grad)} has no order to clip by; use clip_by_global_norm")
        if not is_castable(grad):
            return grad
        wide = grad.to(full_precision(grad.dtype))
        bound: Any = in_dtype(max_delta, wide.dtype)
        return wide.clamp(-bound, bound)

    return GradientTransformation(init, update)


def _check_bound(name: str, value: Scalar) -> None:
    if isinstance(value, torch.Tensor) or value != math.inf:
        checks.number(name, value)
