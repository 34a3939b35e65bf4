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
    with pytest.raises(TypeError, match=r"part 1 of the chain is <function adam.*; call it to make one"):
        optim.chain(optim.clip_by_global_norm(1.0), optim.adam)  # pyright: ignore[reportArgumentType]
