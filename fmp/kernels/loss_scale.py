"""The next dynamic loss scale, in one launch; `cuda/loss_scale.cu` has the rule."""

import numpy as np
import torch

from fmp.kernels.launch import launch

Tensor = torch.Tensor

_THREADS = 32


def adjust(
    finite: Tensor,
    loss_scale: Tensor,
    growth_count: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
) -> tuple[Tensor, Tensor]:
    """Computes the next loss scale, without asking the host whether the step was good.

    Args:
        finite: bool[], whether it was.
        loss_scale: f32[], on the same device.
        growth_count: i32[], the good steps since the last change.
        growth_factor: What the scale is multiplied by when it grows.
        backoff_factor: What it is multiplied by when it shrinks.
        growth_interval: The good steps in a row that make it grow.
        min_scale: The floor.
        max_scale: The ceiling.

    Returns:
        The scale, f32[], and the count, i32[], in new memory.
    """
    new = torch.empty_like(loss_scale), torch.empty_like(growth_count)
    rule = [np.float32(growth_factor), np.float32(backoff_factor), np.int32(growth_interval)]
    pointers = [tensor.data_ptr() for tensor in (finite, loss_scale, growth_count, *new)]
    arguments = [*pointers, *rule, np.float32(min_scale), np.float32(max_scale)]
    launch(finite.device, "adjust", of="loss_scale", blocks=1, threads=_THREADS, arguments=arguments)
    return new
