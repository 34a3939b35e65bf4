"""Gradients across backward passes: what `scale_loss` takes away on entry, and what it gives back on exit.

Each pass finds `.grad` empty, so that its own gradients can be unscaled apart from those of earlier passes:

    enter             taken = param.grad;  param.grad = None
    leave             target.grad = unscale(param.grad) + earlier      target: the master, or the parameter itself
    leave, delayed    target.grad = earlier * scale + param.grad       still scaled, where `zero_grad` reaches it
    failed            param.grad = taken

`earlier` is what the target had: the gradient of the master, or what was taken.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmp import _compat
from fmp.dtypes import full_precision
from fmp.scaling import LossScale, NoOpLossScale

# By parameter. The target of a parameter is its master, or itself.
Targets = Mapping[Tensor, Tensor]
Taken = Mapping[Tensor, Tensor | None]


class Delayed(NamedTuple):
    """What a pass has left scaled at a target.

    Attributes:
        scaler: What it is scaled by.
        is_cleared: Whether the present gradient of the parameter tells that somebody has cleared it since.
    """

    scaler: LossScale
    is_cleared: Callable[[Tensor | None], bool]


# By parameter.
Pending = dict[Tensor, Delayed]


def forget_cleared(targets: Targets, pending: Pending) -> None:
    """Drops what delayed passes have left where somebody has cleared the gradients since, in model or optimizer."""
    for param, target in targets.items():
        if param not in pending:
            continue
        cleared = pending[param].is_cleared(param.grad)
        if cleared and target is not param:
            target.grad = None
        if cleared or target.grad is None:
            del pending[param]


def take(targets: Targets) -> Taken:
    """Takes the gradients of parameters away."""
    with _compat.DisableTorchFunction():  # the casting of O1 would be asked about each attribute
        taken = {param: param.grad for param in targets}
        for param in targets:
            param.grad = None
    return taken


def give_back(taken: Taken) -> None:
    """Puts gradients back as they were."""
    for param, grad in taken.items():
        param.grad = grad


@torch.no_grad()
def keep_scaled(targets: Targets, taken: Taken, pending: Pending, scaler: LossScale) -> None:
    """Adds the gradients of one pass to those before, all scaled by the scaler of this pass."""
    for param, target in targets.items():
        target.grad = _all_scaled(param, target, taken, pending, scaler)
        pending.pop(param, None)
        if target.grad is not None:
            pending[param] = Delayed(scaler, _is_none if target is param else _differs_from(param.grad))


def bring_back(taken: Taken, pending: Pending, scaler: LossScale) -> None:
    """Puts the gradients of parameters back that a pass was not meant for; where it has added some, all stay scaled."""
    reached = {param: param for param in taken if param.grad is not None}
    give_back({param: grad for param, grad in taken.items() if param not in reached})
    keep_scaled(reached, taken, pending, scaler)
    for param in reached:
        pending[param] = Delayed(scaler, _is_another_than(param.grad))


@torch.no_grad()
def unscale(targets: Targets, taken: Taken, pending: Pending, scaler: LossScale) -> list[Tensor]:
    """Unscales the gradients of one pass, and of delayed ones before, and adds them to the gradients of the targets.

    Returns:
        The unscaled gradients before they were added: whether they are finite is what the scaler wants to know.
    """
    unscaled = []
    for param, target in targets.items():
        new, earlier = param.grad, taken[param] if target is param else target.grad
        if param in pending:
            new, earlier = _all_scaled(param, target, taken, pending, scaler), None
            del pending[param]
        if new is None:
            target.grad = earlier
            continue
        grad: Tensor = scaler.unscale(new)
        if earlier is None:
            target.grad = grad.to(target.dtype)
            unscaled.append(target.grad)
        else:
            target.grad = (grad + earlier.to(grad.dtype)).to(target.dtype)
            unscaled.append(grad.to(target.dtype))
    return unscaled


@torch.no_grad()
def settle(targets: Targets, pending: Pending) -> dict[Tensor, Tensor | None]:
    """Unscales what delayed passes have left, and returns the gradients of parameters as they would be without amp.

    Args:
        targets: The parameters and their targets.
        pending: Emptied for these parameters.
    """
    grads: dict[Tensor, Tensor | None] = {}
    for param, target in targets.items():
        delayed = pending.pop(param, None)
        if delayed is not None and target.grad is not None:
            grad: Tensor = delayed.scaler.unscale(target.grad)
            target.grad = grad.to(target.dtype)
        grads[param] = target.grad
    return grads


def _all_scaled(param: Tensor, target: Tensor, taken: Taken, pending: Pending, scaler: LossScale) -> Tensor | None:
    """Adds the gradient of one pass to the earlier one of its target, scaled by the scaler of the pass."""
    earlier = taken[param] if target is param else target.grad
    before = pending[param].scaler if param in pending else NoOpLossScale()
    new = None if param.grad is None else param.grad.to(target.dtype)
    if earlier is not None and before is not scaler:
        rescaled: Tensor = scaler.scale(before.unscale(earlier))
        earlier = rescaled.to(earlier.dtype)
    return _add(earlier, new)


def _is_none(grad: Tensor | None) -> bool:
    return grad is None


def _is_another_than(own: Any) -> Callable[[Tensor | None], bool]:
    reference = weakref.ref(own)  # nobody may need the gradient of such a pass
    return lambda grad: reference() is not grad


def _differs_from(own: Tensor | None) -> Callable[[Tensor | None], bool]:
    version = None if own is None else own._version
    return lambda grad: grad is not own or (grad is not None and grad._version != version)


def _add(earlier: Tensor | None, new: Tensor | None) -> Tensor | None:
    if earlier is None or new is None:
        return new if earlier is None else earlier
    wide = full_precision(new.dtype) if new.is_sparse else new.dtype
    return (earlier.to(wide) + new.to(wide)).to(new.dtype)
