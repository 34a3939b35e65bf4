"""Comparing trees bit for bit: NaN equals itself, and -0.0 does not equal 0.0."""

from typing import Any

import torch

from fmp import tree


def same_bits(left: Any, right: Any) -> bool:
    """Says whether two trees have the same structure, dtypes, shapes and bits."""
    return tree.structure(left) == tree.structure(right) and not differing(left, right)


def differing(left: Any, right: Any) -> set[str]:
    """Returns the paths of the leaves in which two trees of one structure differ."""
    return {path for (path, a), b in zip(tree.items(left), tree.leaves(right), strict=True) if not _same_leaf(a, b)}


def snapshot(value: Any) -> Any:
    """Copies a tree, for a later look at whether it was changed in place."""
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def storages(value: Any) -> list[int]:
    """Returns the address of the memory of each tensor in a tree; 0-byte tensors have none."""
    return [
        leaf.untyped_storage().data_ptr()
        for leaf in tree.leaves(value)
        if isinstance(leaf, torch.Tensor) and leaf.numel()
    ]


def _same_leaf(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A copy in fresh memory: of one element, any stride counts as contiguous, but not for a view as bytes.
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())
    return plain.reshape(-1).view(torch.uint8)
