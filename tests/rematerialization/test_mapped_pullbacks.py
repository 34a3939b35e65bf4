"""Mappings that begin after a call map the pulling back, not the recomputation; those around the call map both."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jacfwd, jacrev, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import fmp
from tests.rematerialization.comparison import as_it_is

X = torch.linspace(-1.0, 1.0, 12).view(4, 3)
vjp: Any = torch.func.vjp
SQUARES = torch.linspace(-1.0, 1.0, 24).view(2, 3, 4)


def drop(x):
    return F.dropout(x.exp())


def many(wrap):
    return lambda x: vmap(wrap(drop), randomness="different")(x)


def pulled(wrap):
    _, pull = vjp(lambda x: many(wrap)(x).sum(1), X)
    return vmap(pull, randomness="different")(torch.eye(4))


def pulled_twice(wrap):
    _, pull = vjp(lambda x: many(wrap)(x).sum(1), X)
    nested = vmap(vmap(pull, 1, 1, randomness="different"), randomness="error")
    return nested(SQUARES.view(3, 4, 2))


def of_two(wrap):
    nested = vmap(
        vmap(wrap(lambda x, w: F.dropout(x * w)), (0, None), randomness="different"), 1, randomness="different"
    )
    _, pull = vjp(nested, SQUARES, torch.ones(4, 3))
    return vmap(pull, 2)(torch.linspace(-1.0, 1.0, 120).view(3, 2, 5, 4))


def by_autograd(wrap):
    x = X.clone().requires_grad_()
    y = many(wrap)(x).sum(1)
    return vmap(lambda row: torch.autograd.grad(y, x, row, retain_graph=True)[0], randomness="different")(torch.eye(4))


HOW = {
    "vmap(pull)": pulled,
    "vmap(vmap(pull))": pulled_twice,
    "of two mappings": of_two,
    "vmap(autograd.grad)": by_autograd,
    "jacrev(vmap)": lambda wrap: jacrev(many(wrap))(X),
    "jacrev(vmap(grad))": lambda wrap: jacrev(
        vmap(grad(lambda x: wrap(drop)(x).square().sum()), randomness="different")
    )(X),
    "jacrev(jacfwd)": lambda wrap: jacrev(jacfwd(lambda x: wrap(drop)(x).square(), randomness="different"))(X),
    "jacrev(jacrev)": lambda wrap: jacrev(jacrev(lambda x: many(wrap)(x).square().sum()))(X),
}


@pytest.mark.parametrize("lean", [fmp.remat, fmp.remat(saveable=fmp.saveable.dots)])
@pytest.mark.parametrize("how", HOW)
def test_the_masks_are_those_of_the_call(how, lean):
    found = []
    for wrap in (as_it_is, lean):
        torch.manual_seed(3)
        found.append(HOW[how](wrap))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("of_module", [False, True])
def test_only_the_random_numbers_are_mapped(of_module):
    """Each member draws its own numbers although all have the same arguments and cotangents."""
    lean = fmp.remat(nn.Sequential(nn.Dropout(0.5)) if of_module else F.dropout)

    def member(_):
        value, pull = vjp(lean, torch.ones(4, 3))
        return value, pull(torch.ones(4, 3))[0]

    value, gradient = vmap(member, randomness="different")(torch.zeros(3))
    assert torch.equal(value, gradient)
    assert not torch.equal(value[0], value[1])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_torch_can_map_but_not_differentiate_there_runs_as_it_is():
    torch.manual_seed(0)
    cell, sparse = nn.GRUCell(3, 3), torch.eye(4).to_sparse()
    torch.testing.assert_close(vmap(fmp.remat(cell))(SQUARES.mT), vmap(cell)(SQUARES.mT))

    def product(x):
        return torch.sparse.mm(sparse, x).sin()

    def loss(x, wrap):
        return vmap(wrap(product))(torch.stack([x, x + 1])).sum()

    torch.testing.assert_close(grad(lambda x: loss(x, fmp.remat))(X), grad(lambda x: loss(x, as_it_is))(X))

    def attention(x):
        return F.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.3)

    def dropped(wrap):
        torch.manual_seed(1)
        inner = vmap(wrap(attention), randomness="different")
        return vmap(grad(lambda x: inner(torch.stack([x, x + 1])).sum()), randomness="different")(
            torch.stack([X, X + 1])
        )

    torch.testing.assert_close(dropped(fmp.remat), dropped(as_it_is))


def test_a_name_within_a_mapping_inside_of_the_function():
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products.append(func is torch.ops.aten.mm.default)
            return func(*args, **(kwargs or {}))

    def inside(x):
        return vmap(lambda row: fmp.checkpoint_name(row @ torch.ones(3, 3), "product").tanh())(x)

    lean = fmp.remat(inside, saveable=fmp.saveable.only_names("product"))
    with Products():
        got = grad(lambda x: lean(x).sum())(X)
    torch.testing.assert_close(got, grad(lambda x: inside(x).sum())(X))
    assert sum(products) == 2  # the product, and that of its gradient
