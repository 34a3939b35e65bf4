"""chain and named_chain: several transformations of a gradient, one after the other.

If all parts but the last only look, and the last has a one-pass form, so has the chain:

    for observer in observers:
        observer.state = observer.observe(grads, observer.state, read)      # read(g) = g * inv_scale * clip
    params, low, state = last.fused(grads, state, params, inv_scale=..., clip=...)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fmp import _compat, tree
from fmp.held import Held
from fmp.optim.base import GradientTransformation, check_transformation
from fmp.optim.fused import Request, Trees, reader, run_fused

Tree = Any
Read = Callable[[Any], Any]
Observe = Callable[[Tree, tuple[Tree, ...], Read], tuple[Tree, ...]]


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Makes one optimizer of several parts; each part's updates are the next one's gradients.

    Args:
        *transformations: The parts, in the order in which they see the gradient. With none, gradients pass through.

    Returns:
        The optimizer. Its state is the tuple of the parts' states. It has a one-pass form if its last part has one, and
        the others only look at gradients, as `fmp.numerics.watch_gradients` does.

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

    observe, observe_first = _observing(transformations), _observing(transformations[:-1])
    last = transformations[-1] if transformations else None
    if last is None or last.fused is None or observe_first is None:
        return GradientTransformation(init, update, observe=observe)
    # What looks at gradients looks at whole ones.
    is_entrywise = last.entrywise and len(transformations) == 1
    return GradientTransformation(init, update, _one_pass(observe_first, last.fused), observe, is_entrywise)


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

    def in_order(state: dict[str, Tree]) -> tuple[Tree, ...]:
        return tuple(state[name] for name in transformations)

    @_compat.compiled_on_its_own
    def init(params: Tree) -> dict[str, Tree]:
        return dict(zip(transformations, whole.init(params), strict=True))

    @_compat.compiled_on_its_own
    def update(grads: Tree, state: dict[str, Tree], params: Tree) -> tuple[Tree, dict[str, Tree]]:
        # By name: a dictionary that was saved may come back in another order.
        updates, states = whole.update(grads, in_order(state), params)
        return updates, dict(zip(transformations, states, strict=True))

    look, run = whole.observe, whole.fused

    def observe(grads: Tree, state: dict[str, Tree], read: Read) -> dict[str, Tree]:
        assert look is not None
        return dict(zip(transformations, look(grads, in_order(state), read), strict=True))

    def fused(
        grads: Tree, state: dict[str, Tree], params: Tree, *, cast_dtype: torch.dtype | None = None, **options: Any
    ) -> Trees:
        assert run is not None
        held = Held(grads=grads, state=in_order(state), params=params)
        del grads, state, params
        params, low, states = run_fused(run, held, Request(**options), cast_dtype)
        return params, low, dict(zip(transformations, states, strict=True))

    return GradientTransformation(
        init,
        update,
        fused=None if run is None else fused,
        observe=None if look is None else observe,
        entrywise=whole.entrywise,
    )


def _observing(parts: Sequence[GradientTransformation]) -> Observe | None:
    """Makes the `observe` of some parts, one after the other; None if one of them does more than look."""
    observers = [part.observe for part in parts if part.observe is not None]
    if len(observers) < len(parts):
        return None

    def observe(grads: Tree, state: tuple[Tree, ...], read: Read) -> tuple[Tree, ...]:
        new_states = []
        for index, (look, old) in enumerate(zip(observers, state, strict=True)):
            new_states.append(_checked(index, look(grads, old, read), old))
        return tuple(new_states)

    return observe


def _checked(index: int, new: Tree, old: Tree) -> Tree:
    """Raises a `TypeError` for the state that an observer returns, if it is another tree than the one before."""
    if tree.structure(new) != tree.structure(old):
        raise TypeError(
            f"part {index} of the chain: its observe returned {tree.describe(new)}, and its state was "
            f"{tree.describe(old)}; it must return the new state alone, of the same structure"
        )
    return new


def _one_pass(observe: Observe, last: Callable[..., Trees]) -> Callable[..., Trees]:
    """Makes the `fused` of a chain of observers and an optimizer of which `last` is the one-pass form."""

    def fused(
        grads: Tree, state: tuple[Tree, ...], params: Tree, *, cast_dtype: torch.dtype | None = None, **options: Any
    ) -> Trees:
        request = Request(**options)
        old = tuple(state[:-1])
        seen = observe(grads, old, reader(request.inv_scale, request.clip))
        if request.finite is not None:
            tree.check_flag("finite", request.finite)
            seen = tree.select(request.finite, seen, old)
        held = Held(grads=grads, state=state[-1], params=params)
        del grads, state, params, old
        params, low, rest = run_fused(last, held, request, cast_dtype)
        return params, low, (*seen, rest)

    return fused
