"""Hypothesis strategies for what a train step is made of: tensors at the edges of their formats, trees, histories."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fmp import tree
from fmp.dtypes import is_castable, short_name
from fmp.scaling import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale

Tree = Any

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = ((), (0,), (1,), (3,), (2, 3), (2, 0), (1, 1, 2))
_KEYS = ("a", "b", "bias", "norm.weight", "weight")
_NONFINITE = (math.inf, -math.inf, math.nan)
_WIDTHS = {torch.float16: 16, torch.bfloat16: 32, torch.float32: 32, torch.float64: 64}


@tree.dataclass
class Node:
    """A node of the trees that `trees` draws.

    Attributes:
        left: A subtree.
        right: A subtree.
        label: Metadata.
    """

    left: Tree
    right: Tree
    label: str = tree.static(default="node")


def values(dtype: torch.dtype) -> SearchStrategy[float]:
    """Draws finite numbers of a format: signed zeros, subnormals, the largest ones, and ordinary ones.

    Args:
        dtype: A floating-point dtype of 16 bits or more.

    Returns:
        The strategy. What it draws is not always representable in bfloat16, but always finite there.

    Raises:
        ValueError: If the dtype is another one.

    Example:
        >>> from hypothesis import find
        >>> find(values(torch.float16), lambda drawn: drawn > 60000) <= 65504
        True
    """
    if dtype not in _WIDTHS:
        raise ValueError(f"dtype must be one of {[short_name(known) for known in DTYPES]}, got {dtype}")
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    positive = [0.0, subnormal, info.smallest_normal - subnormal, info.smallest_normal, info.eps, 1.0, info.max]
    edges = st.sampled_from([sign * value for value in positive for sign in (1.0, -1.0)])
    width: Any = _WIDTHS[dtype]
    return edges | st.floats(-info.max, info.max, width=width)


@st.composite
def tensors(
    draw: DrawFn, dtypes: Sequence[torch.dtype] = DTYPES, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> torch.Tensor:
    """Draws floating-point tensors of finite values, of zero, one and more dimensions, some of them empty.

    Args:
        draw: Given by hypothesis.
        dtypes: The dtypes to choose from.
        shapes: The shapes to choose from.

    Returns:
        The strategy.

    Example:
        >>> from hypothesis import find
        >>> find(tensors([torch.float16]), lambda drawn: drawn.numel() == 0).dtype
        torch.float16
    """
    dtype, shape = draw(st.sampled_from(list(dtypes))), draw(st.sampled_from(list(shapes)))
    return _filled(draw, dtype, shape)


def trees(leaves: SearchStrategy[Any], *, max_leaves: int = 6) -> SearchStrategy[Tree]:
    """Draws trees of nested dictionaries, lists, tuples and fmp dataclasses, with None among the leaves.

    Args:
        leaves: Draws the other leaves.
        max_leaves: About how many leaves a tree has at most.

    Returns:
        The strategy; a tree may also be empty, or a single leaf.

    Example:
        >>> from hypothesis import find
        >>> find(trees(st.just(1)), lambda drawn: tree.leaves(drawn) == [1, None, 1]) is not None
        True
    """

    def grow(children: SearchStrategy[Any]) -> SearchStrategy[Any]:
        few = st.lists(children, max_size=3)
        branches = st.dictionaries(st.sampled_from(_KEYS), children, max_size=3)
        return branches | few | few.map(tuple) | st.builds(Node, children, children)

    return st.recursive(st.none() | leaves, grow, max_leaves=max_leaves)


def params(dtypes: Sequence[torch.dtype] = DTYPES, *, max_leaves: int = 6) -> SearchStrategy[Tree]:
    """Draws parameters: dictionaries of trees of floating-point tensors, with an integer one or None here and there.

    Args:
        dtypes: The dtypes to choose from, for each leaf anew.
        max_leaves: About how many leaves an entry has at most.

    Returns:
        The strategy.

    Example:
        >>> from hypothesis import find
        >>> type(find(params(), lambda drawn: bool(drawn)))
        <class 'dict'>
    """
    integers = st.builds(lambda size: torch.arange(size), st.integers(0, 3))
    # A list keeps the share of integers small: each `|` would give them half.
    leaves = st.integers(0, 5).flatmap(lambda die: integers if die == 5 else tensors(dtypes))
    return st.dictionaries(st.sampled_from(_KEYS), trees(leaves, max_leaves=max_leaves), max_size=3)


def gradients(
    like: Tree, *, nonfinite: bool | Mapping[str, float] | None = False, holes: bool = True
) -> SearchStrategy[Tree]:
    """Draws gradients for a tree, with each leaf's dtype and shape.

    Args:
        like: The parameters.
        nonfinite: Where there is inf, -inf or NaN. False: nowhere; True: at one drawn place at least; None: perhaps
            somewhere; a mapping from a leaf's path to a value: this value at a drawn place of that leaf.
        holes: Whether a leaf that could have a gradient may have None instead.

    Returns:
        The strategy. A leaf that is not a floating-point tensor always has None.

    Raises:
        KeyError: If a path of `nonfinite` is not one of a floating-point leaf.
        ValueError: If the leaf there, or with True the whole tree, has no element that could be non-finite.

    Example:
        >>> from hypothesis import find
        >>> find(gradients({"w": torch.ones(())}, nonfinite={"w": math.inf}), lambda drawn: True)
        {'w': tensor(inf)}
    """
    sizes = {path: leaf.numel() for path, leaf in tree.items(like) if is_castable(leaf)}
    filled = [path for path, size in sizes.items() if size]
    if isinstance(nonfinite, Mapping):
        for path in nonfinite:
            if path not in sizes:
                raise KeyError(f"nonfinite: {path!r} is not the path of a floating-point leaf; there are {list(sizes)}")
            if path not in filled:
                raise ValueError(f"nonfinite: the leaf {path!r} has no elements")
    elif nonfinite and not filled:
        raise ValueError(f"nonfinite=True needs a floating-point leaf with elements, got {tree.describe(like)}")
    return _gradients(like, filled, nonfinite, holes)


def loss_scales() -> SearchStrategy[LossScale]:
    """Draws loss scalers: none, constant, and dynamic ones in any state, most of them at an edge.

    At an edge the scale is its smallest or largest, or one more finite step makes it grow.

    Returns:
        The strategy.

    Example:
        >>> from hypothesis import find
        >>> find(loss_scales(), lambda drawn: isinstance(drawn, DynamicLossScale) and drawn.growth_interval > 1)
        DynamicLossScale(loss_scale=tensor(1.), growth_count=tensor(0, dtype=torch.int32), ...)
    """
    static = st.sampled_from([2.0**-126, 0.3, 1.0, 2.0**16, 2.0**126]).map(StaticLossScale)
    return st.just(NoOpLossScale()) | static | _dynamic()


def histories(length: int) -> SearchStrategy[list[bool]]:
    """Draws verdicts of consecutive steps, True where all gradients were finite.

    Args:
        length: The number of steps.

    Returns:
        The strategy. Runs of one verdict, and one bad step among good ones, come up often.

    Example:
        >>> from hypothesis import find
        >>> len(find(histories(3), lambda drawn: sum(drawn) == 2))
        3
    """
    one_bad = st.integers(0, max(length - 1, 0)).map(lambda bad: [step != bad for step in range(length)])
    constant = st.booleans().map(lambda verdict: [verdict] * length)
    return st.lists(st.booleans(), min_size=length, max_size=length) | constant | one_bad


def _filled(draw: DrawFn, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    size = math.prod(shape)
    # Beyond a few elements, drawing each would only be slow.
    drawn = draw(st.lists(values(dtype), min_size=min(size, 8), max_size=min(size, 8)))
    return torch.tensor([drawn[i % len(drawn)] for i in range(size)], dtype=dtype).reshape(tuple(shape))


@st.composite
def _gradients(
    draw: DrawFn, like: Tree, filled: list[str], nonfinite: bool | Mapping[str, float] | None, holes: bool
) -> Tree:
    if isinstance(nonfinite, Mapping):
        bad = dict(nonfinite)
    elif nonfinite is False or not filled:
        bad = {}
    else:
        places = st.lists(st.sampled_from(filled), min_size=int(nonfinite is True), max_size=2)
        bad = {path: draw(st.sampled_from(_NONFINITE)) for path in draw(places)}

    def gradient(path: str, leaf: Any) -> torch.Tensor | None:
        if not is_castable(leaf) or (holes and path not in bad and draw(st.integers(0, 3)) == 3):
            return None
        found = _filled(draw, leaf.dtype, leaf.shape).to(leaf.device)
        if path in bad:
            found.view(-1)[draw(st.integers(0, leaf.numel() - 1))] = bad[path]
        return found

    return tree.map_with_path(gradient, like)


@st.composite
def _dynamic(draw: DrawFn) -> DynamicLossScale:
    smallest = draw(st.sampled_from([1.0, 2.0**-126, 0.375]))
    largest = draw(st.sampled_from([2.0**24, 2.0**126, smallest]))
    scaler = DynamicLossScale(
        draw(st.sampled_from([smallest, largest]) | st.floats(smallest, largest, width=32)),
        growth_factor=draw(st.sampled_from([2.0, 1.5, 1000.0])),
        backoff_factor=draw(st.sampled_from([0.5, 0.9, 0.001])),
        growth_interval=draw(st.sampled_from([1, 2, 2000])),
        min_scale=smallest,
        max_scale=largest,
    )
    last = scaler.growth_interval - 1
    count = draw(st.sampled_from([0, last]) | st.integers(0, last))
    return tree.replace(scaler, growth_count=torch.full_like(scaler.growth_count, count))
