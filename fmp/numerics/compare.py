"""`fmp.numerics.compare`: the same step computed in two ways, by leaf, and the op at which the two part."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmp import _compat, master, tree
from fmp.live_memory import uncompiled
from fmp.numerics.differences import LeafDifference, leaf_difference
from fmp.numerics.op_sequence import OpSequence, Parting, RanOp, parting
from fmp.step import Metrics, TrainState, TrainStep

Tree = Any

_ROWS = 30
# A loss in float16 is scaled by this at most.
_LARGEST_HALF_SCALE = 2.0**15


@dataclass(frozen=True)
class Comparison:
    """What two calls computed differently; `str` makes a table of it.

    Attributes:
        leaves: The differences of what both returned, by path.
        parting: The op at which the two part; None if their ops never do.
        only_in_a: The paths of what only the first returned, or in another shape.
        only_in_b: The paths of what only the second returned.
        op_counts: How many ops each ran, without casts.
    """

    leaves: tuple[LeafDifference, ...]
    parting: Parting | None
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    op_counts: tuple[int, int]

    @property
    def is_equal(self) -> bool:
        """Whether both returned the same leaves with the same numbers."""
        return not (self.only_in_a or self.only_in_b) and all(leaf.is_equal for leaf in self.leaves)

    def __getitem__(self, path: str) -> LeafDifference:
        """Returns the difference at a path."""
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise KeyError(f"no leaf {path!r} to compare; the paths are {', '.join(leaf.path for leaf in self.leaves)}")

    def __str__(self) -> str:
        different = sorted((leaf for leaf in self.leaves if not leaf.is_equal), key=lambda leaf: -leaf.relative_error)
        lines = [f"{len(self.leaves) - len(different)} of {len(self.leaves)} leaves are equal"]
        if different:
            lines += _table(different[:_ROWS])
        if len(different) > _ROWS:
            lines.append(f"and {len(different) - _ROWS} more, with smaller errors")
        for name, paths in (("a", self.only_in_a), ("b", self.only_in_b)):
            if paths:
                shown = ", ".join(paths[:_ROWS]) + (", ..." if len(paths) > _ROWS else "")
                lines.append(f"only in {name}: {shown}")
        ops = f"{self.op_counts[0]} and {self.op_counts[1]} ops"
        lines.append(f"{ops}: {self.parting}" if self.parting else f"{ops}, which do not part")
        return "\n".join(lines)


def compare(
    step_a: Callable[..., Any],
    step_b: Callable[..., Any],
    /,
    *args: Any,
    tolerance: float | None = None,
    **kwargs: Any,
) -> Comparison:
    """Runs the same step in two ways, such as under two policies, and measures what comes out different.

    `compare(step_a, step_b, state, batch)` takes two results of `fmp.train_step` and a state of the first one. The
    second gets a state of its own with the same values:

        full    = master.merge(state.params, state.master)      # float32, or wider
        state_b = step_b.init(full, buffers=state.buffers, seed=state.seed)
        each leaf of counts, optimizer state, moving average and loss scale that both have, is cast and carried over

    If both states have the same structure and dtypes, it gets that of the first. Two plain functions get the same
    arguments, which they must not change. Random numbers are the same for both.

    Compared by path are, for steps: `params`; `master`, the weights in full precision, whether they are kept or not;
    `update`, what was added to those; `opt_state`, `buffers`, `ema`, `loss_scale`, `metrics` and the counts. For
    functions, what they return, below `result`.

    The ops of both are paired by name, shape and order, forward and backward, without casts and copies, and without
    what is recomputed. Their results are compared up to the factor between the two loss scales. What the first op
    returned is kept until the end, up to 16,384 entries of a result, evenly spaced.

    Args:
        step_a: A step or function; differences are relative to what it computes. If it is compiled, it runs eagerly;
            if it is a step that donates, it does not.
        step_b: Another one.
        *args: The arguments, for steps the state and the batch.
        tolerance: The relative difference at which ops part; None for 16 times the distance from 1 to the next number
            in the coarsest format that either has computed in so far: 0.125 in bfloat16, 0.016 in float16.
        **kwargs: Keyword arguments of both.

    Returns:
        The differences; `str` makes a table of them.

    Raises:
        RuntimeError: Inside of a torch.func transform.
        ValueError: If the tolerance is negative.

    Example:
        >>> def loss_fn(params, x):
        ...     return (x @ params["w"]).square().mean()
        >>> def step(policy):
        ...     return fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=fmp.Policy.parse(policy))
        >>> a, b = step("params=f32,compute=f32,output=f32"), step("params=f32,compute=bf16,output=f32")
        >>> comparison = compare(a, b, a.init({"w": torch.rand(8)}), torch.rand(4, 8))
        >>> comparison.is_equal, comparison["metrics/loss"].relative_error < 0.01, comparison.parting
        (False, True, None)
        >>> compare(a, a, a.init({"w": torch.rand(8)}), torch.rand(4, 8)).is_equal
        True
    """
    if _compat.transform_active():
        raise RuntimeError("compare watches two whole calls; call it outside of torch.func transforms")
    if tolerance is not None and not tolerance >= 0.0:
        raise ValueError(f"tolerance must be a relative difference, at least 0, got {tolerance!r}")
    step_a, step_b = _keeping(step_a), _keeping(step_b)
    args_b = args
    if isinstance(step_a, TrainStep) and isinstance(step_b, TrainStep) and args and isinstance(args[0], TrainState):
        args_b = (_fitted(step_a, step_b, args[0]), *args[1:])
    with torch.random.fork_rng(_cuda_devices((args, kwargs))):
        result_a, ops_a = _recorded(step_a, args, kwargs)
    result_b, ops_b = _recorded(step_b, args_b, kwargs)
    leaves_a = dict(_named(step_a, args, result_a))
    leaves_b = dict(_named(step_b, args_b, result_b))
    both = [path for path, leaf in leaves_a.items() if path in leaves_b and leaf.shape == leaves_b[path].shape]
    return Comparison(
        leaves=tuple(leaf_difference(path, leaves_a[path], leaves_b[path]) for path in both),
        parting=parting(ops_a, ops_b, tolerance=tolerance, factors=_factors(result_a, result_b)),
        only_in_a=tuple(path for path in leaves_a if path not in both),
        only_in_b=tuple(path for path in leaves_b if path not in both),
        op_counts=(len(ops_a), len(ops_b)),
    )


def _keeping(step: Callable[..., Any]) -> Callable[..., Any]:
    return replace(step, donate=False) if isinstance(step, TrainStep) else step


def _recorded(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[RanOp]]:
    sequence = OpSequence(_recorded.__code__)
    with uncompiled(), torch.autograd.set_multithreading_enabled(False), sequence:
        result = fn(*args, **kwargs)
    return result, sequence.ops


def _fitted(step_a: TrainStep, step_b: TrainStep, state: TrainState) -> TrainState:
    """Makes a state for the second step with the values of one of the first."""
    fresh = step_b.init(_full(step_a, state), buffers=state.buffers, seed=state.seed)
    if step_a.config.master_form == step_b.config.master_form and _same_kind(fresh, state):
        return state
    carried = ("step", "opt_state", "ema", "skip_count", "loss_scale")
    values = {part: _carried(getattr(state, part), getattr(fresh, part)) for part in carried}
    if type(state.loss_scale) is not type(fresh.loss_scale):
        values["loss_scale"] = fresh.loss_scale
    return tree.replace(fresh, **values)


def _same_kind(a: Tree, b: Tree) -> bool:
    kinds = [[leaf is not None and (leaf.dtype, leaf.shape) for leaf in tree.leaves(each)] for each in (a, b)]
    return tree.structure(a) == tree.structure(b) and kinds[0] == kinds[1]


def _carried(old: Tree, new: Tree) -> Tree:
    values = dict(tree.items(old))

    def carry(path: str, leaf: Any) -> Any:
        value = values.get(path)
        if isinstance(value, Tensor) and isinstance(leaf, Tensor) and value.shape == leaf.shape:
            return value.to(leaf.dtype, copy=True)
        return leaf

    return tree.map_with_path(carry, new)


def _full(step: TrainStep, state: TrainState) -> Tree:
    return master.merge(state.params, state.master, form=step.config.master_form)


def _named(step: Callable[..., Any], args: Any, result: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields what a call returned, by path."""
    parts: Any = {"result": result}
    if isinstance(step, TrainStep):
        state, metrics = result
        full = _full(step, state)
        parts = {
            "params": state.params,
            "master": full,
            "update": tree.map(_added, full, _full(step, args[0])),
            "opt_state": state.opt_state,
            "buffers": state.buffers,
            "ema": state.ema,
            "loss_scale": state.loss_scale,
            "step": state.step,
            "skip_count": state.skip_count,
            "metrics": metrics,
        }
    for name, part in parts.items():
        for path, leaf in tree.items(part):
            if isinstance(leaf, Tensor):
                yield f"{name}/{path}" if path else name, leaf


def _added(new: Any, old: Any) -> Any:
    return new - old if isinstance(new, Tensor) and new.is_floating_point() else None


def _factors(result_a: Any, result_b: Any) -> list[float]:
    """Lists by what a gradient of the second may be short of one of the first, because losses were scaled."""
    scales_a, scales_b = [{1.0} | _scales(result) for result in (result_a, result_b)]
    return sorted({a / b for a in scales_a for b in scales_b}, key=lambda factor: factor != 1.0)


def _scales(result: Any) -> set[float]:
    metrics = result[-1] if isinstance(result, tuple) and result else None
    used = tree.leaves(metrics.loss_scale) if isinstance(metrics, Metrics) else []
    scales = {scale.item() for scale in used if scale.numel() == 1}
    return scales | {min(scale, _LARGEST_HALF_SCALE) for scale in scales}


def _cuda_devices(values: Tree) -> list[int]:
    devices = [leaf.device for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
    return sorted({device.index or 0 for device in devices if device.type == "cuda"})


def _table(leaves: list[LeafDifference]) -> list[str]:
    rows = [("relative error", "cosine", "ulps", "leaf", "a", "b")]
    for leaf in leaves:
        ulps = "-" if leaf.ulps is None else f"{leaf.ulps:,}"
        rows.append((f"{leaf.relative_error:.3g}", f"{leaf.cosine:.6f}", ulps, leaf.path, *leaf.described))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index < 3 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
