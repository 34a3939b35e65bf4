"""What `train_step` refuses, each time naming the argument."""

from typing import Any

import pytest
import torch

import fmp


def loss_fn(params, batch):
    return (params["w"] * batch).sum()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_fn": None}, TypeError, "loss_fn must be a function"),
        ({"loss_fn": torch.ones(1)}, TypeError, "loss_fn must be a function"),
        ({"optimizer": 1e-3}, TypeError, "optimizer must be a GradientTransformation .*, got 0.001"),
        ({"optimizer": fmp.optim.adamw}, TypeError, "optimizer must be a GradientTransformation"),
        ({"optimizer": None}, TypeError, "optimizer must be a GradientTransformation"),
        (
            {"optimizer": torch.optim.SGD([torch.ones(1)], lr=0.1)},
            TypeError,
            "optimizer must be a GradientTransformation",
        ),
        ({"policy": "O2"}, TypeError, "policy must be a Policy or None, got 'O2'; see fmp.opt_level"),
        ({"policy": torch.float16}, TypeError, "policy must be a Policy or None"),
        ({"loss_scale": "fast"}, ValueError, "'fast'"),
        ({"loss_scale": -1.0}, ValueError, "must be positive"),
        ({"loss_scale": 0}, ValueError, "must be positive"),
        ({"loss_scale": fmp.DynamicLossScale}, TypeError, "loss scale must be"),
        ({"loss_scale": {"main": 1.0}}, KeyError, "there is one loss_fn"),
        ({"accumulate": 0}, ValueError, "accumulate must be a whole number of microbatches, at least 1, got 0"),
        ({"accumulate": -2}, ValueError, "accumulate must be .* got -2"),
        ({"accumulate": 2.0}, ValueError, "accumulate must be .* got 2.0"),
        ({"accumulate": True}, ValueError, "accumulate must be .* got True"),
        ({"accumulate": "2"}, ValueError, "accumulate must be .* got '2'"),
        ({"microbatch_weight": 2.0}, TypeError, "microbatch_weight must be a function of a microbatch, got 2.0"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm must be at least 0.0 and below inf, got -1.0"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm must be .* got nan"),
        ({"clip_norm": "1"}, TypeError, "clip_norm must be a number, got '1'"),
        ({"clip_norm": True}, TypeError, "clip_norm must be a number, got True"),
        ({"ema": 1.0}, ValueError, "ema must be at least 0.0 and below 1.0, got 1.0"),
        ({"ema": -0.1}, ValueError, "ema must be .* got -0.1"),
        ({"ema": True}, TypeError, "ema must be a number, got True"),
        ({"has_aux": 1}, TypeError, "has_aux must be True or False, got 1"),
        ({"skip_nonfinite": "no"}, TypeError, "skip_nonfinite must be True or False, got 'no'"),
        ({"donate": None}, TypeError, "donate must be True or False, got None"),
        ({"compile": "inductor"}, TypeError, "compile must be True or False, got 'inductor'"),
        ({"uses": {"main": ["w"]}}, KeyError, "uses names the losses"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error, message):
    with pytest.raises(error, match=message):
        fmp.train_step(**{"loss_fn": loss_fn, "optimizer": fmp.optim.sgd(0.1), **options})


@pytest.mark.parametrize(
    "options", [{"clip_norm": 1}, {"clip_norm": 0}, {"ema": 0}, {"loss_scale": "none"}, {"loss_scale": 2}]
)
def test_what_is_taken(options):
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), **options)
    state, _ = step(step.init({"w": torch.ones(1)}), torch.ones(1))
    assert state.step == 1


def test_the_dictionaries_given_can_be_changed_afterwards():
    losses, optimizers = {"a": loss_fn}, {"w": fmp.optim.sgd(0.5)}
    uses = {"a": ["w"]}
    step = fmp.train_step(losses, optimizers, uses=uses)
    for changed in (losses, optimizers, uses["a"]):
        changed.clear()
    state, _ = step(step.init({"w": torch.ones(1)}), torch.ones(1))
    assert state.params["w"] == 0.5


def test_dictionaries_by_loss_may_name_some_of_the_losses():
    losses = {"g": lambda p, b: (p["g"].sum(), "aux"), "d": lambda p, b: p["d"].sum()}
    optimizers = {"g": fmp.optim.sgd(0.1), "d": fmp.optim.sgd(0.1)}
    step = fmp.train_step(
        losses, optimizers, has_aux={"g": True}, loss_scale={"d": 8.0}, skip_nonfinite={"g": True}, uses={"d": ["d"]}
    )
    _, metrics = step(step.init({"g": torch.ones(1), "d": torch.ones(1)}), None)
    assert metrics.aux == {"g": "aux", "d": None}
    assert (metrics.loss_scale["g"], metrics.loss_scale["d"]) == (1, 8)
    assert step.config.skips == {"g": True, "d": True}
    assert step.config.uses == {"g": ("g", "d"), "d": ("d",)}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fmp.train_step(plain, fmp.optim.sgd(0.1), loss_scale={"d": 1.0}), KeyError, "there is one loss_fn"),
        (lambda: step_of(plain).init(torch.nn.Linear(1, 1)), TypeError, r"fmp\.functionalize\(module\)\.params"),
        (lambda: step_of(plain)(step_of(plain).init(W), {"x": W.numpy()}), TypeError, "x is a numpy array"),
        (lambda: two({"a": pair, "b": plain}), TypeError, r"loss_fn\['a'\] must return the loss alone .* returned 2"),
        (lambda: two({"a": plain, "b": lambda w, b: 3}), TypeError, r"loss_fn\['b'\] must return the loss as"),
    ],
)
def test_mistakes_of_a_newcomer_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


W = torch.ones(2)
plain = lambda w, b: w.sum()
pair = lambda w, b: (w.sum(), "aux")


def step_of(loss_fn):
    return fmp.train_step(loss_fn, fmp.optim.sgd(0.1))


def two(losses):
    step = step_of(losses)
    return step(step.init(W), None)
