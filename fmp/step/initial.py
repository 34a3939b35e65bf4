"""The first state of a run, and a state with more parameters than before."""

import operator
from collections.abc import Mapping
from typing import Any

import optree
import torch

from fmp import master, members, tree
from fmp.df11.compressed import CompressedTensor
from fmp.df11.frozen_weight import FrozenWeight
from fmp.dtypes import full_precision, is_castable
from fmp.module import Model
from fmp.patterns import matches
from fmp.policy import NORM_PATTERNS
from fmp.step.config import ONLY, StepConfig
from fmp.step.kept_norms import warn_of_cast_norms
from fmp.step.state import TrainState
from fmp.tree.wholes import check_whole

Tree = Any


def init(config: StepConfig, params: Tree, buffers: Tree, seed: int | torch.Tensor) -> TrainState:
    """Makes the first state, of copies; see `TrainStep.init`."""
    placement = config.placement

    def checked() -> tuple[int | torch.Tensor, Tree, Tree]:
        _check_trees(config, params, buffers)
        own = params if ONLY in config.optimizers else dict(params)
        return _checked_seed(seed), own, placement.place(own)

    seed, params, placed = placement.together(checked)
    given = (params, buffers, seed)
    # The line that called TrainStep.init.
    warn_of_cast_norms([loss.fn for loss in config.losses.values()], config.policy, buffers, params, stacklevel=3)
    device = next((leaf.device for leaf in tree.leaves(params) if leaf is not None), torch.device("cpu"))
    placement.check_alike({"params": params, "buffers": buffers, "seed": torch.as_tensor(seed)})
    params, wholes = placement.opened(placed)
    buffers = tree.map(_copy, buffers)
    stored, masters, form = params, tree.map(lambda leaf: None, params), config.master_form
    if config.policy is not None:
        stored = config.policy.cast_to_param(params)
        buffers = config.policy.cast_to_param(buffers)
        if form is not None:
            # Some forms round in another way than the policy casts.
            wide = tree.map(_widened, params, stored)
            stored, masters = master.split(wide, stored, master.init(stored, form=form), form=form)
    full = master.merge(stored, masters, form=form)
    groups = config.by_group(placement.closed(full, wholes))
    averages = None if config.ema is None else tree.map(_full_precision_copy, params, full)

    def count() -> torch.Tensor:
        return torch.zeros((), dtype=torch.int32, device=device)

    state = TrainState(
        step=count(),
        params=placement.closed(stored, wholes),
        master=placement.closed(masters, wholes),
        opt_state=config.from_groups(
            {key: placement.initial(tx.init, groups[key]) for key, tx in config.optimizers.items()}
        ),
        loss_scale=config.from_losses(tree.map(lambda leaf: _copy(leaf, device), dict(config.scalers))),
        buffers=buffers,
        ema=None if config.ema is None else placement.closed(averages, wholes),
        seed=torch.as_tensor(seed, dtype=torch.int64, device=device).clone(),
        skip_count=config.from_groups({key: count() for key in config.optimizers}),
    )
    return members.apart(state, *given)


def look_at_frozen(config: StepConfig, state: TrainState, frozen: Tree, looked_at: set[tree.Spec]) -> None:
    """Looks whether the policy keeps in float32 what it is meant to, of what `init` was not given; see `TrainStep`.

    Args:
        config: The parts of the step.
        state: The state.
        frozen: What a call gives besides.
        looked_at: The structures of `frozen` that have been looked at, which takes longer than a step may; this one is
            added.
    """
    if config.policy is None or torch.compiler.is_compiling() or not config.takes("frozen"):
        return
    structure = tree.structure(frozen)
    if structure in looked_at:
        return
    trees = (state.buffers, state.params, frozen)
    check_kept(config, *trees)
    # The line that called the step.
    warn_of_cast_norms([loss.fn for loss in config.losses.values()], config.policy, *trees, stacklevel=3)
    looked_at.add(structure)


def extend(config: StepConfig, state: TrainState, params: Tree) -> TrainState:
    """Adds parameters to a state; see `TrainStep.extend`."""
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be a dictionary of new parameters, got a {type(params).__name__}")
    placement = config.placement
    parts, wholes = placement.opened(state.params)
    masters, _ = placement.opened(state.master)
    full = placement.closed(master.merge(parts, masters, form=config.master_form), wholes)
    del parts, masters
    full = _merged(full, params, path="params")
    fresh = init(config, full, state.buffers, state.seed)
    old_leaves, old_spec = tree.flatten(state)
    old = dict(zip(old_spec.paths(), old_leaves, strict=True))
    leaves, spec = tree.flatten(fresh)
    known = [old.get(path) for path in spec.paths()]
    extended = tree.unflatten(
        spec, [_copy(leaf if kept is None else kept) for leaf, kept in zip(leaves, known, strict=True)]
    )
    return tree.replace(extended, loss_scale=tree.map(_copy, state.loss_scale))


def _copy(leaf: Any, device: torch.device | None = None) -> Any:
    return None if leaf is None else leaf.to(device, copy=True)


def _widened(leaf: Any, like: Any) -> Any:
    return leaf.to(full_precision(like.dtype)) if is_castable(leaf) else leaf


def _full_precision_copy(leaf: Any, like: Any) -> Any:
    return leaf.to(full_precision(like.dtype), copy=True) if is_castable(leaf) else None


def _merged(old: Tree, new: Tree, *, path: str) -> Tree:
    if not isinstance(new, Mapping):
        raise KeyError(f"{path} exists already")
    if not isinstance(old, Mapping):
        raise TypeError(f"{path}: parameters can only be added to a dictionary, found {type(old).__name__}")
    added = {key: _merged(old[key], value, path=f"{path}/{key}") if key in old else value for key, value in new.items()}
    return {**old, **added}


def _checked_seed(seed: Any) -> int | torch.Tensor:
    if isinstance(seed, torch.Tensor):
        integer = not (seed.dtype.is_floating_point or seed.dtype.is_complex or seed.dtype == torch.bool)
        if integer and seed.ndim == 0:
            return seed
    elif hasattr(seed, "__index__") and not isinstance(seed, bool) and -(2**63) <= operator.index(seed) < 2**63:
        return operator.index(seed)
    hint = "; vmap maps positions only: vmap(lambda p, s: step.init(p, seed=s))(params, seeds)"
    found = tree.describe(seed) + (hint if isinstance(seed, torch.Tensor) and seed.ndim else "")
    raise TypeError(f"seed must be an integer of 64 bits or a scalar tensor of one, got {found}")


def _check_trees(config: StepConfig, params: Tree, buffers: Tree) -> None:
    if isinstance(params, torch.nn.Module):
        raise TypeError("params is an nn.Module; pass the parameters of a function: fmp.functionalize(module).params")
    if isinstance(params, Model):
        raise TypeError("params is a fmp.Model; pass its parameters: step.init(model.params, buffers=model.buffers)")
    check_whole({"params": params, "buffers": buffers}, "a state")
    for argument, value in (("params", params), ("buffers", buffers)):
        nodes = optree.tree_leaves(value, is_leaf=lambda node: isinstance(node, CompressedTensor))
        if any(isinstance(node, CompressedTensor) for node in nodes):
            raise TypeError(
                f"{argument} holds compressed tensors, which cannot be trained; leave them out and pass them to the "
                "step as frozen=..., or decompress them first"
            )
        for path, leaf in tree.items(value):
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                raise TypeError(
                    f"{argument}: leaf {path!r} is {leaf!r}; a state holds tensors only, "
                    "so close over constants in the loss function"
                )
            if leaf is not None and leaf.layout != torch.strided:
                raise TypeError(f"{argument}: leaf {path!r} is sparse ({leaf.layout}); make it dense")
            if isinstance(leaf, FrozenWeight):
                raise TypeError(
                    f"{argument}: leaf {path!r} is a compressed weight, which cannot be trained; leave it out and pass "
                    "it to the step as frozen=..., or decompress it first"
                )
    if ONLY not in config.optimizers and (not isinstance(params, Mapping) or params.keys() != config.optimizers.keys()):
        found = sorted(params) if isinstance(params, Mapping) else f"a {type(params).__name__}"
        raise KeyError(f"params must have the keys of the optimizers, {sorted(config.optimizers)}; found {found}")
    if not config.takes("frozen"):
        check_kept(config, params, buffers)
    takes_buffers = config.takes("buffers")
    if takes_buffers and buffers is None:
        raise ValueError("loss_fn takes buffers: pass init(params, buffers=...)")
    if buffers is not None and not takes_buffers:
        raise ValueError("init got buffers, but loss_fn does not take the keyword argument `buffers`")


def check_kept(config: StepConfig, *trees: Tree) -> None:
    """Refuses names to keep in float32 of which no leaf has one; those that an opt level guesses may match nothing.

    Args:
        config: The parts of the step.
        *trees: Parameters, buffers, and what is frozen.

    Raises:
        ValueError: If there are leaves, and none has one of the names.
    """
    given = [] if config.policy is None else [name for name in config.policy.keep_full if name not in NORM_PATTERNS]
    paths = [path for each in trees for path, leaf in tree.items(each) if leaf is not None]
    if given and paths and not any(matches(path, given) for path in paths):
        shown = ", ".join(repr(path) for path in paths[:5])
        more = ", ..." if len(paths) > 5 else ""
        raise ValueError(f"the policy's keep_full names {given[:5]}, but no leaf matches; the paths are {shown}{more}")
