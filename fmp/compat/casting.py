"""O1's casting mode of a session: entered by `initialize`, left by `shutdown`, paused while an optimizer steps."""

import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from fmp import _compat
from fmp._composite import body, inside
from fmp.dtypes import short_name
from fmp.policy import OpRules
from fmp.policy.caster import Caster


class Casting:
    """Casts what torch functions are given in this thread of this process, from `enter` to `leave`.

    Args:
        rules: The rules.
        low: What half means.
        tells: Prints each cast.
    """

    def __init__(self, rules: OpRules, low: torch.dtype, *, tells: bool = False):
        self._caster = TellingCaster(rules, low) if tells else SessionCaster(rules, low)
        self._is_on = False
        self._thread = threading.get_ident()

    def enter(self) -> None:
        """Begins casting."""
        self._caster.__enter__()
        self._is_on = True

    def pause(self, call: FrameType | None) -> None:
        """Switches casting off.

        Args:
            call: The call to whose end it is off; None for until `resume`.
        """
        self._caster.pause(call)

    def resume(self) -> None:
        """Switches casting on again, if `pause` has switched it off."""
        self._caster.resume()

    def renew_cache(self) -> None:
        """Forgets the casts of weights."""
        self._caster.renew()

    def check_on(self) -> None:
        """Refuses to go on without casting.

        Raises:
            RuntimeError: If casting is not on in this thread.
        """
        if self._caster not in _compat.function_modes() or self._caster.is_suspended():
            raise RuntimeError(
                "the casting of O1 is not on here: train in the process and the thread that called amp.initialize, and "
                "call it outside of `with` blocks of other function modes, whose end would take the casting away"
            )

    def leave(self) -> None:
        """Ends casting.

        Raises:
            RuntimeError: If this is another thread than the one that it began in.
        """
        if not self._is_on:
            return
        if threading.get_ident() != self._thread:
            raise RuntimeError("amp.shutdown: call it in the thread that called amp.initialize")
        self._is_on = False
        _compat.remove_function_mode(self._caster)


class Resume:
    """A forward pre-hook that switches casting on, in case a failed step that was compiled has left it off.

    Args:
        casting: The casting mode; None in a copy of the model.
    """

    def __init__(self, casting: Casting | None):
        self.casting = casting

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Switches it on."""
        if self.casting is not None:
            self.casting.resume()

    def __deepcopy__(self, memo: Any) -> "Resume":
        return Resume(None)

    def __reduce__(self) -> Any:
        return Resume, (None,)


# A mode is off inside the functions that it is shown, and these run custom functions and recomputation.
_BACKWARD = {
    function: body(function) for function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}


class SessionCaster(Caster):
    """A caster that stays on in a backward pass, and is off during a step and in other processes."""

    def __init__(self, rules: OpRules, low: torch.dtype):
        super().__init__(rules, low)
        self._process = _process()
        self._paused = False
        self._call: FrameType | None = None  # the step to whose end it is paused

    def pause(self, call: FrameType | None) -> None:
        """Switches casting off, see `Casting.pause`."""
        self.covers += not self._paused
        self._paused, self._call = True, call

    def resume(self) -> None:
        """Switches casting on again, if `pause` has switched it off."""
        self.covers -= self._paused
        self._paused, self._call = False, None

    def resume_after_failure(self) -> None:
        """Switches casting on again if the step has raised, which runs no hook."""
        if self._call is not None and not runs(self._call):
            self.resume()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs one torch function."""
        if func in _BACKWARD:
            return inside(_BACKWARD[func], self, *args, **(kwargs or {}))
        if self.covers and not is_compiling():
            self.resume_after_failure()
        return super().__torch_function__(func, types, args, kwargs)

    def is_suspended(self) -> bool:
        """Says whether this is another process, such as one that loads data.

        Apex knows nothing of `torch.autocast`, which torch's checkpoint switches off when it recomputes.
        """
        return _process() != self._process


class TellingCaster(SessionCaster):
    """A caster that prints each cast, for `verbosity=2`."""

    _op = ""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs one torch function."""
        self._op = getattr(func, "__name__", repr(func))
        return super().__torch_function__(func, types, args, kwargs)

    def _to(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        print(f"{short_name(tensor.dtype)}->{short_name(dtype)} ({self._op})")
        return super()._to(tensor, dtype)


@_compat.constant_while_tracing
def _process() -> int:
    return os.getpid()


def runs(call: FrameType) -> bool:
    """Says whether a call has not ended yet, in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


def in_this_thread(casting: Casting | None) -> AbstractContextManager[Any]:
    """Keeps a backward pass in the thread of the caller, where the casting mode is.

    On a GPU torch runs it in another thread, and custom functions and recomputation would not be cast.
    """
    return nullcontext() if casting is None else torch.autograd.set_multithreading_enabled(False)
