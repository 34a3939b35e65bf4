"""Peak memory of a call, from the allocator events of the profiler; saved-tensor hooks do not work under functorch.

oneDNN is off meanwhile: on processors with instructions for float16 its products allocate workspaces, which are no
tensors.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """Returns the most bytes of CPU memory that were live at once during a call, beyond those live before it."""
    gc.collect()
    with _without_onednn(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
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


@contextmanager
def _without_onednn() -> Iterator[None]:
    onednn: Any = torch.backends.mkldnn  # whose `flags` would warn of processors that are not there
    was_enabled, onednn.enabled = onednn.enabled, False
    try:
        yield
    finally:
        onednn.enabled = was_enabled
