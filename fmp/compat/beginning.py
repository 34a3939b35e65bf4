"""The beginning of a session: everything is checked before anything is changed."""

from typing import Any

import torch

from fmp.compat import losses, masters, models as modules
from fmp.compat.casting import Casting
from fmp.compat.options import Options
from fmp.compat.registry import registry, session_rules
from fmp.compat.session import Session
from fmp.policy.fields import as_flag


@torch.inference_mode(False)  # training is to come, whatever is around this call
def begin(
    models: Any,
    optimizers: Any,
    options: Options,
    num_losses: Any,
    verbosity: Any,
    bounds: tuple[Any, Any],
    skip_nonfinite: Any,
) -> Session:
    """Casts models, hooks optimizers and enters the casting of O1, see `amp.initialize`."""
    stepping = masters.as_list(optimizers)
    trained = list(dict.fromkeys(modules.as_list(models)))
    modules.check(trained, options)
    for name, value in {"num_losses": num_losses, "verbosity": verbosity}.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r}")
    if num_losses < 0:
        raise ValueError(f"num_losses must be at least 0, got {num_losses}")
    scaler = losses.make_loss(options.loss_scale, *bounds)
    skip = as_flag("skip_nonfinite", skip_nonfinite)
    if num_losses > 0 and scaler.changes_gradients(skip, options.master_weights):
        for number, optimizer in enumerate(stepping):
            masters.check_params(optimizer, f"optimizers[{number}]")

    casting = None
    if options.patch_torch_functions:
        casting = Casting(session_rules(registry.take()), options.half, tells=verbosity >= 2)
    scalers = [scaler] * num_losses
    session = Session(trained, stepping, options, scalers, casting, skip_nonfinite=skip, verbosity=verbosity)
    try:
        session.open()
    except BaseException:
        session.close()
        raise
    return session
