"""What test_checkpoint.py saves and a second process resumes: a run for each opt level, half dtype and form of masters.

Run as a program, it resumes every checkpoint in a folder, finishes its run and saves the result beside it:

    python resume_case.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fmp

STEPS = 6
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{level}-{half}": {"level": level, "half_dtype": half} for level in ("O0", "O1", "O2", "O3") for half in HALVES
    },
    "O2-bf16-remainder": {"level": "O2", "half_dtype": "bf16", "master_weights": "remainder"},
    "O2-f16-kahan": {"level": "O2", "half_dtype": "f16", "master_weights": "kahan"},
    "O2-bf16-stochastic": {"level": "O2", "half_dtype": "bf16", "master_weights": "stochastic"},
    "off": {"level": "O2", "enabled": False},
}


def case(name: str) -> tuple[fmp.TrainStep, fmp.TrainState]:
    """Makes the step of a case, and its first state."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3))
    model = fmp.functionalize(module)

    def loss_fn(params: Any, batch: Any, *, buffers: Any, seed: Any) -> Any:
        logits, buffers = model.apply(params, buffers, batch[0], seed=seed, train=True)
        return F.cross_entropy(logits.float(), batch[1]), buffers

    schedule = fmp.optim.schedules.linear(0.05, 0.01, STEPS)
    tx = fmp.optim.accumulate(fmp.optim.adamw(schedule, weight_decay=0.1), every=2)
    step = fmp.train_step(
        loss_fn,
        tx,
        policy=fmp.opt_level(**CASES[name], keep_full=model if name.startswith("O2") else ()),
        loss_scale=fmp.DynamicLossScale(256.0, growth_interval=2),
        accumulate=2,
        ema=0.9,
    )
    return step, step.init(model.params, buffers=model.buffers, seed=11)


def batch_of(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the batch of a step; the third one overflows."""
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(index))
    y = x[:, :3].argmax(-1)
    return (x * float("inf") if index == 2 else x), y


def run(step: fmp.TrainStep, state: fmp.TrainState, first: int, last: int) -> fmp.TrainState:
    """Makes the steps from `first` to before `last`."""
    for index in range(first, last):
        state, _ = step(state, batch_of(index))
    return state


def main(folder: Path) -> None:
    """Resumes every run in a folder."""
    for path in sorted(folder.glob("*.at*")):
        name, first = path.name.split(".at")
        step, like = case(name)
        state = fmp.checkpoint.load(like, path)
        fmp.checkpoint.save(run(step, state, int(first), STEPS), path.with_name(f"{path.name}.end"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
