"""What is told of a call of an operator: what it was given, and which memory it reads and makes."""

from typing import Any

import torch
from torch import Tensor

from fmp import tree

Facts = tuple[Any, ...]  # shape, dtype and device of each tensor among the arguments, and the other arguments

_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device)


def facts_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Facts:
    """Says what an operator was given, but for numbers in tensors."""
    facts: list[Any] = []
    for leaf in tree.leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            facts.append((tuple(leaf.shape), leaf.dtype, leaf.device))
        else:
            facts.append(repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__)  # nan is not equal to itself
    return tuple(facts)


def tensors_in(value: Any) -> list[Tensor]:
    """Lists the tensors of a tree."""
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def has_storage(leaf: Any) -> bool:
    """Says whether a leaf is a tensor whose numbers are in one storage; those of a sparse one are in several."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided


def memory_of(tensor: Tensor) -> int:
    """Returns a number that tensors have in common if they share their memory; 0 for one without a storage."""
    return tensor.untyped_storage()._cdata if has_storage(tensor) else 0
