"""Steps of optimizers that amp was not given: one that would train nothing, or step on an overflow, is refused.

Some optimizers step through another one. Only the steps of those that amp was given have hooks that skip and round.
What a stranger must not step on:

    a parameter with a master                     the master rounds over what the step has done
    a master, but inside of a step with hooks     nobody rounds it
    a parameter that is to skip a step, likewise  the overflow is in its gradient

A stranger that holds one of amp's optimizers may step through that, and is left alone.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fmp import _compat
from fmp.compat.masters import ManagedOptimizer, Masters

Optimizer = torch.optim.Optimizer

_DEPTH = 3  # an optimizer in a list in an attribute, as that of a wrapper in a wrapper


class Strangers:
    """A hook before the steps of all optimizers.

    Args:
        optimizers: What the session knows of each.
        masters: The masters of the session, by parameter.
        is_running: Says whether a step of an optimizer of the session is around.
    """

    def __init__(
        self,
        optimizers: Mapping[Optimizer, ManagedOptimizer],
        masters: Masters,
        is_running: Callable[[Optimizer], bool],
    ):
        self._optimizers = optimizers
        self._masters = masters
        self._is_running = is_running

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Looks at what an optimizer that amp was not given is about to step on.

        Raises:
            RuntimeError: If the step would be lost, or is to be skipped.
        """
        if torch.compiler.is_compiling() or optimizer in self._optimizers:
            return
        with _compat.DisableTorchFunction():  # the casting of O1 would be asked about each attribute
            stepped = {tensor for group in optimizer.param_groups for tensor in group["params"]}
            stepped = {tensor for tensor in stepped if tensor.grad is not None}
        fate = self._fate(stepped)
        if fate and not any(held in self._optimizers for held in _held(optimizer, _DEPTH)):
            name = type(optimizer).__name__
            raise RuntimeError(
                f"step() of {name}: {fate}, because amp was not given this {name}. If another optimizer steps through "
                "it, give the inner one to amp.initialize and to amp.scale_loss, and make the outer one around it "
                "after amp.initialize"
            )

    def _fate(self, stepped: set[Tensor]) -> str:
        if any(tensor in self._masters for tensor in stepped):
            return "it works on parameters whose float32 masters would overwrite what it does"
        away = [item for item in self._optimizers.values() if not self._is_running(item.optimizer)]
        around = {master for item in self._optimizers.values() if item not in away for master in item.masters()}
        if not stepped.isdisjoint(set(self._masters.values()) - around):
            return "it works on float32 masters, and what it does would not reach the model"
        skipping = (item for item in away if item.skips is not None)
        if any(not stepped.isdisjoint(item.targets()) for item in skipping):
            return "the gradients have overflowed, and it would not skip the step"
        return ""


def _held(value: Any, depth: int) -> Iterator[Optimizer]:
    """Finds the optimizers in the attributes of an object, in lists and dictionaries, too."""
    if depth == 0 or isinstance(value, Tensor | torch.nn.Module):
        return
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        if isinstance(part, Optimizer):
            yield part
        yield from _held(part, depth - 1)
