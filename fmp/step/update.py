"""The part of a step that changes one group of parameters: clip, update the masters, cast out, keep or undo."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fmp import master, tree
from fmp.dtypes import full_precision, is_castable
from fmp.optim import GradientTransformation, apply_updates, clip_factor, clip_to_norm
from fmp.step.config import StepConfig
from fmp.step.measuring import Gradients

Tree = Any


class Group(NamedTuple):
    """The part of the state that one optimizer changes."""

    params: Tree
    master: Tree
    opt_state: Tree
    ema: Tree


def update(
    config: StepConfig,
    optimizer: GradientTransformation,
    grads: Gradients,
    norm: torch.Tensor,
    group: Group,
    *,
    noise: torch.Tensor | None,
    good: torch.Tensor | None,
    donate: bool,
) -> Group:
    """Updates one group.

    Args:
        config: The parts of the step.
        optimizer: The optimizer of the group.
        grads: The gradients; still scaled only if the optimizer has a one-pass form.
        norm: The norm of the unscaled ones.
        group: The group before.
        noise: i64[], the seed by which masters are rounded, for a form that takes one.
        good: bool[], false where the group must stay as it is; None for never.
        donate: Whether parameters, masters and optimizer state of the group may be overwritten.
    """
    if optimizer.fused is not None:
        return _in_one_pass(config, optimizer.fused, grads, norm, group, noise=noise, good=good, donate=donate)
    old = None if good is None else group
    params, masters, opt_state, ema = group
    del group  # each old leaf is let go as soon as its new one exists
    full = master.merge(params, masters, form=config.master_form)
    values = grads.values
    del grads
    if config.clip_norm is not None:
        values = clip_to_norm(values, norm, config.clip_norm)
    updates, opt_state = optimizer.update(values, opt_state, full)
    del values
    full = apply_updates(full, updates)
    del updates
    params, masters = master.split(full, params, masters, form=config.master_form, seed=noise)
    ema = ema if config.ema is None else _averaged(ema, full, config.ema)
    new = Group(params, masters, opt_state, ema)
    return new if good is None or old is None else tree.select(good, new, old)


def _in_one_pass(
    config: StepConfig,
    fused: Callable[..., tuple[Tree, Tree, Tree]],
    grads: Gradients,
    norm: torch.Tensor,
    group: Group,
    *,
    noise: torch.Tensor | None,
    good: torch.Tensor | None,
    donate: bool,
) -> Group:
    """Updates one group by the one-pass form of its optimizer, which unscales, clips, casts and skips by itself."""
    old = None if good is None else group
    params, masters, opt_state, ema = group
    del group
    full = master.merge(params, masters, form=config.master_form)
    low = _casts(params, masters) if config.master_form == "f32" else None
    options: dict[str, Any] = {} if low is None else {"low": low}
    options["inv_scale"] = None if grads.scale is None else 1.0 / grads.scale
    options["clip"] = None if config.clip_norm is None else clip_factor(norm, config.clip_norm)
    held = [full, opt_state, grads.values]
    del full, low, opt_state, grads  # what the optimizer holds alone it can let go
    full, low, opt_state = fused(
        held.pop(), held.pop(), held.pop(), finite=good, cast_dtype=None, donate=donate, **options
    )
    if low is not None:
        params = tree.map(lambda wide, cast: wide if cast is None else cast, full, low)
        masters = tree.map(lambda wide, cast: None if cast is None else wide, full, low)
    else:
        params, masters = master.split(full, params, masters, form=config.master_form, seed=noise)
    ema = ema if config.ema is None else _averaged(ema, full, config.ema)
    new = Group(params, masters, opt_state, ema)
    if good is None or old is None:
        return new
    if config.master_form == "f32":  # then all but the average is what it has kept itself
        return new._replace(ema=tree.select(good, ema, old.ema))
    return tree.select(good, new, _where_done((full, opt_state), new, old))


def _casts(params: Tree, masters: Tree) -> Tree:
    """Returns the parameters that are casts of a master, None in place of the others; or None if there are none."""
    low = tree.map(lambda param, rest: None if rest is None or not _is_narrow(param) else param, params, masters)
    return low if any(leaf is not None for leaf in tree.leaves(low)) else None


def _is_narrow(param: Any) -> bool:
    return is_castable(param) and param.dtype != full_precision(param.dtype)


def _averaged(average: Tree, values: Tree, decay: float) -> Tree:
    return tree.map(lambda a, v: None if a is None else a.lerp(v.to(a.dtype), 1.0 - decay), average, values)


def _where_done(done: Tree, new: Group, old: Group) -> Group:
    """Replaces what needs no choice any more by the new leaf, so that none is made."""
    leaves = {id(leaf) for leaf in tree.leaves(done)}
    return tree.map(lambda after, before: after if id(after) in leaves else before, new, old)
