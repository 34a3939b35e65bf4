"""A mode that shows each op, on plain tensors: below autograd, torch.func transforms, and what fmp puts in between."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from fmp.live_memory import Watch, storages
from fmp.numerics.magnitudes import Magnitude, is_measurable, measure
from fmp.numerics.places import Place, Places


@dataclass(frozen=True, eq=False)
class Op:
    """A call of an operator.

    Attributes:
        name: The operator without its namespace and overload, such as `mm`.
        place: Where it was called.
        inputs: The tensors among its arguments.
        numbers: The numbers among its arguments.
        outputs: What it returned, as far as it holds floating-point or complex numbers.
        overwritten: What was in the tensors that it wrote into, by their place among the inputs.
        writes: Whether it writes into an input.
    """

    name: str
    place: Place
    inputs: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    outputs: tuple[Tensor, ...]
    overwritten: dict[int, Magnitude] = field(default_factory=dict)
    writes: bool = False


class OpWatch(Watch):
    """Shows each op that computes or copies numbers to `saw`; views are left out.

    Args:
        outermost: The code of the function that calls what is watched.
    """

    def __init__(self, outermost: CodeType):
        super().__init__()
        self._places = Places(outermost)

    @abstractmethod
    def saw(self, op: Op) -> None:
        """Takes note of an op that has run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator and shows it."""
        values = (*args, *(kwargs or {}).values())
        inputs = tuple(_of(Tensor, values))
        schema = getattr(func, "_schema", None)
        writes = schema is not None and schema.is_mutable
        # A mode of the user, such as a policy that casts, must not see what is measured here.
        with torch._C.DisableTorchFunction():
            place = self._places.here()
            written = _written(schema, args, kwargs or {}) if writes else []
            overwritten = {
                index: measure(tensor)
                for index, tensor in enumerate(inputs)
                if is_measurable(tensor) and any(tensor is other for other in written)
            }
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if output is NotImplemented or is_view(func):
            return output
        with torch._C.DisableTorchFunction():
            outputs = tuple(tensor for tensor in _of(Tensor, (output, written)) if is_measurable(tensor))
            if outputs:
                numbers = tuple(_of((int, float), values))
                self.saw(Op(_name(func), place, inputs, numbers, _distinct(outputs), overwritten, writes))
        return output

    def origin(self, tensor: Tensor) -> Any:
        """Returns what `note_origin` has noted last about the memory of a tensor; None without."""
        memory = next((self.memories.get(storage._cdata) for storage in storages(tensor)), None)
        return None if memory is None else memory.origin

    def note_origin(self, tensor: Tensor, origin: Any) -> None:
        """Notes something about the memory of a tensor, for as long as it lives."""
        for storage in storages(tensor):
            self._see(storage, is_new=False).origin = origin


def is_view(func: Any) -> bool:
    """Says whether an operator shows its input in another shape, without writing."""
    schema = getattr(func, "_schema", None)
    returns = () if schema is None or func is _FRESH else schema.returns
    return any(result.alias_info and not result.alias_info.is_write for result in returns)


_FRESH: Any = torch.ops.aten.lift_fresh.default  # shows a tensor that torch.tensor has just made


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Lists the tensors that an operator writes into."""
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    names = [item.name for item in schema.arguments if item.alias_info and item.alias_info.is_write]
    return list(_of(Tensor, [given.get(name) for name in names]))


def _of(kinds: Any, values: Any) -> Iterator[Any]:
    """Yields what is of some kinds, also in lists."""
    for value in values:
        if isinstance(value, kinds) and not isinstance(value, bool):
            yield value
        elif isinstance(value, list | tuple):
            yield from _of(kinds, value)


def _distinct(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple({id(tensor): tensor for tensor in tensors}.values())


def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return str(func) if schema is None else schema.name.removeprefix("aten::").replace("::", ".")
