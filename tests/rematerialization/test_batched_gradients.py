"""Many cotangents are pulled back through one recomputation, which draws what the call has drawn."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacrev, vmap

import fmp
from tests.bits import same_bits
from tests.rematerialization.comparison import as_it_is

X = torch.linspace(-1.0, 1.0, 12).view(4, 3)
LEAN = {
    "nothing": fmp.remat,
    "dots": fmp.remat(saveable=fmp.saveable.dots),
    "bitwise": fmp.remat(determinism_check="bitwise"),
}


def results(wrap: Any, calls: Any = None):
    def block(x):
        if calls is not None:
            calls.append(tuple(x.shape))
        return F.dropout(torch.tanh(x.sin() @ x.t()))

    x = X.clone().requires_grad_()
    return x, (wrap(block)(x) * x.sum()).sum(1)


def batched(wrap, create_graph=False):
    x, y = results(wrap)
    return torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True, create_graph=create_graph)[0], x


def differentiated_again(wrap):
    rows, x = batched(wrap, create_graph=True)
    return torch.autograd.grad((rows + x).square().sum(), x)[0]


def mapped(wrap):
    x, y = results(wrap)
    return vmap(lambda row: torch.autograd.grad(y, x, row, retain_graph=True)[0])(torch.eye(4))


def second_derivatives(wrap):
    x, y = results(wrap)
    first = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    return torch.autograd.grad(first, x, torch.eye(12).view(12, 4, 3), is_grads_batched=True)[0]


def nested(wrap):
    x = X.clone().requires_grad_()
    y = wrap(lambda x: wrap(lambda x: F.dropout(x.sin()))(x).cos().sum(1))(x)
    return torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)[0]


def of_function(wrap):
    jacobian: Any = torch.autograd.functional.jacobian
    return jacobian(lambda x: wrap(lambda x: F.dropout(x.sin()))(x).sum(1), X, vectorize=True)


def by_jacrev(wrap):
    return jacrev(lambda x: wrap(lambda x: F.dropout(x.sin()))(x).sum(1))(X)


HOW = {
    "is_grads_batched": lambda wrap: batched(wrap)[0],
    "differentiated again": differentiated_again,
    "vmap of autograd.grad": mapped,
    "second derivatives": second_derivatives,
    "nested": nested,
    "vectorized jacobian": of_function,
    "jacrev": by_jacrev,
}


@pytest.mark.parametrize("lean", LEAN)
@pytest.mark.parametrize("how", HOW)
def test_every_cotangent_meets_the_same_random_numbers(how, lean):
    found = []
    for wrap in (as_it_is, LEAN[lean]):
        torch.manual_seed(3)
        found.append((HOW[how](wrap), torch.rand(1)))
    (want, after), (got, after_remat) = found
    torch.testing.assert_close(got, want)
    assert same_bits(after, after_remat)


@pytest.mark.parametrize("lean", LEAN)
@pytest.mark.parametrize("is_batched", [False, True])
def test_the_recomputation_runs_once_on_tensors_that_are_not_mapped(lean, is_batched):
    calls: list[Any] = []
    x, y = results(LEAN[lean], calls)
    pull = functools.partial(torch.autograd.grad, y, x)
    if is_batched:
        pull(torch.eye(4), is_grads_batched=True)
    else:
        vmap(pull)(torch.eye(4))
    assert calls == [(4, 3)] * 2


def test_a_function_that_draws_runs_once_in_each_pass():
    calls: list[Any] = []

    def block(x):
        calls.append(tuple(x.shape))
        return F.dropout(x.sin())

    torch.func.grad(lambda x: fmp.remat(block)(x).sum())(X)
    assert len(calls) == 2
