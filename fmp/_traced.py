"""Pytrees inside torch.compile: what `fmp.tree` needs of optree, in plain Python.

Dynamo puts a version of its own in place of optree. That one fails on a dictionary which is made while tracing and
holds no tensor (`{}`, `{"w": None}`), and on filling a dictionary with constants only. A train step does both, with
masters that do not exist and gradients that are None.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import optree
import optree.utils

_DICTS = (dict, OrderedDict, defaultdict)


class Spec:
    """The structure of a tree, with the methods of `optree.PyTreeSpec` that fmp uses. Without arguments, a leaf.

    Args:
        node_type: The class of the node; None for a leaf.
        metadata: What the node's class needs to rebuild it; for a dict its default factory and its keys in their own
            order.
        entries: One key, index or field name a child.
        children: The structures of the children.
        rebuild: Makes a node of the metadata and the children.
    """

    def __init__(
        self,
        node_type: type | None = None,
        metadata: Any = None,
        entries: Iterable[Any] = (),
        children: Iterable["Spec"] = (),
        rebuild: Callable[[Any, Any], Any] | None = None,
    ):
        self.node_type = node_type
        self.metadata = metadata
        self.entries = tuple(entries)
        self.children = tuple(children)
        self.rebuild = rebuild
        self.num_leaves: int = 1 if node_type is None else sum([child.num_leaves for child in self.children])

    def __eq__(self, other: object) -> bool:
        """Compares everything but the order of keys in a dict."""
        if not isinstance(other, Spec) or self.node_type is not other.node_type or self.entries != other.entries:
            return False
        if self.node_type in (dict, defaultdict):
            return self.metadata[0] == other.metadata[0] and self.children == other.children
        return self.metadata == other.metadata and self.children == other.children

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # metadata may be a list

    def paths(self) -> list[tuple[Any, ...]]:
        """Returns the path of every leaf."""
        if self.node_type is None:
            return [()]
        pairs = zip(self.entries, self.children, strict=True)
        return [(entry, *path) for entry, child in pairs for path in child.paths()]

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Fills the structure with leaves."""
        leaves = list(leaves)
        if len(leaves) != self.num_leaves:
            raise ValueError(f"the structure has {self.num_leaves} leaves, got {len(leaves)}")
        return self._fill(leaves)

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """Takes a tree apart to the depth of this structure.

        Raises:
            ValueError: If the tree differs in structure above that depth.
        """
        subtrees: list[Any] = []
        self._collect(tree, subtrees)
        return subtrees

    def _fill(self, leaves: list[Any]) -> Any:
        if self.node_type is None:
            return leaves[0]
        start, nodes = 0, []
        for child in self.children:
            nodes.append(child._fill(leaves[start : start + child.num_leaves]))
            start += child.num_leaves
        if self.node_type in (dict, defaultdict):
            factory, order = self.metadata
            filled = dict(zip(self.entries, nodes, strict=True))
            ordered = {key: filled[key] for key in order}
            return ordered if self.node_type is dict else defaultdict(factory, ordered)
        assert self.rebuild is not None
        return self.rebuild(self.metadata, nodes)

    def _collect(self, node: Any, subtrees: list[Any]) -> None:
        if self.node_type is None:
            subtrees.append(node)
            return
        if self.node_type in _DICTS and type(node) in _DICTS:
            if set(node) != set(self.entries):
                raise ValueError(f"expected the keys {sorted(self.entries, key=str)}, got {sorted(node, key=str)}")
            children = [node[key] for key in self.entries]
        else:
            if type(node) is not self.node_type:
                raise ValueError(f"expected a node of type {self.node_type}, got {type(node)}")
            children, metadata, entries, _ = _one_level(node)
            if metadata != self.metadata or len(entries) != len(self.entries):
                raise ValueError(f"two nodes of type {self.node_type} differ in size or in static fields")
        for child, subtree in zip(self.children, children, strict=True):
            child._collect(subtree, subtrees)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Spec]:
    """Takes a tree apart into its leaves and its structure; None is a leaf, and keys are sorted.

    Args:
        tree: Any tree.
        is_leaf: Says of a node whether it is to be one leaf.
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, is_leaf)


def _flatten(node: Any, leaves: list[Any], is_leaf: Callable[[Any], bool] | None) -> Spec:
    if (is_leaf is not None and is_leaf(node)) or optree.tree_is_leaf(node, none_is_leaf=True):
        leaves.append(node)
        return Spec()
    children, metadata, entries, rebuild = _one_level(node)
    return Spec(type(node), metadata, entries, [_flatten(child, leaves, is_leaf) for child in children], rebuild)


def _one_level(node: Any) -> tuple[Any, Any, Any, Any]:
    if type(node) in (dict, defaultdict):
        keys = optree.utils.total_order_sorted(node)
        factory = node.default_factory if type(node) is defaultdict else None
        return [node[key] for key in keys], (factory, tuple(node)), keys, None
    return optree.tree_flatten_one_level(node, none_is_leaf=True)
