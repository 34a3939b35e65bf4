"""Adam and AdamW: two treatments of weight decay around one core."""

from typing import Any

import torch

from fmp import _compat, tree
from fmp.kernels import adam as kernel, eligible
from fmp.optim import checks
from fmp.optim.adam_coefficients import Coefficients, coefficient_rows, coefficients_of as _coefficients_of
from fmp.optim.base import (
    GradientTransformation,
    Scalar,
    ScalarOrSchedule,
    add_scaled,
    is_off,
    mean_of_squares,
    reusable,
    scheduled,
    square_root,
    update_leaves,
    zero_count,
    zeros,
)
from fmp.optim.fused import Request, check_numbers, counted, one_pass, stacked, together
from fmp.optim.masks import Mask, selector
from fmp.optim.one_launch import Leaves, in_one_launch
from fmp.optim.torch_kernel import Launch, overwrite

Tree = Any


@tree.dataclass
class AdamState:
    """The state of `adam` and `adamw`.

    Attributes:
        count: i32[], the number of updates made; what a schedule is asked at.
        ages: i32[] a parameter, the number of updates that it has had; fewer for one that came later, or that had no
            gradient for a while. Bias correction goes by these.
        first_moment: The running mean of each parameter's gradient, in float32 or wider.
        second_moment: The running mean of its square.
    """

    count: torch.Tensor
    ages: Tree
    first_moment: Tree
    second_moment: Tree


def adam(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    fused: bool = False,
) -> GradientTransformation:
    """Makes Adam (Kingma and Ba 2015), as `torch.optim.Adam` defines it.

        g = g + weight_decay * p
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        p = p - learning_rate * (m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps)

    Args:
        learning_rate: A number, a 0-dim tensor, or a schedule, which is asked at 0 for the first update.
        b1: The decay rate of the first moment.
        b2: The decay rate of the second moment.
        eps: What is added to the denominator.
        weight_decay: The factor of the parameter that is added to its gradient (L2 regularisation, which the moments
            see; `adamw` has the other kind).
        fused: Whether a train step runs torch's one-pass kernel on plain tensors: faster, and equal to `update` up to
            rounding. On a GPU it runs fmp's kernel either way where that can run; see `fmp.kernels`.

    Returns:
        The optimizer; its state is an `AdamState`.

    Raises:
        ValueError: If `b1` or `b2` is outside [0, 1), or another number is negative or not finite.
        TypeError: If `fused` is set and a number other than `learning_rate` is a tensor.

    Example:
        >>> tx = adam(0.1)
        >>> params = {"w": torch.zeros(2)}
        >>> updates, state = tx.update({"w": torch.tensor([5.0, -1e-3])}, tx.init(params), params)
        >>> updates, state.count
        ({'w': tensor([-0.1000,  0.1000])}, tensor(1, dtype=torch.int32))
    """
    return _adam(learning_rate, b1, b2, eps, weight_decay, decoupled=False, mask=None, fused=fused)


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-2,
    mask: Mask | None = None,
    *,
    fused: bool = False,
) -> GradientTransformation:
    """Makes AdamW (Loshchilov and Hutter 2019), as `torch.optim.AdamW` defines it.

    Like `adam`, but the decay goes past the moments straight into the update:

        p = p - learning_rate * (m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * p)

    Args:
        learning_rate: A number, a 0-dim tensor, or a schedule, which is asked at 0 for the first update.
        b1: The decay rate of the first moment.
        b2: The decay rate of the second moment.
        eps: What is added to the denominator.
        weight_decay: The factor of the parameter in the update.
        mask: Which leaves decay: a tree of bools, name patterns, or a function of a leaf's path; None for all.
        fused: Whether a train step runs torch's one-pass kernel on plain tensors: faster, and equal to `update` up to
            rounding. On a GPU it runs fmp's kernel either way where that can run; see `fmp.kernels`.

    Returns:
        The optimizer; its state is an `AdamState`.

    Raises:
        ValueError: If `b1` or `b2` is outside [0, 1), or another number is negative or not finite; or if the mask does
            not fit the parameters, or none of its patterns matches any of them (when `init` or `update` is called).
        TypeError: If `fused` is set and a number other than `learning_rate` is a tensor.

    Example:
        >>> tx = adamw(0.1, weight_decay=0.5, mask=["*.weight"])
        >>> params = {"layer.weight": torch.ones(1), "layer.bias": torch.ones(1)}
        >>> grads = {"layer.weight": torch.zeros(1), "layer.bias": torch.zeros(1)}
        >>> tx.update(grads, tx.init(params), params)[0]["layer.weight"]
        tensor([-0.0500])
    """
    return _adam(learning_rate, b1, b2, eps, weight_decay, decoupled=True, mask=mask, fused=fused)


def _adam(
    learning_rate: ScalarOrSchedule,
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    weight_decay: Scalar,
    *,
    decoupled: bool,
    mask: Mask | None,
    fused: bool,
) -> GradientTransformation:
    checks.number_or_schedule("learning_rate", learning_rate)
    checks.number("b1", b1, below=1.0)
    checks.number("b2", b2, below=1.0)
    checks.number("eps", eps)
    checks.number("weight_decay", weight_decay)
    checks.flag("fused", fused)
    coupled_decay = 0.0 if decoupled else weight_decay
    decoupled_decay = weight_decay if decoupled else 0.0
    select = selector(True if mask is None else mask, "mask")

    @_compat.compiled_on_its_own
    def init(params: Tree) -> AdamState:
        select(params)
        moments = zeros(params)
        ages = tree.map(lambda moment: None if moment is None else zero_count(moment), moments)
        return AdamState(count=zero_count(params), ages=ages, first_moment=moments, second_moment=zeros(params))

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        checks.params_match(grads, params)
        rate = scheduled(learning_rate, state.count)
        coefficients = _coefficients_of(
            tree.leaves(params), tree.leaves(state.ages), rate, b1, b2, eps, decoupled_decay
        )
        shrinks = not is_off(decoupled_decay) and not is_off(rate)

        def update_leaf(
            grad: torch.Tensor,
            param: torch.Tensor,
            age: torch.Tensor,
            first: torch.Tensor,
            second: torch.Tensor,
            use: Coefficients,
            decays: bool,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            if not is_off(coupled_decay):
                grad = add_scaled(grad, coupled_decay, param)
            first = torch.lerp(first, grad, use.first_weight)
            second = mean_of_squares(second, grad, use.second_weight)

            step = square_root(second)
            out = reusable(step, param, first, second, *use)
            step = torch.add(step, use.eps, out=out)
            step = torch.div(first, step, out=out)
            step = torch.mul(step, use.step_size, out=out)
            if decays and shrinks:
                step = add_scaled(step, use.shrink, param, out=out)
            return step, age + 1, first, second

        updates, ages, first_moment, second_moment = update_leaves(
            update_leaf,
            grads,
            params,
            state.ages,
            state.first_moment,
            state.second_moment,
            given=(coefficients, select(params)),
        )
        return updates, AdamState(state.count + 1, ages, first_moment, second_moment)

    def launch(grads: Tree, state: AdamState, params: Tree, request: Request) -> tuple[Tree, Tree, AdamState] | None:
        if not eligible.has_kernels(state.count.device):
            return None
        rate = scheduled(learning_rate, state.count)
        decays, (ages, spec) = select(params), tree.flatten(state.ages)
        new_ages = list(ages)

        def run(on: Leaves) -> None:
            age = stacked([ages[index] for index in on.indices])
            rows = coefficient_rows(age, rate, b1, b2, eps, decoupled_decay, coupled_decay)
            coupled = 0 if is_off(coupled_decay) else kernel.COUPLED_DECAY
            decoupled = 0 if is_off(decoupled_decay) or is_off(rate) else kernel.DECOUPLED_DECAY
            flags = [coupled | decoupled if decays[index] else coupled for index in on.indices]
            first, second = on.moments
            kernel.step(on.gradients, on.params, first, second, on.low, flags=flags, coefficients=rows, **on.options)
            for index, new_age in zip(on.indices, counted(age, request.finite).unbind(), strict=True):
                new_ages[index] = new_age

        moments, numbers = (state.first_moment, state.second_moment), (rate, b1, b2, eps, weight_decay)
        counts = (state.count, *[age for age in ages if age is not None])
        found = in_one_launch("adam", run, grads, params, *moments, counts=counts, numbers=numbers, request=request)
        if found is None:
            return None
        params, low, first, second = found
        return (
            params,
            low,
            AdamState(counted(state.count, request.finite), tree.unflatten(spec, new_ages), first, second),
        )

    if not fused:
        return GradientTransformation(init, update, one_pass(update, launch))
    options = {"beta1": b1, "beta2": b2, "eps": eps, "weight_decay": weight_decay}
    check_numbers(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)

    def on_torchs_kernel(
        grads: Tree, state: AdamState, params: Tree, *, finite: torch.Tensor | None, donate: bool
    ) -> tuple[Tree, AdamState] | None:
        rate = scheduled(learning_rate, state.count)
        ages, spec = tree.flatten(state.ages)
        new_ages, kept = list(ages), together(ages)

        def run_torchs(on: Launch, decays: bool = True) -> None:
            run = _compat.fused_adamw_ if decoupled else _compat.fused_adam_
            device = on.params[0].device
            are_all = len(kept) < len(ages) == len(on.indices)
            age = kept[0] if are_all else stacked([ages[index] for index in on.indices])
            run(
                on.params,
                on.grads,
                *on.moments,
                [],  # the largest second moments, for amsgrad
                _steps(age, device),
                lr=rate.to(device) if isinstance(rate, torch.Tensor) else rate,
                **(options if decays else options | {"weight_decay": 0.0}),
                amsgrad=False,
                maximize=False,
                found_inf=on.skip,
            )
            for index, new_age in zip(on.indices, counted(age, finite).unbind(), strict=True):
                new_ages[index] = new_age

        found = overwrite(
            run_torchs,
            grads,
            params,
            state.first_moment,
            state.second_moment,
            others=(rate, state.count, *kept),
            kinds=None if mask is None else select(params),
            finite=finite,
            donate=donate,
        )
        if found is None:
            return None
        params, first, second = found
        return params, AdamState(counted(state.count, finite), tree.unflatten(spec, new_ages), first, second)

    return GradientTransformation(init, update, one_pass(update, launch, on_torchs_kernel))


def _steps(ages: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Lists the numbers of the updates to come, as torch's kernel takes them; it reads them only."""
    steps = (ages + 1).to(device, torch.float32)
    if steps.is_cpu and len(set(steps.tolist())) == 1:  # to take them apart takes as long as a small update
        return [steps[0]] * len(steps)
    return list(steps.unbind())
