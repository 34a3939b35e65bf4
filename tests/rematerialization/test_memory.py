"""What remat is for: peak memory of a chain of blocks."""

import gc
from typing import Any

import pytest
import torch
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import fmp
from fmp.rematerialization.user_call import UserCall
from tests.memory import peak_bytes

WEIGHTS = [torch.randn(4, 32, 32) / 6 for _ in range(16)]
X = torch.randn(1024, 32)


def block(x, w):
    for row in w:
        x = torch.tanh(x @ row)
    return x


def loss_of(block: Any) -> Any:
    def loss(weights, x):
        for w in weights:
            x = block(x, w)
        return x.square().sum()

    return loss


def by_autograd(loss):
    weights = [w.clone().requires_grad_() for w in WEIGHTS]
    return torch.autograd.grad(loss(weights, X), weights)


PLAIN, LEAN = loss_of(block), loss_of(fmp.remat(block))


def test_a_quarter_of_torch_func_grad():
    full = peak_bytes(lambda: grad(PLAIN)(WEIGHTS, X))
    assert peak_bytes(lambda: grad(LEAN)(WEIGHTS, X)) <= full / 4
    assert peak_bytes(lambda: fmp.value_and_grad(LEAN)(WEIGHTS, X)) <= full / 8


def test_the_memory_of_torch_utils_checkpoint_without_a_transform():
    rival = loss_of(lambda x, w: checkpoint(block, x, w, use_reentrant=False))
    assert peak_bytes(lambda: by_autograd(LEAN)) <= 1.02 * peak_bytes(lambda: by_autograd(rival))


def test_a_gradient_by_a_transform_needs_the_memory_of_autograd():
    """pytorch#134612."""
    x = torch.linspace(-1.0, 1.0, 2**18)

    def chain(wrap):
        lean = wrap(lambda x: torch.sin(torch.cos(x)))

        def loss(x):
            for _ in range(10):
                x = lean(x)
            return x.sum()

        return loss

    def reference(loss):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf)

    for wrap in (lambda fn: fn, fmp.remat):
        want = peak_bytes(lambda wrap=wrap: reference(chain(wrap)))
        assert peak_bytes(lambda wrap=wrap: fmp.grad(chain(wrap))(x)) <= 1.1 * want


def test_per_sample_gradients_and_second_order():
    xs = X[:, None]
    samples = peak_bytes(lambda: vmap(grad(lambda x: LEAN(WEIGHTS, x)))(xs))
    assert samples <= peak_bytes(lambda: vmap(grad(lambda x: PLAIN(WEIGHTS, x)))(xs)) / 3

    def penalty(loss):
        return grad(lambda x: grad(loss, 1)(WEIGHTS, x).square().sum())(X)

    assert peak_bytes(lambda: penalty(LEAN)) <= peak_bytes(lambda: penalty(PLAIN)) / 3


def test_forward_mode_keeps_nothing():
    def tangent(loss):
        return torch.func.jvp(lambda x: loss(WEIGHTS, x), (X,), (X,))

    assert peak_bytes(lambda: tangent(LEAN)) <= 1.5 * peak_bytes(lambda: tangent(PLAIN))


@pytest.mark.parametrize("gradient", [by_autograd, lambda loss: fmp.grad(loss)(WEIGHTS, X)])
def test_nested_remat_keeps_the_inputs_of_few_blocks(gradient):
    def outer(x, *weights):
        for w in weights:
            x = lean_block(x, w)
        return x

    lean_block, lean_outer = fmp.remat(block), fmp.remat(outer)

    def nested(weights, x):
        for start in range(0, 16, 4):
            x = lean_outer(x, *weights[start : start + 4])
        return x.square().sum()

    assert peak_bytes(lambda: gradient(nested)) < 0.75 * peak_bytes(lambda: gradient(LEAN))


def test_a_kept_value_costs_its_memory():
    def named(x, w):
        return fmp.checkpoint_name(block(x, w), "out")

    def peak(saveable):
        return peak_bytes(lambda: by_autograd(loss_of(fmp.remat(named, saveable=saveable))))

    nothing = peak(fmp.saveable.nothing)
    assert peak(fmp.saveable.only_names("other")) <= 1.02 * nothing
    assert peak(fmp.saveable.dots) > 2 * nothing


@pytest.mark.parametrize("saveable", [fmp.saveable.nothing, fmp.saveable.dots], ids=["nothing", "dots"])
def test_nothing_waits_for_the_garbage_collector(saveable: Any):
    gradient = grad(loss_of(fmp.remat(block, saveable=saveable)))
    gradient(WEIGHTS[:2], X[:4])
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            gradient(WEIGHTS[:2], X[:4])
        assert not [each for each in gc.get_objects() if type(each) is UserCall]
    finally:
        gc.enable()
