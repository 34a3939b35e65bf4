"""What a cast to a narrow format would lose of the numbers in a tree, and the scale at which it loses least."""

import math
from typing import Any

import torch

from fmp import tree
from fmp.numerics.counting import device, floating, fraction, stacked
from fmp.numerics.formats import Format, number_format

Tree = Any
Scale = float | torch.Tensor

_LARGEST_POWER = 126  # a scale and its inverse are normal numbers of float32


@tree.dataclass
class FormatLoss:
    """What a cast would do to the nonzero finite numbers of a tree, a row for each leaf.

    The fields are counts, so they may be summed over steps or over processes. What vmap or microbatches add stands
    before the other dimensions.

    Attributes:
        total: i64[leaves], the nonzero finite numbers.
        zeroed: i64[leaves], those that become zero.
        denormalized: i64[leaves], those that become subnormal numbers, with fewer digits.
        overflowed: i64[leaves], those that are too large, so that the cast gives inf or NaN, or saturates.
        names: The paths of the leaves.
        dtype: The format.
    """

    total: torch.Tensor
    zeroed: torch.Tensor
    denormalized: torch.Tensor
    overflowed: torch.Tensor
    names: tuple[str, ...] = tree.static()
    dtype: torch.dtype = tree.static()

    @property
    def underflow(self) -> torch.Tensor:
        """f32[], the fraction of all numbers that become zero."""
        return fraction(self.zeroed.sum(-1), self.total.sum(-1))

    @property
    def subnormal(self) -> torch.Tensor:
        """f32[], the fraction of all numbers that become subnormal."""
        return fraction(self.denormalized.sum(-1), self.total.sum(-1))

    @property
    def overflow(self) -> torch.Tensor:
        """f32[], the fraction of all numbers that overflow."""
        return fraction(self.overflowed.sum(-1), self.total.sum(-1))

    @property
    def leaf_underflow(self) -> torch.Tensor:
        """f32[leaves], the fraction of each leaf that becomes zero."""
        return fraction(self.zeroed, self.total)

    @property
    def leaf_subnormal(self) -> torch.Tensor:
        """f32[leaves], the fraction of each leaf that becomes subnormal."""
        return fraction(self.denormalized, self.total)

    @property
    def leaf_overflow(self) -> torch.Tensor:
        """f32[leaves], the fraction of each leaf that overflows."""
        return fraction(self.overflowed, self.total)


def loss_in(values: Tree, dtype: torch.dtype | str, scale: Scale = 1.0) -> FormatLoss:
    """Measures what a cast to a format would lose, if the numbers were multiplied by a scale before.

    For each nonzero finite entry of each leaf, with `y = (leaf.to(float32) * scale).to(dtype)`, ties rounded to even:

        underflow   y = 0
        subnormal   0 < |y| < the smallest normal number
        overflow    |leaf * scale| exceeds the largest number by half a step: y is inf or NaN, or it saturated

    A leaf in float64 is multiplied in float64. The counts are what torch's own cast does, number by number, but no
    cast is made. There is no host sync; it works under vmap, with a scale for each member too, and in a compiled step,
    as `aux` of the loss too.

    Args:
        values: Any tree, of gradients for example, best from float32 or bfloat16: what a float16 backward pass has lost
            comes as zero, and zeros do not count. Real floating-point tensors count; all else is ignored.
        dtype: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32, or a name of one.
        scale: What the numbers are multiplied by: a positive number or a scalar tensor, such as the loss scale.

    Returns:
        The counts, and fractions of them, for each leaf and overall.

    Raises:
        ValueError: If the format is another one, or the scale is not positive and finite.
        TypeError: If the scale is neither a number nor a scalar tensor.

    Example:
        >>> grads = {"w": torch.tensor([1e-9, 1e-8, 1e-6, 1.0]), "b": torch.tensor([0.0, 1e5])}
        >>> loss = loss_in(grads, torch.float16)
        >>> loss.underflow, loss.subnormal, loss.overflow
        (tensor(0.4000), tensor(0.2000), tensor(0.2000))
        >>> loss.names, loss.leaf_underflow, loss_in(grads, torch.float16, scale=16.0).leaf_underflow
        (('b', 'w'), tensor([0.0000, 0.5000]), tensor([0.0000, 0.2500]))
    """
    target = number_format(dtype)
    _check_scale(scale)
    names, leaves = floating(values)
    rows = stacked([_lost(leaf, target, scale) for leaf in leaves], (4,), values)
    return FormatLoss(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], names, target.dtype)


def _lost(leaf: torch.Tensor, target: Format, scale: Scale) -> torch.Tensor:
    """Counts one leaf, i64[4]: nonzero finite numbers, and those that become zero, subnormal or too large."""
    magnitude = leaf.abs()
    counted = (magnitude > 0) & (magnitude < math.inf)
    scaled = _scaled(magnitude, target, scale)
    zeroed = counted & (scaled <= target.zero_up_to)
    below_normal = counted & (scaled < target.normal_from)
    overflowed = counted & target.overflows(scaled)
    total, zeros, small, large = (mask.count_nonzero() for mask in (counted, zeroed, below_normal, overflowed))
    return torch.stack([total, zeros, small - zeros, large])


def _scaled(magnitude: torch.Tensor, target: Format, scale: Scale) -> torch.Tensor:
    """Multiplies, and rounds to where the limits of the format are exact."""
    factor = scale.to(magnitude.dtype) if isinstance(scale, torch.Tensor) else scale
    return (magnitude * factor).to(target.compared_in)


def suggest_scale(values: Tree, dtype: torch.dtype | str, *, margin: int = 0) -> torch.Tensor:
    """Finds the power of two that a cast to a format loses least with.

    That is the one with, in this order, the fewest overflows (one is enough to lose a whole step), the fewest numbers
    that become zero, and the fewest that become subnormal. Of several the smallest is chosen, which leaves the most
    head-room, but not one below 1 where 1 is as good. It is exact: no power of two does better in
    `loss_in`. It needs no host sync, and works under vmap and in a compiled step.

    In the order in which it is found:

        highest = the largest k at which no |leaf * 2^k| overflows
        x       = |leaf * 2^highest|
        halves  = how often the smallest x that is not zero, and the smallest that is normal, can be halved and stay so
        result  = 2^(highest - the smaller number of halves)

    Args:
        values: Any tree, of unscaled gradients for example, best from float32 or bfloat16, as for `loss_in`. Real
            floating-point tensors count, however few are very small; all else is ignored.
        dtype: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32, or a name of one.
        margin: How many powers of two to keep free below the overflow, for the steps to come.

    Returns:
        f32[], from 2^-126 to 2^126; 1 if there is no nonzero finite number.

    Raises:
        ValueError: If the format is another one, or the margin is out of its range.
        TypeError: If the margin is not an int.

    References:
        Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2: choose a factor so that its
        product with the largest gradient stays below the largest number of the format.

    Example:
        >>> grads = {"w": torch.tensor([1e-9, 1e-8, 1e-6, 1e-4])}
        >>> scale = suggest_scale(grads, torch.float16)
        >>> scale, loss_in(grads, torch.float16, scale).underflow
        (tensor(65536.), tensor(0.))
    """
    target = number_format(dtype)
    if not isinstance(margin, int) or isinstance(margin, bool):
        raise TypeError(f"margin must be an int, got {margin!r}")
    if not 0 <= margin <= _LARGEST_POWER:
        raise ValueError(f"margin must lie between 0 and {_LARGEST_POWER}, got {margin}")
    magnitudes = [leaf.abs() for leaf in floating(values)[1] if leaf.numel()]
    if not magnitudes:
        return torch.ones((), dtype=torch.float32, device=device(values))
    highest = torch.stack([_highest_power(magnitude, target) for magnitude in magnitudes]).amin()
    highest = (highest - margin).clamp(-_LARGEST_POWER, _LARGEST_POWER)
    scale = _power_of_two(highest)
    halves = torch.stack([_spare_halves(_scaled(magnitude, target, scale), target) for magnitude in magnitudes]).amin()
    power = (highest - halves).clamp(min=-_LARGEST_POWER)
    return _power_of_two(torch.where(highest < 0, power, power.clamp(min=0)))


def _highest_power(magnitude: torch.Tensor, target: Format) -> torch.Tensor:
    """Finds the highest power of two at which nothing overflows, save what does at every power, i32[]."""
    fits = magnitude < target.max_rounded * 2.0**_LARGEST_POWER
    largest = torch.where(fits, magnitude, 0.0).amax()
    mantissa, exponent = torch.frexp(largest)
    mantissa = mantissa.to(target.compared_in)  # and not `largest` itself, which may be beyond that dtype
    limit, limit_exponent = math.frexp(target.max_rounded)
    below = mantissa <= limit if target.max_is_even else mantissa < limit
    power = torch.where(below, limit_exponent, limit_exponent - 1) - exponent
    return torch.where(largest > 0, power, 2 * _LARGEST_POWER)


def _spare_halves(magnitude: torch.Tensor, target: Format) -> torch.Tensor:
    """Counts how often a leaf can be halved before one more number becomes zero or subnormal, i32[]."""
    nonzero = torch.where(magnitude > target.zero_up_to, magnitude, math.inf).amin()
    mantissa, exponent = torch.frexp(nonzero)
    limit, limit_exponent = math.frexp(target.zero_up_to)
    until_zero = exponent - torch.where(mantissa > limit, limit_exponent, limit_exponent + 1)

    normal = torch.where(magnitude >= target.normal_from, magnitude, math.inf).amin()
    mantissa, exponent = torch.frexp(normal)
    limit, limit_exponent = math.frexp(target.normal_from)
    until_subnormal = exponent - torch.where(mantissa >= limit, limit_exponent, limit_exponent + 1)

    most = 2 * _LARGEST_POWER
    until_zero = torch.where(nonzero < math.inf, until_zero, most)
    return torch.minimum(until_zero, torch.where(normal < math.inf, until_subnormal, most))


def _power_of_two(power: torch.Tensor) -> torch.Tensor:
    """Returns 2^power, f32[], from its bits: `exp2` is not exact on every device."""
    return ((power.to(torch.int32) + 127) << 23).view(torch.float32)


def _check_scale(scale: Scale) -> None:
    if isinstance(scale, torch.Tensor):
        if scale.ndim or not scale.dtype.is_floating_point:
            raise TypeError(f"scale must be a number or a floating-point scalar tensor, got {tree.describe(scale)}")
    elif isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a number or a scalar tensor, got {scale!r} of type {type(scale).__name__}")
    elif not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
