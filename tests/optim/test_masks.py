import functools

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim, tree
from fmp.optim.masks import broadcast, selector

TREES = st.recursive(
    st.booleans(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from("abc"), children, max_size=3),
    max_leaves=8,
)


@given(TREES)
def test_a_tree_selects_itself(mask):
    # Without any bools in it, a list is a collection of no patterns.
    assert selector(mask, "mask")(mask) == tree.leaves(mask)


@given(TREES, st.booleans())
def test_one_bool_stands_for_all(full, flag):
    assert selector(flag, "mask")(full) == [flag] * len(tree.leaves(full))


@given(TREES)
def test_all_ways_to_say_it_agree(mask):
    leaves = tree.leaves(mask)
    meant = {path for path, flag in tree.items(mask) if flag}
    assert selector(lambda path: path in meant, "mask")(mask) == leaves
    assert selector(meant, "mask")(mask) == leaves
    assert selector(iter(sorted(meant)), "mask")(mask) == leaves


def test_broadcast_names_what_does_not_fit():
    with pytest.raises(ValueError, match=r"the structure of labels does not fit the tree: .*'c'"):
        broadcast({"a": 1, "b": 2}, {"a": [0, 0], "c": 0}, "labels")


def test_patterns_that_match_nothing_are_refused():
    full = dict.fromkeys("abcdefg", 0)
    with pytest.raises(ValueError, match=r"mask: none of the patterns \['\*.nrom', 'x'\] matches a path") as caught:
        selector(["*.nrom", "x"], "mask")(full)
    assert str(caught.value).endswith("there are ['a', 'b', 'c', 'd', 'e'] and 2 more")
    assert selector(["x", "b"], "mask")(full) == [False, True, False, False, False, False, False]


def test_patterns_may_match_holes_only_and_nothing_in_an_empty_tree():
    assert selector(["a"], "mask")({"a": None, "b": 0}) == [True, False]
    for empty in ({}, (None,), {"b": None}):
        assert selector(["a"], "mask")(empty) == [False] * len(tree.leaves(empty))
    assert selector([], "mask")({"b": 0}) == [False]


@pytest.mark.parametrize("make", [optim.freeze, lambda mask: optim.adamw(0.1, mask=mask)], ids=["freeze", "adamw"])
def test_a_typo_is_noticed_by_init(make):
    with pytest.raises(ValueError, match=r"none of the patterns \['backbnoe'\].*\['backbone/w', 'head/w'\]"):
        make(["backbnoe"]).init({"backbone": {"w": torch.ones(1)}, "head": {"w": torch.ones(1)}})


MATRICES = {"a": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, "norm": {"weight": torch.ones(2)}}


@pytest.mark.parametrize(
    "mask",
    [
        lambda path, leaf: leaf.ndim >= 2,
        lambda path, leaf, least=2: leaf.ndim >= least,
        functools.partial(lambda least, path, leaf: leaf.ndim >= least, 2),
    ],
)
def test_a_function_may_look_at_the_leaf(mask):
    assert selector(mask, "mask")(MATRICES) == [False, True, False]
    tx = optim.adamw(1.0, weight_decay=0.5, mask=mask)
    updates, _ = tx.update(tree.map(torch.zeros_like, MATRICES), tx.init(MATRICES), MATRICES)
    assert [float(leaf.abs().sum()) for leaf in tree.leaves(updates)] == [0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    "mask",
    [
        lambda path: path == "a/weight",
        lambda path, deep=True: deep and path == "a/weight",  # as it always was: the default stays
        lambda *path: path == ("a/weight",),
        "a/weight".__eq__,
    ],
)
def test_a_function_that_one_argument_is_enough_for_gets_the_path(mask):
    assert selector(mask, "mask")(MATRICES) == [False, True, False]


def test_a_function_of_leaves_is_not_asked_about_holes():
    assert selector(lambda path, leaf: leaf.ndim >= 0, "mask")({"a": None, "b": torch.ones(2)}) == [False, True]


@pytest.mark.parametrize(
    "mask",
    [
        lambda: True,
        lambda path, leaf, more: True,
        lambda path, *, leaf: True,
        lambda params: tree.map(lambda leaf: leaf.ndim >= 2, params),
    ],
)
def test_other_functions_are_refused_at_once(mask):
    for make in (
        optim.freeze,
        lambda mask: optim.adamw(0.1, mask=mask),
        lambda mask: optim.masked(optim.sgd(1.0), mask),
    ):
        with pytest.raises(
            TypeError, match=r"mask must be a function of a leaf's path, .*as in optax, .*mask=fn\(params\)"
        ):
            make(mask)


def test_an_injected_optimizer_with_a_function_of_leaves_compiles():
    tx = optim.inject_hyperparams(optim.adamw)(
        learning_rate=1.0, weight_decay=0.5, mask=lambda path, leaf: leaf.ndim >= 2
    )
    grads, state = tree.map(torch.zeros_like, MATRICES), tx.init(MATRICES)
    compiled = torch.compile(tx.update, backend="aot_eager", fullgraph=True)
    for update in (tx.update, compiled):
        assert [float(leaf.abs().sum()) for leaf in tree.leaves(update(grads, state, MATRICES)[0])] == [0.0, 2.0, 0.0]
