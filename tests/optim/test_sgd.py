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
