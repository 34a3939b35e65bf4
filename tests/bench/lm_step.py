"""The step of examples/train_lm.py in bfloat16, by fmp (O2 or O1) and by torch.amp."""

import dataclasses
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import fmp

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_lm import GPT, make_policy, make_step

ARGUMENTS = Namespace(
    opt_level="O2", half="bf16", loss_scale=None, keep_norm_fp32=None, master_weights=None, steps=600, warm_up=50,
    learning_rate=2e-3, accumulate=1, donate=False, compile=False,
)  # fmt: skip
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 128, 256, 8, 4, 16


def setup(variant: str) -> Callable[[], None]:
    """Prepares one variant: fmp, fmp-donated, fmp-compiled, amp or amp-compiled; fmp-O1 and fmp-O1-torch likewise."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    module = GPT(CONTEXT, WIDTH, HEADS, LAYERS)
    tokens = torch.randint(256, (BATCH, CONTEXT + 1))
    library, _, form = variant.partition("-")
    return _fmp(module, tokens, form) if library == "fmp" else _amp(module, tokens, form)


def _fmp(module: GPT, tokens: torch.Tensor, form: str) -> Callable[[], None]:
    model = fmp.functionalize(module)
    changes = {
        "opt_level": "O1" if "O1" in form else "O2",
        "donate": "donated" in form,
        "compile": "compiled" in form,
    }
    arguments = Namespace(**{**vars(ARGUMENTS), **changes})
    policy = make_policy(arguments)
    if "torch" in form:
        policy = dataclasses.replace(policy, op_rules=fmp.OpRules.torch())
    step = make_step(model, policy, arguments)
    state = step.init(model.params, buffers=model.buffers)

    def run() -> None:
        nonlocal state
        state, _ = step(state, tokens)

    return run


def _amp(module: GPT, tokens: torch.Tensor, form: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = module(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    if form == "compiled":
        loss_of = torch.compile(loss_of, fullgraph=True)

    def run() -> None:
        optimizer.zero_grad()
        loss_of(tokens).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return run
