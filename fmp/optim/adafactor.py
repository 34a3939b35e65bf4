"""Adafactor: second moments kept as the means of their rows and columns."""

from typing import Any

import torch

from fmp import _compat, tree
from fmp.dtypes import full_precision, is_castable
from fmp.optim import checks
from fmp.optim.base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    add_scaled,
    blend,
    in_dtype,
    is_off,
    reusable,
    scheduled,
    square_root,
    update_leaves,
    zero_ages,
    zero_count,
)
from fmp.tree.wholes import check_whole

Tree = Any


@tree.dataclass
class AdafactorState:
    """The state of `adafactor`.

    Attributes:
        count: i32[], the number of updates made; what a schedule is asked at.
        ages: i32[] a parameter, the number of updates that it has had; its decay rate and its step size go by it.
        row: [..., m, 1] for a parameter [..., m, n], the running mean of the squared gradient's rows, in float32 or
            wider; None for a parameter of less than two dimensions.
        column: [..., 1, n], the same for the columns.
        full: The running mean of the squared gradient itself, for a parameter of less than two dimensions; None for
            the others.
    """

    count: torch.Tensor
    ages: Tree
    row: Tree
    column: Tree
    full: Tree


def adafactor(
    learning_rate: ScalarOrSchedule,
    beta2_decay: Scalar = -0.8,
    eps1: Scalar | None = None,
    eps2: Scalar = 1e-3,
    clipping_threshold: Scalar = 1.0,
    weight_decay: Scalar = 0.0,
) -> GradientTransformation:
    """Makes Adafactor, as `torch.optim.Adafactor` defines it.

    In place of a second moment for each entry of an m x n matrix it keeps m + n numbers, and it has no first moment:

        w = t**beta2_decay
        r = (1 - w) * r + w * mean(g**2, dim=-1)                  (c alike, with dim=-2)
        v = r * c / max(mean(r, dim=-2), eps1)
        u = g / sqrt(max(v, eps1**2))
        p = p - learning_rate * weight_decay * p
              - min(learning_rate, 1 / sqrt(t)) * max(eps2, rms(p)) * u / max(1, rms(u) / clipping_threshold)

    with `rms(x) = sqrt(mean(x**2))`. A parameter of less than two dimensions has `v = (1 - w) * v + w * g**2`; of one
    with more, the last two are the matrix.

    Args:
        learning_rate: The bound of the step size relative to the parameter's own size: a number, a 0-dim tensor, or a
            schedule, which is asked at 0 for the first update.
        beta2_decay: The exponent by which the weight of a new squared gradient falls; 0 or less.
        eps1: The smallest root mean square that a gradient is divided by; None for the machine epsilon of the dtype
            that the update is computed in. What would be squared to less than a normal number counts as that.
        eps2: The smallest size of a parameter that the step size is relative to, so that zeros can move.
        clipping_threshold: The largest root mean square of `u`, at least 1.
        weight_decay: The factor of the parameter in the update.

    Returns:
        The optimizer; its state is an `AdafactorState`.

    Raises:
        TypeError: If an argument is neither a number nor a tensor.
        ValueError: If `beta2_decay` is above 0, `clipping_threshold` below 1, another number negative, or any of them
            not finite.

    References:
        Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5.

    Example:
        >>> tx = adafactor(0.1)
        >>> params = {"w": torch.ones(2, 3)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> updates["w"][0], tree.describe((state.row, state.column, state.full))
        (tensor([-0.1000, -0.1000, -0.1000]), "({'w': f32[2,1]}, {'w': f32[1,3]}, {'w': None})")
    """
    checks.number_or_schedule("learning_rate", learning_rate)
    checks.number("beta2_decay", beta2_decay, low=torch.finfo(torch.float32).min)
    if not isinstance(beta2_decay, torch.Tensor) and beta2_decay > 0:
        raise ValueError(f"beta2_decay must be at most 0, got {beta2_decay}")
    if eps1 is not None:
        checks.number("eps1", eps1)
    checks.number("eps2", eps2)
    checks.number("clipping_threshold", clipping_threshold, low=1.0)
    checks.number("weight_decay", weight_decay)

    @_compat.compiled_on_its_own
    def init(params: Tree) -> AdafactorState:
        return AdafactorState(
            count=zero_count(params),
            ages=zero_ages(params),
            row=tree.map(lambda leaf: _zeros(leaf, dim=-1) if _is_factored(leaf) else None, params),
            column=tree.map(lambda leaf: _zeros(leaf, dim=-2) if _is_factored(leaf) else None, params),
            full=tree.map(
                lambda leaf: _zeros(leaf, dim=None) if is_castable(leaf) and not _is_factored(leaf) else None, params
            ),
        )

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: AdafactorState, params: Tree) -> tuple[Tree, AdafactorState]:
        check_whole(params, "the means of Adafactor")
        rate = scheduled(learning_rate, state.count)

        def update_leaf(
            grad: torch.Tensor,
            param: torch.Tensor,
            age: torch.Tensor,
            row: torch.Tensor | None,
            column: torch.Tensor | None,
            full: torch.Tensor | None,
        ) -> tuple[torch.Tensor | None, ...]:
            dtype = grad.dtype
            typed_rate = in_dtype(rate, dtype)
            eps = torch.finfo(dtype).eps if eps1 is None else in_dtype(eps1, dtype)
            time = (age + 1).to(dtype)
            weight = time ** in_dtype(beta2_decay, dtype)

            square = grad * grad
            if row is not None and column is not None:
                row = blend(weight, _mean(square, dim=-1), row)
                column = blend(weight, _mean(square, dim=-2), column)
                out = reusable(square, grad, param, row, column, eps)
                # Divided first, the product stays within the range of its dtype.
                average = row.mean(dim=-2, keepdim=True).clamp(min=_positive(eps, dtype))
                # A square that overflowed makes the step zero, or close to it; inf / inf would be NaN.
                share = torch.where(average.isinf(), torch.finfo(dtype).max, row / average)
                variance = torch.mul(share, column, out=out)
            else:
                assert full is not None
                full = blend(weight, square, full)
                out = reusable(square, grad, param, full, eps)
                variance = full

            step = torch.clamp(variance, min=_positive(eps * eps, dtype), out=out)
            step = torch.rsqrt(step, out=out)
            step = torch.mul(step, grad, out=out)
            size = _rms(param.to(dtype)).clamp(min=in_dtype(eps2, dtype))
            excess = (_rms(step) / in_dtype(clipping_threshold, dtype)).clamp(min=1.0)
            step = step * (time.rsqrt().clamp(max=typed_rate) * -size / excess)
            if not is_off(weight_decay):
                step = add_scaled(step, -typed_rate * in_dtype(weight_decay, dtype), param)
            return step, age + 1, row, column, full

        updates, *parts = update_leaves(update_leaf, grads, params, state.ages, state.row, state.column, state.full)
        return updates, AdafactorState(state.count + 1, *parts)

    return GradientTransformation(init, update)


def _is_factored(leaf: Any) -> bool:
    return is_castable(leaf) and leaf.ndim >= 2


def _zeros(leaf: torch.Tensor, *, dim: int | None) -> torch.Tensor:
    """Makes zeros of a parameter's shape, but 1 along a dimension."""
    shape = list(leaf.shape)
    if dim is not None:
        # A tensor that is shared out along its first dimension makes another one so if it has the same shape.
        leaf = leaf.narrow(dim, 0, 1) if leaf.shape[dim] and leaf.ndim + dim > 0 else leaf
        shape[dim] = 1
    return leaf.new_zeros(shape, dtype=full_precision(leaf.dtype))


def _mean(x: torch.Tensor, dim: int) -> torch.Tensor:
    # The mean of no entries would put NaN into the state.
    return x.sum(dim=dim, keepdim=True) / max(x.shape[dim], 1)


def _rms(x: torch.Tensor) -> torch.Tensor:
    return square_root((x * x).mean())


def _positive(value: Scalar, dtype: torch.dtype) -> Scalar:
    """Keeps a bound above zero: 0 / 0 would turn zero gradients into NaN, as a small `eps1` does once squared."""
    tiny = torch.finfo(dtype).tiny
    return value.clamp(min=tiny) if isinstance(value, torch.Tensor) else max(value, tiny)
