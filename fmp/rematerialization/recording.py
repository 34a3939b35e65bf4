"""Keeps what chosen operators return while a function runs first, and returns it in their place when it runs again.

The modes that do so lie below autograd and below the transforms of torch.func, so they see operators on plain tensors:

    first     mm(x, w) -> y      kept as (mm, 0), the first product
    again     mm(x, w)           is not computed: it is (mm, 0), so y
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fmp import _compat, ambient, tree
from fmp.errors import RematError
from fmp.rematerialization.region import differentiable
from fmp.rematerialization.saveable import Names, Saveable

Key = tuple[Any, int]  # an operator, and how many calls of it came before


class Made(NamedTuple):
    """What is known of memory that an operator allocated, to keep its result if it gets a name later."""

    key: Key
    version: int
    dtype: torch.dtype
    geometry: tuple[Any, ...] | None
    output: Any
    random: ambient.RandomState | None


class Entry(NamedTuple):
    """A kept result."""

    output: Any
    versions: list[int]
    device: torch.device | None
    random: ambient.RandomState | None
    copied: bool = False


class Kept:
    """The values that one call keeps.

    Args:
        saveable: Which.
    """

    def __init__(self, saveable: Saveable):
        self.saveable = saveable
        self.entries: dict[Key, Entry] = {}

    def recording(self) -> AbstractContextManager[Any]:
        """Keeps values while a function runs inside."""
        return _Recorder(self)

    def again(self) -> AbstractContextManager[Any]:
        """Uses the values while the function runs once more inside."""
        # Operators on tangents come between those of the function, and would be counted.
        return nullcontext() if not self.entries or _compat.forward_mode_active() else _Replayer(self.entries)

    def first(self, call: Callable[[Sequence[Tensor]], Any], operands: Sequence[Tensor]) -> Any:
        """Calls a function where it will be called again inside of a vjp, and so with the same operators.

        torch takes composite functions apart in another way under `vmap` than under `vmap` and `grad`.
        """
        at = [place for place, operand in enumerate(operands) if differentiable(operand)]
        if not at:
            with self.recording():
                return call(operands)
        found: Any = None

        def recorded(*variables: Tensor) -> tuple[Tensor, list[Tensor]]:
            nonlocal found
            filled = list(operands)
            for place, variable in zip(at, variables, strict=True):
                filled[place] = variable
            original = {id(new): old for new, old in zip(filled, operands, strict=True)}
            with self.recording():
                leaves, spec = tree.flatten(call(filled))
            computed = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in original]
            found = [original.get(id(leaf), leaf) for leaf in leaves], spec, {id(leaf) for leaf in computed}
            return variables[0].sum() * 0, computed

        vjp: Any = torch.func.vjp
        unwrapped = iter(vjp(recorded, *(operands[place] for place in at), has_aux=True)[2])
        leaves, spec, computed = found
        return tree.unflatten(spec, [next(unwrapped) if id(leaf) in computed else leaf for leaf in leaves])


def name_value(tensor: Tensor, name: str) -> None:
    """Tells the call that is being recorded, if there is one, the name of a value, and the modes that listen."""
    modes = _compat.dispatch_modes()
    recorders = [mode for mode in modes if isinstance(mode, _Recorder)]
    listeners = [mode for mode in modes if isinstance(mode, NameListener) and mode not in recorders]
    for mode in (*recorders[-1:], *listeners):
        mode.name(_compat.below_transforms(tensor), name)


class NameListener(TorchDispatchMode):
    """A mode that is told the names of values."""

    def name(self, tensor: Tensor, name: str) -> None:
        """Takes note of the name of a value."""
        raise NotImplementedError


class _Counter(TorchDispatchMode):
    """A mode that counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[Any, int] = {}

    def next_key(self, op: Any) -> Key:
        """Counts a call."""
        count = self._counts[op] = self._counts.get(op, -1) + 1
        return op, count


class _Recorder(_Counter):
    def __init__(self, kept: Kept):
        super().__init__()
        self._kept = kept
        self._by_name = isinstance(kept.saveable, Names)
        self._made: dict[int, Made] = {}
        self._keys: dict[int, list[Key]] = {}

    def __exit__(self, error: Any, *details: Any) -> None:
        """Lets go of what was needed meanwhile."""
        super().__exit__(error, *details)
        self._made, self._keys = {}, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator, and keeps what it returns if the policy says so."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._copy_what_changes(func, args, kwargs)
        output = func(*args, **kwargs)
        if not _makes_new(func):
            return output
        key = self.next_key(func)
        saved = self._kept.saveable(func, args)
        if not saved and not self._by_name:
            return output
        random = _state_after(func, args, kwargs)
        if saved:
            self._keep(key, output, random)
            return output
        given = {
            _memory(tensor) for tensor in _tensors((args, kwargs))
        }  # aten._unsafe_view does not say that it shares
        for tensor in _tensors(output):
            if _memory(tensor) in given:
                continue
            geometry = (tensor.size(), tensor.stride(), tensor.storage_offset()) if tensor is output else None
            made = Made(key, tensor._version, tensor.dtype, geometry, None if tensor is output else output, random)
            self._made[_memory(tensor)] = made
        return output

    def name(self, tensor: Tensor, name: str) -> None:
        """Keeps the result that a tensor, perhaps a view, shows, if the policy keeps its name."""
        made = self._made.get(_memory(tensor))
        if made is None or not isinstance(self._kept.saveable, Names) or not self._kept.saveable.keeps(name):
            return
        if tensor._version != made.version or (made.dtype != tensor.dtype and made.geometry):
            raise RematError(
                f"remat: the value named {name!r} was changed in place after {made.key[0]} had made it; name a value "
                "that is made by one op"
            )
        output = made.output
        if made.geometry is not None:
            with torch.no_grad():
                output = _compat.below_transforms(tensor.as_strided(*made.geometry))
        self._keep(made.key, output, made.random)

    def _keep(self, key: Key, output: Any, random: ambient.RandomState | None) -> None:
        offload = isinstance(self._kept.saveable, Names) and self._kept.saveable.offload
        device = next((tensor.device for tensor in _tensors(output)), None)
        for tensor in _tensors(output):
            self._keys.setdefault(_memory(tensor), []).append(key)
        self._kept.entries[key] = _entry(tree.map(_to_host if offload else _alias, output), device, random)

    def _copy_what_changes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copies what is kept before an operator writes to its memory, such as the addition of a bias to a product."""
        for place, argument in enumerate(op._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in _tensors(args[place] if place < len(args) else kwargs.get(argument.name)):
                for key in self._keys.pop(_memory(tensor), ()):
                    entry = self._kept.entries[key]
                    copied = tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, entry.output)
                    self._kept.entries[key] = _entry(copied, entry.device, entry.random, copied=True)


class _Replayer(_Counter):
    def __init__(self, entries: dict[Key, Entry]):
        super().__init__()
        self._entries = entries
        self._met: set[Key] = set()

    def __exit__(self, error: Any, *details: Any) -> None:
        """Checks that every value was used."""
        super().__exit__(error, *details)
        if error is None and len(self._met) < len(self._entries):
            op, count = next(key for key in self._entries if key not in self._met)
            raise RematError(
                f"remat: call {count + 1} of {op} was kept at first, and did not occur when the function was "
                "recomputed; the function must run the same ops both times"
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
        if [tensor._version for tensor in _tensors(entry.output)] != entry.versions:
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
    return ambient.random_state(_tensors(args), given)


def _entry(output: Any, device: torch.device | None, random: ambient.RandomState | None, copied: bool = False) -> Entry:
    return Entry(output, [tensor._version for tensor in _tensors(output)], device, random, copied)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _alias(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with _compat.counting_changes():
        return value.detach()


def _to_host(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return _alias(value)
    # On one stream, the copy back comes after this one without waiting for it.
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


def _from_host(value: Any, entry: Entry) -> Any:
    if not isinstance(value, Tensor):
        return value
    if entry.device is not None and value.device.type != entry.device.type:
        return value.to(entry.device, non_blocking=True)
    return value.clone() if entry.copied else _alias(value)
