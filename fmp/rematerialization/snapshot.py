"""What a call reads besides tensors, as it stood: closure variables, global variables, module attributes, containers.

    note      at the call
    restore   before the function runs again, so that it reads what it read at first
    undo      afterwards

A variable or container that the function changes itself is not restored. Instead, `check` finds the tensors that it put
there.
"""

import dis
import functools
import operator
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fmp import _compat, tree
from fmp.errors import RematError

# What every module has; torch itself keeps it.
OWN = frozenset(vars(nn.Module())) - {"training"}
_MISSING: Any = object()
_NOTHING: frozenset[str] = frozenset()

Table = dict[str, Any]
Undo = list[tuple[Any, Any, Any]]


class Snapshot:
    """What a call reads besides tensors."""

    def __init__(self) -> None:
        self._cells: list[tuple[types.CellType, Any]] = []
        self._entries: list[tuple[Table, str, Any]] = []
        self._set_cells: list[tuple[types.CellType, Any, str]] = []
        self._set_globals: list[tuple[Table, str, Any]] = []
        self._tables: list[tuple[Table, frozenset[str], str]] = []
        self._containers: list[tuple[Any, Any]] = []

    def note_cell(self, cell: types.CellType, name: str, is_set: bool) -> None:
        """Notes a closure variable, and whether the function sets it."""
        if is_set:
            self._set_cells.append((cell, _contents(cell), name))
        elif (value := _contents(cell)) is not _MISSING:
            self._cells.append((cell, value))

    def note_global(self, scope: Table, name: str, is_set: bool) -> None:
        """Notes a global variable, and whether the function sets it."""
        (self._set_globals if is_set else self._entries).append((scope, name, scope.get(name, _MISSING)))

    def note_module(self, module: nn.Module, path: str, others: Sequence[tuple[str, Any]]) -> None:
        """Notes a module: its submodules, and those of its attributes that are not and hold no tensors."""
        attributes, submodules = vars(module), module._modules
        self._entries += [(attributes, key, value) for key, value in others]
        if submodules:
            self._containers.append((submodules, dict(submodules)))
        for table in (attributes, module._parameters, module._buffers):
            self._tables.append((table, frozenset(table) if table else _NOTHING, path))

    def note_empty(self, container: Any) -> None:
        """Notes that a dictionary is empty."""
        self._containers.append((container, {}))

    def note_container(self, container: Any) -> None:
        """Notes what a list or dictionary that holds no tensor holds, and the ones inside of it."""
        for each in _nested(container):
            self._containers.append((each, _copied(each)))

    def restore(self) -> Undo:
        """Puts back what was noted; returns what is needed to undo that."""
        changes: Undo = []
        for cell, value in self._cells:
            now = _contents(cell)
            if now is not value:
                changes.append((cell, None, now))
                cell.cell_contents = value
        for table, key, value in self._entries:
            now = table.get(key, _MISSING)
            if now is not value:
                changes.append((table, key, now))
                _set(table, key, value)
        for container, copied in self._containers:
            if not _same(container, copied):
                changes.append((container, _MISSING, _copied(container)))
                _fill(container, copied)
        return changes

    def settle(self) -> None:
        """Leaves the containers alone that the first call has changed: the function keeps a record in them."""
        self._set_cells, self._set_globals, self._tables = [], [], []
        self._containers = [noted for noted in self._containers if _same(*noted)]

    def check(self) -> None:
        """Refuses tensors that the function has put where the caller can find them.

        Raises:
            RematError: If there is one, naming where.
        """
        for cell, before, name in self._set_cells:
            _refuse_new(_contents(cell), before, f"the variable {name!r}")
        for scope, name, before in self._set_globals:
            _refuse_new(scope.get(name), before, f"the global variable {name!r}")
        for table, key, before in self._entries:
            _refuse_new(table.get(key), before, f"the attribute or variable {key!r}")
        for table, keys, path in self._tables:
            for key in table.keys() - keys:
                _refuse_new(table[key], None, f"the module's attribute {f'{path}.{key}'.removeprefix('.')!r}")
        for container, copied in self._containers:
            if not _same(container, copied):
                before = {id(value) for value in _values(copied)}
                for value in _values(container):
                    if id(value) not in before:
                        _refuse_new(value, None, f"a {type(container).__name__}")


class Restored:
    """Reads as it stood at the call what a snapshot has noted, inside; afterwards as it stands now.

    Args:
        snapshot: The snapshot.
    """

    def __init__(self, snapshot: Snapshot):
        self._snapshot = snapshot
        self._changes: Undo = []

    def __enter__(self) -> None:
        self._changes = self._snapshot.restore()

    def __exit__(self, *error: object) -> None:
        _undo(self._changes)


def _undo(changes: Undo) -> None:
    for place, key, value in changes:
        if isinstance(place, types.CellType):
            if value is _MISSING:
                del place.cell_contents
            else:
                place.cell_contents = value
        elif key is _MISSING:
            _fill(place, value)
        else:
            _set(place, key, value)


def refuse_escaped(value: Any, place: str) -> None:
    """Refuses a tensor that the function left where it is no result.

    Raises:
        RematError: If the value is one that can have a gradient, or that belongs to a transform.
    """
    if not isinstance(value, Tensor):
        return
    if value.is_floating_point() or value.is_complex() or _compat.wrapped_by_transform(value):
        raise RematError(
            f"remat: the function put {tree.describe(value)} into {place}. Under a transform, only what it returns "
            "gets a gradient; return the tensor as well"
        )


@functools.lru_cache(maxsize=4096)
def names_set(code: types.CodeType) -> frozenset[str]:
    """Lists the closure and global variables that code, or a function defined in it, sets."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("STORE_DEREF", "STORE_GLOBAL", "DELETE_DEREF", "DELETE_GLOBAL")
    }
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(names.union(*map(names_set, inner)))


@functools.lru_cache(maxsize=4096)
def names_read(code: types.CodeType) -> tuple[str, ...]:
    """Lists the global variables and attributes that code, or a function defined in it, names."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for constant in inner for name in names_read(constant))]))


def is_full(cell: types.CellType) -> bool:
    """Says whether a closure variable has a value."""
    return _contents(cell) is not _MISSING


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _refuse_new(value: Any, before: Any, place: str) -> None:
    if value is not before:
        refuse_escaped(value, place)


def _set(table: Table, key: str, value: Any) -> None:
    if value is _MISSING:
        table.pop(key, None)
    else:
        table[key] = value


def _nested(container: Any) -> Iterator[Any]:
    """Yields a list or dictionary, and those inside of it."""
    pending, met = [container], set()
    while pending:
        each = pending.pop()
        if isinstance(each, list | tuple | dict) and id(each) not in met:
            met.add(id(each))
            if not isinstance(each, tuple):
                yield each
            pending.extend(_values(each))


def _values(container: Any) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container


def _copied(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _same(one: Any, other: Any) -> bool:
    if not one and not other:
        return True
    if len(one) != len(other) or (isinstance(one, dict) and not all(map(operator.is_, one, other))):
        return False
    return all(map(operator.is_, _values(one), _values(other)))


def _fill(container: Any, contents: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(contents)
