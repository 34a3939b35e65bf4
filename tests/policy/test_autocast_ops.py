"""Casting op by op: the spellings of an op, what writes in place, which arguments are left alone, what is refused."""

import dataclasses
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmp
from fmp.policy import OpRules
from fmp.policy.op_rules import Rule

# Most calls here mix dtypes to see what becomes of them.
pytestmark = pytest.mark.mixed_dtypes

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
LISTS = ["apex", "torch"]
aten = torch.ops.aten


def cast(fn, rules: OpRules | str = "apex", low=BF16):
    return fmp.autocast(fn, fmp.Policy("f32", low, None, op_rules=rules))


@pytest.fixture
def x():
    return torch.rand(4, 4) + 0.1


@pytest.fixture
def half(x):
    return x.to(BF16)


@torch.library.custom_op("fmp_test_autocast_ops::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


# --- spellings

LOW = {
    "x @ y": lambda x, y: x @ y,
    "x.__rmatmul__(y)": lambda x, y: torch.Tensor.__rmatmul__(y, x),
    "x.matmul(y)": lambda x, y: x.matmul(y),
    "torch.matmul": torch.matmul,
    "torch.linalg.matmul": torch.linalg.matmul,
    "aten.mm.default": aten.mm.default,
    "x.mm(y)": torch.Tensor.mm,
    "input=": lambda x, y: torch.mm(input=x, mat2=y),
    "F.linear": lambda x, y: F.linear(x, weight=y.t()),
}
FULL = {
    "x.softmax": lambda x: x.softmax(-1),
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "F.softmax": lambda x: F.softmax(x, dim=-1),
    "torch.special.softmax": lambda x: torch.special.softmax(x, -1),
    "aten.softmax.int": lambda x: aten.softmax.int(x, -1),
    "nn.Softmax": nn.Softmax(-1),
    "x ** 2": lambda x: x**2,
    "2 ** x": lambda x: 2**x,
    "x.pow": lambda x: x.pow(0.5),
    "1 / x": lambda x: 1 / x,
    "x.sum()": torch.Tensor.sum,
}
PROMOTED = {
    "x + y": lambda x, y: x + y,
    "x.__radd__(y)": torch.Tensor.__radd__,
    "x.add(y)": torch.Tensor.add,
    "torch.add": torch.add,
    "aten.add.Tensor": aten.add.Tensor,
    "torch.subtract": torch.subtract,
    "torch.rsub": torch.rsub,
    "torch.true_divide": torch.true_divide,
    "x / y": operator.truediv,
    "torch.atan2": torch.atan2,
    "torch.cat": lambda x, y: torch.cat([x, y]),
    "torch.stack": lambda x, y: torch.stack([x, y]),
    "torch.addcmul": lambda x, y: torch.addcmul(x, y, x),
}


@pytest.mark.parametrize("rules", LISTS)
@pytest.mark.parametrize("call", LOW.values(), ids=LOW)
def test_every_spelling_of_a_product_runs_low(call, rules, x, half):
    expected = torch.mm(half, half)
    for left, right in [(x, x), (half, x), (x, half), (half, half)]:
        assert torch.equal(cast(call, rules)(left, right), expected)


@pytest.mark.parametrize("rules", LISTS)
@pytest.mark.parametrize("call", FULL.values(), ids=FULL)
def test_every_spelling_of_an_exponential_runs_full(call, rules, half):
    assert torch.equal(cast(call, rules)(half), call(half.float()))


@pytest.mark.parametrize("rules", LISTS)
@pytest.mark.parametrize("call", PROMOTED.values(), ids=PROMOTED)
def test_every_spelling_of_a_sum_promotes(call, rules, x, half):
    cast_call = cast(call, rules)
    assert torch.equal(cast_call(half, x), call(half.float(), x))
    assert torch.equal(cast_call(x, half), call(x, half.float()))
    assert cast_call(half, half).dtype == BF16


def test_an_op_without_a_rule_runs_on_what_it_is_given(x, half):
    for op in (torch.relu, F.silu, torch.mean, F.dropout, torch.sigmoid, torch.neg):
        assert cast(op)(x).dtype == F32
        assert cast(op)(half).dtype == BF16


def test_operands_without_dimensions_count_under_apex_rules_only(x, half):
    scale = torch.tensor(1.001)
    for op in (torch.mul, operator.mul, torch.maximum, torch.Tensor.div):
        assert torch.equal(cast(op)(half, scale), op(half.float(), scale))
        assert cast(op, "torch")(half, scale).dtype == BF16
    assert cast(lambda a: a * 1.001)(half).dtype == BF16  # a Python number has no dtype
    assert cast(torch.exp)(half[0, 0]).dtype == F32


@pytest.mark.parametrize("rules", LISTS)
def test_two_16_bit_formats_meet_in_float32(rules, x, half):
    other = x.to(torch.float16)
    for op in (torch.add, torch.atan2, lambda a, b: torch.cat([a, b])):
        assert cast(op, rules)(half, other).dtype == F32
    assert torch.equal(cast(torch.mm, rules)(half, other), half @ other.to(BF16))


# --- in place, out=, at an index


def _setitem(target, index, value):
    target[index] = value
    return target


WRITING = {
    "add_": lambda t, v: t.add_(v),
    "+=": operator.iadd,
    "*=": operator.imul,
    "/=": operator.itruediv,
    "aten.mul_": lambda t, v: aten.mul_(t, v),
    "add_(other=)": lambda t, v: t.add_(other=v),
    "addcmul_": lambda t, v: t.addcmul_(v, v),
    "lerp_": lambda t, v: t.lerp_(v, 0.5),
    "addmm_": lambda t, v: t.addmm_(v, v),
    "add out=": lambda t, v: torch.add(v, v, out=t),
    "mm out=": lambda t, v: torch.mm(v, v, out=t),
    "x[indices] =": lambda t, v: _setitem(t, torch.tensor([2, 0]), v[:2]),
    "x[mask] =": lambda t, v: _setitem(t, torch.eye(4) > 0, v[0]),
    "x[1] =": lambda t, v: _setitem(t, 1, v[0]),
    "index_put_": lambda t, v: t.index_put_((torch.tensor([1]),), v[:1], accumulate=True),
    "index_add_": lambda t, v: t.index_add_(0, torch.arange(4), v),
    "scatter_add_": lambda t, v: t.scatter_add_(0, torch.zeros(4, 4, dtype=torch.int64), v),
}


@pytest.mark.parametrize("target_dtype", [F32, BF16])
@pytest.mark.parametrize("value_dtype", [F32, BF16])
@pytest.mark.parametrize("write", WRITING.values(), ids=WRITING)
def test_what_is_written_to_keeps_its_dtype(write, target_dtype, value_dtype, x):
    target, value = torch.ones(4, 4, dtype=target_dtype), x.to(value_dtype)
    expected = write(target.clone(), value.to(target_dtype))
    assert cast(write)(target, value) is target
    assert target.dtype == target_dtype
    assert torch.equal(target, expected)


FULL_IN_PLACE = {
    "exp": torch.Tensor.exp_,
    "reciprocal": torch.reciprocal_,
    "log": lambda t: aten.log_(t),
    "pow": lambda t: t.pow_(2),
    "cumsum": lambda t: t.cumsum_(0),
    "sum": lambda t: torch.sum(torch.ones(4, 4), 0, out=t),
}


@pytest.mark.parametrize("name", FULL_IN_PLACE)
def test_full_precision_refuses_to_write_into_16_bits(name):
    write = FULL_IN_PLACE[name]
    with pytest.raises(fmp.BannedOpError, match=f"{name} cannot write into a tensor of bf16: .*float32"):
        cast(write)(torch.ones(4, dtype=BF16))
    assert torch.equal(cast(write)(torch.ones(4)), write(torch.ones(4)))


@pytest.mark.parametrize(
    "call",
    [
        lambda t: F.relu(t, inplace=True),
        lambda t: F.relu(t, True),
        nn.ReLU(inplace=True),
        torch.relu_,
        lambda t: F.celu(t, 1.0, True),
        lambda t: F.threshold(t, 0.1, 0.0, inplace=True),
        lambda t: F.dropout(t, 0.5, True, True),
    ],
)
def test_the_inplace_flag_counts_as_in_place(call, x, half):
    rules = OpRules.apex().full("relu", F.celu, F.threshold, "dropout")
    with pytest.raises(fmp.BannedOpError, match="cannot write into a tensor of bf16"):
        cast(call, rules)(half)
    given = x.clone()
    assert cast(call, rules)(given) is given
    assert cast(F.relu, rules)(half).dtype == F32
    assert cast(call)(half).dtype == BF16  # without that rule


def test_torch_rules_leave_alone_what_writes(x, half):
    assert torch.equal(cast(torch.Tensor.exp_, "torch")(half.clone()), half.exp())
    assert cast(torch.exp, "torch")(half, out=torch.empty_like(half)).dtype == BF16
    assert torch.equal(cast(lambda t: torch.mm(t, t, out=torch.empty(4, 4)), "torch")(x), x @ x)
    for write in (WRITING["mm out="], WRITING["addmm_"], WRITING["x[indices] ="]):
        with pytest.raises(RuntimeError, match="dtype"):
            cast(write, "torch")(torch.ones(4, 4), half)


# --- arguments that are left alone


@pytest.mark.parametrize("rules", LISTS)
def test_an_explicit_dtype_is_respected(rules, x, half):
    assert torch.equal(cast(lambda a: a.softmax(-1, dtype=BF16), rules)(half), half.softmax(-1))
    assert cast(lambda a: torch.sum(a, dtype=torch.float16), rules)(half).dtype == torch.float16
    assert cast(lambda a: F.softmax(a, -1, 3, F64), rules)(half).dtype == F64
    assert cast(lambda a: a.cumsum(0, dtype=None), rules)(half).dtype == F32


def test_float64_is_cast_by_apex_rules_and_left_by_torch_rules(x):
    wide = x.double()
    assert torch.equal(cast(torch.mm)(wide, x), x.to(BF16) @ x.to(BF16))
    assert cast(lambda a: a.softmax(-1))(wide).dtype == F32
    assert cast(torch.mm, "torch")(wide, wide).dtype == F64
    assert torch.equal(cast(lambda a: a.softmax(-1), "torch")(wide), wide.softmax(-1))
    for rules in LISTS:
        assert cast(torch.add, rules)(wide, x).dtype == F64
        assert cast(torch.relu, rules)(wide).dtype == F64


@pytest.mark.parametrize("rules", LISTS)
def test_what_is_no_floating_point_tensor_passes_untouched(rules, x):
    labels = torch.arange(4)
    assert cast(torch.mm, rules)(x + 0j, x + 0j).dtype == torch.complex64
    assert torch.equal(cast(torch.outer, rules)(labels, labels), torch.outer(labels, labels))
    assert cast(torch.sum, rules)(labels > 1).dtype == torch.int64
    assert cast(torch.add, rules)(labels, 2).dtype == torch.int64
    assert torch.equal(cast(F.linear, rules)(x, x, None), F.linear(x.to(BF16), x.to(BF16)))
    assert cast(lambda a: a.clamp(min=0.5), rules)(x).dtype == F32


# --- what is refused


def test_binary_cross_entropy_is_refused_by_dtype_or_always(x, half):
    x, half = x.clamp(max=1), half.clamp(max=1)
    for given in [(half, x), (x, half)]:
        with pytest.raises(fmp.BannedOpError, match=r"binary_cross_entropy on bf16 is banned: .*_with_logits"):
            cast(F.binary_cross_entropy)(*given)
    assert torch.equal(cast(nn.BCELoss())(x, x), F.binary_cross_entropy(x, x))
    for given in [(half, x), (x, x)]:
        with pytest.raises(fmp.BannedOpError, match=r"binary_cross_entropy( on bf16)? is banned: torch\.autocast"):
            cast(F.binary_cross_entropy, "torch")(*given)
    for rules in (OpRules.apex(), OpRules.torch()):
        allowed = rules.full(F.binary_cross_entropy)
        loss = cast(nn.BCELoss(), allowed)(half, x)
        assert torch.equal(loss, F.binary_cross_entropy(half.float(), x))


def test_banning_an_op(x, half):
    rules = OpRules.apex().banned(torch.svd, "use torch.linalg.svd").banned("mm", "no products", always=True)
    with pytest.raises(fmp.BannedOpError, match=r"svd on bf16 is banned: use torch\.linalg\.svd"):
        cast(torch.Tensor.svd, rules)(half)
    assert cast(torch.svd, rules)(x).S.dtype == F32
    with pytest.raises(fmp.BannedOpError, match="mm is banned: no products"):
        cast(torch.Tensor.mm, rules)(x, x)


@pytest.mark.parametrize("op", [operator.add, operator.eq, operator.iadd, operator.matmul])
def test_operators_refuse_like_functions(op, x, half):
    why = "not here"
    rules = OpRules.apex().banned("add", why).banned("eq", why).banned("matmul", why)
    with pytest.raises(fmp.BannedOpError):
        cast(op, rules)(half, x)


def test_the_error_is_what_apex_raises_and_none_that_operators_swallow():
    assert issubclass(fmp.BannedOpError, NotImplementedError)
    assert not issubclass(fmp.BannedOpError, TypeError)


# --- rules of one's own


def test_op_rules_are_immutable_values():
    base = OpRules.apex()
    changed = base.full(torch.relu)
    assert changed is not base
    assert base == OpRules.apex()
    assert base.rule("relu") is None
    assert hash(changed) == hash(OpRules.apex().full(F.relu))
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.changes = ()  # pyright: ignore[reportAttributeAccessIssue]  # the point of the test


@pytest.mark.parametrize("op", [torch.relu, F.relu, torch.Tensor.relu_, "relu", "F.relu", aten.relu.default])
def test_any_spelling_names_all_of_them(op, x, half):
    rules = OpRules.apex().full(op)
    assert rules.rule(torch.relu) == Rule("full", "your rule")
    for call in (torch.relu, F.relu, torch.Tensor.relu, nn.ReLU(), aten.relu):
        assert cast(call, rules)(half).dtype == F32


def test_the_last_rule_counts(x, half):
    rules = OpRules.torch().low("softmax", "relu").full("relu").leave("mm", "softmax").promote("mm")
    assert rules.rule("softmax") is None
    assert cast(torch.relu, rules)(half).dtype == F32
    assert cast(lambda a: a.softmax(-1), rules)(half).dtype == BF16
    assert cast(torch.mm, rules)(half, x).dtype == F32
    only = OpRules().low("einsum")
    assert cast(lambda a: torch.einsum("ij,jk", a, a), only)(x).dtype == BF16
    assert cast(torch.mm, only)(x, x).dtype == F32


@pytest.mark.parametrize("op", [twice, torch.ops.fmp_test_autocast_ops.twice, "fmp_test_autocast_ops::twice"])
def test_a_custom_op_has_rules_too(op, x):
    rules = OpRules.apex().low(op)
    assert torch.equal(cast(twice, rules)(x), 2 * x.to(BF16))
    assert torch.equal(cast(torch.ops.fmp_test_autocast_ops.twice.default, rules)(x), 2 * x.to(BF16))
    assert cast(twice)(x).dtype == F32


@pytest.mark.parametrize("op", [lambda x: x, nn.ReLU, nn.ReLU(), torch.manual_seed, torch.vmap, len])
def test_a_function_that_is_no_op_is_refused(op):
    with pytest.raises(TypeError, match=r"is no op of torch.*fmp\.low_precision"):
        OpRules.apex().low(op)


def test_bad_rules():
    with pytest.raises(ValueError, match="torch has no op 'soft_max'; did you mean 'softmax'"):
        OpRules.apex().full("soft_max")
    with pytest.raises(TypeError, match=r"of type list; name several ops as arguments of their own"):
        OpRules.apex().full(["relu", "gelu"])  # pyright: ignore[reportArgumentType]  # the point of the test
    with pytest.raises(TypeError, match="got 3 of type int"):
        OpRules.apex().full(3)  # pyright: ignore[reportArgumentType]  # the point of the test
    with pytest.raises(TypeError, match=r"low\(\) needs at least one op"):
        OpRules.apex().low()
    with pytest.raises(ValueError, match="base must be one of"):
        OpRules("amp")  # pyright: ignore[reportArgumentType]  # the point of the test
