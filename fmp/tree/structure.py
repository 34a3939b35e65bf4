"""The structure of a tree: taking it apart, mapping over it, naming and describing its leaves."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import optree
import torch

from fmp import _traced
from fmp.dtypes import short_name

Tree = Any
Spec = optree.PyTreeSpec | _traced.Spec


def flatten(tree: Tree) -> tuple[list[Any], Spec]:
    """Takes a tree apart into its leaves and its structure; None is a leaf.

    Example:
        >>> found, spec = flatten({"a": 1, "b": None})
        >>> found
        [1, None]
    """
    if torch.compiler.is_compiling():
        return _traced.flatten(tree)
    return optree.tree_flatten(tree, none_is_leaf=True)


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Tree:
    """Puts leaves back into a structure that `flatten` returned.

    Args:
        spec: The structure.
        leaves: One value for each of its leaves, in the order of `flatten`.

    Returns:
        A new tree, whose leaves are these values.

    Raises:
        ValueError: If there are fewer or more values than leaves.

    Example:
        >>> found, spec = flatten({"a": 1, "b": (2, 3)})
        >>> unflatten(spec, [10 * leaf for leaf in found])
        {'a': 10, 'b': (20, 30)}
    """
    return spec.unflatten(leaves)


def leaves(tree: Tree) -> list[Any]:
    """Returns the leaves of a tree, None included.

    Example:
        >>> leaves({"b": None, "a": (1, 2)})
        [1, 2, None]
    """
    return flatten(tree)[0]


def structure(tree: Tree) -> Spec:
    """Returns the structure of a tree; two trees that can be mapped together have equal ones.

    Example:
        >>> structure({"a": 1}) == structure({"a": 2}), structure({"a": 1}) == structure([1])
        (True, False)
    """
    return flatten(tree)[1]


def map(fn: Callable[..., Any], tree: Tree, *rests: Tree) -> Tree:
    """Applies a function to the leaves of one or more trees of the same structure.

    Args:
        fn: Called with one leaf of each tree. A None leaf is passed like any other.
        tree: The tree that sets the structure.
        *rests: Further trees, each with `tree`'s structure, or with whole subtrees in place of its leaves.

    Returns:
        A tree of the results.

    Raises:
        ValueError: If the structure of one of the `rests` does not fit.

    Example:
        >>> map(lambda a, b: a if b is None else a + b, {"w": 1, "b": 2}, {"w": 10, "b": None})
        {'w': 11, 'b': 2}
    """
    if not torch.compiler.is_compiling():
        return optree.tree_map(fn, tree, *rests, none_is_leaf=True)
    leaves, spec = flatten(tree)
    columns = [spec.flatten_up_to(rest) for rest in rests]
    return spec.unflatten([fn(*row) for row in zip(leaves, *columns, strict=True)])


def map_with_path(fn: Callable[..., Any], tree: Tree, *rests: Tree) -> Tree:
    """Like `map`, with the leaf's path (`blocks/3/attn/qkv`) as the function's first argument.

    Args:
        fn: Called with a path, and one leaf of each tree.
        tree: The tree that sets the structure.
        *rests: Further trees, as for `map`.

    Returns:
        A tree of the results.

    Raises:
        ValueError: If the structure of one of the `rests` does not fit.

    Example:
        >>> map_with_path(lambda path, leaf: f"{path}={leaf}", {"a": {"b": 1}})
        {'a': {'b': 'a/b=1'}}
    """
    spec = structure(tree)
    return map(fn, spec.unflatten(paths(tree)), tree, *rests)


def join(path: tuple[Any, ...]) -> str:
    """Writes a path of keys, indices and field names as one string.

    Example:
        >>> join(("blocks", 3, "w"))
        'blocks/3/w'
    """
    return "/".join(str(part) for part in path)


def paths(tree: Tree) -> list[str]:
    """Returns the path of every leaf, in the order of `leaves`.

    Args:
        tree: Any tree. A tree that is a single leaf has the path `""`.

    Returns:
        One string a leaf: dictionary keys, sequence indices and field names, joined with `/`.

    Example:
        >>> paths({"blocks": [{"w": 0}, {"w": 1}], "norm": 2})
        ['blocks/0/w', 'blocks/1/w', 'norm']
    """
    return [join(path) for path in structure(tree).paths()]


def items(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Iterates over the pairs of path and leaf.

    Example:
        >>> list(items({"a": {"b": 1}, "c": 2}))
        [('a/b', 1), ('c', 2)]
    """
    return zip(paths(tree), leaves(tree), strict=True)


class _Description(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shape(tensor: torch.Tensor) -> str:
    return f"{short_name(tensor.dtype)}[{','.join(str(size) for size in tensor.shape)}]"


def describe(tree: Tree) -> str:
    """Writes a tree with dtype and shape in place of each tensor.

    Args:
        tree: Any tree, or a single tensor. A node whose class has a method `__describe__() -> str` is shown as what
            that returns.

    Returns:
        For example `{'w': f32[3,4], 'count': i32[], 'name': 'adam'}`.

    Example:
        >>> describe({"w": torch.ones(3, 4), "count": torch.tensor(1)})
        "{'w': f32[3,4], 'count': i64[]}"
    """

    def describes_itself(node: Any) -> bool:
        return hasattr(type(node), "__describe__")

    def short(leaf: Any) -> Any:
        if describes_itself(leaf):
            return _Description(leaf.__describe__())
        return _Description(_shape(leaf)) if isinstance(leaf, torch.Tensor) else leaf

    if type(tree) is torch.Tensor:  # the usual case, and one in which the tracer of torch.compile need know no class
        return _shape(tree)
    if torch.compiler.is_compiling():
        return repr(map(short, tree))
    return repr(optree.tree_map(short, tree, is_leaf=describes_itself, none_is_leaf=True))
