"""The same training by fmp and by torch.amp, autocast with GradScaler: the same losses, and the same scales."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmp
from tests.bits import same_bits

STEPS = 100
RATE = 2.0**-4  # like the momentum a power of two: products with them are exact, fused with a sum or not
BF16, F16 = torch.bfloat16, torch.float16


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Attention(nn.Module):
    """Layers on which torch's lists for CUDA and for CPU differ: layer_norm and softmax."""

    def __init__(self):
        super().__init__()
        self.embed, self.value, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(F.relu(self.embed(x)))
        value = F.gelu(self.value(h))
        return self.head(h + (h @ value.mT).softmax(-1) @ value)


class Run(NamedTuple):
    losses: torch.Tensor
    scales: list[float]
    skipped: list[bool]
    params: Any


def batches(bad: tuple[int, ...] = ()) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(STEPS, 32, 8, generator=generator)
    ys = (xs @ torch.randn(8, 3, generator=generator)).argmax(-1)
    return [(x * (float("inf") if index in bad else 1.0), y) for index, (x, y) in enumerate(zip(xs, ys, strict=True))]


def module_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def by_torch(kind: type[nn.Module], optimizer_of: Any, half: torch.dtype, bad: tuple[int, ...] = (), **scaling: Any):
    module = module_of(kind)
    optimizer = optimizer_of(module.parameters())
    scaler = torch.amp.GradScaler("cpu", **scaling)
    losses, scales, skipped = [], [], []
    for x, y in batches(bad):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=half):
            loss = F.cross_entropy(module(x), y)
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        skipped.append(scaler.get_scale() < scales[-1])
    params = {name: param.detach() for name, param in module.named_parameters()}
    return Run(torch.stack(losses), [*scales, scaler.get_scale()], skipped, params)


def by_fmp(kind: type[nn.Module], tx: Any, half: torch.dtype, bad: tuple[int, ...] = (), rules: Any = None, **scaling):
    model = fmp.functionalize(module_of(kind))
    policy = fmp.opt_level("O1", half, op_rules=rules or fmp.OpRules.torch())
    loss_fn = lambda params, batch: F.cross_entropy(model.apply(params, {}, batch[0])[0], batch[1])
    step = fmp.train_step(loss_fn, tx, policy=policy, loss_scale=fmp.DynamicLossScale(**scaling))
    state = step.init(model.params)
    losses, scales, skipped = [], [], []
    for batch in batches(bad):
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
        scales.append(float(metrics.loss_scale))
        skipped.append(bool(metrics.skipped))
    scales.append(float(state.loss_scale.loss_scale))
    return Run(torch.stack(losses), scales, skipped, state.params)


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.5), fmp.optim.sgd(RATE, momentum=0.5)),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1), fmp.optim.adamw(1e-3, weight_decay=0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", [Perceptron, Attention])
def test_a_hundred_losses_in_bfloat16_agree_within_its_rounding(kind, name):
    theirs, ours = OPTIMIZERS[name]
    # On a CPU, torch.autocast leaves these two in bfloat16, which OpRules.torch(), its list for CUDA, does not.
    rules = fmp.OpRules.torch().leave("layer_norm").leave("softmax")
    expected, found = by_torch(kind, theirs, BF16), by_fmp(kind, ours, BF16, rules=rules)
    assert expected.losses[-1] < 0.7 * expected.losses[0]
    torch.testing.assert_close(found.losses, expected.losses, rtol=torch.finfo(BF16).eps, atol=0.0)
    assert same_bits(found.losses[0], expected.losses[0])
    assert found.scales == expected.scales
    assert not any(found.skipped)


def test_with_sgd_they_agree_in_every_bit_of_the_losses():
    theirs, ours = OPTIMIZERS["sgd"]
    assert same_bits(by_fmp(Perceptron, ours, BF16).losses, by_torch(Perceptron, theirs, BF16).losses)


@pytest.mark.mixed_dtypes
def test_with_the_list_for_cuda_they_agree_where_the_lists_do():
    theirs, ours = OPTIMIZERS["sgd"]
    expected, found = by_torch(Attention, theirs, BF16).losses, by_fmp(Attention, ours, BF16).losses
    assert not same_bits(found, expected)
    # What is kept in float32 differs by rounding in the first step, and by what training makes of that in later ones.
    torch.testing.assert_close(found[0], expected[0], rtol=torch.finfo(BF16).eps, atol=0.0)
    assert (found[-10:].mean() - expected[-10:].mean()).abs() < 0.1 * expected[-10:].mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("scaling", "bad", "overflows"),
    [
        ({"init_scale": 1024.0, "growth_interval": 10}, (0, 25, 26, 99), 4),  # bad batches
        ({"init_scale": 2.0**24, "growth_interval": 20}, (), None),  # a scale that is too high, and grows again
        ({"init_scale": 512.0, "growth_interval": 7, "growth_factor": 4.0, "backoff_factor": 0.25}, (31, 64), None),
        ({"init_scale": 1024.0}, (3,), 1),
    ],
    ids=["bad batches", "too high", "other factors", "defaults"],
)
def test_the_scales_in_float16_are_those_of_grad_scaler(scaling, bad, overflows, name):
    theirs, ours = OPTIMIZERS[name]
    expected = by_torch(Perceptron, theirs, F16, bad, **scaling)
    found = by_fmp(Perceptron, ours, F16, bad, **scaling, max_scale=2.0**100, min_scale=2.0**-100)
    assert found.scales == expected.scales
    assert found.skipped == expected.skipped
    assert sum(found.skipped) == (overflows or sum(expected.skipped)) > 0
    good = torch.tensor([index not in bad for index in range(STEPS)])
    torch.testing.assert_close(found.losses[good], expected.losses[good], rtol=0.02, atol=0.0)
    torch.testing.assert_close(found.params, expected.params, rtol=0.0, atol=0.02)
