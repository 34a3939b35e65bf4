"""The operators that a function ran, written down in both passes, to show where the passes part."""

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fmp import tree

_LIBRARIES = (str(Path(torch.__file__ or "").parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)

_ON_THE_WAY = ("__torch_function__", "__torch_dispatch__")


class OpTrace(TorchDispatchMode):
    """Writes down the operators that run inside, except for views.

    Attributes:
        lines: One for each operator: its name, arguments and results, and the line of the user's code that called it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        output = func(*args, **(kwargs or {}))
        if not any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns):
            given = ", ".join(
                [*map(_shown, args), *(f"{name}={_shown(value)}" for name, value in (kwargs or {}).items())]
            )
            self.lines.append((f"{func}({given}) -> {_shown(output)}", _caller()))
        return output


def compared(first: OpTrace, again: OpTrace) -> str:
    """Shows two passes and the first operator where they part."""
    parts = ["Both passes ran the same ops: a value that they read must have changed."]
    for index, (old, new) in enumerate(itertools.zip_longest(first.lines, again.lines)):
        if (old and old[0]) != (new and new[0]):
            parts = [f"The passes part at op {index + 1}:", f"  at first: {_line(old)}", f"  again:    {_line(new)}"]
            break
    for name, trace in (("at first", first), ("when recomputed", again)):
        parts += [f"Ops {name}:", *(f"  {index + 1:3} {_line(line)}" for index, line in enumerate(trace.lines))]
    return "\n".join(parts)


def _line(line: tuple[str, str] | None) -> str:
    return f"{line[0]}   {line[1]}" if line else "no more ops"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return tree.describe(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)


def _caller() -> str:
    """Names the line that called an operator: neither of a library nor of a mode on the way."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith((*_LIBRARIES, "<")) or frame.f_code.co_name in _ON_THE_WAY
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
