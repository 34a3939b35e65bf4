"""Where an op was called: the line of the user's code, the module, and forward or backward.

A dispatch mode sees an op after autograd has numbered its node. So the nodes that are new when an op runs are its own:

    forward   the line is on the stack; note it for the new nodes
    backward  the node that runs has a number; its line was noted
"""

import contextlib
import functools
import linecache
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from fmp import _compat
from fmp._compat import ENGINE, next_number, running_node
from fmp.tree import values
from fmp.user_line import FMP, LIBRARIES, is_of_mode

FORWARD = "forward"
BACKWARD = "backward"
AGAIN = "forward, recomputed"

_HERE = os.path.dirname(__file__) + os.sep
_LIBRARIES = (*LIBRARIES, *[str(module.__file__) for module in (contextlib, functools)])
# What `apply` of a torch.autograd.Function calls. It need not be on the stack itself: since torch 2.14 it is C++ code.
_APPLIED = ("forward", "setup_context", "jvp", "vmap")
# What stands between an op and this file: a mode, and what keeps torch.compile out of it.
_WATCHING = ("op_", "nonfinite", "places", "magnitudes")
_BEFORE = (
    *[_HERE + name for name in _WATCHING],
    *[os.path.join(os.path.dirname(torch.__file__), name) for name in ("_compile.py", "_dynamo")],
)
_VALUES = str(values.__file__)
_RECOMPUTING = (os.path.join(FMP, "rematerialization"), str(torch.utils.checkpoint.__file__))


@dataclass(frozen=True, eq=False)
class Line:
    """A line of code.

    Attributes:
        file: The path of its file.
        number: Its number in it.
        function: The function that it belongs to.
        modules: The modules whose methods were running there, the innermost first.
    """

    file: str
    number: int
    function: str
    modules: tuple[nn.Module, ...] = ()

    def __str__(self) -> str:
        is_ours = self.file.startswith(FMP)
        file = os.path.relpath(self.file, os.path.dirname(FMP[:-1])) if is_ours else os.path.basename(self.file)
        return f"{file}:{self.number} in {self.function}"

    @property
    def source(self) -> str:
        """What the line says, if its file can be read."""
        return linecache.getline(self.file, self.number).strip()

    @property
    def module(self) -> str:
        """The dotted path of the innermost module below the outermost one; empty without one."""
        parts = self.modules[-1].named_modules() if self.modules else ()
        return next((path for path, part in parts if part is self.modules[0]), "")


@dataclass(frozen=True, eq=False)
class Place:
    """Where an op was called.

    Attributes:
        phase: FORWARD, BACKWARD, or AGAIN for what `fmp.remat` recomputes in a backward pass.
        line: The line of the op; in a backward pass, that of the forward op whose gradient is computed.
        inner: The line in a backward pass that the user wrote, such as that of a `torch.autograd.Function`, or None.
        node: The name of the node of autograd that ran, without what torch.func adds; empty in a forward pass.
        caller: The function of fmp that called the op by itself; None if it was the user's code or a node of autograd.
    """

    phase: str
    line: Line | None
    inner: Line | None = None
    node: str = ""
    caller: CodeType | None = None

    @property
    def is_measuring(self) -> bool:
        """Whether fmp only measures something there, where NaN stands for what is not known."""
        return self.caller is not None and self.caller.co_filename.startswith(_HERE)

    @property
    def is_selecting(self) -> bool:
        """Whether fmp only chooses between two trees there, as a step does to skip."""
        return self.caller is not None and self.caller.co_filename == _VALUES and self.caller.co_name == "choose"


class Places:
    """Finds the places of ops, and remembers those of the nodes that they leave for the backward pass.

    All passes must run in this thread.

    Args:
        outermost: The code of the function that calls what is watched.
    """

    def __init__(self, outermost: CodeType):
        self._outermost = outermost
        self._lines: dict[int, Line | None] = {}
        self._is_applied = functools.cache(_is_applied)
        self._first = next_number()

    def here(self) -> Place:
        """Finds the place of the op that a dispatch mode is being shown."""
        node = running_node()
        line, applied, is_in_python, is_again, caller = self._look(in_backward=node is not None)
        if node is None:
            place = Place(FORWARD, line, caller=caller)
        elif is_again:
            place = Place(AGAIN, line, caller=caller)
        else:
            known = self._lines.get(_compat.recorded_at(node), line)
            place = Place(BACKWARD, known, line if is_in_python else None, _name(node))
        made = applied or place.inner or place.line
        following = next_number()
        for number in range(self._first, following):
            self._lines[number] = made
        self._first = following
        return place

    def _look(self, *, in_backward: bool) -> tuple[Line | None, Line | None, bool, bool, CodeType | None]:
        """Looks up the stack.

        Returns:
            The line; the one that applied the torch.autograd.Function which it belongs to; whether a backward pass runs
            the line; whether that is a recomputation; and the function of fmp that called the op by itself.
        """
        found: FrameType | None = None
        applied: FrameType | None = None
        ours: FrameType | None = None
        nearest: FrameType | None = None
        is_in_function = is_below_ours = False
        caller: CodeType | None = None
        modules: list[nn.Module] = []
        is_again = False
        for frame in self._frames():
            code = frame.f_code
            if code is ENGINE and in_backward:
                # A node made of C++ code: what is above called for the whole backward pass.
                in_python = found is not None
                return _line(found, modules), _line(applied, modules), in_python, in_python and is_again, caller
            if code.co_varnames[:1] == ("self",) and isinstance(owner := frame.f_locals.get("self"), nn.Module):
                modules.append(owner)
            is_mode = is_of_mode(code)
            is_ours = code.co_filename.startswith(FMP)
            if not (is_mode or code.co_filename.startswith(_LIBRARIES)):
                found = found or frame
                if self._is_applied(code):
                    is_in_function = is_in_function or not is_below_ours
                else:
                    applied = applied or (frame if is_in_function else None)
            elif found is None:
                ours = ours or (frame if is_ours and not is_mode else None)
                caller = code if ours is frame and caller is None else caller
                nearest = nearest or frame
            else:
                is_again = is_again or code.co_filename.startswith(_RECOMPUTING)
                # A function of fmp's, such as remat, calls the user's in the forward pass of a Function of its own.
                is_below_ours = is_below_ours or is_ours
                is_in_function = is_in_function or (self._is_applied(code) and not is_below_ours)
        return _line(found or ours or nearest, modules), _line(applied, modules), False, False, caller

    def _frames(self) -> Iterator[FrameType]:
        """Yields the frames from the one that called the op up to the one that calls what is watched."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(_BEFORE):
            frame = frame.f_back
        while frame is not None and frame.f_code is not self._outermost:
            yield frame
            frame = frame.f_back


def _is_applied(code: CodeType) -> bool:
    """Says whether a function is a part of a torch.autograd.Function that its `apply` calls."""
    methods = [getattr(kind, name) for kind in _classes_below(torch.autograd.Function) for name in _APPLIED]
    return any(code is each for method in methods for each in _codes(method))


def _classes_below(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _classes_below(each)


def _codes(fn: Any) -> Iterator[CodeType | None]:
    """Yields the code of a function, and of those that it wraps."""
    while fn is not None:
        yield getattr(fn, "__code__", None)
        fn = getattr(fn, "__wrapped__", None)


def _line(frame: FrameType | None, modules: list[nn.Module]) -> Line | None:
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, tuple(modules)) if frame else None


def _name(node: Any) -> str:
    return node.name().replace("GeneratedBackward", "Backward")
