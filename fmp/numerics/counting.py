"""What the measures of a tree share: the leaves that they look at, and fractions of counts."""

from typing import Any

import torch

from fmp import tree
from fmp.dtypes import full_precision, is_castable
from fmp.tree.wholes import check_whole

Tree = Any


def floating(values: Tree, what: str) -> tuple[tuple[str, ...], list[torch.Tensor]]:
    """Returns paths and values of the real floating-point leaves of a tree, detached, in float32 or wider.

    Args:
        values: The tree.
        what: What is made of them, for a message.

    Raises:
        TypeError: If the tree holds a `LocalShard`.
    """
    check_whole(values, what)
    found = [(path, leaf) for path, leaf in tree.items(values) if is_castable(leaf)]
    return tuple(path for path, _ in found), [leaf.detach().to(full_precision(leaf.dtype)) for _, leaf in found]


def stacked(rows: list[torch.Tensor], shape: tuple[int, ...], values: Tree) -> torch.Tensor:
    """Stacks one row of counts, i64 of some shape, a leaf; none of them make an empty tensor where `values` are."""
    return torch.stack(rows) if rows else torch.zeros((0, *shape), dtype=torch.int64, device=device(values))


def device(values: Tree) -> torch.device | None:
    """Returns where the first tensor of a tree is."""
    return next((leaf.device for leaf in tree.leaves(values) if isinstance(leaf, torch.Tensor)), None)


def fraction(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Divides counts, i64; the fraction of nothing is zero, f32."""
    return part.float() / whole.clamp(min=1).float()
