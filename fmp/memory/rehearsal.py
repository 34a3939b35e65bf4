"""A train step of a plan, run on fake tensors: `fmp.memory.plan(..., measure=True)`."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from fmp.memory.checks import is_number
from fmp.memory.measured import Timeline, measure_step
from fmp.memory.model_sizes import with_tensors
from fmp.module import Model
from fmp.optim import GradientTransformation
from fmp.policy import Policy
from fmp.step import TrainStep, train_step

Tree = Any


def rehearse(
    model: Any,
    optimizer: GradientTransformation | None,
    policy: Policy,
    *,
    accumulate: int,
    average: bool,
    loss_fn: Callable[..., Any] | None,
    batch: Tree,
) -> Timeline:
    """Measures the step that a plan is for.

    Args:
        model: What `fmp.memory.plan` takes, but no number. Of a module, what requires no grad is not trained: the loss
            function gets it among the parameters, and the step keeps it apart.
        optimizer: The optimizer; None if fmp has none that could run.
        policy: The policy.
        accumulate: The number of microbatches.
        average: Whether a moving average is kept.
        loss_fn: The loss function.
        batch: The batch.

    Raises:
        ValueError: If one of these is missing.
    """
    if loss_fn is None or batch is None:
        raise ValueError("measure=True runs a step: give loss_fn and batch, or call fmp.memory.measure_step")
    if is_number(model) or optimizer is None:
        raise ValueError("measure=True runs a step: give a model with tensors or shapes, and an optimizer that fmp has")
    buffers, frozen = None, {}
    if isinstance(model, nn.Module):
        parameters = dict(model.named_parameters())
        params = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        buffers = dict(model.named_buffers())
    elif isinstance(model, Model):
        params, buffers = model.params, model.buffers
    else:
        params = with_tensors(model)
    step = train_step(loss_fn, optimizer, policy=policy, accumulate=accumulate, ema=0.999 if average else None)
    takes_buffers = any("buffers" in loss.keywords for loss in step.config.losses.values())
    kept = {"frozen": policy.cast_to_param(frozen)} if frozen else {}
    return measure_step(
        _with_frozen(step) if frozen else step, params, batch, buffers=buffers if takes_buffers else None, **kept
    )


def _with_frozen(step: TrainStep) -> TrainStep:
    """Makes a step whose losses get the frozen parameters among the others."""

    def joined(fn: Callable[..., Any]) -> Callable[..., Any]:
        def loss_fn(params: Tree, batch: Tree, *, frozen: Tree, **others: Any) -> Any:
            return fn({**params, **frozen}, batch, **others)

        return loss_fn

    losses = {
        name: dataclasses.replace(loss, fn=joined(loss.fn), keywords=loss.keywords | {"frozen"})
        for name, loss in step.config.losses.items()
    }
    return dataclasses.replace(step, config=dataclasses.replace(step.config, losses=losses))
