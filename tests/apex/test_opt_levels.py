"""Apex 1.1 to 1.3: each opt level against the same training written out in plain torch, and what `initialize` took."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmp
from fmp import tree
from tests.bits import same_bits

HALVES = [torch.float16, torch.bfloat16]
STEPS = 4
RATE = 0.125  # like the momentum a power of two: products with them are exact, fused with a sum or not


def module_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    )


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(STEPS, 16, 6, generator=generator)
    return [(x, x[:, :3].argmax(-1)) for x in xs]


def trained(policy: fmp.Policy | None, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    model = fmp.functionalize(module_of())

    def loss_fn(params: Any, batch: Any, *, buffers: Any) -> Any:
        logits, buffers = model.apply(params, buffers, batch[0], train=True)
        return F.cross_entropy(logits.float(), batch[1]), buffers

    step = fmp.train_step(loss_fn, fmp.optim.sgd(RATE, momentum=0.5), policy=policy, **options)
    state, losses = step.init(model.params, buffers=model.buffers), []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    return state, losses


def by_torch(module: nn.Module, cast: torch.dtype) -> list[torch.Tensor]:
    """Trains a module as it is: its parameters and inputs in one dtype."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.5)
    losses = []
    for x, y in batches():
        loss = F.cross_entropy(module(x.to(cast)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_o0_is_training_in_float32_bit_for_bit():
    module = module_of()
    losses = by_torch(module, torch.float32)
    state, found = trained(fmp.opt_level("O0"))
    assert same_bits(found, losses)
    assert same_bits({**state.params, **state.buffers}, dict(module.state_dict()))


def test_disabled_is_training_without_amp_bit_for_bit():
    module = module_of()
    losses = by_torch(module, torch.float32)
    for level in ("O0", "O1", "O2", "O3"):
        state, found = trained(fmp.opt_level(level, enabled=False))
        assert same_bits(found, losses)
        assert same_bits({**state.params, **state.buffers}, dict(module.state_dict()))
        assert all(leaf is None for leaf in tree.leaves(state.master))
        assert isinstance(state.loss_scale, fmp.NoOpLossScale)
        assert state.skip_count == 0


@pytest.mark.parametrize("half", HALVES)
def test_o3_is_training_a_half_module(half):
    module = module_of().to(half)
    losses = by_torch(module, half)
    state, found = trained(fmp.opt_level("O3", half))
    torch.testing.assert_close(found, losses, rtol=4 * torch.finfo(half).eps, atol=0.0)
    assert {leaf.dtype for leaf in tree.leaves((state.params, state.buffers)) if leaf.is_floating_point()} == {half}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_o1_and_o2_stay_close_to_float32(level, half):
    _, expected = trained(fmp.opt_level("O0"))
    policy = fmp.opt_level(level, half, keep_full=module_of() if level == "O2" else ())
    state, found = trained(policy, loss_scale=1024.0)
    assert state.skip_count == 0
    torch.testing.assert_close(found, expected, rtol=16 * torch.finfo(half).eps, atol=0.0)


@pytest.mark.parametrize("half", HALVES)
def test_what_each_level_stores(half):
    norms = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "4.weight", "4.bias"}
    model = fmp.functionalize(module_of())
    for level, narrow, masters in (("O0", False, False), ("O1", False, False), ("O2", True, True), ("O3", True, False)):
        policy = fmp.opt_level(level, half, keep_full=model if level == "O2" else ())
        state, _ = trained(policy, loss_scale=1024.0)
        kept = norms if level == "O2" else set()
        for name, leaf in {**state.params, **state.buffers}.items():
            if leaf.is_floating_point():
                assert leaf.dtype == (half if narrow and name not in kept else torch.float32)
        for name, leaf in state.master.items():
            assert (leaf is not None) == (masters and name not in kept)


def test_batch_norms_alone_are_kept_as_by_apex():
    module = module_of()
    kept = [f"{path}.*" for path, part in module.named_modules() if isinstance(part, nn.BatchNorm1d)]
    state, _ = trained(fmp.opt_level("O2", "bf16", keep_norm_fp32=False, keep_full=kept))
    full = {name for name, leaf in {**state.params, **state.buffers}.items() if leaf.dtype == torch.float32}
    assert full == {"1.weight", "1.bias", "1.running_mean", "1.running_var"}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_model_that_is_half_already_keeps_its_values(level):
    """Apex refuses such a model."""
    model = fmp.functionalize(nn.Linear(3, 2).half())
    step = fmp.train_step(lambda p, x: model.apply(p, {}, x)[0].sum(), fmp.optim.sgd(0.1), policy=fmp.opt_level(level))
    assert same_bits(step.init(model.params).params, dict(model.params))


# What Apex's initialize refuses or takes, line by line: level, override, and fmp's answer ("" where both take it).
PROPERTIES: list[tuple[str, dict[str, Any], str]] = [
    ("O1", {"cast_model_type": torch.float16}, "the model is stored in float32"),
    ("O1", {"cast_model_type": torch.float32}, ""),
    ("O1", {"cast_model_type": False}, ""),
    ("O2", {"cast_model_type": False}, ""),
    ("O0", {"patch_torch_functions": True}, "only O1 casts around functions"),
    ("O2", {"patch_torch_functions": True}, "only O1 casts around functions"),
    ("O3", {"patch_torch_functions": True}, "only O1 casts around functions"),
    ("O1", {"patch_torch_functions": False}, ""),
    ("O1", {"keep_batchnorm_fp32": True}, "all parameters stay in float32"),
    ("O1", {"keep_batchnorm_fp32": False}, "all parameters stay in float32"),
    ("O1", {"keep_batchnorm_fp32": "False"}, "all parameters stay in float32"),
    ("O3", {"keep_batchnorm_fp32": "True"}, ""),
    ("O2", {"keep_batchnorm_fp32": "False"}, ""),
    ("O2", {"keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32"),
    ("O1", {"master_weights": True}, "all parameters stay in float32"),
    ("O1", {"master_weights": False}, "all parameters stay in float32"),
    ("O3", {"master_weights": True}, ""),
    ("O2", {"master_weights": False}, ""),
    ("O2", {"loss_scale": "dynamic"}, ""),
    ("O2", {"loss_scale": "128.0"}, ""),
    ("O0", {"loss_scale": 128.0}, ""),
    ("O2", {"loss_scale": "fast"}, "fast"),
    ("02", {}, "with the letter O, not zero"),
    # Apex has no check for these.
    ("O0", {"master_weights": True}, "float32 parameters are their own masters"),
    ("O2", {"loss_scale": -1.0}, "positive"),
    ("O2", {"loss_scale": 0.0}, "positive"),
    ("O2", {"loss_scale": float("nan")}, "positive"),
]


@pytest.mark.parametrize(("level", "override", "reason"), PROPERTIES, ids=str)
def test_every_property(level, override, reason):
    if not reason:
        assert isinstance(fmp.opt_level(level, **override), fmp.Policy)
        return
    with pytest.raises(ValueError, match=reason):
        fmp.opt_level(level, **override)
