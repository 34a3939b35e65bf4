"""Gradients across backward passes: what `scale_loss` takes away on entry, and what it gives back on exit.

Each pass finds `.grad` empty, so that its own gradients can be unscaled apart from those of earlier passes:

    enter             taken = param.grad;  param.grad = None
    leave             target.grad = unscale(param.grad) + earlier      target: the master, or the parameter itself
    leave, delayed    param.grad = taken + param.grad                  both still scaled
    failed            param.grad = taken

`earlier` is what the target had: the gradient of the master, or what was taken.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fmp.dtypes import full_precision
from fmp.scaling import LossScale, NoOpLossScale

# By parameter. The target of a parameter is its master, or itself.
Targets = Mapping[Tensor, Tensor]
Taken = Mapping[Tensor, Tensor | None]
# The scalers of gradients that a delayed pass left scaled, by parameter.
Pending = dict[Tensor, LossScale]


def take(targets: Targets) -> Taken:
    """Takes the gradients of parameters away."""
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
        param.grad = _add(_earlier(param, target, taken, pending, scaler), param.grad)
        pending.pop(param, None)
        if param.grad is not None:
            pending[param] = scaler


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
            new = _add(_earlier(param, target, taken, pending, scaler), new)
            earlier = None if target is param else earlier
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


def _earlier(param: Tensor, target: Tensor, taken: Taken, pending: Pending, scaler: LossScale) -> Tensor | None:
    """Returns what was taken from a parameter, scaled by a scaler."""
    grad = taken[param]
    before = pending.get(param)
    if before is None and target is not param:
        return None  # left over from a pass that the master has taken into account
    if grad is None or before is scaler:
        return grad
    rescaled: Tensor = scaler.scale((before or NoOpLossScale()).unscale(grad))
    return rescaled.to(grad.dtype)


def _add(earlier: Tensor | None, new: Tensor | None) -> Tensor | None:
    if earlier is None or new is None:
        return new if earlier is None else earlier
    wide = full_precision(new.dtype) if new.is_sparse else new.dtype
    return (earlier.to(wide) + new.to(wide)).to(new.dtype)
