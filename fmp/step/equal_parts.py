"""Whether processes pass parts of a batch that are equal in size, and return auxiliary output of equal shapes.

What each has is a number that it knows without a look at its device. The numbers travel with those that are added up
anyway, as themselves and squared: n of them are equal if, and only if, n times the sum of squares is the square of the
sum. To look at the sums is to wait for the device, so that is done on the CPU only, and not in a compiled step.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmp import tree

Tree = Any

_BELOW = 2**20  # so that sums of squares are exact in float64, over up to 2**13 processes


class Number(NamedTuple):
    """What should be the same on every process.

    Attributes:
        value: The number; None where a process has none, which is no difference.
        error: What to say if it differs.
    """

    value: int | None
    error: str


def of_rows(batch: Tree) -> Number:
    """Numbers the rows of a batch: the first dimension of its tensors, or a checksum if they do not share one.

    Example:
        >>> of_rows((torch.zeros(5, 2), torch.zeros(5))).value
        5
        >>> of_rows(torch.tensor(1.0)).value is None
        True
    """
    tensors = {path: leaf for path, leaf in tree.items(batch) if isinstance(leaf, Tensor) and leaf.ndim}
    sizes = [leaf.shape[0] for leaf in tensors.values()]
    is_shared = len(set(sizes)) <= 1
    shown = str(sizes[0] if sizes else None)
    if not is_shared:
        shown = ", ".join([f"{size} of {path}" for path, size in zip(tensors, sizes, strict=True)])
    value = zlib.crc32(shown.encode()) if not is_shared else sizes[0] if sizes else None
    return Number(
        value,
        f"batch: the ranks have different numbers of rows, this one {shown}, so the mean of their losses is not that "
        "of all rows; pad or leave out rows, or weight the ranks' parts by microbatch_weight, for example by their "
        "numbers of rows (not with zero=3)",
    )


def of_shape(where: str, leaf: Tensor) -> Number:
    """Numbers the shape and dtype of an auxiliary output, as far as a checksum tells."""
    shown = tree.describe(leaf)
    return Number(
        zlib.crc32(shown.encode()),
        f"{where} has different shapes or dtypes on the ranks, this one's is {shown}; return tensors of the same shape "
        "on every rank, padded where they must be, or numbers without dimensions",
    )


def can_be_looked_at(like: Tensor) -> bool:
    """Says whether there is time to look at sums: on the device of a tensor, and whether this is no trace."""
    return not torch.compiler.is_compiling() and like.device.type == "cpu" and type(like) is Tensor


def sent(numbers: Sequence[Number]) -> list[Tensor]:
    """Makes what is to be added up over all processes: f64[n,4], or nothing.

    Args:
        numbers: The same ones, in the same order, on every process.
    """
    if not numbers:
        return []
    values = [None if number.value is None else number.value % _BELOW for number in numbers]
    rows = [(1, 0, 0, 0) if value is None else (1, 1, value, value * value) for value in values]
    return [torch.tensor(rows, dtype=torch.float64)]


def check(numbers: Sequence[Number], sums: Sequence[Tensor]) -> None:
    """Raises on every process if some differ.

    Args:
        numbers: Those that were sent.
        sums: What `sent` made, added up.

    Raises:
        ValueError: If a number differs between processes.
    """
    for each in sums:
        for number, row in zip(numbers, each.tolist(), strict=True):
            processes, known, total, squares = [int(value) for value in row]
            if known == processes and processes * squares != total**2:
                raise ValueError(number.error)
