"""`fmp.train_step`: a configured, pure train step."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch

from fmp import _compat, tree
from fmp.donation import check_owned, give_away
from fmp.dtypes import casts_itself
from fmp.optim import GradientTransformation
from fmp.optim.base import check_transformation
from fmp.placement import Placement
from fmp.policy import Policy
from fmp.policy.caster import covered
from fmp.scaling import LossScale, NoOpLossScale, loss_scale as parse_loss_scale
from fmp.step import arguments, initial
from fmp.step.advance import advance
from fmp.step.config import ONLY, StepConfig
from fmp.step.loss import Loss, LossFn
from fmp.step.state import Metrics, TrainState

Tree = Any
ScaleSpec = str | float | LossScale | None


@dataclass(frozen=True)
class TrainStep:
    """A train step; `fmp.train_step` makes it and describes what it does.

    Attributes:
        config: Its parts.
        donate: Whether a call takes the state away from the caller.
        advance: The algorithm, `fmp.step.advance.advance` or a compiled form of it.
    """

    __name__ = "train_step"  # for torch.func.vmap, which would ask for a repr otherwise

    config: StepConfig
    donate: bool
    advance: Callable[[StepConfig, TrainState, Tree, Tree], tuple[TrainState, Metrics]]
    # The structures of `frozen` whose names have been looked at, which takes longer than a step may.
    _looked_at: set[tree.Spec] = field(default_factory=set, init=False, repr=False, compare=False)

    def __call__(self, state: TrainState, batch: Tree, *, frozen: Tree = None) -> tuple[TrainState, Metrics]:
        """Makes one step.

        Args:
            state: The state, from `init` or from the step before.
            batch: Any tree of tensors; the policy casts its floating-point leaves. A batch of a class of your own is
                cast by its method `to`, if it has one.
            frozen: What the loss takes and the step does not train, such as the base under adapters: any tree, given
                anew with each call, passed to the loss function if it names it; not differentiated, and not kept in
                the state. Cast like the parameters, by name, in each step; what is in the compute dtype already, or
                compressed, goes in as it is. Nest it (`{"generator": ...}`) where names of the policy's `keep_full`
                might hit it.

        Returns:
            The next state, and the metrics of this step.

        Raises:
            DonatedStateError: If the state was given to a donating step before.
            TypeError: If `state` is not a `TrainState`, or is one of a layout and the step has none.
            ValueError: If `frozen` is given and no loss takes it, or the reverse; if the policy's `keep_full` names no
                leaf of it nor of the state; if the only loss does not depend on
                the parameters; or if a step with a layout runs under a torch.func transform, or one with
                `compile=True` under vmap.
        """
        _check_call(self.config, state, batch, frozen)
        _check_not_mapped(self.advance)
        initial.look_at_frozen(self.config, state, frozen, self._looked_at)
        with _unrecorded(), covered():
            if not self.donate or torch.compiler.is_compiling():  # what is compiled as a whole frees by itself
                return self.advance(self.config, state, batch, frozen)
            if self.advance is advance:
                return advance(self.config, state, batch, frozen, take=give_away)
            return self.advance(self.config, give_away(state), batch, frozen)

    def init(self, params: Tree, *, buffers: Tree = None, seed: int | torch.Tensor = 0) -> TrainState:
        """Makes the first state. All of its tensors are copies, and no two share memory.

        Args:
            params: The parameters, with a layout equal on every rank. Best in float32: masters and moving average start
                from these values, not from those that the policy rounds them to. With several optimizers, a dictionary
                with a key for each.
            buffers: The model's buffers, if the loss takes them.
            seed: What all randomness of the run derives from: an integer, or i64[].

        Returns:
            The state, on the device of the parameters.

        Raises:
            TypeError: If a leaf of `params` or `buffers` is neither a tensor nor None, or the seed is not an integer.
            KeyError: If `params` lacks a key that an optimizer has, or the reverse.
            ValueError: If the loss takes buffers and there are none, or the reverse; or if the ranks of a layout have
                different parameters, buffers or seeds.
        """
        with _unrecorded(), covered():
            return initial.init(self.config, params, buffers, seed)

    def extend(self, state: TrainState, params: Tree) -> TrainState:
        """Adds parameters in the middle of training.

        Args:
            state: The state so far.
            params: The new parameters: a dictionary, nested like the state's where it adds to an inner one.

        Returns:
            A state with the old and the new parameters. Every leaf of the old state keeps its value; the new leaves
            start as `init` starts them.

        Raises:
            KeyError: If a parameter exists already.
            TypeError: If the parameters are not dictionaries.
        """
        with _unrecorded(), covered():
            return initial.extend(self.config, state, params)


def train_step(
    loss_fn: LossFn | Mapping[str, LossFn],
    optimizer: GradientTransformation | Mapping[str, GradientTransformation],
    *,
    policy: Policy | None = None,
    loss_scale: ScaleSpec | Mapping[str, ScaleSpec] = None,
    accumulate: int = 1,
    microbatch_weight: Callable[[Tree], torch.Tensor] | None = None,
    clip_norm: float | None = None,
    ema: float | None = None,
    has_aux: bool | Mapping[str, bool] = False,
    skip_nonfinite: bool | Mapping[str, bool] | None = None,
    uses: Mapping[str, Sequence[str]] | None = None,
    donate: bool = False,
    compile: bool = False,
    layout: Placement | None = None,
) -> TrainStep:
    """Makes a pure train step from a loss function and an optimizer.

    One step does, in this order:

        compute   = policy.cast_to_compute(state.params)
        loss, g   = value_and_grad(lambda p: scaler.scale(loss_fn(p, batch)))(compute)
        g         = scaler.unscale(g)
        finite    = all_finite(g)
        norm      = global_norm(g)
        g         = clip_to_norm(g, norm, clip_norm)
        full      = master.merge(state.params, state.master, form=policy.master_form)
        updates, opt_state = optimizer.update(g, state.opt_state, full)
        params, masters    = master.split(apply_updates(full, updates), state.params, state.master, form=...)
        state     = select(finite, new_state, state)        # if the scaler is one that skips
        scaler    = scaler.adjust(finite)

    A skipped step leaves every leaf bit-identical, step count, schedule and buffers included; only the loss scale, its
    count and `skip_count` move. The step makes no host sync and never changes its inputs, unless the state is donated;
    a loss function must not write into them either, except into its buffers, which are copies. `torch.func` can
    differentiate a step, `.backward()` cannot. Under `torch.func.vmap` each member has its own state and loss scale;
    `torch.compile` may go around that, but a step with `compile=True` cannot be mapped.

    Buffers are cast like parameters. What a model accumulates in them, such as BatchNorm statistics, stalls in 16 bits:
    name these buffers in the policy's `keep_full`, as `fmp.opt_level("O2", keep_full=module)` does.

    Several losses or optimizers: pass dictionaries. `optimizer={key: tx}` has a key for each top-level entry of
    `params`; `loss_fn={name: fn}` a name for each loss; `uses={name: [keys]}` says which parameters a loss changes
    (all of them by default). All losses see the same parameters; buffers pass from one loss to the next; a loss with
    non-finite gradients skips exactly the optimizers that use it. `loss_scale`, `has_aux` and `skip_nonfinite` may
    then be dictionaries by loss; metrics and parts of the state are, by loss or by key. A GAN alternates two steps.

    Args:
        loss_fn: `loss_fn(params, batch, *, buffers=, seed=, frozen=)`, each keyword only if the function names it. It
            returns `loss`, `(loss, aux)`, or, if it takes buffers, `(loss, buffers)` or `(loss, buffers, aux)`.
            Buffers and seed are in the state; `frozen` is given with each call, `step(state, batch, frozen=...)`. The
            loss is best reduced in float32: one in float16 can be scaled by 2^15 at most.
        optimizer: Changes the parameters.
        policy: The precision policy; None computes in the parameters' own dtypes. `fmp.autocast` around a step does not
            reach into it.
        loss_scale: `"dynamic"`, a number, None for what the policy says, or a scaler, also one of your own (see
            `fmp.scaling.LossScale`).
        accumulate: The number of microbatches that dimension 0 of the batch is split into. Gradients are averaged in
            float32; one bad microbatch skips the whole step.
        microbatch_weight: Gives the weight of a microbatch (a scalar tensor), for example its number of valid tokens.
            One of weight zero counts for nothing, whatever its loss.
        clip_norm: The largest norm of the unscaled gradients, for each optimizer on its own.
        ema: The decay of a moving average of the parameters, kept in `state.ema` (`average=True` of
            `fmp.memory.plan`).
        has_aux: Whether the loss function returns auxiliary output, which comes back in the metrics; stacked along a
            new dimension 0 if there are microbatches.
        skip_nonfinite: Whether to skip a step with non-finite gradients. By default every scaler skips except
            `NoOpLossScale`.
        uses: Which groups of parameters each loss changes.
        donate: Free the old state during the step, or overwrite its tensors if the optimizer has a one-pass form. It
            cannot be used afterwards; trying raises `DonatedStateError`. An error in the loss function leaves it
            usable, unless the step is compiled.
        compile: Compile the whole step with `torch.compile(fullgraph=True)`.
        layout: How the state and the batch are shared out over processes, a `fmp.distributed.Layout`, which describes
            what changes; None for a single process.

    Returns:
        The step. `step.init(params)` makes the first state, `step(state, batch)` returns `(state, metrics)`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
        KeyError: If dictionaries name different losses or groups.

    Example:
        >>> def loss_fn(params, batch):
        ...     x, y = batch
        ...     return ((x @ params["w"] - y) ** 2).mean()
        >>> scaler = fmp.DynamicLossScale(init_scale=1024.0)
        >>> step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2"), loss_scale=scaler)
        >>> state = step.init({"w": torch.zeros(2)})
        >>> state, metrics = step(state, (torch.ones(4, 2), torch.ones(4)))
        >>> metrics.loss, state.params["w"], state.loss_scale.loss_scale
        (tensor(1.), tensor([0.2000, 0.2000], dtype=torch.float16), tensor(1024.))
    """
    loss_fns = dict(loss_fn) if isinstance(loss_fn, Mapping) else {ONLY: loss_fn}
    optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {ONLY: optimizer}
    arguments.check_names("loss_fn", loss_fns, isinstance(loss_fn, Mapping))
    arguments.check_names("optimizer", optimizers, isinstance(optimizer, Mapping))
    for key, tx in optimizers.items():
        check_transformation(f"optimizer{arguments.at(key)}", tx)
    if microbatch_weight is not None and not callable(microbatch_weight):
        raise TypeError(f"microbatch_weight must be a function of a microbatch, got {microbatch_weight!r}")
    placement = arguments.checked_layout(layout, microbatch_weight)
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy must be a Policy or None, got {policy!r}; see fmp.opt_level and fmp.Policy.parse")

    names = list(loss_fns)
    default_scale = None if policy is None else policy.loss_scale
    specs = {
        name: default_scale if spec is None else spec
        for name, spec in arguments.by_loss("loss_scale", loss_scale, names, None)
    }
    scalers = {name: parse_loss_scale(spec) for name, spec in specs.items()}
    skips = {
        name: not isinstance(scalers[name], NoOpLossScale)
        if skip is None
        else arguments.checked_flag("skip_nonfinite", skip)
        for name, skip in arguments.by_loss("skip_nonfinite", skip_nonfinite, names, None)
    }
    aux = {
        name: arguments.checked_flag("has_aux", flag)
        for name, flag in arguments.by_loss("has_aux", has_aux, names, False)
    }
    config = StepConfig(
        losses={name: Loss.of(fn, aux[name], arguments.at(name)) for name, fn in loss_fns.items()},
        optimizers=optimizers,
        scalers=scalers,
        skips=skips,
        uses=arguments.checked_uses(uses, names, list(optimizers)),
        policy=policy,
        accumulate=arguments.checked_count(accumulate),
        microbatch_weight=microbatch_weight,
        clip_norm=None if clip_norm is None else arguments.checked_number("clip_norm", clip_norm, 0.0, math.inf),
        ema=None if ema is None else arguments.checked_number("ema", ema, 0.0, 1.0),
        placement=placement,
    )
    return TrainStep(
        config,
        donate=arguments.checked_flag("donate", donate),
        advance=compiled_advance() if arguments.checked_flag("compile", compile) else advance,
    )


def _unrecorded() -> AbstractContextManager[None]:
    """Keeps autograd from recording a whole step, unless the step itself is being differentiated."""
    # A compiler tracing through here cannot look at the transforms, and records nothing that needs no gradient anyway.
    recorded = torch.compiler.is_compiling() or _compat.reverse_mode_active()
    return contextlib.nullcontext() if recorded else torch.no_grad()


def _check_call(config: StepConfig, state: Any, batch: Tree, frozen: Tree) -> None:
    if not isinstance(state, TrainState):
        check_owned(state)
        raise TypeError(f"state must be a TrainState, as step.init(params) makes it, got {tree.describe(state)}")
    if not config.placement.is_shared:
        _check_plain(state.params)
    elif not torch.compiler.is_compiling() and _compat.transform_active():
        raise ValueError(
            "a step with a layout cannot run inside torch.func transforms, since every rank has its own batch and the "
            "collectives are for all; map or differentiate inside of the loss function, or use layout=None"
        )
    if frozen is not None and not config.takes("frozen"):
        raise ValueError("the step got frozen=..., but no loss_fn takes the keyword argument `frozen`")
    for loss in config.losses.values():
        if frozen is None and loss.needs_frozen:
            raise ValueError(f"loss_fn{loss.where} takes frozen: pass step(state, batch, frozen=...)")
    for index, leaf in enumerate(tree.leaves(batch)):
        if not isinstance(leaf, torch.Tensor):
            _check_batch_leaf(leaf, batch, index, config.accumulate)


def _check_plain(params: Tree) -> None:
    """Refuses parameters that a layout has shared out; by the name of their class, which nobody has to import."""
    for index, leaf in enumerate(tree.leaves(params)):
        if type(leaf).__name__ == "DTensor":
            raise TypeError(
                f"state: params/{tree.paths(params)[index]} is a DTensor, since this state belongs to a layout; pass "
                "layout= to train_step, or to this step what layout.full(state) returns"
            )


def _check_not_mapped(algorithm: Callable[..., Any]) -> None:
    is_inside = torch.compiler.is_compiling()  # then it is traced through
    if not is_inside and _compat.is_compiled(algorithm) and _compat.VMAP in _compat.transforms():
        raise ValueError(
            "a step with compile=True cannot be mapped; put torch.compile around the vmap of a step without it: "
            "torch.compile(torch.func.vmap(step), fullgraph=True)"
        )


def _check_batch_leaf(leaf: Any, batch: Tree, index: int, accumulate: int) -> None:
    if casts_itself(leaf):
        if accumulate == 1:
            return
        raise TypeError(
            f"batch: {tree.paths(batch)[index] or 'it'} is a {type(leaf).__name__}, which cannot be split into "
            f"accumulate={accumulate} microbatches; make its class a fmp.tree.dataclass"
        )
    fields = leaf.values() if isinstance(leaf, Mapping) else vars(leaf).values() if is_dataclass(leaf) else ()
    if type(leaf).__module__ == "numpy":
        raise TypeError(
            f"batch: {tree.paths(batch)[index] or 'it'} is a numpy array; pass tensors, with torch.from_numpy"
        )
    if any(isinstance(field, torch.Tensor) for field in fields):
        raise TypeError(
            f"batch: {tree.paths(batch)[index] or 'it'} is a {type(leaf).__name__}, which is no pytree, so its tensors "
            "would not be cast or split; pass a dictionary, or make its class a fmp.tree.dataclass"
        )


def compiled_advance(**options: Any) -> Callable[..., tuple[TrainState, Metrics]]:
    """Compiles the algorithm of a step as one graph.

    Args:
        **options: Passed to `torch.compile`.
    """
    return torch.compile(_compat.compiled_on_its_own(advance), fullgraph=True, **options)
