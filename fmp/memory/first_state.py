"""The first state of an optimizer without data, also of one that looks at values or of which only a number is known.

init on the meta device            what most optimizers allow
init on zeros                      of all leaves, where one looks at values, as `from_torch` does; or, if these are
                                   many, of one leaf after the other, with None in place of the others:
                                   state = init(no leaves) + sum of what each leaf adds to it
"""

from typing import Any

import optree
import torch
from torch import Tensor

from fmp import tree
from fmp.optim import GradientTransformation
from fmp.optim.masked import MaskedState
from fmp.optim.partition import PartitionState

Tree = Any

# As many zeros are made at once; more for one leaf are not made at all.
_FEW, _MOST = 2**20, 2**26
# In place of a number of parameters that is too large to make; a prime, so that no other size is it by chance.
_SAMPLE = 1009


def first_state(optimizer: GradientTransformation, full: Tree) -> Tree:
    """Makes the first state of an optimizer on the meta device.

    Args:
        optimizer: The optimizer.
        full: What it works on, on the meta device, None in place of leaves that are not trained.

    Returns:
        The state; a list of its tensors where the leaves were shown one by one.

    Raises:
        ValueError: If it looks at values, and a leaf is too large to make.
    """
    try:
        return optimizer.init(full)
    except (AssertionError, RuntimeError, NotImplementedError) as error:  # it looks at values, or raises this again
        return _by_value(optimizer, full, error)


def state_of_number(optimizer: GradientTransformation, full: Tree) -> Tree:
    """Makes the first state for a number of parameters, given as one vector, if only the number matters.

    Raises:
        ValueError: If the state depends on shapes or names.
    """
    state = _of_vector(optimizer, full)
    if _depends_on_names(state):
        raise ValueError(f"what this optimizer keeps depends on names; {_ADVICE}")
    for probe, cause in (
        (full.view(1, -1), "the shapes of the parameters"),
        ({"layers": {"weight": full}}, "names"),
        ({"norm.bias": full}, "names"),
    ):
        if _slots(_of_vector(optimizer, probe)) != _slots(state):
            raise ValueError(f"what this optimizer keeps depends on {cause}; {_ADVICE}")
    return state


_ADVICE = "give a module or a tree of shapes instead of a number"


def _by_value(optimizer: GradientTransformation, full: Tree, cause: Exception) -> Tree:
    sizes = [0 if leaf is None else leaf.numel() for leaf in tree.leaves(full)]
    for path, leaf in tree.items(full):
        if leaf is not None and leaf.numel() > _MOST:
            raise ValueError(
                f"{path or 'the model'}: the optimizer looks at values, and {tree.describe(leaf)} is too large to "
                "make; name the optimizer, such as 'adamw', or give a smaller model"
            ) from cause
    if sum(sizes) <= _FEW:
        return _of_zeros(optimizer, full)
    return _leaf_by_leaf(optimizer, full)


def _of_vector(optimizer: GradientTransformation, full: Tree) -> Tree:
    """Makes the state of a tree with one leaf, which may be too large to make."""
    (leaf,) = tree.leaves(full)
    try:
        try:
            return optimizer.init(full)
        except (AssertionError, RuntimeError, NotImplementedError):
            pass
        if leaf.numel() <= _FEW:
            return _of_zeros(optimizer, full)
        shape = [_SAMPLE if size == leaf.numel() else size for size in leaf.shape]
        state = _of_zeros(optimizer, tree.map(lambda leaf: leaf.new_empty(shape), full))
    except (ValueError, KeyError) as error:  # names or a structure that a number has not
        raise ValueError(f"{_text(error)}; if that is about names or shapes, {_ADVICE}") from error

    def enlarged(slot: Any) -> Any:
        if not isinstance(slot, Tensor) or _SAMPLE not in slot.shape:
            return slot
        return slot.new_empty([leaf.numel() if size == _SAMPLE else size for size in slot.shape])

    return tree.map(enlarged, state)


def _depends_on_names(state: Tree) -> bool:
    found: list[Any] = []

    def is_leaf(node: Any) -> bool:
        # In a single group there is everything, whatever the names are.
        if isinstance(node, MaskedState) or (isinstance(node, PartitionState) and len(node.inner) > 1):
            found.append(node)
        return False

    optree.tree_flatten(state, is_leaf=is_leaf, none_is_leaf=True)
    return bool(found)


def _leaf_by_leaf(optimizer: GradientTransformation, full: Tree) -> list[Tensor]:
    leaves, spec = tree.flatten(full)

    def made(index: int | None) -> dict[str, Tensor]:
        alone = [leaf if place == index else None for place, leaf in enumerate(leaves)]
        state = _of_zeros(optimizer, tree.unflatten(spec, alone))
        return {path: slot for path, slot in tree.items(state) if isinstance(slot, Tensor)}

    common = made(None)
    tensors = list(common.values())
    for index, leaf in enumerate(leaves):
        if leaf is not None:
            tensors += [slot for path, slot in made(index).items() if not _alike(slot, common.get(path))]
    return tensors


def _of_zeros(optimizer: GradientTransformation, full: Tree) -> Tree:
    """Makes the state of zeros, and lets go of its data."""
    with torch.device("cpu"):
        zeros = tree.map(lambda leaf: None if leaf is None else torch.zeros(leaf.shape, dtype=leaf.dtype), full)
        return tree.map(lambda slot: slot.to("meta") if isinstance(slot, Tensor) else slot, optimizer.init(zeros))


def _alike(slot: Tensor, other: Tensor | None) -> bool:
    return other is not None and (slot.shape, slot.dtype) == (other.shape, other.dtype)


def _slots(state: Tree) -> list[tuple[str, int]]:
    """Lists what has dimensions: dtype and numbers, in any order."""
    slots = [leaf for leaf in tree.leaves(state) if isinstance(leaf, Tensor) and leaf.ndim]
    return sorted((str(slot.dtype), slot.numel()) for slot in slots)


def _text(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
