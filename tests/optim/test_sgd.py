import pytest
import torch

from fmp import optim


def test_without_momentum_there_is_no_sum():
    for momentum in (None, 0, 0.0):
        state = optim.sgd(0.1, momentum=momentum).init({"w": torch.ones(2)})
        assert state.momentum is None


def test_learning_rate_may_be_a_tensor_of_any_dtype():
    values = {"w": torch.ones(2), "scalar": torch.tensor(1.0)}
    tx = optim.sgd(torch.tensor(0.5, dtype=torch.float64), momentum=torch.tensor(0.9, dtype=torch.float64))
    updates, state = tx.update(values, tx.init(values), values)
    assert updates["w"].tolist() == [-0.5, -0.5]
    assert updates["scalar"].dtype == state.momentum["scalar"].dtype == torch.float32


def test_a_tensor_momentum_of_zero_gives_plain_sgd():
    values = {"w": torch.ones(2)}
    tx = optim.sgd(0.5, momentum=torch.tensor(0.0))
    state = tx.init(values)
    for _ in range(2):
        updates, state = tx.update(values, state, values)
        assert updates["w"].tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("dampening", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_the_first_gradient_of_a_late_parameter_is_not_dampened(dampening):
    values = {"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64), "ids": torch.arange(2)}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in values.items() if name != "ids"}
    reference = torch.optim.SGD(theirs.values(), lr=0.1, momentum=0.9, dampening=0.5)
    tx = optim.sgd(0.1, momentum=0.9, dampening=dampening)
    state = tx.init(values)
    for index in range(6):
        grads = {"a": values["a"] + index, "b": values["b"] if index % 3 == 2 else None, "ids": None}
        for name, param in theirs.items():
            param.grad = grads[name]
        reference.step()
        updates, state = tx.update(grads, state, values)
        values = optim.apply_updates(values, updates)
    for name, param in theirs.items():
        torch.testing.assert_close(values[name], param.detach(), rtol=1e-12, atol=0)
    assert [age if age is None else age.item() for age in state.ages.values()] == [6, 2, None]


def test_without_dampening_there_are_no_ages():
    for tx in (optim.sgd(0.1), optim.sgd(0.1, dampening=0.5), optim.sgd(0.1, momentum=0.9, nesterov=True)):
        assert tx.init({"w": torch.ones(2)}).ages is None


def test_nesterov_may_come_with_a_tensor_dampening_of_zero():
    values = {"w": torch.ones(2), "scalar": torch.tensor(2.0)}
    plain = optim.sgd(0.1, momentum=0.9, nesterov=True)
    zero = optim.sgd(0.1, momentum=0.9, nesterov=True, dampening=torch.tensor(0.0))
    state, other = plain.init(values), zero.init(values)
    for _ in range(3):
        updates, state = plain.update(values, state, values)
        others, other = zero.update(values, other, values)
        torch.testing.assert_close(others, updates, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("learning_rate", -1.0),
        ("momentum", -0.1),
        ("momentum", float("nan")),
        ("weight_decay", -0.1),
        ("dampening", float("inf")),
    ],
)
def test_bad_numbers_are_refused(argument, value):
    with pytest.raises(ValueError, match=argument):
        optim.sgd(**{"learning_rate": 0.1, argument: value})


@pytest.mark.parametrize("kwargs", [{}, {"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_momentum_without_dampening(kwargs):
    with pytest.raises(ValueError, match="nesterov=True needs momentum and no dampening"):
        optim.sgd(0.1, nesterov=True, **kwargs)
