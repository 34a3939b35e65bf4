"""An optimizer of a session: its parameters, the float32 masters that take their place, and the steps that are skipped.

Nothing of the optimizer is replaced. Masters stand in its `param_groups`, and hooks run before and after its step.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fmp.compat.gradients import Pending, forget_cleared
from fmp.compat.models import check_trainable
from fmp.dtypes import full_precision, is_castable
from fmp.tree import describe

# By parameter. Optimizers that share a parameter share its master.
Masters = dict[Tensor, Tensor]


def as_list(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Reads the argument `optimizers`.

    Raises:
        TypeError: If it is neither an optimizer, nor a list of them, nor None.
        RuntimeError: If one is given twice.
    """
    given = [] if optimizers is None else optimizers
    given = [given] if isinstance(given, torch.optim.Optimizer) else given
    if not isinstance(given, list) or not all(isinstance(item, torch.optim.Optimizer) for item in given):
        raise TypeError(f"optimizers must be one torch.optim.Optimizer or a list of them, got {optimizers!r}")
    if len(set(given)) < len(given):
        raise RuntimeError("optimizers: one of them is given twice")
    return given


class ManagedOptimizer:
    """What a session knows of one optimizer.

    Args:
        optimizer: The optimizer.
        masters: The masters of the session, or None if there are to be none.

    Attributes:
        optimizer: The optimizer.
        skips: The index of the loss whose overflow makes the next step a skipped one; None without.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Masters | None):
        self.optimizer = optimizer
        self.skips: int | None = None
        self._masters = masters
        self._params: dict[Tensor, Tensor] = {}  # by master
        self._hidden: dict[Tensor, Tensor] = {}  # gradients that a skipped step must not see

    def find_params(self) -> None:
        """Puts masters in the place of the half parameters that have joined the groups since the last time.

        Raises:
            TypeError: If a parameter has a dtype that amp does not train.
            ValueError: If the optimizer has a parameter already, whose master torch did not know.
        """
        new = []
        present = set(self._tensors())
        for group in self.optimizer.param_groups:
            for index, tensor in enumerate(group["params"]):
                if tensor in self._params or not tensor.requires_grad:
                    continue
                check_trainable(tensor)
                if self._masters is not None and self._masters.get(tensor) in present:
                    raise ValueError(f"optimizers: a parameter {describe(tensor)} is in two groups of one optimizer")
                if self._masters is not None and tensor.dtype != full_precision(tensor.dtype):
                    new.append((group["params"], index, tensor))
        for params, index, param in new:
            self._promote(params, index, param)

    def targets(self) -> dict[Tensor, Tensor]:
        """Returns the parameters of the model, each with what the optimizer has in its place."""
        return {self._params.get(tensor, tensor): tensor for tensor in self._tensors()}

    def master_values(self) -> list[Tensor | None]:
        """Copies the masters, in the order of the groups; None for a parameter without one."""
        return [tensor.detach().clone() if tensor in self._params else None for tensor in self._tensors()]

    @torch.no_grad()
    def set_values(self, values: list[Tensor | None]) -> None:
        """Sets what the optimizer works on, and the parameters of the model with it; None leaves one as it is."""
        for tensor, value in zip(self._tensors(), values, strict=True):
            if value is not None:
                tensor.copy_(value)
        self.copy_to_model()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Rounds each master to its parameter."""
        for tensor in self._tensors():
            if tensor in self._params:
                self._params[tensor].copy_(tensor)

    def hide_grads(self) -> None:
        """Lets the optimizer see no gradients. Those of torch leave a parameter without one alone, state and all."""
        for tensor in self._tensors():
            if tensor.grad is not None:
                self._hidden[tensor] = tensor.grad
                tensor.grad = None

    def show_grads(self) -> None:
        """Puts the hidden gradients back."""
        for tensor, grad in self._hidden.items():
            tensor.grad = grad
        self._hidden.clear()

    def masters(self) -> list[Tensor]:
        """Lists the masters that the optimizer works on."""
        return [tensor for tensor in self._tensors() if tensor in self._params]

    def has_masters(self) -> bool:
        """Says whether a step has masters to copy to the model."""
        return bool(self._params)

    def has_scaled_grads(self, pending: Pending) -> bool:
        """Says whether gradients are left that a delayed pass has not unscaled."""
        targets = self.targets()
        forget_cleared(targets, pending)
        return not pending.keys().isdisjoint(targets)

    def recast_state(self) -> None:
        """Gives the state that the optimizer has already the dtypes of its parameters."""
        for tensor in self._tensors():
            _cast_state(self.optimizer, tensor, tensor)

    def release(self) -> None:
        """Gives the optimizer the parameters of the model back, with the state of their masters."""
        self.show_grads()
        for group in self.optimizer.param_groups:
            for index, tensor in enumerate(group["params"]):
                if tensor in self._params:
                    param = self._params[tensor]
                    group["params"][index] = param
                    _cast_state(self.optimizer, tensor, param)
        self._params.clear()

    def _tensors(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _promote(self, params: list[Tensor], index: int, param: Tensor) -> None:
        assert self._masters is not None
        if param not in self._masters:
            self._masters[param] = param.detach().to(full_precision(param.dtype), copy=True).requires_grad_()
        master = params[index] = self._masters[param]
        self._params[master] = param
        _cast_state(self.optimizer, param, master)


class RefreshMasters:
    """A hook for after a module has loaded a state dict: a master that no longer rounds to its parameter follows it.

    Scripts load an average for evaluation, and their own weights back afterwards. A master that was given up comes back
    if its rounding is loaded before the next step; rounded, it would lose what a small step adds.

    Args:
        masters: The masters of the session.
        given_up: The masters' values before other weights were loaded, by parameter; a step clears them.
    """

    def __init__(self, masters: Masters, given_up: Masters):
        self.masters = masters
        self.given_up = given_up

    @torch.no_grad()
    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Looks at the parameters of one module."""
        for param in module.parameters(recurse=False):
            master = self.masters.get(param)
            if master is None or torch.equal(master.to(param.dtype), param):
                continue
            value = self.given_up.setdefault(param, master.detach().clone())
            master.copy_(value if torch.equal(value.to(param.dtype), param) else param)

    def __deepcopy__(self, memo: Any) -> "RefreshMasters":
        return RefreshMasters({}, {})  # a copy of a model has no masters

    def __reduce__(self) -> Any:
        return RefreshMasters, ({}, {})


def _cast_state(optimizer: torch.optim.Optimizer, old: Tensor, new: Tensor) -> None:
    """Moves the state of one tensor to another, in its dtype; a step count keeps its own, as torch has it."""
    if old not in optimizer.state:
        return
    state = optimizer.state.pop(old)
    optimizer.state[new] = {
        key: value.to(new.dtype) if is_castable(value) and key != "step" else value for key, value in state.items()
    }
