import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim, tree
from fmp.optim import schedules


def gradient(param, step):
    return param**3 + torch.cos(3.0 * param + step) + 0.1 * step


def start():
    generator = torch.Generator().manual_seed(1)
    shapes = {"matrix": (4, 3), "one": (1,), "scalar": ()}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def by_the_paper(values, rate, b1=0.9, b2=0.99, weight_decay=1e-3, steps=20):
    """Algorithm 2 of the paper, entry by entry in Python's floats."""
    found = {}
    for name, value in values.items():
        entries = []
        for theta in value.flatten().tolist():
            momentum = 0.0
            for step in range(steps):
                grad = theta**3 + math.cos(3.0 * theta + step) + 0.1 * step
                c = b1 * momentum + (1.0 - b1) * grad
                sign = (c > 0.0) - (c < 0.0)
                eta = rate(step) if callable(rate) else rate
                theta = theta - eta * (sign + weight_decay * theta)
                momentum = b2 * momentum + (1.0 - b2) * grad
            entries.append(theta)
        found[name] = torch.tensor(entries, dtype=torch.float64).reshape(value.shape)
    return found


def run(tx, values, steps=20):
    state = tx.init(values)
    for step in range(steps):
        updates, state = tx.update(tree.map(lambda param: gradient(param, step), values), state, values)
        values = optim.apply_updates(values, updates)
    return values, state


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.0}, {"weight_decay": 0.5}, {"b1": 0.0, "b2": 0.0}, {"b1": 0.95, "b2": 0.98}],
    ids=str,
)
def test_is_the_algorithm_of_the_paper(options):
    found, state = run(optim.lion(0.01, **options), start())
    torch.testing.assert_close(found, by_the_paper(start(), 0.01, **options), rtol=1e-12, atol=1e-14)
    assert state.count.item() == 20


def test_hyper_parameters_may_be_tensors():
    tx = optim.lion(*(torch.tensor(value, dtype=torch.float64) for value in (0.01, 0.8, 0.9, 0.1)))
    expected = by_the_paper(start(), 0.01, b1=0.8, b2=0.9, weight_decay=0.1)
    torch.testing.assert_close(run(tx, start())[0], expected, rtol=1e-12, atol=1e-14)


def test_first_update_asks_the_schedule_at_zero():
    found, _ = run(optim.lion(schedules.piecewise_constant([0.5, 0.25, 0.125], [1, 2])), start())
    expected = by_the_paper(start(), lambda step: [0.5, 0.25][step] if step < 2 else 0.125)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_mask_says_what_decays():
    values = {"layer": {"weight": torch.ones(1), "bias": torch.ones(1)}}
    tx = optim.lion(0.1, weight_decay=0.5, mask=["*.weight"])
    updates, _ = tx.update(tree.map(torch.zeros_like, values), tx.init(values), values)
    assert updates["layer"]["weight"].item() == pytest.approx(-0.05)
    assert updates["layer"]["bias"].item() == 0.0


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_first_step_has_the_length_of_the_rate(entries):
    grads = {"w": torch.tensor(entries)}
    tx = optim.lion(0.25, b1=0.5, weight_decay=0.0)
    updates, state = tx.update(grads, tx.init(grads), grads)
    # Half of the smallest number is zero.
    expected = [-0.25 * (0.0 if abs(entry) < 3e-45 else math.copysign(1.0, entry)) for entry in entries]
    assert updates["w"].tolist() == expected
    assert state.momentum["w"].isfinite().all()


def test_opposite_gradients_near_the_largest_float_do_not_overflow():
    large = torch.finfo(torch.float32).max
    values = {"w": torch.ones(())}
    tx = optim.lion(0.1, b1=0.5, b2=0.1, weight_decay=0.0)
    state = tx.init(values)
    for sign in (1.0, -1.0, 1.0):
        updates, state = tx.update({"w": torch.tensor(sign * large)}, state, values)
        assert updates["w"].item() == pytest.approx(-0.1 * sign)
        assert state.momentum["w"].isfinite()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_gradient_stays_visible(bad):
    values = {"w": torch.ones(2)}
    tx = optim.lion(0.1)
    _, state = tx.update({"w": torch.tensor([1.0, bad])}, tx.init(values), values)
    assert state.momentum["w"].isfinite().tolist() == [True, False]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", math.inf),
        ("b1", 1.0),
        ("b2", 1.0),
        ("b2", math.nan),
        ("weight_decay", -1e-3),
        ("weight_decay", torch.ones(2)),
    ],
)
def test_bad_numbers_are_refused(argument, value):
    with pytest.raises(ValueError, match=argument):
        optim.lion(**{"learning_rate": 0.1, argument: value})


def test_other_types_are_refused():
    wrong: Any = None
    with pytest.raises(TypeError, match="weight_decay"):
        optim.lion(0.1, weight_decay=wrong)
    with pytest.raises(TypeError, match="mask must say True or False for 'w', got 1"):
        optim.lion(0.1, mask={"w": 1}).init({"w": torch.ones(1)})
    with pytest.raises(ValueError, match="mask: none of the patterns"):
        optim.lion(0.1, mask=["bias"]).init({"w": torch.ones(1)})


def test_parameters_are_needed():
    params = {"w": torch.ones(1)}
    tx = optim.lion(0.1, mask={"w": True})
    with pytest.raises(TypeError, match="update needs the parameters, but params is None"):
        tx.update(params, tx.init(params), None)
