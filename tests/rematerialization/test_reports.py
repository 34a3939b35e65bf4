"""What users have reported of checkpointing elsewhere, as small functions: remat does the right thing, or says no."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vmap

import fmp
from tests.bits import same_bits

X, W = torch.linspace(-1.0, 1.0, 4), torch.linspace(0.5, 2.0, 4)
HALF = fmp.opt_level("O1", half_dtype=torch.bfloat16)


def f(x, w):
    return torch.tanh(torch.tanh(x * w) * w).sum()


def test_per_sample_gradients():
    """pytorch#122729, #165880."""
    xs = torch.stack([X, X + 1, -X])
    got = vmap(grad(fmp.remat(f)), (0, None))(xs, W)
    assert same_bits(got, torch.stack([grad(f)(x, W) for x in xs]))


def test_offloading_keeps_an_outer_graph_connected():
    """functorch#1027."""

    def named(x, w):
        return f(fmp.checkpoint_name(torch.sin(x), "sine"), w)

    def outer(fn):
        w = W.clone().requires_grad_()
        return torch.autograd.grad(grad(fn)(X, w).square().sum(), w)

    lean = fmp.remat(named, saveable=fmp.saveable.offload_names("sine"))
    torch.testing.assert_close(outer(lean), outer(named))


@pytest.mark.parametrize("outer", [jacfwd, jacrev, grad])
@pytest.mark.parametrize("inner", [jacfwd, jacrev, grad])
def test_second_derivatives_are_not_zero(outer, inner):
    """pytorch#197867: forward over forward mode through an autograd.Function is zero."""
    assert outer(inner(fmp.remat(lambda x: x**4)))(torch.tensor(3.0)) == 108.0


def test_compiled_forward_mode():
    """pytorch#192985."""
    run = lambda x: jvp(lambda x: fmp.remat(f)(x, W), (x,), (W,))
    assert same_bits(torch.compile(run, backend="aot_eager", fullgraph=True)(X), run(X))


@pytest.mark.parametrize("transform", [grad, fmp.grad, lambda f: vmap(grad(f), (0, None))])
def test_compiled_gradients_in_one_graph(transform):
    """pytorch#118397, #129845."""
    x = torch.stack([X, -X])
    g = lambda x, w: transform(lambda x, w: fmp.remat(f)(x, w))(x, w)
    torch.testing.assert_close(torch.compile(g, backend="aot_eager", fullgraph=True)(x, W), transform(f)(x, W))


def test_a_compiled_function_keeps_the_recomputation():
    nodes = []

    def backend(module, inputs):
        nodes.extend(str(node.target) for node in module.graph.nodes)
        return module

    torch.compile(lambda x: fmp.remat(f)(x, W), backend=backend, fullgraph=True)(X.clone().requires_grad_())
    assert any("checkpoint" in node for node in nodes)


def test_a_compiled_block_is_compiled_once():
    """jax#9661."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    block = fmp.remat(torch.compile(f, backend=backend))
    for _ in range(5):
        x = X.clone().requires_grad_()
        got = torch.autograd.grad(block(x, W), x)[0]
    assert len(graphs) == 1
    assert same_bits(got, grad(f)(X, W))


def test_a_compiled_block_under_a_transform():
    block = torch.compile(f, backend="aot_eager")
    assert same_bits(grad(fmp.remat(block))(X, W), grad(f)(X, W))


def test_batch_norm_statistics_are_updated_once():
    """pytorch#96136, #62471; fairscale#1035."""
    model = fmp.functionalize(nn.BatchNorm1d(4))
    x = torch.stack([X, 2 * X, W])

    def loss(params, buffers):
        out, buffers = fmp.remat(model.apply)(params, buffers, x, train=True)
        return torch.sin(out).sum(), buffers

    for differentiate in (grad, fmp.grad):
        _, buffers = differentiate(loss, has_aux=True)(model.params, model.buffers)
        assert buffers["num_batches_tracked"] == 1
        torch.testing.assert_close(buffers["running_mean"], 0.1 * x.mean(0))
        assert model.buffers["num_batches_tracked"] == 0


def test_batch_norm_under_per_sample_gradients():
    """functorch#273, #986."""
    model = fmp.functionalize(nn.BatchNorm1d(4))
    xs = torch.stack([torch.stack([X, W]), torch.stack([W, 2 * X])])

    def run(wrap):
        def loss(params, buffers, x):
            out, buffers = wrap(model.apply)(params, buffers, x, train=True)
            return torch.sin(out).sum(), buffers

        buffers = {name: torch.stack([buffer, buffer]) for name, buffer in model.buffers.items()}
        return vmap(grad(loss, has_aux=True), (None, 0, 0))(model.params, buffers, xs)

    assert same_bits(run(fmp.remat), run(lambda fn: fn))


@pytest.mark.mixed_dtypes
def test_the_jacobian_of_a_norm_under_a_half_policy():
    """pytorch#184890."""
    torch.manual_seed(0)
    model = fmp.functionalize(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)))
    policy = fmp.opt_level("O1", half_dtype=torch.float16)

    def run(wrap):
        call = fmp.autocast(lambda params: wrap(model.apply)(params, {}, X[None])[0][0], policy)
        return jacrev(call)(model.params)

    got = run(fmp.remat)
    assert all(leaf.dtype == torch.float32 and leaf.isfinite().all() for leaf in got.values())
    torch.testing.assert_close(got, run(lambda fn: fn), rtol=5e-3, atol=5e-3)


@pytest.mark.mixed_dtypes
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize_is_jvp_under_a_policy():
    """pytorch#172383."""
    g = fmp.autocast(fmp.remat(lambda x: F.layer_norm(torch.outer(x, W) @ torch.outer(W, x), (4,))), HALF)
    assert same_bits(linearize(g, X)[1](W), jvp(g, (X,), (W,))[1])


@pytest.mark.mixed_dtypes
def test_vmap_under_a_policy_has_the_same_dtypes():
    """pytorch#105442."""
    torch.manual_seed(0)
    layer, xs = nn.Linear(768, 1), torch.randn(8, 768)
    g = fmp.autocast(fmp.remat(layer), fmp.Policy(None, torch.bfloat16, None, op_rules=fmp.OpRules.apex()))
    mapped, batched = vmap(g)(xs), g(xs)
    assert mapped.dtype == batched.dtype == torch.bfloat16
    torch.testing.assert_close(mapped, batched, rtol=2e-2, atol=2e-2)


@pytest.mark.mixed_dtypes
def test_a_pass_without_gradient_leaves_no_casts():
    """pytorch#158232, #65766."""
    w = torch.eye(4).requires_grad_()

    def both(x):
        with torch.no_grad():
            fmp.remat(lambda x: x @ w)(x)
        return fmp.remat(lambda x: x @ w)(x)

    fmp.autocast(both, HALF)(X[None]).sum().backward()
    assert w.grad is not None
    assert w.grad.abs().max() > 0


def test_autograd_through_functional_call_of_a_module_with_remat_inside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return fmp.remat(self.layer)(x).tanh().sum()

    net = Net()
    weights = {name: (param.detach() + 1).requires_grad_() for name, param in net.named_parameters()}
    got = torch.autograd.grad(functional_call(net, weights, (X,)), list(weights.values()))
    want = torch.autograd.grad(
        F.linear(X, weights["layer.weight"], weights["layer.bias"]).tanh().sum(), list(weights.values())
    )
    assert same_bits(list(got), list(want))


def test_a_transform_inside_of_the_function_under_plain_autograd():
    """torch.utils.checkpoint refuses these."""
    inner: Any = {"grad": lambda x: grad(f)(x, W), "vmap(grad)": lambda x: vmap(grad(f))(x[None], W[None])}
    for body in inner.values():
        lean = fmp.remat(lambda x, body=body: torch.sin(body(x) * torch.rand(4)))
        for _ in range(2):  # the second time it is known
            torch.manual_seed(1)
            x = X.clone().requires_grad_()
            got = torch.autograd.grad(lean(x).sum(), x)
            after = torch.rand(1)
            torch.manual_seed(1)
            want = torch.autograd.grad(torch.sin(body(x) * torch.rand(4)).sum(), x)
            torch.testing.assert_close(got, want)
            assert same_bits(torch.rand(1), after)


def test_side_effects_happen_in_both_passes():
    """jax#4663."""
    calls = []
    grad(fmp.remat(lambda x: (calls.append(1), torch.sin(x).sum())[1]))(X)
    assert len(calls) == 2


def test_batched_cotangents_by_autograd():
    x = X.clone().requires_grad_()
    y = fmp.remat(lambda x: torch.sin(x) * W)(x)
    rows = torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)[0]
    assert same_bits(rows, torch.diag(torch.cos(X) * W))
    assert same_bits(torch.autograd.functional.hessian(lambda x: fmp.remat(f)(x, W), X), _hessian())


def _hessian():
    return torch.autograd.functional.hessian(lambda x: f(x, W), X)


def test_higher_order_under_plain_autograd():
    def third(fn):
        x = X.clone().requires_grad_()
        y = fn(x, W)
        for _ in range(3):
            y = torch.autograd.grad(y, x, create_graph=True)[0].sum()
        return y.detach()

    assert same_bits(third(fmp.remat(f)), third(f))


def test_changes_to_the_result_after_the_call():
    g = lambda x: fmp.remat(lambda x: x.sin())(x).mul_(2).sum()
    assert torch.equal(grad(g)(X), 2 * X.cos())
    x = X.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(g(x), x)[0], 2 * X.cos())


def test_complex_numbers_and_no_differentiable_result():
    z = torch.complex(X, W)
    g = lambda z: (z * z).abs().sum()
    assert same_bits(torch.view_as_real(grad(fmp.remat(g))(z)), torch.view_as_real(grad(g)(z)))
    assert torch.equal(grad(lambda x: (fmp.remat(lambda x: x > 0)(x) * x).sum())(X), (X > 0).float())


def test_it_decorates_and_keeps_the_name():
    @fmp.remat(saveable=fmp.saveable.dots)
    def block(x):
        """Says what it does."""
        return torch.sin(x)

    assert (block.__name__, block.__doc__) == ("block", "Says what it does.")

    class Owner:
        scale = 2

        @fmp.remat
        def method(self, x):
            return torch.sin(x) * self.scale

    assert torch.equal(grad(lambda x: Owner().method(x).sum())(X), 2 * torch.cos(X))
