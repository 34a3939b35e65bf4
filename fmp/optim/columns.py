"""Columns: lists with an entry for each leaf of a tree, as kernels that work on many leaves at once take them."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from fmp.optim.fused import counted, stacked

_DTYPE = attrgetter("dtype")


def chosen(column: Sequence[Any], places: list[int]) -> list[Any]:
    """Picks the entries at some places, which rise.

    Example:
        >>> chosen(["a", "b", "c"], [0, 2])
        ['a', 'c']
    """
    return list(column) if len(places) == len(column) else [column[place] for place in places]


def put(entries: Sequence[Any], column: list[Any], places: list[int]) -> None:
    """Puts entries in the place of others, in a column that is overwritten.

    Example:
        >>> column = ["a", "b", "c"]
        >>> put(["A", "C"], column, [0, 2])
        >>> column
        ['A', 'b', 'C']
    """
    if len(places) == len(column):
        column[:] = entries
        return
    for place, entry in zip(places, entries, strict=True):
        column[place] = entry


def advance(
    ages: list[Any], places: list[int], finite: torch.Tensor | None, *, whole: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds 1 to the ages of some leaves, in a column that is overwritten.

    Args:
        ages: i32[] each, or None; the tensors themselves stay as they are.
        places: The places of the leaves that are updated, which rise.
        finite: bool[], false where the update is skipped; None for true.
        whole: All ages, i32[leaves], where they are known to have been taken out of one vector.

    Returns:
        i32[n], the ages from before.

    Example:
        >>> ages = [torch.tensor(3), None, torch.tensor(0)]
        >>> advance(ages, [0, 2], finite=None), ages
        (tensor([3, 0]), [tensor(4), None, tensor(1)])
    """
    old = whole if whole is not None and len(places) == len(ages) else stacked(chosen(ages, places))
    put(counted(old, finite).unbind(), ages, places)
    return old


def copies(tensors: Sequence[Any], memory_format: torch.memory_format = torch.preserve_format) -> list[Any]:
    """Copies tensors; None stays None."""
    return [None if tensor is None else tensor.clone(memory_format=memory_format) for tensor in tensors]


def laid_out_as(
    likes: Sequence[torch.Tensor],
    tensors: list[torch.Tensor],
    *,
    are_contiguous: bool,
    dtype: torch.dtype | None = None,
    copy: bool = False,
) -> list[torch.Tensor]:
    """Lays tensors out in memory in the order in which others lie.

    Args:
        likes: The others, of the same shapes, without gaps.
        tensors: The tensors. One that lies so already, and has the dtype, is returned itself.
        are_contiguous: Whether all of both are known to be contiguous.
        dtype: The dtype of what is returned; None for that of each tensor.
        copy: Whether each must be copied, one that lies so already as well.

    Example:
        >>> laid_out_as([torch.zeros(2, 3).t()], [torch.zeros(3, 2)], are_contiguous=False)[0].stride()
        (1, 3)
    """
    if are_contiguous and (dtype is None or {dtype}.issuperset(map(_DTYPE, tensors))):
        return list(map(torch.Tensor.clone, tensors)) if copy else tensors
    found = []
    for like, tensor in zip(likes, tensors, strict=True):
        wanted = tensor.dtype if dtype is None else dtype
        if tensor.dtype == wanted and tensor.stride() == like.stride():
            found.append(tensor.clone() if copy else tensor)
        else:
            found.append(torch.empty_like(like, dtype=wanted).copy_(tensor))
    return found
