"""Trains one model on any number of processes: the same step, the same loss, less and less state on each.

    python examples/train_distributed.py                            # one process
    torchrun --nproc-per-node 4 examples/train_distributed.py       # four: gloo on a CPU, NCCL on GPUs
    torchrun --nproc-per-node 4 examples/train_distributed.py --replicas 2    # two copies, each shared out over two

A student learns what a random teacher computes. It does so once for each way to share out its state:

    zero=0      every process has all of it, and gradients are averaged
    zero=1      each has its rows of parameters, masters and moments, and gathers the parameters for the loss
    zero=3      a block's parameters are gathered when it runs, and again for its gradient

Each process computes on its rows of the same global batch, so the losses are those of one process, up to rounding.
"""

import argparse
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

import fmp
from fmp.distributed import Layout, gathered_block

Tree = Any
ROWS = 128  # of the global batch


def block(params: Tree, x: Tensor) -> Tensor:
    """A residual block; it neither knows nor cares where its parameters come from."""
    hidden = torch.nn.functional.layer_norm(x, x.shape[-1:], params["norm"], None)
    return x + torch.tanh(hidden @ params["up"] + params["bias"]) @ params["down"]


def make_params(width: int, blocks: int, device: torch.device) -> Tree:
    """The same parameters in every process, since they come from the same seed."""
    made = torch.Generator().manual_seed(1)

    def one() -> Tree:
        return {
            "norm": torch.ones(width),
            "up": torch.randn(width, 3 * width, generator=made) / width**0.5,
            "bias": torch.zeros(3 * width),
            "down": torch.randn(3 * width, width, generator=made) / (30 * width**0.5),
        }

    params = {"blocks": [one() for _ in range(blocks)], "out": torch.randn(width, 1, generator=made) / width**0.5}
    return fmp.tree.map(lambda leaf: leaf.to(device), params)


def make_loss(layout: Layout) -> Callable[[Tree, Tree], Tensor]:
    """With zero=3 each block gathers its own parameters; with less, the step has done it."""
    run = gathered_block(block, layout) if layout.zero == 3 else block

    def loss_fn(params: Tree, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        for own in params["blocks"]:
            x = run(own, x)
        return ((x @ params["out"]).float() - y.float()).square().mean()

    return loss_fn


def batches(steps: int, width: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The global batches."""
    made = torch.Generator().manual_seed(2)
    teacher = torch.randn(width, 1, generator=made) * 2.0
    found = []
    for _ in range(steps):
        x = torch.randn(ROWS, width, generator=made)
        found.append((x.to(device), torch.sin(x @ teacher / width**0.5).to(device)))
    return found


def train(layout: Layout, arguments: argparse.Namespace, device: torch.device) -> tuple[float, int]:
    """Trains, and returns the mean loss of the last ten steps and the bytes of state that this process holds."""
    policy = fmp.opt_level(arguments.opt_level, half_dtype=torch.bfloat16)
    optimizer = fmp.optim.adamw(3e-3)
    step = fmp.train_step(make_loss(layout), optimizer, policy=policy, clip_norm=1.0, layout=layout)
    state = step.init(make_params(arguments.width, arguments.blocks, device))
    losses = []
    for x, y in batches(arguments.steps, arguments.width, device):
        mine = slice(layout.part * ROWS // layout.size, (layout.part + 1) * ROWS // layout.size)
        state, metrics = step(state, (x[mine], y[mine]))
        losses.append(metrics.loss)
    parts, _ = layout.opened(state)
    held = sum(leaf.nbytes for leaf in fmp.tree.leaves(parts) if leaf is not None)
    return torch.stack(losses[-10:]).mean().item(), held


def begin() -> torch.device:
    """Joins the other processes that torchrun has started; without it, there are none."""
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    store = None if "RANK" in os.environ else cast(Any, distributed).HashStore()
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timedelta(minutes=5))
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--opt-level", default="O2", choices=["O0", "O1", "O2", "O3"])
    parser.add_argument("--replicas", type=int, default=1, help="how many copies of the state there are")
    arguments = parser.parse_args()
    device = begin()
    rank, count = distributed.get_rank(), distributed.get_world_size()
    if ROWS % count or count % arguments.replicas:
        parser.error(f"{count} processes share neither {ROWS} rows nor {arguments.replicas} copies evenly")

    shape = (count,) if arguments.replicas == 1 else (arguments.replicas, count // arguments.replicas)
    mesh = init_device_mesh(device.type, shape)
    if rank == 0:
        print(f"{count} process(es), {arguments.opt_level}, {arguments.steps} steps of {ROWS} rows")
        print("zero    loss    state here")
    for zero in (0, 1, 3):
        layout = Layout(mesh, zero=zero, blocks=["blocks"] if zero == 3 else [])
        loss, held = train(layout, arguments, device)
        if rank == 0:
            print(f"{zero:4}  {loss:.4f}  {held / 1e6:7.3f} MB")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
