"""remat_sequential: the chain itself, with its values and gradients, and the peak that it predicts."""

import functools
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

import fmp
from fmp import tree
from fmp.dropout import SeededRandomness
from fmp.rematerialization.segments import Segment
from fmp.rematerialization.sequential import ChainPlan
from tests.bits import differing
from tests.rematerialization.cases import HALF, POLICIES, TRANSFORMS

SPLITS: list[Any] = [1, 2, 4, [1, 2, 1], "auto"]


def in_turn(fns: Any, segments: Any = None, **options: Any) -> Any:
    def chain(*args: Any) -> Any:
        value = args
        for fn in fns:
            value = (fn(*value),)
        return value[0]

    return chain


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(torch.outer(w, w) @ x) * x)


def blocks(w: torch.Tensor) -> list[Any]:
    """Four functions with a row of parameters each, so that no gradients are summed in another order."""
    rows = list(w)

    def wide(x):
        return torch.cat([torch.tanh(x * rows[1]), torch.sin(x)])

    def narrow(x):
        return torch.tanh(x[:4] * x[4:] * rows[2])

    return [functools.partial(block, w=rows[0]), wide, narrow, lambda x: F.linear(x, rows[3][None]).cos()]


def value_of(sequential: Any, segments: Any, fns: Any = blocks, **options: Any) -> Any:
    return lambda x, w: sequential(fns(w), segments, **options)(x).sum()


def same(transform: str, segments: Any, fns: Any = blocks, **options: Any) -> None:
    results = []
    for sequential in (in_turn, fmp.remat_sequential):
        torch.manual_seed(7)
        result = TRANSFORMS[transform](value_of(sequential, segments, fns, **options))
        results.append((result, torch.rand(1)))
    assert tree.structure(results[0]) == tree.structure(results[1])
    if transform in ("grad(vmap)", "grad(grad)"):  # sums are formed in another order
        for want, got in zip(tree.leaves(results[0]), tree.leaves(results[1]), strict=True):
            torch.testing.assert_close(want, got, rtol=2e-6, atol=2e-6)
    else:
        assert differing(*results) == set()


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch.func.linearize itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("segments", SPLITS, ids=str)
def test_same_results_with_and_without_remat(transform, segments):
    same(transform, segments)


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "autograd.grad", "backward"])
@pytest.mark.parametrize("segments", SPLITS, ids=str)
def test_dropout_draws_the_same(transform, segments):
    same(transform, segments, lambda w: [part for fn in blocks(w) for part in (fn, F.dropout)][:4])


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "autograd.grad"])
def test_seeded_dropout_goes_on_as_if_nothing_had_been_measured(transform):
    def seeded(sequential, segments, **options):
        def chain(x, w):
            with SeededRandomness(3):
                return (sequential([blocks(w)[0], F.dropout, torch.sin, F.dropout], segments)(x) * F.dropout(x)).sum()

        return chain

    results = [
        TRANSFORMS[transform](seeded(in_turn, None)),
        TRANSFORMS[transform](seeded(fmp.remat_sequential, "auto")),
    ]
    for want, got in zip(*map(tree.leaves, results), strict=True):
        torch.testing.assert_close(want, got, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("transform", ["grad", "autograd.grad"])
@pytest.mark.parametrize("saveable", POLICIES)
def test_policies(transform, saveable):
    same(transform, 3, saveable=POLICIES[saveable])


def test_a_block_that_is_rematerialized_itself():
    same("grad", "auto", lambda w: [fmp.remat(fn) for fn in blocks(w)])
    same("autograd.grad", "auto", lambda w: [fmp.remat(fn) for fn in blocks(w)])


@pytest.mark.parametrize("segments", [2, "auto"])
@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "autograd.grad"])
def test_a_chain_inside_of_remat(transform, segments):
    def nested(fns, segments, **options):
        return fmp.remat(fmp.remat_sequential(fns, segments))

    want = TRANSFORMS[transform](value_of(in_turn, None))
    assert differing(want, TRANSFORMS[transform](value_of(nested, segments))) == set()


def modules(*layers: nn.Module) -> tuple[nn.Sequential, torch.Tensor]:
    return nn.Sequential(*layers), torch.randn(6, 8)


@pytest.mark.parametrize("segments", [1, [2, 2, 1], "auto"])  # not cut before the activation that works in place
def test_parameters_of_modules(segments: Any):
    class Lean(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return fmp.remat_sequential(self.model, segments)(x)

    model, x = modules(nn.Linear(8, 64), nn.ReLU(inplace=True), nn.Linear(64, 2), nn.GELU(), nn.Linear(2, 3))
    lean = Lean(model)
    want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert differing(want, torch.autograd.grad(lean(x).sum(), list(model.parameters()))) == set()
    params = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}

    def loss(params):
        return torch.func.functional_call(lean, params, (x,)).sum()

    assert differing(want, tuple(grad(loss)(params).values())) == set()


def test_a_first_function_of_several_arguments_and_trees_in_between():
    fns = [lambda x, index: {"x": x[index], "index": index}, lambda v: (v["x"].sin(), v["index"]), lambda v: v[0] * 2]
    x, index = torch.randn(4), torch.tensor([3, 0])
    want = grad(lambda x: in_turn(fns)(x, index).sum())(x)
    splits: list[Any] = [3, "auto"]
    for segments in splits:
        assert differing(want, grad(lambda x: fmp.remat_sequential(fns, segments)(x, index).sum())(x)) == set()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.large = x.exp().cos()  # not saved for the backward pass by the book
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.large


# With chains of which the first function, or the one that is not cut off from the one before it, is special.
ODD: dict[str, tuple[Any, ...]] = {
    "identity": (lambda x: x, torch.sin, torch.cos),
    "views": (lambda x: x.flatten(), torch.sin, lambda x: x.view(8, -1), lambda x: x.expand(2, 8, 8), torch.cos),
    "in place": (torch.sin, lambda x: x.relu_(), torch.cos, lambda x: x.mul_(2).add_(1)),
    "values": (torch.sin, lambda x: x * float(x.detach().numpy().sum()), torch.cos),
    "sparse": (torch.sin, lambda x: x.to_sparse().to_dense(), torch.cos),
    "no gradient": (torch.sin, lambda x: x.detach() > 0, lambda mask: mask.float(), lambda x: x + 1),
    "custom function": (torch.sin, Doubled.apply, torch.sin, Doubled.apply, torch.sin),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_functions(case):
    x = torch.randn(8, 8, requires_grad=True)
    chain = fmp.remat_sequential(ODD[case], "auto")
    results = [fns(x) for fns in (in_turn(ODD[case]), chain)]
    assert differing(*results) == set()
    if results[0].requires_grad:
        assert differing(*[torch.autograd.grad(result.sum(), x) for result in results]) == set()


def test_a_compiled_function():
    x = torch.randn(8, requires_grad=True)
    chain = fmp.remat_sequential([torch.compile(torch.sin, backend="eager"), torch.tanh, torch.cos], "auto")
    want = torch.autograd.grad(in_turn([torch.sin, torch.tanh, torch.cos])(x).sum(), x)
    assert differing(want, torch.autograd.grad(chain(x).sum(), x)) == set()


def test_an_error_of_a_function_is_its_own():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        fmp.remat_sequential([torch.sin, lambda x: x @ torch.ones(7, 7)], "auto")(torch.ones(3, 3))


# What is measured, and what is not done to measure it.


def test_measured_once_for_each_shape():
    calls = 0

    def noting(x):
        nonlocal calls
        calls += 1
        return x.sin()

    chain = fmp.remat_sequential([noting, torch.cos], "auto")
    x = torch.randn(3, requires_grad=True)
    first = chain(x)
    measured = calls - 1
    assert measured > 0
    chain(x)
    assert calls == measured + 2
    assert chain.plan(x) is chain.plan(x)
    chain(torch.randn(4, requires_grad=True))
    assert calls == 2 * measured + 3
    with torch.no_grad():
        assert torch.equal(chain(x), first)
    assert calls == 2 * measured + 4


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "autograd.grad", "compile"])
def test_a_plan_is_used_without_measuring(transform, monkeypatch):
    plan = fmp.remat_sequential(blocks(torch.randn(4, 4)), "auto").plan(torch.randn(4))
    assert plan.peak_bytes is not None
    monkeypatch.setattr("fmp.rematerialization.sequential.measure", None)
    same(transform, plan)
    assert fmp.remat_sequential(blocks(torch.randn(4, 4)), plan).plan(torch.randn(4)) is plan
    with pytest.raises(ValueError, match="plan of a chain of 4 functions, and there are 2"):
        fmp.remat_sequential([torch.sin, torch.cos], plan)


def test_measured_again_when_a_layer_thaws():
    model, x = modules(nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 64), nn.Tanh())
    chain = fmp.remat_sequential(model, "auto")
    peaks: list[Any] = []
    for frozen in (True, False):
        model[:2].requires_grad_(not frozen)
        peaks.append(chain.plan(x).peak_bytes)
    assert peaks[0] < peaks[1]


def test_measuring_changes_nothing():
    model, x = modules(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8).eval())
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    fmp.remat_sequential(model, "auto").plan(x)
    assert torch.equal(torch.get_rng_state(), generator)
    assert differing(before, dict(model.state_dict())) == set()
    assert all(type(value) is nn.Parameter for value in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert seen == []
    model(x)
    assert seen == [1]


def test_the_modes_and_casts_around_are_part_of_the_measurement():
    layers, x = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(512, 8)
    chain = fmp.remat_sequential(layers, "auto")
    full: Any = chain.plan(x).peak_bytes
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half: Any = chain.plan(x).peak_bytes
    assert half < full
    low: Any = fmp.autocast(chain.plan, HALF)(x).peak_bytes
    assert low < full


def test_a_function_that_looks_at_values():
    def positive(x):
        return x[x > 0]

    fns, x = [torch.sin, positive, torch.tanh], torch.linspace(-1, 1, 8)
    chain = fmp.remat_sequential(fns, "auto")
    with pytest.raises(fmp.RematError, match=r"without values.*give the segments"):
        grad(lambda x: chain(x).sum())(x)
    x.requires_grad_()
    want = torch.autograd.grad(in_turn(fns)(x).sum(), x)
    assert differing(want, torch.autograd.grad(chain(x).sum(), x)) == set()


@pytest.mark.parametrize("segments", [3, "auto"])
def test_batch_norm_in_training_is_refused(segments: Any):
    model, x = modules(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    with pytest.raises(fmp.RematError, match=r"in place.*fmp.functionalize"):
        fmp.remat_sequential(model, segments)(x)


# What is refused, and what is shown.


def test_the_plan_is_shown():
    given = fmp.remat_sequential([torch.sin] * 4, [2, 1, 1]).plan(torch.ones(2))
    assert str(given) == "0:2 recomputed\n2:3 recomputed\n3:4 kept"
    assert fmp.remat_sequential([torch.sin] * 4, cast(Any, np.int64(2))).plan(torch.ones(2)).segments[0].stop == 2
    chain = fmp.remat_sequential([torch.sin] * 4, "auto", memory_budget=1000)
    assert str(chain.plan(torch.ones(2, requires_grad=True))).splitlines()[0] == "0:4 kept"


@pytest.mark.parametrize(
    ("fns", "segments", "options", "error", "message"),
    [
        ([torch.sin], 0, {}, ValueError, "segments must be from 1 to 1, the number of functions, got 0"),
        ([torch.sin], 2, {}, ValueError, "from 1 to 1"),
        ([torch.sin], True, {}, TypeError, "got True"),
        ([torch.sin], "best", {}, TypeError, 'segments must be a number, "auto"'),
        ([torch.sin], 1.0, {}, TypeError, "segments must be"),
        ([torch.sin] * 3, [1, 1], {}, ValueError, r"3 in all, got \[1, 1\]"),
        ([torch.sin] * 3, [3, 0], {}, ValueError, "positive"),
        ([], 1, {}, ValueError, "fns is empty"),
        (nn.Sequential(), "auto", {}, ValueError, "fns is empty"),
        ([torch.sin, 3], 1, {}, TypeError, r"fns\[1\] must be a function, got 3"),
        (torch.sin, 1, {}, TypeError, "fns must be a sequence"),
        ([torch.sin], ChainPlan((Segment(0, 1, False),)), {"memory_budget": 1}, ValueError, 'needs segments="auto"'),
        ([torch.sin], 1, {"memory_budget": 10}, ValueError, 'memory_budget needs segments="auto"'),
        ([torch.sin], "auto", {"memory_budget": "1"}, TypeError, "memory_budget must be a number of bytes, got '1'"),
        ([torch.sin], "auto", {"memory_budget": float("nan")}, ValueError, "got nan"),
        ([torch.sin] * 3, ChainPlan((Segment(0, 1, True), Segment(2, 3, False))), {}, ValueError, "without a gap"),
        ([torch.sin] * 3, ChainPlan(()), {}, ValueError, "of a chain of 0 functions"),
        ([torch.sin], 1, {"saveable": 3}, TypeError, "saveable must be"),
        ([torch.sin], 1, {"determinism_check": "all"}, ValueError, "determinism_check must be"),
    ],
)
def test_refusals(fns, segments, options, error, message):
    with pytest.raises(error, match=message):
        fmp.remat_sequential(fns, segments, **options)


def test_a_sequential_with_a_forward_of_its_own_is_refused():
    class Residual(nn.Sequential):
        def forward(self, input):
            return input + super().forward(input)

    with pytest.raises(TypeError, match="Residual with a forward method of its own"):
        fmp.remat_sequential(Residual(nn.Tanh()), 1)


def test_keyword_arguments_are_refused():
    chain: Any = fmp.remat_sequential([torch.sin], 1)
    with pytest.raises(TypeError, match="keyword argument 'x'"):
        chain(x=torch.ones(2))
