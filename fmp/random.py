"""Counter-based noise: random numbers that are a pure function of a seed and of an element's place in its tensor.

There is no generator to advance. The same seed gives the same noise eagerly, compiled, under every torch.func
transform, in a recomputation and on any device; and since an element's number depends on nothing but its global index,
a sharded tensor gets the shards of what the whole tensor would get (see `bits_at` and `part_of_batch`).

Under `torch.func.vmap` a batched seed gives each member noise of its own. A seed that is not batched gives every
member the same noise, whether its data is batched or not.

The numbers come from hashing index and seed with two rounds of a 32-bit integer mixer. That is fast and statistically
sound, but not cryptography.

References:
    C. Wellons, hash-prospector (the mixer `lowbias32`), https://github.com/skeeto/hash-prospector.
    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011 (the idea of a counter in place of a state).
    Jarzynski and Olano, Hash Functions for GPU Rendering, JCGT 9(3), 2020 (hashing several words by nesting).
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fmp.tree import describe

Seed = int | torch.Tensor

# The mixer works on int32, which is several times as fast as int64 and half its size. Multiplication wraps around there
# on every backend, and a cast from int64 keeps the low word; the tests check both against Python's integers.
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - 2**32
_GOLDEN = 0x9E3779B9 - 2**32
# Keep the seeds that `fold_in` derives apart from the noise of the same seed: digits of pi.
_CHILD, _CHILD_STEP = 0x243F6A8885A308D3, 0x13198A2E03707344


class _Part(threading.local):
    """Which part of the batch this thread computes on."""

    def __init__(self):
        self.index = 0


_part = _Part()


@contextmanager
def part_of_batch(index: int) -> Iterator[None]:
    """Lets numbers be drawn for one of several equal parts of a batch, which lie behind one another.

    A draw inside takes its shape for that of a part: it gets the words that stand behind those of the parts before, as
    in a draw for the whole batch. So the numbers do not depend on how many processes share a batch, if the first
    dimension of what is drawn is that of the batch; a tensor without that dimension gets other numbers in each part.
    `fold_in` and `bits_at` are the same as outside.

    Args:
        index: Which part it is, from 0.

    Example:
        >>> with part_of_batch(1):
        ...     second = bits(7, (2, 3))
        >>> (second == bits(7, (4, 3))[2:]).all()
        tensor(True)
    """
    before = _part.index
    _part.index = index
    try:
        yield
    finally:
        _part.index = before


def current_part() -> int:
    """Returns the index of the `part_of_batch` around the caller; 0 without one.

    Example:
        >>> with part_of_batch(1):
        ...     current_part()
        1
    """
    return _part.index


def as_seed(seed: Seed, device: torch.device | str | None = None) -> torch.Tensor:
    """Makes a seed tensor of what a user gives.

    Args:
        seed: An integer, or an integer tensor without dimensions.
        device: Where the seed shall live; by default where it is.

    Returns:
        i64[].

    Raises:
        TypeError: If `seed` is not an integer or an integer tensor.
        ValueError: If `seed` has dimensions or takes more than 64 bits.

    Example:
        >>> as_seed(7)
        tensor(7)
    """
    word = _as_word("seed", seed, device)
    if word.ndim:
        raise ValueError(f"seed must be a scalar, got {describe(word)}; map over several seeds with torch.func.vmap")
    return word if device is None else word.to(device)


def fold_in(seed: Seed, data: Seed) -> torch.Tensor:
    """Derives a new seed from a seed and a number, such as a step count or the index of a layer.

    Args:
        seed: An integer, or i64[...].
        data: What to derive by: an integer, or an integer tensor whose shape broadcasts with the seed's. Any 64-bit
            value gives a seed of its own.

    Returns:
        i64[...], well mixed: consecutive seeds and consecutive data give unrelated results.

    Raises:
        TypeError: If `seed` or `data` is not an integer or an integer tensor.
        ValueError: If one takes more than 64 bits.

    Example:
        >>> fold_in(fold_in(0, 5), torch.tensor(2)) == fold_in(fold_in(0, 5), torch.tensor(3))
        tensor(False)
    """
    seed = _as_word("seed", seed, data.device if isinstance(data, torch.Tensor) else None)
    data = _as_word("data", data, seed.device)
    keys = seed.unsqueeze(-1) ^ (torch.arange(2, device=seed.device) * _CHILD_STEP + _CHILD)
    high, low = _unsigned(_hash(keys, data.unsqueeze(-1))).unbind(-1)
    return (high - 2**31) * 2**32 + low


def bits(seed: Seed, shape: Sequence[int], *, device: torch.device | str | None = None) -> torch.Tensor:
    """Makes random 32-bit words.

    Args:
        seed: An integer, or i64[].
        shape: The shape of the result.
        device: Where to make them; by default where the seed is.

    Returns:
        i64[*shape], uniform over the integers from 0 to 2^32 - 1.

    Raises:
        TypeError: If `seed` is not an integer or an integer tensor.
        ValueError: If `seed` has dimensions or takes more than 64 bits.

    Example:
        >>> (bits(0, (4, 2)).flatten() == bits_at(0, torch.arange(8))).all()
        tensor(True)
    """
    return _unsigned(_words(seed, shape, device))


def bits_at(seed: Seed, index: torch.Tensor) -> torch.Tensor:
    """Makes the random words that stand at some flat indices of a larger tensor, for example of a shard.

    Args:
        seed: An integer, or i64[].
        index: i64[...], indices into the flattened whole tensor.

    Returns:
        i64[...] of the shape of `index`: the elements of `bits(seed, shape)` at these places, whatever the shape.

    Raises:
        TypeError: If `seed` or `index` is not of integers.
        ValueError: If `seed` has dimensions or takes more than 64 bits.

    Example:
        >>> bits_at(7, torch.tensor([2])) == bits(7, (3,))[2]
        tensor([True])
    """
    return _unsigned(_hash(as_seed(seed, index.device), _as_word("index", index, None)))


def uniform(
    seed: Seed, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> torch.Tensor:
    """Makes uniform random numbers.

    Args:
        seed: An integer, or i64[].
        shape: The shape of the result.
        dtype: The floating-point dtype.
        device: Where to make them; by default where the seed is.

    Returns:
        Numbers in [0, 1), all multiples of 2^-d for the d digits of the dtype's mantissa (at most 32), so that no
        rounding brings one up to 1.

    Example:
        >>> uniform(0, (2, 3), dtype=torch.bfloat16).dtype
        torch.bfloat16
    """
    digits = min(32, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return (bits(seed, shape, device=device) >> (32 - digits)).to(dtype) * 2.0**-digits


def normal(
    seed: Seed, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> torch.Tensor:
    """Makes standard normal random numbers, by the inverse of the distribution function.

    Args:
        seed: An integer, or i64[].
        shape: The shape of the result.
        dtype: The floating-point dtype.
        device: Where to make them; by default where the seed is.

    Returns:
        Numbers of mean 0 and variance 1, computed in float32 from 2^23 points, the outermost of which stand at 5.3.
        Devices and compilers may differ in the last bit of the inverse error function.

    Example:
        >>> normal(0, (2, 3)).shape
        torch.Size([2, 3])
    """
    return (torch.erfinv(_open_uniform(seed, shape, device) * 2.0 - 1.0) * math.sqrt(2.0)).to(dtype)


def exponential(
    seed: Seed, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> torch.Tensor:
    """Makes exponentially distributed random numbers of rate 1.

    Args:
        seed: An integer, or i64[].
        shape: The shape of the result.
        dtype: The floating-point dtype.
        device: Where to make them; by default where the seed is.

    Returns:
        Numbers above 0 of mean 1, computed in float32 from 2^23 points, the outermost of which stands at 16.6.
        Devices and compilers may differ in the last bit of the logarithm.

    Example:
        >>> bool((exponential(0, (100,)) > 0).all())
        True
    """
    return -_open_uniform(seed, shape, device).log().to(dtype)


def keep_mask(seed: Seed, shape: Sequence[int], p: float, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Makes the mask of a dropout layer.

    Args:
        seed: An integer, or i64[].
        shape: The shape of the result.
        p: The probability to drop an element, from 0 to 1.
        device: Where to make the mask; by default where the seed is.

    Returns:
        bool[*shape], true where the element is kept. All true for `p=0`, all false for `p=1`;
        between them `p` counts to the nearest multiple of 2^-32.

    Raises:
        ValueError: If `p` is not a probability, or `seed` has dimensions or takes more than 64 bits.
        TypeError: If `seed` is not an integer or an integer tensor.

    Example:
        >>> keep_mask(0, (100, 100), 0.25).float().mean()
        tensor(0.7...)
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must be between 0 and 1, got {p}")
    threshold = round(p * 2**32)
    if threshold == 2**32:  # too large for an int32, with which it would be compared
        return torch.zeros(tuple(shape), dtype=torch.bool, device=as_seed(seed, device).device)
    return _words(seed, shape, device) >= threshold - 2**31


def _open_uniform(seed: Seed, shape: Sequence[int], device: torch.device | str | None) -> torch.Tensor:
    # Odd multiples of 2^-24 lie symmetrically around 1/2, touch neither 0 nor 1, and are exact in float32.
    return ((bits(seed, shape, device=device) >> 9) * 2 + 1).to(torch.float32) * 2.0**-24


def _words(seed: Seed, shape: Sequence[int], device: torch.device | str | None) -> torch.Tensor:
    seed = as_seed(seed, device)
    size = math.prod(shape)
    start = current_part() * size
    end = start + size
    index = torch.arange(start, end, dtype=torch.int32 if end <= 2**31 else torch.int64, device=seed.device)
    return _hash(seed, index).reshape(tuple(shape))


def _hash(seed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Hashes indices, i32 or i64, under an i64 seed to words, uniform over all of i32."""
    # One word of the seed goes in before each round. Two seeds then share no sequence, not even a shifted one, and the
    # low word, in which seeds like 0, 1, 2 differ, meets an index that is mixed already.
    low, high = seed.to(torch.int32), (_shifted(seed, 32) + 1).to(torch.int32) * _GOLDEN
    if index.dtype == torch.int64:
        low = low ^ (_shifted(index, 32).to(torch.int32) * _GOLDEN)
        index = index.to(torch.int32)
    return _mix(_mix(index ^ high) ^ low)


def _mix(word: torch.Tensor) -> torch.Tensor:
    # A shift of signed numbers fills with the sign, so the mask takes off what an unsigned shift would not bring in.
    word = word ^ (_shifted(word, 16) & 0xFFFF)
    word = word * _FIRST
    word = word ^ (_shifted(word, 15) & 0x1FFFF)
    word = word * _SECOND
    return word ^ (_shifted(word, 16) & 0xFFFF)


def _shifted(word: torch.Tensor, count: int) -> torch.Tensor:
    # Not by `>>`: of a DTensor torch takes that as well, but shifts by nothing.
    return torch.bitwise_right_shift(word, count)


def _unsigned(word: torch.Tensor) -> torch.Tensor:
    return word.to(torch.int64) & 0xFFFFFFFF


def _as_word(name: str, value: Seed, device: torch.device | str | None) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
            raise TypeError(f"{name} must hold integers, got {describe(value)}")
        return value.to(torch.int64)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer or an integer tensor, got {value!r}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be from -2^63 to 2^63 - 1, got {value}; take it modulo 2^63")
    # Filled in place: copying a number to an accelerator would wait for it.
    return torch.full((), value, dtype=torch.int64, device=device)
