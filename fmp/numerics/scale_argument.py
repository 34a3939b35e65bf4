"""The argument `scale`: what numbers are multiplied by before a cast."""

import math
from numbers import Real

import torch

from fmp import tree
from fmp.scaling import LossScale

Scale = float | torch.Tensor


def checked_scale(scale: Scale) -> Scale:
    """Returns a scale as Python's number, or as the scalar tensor that it is, whose value is not looked at.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is a number that is not positive and finite.

    Example:
        >>> checked_scale(8), checked_scale(torch.tensor(8))
        (8.0, tensor(8))
    """
    if isinstance(scale, torch.Tensor):
        if scale.ndim or scale.dtype == torch.bool or scale.dtype.is_complex:
            raise TypeError(f"scale must be a number or a real scalar tensor, got {tree.describe(scale)}")
        return scale
    if isinstance(scale, bool) or not isinstance(scale, int | float | Real):
        found = f"{scale!r} of type {type(scale).__name__}"
        if isinstance(scale, LossScale):
            found = f"a {type(scale).__name__}; pass its .loss_scale"
        raise TypeError(f"scale must be a number or a scalar tensor, got {found}")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return float(scale)


def scale_as_number(scale: Scale) -> float:
    """Returns a scale as Python's number, for which it waits for the device of a tensor.

    Raises:
        TypeError: If it is neither a number nor a scalar tensor.
        ValueError: If it is not positive and finite.

    Example:
        >>> scale_as_number(torch.tensor(8))
        8.0
    """
    number = float(checked_scale(scale))
    if not 0 < number < math.inf:
        raise ValueError(f"scale must be positive and finite, got {number}")
    return number
