"""Losses and batches of all kinds in a measured step: with gradients of their own, as methods, of own classes."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import fmp
from fmp.memory.measured import measure_step
from tests.test_memory_measure import W, X, nbytes


def test_a_gradient_within_the_loss_is_of_the_forward_pass():
    def score(params, x):
        return torch.tanh(x @ params["a"]) @ params["b"]

    def penalized(params, x):
        (slope,) = torch.func.vjp(lambda x: score(params, x), x)[1](torch.ones(len(x), 1))
        return (slope.square().sum(1) - 1).square().mean() + score(params, x).mean()

    params, x = {"a": torch.randn(64, 64), "b": torch.randn(64, 1)}, torch.randn(512, 64)
    timeline = measure_step(fmp.train_step(penalized, fmp.optim.adam(1e-3)), params, x)
    phases = [phase for phase, _ in itertools.groupby(timeline.phases)]
    assert phases.count("forward") == phases.count("backward") == 1
    live = zip(timeline.phases, timeline.live["gradients"], strict=True)
    # In the forward pass nothing is a gradient; later the parameters have one each.
    assert max(size for phase, size in live if phase == "forward") == 0
    assert max(timeline.live["gradients"]) < 2 * nbytes(params) + 100
    # Two activations of each score and the slope live at once, whoever made them.
    assert max(timeline.live["activations"]) >= 5 * x.nbytes


class OwnBatch:
    def __init__(self, x: torch.Tensor):
        self.x = x

    def to(self, dtype: torch.dtype) -> "OwnBatch":
        return OwnBatch(self.x.to(dtype))


class Task:
    def __init__(self) -> None:
        self.teacher, self.layer = torch.randn(128, 128), nn.Linear(128, 4)

    def loss(self, params, x):
        return self.layer(x @ params["w"] @ self.teacher).square().mean()


@pytest.mark.parametrize("policy", [None, fmp.opt_level("O2", "bf16")])
def test_a_batch_of_a_class_of_its_own(policy):
    def of_own(params, batch):
        return (batch.x @ params["w"]).float().square().mean()

    def of_plain(params, x):
        return (x @ params["w"]).float().square().mean()

    options: dict[str, Any] = {"optimizer": fmp.optim.adam(1e-3), "policy": policy}
    own = measure_step(fmp.train_step(of_own, **options), {"w": W}, OwnBatch(X))
    assert own == measure_step(fmp.train_step(of_plain, **options), {"w": W}, X)


def test_a_loss_that_is_a_method():
    task = Task()
    teacher = task.teacher
    timeline = measure_step(fmp.train_step(task.loss, fmp.optim.sgd(0.1)), {"w": W}, X)
    assert task.teacher is teacher
    assert timeline.live["other"][0] >= teacher.nbytes + nbytes(list(task.layer.parameters()))


def test_new_tensors_are_no_meta_tensors():
    def loss_fn(params, x):
        return (x @ params["w"] + torch.randn(128)).square().mean()

    step = fmp.train_step(loss_fn, fmp.optim.adam(1e-3))
    expected = measure_step(step, {"w": W}, X)
    with torch.device("meta"):
        assert measure_step(step, {"w": W}, X) == expected
