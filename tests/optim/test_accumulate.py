import math

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim, tree
from fmp.optim import accumulate, schedules

PARAMS = {"w": torch.randn(3, 2), "b": torch.randn(2), "scalar": torch.randn(()), "ids": torch.arange(2), "hole": None}


def random_grads(like=PARAMS):
    return tree.map(lambda leaf: torch.randn(leaf.shape) if tree.describe(leaf).startswith("f") else None, like)


def assert_same_bits(found, expected):
    assert tree.structure(found) == tree.structure(expected)
    for new, old in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        if isinstance(new, torch.Tensor):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
        else:
            assert new is old


@given(st.integers(1, 5), st.integers(1, 3))
def test_is_one_update_with_the_mean(every, windows):
    inner = optim.adamw(0.1)
    tx = accumulate(inner, every)
    params = {"w": torch.randn(3, 2, dtype=torch.float64), "scalar": torch.randn((), dtype=torch.float64)}
    values, expected = params, params
    state, expected_state = tx.init(params), inner.init(params)
    for _ in range(windows):
        members = [tree.map(lambda leaf: torch.randn(leaf.shape, dtype=leaf.dtype), params) for _ in range(every)]
        for grads in members:
            updates, state = tx.update(grads, state, values)
            values = optim.apply_updates(values, updates)
        mean = tree.map(lambda *leaves: torch.stack(leaves).mean(dim=0), *members)
        updates, expected_state = inner.update(mean, expected_state, expected)
        expected = optim.apply_updates(expected, updates)
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(tree.leaves(state.inner), tree.leaves(expected_state), rtol=1e-9, atol=1e-12)
    assert state.count.item() == 0
    assert not any(leaf.any() for leaf in tree.leaves(state.accumulated))


def test_is_the_accumulation_of_torch():
    start, batches = torch.randn(3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    theirs = torch.nn.Parameter(start.clone())
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.1)
    loss = lambda param, batch: ((param - batch) ** 4).sum()
    tx, ours = accumulate(optim.sgd(0.1, momentum=0.9, weight_decay=0.1), 4), {"w": start}
    state = tx.init(ours)
    for index, batch in enumerate(batches):
        (loss(theirs, batch) / 4).backward()
        if index % 4 == 3:
            reference.step()
            reference.zero_grad()
        grads = {"w": torch.func.grad(loss)(ours["w"], batch)}
        updates, state = tx.update(grads, state, ours)
        ours = optim.apply_updates(ours, updates)
        torch.testing.assert_close(ours["w"], theirs.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_in_between_nothing_moves(bad):
    tx = accumulate(optim.adamw(0.1, weight_decay=0.5), every=3)
    state, values = tx.init(PARAMS), PARAMS
    for _ in range(3):
        _, state = tx.update(random_grads(), state, values)
    before = state.inner
    for _ in range(2):
        grads = random_grads()
        grads["w"][0] += bad
        updates, state = tx.update(grads, state, values)
        assert all(not update.any() for update in tree.leaves(updates) if update is not None)
        assert_same_bits(optim.apply_updates(values, updates), values)
        assert_same_bits(state.inner, before)
    updates, state = tx.update(random_grads(), state, values)
    assert all(update.any() for update in tree.leaves(updates) if update is not None)


def test_a_bad_window_does_not_reach_the_next():
    tx = accumulate(optim.sgd(1.0), every=2)
    state = tx.init(PARAMS)
    one = tree.map(lambda leaf: None if leaf is None else torch.ones_like(leaf), random_grads())
    bad = tree.map(lambda leaf: None if leaf is None else torch.full_like(leaf, math.nan), one)
    for grads in (bad, one, one):
        updates, state = tx.update(grads, state, PARAMS)
    updates, state = tx.update(one, state, PARAMS)
    assert updates["w"].tolist() == [[-1.0, -1.0]] * 3


def test_half_gradients_add_up_beyond_their_own_range():
    params = {"w": torch.zeros(2, dtype=torch.float16)}
    tx = accumulate(optim.sgd(1.0), every=3)
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update({"w": torch.tensor([6e4, 6e-8], dtype=torch.float16)}, state, params)
    assert state.accumulated["w"].dtype == updates["w"].dtype == torch.float32
    torch.testing.assert_close(updates["w"], -torch.tensor([6e4, 6e-8]).half().float())


def test_a_leaf_without_gradient_stays_out():
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    tx = accumulate(optim.sgd(1.0), every=2)
    state = tx.init(params)
    seen = []
    for a, b in [(1.0, 1.0), (1.0, None), (1.0, None), (1.0, 2.0)]:
        grads = {"a": torch.tensor([a]), "b": None if b is None else torch.tensor([b])}
        updates, state = tx.update(grads, state, params)
        seen.append([update if update is None else update.item() for update in updates.values()])
    assert seen == [[0.0, 0.0], [-1.0, None], [0.0, None], [-1.0, -1.5]]


def test_the_optimizer_may_leave_holes_of_its_own():
    tx = accumulate(optim.chain(optim.freeze(["w"]), optim.adam(0.1)), every=2)
    state = tx.init(PARAMS)
    for _ in range(2):
        updates, state = tx.update(random_grads(), state, PARAMS)
        assert updates["w"] is None
    assert updates["b"].any()


def test_schedules_count_windows():
    params = {"w": torch.zeros(1)}
    tx = accumulate(optim.sgd(schedules.linear(1.0, 0.0, 4)), every=2)
    state = tx.init(params)
    seen = []
    for _ in range(6):
        updates, state = tx.update({"w": torch.ones(1)}, state, params)
        seen.append(updates["w"].item())
    assert seen == [0.0, -1.0, 0.0, -0.75, 0.0, -0.5]


def test_every_one_is_the_optimizer_itself():
    inner = optim.adam(0.1)
    tx = accumulate(inner, every=1)
    state, expected_state = tx.init(PARAMS), inner.init(PARAMS)
    for _ in range(3):
        grads = random_grads()
        updates, state = tx.update(grads, state, PARAMS)
        expected, expected_state = inner.update(grads, expected_state, PARAMS)
        assert_same_bits(updates, expected)
        assert_same_bits(state.inner, expected_state)


def test_members_may_be_at_different_places_of_their_windows():
    params, grads = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    tx = accumulate(optim.sgd(1.0), every=3)
    state = tx.init(params)

    def update(count):
        updates, new_state = tx.update(grads, tree.replace(state, count=count), params)
        return updates["w"], new_state.count, new_state.accumulated["w"]

    updates, counts, sums = torch.func.vmap(update)(torch.arange(3, dtype=torch.int32))
    torch.testing.assert_close(updates.flatten(), torch.tensor([0.0, 0.0, -1 / 3]))
    assert counts.tolist() == [1, 2, 0]
    assert counts.dtype == torch.int32
    assert sums.flatten().tolist() == [1.0, 1.0, 0.0]


def test_an_update_is_differentiable_in_all_gradients_of_its_window():
    params = {"w": torch.zeros(2)}
    tx = accumulate(optim.sgd(0.5), every=2)

    def window(first, second):
        _, state = tx.update({"w": first}, tx.init(params), params)
        return tx.update({"w": second}, state, params)[0]["w"].sum()

    found = torch.func.grad(window, argnums=(0, 1))(torch.randn(2), torch.randn(2))
    assert [each.tolist() for each in found] == [[-0.25, -0.25]] * 2


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match=r"transformation must be a GradientTransformation .*, got <function adam"):
        accumulate(optim.adam, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        accumulate(optim.adam(0.1), 0)
    with pytest.raises(TypeError, match=r"every must be an int, got 2.0"):
        accumulate(optim.adam(0.1), 2.0)  # pyright: ignore[reportArgumentType]


def test_complex_gradients_are_refused():
    params = {"z": torch.zeros(2, dtype=torch.complex64)}
    tx = accumulate(optim.sgd(0.1), 2)
    state = tx.init(params)
    with pytest.raises(TypeError, match="z: a leaf c64"):
        tx.update(params, state, params)
