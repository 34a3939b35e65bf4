"""LARC: gradients scaled so that no parameter moves far relative to its size."""

from typing import Any

import torch

from fmp import _compat, tree
from fmp.optim import checks
from fmp.optim.base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    add_scaled,
    in_dtype,
    is_off,
    scheduled,
    update_leaves,
    zero_count,
)
from fmp.tree.wholes import check_whole

Tree = Any


@tree.dataclass
class LarcState:
    """The state of `larc`.

    Attributes:
        count: i32[], the number of updates made, what a schedule is asked at; None if the learning rate is not one.
    """

    count: Tree


def larc(
    learning_rate: ScalarOrSchedule,
    trust_coefficient: Scalar = 0.02,
    clip: bool = True,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
) -> GradientTransformation:
    """Makes LARC (You, Gitman and Ginsburg 2017, arXiv 1708.03888), as Apex's `LARC` wraps it around an optimizer.

        adaptive = trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p) + eps)
        factor = min(adaptive / learning_rate, 1) if clip else adaptive
        g = factor * (g + weight_decay * p)

    This changes gradients only: put it into a `chain`, last before the optimizer, and give that one the same learning
    rate and no weight decay. A parameter that is zero, or has the gradient zero, has its gradient unchanged, without
    decay. Norms go over all entries of one parameter and are taken in float32 or wider. One that overflows, from
    entries beyond 1.8e19 in float32, makes the gradient zero.

    Args:
        learning_rate: That of the optimizer behind: a number, a 0-dim tensor, or a schedule. It matters to `clip` only.
        trust_coefficient: How far a parameter may move in an update, relative to its norm.
        clip: Whether the learning rate becomes the smaller of `adaptive` and itself (clipping); if not, it becomes
            their product (scaling, LARS).
        eps: What is added to the denominator.
        weight_decay: The factor of the parameter that is added to its gradient (L2 regularization).

    Returns:
        The transformation; its state is a `LarcState`. New gradients have dtype float32 or wider.

    Raises:
        TypeError: If `clip` is not a bool, or another argument neither a number nor a tensor.
        ValueError: If a number is negative or not finite.

    Example:
        >>> import fmp.optim as optim
        >>> tx = optim.chain(larc(0.1, trust_coefficient=0.01), optim.sgd(0.1, momentum=0.9))
        >>> params = {"far": torch.full((4,), 2.0), "near": torch.full((4,), 2.0)}
        >>> grads = {"far": torch.full((4,), 100.0), "near": torch.full((4,), 0.1)}
        >>> tx.update(grads, tx.init(params), params)[0]
        {'far': tensor([-0.0200, -0.0200, -0.0200, -0.0200]), 'near': tensor([-0.0100, -0.0100, -0.0100, -0.0100])}
    """
    checks.number_or_schedule("learning_rate", learning_rate)
    checks.number("trust_coefficient", trust_coefficient)
    checks.flag("clip", clip)
    checks.number("eps", eps)
    checks.number("weight_decay", weight_decay)

    @_compat.compiled_on_its_own
    def init(params: Tree) -> LarcState:
        return LarcState(count=zero_count(params) if callable(learning_rate) else None)

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: LarcState, params: Tree) -> tuple[Tree, LarcState]:
        check_whole(params, "the norms of LARC")
        rate = scheduled(learning_rate, state.count)

        def adapt(grad: torch.Tensor, param: torch.Tensor) -> tuple[torch.Tensor]:
            dtype = grad.dtype
            param_norm, grad_norm = tree.global_norm(param), tree.global_norm(grad)
            adapts = (param_norm != 0) & (grad_norm != 0)
            denominator = grad_norm + in_dtype(eps, dtype)
            if not is_off(weight_decay):
                denominator = denominator + in_dtype(weight_decay, dtype) * param_norm
            # A norm of 0 is never a divisor, not even in the branch that is not chosen, so derivatives stay finite.
            factor = in_dtype(trust_coefficient, dtype) * param_norm / torch.where(adapts, denominator, 1.0)
            if clip:
                factor = _clipped(factor, in_dtype(rate, dtype))
            decayed = grad if is_off(weight_decay) else add_scaled(grad, weight_decay, param)
            adapted = torch.where(param_norm.isinf(), 0.0, factor * decayed)
            return (torch.where(adapts, adapted, grad),)

        (updates,) = update_leaves(adapt, grads, params)
        return updates, LarcState(None if state.count is None else state.count + 1)

    return GradientTransformation(init, update)


def _clipped(adaptive: torch.Tensor, rate: Scalar) -> torch.Tensor:
    """Computes `min(adaptive / rate, 1)`, which is 1 also where the rate is 0, as in the first step of a warm-up."""
    within = adaptive < rate
    return torch.where(within, adaptive / torch.where(within, rate, torch.ones_like(adaptive)), 1.0)
