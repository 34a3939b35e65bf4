"""An optimizer of a session: its parameters, the float32 masters that take their place, and the steps that are skipped.

Nothing of the optimizer is replaced. Masters stand in its `param_groups`, and hooks run before and after its step.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fmp import _compat
from fmp.compat.gradients import Pending, forget_cleared
from fmp.dtypes import full_precision, is_castable
from fmp.tree import describe

_TRAINED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# By parameter. Optimizers that share a parameter share its master.
Masters = dict[Tensor, Tensor]


def as_list(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Reads the argument `optimizers`.

    Raises:
        TypeError: If it is neither an optimizer, nor a list of them, nor None.
        RuntimeError: If one is given twice, or takes no hooks.
    """
    given = [] if optimizers is None else optimizers
    given = [given] if isinstance(given, torch.optim.Optimizer) else given
    if not isinstance(given, list) or not all(isinstance(item, torch.optim.Optimizer) for item in given):
        raise TypeError(f"optimizers must be one torch.optim.Optimizer or a list of them, got {optimizers!r}")
    if len(set(given)) < len(given):
        raise RuntimeError("optimizers: one of them is given twice")
    for optimizer in given:
        _check_hooks(optimizer)
    return given


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.register_step_pre_hook(lambda *args: None).remove()
    except AttributeError:
        raise RuntimeError(
            f"optimizers: {type(optimizer).__name__} does not call super().__init__, so its steps cannot be skipped; "
            "call it there, or give amp.initialize the optimizer that it wraps, and wrap that afterwards"
        ) from None


def check_params(optimizer: torch.optim.Optimizer, name: str = "optimizers") -> None:
    """Refuses parameters whose gradients amp cannot scale.

    Args:
        optimizer: The optimizer.
        name: What to call it.

    Raises:
        TypeError: If a parameter is neither float64 or float32 nor of 16 bits.
    """
    for number, group in enumerate(optimizer.param_groups):
        with _compat.DisableTorchFunction():  # the casting of O1 would be asked about each attribute
            refused = [p.requires_grad and p.dtype not in _TRAINED for p in group["params"]]
        for index, tensor in enumerate(group["params"]):
            if refused[index]:
                raise TypeError(
                    f"{name}.param_groups[{number}]['params'][{index}] of {type(optimizer).__name__} is "
                    f"{describe(tensor)}; amp trains parameters of float64, float32, float16 and bfloat16"
                )


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
        self._noted: dict[
            Tensor, tuple[Any, int]
        ] = {}  # by parameter, a weak reference to its gradient, and its version

    def find_params(self) -> None:
        """Puts masters in the place of the half parameters that have joined the groups since the last time.

        Raises:
            TypeError: If a parameter has a dtype that amp does not train.
            ValueError: If the optimizer has a parameter already, whose master torch did not know.
        """
        if self._masters is None:
            return
        check_params(self.optimizer)
        new = []
        present = set(self._tensors())
        for group in self.optimizer.param_groups:
            for index, tensor in enumerate(group["params"]):
                if tensor in self._params or not tensor.requires_grad:
                    continue
                if self._masters.get(tensor) in present:
                    raise ValueError(f"optimizers: a parameter {describe(tensor)} is in two groups of one optimizer")
                if tensor.dtype != full_precision(tensor.dtype):
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

    def forget_hidden(self) -> None:
        """Drops the hidden gradients, which only a step that has raised leaves behind."""
        self._hidden.clear()

    def note_grads(self) -> None:
        """Takes note of the gradients of parameters with masters, so that new ones can be told from them."""
        grads = ((param, param.grad) for param in self._params.values())
        self._noted = {param: (weakref.ref(grad), grad._version) for param, grad in grads if grad is not None}

    def misses_grads(self) -> bool:
        """Says whether parameters with masters have new gradients, while no master has one."""
        masters = self.masters()
        return all(master.grad is None for master in masters) and any(
            self._has_new_grad(self._params[master]) for master in masters
        )

    def _has_new_grad(self, param: Tensor) -> bool:
        if param.grad is None:
            return False
        noted, version = self._noted.get(param, (lambda: None, 0))
        return (noted() is not param.grad or version != param.grad._version) and bool(param.grad.any())

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
        grads = [targets[param].grad for param in targets if param in pending]
        return any(grad is not None and bool(grad.any()) for grad in grads)

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

    @torch.inference_mode(False)  # a script may look at the masters first when it evaluates
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
        compiled = (part for part in module.children() if isinstance(part, torch.jit.ScriptModule))  # take no hooks
        for param in (*module.parameters(recurse=False), *(param for part in compiled for param in part.parameters())):
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
