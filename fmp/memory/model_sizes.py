"""The parameters of a model as tensors without data, whatever they are given as."""

import math
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fmp import tree
from fmp._compat import wraps_tensors
from fmp.df11.compressed import CompressedTensor
from fmp.df11.frozen_weight import FrozenWeight
from fmp.distributed_modules import check_no_wrapper
from fmp.dtypes import is_castable
from fmp.live_memory import storages
from fmp.memory.checks import is_number
from fmp.module import Model

Tree = Any

# More bytes than 2^63 torch does not take for one tensor, and a number may be 8 of them.
_LIMIT = 2**60


class ModelSizes(NamedTuple):
    """A model as trees of tensors on the meta device.

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


def model_sizes(model: Any, *, trains: bool = True) -> ModelSizes:
    """Looks at the sizes of a model.

    Args:
        model: A number of parameters, an `nn.Module`, an `fmp.Model`, or a tree of tensors, shapes or numbers. Shapes
            and numbers are of float32. In a tree without tensors, `()` is the shape of a single number.
        trains: Whether the model is trained. A train step copies each leaf of a tree, also one that is there twice;
            if nothing is trained, such a leaf counts at its first place.

    Returns:
        The sizes. Trained is what is of a floating-point dtype, in a module what also requires grad. A weight that a
        module ties is one parameter of it.

    Raises:
        TypeError: If the model, or a leaf of it, is nothing of these, or a tensor that a step cannot train; or it is a
            module from DDP or FSDP.
        ValueError: If a number is negative, not whole, or 2^60 or more, or a parameter has no shape yet.

    Example:
        >>> sizes = model_sizes({"w": (3, 4), "b": 4, "ids": torch.arange(2)})
        >>> tree.describe((sizes.trained, sizes.frozen))
        "({'w': f32[3,4], 'b': f32[4], 'ids': None}, {'w': None, 'b': None, 'ids': i64[2]})"
        >>> sizes.numbers
        18
    """
    if is_number(model) or isinstance(model, bool):
        numbers = _whole("the model", model)
        vector = _meta("the model", (numbers,))
        return ModelSizes(vector if trains else None, None if trains else vector, {}, numbers, is_number=True)
    buffers: dict[str, Tensor] = {}
    in_module = isinstance(model, nn.Module)
    if isinstance(model, nn.Module):
        check_no_wrapper(model, "model")
        model, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    elif isinstance(model, Model):
        model, buffers = model.params, model.buffers

    leaves, spec = _flattened(model)
    seen: set[Any] | None = None if trains else set()
    trained, frozen, numbers = [], [], 0
    for path, leaf in zip(spec.paths(), leaves, strict=True):
        may_train = trains and (leaf.requires_grad if in_module else True)
        meta, count = _sized(tree.join(path), leaf, seen, may_train)
        is_trained = may_train and is_castable(meta)
        trained.append(meta if is_trained else None)
        frozen.append(None if is_trained else meta)
        numbers += count
    kept = {name: _sized(name, buffer, seen, False)[0] for name, buffer in buffers.items()}
    return ModelSizes(optree.tree_unflatten(spec, trained), optree.tree_unflatten(spec, frozen), kept, numbers)


def with_tensors(model: Any) -> Any:
    """Returns a tree with float32 tensors on the meta device in place of shapes and numbers, for a run on fake tensors.

    Example:
        >>> tree.describe(with_tensors({"w": (3, 4), "ids": torch.arange(2)}))
        "{'w': f32[3,4], 'ids': i64[2]}"
    """
    leaves, spec = _flattened(model)
    tensors = [
        leaf if leaf is None or isinstance(leaf, Tensor | CompressedTensor) else _sized(tree.join(path), leaf, None)[0]
        for path, leaf in zip(spec.paths(), leaves, strict=True)
    ]
    return optree.tree_unflatten(spec, tensors)


def _flattened(model: Any) -> tuple[list[Any], Any]:
    """Takes a tree apart into tensors, shapes and numbers."""
    holds_tensors = any(isinstance(leaf, Tensor) for leaf in optree.tree_leaves(model))

    def is_leaf(node: Any) -> bool:
        if isinstance(node, CompressedTensor | torch.Size):
            return True
        if type(node) not in (tuple, list) or not all(map(is_number, node)):
            return False
        return bool(node) or not (holds_tensors or node is model)

    return optree.tree_flatten(model, is_leaf=is_leaf, none_is_leaf=True)


def _sized(path: str, leaf: Any, seen: set[Any] | None, may_train: bool = True) -> tuple[Tensor | None, int]:
    """Makes a tensor without data of a leaf, and counts its numbers; None and 0 for what was seen before."""
    if leaf is None:
        return None, 0
    if isinstance(leaf, CompressedTensor):
        return _bytes(path, sum(part.nbytes for part in tree.leaves(leaf))), math.prod(leaf.shape)
    if isinstance(leaf, Tensor):
        if is_lazy(leaf):
            raise ValueError(f"{path or 'the model'}: this parameter has no shape yet; call the module once before")
        if seen is not None:
            place = _place(leaf)
            if place in seen:
                return None, 0
            seen.add(place)
        if _is_plain(leaf):
            return _meta(path, leaf.shape, leaf.dtype), leaf.numel()
        if may_train and is_castable(leaf) and not isinstance(leaf, FrozenWeight):
            kind = type(leaf).__name__ if wraps_tensors(type(leaf)) else str(leaf.layout)
            raise TypeError(
                f"{path or 'the model'}: a plan counts what is trained as plain tensors, got {tree.describe(leaf)}, a "
                f"{kind}; give its shape, {tuple(leaf.shape)}, in its place, or that of this device's part"
            )
        return _bytes(path, sum(part.nbytes() for part in storages(leaf))), leaf.numel()
    if isinstance(leaf, tuple | list) or is_number(leaf):
        sizes = leaf if isinstance(leaf, tuple | list) else (leaf,)
        shape = tuple([_whole(path, size) for size in sizes])
        return _meta(path, shape), math.prod(shape)
    raise TypeError(
        f"{path or 'the model'}: a plan is for a number of parameters, an nn.Module, an fmp.Model, or a tree of "
        f"tensors and shapes, got a {type(leaf).__name__}"
    )


def _is_plain(tensor: Tensor) -> bool:
    return not wraps_tensors(type(tensor)) and tensor.layout == torch.strided and not tensor.is_nested


def _place(tensor: Tensor) -> Any:
    # A tensor without elements has no memory to share.
    if not _is_plain(tensor) or not tensor.numel():
        return id(tensor)
    address = tensor.untyped_storage()._cdata
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _whole(path: str, size: Any) -> int:
    try:
        whole = int(size)
    except (ValueError, OverflowError):  # NaN and infinity
        whole = -1
    if isinstance(size, bool) or size != whole or whole < 0:
        raise ValueError(f"{path or 'the model'}: a number of parameters must be whole and not negative, got {size!r}")
    return whole


def _meta(path: str, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    if math.prod(shape) >= _LIMIT or any(size >= _LIMIT for size in shape):
        raise ValueError(
            f"{path or 'the model'}: a tensor has fewer than 2^60, about 1.15e18, numbers; got the shape {tuple(shape)}"
        )
    return torch.empty(shape, dtype=dtype, device="meta")


def _bytes(path: str, nbytes: int) -> Tensor:
    return _meta(path, (nbytes,), torch.uint8)
