"""Adam and AdamW over lists of tensors, in one launch that overwrites them; `cuda/adam.cu` has the equations."""

from collections.abc import Sequence

import torch

from fmp.kernels import optimizer

Tensor = torch.Tensor

COUPLED_DECAY, DECOUPLED_DECAY = 1, 2
"""Flags of a parameter: its decay goes into the gradient, or past the moments into the update."""


def step(
    gradients: Sequence[Tensor],
    params: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
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
    """Overwrites parameters, moments and casts by those after one step.

    Args:
        gradients: f32, f16 or bf16, still scaled.
        params: f32, the parameters or their masters; 16 bits in a form.
        first: f32, their first moments.
        second: f32, their second moments.
        low: For each parameter its cast, f16 or bf16, or None; or what the form keeps beside it.
        flags: For each parameter the sum of its flags.
        coefficients: f32[n, 8], for each parameter 1 - b1, 1 - b2, 1 - (1 - b2), the size of the step, eps, the factor
            of the parameter in the update, that in the gradient, and nothing.
        scale: f32[], the factor of the gradients; None for 1.
        divide: Whether they are divided by `scale`, not multiplied.
        clip: f32[], a further factor; None for 1.
        finite: bool[], false to leave every byte as it is; None for true.
        form: The form of the parameters, as `fmp.kernels.optimizer` has them; None for f32.
        seeds: i64[n], what the parameters draw by in the form `"stochastic"`.
    """
    options = {"scale": scale, "divide": divide, "clip": clip, "finite": finite, "form": form, "seeds": seeds}
    optimizer.overwrite("adam", gradients, params, (first, second), low, flags, coefficients, **options)
