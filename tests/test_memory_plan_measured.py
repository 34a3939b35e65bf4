"""A plan whose step is measured, too: what runs is what was planned, or the table says so."""

from typing import Any

import pytest
import torch
from torch import nn

import fmp
from fmp.memory.plan import plan
from tests.test_memory_plan import Tied

BATCH = torch.randn(64, 16)


def loss_fn(params, batch):
    return (batch @ params["w"].to(batch.dtype)).float().square().mean()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_measured_with_the_plan(accumulate):
    params = {"w": torch.randn(16, 32)}
    options: dict[str, Any] = {"measure": True, "loss_fn": loss_fn, "batch": BATCH, "accumulate": accumulate}
    made = plan(params, "adam", "O2", **options)
    assert made.timeline is not None
    start = {kind: values[0] for kind, values in made.timeline.live.items()}
    assert (made.params, made.masters, made.moments + made.other) == (
        start["params"],
        start["masters"],
        start["moments"],
    )
    assert made.activations == max(made.timeline.live["activations"]) > 0
    assert "measured peak" in str(made)
    assert made.as_dict()["measured"]["peak"] == made.timeline.peak
    smaller = plan(params, "adam", "O2", **{**options, "activations": 7})
    assert smaller.activations == 7


def test_a_measured_module():
    module = Tied()
    model = fmp.functionalize(module)

    def of_module(params, batch, *, buffers):
        logits, buffers = model.apply(params, buffers, batch)
        return logits.float().square().mean(), buffers

    batch = torch.randint(50, (6,))
    peaks = []
    for given_model in (module, model):
        made = plan(given_model, "adamw", "O2", measure=True, loss_fn=of_module, batch=batch, average=True)
        assert made.timeline is not None
        assert made.timeline.live["buffers"][0] == made.buffers
        assert made.timeline.live["average"][0] == made.average
        peaks.append(made.timeline.peak)
    assert peaks[0] == peaks[1]


def test_frozen_parameters_are_not_trained():
    module = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    module[0].requires_grad_(False)
    model = fmp.functionalize(module)

    def of_module(params, batch):
        return model.apply(params, {}, batch)[0].float().square().mean()

    made = plan(module, "adam", "O2", measure=True, loss_fn=of_module, batch=BATCH)
    assert made.timeline is not None
    start = {kind: values[0] for kind, values in made.timeline.live.items()}
    assert (made.params, made.masters) == (start["params"], start["masters"])
    assert made.moments + made.other == start["moments"]
    assert made.moments == 2 * 4 * sum(each.numel() for each in module.parameters() if each.requires_grad)


def test_shapes_can_be_measured():
    options: dict[str, Any] = {"measure": True, "loss_fn": loss_fn, "batch": BATCH}
    of_shapes, of_tensors = plan({"w": (16, 32)}, **options), plan({"w": torch.ones(16, 32)}, **options)
    assert of_shapes == of_tensors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "one step"),
        ({"zero": 3, "devices": 8}, "one step, on one device"),
        ({"moments": "bf16"}, "one step, its own moments"),
        ({"gradients": "f32", "activations": 5}, "one step, its own gradients, its activations"),
        ({"gradients": None}, "one step, its own gradients"),
    ],
)
def test_the_measured_peak_says_where_it_is_another_step(options, text):
    made = plan({"w": torch.ones(16, 32)}, "adam", "O2", measure=True, loss_fn=loss_fn, batch=BATCH, **options)
    assert next(line for line in str(made).splitlines() if line.startswith("measured peak")).endswith(text)
    assert made.as_dict()["measured"]["counted"] == text
    plain = plan({"w": torch.ones(16, 32)}, "adam", "O2", measure=True, loss_fn=loss_fn, batch=BATCH)
    assert made.timeline == plain.timeline
