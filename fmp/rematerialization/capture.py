"""Finds the tensors that a call can reach, so that they become operands: what is not one gets no gradient.

    fn, args  ->  tensors [t0, t1, ...]  and  rebuild([t0, t1, ...]) = fn, args with these tensors in their places

Reached are the arguments and containers among them, closure cells, default arguments, partials, bound methods, global
variables that the code names, the helper functions behind any of these, and the tensors of modules. A function is
copied only where a tensor was found behind it; a module stays the same object, and its tensors are swapped for a while.

Not reached are the attributes of other objects, and without a transform what lies behind a compiled function. What is
reached and holds no tensor goes into a snapshot.
"""

import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fmp import _compat, tree
from fmp.distributed_modules import check_no_wrapper_class
from fmp.errors import RematError
from fmp.rematerialization.exclusive import hold
from fmp.rematerialization.places import UNSET, Made, Place, Rebuild, check_places, computed_at_each_call
from fmp.rematerialization.snapshot import OWN, Restored, Snapshot, is_full, names_read, names_set

_ATOMS = (str, int, float, complex, bytes, type(None), torch.dtype, torch.device, type, types.ModuleType)
_ATOM_TYPES = frozenset((*_ATOMS, bool))  # found faster than by isinstance
_NO_CONTEXT = nullcontext()
_LIBRARIES = ("torch", "optree", "numpy", "fmp", "functools", "contextlib")


class Capture:
    """The tensors that a value can reach, and the way to make the value anew around others.

    Args:
        value: Anything, for example a function with its arguments.

    Attributes:
        value: The value.
        tensors: The tensors, each once.
        count: How many there are.
        generators: The random generators that it can reach.
        snapshot: What else it can reach.
        is_lazy: Whether a module among what it can reach has no parameters yet.
        left: Where modules have set tensors when they were called last, as they always do.
    """

    def __init__(self, value: Any):
        self.tensors: list[Tensor] = []
        self.generators: list[torch.Generator] = []
        self.snapshot = Snapshot()
        self.is_lazy = False
        self._slots: dict[int, int] = {}
        self._known: dict[int, tuple[Any, Rebuild | None]] = {}
        self._places: dict[int, list[Place]] = {}
        self.left: list[Place] = []
        self._left_tensors: list[Tensor] = []
        self._computed: list[Place] = []
        self._caches = _compat.parametrizations_are_cached()
        self.value: Any = value
        self._rebuild = self._visit(value)
        self._known.clear()
        self.count = len(self.tensors)

    def add(self, tensor: Tensor) -> int:
        """Gives a tensor a slot; returns which."""
        slot = self._slots.setdefault(id(tensor), len(self.tensors))
        if slot == len(self.tensors):
            self.tensors.append(tensor)
            self.is_lazy = self.is_lazy or is_lazy(tensor)
        return slot

    def rebuilt(self, tensors: Sequence[Tensor], made: Made | None = None) -> Any:
        """Makes the value anew around other tensors, one for each slot; `made` takes down what was made."""
        return self.value if self._rebuild is None else self._rebuild(tensors, made or Made())

    def called(self, tensors: Sequence[Tensor], check_effects: bool = False) -> Any:
        """Calls the value, a function with its arguments and keyword arguments, with other tensors.

        Raises:
            RematError: If it shall not leave tensors elsewhere than in its result, and has, naming where.
        """
        made = Made()
        is_small = not (self._places or self._caches or _compat.parametrizations_are_cached())
        with Restored(self.snapshot) if is_small else self.swapped(tensors, made):
            function, args, kwargs = self.rebuilt(tensors, made)
            result = function(*args, **kwargs)
            if check_effects:
                made.check()
                self.snapshot.check()
            return result

    @contextmanager
    def swapped(self, tensors: Sequence[Tensor], made: Made | None = None) -> Iterator[None]:
        """Puts other tensors into the modules that the value can reach, and all else back to where it stood at first.

        Raises:
            RematError: If a module replaced one of them meanwhile, which would be lost.
        """
        places = self._all_places()
        with self.exclusive(), Restored(self.snapshot), self.cache():
            before = [place.table[place.key] for place in places]
            made = made or Made()
            values = [place.rebuild(tensors, made) if place.rebuild else tensors[place.slot] for place in places]
            for place, value in zip(places, values, strict=True):
                place.table[place.key] = value
            try:
                yield
                check_places(places, values)
                self.left = [place for place in self._computed if place.table[place.key] is not UNSET]
                self._left_tensors = [place.table[place.key] for place in self.left]
            finally:
                for place, value in zip(places, before, strict=True):
                    place.table[place.key] = value

    def exclusive(self) -> AbstractContextManager[Any]:
        """Keeps the modules from calls in other threads."""
        return hold(frozenset(self._places)) if self._places else _NO_CONTEXT

    def cache(self) -> AbstractContextManager[Any]:
        """Lets parametrized modules cache as at the call, but nothing that another call has computed."""
        if self._caches or _compat.parametrizations_are_cached():
            return _compat.parametrization_cache(self._caches)
        return _NO_CONTEXT

    def take_left(self) -> list[Tensor]:
        """Hands out the tensors that modules have set when they were called last: one for each of `left`."""
        tensors, self._left_tensors = self._left_tensors, []
        return tensors

    def leave(self, tensors: Sequence[Tensor]) -> None:
        """Leaves tensors in modules where those have set them when they were called: one for each of `left`."""
        for place, tensor in zip(self.left, tensors, strict=True):
            place.table[place.key] = tensor

    def forget(self) -> None:
        """Lets go of the tensors; what is needed to make the value anew stays."""
        self.tensors = []
        if self._rebuild is not None:
            self.value = None

    def name(self, slot: int) -> str:
        """Describes where a tensor was found."""
        for place in self._all_places():
            if place.slot == slot:
                return f"the module's {place.name}"
        for path, leaf in tree.items(self.value):
            if slot < len(self.tensors) and leaf is self.tensors[slot]:
                return f"its argument {path.partition('/')[2]}"
        return "a tensor that it closes over"

    def check_modules(self, tensors: Sequence[Tensor]) -> None:
        """Checks that the modules hold some tensors still.

        Raises:
            RematError: If one does not.
        """
        if self._places:
            places = [place for place in self._all_places() if place.rebuild is None]
            with self.exclusive():
                check_places(places, [tensors[place.slot] for place in places])

    def _all_places(self) -> list[Place]:
        return [place for places in self._places.values() for place in places]

    def _visit(self, value: Any) -> Rebuild | None:
        """Returns how to make a value anew; None for one that reaches no tensor and can stay as it is."""
        kind = type(value)
        if kind in _ATOM_TYPES:
            return None
        if isinstance(value, Tensor):
            slot = self.add(value)
            return lambda tensors, made: tensors[slot]
        if kind is tuple:
            return self._tuple(value)
        if id(value) in self._known:
            return self._known[id(value)][1]
        if kind is types.FunctionType:
            return self._function(value)
        if isinstance(value, _ATOMS):
            return None
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, torch.Generator):
            if not any(value is generator for generator in self.generators):
                self.generators.append(value)
            return None
        if isinstance(value, types.MethodType):
            return self._method(value)
        if isinstance(value, functools.partial):
            return self._partial(value)
        if kind is dict and not value:
            self.snapshot.note_empty(value)
            return None
        return self._container(value)

    def _tuple(self, value: tuple[Any, ...]) -> Rebuild | None:
        parts = [self._visit(item) for item in value]
        if not any(parts):
            return None
        pairs = [(part, None if part else item) for part, item in zip(parts, value, strict=True)]
        return lambda tensors, made: tuple([part(tensors, made) if part else item for part, item in pairs])

    def _container(self, value: Any) -> Rebuild | None:
        if optree.tree_is_leaf(value, none_is_leaf=True):
            return None
        self._known[id(value)] = (value, None)  # a container that holds itself has no tree
        leaves, spec = tree.flatten(value)
        parts = [self._visit(leaf) for leaf in leaves]
        if not any(parts):
            if isinstance(value, list | dict):
                self.snapshot.note_container(value)
            return None
        key = id(value)
        leaves = [None if part else leaf for part, leaf in zip(parts, leaves, strict=True)]

        def rebuild(tensors: Sequence[Tensor], made: Made) -> Any:
            if key not in made.values:
                filled = [part(tensors, made) if part else leaf for part, leaf in zip(parts, leaves, strict=True)]
                made.values[key] = tree.unflatten(spec, filled)
                made.containers.append((made.values[key], filled))
            return made.values[key]

        self._known[id(value)] = (value, rebuild)
        return rebuild

    def _method(self, value: types.MethodType) -> Rebuild | None:
        parts = self._visit((value.__func__, value.__self__))
        return None if parts is None else lambda tensors, made: types.MethodType(*parts(tensors, made))

    def _partial(self, value: functools.partial[Any]) -> Rebuild | None:
        parts = self._visit((value.func, value.args, value.keywords))
        if parts is None:
            return None

        def rebuild(tensors: Sequence[Tensor], made: Made) -> Any:
            func, args, keywords = parts(tensors, made)
            return functools.partial(func, *args, **keywords)

        return rebuild

    def _module(self, module: nn.Module) -> None:
        parts = list(module.named_modules())
        with hold(frozenset([id(part) for _, part in parts])):
            self._parts(parts)

    def _parts(self, parts: list[tuple[str, nn.Module]]) -> None:
        for path, part in parts:
            if id(part) in self._places:
                continue
            check_no_wrapper_class(type(part), path, "remat", twice=not _compat.transform_active())
            if isinstance(part, torch.jit.ScriptModule):
                raise RematError(
                    f"remat: {type(part).__name__} {path!r} is made by torch.jit, and its tensors cannot be replaced "
                    "for a recomputation; use the module that it was made of"
                )
            attributes, computed = vars(part), computed_at_each_call(part)
            self._places[id(part)] = places = [
                Place(table, key, f"{path}.{key}".removeprefix("."), self.add(tensor))
                for table in (part._parameters, part._buffers, attributes)
                for key, tensor in table.items()
                if isinstance(tensor, Tensor) and key not in computed
            ]
            others: list[tuple[str, Any]] = []
            for key, value in attributes.items():
                if key in OWN or (isinstance(value, Tensor) and key not in computed):
                    continue
                if key in computed:
                    again = _constant(UNSET if isinstance(value, Tensor) else value)
                else:
                    again = self._visit(value)
                if again is None:
                    others.append((key, value))
                else:
                    name = f"{path}.{key}".removeprefix(".")
                    places.append(Place(attributes, key, name, -1, again, key in computed))
            self._computed += [
                place for place in places if place.is_computed and isinstance(attributes[place.key], Tensor)
            ]
            self.snapshot.note_module(part, path, others)

    def _function(self, function: types.FunctionType) -> Rebuild | None:
        if _compat.is_compiled(function):
            # Under a transform, torch runs the original.
            return self._visit(_compat.original(function)) if _compat.transform_active() else None
        key = id(function)

        def again(tensors: Sequence[Tensor], made: Made) -> Any:
            return made.values[key] if key in made.values else rebuild(tensors, made)

        # A function that can reach itself is always made anew.
        self._known[key] = (function, again)
        closure, scope, code = function.__closure__ or (), function.__globals__, function.__code__
        in_cells = [self._visit(cell.cell_contents) if is_full(cell) else None for cell in closure]
        given = function.__defaults__, function.__kwdefaults__
        in_defaults = self._visit(given) if any(given) else None
        names = () if is_library(scope) else names_read(code)
        in_globals = {name: part for name in names if (part := self._visit(scope.get(name)))}
        self._note_variables(function, names, in_cells, in_globals)
        if not (in_defaults or in_globals or any(in_cells)):
            self._known[key] = (function, None)
            return None
        # None of these may hold on to a tensor that has a slot.
        cells = [None if part else cell for part, cell in zip(in_cells, closure, strict=True)]
        defaults: Any = None if in_defaults else given
        name = function.__name__
        attributes = {key: value for key, value in vars(function).items() if key != "__wrapped__"}

        def rebuild(tensors: Sequence[Tensor], made: Made) -> Any:
            new_cells = tuple([types.CellType() if cell is None else cell for cell in cells])
            new_scope = dict(scope) if in_globals else scope
            made.values[key] = new = types.FunctionType(code, new_scope, name, None, new_cells)
            vars(new).update(attributes)
            for part, cell, variable in zip(in_cells, new_cells, code.co_freevars, strict=True):
                if part:
                    cell.cell_contents = part(tensors, made)
                    made.cells.append((cell, cell.cell_contents, variable))
            for variable, part in in_globals.items():
                new_scope[variable] = part(tensors, made)
            if in_globals:
                made.scopes += [(new_scope, new_scope.get(variable), variable) for variable in names_set(code)]
            new.__defaults__, new.__kwdefaults__ = in_defaults(tensors, made) if in_defaults else defaults
            return new

        return again

    def _note_variables(
        self, function: types.FunctionType, names: Sequence[str], in_cells: Sequence[Any], in_globals: Any
    ) -> None:
        scope, is_set = function.__globals__, names_set(function.__code__)
        for name, cell, part in zip(function.__code__.co_freevars, function.__closure__ or (), in_cells, strict=True):
            if not part:
                self.snapshot.note_cell(cell, name, name in is_set)
        for name in names:
            if (name in is_set and not in_globals) or (name in scope and name not in in_globals and name not in is_set):
                self.snapshot.note_global(scope, name, name in is_set)


def _constant(value: Any) -> Rebuild:
    return lambda tensors, made: value


def is_library(scope: dict[str, Any]) -> bool:
    """Says whether global variables are those of a library: they are its own business, and hold no tensors."""
    return str(scope.get("__name__")).partition(".")[0] in _LIBRARIES
