"""The columns of a history: which scalars of the metrics they hold, in which dtype, and by which names."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import optree
import torch

from fmp import tree
from fmp.dtypes import short_name
from fmp.numerics.watch import MEASURES, WatchState

_BY_KEY = (dict, list, tuple)

Tree = Any
Path = tuple[str | int, ...]
Leaf = tuple[str, str, str]


def flat(values: Tree) -> list[tuple[Path, Any]]:
    """Returns path and leaf of each leaf, where a `WatchState` is one."""
    paths, leaves, _ = optree.tree_flatten_with_path(
        values, is_leaf=lambda node: isinstance(node, WatchState), none_is_leaf=True
    )
    return list(zip(paths, leaves, strict=True))


def at(node: Tree, path: Path) -> Any:
    """Follows a path; to flatten the tree in each step would take ten times as long.

    Raises:
        KeyError: If the tree does not have it.
    """
    whole: Tree = node
    key: Any
    for key in path:
        try:
            node = node[key] if isinstance(node, _BY_KEY) else getattr(node, str(key))
        except (KeyError, IndexError, AttributeError):
            raise KeyError(
                f"there is no {tree.join(path)!r} as there was in `init`, among {tree.paths(whole)}"
            ) from None
    return node


def scalars(metrics: Tree) -> list[tuple[Path, Any]]:
    """Finds what can be recorded: real tensors without dimensions, and Python's numbers.

    Raises:
        TypeError: If one is where `at` does not find it.
    """
    found = [(path, leaf) for path, leaf in flat(metrics) if _is_scalar(leaf)]
    for path, leaf in found:
        if at(metrics, path) is not leaf:
            raise TypeError(f"metrics: {tree.join(path)} is in a node that has neither keys nor fields by its name")
    return found


def as_scalar(path: Path, leaf: Any, device: torch.device | None) -> torch.Tensor:
    """Makes a tensor of a metric. Python's numbers keep their value: an int is i64, a float f64.

    Raises:
        ValueError: If an int is out of the range of i64.
    """
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, bool):
        return torch.full((), leaf, dtype=torch.bool, device=device)
    if isinstance(leaf, int):
        if not -(2**63) <= leaf < 2**63:
            raise ValueError(f"metrics: {tree.join(path)!r} is {leaf}, beyond 64 bits; record it as a float")
        return torch.full((), leaf, dtype=torch.int64, device=device)
    # `full` fills on the device; a copy of a tensor on the host would wait for it.
    return torch.full((), float(leaf), dtype=torch.float64, device=device)


def value_of(metrics: Tree, path: Path, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a metric as a tensor that its column can hold.

    Raises:
        KeyError: If it is missing.
        TypeError: If its column would not give it back as it is, or it is no scalar any more.
        ValueError: If it is an int out of the range of i64.
    """
    leaf = at(metrics, path)
    if not isinstance(leaf, torch.Tensor | int | float):
        raise TypeError(f"metrics: {tree.join(path)!r} was {short_name(dtype)}[] in `init`, and is {leaf!r} now")
    value = as_scalar(path, leaf, device)
    if value.ndim or (value.dtype != dtype and not _is_wider(dtype, value.dtype)):
        raise TypeError(
            f"metrics: {tree.join(path)!r} was {short_name(dtype)}[] in `init`, and is {tree.describe(value)} now, "
            "which its column cannot hold; report it in one dtype always (a Python int is i64, a float f64), or start "
            "a new history with recorded.init(state, batch)"
        )
    return value


def is_whole(dtype: torch.dtype) -> bool:
    """Says whether numbers are integers that float32 would round, from 2^24 on, and float64 from 2^53 on."""
    return not dtype.is_floating_point and dtype.itemsize > 2


def column(kind: str, measure: str, path: str) -> str:
    """Names what is measured of a leaf: `grad_amax/blocks/0/w`."""
    return f"{kind}_{measure}/{path}" if path else f"{kind}_{measure}"


def names(metrics: Sequence[Path], leaves: Sequence[Leaf]) -> tuple[list[str], list[str]]:
    """Names the columns of the metrics, and those of the leaves."""
    of_leaves = [column(kind, measure, path) for kind, path, _ in leaves for measure in MEASURES]
    taken = {"step", *of_leaves}
    joined = [tree.join(path) or "metrics" for path in metrics]
    return [f"metrics/{name}" if name in taken else name for name in joined], of_leaves


def check_names(metrics: Sequence[Path], leaves: Sequence[Leaf]) -> None:
    """Checks that no two columns have one name.

    Raises:
        ValueError: If two have.
    """
    of_metrics, of_leaves = names(metrics, leaves)
    twice = [name for name, count in Counter([*of_metrics, *of_leaves]).items() if count > 1]
    if twice:
        found = [path for path, name in zip(metrics, of_metrics, strict=True) if name == twice[0]]
        what = f"the metrics at {' and '.join(map(str, found))}" if found else "what is measured of two leaves"
        raise ValueError(f"{what} would both be recorded as {twice[0]!r}; rename one")


def _is_scalar(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim == 0 and not leaf.dtype.is_complex
    return isinstance(leaf, int | float)


def _is_wider(column: torch.dtype, dtype: torch.dtype) -> bool:
    both = dtype.is_floating_point and column.is_floating_point
    return both and column.itemsize >= 4 and column.itemsize > dtype.itemsize
