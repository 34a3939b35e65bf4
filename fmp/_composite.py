"""How a TorchFunctionMode reaches inside functions that it is shown as one call, and how two modes work together.

A mode is off while it handles a function. These helpers turn it on again around a part of that function's body.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fmp import _compat


class CastingMode(TorchFunctionMode):
    """A mode that casts the arguments of torch functions, and of what other modes put in their place."""

    def run_as(self, func: Any, substitute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Casts the arguments as those of `func`, and runs the substitute on them without casting inside."""
        raise NotImplementedError


def run_as(func: Any, substitute: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Runs what stands for a torch function as one op, cast as that function would be.

    Args:
        func: The torch function.
        substitute: What to run.
        *args: Its arguments, which are those of `func`.
        **kwargs: Likewise.
    """
    for mode in reversed(_compat.function_modes()):
        if isinstance(mode, CastingMode):
            return mode.run_as(func, substitute, args, kwargs)
    return substitute(*args, **kwargs)


def body(func: Any) -> types.FunctionType:
    """Copies a Python function of torch without its check for overrides.

    Turned on again, a mode would get the same function once more, because asking for overrides is the first thing that
    the function does. Without that, the mode gets what the function calls.

    Args:
        func: A function of `torch.nn.functional` or the like that begins with `has_torch_function`.
    """
    replaced: dict[str, Any] = dict.fromkeys(override_checks(func), lambda *args: False)
    if "_check_key_padding_mask" in func.__code__.co_names:
        replaced["_check_key_padding_mask"] = _check_key_padding_mask
    return types.FunctionType(
        func.__code__, func.__globals__ | replaced, func.__name__, func.__defaults__, func.__closure__
    )


def override_checks(func: Any) -> list[str]:
    """Lists the names by which a Python function of torch asks for overrides; empty for one that does not."""
    return [name for name in func.__code__.co_names if name.startswith("has_torch_function")]


def _check_key_padding_mask(key_padding_mask: torch.Tensor, src_len: int, bsz: int) -> None:
    """Does what torch's own function does, without a message that torch.compile cannot trace."""
    if tuple(key_padding_mask.shape[:2]) != (bsz, src_len):
        raise AssertionError(
            f"key_padding_mask must have the shape ({bsz}, {src_len}), got {tuple(key_padding_mask.shape)}"
        )


def inside(body: Callable[..., Any], mode: TorchFunctionMode, /, *args: Any, **kwargs: Any) -> Any:
    """Runs the body of a composite function with the mode turned on."""
    with mode:
        return body(*args, **kwargs)


def custom_function(mode: TorchFunctionMode, function: type[torch.autograd.Function], /, *args: Any) -> Any:
    """Runs a custom function under a transform of torch.func, with the mode turned on inside.

    Without a transform the body of a custom function is not hidden from a mode; with one it is.
    """
    members: dict[str, Any] = {"forward": staticmethod(functools.partial(inside, function.forward, mode))}
    if function.vmap is not torch.autograd.Function.vmap:
        members["vmap"] = staticmethod(functools.partial(inside, function.vmap, mode))
    return torch.ops.higher_order.custom_function_call(type(function.__name__, (function,), members), *args)
