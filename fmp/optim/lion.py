"""Lion: the sign of a momentum."""

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
    per_dtype,
    scheduled,
    update_leaves,
    zero_count,
    zeros,
)
from fmp.optim.masks import Mask, selector

Tree = Any


@tree.dataclass
class LionState:
    """The state of `lion`.

    Attributes:
        count: i32[], the number of updates made; what a schedule is asked at.
        momentum: The running mean of each parameter's gradient, in float32 or wider.
    """

    count: torch.Tensor
    momentum: Tree


def lion(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    weight_decay: Scalar = 1e-3,
    mask: Mask | None = None,
) -> GradientTransformation:
    """Makes Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2).

        u = sign(b1 * m + (1 - b1) * g) + weight_decay * p
        m = b2 * m + (1 - b2) * g
        p = p - learning_rate * u

    Every entry moves by the learning rate, so that this is to be 3 to 10 times smaller than for `adamw`, and the weight
    decay as many times larger. An entry whose momentum and gradient are both zero does not move.

    Args:
        learning_rate: A number, a 0-dim tensor, or a schedule, which is asked at 0 for the first update.
        b1: The weight of the momentum in the update.
        b2: The decay rate of the momentum.
        weight_decay: The factor of the parameter in the update.
        mask: Which leaves decay: a tree of bools, name patterns, or a function of a leaf's path, or of its path and the
            leaf: `lambda path, leaf: leaf.ndim >= 2` for matrices only. None for all.

    Returns:
        The optimizer; its state is a `LionState`.

    Raises:
        TypeError: If a hyper-parameter is neither a number nor a tensor, or the mask says anything but True or False.
        ValueError: If `b1` or `b2` is outside [0, 1), or another number is negative or not finite; or if the mask does
            not fit the parameters, or none of its patterns matches any of them (when `init` or `update` is called).

    Example:
        >>> tx = lion(0.5, weight_decay=0.0)
        >>> params = {"w": torch.zeros(3)}
        >>> tx.update({"w": torch.tensor([5.0, -1e-3, 0.0])}, tx.init(params), params)[0]
        {'w': tensor([-0.5000,  0.5000, -0.0000])}
    """
    checks.number_or_schedule("learning_rate", learning_rate)
    checks.number("b1", b1, below=1.0)
    checks.number("b2", b2, below=1.0)
    checks.number("weight_decay", weight_decay)
    select = selector(True if mask is None else mask, "mask")

    @_compat.compiled_on_its_own
    def init(params: Tree) -> LionState:
        select(params)
        return LionState(count=zero_count(params), momentum=zeros(params))

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: LionState, params: Tree) -> tuple[Tree, LionState]:
        checks.params_match(grads, params)
        rate = scheduled(learning_rate, state.count)
        rates = per_dtype(lambda dtype: in_dtype(rate, dtype), params)

        def update_leaf(
            grad: torch.Tensor, param: torch.Tensor, momentum: torch.Tensor, decays: bool
        ) -> tuple[torch.Tensor, torch.Tensor]:
            direction = blend(b1, momentum, grad).sign()
            if decays and not is_off(weight_decay):
                direction = add_scaled(direction, weight_decay, param)
            return direction * -rates[grad.dtype], blend(b2, momentum, grad)

        updates, momentum = update_leaves(update_leaf, grads, params, state.momentum, given=(select(params),))
        return updates, LionState(state.count + 1, momentum)

    return GradientTransformation(init, update)
