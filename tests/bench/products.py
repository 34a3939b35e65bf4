"""How much of the compiled language-model step the matrix products take: `python -m tests.bench.products`.

They are the same in every library, so they bound what compiling the rest can win.
"""

import os

import torch
from torch.profiler import ProfilerActivity, profile

from tests.bench import lm_step

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
STEPS = 10


def main() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    step = lm_step.setup("fmp-compiled")
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        for _ in range(STEPS):
            step()
    events = recording.key_averages()
    products = sum(event.self_cpu_time_total for event in events if event.key in PRODUCTS)
    total = sum(event.self_cpu_time_total for event in events)
    print(f"matrix products: {products / STEPS / 1e3:.0f} of {total / STEPS / 1e3:.0f} ms a step, on one thread")


if __name__ == "__main__":
    main()
