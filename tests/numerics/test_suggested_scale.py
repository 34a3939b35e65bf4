"""What is said about training with a suggested scale: a static one may overflow elsewhere, a dynamic one falls back."""

import pytest
import torch

import fmp

BATCH = torch.ones(4, 1), torch.tensor([1.0, -1.0, 1.0, -1.0])


def loss_fn(params, batch, zeros=None):
    x, y = batch
    out = x @ params["w"]
    return ((out if zeros is None else out + zeros).double() - y.double()).square().mean()


@pytest.fixture(scope="module")
def measured():
    """The gradients by parameters, in which the samples all but cancel out, and by the output, in which they do not."""
    params = {"w": torch.tensor([2.0**-44], dtype=torch.float64)}
    batch = fmp.cast(BATCH, torch.float64)
    return fmp.grad(loss_fn, argnums=(0, 2))(params, batch, torch.zeros(4, dtype=torch.float64))


def skipped(loss_scale, steps):
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2"), loss_scale=loss_scale)
    state, found = step.init({"w": torch.tensor([2.0**-44])}), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        found.append(metrics.skipped.item())
    return found


def test_a_static_scale_for_parameters_alone_may_skip_every_step(measured):
    scale = fmp.numerics.suggest_scale(measured[0], "fp16")
    assert scale == 2.0**29
    assert fmp.numerics.loss_in(measured[0], "fp16", scale=scale).overflow == 0
    assert skipped(float(scale), 20) == [True] * 20


def test_a_dynamic_scale_that_begins_there_falls_back(measured):
    scale = fmp.numerics.suggest_scale(measured[0], "fp16")
    scaler = fmp.DynamicLossScale(init_scale=scale, max_scale=2.0**40)
    assert skipped(scaler, 20) == [True] * 13 + [False] * 7  # to 2^16, where 0.5 does not overflow


def test_a_static_scale_for_activations_too_skips_nothing(measured):
    scale = fmp.numerics.suggest_scale(measured, "fp16")
    assert fmp.numerics.loss_in(measured, "fp16", scale=scale).overflow == 0
    assert skipped(float(scale), 3) == [False] * 3


def test_find_nonfinite_says_whether_a_static_scale_fits(measured):
    for values, overflows in ((measured[0], True), (measured, False)):
        scale = float(fmp.numerics.suggest_scale(values, "fp16"))
        step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2"), loss_scale=scale)
        report = fmp.numerics.find_nonfinite(step, step.init({"w": torch.zeros(1)}), BATCH)
        assert (report is not None) == overflows
        assert report is None or (report.phase, report.op) == ("backward", "_to_copy")
