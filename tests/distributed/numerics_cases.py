"""fmp.numerics around a train step on several ranks, run by tests/distributed/test_numerics_ranks.py."""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

import fmp
from fmp import numerics, optim
from fmp.distributed import Layout, gathered_block

Tree = Any


def layout(zero: int | None) -> Layout | None:
    if zero is None:
        return None
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    return Layout(mesh, zero=zero, blocks=["hidden"] if zero == 3 else ())


def step_on(place: Layout | None, rate: float = 1e-2) -> fmp.TrainStep:
    def product(weight: Tensor, x: Tensor) -> Tensor:
        return x @ weight

    block = product if place is None or place.zero != 3 else gathered_block(product, place)

    def loss(params: Tree, batch: Tensor) -> Tensor:
        return (torch.tanh(block(params["hidden"], batch)) @ params["out"]).square().mean()

    optimizer = optim.chain(numerics.watch_gradients("fp16", scale=1e-3), optim.adamw(rate))
    return fmp.train_step(loss, optimizer, layout=place)


def params() -> Tree:
    generator = torch.Generator().manual_seed(0)
    return {"hidden": torch.randn(5, 7, generator=generator), "out": 1e-3 * torch.randn(7, 1, generator=generator)}


def batch(step: int, place: Layout | None) -> Tensor:
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
    return rows if place is None else rows.chunk(place.size)[place.part]


def recorded(zero: int | None, *, is_compiled: bool = False) -> dict[str, list[float]]:
    """The history of a few steps, of their gradients and of their parameters."""
    place = layout(zero)
    step = numerics.record(step_on(place), length=4, params="fp16")
    carry = step.init(step.step.init(params()))
    run = torch.compile(step, backend="aot_eager", fullgraph=True) if is_compiled else step
    for index in range(3):
        carry, _ = run(carry, batch(index, place))
    return {name: column.tolist() for name, column in carry[1].arrays().items()}


def nonfinite(zero: int, bad: int) -> tuple[str, str, str]:
    """What a rank is told about NaN in the batch of one of them: the op, the leaf, the text."""
    place = layout(zero)
    step = step_on(place)
    rows = batch(0, place).clone()
    if distributed.get_rank() == bad:
        rows[0, 0] = float("nan")
    report = numerics.find_nonfinite(step, step.init(params()), rows)
    assert report is not None
    return report.op, report.leaf, str(report)


def nothing_nonfinite(zero: int) -> bool:
    place = layout(zero)
    step = step_on(place)
    return numerics.find_nonfinite(step, step.init(params()), batch(0, place)) is None


def compared(zero: int | None) -> tuple[bool, list[tuple[str, float, int | None]]]:
    """Whether a step equals itself, and how far it is off one with another learning rate."""
    place = layout(zero)
    step, other = step_on(place), step_on(place, 1.1e-2)
    state, rows = step.init(params()), batch(0, place)
    found = numerics.compare(step, other, state, rows)
    return numerics.compare(step, step, state, rows).is_equal, [
        (leaf.path, leaf.relative_error, leaf.ulps)
        for leaf in found.worst()
        if leaf.path.startswith(("params", "update"))
    ]
