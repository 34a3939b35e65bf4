"""A session: all that lies between `amp.initialize` and `amp.shutdown`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fmp.compat import gradients, losses, models
from fmp.compat.casting import Casting, in_this_thread
from fmp.compat.gradients import Pending
from fmp.compat.losses import Loss
from fmp.compat.masters import ManagedOptimizer, Masters, RefreshMasters
from fmp.compat.options import Options
from fmp.dtypes import full_precision
from fmp.policy.caster import covered

Optimizer = torch.optim.Optimizer


class Session:
    """Models, optimizers and loss scalers that train together.

    Args:
        modules: The models.
        optimizers: Their optimizers.
        options: Apex's properties.
        scalers: The scaling of each loss.
        skip_nonfinite: Whether a static scale, too, checks for overflow and skips.
        verbosity: How much to print.

    Attributes:
        losses: The scaling of each loss, from the last backward pass.
        casting: O1's casting mode, which `amp.initialize` sets; None elsewhere.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        options: Options,
        scalers: Sequence[Loss],
        *,
        skip_nonfinite: bool,
        verbosity: int,
    ):
        self.options = options
        self.losses = list(scalers)
        self.casting: Casting | None = None
        self._verbosity = verbosity
        self._skip_nonfinite = skip_nonfinite
        self._masters: Masters = {}
        self._given_up: Masters = {}
        self._pending: Pending = {}
        self._open: dict[Optimizer, set[Tensor]] = {}  # by optimizer, the parameters of passes in progress
        self._stepped: dict[Tensor, set[Optimizer]] = {}  # by master, which optimizers have used its gradient
        self._places = [place for module in modules for place in self._cast(module)]
        self._optimizers = {optimizer: self._manage(optimizer) for optimizer in optimizers}
        self._handles = [handle for module in modules for handle in self._module_hooks(module)]
        self._handles += [handle for optimizer in optimizers for handle in self._optimizer_hooks(optimizer)]

    @contextmanager
    def scaled(
        self, loss: Tensor, optimizers: Any, index: int, delay_unscale: bool, delay_overflow_check: bool
    ) -> Iterator[Tensor]:
        """Runs one backward pass, see `amp.scale_loss`."""
        state = self._loss(index)
        if self.casting is not None:
            self.casting.check_on()
        checks = state.is_dynamic or self._skip_nonfinite
        try:
            with in_this_thread(self.casting):
                if not checks and not self.options.master_weights and state.scale == 1.0:
                    yield loss.to(full_precision(loss.dtype))
                    return
                managed = self._managed(optimizers)
                with self._opened(managed) as targets:
                    gradients.forget_cleared(targets, self._pending)
                    taken = gradients.take(targets)
                    try:
                        with covered():
                            scaled = state.scaler.scale(loss)
                        yield scaled
                    except BaseException:
                        gradients.give_back(taken)
                        raise
            with covered():
                if delay_unscale:
                    gradients.keep_scaled(targets, taken, self._pending, state.scaler)
                    return
                unscaled = gradients.unscale(targets, taken, self._pending, state.scaler)
                if not delay_overflow_check:
                    self._adjust(index % len(self.losses), managed, unscaled, checks)
        finally:
            if self.casting is not None:
                self.casting.renew_cache()

    def masters_of(self, optimizer: Optimizer) -> list[Tensor]:
        """Lists what an optimizer works on, with its masters."""
        if optimizer in self._optimizers:
            self._optimizers[optimizer].find_params()
        return [param for group in optimizer.param_groups for param in group["params"]]

    def master_values(self) -> list[list[Tensor | None]]:
        """Copies the masters of each optimizer."""
        return [managed.master_values() for managed in self._optimizers.values()]

    def set_values(self, values: list[list[Tensor | None]]) -> None:
        """Sets the masters of each optimizer."""
        for managed, tensors in zip(self._optimizers.values(), values, strict=True):
            managed.set_values(tensors)

    def working_tensors(self) -> list[list[Tensor]]:
        """Lists what each optimizer works on."""
        return [self.masters_of(optimizer) for optimizer in self._optimizers]

    def say(self, message: str) -> None:
        """Prints a message, once in a distributed run."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._verbosity > 0 and (not distributed or torch.distributed.get_rank() == 0):
            print(message)

    def close(self) -> None:
        """Ends the session and gives models and optimizers back as they came, in their old dtypes."""
        if self.casting is not None:
            self.casting.leave()
        for handle in self._handles:
            handle.remove()
        grads: dict[Tensor, Tensor | None] = {}
        for managed in self._optimizers.values():
            managed.show_grads()
            gradients.forget_cleared(managed.targets(), self._pending)
            grads |= gradients.settle(managed.targets(), self._pending)
        for param in grads:
            param.grad = None
        models.put_back(self._places, self._masters)
        for param, grad in grads.items():
            param.grad = None if grad is None else grad.to(param.dtype)
        for managed in self._optimizers.values():
            managed.release()
            self._recast(managed)

    # --- hooks around the optimizer's step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        managed = self._optimizers[optimizer]
        managed.show_grads()
        if self.options.master_weights:
            managed.find_params()
        if optimizer in self._open:
            raise RuntimeError("step() inside of amp.scale_loss: leave the block first, which unscales the gradients")
        if managed.has_scaled_grads(self._pending):
            raise RuntimeError(
                "step(): the gradients are still scaled by a scale_loss(..., delay_unscale=True); call scale_loss "
                "without delay_unscale for the last backward pass before a step"
            )
        by_itself = managed.skips is None and not managed.has_masters()
        if not by_itself and any(callable(arg) for arg in (*args[1:], *kwargs.values())):
            raise RuntimeError(
                "step(closure): amp supports no closure with master weights or in a step that overflow skips; call "
                "step() without one"
            )
        if self.casting is not None:
            self.casting.pause()
        if managed.skips is not None:
            self._tell_of_skip(managed.skips)
            managed.hide_grads()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        managed = self._optimizers[optimizer]
        if managed.skips is None:
            managed.copy_to_model()
        else:
            managed.show_grads()
            managed.skips = None
        self._drop_master_grads(managed)
        for param in managed.targets():
            self._given_up.pop(param, None)
        if self.casting is not None:
            self.casting.renew_cache()
            self.casting.resume()

    def _drop_master_grads(self, managed: ManagedOptimizer) -> None:
        """Clears the gradients of masters, which `model.zero_grad()` does not reach, when all who share one have it."""
        owners = {item.optimizer: set(item.masters()) for item in self._optimizers.values()}
        for master in managed.masters():
            stepped = self._stepped.setdefault(master, set())
            stepped.add(managed.optimizer)
            if all(optimizer in stepped for optimizer, masters in owners.items() if master in masters):
                master.grad = None
                del self._stepped[master]

    def _tell_of_skip(self, index: int) -> None:
        state = self.losses[index]
        change = f"reducing loss scale to {state.scale}" if state.is_dynamic else f"loss scale stays {state.scale}"
        self.say(f"Gradient overflow.  Skipping step, loss scaler {index} {change}")

    # --- what a session is made of

    def _cast(self, module: nn.Module) -> list[models.Place]:
        dtype = self.options.model_dtype
        if dtype is None:
            return []
        return models.cast(module, dtype, keep_batchnorm=bool(self.options.keep_batchnorm_fp32))

    def _manage(self, optimizer: Optimizer) -> ManagedOptimizer:
        managed = ManagedOptimizer(optimizer, self._masters if self.options.master_weights else None)
        self._recast(managed)
        return managed

    def _recast(self, managed: ManagedOptimizer) -> None:
        # Masters take the state over as it is.
        if not self.options.master_weights and self.options.model_dtype is not None:
            managed.recast_state()

    def _loss(self, index: int) -> Loss:
        try:
            return self.losses[index]
        except IndexError:
            raise IndexError(
                f"loss_id={index}, but there are {len(self.losses)} loss scalers; give amp.initialize num_losses="
            ) from None

    def _module_hooks(self, module: nn.Module) -> list[Any]:
        handles = models.add_hooks(module, self.options)
        if self.options.master_weights:
            refresh = RefreshMasters(self._masters, self._given_up)
            handles += [part.register_load_state_dict_post_hook(refresh) for part in module.modules()]
        if self.options.patch_torch_functions:
            # A step that has raised does not reach its last hook.
            handles.append(module.register_forward_pre_hook(_Resume(self)))
        return handles

    def _optimizer_hooks(self, optimizer: Optimizer) -> list[Any]:
        find = self._optimizers[optimizer].find_params
        return [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            # Loading casts state to the dtype of the parameters, so the masters must be there before.
            optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: find()),
        ]

    def _managed(self, optimizers: Any) -> list[ManagedOptimizer]:
        given = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        if not isinstance(given, list | tuple) or not all(isinstance(item, Optimizer) for item in given):
            raise TypeError(f"optimizers must be one optimizer, or a list or tuple of them, got {optimizers!r}")
        unknown = [type(item).__name__ for item in given if item not in self._optimizers]
        if unknown:
            raise RuntimeError(
                f"optimizers: {', '.join(unknown)} was not given to amp.initialize; give it all models and optimizers"
            )
        return [self._optimizers[item] for item in dict.fromkeys(given)]

    @contextmanager
    def _opened(self, managed: Sequence[ManagedOptimizer]) -> Iterator[dict[Tensor, Tensor]]:
        if any(item.optimizer in self._open for item in managed):
            raise RuntimeError("scale_loss inside of scale_loss with the same optimizer: leave the first block before")
        targets: dict[Tensor, Tensor] = {}
        for item in managed:
            item.show_grads()
            item.find_params()
            targets |= item.targets()
        if any(not params.isdisjoint(targets) for params in self._open.values()):
            raise RuntimeError(
                "scale_loss inside of scale_loss, and their optimizers share a parameter: leave the first block before"
            )
        opened = {item.optimizer: set(item.targets()) for item in managed}
        self._open |= opened
        try:
            yield targets
        finally:
            for optimizer in opened:
                del self._open[optimizer]

    def _adjust(
        self, index: int, managed: Sequence[ManagedOptimizer], unscaled: Sequence[Tensor], checks: bool
    ) -> None:
        finite = losses.finite(unscaled).cpu() if checks else torch.tensor(True)
        self.losses[index] = self.losses[index].adjust(finite)
        if not finite:
            for item in managed:
                item.skips = index if item.skips is None else item.skips


class _Resume:
    """A forward pre-hook that switches casting on, in case a failed step has left it off."""

    def __init__(self, session: Session | None):
        self.session = session

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.session is not None and self.session.casting is not None:
            self.session.casting.resume()

    def __deepcopy__(self, memo: Any) -> "_Resume":
        return _Resume(None)

    def __reduce__(self) -> Any:
        return _Resume, (None,)


class Current:
    """What `amp.initialize` has begun: Apex's functions take no session, so there is one a process.

    Attributes:
        session: The session; None before and after, and where amp is switched off.
        is_disabled: Whether amp was initialized with `enabled=False`.
    """

    session: Session | None = None
    is_disabled: bool = False


current = Current()


def the_session(function: str) -> Session | None:
    """Returns the session; None if amp is switched off.

    Args:
        function: Who asks.

    Raises:
        RuntimeError: If amp is not initialized.
    """
    if current.session is None and not current.is_disabled:
        raise RuntimeError(f"amp.{function}: amp is not initialized; call amp.initialize before")
    return current.session
