"""Gradients of a loss with and without remat, under a transform, two, and none."""

import pytest
import torch
from torch.func import grad, vmap

import fmp

X = torch.linspace(-1.0, 1.0, 12).view(4, 3)


def under_grad(f):
    return grad(f)(X)


def under_vmap(f):
    return vmap(grad(f))(X)


def plainly(f):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


def as_it_is(f, **options):
    return f


def check(run, loss):
    """Compares the gradients of `loss(x, wrap)` with and without remat."""
    torch.testing.assert_close(run(lambda x: loss(x, fmp.remat)), run(lambda x: loss(x, as_it_is)))


everywhere = pytest.mark.parametrize("run", [under_grad, under_vmap, plainly])
