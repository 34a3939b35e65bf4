"""SGD, with momentum."""

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
    per_dtype,
    scheduled,
    update_leaves,
    zero_ages,
    zero_count,
    zeros,
)
from fmp.optim.sgd_fused import Hyperparams, gain_of, one_pass_form

Tree = Any


@tree.dataclass
class SgdState:
    """The state of `sgd`.

    Attributes:
        count: i32[], the number of updates made.
        momentum: The running sum of gradients of each parameter, in float32 or wider; None without momentum.
        ages: i32[] a parameter, the number of updates that it has had, which says whose first gradient is not dampened;
            None without dampening.
    """

    count: torch.Tensor
    momentum: Tree = None
    ages: Tree = None


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: Scalar | None = None,
    nesterov: bool = False,
    weight_decay: Scalar = 0.0,
    *,
    dampening: Scalar = 0.0,
    fused: bool = False,
) -> GradientTransformation:
    """Makes stochastic gradient descent, as `torch.optim.SGD` defines it.

        g = g + weight_decay * p
        m = momentum * m + (1 - dampening) * g          (a parameter's first time, m = g)
        p = p - learning_rate * (g + momentum * m if nesterov else m)

    Args:
        learning_rate: A number, a 0-dim tensor, or a schedule, which is asked at 0 for the first update.
        momentum: How much of the old running sum stays; None or 0 for none.
        nesterov: Whether to look ahead along the momentum (Sutskever et al. 2013).
        weight_decay: The factor of the parameter that is added to its gradient (L2 regularization).
        dampening: How much of a new gradient is left out of the running sum.
        fused: Whether a train step runs torch's one-pass kernel on plain tensors: faster, and equal to `update` up to
            rounding. On a GPU it runs fmp's kernel either way where that can run; see `fmp.kernels`.

    Returns:
        The optimizer; its state is an `SgdState`.

    Raises:
        ValueError: If a number is negative or not finite, or `nesterov` comes without momentum, or with a dampening
            that is a number other than 0; or `fused` with a dampening.
        TypeError: If `nesterov` or `fused` is not a bool, or another argument neither a number nor a tensor; or if
            `fused` is set and a number other than `learning_rate` is a tensor.

    Example:
        >>> tx = sgd(0.1, momentum=0.9)
        >>> params = {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> updates, state.momentum
        ({'w': tensor([-0.1000, -0.1000])}, {'w': tensor([1., 1.])})
    """
    checks.number_or_schedule("learning_rate", learning_rate)
    checks.number("weight_decay", weight_decay)
    checks.number("dampening", dampening)
    checks.flag("nesterov", nesterov)
    checks.flag("fused", fused)
    if momentum is not None:
        checks.number("momentum", momentum)
        momentum = None if is_off(momentum) else momentum
    dampened = momentum is not None and not is_off(dampening)
    # The value of a tensor is never looked at; it may well be 0.
    if nesterov and (momentum is None or (dampened and not isinstance(dampening, torch.Tensor))):
        raise ValueError(f"nesterov=True needs momentum and no dampening, got {momentum=} and {dampening=}")

    @_compat.compiled_on_its_own
    def init(params: Tree) -> SgdState:
        return SgdState(
            count=zero_count(params),
            momentum=None if momentum is None else zeros(params),
            ages=zero_ages(params) if dampened else None,
        )

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: SgdState, params: Tree) -> tuple[Tree, SgdState]:
        rate = scheduled(learning_rate, state.count)
        rates = per_dtype(lambda dtype: in_dtype(rate, dtype), params)

        def update_leaf(grad: torch.Tensor, param: torch.Tensor, total: Any = None, age: Any = None) -> tuple[Any, ...]:
            if not is_off(weight_decay):
                grad = add_scaled(grad, weight_decay, param)
            if momentum is None:
                return (grad * -rates[grad.dtype],)
            added = grad * gain_of(age, dampening, grad.dtype) if dampened else grad
            total = add_scaled(added, momentum, total)
            direction = add_scaled(grad, momentum, total) if nesterov else total
            step = direction * -rates[grad.dtype]
            return (step, total, age + 1) if dampened else (step, total)

        kept = [] if momentum is None else [state.momentum, state.ages] if dampened else [state.momentum]
        updates, *kept = update_leaves(update_leaf, grads, params, *kept)
        return updates, SgdState(state.count + 1, *kept)

    hyper = Hyperparams(learning_rate, momentum, nesterov, weight_decay, dampening)
    return GradientTransformation(init, update, one_pass_form(update, hyper, on_torchs=fused))
