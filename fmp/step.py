"""The train step: a pure function `(state, batch) -> (state, metrics)` composed of the public parts.

    policy -> scale -> differentiate -> unscale -> finite? -> clip -> update masters -> cast out -> select -> adjust

One loss and one optimizer are the common case of several: inside, everything is keyed by the name of a loss or of a
group of parameters, and the key is taken off again where the user gave none.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fmp import _compat, master, random, tree
from fmp.donation import check_owned, give_away
from fmp.dtypes import full_precision, is_castable
from fmp.loss import Loss, LossOutput, accumulate, differentiate
from fmp.optim import GradientTransformation, apply_updates, clip_to_norm
from fmp.policy import Policy
from fmp.scaling import LossScale
from fmp.state import Metrics, TrainState

Tree = Any
ONLY = ""  # the key of the only loss, and of the only group of parameters


class _Group(NamedTuple):
    """The part of the state that one optimizer changes."""

    params: Tree
    master: Tree
    opt_state: Tree
    ema: Tree


@dataclass(frozen=True)
class TrainStep:
    """A configured train step; `fmp.train_step` makes it and describes its parts."""

    losses: Mapping[str, Loss]
    optimizers: Mapping[str, GradientTransformation]
    scalers: Mapping[str, LossScale]
    skips: Mapping[str, bool]
    uses: Mapping[str, Sequence[str]]
    policy: Policy | None
    accumulate: int
    microbatch_weight: Callable[[Tree], torch.Tensor] | None
    clip_norm: float | None
    ema: float | None
    donate: bool
    advance: "Callable[[TrainStep, TrainState, Tree, Tree], tuple[TrainState, Metrics]]"

    def __call__(self, state: TrainState, batch: Tree, *, frozen: Tree = None) -> tuple[TrainState, Metrics]:
        """Makes one step.

        Args:
            state: The state, from `init` or from the step before.
            batch: Any tree of tensors; the policy casts its floating-point leaves.
            frozen: Passed to the loss function if it takes it; cast like the parameters, not differentiated.

        Returns:
            The next state, and the metrics of this step.

        Raises:
            DonatedStateError: If the state was given to a donating step before.
            TypeError: If `state` is not a `TrainState`.
            ValueError: If `frozen` is given and no loss takes it.
        """
        _check_call(self, state, frozen)
        if self.donate and not torch.compiler.is_compiling():  # what is compiled as a whole frees by itself
            state = give_away(state)
        with _unrecorded():
            return self.advance(self, state, batch, frozen)

    def init(self, params: Tree, *, buffers: Tree = None, seed: int | torch.Tensor = 0) -> TrainState:
        """Makes the first state. All of its tensors are copies, and no two share memory.

        Args:
            params: The parameters, best in float32: masters and moving average start from these values, not from
                those that the policy rounds them to. With several optimizers, a dictionary with a key for each.
            buffers: The model's buffers, if the loss takes them.
            seed: What all randomness of the run derives from: an integer, or i64[].

        Returns:
            The state, on the device of the parameters.

        Raises:
            TypeError: If a leaf of `params` or `buffers` is neither a tensor nor None, or the seed is not an integer.
            KeyError: If `params` lacks a key that an optimizer has, or the reverse.
            ValueError: If the loss takes buffers and there are none, or the reverse.
        """
        _check_trees(self, params, buffers)
        _check_seed(seed)
        with _unrecorded():
            return self._init(params, buffers, seed)

    def _init(self, params: Tree, buffers: Tree, seed: int | torch.Tensor) -> TrainState:
        device = next((leaf.device for leaf in tree.leaves(params) if leaf is not None), torch.device("cpu"))
        params = tree.map(_copy, params)
        buffers = tree.map(_copy, buffers)
        stored, masters = params, tree.map(lambda leaf: None, params)
        if self.policy is not None:
            stored = self.policy.cast_to_param(params)
            buffers = self.policy.cast_to_param(buffers)
            if self.policy.master_weights:
                masters = master.init(stored, params)
        full = master.merge(stored, masters)
        groups = self._by_group(full)

        def count() -> torch.Tensor:
            return torch.zeros((), dtype=torch.int32, device=device)

        return TrainState(
            step=count(),
            params=stored,
            master=masters,
            opt_state=self._group_part({key: tx.init(groups[key]) for key, tx in self.optimizers.items()}),
            loss_scale=self._loss_part(tree.map(lambda leaf: _copy(leaf, device), dict(self.scalers))),
            buffers=buffers,
            ema=None if self.ema is None else tree.map(_full_precision_copy, params, full),
            seed=torch.as_tensor(seed, dtype=torch.int64).to(device, copy=True),
            skip_count=self._group_part({key: count() for key in self.optimizers}),
        )

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
        if not isinstance(params, Mapping):
            raise TypeError(f"params must be a dictionary of new parameters, got a {type(params).__name__}")
        full = _merged(master.merge(state.params, state.master), params, path="params")
        fresh = self.init(full, buffers=state.buffers, seed=state.seed)
        old = dict(tree.items(state))
        return tree.map_with_path(lambda path, leaf: leaf if old.get(path) is None else old[path].clone(), fresh)

    def _by_group(self, tree_of_params: Tree) -> Mapping[str, Any]:
        return {ONLY: tree_of_params} if ONLY in self.optimizers else tree_of_params

    def _group_part(self, by_group: dict[str, Any]) -> Any:
        return by_group[ONLY] if ONLY in self.optimizers else by_group

    def _by_loss(self, value: Any) -> Mapping[str, Any]:
        return {ONLY: value} if ONLY in self.losses else value

    def _loss_part(self, by_loss: dict[str, Any]) -> Any:
        return by_loss[ONLY] if ONLY in self.losses else by_loss


def advance(step: TrainStep, state: TrainState, batch: Tree, frozen: Tree) -> tuple[TrainState, Metrics]:
    """Makes one step; all of it can be compiled as one graph."""
    compute = state.params if step.policy is None else step.policy.cast_to_compute(state.params)
    scalers = step._by_loss(state.loss_scale)

    buffers: Tree = state.buffers
    outputs: dict[str, LossOutput] = {}
    finite: dict[str, torch.Tensor] = {}
    grads: dict[str, Tree] = {}
    for index, name in enumerate(step.losses):
        seed = _seed_of(step, name, index, state)
        outputs[name], loss_grads = _gradients(step, name, compute, batch, scalers[name], buffers, seed, frozen)
        finite[name] = tree.all_finite(loss_grads)
        buffers = _keep(finite[name] if step.skips[name] else None, outputs[name].buffers, buffers)
        for key, part in step._by_group(loss_grads).items():
            grads[key] = _add(grads[key], part) if key in grads else part

    old = {key: _Group(*parts) for key, *parts in _zip_groups(step, state)}
    new: dict[str, _Group] = {}
    norms: dict[str, torch.Tensor] = {}
    skipped: dict[str, torch.Tensor] = {}
    for key, optimizer in step.optimizers.items():
        checks = [finite[name] for name, keys in step.uses.items() if key in keys and step.skips[name]]
        good = torch.stack(checks).all() if checks else None
        norms[key] = tree.global_norm(grads[key])
        new[key] = _keep(good, _update(step, optimizer, grads[key], norms[key], old[key]), old[key])
        skipped[key] = torch.zeros_like(state.step, dtype=torch.bool) if good is None else ~good

    all_skipped = torch.stack(list(skipped.values())).all()
    skip_counts = {key: count + skipped[key] for key, count in step._by_group(state.skip_count).items()}
    next_state = TrainState(
        step=state.step + ~all_skipped,
        params=step._group_part({key: group.params for key, group in new.items()}),
        master=step._group_part({key: group.master for key, group in new.items()}),
        opt_state=step._group_part({key: group.opt_state for key, group in new.items()}),
        loss_scale=step._loss_part({name: scaler.adjust(finite[name]) for name, scaler in scalers.items()}),
        buffers=buffers,
        ema=None if step.ema is None else step._group_part({key: group.ema for key, group in new.items()}),
        seed=state.seed,
        skip_count=step._group_part(skip_counts),
    )
    metrics = Metrics(
        loss=step._loss_part({name: output.loss for name, output in outputs.items()}),
        aux=step._loss_part({name: output.aux for name, output in outputs.items()}),
        grads_finite=step._loss_part(finite),
        skipped=step._group_part(skipped),
        loss_scale=step._loss_part({name: _scale_of(scaler, state.seed.device) for name, scaler in scalers.items()}),
        grad_norm=step._group_part(norms),
    )
    return next_state, metrics


def _seed_of(step: TrainStep, name: str, index: int, state: TrainState) -> torch.Tensor:
    """Derives the seed of one loss in one step; a loss that takes no seed is spared the arithmetic."""
    if "seed" not in step.losses[name].keywords:
        return state.seed
    return random.fold_in(random.fold_in(state.seed, state.step), index)


def _gradients(
    step: TrainStep,
    name: str,
    compute: Tree,
    batch: Tree,
    scaler: LossScale,
    buffers: Tree,
    seed: torch.Tensor,
    frozen: Tree,
) -> tuple[LossOutput, Tree]:
    """Differentiates one loss, over all microbatches, with respect to the groups that it uses."""

    def gradient_of(microbatch: Tree, buffers: Tree, seed: torch.Tensor) -> tuple[LossOutput, Tree]:
        return differentiate(
            step.losses[name],
            compute,
            microbatch,
            policy=step.policy,
            scaler=scaler,
            buffers=buffers,
            seed=seed,
            frozen=frozen,
            wrt=None if ONLY in step.optimizers else step.uses[name],
        )

    if step.accumulate == 1 and step.microbatch_weight is None:
        return gradient_of(batch, buffers, seed)
    return accumulate(
        gradient_of, batch, count=step.accumulate, weight_of=step.microbatch_weight, buffers=buffers, seed=seed
    )


def _update(
    step: TrainStep, optimizer: GradientTransformation, grads: Tree, norm: torch.Tensor, group: _Group
) -> _Group:
    """Clips, updates the masters, and casts them out."""
    if step.clip_norm is not None:
        grads = clip_to_norm(grads, norm, step.clip_norm)
    full = master.merge(group.params, group.master)
    updates, opt_state = optimizer.update(grads, group.opt_state, full)
    full = apply_updates(full, updates)
    params, masters = master.split(full, group.params, group.master)
    ema = group.ema if step.ema is None else _averaged(group.ema, full, step.ema)
    return _Group(params, masters, opt_state, ema)


def _averaged(average: Tree, values: Tree, decay: float) -> Tree:
    return tree.map(lambda a, v: None if a is None else a.lerp(v.to(a.dtype), 1.0 - decay), average, values)


def _keep(good: torch.Tensor | None, new: Tree, old: Tree) -> Tree:
    return new if good is None else tree.select(good, new, old)


def _add(left: Tree, right: Tree) -> Tree:
    def add(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a.to(full_precision(a.dtype)) + b.to(full_precision(b.dtype))

    return tree.map(add, left, right)


def _zip_groups(step: TrainStep, state: TrainState) -> list[tuple[Any, ...]]:
    parts = [step._by_group(part) for part in (state.params, state.master, state.opt_state)]
    averages = {} if step.ema is None else step._by_group(state.ema)
    return [(key, *(part[key] for part in parts), averages.get(key)) for key in step.optimizers]


def _scale_of(scaler: LossScale, device: torch.device) -> torch.Tensor:
    return scaler.scale(torch.ones((), device=device))


def _unrecorded() -> AbstractContextManager[None]:
    """Keeps autograd from recording a whole step, unless the step itself is being differentiated."""
    # A compiler tracing through here cannot look at the transforms, and records nothing that needs no gradient anyway.
    recorded = torch.compiler.is_compiling() or _compat.reverse_mode_active()
    return contextlib.nullcontext() if recorded else torch.no_grad()


def _copy(leaf: Any, device: torch.device | None = None) -> Any:
    return None if leaf is None else leaf.to(device, copy=True)


def _full_precision_copy(leaf: Any, like: Any) -> Any:
    return leaf.to(full_precision(like.dtype), copy=True) if is_castable(leaf) else None


def _merged(old: Tree, new: Tree, *, path: str) -> Tree:
    if not isinstance(new, Mapping):
        raise KeyError(f"{path} exists already")
    if not isinstance(old, Mapping):
        raise TypeError(f"{path}: parameters can only be added to a dictionary, found {type(old).__name__}")
    added = {key: _merged(old[key], value, path=f"{path}/{key}") if key in old else value for key, value in new.items()}
    return {**old, **added}


def _check_call(step: TrainStep, state: Any, frozen: Tree) -> None:
    if not isinstance(state, TrainState):
        check_owned(state)
        raise TypeError(f"state must be a TrainState, as step.init(params) makes it, got {tree.describe(state)}")
    if frozen is not None and not any("frozen" in loss.keywords for loss in step.losses.values()):
        raise ValueError("the step got frozen=..., but no loss_fn takes the keyword argument `frozen`")


def _check_seed(seed: Any) -> None:
    if isinstance(seed, torch.Tensor):
        integer = not (seed.dtype.is_floating_point or seed.dtype.is_complex or seed.dtype == torch.bool)
        valid = integer and seed.ndim == 0
    else:
        valid = isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 2**63
    if not valid:
        raise TypeError(f"seed must be an integer of 64 bits or a scalar tensor of one, got {tree.describe(seed)}")


def _check_trees(step: TrainStep, params: Tree, buffers: Tree) -> None:
    for argument, value in (("params", params), ("buffers", buffers)):
        for path, leaf in tree.items(value):
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                raise TypeError(
                    f"{argument}: leaf {path!r} is {leaf!r}; a state holds tensors only, "
                    "so close over constants in the loss function"
                )
    if ONLY not in step.optimizers and (not isinstance(params, Mapping) or params.keys() != step.optimizers.keys()):
        found = sorted(params) if isinstance(params, Mapping) else f"a {type(params).__name__}"
        raise KeyError(f"params must have the keys of the optimizers, {sorted(step.optimizers)}; found {found}")
    takes_buffers = any("buffers" in loss.keywords for loss in step.losses.values())
    if takes_buffers and buffers is None:
        raise ValueError("loss_fn takes buffers: pass init(params, buffers=...)")
    if buffers is not None and not takes_buffers:
        raise ValueError("init got buffers, but loss_fn does not take the keyword argument `buffers`")
