import math

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim, tree
from fmp.optim import apply_updates
from fmp.optim.base import (
    add_scaled,
    bias_correction,
    check_transformation,
    per_dtype,
    reusable,
    scheduled,
    update_leaves,
    zero_count,
    zeros,
)

ALL = {"half": torch.ones(2, dtype=torch.float16), "double": torch.ones(2, dtype=torch.float64), "ids": torch.arange(2)}


@given(st.floats(0.0, 0.999999), st.integers(1, 10**6))
def test_bias_correction_keeps_all_digits(decay, count):
    exact = -math.expm1(count * math.log(decay)) if decay else 1.0
    for dtype, digits in [(torch.float32, 3e-7), (torch.float64, 1e-14)]:
        found = bias_correction(decay, torch.tensor(count, dtype=dtype))
        assert found.dtype == dtype
        assert found.item() == pytest.approx(exact, rel=digits)


def test_bias_correction_of_a_tensor_matches_its_float32_value():
    decay = torch.tensor(0.999)
    found = bias_correction(decay, torch.tensor(1.0))
    assert found.item() == pytest.approx(1.0 - decay.item(), rel=1e-6)
    assert bias_correction(torch.tensor(0.0), torch.tensor(3.0)) == 1.0


def test_apply_updates_rounds_once():
    param = torch.tensor([1.0], dtype=torch.bfloat16)
    assert apply_updates(param, torch.tensor([0.005])).item() == 1.0078125
    assert apply_updates(param, torch.tensor([0.0039])).item() == 1.0


def test_an_update_of_another_shape_is_refused():
    params = {"a": torch.ones(2), "b": torch.ones(4, 16), "c": torch.ones(4, 16)}
    updates = {"a": torch.ones(2), "b": None, "c": torch.ones(1, 16)}
    with pytest.raises(ValueError, match=r"c: the update is f32\[1,16\], the parameter f32\[4,16\]"):
        apply_updates(params, updates)


def test_apply_updates_keeps_dtypes_and_holes():
    updates = {"half": torch.full((2,), 0.5), "double": torch.full((2,), 0.5), "ids": None}
    found = apply_updates(ALL, updates)
    assert tree.describe(found) == tree.describe(ALL)
    assert found["ids"] is ALL["ids"]
    assert found["double"].tolist() == [1.5, 1.5]


def test_zeros_are_wide():
    moments = zeros({**ALL, "hole": None})
    assert tree.describe(moments) == "{'half': f32[2], 'double': f64[2], 'ids': None, 'hole': None}"
    assert not any(leaf.any() for leaf in tree.leaves(zeros(ALL)) if leaf is not None)


def test_zero_count_is_a_32_bit_scalar():
    assert tree.describe(zero_count(ALL)) == "i32[]"
    assert zero_count({}).item() == 0
    assert zero_count({"a": torch.ones(1, device="meta")}).device.type == "meta"


def test_update_leaves_casts_gradients_to_the_moments():
    grads = {"half": torch.ones(2, dtype=torch.float64), "double": torch.ones(2), "ids": None}
    seen = []

    def update(grad, param, moment, flag):
        seen.append((grad.dtype, flag))
        return grad, moment + 1

    updates, moments = update_leaves(update, grads, ALL, zeros(ALL), given=([True, False, True],))
    assert seen == [(torch.float64, True), (torch.float32, False)]
    assert tree.describe(updates) == "{'half': f32[2], 'double': f64[2], 'ids': None}"
    assert moments["ids"] is None


@pytest.mark.parametrize(
    ("param", "grad", "message"),
    [
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64), r"c64\[2\] has the gradient c64"),
        (torch.ones(2), torch.ones(2, dtype=torch.complex64), r"f32\[2\] has the gradient c64"),
        (torch.arange(2), torch.ones(2), r"i64\[2\] has the gradient f32"),
        (None, torch.ones(2), "None has the gradient f32"),
    ],
    ids=["complex", "complex gradient", "integer", "none"],
)
def test_update_leaves_refuses_to_pass_over_a_gradient(param, grad, message):
    values, grads = {"a": torch.ones(1), "b": {"w": param}}, {"a": torch.ones(1), "b": {"w": grad}}
    with pytest.raises(TypeError, match=f"b/w: a leaf {message}.*freeze it, or split it"):
        update_leaves(lambda grad, param: (grad,), grads, values)


@pytest.mark.parametrize("make", [optim.sgd, optim.adam, optim.adamw])
def test_a_complex_parameter_may_be_frozen(make):
    values = {"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex64)}
    tx = optim.chain(optim.freeze(["c"]), make(0.1))
    updates, _ = tx.update(values, tx.init(values), values)
    assert updates["w"].all()
    assert updates["c"] is None
    tx = make(0.1)
    with pytest.raises(TypeError, match="c: a leaf"):
        tx.update(values, tx.init(values), values)


def test_per_dtype_asks_once_for_each():
    asked = []
    assert per_dtype(asked.append, [*ALL.values(), torch.ones(1), None]) == {torch.float32: None, torch.float64: None}
    assert sorted(asked, key=str) == [torch.float32, torch.float64]


def test_scheduled():
    count = torch.tensor(3)
    assert scheduled(0.5, count) == 0.5
    assert scheduled(count, count) is count
    assert scheduled(lambda count: count * 2, count) == 6


@pytest.mark.parametrize(
    ("found", "error"),
    [(torch.ones(1), ValueError), (torch.ones(2, 3), ValueError), (None, TypeError), (-1.0, ValueError)],
    ids=str,
)
@pytest.mark.parametrize("make", [optim.sgd, optim.adam, optim.inject_hyperparams(optim.sgd)])
def test_a_schedule_must_return_one_number(make, found, error):
    values = {"w": torch.tensor(1.0)}

    def train():
        tx = make(learning_rate=lambda count: found)
        tx.update(values, tx.init(values), values)

    with pytest.raises(error, match="the value of a schedule must be"):
        train()


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_add_scaled(scale):
    x, y = torch.tensor([1.0]), torch.tensor([4.0], dtype=torch.bfloat16)
    found = add_scaled(x, scale, y)
    assert found.dtype == torch.float32
    assert found.item() == 3.0


def test_memory_is_reused_only_where_nothing_can_notice():
    plain, required = torch.ones(2), torch.ones(2, requires_grad=True)
    assert reusable(plain, plain, 0.5) is plain
    assert reusable(plain, required) is None
    with torch.no_grad():
        assert reusable(plain, required) is plain
    found = []

    def inside(x):
        found.append(reusable(plain))
        return x.sum()

    torch.func.vmap(inside)(plain)
    torch.func.grad(inside)(plain)
    torch.compile(inside, backend="eager", fullgraph=True)(plain)
    assert found == [None, None, None]
    assert reusable(torch.nn.Parameter(plain, requires_grad=False)) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (optim.adam, r"got <function adam at .*>; call it to make one$"),
        (torch.optim.AdamW, r"got <class 'torch.optim.adamw.AdamW'>$"),
        (torch.optim.SGD([torch.ones(1)], lr=0.1), r"got an instance of torch.optim.SGD$"),
        (None, "got None$"),
    ],
    ids=["function", "class", "torch", "none"],
)
def test_what_is_no_optimizer_is_named_with_what_to_do(value, message):
    with pytest.raises(TypeError, match=f"^group 'a' must be a GradientTransformation such as fmp.optim.* {message}"):
        check_transformation("group 'a'", value)
    check_transformation("group 'a'", optim.adam(0.1))
