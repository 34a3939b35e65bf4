"""What `functionalize` and `Model.apply` refuse, because it would go wrong without a word."""

import collections
import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fmp import tree
from fmp.distributed_modules import check_no_wrapper

_REFUSED = {
    "DataParallel": "it copies the module inside each call; functionalize the inner module, `.module`",
    "ScriptModule": "its tensors cannot be replaced; functionalize the module before it is scripted",
}
# Attributes of nn.Module that no call reads, that are not copied, or whose contents are visited on their own.
_UNREAD = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")
_SAVING = ("_state_dict", "_load_state_dict")


def check_module(module: Any) -> None:
    """Refuses what cannot be a pure function of its parameters and buffers.

    Args:
        module: What was given to `functionalize`.

    Raises:
        TypeError: If it is not a module, or has a part that runs its own collectives or cannot run with other tensors
            than its own.
        ValueError: If a tensor is not initialized yet or has gradient hooks, if an embedding renormalizes its weight,
            or if a function in it refers to the module itself.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    check_no_wrapper(module, "functionalize")
    for path, part in module.named_modules():
        for cls in type(part).__mro__:
            if cls.__name__ in _REFUSED and cls.__module__.startswith("torch."):
                raise TypeError(f"{path or 'module'} is a {cls.__name__}: {_REFUSED[cls.__name__]}")
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise ValueError(
                f"{path or 'module'} has max_norm={part.max_norm}, with which each call overwrites the weight that it "
                "was given; set max_norm=None, and renormalize in forward or after the update"
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} is not initialized yet; call the module once on a batch, then functionalize it")
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name} has gradient hooks, which the tensors given to `apply` do not have; remove them, and change "
                "the gradients that `fmp.value_and_grad` returns"
            )
    _check_functions(module)


def _check_functions(module: nn.Module) -> None:
    """Refuses functions that refer to the module: they are not copied, and would go on using the user's one."""
    own: dict[int, str] = {id(part): path or "the module" for path, part in module.named_modules()}
    own |= {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    storages = own_storages(module)
    seen: dict[int, Any] = {}
    for name, function in _functions(module):
        for held in _captured(function, seen):
            place = own.get(id(held))
            if place is None and isinstance(held, torch.Tensor) and storage(held) in storages:
                place = "one of its tensors"
            if place is not None:
                raise ValueError(
                    f"{name}: the function {function.__qualname__} refers to {place}, and would go on using it instead "
                    "of what is given to `apply`; make it a method, or let it take the module as an argument, as hooks "
                    "do"
                )


def _functions(module: nn.Module) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in attributes(module):
        if isinstance(value, types.FunctionType):
            yield name, value
    classes = {cls for part in module.modules() for cls in type(part).__mro__ if not _is_torchs(cls)}
    for cls in classes:
        for name, value in vars(cls).items():
            if isinstance(value, types.FunctionType) and name != "__init__":  # which no call runs
                yield f"{cls.__qualname__}.{name}", value


def _captured(function: types.FunctionType, seen: dict[int, Any]) -> Iterator[Any]:
    """Yields what a function refers to by closure, defaults and globals, and so do the functions among it."""
    held: list[Any] = [function]
    while held:
        value = held.pop()
        if id(value) in seen:
            continue
        if isinstance(value, nn.Module | torch.Tensor):
            yield value
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            held += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            held += [value.__defaults__, value.__kwdefaults__]
            yield from [value.__globals__.get(name) for name in _global_names(value.__code__)]
        else:
            held += _contents(value)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _global_names(const)


def attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields what the plain attributes of a module and its parts hold, hooks included, each thing once.

    Args:
        module: Any module.

    Returns:
        Pairs of the attribute's dotted name and a value. Containers and objects come before what is in them.
    """
    seen: dict[int, Any] = {id(part): part for part in module.modules()}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _UNREAD or name.startswith(_SAVING):
                continue
            if name == "forward" and type(part).__name__ == "OptimizedModule":
                continue  # torch.compile makes it anew for the copy
            held = [value]
            while held:
                value = held.pop()
                if id(value) in seen:
                    continue
                seen[id(value)] = value
                yield f"{path}.{name}".removeprefix("."), value
                held += _contents(value)
                if hasattr(value, "__dict__") and not _is_closed(value):
                    held += vars(value).values()


def _contents(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return [value.__self__] if isinstance(value, types.MethodType) else []


def _is_closed(value: Any) -> bool:
    known = isinstance(value, type | types.ModuleType | types.FunctionType | torch.Tensor)
    return known or (_is_torchs(type(value)) and not isinstance(value, nn.Module))


def _is_torchs(cls: type) -> bool:
    return cls is object or cls.__module__.partition(".")[0] == "torch"


def own_storages(module: nn.Module) -> set[int]:
    """Identifies the memory of a module's parameters and buffers.

    Args:
        module: Any module.
    """
    found = {storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return {number for number in found if number is not None}


def storage(tensor: torch.Tensor) -> int | None:
    """Identifies the memory of a tensor.

    Args:
        tensor: Any tensor.

    Returns:
        A number; None for a tensor without memory of the usual kind, such as a sparse one.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def check_tensors(kind: str, given: Mapping[str, Any], shapes: dict[str, torch.Size]) -> None:
    """Compares tensors given to `Model.apply` with those of the module.

    Args:
        kind: The name of the argument.
        given: Its value.
        shapes: The shapes in the module.

    Raises:
        KeyError: If a name is missing or unknown.
        ValueError: If a shape differs.
        TypeError: If one is not a tensor.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"{kind} must be a dictionary of tensors by name, got {type(given).__name__}")
    if given.keys() != shapes.keys():
        missing, unknown = sorted(shapes.keys() - given.keys()), sorted(given.keys() - shapes.keys())
        raise KeyError(
            f"{kind}: " + "; ".join([f"missing {name}" for name in missing] + [f"unknown {name}" for name in unknown])
        )
    for name, shape in shapes.items():
        tensor = given[name]
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{kind}[{name!r}] must be a tensor, got {type(tensor).__name__}")
        if tensor.shape != shape:
            hint = "; map over stacked ones with torch.func.vmap" if tensor.shape[1:] == shape else ""
            raise ValueError(
                f"{kind}[{name!r}] is {tree.describe(tensor)}, but the module has the shape {list(shape)}{hint}"
            )


def check_new_buffers(buffers: Mapping[str, Any], shapes: dict[str, torch.Size]) -> None:
    """Refuses buffers that the next call would not take.

    Args:
        buffers: The buffers after a call.
        shapes: The shapes in the module.

    Raises:
        ValueError: If one is no tensor or has another shape.
    """
    for name, shape in shapes.items():
        tensor = buffers[name]
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"the buffer {name} was removed during the call; leave a tensor of its shape in its place")
        if tensor.shape != shape:
            raise ValueError(
                f"the buffer {name} became {tree.describe(tensor)} during the call, but a buffer keeps its shape, "
                f"{list(shape)}; give it its final size when the module is made"
            )


def versions(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Counts how often each tensor was written into; inference tensors do not know.

    Args:
        tensors: Tensors by name.
    """
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors.values()]


def check_unwritten(before: list[int], given: Mapping[str, torch.Tensor], used: Mapping[str, Any]) -> None:
    """Refuses a call that wrote into its parameters, or put others in their place.

    Args:
        before: The versions of the parameters before the call.
        given: The parameters.
        used: What the module holds under their names after the call.

    Raises:
        ValueError: If a parameter was written into or replaced.
    """
    for (name, param), old, new in zip(given.items(), before, versions(given), strict=True):
        if old != new or used[name] is not param:
            raise ValueError(
                f"the module {'replaced' if old == new else 'wrote into'} its parameter {name} during the call; "
                "parameters only change between calls: make it a buffer, or do this to the params outside of `apply`"
            )
