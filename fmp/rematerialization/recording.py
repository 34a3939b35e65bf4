"""Keeps what chosen operators return while a function runs first, and returns it in their place when it runs again.

The modes that do so lie below autograd and below the transforms of torch.func, so they see operators on plain tensors:

    first     mm(x, w) -> y      kept as (mm, 0), the first product
    again     mm(x, w)           is not computed: it is (mm, 0), so y
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fmp import _compat, ambient, tree
from fmp.errors import RematError
from fmp.rematerialization.operators import Facts, facts_of, memory_of, tensors_in
from fmp.rematerialization.saveable import Names, Saveable

Key = tuple[Any, int]  # an operator, and how many calls of it came before


class Allocated(NamedTuple):
    """What is known of memory that an operator allocated, to keep its result if it gets a name later."""

    key: Key
    given: Facts
    dtype: torch.dtype
    geometry: tuple[Any, ...] | None
    output: Any
    random: ambient.RandomState | None
    memory: StorageWeakRef  # as long as it lives, no other memory gets the same number


class Entry(NamedTuple):
    """A kept result."""

    output: Any
    given: Facts
    versions: list[int]
    device: torch.device | None
    random: ambient.RandomState | None
    copied: bool = False
    reshaped: bool = False


class Kept:
    """The values that one call keeps.

    Args:
        saveable: Which.
    """

    def __init__(self, saveable: Saveable):
        self.saveable = saveable
        self.entries: dict[Key, Entry] = {}
        self.last: dict[Any, int] = {}

    def recording(self) -> AbstractContextManager[Any]:
        """Keeps values while a function runs inside; those of an attempt that was given up are dropped."""
        self.entries.clear()
        return _Recorder(self)

    def again(self) -> AbstractContextManager[Any]:
        """Uses the values while the function runs once more inside."""
        # Operators on tangents come between those of the function, and would be counted.
        return nullcontext() if not self.entries or _compat.forward_mode_active() else _Replayer(self)


def name_value(tensor: Tensor, name: str) -> None:
    """Tells the call that is being recorded, if there is one, the name of a value, and the modes that listen."""
    modes = _compat.dispatch_modes()
    recorders = [mode for mode in modes if isinstance(mode, _Recorder)]
    listeners = [mode for mode in modes if isinstance(mode, NameListener) and mode not in recorders]
    for mode in (*recorders[-1:], *listeners):
        mode.name(_compat.below_transforms(tensor), name)


class NameListener(_compat.TorchDispatchMode):
    """A mode that is told the names of values."""

    def name(self, tensor: Tensor, name: str) -> None:
        """Takes note of the name of a value."""
        raise NotImplementedError


class _Counter(_compat.TorchDispatchMode):
    """A mode that counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Any, int] = {}

    def next_key(self, op: Any) -> Key:
        """Counts a call."""
        count = self.counts[op] = self.counts.get(op, -1) + 1
        return op, count


class _Recorder(_Counter):
    def __init__(self, kept: Kept):
        super().__init__()
        self._kept = kept
        self._by_name = isinstance(kept.saveable, Names)
        self._made: dict[int, Allocated] = {}
        self._keys: dict[int, list[Key]] = {}
        self._changed: set[Key] = set()
        self._reshaped: set[int] = set()
        self._paused = False  # while the recorder itself makes tensors

    def __exit__(self, error: Any, *details: Any) -> None:
        """Lets go of what was needed meanwhile."""
        super().__exit__(error, *details)
        self._kept.last = {op: self.counts[op] for op, _ in self._kept.entries}
        for key in {key for memory in self._reshaped for key in self._keys.get(memory, ())}:
            entry = self._kept.entries[key]  # squeeze_ counts as a change, but only after this mode has seen it
            self._kept.entries[key] = entry._replace(versions=_versions(entry.output), reshaped=True)
        self._made, self._keys = {}, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator, and keeps what it returns if the policy says so."""
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:  # squeeze_ writes nothing
            self._reshaped.update(map(memory_of, tensors_in(args[:1])))
        elif func._schema.is_mutable:
            self._copy_what_changes(func, args, kwargs)
        output = func(*args, **kwargs)
        if not _makes_new(func):
            return output
        key = self.next_key(func)
        saved = self._kept.saveable(func, args)
        if not saved and not self._by_name:
            return output
        random, facts = _state_after(func, args, kwargs), facts_of(args, kwargs)
        if saved:
            self._keep(key, facts, output, random)
            return output
        # aten._unsafe_view does not say that it shares. What has no storage cannot be found again by its name.
        others = {0, *(memory_of(tensor) for tensor in tensors_in((args, kwargs)))}
        for tensor in tensors_in(output):
            if memory_of(tensor) in others:
                continue
            geometry = (tensor.size(), tensor.stride(), tensor.storage_offset()) if tensor is output else None
            whole = None if tensor is output else tree.map(_alias, output)  # an alias keeps its shape
            memory = StorageWeakRef(tensor.untyped_storage())
            self._made[memory_of(tensor)] = Allocated(key, facts, tensor.dtype, geometry, whole, random, memory)
        return output

    def name(self, tensor: Tensor, name: str) -> None:
        """Keeps the result that a tensor, perhaps a view, shows, if the policy keeps its name."""
        made = self._made.get(memory_of(tensor))
        if made is None or not isinstance(self._kept.saveable, Names) or not self._kept.saveable.keeps(name):
            return
        if made.key in self._changed:
            raise RematError(
                f"remat: the value named {name!r} was changed in place after {made.key[0]} had made it, or what that "
                "op made with it; name a value that is made by one op, or name it before the change"
            )
        output = made.output
        self._paused = True
        try:
            if made.geometry is not None:
                with torch.no_grad(), _compat.without_transforms():
                    output = _as_made(tensor, made.dtype, made.geometry)
            self._keep(made.key, made.given, output, made.random)
        finally:
            self._paused = False

    def _keep(self, key: Key, given: Facts, output: Any, random: ambient.RandomState | None) -> None:
        offload = isinstance(self._kept.saveable, Names) and self._kept.saveable.offload
        device = next((tensor.device for tensor in tensors_in(output)), None)
        for tensor in tensors_in(output):
            self._keys.setdefault(memory_of(tensor), []).append(key)
        stored = tree.map(_to_host if offload else _alias, output)
        self._kept.entries[key] = Entry(stored, given, _versions(stored), device, random)

    def _copy_what_changes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copies what is kept before an operator writes to its memory, such as the addition of a bias to a product."""
        for place, argument in enumerate(op._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tensors_in(args[place] if place < len(args) else kwargs.get(argument.name)):
                if (made := self._made.get(memory_of(tensor))) is not None:
                    self._changed.add(made.key)
                for key in self._keys.pop(memory_of(tensor), ()):
                    entry = self._kept.entries[key]
                    copied = tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, entry.output)
                    self._kept.entries[key] = entry._replace(output=copied, versions=_versions(copied), copied=True)


class _Replayer(_Counter):
    def __init__(self, kept: Kept):
        super().__init__()
        self._entries = kept.entries
        self._last = kept.last
        self._met: set[Key] = set()

    def __exit__(self, error: Any, *details: Any) -> None:
        """Checks that every value was used, each for the call that had returned it."""
        super().__exit__(error, *details)
        if error is not None:
            return
        if len(self._met) < len(self._entries):
            op, count = next(key for key in self._entries if key not in self._met)
            raise RematError(
                f"remat: call {count + 1} of {op} was kept at first, and did not occur when the function was "
                "recomputed; the function must run the same ops both times"
            )
        for op, last in self._last.items():
            if self.counts[op] != last:
                raise RematError(
                    f"remat: results of {op} were kept; it ran {last + 1} times at first and {self.counts[op] + 1} "
                    "times when the function was recomputed; the function must run the same ops both times, so compute "
                    "what it caches before it is called"
                )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator, or returns what it returned at first."""
        if not _makes_new(func):
            return func(*args, **(kwargs or {}))
        key = self.next_key(func)
        entry = self._entries.get(key)
        if entry is None:
            return func(*args, **(kwargs or {}))
        self._met.add(key)
        asked = facts_of(args, kwargs or {})
        if asked != entry.given:
            raise RematError(
                f"remat: call {key[1] + 1} of {func} was kept at first, as {_shown(facts_of((entry.output,), {}))} of "
                f"({_shown(entry.given)}), and got ({_shown(asked)}) when the function was recomputed; the function "
                "must run the same ops both times, and not depend on state that changes"
            )
        if _versions(entry.output) != entry.versions:
            raise RematError(
                f"remat: what {func} returned was kept, and was changed in place after the function had returned; "
                "change a copy of the function's result instead"
            )
        if entry.random is not None:
            ambient.set_random_state(entry.random)
        return tree.map(lambda leaf: _from_host(leaf, entry), entry.output)


def _makes_new(op: Any) -> bool:
    """Says whether what an operator returns is new memory: neither a view nor what it wrote into."""
    schema = getattr(op, "_schema", None)
    return schema is not None and not schema.is_mutable and not any(result.alias_info for result in schema.returns)


def _state_after(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ambient.RandomState | None:
    """Reads the random state where a random operator has left it: it must be the same if the operator is left out."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return None
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    return ambient.random_state(tensors_in(args), given)


def _as_made(view: Tensor, dtype: torch.dtype, geometry: tuple[Any, ...]) -> Tensor:
    """Returns the tensor of which another is a view: as the operator had made it, with its count of changes."""
    if view.is_neg():
        view = torch.ops.aten._neg_view(view)  # undoes it, as does the conjugate of a conjugate
    if view.is_conj():
        view = view.conj()
    if view.dtype != dtype:  # such as the real part
        in_bytes = view.as_strided((0,), (1,), 0).view(torch.uint8)
        view = in_bytes.as_strided((view.untyped_storage().nbytes(),), (1,), 0).view(dtype)
    return view.as_strided(*geometry)


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in tensors_in(value)]


def _shown(facts: Facts) -> str:
    return ", ".join([fact if isinstance(fact, str) else f"{fact[1]}{list(fact[0])} on {fact[2]}" for fact in facts])


def _alias(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with _compat.counting_changes():
        return _compat.below_transforms(value.detach())  # the name may be given inside of a transform


def _to_host(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return _alias(value)
    # On one stream, the copy back comes after this one without waiting for it.
    copied = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
    return _compat.below_transforms(copied)


def _from_host(value: Any, entry: Entry) -> Any:
    if not isinstance(value, Tensor):
        return value
    if entry.device is not None and value.device.type != entry.device.type:
        return value.to(entry.device, non_blocking=True)
    if entry.copied:
        return value.clone()
    return _compat.below_transforms(value.detach()) if entry.reshaped else _alias(value)
