import pytest
import torch

from fmp import optim

PARAMS = {"w": torch.tensor([0.0, 0.0])}
GRADS = {"w": torch.tensor([3.0, 4.0])}


def test_parts_act_in_order():
    clip_first = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(10.0))
    clip_last = optim.chain(optim.sgd(10.0), optim.clip_by_global_norm(1.0))
    for tx, expected in [(clip_first, [-6.0, -8.0]), (clip_last, [-0.6, -0.8])]:
        updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
        assert updates["w"].tolist() == pytest.approx(expected)


def test_every_part_keeps_its_own_state_and_sees_the_parameters():
    tx = optim.chain(optim.sgd(1.0, momentum=0.5), optim.chain(optim.sgd(1.0, weight_decay=1.0)))
    values = {"w": torch.ones(2)}
    state = tx.init(values)
    updates, state = tx.update(GRADS, state, values)
    assert updates["w"].tolist() == [2.0, 3.0]  # -(-g + w)
    assert state[0].momentum["w"].tolist() == [3.0, 4.0]
    assert state[1][0].count.item() == 1


def test_no_parts_change_nothing():
    tx = optim.chain()
    assert tx.update(GRADS, tx.init(PARAMS), PARAMS) == (GRADS, ())


def test_a_factory_is_refused():
    with pytest.raises(TypeError, match=r"part 1 of the chain must be .*got <function adam.*; call it to make one"):
        optim.chain(optim.clip_by_global_norm(1.0), optim.adam)  # pyright: ignore[reportArgumentType]


def test_a_named_chain_is_a_chain():
    parts = {"z clip": optim.clip_by_global_norm(1.0), "momentum": optim.sgd(10.0, momentum=0.9), "a": optim.ema(0.9)}
    named, plain = optim.named_chain(*parts.items()), optim.chain(*parts.values())
    state, expected_state = named.init(PARAMS), plain.init(PARAMS)
    assert list(state) == list(parts)
    for _ in range(3):
        # A state that was saved may come back in another order.
        updates, state = named.update(GRADS, dict(sorted(state.items())), PARAMS)
        expected, expected_state = plain.update(GRADS, expected_state, PARAMS)
        assert torch.equal(updates["w"], expected["w"])
    assert torch.equal(state["momentum"].momentum["w"], expected_state[1].momentum["w"])
    assert not torch.equal(updates["w"], named.update(GRADS, named.init(PARAMS), PARAMS)[0]["w"])


def test_no_named_parts_change_nothing():
    tx = optim.named_chain()
    assert tx.update(GRADS, tx.init(PARAMS), PARAMS) == (GRADS, {})


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([optim.sgd(0.1)], TypeError, "part 0 of the chain is .*, not a pair of a name and a transformation"),
        ([("a", optim.sgd(0.1)), "ab"], TypeError, "part 1 of the chain is 'ab', not a pair"),
        ([("a", optim.sgd)], TypeError, "part 'a' of the chain must be .*got <function sgd.*; call it to make one"),
        ([(0, optim.sgd(0.1))], TypeError, "the name of part 0 of the chain must be a string, got 0"),
        ([("a", optim.sgd(0.1)), ("a", optim.adam(0.1))], ValueError, "two parts of the chain have the name 'a'"),
    ],
)
def test_bad_named_parts_are_refused(parts, error, message):
    with pytest.raises(error, match=message):
        optim.named_chain(*parts)
