"""What casting op by op costs an op that needs no cast, 8 x 8: plain, under torch.autocast, under fmp.autocast."""

import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import fmp

CALLS = 5_000


class EmptyMode(TorchFunctionMode):
    """The least that any TorchFunctionMode costs."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs one torch function."""
        return func(*args, **kwargs) if kwargs else func(*args)


def op_microseconds(rounds: int) -> dict[str, dict[str, float]]:
    """Times each op under each library in turns, in this process on one thread.

    Returns:
        By op and then by library, the microseconds that a call takes, in the best round: noise only adds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: _race(op, rounds) for name, op in _ops().items()}
    finally:
        torch.set_num_threads(threads)


def _ops() -> dict[str, Callable[[], object]]:
    full, low = torch.ones(8, 8), torch.ones(8, 8, dtype=torch.bfloat16)
    return {
        "torch.relu, no rule": lambda: torch.relu(full),
        "x + y, promote": lambda: full + full,
        "torch.mm, low": lambda: torch.mm(low, low),
        "x.softmax(-1), full": lambda: full.softmax(-1),
        "torch.cat, promote": lambda: torch.cat([full, full]),
        "F.relu, no rule": lambda: F.relu(full),
        "F.layer_norm, full": lambda: F.layer_norm(full, (8,)),
    }


def _race(op: Callable[[], object], rounds: int) -> dict[str, float]:
    policy = fmp.opt_level("O1", half_dtype=torch.bfloat16)

    def seconds() -> float:
        return timeit.timeit(op, number=CALLS)

    def under_torch() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            return seconds()

    def under_empty_mode() -> float:
        with EmptyMode():
            return seconds()

    contenders: dict[str, Callable[[], float]] = {
        "plain torch": seconds,
        "torch.autocast": under_torch,
        "empty mode": under_empty_mode,
        "fmp.autocast": fmp.autocast(seconds, policy),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):  # the first round warms up
        for name, contender in contenders.items():
            times[name].append(contender())
    return {name: 1e6 * min(values[1:]) / CALLS for name, values in times.items()}
