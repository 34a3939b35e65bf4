"""Peak memory of a call, from the allocator events of the profiler; saved-tensor hooks do not work under functorch."""

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """Returns the most bytes of CPU memory that were live at once during a call, beyond those live before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        result = call()
    profiler: Any = recording.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    del result
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak
