"""SGD, with momentum."""

from typing import Any

import torch

from fmp import _compat, tree
from fmp.kernels import eligible, sgd as kernel
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
from fmp.optim.fused import Request, check_numbers, counted, one_pass, stacked
from fmp.optim.one_launch import Leaves, as_rows, in_one_launch
from fmp.optim.torch_kernel import Launch, overwrite

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
            rounding. On a GPU it runs fmp's kernel either way where that can run; see `fmp.kernels`.

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

    def gain_of(age: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.where(age == 0, torch.ones_like(age, dtype=dtype), 1.0 - in_dtype(dampening, dtype))

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
            return *moved(grad, grad * gain_of(age, grad.dtype), total), age + 1

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

    def launch(grads: Tree, state: SgdState, params: Tree, request: Request) -> tuple[Tree, Tree, SgdState] | None:
        if not eligible.has_kernels(state.count.device):
            return None
        rate = scheduled(learning_rate, state.count)
        ages, spec = tree.flatten(state.ages)
        new_ages = list(ages)

        def run(on: Leaves) -> None:
            like = torch.empty(len(on.params), dtype=torch.float32, device=on.params[0].device)
            gain: Scalar = 1.0
            if dampened:
                age = stacked([ages[index] for index in on.indices])
                gain = gain_of(age, torch.float32)
                for index, new_age in zip(on.indices, counted(age, request.finite).unbind(), strict=True):
                    new_ages[index] = new_age
            rows = as_rows(
                (-in_dtype(rate, torch.float32), 0.0 if momentum is None else momentum, gain, weight_decay), like
            )
            flag = (0 if is_off(weight_decay) else kernel.DECAY) | (kernel.NESTEROV if nesterov else 0)
            kernel.step(
                on.gradients,
                on.params,
                on.moments[0] if on.moments else None,
                on.low,
                flags=[flag] * len(on.params),
                coefficients=rows,
                **on.options,
            )

        totals = () if momentum is None else (state.momentum,)
        numbers = (rate, momentum, dampening, weight_decay)
        counts = (state.count, *[age for age in ages if age is not None])
        found = in_one_launch("sgd", run, grads, params, *totals, counts=counts, numbers=numbers, request=request)
        if found is None:
            return None
        params, low, *totals = found
        count, ages = counted(state.count, request.finite), tree.unflatten(spec, new_ages)
        return params, low, SgdState(count, totals[0] if totals else None, ages)

    if not fused:
        return GradientTransformation(init, update, one_pass(update, launch))
    if not is_off(dampening):
        raise ValueError(f"fused=True has no dampening, got {dampening=}; leave one of them out")
    options = {"momentum": momentum or 0.0, "weight_decay": weight_decay}
    check_numbers(**options)

    def on_torchs_kernel(
        grads: Tree, state: SgdState, params: Tree, *, finite: torch.Tensor | None, donate: bool
    ) -> tuple[Tree, SgdState] | None:
        rate = scheduled(learning_rate, state.count)

        def run_torchs(on: Launch) -> None:
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
        found = overwrite(run_torchs, grads, params, *totals, others=others, finite=finite, donate=donate)
        if found is None:
            return None
        params, *totals = found
        return params, SgdState(counted(state.count, finite), *(totals or (None,)))

    return GradientTransformation(init, update, one_pass(update, launch, on_torchs_kernel))
