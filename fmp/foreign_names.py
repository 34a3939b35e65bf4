"""What a name means that a module of fmp does not have: a slip of the keyboard, or another library's name."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

# By the name without case and underscores. Of torch, jax, jmp, optax and Apex.
_MEANT: Final[Mapping[str, str]] = {
    # loss scaling
    "gradscaler": 'fmp.DynamicLossScale, or loss_scale="dynamic" of fmp.train_step',
    "lossscaler": "fmp.DynamicLossScale, or fmp.StaticLossScale",
    "lossscale": "fmp.DynamicLossScale, fmp.StaticLossScale, or the protocol fmp.scaling.LossScale",
    "applyiffinite": "fmp.train_step(..., skip_nonfinite=True)",
    # policies
    "getpolicy": "fmp.Policy.parse, or fmp.opt_level",
    "casttocompute": "fmp.Policy.cast_to_compute, of a policy",
    "casttoparam": "fmp.Policy.cast_to_param, of a policy",
    "casttooutput": "fmp.Policy.cast_to_output, of a policy",
    "initialize": "fmp.compat.amp.initialize for a script of Apex, fmp.train_step for a new one",
    "scaleloss": "fmp.compat.amp.scale_loss for a script of Apex, fmp.train_step for a new one",
    "amp": "fmp.compat.amp for a script of Apex, fmp.autocast and fmp.train_step for a new one",
    # trees and transforms
    "treemap": "fmp.tree.map",
    "treeleaves": "fmp.tree.leaves",
    "treeflatten": "fmp.tree.flatten",
    "treeunflatten": "fmp.tree.unflatten",
    "selecttree": "fmp.select",
    "jit": "fmp.train_step(..., compile=True), or torch.compile",
    "compile": "fmp.train_step(..., compile=True), or torch.compile",
    "vmap": "torch.func.vmap",
    "jacrev": "torch.func.jacrev",
    "checkpointpolicies": "fmp.saveable",
    # gradients and optimizers
    "clipgradnorm": "fmp.train_step(..., clip_norm=1.0), or fmp.optim.clip_by_global_norm",
    "clipgradvalue": "fmp.optim.clip_by_value",
    "clip": "fmp.optim.clip_by_value, or fmp.optim.clip_by_global_norm",
    "multitransform": "fmp.optim.partition",
    "multisteps": "fmp.optim.accumulate, or fmp.train_step(..., accumulate=4)",
    "settozero": "fmp.optim.freeze",
    "adddecayedweights": "fmp.optim.adamw(..., weight_decay=0.1, mask=...)",
    "injecthyperparameters": "fmp.optim.inject_hyperparams",
    "optimizer": "fmp.optim.GradientTransformation",
    "adam": "fmp.optim.adam",
    "adamw": "fmp.optim.adamw",
    "sgd": "fmp.optim.sgd",
    "applyupdates": "fmp.optim.apply_updates",
    # schedules
    "cosine": "fmp.optim.schedules.cosine_decay",
    "cosinedecayschedule": "fmp.optim.schedules.cosine_decay",
    "cosineannealinglr": "fmp.optim.schedules.cosine_decay",
    "warmupcosine": "fmp.optim.schedules.warmup_cosine_decay",
    "warmupcosinedecayschedule": "fmp.optim.schedules.warmup_cosine_decay",
    "warmuplinear": "fmp.optim.schedules.warmup_linear_decay",
    "linearschedule": "fmp.optim.schedules.linear",
    "constantschedule": "fmp.optim.schedules.constant",
    "joinschedules": "fmp.optim.schedules.join",
}


def unknown_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Makes the error for a name that a module does not have.

    Args:
        module: The module's full name.
        name: The name.
        known: The names that it has.

    Returns:
        The error, to be raised; it says what may have been meant, if anything is near.

    Example:
        >>> print(unknown_name("fmp", "GradScaler", []))
        module 'fmp' has no attribute 'GradScaler'; here it is fmp.DynamicLossScale, or loss_scale="dynamic" ...
        >>> print(unknown_name("fmp.optim", "admaw", ["adam", "adamw"]))
        module 'fmp.optim' has no attribute 'admaw'; did you mean 'adamw'?
    """
    message = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(message)
    if meant := _MEANT.get(_plain(name)):
        return AttributeError(f"{message}; here it is {meant}")
    by_plain = {_plain(each): each for each in known if not each.startswith("_")}
    nearest = difflib.get_close_matches(_plain(name), by_plain, n=1, cutoff=0.75)
    return AttributeError(f"{message}; did you mean {by_plain[nearest[0]]!r}?" if nearest else message)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
