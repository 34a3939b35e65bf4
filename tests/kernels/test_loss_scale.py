"""cuda/loss_scale.cu against `fmp.DynamicLossScale.adjust`, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import fmp
from fmp import tree
from tests.cuda_executor import Module
from tests.kernels.harness import in_every_order, launch, module, needs_executor, same

pytestmark = needs_executor


def adjusted(kernels: Module, scaler: fmp.DynamicLossScale, finite: bool, in_place: bool) -> fmp.DynamicLossScale:
    old = scaler.loss_scale.clone(), scaler.growth_count.clone()
    new = old if in_place else (torch.full((), -1.0), torch.full((), -1, dtype=torch.int32))
    flag = torch.tensor(finite)
    rule = (
        np.float32(scaler.growth_factor),
        np.float32(scaler.backoff_factor),
        np.int32(scaler.growth_interval),
        np.float32(scaler.min_scale),
        np.float32(scaler.max_scale),
    )
    launch(
        kernels,
        "adjust",
        1,
        32,
        (flag, *old, *new, *rule),
        read=[flag, *(() if in_place else old)],
        written=list(new),
    )
    if not in_place:
        assert same(old[0], scaler.loss_scale)
        assert torch.equal(old[1], scaler.growth_count)
    return tree.replace(scaler, loss_scale=new[0], growth_count=new[1])


def check(kernels: Module, scaler: fmp.DynamicLossScale, finite: bool, in_place: bool = False) -> None:
    found, wanted = adjusted(kernels, scaler, finite, in_place), scaler.adjust(torch.tensor(finite))
    assert same(found.loss_scale, wanted.loss_scale)
    assert torch.equal(found.growth_count, wanted.growth_count)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_run_of_steps_in_every_order(in_place: bool) -> None:
    flags = [True, True, True, False, True, False, False, True, True, True, True, True, True]
    for kernels in in_every_order("loss_scale"):
        scaler = fmp.DynamicLossScale(init_scale=64.0, growth_interval=2, max_scale=128.0, min_scale=24.0)
        for finite in flags:
            check(kernels, scaler, finite, in_place)
            scaler = scaler.adjust(torch.tensor(finite))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 2**31 - 1, -5])
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("scale", [1.0, 3.3e38, 1e-38, float("inf"), float("nan"), 0.0])
def test_states_that_only_a_user_can_make(scale: float, finite: bool, count: int) -> None:
    scaler = tree.replace(
        fmp.DynamicLossScale(growth_interval=3),
        loss_scale=torch.tensor(scale),
        growth_count=torch.tensor(count, dtype=torch.int32),
    )
    check(module("loss_scale", "checked"), scaler, finite)


@given(
    scale=st.floats(1.0, 2.0**24, width=32),
    growth=st.floats(1.01, 10.0),
    backoff=st.floats(0.01, 0.99),
    interval=st.integers(1, 4),
    count=st.integers(0, 4),
    finite=st.booleans(),
)
def test_any_rule(scale: float, growth: float, backoff: float, interval: int, count: int, finite: bool) -> None:
    scaler = fmp.DynamicLossScale(
        init_scale=scale, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    scaler = tree.replace(scaler, growth_count=torch.tensor(count, dtype=torch.int32))
    check(module("loss_scale", "fast"), scaler, finite)
