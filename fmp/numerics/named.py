"""What a function reaches, by name: in its arguments, in its module, in what it closes over, and in what it returns."""

import dataclasses
import dis
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fmp import _compat
from fmp.df11 import CompressedTensor
from fmp.numerics.history import History
from fmp.numerics.record import Recorded
from fmp.numerics.watch import WatchState
from fmp.rematerialization.capture import is_library
from fmp.rematerialization.snapshot import is_full
from fmp.step import TrainStep

_PLAIN = (str, bytes, int, float, complex, type, types.ModuleType, torch.dtype, torch.device, Tensor, nn.Module)


@dataclass(frozen=True, eq=False)
class Named:
    """A tensor with its name.

    Attributes:
        path: Such as `params/w`; that of a module's is dotted.
        tensor: The tensor.
        is_measurement: Whether it belongs to what measures a run, where NaN stands for what is not known.
    """

    path: str
    tensor: Tensor
    is_measurement: bool = False


def named_tensors(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Named]:
    """Yields each tensor that a function reaches, once, its arguments first.

    Args:
        fn: The function.
        args: Its positional arguments, named as in its signature.
        kwargs: Its keyword arguments.
    """
    seen: set[int] = set()
    for path, leaf in _reached(fn, args, kwargs):
        for found in _tensors(path, leaf):
            if id(found.tensor) not in seen and not is_lazy(found.tensor):
                seen.add(id(found.tensor))
                yield found


def random_generators(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Generator]:
    """Lists the random generators that a function reaches, besides those that torch has itself."""
    leaves = [leaf for _, leaf in _reached(fn, args, kwargs) if isinstance(leaf, torch.Generator)]
    return list({id(leaf): leaf for leaf in leaves}.values())


def leaves_of(value: Any, path: str = "", *, is_leaf: Collection[type] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the path and the value of each leaf of anything: a tree, a mapping, a dataclass, a list.

    Unlike `fmp.tree.items`, it looks into subclasses of these and into dataclasses that no tree knows, and comes to an
    end where a container holds itself.

    Args:
        value: The value.
        path: Its own path.
        is_leaf: Classes that are not looked into.
    """
    yield from _walked(value, path, is_leaf, {}, once=False)


def _walked(
    value: Any, path: str, is_leaf: Collection[type], around: dict[int, Any], *, once: bool
) -> Iterator[tuple[str, Any]]:
    """Yields leaves; `around` holds the containers that are looked into, or all that ever were if once is enough."""
    children = None if type(value) in is_leaf else _children(value)
    if children is None:
        yield path, value
    elif id(value) not in around:
        around[id(value)] = value
        for name, child in children:
            yield from _walked(child, f"{path}/{name}" if path else str(name), is_leaf, around, once=once)
        if not once:
            del around[id(value)]


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the parts of a container with their names; None for a leaf."""
    if value is None or isinstance(value, _PLAIN):
        return None
    if not optree.tree_is_leaf(value, none_is_leaf=True):
        children, _, entries, *_ = optree.tree_flatten_one_level(value, none_is_leaf=True)
        return list(zip(entries, children, strict=True))
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return None


def arguments(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name."""
    called: Any = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        return dict(inspect.signature(called).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # what is written in C may have no signature
        return {"args": args, **kwargs}


def _reached(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of the arguments, then those around the function and the functions that it reaches."""
    seen: dict[int, Any] = {}
    pending: list[tuple[str, Any]] = [*arguments(fn, args, kwargs).items(), *_around(fn)]
    while pending:
        name, value = pending.pop(0)
        for path, leaf in _walked(value, name, _KINDS, seen, once=True):
            if not isinstance(leaf, _CALLED):
                yield path, leaf
            elif id(leaf) not in seen:
                seen[id(leaf)] = leaf
                pending += [("/".join(filter(None, (path, inner))), part) for inner, part in _around(leaf)]


_CALLED = (types.FunctionType, types.MethodType, functools.partial, TrainStep, Recorded)
_KINDS = frozenset((WatchState, History, CompressedTensor, TrainStep, Recorded))


def _around(fn: Any) -> list[tuple[str, Any]]:
    """Lists what a function reads besides its arguments: the variables around it, and what it is bound to."""
    if isinstance(fn, TrainStep):
        return [pair for loss in fn.config.losses.values() for pair in _around(loss.fn)]
    if isinstance(fn, Recorded):
        return [("", fn.step)]
    if isinstance(fn, functools.partial):
        return [("", fn.func), ("args", fn.args), *fn.keywords.items()]
    if _compat.is_compiled(fn) and not isinstance(fn, nn.Module):
        fn = _compat.original(fn)
    fn = inspect.unwrap(fn)
    found: list[tuple[str, Any]] = []
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        found.append(("", owner))
    elif owner is not None:
        found += [(f"self/{name}", value) for name, value in getattr(owner, "__dict__", {}).items()]
    function = getattr(fn, "__func__", fn)
    if not isinstance(function, types.FunctionType):
        return found
    code, scope = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        found += [(name, cell.cell_contents)] if is_full(cell) else []
    if not is_library(scope):
        found += [(name, scope[name]) for name in _globals_read(code) if name in scope]
    found += [(name, value) for name, value in (function.__kwdefaults__ or {}).items()]
    return [*found, *[(f"default {index}", value) for index, value in enumerate(function.__defaults__ or ())]]


@functools.lru_cache(1024)
def _globals_read(code: types.CodeType) -> tuple[str, ...]:
    """Lists the global variables that some code reads, also in the functions inside of it."""
    names = [str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _globals_read(part)]
    return tuple(dict.fromkeys([*names, *inner]))


def _tensors(path: str, leaf: Any) -> Iterator[Named]:
    if isinstance(leaf, nn.Module):
        for dotted, tensor in (*leaf.named_parameters(), *leaf.named_buffers()):
            yield Named(f"{path}/{dotted}".lstrip("/"), tensor)
    elif isinstance(leaf, Tensor):
        yield Named(path, leaf)
    elif isinstance(leaf, WatchState | History):
        for inner, tensor in leaves_of(leaf, path):
            if isinstance(tensor, Tensor):
                yield Named(inner, tensor, is_measurement=True)
    elif isinstance(leaf, CompressedTensor):  # its parts mean nothing by themselves
        for _, tensor in leaves_of(leaf):
            if isinstance(tensor, Tensor):
                yield Named(path, tensor)
