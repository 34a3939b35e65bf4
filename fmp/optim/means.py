"""The weighted mean of two tensors, which moments are updated by."""

import torch

from fmp.optim.base import Scalar, add_scaled, in_dtype


def blend(weight: Scalar, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes `weight * x + (1 - weight) * y`.

    Not by `torch.lerp`, which takes the difference: that of two large finite numbers may overflow, and that of two
    infinite ones is NaN.

    Args:
        weight: The weight of `x`, in [0, 1].
        x: Any numbers.
        y: Others, of the same dtype.

    Example:
        >>> blend(0.75, torch.tensor([3e38]), torch.tensor([-3e38]))
        tensor([1.5000e+38])
    """
    return add_scaled(y * (1.0 - in_dtype(weight, y.dtype)), weight, x)
