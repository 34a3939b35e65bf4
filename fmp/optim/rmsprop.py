"""RMSprop, with momentum and centering."""

from typing import Any

import torch

from fmp import _compat, tree
from fmp.optim import checks
from fmp.optim.base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    add_scaled,
    blend,
    in_dtype,
    is_off,
    mean_of_squares,
    per_dtype,
    scheduled,
    square_root,
    update_leaves,
    zero_count,
    zeros,
)

Tree = Any


@tree.dataclass
class RmspropState:
    """The state of `rmsprop`.

    Attributes:
        count: i32[], the number of updates made; what a schedule is asked at.
        second_moment: The running mean of the square of each parameter's gradient, in float32 or wider.
        first_moment: The running mean of the gradient itself; None if not centered.
        momentum: The running sum of steps; None without momentum.
    """

    count: torch.Tensor
    second_moment: Tree
    first_moment: Tree = None
    momentum: Tree = None


def rmsprop(
    learning_rate: ScalarOrSchedule,
    decay: Scalar = 0.99,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    momentum: Scalar = 0.0,
    centered: bool = False,
) -> GradientTransformation:
    """Makes RMSprop (Hinton 2012, lecture 6e), as `torch.optim.RMSprop` defines it.

        g = g + weight_decay * p
        v = decay * v + (1 - decay) * g**2
        m = decay * m + (1 - decay) * g
        step = g / (sqrt(v - m**2 if centered else v) + eps)
        total = momentum * total + step
        p = p - learning_rate * total

    The variance `v - m**2` is never below zero here. In torch, rounding can make it so, for a gradient that hardly
    changes, and the step NaN.

    Args:
        learning_rate: A number, a 0-dim tensor, or a schedule, which is asked at 0 for the first update.
        decay: The decay rate of the moments (`alpha` in torch).
        eps: What is added to the denominator.
        weight_decay: The factor of the parameter that is added to its gradient (L2 regularization).
        momentum: How much of the old running sum of steps stays; 0 for none.
        centered: Whether to divide by the standard deviation of the gradient (Graves 2013), not by its root mean
            square.

    Returns:
        The optimizer; its state is an `RmspropState`.

    Raises:
        TypeError: If `centered` is not a bool, or another argument neither a number nor a tensor.
        ValueError: If `decay` is outside [0, 1), or another number is negative or not finite.

    Example:
        >>> tx = rmsprop(0.1, decay=0.75)
        >>> params = {"w": torch.zeros(2)}
        >>> updates, state = tx.update({"w": torch.tensor([5.0, -0.1])}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.2000,  0.2000])}
    """
    checks.number_or_schedule("learning_rate", learning_rate)
    checks.number("decay", decay, below=1.0)
    checks.number("eps", eps)
    checks.number("weight_decay", weight_decay)
    checks.number("momentum", momentum)
    checks.flag("centered", centered)
    has_momentum = not is_off(momentum)

    @_compat.compiled_on_its_own
    def init(params: Tree) -> RmspropState:
        return RmspropState(
            count=zero_count(params),
            second_moment=zeros(params),
            first_moment=zeros(params) if centered else None,
            momentum=zeros(params) if has_momentum else None,
        )

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: RmspropState, params: Tree) -> tuple[Tree, RmspropState]:
        rate = scheduled(learning_rate, state.count)
        rates = per_dtype(lambda dtype: in_dtype(rate, dtype), params)
        absent = tree.map(lambda grad: None, grads)

        def update_leaf(
            grad: torch.Tensor,
            param: torch.Tensor,
            second: torch.Tensor,
            first: torch.Tensor | None,
            total: torch.Tensor | None,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
            if not is_off(weight_decay):
                grad = add_scaled(grad, weight_decay, param)
            weight = 1.0 - in_dtype(decay, grad.dtype)
            second = mean_of_squares(second, grad, weight)
            spread = second
            if first is not None:
                first = blend(decay, first, grad)
                # A square that overflowed makes the step zero, as it does without centering; inf - inf would be NaN.
                spread = torch.where(second.isinf(), second, (second - first * first).clamp(min=0.0))
            step = grad / (square_root(spread) + in_dtype(eps, grad.dtype))
            if total is not None:
                step = total = add_scaled(step, momentum, total)
            return step * -rates[grad.dtype], second, first, total

        updates, second_moment, first_moment, totals = update_leaves(
            update_leaf,
            grads,
            params,
            state.second_moment,
            state.first_moment if centered else absent,
            state.momentum if has_momentum else absent,
        )
        return updates, RmspropState(
            count=state.count + 1,
            second_moment=second_moment,
            first_moment=first_moment if centered else None,
            momentum=totals if has_momentum else None,
        )

    return GradientTransformation(init, update)
