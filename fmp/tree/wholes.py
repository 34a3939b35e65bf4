"""Tensors of which other processes have the rest, which functions of whole tensors must not take for all of it."""

from typing import Any

import optree
import torch

from fmp import _compat, _traced

Tree = Any


def check_whole(values: Tree, what: str) -> None:
    """Refuses a tree that holds parts of tensors of which other processes have the rest.

    Args:
        values: Any tree. A node whose class has the attribute `__is_part__` is such a part.
        what: What would go wrong.

    Raises:
        TypeError: If there is one, naming its path.

    Example:
        >>> check_whole({"w": torch.ones(3)}, "a norm")
    """
    if torch.compiler.is_compiling():
        leaves, spec = _traced.flatten(values, _is_part)
    else:
        leaves, spec = optree.tree_flatten(values, is_leaf=_is_part, none_is_leaf=True)
    for index, leaf in enumerate(leaves):
        if _is_part(leaf):
            path = "/".join([str(entry) for entry in spec.paths()[index]])
            raise TypeError(
                f"{path or 'the tree'} is a {type(leaf).__name__}, of which other ranks have other rows: {what} would "
                "be this rank's own; make DTensors of the tree with fmp.distributed.as_dtensors(tree, mesh), or "
                "compute it of full parameters, inside of a gathered block"
            )


def is_dtensor(leaf: Any) -> bool:
    """Says whether a tensor is a DTensor, perhaps inside of torch.func transforms, without importing that class.

    Example:
        >>> is_dtensor(torch.ones(3))
        False
    """
    if isinstance(leaf, torch.Tensor) and not torch.compiler.is_compiling():
        leaf = _compat.below_transforms(leaf)
    return hasattr(leaf, "placements")


def _is_part(node: Any) -> bool:
    # torch.compile before 2.13 cannot ask the type of None.
    return node is not None and hasattr(type(node), "__is_part__")
