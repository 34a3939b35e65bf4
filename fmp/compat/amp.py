"""Apex's amp on fmp: a script that says `from apex import amp` runs after changing `apex` there to `fmp.compat`.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    amp.shutdown()

Models are `nn.Module`s and optimizers are those of `torch.optim`, on any device. No function, method or class is
replaced: casting is done by hooks (O2, O3) or by a mode of this thread (O1), loss scaling by `fmp.DynamicLossScale`
and `fmp.StaticLossScale`, and an optimizer that is to skip a step is shown no gradients. New code is better off with
`fmp.train_step`, which has no global state at all.

What differs from Apex, on purpose:

- CPU tensors are cast like those of a GPU (put `disable_casts` around what prepares data under O1), and neither CUDA
  nor cuDNN has to be there. Other processes, as those of a DataLoader, are not cast.
- `half_dtype=torch.bfloat16` chooses the other half, whose loss scale is 1 unless one is given.
- `state_dict()` has the float32 masters, so that a resumed run goes on bit for bit. Moments keep their float32, too.
  A dictionary that Apex has saved can be loaded.
- `shutdown()` ends the session, and gives models and optimizers back in their old dtypes with the masters' values.
  A second `initialize` before that is refused.
- Masters exist from the first `scale_loss`, `step`, `master_params`, `state_dict` or `optimizer.load_state_dict` on. A
  model that loads a state dict later takes them along, and back. Optimizers that share a parameter share its master.
- Before a backward pass the half gradients of parameters with masters are dropped, so that `optimizer.zero_grad()`,
  with any arguments, has to clear the masters' only.
- `skip_nonfinite=True` checks for overflow under a static scale, too.
- Overflow is looked for element by element in the unscaled gradients. A sum that overflows is none.
- A dynamic scale never falls to 0; scales that are not positive and finite are refused.
- Gradients that are left scaled (`delay_unscale`) stand in the masters, and are rescaled if the next pass has another
  scale. `zero_grad()` of model or optimizer drops them; `step()` refuses them, and `step()` inside of `scale_loss`.
- Without masters, the same holds for gradients that a pass leaves in optimizers that it was not given. With masters,
  `step()` refuses to do nothing after a backward pass outside of `scale_loss`.
- `scale_loss` takes a tuple of optimizers. An exception inside leaves gradients and scale as they were before it.
- `load_state_dict` checks everything before it changes anything.
- With `enabled=False`, `state_dict()` is empty, and any dictionary can be loaded.
- Named tuples and dataclasses of `fmp.tree` keep their type when inputs and outputs are cast.
- Calling `model.forward(x)` in place of `model(x)` casts nothing, as torch's hooks go.
- Under O1 a write to a weight is noticed after a forward pass without backward, as in evaluation. The lists of
  functions are Apex's with additions for later releases of torch, see `fmp.OpRules.apex`. `disable_casts` also allows
  banned functions, and it ends when its block raises. Backward passes inside `scale_loss` run in the caller's thread,
  so that recomputation is cast. As in Apex, `torch.autocast(..., enabled=False)` does not stop the casting.
- `register_half_function` and its kin take functions of torch only; decorate others. `cast_model_type=False` takes
  models that mix dtypes.
- A skipped step is a call of the optimizer's `step` in which no parameter has a gradient. It may come of an overflow
  inside of `step(closure)`. Under O1 a closure is cast, and what the step does before and after is not.
- Parameters in float64 train in float64; what cannot be scaled is refused by `initialize`.
- Models that are cast later, as by `model.float()`, take their inputs in the new dtype.
- `load_state_dict` warns of another opt level, by an attribute of what `state_dict` returns.
- An optimizer that amp was not given may not step on parameters or masters of one that was, where that would be lost.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fmp.compat import options, saving
from fmp.compat.beginning import begin
from fmp.compat.current import current, the_session
from fmp.compat.registry import (
    float_function as float_function,
    half_function as half_function,
    promote_function as promote_function,
    register_float_function as register_float_function,
    register_half_function as register_half_function,
    register_promote_function as register_promote_function,
)
from fmp.policy.caster import covered
from fmp.policy.fields import as_flag

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "shutdown",
    "state_dict",
]


_INSTEAD = {
    "_amp_state": 'amp.state_dict()["loss_scaler0"]["loss_scale"] is the scale of the first loss',
    "init": 'call amp.initialize(model, optimizer, opt_level="O1")',
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    half_dtype: torch.dtype | str = torch.float16,
    skip_nonfinite: bool = False,
) -> Any:
    """Prepares models and optimizers for mixed precision, in place.

    Args:
        models: One module or a list of them, in float32 and not yet wrapped for parallel training.
        optimizers: One optimizer or a list of them, or None.
        enabled: False returns everything untouched, and makes every other function here do nothing.
        opt_level: `"O0"` (float32), `"O1"` (function by function), `"O2"` (half with float32 masters), `"O3"` (half).
        cast_model_type: The dtype to cast models to, or False for none.
        patch_torch_functions: False takes the casting from O1.
        keep_batchnorm_fp32: Whether batch normalization stays in float32; also `"True"` and `"False"`.
        master_weights: Whether half parameters have float32 masters, which stand in the optimizers' `param_groups`.
        loss_scale: `"dynamic"`, or a number or its string.
        cast_model_outputs: The dtype of what the models return; float32 where they are cast.
        num_losses: The number of loss scalers, for `scale_loss(..., loss_id=...)`.
        verbosity: 0 prints nothing, 1 what was chosen and each skipped step, 2 also each cast of O1.
        min_loss_scale: The floor of a dynamic scale; None for none.
        max_loss_scale: Its ceiling.
        half_dtype: What half means: `torch.float16` or `torch.bfloat16`.
        skip_nonfinite: Whether a static scale skips steps with gradients that are not finite, too.

    Returns:
        `models` and `optimizers` as they were given, or `models` alone without optimizers.

    Raises:
        RuntimeError: If amp is initialized already, the opt level is unknown, a property contradicts it, a model is
            wrapped or cast already, or an optimizer is given twice.
        TypeError: If an argument is of a wrong type, or a parameter of an optimizer is complex or of 8 bits.
        ValueError: If a number is out of range.
        AssertionError: If `keep_batchnorm_fp32` is no switch.

    References:
        NVIDIA Apex, https://nvidia.github.io/apex/amp.html.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = initialize(model, optimizer, opt_level="O2", half_dtype="bf16", verbosity=0)
        >>> with scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> model.weight.dtype, [param.dtype for param in master_params(optimizer)]
        (torch.bfloat16, [torch.float32, torch.float32])
        >>> shutdown()
        >>> model.weight.dtype
        torch.float32
    """
    if current.session is not None:
        raise RuntimeError(
            "amp.initialize was called before: give all models and optimizers to one call, as lists, or end that "
            "session by amp.shutdown()"
        )
    result = models if optimizers is None else (models, optimizers)
    current.is_disabled = not as_flag("enabled", enabled)
    if current.is_disabled:
        return result
    chosen = options.defaults(opt_level, half_dtype)
    lines = ["Defaults for this optimization level are:", *chosen.describe()]
    chosen = options.override(
        chosen,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
    )
    bounds = (min_loss_scale, max_loss_scale)
    current.session = begin(models, optimizers, chosen, num_losses, verbosity, bounds, skip_nonfinite)
    current.session.say(f"Selected optimization level {opt_level}: {chosen.meaning()}")
    for line in [*lines, "After overrides, the options are:", *chosen.describe()]:
        current.session.say(line)
    return result


def shutdown() -> None:
    """Ends the session: leaves O1's casting mode, and gives models and optimizers back in their old dtypes.

    Parameters with masters get the masters' values. After that `initialize` may be called again. Without a session it
    does nothing.

    Raises:
        RuntimeError: If called in another thread than `initialize`, under O1.

    Example:
        >>> model = initialize(torch.nn.Linear(2, 2), opt_level="O3", half_dtype="bf16", verbosity=0)
        >>> shutdown()
        >>> model.weight.dtype
        torch.float32
    """
    session = current.session
    if session is not None and session.casting is not None:
        session.casting.leave()  # refuses in another thread, before anything has changed
    current.session = None
    current.is_disabled = False
    if session is not None:
        session.close()


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scales a loss for its backward pass, and unscales the gradients when the block ends.

    On leaving, the scaled gradients of this pass are unscaled and added to those of earlier passes, in float32 masters
    where there are some. If one is not finite, the next step of each of these optimizers is skipped, and the scale is
    halved.

    Args:
        loss: A floating-point tensor.
        optimizers: The optimizer of the parameters that this loss reaches, or a list or tuple of them.
        loss_id: Which of the `num_losses` scalers to use.
        model: Not used; Apex reserves it.
        delay_unscale: Leaves the gradients scaled. A later pass before the step must not delay.
        delay_overflow_check: Leaves out the check, and the scale as it is.

    Returns:
        A context manager that gives the scaled loss, in float32 or wider.

    Raises:
        RuntimeError: If amp is not initialized, an optimizer is unknown to it, or the block is inside of another one
            for the same optimizer.
        IndexError: If there is no such scaler.
        TypeError: If an argument is of a wrong type, or parameters that joined an optimizer are complex or of 8 bits.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = initialize(model, optimizer, opt_level="O0", loss_scale=128.0, verbosity=0)
        >>> loss = model(torch.ones(1, 2)).sum()
        >>> with scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> bool(scaled_loss == 128 * loss), model.weight.grad
        (True, tensor([[1., 1.]]))
        >>> shutdown()
    """
    session = the_session("scale_loss")
    if session is None:
        yield loss
        return
    if not isinstance(loss, Tensor) or not loss.dtype.is_floating_point:
        raise TypeError(f"loss must be a floating-point tensor, got {loss!r}")
    with session.scaled(loss, optimizers, loss_id, delay_unscale, delay_overflow_check) as scaled:
        yield scaled


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yields what an optimizer works on: float32 masters where there are some, else parameters of the model.

    Clip these, after leaving `scale_loss`.

    Args:
        optimizer: The optimizer.

    Example:
        >>> parameters = [torch.nn.Parameter(torch.ones(2))]
        >>> list(master_params(torch.optim.SGD(parameters, lr=0.1)))[0] is parameters[0]
        True
    """
    if current.session is not None:
        yield from current.session.masters_of(optimizer)
        return
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict() -> dict[str, Any]:
    """Returns the state of the loss scalers, as Apex does, and the float32 masters.

    Save it with the state dicts of models and optimizers.

    Returns:
        `{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}`; with master weights also `"masters"`: for each
        optimizer a list with a copy of each parameter's master, or None, in the order of its groups.

    Raises:
        RuntimeError: If amp is not initialized.

    Example:
        >>> model = initialize(torch.nn.Linear(2, 2), opt_level="O1", num_losses=2, verbosity=0)
        >>> state_dict()["loss_scaler1"]
        {'loss_scale': 65536.0, 'unskipped': 0}
        >>> shutdown()
    """
    session = the_session("state_dict")
    return {} if session is None else saving.save(session)


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Restores what `state_dict` returned, or what that of Apex did, after `initialize` with the same opt level.

    The order of the entries counts, not the number in their names. Masters set the parameters of the model, too. A
    dictionary of another opt level, or of another number of losses, is loaded with a printed warning.

    Args:
        state_dict: The dictionary. Of more loss scalers than there are, the first ones are loaded; of fewer, the
            others keep their state.

    Raises:
        RuntimeError: If amp is not initialized, or the dictionary has an unknown key.
        ValueError: If an entry is not the state of a loss scaler, or the masters do not fit the optimizers. Nothing has
            changed then.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = initialize(model, optimizer, opt_level="O2", half_dtype="bf16", verbosity=0)
        >>> load_state_dict(state_dict())
        >>> shutdown()
    """
    session = the_session("load_state_dict")
    if session is not None:
        saving.load(session, state_dict)


@contextmanager
def disable_casts() -> Iterator[None]:
    """Switches the casting of O1 off inside.

    Example:
        >>> model = initialize(torch.nn.Linear(2, 2), opt_level="O1", half_dtype="bf16", verbosity=0)
        >>> with disable_casts():
        ...     print(model(torch.ones(1, 2)).dtype)
        torch.float32
        >>> model(torch.ones(1, 2)).dtype
        torch.bfloat16
        >>> shutdown()
    """
    with covered():
        yield
