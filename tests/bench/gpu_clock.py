"""Times work on a GPU by its own clock."""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

_REPEATS, _WARM_UP = 15, 3
_FLUSH_NBYTES, _FLUSHES = 2**30, 6


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Measures how long the device takes for what a function launches: the median of several calls, after some others.

    Before each call memory far larger than any cache is overwritten. That takes the device some milliseconds, in which
    the host launches the work, so that the figure is the device's, unless the host takes even longer.
    """
    for _ in range(_WARM_UP):
        run()
    flush = torch.empty(_FLUSH_NBYTES, dtype=torch.uint8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_REPEATS)]
    for begin, end in events:
        for _ in range(_FLUSHES):
            flush.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


@functools.cache
def copy_milliseconds(nbytes: int, device: torch.device) -> float:
    """Measures a copy within the device that reads and writes so many bytes together."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source), device)
