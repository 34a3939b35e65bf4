import pytest
import torch

from fmp import optim

PARAMS = {"body": {"w": torch.randn(2), "b": torch.randn(2)}, "head": torch.randn(2)}
GRADS = {"body": {"w": torch.randn(2), "b": torch.randn(2)}, "head": torch.randn(2)}


@pytest.mark.parametrize(
    "mask",
    [
        {"body": {"w": True, "b": True}, "head": False},
        {"body": True, "head": False},
        ["body"],
        ("*.w", "body/b"),
        lambda path: path.startswith("body/"),
    ],
    ids=["tree", "prefix", "pattern", "patterns", "function"],
)
@pytest.mark.parametrize("after", [False, True], ids=["before the optimizer", "after it"])
def test_frozen_leaves_keep_every_bit(mask, after):
    optimizer = optim.adamw(0.1, weight_decay=0.5)
    tx = optim.chain(optimizer, optim.freeze(mask)) if after else optim.chain(optim.freeze(mask), optimizer)
    state, values = tx.init(PARAMS), PARAMS
    for _ in range(3):
        updates, state = tx.update(GRADS, state, values)
        assert updates["body"] == {"w": None, "b": None}
        values = optim.apply_updates(values, updates)
    assert values["body"]["w"] is PARAMS["body"]["w"]
    assert values["body"]["b"] is PARAMS["body"]["b"]
    assert not torch.equal(values["head"], PARAMS["head"])


def test_in_front_of_an_optimizer_moments_stay_zero():
    tx = optim.chain(optim.freeze(["body"]), optim.adam(0.1))
    _, (_, state) = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert not state.first_moment["body"]["w"].any()
    assert state.first_moment["head"].all()


def test_frozen_gradients_do_not_count_in_a_norm_taken_later():
    tx = optim.chain(optim.freeze(["body"]), optim.clip_by_global_norm(1.0))
    grads = {"body": {"w": torch.full((2,), 1e6), "b": torch.ones(2)}, "head": torch.tensor([0.5, 0.5])}
    assert tx.update(grads, tx.init(PARAMS), PARAMS)[0]["head"].tolist() == [0.5, 0.5]


def test_all_or_nothing():
    assert optim.freeze(True).update(GRADS, (), PARAMS)[0] == {"body": {"w": None, "b": None}, "head": None}
    assert optim.freeze([]).update(GRADS, (), PARAMS)[0]["head"] is GRADS["head"]


def test_a_mask_that_does_not_fit_is_refused_by_init():
    with pytest.raises(ValueError, match="structure of mask does not fit"):
        optim.freeze({"head": True}).init(PARAMS)
