import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim, tree
from fmp.optim import schedules

STEPS = 20


def gradient(param, step):
    return param**3 + torch.cos(3.0 * param + step) + 0.1 * step


def start(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = {"matrix": (4, 3), "one": (1,), "scalar": ()}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def run(tx, values, grads=gradient):
    state = tx.init(values)
    for step in range(STEPS):
        updates, state = tx.update(tree.map(lambda param: grads(param, step), values), state, values)
        values = optim.apply_updates(values, updates)
    return values, state


def run_torch(values, grads=gradient, scheduler=None, **options):
    values = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    optimizer = torch.optim.RMSprop(values.values(), **options)
    scheduler = scheduler(optimizer) if scheduler else None
    for step in range(STEPS):
        for value in values.values():
            value.grad = grads(value.detach(), step)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return {name: value.detach() for name, value in values.items()}


@pytest.mark.parametrize(
    ("weight_decay", "momentum", "centered", "decay"),
    # A single gradient has no variance: with no memory, centering leaves nothing to divide by.
    [
        case
        for case in itertools.product([0.0, 0.1], [0.0, 0.9, 1.5], [False, True], [0.0, 0.5, 0.99])
        if case[2:] != (True, 0.0)
    ],
)
def test_is_torch_rmsprop(weight_decay, momentum, centered, decay):
    ours = optim.rmsprop(0.01, decay, 1e-6, weight_decay, momentum, centered)
    expected = run_torch(
        start(), lr=0.01, alpha=decay, eps=1e-6, weight_decay=weight_decay, momentum=momentum, centered=centered
    )
    torch.testing.assert_close(run(ours, start())[0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_float32_is_torch_rmsprop(momentum, centered):
    ours = run(optim.rmsprop(0.01, momentum=momentum, centered=centered), start(torch.float32))[0]
    expected = run_torch(start(torch.float32), lr=0.01, momentum=momentum, centered=centered)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_defaults_are_those_of_torch():
    torch.testing.assert_close(run(optim.rmsprop(0.01), start())[0], run_torch(start(), lr=0.01), rtol=1e-10, atol=0.0)


def test_hyper_parameters_may_be_tensors():
    values = [torch.tensor(value, dtype=torch.float64) for value in (0.01, 0.9, 1e-6, 0.1, 0.8)]
    names = ("learning_rate", "decay", "eps", "weight_decay", "momentum")
    hyperparams: dict[str, Any] = dict(zip(names, values, strict=True))
    tx = optim.rmsprop(**hyperparams)
    expected = run_torch(start(), lr=0.01, alpha=0.9, eps=1e-6, weight_decay=0.1, momentum=0.8)
    torch.testing.assert_close(run(tx, start())[0], expected, rtol=1e-10, atol=0.0)


def test_schedule_is_that_of_torch():
    tx = optim.rmsprop(schedules.exponential_decay(0.01, 1, 0.9), momentum=0.5)
    scheduler = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    expected = run_torch(start(), scheduler=scheduler, lr=0.01, momentum=0.5)
    found, state = run(tx, start())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert state.count.item() == STEPS


def test_a_parameter_without_gradient_waits():
    values, theirs = start(), {name: torch.nn.Parameter(value) for name, value in start().items()}
    tx = optim.rmsprop(0.1, momentum=0.9, centered=True)
    reference = torch.optim.RMSprop(theirs.values(), lr=0.1, momentum=0.9, centered=True)
    state = tx.init(values)
    for step in range(6):
        grads = {name: gradient(value, step) for name, value in values.items()}
        if step % 2:
            grads["matrix"] = None
        for name, grad in grads.items():
            theirs[name].grad = grad
        updates, state = tx.update(grads, state, values)
        reference.step()
        values = optim.apply_updates(values, updates)
    torch.testing.assert_close(values, {name: value.detach() for name, value in theirs.items()}, rtol=1e-10, atol=0.0)


def test_variance_that_rounds_below_zero_gives_no_nan():
    """A gradient that stays the same has the variance zero; torch takes the root of what rounding makes of it."""
    values = {"w": torch.zeros(4096)}
    grads = {"w": torch.linspace(0.5, 1.5, 4096)}
    tx = optim.rmsprop(1e-3, decay=0.5, centered=True)
    state = tx.init(values)
    for _ in range(60):
        updates, state = tx.update(grads, state, values)
        assert updates["w"].isfinite().all()
    assert (state.second_moment["w"] < state.first_moment["w"] ** 2).any()


def test_state_holds_what_is_needed():
    values = start()
    plain, full = optim.rmsprop(0.1).init(values), optim.rmsprop(0.1, momentum=0.9, centered=True).init(values)
    assert plain.first_moment is None
    assert plain.momentum is None
    assert tree.paths(full.first_moment) == tree.paths(full.momentum) == tree.paths(values)


@given(st.floats(1e-18, 1e18), st.sampled_from([-1.0, 1.0]), st.floats(0.0, 0.999))
def test_first_step_forgets_the_size_of_the_gradient(size, sign, decay):
    values = {"w": torch.ones(1)}
    tx = optim.rmsprop(0.1, decay=decay, eps=0.0)
    updates, _ = tx.update({"w": torch.tensor([sign * size])}, tx.init(values), values)
    assert updates["w"].item() == pytest.approx(-0.1 * sign / math.sqrt(1.0 - decay), rel=1e-4)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", math.nan),
        ("decay", 1.0),
        ("decay", -0.1),
        ("eps", -1e-8),
        ("weight_decay", math.inf),
        ("weight_decay", torch.ones(2)),
        ("momentum", -0.5),
    ],
)
def test_bad_numbers_are_refused(argument, value):
    with pytest.raises(ValueError, match=argument):
        optim.rmsprop(**{"learning_rate": 0.1, argument: value})


@pytest.mark.parametrize(("argument", "value"), [("learning_rate", "0.1"), ("momentum", None), ("centered", 1)])
def test_other_types_are_refused(argument, value):
    with pytest.raises(TypeError, match=argument):
        optim.rmsprop(**{"learning_rate": 0.1, argument: value})


def test_complex_parameters_are_refused_by_path():
    values = {"layer": {"w": torch.ones(1, dtype=torch.complex64)}}
    tx = optim.rmsprop(0.1)
    with pytest.raises(TypeError, match="layer/w"):
        tx.update(values, tx.init(values), values)


@pytest.mark.parametrize("centered", [False, True])
def test_an_entry_whose_square_overflows_stands_still(centered):
    params = {"w": torch.ones(2)}
    tx = optim.rmsprop(0.5, centered=centered)
    state = tx.init(params)
    for sign in (1.0, -1.0):
        updates, state = tx.update({"w": torch.tensor([sign * 3.3e38, 1.0])}, state, params)
        assert updates["w"][0] == 0
        assert updates["w"][1] < 0
