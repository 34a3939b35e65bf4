import pytest
import torch

from fmp import optim, tree
from fmp.optim import schedules

SHAPES = {
    "scalar": (),
    "vector": (5,),
    "matrix": (4, 3),
    "row": (1, 6),
    "column": (6, 1),
    "stack": (2, 3, 4),
    "kernel": (2, 1, 3, 3),
}


def start(dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(1)
    make = lambda shape: scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return {name: make(shape).to(dtype) for name, shape in SHAPES.items()}


def gradient(param, step):
    return param**3 + torch.cos(3.0 * param + step) + 0.1 * step


def run(tx, values, steps=20, missing=lambda name, step: False):
    state = tx.init(values)
    for step in range(steps):
        grads = {name: None if missing(name, step) else gradient(value, step) for name, value in values.items()}
        updates, state = tx.update(grads, state, values)
        values = optim.apply_updates(values, updates)
    return values, state


def run_torch(values, steps=20, missing=lambda name, step: False, rates=None, **kwargs):
    values = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    optimizer = torch.optim.Adafactor(values.values(), **kwargs)
    for step in range(steps):
        for name, value in values.items():
            value.grad = None if missing(name, step) else gradient(value.detach(), step)
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates(torch.tensor(step)).item()
        optimizer.step()
    return {name: value.detach() for name, value in values.items()}, {
        name: optimizer.state[value] for name, value in values.items()
    }


CASES = {
    "default": ({}, {}),
    "decay": ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
    "beta2": ({"beta2_decay": -0.3}, {"beta2_decay": -0.3}),
    "beta2 0": ({"beta2_decay": 0.0}, {"beta2_decay": 0.0}),
    "eps": ({"eps1": 0.3, "eps2": 0.9}, {"eps": (0.3, 0.9)}),
    "paper": ({"eps1": 1e-30, "eps2": 1e-3}, {"eps": (1e-30, 1e-3)}),
    "threshold": ({"clipping_threshold": 1.5}, {"d": 1.5}),
    "everything": (
        {"beta2_decay": -0.5, "eps1": 1e-2, "eps2": 1e-1, "clipping_threshold": 1.2, "weight_decay": 0.3},
        {"beta2_decay": -0.5, "eps": (1e-2, 1e-1), "d": 1.2, "weight_decay": 0.3},
    ),
}


@pytest.mark.parametrize("rate", [0.01, 0.9])
@pytest.mark.parametrize(("ours", "theirs"), CASES.values(), ids=CASES.keys())
def test_is_torch_optim(ours, theirs, rate):
    values, state = run(optim.adafactor(rate, **ours), start())
    expected, expected_state = run_torch(start(), lr=rate, **theirs)
    torch.testing.assert_close(values, expected, rtol=1e-11, atol=1e-13)
    for name, theirs in expected_state.items():
        for own, other in {"row": "row_var", "column": "col_var", "full": "variance", "ages": "step"}.items():
            found = getattr(state, own)[name]
            assert (found is None) == (other not in theirs)
            if found is not None:
                torch.testing.assert_close(found, theirs[other], rtol=1e-11, atol=0, check_dtype=False)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_float32_is_torch_optim(scale):
    start32 = start(torch.float32, scale)
    values, _ = run(optim.adafactor(0.01), start32)
    torch.testing.assert_close(values, run_torch(start32, lr=0.01)[0], rtol=1e-5, atol=1e-6)


def test_tensors_are_numbers():
    numbers = (0.05, -0.7, 1e-3, 1e-2, 1.3, 0.1)
    values, _ = run(optim.adafactor(*(torch.tensor(number, dtype=torch.float64) for number in numbers)), start())
    expected, _ = run(optim.adafactor(*numbers), start())
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=0)


def test_a_schedule_is_asked_at_the_number_of_updates():
    schedule = schedules.warmup_cosine_decay(0.0, 0.3, 5, 18)
    values, _ = run(optim.adafactor(schedule, weight_decay=0.1), start())
    expected, _ = run_torch(start(), rates=schedule, weight_decay=0.1)
    # A schedule's values are float32.
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-7)


def test_a_late_parameter_has_its_own_time():
    missing = lambda name, step: step % 3 != 2 if name in ("matrix", "scalar") else step == 5
    values, state = run(optim.adafactor(0.5), start(), missing=missing)
    expected, _ = run_torch(start(), lr=0.5, missing=missing)
    torch.testing.assert_close(values, expected, rtol=1e-11, atol=1e-13)
    assert state.ages["matrix"].item() == 6
    assert state.ages["vector"].item() == 19
    assert state.count.item() == 20


def test_a_matrix_costs_a_row_and_a_column():
    params = {"w": torch.ones(30, 20, dtype=torch.bfloat16), "b": torch.ones(20).half(), "ids": torch.arange(2)}
    state = optim.adafactor(0.1).init({**params, "hole": None})
    assert tree.describe(state.row) == "{'w': f32[30,1], 'b': None, 'ids': None, 'hole': None}"
    assert tree.describe(state.column) == "{'w': f32[1,20], 'b': None, 'ids': None, 'hole': None}"
    assert tree.describe(state.full) == "{'w': None, 'b': f32[20], 'ids': None, 'hole': None}"


def test_half_parameters_are_computed_in_float32():
    half = start(torch.bfloat16)
    wide = {name: value.float() for name, value in half.items()}
    grads = {name: torch.randn(value.shape).bfloat16() for name, value in half.items()}
    wide_grads = {name: grad.float() for name, grad in grads.items()}
    tx = optim.adafactor(0.1, weight_decay=0.1)
    found, state = tx.update(grads, tx.init(half), half)
    expected, expected_state = tx.update(wide_grads, tx.init(wide), wide)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(tree.leaves(state), tree.leaves(expected_state), rtol=0, atol=0)


@pytest.mark.parametrize("eps1", [None, 0.0, 1e-30, torch.tensor(0.0), torch.tensor(1e-30)])
def test_zero_gradients_are_finite_whatever_the_epsilon(eps1):
    values = start(torch.float32)
    zeros = {name: torch.zeros_like(value) for name, value in values.items()}
    half_zero = {name: torch.zeros_like(value) for name, value in values.items()}
    half_zero["matrix"][0] = 1.0
    tx = optim.adafactor(0.1, eps1=eps1)
    state = tx.init(values)
    for grads in (zeros, half_zero, zeros):
        updates, state = tx.update(grads, state, values)
        assert tree.all_finite((updates, state))
        assert all(not updates[name][grads[name] == 0].any() for name in values)
    assert tx.update(half_zero, state, values)[0]["matrix"][0].all()


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e15])
def test_products_of_means_stay_in_range(size):
    grads = {"w": size * torch.randn(4, 3, dtype=torch.float64)}
    params = {"w": torch.randn(4, 3, dtype=torch.float64)}
    narrow = lambda each: {"w": each["w"].float()}
    tx = optim.adafactor(0.1, eps1=1e-30)
    expected, _ = tx.update(grads, tx.init(params), params)
    found, _ = tx.update(narrow(grads), tx.init(narrow(params)), narrow(params))
    torch.testing.assert_close(found, narrow(expected), rtol=1e-4, atol=0)


def test_parameters_of_zero_begin_to_move():
    values = {"w": torch.zeros(3, 2), "b": torch.zeros(2)}
    grads = {"w": torch.full((3, 2), -2.0), "b": torch.full((2,), 5.0)}
    updates, _ = optim.adafactor(0.1, eps2=1e-2).update(grads, optim.adafactor(0.1).init(values), values)
    torch.testing.assert_close(updates, {"w": torch.full((3, 2), 1e-3), "b": torch.full((2,), -1e-3)})


def test_derivatives_at_zero_are_finite():
    tx = optim.adafactor(0.1)

    def total(grads, params):
        updates, state = tx.update(grads, tx.init(params), params)
        return sum(leaf.sum() for leaf in tree.leaves((updates, state.row, state.full)) if leaf is not None)

    zeros = {"w": torch.zeros(3, 2), "b": torch.zeros(2)}
    assert tree.all_finite(torch.func.grad(total, argnums=(0, 1))(zeros, zeros))


def test_empty_parameters_leave_no_trace():
    values = {"none": torch.zeros(0), "no columns": torch.zeros(3, 0), "no rows": torch.zeros(0, 3), "w": torch.ones(2)}
    tx = optim.adafactor(0.1, weight_decay=0.1)
    state = tx.init(values)
    update = torch.compile(tx.update, backend="aot_eager", fullgraph=True)
    for function in (tx.update, update):
        updates, new_state = function(values, state, values)
        assert {name: each.shape for name, each in updates.items()} == {n: v.shape for n, v in values.items()}
        assert tree.all_finite((updates, new_state))


def test_hyperparameters_may_be_state():
    kwargs = {"learning_rate": 0.05, "beta2_decay": -0.7, "eps1": 1e-3, "clipping_threshold": 1.3}
    values, state = run(optim.inject_hyperparams(optim.adafactor)(**kwargs), start(torch.float32))
    expected, _ = run(optim.adafactor(**kwargs), start(torch.float32))
    torch.testing.assert_close(values, expected)
    assert sorted(state.hyperparams) == sorted(kwargs)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("learning_rate", -1.0),
        ("beta2_decay", 0.8),
        ("beta2_decay", float("nan")),
        ("beta2_decay", -float("inf")),
        ("eps1", -1e-30),
        ("eps2", float("inf")),
        ("clipping_threshold", 0.5),
        ("weight_decay", -0.1),
    ],
)
def test_bad_numbers_are_refused(argument, value):
    with pytest.raises(ValueError, match=argument):
        optim.adafactor(**{"learning_rate": 0.1, argument: value})


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_square_that_overflows_makes_no_nan(shape):
    params = {"w": torch.ones(shape)}
    tx = optim.adafactor(0.5)
    state = tx.init(params)
    for sign in (1.0, -1.0):
        grad = torch.tensor([sign * 3.3e38, 1e30, 1.0, 1e-3]).reshape(shape)
        updates, state = tx.update({"w": grad}, state, params)
        assert updates["w"].isfinite().all()
        assert updates["w"].flatten()[0].abs() < 1e-12
