import math

import pytest
import torch

from fmp import optim, tree

PARAMS = {"body": {"w": torch.randn(2), "b": torch.randn(2)}, "head": torch.randn(2)}
GRADS = {"body": {"w": torch.tensor([3.0, 4.0]), "b": torch.randn(2).half()}, "head": torch.tensor([6.0, 8.0])}
EVERY_MASK = pytest.mark.parametrize(
    "mask",
    [
        {"body": {"w": True, "b": False}, "head": True},
        {"body": {"w": True, "b": False}, "head": [True]},
        ["*.w", "head"],
        lambda path: path != "body/b",
    ],
    ids=["tree", "prefix", "patterns", "function"],
)


def nested(leaves):
    return {**leaves, "head": [leaves["head"]]}


@EVERY_MASK
def test_others_pass_through_unchanged(mask):
    wrap = nested if isinstance(mask, dict) and isinstance(mask["head"], list) else dict
    params, grads = wrap(PARAMS), wrap(GRADS)
    tx = optim.masked(optim.adam(0.1), mask)
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["body"]["b"] is GRADS["body"]["b"]
    assert updates["body"]["w"].tolist() == pytest.approx([-0.1, -0.1])
    assert tree.leaves(updates["head"])[0].tolist() == pytest.approx([-0.1, -0.1])
    assert state.inner.first_moment["body"]["b"] is None


def test_a_norm_is_that_of_the_masked_leaves():
    tx = optim.masked(optim.clip_by_global_norm(1.0), ["body.w"])
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert updates["body"]["w"].tolist() == pytest.approx([0.6, 0.8])
    assert updates["head"] is GRADS["head"]


def test_what_no_later_part_treats_is_added_as_it_is():
    tx = optim.masked(optim.sgd(0.1), ["body"])
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert torch.equal(optim.apply_updates(PARAMS, updates)["head"], PARAMS["head"] + GRADS["head"])


def test_the_masks_of_two_parts_make_a_partition():
    is_body = lambda path: path.startswith("body")
    masks = optim.chain(
        optim.masked(optim.adam(0.1), is_body), optim.masked(optim.sgd(0.2, momentum=0.9), lambda p: not is_body(p))
    )
    parts = optim.partition(
        {"body": optim.adam(0.1), "head": optim.sgd(0.2, momentum=0.9)}, {"body": "body", "head": "head"}
    )
    state, expected_state = masks.init(PARAMS), parts.init(PARAMS)
    for _ in range(3):
        updates, state = masks.update(GRADS, state, PARAMS)
        expected, expected_state = parts.update(GRADS, expected_state, PARAMS)
        torch.testing.assert_close(updates, expected, rtol=0, atol=0)


def test_all_or_nothing():
    adam = optim.adam(0.1)
    everything, nothing = optim.masked(adam, True), optim.masked(adam, False)
    expected, _ = adam.update(GRADS, adam.init(PARAMS), PARAMS)
    torch.testing.assert_close(everything.update(GRADS, everything.init(PARAMS), PARAMS)[0], expected, rtol=0, atol=0)
    updates, _ = nothing.update(GRADS, nothing.init(PARAMS), PARAMS)
    assert all(new is old for new, old in zip(tree.leaves(updates), tree.leaves(GRADS), strict=True))


def test_holes_and_integers():
    params = {"w": torch.ones(1), "ids": torch.arange(2), "hole": None}
    grads = {"w": None, "ids": None, "hole": None}
    for mask in (["w"], ["ids"], lambda path: True):
        tx = optim.masked(optim.adam(0.1), mask)
        state = tx.init(params)
        assert tx.update(grads, state, params)[0] == grads


def test_what_passes_may_be_nan_without_harm():
    grads = {**GRADS, "head": torch.tensor([math.nan, math.inf])}
    tx = optim.masked(optim.clip_by_global_norm(1.0), ["body"])
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert tree.all_finite(updates["body"])


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match=r"transformation must be a GradientTransformation .*, got <function adam"):
        optim.masked(optim.adam, True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="structure of mask does not fit"):
        optim.masked(optim.adam(0.1), {"head": True}).init(PARAMS)
    with pytest.raises(ValueError, match=r"none of the patterns \['haed'\] matches"):
        optim.masked(optim.adam(0.1), ["haed"]).init(PARAMS)
    with pytest.raises(TypeError, match="mask must say True or False for 'head', got 1"):
        optim.masked(optim.adam(0.1), {"body": True, "head": 1})


def test_parameters_are_needed():
    tx = optim.masked(optim.clip_by_value(0.1), {"w": True})
    params = {"w": torch.ones(1)}
    with pytest.raises(TypeError, match="update needs the parameters, but params is None"):
        tx.update(params, tx.init(params), None)
