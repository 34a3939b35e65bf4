from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given, strategies as st

import fmp.tree
from fmp import _traced
from fmp.scaling import DynamicLossScale, NoOpLossScale


class Point(NamedTuple):
    x: Any
    y: Any


@fmp.tree.dataclass
class Cell:
    left: Any
    right: Any = None
    unit: str = fmp.tree.static(default="m")


KEYS = st.one_of(st.text("ab", max_size=2), st.integers(0, 2))
TREES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text("xy", max_size=1)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda items: defaultdict(list, items)),
        st.builds(Point, inner, inner),
        st.builds(Cell, inner, inner, st.sampled_from(["m", "s"])),
        st.just(NoOpLossScale()),
    ),
    max_leaves=8,
)


def outcome(call):
    try:
        return call()
    except ValueError:
        return "refused"


@given(TREES)
def test_the_same_leaves_paths_and_trees_as_optree(tree):
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    traced_leaves, traced = _traced.flatten(tree)
    assert traced_leaves == leaves
    assert traced.num_leaves == spec.num_leaves
    assert traced.paths() == spec.paths()
    numbers = list(range(len(leaves)))
    rebuilt, expected = traced.unflatten(iter(numbers)), spec.unflatten(numbers)
    assert type(rebuilt) is type(expected)
    assert optree.tree_structure(rebuilt, none_is_leaf=True) == spec
    assert optree.tree_leaves(rebuilt, none_is_leaf=True) == numbers
    if isinstance(tree, dict):
        assert list(rebuilt) == list(tree)
    with pytest.raises(ValueError, match="leaves"):
        traced.unflatten([*numbers, 0])


@given(TREES, TREES)
def test_structures_are_equal_when_optree_says_so(left, right):
    expected = optree.tree_structure(left, none_is_leaf=True) == optree.tree_structure(right, none_is_leaf=True)
    assert (_traced.flatten(left)[1] == _traced.flatten(right)[1]) == expected
    assert (_traced.flatten(left)[1] != _traced.flatten(right)[1]) != expected
    assert _traced.flatten(left)[1] == _traced.flatten(left)[1]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": 1, "b": 2}, {"b": 1, "a": 2}),
        ({"a": 1}, OrderedDict(a=1)),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (defaultdict(list, a=1), defaultdict(dict, a=1)),
        (Cell(1), Cell(2)),
        (Cell(1), Cell(1, unit="s")),
        (Point(1, 2), (1, 2)),
        ([1], [[1]]),
        ([1], 1),
        (DynamicLossScale(), DynamicLossScale(growth_interval=3)),
    ],
    ids=str,
)
def test_equality_in_chosen_cases(left, right):
    expected = optree.tree_structure(left, none_is_leaf=True) == optree.tree_structure(right, none_is_leaf=True)
    assert (_traced.flatten(left)[1] == _traced.flatten(right)[1]) == expected


@given(TREES, TREES)
def test_flatten_up_to_takes_and_refuses_what_optree_does(prefix, tree):
    for candidate in (prefix, tree):
        found = outcome(lambda candidate=candidate: _traced.flatten(prefix)[1].flatten_up_to(candidate))
        expected = outcome(
            lambda candidate=candidate: optree.tree_structure(prefix, none_is_leaf=True).flatten_up_to(candidate)
        )
        assert len(found) == len(expected)
        assert all(a is b or a == b for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("prefix", "tree"),
    [
        ({"a": 1}, {"a": [1, 2]}),
        ({"a": 1, "b": 2}, OrderedDict(b=1, a=2)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, [1]),
        ([1, 2], [1]),
        (Cell(1, 2), Cell([1], {"x": 2})),
        (Cell(1, 2), Cell(1, 2, "s")),
        (Point(1, 2), (1, 2)),
        (deque([1]), deque([[2]])),
    ],
    ids=str,
)
def test_flatten_up_to_in_chosen_cases(prefix, tree):
    found = outcome(lambda: _traced.flatten(prefix)[1].flatten_up_to(tree))
    assert found == outcome(lambda: optree.tree_structure(prefix, none_is_leaf=True).flatten_up_to(tree))


# What Dynamo's own version of optree cannot do.
HOLLOW: dict[str, Any] = {
    "empty dict": lambda x: ({"a": x, "b": {}}, [{}]),
    "only an empty dict": lambda x: {},
    "none in a dict": lambda x: {"a": x, "b": {"c": None, "d": {"e": None}}},
    "numbers in a dict": lambda x: [x, {"a": 1, "b": "text"}],
    "in a node": lambda x: Cell({"a": None}, {"b": {}, "a": x}),
    "ordered": lambda x: [x, OrderedDict(b=None, a=1)],
    "scalers": lambda x: {"b": {"s": NoOpLossScale()}, "a": [DynamicLossScale(), x]},
}


@pytest.mark.parametrize("make", HOLLOW.values(), ids=HOLLOW)
def test_trees_made_while_tracing(make):
    def work(x):
        tree = make(x)
        leaves, spec = fmp.tree.flatten(tree)
        nothing = fmp.tree.unflatten(spec, [None] * len(leaves))
        holes = fmp.tree.map(lambda leaf: None, tree)
        again = fmp.tree.map(lambda leaf, none: leaf, tree, holes)
        chosen = fmp.tree.select(x.sum() > 0, [again, holes], [tree, nothing])
        return chosen, fmp.tree.paths(tree), spec == fmp.tree.structure(nothing), x + 1

    found = torch.compile(work, backend="eager", fullgraph=True)(torch.ones(2))
    expected = work(torch.ones(2))
    assert fmp.tree.structure(found) == fmp.tree.structure(expected)
    for new, old in zip(fmp.tree.leaves(found), fmp.tree.leaves(expected), strict=True):
        assert torch.equal(new, old) if isinstance(old, torch.Tensor) else new == old


def test_tree_functions_on_inputs_of_a_compiled_function():
    tree = {
        "b": [torch.ones(2), None],
        "a": {"n": None, "e": {}},
        "c": Cell(torch.zeros(1), {"k": 3}),
        "d": defaultdict(list, {"z": None, "y": 2, "x": None}),
    }

    def work(tree):
        named = fmp.tree.map_with_path(lambda path, leaf: path, tree)
        doubled = fmp.tree.map(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, tree)
        return named, doubled

    found, expected = torch.compile(work, backend="eager", fullgraph=True)(tree), work(tree)
    assert fmp.tree.structure(found) == fmp.tree.structure(expected)
    assert fmp.tree.leaves(found[0]) == fmp.tree.paths(tree)
    assert [str(leaf) for leaf in fmp.tree.leaves(found)] == [str(leaf) for leaf in fmp.tree.leaves(expected)]
