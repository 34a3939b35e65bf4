"""What a function reaches without being given it gets the gradient that it has without remat, or raises."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import fmp
from fmp.rematerialization.capture import Capture
from tests.bits import same_bits

X = torch.linspace(-1.0, 1.0, 4)
W = torch.linspace(0.5, 2.0, 4)
GLOBAL = torch.linspace(1.0, 2.0, 4)
TABLE = {"weights": [GLOBAL]}


def product(x, w):
    return torch.tanh(torch.tanh(x * w) * w).sum()


def reads_global(x):
    return product(x, GLOBAL)


def reads_table(x):
    return product(x, TABLE["weights"][0])


def helper_of_helper(x):
    return reads_global(x) * 2


class Holder:
    def __init__(self, w):
        self.w = w

    def method(self, x):
        return product(x, self.w)


class Pair(nn.Module):
    def __init__(self, wrap: Any = None):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = torch.ones(4)  # no parameter, no buffer
        self.wrap = wrap or (lambda fn: fn)

    def body(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale

    def forward(self, x):
        return self.wrap(self.body)(x).sum()


def without(fn):
    return fn


def _default(wrap, x, w):
    return wrap(lambda x, w=w: product(x, w))(x)


def _keyword_default(wrap, x, w):
    def call(x, *, w=w):
        return product(x, w)

    return wrap(call)(x)


def _helper(wrap, x, w):
    def helper(x):
        return product(x, w)

    return wrap(lambda x: helper(x) * 2)(x)


def _recursive(wrap, x, w):
    def power(x, n):
        return x if n == 0 else power(torch.tanh(x * w), n - 1)

    return wrap(power)(x, 3).sum()


def _mutually_recursive(wrap, x, w):
    def even(x, n):
        return x if n == 0 else odd(torch.tanh(x), n - 1)

    def odd(x, n):
        return even(x * w, n - 1)

    return wrap(even)(x, 4).sum()


def _inner_grad(wrap, x, w):
    return wrap(lambda x: grad(lambda a: torch.sin(a * w).sum())(x).square().sum())(x)


def _inner_fmp_grad(wrap, x, w):
    return wrap(lambda x: fmp.grad(lambda a: torch.sin(a * w).sum())(x).square().sum())(x)


def _inner_vmap(wrap, x, w):
    return wrap(lambda x: vmap(lambda a: torch.sin(a * w).sum())(torch.stack([x, 2 * x])).sum())(x)


def _as_function_argument(wrap, x, w):
    return wrap(lambda apply, x: apply(x))(lambda x: product(x, w), x)


def _in_a_loop(wrap, x, w):
    for factor in (w, 2 * w, 3 * w):
        x = wrap(lambda x: torch.sin(x * factor))(x)
    return x.sum()


CAPTURES = {
    "default": _default,
    "keyword default": _keyword_default,
    "partial": lambda wrap, x, w: wrap(functools.partial(product, w=w))(x),
    "helper": _helper,
    "recursive": _recursive,
    "mutually recursive": _mutually_recursive,
    "inner grad": _inner_grad,
    "inner fmp.grad": _inner_fmp_grad,
    "inner vmap": _inner_vmap,
    "function as argument": _as_function_argument,
    "changed variable": _in_a_loop,
    "everything": lambda wrap, x, w: wrap(lambda: product(x, w))(),
}


@pytest.mark.parametrize("name", CAPTURES)
@pytest.mark.parametrize("how", ["grad", "vmap(grad)", "autograd"])
def test_a_captured_tensor_gets_its_gradient(name, how):
    def run(wrap):
        f = functools.partial(CAPTURES[name], wrap)
        if how == "grad":
            return grad(f, (0, 1))(X, W)
        if how == "vmap(grad)":
            return vmap(grad(f, (0, 1)))(torch.stack([X, X + 1]), torch.stack([W, W - 1]))
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        return torch.autograd.grad(f(x, w), (x, w))

    want, got = run(without), run(fmp.remat)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    if how == "autograd":
        assert same_bits(want, got)
    assert all(gradient.abs().max() > 0 for gradient in got)


@pytest.mark.parametrize("function", [reads_global, reads_table, helper_of_helper])
def test_a_global_tensor_gets_its_gradient(function, monkeypatch):
    def loss(wrap, w):
        monkeypatch.setitem(globals(), "GLOBAL", w)
        monkeypatch.setitem(TABLE, "weights", [w])
        return wrap(function)(X)

    want = grad(lambda w: loss(without, w))(W)
    assert same_bits(grad(lambda w: loss(fmp.remat, w))(W), want)
    assert want.abs().max() > 0


def test_the_attribute_of_an_object_raises_under_a_transform():
    with pytest.raises(fmp.RematError, match=r"reads a tensor, f32\[4\].*pass it as an argument"):
        grad(lambda w: fmp.remat(Holder(w).method)(X))(W)
    with pytest.raises(fmp.RematError, match="pass it as an argument"):
        grad(lambda w: vmap(fmp.remat(Holder(w).method))(torch.stack([X, X])).sum())(W)
    with pytest.raises(fmp.RematError, match="pass it as an argument"):
        vmap(grad(lambda w: fmp.remat(Holder(w).method)(X)))(torch.stack([W, W]))


def test_the_attribute_of_an_object_raises_where_autograd_lies_outside_of_a_transform():
    w, x = W.clone().requires_grad_(), torch.stack([X, X]).requires_grad_()
    with pytest.raises(fmp.RematError, match="requires grad and is no operand"):
        vmap(fmp.remat(Holder(w).method))(x)


def test_the_attribute_of_an_object_gets_its_gradient_where_no_argument_wants_one():
    w, same = W.clone().requires_grad_(), W.clone().requires_grad_()
    vmap(fmp.remat(Holder(w).method))(torch.stack([X, X])).sum().backward()
    vmap(Holder(same).method)(torch.stack([X, X])).sum().backward()
    assert same_bits(w.grad, same.grad)


def test_the_attribute_of_an_object_gets_its_gradient_without_a_transform():
    w, same = W.clone().requires_grad_(), W.clone().requires_grad_()
    fmp.remat(Holder(w).method)(X).backward()
    product(X, same).backward()
    assert same_bits(w.grad, same.grad)


@pytest.mark.parametrize("wrap", [fmp.remat, fmp.remat(saveable=fmp.saveable.dots)])
def test_a_module_is_called_with_the_tensors_of_functional_call(wrap):
    torch.manual_seed(0)
    lean, full = Pair(wrap), Pair()
    full.load_state_dict(lean.state_dict())
    params = {name: param.detach() + 1 for name, param in lean.named_parameters()}

    def gradient(module):
        return grad(lambda params: functional_call(module, params, (X,)))(params)

    def by_autograd(module):
        leaves = {name: param.clone().requires_grad_() for name, param in params.items()}
        return torch.autograd.grad(functional_call(module, leaves, (X,)), list(leaves.values()))

    assert same_bits(gradient(lean), gradient(full))
    # torch.utils.checkpoint recomputes with the module's own parameters here, and returns wrong gradients.
    assert same_bits(by_autograd(lean), by_autograd(full))
    assert all(type(param) is nn.Parameter for param in lean.parameters())


def test_a_module_may_be_the_function_or_an_argument():
    torch.manual_seed(0)
    module = Pair()

    def backward(f):
        module.zero_grad()
        f().backward()
        return [param.grad for param in module.parameters()]

    want = backward(lambda: module(X))
    assert same_bits(backward(lambda: fmp.remat(module)(X)), want)
    assert same_bits(backward(lambda: fmp.remat(lambda module, x: module(x))(module, X)), want)


def test_plain_attributes_of_a_module_get_their_gradient():
    module = Pair()

    def loss(wrap, scale):
        module.scale = scale
        return wrap(module)(X)

    want = grad(lambda scale: loss(without, scale))(W)
    assert same_bits(grad(lambda scale: loss(fmp.remat, scale))(W), want)
    module.scale = W


@pytest.mark.parametrize("how", [lambda f: grad(f)(X), lambda f: vmap(grad(f))(torch.stack([X, X]))])
def test_a_tensor_without_a_gradient_has_its_memory_in_both_passes(how):
    held, seen = torch.ones(4), []

    def kernel(x):
        seen.append(held.data_ptr())
        return (x * held).sin().sum()

    how(fmp.remat(kernel))
    assert seen == [held.data_ptr()] * 2


def test_unused_parameters_get_no_zeros():
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def part(self, x):
            return self.used(x).sum()

    module = Big()
    fmp.remat(determinism_check="bitwise")(module.part)(X).backward()  # by the Function
    assert module.used.weight.grad is not None
    assert module.unused.weight.grad is None


def test_a_function_that_reaches_no_tensor_is_not_copied():
    def helper(x):
        return x * 2

    value = (lambda x: helper(x) + 1), (3, "text", [None]), {}
    assert Capture(value).rebuilt([]) is value


def test_a_tensor_is_one_operand_however_often_it_occurs():
    captured = Capture((lambda: W, (W, [X, W]), {"x": X}))
    assert [id(tensor) for tensor in captured.tensors] == [id(W), id(X)]
    function, (first, (second, third)), kwargs = captured.rebuilt([X, W])
    assert function() is first is third is X
    assert second is kwargs["x"] is W
