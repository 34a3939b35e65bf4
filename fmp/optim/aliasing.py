"""Whether tensors lie in the same memory, so that writing to one would change another."""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fmp import _compat

PLAIN = frozenset([torch.Tensor, torch.nn.Parameter])
"""The types of tensors that are nothing but memory with a shape."""

NBYTES = attrgetter("nbytes")


class Intervals(NamedTuple):
    """Where pieces of memory begin and end, u64[n] each."""

    begins: npt.NDArray[np.uint64]
    ends: npt.NDArray[np.uint64]


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


def intervals_overlap(inside: Intervals, *others: Intervals) -> bool:
    """Says whether two of some intervals, or one of them and one of others, have an address in common.

    Example:
        >>> weights, moments = intervals_from([0, 8], [8, 8]), intervals_from([16, 20], [8, 8])
        >>> intervals_overlap(weights, moments), intervals_overlap(moments, weights)
        (False, True)
    """
    if _are_disjoint(_together(inside, *others)):
        return False
    if not _are_disjoint(inside):
        return True
    begins, ends = map(np.sort, inside)
    outside = _together(*others)
    before = np.searchsorted(begins, outside.ends)  # of those that begin before one ends, the last reaches furthest
    furthest = np.concatenate([np.zeros(1, np.uint64), ends])[before]
    return bool((furthest > outside.begins).any())


def intervals_from(begins: list[int], sizes: list[int]) -> Intervals:
    """Says where pieces of memory begin and end, of those that are not empty."""
    starts, bytes_each = np.array(begins, np.uint64), np.array(sizes, np.uint64)
    if 0 in sizes:
        starts, bytes_each = starts[bytes_each > 0], bytes_each[bytes_each > 0]
    return Intervals(starts, starts + bytes_each)


def intervals_of(tensors: list[torch.Tensor]) -> Intervals:
    """Where the memory of each tensor begins and ends; one whose entries do not lie side by side gets its storage."""
    if all(map(torch.Tensor.is_contiguous, tensors)):
        return intervals_from(list(map(torch.Tensor.data_ptr, tensors)), list(map(NBYTES, tensors)))
    storages: Any = [tensor.untyped_storage() for tensor in tensors]
    return intervals_from([storage.data_ptr() for storage in storages], [storage.nbytes() for storage in storages])


def _tensors(leaves: Iterable[Any]) -> list[torch.Tensor]:
    leaves = list(leaves)
    if PLAIN.issuperset(map(type, leaves)):
        return leaves
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _together(*intervals: Intervals) -> Intervals:
    return Intervals(*map(np.concatenate, zip(*intervals, strict=True)))


def _are_disjoint(intervals: Intervals) -> bool:
    # In order of their begins, disjoint intervals are in order of their ends, too.
    begins, ends = map(np.sort, intervals)
    return not (ends[:-1] > begins[1:]).any()
