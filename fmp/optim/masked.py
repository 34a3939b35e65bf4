"""masked: a transformation for some of the parameters."""

from typing import Any

from fmp import _compat, tree
from fmp.optim import checks
from fmp.optim.base import GradientTransformation, check_transformation
from fmp.optim.masks import Mask, selector

Tree = Any


@tree.dataclass
class MaskedState:
    """The state of `masked`.

    Attributes:
        inner: The state of the transformation, which holds nothing for leaves outside of the mask.
    """

    inner: Tree


def masked(transformation: GradientTransformation, mask: Mask) -> GradientTransformation:
    """Wraps a transformation so that it sees some leaves only; the gradients of the others pass through unchanged.

    The transformation sees the whole tree with None in place of the other leaves, so a norm that it takes is the norm
    of its own leaves.

    Passing through does not mean standing still: a gradient that no later part of a chain turns into an update is
    itself added to its parameter by `apply_updates`, uphill and at full length. Use `masked` for a part of a chain,
    such as clipping; to leave parameters alone use `freeze`, to train them differently use `partition`.

    Args:
        transformation: The transformation.
        mask: Which leaves it sees: a tree of bools, name patterns, or a function of a leaf's path,
            or of its path and the leaf.

    Returns:
        The transformation; its state is a `MaskedState`.

    Raises:
        TypeError: If `transformation` is not a `GradientTransformation`, or the mask holds or returns something other
            than bools.
        ValueError: If the structure of the mask does not fit the parameters, or none of its patterns matches any of
            them (when `init` or `update` is called).

    Example:
        >>> import torch, fmp.optim as optim
        >>> tx = optim.chain(masked(optim.clip_by_global_norm(1.0), ["embedding"]), optim.sgd(1.0))
        >>> params = {"embedding.w": torch.tensor([3.0, 4.0]), "head.w": torch.tensor([3.0, 4.0])}
        >>> tx.update(params, tx.init(params), params)[0]
        {'embedding.w': tensor([-0.6000, -0.8000]), 'head.w': tensor([-3., -4.])}
    """
    check_transformation("transformation", transformation)
    select = selector(mask, "mask")

    @_compat.compiled_on_its_own
    def init(params: Tree) -> MaskedState:
        return MaskedState(transformation.init(_only(params, select(params))))

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: MaskedState, params: Tree) -> tuple[Tree, MaskedState]:
        checks.params_match(grads, params)
        flags = select(params)
        own, inner = transformation.update(_only(grads, flags), state.inner, _only(params, flags))
        leaves, spec = tree.flatten(grads)
        rows = zip(flags, tree.leaves(own), leaves, strict=True)
        return tree.unflatten(spec, [new if meant else old for meant, new, old in rows]), MaskedState(inner)

    return GradientTransformation(init, update)


def _only(full: Tree, flags: list[bool]) -> Tree:
    leaves, spec = tree.flatten(full)
    return tree.unflatten(spec, [leaf if meant else None for leaf, meant in zip(leaves, flags, strict=True)])
