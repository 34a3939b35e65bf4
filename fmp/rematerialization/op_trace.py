"""The operators that a function ran, written down in both passes, to show where the passes part."""

import itertools
from typing import Any

from torch import Tensor

from fmp import _compat, tree
from fmp.user_line import user_line


class OpTrace(_compat.TorchDispatchMode):
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
            self.lines.append((f"{func}({given}) -> {_shown(output)}", user_line()))
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
