"""Apex 1.5: gradients across backward passes, in float32 and whatever the scales, against plain torch."""

from typing import Any

import pytest
import torch

import fmp
from tests.bits import same_bits

INF = float("inf")
HALVES = [torch.float16, torch.bfloat16]


def loss_fn(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ weight).float().square().mean()


def problem(count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, generator=generator), [torch.randn(5, 4, generator=generator) for _ in range(count)]


def half_gradient(master: torch.Tensor, x: torch.Tensor, half: torch.dtype, scale: float) -> torch.Tensor:
    """Computes what Apex's O2 adds to a master's gradient: that of the half model, widened, then unscaled."""
    weight = master.to(half).requires_grad_()
    (loss_fn(weight, x.to(half)) * scale).backward()
    assert weight.grad is not None
    return weight.grad.float() / scale


@pytest.mark.parametrize("half", HALVES)
def test_several_backward_passes_add_up_in_the_masters(half):
    weight, batches = problem(3)
    losses: Any = {str(i): lambda w, batch, i=i: loss_fn(w, batch[i]) for i in range(3)}
    scales = {"0": 64.0, "1": 1024.0, "2": 8.0}
    step = fmp.train_step(losses, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2", half), loss_scale=scales)
    state, _ = step(step.init(weight), batches)

    master = weight.clone().requires_grad_()
    master.grad = sum((half_gradient(weight, x, half, scales[str(i)]) for i, x in enumerate(batches)), torch.zeros(()))
    torch.optim.SGD([master], lr=0.1).step()
    torch.testing.assert_close(state.master, master.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("half", HALVES)
def test_a_window_of_iterations_while_the_scale_moves(half):
    weight, batches = problem(6)
    tx = fmp.optim.accumulate(fmp.optim.sgd(0.1, momentum=0.9), every=3)
    scaler = fmp.DynamicLossScale(8.0, growth_interval=1)
    step = fmp.train_step(loss_fn, tx, policy=fmp.opt_level("O2", half), loss_scale=scaler)
    state = step.init(weight)

    master = weight.clone().requires_grad_()
    optimizer = torch.optim.SGD([master], lr=0.1, momentum=0.9)
    for index, x in enumerate(batches):
        before = state
        state, metrics = step(state, x)
        assert metrics.loss_scale == 8.0 * 2**index
        grad = half_gradient(master.detach(), x, half, float(metrics.loss_scale)) / 3
        master.grad = grad if master.grad is None else master.grad + grad
        if (index + 1) % 3:
            assert same_bits((state.params, state.master), (before.params, before.master))
        else:
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(state.master, master.detach(), rtol=1e-5, atol=1e-6)


def test_a_bad_iteration_is_left_out_of_its_window():
    """Apex skips the step of the whole window; here it waits for one more good batch."""
    weight, (one, two, three) = problem(3)
    tx = fmp.optim.accumulate(fmp.optim.sgd(0.1), every=3)
    step = fmp.train_step(loss_fn, tx, policy=fmp.opt_level("O2"), loss_scale=fmp.DynamicLossScale(64.0))
    clean = bad = step.init(weight)
    for x in (one, two, three):
        clean, _ = step(clean, x)
    for x in (one, torch.full((5, 4), INF), two, three):
        bad, _ = step(bad, x)
    assert (clean.skip_count, bad.skip_count, bad.loss_scale.loss_scale) == (0, 1, 32.0)
    torch.testing.assert_close(bad.master, clean.master, rtol=1e-3, atol=1e-4)
    assert not same_bits(bad.master, weight)


def test_a_bad_microbatch_skips_the_step_as_in_apex():
    weight, batches = problem(4)
    batches[2] = torch.full((5, 4), INF)
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2"), accumulate=4)
    state = step.init(weight)
    after, metrics = step(state, torch.cat(batches))
    assert metrics.skipped
    assert same_bits((after.params, after.master), (state.params, state.master))
    assert after.loss_scale.loss_scale == 2.0**15  # one window, one back-off


@pytest.mark.parametrize("half", HALVES)
def test_microbatches_add_up_in_the_masters(half):
    weight, batches = problem(4)
    policy = fmp.opt_level("O2", half, loss_scale=256.0)
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=policy, accumulate=4)
    state, _ = step(step.init(weight), torch.cat(batches))
    grad = sum((half_gradient(weight, x, half, 256.0) for x in batches), torch.zeros(())) / 4
    torch.testing.assert_close(state.master, weight - 0.1 * grad, rtol=1e-6, atol=1e-7)
