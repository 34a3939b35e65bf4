"""What a policy keeps is not computed again."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import fmp
from tests.bits import same_bits

X, W = torch.linspace(-1.0, 1.0, 12).reshape(3, 4), torch.linspace(0.5, 2.0, 16).reshape(4, 4)


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))

    def count(self, *names):
        return sum(name in names for name in self.names)


def named(x, w):
    y = fmp.checkpoint_name((x @ w)[:, :2], "product")  # a view of what is kept
    return torch.tanh(fmp.checkpoint_name(torch.sin(y), "sine")).sum()


def by_autograd(f):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    return torch.autograd.grad(f(x, w), (x, w))


GRADIENTS = {
    "autograd": by_autograd,
    "grad": lambda f: grad(f, (0, 1))(X, W),
    "vmap(grad)": lambda f: vmap(grad(f, (0, 1)), (0, None))(torch.stack([X, -X]), W),
    "grad(vmap)": lambda f: grad(lambda x, w: vmap(f, (0, None))(x, w).sum(), (0, 1))(torch.stack([X, -X]), W),
}
PRODUCTS = ("mm", "bmm")


@pytest.mark.parametrize("how", GRADIENTS)
@pytest.mark.parametrize(
    ("saveable", "products", "sines"),
    [
        (fmp.saveable.everything, 0, 0),
        (fmp.saveable.nothing, 1, 1),
        (fmp.saveable.dots, 0, 1),
        (fmp.saveable.only_names("product"), 0, 1),
        (fmp.saveable.only_names("sine", "other"), 1, 0),
        (fmp.saveable.any_except_names("sine"), 0, 1),
        (fmp.saveable.any_except_names(), 0, 0),
        (fmp.saveable.offload_names("sine"), 1, 0),
        (lambda op, args: op is torch.ops.aten.sin.default, 1, 0),
    ],
)
def test_kept_values_are_not_computed_again(how, saveable, products, sines):
    with Ops() as plain:
        want = GRADIENTS[how](named)
    with Ops() as lean:
        got = GRADIENTS[how](fmp.remat(named, saveable=saveable))
    if how == "grad(vmap)":
        torch.testing.assert_close(got, want)
    else:
        assert same_bits(got, want)
    assert lean.count(*PRODUCTS) - plain.count(*PRODUCTS) == products
    assert lean.count("sin") - plain.count("sin") == sines


def test_products_with_batch_dimensions():
    def attend(x, w):
        return torch.bmm(torch.stack([x, x]) @ w, torch.ones(2, 4, 1)).sum()

    def extra(saveable):
        with Ops() as ops:
            grad(fmp.remat(attend, saveable=saveable))(X, W)
        return ops.count(*PRODUCTS)

    kept = {name: extra(getattr(fmp.saveable, name)) for name in ("nothing", "dots_with_no_batch_dims", "dots")}
    assert kept["nothing"] - kept["dots_with_no_batch_dims"] == 1
    assert kept["dots_with_no_batch_dims"] - kept["dots"] == 1


@pytest.mark.parametrize("how", ["autograd", "grad"])
def test_what_is_drawn_after_a_kept_draw(how):
    def f(x, w):
        return (F.dropout(x @ w) * torch.rand(3, 4) * torch.sin(x)).sum()

    def run(wrap):
        torch.manual_seed(3)
        return GRADIENTS[how](wrap(f)), torch.rand(1)

    def draws(op, args):
        return op in (
            torch.ops.aten.native_dropout.default,
            torch.ops.aten.bernoulli_.float,
            torch.ops.aten.rand.default,
        )

    assert same_bits(run(lambda f: fmp.remat(f, saveable=draws)), run(lambda f: f))


@pytest.mark.parametrize("how", ["autograd", "grad"])
def test_a_kept_value_that_the_function_itself_changes(how):
    def f(x, w):
        return torch.tanh((x @ w).mul_(2).add_(1)).sum()

    assert same_bits(GRADIENTS[how](fmp.remat(f, saveable=fmp.saveable.dots)), GRADIENTS[how](f))


def test_backward_twice():
    x = X.clone().requires_grad_()
    y = fmp.remat(named, saveable=fmp.saveable.dots)(x, W)
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert same_bits(torch.autograd.grad(y, x), first)


def test_a_name_outside_of_remat_does_nothing():
    assert fmp.checkpoint_name(X, "x") is X


def test_an_operand_may_have_a_name():
    f = fmp.remat(lambda x: torch.sin(fmp.checkpoint_name(x, "x")).sum(), saveable=fmp.saveable.only_names("x"))
    assert same_bits(grad(f)(X), torch.cos(X))


def test_policies_are_values():
    assert fmp.saveable.only_names("a", "b") == fmp.saveable.only_names("b", "a")
    assert len({fmp.saveable.dots, fmp.saveable.dots_with_no_batch_dims, fmp.saveable.dots}) == 2
