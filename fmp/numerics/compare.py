"""`fmp.numerics.compare`: the same step computed in two ways, by leaf, and the op at which the two part."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmp import _compat, tree
from fmp.live_memory import uncompiled
from fmp.numerics.differences import LeafDifference, value_difference
from fmp.numerics.fitted import accumulation, fitted_state, full_weights
from fmp.numerics.history import History
from fmp.numerics.keeping import copied_states, keeping
from fmp.numerics.named import leaves_of, named_tensors, random_generators
from fmp.numerics.op_sequence import OpSequence, Parting, RanOp, parting
from fmp.numerics.parts import gathered
from fmp.numerics.record import Recorded
from fmp.numerics.tables import in_columns
from fmp.step import Metrics, TrainState, TrainStep

Tree = Any

_ROWS = 30
_ORDERS: dict[str, Callable[[LeafDifference], float]] = {
    "relative_error": lambda leaf: -leaf.relative_error,
    "ulps": lambda leaf: 1.0 if leaf.ulps is None else -float(leaf.ulps),
    "cosine": lambda leaf: leaf.cosine,
}
# A loss in float16 is scaled by this at most.
_LARGEST_HALF_SCALE = 2.0**15


@dataclass(frozen=True)
class Comparison:
    """What two calls computed differently; `str` makes a table of it, the leaves that differ most first.

    Attributes:
        leaves: The differences of what both returned, by path.
        parting: The op at which the two part; None if their ops never do.
        only_in_a: The paths of what only the first returned, or in another shape.
        only_in_b: The paths of what only the second returned.
        op_counts: How many ops each ran, without casts.
        not_compared: The paths of what both returned and nobody can compare, such as an object of a class of your own.
    """

    leaves: tuple[LeafDifference, ...]
    parting: Parting | None
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    op_counts: tuple[int, int]
    not_compared: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether both returned the same leaves with the same numbers; not if there is one that was not compared."""
        is_whole = not (self.only_in_a or self.only_in_b or self.not_compared)
        return is_whole and all(leaf.is_equal for leaf in self.leaves)

    def __getitem__(self, path: str) -> LeafDifference:
        """Returns the difference at a path."""
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise KeyError(f"no leaf {path!r} to compare; the paths are {', '.join(leaf.path for leaf in self.leaves)}")

    def worst(self, by: str = "relative_error") -> tuple[LeafDifference, ...]:
        """Returns the leaves that differ, the worst first.

        Args:
            by: `"relative_error"`; `"ulps"`, where what is no floating-point number comes last; or `"cosine"`.

        Raises:
            ValueError: If it is none of these.
        """
        if by not in _ORDERS:
            raise ValueError(f"by must be one of {', '.join(map(repr, _ORDERS))}, got {by!r}")
        return tuple(sorted((leaf for leaf in self.leaves if not leaf.is_equal), key=_ORDERS[by]))

    def table(self, by: str = "relative_error", rows: int = _ROWS) -> str:
        """Writes a table of the leaves that differ, the worst first.

        Args:
            by: How to sort; see `worst`.
            rows: How many leaves to show.

        Raises:
            ValueError: If `by` is unknown.
        """
        different = self.worst(by)
        lines = [f"{len(self.leaves) - len(different)} of {len(self.leaves)} leaves are equal"]
        if different:
            lines += _table(different[:rows])
        if len(different) > rows:
            lines.append(f"and {len(different) - rows} more, which differ less by {by.replace('_', ' ')}")
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [self.table()]
        others = (("only in a", self.only_in_a), ("only in b", self.only_in_b), ("not compared", self.not_compared))
        for name, paths in others:
            if paths:
                shown = ", ".join(paths[:_ROWS]) + (", ..." if len(paths) > _ROWS else "")
                lines.append(f"{name}: {shown}")
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

    If both states have the same structure and dtypes, it gets that of the first. Two steps that `fmp.numerics.record`
    made are compared as the steps in them. Two other functions get the same arguments, which they must not change (but
    copies of train states and histories, which they may donate). Random numbers are the same for both: those of torch,
    and of each `torch.Generator` among the arguments and in what the functions close over.

    Compared by path are, for steps: `params`; `master`, the weights in full precision, whether they are kept or not;
    `update`, what was added to those; `opt_state`, `buffers`, `ema`, `loss_scale`, `metrics` and the counts. For
    functions, what they return, below `result`: tensors, numbers and what says by == whether it is equal, in trees,
    mappings, dataclasses and lists. The paths of anything else are listed as not compared.

    The ops of both are paired by name, shape and order, forward and backward, without casts and copies, and without
    what is recomputed. Their results are compared up to the factor between the two loss scales. What the first op
    returned is kept until the end, up to 16,384 entries of a result, evenly spaced. Left out is what a step chooses
    between to skip itself, what only measures it, and of two steps that accumulate over different numbers of
    microbatches all up to the gradients.

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
        ValueError: If the tolerance is negative, or the first step cannot use the state, naming the leaf.

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
    step_a, step_b = keeping(step_a), keeping(step_b)
    if isinstance(step_a, Recorded) and isinstance(step_b, Recorded) and _is_carry(args):
        step_a, step_b, args = step_a.step, step_b.step, (args[0][0], *args[1:])
    args_b = args
    if isinstance(step_a, TrainStep) and isinstance(step_b, TrainStep) and args and isinstance(args[0], TrainState):
        args_b = (fitted_state(step_a, step_b, args[0]), *args[1:])
    generators = [each for step in (step_a, step_b) for each in random_generators(step, args, kwargs)]
    with_losses = accumulation(step_a) == accumulation(step_b)
    before = [generator.get_state() for generator in generators]
    devices = {device for step in (step_a, step_b) for device in _cuda_devices(step, args, kwargs)}
    with torch.random.fork_rng(sorted(devices)):
        result_a, ops_a = _recorded(step_a, args, kwargs, with_losses=with_losses)
    for generator, state in zip(generators, before, strict=True):
        generator.set_state(state)
    result_b, ops_b = _recorded(step_b, args_b, kwargs, with_losses=with_losses)
    leaves_a = dict(_named(step_a, args, result_a))
    leaves_b = dict(_named(step_b, args_b, result_b))
    both = [path for path, leaf in leaves_a.items() if path in leaves_b and _shape(leaf) == _shape(leaves_b[path])]
    found = [(path, value_difference(path, gathered(leaves_a[path]), gathered(leaves_b[path]))) for path in both]
    return Comparison(
        leaves=tuple(difference for _, difference in found if difference is not None),
        parting=parting(ops_a, ops_b, tolerance=tolerance, factors=_factors(result_a, result_b)),
        only_in_a=tuple(path for path in leaves_a if path not in both),
        only_in_b=tuple(path for path in leaves_b if path not in both),
        op_counts=(len(ops_a), len(ops_b)),
        not_compared=tuple(path for path, difference in found if difference is None),
    )


def _is_carry(args: tuple[Any, ...]) -> bool:
    carry = args[0] if args else None
    return isinstance(carry, tuple) and len(carry) == 2 and isinstance(carry[1], History)


def _recorded(fn: Callable[..., Any], args: Any, kwargs: Any, *, with_losses: bool) -> tuple[Any, list[RanOp]]:
    args, kwargs = copied_states(fn, (args, kwargs))
    sequence = OpSequence(_recorded.__code__, with_losses=with_losses)
    with uncompiled(), torch.autograd.set_multithreading_enabled(False), sequence:
        result = fn(*args, **kwargs)
    return result, sequence.ops


def _shape(value: Any) -> object:
    return value.shape if isinstance(value, Tensor) else ()


def _named(step: Callable[..., Any], args: Any, result: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a call returned, by path; a path that two leaves have gets numbers."""
    parts: Any = {"result": result}
    if isinstance(step, TrainStep):
        state, metrics = result
        full = full_weights(step, state)
        parts = {
            "params": state.params,
            "master": full,
            "update": tree.map(_added, full, full_weights(step, args[0])),
            "opt_state": state.opt_state,
            "buffers": state.buffers,
            "ema": state.ema,
            "loss_scale": state.loss_scale,
            "step": state.step,
            "skip_count": state.skip_count,
            "metrics": metrics,
        }
    taken: dict[str, int] = {}
    for path, leaf in leaves_of(parts):
        if leaf is not None:
            taken[path] = taken.get(path, 0) + 1
            yield path if taken[path] == 1 else f"{path} ({taken[path]})", leaf


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


def _cuda_devices(step: Callable[..., Any], args: Any, kwargs: Any) -> set[int]:
    devices = [item.tensor.device for item in named_tensors(step, args, kwargs)]
    return {device.index or 0 for device in devices if device.type == "cuda"}


def _table(leaves: Sequence[LeafDifference]) -> list[str]:
    rows = [("relative error", "cosine", "ulps", "leaf", "a", "b")]
    for leaf in leaves:
        ulps = "-" if leaf.ulps is None else f"{leaf.ulps:,}"
        rows.append((f"{leaf.relative_error:.3g}", f"{leaf.cosine:.6f}", ulps, leaf.path, *leaf.described))
    return in_columns(rows, left=(3, 4, 5))
