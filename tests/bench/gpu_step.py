"""A whole step of a language model in float16 on a GPU: with the kernels and without, with a CUDA graph and without."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

import fmp
from fmp.kernels import eligible
from tests.bench.gpu_work import Work
from tests.bench.lm_step import ARGUMENTS, GPT, make_policy, make_step
from tests.gpu.steps import captured, in_place

SIZE = Namespace(context=512, width=1024, heads=16, layers=12, batch=8)
TINY = Namespace(context=8, width=16, heads=2, layers=1, batch=2)


def stepping(device: torch.device, size: Namespace) -> Iterator[Work]:
    """Makes donating steps of O2, with float32 masters, AdamW, clipping and a dynamic loss scale."""
    settings = Namespace(**(vars(ARGUMENTS) | {"half": "fp16", "loss_scale": "dynamic", "donate": True}))
    for form, how in (("fmp, no kernels", without_kernels), ("fmp", nullcontext)):
        for graph in (False, True):
            yield Work(
                f"LM step, f16{', CUDA graph' * graph}", form, prepared(device, size, settings, how, graph), 0, ()
            )


def prepared(
    device: torch.device,
    size: Namespace,
    settings: Namespace,
    how: Callable[[], AbstractContextManager[Any]],
    graph: bool,
) -> Callable[[], Any]:
    """Prepares one form of the step."""
    torch.manual_seed(0)
    model = fmp.functionalize(GPT(size.context, size.width, size.heads, size.layers).to(device))
    tokens = torch.randint(256, (size.batch, size.context + 1), device=device)
    step = make_step(model, make_policy(settings), settings)
    state = step.init(model.params, buffers=model.buffers)
    if graph:
        with how():
            return captured(device, partial(in_place, step, state, tokens))[0]

    def run() -> None:
        nonlocal state
        with how():
            state, _ = step(state, tokens)

    return run


def without_kernels() -> AbstractContextManager[Any]:
    """Lets torch's operators do all work."""
    return mock.patch.object(eligible, "has_kernels", return_value=False)
