"""freeze: parameters that an optimizer leaves alone."""

from typing import Any

from fmp import _compat, tree
from fmp.optim.base import GradientTransformation
from fmp.optim.masks import Mask, selector

Tree = Any


def freeze(mask: Mask) -> GradientTransformation:
    """Makes a transformation that takes the gradient from some parameters, so that they keep every bit.

    A frozen leaf has the update None. In front of an optimizer this also keeps weight decay and moments away from it;
    to save the memory of the moments too, use `partition` with `freeze(True)` for a group.

    Args:
        mask: Which leaves are frozen: a tree of bools (True freezes), name patterns, or a function of a leaf's path,
            or of its path and the leaf.

    Returns:
        The transformation, without state.

    Raises:
        TypeError: If the mask holds or returns something other than bools.
        ValueError: If its structure does not fit the parameters, or none of its patterns matches any of them (when
            `init` or `update` is called).

    Example:
        >>> import torch, fmp.optim as optim
        >>> tx = optim.chain(freeze(["backbone"]), optim.adamw(0.1))
        >>> params = {"backbone.w": torch.ones(1), "head.w": torch.ones(1)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> optim.apply_updates(params, updates)
        {'backbone.w': tensor([1.]), 'head.w': tensor([0.8990])}
    """
    select = selector(mask, "mask")

    @_compat.compiled_on_its_own
    def init(params: Tree) -> tuple[()]:
        select(params)
        return ()

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: tuple[()], params: Tree) -> tuple[Tree, tuple[()]]:
        leaves, spec = tree.flatten(grads)
        kept = [None if frozen else leaf for frozen, leaf in zip(select(grads), leaves, strict=True)]
        return tree.unflatten(spec, kept), state

    return GradientTransformation(init, update)
