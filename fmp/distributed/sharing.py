"""Numbers that all ranks come to share: sums, means, rows behind one another, and whether they have the same."""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fmp import tree
from fmp._compat import collectives
from fmp.distributed.gathering import Ranks

_CHUNK = 2**22


def count(ranks: Ranks) -> int:
    """Returns the number of processes."""
    return ranks.size * ranks.copies


def totals(ranks: Ranks, sums: Sequence[Tensor], means: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Adds up some tensors, and averages others, in one collective.

    All are added in float64. So equal numbers of 32 bits or less have themselves as their mean, bit for bit.

    Args:
        ranks: Who takes part.
        sums: What to add up.
        means: What to average; real or complex.

    Returns:
        Both, each in the dtype in which it came.
    """
    tensors = [*sums, *means]
    if not tensors:
        return [], []
    numbers = [torch.view_as_real(each) if each.is_complex() else each for each in tensors]
    flat = [each.detach().to(torch.float64).reshape(-1) for each in numbers]
    (total,) = _summed(ranks, [torch.cat(flat)])
    found: list[Tensor] = []
    for index, part in enumerate(total.split([each.numel() for each in flat])):
        shared = (part if index < len(sums) else part / count(ranks)).reshape(numbers[index].shape)
        shared = torch.view_as_complex(shared) if tensors[index].is_complex() else shared
        found.append(shared.to(tensors[index].dtype))
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
    sent = [each.detach().to(dtype).contiguous() for each in real]
    if dtype == torch.float16:  # whose sum overflows where the mean does not
        found = _summed(ranks, [each / count(ranks) for each in sent])
    else:
        found = [each / count(ranks) for each in _summed(ranks, sent)]
    return [torch.view_as_complex(new) if old.is_complex() else new for new, old in zip(found, tensors, strict=True)]


def concatenated(ranks: Ranks, tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Concatenates each tensor with those of the other ranks, in their order, in one collective.

    Args:
        ranks: Who takes part.
        tensors: Tensors of any dtype, of the same shape on every rank.
        dim: Along which dimension.
    """
    if not tensors:
        return []
    found = [each.detach().movedim(dim, 0).contiguous() for each in tensors]
    for group, size in ((ranks.group, ranks.size), (ranks.replicas, ranks.copies)):
        if size > 1:
            # Bytes, since tensors of several dtypes cannot travel together.
            received = collectives.all_gather([each.view(torch.uint8) for each in found], size, group)
            found = [new.view(old.dtype) for new, old in zip(received, found, strict=True)]
    return [each.movedim(0, dim) for each in found]


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


def _agree(ranks: Ranks, numbers: Tensor) -> list[bool]:
    """Says of each number whether it is the same on every rank."""
    (everyone,) = concatenated(ranks, [numbers.unsqueeze(0)], 0)
    return (everyone == everyone[0]).all(0).tolist()


def _checksum(leaf: Tensor) -> Tensor:
    """Computes i64[] from the bits of a tensor; swapping entries changes it, too."""
    flat = leaf.detach().contiguous().reshape(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.dtype.itemsize, torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=leaf.device)
    for chunk in words.split(_CHUNK):
        total = total * 31 + (chunk.to(torch.int64) * torch.arange(1, chunk.numel() + 1, device=leaf.device)).sum()
    return total


def _summed(ranks: Ranks, tensors: Sequence[Tensor]) -> list[Tensor]:
    tensors = collectives.all_reduce(tensors, ranks.group)
    return collectives.all_reduce(tensors, ranks.replicas) if ranks.copies > 1 else list(tensors)
