"""`fmp.numerics.record`: a train step that keeps its own history, on the device."""

from dataclasses import dataclass
from typing import Any

import torch

from fmp import _compat, tree
from fmp.donation import check_owned, give_away
from fmp.dtypes import is_castable, short_name
from fmp.numerics.columns import Leaf, Path, as_scalar, at, check_names, flat, is_whole, scalars, value_of
from fmp.numerics.formats import number_format
from fmp.numerics.history import History, with_row
from fmp.numerics.trial import Step, Tree, expected_metrics, metrics_of
from fmp.numerics.watch import MEASURES, WatchState, measure
from fmp.step import TrainState, TrainStep
from fmp.tree.wholes import check_whole

_ANEW = "start a new history with recorded.init(state)"


@dataclass(frozen=True)
class Recorded:
    """A step that records; `fmp.numerics.record` makes it and describes what it does.

    Attributes:
        step: The step itself.
        length: How many steps are kept.
        params: The format by which parameters are measured; None if they are not.
    """

    __name__ = "recorded"  # for torch.func.vmap, which would ask for a repr otherwise

    step: Step
    length: int
    params: torch.dtype | None

    def init(self, state: Tree, batch: Tree = None, **kwargs: Any) -> tuple[Tree, History]:
        """Makes the history of no steps.

        Args:
            state: The state of the step, from its own `init`. It is not copied.
            batch: A batch, if not only the fields of `fmp.Metrics` are to be recorded, but also scalars in its `aux`;
                and for any step but one that `fmp.train_step` made. One step is made with it, and thrown away, to see
                what its metrics are; the random generators of torch, Python and numpy are put back afterwards. (Such a
                step of your own gets a copy of the state.)
            **kwargs: What the step takes besides.

        Returns:
            The pair of the state and the history: what the recording step takes.

        Raises:
            TypeError: If the step is one of your own and there is no batch; or if the state has a history already.
            ValueError: If nothing can be recorded, two numbers would be recorded by one name, or parameters are to be
                measured and the state has no `params`.
        """
        check_owned(state)
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], History):
            raise TypeError("state: this is a pair of state and history already; pass the state alone")
        if batch is not None:
            metrics = metrics_of(self.step, state, batch, kwargs)
        elif isinstance(self.step, TrainStep) and isinstance(state, TrainState):
            metrics = expected_metrics(self.step.config, state)
        else:
            raise TypeError(
                "the metrics of a step that fmp.train_step has not made are not known in advance; pass a batch: "
                "recorded.init(state, batch)"
            )
        found = scalars(metrics)
        watched = tuple(path for path, leaf in flat(state) if isinstance(leaf, WatchState))
        leaves = _watched_leaves(state, watched)
        if self.params is not None:
            check_whole(_params(state), "what is recorded")
            name = short_name(self.params)
            leaves += [("param", path, name) for path, leaf in tree.items(_params(state)) if is_castable(leaf)]
        if not found and not leaves:
            raise ValueError(f"there is nothing to record: the metrics have no scalars, {tree.describe(metrics)}")
        paths = tuple(path for path, _ in found)
        check_names(paths, leaves)
        dtypes = tuple(as_scalar(path, leaf, None).dtype for path, leaf in found)
        whole = sum(map(is_whole, dtypes))
        like = next((leaf for leaf in tree.leaves((state, metrics)) if isinstance(leaf, torch.Tensor)), None)
        device = None if like is None else like.device
        width = len(found) - whole + len(MEASURES) * len(leaves)
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        history = History(
            count=torch.zeros((), dtype=torch.int64, device=device),
            table=torch.zeros((self.length, width), dtype=dtype, device=device),
            integers=torch.zeros((self.length, whole), dtype=torch.int64, device=device),
            metrics=paths,
            dtypes=dtypes,
            leaves=tuple(leaves),
            watched=watched,
            params_in=self.params,
        )
        return state, history

    def __call__(self, carry: tuple[Tree, History], batch: Tree, **kwargs: Any) -> tuple[tuple[Tree, History], Tree]:
        """Makes one step and records it.

        Args:
            carry: The pair of state and history, from `init` or from the step before.
            batch: Passed to the step.
            **kwargs: Passed to the step.

        Returns:
            The next pair of state and history, and the metrics of this step.

        Raises:
            DonatedStateError: If state and history were given to a donating step before.
            KeyError: If the metrics, or the state, lack something that `init` found.
            TypeError: If `carry` is no such pair; or if a metric has not the dtype that `init` found, and would be
                rounded.
            ValueError: If the state has other leaves than `init` found, or they are measured by another format.
        """
        state, history = _pair(carry)
        counts = [_watch_at(state, path).count for path in history.watched]
        donated = getattr(self.step, "donate", False) and not torch.compiler.is_compiling()
        state, metrics = self.step(state, batch, **kwargs)
        if donated:
            history = give_away(history)
        measured: list[torch.Tensor] = []
        number = 0
        for path, count in zip(history.watched, counts, strict=True):
            watch = _watch_at(state, path)
            rows = [row for row in tree.leaves(watch.measured) if row is not None]
            if rows:
                _check_form(watch, history.leaves[number:])
                # If nothing was measured in this step, the old numbers are none of it.
                measured.append(torch.where(watch.count == count, torch.nan, torch.cat(rows)))
            number += len(rows)
        if history.params_in is not None:
            target = number_format(history.params_in)
            rows = [measure(leaf, target) for leaf in tree.leaves(_params(state)) if is_castable(leaf)]
            measured, number = measured + rows, number + len(rows)
        if number != len(history.leaves):
            raise ValueError(
                f"the state has {number} leaves to measure, and the history has {len(history.leaves)}; {_ANEW}"
            )
        device = history.table.device
        columns = zip(history.metrics, history.dtypes, strict=True)
        values = [value_of(metrics, path, dtype, device) for path, dtype in columns]
        overwrite = donated and not _compat.transform_active()
        return (state, with_row(history, values, measured, overwrite=overwrite)), metrics


def record(step: Step, *, length: int = 1024, params: torch.dtype | str | None = None) -> Recorded:
    """Wraps a train step so that it keeps a bounded history of its metrics, on the device.

        (state, history), metrics = recorded((state, history), batch)

    Each step writes one row into a ring buffer: every scalar of its metrics (loss, loss scale, skipped, gradient norm;
    by loss or by group if there are several), and for each leaf what `watch_gradients` has measured, if that is part of
    the optimizer. It never waits for the device, and takes some tens of microseconds and as much again for each leaf,
    at most 4 % of a step of a small language model; so it may stay on, and tell after the fact what led to a failure.

    The recording step is as pure as the step. Its state is one more tree: it is compiled, mapped by `torch.func.vmap`
    with a history for each member, saved by `fmp.checkpoint` with the state, and donated if the step donates its own.

    In a skipped step an optimizer keeps its old state, so what it has measured is unknown, and NaN in the history;
    likewise in a step that only accumulates.

    Args:
        step: What `fmp.train_step` made, or any function `(state, batch) -> (state, metrics)`. Metrics may be any
            tree; its scalar tensors and Python numbers are recorded.
        length: How many steps are kept; older ones are overwritten. The memory is 4 bytes for each metric, and 12 for
            each leaf, times this; twice that if a metric is in float64, as Python's floats are.
        params: Also measure each leaf of `state.params` after the step, as `watch_gradients` does, by this format. It
            reads all parameters a few times.

    Returns:
        The step that records. `recorded.init(state)` makes the first pair of state and history; `history.arrays()`
        returns numpy arrays; `write_jsonl`, `write_tensorboard`, `plot_scale` and `plot_underflow` take a history.

    Raises:
        TypeError: If `step` is not callable, or `length` not an int.
        ValueError: If `length` is below 1, or `params` is none of the formats.

    Example:
        >>> def loss_fn(params, batch):
        ...     return (params["w"] * batch).sum()
        >>> optimizer = fmp.optim.chain(fmp.numerics.watch_gradients(), fmp.optim.sgd(1.0))
        >>> step = fmp.train_step(loss_fn, optimizer, policy=fmp.opt_level("O2"), loss_scale=1024.0)
        >>> recorded = fmp.numerics.record(step, length=100)
        >>> carry = recorded.init(step.init({"w": torch.ones(2)}))
        >>> for _ in range(3):
        ...     carry, metrics = recorded(carry, torch.tensor([0.5, 0.0]))
        >>> state, history = carry
        >>> history.arrays()["loss"].tolist(), history.latest(2)["grad_zeros/w"].tolist()
        ([0.5, 0.25, 0.0], [0.5, 0.5])
    """
    if not callable(step):
        raise TypeError(f"step must be what fmp.train_step returns, or a function of state and batch, got {step!r}")
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"length must be a number of steps, got {length!r}")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    return Recorded(step, length, None if params is None else number_format(params).dtype)


def _pair(carry: Any) -> tuple[Tree, History]:
    if isinstance(carry, tuple | list) and len(carry) == 2:
        state, history = carry
        check_owned(history)
        if isinstance(history, History):
            return state, history
    found = f"a {type(carry).__name__}"
    if isinstance(carry, tuple | list):
        found += f" of {', '.join(type(part).__name__ for part in carry)}"
    raise TypeError(
        "a step that records takes the pair of state and history, and returns the next one: carry = "
        "recorded.init(state); carry, metrics = recorded(carry, batch); as carry it got " + found
    )


def _params(state: Tree) -> Tree:
    found = state.get("params") if isinstance(state, dict) else getattr(state, "params", None)
    if found is None:
        raise ValueError(f"params: the state is a {type(state).__name__} without params, so they cannot be measured")
    return found


def _watched_leaves(state: Tree, watched: tuple[Path, ...]) -> list[Leaf]:
    """Describes what is watched: kind, path of the leaf after what tells one watcher from the others, and format."""
    leaves = []
    for path, distinct in zip(watched, _distinct(watched), strict=True):
        watch: WatchState = at(state, path)
        names = [name for name, row in tree.items(watch.measured) if row is not None]
        leaves += [("grad", tree.join((*distinct, name) if name else distinct), _form(watch)) for name in names]
    return leaves


def _form(watch: WatchState) -> str:
    return short_name(watch.dtype) + ("" if watch.scale == 1.0 else f" times {watch.scale:g}")


def _distinct(paths: tuple[Path, ...]) -> list[Path]:
    """Takes from some paths what all of them begin and end with."""
    while paths and all(path for path in paths) and len({path[0] for path in paths}) == 1:
        paths = tuple(path[1:] for path in paths)
    while paths and all(path for path in paths) and len({path[-1] for path in paths}) == 1:
        paths = tuple(path[:-1] for path in paths)
    return list(paths)


def _watch_at(state: Tree, path: Path) -> WatchState:
    watch = at(state, path)
    if not isinstance(watch, WatchState):
        raise KeyError(f"{tree.join(path)!r} is not the state of watch_gradients, as it was in `init`; {_ANEW}")
    return watch


def _check_form(watch: WatchState, leaves: tuple[Leaf, ...]) -> None:
    form = _form(watch)
    if leaves and leaves[0][0] == "grad" and leaves[0][2] != form:
        raise ValueError(f"the history has {leaves[0][1]!r} in {leaves[0][2]}, and it is measured in {form}; {_ANEW}")
