"""A state for one train step with the values of a state of another one."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fmp import master, tree
from fmp.numerics.keeping import layers
from fmp.step import TrainState, TrainStep

Tree = Any

_PARTS = ("params", "master", "opt_state", "loss_scale", "buffers", "ema")
_CARRIED = ("step", "opt_state", "ema", "skip_count", "loss_scale")


def fitted_state(step_a: TrainStep, step_b: TrainStep, state: TrainState) -> TrainState:
    """Makes a state for the second step with the values of one of the first.

    Raises:
        ValueError: If the state is none of the first step, naming the first leaf that tells.
    """
    full = _checked(step_a, state)
    fresh = step_b.init(full, buffers=state.buffers, seed=state.seed)
    if step_a.config.master_form == step_b.config.master_form and _same_kind(fresh, state):
        return state
    values = {part: _carried(getattr(state, part), getattr(fresh, part)) for part in _CARRIED}
    if type(state.loss_scale) is not type(fresh.loss_scale):
        values["loss_scale"] = fresh.loss_scale
    return tree.replace(fresh, **values)


def full_weights(step: TrainStep, state: TrainState) -> Tree:
    """Returns the weights of a state in full precision."""
    return master.merge(state.params, state.master, form=step.config.master_form)


def accumulation(step: Callable[..., Any]) -> int | None:
    """Returns over how many microbatches a step accumulates; None for a function that is no train step."""
    *_, innermost = layers(step)
    return innermost.config.accumulate if isinstance(innermost, TrainStep) else None


def _checked(step: TrainStep, state: TrainState) -> Tree:
    """Returns the weights of a state in full precision, once it is clear that the step can use it."""
    try:
        full = full_weights(step, state)
        fresh = step.init(full, buffers=state.buffers, seed=state.seed)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"step_a cannot use this state, so another step must have made it: {error}") from error
    for part in _PARTS:
        has, needs = [dict(tree.items(getattr(each, part))) for each in (state, fresh)]
        for path in (*needs, *has):
            if _kind(has.get(path)) != _kind(needs.get(path)):
                where = tree.join((part, path)).rstrip("/")
                raise ValueError(
                    f"step_a cannot use this state, so another step must have made it: {where} is "
                    f"{tree.describe(has.get(path))}, and {tree.describe(needs.get(path))} in one of step_a; pass a "
                    "state of the first step, or change their order"
                )
    return full


def _kind(leaf: Any) -> object:
    return (leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else type(leaf)


def _same_kind(a: Tree, b: Tree) -> bool:
    kinds = [[_kind(leaf) for leaf in tree.leaves(each)] for each in (a, b)]
    return tree.structure(a) == tree.structure(b) and kinds[0] == kinds[1]


def _carried(old: Tree, new: Tree) -> Tree:
    values = dict(tree.items(old))

    def carry(path: str, leaf: Any) -> Any:
        value = values.get(path)
        if isinstance(value, Tensor) and isinstance(leaf, Tensor) and value.shape == leaf.shape:
            return value.to(leaf.dtype, copy=True)
        return leaf

    return tree.map_with_path(carry, new)
