"""A weight is cast once in a call, however often it is used, and its gradient is that without a cache."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap
from torch.overrides import TorchFunctionMode

import fmp
from fmp.policy.cast_cache import CastCache
from tests.bits import same_bits

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
APEX = fmp.Policy("f32", "bf16", None, op_rules="apex")
HALF = fmp.Policy("f32", "f16", None, op_rules="apex")
USES = 100


class CountedCasts(TorchFunctionMode):
    """Counts the casts of one tensor's values, outside of what is cast."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and tuple(args[0].shape) == self.shape and result.dtype != args[0].dtype:
            self.count += 1
        return result


def weight() -> torch.Tensor:
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(1))


def batch() -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(2))


def many(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Uses a weight many times."""
    total = x.new_zeros(())
    for index in range(USES):
        total = total + torch.tanh(x * (0.5 + index / USES) @ w).float().sum()
    return total


def anew(fn: Any, policy: fmp.Policy = APEX) -> Any:
    """Autocast without a cache."""

    def run(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CastCache, "cast", lambda self, tensor, dtype: tensor.to(dtype))
            return fmp.autocast(fn, policy)(*args)

    return run


def taped(fn: Any, *args: torch.Tensor) -> torch.Tensor:
    leaf = args[0].detach().clone().requires_grad_()
    return torch.autograd.grad(fn(leaf, *args[1:]), leaf)[0]


# --- cast once


CALLS = {
    "plain": lambda fn: fn,
    "no_grad": lambda fn: torch.no_grad()(fn),
    "taped": lambda fn: lambda w, x: taped(fn, w, x),
    "grad": grad,
    "vmap": lambda fn: lambda w, x: vmap(fn, in_dims=(None, 0))(w, x[:, None]),
    "vmap(grad)": lambda fn: lambda w, x: vmap(grad(fn), in_dims=(None, 0))(w, x[:, None]),
    "grad(vmap)": lambda fn: grad(lambda w, x: vmap(fn, in_dims=(None, 0))(w, x[:, None]).sum()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_weight_is_cast_once_in_a_call(call):
    with CountedCasts((3, 3)) as counted:
        CALLS[call](fmp.autocast(many, APEX))(weight(), batch())
    assert counted.count == 1
    with CountedCasts((3, 3)) as counted:
        CALLS[call](anew(many))(weight(), batch())
    assert counted.count == USES


@pytest.mark.parametrize("recorded", [True, False])
def test_a_parameter_that_a_function_closes_over_is_cast_once(recorded):
    linear = torch.nn.Linear(3, 3)
    with CountedCasts((3, 3)) as counted, torch.set_grad_enabled(recorded):
        fmp.autocast(lambda x: sum(linear(x) for _ in range(5)), APEX)(batch())
    assert counted.count == 1


def test_what_is_computed_inside_is_not_kept():
    with CountedCasts((3, 3)) as counted:
        fmp.autocast(lambda w, x: x @ (inner := w * 2.0) + x @ inner, APEX)(weight(), batch())
    assert counted.count == 2


def test_each_call_casts_again():
    fn, w = fmp.autocast(many, APEX), weight()
    with CountedCasts((3, 3)) as counted:
        first = fn(w, batch())
        w.mul_(2.0)
        second = fn(w, batch())
    assert counted.count == 2
    assert not torch.equal(first, second)


def test_a_weight_in_a_tree_and_by_keyword_is_cast_once():
    run = lambda params, *, head: batch() @ params["w"][0] @ params["w"][0] @ head @ head
    with CountedCasts((3, 3)) as counted:
        fmp.autocast(run, APEX)({"w": [weight()]}, head=weight())
    assert counted.count == 2


# --- the gradient is that without a cache


@pytest.mark.parametrize("call", ["taped", "grad", "vmap(grad)", "grad(vmap)"])
def test_gradients_have_the_bits_of_those_without_a_cache(call):
    found = CALLS[call](fmp.autocast(many, APEX))(weight(), batch())
    assert found.dtype == F32
    assert same_bits(found, CALLS[call](anew(many))(weight(), batch()))


def test_a_sum_in_16_bits_would_differ():
    def cast_first(w, x):
        low = w.to(BF16)
        return sum(torch.tanh((x * (0.5 + index / USES)).to(BF16) @ low).float().sum() for index in range(USES))

    exact, found = taped(many, weight(), batch()), taped(fmp.autocast(many, APEX), weight(), batch())
    rounded = taped(cast_first, weight(), batch())
    assert (found - exact).abs().max() < 0.2 * (rounded - exact).abs().max()


def test_a_weight_in_low_and_in_full_precision():
    both = lambda w, x: (x @ w).float().sum() + torch.exp(w).sum() + (x @ w).float().square().sum() + w.sum()
    for call in ("taped", "grad"):
        found = CALLS[call](fmp.autocast(both, APEX))(weight(), batch())
        assert same_bits(found, CALLS[call](anew(both))(weight(), batch()))
        torch.testing.assert_close(found, CALLS[call](both)(weight(), batch()), rtol=0.05, atol=0.1)


def test_a_16_bit_weight_is_cast_once_to_float32():
    full = lambda w: sum(torch.exp(w * 1.0).sum() + torch.exp(w).sum() for _ in range(3))
    w = weight().to(BF16)
    with CountedCasts((3, 3)) as counted:
        found = taped(fmp.autocast(full, APEX), w)
    assert counted.count == 1 + 3  # and three products
    assert same_bits(found, taped(anew(full), w))


def test_higher_derivatives():
    loss = lambda w, x: torch.tanh(x @ w @ w).float().square().sum()
    cast, plain, w, x = fmp.autocast(loss, APEX), anew(loss), weight(), batch()
    assert same_bits(hessian(cast)(w, x), hessian(plain)(w, x))
    assert same_bits(jvp(lambda w: cast(w, x), (w,), (w + 1.0,)), jvp(lambda w: plain(w, x), (w,), (w + 1.0,)))
    gradient = jvp(grad(lambda w: cast(w, x)), (w,), (w + 1.0,))
    assert same_bits(gradient, jvp(grad(lambda w: plain(w, x)), (w,), (w + 1.0,)))

    def twice(fn, w):
        (first,) = torch.autograd.grad(fn(w, x), w, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), w)[0]

    leaf = w.clone().requires_grad_()
    assert same_bits(twice(cast, leaf), twice(plain, leaf))
    penalty = lambda fn: grad(lambda w: grad(fn)(w, x).square().sum())(w)
    assert same_bits(penalty(cast), penalty(plain))
    exact = penalty(loss)
    torch.testing.assert_close(penalty(cast), exact, rtol=0.2, atol=0.05 * float(exact.abs().max()))


# --- never stale


def in_place(w):
    with torch.no_grad():
        w.mul_(2.0)


def through_data(w):
    w.data.mul_(2.0)


def through_data_assigned(w):
    w.data = w.data * 2.0


def through_set(w):
    with torch.no_grad():
        w.set_((w * 2.0).clone())


def through_numpy(w):
    w.detach().numpy()[:] *= 2.0


def through_a_detached_view(w):
    w.detach()[0].mul_(2.0)


def through_dlpack(w):
    torch.from_dlpack(w.detach()).mul_(2.0)


CHANGES = [
    in_place,
    through_data,
    through_data_assigned,
    through_set,
    through_numpy,
    through_a_detached_view,
    through_dlpack,
]


@pytest.mark.parametrize("parameter", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_uses_is_seen(change, recorded, parameter):
    def run(w, x):
        first = x @ w
        change(w)
        return first, x @ w, x @ w

    w = torch.nn.Parameter(weight()) if parameter else weight()
    with torch.set_grad_enabled(recorded):
        first, second, third = fmp.autocast(run, APEX)(w, batch())
    low = lambda w: (batch().to(BF16) @ w.detach().to(BF16)).float()
    assert torch.equal(first.detach().float(), low(weight()))
    assert torch.equal(second.detach().float(), low(w))
    assert same_bits(third.detach(), second.detach())
    assert not torch.equal(first.detach(), second.detach())


def test_a_use_without_autograd_before_one_with_it():
    def run(w, x):
        with torch.no_grad():
            scale = (x @ w).float().abs().amax()
        return (x @ w).float().sum() / scale + (x @ w).float().sum()

    found = taped(fmp.autocast(run, APEX), weight(), batch())
    assert found.abs().sum() > 0
    assert same_bits(found, taped(anew(run), weight(), batch()))


def test_a_weight_that_begins_to_need_a_gradient_inside():
    def run(w, x):
        before = x @ w
        w.requires_grad_()
        return before, (x @ w).float().sum()

    w = weight()
    before, after = fmp.autocast(run, APEX)(w, batch())
    assert not before.requires_grad
    assert torch.autograd.grad(after, w)[0].abs().sum() > 0


def test_another_policy_inside_casts_the_same_weight_to_its_own_dtype():
    def run(w, x):
        inner = fmp.autocast(lambda x: x @ w, HALF)
        outs = [x @ w, inner(x), x @ w, inner(x)]
        return sum(out.float().sum() for out in outs), outs

    w = weight().requires_grad_()
    loss, outs = fmp.autocast(run, APEX)(w, batch())
    assert [out.dtype for out in outs] == [BF16, F16, BF16, F16]
    plain = torch.stack([(batch().to(low) @ w.to(low)).float().sum() for low in (BF16, F16, BF16, F16)]).sum()
    assert same_bits(torch.autograd.grad(loss, w), torch.autograd.grad(plain, w))


@pytest.mark.parametrize("order", ["before", "after", "both"])
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "vmap(grad)"])
def test_a_transform_inside_over_a_captured_weight(transform, order):
    def inner(w, x):
        loss = lambda x: (x @ w @ w).float().square().sum()
        return {
            "grad": lambda: grad(loss)(x),
            "vmap": lambda: vmap(loss)(x),
            "jvp": lambda: jvp(loss, (x,), (x + 1.0,))[1],
            "vmap(grad)": lambda: vmap(grad(loss))(x),
        }[transform]().sum()

    def run(w, x):
        parts = []
        if order != "after":
            parts.append((x @ w).float().sum())
        parts.append(inner(w, x))
        parts.append(grad(lambda w: (x @ w).float().sum())(w).sum() + inner(w, x))
        if order != "before":
            parts.append((x @ w).float().sum())
        return sum(parts)

    parameter = torch.nn.Parameter(weight())
    closed = lambda fn: lambda w, x: fn(parameter, x) * w.sum()
    for call in ("plain", "no_grad", "taped", "grad", "vmap"):
        x = batch() if call != "vmap" else torch.stack([batch(), batch() + 1.0])
        for fn in (run, closed(run)):
            found = CALLS[call](fmp.autocast(fn, APEX))(weight(), x)
            torch.testing.assert_close(found, CALLS[call](anew(fn))(weight(), x), rtol=0, atol=0)


# --- nothing stays


@pytest.mark.parametrize("recorded", [True, False])
def test_nothing_is_kept_alive_after_the_call(recorded):
    kept: list[Any] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.Tensor.to:
                kept.append(weakref.ref(result))
            return result

    linear = torch.nn.Linear(3, 3)
    run = fmp.autocast(lambda w, x: linear(x @ w @ w).float().sum(), APEX)
    gc.disable()
    try:
        with Watching(), torch.set_grad_enabled(recorded):
            run(weight(), batch())
        assert len(kept) > 3
        assert not any(reference() is not None for reference in kept)
    finally:
        gc.enable()


def test_inference_mode():
    w, x = weight(), batch()
    expected = fmp.autocast(many, APEX)(w, x)
    with torch.inference_mode():
        assert same_bits(fmp.autocast(many, APEX)(w, x).clone(), expected)
        inference = w.clone()

        def run(w, x):
            first = x @ w
            w.mul_(2.0)
            return first, x @ w

        first, second = fmp.autocast(run, APEX)(inference, x)
        assert same_bits(first * 2.0, second)
