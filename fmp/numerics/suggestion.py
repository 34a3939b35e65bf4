"""`fmp.numerics.suggest_scale`: the power of two to multiply by before a cast to a narrow format."""

import math
from typing import Any

import torch

from fmp import _compat
from fmp.numerics.counting import device, floating
from fmp.numerics.format_loss import scaled
from fmp.numerics.formats import Format, number_format
from fmp.numerics.parts import of_parts, summed

Tree = Any

_LARGEST_POWER = 126  # a scale and its inverse are normal numbers of float32
_MOST_HALVES = 2 * _LARGEST_POWER


def suggest_scale(values: Tree, dtype: torch.dtype | str, *, margin: int = 0, tolerance: float = 1e-4) -> torch.Tensor:
    """Finds the power of two to multiply by before a cast to a format.

    The largest power at which nothing overflows loses least. (One overflow is enough to lose a whole step, so for this
    a single number does count.) A smaller one leaves more head-room for the steps to come, so the smallest is chosen of
    those that lose nearly as little, such that a few numbers far below all others, as rounding noise is, decide
    nothing:

        highest   = the largest k at which no |leaf * 2^k| overflows, less the margin
        nonzero   = the numbers that are not zero in the format at 2^highest
        normal    = those that are not even subnormal there
        result    = 2^k for the smallest k at which at most  tolerance * |nonzero|  of the nonzero become zero, and
                    at most  tolerance * |normal|  of the normal become subnormal or zero

    but 1 where such a k is below 0 and `highest` is not: what float32 gives needs no smaller scale. With a tolerance
    of 0 no power of two does better in `loss_in`: it has the fewest overflows, of these the fewest zeros, and of these
    the fewest subnormal numbers. It needs no host sync, and works under vmap and in a compiled step.

    It sees only what it is given. A float16 backward pass also holds the gradients of activations, which may be far
    larger than those of parameters, where the samples of a batch cancel out: at a scale for the latter alone they
    overflow, and a static scale then skips every step. So begin a dynamic scale with it, which falls back, as below; or
    give it the gradients of activations too, those with respect to zeros that are added to them.

    Args:
        values: Any tree, of unscaled gradients for example, best from float32 or bfloat16, as for `loss_in`. Real
            floating-point tensors count, all leaves together; all else is ignored.
        dtype: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32, or a name of one.
        margin: How many powers of two to keep free below the overflow, for the steps to come.
        tolerance: The fraction that may be lost of what could be kept, from 0 to below 1. Of fewer than 1 / tolerance
            numbers, each one counts.

    Returns:
        f32[], from 2^-126 to 2^126; 1 if there is no nonzero finite number.

    Raises:
        ValueError: If the format is another one, or the margin or the tolerance is out of its range.
        TypeError: If the margin is not an int, or the tolerance not a number; or if the tree holds a `LocalShard`, of
            which other ranks have other rows.

    References:
        Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2: choose a factor so that its
        product with the largest gradient stays below the largest number of the format.

    Example:
        >>> grads = {"w": torch.tensor([1e-9, 1e-8, 1e-6, 1e-4])}
        >>> scale = suggest_scale(grads, torch.float16)
        >>> scale, fmp.numerics.loss_in(grads, torch.float16, scale).underflow
        (tensor(65536.), tensor(0.))
        >>> scaler = fmp.DynamicLossScale(init_scale=scale, max_scale=2.0**40)
        >>> grads = {"w": torch.full((20_000,), 1e-6), "noise": torch.tensor([1e-11, 1.0])}
        >>> suggest_scale(grads, torch.float16), suggest_scale(grads, torch.float16, tolerance=0.0)
        (tensor(64.), tensor(4096.))
    """
    target = number_format(dtype)
    _check(margin, tolerance)
    magnitudes = [leaf.abs() for leaf in floating(values, "the scale")[1] if leaf.numel()]
    if not magnitudes:
        return torch.ones((), dtype=torch.float32, device=device(values))
    powers = [of_parts(lambda part: _highest_power(part, target), magnitude) for magnitude in magnitudes]
    highest = torch.cat(powers).amin()
    highest = (highest - margin).clamp(-_LARGEST_POWER, _LARGEST_POWER)
    scale = _power_of_two(highest)
    counts = [summed(lambda part: _by_halves(scaled(part, target, scale), target), each) for each in magnitudes]
    counts = torch.stack(counts).sum(0)
    lost, kept = counts.cumsum(-1)[:, :_MOST_HALVES], counts.sum(-1, keepdim=True)
    halves = (lost <= tolerance * kept.double()).sum(-1).amin()  # what is lost grows, so these are the first
    power = (highest - halves).clamp(min=-_LARGEST_POWER)
    return _power_of_two(torch.where(highest < 0, power, power.clamp(min=0)))


def _highest_power(magnitude: torch.Tensor, target: Format) -> torch.Tensor:
    """Finds the highest power of two at which nothing overflows, save what does at every power, i32[]."""
    if not magnitude.numel():  # a rank without rows of a tensor
        return torch.full((), _MOST_HALVES, dtype=torch.int32, device=magnitude.device)
    fits = magnitude < target.max_rounded * 2.0**_LARGEST_POWER
    largest = torch.where(fits, magnitude, 0.0).amax()
    mantissa, exponent = torch.frexp(largest)
    mantissa = mantissa.to(target.compared_in)  # and not `largest` itself, which may be beyond that dtype
    limit, limit_exponent = math.frexp(target.max_rounded)
    below = mantissa <= limit if target.max_is_even else mantissa < limit
    power = torch.where(below, limit_exponent, limit_exponent - 1) - exponent
    return torch.where(largest > 0, power, _MOST_HALVES).to(torch.int32)


def _by_halves(magnitude: torch.Tensor, target: Format) -> torch.Tensor:
    """Counts numbers by how often they can be halved and stay nonzero, and by how often and stay normal, i64[2, n]."""
    mantissa, exponent = torch.frexp(magnitude)
    limit, limit_exponent = math.frexp(target.zero_up_to)
    nonzero = exponent - torch.where(mantissa > limit, limit_exponent, limit_exponent + 1)
    limit, limit_exponent = math.frexp(target.normal_from)
    normal = exponent - torch.where(mantissa >= limit, limit_exponent, limit_exponent + 1)
    is_finite = magnitude < math.inf
    return torch.stack(
        [
            _counted(nonzero, is_finite & (magnitude > target.zero_up_to)),
            _counted(normal, is_finite & (magnitude >= target.normal_from)),
        ]
    )


def _counted(halves: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Counts how often each number from 0 to the most is there, i64[n]; the last bin has what is above, too."""
    index = torch.where(counts, halves.clamp(max=_MOST_HALVES), _MOST_HALVES + 1).reshape(-1)
    one = torch.ones((), dtype=torch.int64, device=index.device)
    bins = torch.zeros(_MOST_HALVES + 2, dtype=torch.int64, device=index.device)
    return bins.index_add(0, index, one.expand(index.shape))[:-1]


def _power_of_two(power: torch.Tensor) -> torch.Tensor:
    """Returns 2^power, f32[], from its bits: `exp2` is not exact on every device."""
    return _compat.reinterpreted(torch.bitwise_left_shift(power.to(torch.int32) + 127, 23), torch.float32)


def _check(margin: int, tolerance: float) -> None:
    if not isinstance(margin, int) or isinstance(margin, bool):
        raise TypeError(f"margin must be an int, got {margin!r}")
    if not 0 <= margin <= _LARGEST_POWER:
        raise ValueError(f"margin must lie between 0 and {_LARGEST_POWER}, got {margin}")
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool):
        raise TypeError(f"tolerance must be a fraction of the numbers, got {tolerance!r}")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be a fraction of the numbers, from 0 to below 1, got {tolerance}")
