"""Numbers that all ranks come to share: sums, means, rows behind one another, and whether they have the same."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fmp import reductions, tree
from fmp._compat import collectives
from fmp.distributed.agreement import describe_failures
from fmp.distributed.gathering import Ranks, as_bytes, mean_of, to_sum

T = TypeVar("T")

_CHUNK = 2**22
_TEXT = 2**10  # bytes; of an error's message, as many reach the other ranks


def count(ranks: Ranks) -> int:
    """Returns the number of processes."""
    return ranks.size * ranks.copies


def totals(ranks: Ranks, sums: Sequence[Tensor], means: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Adds up some tensors, and averages others, in one collective.

    All are added in float64. So equal numbers of 32 bits or less have themselves as their mean, bit for bit. Integers
    go as two halves, so that their sums are exact, or overflow as integers do.

    Args:
        ranks: Who takes part.
        sums: What to add up; real or integers.
        means: What to average; real or complex.

    Returns:
        Both, each in the dtype in which it came.
    """
    tensors = [*sums, *means]
    if not tensors:
        return [], []
    flat = [_in_double(each.detach()) for each in tensors]
    (total,) = _summed(ranks, [torch.cat([each.reshape(-1) for each in flat])])
    found: list[Tensor] = []
    for index, part in enumerate(total.split([each.numel() for each in flat])):
        shared = part if index < len(sums) else part / count(ranks)
        found.append(_from_double(shared.reshape(flat[index].shape), tensors[index].dtype))
    return found[: len(sums)], found[len(sums) :]


def means(ranks: Ranks, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Averages tensors in one collective.

    Args:
        ranks: Who takes part.
        tensors: Real or complex ones.
        dtype: The real dtype to add them up in.

    Returns:
        The means, in that dtype.
    """
    real = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in tensors]
    sent = [to_sum(each.detach(), count(ranks), dtype).contiguous() for each in real]
    found = [mean_of(each, count(ranks)) for each in _summed(ranks, sent)]
    return [torch.view_as_complex(new) if old.is_complex() else new for new, old in zip(found, tensors, strict=True)]


def measured(ranks: Ranks, parts: Sequence[Tensor], copies: Sequence[Tensor], device: str) -> tuple[Tensor, Tensor]:
    """Measures tensors of which each rank has a part, and others of which each has all.

    Returns:
        This rank's share, f64[], of the sum of squares, and whether its numbers are finite, bool[].
    """
    total, finite = torch.zeros((), dtype=torch.float64, device=device), []
    for tensors, times in ((parts, ranks.copies), (copies, count(ranks))):
        if any(tensor is not None for tensor in tensors):
            found = reductions.measure(tensors)
            total = total + found.norm.to(torch.float64).square() / times
            finite.append(found.finite)
    return total, torch.stack(finite).all() if finite else total == 0


def concatenated(ranks: Ranks, tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Concatenates each tensor with those of the other ranks, in their order, in one collective.

    Args:
        ranks: Who takes part.
        tensors: Tensors of any dtype, of the same shape on every rank.
        dim: Along which dimension.
    """
    if not tensors:
        return []
    parts = [each.detach().movedim(dim, 0) for each in tensors]
    # Bytes, since tensors of several dtypes cannot travel together.
    found = [as_bytes(each) for each in parts]
    for group, size in ((ranks.group, ranks.size), (ranks.replicas, ranks.copies)):
        if size > 1:
            found = collectives.all_gather(found, size, group)
    wholes = [(count(ranks) * each.shape[0], *each.shape[1:]) for each in parts]
    dtypes = [each.dtype for each in parts]
    return [
        data.view(dtype).view(shape).movedim(0, dim) for data, dtype, shape in zip(found, dtypes, wholes, strict=True)
    ]


def check_alike(ranks: Ranks, values: Mapping[str, Tensor], device: str) -> None:
    """Checks that all ranks have the same values, as far as a checksum tells; it waits for them.

    Args:
        ranks: Who takes part.
        values: Tensors by their paths.
        device: Where to compare.

    Raises:
        ValueError: If they have not; the message names the paths.
    """
    kinds = torch.tensor([zlib.crc32(tree.describe(values).encode())], device=device)
    if not _agree(ranks, kinds)[0]:
        raise ValueError(f"the ranks have different trees of tensors; this one has {tree.describe(values)}")
    if not values:
        return
    same = _agree(ranks, torch.stack([_checksum(leaf).to(device) for leaf in values.values()]))
    if differing := [path for path, is_same in zip(values, same, strict=True) if not is_same]:
        raise ValueError(
            f"{', '.join(differing[:5])}: the ranks have different values; make them from the same seed on every rank, "
            "or load them from the same file"
        )


def together(ranks: Ranks, work: Callable[[], T], device: str) -> T:
    """Does a piece of work, without collectives, on every rank; if it raises on one, all raise, and none is waited for.

    Args:
        ranks: Who takes part.
        work: Called once.
        device: Where to exchange messages.

    Returns:
        What this rank's call returned.

    Raises:
        Exception: What this rank's call raised.
        ValueError: If it raised on other ranks only; the message names them, and what they met.
    """
    result, own = None, None
    try:
        result = work()
    except Exception as error:
        own = error
    text = b"" if own is None else f"{type(own).__name__}: {own}".encode()[:_TEXT]
    sent = torch.tensor([[*text.ljust(_TEXT, b"\0")]], dtype=torch.uint8, device=device)
    (everyone,) = concatenated(ranks, [sent], 0)
    if own is not None:
        raise own
    texts = [bytes(each).rstrip(b"\0").decode(errors="replace") for each in everyone.tolist()]
    if failures := {rank: text for rank, text in enumerate(texts) if text}:
        raise ValueError(describe_failures(failures, len(texts)))
    return result  # pyright: ignore[reportReturnType]  # it did not raise


def _agree(ranks: Ranks, numbers: Tensor) -> list[bool]:
    """Says of each number whether it is the same on every rank."""
    (everyone,) = concatenated(ranks, [numbers.unsqueeze(0)], 0)
    return (everyone == everyone[0]).all(0).tolist()


def _checksum(leaf: Tensor) -> Tensor:
    """Computes i64[] from the bits of a tensor; swapping entries changes it, too."""
    words = as_bytes(leaf.detach()).view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(leaf.dtype.itemsize, torch.int64)
    )
    total = torch.zeros((), dtype=torch.int64, device=leaf.device)
    for chunk in words.split(_CHUNK):
        total = total * 31 + (chunk.to(torch.int64) * torch.arange(1, chunk.numel() + 1, device=leaf.device)).sum()
    return total


def _in_double(tensor: Tensor) -> Tensor:
    """Writes numbers in float64: a complex or a whole number as two of them, in a new last dimension."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).to(torch.float64)
    if tensor.is_floating_point():
        return tensor.to(torch.float64)
    wide = tensor.to(torch.int64)
    return torch.stack((wide >> 32, wide & 0xFFFFFFFF), -1).to(torch.float64)


def _from_double(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Reads sums of what `_in_double` wrote."""
    if dtype.is_complex:
        return torch.view_as_complex(numbers).to(dtype)
    if dtype.is_floating_point:
        return numbers.to(dtype)
    high, low = numbers.to(torch.int64).unbind(-1)
    return ((high << 32) + low).to(dtype)


def _summed(ranks: Ranks, tensors: Sequence[Tensor]) -> list[Tensor]:
    tensors = collectives.all_reduce(tensors, ranks.group)
    return collectives.all_reduce(tensors, ranks.replicas) if ranks.copies > 1 else list(tensors)
