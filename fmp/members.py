"""Memory of its own for each member of a `vmap`, for what all members begin with alike."""

from typing import Any

import torch

from fmp import _compat, tree

Tree = Any


def apart(values: Tree, *given: Tree) -> Tree:
    """Lets every leaf be mapped by each `vmap` that maps over anything given.

    What a mapped function returns for all members alike has the stride 0 outside, one number for all of them. A step
    returns a number for each, and a compiled one would compile again for these other strides.

    Args:
        values: Any tree.
        *given: Trees, of which some leaves may be mapped.

    Returns:
        The tree, with the same bits; leaves that are mapped already as they are.

    Example:
        >>> torch.func.vmap(lambda x: torch.zeros(()))(torch.ones(3)).stride()
        (0,)
        >>> torch.func.vmap(lambda x: apart(torch.zeros(()), x))(torch.ones(3)).stride()
        (1,)
    """
    if not _compat.transform_active():
        return values
    tensors = [leaf for leaf in tree.leaves(given) if isinstance(leaf, torch.Tensor)]
    if not tensors or not _may_lack([], tensors):
        return values
    device = tensors[0].device
    mapped = torch.stack([leaf.new_zeros((), dtype=torch.bool, device=device) for leaf in tensors]).any()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not _may_lack([leaf], tensors):
            return leaf
        return torch.where(mapped.to(leaf.device), leaf, leaf)

    return tree.map(own, values)


def _may_lack(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Says whether a `vmap` that maps over some of the others maps over none of these; torch.compile cannot tell."""
    if torch.compiler.is_compiling():
        return True
    return not _compat.mapped_sizes(others).keys() <= _compat.mapped_sizes(some).keys()
