"""The part of a step that changes one group of parameters: clip, update the masters, cast out, keep or undo."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fmp import master, tree
from fmp.held import Held
from fmp.master.trees import is_narrow
from fmp.optim import GradientTransformation, apply_updates, clip_factor, clip_to_norm
from fmp.optim.fused import Request, run_fused, select_rest
from fmp.step.config import StepConfig

Tree = Any


class Group(NamedTuple):
    """The part of the state that one optimizer changes."""

    params: Tree
    master: Tree
    opt_state: Tree
    ema: Tree


class Task(NamedTuple):
    """How one group is to be updated in one step.

    Attributes:
        config: The parts of the step.
        optimizer: The optimizer of the group.
        norm: The norm of the unscaled gradients.
        wholes: The wholes that this process's parts of the group are parts of; None in a single process.
        noise: i64[], the seed by which masters are rounded, for a form that takes one.
        good: bool[], false where the group must stay as it is; None for never.
        donate: Whether parameters, masters and optimizer state of the group may be overwritten.
    """

    config: StepConfig
    optimizer: GradientTransformation
    norm: torch.Tensor
    wholes: Group | None
    noise: torch.Tensor | None
    good: torch.Tensor | None
    donate: bool


def update(task: Task, held: Held) -> Group:
    """Updates this process's parts of one group.

    Args:
        task: How.
        held: `group`, the `Group` before, and `grads`, its `Gradients`, still scaled only if the optimizer has a
            one-pass form. Each old leaf is let go as soon as its new one exists, unless it may be kept.
    """
    if task.optimizer.fused is not None and (task.optimizer.entrywise or not _has_parts(task)):
        return _in_one_pass(task, task.optimizer.fused, held)
    config, form = task.config, task.config.master_form
    group, grads = held.take("group"), held.take("grads").values
    params, masters, opt_state, ema = group
    old = None if task.good is None else group
    del group
    full = master.merge(params, masters, form=form)
    if config.clip_norm is not None:
        grads = clip_to_norm(grads, task.norm, config.clip_norm)
    wholes = (None, None) if task.wholes is None else (task.wholes.params, task.wholes.opt_state)
    updates, opt_state = config.placement.transform(task.optimizer.update, grads, opt_state, full, wholes)
    del grads
    full = apply_updates(full, updates)
    del updates
    params, masters = master.split(full, params, masters, form=form, seed=task.noise, offsets=_offsets(task))
    new = Group(params, masters, opt_state, _averaged(config, ema, full))
    return new if task.good is None or old is None else tree.select(task.good, new, old)


def _has_parts(task: Task) -> bool:
    """Says whether other processes have the rest of some leaves of the group."""
    return any(whole is not None for whole in tree.leaves(task.wholes))


def _in_one_pass(task: Task, fused: Callable[..., tuple[Tree, Tree, Tree]], held: Held) -> Group:
    """Updates one group by the one-pass form of its optimizer, which unscales, clips, casts and skips by itself."""
    config, form, offsets = task.config, task.config.master_form, _offsets(task)
    are_casts = form in (None, "f32")  # the parameters, of what the optimizer works on
    # The average is of the numbers before rounding, which only a remainder gives back; and a kernel draws by the place
    # in the tensor that it sees.
    is_exact = config.ema is None or form == "remainder"
    if not are_casts and offsets is None and is_exact:
        return _in_form(task, fused, held)
    group, grads = held.take("group"), held.take("grads")
    params, masters, opt_state, ema = group
    old = None if task.good is None else group
    full = master.merge(params, masters, form=form)
    low = _casts(params, masters) if are_casts else None
    scale, held = grads.scale, Held(grads=grads.values, state=opt_state, params=full)
    del group, grads, opt_state, full
    full, low, opt_state = run_fused(fused, held, _request(task, scale, low))
    if low is not None:
        params = tree.map(lambda wide, cast: wide if cast is None else cast, full, low)
        masters = tree.map(lambda wide, cast: None if cast is None else wide, full, low)
    else:
        params, masters = master.split(full, params, masters, form=form, seed=task.noise, offsets=offsets)
    new = Group(params, masters, opt_state, _averaged(config, ema, full))
    if task.good is None or old is None:
        return new
    if are_casts:  # then all but the average is what it has kept itself
        return new._replace(ema=tree.select(task.good, new.ema, old.ema))
    return select_rest(task.good, new, old, chosen=(full, opt_state))


def _in_form(task: Task, fused: Callable[..., tuple[Tree, Tree, Tree]], held: Held) -> Group:
    """Updates one group by a one-pass form that takes parameters and masters as they are kept."""
    config, form = task.config, task.config.master_form
    group, grads = held.take("group"), held.take("grads")
    params, masters, opt_state, ema = group
    scale, held = grads.scale, Held(grads=grads.values, state=opt_state, params=params)
    del group, grads, opt_state, params
    params, masters, opt_state = run_fused(fused, held, _request(task, scale, masters, form))
    if config.ema is not None:
        averages = _averaged(config, ema, master.merge(params, masters, form=form))
        ema = averages if task.good is None else tree.select(task.good, averages, ema)
    return Group(params, masters, opt_state, ema)


def _request(task: Task, scale: torch.Tensor | None, low: Tree, form: str | None = None) -> Request:
    """Asks a one-pass form to unscale, to clip, to cast and to skip."""
    return Request(
        low=low,
        inv_scale=None if scale is None else 1.0 / scale,
        clip=None if task.config.clip_norm is None else clip_factor(task.norm, task.config.clip_norm),
        finite=task.good,
        donate=task.donate,
        form=form,
        seed=None if form is None else task.noise,
    )


def _offsets(task: Task) -> Tree:
    """Says where in the whole each part begins, for masters that are rounded by chance; None for those of no part."""
    if task.noise is None or task.wholes is None:
        return None
    return task.config.placement.offsets(task.wholes.params)


def _casts(params: Tree, masters: Tree) -> Tree:
    """Returns the parameters that are casts of a master, None in place of the others; or None if there are none."""
    low = tree.map(lambda param, rest: None if rest is None or not is_narrow(param) else param, params, masters)
    return low if any(leaf is not None for leaf in tree.leaves(low)) else None


def _averaged(config: StepConfig, average: Tree, values: Tree) -> Tree:
    """Moves the average, if there is one, towards the values."""
    if config.ema is None:
        return average
    weight = 1.0 - config.ema
    return tree.map(lambda a, v: None if a is None else a.lerp(v.to(a.dtype), weight), average, values)
