import pytest
from hypothesis import given, strategies as st

from fmp import tree
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
