"""Calling a step once more than its owner does, so that the state which he holds stays his.

a train step, one that records, one in a partial     the same without donation
any other function                                   gets copies of states and histories, which it may give away
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import optree
import torch

from fmp import tree
from fmp.numerics.history import History
from fmp.numerics.record import Recorded
from fmp.step import TrainState, TrainStep


def keeping(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a step leave the state to its owner, as far as the step can be seen."""
    if isinstance(fn, TrainStep):
        return replace(fn, donate=False)
    if isinstance(fn, Recorded):
        return replace(fn, step=keeping(fn.step))
    if type(fn) is functools.partial:
        return functools.partial(keeping(fn.func), *fn.args, **fn.keywords)
    return fn


def layers(fn: Any) -> Iterator[Any]:
    """Yields a function, and what it wraps."""
    yield fn
    if isinstance(fn, Recorded):
        yield from layers(fn.step)
    elif isinstance(fn, functools.partial):
        yield from layers(fn.func)


def copied_states(fn: Callable[..., Any], values: Any) -> Any:
    """Copies the states and histories among some arguments, unless the function is known to keep them."""
    *_, innermost = layers(fn)
    if isinstance(innermost, TrainStep):
        return values
    found: list[bool] = []

    def is_state(node: Any) -> bool:
        found.append(isinstance(node, TrainState | History))
        return found[-1]

    copied = optree.tree_map(
        lambda leaf: tree.map(_copied, leaf) if isinstance(leaf, TrainState | History) else leaf,
        values,
        is_leaf=is_state,
        none_is_leaf=True,
    )
    return copied if any(found) else values


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if leaf.is_leaf else leaf.clone()
