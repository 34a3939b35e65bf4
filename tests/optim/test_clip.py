import math

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim, tree


def clipped(grads, max_norm):
    return optim.clip_by_global_norm(max_norm).update(grads, (), grads)[0]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=6), st.floats(0.0, 1e4))
def test_norm_is_bounded_and_direction_kept(entries, max_norm):
    grads = [torch.tensor([entry]) for entry in entries]
    norm = tree.global_norm(grads).item()
    factor = max_norm / max(norm, max_norm) if max_norm else 0.0
    torch.testing.assert_close(clipped(grads, max_norm), [grad * factor for grad in grads], rtol=1e-5, atol=1e-30)
    assert tree.global_norm(clipped(grads, max_norm)).item() <= max_norm * (1 + 1e-6)


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
