"""The tensors that a function reaches, by name: in its arguments, in its module, and in what it closes over."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fmp import tree
from fmp.numerics.magnitudes import is_measurable
from fmp.step import TrainStep


def named_tensors(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the name and the tensor of all that holds floating-point or complex numbers.

    Args:
        fn: The function.
        args: Its positional arguments, named as in its signature.
        kwargs: Its keyword arguments.

    Yields:
        Pairs such as `("params/w", tensor)`; a module's by dotted path.
    """
    seen: set[int] = set()
    for values in (_arguments(fn, args, kwargs), _closure(fn)):
        for path, leaf in _leaves(values):
            if is_measurable(leaf) and id(leaf) not in seen:
                seen.add(id(leaf))
                yield path, leaf


def _arguments(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    called: Any = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        return dict(inspect.signature(called).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # what is written in C may have no signature
        return {"args": args, **kwargs}


def _closure(fn: Any) -> dict[str, Any]:
    """Finds what a function reads besides its arguments: the variables around it, and the module that it belongs to."""
    if isinstance(fn, TrainStep):
        return {name: value for loss in fn.config.losses.values() for name, value in _closure(loss.fn).items()}
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    found: dict[str, Any] = {"": owner} if isinstance(owner, nn.Module) else {}
    try:
        around = inspect.getclosurevars(fn)
    except (TypeError, ValueError):
        return found
    return {**found, **around.globals, **around.nonlocals}


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        for path, leaf in tree.items(value):
            where = "/".join(part for part in (name, path) if part)
            if isinstance(leaf, nn.Module):
                for dotted, tensor in (*leaf.named_parameters(), *leaf.named_buffers()):
                    yield f"{where}/{dotted}".lstrip("/"), tensor
            elif isinstance(leaf, Tensor):
                yield where, leaf
