"""All passes find the same flags: whether gradients are recorded, and which tensors require grad."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, grad_and_value, hessian, jvp, vmap

import fmp
from tests.rematerialization.comparison import X, as_it_is, plainly, under_grad

LEAN = {
    "nothing": fmp.remat,
    "dots": fmp.remat(saveable=fmp.saveable.dots),
    "bitwise": fmp.remat(determinism_check="bitwise"),
}


def asks_for_grad(x):
    return x.sin() if x.requires_grad else x.cos()


def asks_for_grad_mode(x):
    return x.sin() if torch.is_grad_enabled() else x.cos()


def hooked(x):
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda cotangent: cotangent * 2)
    return y.cos()


HOW = {
    "grad_and_value": lambda f: grad_and_value(lambda x: f(x).sum())(X),
    "vmap(grad_and_value)": lambda f: vmap(grad_and_value(lambda x: f(x).sum()))(X),
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "jvp(grad)": lambda f: jvp(grad(lambda x: f(x).sum()), (X,), (X,)),
    "grad(grad)": lambda f: grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(X),
    "vmap(jvp(grad))": lambda f: vmap(lambda x: jvp(grad(lambda x: f(x).sum()), (x,), (x,)))(X),
    "autograd": lambda f: plainly(lambda x: f(x).sum()),
}


@pytest.mark.parametrize("lean", LEAN)
@pytest.mark.parametrize("function", [asks_for_grad, asks_for_grad_mode])
@pytest.mark.parametrize("how", HOW)
def test_a_branch_on_a_flag(how, function, lean):
    torch.testing.assert_close(HOW[how](LEAN[lean](function)), HOW[how](function))


def test_value_and_tangent_are_those_of_one_branch():
    push: Any = jvp

    def pushed(x):
        y, tangent = push(fmp.remat(asks_for_grad), (x,), (torch.ones(4, 3),))
        return tangent.sum(), (y, tangent)

    gradient, (y, tangent) = grad(pushed, has_aux=True)(X)
    torch.testing.assert_close(y, X.sin())
    torch.testing.assert_close(tangent, X.cos())
    torch.testing.assert_close(gradient, -X.sin())


@pytest.mark.parametrize("run", [under_grad, plainly])
def test_hooks_on_tensors_inside(run):
    torch.testing.assert_close(run(lambda x: fmp.remat(hooked)(x).sum()), run(lambda x: hooked(x).sum()))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("function", [F.silu, F.mish, lambda x: F.group_norm(x, 3)])
def test_second_derivatives_of_what_has_another_formula_for_them(function):
    def loss(x, wrap):
        return wrap(function)(x).square().sum()

    for second in (hessian, lambda f: lambda x: vmap(lambda v: jvp(grad(f), (x,), (v,))[1])(torch.stack([x, x.cos()]))):
        torch.testing.assert_close(second(lambda x: loss(x, fmp.remat))(X), second(lambda x: loss(x, as_it_is))(X))


class Logged(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x).tanh()


class Log:
    value: torch.Tensor = torch.zeros(())


@pytest.mark.parametrize("how", ["grad", "grad(grad)", "vmap(grad)", "vmap(vmap(grad))"])
def test_what_a_hook_logs_can_be_read_within_the_loss(how):
    torch.manual_seed(0)
    module, log = Logged(), Log()
    module.linear.register_forward_hook(lambda module, inputs, output: setattr(log, "value", output.detach()))

    def gradient(wrap):
        one = grad(lambda x: wrap(module)(x).sum() * log.value.square().sum())
        ways = {
            "grad": lambda: one(X),
            "grad(grad)": lambda: grad(lambda x: one(x).sin().sum())(X),
            "vmap(grad)": lambda: vmap(one)(X),
            "vmap(vmap(grad))": lambda: vmap(vmap(one))(torch.stack([X, X.cos()])),
        }
        return ways[how]()

    torch.testing.assert_close(gradient(fmp.remat), gradient(as_it_is))
    module(X)
    torch.testing.assert_close(log.value, module.linear(X).detach())


def test_autograd_inside_of_what_wants_no_gradient():
    def inside(x):
        z = x.detach().requires_grad_()
        return torch.autograd.grad(z.tanh().square().sum(), z)[0] * x

    lean = fmp.remat(inside, determinism_check="bitwise")
    torch.testing.assert_close(lean(X), inside(X))
    with pytest.raises(fmp.RematError, match="uses ordinary autograd"):
        lean(X.clone().requires_grad_())


def test_a_lazy_module_makes_its_parameters_in_the_first_call():
    module = nn.LazyLinear(2)
    value = fmp.remat(module)(X)
    value.sum().backward()
    torch.testing.assert_close(fmp.remat(module)(X), value)
    assert module.weight.grad is not None
