"""The train step with one loss and one optimizer: its arithmetic, what a skipped step leaves, masters, purity."""

import dataclasses
import functools
import math
import struct
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import fmp
from fmp import master, tree
from tests.bits import differing, same_bits, snapshot, storages
from tests.host import NoHostSync

INF, NAN = float("inf"), float("nan")


def squares(params, batch):
    x, y = batch
    return ((x @ params["w"] + params["b"] - y).float() ** 2).mean()


def regression(dtype=torch.float32, rows=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y, w = (torch.randn(size, generator=generator, dtype=dtype) for size in [(rows, 3), (rows, 2), (3, 2)])
    return {"w": w, "b": torch.zeros(2, dtype=dtype)}, (x, y)


def given_gradient(params, gradient):
    """A loss whose gradient is the batch."""
    return sum((p.float() * g.float()).sum() for p, g in zip(tree.leaves(params), tree.leaves(gradient), strict=True))


def gradient_spy():
    """An optimizer that changes nothing and keeps the gradients that it was given as its state."""
    return fmp.optim.GradientTransformation(
        init=lambda params: tree.map(lambda leaf: torch.zeros_like(leaf, dtype=torch.float32), params),
        update=lambda grads, state, params: (tree.map(lambda leaf: None, grads), grads),
    )


# The arithmetic


def test_fifty_steps_equal_those_of_torch_in_float64():
    params, batch = regression(torch.float64)
    loss_fn = lambda params, batch: ((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2).mean()
    step = fmp.train_step(loss_fn, fmp.optim.adamw(1e-2, weight_decay=0.1), loss_scale="dynamic")
    state = step.init(params)

    theirs = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    optimizer = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.1)
    for _ in range(50):
        state, metrics = step(state, batch)
        optimizer.zero_grad()
        loss = loss_fn(theirs, batch)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(metrics.loss, loss.detach(), rtol=1e-10, atol=0)
    for name in params:
        torch.testing.assert_close(state.params[name], theirs[name].detach(), rtol=1e-10, atol=1e-12)
    assert metrics.loss.dtype == metrics.grad_norm.dtype == torch.float64
    assert state.step == 50


def test_a_step_in_float32_equals_torch_amp_with_its_scaler():
    params, batch = regression()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    theirs = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    optimizer = torch.optim.SGD(theirs.values(), lr=0.125, momentum=0.5)

    ours = fmp.DynamicLossScale(init_scale=2.0**10, growth_interval=2)
    step = fmp.train_step(squares, fmp.optim.sgd(0.125, momentum=0.5), loss_scale=ours)
    state = step.init(params)
    for bad in (False, False, True, False, True, True, False, False, False):
        x, y = batch
        x = x * INF if bad else x
        state, metrics = step(state, (x, y))
        optimizer.zero_grad()
        scaler.scale(squares(theirs, (x, y))).backward()
        scaler.step(optimizer)
        scaler.update()
        assert metrics.skipped == bad
        assert state.loss_scale.loss_scale == scaler.get_scale()
        for name in params:
            torch.testing.assert_close(state.params[name], theirs[name].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("interval", [1, 3])
def test_the_scale_grows_on_exactly_the_nth_finite_step(interval):
    step = fmp.train_step(
        given_gradient, gradient_spy(), loss_scale=fmp.DynamicLossScale(init_scale=4.0, growth_interval=interval)
    )
    state = step.init({"w": torch.ones(3)})
    scale, tracker = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32)
    for bad in (False, False, False, False, True, False, False, False, True, True, False, False, False):
        state, metrics = step(state, {"w": torch.full((3,), INF if bad else 2.0)})
        assert metrics.loss_scale == scale
        torch.ops.aten._amp_update_scale_(scale, tracker, torch.tensor(float(bad)), 2.0, 0.5, interval)
        assert state.loss_scale.loss_scale == max(scale, 1.0)
        assert state.loss_scale.growth_count == tracker


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_loss_and_gradient_are_exact_on_the_step_that_grows_the_scale(dtype):
    step = fmp.train_step(
        lambda params, batch: (params["w"] * params["w"]).sum(),
        gradient_spy(),
        loss_scale=fmp.DynamicLossScale(init_scale=2.0**12, growth_interval=3),
    )
    state = step.init({"w": torch.ones(3, dtype=dtype)})
    for scale in (2.0**12, 2.0**12, 2.0**12, 2.0**13):
        state, metrics = step(state, None)
        assert metrics.loss_scale == scale
        assert metrics.loss == 3.0
        assert same_bits(state.opt_state["w"], torch.full((3,), 2.0))


@pytest.mark.parametrize("scale", ["dynamic", 2.0**16, 2.0**20, 2.0**15, 2.0**3])
@pytest.mark.parametrize("policy", [None, "f16", "params=f16,compute=f16,output=f32"])
def test_a_float16_loss_is_scaled_in_float32(scale, policy):
    step = fmp.train_step(
        lambda params, batch: (params["w"] * batch).sum(),
        gradient_spy(),
        policy=policy and fmp.Policy.parse(policy),
        loss_scale=scale,
    )
    state = step.init({"w": torch.tensor([1.0], dtype=torch.float16)})
    state, metrics = step(state, torch.tensor([1.5], dtype=torch.float16))
    assert not metrics.skipped
    assert same_bits(metrics.loss, torch.tensor(1.5))
    assert same_bits(state.opt_state, {"w": torch.tensor([1.5])})
    assert metrics.loss_scale == (2.0**16 if scale == "dynamic" else scale)


def test_a_float32_loss_of_float16_parameters_takes_the_whole_scale():
    step = fmp.train_step(given_gradient, gradient_spy(), loss_scale=2.0**20)
    state = step.init({"w": torch.ones(2, dtype=torch.float16)})
    # Without scaling, both entries would be zero or have few digits in float16.
    state, _ = step(state, {"w": torch.tensor([3 * 2.0**-30, 1e-6])})
    torch.testing.assert_close(state.opt_state["w"], torch.tensor([3 * 2.0**-30, 1e-6]), rtol=1e-3, atol=0)


def test_finiteness_is_that_of_the_unscaled_gradient():
    # The scaled gradient is 1e30; without the scale of 2^-120 it is beyond float32.
    loss_fn = lambda params, batch: (params["w"] * batch).sum() * 2.0**120
    step = fmp.train_step(loss_fn, fmp.optim.sgd(1.0), loss_scale=2.0**-120)
    state = step.init({"w": torch.ones(1)})
    after, metrics = step(state, torch.tensor([1e30]))
    assert (metrics.grads_finite, metrics.skipped) == (False, True)
    assert same_bits(after.params, state.params)


@pytest.mark.parametrize("scale", [None, 2.0**16, "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_clipping_sees_the_unscaled_norm(scale, dtype):
    scale = 2.0**13 if scale == 2.0**16 and dtype == torch.float16 else scale
    gradient = {"w": torch.tensor([0.3, 0.4])}
    step = fmp.train_step(given_gradient, gradient_spy(), loss_scale=scale, clip_norm=1.0)
    state, metrics = step(step.init({"w": torch.ones(2, dtype=dtype)}), gradient)
    torch.testing.assert_close(metrics.grad_norm, torch.tensor(0.5), rtol=1e-3, atol=0)
    torch.testing.assert_close(state.opt_state, gradient, rtol=1e-3, atol=0)

    tight = fmp.train_step(given_gradient, gradient_spy(), loss_scale=scale, clip_norm=0.25)
    state, metrics = tight(tight.init({"w": torch.ones(2, dtype=dtype)}), gradient)
    torch.testing.assert_close(metrics.grad_norm, torch.tensor(0.5), rtol=1e-3, atol=0)
    torch.testing.assert_close(state.opt_state, {"w": torch.tensor([0.15, 0.2])}, rtol=1e-3, atol=0)


def test_clipping_does_not_overflow_in_float16():
    params = {"w": torch.ones(1000, dtype=torch.float16)}
    step = fmp.train_step(given_gradient, gradient_spy(), clip_norm=1.0)
    state, metrics = step(step.init(params), {"w": torch.full((1000,), 3000.0)})
    torch.testing.assert_close(metrics.grad_norm, torch.tensor(3000.0 * 1000**0.5))
    torch.testing.assert_close(fmp.global_norm(state.opt_state), torch.tensor(1.0))


def test_clipping_to_zero_of_zero_gradients_is_zero():
    step = fmp.train_step(given_gradient, gradient_spy(), clip_norm=0.0)
    state, _ = step(step.init({"w": torch.ones(2)}), {"w": torch.zeros(2)})
    assert same_bits(state.opt_state, {"w": torch.zeros(2)})


def test_the_moving_average_does_not_stall():
    step = fmp.train_step(given_gradient, fmp.optim.sgd(1.0), policy=fmp.opt_level("O2", "bf16"), ema=0.999)
    state = step.init({"w": torch.ones(1)})
    state, _ = step(state, {"w": torch.tensor([-1.0])})
    assert state.params["w"] == 2.0
    for _ in range(499):
        state, _ = step(state, {"w": torch.zeros(1)})
    torch.testing.assert_close(state.ema["w"], torch.tensor([2 - 0.999**500]), rtol=1e-5, atol=0)


def test_zero_gradients_change_nothing_but_the_counts():
    step = fmp.train_step(
        given_gradient, fmp.optim.adamw(0.1, weight_decay=0.0), policy=fmp.opt_level("O2"), ema=0.5, clip_norm=1.0
    )
    first = state = step.init({"w": torch.linspace(-1, 1, 5)})
    for _ in range(3):
        state, metrics = step(state, {"w": torch.zeros(5)})
        assert not metrics.skipped
    assert differing(first, state) == {"step", "opt_state/count", "opt_state/ages/w", "loss_scale/growth_count"}


# What a step skips, against a model of the semantics in plain Python


def half(x):
    return struct.unpack("e", struct.pack("e", x))[0]


@dataclasses.dataclass
class Plain:
    """The semantics of a train step, for one weight, in plain Python numbers."""

    weight: float
    step: int = 0
    momentum: float = 0.0
    updates: int = 0
    ema: float = math.nan
    mean: float = 0.0
    batches: int = 0
    scale: float = 2.0**11
    growth_count: int = 0
    skip_count: int = 0

    def __post_init__(self):
        self.ema = self.weight

    def run(self, gradient, poison, skip):
        loss = half(self.weight) * gradient
        finite = poison == 0.0 and abs(gradient) * self.scale < 65520
        if finite or not skip:
            assert finite, "the model stops where NaN begins"
            rate = 0.25 if self.updates < 3 else 0.125
            self.momentum = 0.5 * self.momentum + gradient
            self.weight -= rate * self.momentum
            self.updates += 1
            self.ema = 0.5 * self.ema + 0.5 * self.weight
            self.mean = 0.5 * self.mean + 0.5 * gradient
            self.batches += 1
            self.step += 1
        else:
            self.skip_count += 1
        if not finite:
            self.scale, self.growth_count = max(self.scale * 0.5, 512.0), 0
        elif self.growth_count == 1:
            self.scale, self.growth_count = min(self.scale * 2.0, 2.0**14), 0
        else:
            self.growth_count += 1
        return loss, finite

    def as_state(self):
        def f32(x):
            return torch.tensor([x])

        def i32(x):
            return torch.tensor(x, dtype=torch.int32)

        scaler = fmp.DynamicLossScale(self.scale, 2.0, 0.5, 2, min_scale=512.0, max_scale=2.0**14)
        return fmp.TrainState(
            step=i32(self.step),
            params={"w": torch.tensor([half(self.weight)], dtype=torch.float16)},
            master={"w": f32(self.weight)},
            opt_state=fmp.optim.SgdState(i32(self.updates), {"w": f32(self.momentum)}),
            loss_scale=tree.replace(scaler, growth_count=i32(self.growth_count)),
            buffers={"mean": f32(self.mean), "batches": torch.tensor(self.batches)},
            ema={"w": f32(self.ema)},
            seed=torch.tensor(7),
            skip_count=i32(self.skip_count),
        )


def poisoned(params, batch, buffers):
    gradient, poison = batch[0].float(), batch[1].float()
    value = (params["w"].float() * (gradient + poison)).sum()
    buffers = {"mean": 0.5 * buffers["mean"] + 0.5 * gradient + poison, "batches": buffers["batches"] + 1}
    return value, buffers


# Momentum, average and weight gain a binary digit a step; up to eight of them, all of this is exact in float32.
@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, -2.0, 0.5, 4.0, -16.0]), st.sampled_from([0.0, 0.0, 0.0, INF, NAN])), max_size=8
    )
)
def test_every_leaf_follows_the_semantics(batches):
    step = fmp.train_step(
        poisoned,
        fmp.optim.sgd(fmp.optim.schedules.piecewise_constant([0.25, 0.125], [3]), momentum=0.5),
        policy=fmp.Policy(torch.float16, torch.float16, torch.float32, keep_full="mean", master_weights=True),
        loss_scale=fmp.DynamicLossScale(2.0**11, 2.0, 0.5, 2, min_scale=512.0, max_scale=2.0**14),
        ema=0.5,
    )
    weight = 1.0 + 2.0**-12  # not a float16
    plain = Plain(weight)
    state = step.init(
        {"w": torch.tensor([weight])}, buffers={"mean": torch.zeros(1), "batches": torch.tensor(0)}, seed=7
    )
    assert same_bits(state, plain.as_state())
    for gradient, poison in batches:
        scale = plain.scale
        loss, finite = plain.run(gradient, poison, skip=True)
        state, metrics = step(state, (torch.tensor([gradient]), torch.tensor(poison)))
        expected = plain.as_state()
        assert same_bits(state, expected), differing(state, expected)
        assert (metrics.grads_finite, metrics.skipped, metrics.loss_scale) == (finite, not finite, scale)
        if finite:
            assert (metrics.loss, metrics.grad_norm) == (loss, abs(gradient))


def batch_norm(params, batch, buffers):
    x, y = batch
    x = x @ params["w"]
    mean, var = buffers["mean"].clone(), buffers["var"].clone()
    x = nn.functional.batch_norm(x, mean, var, params["scale"], None, training=True)
    return ((x - y) ** 2).mean(), {"mean": mean, "var": var, "count": buffers["count"] + 1}


@pytest.mark.parametrize("poison", [INF, NAN, -INF])
def test_a_skipped_step_leaves_no_trace(poison):
    schedule = fmp.optim.schedules.linear(0.1, 0.0, 10)
    step = fmp.train_step(
        batch_norm,
        fmp.optim.chain(fmp.optim.clip_by_global_norm(1.0), fmp.optim.adamw(schedule)),
        loss_scale=fmp.DynamicLossScale(init_scale=64.0, growth_interval=3),
        ema=0.9,
        clip_norm=0.5,
    )
    params, (x, y) = regression()
    buffers = {"mean": torch.zeros(2), "var": torch.ones(2), "count": torch.tensor(0)}
    state = step.init({"w": params["w"], "scale": torch.ones(2)}, buffers=buffers, seed=3)
    clean = state = step(state, (x, y))[0]
    for skips in (1, 2):
        before = state
        state, metrics = step(
            state, (x.clone().index_put_((torch.tensor(0), torch.tensor(0)), torch.tensor(poison)), y)
        )
        assert (metrics.grads_finite, metrics.skipped) == (False, True)
        changed = {"loss_scale/loss_scale", "skip_count"} | ({"loss_scale/growth_count"} if skips == 1 else set())
        assert differing(before, state) == changed
        assert (state.loss_scale.loss_scale, state.loss_scale.growth_count, state.skip_count) == (
            64 / 2**skips,
            0,
            skips,
        )

    # From here on the run is the one that never saw the bad steps.
    state, _ = step(state, (x, y))
    clean, _ = step(clean, (x, y))
    assert differing(state, clean) == {"loss_scale/loss_scale", "loss_scale/growth_count", "skip_count"}


def test_nan_in_one_leaf_skips_all_of_them():
    step = fmp.train_step(given_gradient, fmp.optim.adamw(0.1), loss_scale="dynamic")
    state = step.init({"a": torch.ones(2), "b": torch.ones(2)})
    after, metrics = step(state, {"a": torch.ones(2), "b": torch.tensor([0.0, NAN])})
    assert metrics.skipped
    assert differing(state, after) == {"loss_scale/loss_scale", "skip_count"}


def test_batch_norm_of_a_module_is_rolled_back():
    model = fmp.functionalize(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))

    def loss_fn(params, batch, *, buffers):
        out, buffers = model.apply(params, buffers, batch[0], train=True)
        return (out.float() - batch[1].float()).square().mean(), buffers

    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2", keep_full="1"), ema=0.9)
    _, (x, y) = regression()
    state = step.init(model.params, buffers=model.buffers)
    state = tree.replace(state, loss_scale=fmp.DynamicLossScale(256.0))
    state, metrics = step(state, (x, y))
    assert not metrics.skipped
    assert state.buffers["1.num_batches_tracked"] == 1
    before, original = snapshot(state), state
    after, metrics = step(state, (x * INF, y))
    assert metrics.skipped
    assert same_bits(original, before)
    assert differing(before, after) == {"loss_scale/loss_scale", "loss_scale/growth_count", "skip_count"}


@pytest.mark.parametrize(
    ("scale", "skip", "skips"),
    [
        (None, None, False),
        (8.0, None, True),
        ("dynamic", None, True),
        (None, True, True),
        (8.0, False, False),
        ("dynamic", False, False),
    ],
)
def test_who_skips(scale, skip, skips):
    step = fmp.train_step(given_gradient, fmp.optim.sgd(1.0), loss_scale=scale, skip_nonfinite=skip)
    state, metrics = step(step.init({"w": torch.ones(2)}), {"w": torch.tensor([INF, 1.0])})
    assert not metrics.grads_finite
    assert metrics.skipped == skips
    assert (state.skip_count, state.step) == (skips, 1 - skips)
    assert same_bits(state.params["w"], torch.ones(2)) == skips
    if scale == "dynamic":
        assert state.loss_scale.loss_scale == 2.0**15


@pytest.mark.parametrize("bad", [True, False])
def test_extreme_scales_stay_in_bounds(bad):
    step = fmp.train_step(
        given_gradient,
        fmp.optim.sgd(0.0),
        loss_scale=fmp.DynamicLossScale(growth_interval=1, min_scale=2.0**-10, max_scale=2.0**30),
    )
    state = step.init({"w": torch.ones(1)})
    for _ in range(60):
        state, _ = step(state, {"w": torch.tensor([INF if bad else 1.0])})
    assert state.loss_scale.loss_scale == (2.0**-10 if bad else 2.0**30)
    state, metrics = step(state, {"w": torch.tensor([1.0 if bad else INF])})
    assert metrics.skipped == (not bad)
    assert state.loss_scale.loss_scale == (2.0**-9 if bad else 2.0**29)


@tree.dataclass
class HalfScale:
    """A scaler of one's own, with a hole in its state."""

    factor: torch.Tensor
    hole: None = None

    def scale(self, loss):
        return loss.to(torch.float32) * self.factor

    def unscale(self, grads):
        return tree.map(lambda grad: grad.to(torch.float32) / self.factor, grads)

    def adjust(self, grads_finite):
        return tree.replace(self, factor=torch.where(grads_finite, self.factor, self.factor * 0.5))


def test_a_scaler_of_ones_own():
    step = fmp.train_step(given_gradient, fmp.optim.sgd(1.0), loss_scale=HalfScale(torch.tensor(32.0)))
    state = step.init({"w": torch.ones(1)})
    state, metrics = step(state, {"w": torch.tensor([INF])})
    assert (metrics.skipped, metrics.loss_scale, state.loss_scale.factor) == (True, 32.0, 16.0)
    state, metrics = step(state, {"w": torch.tensor([0.5])})
    assert (metrics.skipped, metrics.loss_scale, state.params["w"]) == (False, 16.0, 0.5)


# Masters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(exponents=st.lists(st.integers(-30, 12), min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_parameters_are_the_rounded_masters_after_every_step(dtype, exponents, seed):
    generator = torch.Generator().manual_seed(seed)
    step = fmp.train_step(
        given_gradient,
        fmp.optim.adamw(1e-3, weight_decay=0.1),
        policy=fmp.opt_level("O2", dtype, keep_norm_fp32=False),
        loss_scale="dynamic",
    )
    state = step.init({"w": torch.randn(5, generator=generator), "s": torch.randn((), generator=generator)})
    for exponent in exponents:
        gradient = {"w": torch.randn(5, generator=generator), "s": torch.randn((), generator=generator)}
        state, _ = step(state, tree.map(lambda g: g * 2.0**exponent, gradient))
        assert same_bits(state.params, fmp.cast(state.master, dtype))
        assert tree.describe(state.master) == "{'w': f32[5], 's': f32[]}"


def test_small_updates_add_up_in_the_master():
    step = fmp.train_step(given_gradient, fmp.optim.sgd(1.0), policy=fmp.opt_level("O2", "bf16"))
    state = step.init({"w": torch.ones(1)})
    for _ in range(64):
        state, _ = step(state, {"w": torch.tensor([-(2.0**-12)])})
    assert same_bits(state.params["w"], torch.tensor([1.015625], dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_and_average_start_from_the_values_before_rounding(dtype):
    values = {"w": torch.tensor([1.0 + 2.0**-20, 1e-9])}
    step = fmp.train_step(given_gradient, fmp.optim.sgd(0.0), policy=fmp.opt_level("O2", dtype), ema=0.5)
    state = step.init(values)
    assert same_bits(state.master, values)
    assert same_bits(state.ema, values)
    assert same_bits(state.params, fmp.cast(values, dtype))


def test_masters_belong_to_exactly_the_narrow_parameters():
    params = {
        "w": torch.ones(2),
        "norm": torch.ones(2),
        "wide": torch.ones(2, dtype=torch.float64),
        "ids": torch.arange(2),
        "phase": torch.ones(2, dtype=torch.complex64),
        "hole": None,
    }
    policy = fmp.opt_level("O2", keep_full=["wide", "*norm*"])
    step = fmp.train_step(
        lambda p, b: p["w"].float().sum() + p["wide"].float().sum(), fmp.optim.adamw(0.1), policy=policy
    )
    state = step.init(params)
    assert tree.describe(state.params) == (
        "{'w': f16[2], 'norm': f32[2], 'wide': f64[2], 'ids': i64[2], 'phase': c64[2], 'hole': None}"
    )
    assert tree.describe(state.master) == (
        "{'w': f32[2], 'norm': None, 'wide': None, 'ids': None, 'phase': None, 'hole': None}"
    )
    assert same_bits(master.merge(state.params, state.master), params)


def test_master_split_keeps_what_is_not_floating_point():
    params = {"w": torch.ones(2, dtype=torch.bfloat16), "ids": torch.arange(2), "hole": None}
    masters = master.init(params, {"w": torch.full((2,), 1.001), "ids": torch.arange(2), "hole": None})
    assert same_bits(masters, {"w": torch.full((2,), 1.001), "ids": None, "hole": None})
    again = master.split(master.merge(params, masters), params, masters)
    assert same_bits(again, (params, masters))


def test_masters_are_copies_even_of_values_that_are_float32_already():
    source = {"w": torch.ones(2)}
    masters = master.init(fmp.cast(source, torch.float16), source)
    assert masters["w"].data_ptr() != source["w"].data_ptr()


# The policy


def test_batch_frozen_buffers_and_output_are_cast():
    seen = {}

    def loss_fn(params, batch, *, buffers, frozen):
        seen.update(params=params, batch=batch, buffers=buffers, frozen=frozen)
        return params["w"].float().sum(), buffers, {"out": params["w"] * 2, "label": "x"}

    policy = fmp.Policy(torch.float32, torch.bfloat16, torch.float32, keep_full="*norm")
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=policy, has_aux=True)
    params = {"w": torch.ones(2), "norm": torch.ones(1)}
    state = step.init(params, buffers={"norm": torch.ones(1), "table": torch.ones(1), "n": torch.tensor(1)})
    # A name in the batch is not a parameter's, whatever it matches.
    batch = (torch.ones(3), torch.arange(3), {"norm": torch.ones(1), "scale": 0.5, "name": "a", "hole": None})
    after, metrics = step(state, batch, frozen={"teacher": torch.ones(1), "norm": torch.ones(1)})
    assert tree.describe(seen) == (
        "{'params': {'w': bf16[2], 'norm': f32[1]}, "
        "'batch': (bf16[3], i64[3], {'norm': bf16[1], 'scale': 0.5, 'name': 'a', 'hole': None}), "
        "'buffers': {'norm': f32[1], 'table': bf16[1], 'n': i64[]}, "
        "'frozen': {'teacher': bf16[1], 'norm': f32[1]}}"
    )
    assert tree.describe(metrics.aux) == "{'out': f32[2], 'label': 'x'}"
    assert tree.describe(after.buffers) == "{'norm': f32[1], 'table': f32[1], 'n': i64[]}"
    assert tree.describe(after.params) == "{'w': f32[2], 'norm': f32[1]}"


def test_a_narrow_output_dtype_does_not_narrow_the_loss():
    step = fmp.train_step(
        lambda p, b: (p["w"].float() * b.float()).sum(), fmp.optim.sgd(0.0), policy=fmp.Policy.parse("f16")
    )
    _, metrics = step(step.init({"w": torch.tensor([60000.0])}), torch.tensor([2.0]))
    torch.testing.assert_close(metrics.loss, torch.tensor(120000.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a_policy_that_is_off_equals_no_policy(level):
    params, batch = regression()
    states = []
    for policy in (None, fmp.opt_level(level, enabled=False)):
        step = fmp.train_step(squares, fmp.optim.adamw(0.1), policy=policy, ema=0.9, clip_norm=1.0)
        state = step.init(params)
        states.append([state := step(state, batch)[0] for _ in range(3)])
    assert same_bits(*states)


@pytest.mark.parametrize(
    ("policy", "scale", "found"),
    [
        (fmp.opt_level("O2"), None, fmp.DynamicLossScale),
        (fmp.opt_level("O2", "bf16"), None, fmp.NoOpLossScale),
        (fmp.opt_level("O2"), "none", fmp.NoOpLossScale),
        (fmp.opt_level("O2"), 8, fmp.StaticLossScale),
        (fmp.opt_level("O2", loss_scale="128.0"), None, fmp.StaticLossScale),
        (None, None, fmp.NoOpLossScale),
        (None, fmp.DynamicLossScale(), fmp.DynamicLossScale),
    ],
)
def test_the_loss_scale_is_that_of_the_policy_unless_given(policy, scale, found):
    step = fmp.train_step(given_gradient, fmp.optim.sgd(0.1), policy=policy, loss_scale=scale)
    assert isinstance(step.init({"w": torch.ones(1)}).loss_scale, found)


@pytest.mark.parametrize("optimizer", [fmp.optim.adamw(0.1), fmp.optim.sgd(0.1, momentum=0.9), fmp.optim.adam(0.1)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("masters", [True, False])
def test_a_step_keeps_every_dtype(optimizer, dtype, masters):
    policy = fmp.Policy(dtype, dtype, "f32", master_weights=masters)
    step = fmp.train_step(
        squares, optimizer, policy=policy, loss_scale=fmp.DynamicLossScale(16.0), ema=0.9, clip_norm=1.0, accumulate=2
    )
    params, batch = regression()
    first = state = step.init(params)
    for _ in range(2):
        state, metrics = step(state, batch)
        assert not metrics.skipped
        assert tree.structure(state) == tree.structure(first)
        assert tree.describe(state) == tree.describe(first)
    wide = "f64[2]" if dtype == "f64" else "f32[2]"
    assert tree.describe(state.ema["b"]) == wide
    # This loss is taken in float32 whatever the parameters.
    assert (metrics.loss.dtype, metrics.loss_scale.dtype) == (torch.float32, torch.float32)
    assert metrics.grad_norm.dtype == (torch.float64 if dtype == "f64" else torch.float32)


# Purity


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bad", [False, True])
def test_the_same_call_gives_the_same_bits_and_changes_none_of_its_inputs(accumulate, bad):
    def loss_fn(params, batch, *, buffers, seed, frozen):
        x, y = batch
        noise = fmp.random.uniform(seed, (2,))
        loss = ((x @ params["w"] + params["b"] + frozen - y).float() ** 2).mean() + (params["b"].float() * noise).sum()
        return loss, {"n": buffers["n"] + 1, "mean": buffers["mean"] + x.mean()}, {"x": x, "noise": noise}

    options: dict[str, Any] = {"has_aux": True, "accumulate": accumulate, "ema": 0.9, "clip_norm": 1.0}
    step = fmp.train_step(loss_fn, fmp.optim.adamw(0.1), policy=fmp.opt_level("O2", loss_scale=64.0), **options)
    params, batch = regression()
    if bad:
        batch[0][0, 0] = INF
    frozen = torch.ones(2)
    state = step.init(params, buffers={"n": torch.tensor(0), "mean": torch.zeros(())}, seed=5)
    state, _ = step(state, regression(seed=1)[1], frozen=frozen)

    inputs = (state, batch, frozen)
    before = snapshot(inputs)
    one, two = step(state, batch, frozen=frozen), step(state, batch, frozen=frozen)
    assert same_bits(one, two)
    assert same_bits(inputs, before)
    assert one[1].skipped == bad


def test_init_copies_and_aliases_nothing():
    params, _ = regression()
    tied = {
        "w": params["w"],
        "again": params["w"],
        "view": params["w"][0],
        "wide": params["b"].expand(4, 2),
        "n": torch.tensor(1),
    }
    buffers = {"mean": params["b"], "same": params["b"]}
    seed = torch.tensor(3)
    scaler = fmp.DynamicLossScale()
    loss_fn = lambda params, batch, buffers: (params["w"].sum(), buffers)
    optimizers = [fmp.optim.adamw(0.1), fmp.optim.inject_hyperparams(fmp.optim.adamw)(learning_rate=0.1)]
    for optimizer in optimizers:
        for policy in (None, fmp.opt_level("O0"), fmp.opt_level("O2"), fmp.opt_level("O2", keep_full="*")):
            step = fmp.train_step(loss_fn, optimizer, policy=policy, loss_scale=scaler, ema=0.9)
            one, two = step.init(tied, buffers=buffers, seed=seed), step.init(tied, buffers=buffers, seed=seed)
            given_storages = set(storages((tied, buffers, seed, scaler, step.config.scalers)))
            found = [*storages(one), *storages(two)]
            assert len(found) == len(set(found))
            assert not set(found) & given_storages
            assert same_bits(one, two)


def test_writing_into_a_state_reaches_no_other():
    step = fmp.train_step(squares, fmp.optim.adamw(0.1), policy=fmp.opt_level("O2"), ema=0.9)
    params, _ = regression()
    ruined, fine = step.init(params), step.init(params)
    expected = snapshot(fine)
    for leaf in tree.leaves(ruined):
        if leaf is not None:
            leaf.fill_(1)
    assert same_bits(fine, expected)
    assert same_bits(step.init(params), expected)


def test_a_state_takes_no_graph_along():
    params = {name: nn.Parameter(leaf) for name, leaf in regression()[0].items()}
    outside = torch.ones(2, requires_grad=True)
    step = fmp.train_step(lambda p, b: squares(p, b) + (p["b"] * outside).sum(), fmp.optim.sgd(0.1), ema=0.5)
    state = step.init(params)
    assert all(type(leaf) is torch.Tensor for leaf in state.params.values())
    state, metrics = step(state, regression()[1])
    assert not any(leaf.requires_grad for leaf in tree.leaves((state, metrics)) if leaf is not None)
    assert outside.grad is None


def test_a_step_never_waits_for_the_device():
    def loss_fn(params, batch, *, buffers, seed, frozen):
        noise = fmp.random.keep_mask(seed, (2,), 0.5)
        return squares(params, batch) + (params["b"].float() * noise).sum() + frozen.float().sum(), buffers, "aux"

    step = fmp.train_step(
        loss_fn,
        fmp.optim.adamw(fmp.optim.schedules.linear(0.1, 0.0, 5)),
        policy=fmp.opt_level("O2"),
        loss_scale=fmp.DynamicLossScale(64.0),
        accumulate=2,
        microbatch_weight=lambda batch: batch[1].sum().abs(),
        clip_norm=1.0,
        ema=0.9,
        has_aux=True,
    )
    params, batch = regression()
    state = step.init(params, buffers={"n": torch.tensor(0)})
    with NoHostSync():
        for _ in range(2):
            state, _ = step(state, batch, frozen=torch.ones(1))
    assert state.step == 2


# The seed


def seeds_of(step, state, batch):
    after, metrics = step(state, batch)
    return after, metrics.aux["seed"].reshape(-1).tolist()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_seed_differs_by_step_and_microbatch_and_repeats_after_a_skip(accumulate):
    def loss_fn(params, batch, *, seed):
        return (params["w"] * batch.sum()).sum(), {"seed": seed}

    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), loss_scale="dynamic", has_aux=True, accumulate=accumulate)
    state = step.init({"w": torch.ones(1)}, seed=11)
    good, bad = torch.ones(3), torch.tensor([1.0, INF, 1.0])
    after, first = seeds_of(step, state, good)
    assert seeds_of(step, state, good)[1] == first
    _, second = seeds_of(step, after, good)
    skipped, again = seeds_of(step, after, bad)
    assert again == second
    assert seeds_of(step, skipped, good)[1] == second
    other = seeds_of(step, step.init({"w": torch.ones(1)}, seed=12), good)[1]
    assert len({*first, *second, *other}) == 3 * accumulate
    assert same_bits(skipped.seed, torch.tensor(11))


# Loss functions of every kind


class Loss:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, params, batch, *, seed):
        return (params["w"] * batch).sum() * self.factor + 0.0 * seed

    def method(self, params, batch):
        return (params["w"] * batch).sum() * self.factor


def with_factor(factor, params, batch):
    return (params["w"] * batch).sum() * factor


def with_keywords(params, batch, **kwargs):
    assert not kwargs
    return (params["w"] * batch).sum() * 2.0


def decorated(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


@decorated
def named(params, batch, *, seed):
    return (params["w"] * batch).sum() * 2.0 + 0.0 * seed


@pytest.mark.parametrize(
    "loss_fn",
    [
        Loss(2.0),
        Loss(2.0).method,
        functools.partial(with_factor, 2.0),
        functools.partial(lambda params, batch, *, frozen: (params["w"] * batch).sum() * frozen, frozen=2.0),
        functools.partial(lambda params, batch, seed: (params["w"] * batch).sum() * seed, seed=2.0),
        with_keywords,
        named,
        lambda params, batch: (params["w"] * batch).sum() * 2.0,
        lambda params, batch, seed, frozen=None: (params["w"] * batch).sum() * 2.0,
    ],
)
def test_loss_functions_of_every_kind(loss_fn):
    step = fmp.train_step(loss_fn, fmp.optim.sgd(1.0))
    state, metrics = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, 3.0]))
    assert metrics.loss == 8.0
    assert same_bits(state.params["w"], torch.tensor([-1.0, -5.0]))


def test_a_builtin_function_is_a_loss():
    step = fmp.train_step(torch.dot, fmp.optim.sgd(1.0))
    state, _ = step(step.init(torch.ones(2)), torch.tensor([1.0, 3.0]))
    assert same_bits(state.params, torch.tensor([0.0, -2.0]))


LINEAR = nn.Linear(2, 1)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, batch: batch.sum(),
        lambda params, batch: LINEAR(batch).sum(),
        lambda params, batch: LINEAR(batch).sum().detach(),
        lambda params, batch: (batch @ params["weight"].detach().T).sum(),
        lambda params, batch: fmp.remat(lambda x: LINEAR(x).sum())(batch),
    ],
    ids=["constant", "the module itself", "detached", "of detached parameters", "in remat"],
)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"loss_scale": "dynamic", "donate": True}])
def test_a_loss_that_ignores_its_parameters_is_refused(loss_fn, options):
    step = fmp.train_step(loss_fn, fmp.optim.sgd(1.0), **options)
    params, batch = fmp.functionalize(LINEAR).params, torch.ones(4, 2)
    with pytest.raises(ValueError, match=r"loss_fn does not depend on params.*model\.apply\(params, \.\.\.\)"):
        step(step.init(params), batch)
    twice = tree.map(lambda leaf: torch.stack([leaf] * 2), params)
    with pytest.raises(ValueError, match="loss_fn does not depend on params"):
        torch.func.vmap(lambda params: step(step.init(params), batch))(twice)
    with pytest.raises(ValueError, match="loss_fn does not depend on params"):
        torch.func.grad(lambda params: step(step.init(params), batch)[0].params["bias"].sum())(params)


def test_a_loss_may_depend_on_some_parameters_and_be_one_of_them():
    teacher = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))  # whose parameters want gradients
    loss_fn = lambda params, batch: ((batch * params["w"]) - teacher(batch)).square().sum()
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1))
    state, metrics = step(step.init({"w": torch.ones(2), "unused": torch.ones(3)}), torch.ones(4, 2))
    assert metrics.grad_norm > 0
    assert same_bits(state.params["unused"], torch.ones(3))
    step = fmp.train_step(lambda params, batch: params, fmp.optim.sgd(1.0))
    assert step(step.init(torch.ones(())), None)[0].params == 0.0


def test_a_microbatch_that_does_not_count_may_have_a_constant_loss():
    loss_fn = lambda params, batch: (params * batch).sum() if batch.any() else torch.tensor(NAN)
    step = fmp.train_step(loss_fn, fmp.optim.sgd(1.0), accumulate=2, microbatch_weight=torch.sum)
    state, metrics = step(step.init(torch.ones(())), torch.tensor([1.0, 0.0]))
    assert (state.params, metrics.loss) == (0.0, 1.0)


class Pair(NamedTuple):
    a: Any
    b: Any


@tree.dataclass
class Layer:
    weight: Any
    names: str = tree.static(default="layer")


@pytest.mark.parametrize(
    "params",
    [
        {},
        (),
        [],
        None,
        (None,),
        torch.ones(2),
        torch.ones(()),
        torch.ones(0),
        [torch.ones(2), (torch.ones(1), {"x": torch.ones(3)})],
        OrderedDict(b=torch.ones(1), a=torch.ones(2)),
        Pair(torch.ones(1), [None, torch.ones(2)]),
        Layer(torch.ones(2)),
        {"w": torch.ones(2), "ids": torch.arange(3), "flag": torch.tensor(True), "hole": None},
        {1: torch.ones(1), 2: torch.ones(2)},
    ],
    ids=tree.describe,
)
@pytest.mark.parametrize("policy", [None, fmp.opt_level("O2", loss_scale=8.0)])
def test_parameters_of_every_structure(params, policy):
    def loss_fn(params, batch):
        total = torch.zeros(())
        for leaf in tree.leaves(params):
            if leaf is not None and leaf.dtype.is_floating_point:
                total = total + leaf.float().sum()
        return total

    step = fmp.train_step(loss_fn, fmp.optim.adamw(0.1), policy=policy, ema=0.5, clip_norm=100.0)
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, None)
    assert tree.structure(state.params) == tree.structure(params)
    assert state.step == 2
    for old, new in zip(tree.leaves(params), tree.leaves(state.params), strict=True):
        if old is not None and old.dtype.is_floating_point:
            torch.testing.assert_close(new.float(), torch.full(old.shape, 0.8), rtol=0.01, atol=0)
        elif old is not None and not old.dtype.is_complex:
            assert same_bits(old, new)


@pytest.mark.parametrize("aux", ["text", None, 3, {"a": [torch.ones(2), "b"], "n": None}, (1, (2.5, True)), object()])
def test_auxiliary_output_of_any_type(aux):
    step = fmp.train_step(lambda params, batch: (params["w"].sum(), aux), fmp.optim.sgd(0.1), has_aux=True)
    _, metrics = step(step.init({"w": torch.ones(2)}), None)
    assert same_bits(metrics.aux, aux)


def test_auxiliary_tensors_are_detached():
    step = fmp.train_step(lambda params, batch: (params["w"].sum(), params["w"] * 2), fmp.optim.sgd(0.1), has_aux=True)
    _, metrics = step(step.init({"w": torch.ones(2)}), None)
    assert not metrics.aux.requires_grad


# What a loss may not return, and what a step may not be given


@pytest.mark.parametrize(
    ("loss_fn", "has_aux", "error", "message"),
    [
        (
            lambda p, b: (p["w"].sum(), 1),
            False,
            TypeError,
            r"loss_fn must return the loss alone .*has_aux=False; it returned 2",
        ),
        (lambda p, b: p["w"].sum(), True, TypeError, r"must return \(loss, aux\) .*has_aux=True; it returned 1"),
        (lambda p, b: (p["w"].sum(), 1, 2), True, TypeError, r"it returned 3 value"),
        (lambda p, b, seed: (p["w"].sum(), 1), False, TypeError, r"does not take buffers"),
        (lambda p, b: 1.0, False, TypeError, "floating-point scalar tensor, got 1.0"),
        (lambda p, b: None, False, TypeError, "floating-point scalar tensor, got None"),
        (lambda p, b: torch.tensor(3), False, TypeError, r"got i64\[\]"),
        (lambda p, b: p["w"].sum() * 1j, False, TypeError, r"got c64\[\]"),
        (lambda p, b: p["w"], False, ValueError, r"must return a scalar, got f32\[2\]; reduce it"),
    ],
)
@pytest.mark.parametrize("scale", [None, 8.0])
def test_what_a_loss_may_not_return(loss_fn, has_aux, error, message, scale):
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), has_aux=has_aux, loss_scale=scale)
    with pytest.raises(error, match=message):
        step(step.init({"w": torch.ones(2)}), None)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda p, b, buffers: p["w"].sum(), r"must return \(loss, buffers\) as it takes buffers .*; it returned 1"),
        (
            lambda p, b, buffers: (p["w"].sum(), {"m": buffers["n"]}),
            r"structure it was given: \{'n': f32\[1\]\}; it returned \{'m'",
        ),
        (lambda p, b, buffers: (p["w"].sum(), None), "it returned None"),
    ],
)
def test_buffers_must_come_back(loss_fn, message):
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1))
    with pytest.raises((TypeError, ValueError), match=message):
        step(step.init({"w": torch.ones(2)}, buffers={"n": torch.ones(1)}), None)


@pytest.mark.parametrize(
    ("params", "options", "error", "message"),
    [
        ({"w": 1.0}, {}, TypeError, r"params: leaf 'w' is 1.0; a state holds tensors only"),
        ({"a": [torch.ones(1), "x"]}, {}, TypeError, r"leaf 'a/1' is 'x'"),
        (nn.Linear(1, 1), {}, TypeError, "params is an nn.Module"),
        (fmp.functionalize(nn.Linear(1, 1)), {}, TypeError, r"params is a fmp.Model; .* step.init\(model.params"),
        ({"w": torch.ones(1)}, {"buffers": {"n": 1}}, TypeError, r"buffers: leaf 'n' is 1"),
        (
            {"w": torch.ones(1)},
            {"buffers": {"n": torch.ones(1)}},
            ValueError,
            "loss_fn does not take the keyword argument",
        ),
        ({"w": torch.ones(1)}, {"seed": 1.5}, TypeError, "seed must be an integer .* got 1.5"),
        ({"w": torch.ones(1)}, {"seed": True}, TypeError, "seed must be an integer .* got True"),
        ({"w": torch.ones(1)}, {"seed": "0"}, TypeError, "seed must be an integer .* got '0'"),
        ({"w": torch.ones(1)}, {"seed": 2**64}, TypeError, "seed must be an integer of 64 bits"),
        ({"w": torch.ones(1)}, {"seed": torch.tensor([1, 2])}, TypeError, r"seed must be .* got i64\[2\]"),
        ({"w": torch.ones(1)}, {"seed": torch.tensor(0.5)}, TypeError, r"seed must be .* got f32\[\]"),
    ],
)
def test_what_init_refuses(params, options, error, message):
    step = fmp.train_step(given_gradient, fmp.optim.sgd(0.1))
    with pytest.raises(error, match=message):
        step.init(params, **options)


def test_init_asks_for_buffers_that_the_loss_takes():
    step = fmp.train_step(batch_norm, fmp.optim.sgd(0.1))
    with pytest.raises(ValueError, match=r"loss_fn takes buffers: pass init\(params, buffers=\.\.\.\)"):
        step.init({"w": torch.ones(1)})


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("state", ["junk", None, {"w": torch.ones(2)}, 3])
def test_a_step_refuses_what_is_not_a_state(state, donate):
    step = fmp.train_step(given_gradient, fmp.optim.sgd(0.1), donate=donate)
    with pytest.raises(TypeError, match="state must be a TrainState"):
        step(state, None)


def test_a_module_is_no_loss():
    with pytest.raises(TypeError, match=r"loss_fn is an nn\.Module.*fmp\.functionalize\(module\)"):
        fmp.train_step(nn.Linear(2, 1), fmp.optim.sgd(0.1))
    with pytest.raises(TypeError, match=r"loss_fn\['real'\] is an nn\.Module"):
        fmp.train_step({"real": nn.Linear(2, 1)}, fmp.optim.sgd(0.1))


def test_a_step_asks_for_frozen_that_the_loss_takes():
    step = fmp.train_step(
        lambda params, batch, *, frozen: ({**frozen, **params}["w"] * batch).sum(), fmp.optim.sgd(0.1)
    )
    state = step.init({"w": torch.ones(2)})
    with pytest.raises(ValueError, match=r"loss_fn takes frozen: pass step\(state, batch, frozen=\.\.\.\)"):
        step(state, torch.ones(2))
    assert step(state, torch.ones(2), frozen={})[1].loss == 2.0


def test_frozen_that_no_loss_takes_is_refused():
    step = fmp.train_step(with_keywords, fmp.optim.sgd(0.1))
    state = step.init({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="no loss_fn takes the keyword argument `frozen`"):
        step(state, torch.ones(2), frozen={"teacher": torch.ones(1)})


@pytest.mark.parametrize("keep", [["inv_freqs"], fmp.functionalize(torch.nn.LayerNorm(2))])
def test_names_to_keep_that_no_leaf_has_are_refused(keep):
    step = fmp.train_step(given_gradient, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2", keep_full=keep))
    with pytest.raises(ValueError, match=r"keep_full names .*, but no leaf matches; the paths are 'net/w'"):
        step.init({"net": {"w": torch.ones(2)}})
    fine = fmp.train_step(given_gradient, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2", keep_full="*w"))
    assert fine.init({"net": {"w": torch.ones(2)}}).params["net"]["w"].dtype == torch.float32


def test_a_complex_parameter_is_refused_unless_it_is_frozen():
    params = {"c": torch.ones(2, dtype=torch.complex64), "w": torch.ones(2)}
    loss_fn = lambda params, batch: params["c"].abs().sum() + params["w"].sum()
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1))
    state = step.init(params)
    with pytest.raises(TypeError, match=r"c: .*c64\[2\].*freeze it"):
        step(state, None)
    step = fmp.train_step(loss_fn, fmp.optim.chain(fmp.optim.freeze(["c"]), fmp.optim.sgd(0.1)))
    state, _ = step(step.init(params), None)
    assert same_bits(state.params["c"], params["c"])
    assert state.params["w"][0] < 1


# What a loss function does to what it is given


@pytest.mark.parametrize("policy", [None, fmp.opt_level("O0"), fmp.opt_level("O2", keep_full="*")], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_buffers_written_in_place_are_copies_and_roll_back(policy, accumulate):
    layer = torch.nn.BatchNorm1d(3)

    def loss_fn(params, batch, *, buffers):
        out = torch.func.functional_call(layer, {**params, **buffers}, (batch,))
        buffers["extra"] += 1
        return (out.float() ** 2 * params["weight"]).mean(), buffers

    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=policy, loss_scale=8.0, accumulate=accumulate)
    buffers = {**dict(layer.named_buffers()), "extra": torch.tensor(0)}
    state = step.init(dict(layer.named_parameters()), buffers=buffers)
    before = snapshot(state)
    batch = torch.randn(8, 3)
    batch[0, 0] = float("inf")
    skipped, metrics = step(state, batch)
    assert metrics.skipped
    assert same_bits(state, before)
    assert same_bits(skipped.buffers, before.buffers)
    done, metrics = step(state, torch.randn(8, 3))
    assert not metrics.skipped
    assert done.buffers["extra"] == done.buffers["num_batches_tracked"] == accumulate
    assert same_bits(state, before)


def test_a_loss_may_take_its_batch_apart():
    batch = {"x": torch.ones(2), "y": torch.ones(2)}
    loss_fn = lambda w, batch: (w * batch.pop("x") - batch.pop("y")).sum()
    step = fmp.train_step({"a": loss_fn, "b": loss_fn}, fmp.optim.sgd(0.1))
    step(step.init(torch.ones(2)), batch)
    assert batch.keys() == {"x", "y"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 3.0, r"buffer 'n' as f32\[\], it returned 3.0"),
        ("m", torch.zeros(5), r"buffer 'm' as f32\[2\], it returned f32\[5\]"),
        ("c", torch.tensor(0.5), r"buffer 'c' as i64\[\], it returned f32\[\]"),
        ("c", None, r"buffer 'c' as i64\[\], it returned None"),
    ],
)
def test_new_buffers_must_be_like_the_old_ones(name, value, message):
    step = fmp.train_step(lambda w, b, *, buffers: (w.sum(), {**buffers, name: value}), fmp.optim.sgd(0.1))
    state = step.init(torch.ones(2), buffers={"n": torch.zeros(()), "m": torch.zeros(2), "c": torch.tensor(0)})
    with pytest.raises(ValueError, match=message):
        step(state, None)


def test_the_first_two_parameters_of_a_loss_may_have_any_name():
    step = fmp.train_step(lambda buffers, seed, *, frozen: (buffers * seed * frozen).sum(), fmp.optim.sgd(0.1))
    _, metrics = step(step.init(torch.ones(2)), torch.tensor(2.0), frozen=torch.tensor(3.0))
    assert metrics.loss == 12


@dataclasses.dataclass
class Unregistered:
    x: torch.Tensor


@pytest.mark.parametrize("make", [Unregistered, lambda x: UserDict(x=x)])
def test_a_batch_that_is_no_tree_is_refused(make):
    step = fmp.train_step(lambda w, b: w.sum(), fmp.optim.sgd(0.1), accumulate=2)
    with pytest.raises(TypeError, match=r"batch: 0 is a .*, which is no pytree"):
        step(step.init(torch.ones(2)), (make(torch.ones(4, 3)), torch.ones(4)))


def test_a_gradient_that_overflows_where_it_is_narrowed_is_not_finite():
    policy = fmp.Policy("f32", "f64", "f32")
    step = fmp.train_step(lambda w, b: (w * 1e200).sum(), fmp.optim.sgd(0.1), policy=policy, loss_scale=2.0)
    state, metrics = step(step.init(torch.ones(2)), None)
    assert metrics.skipped
    assert same_bits(state.params, torch.ones(2))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_the_reported_scale_does_not_follow_the_default_dtype(default, scale):
    step = fmp.train_step(lambda w, b: w.sum(), fmp.optim.sgd(0.1), loss_scale=scale)
    state = step.init(torch.ones(2))
    torch.set_default_dtype(default)
    try:
        _, metrics = step(state, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert metrics.loss_scale.dtype == torch.float32


def test_a_seed_may_come_from_numpy_and_a_state_does_not_follow_the_default_device():
    int_like: Any = np.int64(3)
    step = fmp.train_step(lambda w, b: w.sum(), fmp.optim.sgd(0.1))
    assert same_bits(step.init(torch.ones(2), seed=int_like), step.init(torch.ones(2), seed=3))
    params = torch.ones(2)
    with torch.device("meta"):
        assert step.init(params).seed.device == params.device


def test_several_optimizers_keep_the_structure_of_the_state():
    losses = lambda params, batch: params["a"].sum() + params["b"].sum()
    step = fmp.train_step(losses, {"b": fmp.optim.sgd(0.1), "a": fmp.optim.sgd(0.2)})
    state = step.init(OrderedDict(b=torch.ones(1), a=torch.ones(2)))
    new, _ = step(state, None)
    assert type(new.params) is type(state.params)
    assert tree.structure(new) == tree.structure(state)


def test_a_sparse_parameter_is_refused():
    step = fmp.train_step(lambda w, b: w.sum(), fmp.optim.sgd(0.1))
    with pytest.raises(TypeError, match="leaf 'w' is sparse"):
        step.init({"w": torch.eye(2).to_sparse()})
