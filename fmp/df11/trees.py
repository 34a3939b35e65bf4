"""Compressing the weights of a tree, and restoring them."""

from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch

from fmp.df11.compressed import CompressedTensor, check_compressible, check_outside
from fmp.df11.frozen_weight import FrozenWeight, stored_form
from fmp.optim.masks import Mask, selector
from fmp.tree import leaves, paths

Tree = Any


def compress(
    tree: Tree,
    *,
    select: Mask | None = None,
    min_numel: int = 4096,
    progress: Callable[[list[int]], Iterable[int]] | None = None,
) -> Tree:
    """Compresses the bf16 tensors of a tree without loss, to about 10.6 bits a weight.

    Args:
        tree: Any tree. Nodes that are compressed already stay as they are.
        select: Which leaves to compress: patterns (`["blocks.*.weight"]`), a function of a leaf's path, or a tree of
            bools. By default all bf16 tensors. None, Python numbers and strings are passed over.
        min_numel: Tensors with fewer elements stay as they are.
        progress: Wraps the list of what is to be done, one item a tensor, for example `tqdm.tqdm`.

    Returns:
        The tree with a `CompressedTensor` in place of each chosen tensor. A tensor that is in the tree twice is
        compressed once, and its node is in the tree twice. `requires_grad` is not kept.

    Raises:
        TypeError: If `select` chooses a tensor that is not bf16; if one that is to be compressed is no plain tensor
            with values; if the tree holds a module; if `min_numel` is no whole number.
        RuntimeError: Inside of a `torch.func` transform or `torch.compile`.
        ValueError: If `select` does not fit the tree.

    Example:
        >>> params = {"weight": torch.full((64, 64), 0.5).bfloat16(), "bias": torch.zeros(64).bfloat16()}
        >>> compressed = compress(params)
        >>> compressed["weight"], fmp.tree.describe(compressed)
        (df11[64,64], "{'weight': df11[64,64], 'bias': bf16[64]}")
        >>> torch.equal(decompress(compressed)["weight"], params["weight"])
        True
    """
    check_outside("compress")
    if not isinstance(min_numel, int):
        raise TypeError(f"min_numel must be a whole number, got {min_numel!r}")
    found, spec = optree.tree_flatten(tree, is_leaf=_is_compressed, none_is_leaf=True)
    found = [stored_form(leaf) for leaf in found]
    places = spec.unflatten(range(len(found)))
    chosen = [_is_bf16(leaf) for leaf in found] if select is None else selector(select, "select")(places)
    work = []
    for index, (path, leaf) in enumerate(zip(paths(places), found, strict=True)):
        if isinstance(leaf, torch.nn.Module):
            raise TypeError(f"{path or 'the tree'} is a {type(leaf).__name__}, no tensor; compress its state_dict()")
        if chosen[index] and isinstance(leaf, torch.Tensor) and (leaf.numel() >= min_numel or not _is_bf16(leaf)):
            check_compressible(leaf, path or "the tree")
            work.append(index)

    nodes: dict[Any, CompressedTensor] = {}
    for index in work if progress is None else progress(work):
        identity = _identity(found[index])
        if identity not in nodes:
            nodes[identity] = CompressedTensor.compress(found[index])
    for index in work:
        found[index] = nodes[_identity(found[index])]
    return spec.unflatten(found)


def decompress(tree: Tree) -> Tree:
    """Restores the tensors of a tree that `compress` returned, bit for bit.

    Args:
        tree: Any tree. Leaves that are not compressed stay as they are.

    Returns:
        The tree with tensors in place of all nodes; a node that is in the tree twice becomes one tensor.

    Raises:
        ValueError: If a node is damaged.
    """
    tensors: dict[Any, torch.Tensor] = {}

    def restored(node: Any) -> Any:
        if isinstance(node, FrozenWeight) and node.requires_grad:
            return torch.stack([node])[0]  # a decoded copy that autograd follows
        node = stored_form(node)
        if not isinstance(node, CompressedTensor):
            return node
        # A node that went through a map is another object with the same parts.
        identity = (node.shape, *[id(part) for part in leaves(node)])
        if identity not in tensors:
            tensors[identity] = node.decompress()
        return tensors[identity]

    return optree.tree_map(restored, tree, is_leaf=_is_compressed, none_is_leaf=True)


def _is_compressed(node: Any) -> bool:
    return isinstance(node, CompressedTensor | FrozenWeight)


def _is_bf16(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16


def _identity(tensor: torch.Tensor) -> Any:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.is_neg()
