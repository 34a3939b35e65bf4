"""The one-pass forms of Adam and AdamW: on fmp's kernel, and on torch's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fmp import _compat
from fmp.kernels import adam as kernel, eligible
from fmp.optim.adam_coefficients import Hyperparams, coefficient_rows
from fmp.optim.base import is_off, scheduled
from fmp.optim.fused import Request, Trees, Update, check_numbers, one_pass
from fmp.optim.kernel_updates import on_fmps_kernel, on_torchs_kernel, rate_on
from fmp.optim.one_launch import Leaves
from fmp.optim.torch_kernel import Launch

Tree = Any

_MOMENTS = ("first_moment", "second_moment")


def one_pass_form(update: Update, hyper: Hyperparams, *, on_torchs: bool) -> Callable[..., Trees]:
    """Makes the `fused` function of Adam or AdamW.

    Args:
        update: Its `update`, for whatever no kernel can work on.
        hyper: Its hyper-parameters.
        on_torchs: Whether torch's kernel runs where fmp's cannot; it takes numbers only.

    Raises:
        TypeError: If torch's kernel may run, and a number other than the learning rate is a tensor.
    """
    launch = partial(_launch, hyper)
    if not on_torchs:
        return one_pass(update, launch)
    check_numbers(b1=hyper.b1, b2=hyper.b2, eps=hyper.eps, weight_decay=hyper.weight_decay)
    return one_pass(update, launch, partial(_launch_torchs, hyper))


def _launch(hyper: Hyperparams, grads: Tree, state: Tree, params: Tree, request: Request) -> Trees | None:
    if not eligible.has_kernels(state.count.device):
        return None
    rate, decays = scheduled(hyper.learning_rate, state.count), hyper.select(params)
    coupled = 0 if is_off(hyper.coupled_decay) else kernel.COUPLED_DECAY
    decoupled = 0 if is_off(hyper.decoupled_decay) or is_off(rate) else kernel.DECOUPLED_DECAY

    def run(on: Leaves, ages: torch.Tensor) -> None:
        flags = [coupled | decoupled if decays[index] else coupled for index in on.indices]
        rows, (first, second) = coefficient_rows(ages, rate, hyper), on.moments
        kernel.step(on.gradients, on.params, first, second, on.low, flags=flags, coefficients=rows, **on.options)

    numbers = (rate, hyper.b1, hyper.b2, hyper.eps, hyper.weight_decay)
    return on_fmps_kernel("adam", run, grads, state, params, request, moments=_MOMENTS, numbers=numbers)


def _launch_torchs(
    hyper: Hyperparams, grads: Tree, state: Tree, params: Tree, *, finite: torch.Tensor | None, donate: bool
) -> tuple[Tree, Tree] | None:
    rate = scheduled(hyper.learning_rate, state.count)
    kinds = hyper.select(params) if hyper.has_mask else None
    torchs = _compat.fused_adamw_ if hyper.decoupled else _compat.fused_adam_

    def run(on: Launch, ages: torch.Tensor, decays: bool = True) -> None:
        device = on.params[0].device
        torchs(
            on.params,
            on.grads,
            *on.moments,
            [],  # the largest second moments, for amsgrad
            _steps(ages, device),
            lr=rate_on(device, rate),
            beta1=hyper.b1,
            beta2=hyper.b2,
            weight_decay=hyper.weight_decay if decays else 0.0,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
            found_inf=on.skip,
        )

    return on_torchs_kernel(
        run, grads, state, params, moments=_MOMENTS, rate=rate, kinds=kinds, finite=finite, donate=donate
    )


def _steps(ages: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Lists the numbers of the updates to come, as torch's kernel takes them; it reads them only."""
    steps = (ages + 1).to(device, torch.float32)
    if steps.is_cpu and len(set(steps.tolist())) == 1:  # to take them apart takes as long as a small update
        return [steps[0]] * len(steps)
    return list(steps.unbind())
