"""LAMB: Adam whose step is as long, relative to its parameter, for every parameter."""

from typing import Any

import torch

from fmp import _compat, tree
from fmp.optim import checks
from fmp.optim.adam_coefficients import bias_corrected
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
    zero_ages,
    zero_count,
    zeros,
)
from fmp.optim.masks import Mask, selector
from fmp.tree.wholes import check_whole

Tree = Any


@tree.dataclass
class LambState:
    """The state of `lamb`.

    Attributes:
        count: i32[], the number of updates made; what a schedule is asked at.
        ages: i32[] a parameter, the number of updates that it has had, which bias correction goes by.
        first_moment: The running mean of each parameter's gradient, in float32 or wider.
        second_moment: The running mean of its square.
    """

    count: torch.Tensor
    ages: Tree
    first_moment: Tree
    second_moment: Tree


def lamb(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-6,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> GradientTransformation:
    """Makes LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2), for very large batches.

        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        u = m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * p
        p = p - learning_rate * norm(p) / norm(u) * u

    The ratio of the norms, over all entries of one parameter, is 1 where either is zero. They are taken in float32 or
    wider; an entry of `u` below 1e-23 does not count in float32. Parameters that are not to have the ratio, such as
    biases, can go to `adamw` by `partition`.

    Args:
        learning_rate: A number, a 0-dim tensor, or a schedule, which is asked at 0 for the first update.
        b1: The decay rate of the first moment.
        b2: The decay rate of the second moment.
        eps: What is added to the denominator.
        weight_decay: The factor of the parameter in the update.
        mask: Which leaves decay: a tree of bools, name patterns, or a function of a leaf's path, or of its path and the
            leaf: `lambda path, leaf: leaf.ndim >= 2` for matrices only. None for all.

    Returns:
        The optimizer; its state is a `LambState`.

    Raises:
        TypeError: If a hyper-parameter is neither a number nor a tensor, or the mask says anything but True or False.
        ValueError: If `b1` or `b2` is outside [0, 1), or another number is negative or not finite; or if the mask does
            not fit the parameters, or none of its patterns matches any of them (when `init` or `update` is called).

    Example:
        >>> tx = lamb(0.1)
        >>> params = {"w": torch.full((4,), 2.0), "new": torch.zeros(4)}
        >>> grads = {"w": torch.ones(4), "new": torch.ones(4)}
        >>> tx.update(grads, tx.init(params), params)[0]
        {'w': tensor([-0.2000, -0.2000, -0.2000, -0.2000]), 'new': tensor([-0.1000, -0.1000, -0.1000, -0.1000])}
    """
    checks.number_or_schedule("learning_rate", learning_rate)
    checks.number("b1", b1, below=1.0)
    checks.number("b2", b2, below=1.0)
    checks.number("eps", eps)
    checks.number("weight_decay", weight_decay)
    select = selector(True if mask is None else mask, "mask")

    @_compat.compiled_on_its_own
    def init(params: Tree) -> LambState:
        select(params)
        return LambState(zero_count(params), zero_ages(params), zeros(params), zeros(params))

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: LambState, params: Tree) -> tuple[Tree, LambState]:
        checks.params_match(grads, params)
        check_whole(params, "the norms of LAMB")
        rate = scheduled(learning_rate, state.count)
        rates = per_dtype(lambda dtype: in_dtype(rate, dtype), params)

        def update_leaf(
            grad: torch.Tensor,
            param: torch.Tensor,
            age: torch.Tensor,
            first: torch.Tensor,
            second: torch.Tensor,
            decays: bool,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            dtype = grad.dtype
            first = blend(b1, first, grad)
            second = mean_of_squares(second, grad, 1.0 - in_dtype(b2, dtype))

            age = age + 1
            scale, scaled_eps = bias_corrected(age.to(dtype), b1, b2, eps)
            direction = first / (square_root(second) + scaled_eps) * scale
            if decays and not is_off(weight_decay):
                direction = add_scaled(direction, weight_decay, param)
            return direction * (_trust_ratio(param, direction) * -rates[dtype]), age, first, second

        updates, ages, first_moment, second_moment = update_leaves(
            update_leaf,
            grads,
            params,
            state.ages,
            state.first_moment,
            state.second_moment,
            given=(select(params),),
        )
        return updates, LambState(state.count + 1, ages, first_moment, second_moment)

    return GradientTransformation(init, update)


def _trust_ratio(param: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Computes the norm of a parameter over that of its direction; 1 where either is zero."""
    param_norm, direction_norm = tree.global_norm(param), tree.global_norm(direction)
    adapts = (param_norm != 0) & (direction_norm != 0)
    # A norm of 0 is never a divisor, not even in the branch that is not chosen, so derivatives stay finite.
    return torch.where(adapts, param_norm / torch.where(adapts, direction_norm, 1.0), 1.0)
