"""The steps of the optimizers of a session: hooks before and after, which skip, cast closures and round masters."""

import sys
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fmp.compat.casting import Casting, runs
from fmp.compat.gradients import Pending
from fmp.compat.masters import ManagedOptimizer, Masters

Optimizer = torch.optim.Optimizer


class Stepping:
    """Hooks around the steps of optimizers.

    An optimizer whose `step` calls that of its base class runs both hooks twice; the inner pair only rounds masters.

    Args:
        optimizers: What the session knows of each.
        pending: What delayed passes have left.
        in_progress: The optimizers of backward passes that have not ended.
        given_up: See `RefreshMasters`; a step clears it.
        casting: O1's casting mode, or None.
        tell_of_skip: Takes the index of a loss whose overflow skips a step.
    """

    def __init__(
        self,
        optimizers: Mapping[Optimizer, ManagedOptimizer],
        pending: Pending,
        in_progress: Collection[Optimizer],
        given_up: Masters,
        casting: Casting | None,
        tell_of_skip: Callable[[int], None],
    ):
        self._optimizers = optimizers
        self._pending = pending
        self._in_progress = in_progress
        self._given_up = given_up
        self._casting = casting
        self._tell_of_skip = tell_of_skip
        self._calls: dict[Optimizer, list[FrameType]] = {}  # of `step`; one that has raised stays until the next
        self._stepped: dict[Tensor, set[Optimizer]] = {}  # by master, which optimizers have used its gradient

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Checks gradients, hides those that overflow has spoilt, and wraps a closure; a hook before a step.

        Raises:
            RuntimeError: If gradients are scaled, or none of `scale_loss`, or a closure cannot be called.
        """
        if self._is_inner(optimizer):
            return None
        managed = self._optimizers[optimizer]
        if optimizer in self._in_progress:
            raise RuntimeError("step() inside of amp.scale_loss: leave the block first, which unscales the gradients")
        managed.show_grads()
        managed.find_params()
        self._check_unscaled(managed)
        if managed.skips is None and managed.misses_grads():
            raise RuntimeError(
                "step(): the gradients in the model are not of a scale_loss with this optimizer, so its masters have "
                "none; call backward inside of `with amp.scale_loss(loss, optimizer) as scaled_loss`, or zero_grad() "
                "before"
            )
        closures = any(callable(arg) for arg in (*args[1:], *kwargs.values()))
        if closures and (managed.skips is not None or managed.has_masters()):
            raise RuntimeError(
                "step(closure): amp supports no closure with master weights or in a step that overflow skips; call "
                "step() without one"
            )
        if managed.skips is not None:
            self._tell_of_skip(managed.skips)
            managed.hide_grads()
        if self._casting is not None:
            self._casting.pause(self._call_of(optimizer))
        if not closures:
            return None
        wrapped = [self._closure(managed, arg) if callable(arg) else arg for arg in args[1:]]
        named = {key: self._closure(managed, arg) if callable(arg) else arg for key, arg in kwargs.items()}
        return (args[0], *wrapped), named

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rounds masters to the model, and ends a skip; a hook after a step."""
        if self._calls.get(optimizer):
            self._calls[optimizer].pop()
        managed = self._optimizers[optimizer]
        if managed.skips is None:
            managed.copy_to_model()
        if self._calls.get(optimizer):
            return
        if managed.skips is not None:
            managed.show_grads()
            managed.skips = None
        self._drop_master_grads(managed)
        managed.note_grads()
        for param in managed.targets():
            self._given_up.pop(param, None)
        if self._casting is not None:
            self._casting.renew_cache()
            self._casting.resume()

    def _closure(self, managed: ManagedOptimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Runs a closure as if it were called outside of the step: cast, and with an overflow that skips."""

        def run() -> Any:
            managed.show_grads()
            managed.skips = None  # a search along a line may overflow, and go on nearer by
            if self._casting is not None:
                self._casting.resume()
            try:
                loss = closure()
            finally:
                if self._casting is not None:
                    self._casting.renew_cache()
                    self._casting.pause(self._call_of(managed.optimizer))
            self._check_unscaled(managed)
            if managed.skips is not None:
                self._tell_of_skip(managed.skips)
                managed.hide_grads()
            return loss

        return run

    def _is_inner(self, optimizer: Optimizer) -> bool:
        """Says whether a step begins inside of a step of the same optimizer, and takes note of it."""
        if torch.compiler.is_compiling():  # there are no calls to tell apart
            return False
        calls = [call for call in self._calls.get(optimizer, []) if runs(call)]
        self._calls[optimizer] = [*calls, sys._getframe(2)]
        return bool(calls)

    def _call_of(self, optimizer: Optimizer) -> FrameType | None:
        return None if torch.compiler.is_compiling() else self._calls[optimizer][0]

    def is_running(self, optimizer: Optimizer) -> bool:
        """Says whether a step of an optimizer has begun and not ended."""
        return any(runs(call) for call in self._calls.get(optimizer, []))

    def _check_unscaled(self, managed: ManagedOptimizer) -> None:
        if managed.has_scaled_grads(self._pending):
            raise RuntimeError(
                "step(): gradients are still scaled, by a scale_loss(..., delay_unscale=True) or by one that was not "
                "given this optimizer; before a step, call scale_loss with it and without delay_unscale for the last "
                "backward pass, or zero_grad() for gradients that it is not to use"
            )

    def _drop_master_grads(self, managed: ManagedOptimizer) -> None:
        """Clears the gradients of masters, which `model.zero_grad()` does not reach, when all who share one have it."""
        owners = {item.optimizer: set(item.masters()) for item in self._optimizers.values()}
        for master in managed.masters():
            stepped = self._stepped.setdefault(master, set())
            stepped.add(managed.optimizer)
            if all(optimizer in stepped for optimizer, masters in owners.items() if master in masters):
                master.grad = None
                del self._stepped[master]
