from functools import partial

import pytest
import torch

from fmp import optim, tree
from fmp.optim import schedules

PARAMS = {"w": torch.tensor([1.0, -2.0])}
GRADS = {"w": torch.tensor([0.5, 0.5])}


def test_numbers_become_leaves():
    tx = optim.inject_hyperparams(optim.adamw)(learning_rate=1e-3, b2=0.99, weight_decay=0, mask=["w"])
    values = {"w": torch.ones(2, dtype=torch.bfloat16)}
    state = tx.init(values)
    assert tree.describe(state.hyperparams) == "{'learning_rate': f32[], 'b2': f32[], 'weight_decay': f32[]}"
    for _ in range(3):
        _, state = tx.update(values, state, values)
    assert state.hyperparams["b2"] == torch.tensor(0.99)
    assert state.count == state.inner.count == 3


def test_is_the_optimizer_without_injection():
    plain, injected = optim.adamw(0.1, weight_decay=0.5), optim.inject_hyperparams(optim.adamw)
    injected = injected(learning_rate=0.1, weight_decay=0.5)
    state, other, values = plain.init(PARAMS), injected.init(PARAMS), PARAMS
    for _ in range(10):
        updates, state = plain.update(GRADS, state, values)
        others, other = injected.update(GRADS, other, values)
        torch.testing.assert_close(others, updates)
        values = optim.apply_updates(values, updates)


def test_zeros_that_became_tensors_are_still_allowed():
    plain = optim.sgd(0.1, momentum=0.9, nesterov=True)
    injected = optim.inject_hyperparams(optim.sgd)(learning_rate=0.1, momentum=0.9, nesterov=True, dampening=0.0)
    state, other = plain.init(PARAMS), injected.init(PARAMS)
    for _ in range(3):
        updates, state = plain.update(GRADS, state, PARAMS)
        others, other = injected.update(GRADS, other, PARAMS)
        torch.testing.assert_close(others, updates)
    with pytest.raises(ValueError, match="nesterov=True needs momentum and no dampening"):
        optim.inject_hyperparams(optim.sgd)(learning_rate=0.1, momentum=0.9, nesterov=True, dampening=0.1)


def test_a_changed_value_is_used_and_kept():
    tx = optim.inject_hyperparams(optim.sgd)(learning_rate=1.0, momentum=0.5)
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    state = tree.replace(state, hyperparams={**state.hyperparams, "learning_rate": torch.tensor(0.0)})
    for _ in range(2):
        updates, state = tx.update(GRADS, state, PARAMS)
        assert not updates["w"].any()


def test_schedules_are_asked_at_each_step_and_logged():
    tx = optim.inject_hyperparams(optim.sgd)(
        learning_rate=schedules.linear(1.0, 0.0, 4), momentum=schedules.constant(0.0)
    )
    state = tx.init(PARAMS)
    assert state.hyperparams["learning_rate"] == 1.0
    for expected in (1.0, 0.75, 0.5):
        updates, state = tx.update(GRADS, state, PARAMS)
        torch.testing.assert_close(updates["w"], -expected * GRADS["w"])
        assert state.hyperparams["learning_rate"] == expected


def test_other_arguments_reach_the_factory_as_they_are():
    seen = {}

    def factory(**kwargs):
        seen.update(kwargs)
        return optim.sgd(kwargs["rate"])

    given = {"flag": True, "name": "x", "nothing": None, "sizes": [1, 2], "mask": lambda path: True, "block": 128}
    tx = optim.inject_hyperparams(factory, static=("mask", "block"))(rate=1, **given)
    state = tx.init(PARAMS)
    assert state.hyperparams.keys() == {"rate"}
    assert {name: seen[name] for name in given} == given
    assert tree.describe(seen["rate"]) == "f32[]"


def test_a_whole_chain_can_be_injected():
    tx = optim.inject_hyperparams(
        lambda learning_rate, max_norm: optim.chain(optim.clip_by_global_norm(max_norm), optim.sgd(learning_rate))
    )(learning_rate=2.0, max_norm=1.0)
    updates, state = tx.update({"w": torch.tensor([3.0, 4.0])}, tx.init(PARAMS), PARAMS)
    torch.testing.assert_close(updates["w"], torch.tensor([-1.2, -1.6]))
    assert state.hyperparams.keys() == {"learning_rate", "max_norm"}


def test_a_tensor_given_is_copied():
    rate = torch.tensor(0.1)
    state = optim.inject_hyperparams(optim.sgd)(learning_rate=rate).init(PARAMS)
    assert state.hyperparams["learning_rate"].data_ptr() != rate.data_ptr()


def test_members_train_with_rates_of_their_own():
    tx = optim.inject_hyperparams(optim.adam)(learning_rate=0.1)
    state = tx.init(PARAMS)

    def update(rate):
        return tx.update(GRADS, tree.replace(state, hyperparams={"learning_rate": rate}), PARAMS)[0]["w"]

    rates = torch.tensor([0.1, 0.2, 0.0])
    torch.testing.assert_close(torch.func.vmap(update)(rates), -rates[:, None].expand(3, 2))


def test_the_learning_rate_can_be_differentiated():
    tx = optim.inject_hyperparams(optim.sgd)(learning_rate=0.1)
    state = tx.init(PARAMS)

    def loss_after(rate):
        updates, _ = tx.update(GRADS, tree.replace(state, hyperparams={"learning_rate": rate}), PARAMS)
        return (optim.apply_updates(PARAMS, updates)["w"] ** 2).sum()

    # d/dr of sum (w - r g)^2 is -2 sum g (w - r g).
    expected = -2 * (GRADS["w"] * (PARAMS["w"] - 0.1 * GRADS["w"])).sum()
    torch.testing.assert_close(torch.func.grad(loss_after)(torch.tensor(0.1)), expected)


def test_bad_numbers_are_refused_at_once():
    with pytest.raises(ValueError, match="b1"):
        optim.inject_hyperparams(optim.adam)(learning_rate=0.1, b1=1.5)
    with pytest.raises(TypeError, match="no_such_argument"):
        optim.inject_hyperparams(optim.adam)(learning_rate=0.1, no_such_argument=1.5)


@pytest.mark.parametrize("rate", [0.5, schedules.linear(0.5, 0.0, 4)], ids=["number", "schedule"])
def test_a_class_of_torch_can_be_injected_and_compiled(rate):
    tx = optim.inject_hyperparams(partial(optim.from_torch, torch.optim.Adam))(lr=rate, betas=(0.5, 0.75))
    plain = optim.from_torch(torch.optim.Adam, lr=rate, betas=(0.5, 0.75))
    compiled = torch.compile(tx.update, backend="aot_eager", fullgraph=True)
    state, expected_state = tx.init(PARAMS), plain.init(PARAMS)
    for _ in range(3):
        updates, state = compiled(GRADS, state, PARAMS)
        expected, expected_state = plain.update(GRADS, expected_state, PARAMS)
        torch.testing.assert_close(updates, expected)
    assert state.inner.slots["step"]["w"] == 3


def test_two_injected_classes_of_torch_keep_apart_in_one_graph():
    make = optim.inject_hyperparams(partial(optim.from_torch, torch.optim.SGD))
    first, second = make(lr=0.5), make(lr=0.5, maximize=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def both(first_state, second_state):
        return first.update(GRADS, first_state, PARAMS)[0], second.update(GRADS, second_state, PARAMS)[0]

    down, up = both(first.init(PARAMS), second.init(PARAMS))
    assert down["w"].tolist() == [-0.25, -0.25]
    assert up["w"].tolist() == [0.25, 0.25]


def test_a_rate_that_a_class_keeps_stays_a_number():
    rprop = partial(optim.from_torch, torch.optim.Rprop)
    with pytest.raises(ValueError, match=r'Rprop keeps its first learning rate.*static=\("lr",\)'):
        optim.inject_hyperparams(rprop)(lr=0.5).init(PARAMS)
    tx = optim.inject_hyperparams(rprop, static="lr")(lr=0.5)
    assert tx.update(GRADS, tx.init(PARAMS), PARAMS)[0]["w"].tolist() == [-0.5, -0.5]


def test_what_makes_no_optimizer_is_refused():
    with pytest.raises(TypeError, match="factory must be a function that makes an optimizer"):
        optim.inject_hyperparams(optim.sgd(0.1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="factory must be a function that makes an optimizer"):
        optim.inject_hyperparams("sgd")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"what factory returns must be a GradientTransformation .*, got 0.5"):
        optim.inject_hyperparams(lambda rate: rate)(rate=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="static must be names of arguments"):
        optim.inject_hyperparams(optim.sgd, static=[1])  # pyright: ignore[reportArgumentType]


def test_a_schedule_that_returns_a_number_is_not_rounded_to_the_default_dtype():
    params = {"w": torch.ones(1, dtype=torch.float32)}
    tx = optim.inject_hyperparams(optim.sgd)(learning_rate=lambda count: 0.1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        state = tx.init(params)
        _, new = tx.update(params, state, params)
    finally:
        torch.set_default_dtype(before)
    for found in (state, new):
        assert torch.equal(found.hyperparams["learning_rate"], torch.tensor(0.1))


def test_an_argument_without_its_name_is_refused():
    with pytest.raises(TypeError, match=r"by name, .* inject_hyperparams\(adamw\)\(learning_rate=\.\.\.\)"):
        optim.inject_hyperparams(optim.adamw)(1e-3)
