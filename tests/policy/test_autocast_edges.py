"""What casting op by op meets at its edges: other switches of torch, odd containers, late bodies, seeded functions."""

import operator
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

import fmp
from fmp import OpRules, Policy

pytestmark = pytest.mark.mixed_dtypes

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
APEX, TORCH = (Policy("f32", "bf16", None, op_rules=rules) for rules in ("apex", "torch"))
AnyRules: Any = OpRules  # for arguments of wrong types
Pair = namedtuple("Pair", "first second")


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 4)


def with_rules(rules: OpRules) -> Policy:
    return Policy("f32", "bf16", None, op_rules=rules)


# --- torch.autocast


def product_with_casting_off(x):
    inside = x @ x
    with torch.autocast("cpu", enabled=False):
        off = x @ x, x.to(BF16).softmax(-1), torch.full((), 2.0, dtype=BF16).exp_()
        with torch.autocast("cpu", BF16):
            on = x @ x
    return inside, *off, on, x @ x


@pytest.mark.parametrize("form", ["eager", "compiled", "vmap"])
def test_code_that_switches_torch_autocast_off_is_not_cast(x, form):
    run = fmp.autocast(product_with_casting_off, APEX)
    if form == "compiled":
        run = torch.compile(run, backend="eager", fullgraph=True)
    if form == "vmap":
        run, x = vmap(run), x[None]
    assert [out.dtype for out in run(x)] == [BF16, F32, BF16, BF16, BF16, BF16]


def test_code_that_switches_torch_autocast_off_may_use_a_banned_op(x):
    def loss(x):
        with torch.autocast("cpu", enabled=False):
            return F.binary_cross_entropy(x.sigmoid(), x.sigmoid().detach())

    assert fmp.autocast(loss, TORCH)(x).isfinite()


def test_a_surrounding_torch_autocast_is_off_inside(x):
    policies = [
        Policy("f32", "f16", None, op_rules="apex"),
        with_rules(OpRules.apex().full("matmul")),
        Policy.parse("f32"),
    ]
    with torch.autocast("cpu", BF16):
        found = [fmp.autocast(operator.matmul, policy)(x, x).dtype for policy in policies]
        assert (x @ x).dtype == BF16
    assert found == [F16, F32, F32]


# --- what the count of changes does not tell


def test_a_fused_optimizer_inside_is_seen(x):
    def train(layer):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.mse_loss(layer(x), x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    layer = nn.Linear(4, 4)
    start = {name: value.clone() for name, value in layer.state_dict().items()}
    found = fmp.autocast(train, APEX)(layer)
    layer.load_state_dict(start)
    assert found == pytest.approx(train(layer), rel=0.02)
    assert found[3] < 0.9 * found[0]


def test_a_rule_for_what_opens_memory_does_not_hide_the_opening(x):
    policy = with_rules(OpRules.apex().full(torch.Tensor.numpy))

    def run(w):
        first = x @ w
        w.numpy()[:] = 0.0
        return first, x @ w

    first, second = fmp.autocast(run, policy)(torch.ones(4, 4))
    assert first.any()
    assert not second.any()


def test_a_cast_made_in_inference_mode_is_not_used_under_autograd(x):
    teacher = nn.Linear(4, 4).requires_grad_(False)

    def run(x):
        with torch.inference_mode():
            teacher(x)
        x = x.clone().requires_grad_()
        return torch.autograd.grad(teacher(x).float().sum(), x)[0]

    assert torch.equal(fmp.autocast(run, APEX)(x), (torch.ones(4, 4, dtype=BF16) @ teacher.weight.to(BF16)).float())


def test_a_weight_of_an_outer_transform_has_its_gradient_after_use_without_one(x):
    def run(w):
        with torch.no_grad():
            unused = x @ w
        return (x @ w).sum() + 0.0 * unused.sum()

    weights = torch.ones(2, 4, 4)
    found = grad(lambda w: vmap(fmp.autocast(run, APEX))(w).sum())(weights)
    assert torch.equal(found, vmap(grad(fmp.autocast(run, APEX)))(weights))
    assert found.any()


def test_many_uses_under_an_outer_transform_sum_in_float32(x):
    run = lambda w: torch.stack([(x[:1] @ w).sum() for _ in range(600)]).sum()
    found = grad(lambda w: vmap(fmp.autocast(run, APEX))(w).sum())(torch.ones(1, 4, 4))
    torch.testing.assert_close(found[0], 600 * x[:1].to(BF16).float().T.expand(4, 4), rtol=1e-5, atol=1e-5)


# --- arguments


@pytest.mark.parametrize("of", [list, tuple, lambda pair: Pair(*pair), type("Pairs", (list,), {})])
def test_containers_of_tensors(x, of):
    cast = lambda fn: fmp.autocast(fn, APEX)
    assert cast(lambda x: torch.linalg.multi_dot(of([x, x])))(x).dtype == BF16
    assert cast(lambda x: torch.einsum("ij,jk", of([x, x])))(x).dtype == BF16
    assert cast(lambda x: torch.cat(of([x, x.to(BF16)])))(x).dtype == F32
    assert cast(lambda x: nn.LSTMCell(4, 4)(x, of([x, x]))[0])(x).dtype == BF16


@pytest.mark.parametrize("policy", [APEX, TORCH])
def test_in_place_functions_by_keyword(x, policy):
    call = lambda x: torch.exp_(input=x)
    target = x.clone()
    assert fmp.autocast(call, policy)(target) is target
    torch.testing.assert_close(target, x.exp())
    if policy is APEX:
        with pytest.raises(fmp.BannedOpError, match="exp cannot write into a tensor of bf16"):
            fmp.autocast(call, policy)(x.to(BF16))


def test_a_float64_number_does_not_widen_what_it_meets(x):
    half = torch.tensor(0.5, dtype=F64)
    kinds = lambda fn: [fmp.autocast(fn, APEX)(value, half).dtype for value in (x, x.to(BF16), x.to(F64))]
    for fn in (torch.mul, operator.add, torch.maximum, lambda x, y: torch.where(x > 0, x, y)):
        assert kinds(fn) == [F32, F32, F64]
    assert fmp.autocast(torch.mul, APEX)(x.to(BF16), x.to(F64)).dtype == F64


def test_a_dtype_given_by_position_is_respected(x):
    wide = fmp.autocast(lambda x: x.double().softmax(-1, F64), APEX)(x)
    assert torch.equal(wide, x.double().softmax(-1))


# --- functions that the policy cannot follow


async def coroutine(x):
    return x @ x


def generator(x):
    yield x @ x


async def stream(x):
    yield x @ x


@pytest.mark.parametrize("fn", [coroutine, generator, stream])
def test_functions_whose_body_runs_later_are_refused(fn):
    transforms: list[Any] = [lambda fn: fmp.autocast(fn, APEX), fmp.low_precision, fmp.full_precision, fmp.promote]
    for transform in transforms:
        with pytest.raises(TypeError, match=f"{fn.__name__} is an? .* function, whose body runs when it has returned"):
            transform(fn)


@pytest.mark.parametrize(("value", "cast"), [(True, True), ("True", True), (False, False), ("false", False)])
def test_enabled_as_a_command_line_gives_it(x, value, cast):
    assert (fmp.autocast(operator.matmul, APEX, enabled=value)(x, x).dtype == BF16) is cast
    with pytest.raises(ValueError, match="enabled must be 'True' or 'False'"):
        fmp.autocast(operator.matmul, APEX, enabled="off")


# --- rules


def test_seeded_functions_go_by_their_rules(x):
    dropout = fmp.functionalize(nn.Dropout(0.5))
    rrelu = fmp.functionalize(nn.RReLU())

    def run(model, rules):
        apply = fmp.autocast(lambda x: model.apply({}, {}, x, seed=1, train=True)[0], with_rules(rules))
        return apply(x.to(BF16)).dtype

    assert run(dropout, OpRules.apex()) == BF16
    assert run(dropout, OpRules.apex().full("dropout")) == F32
    assert run(rrelu, OpRules.apex()) == F32
    with pytest.raises(fmp.BannedOpError, match="dropout on bf16 is banned: not here"):
        run(dropout, OpRules.apex().banned(F.dropout, "not here"))


def test_a_composite_can_be_left_alone(x):
    rules = OpRules.apex().leave(F.normalize, "softmin")
    assert fmp.autocast(F.normalize, with_rules(rules))(x.to(BF16)).dtype == BF16
    assert fmp.autocast(lambda x: F.softmin(x, -1), with_rules(rules))(x.to(BF16)).dtype == BF16
    assert fmp.autocast(F.normalize, APEX)(x.to(BF16)).dtype == F32


def test_rules_can_be_made_in_compiled_code(x):
    def run(x):
        return fmp.autocast(torch.relu, with_rules(OpRules.apex().low(torch.relu, "sigmoid")))(x)

    assert torch.compile(run, backend="eager", fullgraph=True)(x).dtype == BF16


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AnyRules(["apex"]), ValueError, r"base must be one of .* got \['apex'\]"),
        (lambda: AnyRules("apex", (("mm", "low"),)), TypeError, "changes must be pairs of a name and a Rule"),
        (lambda: AnyRules("apex").banned("mm", ""), TypeError, "needs a reason"),
        (lambda: AnyRules("apex").banned("mm", None), TypeError, "needs a reason"),
        (lambda: AnyRules("apex").banned("mm", "why", always="no"), TypeError, "always must be True or False"),
        (lambda: Policy("f32", "f8e4m3", None, op_rules="apex"), ValueError, "compute_dtype is f8e4m3, but op rules"),
        (lambda: Policy("f32", "f64", None, op_rules="apex"), ValueError, "compute_dtype is f64, but op rules"),
    ],
)
def test_rules_that_make_no_sense_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_rule_of_an_unknown_kind_is_refused():
    rule = OpRules.apex().rule("mm")
    assert rule is not None
    with pytest.raises(ValueError, match="mm: a rule cannot be of kind 'lowest'"):
        OpRules("apex", (("mm", rule._replace(kind="lowest")),))
