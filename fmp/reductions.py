"""Whether a tree is finite, and its norm: by a kernel where there is one, by `fmp.tree` elsewhere.

A kernel reads a tree once for both, in one launch for each dtype. Its norm equals that of `fmp.tree.global_norm` up to
the order in which squares are added.
"""

from typing import Any

import torch

from fmp import tree
from fmp.kernels import multi_tensor
from fmp.kernels.eligible import usable
from fmp.kernels.multi_tensor import Measured
from fmp.tree.wholes import check_whole

Tree = Any


def measure(values: Tree) -> Measured:
    """Computes the norm of a tree and whether it is finite.

    Args:
        values: Any tree; only floating-point and complex tensors count.

    Returns:
        The norm, f32[] or f64[], and the flag, bool[]; as `global_norm` and `all_finite`.

    Example:
        >>> measure({"a": torch.tensor([3.0]), "b": torch.tensor([4.0], dtype=torch.float16)})
        Measured(norm=tensor(5.), finite=tensor(True))
    """
    return _by_kernel(values) or Measured(tree.global_norm(values), tree.all_finite(values))


def all_finite(values: Tree) -> torch.Tensor:
    """Says whether every number in a tree is finite.

    Args:
        values: Any tree; only floating-point and complex tensors are looked at.

    Returns:
        bool[], true for a tree without such tensors. It stays on the device.

    Raises:
        TypeError: If the tree holds a `LocalShard`, of which other ranks have other rows.

    Example:
        >>> all_finite({"w": torch.tensor([1.0, float("inf")])}), all_finite({})
        (tensor(False), tensor(True))
    """
    check_whole(values, "the flag")
    found = _by_kernel(values)
    return tree.all_finite(values) if found is None else found.finite


def global_norm(values: Tree) -> torch.Tensor:
    """Computes the Euclidean norm over all tensors of a tree, as if they were one vector.

    Args:
        values: Any tree; only floating-point and complex tensors count.

    Returns:
        f32[], or f64[] if any tensor is float64 or complex128; 0 for a tree without such tensors. See
        `fmp.tree.global_norm`.

    Raises:
        TypeError: If the tree holds a `LocalShard`, of which other ranks have other rows.

    Example:
        >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0], dtype=torch.float16)})
        tensor(5.)
    """
    check_whole(values, "the norm")
    found = _by_kernel(values)
    return tree.global_norm(values) if found is None else found.norm


def _by_kernel(values: Tree) -> Measured | None:
    if torch.compiler.is_compiling():
        return None
    tensors = [leaf for leaf in tree.leaves(values) if isinstance(leaf, torch.Tensor)]
    numbers = [leaf for leaf in tensors if leaf.dtype.is_floating_point or leaf.dtype.is_complex]
    return multi_tensor.measure(numbers) if usable("scale", numbers) else None
