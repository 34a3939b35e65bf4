import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim, tree
from fmp.optim import schedules

WITH_ZEROS = {"matrix": (4, 3), "one": (1,), "scalar": (), "zeros": (2,)}


def gradient(param, step):
    return param**3 + torch.cos(3.0 * param + step) + 0.1 * step


def start():
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in WITH_ZEROS.items()}
    values["zeros"].zero_()
    return values


def norm(entries):
    return math.sqrt(math.fsum(entry * entry for entry in entries))


def by_the_paper(values, rate, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.0, mask=None, steps=20):
    """Algorithm 2 of the paper, with phi the identity, in Python's floats."""
    found = {}
    for name, value in values.items():
        x: list[float] = value.flatten().tolist()
        m, v = [0.0] * len(x), [0.0] * len(x)
        decay = weight_decay if mask is None or mask[name] else 0.0
        for t in range(1, steps + 1):
            g = [entry**3 + math.cos(3.0 * entry + (t - 1)) + 0.1 * (t - 1) for entry in x]
            m = [b1 * mi + (1.0 - b1) * gi for mi, gi in zip(m, g, strict=True)]
            v = [b2 * vi + (1.0 - b2) * gi * gi for vi, gi in zip(v, g, strict=True)]
            r = [mi / (1.0 - b1**t) / (math.sqrt(vi / (1.0 - b2**t)) + eps) for mi, vi in zip(m, v, strict=True)]
            u = [ri + decay * xi for ri, xi in zip(r, x, strict=True)]
            ratio = norm(x) / norm(u) if norm(x) > 0.0 and norm(u) > 0.0 else 1.0
            eta: Any = rate(t - 1) if callable(rate) else rate
            x = [xi - eta * ratio * ui for xi, ui in zip(x, u, strict=True)]
        found[name] = torch.tensor(x, dtype=torch.float64).reshape(value.shape)
    return found


def run(tx, values, steps=20):
    state = tx.init(values)
    for step in range(steps):
        updates, state = tx.update(tree.map(lambda param: gradient(param, step), values), state, values)
        values = optim.apply_updates(values, updates)
    return values, state


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"b1": 0.0, "b2": 0.0},
        {"b1": 0.5, "b2": 0.9, "eps": 0.01, "weight_decay": 0.3},
        {"weight_decay": 0.3, "mask": {"matrix": True, "one": False, "scalar": False, "zeros": True}},
    ],
    ids=str,
)
def test_is_the_algorithm_of_the_paper(options):
    found, state = run(optim.lamb(0.01, **options), start())
    torch.testing.assert_close(found, by_the_paper(start(), 0.01, **options), rtol=1e-9, atol=1e-12)
    assert state.count.item() == 20
    assert [age.item() for age in tree.leaves(state.ages)] == [20] * 4


def test_float32_is_the_algorithm_of_the_paper():
    values = tree.map(lambda value: value.float(), start())
    found, _ = run(optim.lamb(0.01, weight_decay=0.1), values)
    expected = by_the_paper(values, 0.01, weight_decay=0.1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_hyper_parameters_may_be_tensors():
    tx = optim.lamb(*(torch.tensor(value, dtype=torch.float64) for value in (0.01, 0.8, 0.9, 1e-5, 0.1)))
    expected = by_the_paper(start(), 0.01, b1=0.8, b2=0.9, eps=1e-5, weight_decay=0.1)
    torch.testing.assert_close(run(tx, start())[0], expected, rtol=1e-9, atol=1e-12)


def test_first_update_asks_the_schedule_at_zero():
    found, _ = run(optim.lamb(schedules.piecewise_constant([0.5, 0.25, 0.125], [1, 2])), start(), steps=4)
    expected = by_the_paper(start(), lambda step: [0.5, 0.25, 0.125, 0.125][step], steps=4)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@given(st.floats(1e-18, 1e18), st.floats(1e-6, 1e6), st.sampled_from([0.0, 0.5]))
def test_a_step_is_the_rate_times_the_norm_of_the_parameter(grad_size, size, decay):
    values = {"w": size * torch.linspace(-1.0, 2.0, 7), "scalar": torch.tensor(size)}
    grads = {"w": grad_size * torch.linspace(1.0, 2.0, 7), "scalar": torch.tensor(-grad_size)}
    tx = optim.lamb(0.25, eps=0.0, weight_decay=decay)
    updates, _ = tx.update(grads, tx.init(values), values)
    for name, value in values.items():
        if name == "scalar" and decay * size == 1.0:
            continue  # the decay cancels the direction
        assert updates[name].norm().item() == pytest.approx(0.25 * value.norm().item(), rel=1e-4)


def test_the_norm_is_taken_in_float32():
    values = {"w": torch.full((4,), 6e4, dtype=torch.float16)}
    tx = optim.lamb(0.1)
    updates, _ = tx.update({"w": torch.full((4,), 6e4, dtype=torch.float16)}, tx.init(values), values)
    assert updates["w"].dtype == torch.float32
    assert updates["w"].tolist() == pytest.approx([-6e3] * 4, rel=1e-3)


@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e30, 3e38])
def test_gradients_at_the_ends_of_float32_give_finite_updates(size):
    values = {"w": torch.ones(3), "scalar": torch.ones(()), "zeros": torch.zeros(2)}
    tx = optim.lamb(0.1, weight_decay=0.1)
    updates, _ = tx.update(tree.map(lambda value: torch.full_like(value, size), values), tx.init(values), values)
    assert all(update.isfinite().all() for update in tree.leaves(updates))


def test_zero_parameters_and_zero_gradients_have_the_ratio_one():
    values = {"zeros": torch.zeros(2), "still": torch.ones(2)}
    tx = optim.lamb(0.1, eps=0.0)
    state = tx.init(values)
    updates, _ = tx.update({"zeros": torch.tensor([3.0, -3.0]), "still": None}, state, values)
    assert updates["zeros"].tolist() == pytest.approx([-0.1, 0.1])
    assert updates["still"] is None
    updates, _ = optim.lamb(0.1).update(tree.map(torch.zeros_like, values), state, values)
    assert not updates["zeros"].any()
    assert not updates["still"].any()


def test_leaves_without_entries_pass():
    values = {"empty": torch.zeros(0, 3)}
    tx = optim.lamb(0.1, weight_decay=0.1)
    updates, _ = tx.update(values, tx.init(values), values)
    assert updates["empty"].shape == (0, 3)


def test_derivative_is_finite_where_a_norm_is_zero():
    def moved(value, grad, decay):
        tx = optim.lamb(0.1, weight_decay=decay)
        return tx.update({"w": grad}, tx.init({"w": value}), {"w": value})[0]["w"].sum()

    assert torch.func.grad(moved)(torch.zeros(3), torch.ones(3), 0.1).isfinite().all()
    assert torch.func.grad(moved)(torch.ones(3), torch.zeros(3), 0.0).tolist() == [0.0, 0.0, 0.0]


def test_members_have_their_own_ratio():
    tx = optim.lamb(0.1)
    params = torch.tensor([[1.0, 1.0], [10.0, 10.0], [0.0, 0.0]])

    def move(value):
        return tx.update({"w": torch.ones(2)}, tx.init({"w": value}), {"w": value})[0]["w"]

    expected = torch.tensor([[-0.1, -0.1], [-1.0, -1.0], [-0.1, -0.1]])
    torch.testing.assert_close(torch.func.vmap(move)(params), expected)


def test_a_parameter_without_gradient_does_not_age():
    tx, values = optim.lamb(0.1), {"a": torch.ones(2), "b": torch.ones(2)}
    state = tx.init(values)
    for index in range(6):
        _, state = tx.update({"a": torch.ones(2), "b": None if index % 2 else torch.ones(2)}, state, values)
    assert [age.item() for age in state.ages.values()] == [6, 3]
    assert state.first_moment["b"][0].item() == pytest.approx(1.0 - 0.9**3)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", math.nan),
        ("b1", 1.0),
        ("b2", -0.1),
        ("eps", -1e-8),
        ("weight_decay", math.inf),
        ("weight_decay", torch.ones(2)),
    ],
)
def test_bad_numbers_are_refused(argument, value):
    with pytest.raises(ValueError, match=argument):
        optim.lamb(**{"learning_rate": 0.1, argument: value})


def test_other_types_are_refused():
    wrong: Any = "0.9"
    with pytest.raises(TypeError, match="b1"):
        optim.lamb(0.1, b1=wrong)
    with pytest.raises(TypeError, match="mask must say True or False for 'w', got 1"):
        optim.lamb(0.1, mask={"w": 1}).init({"w": torch.ones(1)})
    with pytest.raises(ValueError, match="mask: none of the patterns"):
        optim.lamb(0.1, mask=["bias"]).init({"w": torch.ones(1)})


def test_opposite_giants_do_not_become_nan():
    # Their squares overflow, so that they do not move at all; half of this would, if means were taken of differences.
    params = {"w": torch.ones(2)}
    tx = optim.lamb(0.1)
    giants = torch.tensor([3.3e38, -3.3e38])
    _, state = tx.update({"w": giants}, tx.init(params), params)
    updates, state = tx.update({"w": -giants}, state, params)
    assert state.first_moment["w"].isfinite().all()
    assert not updates["w"].any()


def test_parameters_are_needed():
    params = {"w": torch.ones(1)}
    tx = optim.lamb(0.1, mask={"w": True})
    with pytest.raises(TypeError, match="update needs the parameters, but params is None"):
        tx.update(params, tx.init(params), None)
