"""fmp.df11.frozen: right values and gradients against compressed weights."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import fmp
from fmp import tree
from tests.bits import differing, same_bits
from tests.df11.frozen_blocks import (
    BASE,
    FREED,
    FROZEN,
    LORA,
    PLAIN,
    WIDTH,
    X,
    backward,
    block,
    loss_of,
)


def lora_module(blocks: Any, wrap: Any) -> nn.Module:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.downs = nn.ParameterList([lora["down"].clone() for lora in LORA[:3]])
            self.ups = nn.ParameterList([lora["up"].clone() for lora in LORA[:3]])

        def forward(self, x):
            for weights, down, up in zip(blocks, self.downs, self.ups, strict=True):
                x = wrap(block)(weights, x, {"down": down, "up": up})
            return x

    return Adapted()


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "autograd": lambda loss, base: backward(loss)(LORA[:3], base, X),
    "torch.func.grad": lambda loss, base: grad(loss, (0, 2))(LORA[:3], base, X),
    "by sample": lambda loss, base: vmap(grad(loss), (None, None, 0))(LORA[:3], base, X[:, None]),
    "an ensemble of adapters": lambda loss, base: vmap(grad(loss), (0, None, None))(
        tree.map(lambda leaf: torch.stack([leaf, 2 * leaf]), LORA[:3]), base, X
    ),
    "forward mode": lambda loss, base: jvp(lambda lora: loss(lora, base, X), (LORA[:3],), (LORA[1:4],)),
    "Hessian-vector product": lambda loss, base: jvp(grad(lambda x: loss(LORA[:3], base, x)), (X,), (X.flip(0),)),
}


@pytest.mark.parametrize("way", WAYS)
def test_three_blocks_and_their_adapters(way):
    """A runtime that decodes into one buffer is wrong here without an error, as soon as two blocks are live."""
    assert same_bits(WAYS[way](FREED, FROZEN[:3]), WAYS[way](PLAIN, BASE[:3]))


def test_functional_call_of_a_module_with_frozen_blocks():
    def gradient(module):
        params = dict(module.named_parameters())
        return grad(lambda params: functional_call(module, params, (X,)).float().square().sum())(params)

    want = gradient(lora_module(BASE[:3], lambda fn: fn))
    assert same_bits(gradient(lora_module(FROZEN[:3], fmp.df11.frozen)), want)


def test_several_backward_passes_and_two_graphs_at_once(decoded):
    lora = tree.map(lambda leaf: leaf.clone().requires_grad_(), LORA)
    leaves = tree.leaves(lora)
    first, second = FREED(lora, FROZEN, X), FREED(lora, FROZEN, 2 * X)
    want = [torch.autograd.grad(PLAIN(lora, BASE, x), leaves) for x in (X, 2 * X)]
    for _ in range(2):
        assert same_bits(torch.autograd.grad(first, leaves, retain_graph=True), want[0])
        assert same_bits(torch.autograd.grad(second, leaves, retain_graph=True), want[1])
    assert (decoded.most, decoded.live) == (1, 0)


def test_gradients_of_what_is_not_compressed():
    def gradient(loss, base):
        biases = [weights["bias"] for weights in base]
        kernels = [weights["kernel"] for weights in base]

        def of_rest(biases, x):
            pairs = zip(kernels, biases, strict=True)
            return loss(LORA, [{"kernel": kernel, "bias": bias} for kernel, bias in pairs], x)

        return fmp.grad(of_rest, (0, 1))(biases, X)

    assert same_bits(gradient(FREED, FROZEN), gradient(PLAIN, BASE))


def test_weights_without_nodes_are_differentiated():
    got, want = [fmp.grad(loss, (0, 1))(LORA, BASE, X) for loss in (FREED, PLAIN)]
    assert same_bits(got, want)


def test_nodes_anywhere_in_the_arguments():
    @fmp.df11.frozen(saveable=fmp.saveable.dots)
    def call(x, /, *rest, weights, **more):
        """Says what it does."""
        return block({"kernel": rest[0][0], "bias": more["bias"]}, x, LORA[0]) @ weights["kernel"]

    args = FROZEN[0]["kernel"], FROZEN[1]
    got = call(X, [args[0], "text"], weights=args[1], bias=BASE[0]["bias"])
    assert same_bits(got, block(BASE[0], X, LORA[0]) @ BASE[1]["kernel"])
    assert (call.__name__, call.__doc__) == ("call", "Says what it does.")


def test_a_partial_is_decoded_and_a_closure_is_not():
    lean = fmp.df11.frozen(functools.partial(block, FROZEN[0], lora=LORA[1]))
    assert same_bits(lean(X, lora=LORA[0]), block(BASE[0], X, LORA[0]))
    seen = fmp.df11.frozen(lambda x: type(FROZEN[0]["kernel"]))(X)
    assert seen is fmp.df11.CompressedTensor


def test_a_module_that_takes_weights():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.bfloat16))

        def forward(self, kernel, x):
            return torch.tanh(x @ kernel) * self.scale

    module = Scaled()
    wants, gots = [
        torch.autograd.grad(call(kernel, X).float().sum(), list(module.parameters()))
        for call, kernel in ((module, BASE[0]["kernel"]), (fmp.df11.frozen(module), FROZEN[0]["kernel"]))
    ]
    assert same_bits(gots, wants)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_by_a_module_without_weights_of_its_own(device, decoded):
    def layer():
        return nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True).bfloat16()

    def loss(apply, layers, x):
        for weights in layers:
            x = apply(weights, x)
        return x.float().square().sum() + x.float().sin().sum()

    layers = [{name: param.detach() for name, param in layer().named_parameters()} for _ in range(3)]
    with torch.device(device):
        skeleton = layer()

    def apply(weights, x):
        return functional_call(skeleton, weights, (x,))

    x = torch.randn(2, 3, 64).bfloat16()
    for gradient in (fmp.grad, grad):
        decoded.most = 0
        got = gradient(functools.partial(loss, fmp.df11.frozen(apply), fmp.df11.compress(layers)))(x)
        assert same_bits(got, gradient(functools.partial(loss, apply, layers))(x))
        assert (decoded.most, decoded.live) == (4, 0)  # a layer has four large weights


def test_a_functional_model_with_a_seed():
    model = fmp.functionalize(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.BatchNorm1d(WIDTH)).bfloat16())

    def loss(apply, params):
        def of_input(x):
            out, buffers = apply(params, model.buffers, x, seed=5, train=True)
            return out.float().sin().sum(), buffers

        return of_input

    params = fmp.df11.compress(model.params)
    got = fmp.value_and_grad(loss(fmp.df11.frozen(model.apply), params), has_aux=True)(X)
    assert same_bits(got, fmp.value_and_grad(loss(model.apply, model.params), has_aux=True)(X))


def test_a_function_may_change_its_decoded_weights():
    def doubling(weights, x, lora):
        weights["kernel"].mul_(2)
        return block(weights, x, lora)

    want = fmp.grad(lambda lora: block({**BASE[0], "kernel": BASE[0]["kernel"] * 2}, X, lora).float().sum())(LORA[0])
    for gradient in (fmp.grad, grad):
        got = gradient(lambda lora: fmp.df11.frozen(doubling)(FROZEN[0], X, lora).float().sum())(LORA[0])
        assert same_bits(got, want)


def test_bitwise_determinism_is_checked():
    lean = fmp.df11.frozen(block, determinism_check="bitwise", debug=True)
    assert same_bits(fmp.grad(loss_of(lean))(LORA, FROZEN, X), fmp.grad(PLAIN)(LORA, BASE, X))
    state = types.SimpleNamespace(scale=1.0)
    unstable = fmp.df11.frozen(lambda weights, x: state.scale * (x @ weights["kernel"]), determinism_check="bitwise")
    x = X.clone().requires_grad_()
    y = unstable(FROZEN[0], x).sum()
    state.scale = 2.0
    with pytest.raises(fmp.errors.RematError, match="when it was recomputed"):
        y.backward()


POLICIES = {
    "none": None,
    "O1": fmp.opt_level("O1", half_dtype=torch.bfloat16),
    "O2": fmp.opt_level("O2", half_dtype=torch.bfloat16),
}


@pytest.mark.mixed_dtypes
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler
@pytest.mark.parametrize(("policy", "compile"), [*[(policy, False) for policy in POLICIES], ("O2", True)])
def test_in_a_train_step(policy, compile, monkeypatch):
    if compile:
        real = torch.compile
        monkeypatch.setattr(torch, "compile", lambda fn, **options: real(fn, **{**options, "backend": "aot_eager"}))

    def curve(block, base):
        def loss(lora, batch, *, frozen):
            return loss_of(block)(lora, frozen, batch) / X.numel()

        step = fmp.train_step(loss, fmp.optim.adam(1e-2), policy=POLICIES[policy], compile=compile)
        params = LORA[:3] if policy == "none" else tree.map(torch.Tensor.float, LORA[:3])
        state, losses = step.init(params), []
        for _ in range(4):
            state, metrics = step(state, X if policy != "O1" else X.float(), frozen=base)
            losses.append(metrics.loss)
        return losses, state.params

    want, got = curve(block, BASE[:3]), curve(fmp.df11.frozen(block), FROZEN[:3])
    assert same_bits(got, want)
    assert want[0][-1] < want[0][0]


def test_what_cannot_be_transformed_is_refused():
    with pytest.raises(TypeError, match="frozen transforms a function, got 3"):
        fmp.df11.frozen(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="call it with names"):
        fmp.df11.frozen(block, saveable=fmp.saveable.only_names)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="determinism_check must be one of"):
        fmp.df11.frozen(block, determinism_check="exact")  # pyright: ignore[reportArgumentType]


def test_damaged_and_mapped_nodes_are_refused():
    node = FROZEN[0]["kernel"]
    damaged = {**FROZEN[0], "kernel": tree.replace(node, stream=node.stream[:-8])}
    with pytest.raises(ValueError, match="the compressed numbers are corrupt"):
        FREED(LORA[:1], [damaged], X)
    stacked = tree.map(lambda leaf: torch.stack([leaf, leaf]), FROZEN[:1])
    with pytest.raises(ValueError, match="cannot be mapped over by vmap; use in_dims=None"):
        vmap(fmp.grad(FREED), (None, 0, None))(LORA[:1], stacked, X)


def test_the_compressed_weights_stay_as_they_are():
    before = tree.map(torch.clone, FROZEN)
    fmp.grad(FREED)(LORA, FROZEN, X)
    assert differing(before, FROZEN) == set()
