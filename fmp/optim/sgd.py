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
    zero_count,
    zeros,
)
from fmp.optim.fused import Launch, check_numbers, counted, one_pass, overwrite

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
    momentum: Tree
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
        weight_decay: The factor of the parameter that is added to its gradient (L2 regularisation).
        dampening: How much of a new gradient is left out of the running sum.
        fused: Whether a train step runs torch's one-pass kernel on plain tensors: faster, and equal to `update` up to
            rounding.

    Returns:
        The optimizer; its state is an `SgdState`.

    Raises:
        ValueError: If a number is negative or not finite, or `nesterov` comes without momentum, or with a dampening
            that is a number other than 0; or `fused` with a dampening.
        TypeError: If `fused` is set and a number other than `learning_rate` is a tensor.

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
        totals = None if momentum is None else zeros(params)
        ages = tree.map(lambda total: None if total is None else zero_count(total), totals) if dampened else None
        return SgdState(count=zero_count(params), momentum=totals, ages=ages)

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: SgdState, params: Tree) -> tuple[Tree, SgdState]:
        rate = scheduled(learning_rate, state.count)
        rates = per_dtype(lambda dtype: in_dtype(rate, dtype), params)

        def decayed(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
            return grad if is_off(weight_decay) else add_scaled(grad, weight_decay, param)

        def plain(grad: torch.Tensor, param: torch.Tensor) -> tuple[torch.Tensor]:
            return (decayed(grad, param) * -rates[grad.dtype],)

        def with_momentum(
            grad: torch.Tensor, param: torch.Tensor, total: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            grad = decayed(grad, param)
            return moved(grad, grad, total)

        def with_dampening(
            grad: torch.Tensor, param: torch.Tensor, total: torch.Tensor, age: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            grad = decayed(grad, param)
            gain = torch.where(age == 0, torch.ones_like(age, dtype=grad.dtype), 1.0 - in_dtype(dampening, grad.dtype))
            return *moved(grad, grad * gain, total), age + 1

        def moved(grad: torch.Tensor, added: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            assert momentum is not None
            total = add_scaled(added, momentum, total)
            direction = add_scaled(grad, momentum, total) if nesterov else total
            return direction * -rates[grad.dtype], total

        count = state.count + 1
        if momentum is None:
            (updates,) = update_leaves(plain, grads, params)
            return updates, SgdState(count, momentum=None)
        if not dampened:
            updates, totals = update_leaves(with_momentum, grads, params, state.momentum)
            return updates, SgdState(count, totals)
        updates, totals, ages = update_leaves(with_dampening, grads, params, state.momentum, state.ages)
        return updates, SgdState(count, totals, ages)

    if not fused:
        return GradientTransformation(init, update)
    if not is_off(dampening):
        raise ValueError(f"fused=True has no dampening, got {dampening=}; leave one of them out")
    options = {"momentum": momentum or 0.0, "weight_decay": weight_decay}
    check_numbers(**options)

    def kernel(
        grads: Tree, state: SgdState, params: Tree, *, finite: torch.Tensor | None, donate: bool
    ) -> tuple[Tree, SgdState] | None:
        rate = scheduled(learning_rate, state.count)

        def launch(on: Launch) -> None:
            _compat.fused_sgd_(
                on.params,
                on.grads,
                *(on.moments or ([],)),
                lr=rate.to(on.params[0].device) if isinstance(rate, torch.Tensor) else rate,
                **options,
                dampening=0.0,
                nesterov=nesterov,
                maximize=False,
                is_first_step=False,
                found_inf=on.skip,
            )

        totals = () if momentum is None else (state.momentum,)
        others = (rate, state.count)
        found = overwrite(launch, grads, params, *totals, others=others, finite=finite, donate=donate)
        if found is None:
            return None
        params, *totals = found
        return params, SgdState(counted(state.count, finite), *(totals or (None,)))

    return GradientTransformation(init, update, one_pass(update, kernel))
