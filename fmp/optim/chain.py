"""chain and named_chain: several transformations of a gradient, one after the other."""

from typing import Any

from fmp import _compat
from fmp.optim.base import GradientTransformation, check_transformation

Tree = Any


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Makes one optimizer of several parts; each part's updates are the next one's gradients.

    Args:
        *transformations: The parts, in the order in which they see the gradient. With none, gradients pass through.

    Returns:
        The optimizer. Its state is the tuple of the parts' states.

    Raises:
        TypeError: If a part is not a `GradientTransformation`.

    Example:
        >>> import torch, fmp.optim as optim
        >>> tx = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.5))
        >>> params = {"w": torch.zeros(2)}
        >>> tx.update({"w": torch.tensor([3.0, 4.0])}, tx.init(params), params)[0]
        {'w': tensor([-0.3000, -0.4000])}
    """
    for index, transformation in enumerate(transformations):
        check_transformation(f"part {index} of the chain", transformation)

    @_compat.compiled_on_its_own
    def init(params: Tree) -> tuple[Tree, ...]:
        return tuple(transformation.init(params) for transformation in transformations)

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: tuple[Tree, ...], params: Tree) -> tuple[Tree, tuple[Tree, ...]]:
        new_states = []
        for transformation, part in zip(transformations, state, strict=True):
            grads, new_part = transformation.update(grads, part, params)
            new_states.append(new_part)
        return grads, tuple(new_states)

    return GradientTransformation(init, update)


def named_chain(*parts: tuple[str, GradientTransformation]) -> GradientTransformation:
    """Makes one optimizer of several parts, as `chain` does, with a name for the state of each.

    Args:
        *parts: Pairs of a name and a part, in the order in which the parts see the gradient.

    Returns:
        The optimizer. Its state is a dictionary of the parts' states, by name.

    Raises:
        TypeError: If a part is not a pair of a string and a `GradientTransformation`.
        ValueError: If two parts have the same name.

    Example:
        >>> import torch, fmp.optim as optim
        >>> tx = optim.named_chain(("clip", optim.clip_by_global_norm(1.0)), ("adam", optim.adam(0.1)))
        >>> tx.init({"w": torch.zeros(2)})["adam"].first_moment
        {'w': tensor([0., 0.])}
    """
    transformations: dict[str, GradientTransformation] = {}
    for index, part in enumerate(parts):
        # A GradientTransformation is a tuple too.
        if isinstance(part, GradientTransformation) or not isinstance(part, tuple | list) or len(part) != 2:
            raise TypeError(f"part {index} of the chain is {part!r}, not a pair of a name and a transformation")
        name, transformation = part
        if not isinstance(name, str):
            raise TypeError(f"the name of part {index} of the chain must be a string, got {name!r}")
        check_transformation(f"part {name!r} of the chain", transformation)
        if name in transformations:
            raise ValueError(f"two parts of the chain have the name {name!r}; their states would be one")
        transformations[name] = transformation
    whole = chain(*transformations.values())

    @_compat.compiled_on_its_own
    def init(params: Tree) -> dict[str, Tree]:
        return dict(zip(transformations, whole.init(params), strict=True))

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: dict[str, Tree], params: Tree) -> tuple[Tree, dict[str, Tree]]:
        # By name: a dictionary that was saved may come back in another order.
        updates, states = whole.update(grads, tuple(state[name] for name in transformations), params)
        return updates, dict(zip(transformations, states, strict=True))

    return GradientTransformation(init, update)
