"""A small train step of float16 with a dynamic loss scale, and what a CUDA graph needs around a functional step."""

from collections.abc import Callable
from typing import Any

import torch

import fmp
from fmp import tree
from fmp.optim import schedules

Tree = Any
SHAPES = {"weight": (37, 65), "bias": (65,), "scale": (), "other": (70_001,)}


def loss_fn(params: Tree, batch: Tree) -> torch.Tensor:
    # Sums and products of single numbers: what a library for matrices adds up may depend on the stream.
    x, y = batch
    out = torch.tanh(x * params["weight"] + params["bias"]) * params["scale"]
    return ((out - y).float() ** 2).mean() + params["other"].float().square().mean()


def make_step(optimizer: fmp.optim.GradientTransformation | None = None, **options: Any) -> Any:
    rate = schedules.warmup_cosine_decay(0.0, 0.01, warmup_steps=2, decay_steps=8)
    settings: dict[str, Any] = {
        "policy": fmp.opt_level("O2"),
        "loss_scale": fmp.DynamicLossScale(init_scale=1024.0, growth_interval=2),
        "clip_norm": 0.5,
        "donate": True,
    }
    return fmp.train_step(loss_fn, optimizer or fmp.optim.adamw(rate), **settings | options)


def make_params(device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}


def make_batch(seed: int, device: torch.device | str, overflow: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 4, *SHAPES["weight"], generator=generator).unbind()
    return x.to(device), (y * float("inf") if overflow else y).to(device)


def in_place(step: Any, state: Any, batch: Tree) -> Any:
    """Makes a donating step, and writes the next state where the old one lies, so that a graph finds it there again.

    Args:
        step: The step.
        state: The state before; its tensors hold the next one afterwards, whoever has the state itself.
        batch: The batch.

    Returns:
        The metrics.
    """
    old, spec = tree.flatten(state)
    new, metrics = step(tree.unflatten(spec, old), batch)
    for there, value in zip(old, tree.leaves(new), strict=True):
        if value is not there and value is not None:
            there.copy_(value)
    return metrics


def captured(device: torch.device, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """Captures a function in a CUDA graph, after calls to warm up.

    Args:
        device: On the executor, which has no graphs, calls stand for replays.
        run: What to capture; it must read and write the same tensors each time.

    Returns:
        What replays it, and its result, which each replay overwrites.
    """
    if device.type != "cuda":
        result = run()

        def call() -> None:
            tree.map(lambda there, value: value if value is None else there.copy_(value), result, run())

        return call, result
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles, uploads tables, and lets the allocator and autograd settle
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph.replay, found
