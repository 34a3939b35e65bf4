"""fmp.df11.frozen: the weights of one block at a time are decoded, when they are needed and not before."""

import functools
import tracemalloc

import pytest
import torch
from torch.func import grad
from torch.utils.checkpoint import checkpoint

import fmp
from fmp import tree
from tests.bits import same_bits
from tests.df11.frozen_blocks import (
    BASE,
    DECODED,
    DEPTH,
    FREED,
    FROZEN,
    GRADIENTS,
    LEAN,
    LORA,
    PLAIN,
    X,
    backward,
    block,
    loss_of,
)
from tests.memory import peak_bytes


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_weights_of_one_block_live_at_a_time(gradient, decoded):
    want = GRADIENTS[gradient](PLAIN)(LORA, BASE, X)
    assert same_bits(GRADIENTS[gradient](FREED)(LORA, FROZEN, X), want)
    assert (decoded.calls, decoded.most, decoded.live) == (2 * DEPTH, 1, 0)


def test_nothing_is_decoded_between_forward_and_backward(decoded):
    lora = tree.map(lambda leaf: leaf.clone().requires_grad_(), LORA)
    loss = FREED(lora, FROZEN, X)
    assert (decoded.calls, decoded.live) == (DEPTH, 0)
    loss.backward()
    assert (decoded.calls, decoded.live) == (2 * DEPTH, 0)


def test_blocks_that_no_gradient_goes_through_are_decoded_once(decoded):
    leaf = LORA[-1]["up"].clone().requires_grad_()
    lora = [*LORA[:-1], {**LORA[-1], "up": leaf}]
    got = torch.autograd.grad(FREED(lora, FROZEN, X), leaf)
    assert decoded.calls == DEPTH + 1
    assert same_bits(got, torch.autograd.grad(PLAIN(lora, BASE, X), leaf))


def test_without_a_gradient_weights_are_decoded_once(decoded):
    with torch.no_grad():
        assert same_bits(FREED(LORA, FROZEN, X), PLAIN(LORA, BASE, X))
    with torch.inference_mode():
        assert same_bits(FREED(LORA, FROZEN, X), PLAIN(LORA, BASE, X))
    assert (decoded.calls, decoded.most) == (2 * DEPTH, 1)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_peak_is_that_of_remat_and_one_decoded_block(gradient):
    def peak(loss, base):
        return fmp.memory.peak(GRADIENTS[gradient](loss), LORA, base, X)

    need = peak(LEAN, BASE)
    assert peak(FREED, FROZEN) <= need + 1.01 * DECODED
    assert peak(lambda lora, base, x: LEAN(lora, fmp.df11.decompress(base), x), FROZEN) >= DEPTH * DECODED
    assert fmp.memory.peak(GRADIENTS[gradient](FREED), LORA, FROZEN, X, fake=True) == peak(FREED, FROZEN)


def test_peak_as_the_allocators_see_it():
    """torch's allocator, and numpy's, in which weights are decoded."""
    gradient = fmp.grad(FREED)
    gradient(LORA, FROZEN, X)
    assert peak_bytes(lambda: gradient(LORA, FROZEN, X)) <= 1.02 * peak_bytes(lambda: fmp.grad(LEAN)(LORA, BASE, X))
    tracemalloc.start()
    gradient(LORA, FROZEN, X)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert DECODED <= most <= 3 * DECODED  # with Python's objects and what decoding itself needs


@pytest.mark.parametrize("name", ["nothing", "everything", "dots", "dots_with_no_batch_dims", "predicate", "names"])
def test_decoded_weights_are_never_kept(name, decoded):
    policies = {"predicate": lambda op, args: True, "names": fmp.saveable.only_names("sum")}
    saveable = policies.get(name) or getattr(fmp.saveable, name)

    def cast(weights, x, lora):
        wide = tree.map(torch.Tensor.float, weights)  # a cast is not kept either
        return torch.tanh(fmp.checkpoint_name(x @ wide["kernel"] + wide["bias"], "sum") + (x @ lora["down"]).sum())

    lean = fmp.df11.frozen(cast, saveable=saveable)
    x, lora = X.float(), tree.map(torch.Tensor.float, LORA[0])
    residuals = fmp.memory.saved_residuals(lean, FROZEN[0], x, lora)
    assert residuals.total_bytes < DECODED
    assert (residuals.total_bytes > 0) == (name != "nothing")
    got = fmp.grad(lambda lora: lean(FROZEN[0], x, lora).sum())(lora)
    assert same_bits(got, fmp.grad(lambda lora: cast(BASE[0], x, lora).sum())(lora))
    assert (decoded.most, decoded.live) == (1, 0)


def test_a_weight_that_is_kept_as_it_is():
    raw = fmp.df11.compress(BASE[:1], min_numel=1)
    assert raw[0]["bias"].is_raw  # compressed, it would be larger
    residuals = fmp.memory.saved_residuals(fmp.df11.frozen(block, fmp.saveable.everything), raw[0], X, LORA[0])
    assert "clone" not in [part.name for part in residuals]
    assert same_bits(fmp.grad(FREED)(LORA[:1], raw, X), fmp.grad(PLAIN)(LORA[:1], BASE[:1], X))


@pytest.mark.parametrize("around", [fmp.remat, lambda fn: lambda *args: checkpoint(fn, *args, use_reentrant=False)])
def test_checkpoints_around_frozen_blocks(around, decoded):
    def pair(weights, x, lora):
        return lean(weights[1], lean(weights[0], x, lora[0]), lora[1])

    lean = fmp.df11.frozen(block)

    def loss(lora, base, x):
        for start in range(0, DEPTH, 2):
            x = around(pair)(base[start : start + 2], x, lora[start : start + 2])
        return x.float().square().sum()

    assert same_bits(backward(loss)(LORA, FROZEN, X), backward(PLAIN)(LORA, BASE, X))
    assert (decoded.most, decoded.live) == (1, 0)


@pytest.mark.parametrize("segments", [3, "auto"])
def test_a_chain_of_frozen_blocks(segments, decoded):
    def loss(lora, base, x):
        blocks = [functools.partial(lean, weights, lora=adapter) for weights, adapter in zip(base, lora, strict=True)]
        return fmp.remat_sequential(blocks, segments)(x).float().square().sum()

    lean = fmp.df11.frozen(block)
    for gradient in (backward, fmp.grad):
        assert same_bits(gradient(loss)(LORA, FROZEN, X), gradient(PLAIN)(LORA, BASE, X))
    assert (decoded.most, decoded.live) == (1, 0)


def test_a_frozen_block_inside_of_a_frozen_block(decoded):
    inner = fmp.df11.frozen(block)

    def outer(wrap):
        return wrap(lambda weights, x, lora: inner(weights[1], inner(weights[0], x, lora), lora))

    def loss(wrap):
        return lambda lora, base: outer(wrap)(base[:2], X, lora).float().square().sum()

    for gradient in (fmp.grad, grad):
        got = gradient(loss(fmp.df11.frozen))(LORA[0], FROZEN)
        assert same_bits(got, gradient(loss(lambda fn: fn))(LORA[0], BASE))
    assert decoded.most == 2


def test_a_weight_in_two_places_is_decoded_once_a_call(decoded):
    def tied(weights, x, lora):
        return block(weights["second"], block(weights["first"], x, lora), lora)

    def gradient(wrap, weights):
        return fmp.grad(lambda lora: wrap(tied)({"first": weights, "second": weights}, X, lora).float().sum())(LORA[0])

    assert same_bits(gradient(fmp.df11.frozen, FROZEN[0]), gradient(lambda fn: fn, BASE[0]))
    assert (decoded.calls, decoded.most) == (2, 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler
@pytest.mark.parametrize("where", ["the loss", "inside of frozen", "outside of frozen"])
@pytest.mark.parametrize("saveable", [fmp.saveable.nothing, fmp.saveable.everything])
def test_compiled_weights_of_one_block_live_at_a_time(where, saveable, decoded):
    compiled = functools.partial(torch.compile, backend="aot_eager")
    frozen = functools.partial(fmp.df11.frozen, saveable=saveable)
    loss = {
        "the loss": lambda: compiled(loss_of(frozen(block))),
        "inside of frozen": lambda: loss_of(frozen(compiled(block))),
        "outside of frozen": lambda: loss_of(compiled(frozen(block))),
    }[where]()
    gradient = backward(loss)
    assert same_bits(gradient(LORA[:4], FROZEN[:4], X), backward(PLAIN)(LORA[:4], BASE[:4], X))
    decoded.calls = decoded.most = 0
    gradient(LORA[:4], FROZEN[:4], X)
    assert decoded.calls in (7, 8)  # the compiler may keep the last block's, which it needs at once
    assert (decoded.most, decoded.live) == (1, 0)
