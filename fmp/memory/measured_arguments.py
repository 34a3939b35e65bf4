"""Checks of what `fmp.memory.measure_step` is given: it makes the state itself, from what `step.init` takes."""

from typing import Any

from torch import nn

from fmp import _compat
from fmp.module import Model
from fmp.step import TrainState, TrainStep

Tree = Any

_CALL = "measure_step(step, params, batch, buffers=...)"


def check_arguments(step: Any, params: Tree, buffers: Tree) -> None:
    """Checks the arguments of `measure_step`.

    Raises:
        TypeError: If the step is no train step, or the parameters are a state or a model.
        ValueError: If buffers are missing, or are not taken by the loss.
    """
    if not isinstance(step, TrainStep):
        found = f"a {type(step).__name__}"
        if isinstance(getattr(step, "step", None), TrainStep):  # such as one that records
            found += "; pass the step in it, its .step"
        elif _compat.is_compiled(step):
            found += " from torch.compile; pass the step as it was before, or one with compile=True"
        raise TypeError(f"step must be what fmp.train_step returns, got {found}")
    if isinstance(params, TrainState):
        raise TypeError(
            "params is a TrainState, but measure_step makes the state itself; pass what init(params, buffers=...) was "
            f"given: {_CALL}"
        )
    if isinstance(params, Model | nn.Module):
        model = "model" if isinstance(params, Model) else "fmp.functionalize(module)"
        raise TypeError(
            f"params is a {type(params).__name__}, and not its parameters; pass {model}.params, and {model}.buffers if "
            f"the loss takes them: {_CALL}"
        )
    takes_buffers = any("buffers" in loss.keywords for loss in step.config.losses.values())
    if takes_buffers and buffers is None:
        raise ValueError(
            f"the loss takes buffers, which step.init(params, buffers=...) would be given; pass them here: {_CALL}"
        )
    if buffers is not None and not takes_buffers:
        raise ValueError("buffers: the loss does not take the keyword argument `buffers`; leave them out")
