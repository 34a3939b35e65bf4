"""Apex 1.7: optimizers on float32 masters, clipping, LARC and parameters that are added later, against torch.optim."""

from typing import Any

import pytest
import torch
from torch import nn

import fmp
from fmp import tree
from tests.bits import same_bits

HALVES = [torch.float16, torch.bfloat16]


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ params["one"]) @ params["two"]
    return hidden.float().square().mean()


def problem() -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = {"one": torch.randn(4, 6, generator=generator), "two": torch.randn(6, 3, generator=generator)}
    return params, torch.randn(5, 8, 4, generator=generator)


def half_gradients(masters: Any, x: torch.Tensor, half: torch.dtype, scale: float) -> list[torch.Tensor]:
    """Computes what Apex's O2 writes into the masters' gradients."""
    params = {name: master.detach().to(half).requires_grad_() for name, master in masters.items()}
    (loss_fn(params, x.to(half)) * scale).backward()
    return [param.grad.float() / scale for param in params.values() if param.grad is not None]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("limit", [None, 0.05])
def test_o2_is_torch_optim_on_float32_masters_and_clips_there(half, limit):
    params, batches = problem()
    policy = fmp.opt_level("O2", half, loss_scale=1024.0)
    tx = fmp.optim.adamw(0.01, weight_decay=0.1)
    step = fmp.train_step(loss_fn, tx, policy=policy, clip_norm=limit)
    state = step.init(params)

    masters = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    optimizer = torch.optim.AdamW(masters.values(), lr=0.01, weight_decay=0.1)
    for x in batches:
        state, metrics = step(state, x)
        for master, grad in zip(masters.values(), half_gradients(masters, x, half, 1024.0), strict=True):
            master.grad = grad
        norm = nn.utils.clip_grad_norm_(masters.values(), limit or float("inf"))
        torch.testing.assert_close(metrics.grad_norm, norm, rtol=1e-5, atol=0.0)
        optimizer.step()
        torch.testing.assert_close(state.master, tree.map(torch.Tensor.detach, masters), rtol=1e-4, atol=1e-6)
        assert same_bits(state.params, fmp.cast(state.master, half))


@pytest.mark.parametrize("half", HALVES)
def test_larc_adapts_the_unscaled_gradients_of_the_masters(half):
    params, batches = problem()
    rate, trust = 0.5, 0.01
    tx = fmp.optim.chain(fmp.optim.larc(rate, trust), fmp.optim.sgd(rate, momentum=0.9))
    step = fmp.train_step(loss_fn, tx, policy=fmp.opt_level("O2", half, loss_scale=256.0))
    state = step.init(params)

    masters = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    optimizer = torch.optim.SGD(masters.values(), lr=rate, momentum=0.9)
    for x in batches:
        state, _ = step(state, x)
        for master, grad in zip(masters.values(), half_gradients(masters, x, half, 256.0), strict=True):
            adaptive = trust * master.detach().norm() / (grad.norm() + 1e-8)
            master.grad = grad * min(float(adaptive) / rate, 1.0)
        optimizer.step()
        torch.testing.assert_close(state.master, tree.map(torch.Tensor.detach, masters), rtol=1e-4, atol=1e-5)


def test_larc_under_a_scale_that_overflows_skips_and_goes_on():
    params, batches = problem()
    tx = fmp.optim.chain(fmp.optim.larc(0.1), fmp.optim.sgd(0.1, momentum=0.9))
    step = fmp.train_step(loss_fn, tx, policy=fmp.opt_level("O2"), loss_scale=fmp.DynamicLossScale(64.0))
    state = step.init(params)
    after, metrics = step(state, torch.full_like(batches[0], float("inf")))
    assert metrics.skipped
    assert same_bits((after.params, after.master, after.opt_state), (state.params, state.master, state.opt_state))
    after, metrics = step(after, batches[0])
    assert not metrics.skipped
    assert fmp.all_finite(after)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_adding_parameters_is_add_param_group(level, half, name):
    make: Any = {
        "sgd": (fmp.optim.sgd(0.125, momentum=0.5), lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5)),
        "adamw": (fmp.optim.adamw(0.1, weight_decay=0.01), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01)),
    }[name]
    # The gradients are the batch, exact in every format.
    linear = lambda params, x: sum(((leaf * x).float().sum() for leaf in tree.leaves(params)), torch.zeros(()))
    batches = torch.arange(12.0).reshape(6, 2) - 4.0
    policy = fmp.opt_level(level, half, loss_scale=128.0)
    step = fmp.train_step(linear, make[0], policy=policy)
    state = step.init({"old": torch.tensor([1.0, 2.0])})

    old, new = (torch.tensor(values, requires_grad=True) for values in ([1.0, 2.0], [3.0, -1.0]))
    optimizer = make[1]([old])
    for index, x in enumerate(batches):
        if index == 3:
            state = step.extend(state, {"new": new.detach()})
            optimizer.add_param_group({"params": [new]})
        state, _ = step(state, x)
        optimizer.zero_grad()
        linear([old, new] if index >= 3 else [old], x).backward()
        optimizer.step()
    full = fmp.master.merge(state.params, state.master, form=policy.master_form or "f32")
    torch.testing.assert_close(full, {"old": old.detach(), "new": new.detach()}, rtol=1e-5, atol=1e-6)


def test_master_params_are_merged_from_the_state():
    params, batches = problem()
    policy = fmp.opt_level("O2", "bf16")
    step = fmp.train_step(loss_fn, fmp.optim.adamw(0.01), policy=policy)
    state, _ = step(step.init(params), batches[0])
    full = fmp.master.merge(state.params, state.master, form=policy.master_form)
    assert tree.describe(full) == "{'one': f32[4,6], 'two': f32[6,3]}"
    assert same_bits(fmp.cast(full, torch.bfloat16), state.params)
