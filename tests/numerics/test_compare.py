import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import fmp
from fmp.numerics import compare as typed_compare, differences
from fmp.numerics.op_sequence import SAMPLE
from tests.numerics.planted import planted

# Their results may have None in them, where no test here expects one by mistake.
compare: Any = getattr(typed_compare, "compare", typed_compare)
leaf_difference: Any = differences.leaf_difference


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x))))


torch.manual_seed(0)  # or it would depend on what was imported before
MODEL = fmp.functionalize(Net())


def loss_fn(params, batch):
    x, y = batch
    return ((MODEL.apply(params, {}, x)[0].float() - y.float()) ** 2).mean()


def step_of(level="O0", loss=loss_fn, optimizer=None, half_dtype=torch.float16, **options):
    policy = fmp.opt_level(level, half_dtype=half_dtype, **options.pop("overrides", {}))
    return fmp.train_step(loss, optimizer or fmp.optim.adamw(1e-2), policy=policy, **options)


def batch_of():
    return torch.randn(8, 4), torch.randn(8, 2)


def state_of(step, steps=3):
    state = step.init(MODEL.params)
    for _ in range(steps):
        state, _ = step(state, batch_of())
    return state


# Equal


@pytest.mark.parametrize("options", [{}, {"donate": True}, {"compile": True}, {"loss_scale": "dynamic"}], ids=str)
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_step_is_equal_to_itself(level, options):
    step = step_of(level, **options)
    state = step.init(MODEL.params)
    comparison = compare(step, step, state, batch_of(), tolerance=0.0)
    assert comparison.is_equal
    assert comparison.parting is None
    assert comparison.only_in_a == comparison.only_in_b == ()
    assert {leaf.ulps for leaf in comparison.leaves} <= {0, None}
    assert all(leaf.cosine > 1 - 1e-12 for leaf in comparison.leaves)
    paths = {leaf.path for leaf in comparison.leaves}
    assert {"params/first.weight", "master/first.weight", "update/first.weight"} <= paths
    assert {"opt_state/first_moment/first.weight", "metrics/loss", "metrics/grad_norm", "step"} <= paths
    assert comparison.op_counts[0] == comparison.op_counts[1] > 20
    assert str(comparison).startswith(f"{len(paths)} of {len(paths)} leaves are equal\n")
    if "donate" in options:
        step(state, batch_of())  # which has left the state to its owner


def test_remat_changes_nothing():
    plain = step_of()
    recomputed = step_of(loss=fmp.remat(loss_fn))
    comparison = compare(plain, recomputed, state_of(plain), batch_of(), tolerance=0.0)
    assert comparison.is_equal
    assert comparison.parting is None


def test_loss_scaling_by_a_power_of_two_changes_nothing_but_the_scale():
    plain, scaled = step_of(), step_of(loss_scale=2.0**10)
    comparison = compare(plain, scaled, state_of(plain), batch_of(), tolerance=1e-6)
    assert [leaf.path for leaf in comparison.leaves if not leaf.is_equal] == ["metrics/loss_scale"]
    assert comparison.parting is None


def test_random_numbers_are_the_same_for_both():
    def dropped(x):
        return torch.nn.functional.dropout(x, 0.5)

    assert compare(dropped, dropped, torch.ones(64)).is_equal
    assert compare(dropped, lambda x: dropped(x) * 1, torch.ones(64)).is_equal


# Policies


@pytest.mark.parametrize("half_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_policy_rounds_and_does_not_part(level, half_dtype):
    full = step_of()
    low = step_of(level, half_dtype=half_dtype, loss_scale="dynamic")
    comparison = compare(full, low, state_of(full), batch_of())
    assert comparison.parting is None
    assert 0 < comparison["metrics/loss"].relative_error < 0.02
    assert 0 < comparison["update/first.weight"].relative_error < 0.2
    assert comparison["update/first.weight"].cosine > 0.98
    assert comparison["step"].is_equal
    assert comparison["step"].ulps is None
    assert comparison.only_in_b == ("loss_scale/loss_scale", "loss_scale/growth_count")
    assert "leaves are equal" in str(comparison)
    assert "do not part" in str(comparison)


def test_the_second_step_goes_on_from_where_the_first_is():
    full, low = step_of(), step_of("O2", half_dtype=torch.bfloat16)
    state = state_of(full, steps=5)
    comparison = compare(full, low, state, batch_of())
    assert comparison["params/first.weight"].described == ("f32[16,4]", "bf16[16,4]")
    assert comparison["params/first.weight"].ulps <= 1
    assert comparison["params/norm.weight"].described == ("f32[16]", "f32[16]")
    assert comparison["master/first.weight"].relative_error < 1e-3
    assert comparison["opt_state/second_moment/first.weight"].relative_error < 0.02
    back = compare(low, full, low.init(MODEL.params), batch_of())
    assert back["params/first.weight"].described == ("bf16[16,4]", "f32[16,4]")
    assert back["master/first.weight"].relative_error < 0.02


@pytest.mark.parametrize("form", ["remainder", "kahan", "stochastic"])
def test_every_form_of_masters_goes_on_from_the_same_weights(form):
    f32 = step_of("O2", half_dtype=torch.bfloat16)
    other = step_of("O2", half_dtype=torch.bfloat16, overrides={"master_weights": form})
    comparison = compare(f32, other, state_of(f32), batch_of())
    assert comparison["master/first.weight"].relative_error < 2**-8
    assert comparison["metrics/loss"].relative_error < 0.05
    itself = compare(other, other, state_of(other), batch_of(), tolerance=0.0)
    assert itself.is_equal


def test_a_state_with_buffers_and_an_average():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = fmp.functionalize(module)

    def loss_fn(params, batch, *, buffers):
        out, buffers = model.apply(params, buffers, batch[0], train=True)
        return (out.float() - batch[1].float()).square().mean(), buffers

    def step(level):
        policy = fmp.opt_level(level, half_dtype=torch.bfloat16, keep_norm_fp32=False)
        return fmp.train_step(loss_fn, fmp.optim.sgd(0.1, momentum=0.9), policy=policy, ema=0.9)

    full, low = step("O0"), step("O2")
    state = full.init(model.params, buffers=model.buffers)
    state, _ = full(state, batch_of())
    comparison = compare(full, low, state, batch_of())
    assert 0 < comparison["buffers/1.running_mean"].relative_error < 0.02
    assert 0 < comparison["ema/0.weight"].relative_error < 0.01
    assert comparison["buffers/1.num_batches_tracked"].is_equal


# A difference


def test_an_op_that_is_added_is_named():
    def changed(params, batch):
        x, y = batch
        out = MODEL.apply(params, {}, x)[0]
        out = out * 1.01  # planted
        return ((out.float() - y.float()) ** 2).mean()

    a, b = step_of(), step_of(loss=changed)
    found = compare(a, b, state_of(a), batch_of()).parting
    assert (found.op, found.phase) == ("sub", "forward")
    assert found.only_in_b == (f"mul, {planted(changed)}",)
    assert found.only_in_a == ()
    assert f"only in b: mul, {planted(changed)}" in str(found)


def test_ops_that_only_one_has_are_stepped_over():
    def of(every, last):
        def fn(x):
            for index in range(60):
                x = torch.tanh(x * 1.5)
                x = x - 0.0 if index % every == 0 else x
            return torch.exp(x + 1) * last  # planted

        return fn

    a, b, c = of(7, 1.0), of(5, 1.0), of(4, 2.0)
    comparison = compare(fmp.grad(lambda x: a(x).sum()), fmp.grad(lambda x: b(x).sum()), torch.randn(3))
    assert comparison.is_equal
    assert comparison.parting is None
    assert comparison.op_counts[0] != comparison.op_counts[1]
    found = compare(a, c, torch.randn(3)).parting
    assert (found.op, found.lines[1], round(found.relative_error, 6)) == ("mul", planted(c), 1.0)


def test_an_op_that_another_replaces_is_named():
    def a(x):
        return torch.sin(x).sum()

    def b(x):
        return torch.cos(x).sum()  # planted

    found = compare(fmp.grad(a), fmp.grad(b), torch.randn(5)).parting
    assert (found.op, found.phase) == ("sin against cos", "forward")
    assert found.lines[1] == planted(b)


@pytest.mark.parametrize("grad", [fmp.grad, torch.func.grad, lambda fn: fmp.grad(fmp.remat(fn))])
def test_a_value_that_differs_in_one_op_is_named(grad):
    def of(offset):
        def fn(x):
            y = torch.sin(x)
            y = y.clamp(min=offset)  # planted
            return torch.exp(y).sum()

        return fn

    a, b = of(-0.5), of(-0.4)
    found = compare(grad(a), grad(b), torch.linspace(-1, 1, 9)).parting
    assert (found.op, found.phase, found.lines) == ("clamp", "forward", (planted(a), planted(b)))
    assert found.relative_error > found.tolerance == 16 * torch.finfo(torch.float32).eps


def test_a_backward_that_differs_is_named():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.factor, None

    def of(factor):
        def fn(x):
            y = Scaled.apply(x.sin(), factor)  # planted
            return y.sum()

        return fn

    a, b = of(2.0), of(2.1)
    found = compare(fmp.grad(a), fmp.grad(b), torch.randn(4)).parting
    assert (found.op, found.phase, found.lines[0]) == ("mul", "backward", planted(a))
    assert round(found.relative_error, 6) == 0.05


def test_the_module_is_named():
    first, second = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        list(second.parameters())[-1].add_(0.1)
    found = compare(first, second, torch.randn(2, 3)).parting
    assert (found.op, found.module) == ("addmm", "1")
    assert "in 1" in str(found)


def test_the_optimizer_is_named():
    a, b = step_of(), step_of(optimizer=fmp.optim.adamw(1e-2, b2=0.99))
    comparison = compare(a, b, state_of(a), batch_of())
    assert comparison.parting.phase == "forward"
    assert comparison.parting.lines[0].startswith("fmp/optim/")
    assert comparison["metrics/grad_norm"].is_equal
    assert not comparison["opt_state/second_moment/first.weight"].is_equal


def test_an_overflow_parts():
    def half(x):
        return (x.half() * 100).float()  # planted

    found = compare(lambda x: x * 100, half, torch.full((3,), 1e4)).parting
    assert (found.op, found.relative_error) == ("mul", math.inf)


def test_a_tolerance_of_ones_own():
    a, b = (lambda x: torch.sin(x) * 1), (lambda x: torch.sin(x * 1.001) * 1)
    x = torch.rand(100)
    assert compare(a, b, x).parting.op == "sin"
    assert compare(a, b, x, tolerance=0.01).parting is None
    with pytest.raises(ValueError, match="at least 0"):
        compare(a, b, x, tolerance=-1.0)
    with pytest.raises(ValueError, match="at least 0"):
        compare(a, b, x, tolerance=math.nan)


def test_only_a_sample_of_large_results_is_kept():
    x = torch.randn(3 * SAMPLE)
    changed = x.clone()
    changed[:9] += 1.0  # evenly spaced entries meet some of nine in a row
    assert compare(lambda: x * 1, lambda: x * 1).parting is None
    assert compare(lambda: x * 1, lambda: changed * 1).parting.op == "mul"


# Functions and leaves


def test_results_that_only_one_has():
    comparison = compare(
        lambda x: {"a": x, "b": x[:2], "n": 3}, lambda x: {"a": x * 1, "b": x, "c": x.sum()}, torch.ones(3)
    )
    assert [leaf.path for leaf in comparison.leaves] == ["result/a"]
    assert (comparison.only_in_a, comparison.only_in_b) == (("result/b", "result/n"), ("result/b", "result/c"))
    assert not comparison.is_equal
    assert "only in b: result/b, result/c" in str(comparison)
    with pytest.raises(KeyError, match="result/a"):
        comparison["b"]


def test_inside_of_a_transform():
    with pytest.raises(RuntimeError, match="call it outside"):
        torch.func.vmap(lambda x: compare(torch.sin, torch.sin, x).is_equal)(torch.ones(3))


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]),
    st.floats(-250, 250),
    st.integers(0, 5),
)
def test_ulps_count_the_numbers_in_between(dtype, value, steps):
    a = torch.tensor([value], dtype=torch.float64).to(dtype)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    b = (a.view(bits) + steps).view(dtype)  # the next numbers away from zero
    found = leaf_difference("x", a, b)
    assert found.ulps == steps
    assert leaf_difference("x", b.double(), a).ulps == (steps if dtype != torch.float64 else found.ulps)
    assert found.is_equal == (steps == 0)


def test_ulps_across_zero_and_what_is_not_finite():
    small = torch.tensor([2.0**-24], dtype=torch.float16)
    assert leaf_difference("x", small, -small).ulps == 2
    assert leaf_difference("x", torch.tensor([0.0]), torch.tensor([-0.0])).ulps == 0
    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert leaf_difference("x", largest, -largest).ulps > 2**63
    nan, inf = torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0])
    assert leaf_difference("x", nan, nan).is_equal
    assert leaf_difference("x", inf, inf).is_equal
    assert leaf_difference("x", nan, inf).relative_error == math.inf
    assert leaf_difference("x", inf, -inf).relative_error == math.inf
    assert leaf_difference("x", nan, torch.ones(2)).relative_error == math.inf


def test_relative_error_and_cosine_by_hand():
    found = leaf_difference("x", torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0]))
    assert found.relative_error == pytest.approx(math.sqrt(2) / 5)
    assert found.cosine == pytest.approx(24 / 25)
    zero, one = torch.zeros(2), torch.ones(2)
    assert (leaf_difference("x", zero, zero).cosine, leaf_difference("x", zero, zero).relative_error) == (1.0, 0.0)
    assert (leaf_difference("x", zero, one).cosine, leaf_difference("x", zero, one).relative_error) == (0.0, math.inf)
    whole = leaf_difference("n", torch.tensor([True, False]), torch.tensor([True, True]))
    assert (whole.relative_error, whole.ulps) == (1.0, None)
    turned = leaf_difference("z", torch.tensor([1j]), torch.tensor([1.0 + 0j]))
    assert turned.cosine == 0.0
    assert leaf_difference("e", torch.ones(0), torch.ones(0)).is_equal
