import pytest
import torch

from fmp import optim, tree

PARAMS = {"body": {"w": torch.ones(2), "b": torch.ones(1)}, "head": torch.ones(3), "ids": torch.arange(2), "hole": None}
GRADS = {"body": {"w": torch.ones(2), "b": torch.ones(1)}, "head": torch.ones(3), "ids": None, "hole": None}
LABELS = {"body": "slow", "head": "fast", "ids": "fast", "hole": "nobody"}


def label(path, leaf):
    return "slow" if path.startswith("body/") else "fast"


@pytest.mark.parametrize("labels", [LABELS, label, {**LABELS, "body": {"w": "slow", "b": "slow"}}])
def test_every_leaf_goes_to_its_group(labels):
    tx = optim.partition({"slow": optim.sgd(0.25), "fast": optim.adam(0.5)}, labels)
    state = tx.init(PARAMS)
    moments = {"body": {"w": None, "b": None}, "head": torch.zeros(3), "ids": None, "hole": None}
    assert tree.describe(state.inner["fast"].first_moment) == tree.describe(moments)
    updates, state = tx.update(GRADS, state, PARAMS)
    assert updates["body"]["w"].tolist() == [-0.25, -0.25]
    assert updates["head"].tolist() == pytest.approx([-0.5, -0.5, -0.5])
    assert updates["ids"] is None
    assert updates["hole"] is None


def test_a_norm_is_that_of_the_group():
    tx = optim.partition({"slow": optim.clip_by_global_norm(1.0), "fast": optim.sgd(1.0)}, label)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    torch.testing.assert_close(tree.global_norm(updates["body"]), torch.tensor(1.0))
    assert updates["head"].tolist() == [-1.0, -1.0, -1.0]


def test_groups_nest():
    inner = optim.partition({"w": optim.sgd(0.5), "b": optim.sgd(0.25)}, lambda path, leaf: path[-1])
    tx = optim.partition({"slow": inner, "fast": optim.sgd(1.0)}, label)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert [updates["body"]["w"][0], updates["body"]["b"][0], updates["head"][0]] == [-0.5, -0.25, -1.0]


def test_a_frozen_group_has_no_moments():
    tx = optim.partition({"slow": optim.freeze(True), "fast": optim.adam(0.5)}, label)
    state = tx.init(PARAMS)
    assert state.inner["slow"] == ()
    updates, _ = tx.update(GRADS, state, PARAMS)
    assert updates["body"] == {"w": None, "b": None}


def test_unknown_labels_are_refused():
    tx = optim.partition({"slow": optim.sgd(0.1)}, label)
    with pytest.raises(KeyError, match=r"head: no optimizer for the label 'fast'; there are \['slow'\]"):
        tx.init(PARAMS)


def test_labels_of_any_type_are_refused_by_path():
    tx = optim.partition({"x": optim.sgd(0.1), 1: optim.sgd(0.1)}, label)  # pyright: ignore[reportArgumentType]
    with pytest.raises(KeyError, match=r"body/b: no optimizer for the label 'slow'; there are \['x', 1\]"):
        tx.init(PARAMS)
    for found in ([], ([],), {}, torch.ones(2), None):
        tx = optim.partition({"slow": optim.sgd(0.1)}, lambda path, leaf, found=found: found)
        with pytest.raises(KeyError, match="body/b: no optimizer for the label"):
            tx.init(PARAMS)


def test_labels_that_do_not_fit_are_refused():
    tx = optim.partition({"slow": optim.sgd(0.1)}, {"body": "slow"})
    with pytest.raises(ValueError, match="structure of labels does not fit"):
        tx.init(PARAMS)


def test_a_factory_is_refused():
    with pytest.raises(TypeError, match=r"the optimizer of group 'slow' must be a GradientTransformation"):
        optim.partition({"slow": optim.sgd}, label)  # pyright: ignore[reportArgumentType]


def test_a_list_of_optimizers_is_refused():
    with pytest.raises(TypeError, match="transformations must be optimizers by label"):
        optim.partition([optim.sgd(0.1)], "all")  # pyright: ignore[reportArgumentType]


def test_parameters_are_needed():
    tx = optim.partition({"all": optim.clip_by_value(0.1)}, {"w": "all"})
    params = {"w": torch.ones(1)}
    with pytest.raises(TypeError, match="update needs the parameters, but params is None"):
        tx.update(params, tx.init(params), None)
