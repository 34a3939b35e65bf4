"""The parameters of a model as tensors without data, whatever they are given as."""

import math
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as wraps_tensors

from fmp import tree
from fmp.df11.compressed import CompressedTensor
from fmp.dtypes import is_castable
from fmp.live_memory import storages
from fmp.module import Model

Tree = Any


class ModelSizes(NamedTuple):
    """A model as trees of tensors on the meta device, each once.

    Attributes:
        trained: The parameters that an optimizer may change; None in place of the others.
        frozen: The others, likewise.
        buffers: What else a module stores.
        numbers: How many numbers the parameters are; of compressed ones, how many they stand for.
        is_number: Whether only that was given, and no shapes.
    """

    trained: Tree
    frozen: Tree
    buffers: Tree
    numbers: int
    is_number: bool = False


def model_sizes(model: Any) -> ModelSizes:
    """Looks at the sizes of a model.

    Args:
        model: A number of parameters, an `nn.Module`, an `fmp.Model`, or a tree of tensors, shapes or numbers. Shapes
            and numbers are of float32.

    Returns:
        The sizes. A tensor that is there twice, such as a tied weight, is counted at its first place. Trained is what
        is of a floating-point dtype, in a module what also requires grad.

    Raises:
        TypeError: If the model, or a leaf of it, is nothing of these.
        ValueError: If a number is negative or not whole.

    Example:
        >>> sizes = model_sizes({"w": (3, 4), "b": 4, "ids": torch.arange(2)})
        >>> tree.describe((sizes.trained, sizes.frozen))
        "({'w': f32[3,4], 'b': f32[4], 'ids': None}, {'w': None, 'b': None, 'ids': i64[2]})"
        >>> sizes.numbers
        18
    """
    if isinstance(model, int | float):
        numbers = _whole("the model", model)
        return ModelSizes(_meta((numbers,)), None, {}, numbers, is_number=True)
    buffers: dict[str, Tensor] = {}
    in_module = isinstance(model, nn.Module)
    if isinstance(model, nn.Module):
        model, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    elif isinstance(model, Model):
        model, buffers = model.params, model.buffers

    leaves, spec = optree.tree_flatten(model, is_leaf=_is_leaf, none_is_leaf=True)
    seen: set[Any] = set()
    trained, frozen, numbers = [], [], 0
    for path, leaf in zip(spec.paths(), leaves, strict=True):
        meta, count = _sized(tree.join(path), leaf, seen)
        trains = is_castable(meta) and (leaf.requires_grad if in_module else True)
        trained.append(meta if trains else None)
        frozen.append(None if trains else meta)
        numbers += count
    kept = {name: _sized(name, buffer, seen)[0] for name, buffer in buffers.items()}
    return ModelSizes(optree.tree_unflatten(spec, trained), optree.tree_unflatten(spec, frozen), kept, numbers)


def _sized(path: str, leaf: Any, seen: set[Any]) -> tuple[Tensor | None, int]:
    """Makes a tensor without data of a leaf, and counts its numbers; None and 0 for what was there before."""
    if leaf is None:
        return None, 0
    if isinstance(leaf, CompressedTensor):
        return _meta((sum(part.nbytes for part in tree.leaves(leaf)),), torch.uint8), math.prod(leaf.shape)
    if isinstance(leaf, Tensor):
        place = _place(leaf)
        if place in seen:
            return None, 0
        seen.add(place)
        if wraps_tensors(type(leaf)):
            return _meta((sum(part.nbytes() for part in storages(leaf)),), torch.uint8), leaf.numel()
        return _meta(leaf.shape, leaf.dtype), leaf.numel()
    if isinstance(leaf, tuple | list) or type(leaf) in (int, float):
        sizes = leaf if isinstance(leaf, tuple | list) else (leaf,)
        shape = tuple([_whole(path, size) for size in sizes])
        return _meta(shape), math.prod(shape)
    raise TypeError(
        f"{path or 'the model'}: a plan is for a number of parameters, an nn.Module, an fmp.Model, or a tree of "
        f"tensors and shapes, got a {type(leaf).__name__}"
    )


def _is_leaf(node: Any) -> bool:
    if isinstance(node, CompressedTensor | torch.Size):
        return True
    return type(node) in (tuple, list) and bool(node) and all(type(size) is int for size in node)


def _place(tensor: Tensor) -> Any:
    if wraps_tensors(type(tensor)) or tensor.layout != torch.strided:
        return id(tensor)
    # A tensor without elements has no memory to share.
    address = tensor.untyped_storage()._cdata if tensor.numel() else id(tensor)
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _whole(path: str, size: Any) -> int:
    if isinstance(size, bool) or not math.isfinite(size) or size < 0 or size != int(size):
        raise ValueError(f"{path}: a number of parameters must be whole and not negative, got {size!r}")
    return int(size)


def _meta(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
