"""The step of a small network (three layers of 128, batch 32), where the overhead of a call shows, in float32."""

import os
from collections.abc import Callable

import torch
from torch import nn

import fmp


def setup(variant: str) -> Callable[[], None]:
    """Prepares one variant: fmp, fmp-donated, fmp-fused (and donated), fmp-compiled or torch."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    x, y = torch.randn(32, 128), torch.randn(32, 128)
    module = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    return _torch(module, x, y) if variant == "torch" else _fmp(module, x, y, variant.removeprefix("fmp"))


def _fmp(module: nn.Module, x: torch.Tensor, y: torch.Tensor, form: str) -> Callable[[], None]:
    params = fmp.functionalize(module).params

    def loss_fn(params, batch):
        x, y = batch
        x = torch.relu(torch.nn.functional.linear(x, params["0.weight"], params["0.bias"]))
        x = torch.relu(torch.nn.functional.linear(x, params["2.weight"], params["2.bias"]))
        return (torch.nn.functional.linear(x, params["4.weight"], params["4.bias"]) - y).square().mean()

    optimizer = fmp.optim.adamw(1e-3, fused=form == "-fused")
    donate = form in ("-donated", "-fused")
    step = fmp.train_step(loss_fn, optimizer, donate=donate, compile=form == "-compiled")
    state = step.init(params)

    def run() -> None:
        nonlocal state
        for _ in range(20):
            state, _ = step(state, (x, y))

    return run


def _torch(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def run() -> None:
        for _ in range(20):
            optimizer.zero_grad()
            (module(x) - y).square().mean().backward()
            optimizer.step()

    return run
