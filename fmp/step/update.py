"""The part of a step that changes one group of parameters: clip, update the masters, cast out, keep or undo."""

from typing import Any, NamedTuple

import torch

from fmp import master, tree
from fmp.optim import GradientTransformation, apply_updates, clip_factor, clip_to_norm
from fmp.step.config import StepConfig

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
    grads: Tree,
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
        grads: The unscaled gradients.
        norm: Their norm.
        group: The group before.
        noise: i64[], the seed by which masters are rounded, for a form that takes one.
        good: bool[], false where the group must stay as it is; None for never.
        donate: Whether parameters, masters and optimizer state of the group may be overwritten.
    """
    old = None if good is None else group
    params, masters, opt_state, ema = group
    del group  # each old leaf is let go as soon as its new one exists
    full = master.merge(params, masters, form=config.master_form)
    if optimizer.fused is None:
        if config.clip_norm is not None:
            grads = clip_to_norm(grads, norm, config.clip_norm)
        updates, opt_state = optimizer.update(grads, opt_state, full)
        del grads
        full = apply_updates(full, updates)
        del updates
    else:
        clip = None if config.clip_norm is None else clip_factor(norm, config.clip_norm)
        full, _, opt_state = optimizer.fused(
            grads, opt_state, full, inv_scale=None, clip=clip, finite=good, cast_dtype=None, donate=donate
        )
        del grads
    params, masters = master.split(full, params, masters, form=config.master_form, seed=noise)
    ema = ema if config.ema is None else _averaged(ema, full, config.ema)
    new = Group(params, masters, opt_state, ema)
    if good is None or old is None:
        return new
    if optimizer.fused is not None:  # it has kept what it changes, and says so of `full` and of its state
        old = _where_done((full, opt_state), new, old)
    return tree.select(good, new, old)


def _averaged(average: Tree, values: Tree, decay: float) -> Tree:
    return tree.map(lambda a, v: None if a is None else a.lerp(v.to(a.dtype), 1.0 - decay), average, values)


def _where_done(done: Tree, new: Group, old: Group) -> Group:
    """Replaces what needs no choice any more by the new leaf, so that none is made."""
    leaves = {id(leaf) for leaf in tree.leaves(done)}
    return tree.map(lambda after, before: after if id(after) in leaves else before, new, old)
