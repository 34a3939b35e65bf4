"""Collectives as functions of tensors: the operators below torch's own functional ones, whose names change.

Loaded by `fmp.distributed` only. Each takes a list of tensors and is one collective for all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as _functional  # tells torch the shapes of what the operators return
from torch import Tensor

_ops: Any = torch.ops._c10d_functional
NAMESPACE = "_c10d_functional"

assert _functional is not None


def all_gather(tensors: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
    """Stacks each tensor with those of the other ranks, along the first dimension.

    Args:
        tensors: Contiguous, with the same shapes on every rank.
        size: How many ranks there are.
        group: The name of their process group.
    """
    return _arrived(_ops.all_gather_into_tensor_coalesced(list(tensors), size, group))


def reduce_scatter(tensors: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
    """Adds up each tensor over the ranks, and returns this rank's part of the first dimension.

    Args:
        tensors: Contiguous, with the same shapes on every rank; the first dimension is a multiple of `size`.
        size: How many ranks there are.
        group: The name of their process group.
    """
    return _arrived(_ops.reduce_scatter_tensor_coalesced(list(tensors), "sum", size, group))


def all_reduce(tensors: Sequence[Tensor], group: str) -> list[Tensor]:
    """Adds up each tensor over the ranks.

    Args:
        tensors: Contiguous, with the same shapes on every rank.
        group: The name of their process group.
    """
    return _arrived(_ops.all_reduce_coalesced(list(tensors), "sum", group))


def _arrived(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [_ops.wait_tensor(tensor) for tensor in tensors]
