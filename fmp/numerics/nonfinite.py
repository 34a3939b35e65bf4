"""`fmp.numerics.find_nonfinite`: the op that made the first inf or NaN, in the forward or in the backward pass.

Each inf or NaN has a source, and storages carry the sources of what is not finite in them:

    an op returns NaN and took none             it is a source
    an op returns inf and took neither          it is a source, unless a number among its arguments is inf
    an op returns inf or NaN and took some      what it took is handed on
    all is finite                               nothing is handed on, so what `torch.where` leaves out is forgotten

The culprit is the earliest source of what the function returned, or of what no other op took, such as the loss of a
function that returns gradients.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmp import _compat, tree
from fmp.live_memory import storages, uncompiled
from fmp.numerics.magnitudes import NEAR, Magnitude, is_measurable, measure
from fmp.numerics.named import named_tensors
from fmp.numerics.nonfinite_report import NonfiniteReport, OpInput, OpRecord
from fmp.numerics.op_watch import Op, OpWatch
from fmp.numerics.places import FORWARD, Place
from fmp.step import TrainStep

_NOWHERE = Place(FORWARD, None)
_UNINITIALISED = ("empty", "new_empty", "resize_")
_COPIES = ("_to_copy", "clone", "copy_", "lift_fresh", "_unsafe_view", "view_copy", "alias_copy")


def find_nonfinite(
    fn: Callable[..., Any], /, *args: Any, ignore: str | Sequence[str] = (), ops_before: int = 20, **kwargs: Any
) -> NonfiniteReport | None:
    """Calls a function once, and finds the op, forward or backward, that made the first inf or NaN.

    The ops are watched below autograd and torch.func, so any function will do: a loss, a gradient by `fmp.grad` or
    `torch.func.grad`, a call of `.backward()`, a train step, a module; in any nesting with vmap and `fmp.remat`. Each
    op waits for its result, so a call takes several times as long as otherwise.

    What counts as a mistake:

        NaN in a result, and in no argument         always
        inf in a result, and neither in an argument unless a number given to the op is inf: torch.full(..., -inf),
                                                    masked_fill(..., -inf) and torch.where(..., -inf) mean it
        inf or NaN that other ops leave out         only a warning, if nothing else is found
        inf or NaN in an argument to begin with     if it reaches the result without another mistake; -inf alone is
                                                    taken for a mask
        within 2 % of the largest number            only a warning, if nothing else is found; not in 8-bit formats

    Args:
        fn: The function, or an `nn.Module`. A function from `torch.compile`, and a step with `compile=True`, run
            eagerly. A step with `donate=True` leaves the state to its owner.
        *args: Its arguments.
        ignore: Ops whose inf and NaN are meant: names of ops (`"log"`), of nodes of autograd (`"LogBackward0"`), of
            modules (`"blocks.0.attn"`) or lines (`"model.py:12"`).
        ops_before: How many of the ops before to show.
        **kwargs: Its keyword arguments. For one called `ignore` or `ops_before`, wrap `fn`.

    Returns:
        The report, of which `str` makes a page. None if the result is finite and no op came near an overflow, or all
        inf in it are meant. If the function raises after an inf or NaN, that is reported, with the error.

    Raises:
        RuntimeError: Inside of a torch.func transform.
        Exception: What `fn` raises, if all was finite until then.

    References:
        The rows of the ops before are those of `transformers.debug_utils.DebugUnderflowOverflow`; to name the forward
        op for an op of the backward pass is the idea of `torch.autograd.detect_anomaly`.

    Example:
        >>> def loss(w, x):
        ...     return torch.sqrt(torch.relu(x @ w)).sum()
        >>> report = find_nonfinite(fmp.grad(loss), torch.zeros(2), torch.ones(3, 2))
        >>> report.kind, report.op, report.phase, report.node
        ('inf', 'div', 'backward', 'SqrtBackward0')
        >>> find_nonfinite(fmp.grad(loss), torch.ones(2), torch.ones(3, 2)) is None
        True
    """
    if _compat.transform_active():
        raise RuntimeError("find_nonfinite watches a whole call; call it outside of torch.func transforms")
    was_compiled = any(_compat.is_compiled(part) for part in (fn, getattr(fn, "advance", None)))
    if isinstance(fn, TrainStep) and fn.donate:
        fn = replace(fn, donate=False)
    names = dict(named_tensors(fn, args, kwargs))
    watch = _NonfiniteWatch((ignore,) if isinstance(ignore, str) else tuple(ignore), ops_before)
    begun_with = watch.begin(names)
    result, error = None, ""
    # The engine is to run all of the backward pass in this thread, where nodes have numbers of one row.
    with uncompiled(), torch.autograd.set_multithreading_enabled(False), watch:
        try:
            result = _call(fn, args, kwargs)
        except Exception as raised:
            if all(source.is_meant for source in watch.sources):
                raise
            error = f"{type(raised).__name__}: {raised}"
    grads = [tensor.grad for tensor in names.values() if tensor.is_leaf and tensor.grad is not None]
    found = watch.culprit([*_tensors(result), *grads], failed=bool(error))
    if found is None:
        return None
    return replace(found, begun_with=begun_with, was_compiled=was_compiled, error=error)


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class _Source:
    """Where an inf or NaN comes from.

    Attributes:
        place: Where the op was called.
        op: The name of the op; empty for what was there before the call.
        leaf: The path of what was there before the call.
        result: What came out.
        inputs: What the op took.
        before: The ops that ran before.
        is_meant: Whether it is no mistake.
    """

    place: Place
    op: str
    leaf: str
    result: Magnitude
    inputs: tuple[OpInput, ...]
    before: tuple[OpRecord, ...]
    is_meant: bool = False


@dataclass(frozen=True)
class _Origin:
    """What is known about the memory of a tensor.

    Attributes:
        leaf: The path of the leaf that it is or was copied from.
        op: Else the op that wrote it last.
        sources: The numbers of the sources of what is not finite in it.
        number: Counts what ops have returned.
        is_blank: Whether nothing has been written into it.
    """

    leaf: str = ""
    op: Op | None = None
    sources: frozenset[int] = frozenset()
    number: int = 0
    is_blank: bool = False

    @property
    def name(self) -> str:
        if self.leaf or self.op is None:
            return self.leaf
        return f"from {self.op.name}" + (f", {self.op.place.line}" if self.op.place.line else "")


class _NonfiniteWatch(OpWatch):
    """Follows what is not finite to its sources."""

    def __init__(self, ignore: tuple[str, ...], ops_before: int):
        super().__init__(_call.__code__)
        self.sources: list[_Source] = []
        self._near: _Source | None = None
        self._ignore = ignore
        self._before: deque[tuple[Op, Magnitude]] = deque(maxlen=ops_before)
        self._count = 0
        self._ends: dict[int, frozenset[int]] = {}  # the sources of what no op has taken since

    def begin(self, names: dict[str, Tensor]) -> tuple[OpInput, ...]:
        """Notes the tensors that are there before the call, and returns those that are not finite."""
        found: list[OpInput] = []
        for path, tensor in names.items():
            if self.origin(tensor) is None:
                self.note_origin(tensor, _Origin(path))
            if is_measurable(tensor) and not (held := measure(tensor)).is_finite:
                found.append(OpInput(path, held))
        return tuple(found)

    def saw(self, op: Op) -> None:
        """Follows one op."""
        light = replace(op, inputs=(), outputs=(), overwritten={})
        if op.name.startswith(_UNINITIALISED):
            for tensor in op.outputs:
                self.note_origin(tensor, _Origin(op=light, is_blank=True))
            return
        leaf = self._leaf(op)
        taken = [] if op.name.endswith("_like") or op.name.startswith("new_") else op.inputs  # these take the shape
        for origin in [self.origin(tensor) for tensor in taken]:
            self._ends.pop(origin.number if isinstance(origin, _Origin) else 0, None)
        for index, tensor in enumerate(op.outputs):
            result = measure(tensor)
            sources: frozenset[int] = frozenset()
            is_main = index == 0 or op.name.startswith("_foreach")
            if not result.is_finite:
                sources = self._sources(op, result, is_main=is_main)
            elif result.is_near_max and self._near is None:
                self._notice_near(op, result)
            self._count += 1
            if sources and is_main:
                self._ends[self._count] = sources
            old = self.origin(tensor)
            if op.writes and isinstance(old, _Origin):
                is_part = tensor.nbytes < sum(part.nbytes() for part in storages(tensor))
                sources |= old.sources if is_part else frozenset()
                leaf = old.leaf
            self.note_origin(tensor, _Origin(leaf, light, sources, self._count))
            self._before.append((light, result))

    def culprit(self, results: Iterable[Tensor], *, failed: bool) -> NonfiniteReport | None:
        """Finds the earliest source of what came out; else any other mistake; else what came near."""
        floating = [tensor for tensor in results if is_measurable(tensor)]
        held = [measure(tensor) for tensor in floating]
        sources = [self._sources_of(*pair) for pair in zip(floating, held, strict=True) if not pair[1].is_finite]
        reaching = sorted(frozenset().union(*sources, *self._ends.values()))
        mistakes = [source for source in self.sources if not source.is_meant]
        reached = [self.sources[number] for number in reaching if not self.sources[number].is_meant]
        if reached:
            earlier = [source for source in mistakes[: mistakes.index(reached[0])] if source.op]
            return _report(reached[0], earlier, reached_result=True)
        mistakes = [source for source in mistakes if source.op or failed]
        if mistakes:
            return _report(mistakes[0], reached_result=failed or not floating)
        return None if self._near is None else _report(self._near, reached_result=False)

    def _leaf(self, op: Op) -> str:
        """Finds the path of the leaf that an op copies."""
        origin = self.origin(op.inputs[-1 if op.name == "copy_" else 0]) if op.inputs else None
        return origin.leaf if op.name in _COPIES and isinstance(origin, _Origin) else ""

    def _sources(self, op: Op, result: Magnitude, *, is_main: bool) -> frozenset[int]:
        """Finds where the inf or NaN in a result came from, which may be the op itself.

        What an op returns for its own backward pass besides its main result may hold inf: the logarithms of
        probabilities in a CTC loss do.
        """
        is_constant = op.name == "lift_fresh"
        taken = [] if is_constant else self._taken(op)
        numbers: set[int] = set()
        for index, held in taken:
            if not held.is_finite:
                numbers |= self._sources_of(op.inputs[index], held)
        nan_taken = any(held.nans for _, held in taken)
        inf_taken = is_constant or any(held.infs for _, held in taken) or any(map(math.isinf, op.numbers))
        if (result.nans and not nan_taken) or not (nan_taken or inf_taken):
            is_meant = self._is_ignored(op) or not (is_main or result.nans)
            numbers.add(self._add(op, result, taken, is_meant=is_meant))
        elif not numbers:
            numbers.add(self._add(op, result, taken, is_meant=True))
        return frozenset(numbers)

    def _taken(self, op: Op) -> list[tuple[int, Magnitude]]:
        """Measures what an op took; what it wrote over was measured before it ran."""
        taken = []
        for index, tensor in enumerate(op.inputs):
            origin = self.origin(tensor)
            if is_measurable(tensor) and not (isinstance(origin, _Origin) and origin.is_blank):
                taken.append((index, op.overwritten.get(index) or measure(tensor)))
        return taken

    def _sources_of(self, tensor: Tensor, held: Magnitude) -> frozenset[int]:
        """Finds the sources of what is not finite in a tensor; one that no op has made was there before the call."""
        origin = self.origin(tensor)
        if isinstance(origin, _Origin) and origin.sources:
            return origin.sources
        leaf = origin.leaf if isinstance(origin, _Origin) else ""
        is_number = not leaf and tensor.ndim == 0  # such as in x[mask] = inf
        is_mask = not held.nans and (is_number or not held.plus_infs)
        is_ignored = leaf in self._ignore
        name = leaf or "a tensor that the function does not get as an argument"
        self.sources.append(_Source(_NOWHERE, "", name, held, (), self._records(), is_mask or is_ignored))
        sources = frozenset([len(self.sources) - 1])
        self.note_origin(tensor, _Origin(leaf, None, sources))
        return sources

    def _add(self, op: Op, result: Magnitude, taken: Iterable[tuple[int, Magnitude]], *, is_meant: bool) -> int:
        self.sources.append(self._source(op, result, taken, is_meant=is_meant))
        return len(self.sources) - 1

    def _source(
        self, op: Op, result: Magnitude, taken: Iterable[tuple[int, Magnitude]], *, is_meant: bool = False
    ) -> _Source:
        inputs = []
        for index, held in taken:
            origin = self.origin(op.inputs[index])
            inputs.append(OpInput(origin.name if isinstance(origin, _Origin) else "", held))
        before = () if is_meant else self._records()
        return _Source(op.place, op.name, "", result, tuple(inputs), before, is_meant)

    def _notice_near(self, op: Op, result: Magnitude) -> None:
        """Notes an op that nearly overflows, unless it was given a number as large, or has only moved one."""
        limit = NEAR * torch.finfo(result.dtype).max
        taken = self._taken(op)
        is_given = any(abs(number) >= limit for number in op.numbers)
        if not (is_given or self._is_ignored(op) or any(not held.largest < limit for _, held in taken)):
            self._near = self._source(op, result, taken)

    def _is_ignored(self, op: Op) -> bool:
        place = op.place
        names = {op.name, place.node, place.line.module if place.line else ""}
        lines = [str(line).partition(" ")[0] for line in (place.line, place.inner) if line]
        return any(name in names or any(line == name for line in lines) for name in self._ignore if name)

    def _records(self) -> tuple[OpRecord, ...]:
        return tuple(
            OpRecord(op.name, op.place.phase, str(op.place.line or "-"), result) for op, result in self._before
        )


def _report(source: _Source, earlier: Sequence[_Source] = (), *, reached_result: bool) -> NonfiniteReport:
    place, result = source.place, source.result
    return NonfiniteReport(
        level="error" if reached_result else "warning",
        kind="nan" if result.nans else "inf" if result.infs else "near max",
        op=source.op,
        leaf=source.leaf,
        phase=place.phase,
        node=place.node,
        line=str(place.line or ""),
        source=place.line.source if place.line else "",
        backward_line=str(place.inner or ""),
        module=place.line.module if place.line else "",
        result=result,
        inputs=source.inputs,
        begun_with=(),
        left_out=tuple(dict.fromkeys(f"{each.op} ({each.place.phase}), {each.place.line}" for each in earlier)),
        ops_before=source.before,
        reached_result=reached_result,
    )


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(result) if isinstance(leaf, Tensor)]
