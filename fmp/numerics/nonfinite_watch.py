"""Follows each inf and NaN of a call to the op that made it.

Each has a source, and memory carries the sources of what is not finite in it, place by place:

    an op made it                     the op is its source
    the op was given a number inf     the op is its source, and means it
    the op handed it on               it keeps its sources
    a number is finite                it has none, so what `torch.where` leaves out is forgotten

The culprit is the earliest source of what the function returned, or of what no op took, such as the loss of a function
that returns gradients. An op that made it comes before a leaf that held it to begin with, unless the one follows from
the other.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from fmp.numerics.handing_on import Doing, Labels, Taken, doing
from fmp.numerics.magnitudes import NEAR, Magnitude, entries, is_measurable, measure
from fmp.numerics.named import Named
from fmp.numerics.nonfinite_report import NonfiniteReport, OpInput, OpRecord
from fmp.numerics.op_watch import COPIES, Op, OpWatch
from fmp.numerics.provenance import Provenance, parts
from fmp.numerics.sources import IGNORED, MEANT, MISTAKE, NOWHERE, TURNED, Source, first_cause, report

_UNINITIALIZED = ("empty", "new_empty", "resize_")
_DECODES = "fmp.df11_decode"
_UNNAMED = "a tensor that the function does not get as an argument"


@dataclass(frozen=True)
class _Origin:
    """By whom memory was written.

    Attributes:
        leaf: The path of the leaf that it is or was copied from.
        op: Else the op that wrote it.
        number: Counts the ops; what one of them returned is taken if any of it is.
        is_blank: Whether nothing has been written into it.
    """

    leaf: str = ""
    op: Op | None = None
    number: int = 0
    is_blank: bool = False

    @property
    def name(self) -> str:
        if self.leaf or self.op is None:
            return self.leaf
        return f"from {self.op.name}" + (f", {self.op.place.line}" if self.op.place.line else "")


class NonfiniteWatch(OpWatch):
    """Follows what is not finite to its sources.

    Args:
        outermost: The code of the function that calls what is watched.
        ignore: What is meant; see `fmp.numerics.find_nonfinite`.
        ops_before: How many ops to remember.
    """

    def __init__(self, outermost: CodeType, ignore: tuple[str, ...], ops_before: int):
        super().__init__(outermost)
        self._sources: list[Source] = []
        self._known = Provenance(self.memory)
        self._labels = Labels()
        self._near: Source | None = None
        self._ignore = ignore
        self._before: deque[tuple[Op, Magnitude]] = deque(maxlen=ops_before)
        self._count = 0
        self._ends: dict[int, frozenset[int]] = {}  # the sources of what no op has taken since
        self._taken: set[int] = set()  # the sources of what some op has taken
        self._read: dict[str, frozenset[int]] = {}  # those of numbers that Python has got
        self._stopped: dict[int, Op] = {}  # by which op a source was left out last

    def begin(self, names: Iterable[Named]) -> tuple[OpInput, ...]:
        """Notes the tensors that are there before the call, and returns those that are not finite."""
        found: list[OpInput] = []
        for item in names:
            if self._known.origin(item.tensor) is None:
                self._known.note(item.tensor, _Origin(item.path))
            if is_measurable(item.tensor) and not (held := measure(item.tensor)).is_finite:
                labels, bad = self._known.labels(item.tensor), ~entries(item.tensor).isfinite()
                if labels.shape == bad.shape and (is_new := bad & (labels == 0)).any():
                    number = self._add_leaf(item.path, item.tensor, held, is_measurement=item.is_measurement)
                    labels[is_new] = self._labels.of([number])
                if not item.is_measurement:
                    found.append(OpInput(item.path, held))
        return tuple(found)

    def saw(self, op: Op) -> None:
        """Follows one op."""
        light = op.without_tensors()
        if op.name.startswith(_UNINITIALIZED):
            for tensor in op.outputs:
                if not op.writes:
                    self._known.note(tensor, _Origin(op=light, is_blank=True))
            return
        leaf = self._leaf(op)
        if self._ends and not (op.name.endswith("_like") or op.name.startswith("new_")):  # these take the shape
            for tensor in op.inputs:
                self._forget_ends(self._known.origins(tensor))
        self._count += 1
        given = frozenset[int]().union(*[self._sources_in(tensor) for tensor in op.inputs])
        for tensor in op.others:
            self._known.note(tensor, _Origin(op=light, number=self._count))
        for index, tensor in enumerate(op.outputs):
            result = measure(tensor)
            labels = None
            is_of_list = op.name.startswith("_foreach")
            is_main = index == 0 or is_of_list
            if not result.is_finite:
                labels = self._followed(op, tensor, result, is_main=is_main)
            elif result.is_near_max and self._near is None:
                self._notice_near(op, result)
            self._count += is_of_list
            old = self._known.origin(tensor) if op.writes else None
            name = old.leaf if isinstance(old, _Origin) and op.name not in COPIES else leaf
            self._forget_ends(self._known.note(tensor, _Origin(name, light, self._count), labels))
            is_part = op.writes and tensor.nbytes < sum(part.untyped_storage().nbytes() for part in parts(tensor))
            if labels is not None and is_main and not is_part:  # nobody has to read all of what is filled bit by bit
                self._ends[self._count] = self._labels.sources(labels)
            self._before.append((light, result))
            given -= self._labels.sources(labels)
        for number in given:
            # What only looks at numbers, such as a comparison, counts if nothing else does.
            if op.outputs or number not in self._stopped:
                self._stopped[number] = light

    def saw_number(self, op: Op, number: float) -> None:
        """Remembers where an inf or NaN came from that Python has got."""
        if not math.isfinite(number):
            found = self._labels.sources(self._resolved(op.inputs[0], measure(op.inputs[0])))
            self._read[repr(number)] = self._read.get(repr(number), frozenset()) | found

    def has_failed(self) -> bool:
        """Says whether there was a mistake so far."""
        return any(source.verdict == MISTAKE and self._counts(number) for number, source in enumerate(self._sources))

    def culprit(self, results: Iterable[Tensor], numbers: Iterable[float], *, failed: bool) -> NonfiniteReport | None:
        """Finds the earliest source of what came out; else any other mistake; else what came near.

        Args:
            results: The tensors that the function has returned.
            numbers: The numbers that it has returned.
            failed: Whether it has raised instead.
        """
        floating = [tensor for tensor in results if is_measurable(tensor)]
        for tensor in floating:  # of what it is a view of, the rest is left out
            self._forget_ends(self._known.beside(tensor))
        held = [measure(tensor) for tensor in floating]
        bad = [pair for pair in zip(floating, held, strict=True) if not pair[1].is_finite]
        reaching = [self._labels.sources(self._resolved(*pair)) for pair in bad]
        reaching += [self._read.get(repr(number), frozenset()) for number in numbers]
        numbers = frozenset[int]().union(*reaching, *self._ends.values())
        for verdict in (MISTAKE, TURNED):
            reached = first_cause(self._sources, numbers, verdict)
            if reached is not None:
                earlier = [
                    (source, self._stopped.get(number))
                    for number, source in enumerate(self._sources[:reached])
                    if source.op and source.verdict == MISTAKE
                ]
                return report(self._sources[reached], earlier, reached_result=True)
        known = [number for number in range(len(self._sources)) if self._sources[number].op or failed]
        mistake = first_cause(self._sources, [number for number in known if self._counts(number)])
        if mistake is not None:
            return report(self._sources[mistake], stopped_by=self._stopped.get(mistake), reached_result=failed)
        return None if self._near is None else report(self._near, reached_result=False)

    def _sources_in(self, tensor: Tensor) -> frozenset[int]:
        """Returns the sources of what is not finite in a tensor, as far as they are known."""
        if not is_measurable(tensor):
            return frozenset()
        return frozenset[int]().union(*map(self._labels.sources, self._known.known_labels(tensor)))

    def _counts(self, number: int) -> bool:
        return bool(self._sources[number].op) or number in self._taken

    def _forget_ends(self, origins: Iterable[Any]) -> None:
        for origin in origins:
            self._ends.pop(origin.number, None)

    def _leaf(self, op: Op) -> str:
        """Finds the path of the leaf that an op copies."""
        origin = self._known.origin(op.inputs[0]) if op.inputs else None
        return origin.leaf if op.name in (*COPIES, _DECODES) and isinstance(origin, _Origin) else ""

    def _followed(self, op: Op, tensor: Tensor, result: Magnitude, *, is_main: bool) -> Tensor:
        """Finds where the inf and NaN in a result came from, which may be the op itself."""
        if op.name == _DECODES:
            number = self._add_leaf(self._leaf(op), tensor, result)
            self._taken.add(number)
            return torch.full_like(entries(tensor), self._labels.of([number]), dtype=torch.int32)
        taken = [] if op.name == "lift_fresh" else self._inputs(op)
        done = doing(op, tensor, taken, self._labels)
        labels = torch.where(entries(tensor).isfinite(), 0, done.handed)
        self._taken |= self._labels.sources(labels)
        given = [number for number in op.numbers if not math.isfinite(number)]
        read = frozenset[int]().union(*[self._read.get(repr(number), frozenset()) for number in given])
        if read:
            made = (done.made_nan | done.made_inf) & (labels == 0)
            return torch.where(made, self._labels.of(read), labels)
        # What an op returns for its own backward pass besides its main result may hold inf: the logarithms of
        # probabilities in a CTC loss do.
        is_given = op.name == "lift_fresh" or any(map(math.isinf, given)) or not is_main
        is_ignored = self._is_ignored(op) or op.place.is_measuring
        for verdict, kind, made in _groups(done, is_given=is_given):
            after = self._labels.sources(torch.where(made, labels, 0))
            verdict = IGNORED if is_ignored else verdict
            if verdict == TURNED and any(self._sources[number].verdict != MEANT for number in after):
                continue
            source = self._source(op, result, taken, kind=kind, verdict=verdict, after=after)
            number = self._labels.of([self._add(source)])
            labels = self._labels.union(labels, torch.where(made, number, 0).to(torch.int32))
        return labels

    def _inputs(self, op: Op) -> list[Taken]:
        """Measures what an op took; what it wrote over was measured before it ran."""
        taken = []
        for index, tensor in enumerate(op.inputs):
            origins = list(self._known.origins(tensor)) if is_measurable(tensor) else []
            if not is_measurable(tensor) or (origins and all(origin.is_blank for origin in origins)):
                continue
            held = op.overwritten.get(index) or measure(tensor)
            before = op.before.get(index, tensor)
            labels = None if held.is_finite else self._resolved(tensor, held, before)
            taken.append(Taken(tensor, held, entries(before), labels))
        return taken

    def _resolved(self, tensor: Tensor, held: Magnitude, before: Tensor | None = None) -> Tensor:
        """Returns where the inf and NaN in a tensor came from; what no op has made was there before the call."""
        labels = self._known.labels(tensor)
        values = entries(tensor if before is None else before)
        if labels.shape != values.shape:  # made of several tensors, whose places are not its own
            sources = self._labels.sources(labels)
            labels = torch.full_like(values, self._labels.of(sources), dtype=torch.int32)
        bad = ~values.isfinite()
        if (is_new := bad & (labels == 0)).any():
            labels[is_new] = self._labels.of([self._add_unknown(tensor, held)])
        return torch.where(bad, labels, 0)

    def _add_unknown(self, tensor: Tensor, held: Magnitude) -> int:
        blank = next((each for each in self._known.origins(tensor) if each.is_blank), None)
        if blank is not None:  # read before it was written
            op = blank.op
            return self._add(Source(op.place, op.name, "", "nan" if held.nans else "inf", held, (), self._records()))
        origin = self._known.origin(tensor)
        return self._add_leaf(origin.name if isinstance(origin, _Origin) else "", tensor, held)

    def _add_leaf(self, path: str, tensor: Tensor, held: Magnitude, *, is_measurement: bool = False) -> int:
        is_number = not path and tensor.ndim == 0  # such as in x[mask] = inf
        is_mask = not held.nans and (is_number or not held.plus_infs)
        verdict = MEANT if is_mask else MISTAKE
        verdict = IGNORED if is_measurement or path in self._ignore else verdict
        kind = "nan" if held.nans else "inf"
        return self._add(Source(NOWHERE, "", path or _UNNAMED, kind, held, (), self._records(), verdict))

    def _add(self, source: Source) -> int:
        self._sources.append(source)
        return len(self._sources) - 1

    def _source(self, op: Op, result: Magnitude, taken: Iterable[Taken], *, kind: str, **rest: Any) -> Source:
        inputs = []
        for item in taken:
            origin = self._known.origin(item.tensor)
            inputs.append(OpInput(origin.name if isinstance(origin, _Origin) else "", item.held))
        before = () if rest.get("verdict") in (MEANT, IGNORED) else self._records()
        return Source(op.place, op.name, "", kind, result, tuple(inputs), before, **rest)

    def _notice_near(self, op: Op, result: Magnitude) -> None:
        """Notes an op that nearly overflows, unless it was given a number as large, or has only moved one."""
        limit = NEAR * torch.finfo(result.dtype).max
        taken = self._inputs(op)
        is_given = any(abs(number) >= limit for number in op.numbers) or op.place.is_measuring
        if not (is_given or self._is_ignored(op) or any(not item.held.largest < limit for item in taken)):
            self._near = self._source(op, result, taken, kind="near max")

    def _is_ignored(self, op: Op) -> bool:
        place = op.place
        names = {op.name, place.node, place.line.module if place.line else ""}
        lines = [str(line).partition(" ")[0] for line in (place.line, place.inner) if line]
        return any(name in names or any(line == name for line in lines) for name in self._ignore if name)

    def _records(self) -> tuple[OpRecord, ...]:
        return tuple(
            OpRecord(op.name, op.place.phase, str(op.place.line or "-"), result) for op, result in self._before
        )


def _groups(done: Doing, *, is_given: bool) -> list[tuple[str, str, Tensor]]:
    """Lists what an op made, by verdict; what is wrong in one op has one source."""
    nan, inf = done.made_nan, done.made_inf
    groups = [(MISTAKE, "nan" if nan.any() else "inf", nan | inf)]
    if is_given:
        groups = [(MISTAKE, "nan", nan), (MEANT, "inf", inf)]
    return [group for group in (*groups, (TURNED, "inf", done.turned)) if group[2].any()]
