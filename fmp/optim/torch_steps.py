"""One step of a torch optimizer on tensors that are not its own: built on copies, loaded, stepped, read back."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fmp import _compat, tree
from fmp.dtypes import full_precision
from fmp.optim import checks
from fmp.optim.base import Scalar
from fmp.optim.torch_memory import take_step

Slots = dict[str, Any]

_REFUSED = {
    torch.optim.LBFGS: "its step evaluates the loss several times; minimize with it outside of a train step",
    torch.optim.SparseAdam: "it takes sparse gradients only; use torch.optim.Adam",
}
# What the plain form of an algorithm needs: one tensor at a time, and nothing that a kernel overwrites.
_PLAIN = {"foreach": False, "fused": False}
# What keeps numbers on the device, and lets autograd record the step.
_ON_DEVICE = {**_PLAIN, "capturable": True, "differentiable": True}


class Maker(NamedTuple):
    """Builds the optimizer in its plain form, or in the one that keeps everything on the device."""

    optimizer_class: Any
    plain: dict[str, Any]
    on_device: dict[str, Any]

    def build(self, values: Sequence[torch.Tensor], *, on_device: bool) -> torch.optim.Optimizer:
        """Builds it for some tensors, which it will change in place."""
        return self.optimizer_class(list(values), **(self.on_device if on_device else self.plain))


@_compat.constant_while_tracing
def make(optimizer_class: Any, kwargs: dict[str, Any]) -> Maker:
    """Looks at a class and its options, of which `lr` is a number here.

    Raises:
        TypeError: If it is not a class of optimizers, is one that cannot be a pure function, or takes no such option.
    """
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer_class must be a class such as torch.optim.AdamW, got {checks.shown(optimizer_class)}; "
            "its options are further arguments of from_torch"
        )
    for refused, advice in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise TypeError(f"from_torch cannot take {optimizer_class.__name__}: {advice}")
    accepted = inspect.signature(optimizer_class).parameters
    open_ended = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    if "params" in kwargs or (not open_ended and (unknown := kwargs.keys() - accepted.keys())):
        wrong = ["params"] if "params" in kwargs else sorted(unknown)
        raise TypeError(
            f"{optimizer_class.__name__} takes no option {wrong}; it takes {sorted(set(accepted) - {'params'})}"
        )
    plain = {name: value for name, value in _PLAIN.items() if name in accepted}
    on_device = {name: value for name, value in _ON_DEVICE.items() if name in accepted}
    return Maker(optimizer_class, plain | kwargs, on_device | kwargs)


_IN_GRAPHS = _compat.Numbered[Maker]()  # what graphs of torch.compile may call


def place_in_graphs(maker: Maker) -> int:
    """Returns the number by which `run_in_graph` knows a maker; equal ones share it."""
    torch.compiler.allow_in_graph(run_in_graph)
    return _IN_GRAPHS.number_of(maker)


@_compat.constant_while_tracing
def make_in_graphs(optimizer_class: Any, kwargs: dict[str, Any]) -> int:
    """Returns the number of a maker that is made while the compiler traces, and that it could not hand on."""
    return place_in_graphs(make(optimizer_class, kwargs))


def run_in_graph(place: int, values: list[torch.Tensor], *args: Any) -> tuple[torch.Tensor, ...]:
    """Does what `run` does, under torch.compile.

    The tracer cannot follow an optimizer's constructor, but need not: the step is traced below it.
    """
    # Steps look at the device of their parameters unless they are compiled, and a FakeTensor tells no mode of that.
    with _compat.as_compiling() if isinstance(values[0], _compat.FakeTensor) else contextlib.nullcontext():
        return run(_IN_GRAPHS[place], values, *args)


def run(
    maker: Maker,
    values: list[torch.Tensor],
    grads: list[torch.Tensor],
    slots: list[Slots],
    ages: dict[str, torch.Tensor],
    numbers: tuple[str, ...],
    rate: Scalar | None,
    host: bool,
) -> tuple[torch.Tensor, ...]:
    """Makes one step; returns for each parameter its update, its slots, and its age if that matters."""
    names = [list(each) for each in slots]
    # An input without batch dimensions cannot take in place what has them: every copy gets those of all inputs.
    tensors = [*values, *grads, *[slot for each in slots for slot in each.values()], *ages.values(), rate]
    copy = _copier([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])
    old = [value.reshape(1) if value.ndim == 0 else value for value in values]

    def step(loaded: list[Slots] | None) -> tuple[list[torch.Tensor], list[Slots]]:
        new = [copy(value) for value in old]
        optimizer = maker.build(new, on_device=not host)
        for index, value in enumerate(new):
            value.grad = copy(grads[index]).reshape(value.shape)
            if loaded is not None:
                optimizer.state[value] = {
                    name: _loaded(slot, host, name in numbers, copy) for name, slot in loaded[index].items()
                }
        if rate is not None:
            asked = rate.item() if host and isinstance(rate, torch.Tensor) else rate
            optimizer.param_groups[0]["lr"] = asked
        take_step(optimizer)
        return new, [optimizer.state[value] for value in new]

    if host:
        with torch.no_grad():
            results = [step(slots)] + ([step(None)] if ages else [])
    else:
        with _OnDevice(pretend="capturable" in maker.on_device and values[0].device.type == "cpu"):
            results = [step(slots)] + ([step(None)] if ages else [])

    flat: list[torch.Tensor] = []
    for row, value in enumerate(values):
        rows = [
            [new[row].reshape(value.shape), *_stored(states[row], slots[row], names[row], value, maker)]
            for new, states in results
        ]
        age = ages.get(str(row))
        new_value, *new_slots = (
            rows[0] if age is None else [torch.where(age > 0, a, b) for a, b in zip(*rows, strict=True)]
        )
        flat += [new_value - value, *new_slots]
        if age is not None:
            flat.append(age + 1)
    return tuple(flat)


class _FirstValues(dict[str, Any]):
    """The state of a parameter that remembers with what each entry began."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Slots = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.first.setdefault(name, value.detach().clone() if isinstance(value, torch.Tensor) else value)
        super().__setitem__(name, value)

    def setdefault(self, name: str, value: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if name not in self:
            self[name] = value
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


def first_slots(maker: Maker, leaf: torch.Tensor) -> Slots:
    """Finds with what state a parameter begins, by a step with a zero gradient on a copy."""
    value = leaf.detach().to(full_precision(leaf.dtype), copy=True)
    value = value.reshape(1) if value.ndim == 0 else value
    real = value.device.type != "cpu"
    optimizer = maker.build([value], on_device=real)
    value.grad = torch.zeros_like(value)
    state = _FirstValues()
    state.update(optimizer.state.get(value, {}))
    optimizer.state[value] = state
    with torch.no_grad(), _OnDevice(pretend=False):
        take_step(optimizer)
    first = {name: slot for name, slot in state.first.items() if slot is not None or state[name] is not None}
    for name, slot in first.items():
        if not isinstance(slot, torch.Tensor | bool | int | float):
            raise TypeError(
                f"{type(optimizer).__name__} keeps {name}={slot!r} for a parameter; only tensors and numbers can "
                "be state"
            )
    return first


def beginning(maker: Maker, leaf: torch.Tensor) -> tuple[Slots, bool]:
    """Finds a state to begin with, and says whether a first step with it differs from torch's, from nothing.

    SGD, for one, takes its first gradient for the momentum, without dampening.
    """
    count = torch.arange(leaf.numel(), device=leaf.device, dtype=full_precision(leaf.dtype))
    sample = torch.cos(count + 1).reshape(leaf.shape or (1,))
    expected = _stepped(maker, sample, {})
    first = first_slots(maker, leaf)
    if _equal(_stepped(maker, sample, first_slots(maker, sample)), expected):
        return first, False
    # What was kept only after the step with a zero gradient may have seen weight decay.
    return _zeroed(first), not _equal(_stepped(maker, sample, _zeroed(first_slots(maker, sample))), expected)


def _zeroed(slots: Slots) -> Slots:
    return {name: torch.zeros_like(slot) if isinstance(slot, torch.Tensor) else slot for name, slot in slots.items()}


def _stepped(maker: Maker, sample: torch.Tensor, slots: Slots) -> list[torch.Tensor]:
    value = sample.clone()
    optimizer = maker.build([value], on_device=value.device.type != "cpu")
    value.grad = sample.flip(0) + 0.5
    if slots:
        optimizer.state[value] = dict(slots)
    with torch.no_grad():
        take_step(optimizer)
    kept = sorted(optimizer.state[value].items(), key=lambda item: item[0])
    return [value, *[torch.as_tensor(slot) for _, slot in kept if slot is not None]]


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _loaded(slot: torch.Tensor, host: bool, number: bool, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if host and number:
        return slot.item()
    wide = not host and slot.ndim == 0 and slot.is_floating_point() and slot.device.type != "mps"
    # Powers of decay rates close to 1 lose digits in float32; one 0-dim tensor in float64 costs nothing.
    return copy(slot.to(torch.float64) if wide else slot)


def _stored(state: Slots, old: Slots, names: list[str], like: torch.Tensor, maker: Maker) -> list[torch.Tensor]:
    found = {name for name, slot in state.items() if slot is not None}
    if found != set(names):
        raise ValueError(
            f"{maker.optimizer_class.__name__} kept {sorted(names)} for a parameter {tree.describe(like)} at first, "
            f"and now keeps {sorted(found)}; state must not change its structure"
        )
    return [torch.as_tensor(state[name], dtype=old[name].dtype, device=old[name].device) for name in names]


class _OnDevice(TorchFunctionMode):
    """Lets an optimizer's step compute with 0-dim tensors where it would ask for numbers.

    Args:
        pretend: Whether to name another device than the CPU, where torch refuses `capturable` although it works.
    """

    def __init__(self, pretend: bool) -> None:
        super().__init__()
        self.pretend = pretend

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Makes one call, with its numbers as tensors."""
        if func is torch.Tensor.item:
            return args[0]
        if self.pretend and func == _DEVICE_OF:
            return torch.device("cuda")
        kwargs = dict(kwargs or {})
        args = _narrowed(args)
        for name, position in (("alpha", 1), ("value", 1)):
            if isinstance(kwargs.get(name), torch.Tensor):
                factor = kwargs.pop(name)
                scaled = args[position] * (factor.to(args[position].dtype) if args[position].ndim else factor)
                args = (*args[:position], scaled, *args[position + 1 :])
        if func in _OUT_OF_PLACE:
            return args[0].copy_(_OUT_OF_PLACE[func](*args, **kwargs))
        return func(*args, **kwargs)


# These have batching rules only where they return new tensors.
_OUT_OF_PLACE: dict[Any, Any] = {
    getattr(torch.Tensor, f"{name}_"): getattr(torch.Tensor, name) for name in ("lerp", "addcmul", "addcdiv", "clamp")
}
_DEVICE_OF: Any = torch.Tensor.device.__get__  # pyright: ignore[reportAttributeAccessIssue]


def _narrowed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts 0-dim tensors to the dtype of those with dimensions, as torch does inside of an operation."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    sized = next((arg.dtype for arg in tensors if arg.ndim), None)
    if sized is None or all(arg.ndim for arg in tensors):
        return args
    return tuple(
        arg.to(sized) if isinstance(arg, torch.Tensor) and arg.is_floating_point() and not arg.ndim else arg
        for arg in args
    )


def _copier(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    if not _compat.transform_active():
        return torch.clone
    never = torch.stack([torch.zeros_like(tensor, dtype=torch.bool).any() for tensor in tensors]).any()
    return lambda tensor: torch.where(never, tensor, tensor)
