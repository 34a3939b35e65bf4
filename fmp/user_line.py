"""Which line of the user's code runs an op: the innermost one that is neither torch's nor fmp's.

Two modules look for themselves: `fmp.numerics.places` finds the forward line of what a backward pass runs, and
`fmp.policy.places` a module's path rather than a line, and which part of fmp called the op.
"""

import os
import sys
from types import CodeType, FrameType

import optree
import torch

FMP = os.path.dirname(__file__) + os.sep
LIBRARIES = (FMP, *[os.path.dirname(str(module.__file__)) + os.sep for module in (torch, optree)])
# Code that torch.fx has generated has no file.
_GENERATED = "<eval_with_key>"
_MODES = ("__torch_function__", "__torch_dispatch__")


def is_of_mode(code: CodeType) -> bool:
    """Says whether a function belongs to a mode, also one of the user's: it runs the ops of others."""
    return code.co_name in _MODES


def user_line() -> str:
    """Finds the line that runs the caller.

    Returns:
        For example `train.py:12 in block`; empty if there is no such line, as in a thread of autograd.

    Example:
        >>> def block():
        ...     return user_line()
        >>> block().endswith(":2 in block")
        True
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((*LIBRARIES, _GENERATED)) and not is_of_mode(code):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
