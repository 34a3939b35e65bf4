"""What a function given to remat may return: tensors, constants, and containers of these that can be taken apart."""

import enum
import functools
import gc
import inspect
import types
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fmp import _compat, tree
from fmp.errors import RematError

_CONSTANTS = (
    *(str, int, float, complex, bytes, type(None), type, range, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator, types.ModuleType),
)
_UNFINISHED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
# So much is searched; what holds more is taken to hold a tensor.
_MOST = 10_000


def check_constants(leaves: Sequence[Any], spec: Any) -> None:
    """Refuses a leaf of a result that is no tensor but may hold some, which would get no gradient.

    Args:
        leaves: The leaves.
        spec: The structure of the result.

    Raises:
        RematError: If one does, naming it.
    """
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, (Tensor, *_CONSTANTS)):
            continue
        if isinstance(leaf, _UNFINISHED) or _may_hold_tensors(leaf):
            path = "/".join(map(str, spec.paths()[place]))
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")
            raise RematError(
                f"remat: the result{f' {path!r}' if path else ''} is a {kind}, which may hold tensors and cannot be "
                "taken apart, so they would get no gradient; return a dict, list, tuple or NamedTuple of the tensors, "
                "or make the class a pytree with fmp.tree.dataclass or optree.register_pytree_node"
            )


def _may_hold_tensors(value: Any) -> bool:
    pending, met = [value], {}
    while pending:
        each = pending.pop()
        if id(each) in met or isinstance(each, _CONSTANTS):
            continue
        if isinstance(each, Tensor) or len(met) > _MOST:
            return True
        met[id(each)] = each
        pending.extend(_held(each))
    return False


def _held(value: Any) -> Iterable[Any]:
    """Lists what a value refers to, its class and the global variables of a function apart."""
    if isinstance(value, types.FunctionType):
        return (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
    if type(value).__module__ == "numpy" and getattr(value, "dtype", None) is not None:
        return value.ravel().tolist() if value.dtype.hasobject else ()
    return gc.get_referents(value)


def unchangeable(result: Any, operands: Sequence[Tensor]) -> Any:
    """Lets a change in place raise where a tensor of a result shares its memory with an operand, or with another.

    Autograd does not know that it does: the change would be missing in the gradient of the other.
    """
    leaves, spec = tree.flatten(result)
    given = {id(operand) for operand in operands}
    made = {id(leaf): leaf for leaf in leaves if _has_memory(leaf) and id(leaf) not in given}
    places = Counter(map(_memory, made.values()))
    places.update(map(_memory, {id(operand): operand for operand in operands if _has_memory(operand)}.values()))
    # torch refuses to change one of several views that an operator has returned.
    views = {key: leaf.unsqueeze(0).unbind(0)[0] for key, leaf in made.items() if places[_memory(leaf)] > 1}
    return tree.unflatten(spec, [views.get(id(leaf), leaf) for leaf in leaves]) if views else result


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"


def _memory(tensor: Tensor) -> int:
    return _compat.below_transforms(tensor).untyped_storage()._cdata


def is_unfinished(fn: Any) -> bool:
    """Says whether calling a function does not run it: generator functions and those defined with `async`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    flags = getattr(getattr(fn, "__code__", None), "co_flags", 0)
    return bool(flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))
