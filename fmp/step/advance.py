"""The algorithm of a train step.

policy -> scale -> differentiate -> unscale -> finite? -> clip -> update masters -> cast out -> select -> adjust
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fmp import master, random, tree
from fmp.held import Held
from fmp.optim.aliasing import shares_memory
from fmp.scaling import LossScale
from fmp.step.accumulation import accumulate
from fmp.step.config import ONLY, StepConfig
from fmp.step.loss import LossOutput, differentiate, unscale
from fmp.step.measuring import Gradients, added, measured
from fmp.step.sharing import agreed, with_norms
from fmp.step.state import Metrics, TrainState
from fmp.step.update import Group, Task, update

Tree = Any

# Keeps the seeds that masters are rounded by apart from those of the losses, which are numbered from 0: digits of pi.
_ROUNDING = 0x4A4093822299F31D


class _Seen(NamedTuple):
    """What every loss of a step sees.

    Attributes:
        compute: The parameters that it computes with.
        params: The parameters as they are kept, this process's parts.
        wholes: The wholes that these are parts of.
        batch: The batch.
        frozen: What the loss takes besides.
    """

    compute: Tree
    params: Tree
    wholes: Tree
    batch: Tree
    frozen: Tree


class _Found(NamedTuple):
    """What all losses of a step give.

    Attributes:
        outputs: By loss, what it gives besides its gradient.
        finite: By loss, bool[], whether its gradients are finite.
        buffers: The buffers after all of them.
        grads: By group of parameters, the gradients.
        norms: By group, f32[] or f64[], the norms of these.
    """

    outputs: Mapping[str, LossOutput]
    finite: Mapping[str, torch.Tensor]
    buffers: Tree
    grads: dict[str, Gradients]
    norms: Mapping[str, Any]


def advance(
    config: StepConfig,
    state: TrainState,
    batch: Tree,
    frozen: Tree,
    take: Callable[[TrainState], TrainState] | None = None,
) -> tuple[TrainState, Metrics]:
    """Makes one step; all of it can be compiled as one graph.

    Args:
        config: The parts of the step.
        state: The state before.
        batch: The batch.
        frozen: What the loss takes besides.
        take: Takes the state away from the caller once the gradients are there, so that an error in the loss, the
            likely one, leaves it with its owner.
    """
    found = _losses(config, state, _seen(config, state, batch, frozen))
    # From here on each old leaf is let go as soon as its new one exists: a state that was taken has no other owner.
    state = state if take is None else take(state)
    groups, wholes = config.placement.opened(_groups(config, state))
    state = tree.replace(state, params=None, master=None, opt_state=None, buffers=None, ema=None)
    kept = None if take is None else (found.outputs, found.buffers, batch, frozen)
    groups, skipped = _updates(config, state, found, groups, wholes, kept)
    groups = config.placement.closed(groups, wholes)
    return _next_state(config, state, found, groups, skipped), _metrics(config, state, found, skipped)


def _seen(config: StepConfig, state: TrainState, batch: Tree, frozen: Tree) -> _Seen:
    """Casts the parameters to what the losses compute with."""
    params, wholes = config.placement.opened(state.params)
    compute = params if config.policy is None else config.policy.cast_to_compute(params)
    return _Seen(config.placement.gather(compute, wholes), params, wholes, batch, frozen)


def _losses(config: StepConfig, state: TrainState, seen: _Seen) -> _Found:
    """Differentiates all losses, one after the other, and adds up their gradients."""
    scalers, wholes = config.by_loss(state.loss_scale), seen.wholes
    buffers: Tree = state.buffers
    outputs: dict[str, LossOutput] = {}
    finite: dict[str, torch.Tensor] = {}
    grads: dict[str, Gradients] = {}
    for index, name in enumerate(config.losses):
        seed = _seed_of(config, name, index, state)
        outputs[name], found, finite[name] = loss_gradients(config, name, seen, scalers[name], buffers, seed)
        buffers = _keep(finite[name] if config.skips[name] else None, outputs[name].buffers, buffers)
        for key, part in found.items():
            grads[key] = added(grads[key], part) if key in grads else part
        del found, part
    del seen  # and with it what they computed with
    grads = with_norms(config, grads, wholes)
    return _Found(outputs, finite, buffers, grads, {key: grads[key].norm for key in config.optimizers})


def loss_gradients(
    config: StepConfig, name: str, seen: _Seen, scaler: LossScale, buffers: Tree, seed: torch.Tensor
) -> tuple[LossOutput, dict[str, Gradients], torch.Tensor]:
    """Differentiates one loss, over all microbatches, with respect to the groups that it uses.

    Returns:
        What the loss gave; its gradients by group; and bool[], whether all of them are finite.
    """

    def scaled_gradient_of(microbatch: Tree, buffers: Tree, seed: torch.Tensor) -> tuple[LossOutput, Tree]:
        return differentiate(
            config.losses[name],
            seen.compute,
            microbatch,
            policy=config.policy,
            scaler=scaler,
            buffers=buffers,
            seed=seed,
            frozen=seen.frozen,
            wrt=None if ONLY in config.optimizers else config.uses[name],
            # One of several losses may be switched off, and a microbatch may be one that does not count.
            may_be_constant=ONLY not in config.losses or config.microbatch_weight is not None,
        )

    def gradient_of(microbatch: Tree, buffers: Tree, seed: torch.Tensor) -> tuple[LossOutput, Tree]:
        output, grads = scaled_gradient_of(microbatch, buffers, seed)
        # Processes reduce what is still scaled, so that a narrow dtype may hold it.
        return output, grads if placement.is_shared else unscale(scaler, grads, output.excess)

    weight, placement = config.microbatch_weight, config.placement
    is_split = config.accumulate > 1 or weight is not None
    with placement.drawing():
        if is_split:
            output, grads = accumulate(
                gradient_of,
                seen.batch,
                count=config.accumulate,
                weight_of=weight,
                mean=lambda value: placement.totals([], [value])[1][0],
                buffers=buffers,
                seed=seed,
            )
        else:
            output, grads = scaled_gradient_of(seen.batch, buffers, seed)
    if placement.is_shared:
        return agreed(config, name, output, grads, scaler, seen.params, seen.wholes, seen.batch, is_split=is_split)
    if is_split:  # these are unscaled
        return output, *measured(config, name, grads, None, None, seen.params)
    return output, *measured(config, name, grads, scaler, output.excess, seen.params)


def _updates(
    config: StepConfig, state: TrainState, found: _Found, groups: dict[str, Group], wholes: Tree, kept: Tree
) -> tuple[dict[str, Group], dict[str, torch.Tensor]]:
    """Updates all groups, one after the other.

    Args:
        config: The parts of the step.
        state: The numbers of the state before.
        found: What the losses gave. Gradients are taken out.
        groups: The groups before, which are replaced.
        wholes: The wholes that their leaves are parts of.
        kept: What must not be overwritten, if groups may be; None if they may not.

    Returns:
        The groups after; and for each bool[], whether it was skipped.
    """
    skipped: dict[str, torch.Tensor] = {}
    for index, (key, optimizer) in enumerate(config.optimizers.items()):
        checks = [found.finite[name] for name, keys in config.uses.items() if key in keys and config.skips[name]]
        good = torch.stack(checks).all() if checks else None
        task = Task(
            config,
            optimizer,
            norm=found.norms[key],
            wholes=None if wholes is None else wholes[key],
            noise=_rounding_seed(config, state, index),
            good=good,
            donate=kept is not None and optimizer.fused is not None and _is_owned(groups, key, kept),
        )
        groups[key] = update(task, Held(group=groups.pop(key), grads=found.grads.pop(key)))
        skipped[key] = torch.zeros_like(state.step, dtype=torch.bool) if good is None else ~good
    return groups, skipped


def _next_state(
    config: StepConfig,
    state: TrainState,
    found: _Found,
    groups: Mapping[str, Group],
    skipped: Mapping[str, torch.Tensor],
) -> TrainState:
    """Makes the state after, and counts; it counts as a step if any group was updated."""
    scalers, skip_counts = config.by_loss(state.loss_scale), config.by_group(state.skip_count)
    keys = list(config.optimizers)
    return TrainState(
        step=state.step + ~torch.stack(list(skipped.values())).all(),
        params=config.from_groups({key: groups[key].params for key in keys}),
        master=config.from_groups({key: groups[key].master for key in keys}),
        opt_state=config.from_groups({key: groups[key].opt_state for key in keys}),
        loss_scale=config.from_losses({name: scaler.adjust(found.finite[name]) for name, scaler in scalers.items()}),
        buffers=found.buffers,
        ema=None if config.ema is None else config.from_groups({key: groups[key].ema for key in keys}),
        seed=state.seed,
        skip_count=config.from_groups({key: skip_counts[key] + skipped[key] for key in keys}),
    )


def _metrics(config: StepConfig, state: TrainState, found: _Found, skipped: Mapping[str, torch.Tensor]) -> Metrics:
    """Reports the step, with the scales that it used."""
    scalers, device = config.by_loss(state.loss_scale), state.seed.device
    return Metrics(
        loss=config.from_losses({name: output.loss for name, output in found.outputs.items()}),
        aux=config.from_losses({name: output.aux for name, output in found.outputs.items()}),
        grads_finite=config.from_losses(found.finite),
        skipped=config.from_groups(skipped),
        loss_scale=config.from_losses({name: _scale_of(scaler, device) for name, scaler in scalers.items()}),
        grad_norm=config.from_groups(found.norms),
    )


def _keep(good: torch.Tensor | None, new: Tree, old: Tree) -> Tree:
    return new if good is None else tree.select(good, new, old)


def _groups(config: StepConfig, state: TrainState) -> dict[str, Group]:
    params, masters, opt_states = (config.by_group(part) for part in (state.params, state.master, state.opt_state))
    averages = {} if config.ema is None else config.by_group(state.ema)
    return {key: Group(params[key], masters[key], opt_states[key], averages.get(key)) for key in config.optimizers}


def _is_owned(groups: Mapping[str, Group], key: str, *others: Tree) -> bool:
    """Says whether nothing that outlives the step lies in the memory of what one group's optimizer overwrites."""
    rest = [group for other, group in groups.items() if other != key]
    params, masters, opt_state, ema = groups[key]
    return not shares_memory(tree.leaves((params, masters, opt_state)), tree.leaves((rest, ema, others)))


def _seed_of(config: StepConfig, name: str, index: int, state: TrainState) -> torch.Tensor:
    """Derives the seed of one loss in one step; a loss that takes no seed is spared the arithmetic."""
    if "seed" not in config.losses[name].keywords:
        return state.seed
    return random.fold_in(random.fold_in(state.seed, state.step), index)


def _rounding_seed(config: StepConfig, state: TrainState, index: int) -> torch.Tensor | None:
    """Derives the seed by which one group's masters are rounded in one step, for a form that rounds by chance."""
    if config.master_form is None or not master.FORMS[config.master_form].takes_seed:
        return None
    return random.fold_in(random.fold_in(random.fold_in(state.seed, state.step), _ROUNDING), index)


def _scale_of(scaler: LossScale, device: torch.device) -> torch.Tensor:
    return scaler.scale(torch.ones((), dtype=torch.float32, device=device))
