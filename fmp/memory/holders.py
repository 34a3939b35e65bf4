"""Objects that hold tensors in their attributes, and that a call can reach: `self` of a loss function, or a batch.

Found are those among arguments and in containers, those that bound methods, partials, closures and defaults hold, those
that the code of a function names, and what any of these holds in turn. What belongs to a library is left out, and so
are modules, whose tensors are found by other means.
"""

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fmp import tree
from fmp.rematerialization.snapshot import is_full

_LIBRARIES = ("torch", "optree", "numpy", "fmp", "builtins", "functools", "collections", "contextlib", "threading")
_NO_HOLDERS = (str, bytes, int, float, complex, type, types.ModuleType, types.BuiltinFunctionType, Tensor, nn.Module)


def holders(*values: Any) -> list[Any]:
    """Lists the objects whose attributes hold tensors, modules, or other such objects; each once.

    Example:
        >>> task = types.SimpleNamespace(teacher=torch.ones(2))
        >>> holders(functools.partial(print, task)) == [task]
        True
    """
    found: list[Any] = []
    seen: dict[int, Any] = {}  # alive, so that no other object gets its id
    todo = list(values)
    while todo:
        value = todo.pop()
        if value is None or isinstance(value, _NO_HOLDERS) or id(value) in seen:
            continue
        seen[id(value)] = value
        if _is_holder(value):
            found.append(value)
            todo += vars(value).values()
        else:
            todo += _parts(value)
    return found


def held(value: Any) -> Iterator[Tensor]:
    """Iterates over the tensors of a tree, and over those that objects among its leaves hold."""
    for leaf in tree.leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
    for holder in holders(value):
        for leaf in tree.leaves(dict(vars(holder))):
            if isinstance(leaf, Tensor):
                yield leaf


def _is_holder(value: Any) -> bool:
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial | dict | list | tuple | set):
        return False
    if _of_a_library(type(value).__module__) or not _is_leaf(value):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        cells = [] if value.__closure__ is None else list(value.__closure__)
        inside = [cell.cell_contents for cell in cells if is_full(cell)]
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if _of_a_library(value.__module__):
            return [*inside, *given]
        return [*inside, *given, *inspect.getclosurevars(value).globals.values()]
    return [] if _is_leaf(value) else tree.leaves(value)


def _is_leaf(value: Any) -> bool:
    leaves = tree.leaves(value)
    return len(leaves) == 1 and leaves[0] is value


def _of_a_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
