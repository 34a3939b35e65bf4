"""The sources of inf and NaN, and which of several is to be reported."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fmp.numerics.magnitudes import Magnitude
from fmp.numerics.nonfinite_report import NonfiniteReport, OpInput, OpRecord
from fmp.numerics.op_watch import Op
from fmp.numerics.places import FORWARD, Place

MISTAKE = "mistake"
MEANT = "meant"
IGNORED = "ignored"
TURNED = "turned"  # -inf that was meant, and became inf: a mistake if it reaches the result

NOWHERE = Place(FORWARD, None)


@dataclass(frozen=True, eq=False)
class Source:
    """Where an inf or NaN comes from.

    Attributes:
        place: Where the op was called.
        op: The name of the op; empty for what was there before the call.
        leaf: The path of what was there before the call.
        kind: `"nan"`, `"inf"` or `"near max"`.
        result: What came out.
        inputs: What the op took.
        before: The ops that ran before.
        verdict: MISTAKE, MEANT, IGNORED or TURNED.
        after: The sources of what it was made from.
    """

    place: Place
    op: str
    leaf: str
    kind: str
    result: Magnitude
    inputs: tuple[OpInput, ...]
    before: tuple[OpRecord, ...]
    verdict: str = MISTAKE
    after: frozenset[int] = frozenset()


def first_cause(sources: Sequence[Source], numbers: Iterable[int], verdict: str = MISTAKE) -> int | None:
    """Returns which of some sources to report: the earliest one that follows from no other; an op, if there is one.

    Args:
        sources: All sources.
        numbers: Which of them may be reported.
        verdict: With which verdict.
    """
    wrong = [number for number in sorted(numbers) if sources[number].verdict == verdict]
    causes = [number for number in wrong if not _follows(sources, number)] or wrong
    return next((number for number in causes if sources[number].op), causes[0] if causes else None)


def _follows(sources: Sequence[Source], number: int) -> bool:
    """Says whether a source was made from what another one got wrong."""
    pending, seen = list(sources[number].after), {number}
    while pending:
        each = pending.pop()
        if each not in seen:
            seen.add(each)
            if sources[each].verdict == MISTAKE:
                return True
            pending += sources[each].after
    return False


def report(
    source: Source,
    earlier: Sequence[tuple[Source, Op | None]] = (),
    *,
    stopped_by: Op | None = None,
    reached_result: bool,
) -> NonfiniteReport:
    """Makes the report about a source.

    Args:
        source: The source.
        earlier: Those that other ops left out, each with the op, if it is known.
        stopped_by: The op that left the source out, if one did.
        reached_result: Whether it came out.
    """
    place = source.place
    left_out = [
        _where(each.op, each.place) + (f"; by {_where(by.name, by.place)}" if by else "") for each, by in earlier
    ]
    return NonfiniteReport(
        level="error" if reached_result else "warning",
        kind=source.kind,
        op=source.op,
        leaf=source.leaf,
        phase=place.phase,
        node=place.node,
        line=str(place.line or ""),
        source=place.line.source if place.line else "",
        backward_line=str(place.inner or ""),
        backward_source=place.inner.source if place.inner else "",
        module=place.line.module if place.line else "",
        result=source.result,
        inputs=source.inputs,
        begun_with=(),
        left_out=tuple(dict.fromkeys(left_out)),
        left_out_by=_where(stopped_by.name, stopped_by.place) if stopped_by and not reached_result else "",
        ops_before=source.before,
        reached_result=reached_result,
    )


def _where(op: str, place: Place) -> str:
    return f"{op} ({place.phase})" + (f", {place.line}" if place.line else "")
