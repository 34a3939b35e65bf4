"""Whether tensors lie in the same memory, so that writing to one would change another."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain, compress
from operator import add, attrgetter, gt
from typing import Any

import torch

from fmp import _compat

PLAIN = frozenset([torch.Tensor, torch.nn.Parameter])
"""The types of tensors that are nothing but memory with a shape."""


Intervals = tuple[list[int], list[int]]  # where each begins and ends

NBYTES = attrgetter("nbytes")


def shares_memory(leaves: Iterable[Any], others: Iterable[Any]) -> bool:
    """Says whether two of some leaves, or one of them and a tensor elsewhere, overlap in memory.

    Args:
        leaves: Leaves, each of them looked at once.
        others: Leaves that may share memory among themselves.

    Returns:
        Whether they do; true also where nobody can tell, as under a torch.func transform or for a sparse tensor.

    Example:
        >>> weights = torch.zeros(4)
        >>> shares_memory([weights[:2], weights[2:]], []), shares_memory([weights[:2]], [weights])
        (False, True)
    """
    inside, outside = _tensors(leaves), _tensors(others)
    if _compat.transform_active() or not PLAIN.issuperset(map(type, chain(inside, outside))):
        return True
    if not {torch.strided}.issuperset(map(attrgetter("layout"), chain(inside, outside))):
        return True
    return intervals_overlap(intervals_of(inside), intervals_of(outside))


def intervals_overlap(inside: Intervals, outside: Intervals) -> bool:
    """Says whether two of some intervals, or one of them and one of others, have an address in common."""
    (begins, ends), (outer_begins, outer_ends) = inside, outside
    if _are_disjoint(begins + outer_begins, ends + outer_ends):
        return False
    if not _are_disjoint(begins, ends):
        return True
    begins, ends = sorted(begins), sorted(ends)
    for begin, end in zip(outer_begins, outer_ends, strict=True):
        before = bisect_left(begins, end)  # of those that begin before this one ends, the last reaches furthest
        if before and ends[before - 1] > begin:
            return True
    return False


def intervals_from(begins: list[int], sizes: list[int]) -> Intervals:
    """Says where pieces of memory begin and end, of those that are not empty."""
    if 0 in sizes:
        begins, sizes = [list(compress(numbers, sizes)) for numbers in (begins, sizes)]
    return begins, list(map(add, begins, sizes))


def _tensors(leaves: Iterable[Any]) -> list[torch.Tensor]:
    leaves = list(leaves)
    if PLAIN.issuperset(map(type, leaves)):
        return leaves
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def intervals_of(tensors: list[torch.Tensor]) -> Intervals:
    """Where the memory of each tensor begins and ends; one whose entries do not lie side by side gets its storage."""
    if all(map(torch.Tensor.is_contiguous, tensors)):
        return intervals_from(list(map(torch.Tensor.data_ptr, tensors)), list(map(NBYTES, tensors)))
    storages: Any = [tensor.untyped_storage() for tensor in tensors]
    return intervals_from([storage.data_ptr() for storage in storages], [storage.nbytes() for storage in storages])


def _are_disjoint(begins: list[int], ends: list[int]) -> bool:
    # In order of their begins, disjoint intervals are in order of their ends, too.
    return not any(map(gt, sorted(ends), sorted(begins)[1:]))
