import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=12), st.floats(0, 0.999), st.booleans())
def test_is_its_formula(values, decay, debias):
    tx = optim.ema(decay, debias)
    params = {"w": torch.zeros((), dtype=torch.float64)}
    state = tx.init(params)
    for value in values:
        averages, state = tx.update({"w": torch.tensor(value, dtype=torch.float64)}, state, params)
    age = len(values)
    total = sum((1 - decay) * decay ** (age - 1 - index) * value for index, value in enumerate(values))
    expected = total / (1 - decay**age) if debias else total
    assert averages["w"].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_first_average_is_the_first_gradient():
    params = {"w": torch.randn(3, 2), "half": torch.randn(2).half(), "scalar": torch.randn(())}
    tx = optim.ema(0.999)
    averages, _ = tx.update(params, tx.init(params), params)
    for name, param in params.items():
        assert averages[name].dtype == torch.float32
        torch.testing.assert_close(averages[name], param.float(), rtol=1e-5, atol=0)


def test_a_long_average_of_half_gradients_goes_on():
    # In bfloat16 it would stall near a half, where a step of 1/500 of the rest is rounded away.
    params = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    tx = optim.ema(0.998, debias=False)
    state = tx.init(params)
    for _ in range(1500):
        _, state = tx.update({"w": torch.ones(1, dtype=torch.bfloat16)}, state, params)
    assert state.average["w"].item() == pytest.approx(1 - 0.998**1500, rel=1e-3)


def test_in_front_of_sgd_it_is_momentum():
    start = torch.randn(4, dtype=torch.float64)
    theirs = torch.nn.Parameter(start.clone())
    reference = torch.optim.SGD([theirs], lr=0.1 * (1 - 0.9), momentum=0.9)
    tx, ours = optim.chain(optim.ema(0.9, debias=False), optim.sgd(0.1)), {"w": start}
    state = tx.init(ours)
    for step in range(10):
        theirs.grad = (theirs.detach() + step).cos()
        reference.step()
        updates, state = tx.update({"w": (ours["w"] + step).cos()}, state, ours)
        ours = optim.apply_updates(ours, updates)
    torch.testing.assert_close(ours["w"], theirs.detach(), rtol=1e-12, atol=0)


def test_a_late_gradient_is_corrected_by_its_own_age():
    params = {"a": torch.ones(2), "b": torch.ones(2), "ids": torch.arange(2)}
    tx = optim.ema(0.9)
    state = tx.init(params)
    for _ in range(3):
        averages, state = tx.update({"a": params["a"], "b": None, "ids": None}, state, params)
        assert averages["b"] is None
        assert not state.average["b"].any()
    averages, state = tx.update({"a": params["a"], "b": params["b"], "ids": None}, state, params)
    torch.testing.assert_close((averages["a"], averages["b"]), (params["a"], params["b"]))
    assert [age if age is None else age.item() for age in state.ages.values()] == [4, 1, None]


def test_an_average_shares_no_memory_with_the_state():
    params = {"w": torch.ones(2)}
    for debias in (False, True):
        tx = optim.ema(0.0, debias)
        averages, state = tx.update(params, tx.init(params), params)
        averages["w"].zero_()
        assert state.average["w"].tolist() == [1.0, 1.0]
        assert params["w"].tolist() == [1.0, 1.0]


def test_members_may_have_a_decay_each():
    params = {"w": torch.ones(1)}
    average = lambda decay: optim.ema(decay, debias=False).update(params, optim.EmaState({"w": torch.zeros(1)}), params)
    found = torch.func.vmap(lambda decay: average(decay)[0]["w"])(torch.tensor([0.0, 0.25, 1.0]))
    assert found.flatten().tolist() == [1.0, 0.75, 0.0]


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan"), torch.ones(1)])
def test_bad_decays_are_refused(decay):
    with pytest.raises(ValueError, match="decay"):
        optim.ema(decay)


def test_the_mean_of_opposite_giants_is_finite():
    params = {"w": torch.zeros(2)}
    tx = optim.ema(0.75)
    giants = torch.tensor([3e38, -3e38])
    _, state = tx.update({"w": giants}, tx.init(params), params)
    averages, _ = tx.update({"w": -giants}, state, params)
    # (0.75 * 0.25 - 0.25) / (1 - 0.75**2) of the second.
    torch.testing.assert_close(averages["w"], -giants / 7)


def test_a_decay_of_zero_has_its_derivative():
    first, second = torch.tensor(2.0), torch.tensor(5.0)
    params = {"w": torch.zeros(())}

    def averages(decay):
        tx = optim.ema(decay)
        one, state = tx.update({"w": first}, tx.init(params), params)
        return torch.stack([one["w"], tx.update({"w": second}, state, params)[0]["w"]])

    # The second average is (decay * first + second) / (1 + decay).
    for decay, slope in (0.0, -3.0), (0.5, -3.0 / 2.25):
        found = torch.func.jacrev(averages)(torch.tensor(decay))
        torch.testing.assert_close(found, torch.tensor([0.0, slope]), atol=1e-6, rtol=1e-5)


def test_debias_is_a_bool():
    with pytest.raises(TypeError, match="debias must be True or False, got 'no'"):
        optim.ema(0.5, debias="no")  # pyright: ignore[reportArgumentType]
