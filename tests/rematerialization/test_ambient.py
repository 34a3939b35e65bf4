"""What surrounds a call surrounds its recomputation, whatever surrounds the backward pass."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

import fmp
from fmp import _compat, random
from fmp.dropout import SeededRandomness
from fmp.rematerialization import plain
from tests.bits import differing, same_bits

X = torch.linspace(-1.0, 1.0, 4)
HALF = fmp.opt_level("O1", half_dtype=torch.bfloat16)
vjp: Any = torch.func.vjp


def by_autograd(f, x=X):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


def by_grad(f, x=X):
    return grad(lambda x: f(x).sum())(x)


def late_vjp(f, x=X):
    y, pull = vjp(f, x)
    return pull(torch.ones_like(y))[0]


BOTH = pytest.mark.parametrize("gradient", [by_autograd, by_grad, late_vjp])


class Counting(TorchFunctionMode):
    """Counts the products that it is shown, and the passes of entering it."""

    def __init__(self):
        super().__init__()
        self.products = self.entered = 0

    def __enter__(self):
        self.entered += 1
        return super().__enter__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.products += func in (torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__)
        return func(*args, **(kwargs or {}))


@BOTH
def test_a_foreign_mode_sees_both_passes(gradient):
    mode = Counting()

    def f(x):
        with mode:
            return fmp.remat(lambda x: torch.tanh(torch.outer(x, x) @ torch.eye(4)))(x)

    gradient(f)
    assert (mode.products, mode.entered) == (2, 1)


@pytest.mark.mixed_dtypes
@BOTH
def test_a_policy_that_ended_before_the_backward_pass(gradient):
    seen = []

    def body(x):
        y = torch.outer(x, x) @ torch.outer(x, x)
        seen.append(y.dtype)
        return torch.tanh(y)

    want = gradient(fmp.autocast(body, HALF))
    seen.clear()
    assert same_bits(gradient(fmp.autocast(fmp.remat(body), HALF)), want)
    assert seen == [torch.bfloat16, torch.bfloat16]


@pytest.mark.mixed_dtypes
@BOTH
def test_a_policy_that_began_after_the_call(gradient):
    seen = []

    def body(x):
        y = torch.outer(x, x) @ torch.outer(x, x)
        seen.append(y.dtype)
        return torch.tanh(y)

    def step(x):
        return gradient(lambda x: fmp.autocast(fmp.remat(body), fmp.Policy(None, None, None))(x), x)

    fmp.autocast(step, HALF)(X)
    assert seen == [torch.float32, torch.float32]


@pytest.mark.mixed_dtypes
@BOTH
def test_casting_switched_off_by_torch_autocast(gradient):
    seen = []

    def body(x):
        y = torch.outer(x, x) @ torch.outer(x, x)
        seen.append(y.dtype)
        return torch.tanh(y)

    def f(x):
        with torch.autocast("cpu", enabled=False):
            return fmp.remat(body)(x)

    gradient(fmp.autocast(f, HALF))
    assert seen == [torch.float32, torch.float32]


@pytest.mark.mixed_dtypes
@BOTH
@pytest.mark.parametrize("outside", [False, True])
def test_torch_autocast(gradient, outside):
    seen = []

    def body(x):
        y = torch.outer(x, x) @ torch.outer(x, x)
        seen.append(y.dtype)
        return torch.tanh(y).float()

    def f(wrap, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=not outside):
            return wrap(body)(x)

    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        want = gradient(functools.partial(f, lambda body: body))
        seen.clear()
        got = gradient(functools.partial(f, fmp.remat))
    assert same_bits(got, want)
    assert seen == [torch.float32 if outside else torch.bfloat16] * 2


@BOTH
def test_default_dtype_and_device(gradient):
    seen = []

    def body(x):
        made = torch.zeros(4)
        seen.append((made.dtype, made.device.type))
        return torch.sin(x) + x.new_zeros(4)

    def f(x):
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                return fmp.remat(body)(x)
        finally:
            torch.set_default_dtype(torch.float32)

    gradient(f)
    assert seen == [(torch.float64, "meta")] * 2
    assert torch.get_default_dtype() == torch.float32


@BOTH
def test_the_random_state_of_a_generator_that_the_function_reaches(gradient):
    def f(wrap, generator, x):
        return wrap(lambda x: torch.sin(x * torch.rand(4, generator=generator)))(x)

    def run(wrap):
        generator = torch.Generator().manual_seed(3)
        return gradient(functools.partial(f, wrap, generator)), torch.rand(1, generator=generator)

    assert same_bits(run(fmp.remat), run(lambda fn: fn))


@BOTH
def test_random_state_that_is_not_preserved(gradient):
    f = fmp.remat(lambda x: x * torch.rand(4), preserve_rng_state=False)
    torch.manual_seed(0)
    first, second = torch.rand(4), torch.rand(4)
    torch.manual_seed(0)
    found = gradient(f)
    assert same_bits(found, second)
    assert not same_bits(found, first)


@pytest.mark.parametrize("gradient", [by_autograd, by_grad])
def test_seeded_draws_go_on_after_the_call(gradient):
    def f(wrap, x):
        with SeededRandomness(5) as mode:
            y = wrap(lambda x: F.dropout(F.dropout(x)))(x)
            z = wrap(lambda x: x * torch.rand(4))(y)
            assert mode.calls == 3
            return z * torch.rand(4)

    want = gradient(functools.partial(f, lambda fn: fn))
    assert same_bits(gradient(functools.partial(f, fmp.remat)), want)


def test_draws_before_a_transform_inside_of_the_function():
    def seeded(wrap, x):
        def body(x):
            drawn = F.dropout(x) * torch.rand(4)
            return grad(lambda y: torch.sin(y * drawn).sum())(x)

        with SeededRandomness(5) as mode:
            return wrap(body)(x) * F.dropout(x) * mode.calls

    want = by_autograd(functools.partial(seeded, lambda fn: fn))
    assert same_bits(by_autograd(functools.partial(seeded, fmp.remat)), want)


def test_a_mapped_seed():
    def f(wrap, x, seed):
        with SeededRandomness(seed):
            return wrap(lambda x: torch.sin(F.dropout(x)))(x).sum()

    def run(wrap):
        return vmap(grad(functools.partial(f, wrap)), (None, 0))(torch.ones(64), torch.arange(3))

    got = run(fmp.remat)
    assert same_bits(got, run(lambda fn: fn))
    assert not same_bits(got[0], got[1])


def test_a_model_with_a_seed_that_uses_remat_inside():
    class Net(torch.nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.layer, self.wrap = torch.nn.Linear(4, 4), wrap

        def body(self, x):
            return F.dropout(torch.tanh(self.layer(x)))

        def forward(self, x):
            return self.wrap(self.body)(x)

    def run(wrap, differentiate):
        torch.manual_seed(0)
        model = fmp.functionalize(Net(wrap))
        return differentiate(lambda params: model.apply(params, model.buffers, X, seed=3)[0].sum())(model.params)

    for differentiate in (grad, fmp.grad):
        assert same_bits(run(fmp.remat, differentiate), run(lambda fn: fn, differentiate))


def test_grad_mode():
    f = fmp.remat(lambda x: torch.sin(x))
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert not f(x).requires_grad
    with torch.inference_mode():
        assert f(x).is_inference()
    seen = []

    def body(x):
        seen.append(torch.is_grad_enabled())
        return x * 2

    by_grad(fmp.remat(body))
    by_autograd(fmp.remat(body))
    assert all(seen)


def test_the_stack_of_modes_is_as_it_was_after_an_error():
    def broken(x):
        raise KeyError("no")

    with SeededRandomness(1) as mode:
        before = _compat.function_modes()
        for gradient in (by_autograd, by_grad):
            with pytest.raises(KeyError):
                gradient(fmp.remat(broken))
        assert _compat.function_modes() == before
        assert mode.calls == 0


@pytest.mark.parametrize("saveable", [fmp.saveable.nothing, fmp.saveable.dots], ids=["nothing", "dots"])
@pytest.mark.parametrize("gradient", [torch.func.grad, fmp.grad])
def test_dropout_of_a_transposed_tensor_draws_the_same_mask_again(gradient, saveable):
    def f(x):
        return F.dropout(x.transpose(0, 1) * 1.0, 0.3)

    x = torch.randn(2, 8, 16)

    def run(f):
        torch.manual_seed(3)
        return gradient(lambda x: f(x).square().sum())(x), torch.rand(1)

    assert differing(run(f), run(fmp.remat(f, saveable=saveable))) == set()


@BOTH
def test_a_device_that_the_function_initializes(gradient, monkeypatch):
    in_use = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(in_use))

    def f(x):
        in_use.append(True)
        return x.sin()

    with pytest.raises(fmp.RematError, match="has initialized CUDA"):
        gradient(fmp.remat(f))
    in_use.clear()
    assert torch.equal(gradient(fmp.remat(f, preserve_rng_state=False)), X.cos())


@pytest.mark.parametrize("type_of", ["xpu", "cpu"])
def test_torch_restores_the_random_state_of_devices_that_fmp_does_not_know(type_of, monkeypatch):
    asked = []

    def checkpoint(run, *tensors, preserve_rng_state, **options):
        asked.append(preserve_rng_state)
        return run(*tensors)

    monkeypatch.setattr(plain, "checkpoint", checkpoint)
    monkeypatch.setattr(plain, "_KNOWN", {"cpu"} - {"cpu" if type_of == "xpu" else ""})
    fmp.remat(torch.sin)(X)
    fmp.remat(torch.sin, preserve_rng_state=False)(X)
    assert asked == [type_of == "xpu", False]


def test_numbers_are_drawn_again_for_the_same_part_of_the_batch():
    def noisy(x):
        return x * random.uniform(3, x.shape) * x

    x = torch.ones(4, requires_grad=True)
    with random.part_of_batch(2):
        y = fmp.remat(noisy)(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, 2 * random.uniform(3, (12,))[8:])
