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
    forms: Group | None,
    *,
    noise: torch.Tensor | None,
    good: torch.Tensor | None,
    donate: bool,
) -> Group:
    """Updates this process's parts of one group.

    Args:
        config: The parts of the step.
        optimizer: The optimizer of the group.
        grads: The gradients; still scaled only if the optimizer has a one-pass form.
        norm: The norm of the unscaled ones.
        group: The group before.
        forms: The forms of its parts; None in a single process.
        noise: i64[], the seed by which masters are rounded, for a form that takes one.
        good: bool[], false where the group must stay as it is; None for never.
        donate: Whether parameters, masters and optimizer state of the group may be overwritten.
    """
    if optimizer.fused is not None:
        held = [group, grads]
        del group, grads  # what the optimizer holds alone it can let go; a call with ** would hold all that it passes
        return _in_one_pass(
            config, optimizer.fused, held.pop(), norm, held.pop(), forms, noise=noise, good=good, donate=donate
        )
    old = None if good is None else group
    params, masters, opt_state, ema = group
    of_params, of_state = (None, None) if forms is None else (forms.params, forms.opt_state)
    del group  # each old leaf is let go as soon as its new one exists
    full = master.merge(params, masters, form=config.master_form)
    values = grads.values
    del grads
    if config.clip_norm is not None:
        values = clip_to_norm(values, norm, config.clip_norm)
    updates, opt_state = config.placement.transform(optimizer.update, values, opt_state, full, (of_params, of_state))
    del values
    full = apply_updates(full, updates)
    del updates
    offsets = None if noise is None else config.placement.offsets(of_params)
    params, masters = master.split(full, params, masters, form=config.master_form, seed=noise, offsets=offsets)
    ema = ema if config.ema is None else _averaged(ema, full, config.ema)
    new = Group(params, masters, opt_state, ema)
    return new if good is None or old is None else tree.select(good, new, old)


def _in_one_pass(
    config: StepConfig,
    fused: Callable[..., tuple[Tree, Tree, Tree]],
    grads: Gradients,
    norm: torch.Tensor,
    group: Group,
    forms: Group | None,
    *,
    noise: torch.Tensor | None,
    good: torch.Tensor | None,
    donate: bool,
) -> Group:
    """Updates one group by the one-pass form of its optimizer, which unscales, clips, casts and skips by itself."""
    offsets = None if noise is None or forms is None else config.placement.offsets(forms.params)
    # The average is of the numbers before rounding, which only a remainder gives back; and a kernel draws by the place
    # in the tensor that it sees.
    is_exact = config.ema is None or config.master_form == "remainder"
    if config.master_form != "f32" and offsets is None and is_exact:
        held = [group, grads]
        del group, grads
        return _in_form(config, fused, held.pop(), norm, held.pop(), noise=noise, good=good, donate=donate)
    old = None if good is None else group
    params, masters, opt_state, ema = group
    del group
    full = master.merge(params, masters, form=config.master_form)
    low = _casts(params, masters) if config.master_form == "f32" else None
    inv_scale, clip = _factors(config, grads, norm)
    held = [low, full, opt_state, grads.values]
    del full, low, opt_state, grads
    full, low, opt_state = fused(
        held.pop(),
        held.pop(),
        held.pop(),
        inv_scale=inv_scale,
        clip=clip,
        finite=good,
        low=held.pop(),
        donate=donate,
    )
    if low is not None:
        params = tree.map(lambda wide, cast: wide if cast is None else cast, full, low)
        masters = tree.map(lambda wide, cast: None if cast is None else wide, full, low)
    else:
        params, masters = master.split(full, params, masters, form=config.master_form, seed=noise, offsets=offsets)
    ema = ema if config.ema is None else _averaged(ema, full, config.ema)
    new = Group(params, masters, opt_state, ema)
    if good is None or old is None:
        return new
    if config.master_form == "f32":  # then all but the average is what it has kept itself
        return new._replace(ema=tree.select(good, ema, old.ema))
    return tree.select(good, new, _where_done((full, opt_state), new, old))


def _in_form(
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
    """Updates one group by a one-pass form that takes parameters and masters as they are kept."""
    params, masters, opt_state, ema = group
    inv_scale, clip = _factors(config, grads, norm)
    held = [masters, params, opt_state, grads.values]
    del group, params, masters, opt_state, grads
    params, masters, opt_state = fused(
        held.pop(),
        held.pop(),
        held.pop(),
        inv_scale=inv_scale,
        clip=clip,
        finite=good,
        low=held.pop(),
        donate=donate,
        form=config.master_form,
        seed=noise,
    )
    if config.ema is not None:
        averages = _averaged(ema, master.merge(params, masters, form=config.master_form), config.ema)
        ema = averages if good is None else tree.select(good, averages, ema)
    return Group(params, masters, opt_state, ema)


def _factors(config: StepConfig, grads: Gradients, norm: torch.Tensor) -> tuple[Any, Any]:
    """Returns what a one-pass form multiplies gradients by, f32[] or None each: the inverse scale, the clip factor."""
    clip = None if config.clip_norm is None else clip_factor(norm, config.clip_norm)
    return None if grads.scale is None else 1.0 / grads.scale, clip


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
