"""Where an op runs: in which module, at which line, and which argument of the function it takes."""

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fmp import _compat, tree

# What runs an op for someone else. Frames of these are not where the op was called.
_RECORDING = ("fmp.policy.recording", "fmp.policy.places", "fmp.policy.hazards")
_CASTING = ("fmp.policy.caster", "fmp.policy.cast_cache")
_LIBRARIES = ("torch", "optree")
_MACHINERY = frozenset(
    [*_RECORDING, *_CASTING, "fmp.policy.handlers", "fmp.policy.regions", "fmp._composite", "fmp.dropout"]
)
NOWHERE: Final = "-"


class Place(NamedTuple):
    """Where in the program an op was called.

    Attributes:
        where: The dotted path of the innermost module, relative to the outermost one, else the line.
        is_cast: Whether a caster called the op, to cast an argument.
        is_ours: Whether fmp itself called the op, not the user or a function of torch that the user called.
    """

    where: str
    is_cast: bool
    is_ours: bool


class Memory(NamedTuple):
    """Identifies the memory of a tensor while it lives, also below the wrappers of torch.func.

    Attributes:
        storage: The address of the storage, which views share.
        layout: Where in it the tensor lies.
        version: Counts the changes in place; None where torch does not.
    """

    storage: int
    layout: tuple[Any, ...]
    version: int | None


def memory(tensor: Tensor) -> Memory | None:
    """Finds the memory of a tensor; None if it has none or more than one."""
    with _compat.DisableTorchFunction():
        inner = torch.func.debug_unwrap(tensor, recurse=True)
        try:
            storage = inner.untyped_storage().data_ptr()
            layout = (inner.storage_offset(), tuple(inner.shape), inner.stride())
        except (NotImplementedError, RuntimeError):  # such as sparse and nested ones
            return None
        return Memory(storage, layout, None if inner.is_inference() else inner._version) if storage else None


class Arguments:
    """The leaves of a function's arguments, found again by their memory.

    Args:
        fn: The function.
        args: Its positional arguments, named as in its signature.
        kwargs: Its keyword arguments.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        named = [*zip(_names(fn, len(args)), args, strict=True), *kwargs.items()]
        self.tensors: list[Tensor] = []
        self._found: dict[int, dict[tuple[Any, ...], str]] = {}
        for name, argument in named:
            for path, leaf in tree.items(argument):
                if isinstance(leaf, Tensor):
                    self.tensors.append(leaf)
                    if (place := memory(leaf)) is not None:
                        self._found.setdefault(place.storage, {}).setdefault(
                            place.layout, f"{name}/{path}" if path else name
                        )

    def path_of(self, tensor: Tensor) -> str | None:
        """Returns the path of a leaf that is the tensor or a view of it."""
        place = memory(tensor)
        found = {} if place is None else self._found.get(place.storage, {})
        return None if place is None or not found else found.get(place.layout, next(iter(found.values())))

    def operand(self, tensors: Sequence[Tensor]) -> str:
        """Returns the path of a leaf among what an op takes, of a weight rather than of what it multiplies; or ""."""
        return next(iter(self.operands([*tensors[1:], *tensors[:1]])), "")

    def operands(self, tensors: Iterable[Tensor]) -> list[str]:
        """Returns the paths of all leaves among some tensors."""
        paths = [self.path_of(tensor) for tensor in tensors]
        return [path for path in paths if path is not None]


def place_of_call(outermost: types.CodeType) -> Place:
    """Looks up the frames of the caller, up to one that runs the given code.

    Args:
        outermost: The code of the function to stop at.
    """
    line = ""
    is_cast: bool | None = None
    is_ours: bool | None = None
    modules: list[nn.Module] = []
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not outermost:
        code, name = frame.f_code, frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        if code.co_varnames[:1] == ("self",) and isinstance(owner := frame.f_locals.get("self"), nn.Module):
            modules.append(owner)
        is_passing = package in _LIBRARIES or name in _RECORDING or code.co_name == "__torch_function__"
        if not is_passing and is_cast is None:
            is_cast = name in _CASTING and code.co_name in ("cast", "_to")
        if not is_passing and name not in _MACHINERY:
            # The code of a module of torch's, which fmp calls, is the user's.
            is_ours = package == "fmp" and not modules if is_ours is None else is_ours
            if not line and package != "fmp":
                line = f"{Path(code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return Place(_path(modules) or line or _class_of(modules) or NOWHERE, bool(is_cast), bool(is_ours))


def _path(modules: Sequence[nn.Module]) -> str:
    """Finds the path from the last of the modules, which is the outermost one, to the first."""
    parts = modules[-1].named_modules() if modules else ()
    return next((path for path, part in parts if part is modules[0]), "")


def _class_of(modules: Sequence[nn.Module]) -> str:
    return type(modules[0]).__name__ if modules else ""


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        # The signature of a module's own __call__ tells nothing.
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    named = [item.name for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    rest = next((f"{item.name}/" for item in parameters if item.kind is item.VAR_POSITIONAL), "")
    return [*named[:count], *[f"{rest}{index}" for index in range(count - len(named))]]
