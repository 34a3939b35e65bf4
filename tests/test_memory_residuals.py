"""What is kept for a gradient: lists written by hand, and the memory that goes when the graph goes."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import fmp
from fmp import _compat
from fmp.memory import Residuals, saved_residuals
from tests.versions import BEFORE_2_13

X, W = torch.randn(8, 4), torch.randn(4, 4)


def block(x, w):
    return torch.tanh(fmp.checkpoint_name(torch.tanh(x @ w) @ w, "scores"))


def told(residuals: Residuals) -> list[tuple[Any, ...]]:
    return [(residual.name, residual.nbytes, residual.is_argument) for residual in residuals]


ARGUMENTS = [("args/0", 128, True), ("args/1", 64, True)]


def test_a_chain():
    residuals = saved_residuals(block, X, W)
    assert told(residuals) == [("tanh", 128, False), ("tanh", 128, False), *ARGUMENTS]
    assert [set(residual.saved_by) for residual in residuals] == [
        {"TanhBackward0", "MmBackward0"},
        {"TanhBackward0"},
        {"MmBackward0"},
        {"MmBackward0"},
    ]
    assert residuals.total_bytes == 256
    assert residuals[0].shape == (8, 4)
    assert residuals[0].dtype == torch.float32
    assert residuals[0].line.startswith("test_memory_residuals.py:")
    assert residuals[0].line.endswith("in block")


@pytest.mark.parametrize(
    ("saveable", "kept"),
    [
        (fmp.saveable.nothing, []),
        (fmp.saveable.dots, [("mm", 128, False), ("scores: mm", 128, False)]),
        (fmp.saveable.only_names("scores"), [("scores: mm", 128, False)]),
        (fmp.saveable.only_names("other"), []),
        (fmp.saveable.any_except_names("other"), [("scores: mm", 128, False)]),
        (lambda op, args: op is torch.ops.aten.tanh.default, [("tanh", 128, False)] * 2),
        (fmp.saveable.everything, [("tanh", 128, False)] * 2),
    ],
)
def test_remat_keeps_its_operands_and_what_the_policy_says(saveable, kept):
    residuals = saved_residuals(fmp.remat(block, saveable=saveable), X, W)
    assert told(residuals) == [*kept, *ARGUMENTS]
    assert told(saved_residuals(fmp.remat(block, saveable=saveable), X, W, fake=True)) == [*kept, *ARGUMENTS]


def test_blocks_keep_what_passes_between_them():
    lean = fmp.remat(block)
    residuals = saved_residuals(lambda x, w: lean(lean(lean(x, w), w), w), X, W)
    assert told(residuals) == [("tanh", 128, False)] * 2 + ARGUMENTS

    chained = saved_residuals(
        lambda x, w: checkpoint(block, checkpoint(block, x, w, use_reentrant=False), w, use_reentrant=False), X, W
    )
    assert told(chained) == [("tanh", 128, False), *ARGUMENTS]


def test_bytes_are_those_that_go_with_the_graph():
    for saveable in (fmp.saveable.nothing, fmp.saveable.dots, fmp.saveable.everything):
        lean = fmp.remat(block, saveable=saveable, preserve_rng_state=False)
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()

        def forward():
            out = lean(lean(x, w), w)
            graph = out.grad_fn
            del out
            gc.collect()
            return graph, torch.empty(10_000)  # makes the end of the call its peak

        assert fmp.memory.peak(forward) - 40_000 == saved_residuals(lambda x, w: lean(lean(x, w), w), X, W).total_bytes


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    made[2].weight = made[0].weight
    return made


def test_a_module_whose_weight_is_used_twice():
    expected = [("addmm", 128, False), ("gelu", 128, False), ("args/0", 128, True), ("fn/0/weight", 64, True)]
    net = model()
    assert told(saved_residuals(net, X)) == expected
    assert told(saved_residuals(net.forward, X)) == expected
    assert told(saved_residuals(net, X, fake=True)) == expected
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in net.parameters())
    given = saved_residuals(lambda m, x: m(x), net, x=X)
    assert [residual.name for residual in given if residual.is_argument] == ["args/0/0/weight", "kwargs/x"]
    lean = saved_residuals(fmp.remat(net), X)
    names = ["args/0", "fn/0/weight", "fn/0/bias", "fn/2/bias"]
    assert [residual.name for residual in lean] == names
    assert lean.total_bytes == 0


def test_what_needs_no_gradient_is_closed_over_or_frozen():
    net = model()
    residuals = saved_residuals(lambda: net[0](X))
    assert told(residuals) == [("closed over", 128, True)]  # no gradient of x, so no weight
    net.requires_grad_(False)
    assert saved_residuals(lambda: net(X)) == ()
    assert told(saved_residuals(net[0], X)) == [("fn/weight", 64, True)]


@pytest.mark.parametrize("fn", [lambda x: None, lambda x: (x > 0, 3), lambda x: x.detach() * 2, lambda x: x + 1, dict])
def test_nothing_is_kept(fn):
    args = () if fn is dict else (X,)
    assert saved_residuals(fn, *args) == ()
    assert saved_residuals(fn, *args).total_bytes == 0


def test_a_branch_that_is_dropped_keeps_nothing():
    def branches(x):
        x.exp().sin()
        return x.tanh()

    assert told(saved_residuals(branches, X)) == [("tanh", 128, False)]


def test_a_part_keeps_all_of_its_storage():
    def part(x):
        return torch.relu_(torch.sin(x)).cumsum(0)[:2].square()

    residuals = saved_residuals(part, X)
    assert told(residuals) == [("relu_", 128, False), ("cumsum", 128, False), ("args/0", 128, True)]


@pytest.mark.skipif(BEFORE_2_13, reason="torch before 2.13 does not keep a Function's node alive for Python")
def test_what_a_function_holds_on_to_by_itself():
    cache = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.held = x + 1
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            return cotangents[0] * ctx.held

    def call(x):
        cache.append(x.detach() * 3)  # this goes on living without the graph
        return Doubled.apply(x)

    residuals = saved_residuals(call, X)
    assert told(residuals) == [("add", 128, False), ("args/0", 128, True)]
    assert residuals[0].saved_by == ()
    assert residuals[1].saved_by == ("DoubledBackward",)


def test_a_higher_order_op():
    right = torch.tensor(True)

    def chosen(x):
        return torch.cond(right, lambda x: x.sin(), lambda x: x.cos(), (x,)).exp()

    assert told(saved_residuals(chosen, X)) == [("exp", 128, False), ("args/0", 128, True)]


@pytest.mark.parametrize("block", [block, fmp.remat(block)])
def test_a_transform_inside(block):
    def inner(w):
        return vmap(grad(lambda x: block(x[None], w).sum()))(X)

    residuals = saved_residuals(inner, W)
    assert [residual.name for residual in residuals if residual.is_argument and residual.saved_by]
    lean = block.__name__ == "block" and hasattr(block, "__wrapped__")
    assert (residuals.total_bytes < 128) == lean


def test_within_a_transform_it_is_refused():
    with pytest.raises(RuntimeError, match="call it outside"):
        grad(lambda x: saved_residuals(torch.tanh, x) and x.sum())(X)


def test_a_derivative_inside():
    def penalty(x):
        (slope,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        return (slope * slope).sum()

    residuals = saved_residuals(penalty, X)
    plain = X.clone().requires_grad_()
    penalty(plain).backward()
    assert torch.allclose(plain.grad, 2 * (2 * X).exp()) if plain.grad is not None else False
    assert ("exp", 128, False) in told(residuals)


def test_an_error_inside_leaves_nothing_on():
    def fails(x):
        raise RuntimeError("mine")

    for fake in (False, True):
        with pytest.raises(RuntimeError, match="mine"):
            saved_residuals(fails, X, fake=fake)
        assert _compat.dispatch_modes() == []
        assert torch.tanh(X.clone().requires_grad_()).grad_fn is not None
    x = X.clone().requires_grad_()
    node: Any = x.exp().grad_fn
    assert isinstance(node._raw_saved_result.data, torch.Tensor)  # no hook is on


def test_what_surrounds_the_call_and_what_it_changes():
    x, integers = X.clone(), torch.arange(8)
    with torch.no_grad():
        residuals = saved_residuals(lambda x, at: x[at].square(), x, integers)
        assert not torch.is_grad_enabled()
    assert told(residuals) == [("index", 128, False), ("args/1", 64, True)]
    assert not x.requires_grad
    outer = X.clone().requires_grad_()
    before = outer.exp()
    assert told(saved_residuals(lambda y: y.sin(), before)) == [("args/0", 128, True)]
    assert told(saved_residuals(lambda: before.sin())) == [("closed over", 128, True)]


def test_the_same_tensor_twice_and_trees():
    residuals = saved_residuals(lambda tree: tree["a"] * tree["b"][0], {"a": X, "b": [X]})
    assert told(residuals) == [("args/0/a", 128, True)]
    assert saved_residuals(lambda tree: tree, {}) == ()


def test_the_table():
    def wide(x, w):
        return torch.tanh(torch.cat([x @ w] * 100))

    table = str(saved_residuals(wide, X, W))
    head, first, *arguments, total = table.splitlines()
    assert head.split() == ["bytes", "value", "kept", "by", "computed", "in"]
    assert first.split()[:5] == ["12,800", "tanh", "->", "f32[800,4]", "TanhBackward0"]
    assert [line.split()[:2] for line in arguments] == [["argument", "args/0"], ["argument", "args/1"]]
    assert total.split() == ["12,800", "in", "all"]
    assert str(saved_residuals(lambda: None)).splitlines()[-1].split() == ["0", "in", "all"]


def test_compiled_functions_count_as_if_they_were_not():
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    compiled(X, W)
    residuals = saved_residuals(compiled, X, W)
    assert residuals.total_bytes == saved_residuals(block, X, W).total_bytes


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside of torch"):
        fmp.memory.saved_residuals(torch.sin, torch.ones(2))
