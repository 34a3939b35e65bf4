"""A training run with checkpoints, for torchrun; one of its ranks can be made to kill itself, once.

    torchrun --standalone --nproc-per-node 2 --max-restarts 2 -m tests.distributed.killed_run FOLDER
    ... FOLDER --kill 1 5 torch.save    # rank 1, the first time that torch.save is called from step 5 on

Rank 0 appends to FOLDER/log what the run does, a line of JSON each: where it starts, and every step's loss, exactly.
"""

import argparse
import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

import fmp
from fmp.distributed import Checkpoints, Layout

Tree = Any
STEPS, EVERY, ROWS, WIDTH = 10, 2, 8, 13


def loss_fn(params: Tree, batch: tuple[Tensor, Tensor], *, seed: Tensor) -> Tensor:
    x, y = batch
    hidden = torch.tanh(x @ params["hidden"] + params["bias"])
    kept = fmp.random.keep_mask(fmp.random.fold_in(seed, 1), hidden.shape, 0.8)
    return ((hidden * kept) @ params["out"] - y).float().square().mean()


def make_step(layout: Layout | None) -> fmp.TrainStep:
    """A step whose state has something of everything: masters, moments, an average, a scale that grows."""
    return fmp.train_step(
        loss_fn,
        fmp.optim.adamw(1e-2),
        policy=fmp.opt_level("O2"),
        loss_scale=fmp.DynamicLossScale(init_scale=16.0, growth_interval=3),
        clip_norm=1.0,
        ema=0.9,
        layout=layout,
    )


def first_state(step: fmp.TrainStep) -> fmp.TrainState:
    made = torch.Generator().manual_seed(0)
    hidden, out = torch.randn(7, WIDTH, generator=made) / 3, torch.randn(WIDTH, 1, generator=made) / 4
    return step.init({"hidden": hidden, "bias": torch.zeros(WIDTH), "out": out}, seed=5)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    made = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, 7, generator=made), torch.randn(ROWS, 1, generator=made)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--behind", action="store_true", help="save in the background")
    parser.add_argument("--kill", nargs=3, metavar=("RANK", "STEP", "FUNCTION"), default=("-1", "-1", ""))
    arguments = parser.parse_args()
    victim, fatal_step, function = int(arguments.kill[0]), int(arguments.kill[1]), arguments.kill[2]
    marker = arguments.folder / "killed"

    def die(*args: Any, **kwargs: Any) -> None:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = distributed.get_rank()

    def log(**entry: Any) -> None:
        if rank == 0:
            with open(arguments.folder / "log", "a") as file:
                file.write(json.dumps({"attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), **entry}) + "\n")

    layout = Layout(init_device_mesh("cpu", (distributed.get_world_size(),)), zero=1)
    step = make_step(layout)
    state = first_state(step)
    checkpoints = Checkpoints(arguments.folder / "checkpoints", keep=2)
    log(complete=checkpoints.steps())
    if checkpoints.latest() is not None:
        state = checkpoints.load(state)

    pending = None
    while int(state.step) < STEPS:
        number = int(state.step) + 1
        if rank == victim and number == fatal_step and not marker.exists():
            if pending is not None:
                pending.wait()  # what is killed is this step, or the save after it
            mock.patch(function, die).start()
        mine = fmp.tree.map(lambda leaf: leaf.chunk(layout.size)[layout.part], batch(number))
        state, metrics = step(state, mine)
        log(step=number, loss=metrics.loss.item().hex(), scale=metrics.loss_scale.item())
        if number % EVERY == 0:
            if arguments.behind:
                pending = checkpoints.save_async(state, number)
            else:
                checkpoints.save(state, number)
    if pending is not None:
        pending.wait()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
