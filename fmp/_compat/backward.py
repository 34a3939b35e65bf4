"""Autograd at work: which node of a graph is being run, and which number the next node will have."""

from typing import Any, cast

import torch

_next_number: Any = cast(Any, torch.autograd)._get_sequence_nr
_running_node: Any = cast(Any, torch._C)._current_autograd_node

# The Python function below which the backward pass runs.
ENGINE = cast(Any, torch.autograd.graph)._engine_run_backward.__code__


def running_node() -> Any:
    """Returns the node of autograd that is being run in this thread; None outside of a backward pass."""
    return _running_node()


def next_number() -> int:
    """Returns the number that the next node of autograd recorded in this thread will have, as `recorded_at` gives it.

    An op's node is made before the op runs on what lies below autograd, so a dispatch mode finds it counted already.
    """
    return _next_number()
