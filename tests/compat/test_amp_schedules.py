"""Schedulers and parameter groups of torch on the bridge, and what to write in their place."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import fmp
from fmp.compat import amp

BAD = 2  # which batch overflows


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    factors = [float("inf") if index == BAD else 1.0 for index in range(6)]
    return [torch.randn(5, 4, generator=generator) * factor for factor in factors]


def on_the_bridge(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[int], Any]) -> list[float]:
    """Trains, and returns the learning rate after each step."""
    amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", max_loss_scale=1024.0, verbosity=0)
    rates = []
    for index, x in enumerate(data()):
        optimizer.zero_grad()
        with amp.scale_loss(model(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        after(index)
        rates.append(optimizer.param_groups[0]["lr"])
    amp.shutdown()
    return rates


def by_train_step(model: nn.Module, optimizer: fmp.optim.GradientTransformation) -> Any:
    net = fmp.functionalize(model)
    loss_fn = lambda params, x: net.apply(params, net.buffers, x)[0].square().mean()
    scale = fmp.DynamicLossScale(1024.0, max_scale=1024.0)
    step = fmp.train_step(loss_fn, optimizer, policy=fmp.opt_level("O0"), loss_scale=scale)
    state = step.init(net.params)
    for x in data():
        state, _ = step(state, x)
    assert state.skip_count == 1
    return state


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def check_same(model: nn.Module, state: Any) -> None:
    for name, param in model.named_parameters():
        torch.testing.assert_close(state.params[name], param.detach(), rtol=1e-5, atol=1e-6)


def test_a_schedule_counts_updates_where_a_scheduler_counts_calls():
    factor = lambda count: 0.5**count
    model = net()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = LambdaLR(optimizer, factor)
    rates = on_the_bridge(model, optimizer, lambda index: scheduler.step())
    assert rates == [0.5 * factor(count) for count in range(1, 7)]

    # A scheduler that is not told of the skipped step is the schedule.
    model = copy.deepcopy(other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    aware = LambdaLR(optimizer, factor)
    rates = on_the_bridge(model, optimizer, lambda index: None if index == BAD else aware.step())
    assert rates == [0.25, 0.125, 0.125, 0.0625, 0.03125, 0.015625]
    state = by_train_step(other, fmp.optim.sgd(lambda count: 0.5 * factor(count)))
    assert state.opt_state.count == 5
    check_same(model, state)


def test_a_group_without_weight_decay_is_a_mask():
    model = net()
    other = copy.deepcopy(model)
    named = list(model.named_parameters())
    groups = [
        {"params": [param for name, param in named if "weight" in name], "weight_decay": 0.5},
        {"params": [param for name, param in named if "bias" in name], "weight_decay": 0.0},
    ]
    on_the_bridge(model, torch.optim.AdamW(groups, lr=0.125), lambda index: None)
    check_same(
        model, by_train_step(other, fmp.optim.adamw(0.125, weight_decay=0.5, mask=lambda path, leaf: leaf.ndim >= 2))
    )


def test_groups_with_rates_of_their_own_are_a_partition():
    model: Any = net()
    other = copy.deepcopy(model)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.25}]
    on_the_bridge(model, torch.optim.SGD(groups, lr=0.0625), lambda index: None)
    parts = {"body": fmp.optim.sgd(0.0625), "head": fmp.optim.sgd(0.25)}
    labels = lambda path, leaf: "head" if path.startswith("2.") else "body"
    check_same(model, by_train_step(other, fmp.optim.partition(parts, labels)))
