"""Apex 1.6: the loss scaler, against Apex's algorithm written out."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import fmp


class ApexScaler:
    """Apex's dynamic loss scaler in plain Python."""

    def __init__(self, init: float = 2.0**16, window: int = 2000, low: float | None = None, high: float = 2.0**24):
        self.scale = min(high, init)
        self.unskipped, self.window, self.low, self.high = 0, window, low, high

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.low, self.scale / 2.0) if self.low else self.scale / 2.0
            self.unskipped = 0
        else:
            self.unskipped += 1
        if self.unskipped == self.window:
            self.scale = min(self.high, self.scale * 2.0)
            self.unskipped = 0


@given(
    history=st.lists(st.booleans(), max_size=40),
    window=st.integers(1, 4),
    low=st.sampled_from([2.0**-3, 1.0, 64.0]),
    high=st.sampled_from([128.0, 2.0**12]),
)
def test_the_scale_and_the_count_are_those_of_apex(history, window, low, high):
    theirs = ApexScaler(init=128.0, window=window, low=low, high=high)
    ours = fmp.DynamicLossScale(128.0, growth_interval=window, min_scale=low, max_scale=high)
    for overflow in history:
        theirs.update(overflow)
        ours = ours.adjust(torch.tensor(not overflow))
        assert (ours.loss_scale, ours.growth_count) == (theirs.scale, theirs.unskipped)


def test_the_defaults_are_those_of_apex_but_for_the_floor():
    ours, theirs = fmp.DynamicLossScale(), ApexScaler()
    assert (ours.loss_scale, ours.growth_interval, ours.max_scale) == (theirs.scale, theirs.window, theirs.high)
    assert (ours.growth_factor, ours.backoff_factor) == (2.0, 0.5)
    assert theirs.low is None
    assert ours.min_scale == 1.0


def test_large_finite_gradients_are_no_overflow():
    """Apex's fallback in Python adds the gradients up before it looks."""
    step = fmp.train_step(lambda w, x: (w * x).sum(), fmp.optim.sgd(1.0), loss_scale=fmp.DynamicLossScale(1.0))
    _, metrics = step(step.init(torch.zeros(4)), torch.full((4,), 3e38))
    assert metrics.grads_finite
    assert not metrics.skipped


@pytest.mark.parametrize(("name", "advice"), [("min_loss_scale", "min_scale"), ("max_loss_scale", "max_scale")])
def test_the_bounds_have_another_place(name, advice):
    options: dict[str, Any] = {name: 2.0**10}
    with pytest.raises(TypeError, match=f"DynamicLossScale\\({advice}=...\\)"):
        fmp.opt_level("O2", **options)


def test_the_number_of_losses_has_another_place():
    options: dict[str, Any] = {"num_losses": 3}
    with pytest.raises(TypeError, match="give train_step a dict of losses"):
        fmp.opt_level("O1", **options)


def test_scale_and_skipped_steps_are_read_from_state_and_metrics():
    step = fmp.train_step(lambda w, x: (w * x).sum(), fmp.optim.sgd(1.0), loss_scale="dynamic")
    state = step.init(torch.zeros(1))
    log = []
    for value in (1.0, float("inf"), 1.0):
        state, metrics = step(state, torch.tensor([value]))
        log.append((float(metrics.loss_scale), bool(metrics.skipped), int(state.skip_count)))
    assert log == [(65536.0, False, 0), (65536.0, True, 1), (32768.0, False, 1)]
    assert state.loss_scale.loss_scale == 32768.0
