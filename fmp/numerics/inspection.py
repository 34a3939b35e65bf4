"""What there is to know about the numbers of one tensor in a file: their range, and what each format would lose."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fmp import tree
from fmp.df11_codec import huffman, layout
from fmp.numerics.format_loss import FormatLoss, loss_in
from fmp.numerics.formats import FORMATS, number_format

TARGETS = tuple(item.name for item in FORMATS.values() if item.dtype != torch.float32)
_PIECE = 2**18


@dataclass(frozen=True)
class Lost:
    """The fractions of nonzero finite numbers that a cast makes zero or subnormal, and that overflow."""

    zero: float
    subnormal: float
    overflow: float


@dataclass(frozen=True)
class Inspected:
    """What there is to know about one tensor.

    Attributes:
        name: Its name.
        described: Its dtype and shape, such as `bf16[3,4]`.
        numel: How many elements it has.
        smallest: The smallest magnitude of the nonzero finite elements; None if there are none.
        largest: The largest; None if there are none.
        zeros: How many are zero; None for a dtype that is not looked into.
        infinities: How many are infinite.
        nans: How many are NaN.
        lost: By format, what a cast would lose. Empty if there are no numbers to lose.
        df11_nbytes: The bytes that it takes in memory if it is compressed; None for a dtype other than bf16.
    """

    name: str
    described: str
    numel: int
    smallest: float | None = None
    largest: float | None = None
    zeros: int | None = None
    infinities: int | None = None
    nans: int | None = None
    lost: dict[str, Lost] | None = None
    df11_nbytes: int | None = None


def inspect(name: str, tensor: torch.Tensor) -> Inspected:
    """Looks at the numbers of a tensor, on the host.

    All 65,536 patterns of a 16-bit format are few enough to be counted first and judged afterwards. Wider numbers are
    judged piece by piece. Memory beyond the tensor itself is small in both cases.

    Args:
        name: Its name.
        tensor: A dense tensor of any dtype. Of all but real floating-point numbers only dtype and shape are told.

    Example:
        >>> found = inspect("w", torch.tensor([1e-9, 1.0, -7e4, 0.0]))
        >>> found.described, found.largest, found.zeros, found.lost["f16"].overflow, found.lost["bf16"].overflow
        ('f32[4]', 70000.0, 1, 0.3333333333333333, 0.0)
    """
    facts = Inspected(name, tree.describe(tensor), tensor.numel())
    if tensor.dtype not in {*FORMATS, torch.float64}:
        return facts
    zeros = infinities = nans = total = 0
    smallest, largest = math.inf, 0.0
    lost = dict.fromkeys(TARGETS, torch.zeros(3, dtype=torch.int64))
    patterns = _pattern_counts(tensor) if tensor.dtype.itemsize <= 2 else None
    for values, weights in _pieces(tensor) if patterns is None else [(_all_values(tensor.dtype), patterns)]:
        magnitude = values.abs()
        ordinary = (magnitude > 0) & (magnitude < math.inf)
        zeros += _count(magnitude == 0, weights)
        infinities += _count(magnitude == math.inf, weights)
        nans += _count(magnitude.isnan(), weights)
        total += _count(ordinary, weights)
        found = magnitude[ordinary if weights is None else ordinary & (weights > 0)]
        if found.numel():
            smallest, largest = min(smallest, found.min().item()), max(largest, found.max().item())
        for target in TARGETS:
            counts = _lost_of_all(tensor.dtype, target) @ weights if weights is not None else _lost(values, target)
            lost[target] = lost[target] + counts
    fractions = {target: Lost(*(counts.double() / total).tolist()) for target, counts in lost.items()} if total else {}
    return Inspected(
        name,
        facts.described,
        facts.numel,
        smallest if total else None,
        largest if total else None,
        zeros,
        infinities,
        nans,
        fractions,
        _df11_nbytes(patterns) if tensor.dtype == torch.bfloat16 and patterns is not None else None,
    )


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, None]]:
    for piece in tensor.reshape(-1).split(_PIECE):
        yield piece, None


def _count(mask: torch.Tensor, weights: torch.Tensor | None) -> int:
    return int(mask.sum() if weights is None else weights[mask].sum())


def _lost(values: torch.Tensor, target: str) -> torch.Tensor:
    """Counts what a cast loses: i64[3], of zeros, subnormal numbers and overflows."""
    return _rows(loss_in(values, target)).squeeze(-1)


def _rows(loss: FormatLoss) -> torch.Tensor:
    return torch.stack([loss.zeroed, loss.denormalized, loss.overflowed])


def _pattern_counts(tensor: torch.Tensor) -> torch.Tensor:
    """Counts the bit patterns of numbers of 8 or 16 bits: i64[256] or i64[65536]."""
    bits = 8 * tensor.dtype.itemsize
    integers = tensor.reshape(-1).view(torch.uint8 if bits == 8 else torch.int16)
    counts = torch.zeros(2**bits, dtype=torch.int64)
    for piece in integers.split(_PIECE):
        counts += torch.bincount(piece.int() & (2**bits - 1), minlength=2**bits)
    return counts


@functools.cache
def _all_values(dtype: torch.dtype) -> torch.Tensor:
    """Returns the number that each bit pattern stands for, in float32."""
    bits = 8 * dtype.itemsize
    integers = torch.arange(2**bits, dtype=torch.int32).to(torch.uint8 if bits == 8 else torch.int16)
    return integers.view(dtype).float()


@functools.cache
def _lost_of_all(dtype: torch.dtype, target: str) -> torch.Tensor:
    """Says of each bit pattern what a cast does to it: i64[3, patterns], zeros and ones."""
    losses = torch.func.vmap(lambda value: _rows(loss_in(value, number_format(target).dtype)))(_all_values(dtype))
    return losses.squeeze(-1).T.contiguous()


def _df11_nbytes(patterns: torch.Tensor) -> int:
    """Computes the size of compressed bf16 numbers from the counts of their patterns."""
    exponents = patterns.view(2, 256, 128).sum((0, 2)).numpy()
    numbers = int(exponents.sum())
    if not numbers:
        return 0
    bits = int(exponents @ huffman.code_lengths(exponents).astype(exponents.dtype))
    # What would not get smaller stays as it is.
    return min(layout.sizes(numbers, bits).nbytes, 2 * numbers)
