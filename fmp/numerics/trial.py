"""One step that is made only to see which metrics it has, and leaves no trace."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fmp import tree
from fmp.ambient import Ambient, random_state, set_random_state
from fmp.dtypes import full_precision, is_castable
from fmp.errors import RematError
from fmp.rematerialization.capture import Capture
from fmp.step import Metrics, TrainState, TrainStep
from fmp.step.config import StepConfig

Tree = Any
Step = Callable[..., tuple[Any, Tree]]


def metrics_of(step: Step, state: Tree, batch: Tree, kwargs: dict[str, Any]) -> Tree:
    """Returns the metrics that a step makes of a state. The state and all random generators stay as they are."""
    if isinstance(step, TrainStep):
        functions: Any = [loss.fn for loss in step.config.losses.values()]
        step = replace(step, donate=False)
    else:
        functions = step
        state = tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)
    with _same_random_numbers_again(functions, (state, batch, kwargs)):
        return step(state, batch, **kwargs)[1]


def expected_metrics(config: StepConfig, state: TrainState) -> Metrics:
    """Makes metrics as a step makes them, but for `aux`."""
    dtypes = [full_precision(leaf.dtype) for leaf in tree.leaves(state.params) if is_castable(leaf)]
    number = torch.zeros((), dtype=torch.float64 if torch.float64 in dtypes else torch.float32)
    flag = torch.zeros((), dtype=torch.bool)
    return Metrics(
        loss=config.from_losses(dict.fromkeys(config.losses, number)),
        aux=None,
        grads_finite=config.from_losses(dict.fromkeys(config.losses, flag)),
        skipped=config.from_groups(dict.fromkeys(config.optimizers, flag)),
        loss_scale=config.from_losses(dict.fromkeys(config.losses, number)),
        grad_norm=config.from_groups(dict.fromkeys(config.optimizers, number)),
    )


@contextmanager
def _same_random_numbers_again(functions: Any, operands: Tree) -> Iterator[None]:
    """Puts torch's generators, those that the functions hold, Python's and numpy's back to where they stood."""
    ambient, of_python, of_numpy = Ambient(), random.getstate(), np.random.get_state()
    tensors = [leaf for leaf in tree.leaves(operands) if isinstance(leaf, torch.Tensor)]
    before = random_state(tensors, [*_generators(functions), *_generators(operands)])
    try:
        yield
    finally:
        ambient.rewind()
        set_random_state(before)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _generators(value: Any) -> list[torch.Generator]:
    try:
        return Capture(value).generators
    except RematError:  # it holds what cannot be looked into, such as a module in a wrapper
        return []
