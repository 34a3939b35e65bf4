import pytest
import torch

from fmp import optim, tree


def steps(tx, values, grads, count):
    state = tx.init(values)
    for _ in range(count):
        updates, state = tx.update(grads, state, values)
        values = optim.apply_updates(values, updates)
    return values, state


@pytest.mark.parametrize(
    "tx",
    [
        optim.adam(1e-3),
        optim.inject_hyperparams(optim.adam)(learning_rate=1e-3, b1=0.9, b2=0.999),
    ],
    ids=["plain", "injected"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_second_moment_does_not_stall(tx, dtype):
    values = {"w": torch.ones(2, dtype=dtype)}
    _, state = steps(tx, values, {"w": torch.ones(2, dtype=dtype)}, 1000)
    state = getattr(state, "inner", state)
    assert state.second_moment["w"].dtype == torch.float32
    assert state.second_moment["w"][0].item() == pytest.approx(1.0 - 0.999**1000, rel=1e-4)  # 0.632
    assert state.count.item() == 1000


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
def test_first_step_loses_no_digits_in_float32(magnitude):
    grads = {"w": torch.tensor([magnitude, -magnitude])}
    tx = optim.adam(0.1, eps=0.0)
    updates, _ = tx.update(grads, tx.init(grads), grads)
    assert updates["w"].tolist() == pytest.approx([-0.1, 0.1], rel=4e-7)


def test_decay_of_adamw_ignores_the_gradient():
    values = {"w": torch.tensor([2.0])}
    zero = {"w": torch.zeros(1)}
    assert steps(optim.adamw(0.1, weight_decay=0.5), values, zero, 1)[0]["w"].item() == pytest.approx(1.9)
    assert steps(optim.adam(0.1, weight_decay=0.5), values, zero, 1)[0]["w"].item() == pytest.approx(1.9)
    # With L2 the second step is as long as the first, however small the decay; without, it shrinks with the weight.
    assert steps(optim.adamw(0.1, weight_decay=1e-4), values, zero, 1)[0]["w"].item() == pytest.approx(1.99998)
    assert steps(optim.adam(0.1, weight_decay=1e-4), values, zero, 1)[0]["w"].item() == pytest.approx(1.9, abs=1e-4)


@pytest.mark.parametrize(
    "mask",
    [
        {"layer": True, "norm": {"weight": False, "bias": False}},
        {"layer": True, "norm": False},
        ["layer"],
        iter(["*/layer.w*"]),
        lambda path: path == "layer/weight",
    ],
    ids=["tree", "prefix", "patterns", "iterator", "function"],
)
def test_mask_says_what_decays(mask):
    values = {"layer": {"weight": torch.ones(1)}, "norm": {"weight": torch.ones(1), "bias": torch.ones(1)}}
    tx = optim.adamw(0.1, weight_decay=0.5, mask=mask)
    for _ in range(2):
        updates, _ = tx.update(tree.map(torch.zeros_like, values), tx.init(values), values)
        assert updates["layer"]["weight"].item() == pytest.approx(-0.05)
        assert updates["norm"] == {"weight": torch.zeros(1), "bias": torch.zeros(1)}


def test_first_update_asks_the_schedule_at_zero():
    asked = []

    def schedule(count):
        asked.append(count.item())
        return torch.tensor(0.5)

    values = {"w": torch.ones(1)}
    steps(optim.adam(schedule), values, values, 3)
    assert asked == [0, 1, 2]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("b1", 1.0),
        ("b1", -0.1),
        ("b2", 1.0),
        ("b2", float("nan")),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("weight_decay", torch.ones(2)),
    ],
)
@pytest.mark.parametrize("make", [optim.adam, optim.adamw])
def test_bad_numbers_are_refused(make, argument, value):
    with pytest.raises(ValueError, match=argument):
        make(**{"learning_rate": 0.1, argument: value})


@pytest.mark.parametrize("value", ["0.1", None, True])
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="learning_rate"):
        optim.adam(value)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ({"w": 1}, TypeError, "mask must say True or False for 'w', got 1"),
        ({"v": True}, ValueError, "structure of mask does not fit"),
        (lambda path: None, TypeError, "mask must say True or False for 'w', got None"),
        ("w", TypeError, "collection of strings"),
    ],
)
def test_bad_masks_are_refused(mask, error, message):
    with pytest.raises(error, match=message):
        optim.adamw(0.1, mask=mask).init({"w": torch.ones(1)})


@pytest.mark.parametrize("ours", [optim.adam, optim.adamw])
def test_a_parameter_without_gradient_does_not_age(ours):
    values = {"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    reference = {optim.adam: torch.optim.Adam, optim.adamw: torch.optim.AdamW}[ours](theirs.values(), lr=0.1)
    tx = ours(0.1)
    state = tx.init(values)
    for index in range(6):
        grads = {"a": torch.tensor([0.1, -2.0], dtype=torch.float64) + index, "b": None if index % 2 else values["b"]}
        updates, state = tx.update(grads, state, values)
        for name, grad in grads.items():
            theirs[name].grad = grad
        reference.step()
        values = optim.apply_updates(values, updates)
    for name, value in values.items():
        torch.testing.assert_close(value, theirs[name].detach(), rtol=1e-10, atol=0)
    assert [age.item() for age in state.ages.values()] == [6, 3]


@pytest.mark.parametrize("ours", [optim.adam, optim.adamw])
def test_parameters_on_two_devices(ours):
    tx, values = ours(0.1), {"a": torch.ones(3), "b": torch.ones(2, device="meta"), "c": torch.full((2,), 0.5)}
    grads = {name: torch.full_like(value, 0.25) for name, value in values.items()}
    new, state = steps(tx, values, grads, 2)
    assert {name: value.device.type for name, value in new.items()} == {"a": "cpu", "b": "meta", "c": "cpu"}
    assert state.ages["b"].device.type == "meta"
    here = {name: leaf for name, leaf in values.items() if name != "b"}
    expected, _ = steps(tx, here, {name: grads[name] for name in here}, 2)
    assert all(torch.equal(new[name], expected[name]) for name in here)
