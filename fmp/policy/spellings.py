"""The many callables that are one op: `x @ y`, `torch.matmul`, `torch.linalg.matmul`, `torch.ops.aten.matmul`."""

import difflib
import functools
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from fmp import _compat
from fmp.policy.oplists import ALIASES, OPERATORS

Op = Callable[..., Any]

_F: Any = functional

# Where torch keeps its ops, and what aten puts before their names.
_OWNERS: tuple[tuple[Any, str], ...] = (
    (_compat.FUNCTIONS, ""),
    (_F, ""),
    (_compat.NN_FUNCTIONS, ""),
    (_compat.SPARSE_FUNCTIONS, ""),
    (torch.linalg, "linalg_"),
    (torch.special, "special_"),
    (torch.fft, "fft_"),
    (torch.functional, ""),
    (torch, ""),
    (torch.Tensor, ""),
)

# Functions whose `__name__` is not their op's: `Tensor.unfold`, which slides a window along a dimension, is another op.
_MISNAMED: dict[Op, str] = {_F.unfold: "im2col", _F.fold: "col2im", _F.threshold: "threshold"}

# Python functions that do no more than call the op. A mode sees only that call, but a user may name the function.
_FORWARDING = ("sigmoid", "tanh", "grouped_mm", "meshgrid", "upsample", "upsample_nearest", "upsample_bilinear")

_ALIAS_OF = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
_OPERATOR_OF = {symbol: name for name, symbols in OPERATORS.items() for symbol in symbols}

_PREFIXES: dict[str, Any] = {
    "torch": torch,
    "torch.functional": torch.functional,
    "torch.Tensor": torch.Tensor,
    "Tensor": torch.Tensor,
    "torch.nn.functional": functional,
    "nn.functional": functional,
    "F": functional,
    "torch._C._nn": _compat.NN_FUNCTIONS,
    "torch._VF": _compat.FUNCTIONS,
    "torch.linalg": torch.linalg,
    "linalg": torch.linalg,
    "torch.special": torch.special,
    "special": torch.special,
    "torch.fft": torch.fft,
    "torch.sparse": torch.sparse,
    "fft": torch.fft,
    "operator": operator,
}
_REGISTERED = re.compile(r"(?:(?:torch\.)?ops\.)?(\w+)(?:::|\.)(\w+)(?:\.\w+)?")


@dataclass(frozen=True)
class Spellings:
    """Every callable of torch by which one op can reach a `TorchFunctionMode`.

    Attributes:
        plain: Those that return a new tensor, the ones with an `out` argument included.
        in_place: Those that write into their first argument: `Tensor.add_`, `Tensor.__setitem__`.
    """

    plain: tuple[Op, ...]
    in_place: tuple[Op, ...]

    def __contains__(self, op: object) -> bool:
        return op in self.plain or op in self.in_place


def spellings(name: str) -> Spellings:
    """Lists the callables of torch that are the op of a canonical name.

    Args:
        name: A canonical name, as `name_of` gives it.

    Returns:
        The callables; none where the installed torch has no such op.

    Example:
        >>> torch.add in spellings("add").plain, torch.Tensor.__iadd__ in spellings("add").in_place
        (True, True)
    """
    # Libraries of custom ops grow while a program runs.
    return _registered(name) if "::" in name else _of_torch(name)


@_compat.constant_while_tracing
def name_of(op: Op | str) -> str:
    """Gives the canonical name of an op from any of its spellings.

    The canonical name is aten's, without overload, where torch has the op under it, otherwise the one in
    `torch.nn.functional`. A custom op has its qualified name, `mylib::my_op`.

    Args:
        op: A function or method of torch, a function of the `operator` module, an op of `torch.ops`, or the name of
            one: `"softmax"`, `"F.softmax"`, `"torch.linalg.norm"`, `"aten.mm"`, `"mylib::my_op"`.

    Returns:
        The canonical name.

    Raises:
        ValueError: If torch has no op of that name.
        TypeError: If `op` is something that a `TorchFunctionMode` is never shown: a Python function, a class.

    Example:
        >>> name_of(torch.Tensor.__rdiv__), name_of("torch.special.softmax"), name_of(operator.imul)
        ('div', 'softmax', 'mul')
        >>> name_of("soft_max")
        Traceback (most recent call last):
        ValueError: torch has no op 'soft_max'; did you mean 'softmax'?
    """
    if isinstance(op, str):
        return _named_in_text(op)
    if not callable(op):
        hint = "; name several ops as arguments of their own" if isinstance(op, list | tuple | set) else ""
        raise TypeError(
            f"op must be a function of torch or the name of one, got {op!r} of type {type(op).__name__}{hint}"
        )
    op = _compat.registered_op(op)
    name = _candidate(op)
    if name is None or not (_is_operator(op) or op in spellings(name)):
        raise TypeError(
            f"{_described(op)} is no op of torch, so no rule can be found for it when it is called; decorate it, or a "
            "function that calls it, with fmp.low_precision, fmp.full_precision or fmp.promote"
        )
    return name


# --- from a name to callables


@functools.cache
def _of_torch(name: str) -> Spellings:
    names = (name, *ALIASES.get(name, ()))
    symbols = OPERATORS.get(name, ())
    operators = [f"__{side}{symbol}__" for symbol in symbols for side in ("", "r")]
    writing = [f"__i{symbol}__" for symbol in symbols] + ["__setitem__"] * (name == "index_put")
    return Spellings(
        plain=_unique(
            [
                *_functions([*names, *operators]),
                *[op for op, right in _MISNAMED.items() if right == name],
                *[attribute.__get__ for attribute in _attributes(names)],
            ]
        ),
        in_place=_unique(
            [
                *_functions([*[f"{form}_" for form in names], *writing]),
                *[attribute.__set__ for attribute in _attributes(names)],
            ]
        ),
    )


def _functions(names: Iterable[str]) -> Iterator[Op]:
    for name in names:
        for owner, prefix in _OWNERS:
            value = getattr(owner, name.removeprefix(prefix), None) if name.startswith(prefix) else None
            if value is not None and _is_op(value, owner) and value not in _MISNAMED:
                yield value
        yield from _packet("aten", name)


def _attributes(names: Iterable[str]) -> Iterator[Any]:
    """The attributes of tensors: a mode is shown `Tensor.T.__get__` for `x.T`."""
    values = [getattr(torch.Tensor, name, None) for name in names]
    return (value for value in values if isinstance(value, types.GetSetDescriptorType | property))


def _is_op(value: Any, owner: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return _is_shown(value) or (value.__name__ in _FORWARDING and value.__module__ in _PREFIXES)
    if owner is torch.Tensor:
        inherited = isinstance(value, types.WrapperDescriptorType) and hasattr(object, value.__name__)
        return isinstance(value, types.MethodDescriptorType | types.WrapperDescriptorType) and not inherited
    # `torch` holds settings such as torch.set_num_threads as well; its ops are in `_VariableFunctions`.
    return isinstance(value, types.BuiltinFunctionType) and owner is not torch


def _is_shown(function: types.FunctionType) -> bool:
    """Says whether a Python function hands itself to the function mode: by this call, or by torch's way to choose."""
    return "handle_torch_function" in function.__code__.co_names or function.__qualname__.startswith(
        "boolean_dispatch."
    )


def _registered(name: str) -> Spellings:
    library, _, base = name.partition("::")
    ops = _unique(_packet(library, base))
    return Spellings(plain=(), in_place=ops) if base.endswith("_") else Spellings(plain=ops, in_place=())


def _packet(library: str, name: str) -> Iterator[Any]:
    packet = getattr(getattr(torch.ops, library), name, None)
    if isinstance(packet, _compat.OpOverloadPacket):
        yield packet
        for overload in packet.overloads():
            yield getattr(packet, overload)


def _unique(ops: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(dict.fromkeys(ops))


# --- from a callable to its name


def _candidate(op: Any) -> str | None:
    """The name that the op must have if it is one; whether it is, its spellings tell."""
    if isinstance(op, _compat.OpOverload):
        op = op.overloadpacket
    if isinstance(op, _compat.OpOverloadPacket):
        library, _, base = _compat.packet_name(op).partition("::")
        return _canonical(base) if library == "aten" else _compat.packet_name(op)
    if _is_operator(op):
        return _candidate_of_operator(op.__name__)
    if isinstance(op, types.MethodWrapperType) and op.__name__ in ("__get__", "__set__"):
        attribute: Any = op.__self__
        op = attribute.fget if isinstance(attribute, property) else attribute
    name = getattr(op, "__name__", None)
    if not isinstance(name, str) or isinstance(op, type):
        return None
    return _MISNAMED[op] if op in _MISNAMED else _canonical(name)


def _canonical(name: str) -> str:
    if name == "__setitem__":
        return "index_put"
    if name.startswith("__") and name.endswith("__"):
        symbol = name[2:-2]
        reflected = symbol[1:] if symbol[:1] in ("r", "i") else symbol
        return _OPERATOR_OF.get(symbol) or _OPERATOR_OF.get(reflected) or name
    name = name.removesuffix("_")
    return _ALIAS_OF.get(name, name)


def _is_operator(op: Any) -> bool:
    return isinstance(op, types.BuiltinFunctionType) and op.__module__ == operator.add.__module__


def _candidate_of_operator(name: str) -> str | None:
    method = f"__{name.strip('_')}__"
    canonical = _canonical(method)
    return canonical if canonical != method or hasattr(torch.Tensor, method) else None


def _described(op: Any) -> str:
    kind = "the class" if isinstance(op, type) else "the function" if hasattr(op, "__name__") else "the callable"
    return f"{kind} {getattr(op, '__qualname__', None) or repr(op)}"


# --- from text


def _named_in_text(text: str) -> str:
    prefix, _, attribute = text.rpartition(".")
    if not prefix and "::" not in text:
        name = _canonical(text)
        spelled = spellings(name)
        if text and (spelled.plain or spelled.in_place):
            return name
    elif prefix in _PREFIXES:
        op = getattr(_PREFIXES[prefix], attribute, None)
        if callable(op):
            return name_of(op)
    registered = _REGISTERED.fullmatch(text)
    if registered and (ops := list(_packet(*registered.groups()))):
        return name_of(ops[0])
    nearest = difflib.get_close_matches(attribute.rpartition("::")[2], _known_names(), n=1)
    raise ValueError(f"torch has no op {text!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else ""))


def _known_names() -> list[str]:
    names = [
        prefix + name
        for owner, prefix in _OWNERS
        for name in dir(owner)
        if not name.startswith("_") and _is_op(getattr(owner, name), owner)
    ]
    return sorted(set(names))
