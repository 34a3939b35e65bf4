"""The one-pass forms of SGD: on fmp's kernel, and on torch's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fmp import _compat
from fmp.kernels import eligible, sgd as kernel
from fmp.optim.base import Scalar, ScalarOrSchedule, in_dtype, is_off, scheduled
from fmp.optim.fused import Request, Trees, Update, check_numbers, one_pass
from fmp.optim.kernel_updates import on_fmps_kernel, on_torchs_kernel, rate_on
from fmp.optim.one_launch import Leaves, as_rows
from fmp.optim.torch_kernel import Launch

Tree = Any


@dataclass(frozen=True)
class Hyperparams:
    """What SGD is made with; `fmp.optim.sgd` describes each. Without momentum it is None, never 0."""

    learning_rate: ScalarOrSchedule
    momentum: Scalar | None
    nesterov: bool
    weight_decay: Scalar
    dampening: Scalar

    @property
    def moments(self) -> tuple[str, ...]:
        """The fields of the state that hold moments."""
        return () if self.momentum is None else ("momentum",)


def gain_of(ages: torch.Tensor, dampening: Scalar, dtype: torch.dtype) -> torch.Tensor:
    """Computes how much of its gradient goes into a parameter's running sum: all of the first one.

    Args:
        ages: i32[...], how many updates the parameters have had.
        dampening: How much of a later gradient is left out.
        dtype: The dtype of the running sums, and of what is returned.

    Example:
        >>> gain_of(torch.tensor([0, 1]), 0.25, torch.float32)
        tensor([1.0000, 0.7500])
    """
    return torch.where(ages == 0, torch.ones_like(ages, dtype=dtype), 1.0 - in_dtype(dampening, dtype))


def one_pass_form(update: Update, hyper: Hyperparams, *, on_torchs: bool) -> Callable[..., Trees]:
    """Makes the `fused` function of SGD.

    Args:
        update: Its `update`, for whatever no kernel can work on.
        hyper: Its hyper-parameters.
        on_torchs: Whether torch's kernel runs where fmp's cannot; it takes numbers only, and no dampening.

    Raises:
        TypeError: If torch's kernel may run, and a number other than the learning rate is a tensor.
        ValueError: If it may run, and there is a dampening.
    """
    launch = partial(_launch, hyper)
    if not on_torchs:
        return one_pass(update, launch)
    if not is_off(hyper.dampening):
        raise ValueError(f"fused=True has no dampening, got dampening={hyper.dampening!r}; leave one of them out")
    check_numbers(momentum=hyper.momentum, weight_decay=hyper.weight_decay)
    return one_pass(update, launch, partial(_launch_torchs, hyper))


def _launch(hyper: Hyperparams, grads: Tree, state: Tree, params: Tree, request: Request) -> Trees | None:
    if not eligible.has_kernels(state.count.device):
        return None
    rate, momentum = scheduled(hyper.learning_rate, state.count), hyper.momentum
    flag = (0 if is_off(hyper.weight_decay) else kernel.DECAY) | (kernel.NESTEROV if hyper.nesterov else 0)

    def run(on: Leaves, ages: torch.Tensor | None) -> None:
        gain = 1.0 if ages is None else gain_of(ages, hyper.dampening, torch.float32)
        like = torch.empty(len(on.params), dtype=torch.float32, device=on.params[0].device)
        row = (-in_dtype(rate, torch.float32), 0.0 if momentum is None else momentum, gain, hyper.weight_decay)
        kernel.step(
            on.gradients,
            on.params,
            on.moments[0] if on.moments else None,
            on.low,
            flags=[flag] * len(on.params),
            coefficients=as_rows(row, like),
            **on.options,
        )

    numbers = (rate, momentum, hyper.dampening, hyper.weight_decay)
    return on_fmps_kernel("sgd", run, grads, state, params, request, moments=hyper.moments, numbers=numbers)


def _launch_torchs(
    hyper: Hyperparams, grads: Tree, state: Tree, params: Tree, *, finite: torch.Tensor | None, donate: bool
) -> tuple[Tree, Tree] | None:
    rate = scheduled(hyper.learning_rate, state.count)

    def run(on: Launch, ages: None) -> None:
        _compat.fused_sgd_(
            on.params,
            on.grads,
            *(on.moments or ([],)),
            lr=rate_on(on.params[0].device, rate),
            momentum=hyper.momentum or 0.0,
            weight_decay=hyper.weight_decay,
            dampening=0.0,
            nesterov=hyper.nesterov,
            maximize=False,
            is_first_step=False,
            found_inf=on.skip,
        )

    return on_torchs_kernel(run, grads, state, params, moments=hyper.moments, rate=rate, finite=finite, donate=donate)
