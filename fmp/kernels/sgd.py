"""SGD over lists of tensors, in one launch that overwrites them; `cuda/sgd.cu` has the equations."""

from collections.abc import Sequence

import torch

from fmp.kernels import optimizer

Tensor = torch.Tensor

DECAY, NESTEROV = 1, 2
"""Flags of a parameter: it decays, and it looks ahead along its momentum."""


def step(
    gradients: Sequence[Tensor],
    params: Sequence[Tensor],
    momentum: Sequence[Tensor] | None,
    low: Sequence[Tensor | None],
    *,
    flags: Sequence[int],
    coefficients: Tensor,
    scale: Tensor | None = None,
    divide: bool = False,
    clip: Tensor | None = None,
    finite: Tensor | None = None,
    form: str | None = None,
    seeds: Tensor | None = None,
) -> None:
    """Overwrites parameters, momentum and casts by those after one step.

    Args:
        gradients: f32, f16 or bf16, still scaled.
        params: f32, the parameters or their masters; 16 bits in a form.
        momentum: f32, their running sums of gradients; None without momentum.
        low: For each parameter its cast, f16 or bf16, or None; or what the form keeps beside it.
        flags: For each parameter the sum of its flags.
        coefficients: f32[n, 4], for each parameter the learning rate with a minus, how much momentum stays, the factor
            of a gradient in it, and the factor of the parameter in the gradient.
        scale: f32[], the factor of the gradients; None for 1.
        divide: Whether they are divided by `scale`, not multiplied.
        clip: f32[], a further factor; None for 1.
        finite: bool[], false to leave every byte as it is; None for true.
        form: The form of the parameters, as `fmp.kernels.optimizer` has them; None for f32.
        seeds: i64[n], what the parameters draw by in the form `"stochastic"`.
    """
    options = {"scale": scale, "divide": divide, "clip": clip, "finite": finite, "form": form, "seeds": seeds}
    optimizer.overwrite("sgd", gradients, params, (momentum,), low, flags, coefficients, **options)
