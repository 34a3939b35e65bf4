"""remat and torch.compile: either inside of the other, and what the compiled backward pass computes again."""

import dataclasses
import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.func import grad, hessian, jvp, vmap

import fmp
from fmp import tree
from fmp.step.build import compiled_advance
from tests.bits import differing, same_bits
from tests.rematerialization.cases import CASES, HALF, W, X, block

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler
COMPILED = [name for name in CASES if name not in ("BatchNorm", "aux outputs")]  # these check identities inside


def without_remat(fn: Any, **options: Any) -> Any:
    return fn


def by_autograd(fn: Any, *arguments: torch.Tensor) -> Any:
    leaves = [leaf.clone().requires_grad_() for leaf in arguments or (X, W)]
    return torch.autograd.grad(fn(*leaves), leaves)


def compiled(fn: Any, backend: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(fn, backend=backend, fullgraph=True, **options)


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", COMPILED)
def test_one_graph_with_the_gradients_of_the_function(case, backend):
    def run(wrap, convert):
        torch.manual_seed(3)
        return by_autograd(convert(CASES[case](wrap)))

    convert = functools.partial(compiled, backend=backend)
    assert differing(run(without_remat, convert), run(fmp.remat, convert)) == set()


@pytest.mark.parametrize("case", ["nested", "saveable.only_names"])
def test_inductor(case):
    got, want = by_autograd(compiled(CASES[case](fmp.remat), "inductor")), by_autograd(CASES[case](without_remat))
    torch.testing.assert_close(got, want)


class Graphs:
    """A backend that counts the operators of the forward and of the backward graph."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(
            fw_compiler=functools.partial(self._note, self.forward),
            bw_compiler=functools.partial(self._note, self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _note(self, names, module, inputs):
        names += [node.target.__name__.partition(".")[0] for node in module.graph.nodes if node.op == "call_function"]

        def run(inputs: list[Any]) -> Any:
            return module.forward(*inputs)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]  # as AOTAutograd wants it
        return run


def named(x, w):
    y = fmp.checkpoint_name((x @ w)[:, :2], "product")
    return torch.tanh(fmp.checkpoint_name(torch.sin(y), "sine"))


@pytest.mark.parametrize(
    ("saveable", "products", "sines"),
    [
        (fmp.saveable.nothing, 1, 1),
        (fmp.saveable.dots, 0, 1),
        (fmp.saveable.dots_with_no_batch_dims, 0, 1),
        (fmp.saveable.only_names("product"), 0, 1),
        (fmp.saveable.only_names("sine", "other"), 1, 0),
        (fmp.saveable.any_except_names("sine"), 0, 1),
        (fmp.saveable.any_except_names(), 0, 0),
        (lambda op, args: op is torch.ops.aten.sin.default, 1, 0),
    ],
)
def test_what_a_policy_keeps_is_not_in_the_backward_graph(saveable, products, sines):
    x, w = torch.ones(3, 4), torch.ones(4, 4)
    graphs = Graphs()
    lean = fmp.remat(named, saveable=saveable)
    got = by_autograd(compiled(lambda x, w: lean(x, w).sum(), graphs.backend), x, w)
    assert same_bits(got, by_autograd(lambda x, w: named(x, w).sum(), x, w))
    assert graphs.backward.count("mm") == 2 + products  # two belong to the gradients
    assert graphs.backward.count("sin") == sines


@pytest.mark.parametrize(
    "saveable",
    [
        fmp.saveable.any_except_names(),
        lambda op, args: op in (torch.ops.aten.mm.default, torch.ops.aten.native_layer_norm.default),
    ],
)
def test_an_op_with_several_results(saveable):
    def several(x, w):
        first, second = (x @ w).chunk(2, -1)
        norm = fmp.checkpoint_name(F.layer_norm(fmp.checkpoint_name(first, "half").sin(), (2,)), "norm")
        return torch.tanh(norm * second)

    x, w = torch.linspace(-1.0, 1.0, 12).reshape(3, 4), torch.eye(4)
    graphs = Graphs()
    lean = fmp.remat(several, saveable=saveable)
    got = by_autograd(compiled(lambda x, w: lean(x, w).sum(), graphs.backend), x, w)
    torch.testing.assert_close(got, by_autograd(lambda x, w: several(x, w).sum(), x, w))
    assert graphs.backward.count("mm") == 2  # of the gradients
    assert graphs.backward.count("native_layer_norm") == 0


def test_everything_is_no_remat():
    graphs = Graphs()
    by_autograd(compiled(lambda x, w: fmp.remat(block, saveable=fmp.saveable.everything)(x, w).sum(), graphs.backend))
    assert graphs.backward.count("tanh") == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "saveable", [fmp.saveable.nothing, fmp.saveable.dots, lambda op, args: torch.Tag.nondeterministic_seeded in op.tags]
)
def test_the_mask_of_the_forward_pass(backend, saveable):
    """pytorch#190758, #190717."""

    @fmp.remat(saveable=saveable)
    def twice(x):
        return F.dropout(torch.sin(F.dropout(x))) * torch.rand(4096)

    x = torch.ones(4096).requires_grad_()
    y = compiled(twice, backend)(x)
    assert 0.7 < (y == 0).float().mean() < 0.8
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0] == 0, y == 0)


def test_the_mask_of_the_forward_pass_by_inductor():
    x = torch.ones(4096).requires_grad_()
    y = compiled(fmp.remat(lambda x: torch.sin(F.dropout(torch.sin(x)))), "inductor")(x)
    assert 0.45 < (y == 0).float().mean() < 0.55
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0] == 0, y == 0)


def test_arguments_by_any_name():
    """Such as those of `torch.utils.checkpoint` itself."""

    def options(x, *, debug, use_reentrant):
        return block(x, debug) * use_reentrant

    def run(wrap):
        return lambda x, w: wrap(options)(x, debug=w, use_reentrant=2.0).sum()

    assert same_bits(by_autograd(compiled(run(fmp.remat))), by_autograd(run(without_remat)))


def test_a_module_and_the_structure_of_a_result():
    layer = nn.Linear(4, 4)

    def several(x, *, flag):
        return {"y": layer(x), "x": x, "none": None, "number": 3, "flag": flag}

    def run(wrap):
        def loss(x, w):
            out = wrap(several)(x, flag=True)
            assert out["none"] is None
            assert out["flag"]
            return (out["y"] @ w).sum() * out["number"] + out["x"].sum()

        return loss

    assert same_bits(by_autograd(compiled(run(fmp.remat))), by_autograd(run(without_remat)))


def test_side_effects_happen_once():
    def run(x, w):
        seen = []
        y = fmp.remat(lambda x: (seen.append(3), torch.sin(x))[1])(x)
        assert len(seen) == 1
        return (y * w).sum() * seen[0]

    assert same_bits(by_autograd(compiled(run)), by_autograd(lambda x, w: (torch.sin(x) * w).sum() * 3))
    assert not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint  # set while tracing only


def test_dynamic_shapes():
    counted: Any = Graphs()
    run = compiled(
        lambda x, w: fmp.remat(lambda x: torch.tanh(x @ w) * x.shape[0])(x).sum(), counted.backend, dynamic=True
    )
    for rows in (3, 5, 7):
        x = torch.linspace(-1.0, 1.0, 4 * rows).reshape(rows, 4)
        torch.testing.assert_close(
            by_autograd(run, x, W), by_autograd(lambda x, w: (torch.tanh(x @ w) * x.shape[0]).sum(), x, W)
        )
    assert counted.backward.count("tanh") == 1  # one graph for all, which computes it again


def test_without_gradients():
    with torch.no_grad():
        assert same_bits(compiled(fmp.remat(block))(X, W), block(X, W))


@pytest.mark.mixed_dtypes
def test_policies_around_and_inside():
    inner = fmp.Policy(None, None, None)

    def run(wrap):
        return fmp.autocast(lambda x, w: wrap(fmp.autocast(block, inner))(x, w).sum() * wrap(block)(x, w).sum(), HALF)

    assert same_bits(by_autograd(compiled(run(fmp.remat))), by_autograd(compiled(run(without_remat))))
    graphs = Graphs()
    by_autograd(fmp.autocast(compiled(lambda x, w: fmp.remat(block)(x, w).sum(), graphs.backend), HALF))
    assert graphs.backward.count("tanh") == 2


TRANSFORMS: dict[str, Any] = {
    "autograd": by_autograd,
    "grad": lambda f: grad(f, (0, 1))(X, W),
    "fmp.grad": lambda f: fmp.grad(f, (0, 1))(X, W),
    "vmap": lambda f: vmap(f, (0, None))(torch.stack([X, -X]), W),
    "vmap(grad)": lambda f: vmap(grad(f, (0, 1)), (0, None))(torch.stack([X, -X]), W),
    "jvp": lambda f: jvp(f, (X, W), (X, W)),
    "hessian": lambda f: hessian(f)(X, W),
    "grad(grad)": lambda f: grad(lambda x, w: grad(f)(x, w).square().sum(), (0, 1))(X, W),
}
ARRANGEMENTS: dict[str, Any] = {
    "remat(compile)": lambda wrap, convert: lambda x, w: wrap(convert(block))(x, w).sum(),
    "remat(compile) of a closure": lambda wrap, convert: lambda x, w: wrap(convert(lambda x: block(x, w)))(x).sum(),
    "remat(compile) of a partial": lambda wrap, convert: (
        lambda x, w: wrap(functools.partial(convert(block), w=w))(x).sum()
    ),
    "remat of a caller": lambda wrap, convert: lambda x, w: wrap(lambda x: convert(block)(x, w) * 2)(x).sum(),
    "compile(remat)": lambda wrap, convert: lambda x, w: convert(wrap(block))(x, w).sum(),
}


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_compiled_block_under_a_transform(arrangement, transform):
    make, run = ARRANGEMENTS[arrangement], TRANSFORMS[transform]
    got = run(make(fmp.remat, functools.partial(torch.compile, backend="aot_eager")))
    torch.testing.assert_close(got, run(make(without_remat, lambda f: f)))


def loss_of(block: Any) -> Any:
    def loss(params, x):
        for w in params:
            x = block(x, w)
        return x.square().mean()

    return loss


WEIGHTS, BATCH = [torch.eye(4) + index for index in range(3)], torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


def layer(x, w):
    return torch.tanh(torch.tanh(x @ w) * x)


STEPS: dict[str, Any] = {
    "remat": lambda: (loss_of(fmp.remat(layer)), False),
    "compiled step": lambda: (loss_of(fmp.remat(layer)), True),
    "compiled step with a policy": lambda: (loss_of(fmp.remat(layer, saveable=fmp.saveable.dots)), True),
    "compiled blocks": lambda: (loss_of(fmp.remat(compiled(layer))), False),
    "compiled loss": lambda: (compiled(loss_of(fmp.remat(layer))), False),
}


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("form", STEPS)
@pytest.mark.mixed_dtypes
def test_a_train_step(form, opt_level):
    def run(loss, compile):
        policy = fmp.opt_level(opt_level, half_dtype=torch.bfloat16)
        step = fmp.train_step(loss, fmp.optim.adamw(1e-2), policy=policy)
        if compile:
            step = dataclasses.replace(step, advance=compiled_advance(backend="aot_eager"))
        state = step.init(WEIGHTS)
        for _ in range(2):
            state, _ = step(state, BATCH)
        return tree.leaves(state.params)

    tolerance = 1e-6 if opt_level == "O0" else 2e-2
    torch.testing.assert_close(run(*STEPS[form]()), run(loss_of(layer), False), rtol=tolerance, atol=tolerance)


def test_compiled_blocks_are_compiled_once_in_a_train_step():
    graphs = Graphs()
    step = fmp.train_step(loss_of(fmp.remat(compiled(layer, graphs.backend))), fmp.optim.sgd(0.1))
    state, _ = step(step.init(WEIGHTS), BATCH)
    # Once for the first block, whose input needs no gradient, and once for the others.
    assert graphs.forward.count("tanh") == graphs.backward.count("tanh_backward") == 4
    step(state, BATCH)
    assert graphs.forward.count("tanh") == 4


def test_a_compiled_loss_recomputes_in_a_train_step():
    graphs = Graphs()
    loss = compiled(loss_of(fmp.remat(layer)), graphs.backend)
    step = fmp.train_step(loss, fmp.optim.sgd(0.1))
    step(step.init(WEIGHTS), BATCH)
    assert graphs.backward.count("tanh") >= len(WEIGHTS)


FAILING = """
import torch, fmp
from torch.func import grad

f = lambda x: torch.sin(x).sum()
lean = lambda x: fmp.remat(f)(x)
x = torch.ones(3)
try:
    grad(torch.compile(lean, backend="aot_eager", fullgraph=True))(x)
except Exception as error:
    print("refused:", type(error).__name__)


def untraceable(x):
    torch._dynamo.graph_break()
    return f(x)


try:
    torch.compile(fmp.remat(untraceable), backend="aot_eager", fullgraph=True)(x.requires_grad_())
except Exception as error:
    print("refused:", type(error).__name__)
assert not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint
x = x.detach().requires_grad_()
assert torch.equal(torch.autograd.grad(fmp.remat(f)(x), x)[0], x.detach().cos())
assert torch.equal(grad(lean)(x.detach()), x.detach().cos())
"""


def test_after_a_compilation_that_failed():
    """In a process of its own: a failed compilation leaves its marks on torch."""
    output = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["refused: Unsupported", "refused: Unsupported"]
