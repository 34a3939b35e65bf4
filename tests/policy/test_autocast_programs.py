"""Random programs: the dtype of every intermediate is what the rules say, under every transform and compiled."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch.func import grad, jvp, vmap

import fmp
from fmp import tree
from fmp.policy import OpRules

pytestmark = pytest.mark.mixed_dtypes

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MATRIX, SCALAR = (4, 4), ()
MEMBERS = 2

# --- the ops of a program


@dataclass(frozen=True)
class Op:
    """An op of one or two tensors.

    Attributes:
        name: Its canonical name.
        run: Computes it.
        count: How many tensors it takes.
        only: The one shape that it takes, if it does not take both.
        gives: The dtype that it gives whatever it takes, if it does.
        keeps_first: Whether it changes its first argument in place.
    """

    name: str
    run: Callable[..., torch.Tensor]
    count: int = 1
    only: tuple[int, ...] | None = None
    gives: torch.dtype | None = None
    keeps_first: bool = False


OPS = (
    Op("matmul", lambda a, b: a @ b, 2, MATRIX),
    Op("mm", torch.mm, 2, MATRIX),
    Op("linear", F.linear, 2, MATRIX),
    Op("einsum", lambda a, b: torch.einsum("ij,kj->ik", a, b), 2, MATRIX),
    Op("softmax", lambda a: a.softmax(-1), only=MATRIX),
    Op("log_softmax", lambda a: F.log_softmax(a, dim=0), only=MATRIX),
    Op("layer_norm", lambda a: F.layer_norm(a, (4,)), only=MATRIX),
    Op("normalize", F.normalize, only=MATRIX),
    Op("exp", torch.exp),
    Op("sum", torch.sum),
    Op("mean", torch.Tensor.mean),
    Op("pow", lambda a: a**2),
    Op("pow", lambda a: 1.5**a),
    Op("relu", F.relu),
    Op("tanh", torch.tanh),
    Op("transpose", lambda a: a.transpose(0, 1), only=MATRIX),
    Op("reshape", lambda a: a.reshape(2, 8).reshape(4, 4), only=MATRIX),
    Op("add", lambda a, b: a + b, 2),
    Op("add", lambda a: 2.5 + a),
    Op("sub", torch.sub, 2),
    Op("sub", lambda a: 1.0 - a),
    Op("mul", lambda a, b: a * b, 2),
    Op("mul", lambda a: a * 2),
    Op("div", torch.Tensor.div, 2),
    Op("reciprocal", lambda a: 1.0 / a),
    Op("atan2", torch.atan2, 2),
    Op("maximum", torch.maximum, 2),
    Op("where", lambda a, b: torch.where(a > b, a, b), 2, MATRIX),
    Op("cat", lambda a, b: torch.cat([a, b])[2:6], 2, MATRIX),
    Op("stack", lambda a, b: torch.stack([a, b])[1], 2, MATRIX),
    Op("add", lambda a, b: a.clone().add_(b), 2, MATRIX, keeps_first=True),
    Op("mul", lambda a, b: a.clone().mul_(b), 2, MATRIX, keeps_first=True),
    Op("half", torch.Tensor.half, gives=F16),
    Op("bfloat16", lambda a: a.to(BF16), gives=BF16),
    Op("float", lambda a: a.float(), gives=F32),
)
REDUCING = ("sum", "mean")


@dataclass(frozen=True)
class Program:
    """Ops applied to inputs and to the results of earlier ops.

    Attributes:
        inputs: The dtypes and shapes of the inputs.
        steps: Each op, with the places of what it takes.
    """

    inputs: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    steps: tuple[tuple[Op, tuple[int, ...]], ...]

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns a loss and all intermediates."""
        values = list(inputs)
        for op, places in self.steps:
            values.append(op.run(*[values[place] for place in places]))
        results = values[len(inputs) :]
        return sum((value.float().sum() for value in results), torch.zeros(())), results

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shape of each input and each result."""
        shapes = [shape for _, shape in self.inputs]
        for op, places in self.steps:
            operands = [shapes[place] for place in places]
            shapes.append(SCALAR if op.name in REDUCING else max(operands, key=len))
        return shapes


@st.composite
def programs(draw: Any) -> Program:
    dtypes = st.sampled_from([F32, BF16, F16])
    count = draw(st.integers(1, 3))
    inputs = tuple(
        (draw(dtypes), MATRIX if index == 0 else draw(st.sampled_from([MATRIX, SCALAR]))) for index in range(count)
    )
    steps: tuple[Any, ...] = ()
    for _ in range(draw(st.integers(3, 10))):
        shapes = Program(inputs, steps).shapes()
        op = draw(st.sampled_from(OPS))
        fitting = [place for place, shape in enumerate(shapes) if op.only in (None, shape)]
        steps = (*steps, (op, tuple(draw(st.sampled_from(fitting)) for _ in range(op.count))))
    return Program(inputs, steps)


# --- what the rules say, in plain Python


def predicted(program: Program, rules: OpRules, low: torch.dtype) -> list[torch.dtype]:
    shapes = program.shapes()
    dtypes = [dtype for dtype, _ in program.inputs]
    for op, places in program.steps:
        operands = [dtypes[place] for place in places]
        rule = rules.rule(op.name)
        kind = None if rule is None else rule.kind
        if op.gives is not None:
            found = op.gives
        elif op.keeps_first:
            found = operands[0]
        elif kind == "low":
            found = low
        elif kind == "full":
            found = F32
        elif kind == "promote":
            found = functools.reduce(torch.promote_types, operands)
        elif op.name == "normalize":  # its norm is full, and x / norm has the wider dtype
            found = F32
        else:
            found = native([dtypes[place] for place in places], [shapes[place] for place in places])
        dtypes.append(found)
    return dtypes[len(program.inputs) :]


def native(dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]) -> torch.dtype:
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in zip(dtypes, shapes, strict=True)]
    return torch.result_type(tensors[0], tensors[-1])


# --- the same everywhere

policies = st.builds(
    lambda rules, low: fmp.Policy("f32", low, None, op_rules=rules),
    st.sampled_from([OpRules.apex(), OpRules.torch(), OpRules.apex().low("tanh").full("relu").leave("exp", "add")]),
    st.sampled_from([BF16, F16]),
)


def values_of(program: Program, *leading: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn((*leading, *shape), generator=generator).to(dtype) for dtype, shape in program.inputs]


def dtypes_of(results: Sequence[torch.Tensor]) -> list[torch.dtype]:
    return [result.dtype for result in results]


def transformed(program: Any, inputs: Any, mapped: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields the intermediates of each transform."""
    ones = tuple(torch.ones_like(value) for value in inputs)
    yield "grad", grad(program, has_aux=True)(*inputs)[1]
    *_, results = jvp(program, tuple(inputs), ones, has_aux=True)
    yield "jvp", results
    yield "vmap", vmap(program)(*mapped)[1]
    yield "vmap(grad)", vmap(grad(program, has_aux=True))(*mapped)[1]


@given(programs(), policies)
def test_every_transform_gives_the_dtypes_that_the_rules_say(program, policy):
    inputs, mapped = values_of(program), values_of(program, MEMBERS)
    expected = predicted(program, policy.op_rules, policy.compute_dtype)
    cast = fmp.autocast(program, policy)
    _, plain = cast(*inputs)
    assert dtypes_of(plain) == expected
    for name, results in transformed(cast, inputs, mapped):
        assert dtypes_of(results) == expected, name
        if not name.startswith("vmap"):
            for one, other in zip(results, plain, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=name)


@given(programs(), policies)
@hypothesis.settings(max_examples=10)
def test_it_makes_no_difference_on_which_side_of_a_transform_autocast_is(program, policy):
    inputs = values_of(program)
    inside = grad(fmp.autocast(program, policy), has_aux=True)(*inputs)
    outside = fmp.autocast(grad(program, has_aux=True), policy)(*inputs)
    for one, other in zip(tree.leaves(inside), tree.leaves(outside), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    outside = fmp.autocast(vmap(program), policy)(*values_of(program, MEMBERS))
    assert dtypes_of(outside[1]) == predicted(program, policy.op_rules, policy.compute_dtype)


@given(programs(), policies)
@hypothesis.settings(max_examples=8)
def test_compiled_programs_give_the_dtypes_that_the_rules_say(program, policy):
    torch._dynamo.reset()
    inputs = values_of(program)
    expected = predicted(program, policy.op_rules, policy.compute_dtype)
    run = lambda *inputs: program(*inputs)
    cast = fmp.autocast(run, policy)
    compiled = [
        torch.compile(cast, backend="eager", fullgraph=True),
        fmp.autocast(torch.compile(run, backend="eager", fullgraph=True), policy),
        torch.compile(grad(cast, has_aux=True), backend="eager", fullgraph=True),
    ]
    for fn in compiled:
        assert dtypes_of(fn(*inputs)[1]) == expected


def test_where_with_a_0_dim_tensor_promotes_under_vmap_as_well():
    """Without a rule, as in torch's own lists, torch's vmap would promote where plain torch does not."""
    run = fmp.autocast(lambda a, s: torch.where(a > s, a, s), fmp.Policy("f32", "bf16", None, op_rules="apex"))
    a, s = torch.ones(2, 4, dtype=BF16), torch.zeros(2)
    assert run(a[0], s[0]).dtype == vmap(run)(a, s).dtype == F32
