"""What it costs to record a step: that of examples/train_lm.py in bfloat16 (O2), and one ten times as large.

plain      the step
recorded   with the history of its metrics
watched    with that of each leaf's gradient besides
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import fmp
from fmp.numerics.record import record
from fmp.numerics.watch import watch_gradients

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_lm import GPT

CONTEXT, HEADS, LAYERS = 128, 8, 4
SIZES = {"lm": (256, 16), "large": (768, 8)}  # width and batch
FORMS = ("plain", "recorded", "watched")
VARIANTS = tuple(f"{size}-{form}" for size in SIZES for form in FORMS)


def setup(variant: str) -> Callable[[], None]:
    """Prepares one of `VARIANTS`."""
    torch.manual_seed(0)
    size, form = variant.split("-")
    width, batch = SIZES[size]
    model = fmp.functionalize(GPT(CONTEXT, width, HEADS, LAYERS))
    tokens = torch.randint(256, (batch, CONTEXT + 1))

    def loss_fn(params, tokens, *, buffers):
        logits, buffers = model.apply(params, buffers, tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()), buffers

    optimizer = fmp.optim.adamw(2e-3, b2=0.99, weight_decay=0.1)
    if form == "watched":
        optimizer = fmp.optim.chain(watch_gradients(), optimizer)
    step = fmp.train_step(loss_fn, optimizer, policy=fmp.opt_level("O2", half_dtype="bf16"), clip_norm=1.0)
    state = step.init(model.params, buffers=model.buffers)
    recorded = record(step)
    carry = recorded.init(state)

    def run() -> None:
        nonlocal state
        state, _ = step(state, tokens)

    def run_recorded() -> None:
        nonlocal carry
        carry, _ = recorded(carry, tokens)

    return run if form == "plain" else run_recorded
