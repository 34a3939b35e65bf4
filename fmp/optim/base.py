"""The contract of an optimizer, and the three helpers that every optimizer is written with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fmp import tree
from fmp.dtypes import full_precision, is_castable

Tree = Any
Schedule = Callable[[torch.Tensor], torch.Tensor]
ScalarOrSchedule = float | torch.Tensor | Schedule


class GradientTransformation(NamedTuple):
    """An optimizer, or a part of one: a pair of pure functions, and optionally a one-pass form of them.

    Attributes:
        init: `init(params) -> state`. The state is a pytree of tensors, in float32 or wider.
        update: `update(grads, state, params) -> (updates, state)`. Gradients are unscaled, `params` are the masters,
            and updates are meant to be *added*, by `apply_updates`. A leaf whose gradient is None has the update None
            and keeps its state.
        fused: `fused(grads, state, params, *, inv_scale, clip, finite, cast_dtype) -> (params, low, state)`, the same
            meaning in one pass over memory, or None.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    fused: Callable[..., tuple[Tree, Tree, Tree]] | None = None


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Adds updates to parameters.

    Args:
        params: The parameters.
        updates: A tree of the same structure; None leaves the parameter as it is.

    Returns:
        The new parameters, each with its old dtype. The sum is taken in float32 or wider.

    Example:
        >>> apply_updates({"w": torch.ones(2), "ids": torch.arange(2)}, {"w": torch.full((2,), 0.5), "ids": None})
        {'w': tensor([1.5000, 1.5000]), 'ids': tensor([0, 1])}
    """

    def add(param: Any, update: Any) -> Any:
        if update is None:
            return param
        return (param.to(full_precision(param.dtype)) + update).to(param.dtype)

    return tree.map(add, params, updates)


def zeros(params: Tree) -> Tree:
    """Makes the first moments: zeros in float32 or wider for each floating-point leaf, None for the others.

    Example:
        >>> tree.describe(zeros({"w": torch.ones(2, dtype=torch.bfloat16), "ids": torch.arange(2)}))
        "{'w': f32[2], 'ids': None}"
    """
    return tree.map(
        lambda leaf: torch.zeros_like(leaf, dtype=full_precision(leaf.dtype)) if is_castable(leaf) else None, params
    )


def update_leaves(fn: Callable[..., tuple[Any, ...]], grads: Tree, params: Tree, *states: Tree) -> tuple[Tree, ...]:
    """Runs the update of one leaf over whole trees.

    Args:
        fn: `fn(grad, param, *state) -> (update, *state)`. The gradient comes in float32 or wider.
        grads: The gradients. Where one is None, the update is None and the state stays as it is.
        params: The parameters.
        *states: The trees of state that `fn` takes and returns.

    Returns:
        The tree of updates, then the new trees of state.
    """

    def update_leaf(grad: Any, param: Any, *state: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None, *state)
        return fn(grad.to(full_precision(grad.dtype)), param, *state)

    spec = tree.structure(grads)
    return tree.unzip(tree.map(update_leaf, grads, params, *states), 1 + len(states), spec)


def scheduled(value: ScalarOrSchedule, count: torch.Tensor) -> float | torch.Tensor:
    """Returns the value of a hyper-parameter at a step, whether it is a number, a tensor or a schedule.

    Args:
        value: The number, 0-dim tensor, or schedule.
        count: i32[], the number of updates made so far.
    """
    return value(count) if callable(value) else value
