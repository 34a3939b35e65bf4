"""The algorithm of a train step.

policy -> scale -> differentiate -> unscale -> finite? -> clip -> update masters -> cast out -> select -> adjust
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fmp import master, random, tree
from fmp.optim.aliasing import shares_memory
from fmp.scaling import LossScale
from fmp.step.accumulation import accumulate
from fmp.step.config import ONLY, StepConfig
from fmp.step.loss import LossOutput, differentiate, unscale
from fmp.step.measuring import Gradients, added, measured
from fmp.step.sharing import agreed, with_norms
from fmp.step.state import Metrics, TrainState
from fmp.step.update import Group, update

Tree = Any

# Keeps the seeds that masters are rounded by apart from those of the losses, which are numbered from 0: digits of pi.
_ROUNDING = 0x4A4093822299F31D


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
    compute, forms = config.placement.opened(state.params)
    compute = compute if config.policy is None else config.policy.cast_to_compute(compute)
    compute = config.placement.gather(compute, forms)
    scalers = config.by_loss(state.loss_scale)

    buffers: Tree = state.buffers
    outputs: dict[str, LossOutput] = {}
    finite: dict[str, torch.Tensor] = {}
    grads: dict[str, Gradients] = {}
    for index, name in enumerate(config.losses):
        seed = _seed_of(config, name, index, state)
        outputs[name], found, finite[name] = _gradients(
            config, name, compute, state.params, forms, batch, scalers[name], buffers, seed, frozen
        )
        buffers = _keep(finite[name] if config.skips[name] else None, outputs[name].buffers, buffers)
        for key, part in found.items():
            grads[key] = added(grads[key], part) if key in grads else part
        del found, part
    del compute

    # From here on each old leaf is let go as soon as its new one exists: a state that was taken has no other owner.
    state = state if take is None else take(state)
    groups, forms_of = config.placement.opened(_groups(config, state))
    count, seed, skip_counts = state.step, state.seed, config.by_group(state.skip_count)
    del state
    norms: dict[str, Any] = {}
    skipped: dict[str, torch.Tensor] = {}
    grads = with_norms(config, grads, forms)
    for index, (key, optimizer) in enumerate(config.optimizers.items()):
        noise = _rounding_seed(config, seed, count, index)
        checks = [finite[name] for name, keys in config.uses.items() if key in keys and config.skips[name]]
        good = torch.stack(checks).all() if checks else None
        norms[key] = grads[key].norm
        donate = (
            take is not None
            and optimizer.fused is not None
            and _is_owned(groups, key, (outputs, buffers, batch, frozen))
        )
        groups[key] = update(
            config,
            optimizer,
            grads.pop(key),
            norms[key],
            groups.pop(key),
            None if forms_of is None else forms_of[key],
            noise=noise,
            good=good,
            donate=donate,
        )
        skipped[key] = torch.zeros_like(count, dtype=torch.bool) if good is None else ~good

    groups = config.placement.closed(groups, forms_of)
    all_skipped = torch.stack(list(skipped.values())).all()
    next_state = TrainState(
        step=count + ~all_skipped,
        params=config.from_groups({key: groups[key].params for key in config.optimizers}),
        master=config.from_groups({key: groups[key].master for key in config.optimizers}),
        opt_state=config.from_groups({key: groups[key].opt_state for key in config.optimizers}),
        loss_scale=config.from_losses({name: scaler.adjust(finite[name]) for name, scaler in scalers.items()}),
        buffers=buffers,
        ema=None if config.ema is None else config.from_groups({key: groups[key].ema for key in config.optimizers}),
        seed=seed,
        skip_count=config.from_groups({key: skip_counts[key] + skipped[key] for key in config.optimizers}),
    )
    metrics = Metrics(
        loss=config.from_losses({name: output.loss for name, output in outputs.items()}),
        aux=config.from_losses({name: output.aux for name, output in outputs.items()}),
        grads_finite=config.from_losses(finite),
        skipped=config.from_groups(skipped),
        loss_scale=config.from_losses({name: _scale_of(scaler, seed.device) for name, scaler in scalers.items()}),
        grad_norm=config.from_groups(norms),
    )
    return next_state, metrics


def _gradients(
    config: StepConfig,
    name: str,
    compute: Tree,
    params: Tree,
    forms: Tree,
    batch: Tree,
    scaler: LossScale,
    buffers: Tree,
    seed: torch.Tensor,
    frozen: Tree,
) -> tuple[LossOutput, dict[str, Gradients], torch.Tensor]:
    """Differentiates one loss, over all microbatches, with respect to the groups that it uses."""

    def scaled_gradient_of(
        microbatch: Tree, buffers: Tree, seed: torch.Tensor
    ) -> tuple[LossOutput, Tree, torch.Tensor | None]:
        return differentiate(
            config.losses[name],
            compute,
            microbatch,
            policy=config.policy,
            scaler=scaler,
            buffers=buffers,
            seed=seed,
            frozen=frozen,
            wrt=None if ONLY in config.optimizers else config.uses[name],
            # One of several losses may be switched off, and a microbatch may be one that does not count.
            may_be_constant=ONLY not in config.losses or config.microbatch_weight is not None,
        )

    excess: torch.Tensor | None = None  # which is the same for all microbatches

    def gradient_of(microbatch: Tree, buffers: Tree, seed: torch.Tensor) -> tuple[LossOutput, Tree]:
        nonlocal excess
        output, grads, excess = scaled_gradient_of(microbatch, buffers, seed)
        # Processes reduce what is still scaled, so that a narrow dtype may hold it.
        return output, grads if placement.is_shared else unscale(scaler, grads, excess)

    weight, placement = config.microbatch_weight, config.placement
    is_split = config.accumulate > 1 or weight is not None
    with placement.drawing():
        if is_split:
            output, grads = accumulate(
                gradient_of,
                batch,
                count=config.accumulate,
                weight_of=weight,
                mean=lambda value: placement.totals([], [value])[1][0],
                buffers=buffers,
                seed=seed,
            )
        else:
            output, grads, excess = scaled_gradient_of(batch, buffers, seed)
    if placement.is_shared:
        return agreed(config, name, output, grads, scaler, excess, params, forms, batch, is_split=is_split)
    if is_split:  # these are unscaled
        return output, *measured(config, name, grads, None, None, params)
    return output, *measured(config, name, grads, scaler, excess, params)


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


def _rounding_seed(config: StepConfig, seed: torch.Tensor, step: torch.Tensor, index: int) -> torch.Tensor | None:
    """Derives the seed by which one group's masters are rounded in one step, for a form that rounds by chance."""
    if not master.FORMS[config.master_form].takes_seed:
        return None
    return random.fold_in(random.fold_in(random.fold_in(seed, step), _ROUNDING), index)


def _scale_of(scaler: LossScale, device: torch.device) -> torch.Tensor:
    return scaler.scale(torch.ones((), dtype=torch.float32, device=device))
