from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given, strategies as st

from fmp.patterns import matcher, matches

PIECES = ["a", "b", ".", "*", "?", "[ab]", "[!a]", "[a-c]", "[]a]", "[!]a]", "[^a]", "[", "]", "\\", "|", "^"]
PARTS = st.lists(st.text("abN01", min_size=1, max_size=3), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("norm.weight", "norm.weight"),
        ("norm.weight", "norm"),
        ("norm.weight", "norm.*"),
        ("norm.weight", "*.norm"),
        ("norm.weight", "*.norm.*"),
        ("norm.weight", ".norm"),
        ("norm.weight", "*weight"),
        ("norm/weight", "*.weight"),
        ("norm.weight", "*/weight"),
        ("blocks/3/attn.norm1.weight", "*.norm?"),
        ("blocks/3/attn.norm1.weight", "blocks/[0-3]"),
        ("blocks/3/attn.norm1.weight", "blocks*weight"),
        ("", "*"),
    ],
)
def test_matches(path, pattern):
    assert matches(path, [pattern])


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("norm.weight", "weight"),
        ("norm.weight", "nor"),
        ("norm.weight", "Norm"),
        ("normal.weight", "norm"),
        ("normal.weight", "*.norm.*"),
        ("blocks.13.w", "blocks.[0-3]"),
        ("blocks.10.w", "blocks.1"),
        ("norm", "norm.weight"),
        ("norm", ""),
    ],
)
def test_does_not_match(path, pattern):
    assert not matches(path, [pattern])


def test_any_of_the_patterns_is_enough():
    assert matches("a.b", iter(["x", "a"]))
    assert not matches("a.b", [])


def test_patterns_may_be_an_iterator_that_is_used_up_once():
    assert matches("a.b.c", (pattern for pattern in ["nothing", "a.b"]))


def test_a_single_string_is_refused():
    with pytest.raises(TypeError, match=r"collection of strings, got the string '\*\.norm'"):
        matches("a.norm", "*.norm")


@given(PARTS)
def test_every_parent_names_its_leaves(parts):
    path = "/".join(parts)
    assert all(matches(path, [".".join(parts[: depth + 1])]) for depth in range(len(parts)))
    assert matches(path, ["*." + parts[0]])


@given(PARTS, PARTS)
def test_separators_are_alike(path, pattern):
    spellings = {matches(a.join(path), [b.join(pattern)]) for a in "./" for b in "./"}
    assert len(spellings) == 1
    assert spellings == {path[: len(pattern)] == pattern}


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5), st.text("abc.-|^[\\", max_size=5))
def test_wildcards_are_those_of_fnmatch(pieces, name):
    pattern = "".join(pieces)
    parents = [name[:end] for end in range(len(name) + 1) if end == len(name) or name[end] == "."]
    expected = any(fnmatchcase(prefix + parent, pattern) for parent in parents for prefix in ("", "."))
    assert matches(name, [pattern]) == expected


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match=r"cannot read the patterns \['x\[b-a\]'\]: bad character range b-a"):
        matches("x", ["x[b-a]"])


def test_works_while_torch_compile_traces():
    prepared = matcher(["*.norm", "head"])

    def pick(values):
        return {name: value for name, value in values.items() if prepared(name) or matches(name, ["x.?"])}

    values = {name: torch.ones(1) for name in ("a.norm.w", "a.w", "head/w", "x/y", "x/yz")}
    compiled = torch.compile(pick, backend="eager", fullgraph=True)
    assert compiled(values).keys() == pick(values).keys() == {"a.norm.w", "head/w", "x/y"}
