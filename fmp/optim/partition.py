"""partition: different optimizers for different parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fmp import _compat, tree
from fmp.optim import checks
from fmp.optim.base import GradientTransformation, check_transformation
from fmp.optim.masks import broadcast

Tree = Any
Labels = Tree | Callable[[str, torch.Tensor], str]


@tree.dataclass
class PartitionState:
    """The state of `partition`.

    Attributes:
        inner: The state of each group's optimizer, by label.
    """

    inner: dict[str, Tree]


def partition(transformations: Mapping[str, GradientTransformation], labels: Labels) -> GradientTransformation:
    """Makes an optimizer that hands each parameter to the optimizer of its group.

    A group's optimizer sees the whole tree with None in place of the leaves of other groups, so it holds no state for
    them, and a norm that it takes is the norm of its group.

    Args:
        transformations: The optimizer of each group, by label.
        labels: The label of each leaf: a tree of strings, in which a string may stand for a whole subtree, or a
            function `labels(path, leaf) -> label` with paths like `blocks/3/attn/qkv`. It must not depend on values,
            and is not asked about None.

    Returns:
        The optimizer; its state is a `PartitionState`.

    Raises:
        KeyError: If a leaf has a label without an optimizer (when `init` or `update` is called).
        TypeError: If `transformations` is no mapping, or a group's optimizer not a `GradientTransformation`.
        ValueError: If the tree of labels does not fit the parameters (when `init` or `update` is called).

    Example:
        >>> import fmp.optim as optim
        >>> tx = partition({"fast": optim.sgd(1.0), "slow": optim.sgd(0.1)}, {"head": "fast", "body": "slow"})
        >>> params = {"head": torch.ones(1), "body": torch.ones(1)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'head': tensor([-1.]), 'body': tensor([-0.1000])}
    """
    if not isinstance(transformations, Mapping):
        raise TypeError(
            f"transformations must be optimizers by label, such as {{'all': adam(0.1)}}, got {transformations!r}"
        )
    transformations = dict(transformations)
    for label, transformation in transformations.items():
        check_transformation(f"the optimizer of group {label!r}", transformation)

    @_compat.compiled_on_its_own
    def init(params: Tree) -> PartitionState:
        groups = labels_of(params)
        return PartitionState({label: tx.init(_pick(params, groups, label)) for label, tx in transformations.items()})

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: PartitionState, params: Tree) -> tuple[Tree, PartitionState]:
        checks.params_match(grads, params)
        groups = labels_of(params)
        updates: list[Any] = [None] * len(groups)
        inner = {}
        for label, transformation in transformations.items():
            own, inner[label] = transformation.update(
                _pick(grads, groups, label), state.inner[label], _pick(params, groups, label)
            )
            rows = zip(groups, tree.leaves(own), updates, strict=True)
            updates = [new if group == label else old for group, new, old in rows]
        return tree.unflatten(tree.structure(grads), updates), PartitionState(inner)

    def labels_of(params: Tree) -> list[Any]:
        leaves = tree.leaves(params)
        paths = tree.paths(params)
        if callable(labels):
            found = [None if leaf is None else labels(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        else:
            found = broadcast(labels, params, "labels")
        for path, leaf, label in zip(paths, leaves, found, strict=True):
            if leaf is not None and not has_group(label):
                raise KeyError(f"{path}: no optimizer for the label {label!r}; there are {list(transformations)}")
        return found

    def has_group(label: Any) -> bool:
        try:
            return label in transformations
        except TypeError:  # A list, for example, cannot be looked up.
            return False

    return GradientTransformation(init, update)


def _pick(full: Tree, groups: list[Any], label: str) -> Tree:
    leaves, spec = tree.flatten(full)
    return tree.unflatten(spec, [leaf if group == label else None for leaf, group in zip(leaves, groups, strict=True)])
