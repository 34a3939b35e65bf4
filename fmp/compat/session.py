"""A session: all that lies between `amp.initialize` and `amp.shutdown`."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fmp import _compat
from fmp.compat import gradients, losses, models
from fmp.compat.casting import Casting, Resume, in_this_thread
from fmp.compat.gradients import Pending
from fmp.compat.losses import Loss
from fmp.compat.masters import ManagedOptimizer, Masters, RefreshMasters, check_params
from fmp.compat.options import Options
from fmp.compat.stepping import Stepping
from fmp.compat.strangers import Strangers
from fmp.dtypes import full_precision
from fmp.policy.caster import covered
from fmp.scaling import LossScale, NoOpLossScale

Optimizer = torch.optim.Optimizer


class Session:
    """Models, optimizers and loss scalers that train together.

    Args:
        modules: The models.
        optimizers: Their optimizers.
        options: Apex's properties.
        scalers: The scaling of each loss.
        casting: O1's casting mode, not entered yet; None elsewhere.
        skip_nonfinite: Whether a static scale, too, checks for overflow and skips.
        verbosity: How much to print.

    Attributes:
        losses: The scaling of each loss, from the last backward pass.
        casting: O1's casting mode; None elsewhere.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        options: Options,
        scalers: Sequence[Loss],
        casting: Casting | None,
        *,
        skip_nonfinite: bool,
        verbosity: int,
    ):
        self.options = options
        self.losses = list(scalers)
        self.casting = casting
        self._modules = modules
        self._verbosity = verbosity
        self._skip_nonfinite = skip_nonfinite
        self._masters: Masters = {}
        self._given_up: Masters = {}
        self._pending: Pending = {}
        self._open: dict[Optimizer, set[Tensor]] = {}  # by optimizer, the parameters of passes in progress
        self._aside: gradients.Taken = {}  # gradients that the innermost pass in progress is not meant for
        self._aside_scaler: LossScale = NoOpLossScale()  # of that pass
        self._places: list[models.Place] = []
        self._handles: list[Any] = []
        self._optimizers: dict[Optimizer, ManagedOptimizer] = {}
        masters = self._masters if options.master_weights else None
        self._given = {optimizer: ManagedOptimizer(optimizer, masters) for optimizer in optimizers}

    def open(self) -> None:
        """Casts the models, puts hooks on models and optimizers, and enters the casting of O1.

        If something raises, `close` takes back what was done.
        """
        for module in self._modules:
            self._cast(module)
        steps = Stepping(self._optimizers, self._pending, self._open, self._given_up, self.casting, self._tell_of_skip)
        for optimizer, managed in self._given.items():
            self._optimizers[optimizer] = managed
            self._recast(managed)
            self._add_optimizer_hooks(managed, steps)
        strangers = Strangers(self._optimizers, self._masters, steps.is_running)
        self._handles.append(register_optimizer_step_pre_hook(strangers.before))
        for module in self._modules:
            self._add_module_hooks(module)
        if self.casting is not None:
            self.casting.enter()

    @contextmanager
    def scaled(
        self, loss: Tensor, optimizers: Any, index: int, delay_unscale: bool, delay_overflow_check: bool
    ) -> Iterator[Tensor]:
        """Runs one backward pass, see `amp.scale_loss`."""
        state = self._loss(index)
        if self.casting is not None:
            self.casting.check_on()
        checks = state.is_dynamic or self._skip_nonfinite
        around = self._aside_scaler if self._open else None
        try:
            with in_this_thread(self.casting):
                if not state.changes_gradients(checks, self.options.master_weights):
                    yield loss.to(full_precision(loss.dtype))
                    return
                managed = self._managed(optimizers)
                with self._opened(managed) as targets:
                    self._bring_back()  # what a pass around this one was not meant for, this one may be
                    gradients.forget_cleared(targets, self._pending)
                    taken = gradients.take(targets)
                    self._set_aside(state.scaler)
                    try:
                        with covered():
                            scaled = state.scaler.scale(loss)
                        yield scaled
                    except BaseException:
                        gradients.give_back({**taken, **self._aside})
                        self._aside = {}
                        raise
            with covered():
                self._bring_back()
                if delay_unscale:
                    gradients.keep_scaled(targets, taken, self._pending, state.scaler)
                    return
                unscaled = gradients.unscale(targets, taken, self._pending, state.scaler)
                for item in managed:
                    item.note_grads()
                if not delay_overflow_check:
                    self._adjust(index % len(self.losses), managed, unscaled, checks)
        finally:
            if around is not None:
                self._bring_back()
                self._set_aside(around)
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
        """Ends the session and gives models and optimizers back as they came, in their old dtypes.

        A module that refuses a buffer raises in the end, when parameters, gradients and optimizers are given back.
        """
        if self.casting is not None:
            self.casting.leave()
        for handle in self._handles:
            handle.remove()
        with ExitStack() as after:
            for managed in self._optimizers.values():
                after.callback(self._give_back, managed)
            grads = self._settled_grads()
            for param in grads:
                param.grad = None
            after.callback(_set_grads, grads)
            models.put_back(self._places, self.options.model_dtype, self._masters)

    def _settled_grads(self) -> dict[Tensor, Tensor | None]:
        """Returns the gradients of all parameters, by parameter, as they would be without amp."""
        grads: dict[Tensor, Tensor | None] = {}
        for managed in self._optimizers.values():
            managed.show_grads()
            gradients.forget_cleared(managed.targets(), self._pending)
            grads |= gradients.settle(managed.targets(), self._pending)
        for param in list(self._pending):  # of models alone
            gradients.forget_cleared({param: param}, self._pending)
            grads |= gradients.settle({param: param}, self._pending)
        return grads

    def _give_back(self, managed: ManagedOptimizer) -> None:
        managed.release()
        self._recast(managed)

    def _tell_of_skip(self, index: int) -> None:
        state = self.losses[index]
        change = f"reducing loss scale to {state.scale}" if state.is_dynamic else f"loss scale stays {state.scale}"
        self.say(f"Gradient overflow.  Skipping step, loss scaler {index} {change}")

    def _others(self) -> dict[Tensor, Tensor]:
        """Lists the parameters, by themselves, that no pass in progress is meant for.

        A pass that reaches them leaves its scale in their gradients: in those of other optimizers, and of parameters
        that join one later. Half gradients of what has a master are dropped in the end, so they may stay.
        """
        trained = (param for managed in self._optimizers.values() for param in managed.targets())
        inside = (param for module in self._modules for param in module.parameters())
        meant = set[Tensor]().union(*self._open.values())
        with _compat.DisableTorchFunction():  # the casting of O1 would be asked about each attribute
            found = [param for param in (*trained, *inside) if param not in meant and param.requires_grad]
            if self.options.master_weights:
                found = [param for param in found if param.dtype == full_precision(param.dtype)]
        return {param: param for param in found}

    def _set_aside(self, scaler: LossScale) -> None:
        others = self._others()
        gradients.forget_cleared(others, self._pending)
        self._aside, self._aside_scaler = gradients.take(others), scaler

    def _bring_back(self) -> None:
        gradients.bring_back(self._aside, self._pending, self._aside_scaler)
        self._aside = {}

    # --- what a session is made of

    def _cast(self, module: nn.Module) -> None:
        if self.options.model_dtype is not None:
            keep = bool(self.options.keep_batchnorm_fp32)
            self._places += models.cast(module, self.options.model_dtype, keep_batchnorm=keep)

    def _recast(self, managed: ManagedOptimizer) -> None:
        # Masters take the state over as it is.
        if not self.options.master_weights and self.options.model_dtype is not None:
            managed.recast_state()

    def _loss(self, index: int) -> Loss:
        try:
            return self.losses[operator.index(index)]
        except TypeError:
            raise TypeError(f"loss_id must be an integer, got {index!r}") from None
        except IndexError:
            raise IndexError(
                f"loss_id={index}, but there are {len(self.losses)} loss scalers; give amp.initialize num_losses="
            ) from None

    def _add_module_hooks(self, module: nn.Module) -> None:
        self._handles += models.add_hooks(module, self.options)
        if self.options.master_weights:
            refresh = RefreshMasters(self._masters, self._given_up)
            parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
            self._handles += [part.register_load_state_dict_post_hook(refresh) for part in parts]
        if self.options.patch_torch_functions:
            # A step that has raised does not reach its last hook.
            self._handles.append(module.register_forward_pre_hook(Resume(self.casting)))

    def _add_optimizer_hooks(self, managed: ManagedOptimizer, steps: Stepping) -> None:
        optimizer, find = managed.optimizer, managed.find_params
        self._handles.append(optimizer.register_step_pre_hook(steps.before))
        self._handles.append(optimizer.register_step_post_hook(steps.after))
        # Loading casts state to the dtype of the parameters, so the masters must be there before.
        self._handles.append(optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: find()))

    def _managed(self, optimizers: Any) -> list[ManagedOptimizer]:
        given = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        if not isinstance(given, list | tuple) or not all(isinstance(item, Optimizer) for item in given):
            raise TypeError(f"optimizers must be one optimizer, or a list or tuple of them, got {optimizers!r}")
        unknown = [type(item).__name__ for item in given if item not in self._optimizers]
        if unknown:
            raise RuntimeError(
                f"optimizers: {', '.join(unknown)} was not given to amp.initialize; give it all models and optimizers. "
                "For one that wraps another, name the one inside, here as there"
            )
        return [self._optimizers[item] for item in dict.fromkeys(given)]

    @contextmanager
    def _opened(self, managed: Sequence[ManagedOptimizer]) -> Iterator[dict[Tensor, Tensor]]:
        if any(item.optimizer in self._open for item in managed):
            raise RuntimeError("scale_loss inside of scale_loss with the same optimizer: leave the first block before")
        targets: dict[Tensor, Tensor] = {}
        for item in managed:
            item.forget_hidden()
            check_params(item.optimizer)
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


def _set_grads(grads: dict[Tensor, Tensor | None]) -> None:
    for param, grad in grads.items():
        param.grad = None if grad is None else grad.to(param.dtype)
