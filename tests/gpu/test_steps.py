"""Whole train steps on a device: the kernels do their work, change no bit of it, and the host waits for nothing."""

import pytest
import torch

import fmp
from fmp import tree
from fmp.kernels import eligible
from fmp.optim import schedules
from tests.bits import same_bits
from tests.gpu.steps import make_batch, make_params, make_step

OPTIMIZERS = {
    "adam": fmp.optim.adamw(schedules.linear(0.01, 0.001, 5), mask=["weight", "other"]),
    "sgd": fmp.optim.sgd(0.05, momentum=0.9, weight_decay=0.1),
}
# Norms differ in the last bit, so no gradient is clipped.
OPTIONS = {
    "f16": {},
    "kept state": {"donate": False},
    "two microbatches": {"accumulate": 2},
    "moving average": {"ema": 0.9},
    "static scale": {"loss_scale": 128.0},
    "bf16": {"policy": fmp.opt_level("O2", half_dtype=torch.bfloat16), "loss_scale": None},
    "f32": {"policy": fmp.opt_level("O0"), "loss_scale": None},
}


def run(name: str, device: torch.device, options: dict) -> tuple[list, list]:
    step = make_step(OPTIMIZERS[name], **({"clip_norm": None} | options))
    state, states, metrics = step.init(make_params(device)), [], []
    for seed in range(5):
        state, found = step(state, make_batch(seed, device, overflow=seed == 2 and "policy" not in options))
        states.append(tree.map(lambda leaf: None if leaf is None else leaf.cpu().clone(), state))
        metrics.append(found)
    return states, metrics


@pytest.mark.usefixtures("exact_root_on_a_cpu")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_kernels_change_no_bit(device, sources, monkeypatch, name, options):
    states, metrics = run(name, device, options)
    assert {name, "scale"} <= set(sources)
    del sources[:]
    monkeypatch.setattr(eligible, "has_kernels", lambda device: False)
    wanted_states, wanted_metrics = run(name, device, options)
    assert not sources
    assert same_bits(states, wanted_states)
    for found, wanted in zip(metrics, wanted_metrics, strict=True):
        norm, wanted_norm = found.grad_norm.item(), wanted.grad_norm.item()
        assert norm == pytest.approx(wanted_norm, rel=1e-6) or not found.grads_finite
        assert same_bits(tree.replace(found, grad_norm=None), tree.replace(wanted, grad_norm=None))


def test_clipping_stays_close(device, monkeypatch):
    states, _ = run("sgd", device, {"clip_norm": 0.1})
    monkeypatch.setattr(eligible, "has_kernels", lambda device: False)
    wanted, _ = run("sgd", device, {"clip_norm": 0.1})
    for found, expected in zip(tree.leaves(states[-1].master), tree.leaves(wanted[-1].master), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_the_host_waits_for_nothing(gpu):
    step, batches = make_step(), [make_batch(seed, gpu, overflow=seed == 1) for seed in range(3)]
    state = step.init(make_params(gpu))
    for batch in batches:  # compiles, and tries the kernels
        state, _ = step(state, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            state, _ = step(state, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.step.item() == 4
