import os
import subprocess
import sys
import textwrap
from pathlib import Path

import optree
import torch
from torch.overrides import TorchFunctionMode

from fmp import dtypes, tree
from fmp.user_line import LIBRARIES, user_line


class _Asking(TorchFunctionMode):
    """A mode of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.lines.append(user_line())
        return func(*args, **(kwargs or {}))


def test_the_folders_are_those_of_the_libraries() -> None:
    found = {Path(str(module.__file__)).parent for module in (dtypes, torch, optree)}
    assert {Path(folder) for folder in LIBRARIES} == found
    assert all(folder.endswith(os.sep) for folder in LIBRARIES)


def test_a_mode_is_not_the_line_that_runs_an_op() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softmax(x, -1)  # the mode is told of it here, and torch's code is in between

    x = torch.ones(2)
    with _Asking() as asking:
        block(x)
        tree.map(lambda leaf: leaf.sin(), {"w": x})
    assert [line.partition(" ")[2] for line in dict.fromkeys(asking.lines)] == ["in block", "in <lambda>"]
    assert all(line.startswith("test_user_line.py:") for line in asking.lines)


def test_a_graph_of_torch_fx_is_not_the_line_that_runs_an_op() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.sin(x))
    with _Asking() as asking:
        graph(torch.ones(2))
    assert asking.lines[-1].endswith("in test_a_graph_of_torch_fx_is_not_the_line_that_runs_an_op")


def test_code_without_a_file_has_lines() -> None:
    code = """
        from fmp.user_line import user_line
        def block():
            return user_line()
        print(block())
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "<string>:4 in block\n"
