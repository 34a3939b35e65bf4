import math

import pytest
import torch
from hypothesis import example, given, strategies as st

from fmp import optim, tree


def clipped(grads, max_norm):
    return optim.clip_by_global_norm(max_norm).update(grads, (), grads)[0]


# Squares of smaller numbers lose digits in float32.
ENTRIES = st.floats(-1e6, 1e6, width=32).filter(lambda entry: entry == 0.0 or abs(entry) > 1e-15)


# So does a factor below the normal numbers.
BOUNDS = st.floats(0.0, 1e4).filter(lambda bound: bound == 0.0 or bound > 1e-25)


@given(st.lists(ENTRIES, min_size=1, max_size=6), BOUNDS)
@example([0.0, 1.0], 9.659016297008947e-22)
def test_norm_is_bounded_and_direction_kept(entries, max_norm):
    grads = [torch.tensor([entry]) for entry in entries]
    norm = tree.global_norm(grads).item()
    factor = max_norm / max(norm, max_norm) if max_norm else 0.0
    torch.testing.assert_close(clipped(grads, max_norm), [grad * factor for grad in grads], rtol=1e-5, atol=1e-30)
    assert torch.stack(clipped(grads, max_norm)).double().norm().item() <= max_norm * (1 + 1e-6)


def test_half_gradients_beyond_their_own_range():
    grads = {"w": torch.full((1000,), 3000.0, dtype=torch.float16)}
    found = clipped(grads, 1.0)
    assert found["w"].dtype == torch.float32
    assert tree.global_norm(found).item() == pytest.approx(1.0, rel=1e-6)


def test_clip_to_zero():
    assert clipped({"w": torch.zeros(2)}, 0.0)["w"].tolist() == [0.0, 0.0]
    assert clipped({"w": torch.ones(2)}, 0.0)["w"].tolist() == [0.0, 0.0]


def test_small_gradients_keep_every_bit():
    grads = {"w": torch.randn(5), "b": torch.randn(3)}
    norm = tree.global_norm(grads).item()
    for max_norm in (norm, 2 * norm, math.inf):
        found = clipped(grads, max_norm)
        assert torch.equal(found["w"], grads["w"])
        assert torch.equal(found["b"], grads["b"])


def test_members_are_clipped_by_their_own_norm():
    grads = torch.tensor([[3.0, 4.0], [0.3, 0.4], [30.0, 40.0]])
    found = torch.func.vmap(lambda grad: clipped({"w": grad}, 1.0)["w"])(grads)
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.6, 0.8]]))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_leaf_leaves_others_finite_and_stays_visible(bad):
    found = clipped({"bad": torch.tensor([1.0, bad]), "good": torch.tensor([2.0])}, 1.0)
    assert found["good"].tolist() == [0.0]
    assert found["bad"][0] == 0.0
    assert found["bad"][1].isnan()


def test_a_norm_that_overflows_stops_the_step():
    assert clipped({"w": torch.tensor([2e19, 2e19])}, 1.0)["w"].tolist() == [0.0, 0.0]


def test_complex_gradients_count_and_are_clipped():
    found = clipped({"w": torch.tensor([3.0 + 4.0j])}, 1.0)["w"]
    torch.testing.assert_close(found, torch.tensor([0.6 + 0.8j]))


def test_holes_and_integers_pass():
    ids = torch.arange(3)
    found = clipped({"w": torch.ones(1), "ids": ids, "hole": None}, 0.5)
    assert found["ids"] is ids
    assert found["hole"] is None


def test_derivative_at_zero_gradients_is_finite():
    derivative = torch.func.grad(lambda grad: clipped({"w": grad}, 1.0)["w"].sum())(torch.zeros(3))
    assert derivative.tolist() == [1.0, 1.0, 1.0]


def test_bound_may_be_a_tensor_even_one_a_member():
    grad = torch.tensor([3.0, 4.0])
    assert clipped({"w": grad}, torch.tensor(1.0))["w"].tolist() == pytest.approx([0.6, 0.8])
    found = torch.func.vmap(lambda bound: clipped({"w": grad}, bound)["w"])(torch.tensor([1.0, 10.0]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [3.0, 4.0]]))


@pytest.mark.parametrize("value", [-1.0, math.nan, torch.ones(2), 10**40, 2**63, 1e39])
def test_bad_bounds_are_refused(value):
    with pytest.raises(ValueError, match="max_norm"):
        optim.clip_by_global_norm(value)


def limited(grads, max_delta):
    return optim.clip_by_value(max_delta).update(grads, (), grads)[0]


@given(st.lists(st.floats(width=32), max_size=6), st.floats(0.0, 2.0**100, width=32) | st.just(math.inf))
def test_clip_by_value_is_that_of_torch(entries, max_delta):
    param = torch.zeros(len(entries), requires_grad=True)
    grad = torch.tensor(entries, dtype=torch.float32)
    param.grad = grad.clone()
    torch.nn.utils.clip_grad_value_(param, max_delta)
    torch.testing.assert_close(limited(grad, max_delta), param.grad, rtol=0, atol=0, equal_nan=True)


def test_clip_by_value_keeps_nan_and_bounds_inf():
    found = limited({"w": torch.tensor([math.nan, math.inf, -math.inf, -0.5])}, 1.0)["w"]
    torch.testing.assert_close(found, torch.tensor([math.nan, 1.0, -1.0, -0.5]), rtol=0, atol=0, equal_nan=True)


def test_clip_by_value_of_half_gradients_is_not_rounded():
    found = limited({"w": torch.tensor([3.0, 0.5], dtype=torch.float16), "d": torch.ones(1).double()}, 0.1)
    assert found["w"].tolist() == [torch.tensor(0.1).item()] * 2
    assert found["d"].tolist() == [0.1]


def test_clip_by_value_leaves_holes_and_integers():
    ids = torch.arange(3)
    found = limited({"w": torch.ones(()), "ids": ids, "hole": None}, 0.5)
    assert found == {"w": torch.tensor(0.5), "ids": ids, "hole": None}
    assert found["ids"] is ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_value_bound_may_be_a_tensor_even_one_a_member(dtype):
    grad = torch.tensor([3.0, -4.0])
    found = torch.func.vmap(lambda bound: limited(grad, bound))(torch.tensor([1.0, 3.5], dtype=dtype))
    assert found.dtype == torch.float32
    assert found.tolist() == [[1.0, -1.0], [3.0, -3.5]]


def test_derivative_of_a_clipped_value():
    derivative = torch.func.grad(lambda grad: limited(grad, 1.0).sum())(torch.tensor([-2.0, 0.0, 0.5, 2.0]))
    assert derivative.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_complex_values_are_refused():
    with pytest.raises(TypeError, match=r"a/w: c64\[2\] has no order to clip by; use clip_by_global_norm"):
        limited({"a": {"w": torch.zeros(2, dtype=torch.complex64)}, "b": torch.zeros(1)}, 1.0)


@pytest.mark.parametrize("value", [-1.0, math.nan, torch.ones(2), 1e39])
def test_bad_value_bounds_are_refused(value):
    with pytest.raises(ValueError, match="max_delta"):
        optim.clip_by_value(value)


def test_the_norm_must_be_a_scalar_tensor_and_the_bound_a_bound():
    grads = {"w": torch.ones(2)}
    with pytest.raises(TypeError, match=r"norm must be a 0-dim tensor, as fmp.global_norm returns it, got 2.0"):
        optim.clip_to_norm(grads, 2.0, 1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="norm must be a number or a 0-dim tensor"):
        optim.clip_factor(torch.ones(2), 1.0)
    with pytest.raises(ValueError, match="max_norm"):
        optim.clip_factor(torch.ones(()), -1.0)
    with pytest.raises(TypeError, match="max_norm"):
        optim.clip_by_global_norm(None)  # pyright: ignore[reportArgumentType]
