"""Compressing the weights of a tree, and restoring them."""

from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch

from fmp.df11.compressed import CompressedTensor, check_compressible, check_outside, decompress_all
from fmp.df11.frozen_weight import FrozenWeight, stored_form
from fmp.optim.masks import Mask, selector, takes_leaf
from fmp.tree import describe, leaves, paths

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
        select: Which leaves to compress: patterns (`["blocks.*.weight"]`), a function of a leaf's path, or of its path
            and the leaf, or a tree of bools. By default all bf16 tensors. None, Python numbers and strings are passed
            over.
        min_numel: Tensors with fewer elements stay as they are.
        progress: Wraps the list of what is to be done, one item a tensor, for example `tqdm.tqdm`.

    Returns:
        The tree with a `CompressedTensor` in place of each chosen tensor. A tensor that is in the tree twice is
        compressed once, and its node is in the tree twice. `requires_grad` is not kept.

    Raises:
        TypeError: If `select` chooses a tensor that is not bf16; if one that is to be compressed is no plain tensor
            with values; if the tree holds a module; if `min_numel` is no whole number.
        RuntimeError: Inside of a `torch.func` transform or `torch.compile`.
        ValueError: If `select` does not fit the tree; or if there is none, and no tensor is bf16 though some are large
            enough.

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
    if select is None:
        chosen = [_is_bf16(leaf) for leaf in found]
    else:
        chosen = selector(_of_leaves(select, found), "select")(places)
    if select is None and not any(chosen):
        _check_nothing_was_meant(found, min_numel)
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
        The tree with tensors in place of all nodes; a node that is in the tree twice becomes one tensor. On a GPU whose
        kernels run, all nodes are decoded in one launch.

    Raises:
        ValueError: If a node is damaged.

    Example:
        >>> params = {"w": torch.randn(256, 256).bfloat16(), "step": 3}
        >>> restored = decompress(compress(params))
        >>> bool((restored["w"] == params["w"]).all()), restored["step"]
        (True, 3)
    """
    tensors: dict[Any, torch.Tensor] = {}
    if not torch.compiler.is_compiling():
        found = optree.tree_leaves(tree, is_leaf=_is_compressed, none_is_leaf=True)
        nodes = {_parts(node): node for leaf in found if (node := _node(leaf)) is not None}
        tensors |= zip(nodes, decompress_all(list(nodes.values())), strict=True)

    def restored(leaf: Any) -> Any:
        node = _node(leaf)
        if node is None:
            # If it has a gradient, a decoded copy that autograd follows.
            return torch.stack([leaf])[0] if _is_compressed(leaf) and leaf.requires_grad else stored_form(leaf)
        parts = _parts(node)
        if parts not in tensors:
            tensors[parts] = node.decompress()
        return tensors[parts]

    return optree.tree_map(restored, tree, is_leaf=_is_compressed, none_is_leaf=True)


def _check_nothing_was_meant(found: list[Any], min_numel: int) -> None:
    if any(isinstance(leaf, CompressedTensor) for leaf in found):
        return
    for leaf in found:
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point and leaf.numel() >= min_numel:
            raise ValueError(
                f"no tensor of the tree is bf16, so nothing would be compressed; it has {describe(leaf)}, for example: "
                "cast it first, with fmp.cast(tree, torch.bfloat16)"
            )


def _node(leaf: Any) -> CompressedTensor | None:
    """Returns the node that a leaf is or stands for, if restoring it is all there is to do."""
    if isinstance(leaf, FrozenWeight):
        return None if leaf.views or leaf.requires_grad else leaf.node
    return leaf if isinstance(leaf, CompressedTensor) else None


def _parts(node: CompressedTensor) -> Any:
    """Says which node it is. One that went through a map is another object with the same parts."""
    return node.shape, *[id(part) for part in leaves(node)]


def _of_leaves(select: Mask, found: list[Any]) -> Mask:
    """Makes a function of paths and leaves one of paths and places."""
    if callable(select) and takes_leaf(select, "select"):
        chooses: Any = select
        return lambda path, place: chooses(path, found[place])
    return select


def _is_compressed(node: Any) -> bool:
    return isinstance(node, CompressedTensor | FrozenWeight)


def _is_bf16(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16


def _identity(tensor: torch.Tensor) -> Any:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.is_neg()
