"""The function and dispatch modes that are on, and autocast among them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from fmp._compat.compiler import constant_while_tracing

_autocast_is_on: Any = cast(Any, torch._C)._is_any_autocast_enabled

# Whether a class of tensors is made of others, which its `__tensor_flatten__` names.
wraps_tensors = is_traceable_wrapper_subclass_type
# A context in which neither function modes nor classes of tensors are asked.
DisableTorchFunction: Any = cast(Any, torch._C).DisableTorchFunction
# The `__torch_function__` of a class of tensors for which functions are the same as for plain ones.
plain_torch_function: Any = cast(Any, torch._C)._disabled_torch_function_impl


@constant_while_tracing
def autocast_depth() -> int:
    """Counts the `torch.autocast` contexts around the caller, those with `enabled=False` included."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@constant_while_tracing
def autocast_devices() -> tuple[str, ...]:
    """Lists the types of device for which `torch.autocast` is on around the caller."""
    devices = ("cpu", "cuda", "xpu", "mps", "hpu") if _autocast_is_on() else ()
    return tuple([device for device in devices if torch.is_autocast_enabled(device)])


def function_modes() -> list[TorchFunctionMode]:
    """Lists the function modes that are on, the innermost last; works while torch.compile traces, too."""
    return _get_current_function_mode_stack()


def remove_function_mode(mode: TorchFunctionMode) -> bool:
    """Takes a function mode off the stack of modes, wherever in it; says whether it was there."""
    stack = function_modes()
    if mode not in stack:
        return False
    above = [_pop_mode() for _ in range(len(stack) - stack.index(mode))][:-1]
    for other in reversed(above):
        _push_mode(other)
    return True


@contextmanager
def replaced_function_modes() -> Iterator[None]:
    """Empties the stack of function modes, and puts it back as it was afterwards."""
    outer = [_pop_mode() for _ in function_modes()]
    try:
        yield
    finally:
        for _ in function_modes():
            _pop_mode()
        for mode in reversed(outer):
            _push_mode(mode)


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Puts a mode on the stack without running its `__enter__`; `replaced_function_modes` takes it off again."""
    _push_mode(mode)


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Switches off all dispatch modes, and on again afterwards."""
    return _disable_current_modes()


def dispatch_modes() -> list[Any]:
    """Lists the dispatch modes that are on, the innermost last."""
    return _get_current_dispatch_mode_stack()


def pop_function_mode() -> None:
    """Takes off the innermost function mode."""
    _pop_mode()
