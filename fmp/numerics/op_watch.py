"""A mode that shows each op, on plain tensors: below autograd, torch.func transforms, and what fmp puts in between."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from fmp import _compat, tree
from fmp.live_memory import Memory, Watch
from fmp.numerics.magnitudes import Magnitude, is_measurable, measure
from fmp.numerics.places import Place, Places

# The operators that compute nothing: casts, copies, and views that autograd does not know as such.
COPIES = ("_to_copy", "clone", "copy_", "lift_fresh", "_unsafe_view", "view_copy", "alias_copy")


@dataclass(frozen=True, eq=False)
class Op:
    """A call of an operator.

    Attributes:
        name: The operator without its namespace and overload, such as `mm`.
        place: Where it was called.
        inputs: The tensors among its arguments, without those that are only written into.
        numbers: The numbers among its arguments.
        outputs: What it returned, and what it wrote into, as far as it holds floating-point or complex numbers.
        others: What it returned or wrote into besides, such as indices.
        overwritten: What was in the inputs that it wrote into, by their place among the inputs.
        before: Copies of those of them that were not finite, likewise.
        writes: Whether it writes into memory that was there before.
        func: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """

    name: str
    place: Place
    inputs: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    outputs: tuple[Tensor, ...]
    others: tuple[Tensor, ...] = ()
    overwritten: dict[int, Magnitude] = field(default_factory=dict)
    before: dict[int, Tensor] = field(default_factory=dict)
    writes: bool = False
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def without_tensors(self) -> "Op":
        """Returns it without what would keep memory alive."""
        return Op(self.name, self.place, (), self.numbers, (), writes=self.writes)

    def called_with(self, replaced: Callable[[Tensor], Tensor]) -> Any:
        """Calls the operator again, with other tensors in place of those that hold numbers."""
        args, kwargs = tree.map(lambda leaf: replaced(leaf) if is_measurable(leaf) else leaf, (self.args, self.kwargs))
        return self.func(*args, **kwargs)


class OpWatch(Watch):
    """Shows each op that computes or copies numbers, or looks at them, to `saw`; views are left out.

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
        kwargs = kwargs or {}
        if any(issubclass(kind, _compat.FakeTensor) for kind in types):
            return func(*args, **kwargs)  # as DTensors do, to see how a result would lie; there are no numbers
        values = (*args, *kwargs.values())
        schema = getattr(func, "_schema", None)
        writes = schema is not None and schema.is_mutable
        # A mode of the user, such as a policy that casts, must not see what is measured here.
        with _compat.DisableTorchFunction():
            place = self._places.here()
            written, read = _written(schema, args, kwargs) if writes else ([], values)
            inputs = tuple(_of(Tensor, read))
            overwritten = {
                index: measure(tensor)
                for index, tensor in enumerate(inputs)
                if is_measurable(tensor) and any(tensor is other for other in written)
            }
            before = {index: inputs[index].clone() for index, held in overwritten.items() if not held.is_finite}
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if output is NotImplemented or is_view(func) or func is _WAIT:
            return output
        if getattr(func, "namespace", "") == COLLECTIVES:
            for tensor in _of(Tensor, (output,)):  # what it returns is not there yet
                _WAIT(tensor)
        with _compat.DisableTorchFunction():
            returned = _distinct(tuple(_of(Tensor, (output, written))))
            outputs = tuple([tensor for tensor in returned if is_measurable(tensor)])
            others = tuple([tensor for tensor in returned if not is_measurable(tensor)])
            numbers = tuple(_of((int, float), values))
            op = Op(
                _name(func), place, inputs, numbers, outputs, others, overwritten, before, writes, func, args, kwargs
            )
            self.saw(op)
            if isinstance(output, float):
                self.saw_number(op, output)
        return output

    def saw_number(self, op: Op, number: float) -> None:
        """Takes note of a number that an op has handed to Python."""

    def memory(self, storage: torch.UntypedStorage) -> Memory:
        """Returns what is known about a storage."""
        return self._see(storage, is_new=False)


def is_view(func: Any) -> bool:
    """Says whether an operator shows its input in another shape, without writing."""
    schema = getattr(func, "_schema", None)
    returns = () if schema is None or func is _FRESH else schema.returns
    return any(result.alias_info and not result.alias_info.is_write for result in returns)


COLLECTIVES = "_c10d_functional"
"""The namespace of the operators by which ranks work together."""
_WAIT: Any = getattr(torch.ops, COLLECTIVES).wait_tensor.default if torch.distributed.is_available() else None
_FRESH: Any = torch.ops.aten.lift_fresh.default  # shows a tensor that torch.tensor has just made


# These do not read what they write over.
_FILLS = ("copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_")


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """Lists the tensors that an operator writes into, and the arguments that it reads, which may be the same ones."""
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    written = [item for item in schema.arguments if item.alias_info and item.alias_info.is_write]
    is_fill = schema.name.removeprefix("aten::") in _FILLS
    lost = [item.name for item in written if item.is_out or is_fill]
    into = list(_of(Tensor, [given.get(item.name) for item in written]))
    return into, [value for name, value in given.items() if name not in lost]


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
