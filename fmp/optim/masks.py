"""Masks: the three ways to say which leaves of a tree are meant."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from fmp import _compat, tree
from fmp.patterns import matcher

Tree = Any
Mask = Tree | Iterable[str] | Callable[[str], bool] | Callable[[str, Any], bool]

_SHOWN = 5
# What optax's masks, functions of the whole tree, usually call their argument.
_WHOLE = ("params", "tree", "updates", "pytree", "grads")


def selector(mask: Mask, name: str) -> Callable[[Tree], list[bool]]:
    """Turns a mask into a function that says for each leaf of a tree whether it is meant.

    Args:
        mask: One of
            a tree of bools, where a bool may stand for a whole subtree;
            patterns that the names of the meant leaves match, as in `fmp.patterns.matches`;
            a function that returns a bool, of a leaf's path (`blocks/3/attn/qkv`), or of its path and the leaf. It must
            not depend on values, and one of two arguments is not asked about None, which is not meant.
        name: The name of the argument, for messages.

    Returns:
        A function from a tree to a list of bools, one a leaf, in the order of `fmp.tree.leaves`.

    Raises:
        TypeError: If the mask holds or returns something other than bools, or is a function of other arguments.
        ValueError: If its structure does not fit the tree, or none of its patterns matches any path of a tree that is
            not empty (when the function is called).

    Example:
        >>> selector(["*.norm"], "mask")({"norm": {"weight": 0, "bias": 1}, "weight": 2})
        [True, True, False]
        >>> selector({"norm": False, "weight": True}, "mask")({"norm": {"weight": 0, "bias": 1}, "weight": 2})
        [False, False, True]
        >>> selector(lambda path, leaf: leaf > 1, "mask")({"norm": {"weight": 0, "bias": 1}, "weight": 2})
        [False, False, True]
    """
    if isinstance(mask, Iterator):
        mask = tuple(mask)
    if callable(mask):
        return _by_leaf(mask, name) if takes_leaf(mask, name) else _by_path(mask, name)
    if isinstance(mask, str) or _is_patterns(mask):
        return _by_patterns(mask, name)
    for path, flag in tree.items(mask):
        _checked_flag(flag, path, name)
    return lambda params: broadcast(mask, params, name)


def broadcast(prefix: Tree, full: Tree, name: str) -> list[Any]:
    """Finds for every leaf of a tree the value that another tree has there, or for the subtree that the leaf is in.

    Args:
        prefix: The tree of values; a leaf of it may stand for a whole subtree.
        full: The tree that sets the structure.
        name: What the prefix is called in messages.

    Returns:
        The values, one for each leaf of `full`.

    Raises:
        ValueError: If the two structures do not fit.

    Example:
        >>> broadcast({"a": 1, "b": 2}, {"a": [None, None], "b": None}, "rates")
        [1, 1, 2]
    """
    try:
        branches = tree.structure(prefix).flatten_up_to(full)
    except ValueError as error:
        raise ValueError(f"the structure of {name} does not fit the tree: {error}") from error
    return [value for value, branch in zip(tree.leaves(prefix), branches, strict=True) for _ in tree.leaves(branch)]


@_compat.constant_while_tracing
def takes_leaf(mask: Callable[..., Any], name: str) -> bool:
    """Says whether a mask that is a function takes a path and a leaf, and not a path alone.

    Args:
        mask: The function.
        name: The name of the argument, for messages.

    Raises:
        TypeError: If it takes neither.

    Example:
        >>> takes_leaf(lambda path, leaf: leaf.ndim >= 2, "mask"), takes_leaf(str.isupper, "mask")
        (True, False)
    """
    try:
        signature = inspect.signature(mask)
    except ValueError:  # some functions written in C
        return False
    takes = [_can_take(signature, count) for count in (1, 2)]
    first = next(iter(signature.parameters), "")
    if not any(takes) or (takes[0] and first in _WHOLE):
        raise TypeError(
            f"{name} must be a function of a leaf's path, or of its path and the leaf, that returns a bool, such as "
            f"lambda path, leaf: leaf.ndim >= 2; got one of {signature}. A function of the whole tree, as in optax, "
            f"has to be called: {name}=fn(params)"
        )
    return not takes[0]


def _can_take(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _by_leaf(meant: Callable[[str, Any], Any], name: str) -> Callable[[Tree], list[bool]]:
    return lambda params: [
        leaf is not None and _checked_flag(meant(path, leaf), path, name) for path, leaf in tree.items(params)
    ]


def _by_path(meant: Callable[[str], Any], name: str) -> Callable[[Tree], list[bool]]:
    return lambda params: [_checked_flag(meant(path), path, name) for path in tree.paths(params)]


def _by_patterns(patterns: Iterable[str], name: str) -> Callable[[Tree], list[bool]]:
    matches, given = matcher(patterns), list(patterns)

    def select(params: Tree) -> list[bool]:
        flags = [matches(path) for path in tree.paths(params)]
        # In a tree of holes, the leaves may be somewhere else.
        if given and not any(flags) and any(leaf is not None for leaf in tree.leaves(params)):
            paths = tree.paths(params)
            more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
            raise ValueError(f"{name}: none of the patterns {given} matches a path; there are {paths[:_SHOWN]}{more}")
        return flags

    return select


def _is_patterns(mask: Any) -> bool:
    return (
        isinstance(mask, Collection) and not isinstance(mask, Mapping) and all(isinstance(item, str) for item in mask)
    )


def _checked_flag(flag: Any, path: str, name: str) -> bool:
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must say True or False for {path!r}, got {flag!r} of type {type(flag).__name__}")
    return flag
