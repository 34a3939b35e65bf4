"""chain: several transformations of a gradient, one after the other."""

from typing import Any

from fmp.optim.base import GradientTransformation

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
        if not isinstance(transformation, GradientTransformation):
            hint = "; call it to make one" if callable(transformation) else ""
            raise TypeError(f"part {index} of the chain is {transformation!r}, not a GradientTransformation{hint}")

    def init(params: Tree) -> tuple[Tree, ...]:
        return tuple(transformation.init(params) for transformation in transformations)

    def update(grads: Tree, state: tuple[Tree, ...], params: Tree) -> tuple[Tree, tuple[Tree, ...]]:
        new_states = []
        for transformation, part in zip(transformations, state, strict=True):
            grads, new_part = transformation.update(grads, part, params)
            new_states.append(new_part)
        return grads, tuple(new_states)

    return GradientTransformation(init, update)
