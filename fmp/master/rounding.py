"""Rounding float32 numbers to the grid of a narrower format, in float32.

A compiler that fuses kernels may leave out a cast to 16 bits and back, and with it the rounding. What depends on the
rounding, such as its error, is computed by arithmetic that no compiler leaves out.
"""

import torch

from fmp import _compat

Tensor = torch.Tensor

_EXPONENT = 0x7F800000  # the bits of a float32 that hold its exponent


def straight_through(value: Tensor, source: Tensor) -> Tensor:
    """Returns a value with the gradient of what it was made of, as if making it were the identity.

    Args:
        value: The value, without a gradient of its own.
        source: A tensor of the same shape and dtype. Where it is inf or NaN, there is no gradient.

    Returns:
        `value`, bit for bit, but for the payload of a NaN.

    References:
        Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons, 2013, arXiv:1308.3432.

    Example:
        >>> torch.func.grad(lambda x: straight_through(x.detach().round(), x))(torch.tensor(1.3))
        tensor(1.)
    """
    if not (torch.compiler.is_compiling() or source.requires_grad or _compat.transform_active()):
        return value  # nobody can ask for the gradient
    start = source.detach()
    # Subtracting 0.0 changes nothing; adding it would change the sign of a zero.
    return torch.where(start.isfinite(), value - (start - source), value)


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the distance of the numbers of a format around each value, below it if it is a power of two itself.

    Args:
        values: f32[...], without a gradient.
        dtype: A floating-point dtype without numbers outside the range of float32.

    Returns:
        f32[...], powers of two: dividing by them and multiplying with them is exact. Infinite for inf and NaN.

    Example:
        >>> spacing(torch.tensor([1.0, -1.5, 0.0]), torch.float16)
        tensor([9.7656e-04, 9.7656e-04, 5.9605e-08])
    """
    info = torch.finfo(dtype)
    power = _compat.reinterpreted(_compat.reinterpreted(values, torch.int32) & _EXPONENT, torch.float32)
    return (power * info.eps).clamp(min=info.smallest_normal * info.eps)


def overflow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Makes inf of the numbers beyond the largest one of a format, with their sign."""
    return torch.where(values.abs() > torch.finfo(dtype).max, values * float("inf"), values)


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to the nearest number of a format, and of two to the even one, as a cast to the format and back does.

    Args:
        values: f32[...].
        dtype: `torch.bfloat16` or `torch.float16`.

    Returns:
        f32[...], with the gradient of the cast.
    """
    if not torch.compiler.is_compiling():
        return values.to(dtype).to(torch.float32)
    return nearest_by_arithmetic(values, dtype)


def nearest_by_arithmetic(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Does what `nearest` says without a cast, for compilers."""
    start = values.detach()
    step = spacing(start, dtype)
    rounded = overflow((start / step).round() * step, dtype)
    return straight_through(torch.where(start.isfinite(), rounded, start), values)
