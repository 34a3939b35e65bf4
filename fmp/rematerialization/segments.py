"""Where to cut a chain of functions: an exact dynamic program over numbers of bytes.

A chain is cut into segments. A recomputed one keeps its input; a kept one, of one stage, keeps what its backward pass
needs. The forward pass goes from the first segment to the last, the backward pass comes back. While one segment runs,
there is what it needs itself, what the segments before it keep, and what the segments after it have left: nothing, or
the record of their backward passes if these can be differentiated again.

What is kept before a stage adds to every peak after it in the same way. So the best ways to go on from a stage do not
depend on the way there, and are found from the end of the chain to its start. For each segment [i, j):

    peak = max(forward(i, j), kept(i, j) + peak of the rest, backward(i, j) + left by the rest)
    left = left(i, j) + left by the rest
    cost = cost(i, j) + cost of the rest

From each stage, only those ways go on that no other one beats in all three.

References:
    T. Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174, section 4: one level of segments.
    O. Beaumont et al., Optimal checkpointing for heterogeneous chains, arXiv 1911.13214 (rotor): segments in segments,
    which need less memory still, for more recomputation.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_MOST_WAYS = 256


class Stage(NamedTuple):
    """What one stage of a chain needs, in bytes.

    Attributes:
        held_input: Its input, which a recomputation that starts here keeps; 0 for the input of the chain.
        saved_input: Its input, if its backward pass or that of the stage before needs it; else 0.
        residuals: What else its backward pass needs, besides its output.
        saved_output: Its output, if its backward pass needs it; else 0.
        output: Its output, and so the cotangent of it.
        forward: The peak of its forward pass beyond its input, if nothing is kept for a backward pass.
        recorded: The same, if everything is kept.
        backward: The peak of its backward pass beyond its input, residuals and saved output.
        gradients: The gradients of its parameters, which stay.
        tape: What its backward pass leaves besides the gradients, if it is recorded itself.
        cost: What its forward pass costs, in any unit.
    """

    held_input: int
    saved_input: int
    residuals: int
    saved_output: int
    output: int
    forward: int
    recorded: int
    backward: int
    gradients: int
    tape: int
    cost: int


class Segment(NamedTuple):
    """Stages that are recomputed together, or kept.

    Attributes:
        start: The first stage.
        stop: The stage after the last one.
        recomputed: Whether they are recomputed.
    """

    start: int
    stop: int
    recomputed: bool


class Need(NamedTuple):
    """What a segment needs.

    Attributes:
        forward: Its most bytes at once in the forward pass.
        backward: Its most bytes at once in the backward pass, together with the gradients of later parameters.
        kept: What it keeps while later segments run.
        left: What it leaves when its backward pass is over.
        cost: The cost of its recomputation.
    """

    forward: int
    backward: int
    kept: int
    left: int
    cost: int


class Way(NamedTuple):
    """A way to run a chain from some stage on.

    Attributes:
        peak: Its most bytes at once, beyond what is kept before.
        cost: The cost of its recomputation.
        left: What it leaves, beyond what is kept before.
        segment: Its first segment; None at the end of the chain.
        rest: The way to go on from there.
    """

    peak: int
    cost: int
    left: int
    segment: Segment | None = None
    rest: "Way | None" = None

    def segments(self) -> tuple[Segment, ...]:
        """Lists its segments."""
        found: list[Segment] = []
        way: Way | None = self
        while way is not None and way.segment is not None:
            found.append(way.segment)
            way = way.rest
        return tuple(found)


def best_way(stages: Sequence[Stage], create_graph: bool = False, budget: float | None = None) -> Way:
    """Finds the cheapest way to run a chain within a budget of memory, or with the least peak.

    The least peak is always found. So is the least cost, unless more than 256 ways are unbeaten at some stage of a long
    and uneven chain; then only so many go on from there, and the cost is nearly the least.

    Args:
        stages: The stages of the chain.
        create_graph: Whether the backward pass is recorded, as `torch.func.grad` does.
        budget: The most bytes.

    Returns:
        The way. If none is within the budget, one of least peak.

    Example:
        >>> narrow, wide = [Stage(b, b, 0, b, b, b, b, 2 * b, 0, 0, 1) for b in (1, 100)]
        >>> for budget in (None, 450, 550):
        ...     way = best_way([narrow, wide, narrow, wide], budget=budget)
        ...     print(way.peak, way.cost, [segment[:2] for segment in way.segments() if segment.recomputed])
        401 3 [(0, 3)]
        402 2 [(0, 2)]
        502 0 []
    """
    leanest = _ways(stages, create_graph, math.inf, cost_matters=False)[0]
    within = max(leanest.peak, budget or 0)
    # The leanest is among these, unless there were too many ways to go on with.
    cheapest = min(_ways(stages, create_graph, within, cost_matters=True), key=lambda way: way.cost, default=leanest)
    return leanest if cheapest.cost > leanest.cost else cheapest


def _ways(stages: Sequence[Stage], create_graph: bool, within: float, cost_matters: bool) -> list[Way]:
    """Finds the unbeaten ways to run a chain, the least peak first; all costs are the same unless they matter."""
    ways: list[list[Way]] = [[] for _ in stages] + [[Way(0, 0, 0)]]
    for start in reversed(range(len(stages))):
        found = []
        for segment, need in segments_from(stages, start, create_graph):
            for rest in ways[segment.stop]:
                peak = max(need.forward, need.kept + rest.peak, need.backward + rest.left)
                if peak <= within:
                    found.append((peak, need.cost + rest.cost, need.left + rest.left, segment, rest))
        unbeaten = [Way(*way) for way in _unbeaten(found, cost_matters)]
        ways[start] = _thinned(unbeaten) if cost_matters else unbeaten
    return ways[0]


def segments_from(stages: Sequence[Stage], start: int, create_graph: bool) -> Iterator[tuple[Segment, Need]]:
    """Yields each segment that starts at a stage, with what it needs."""
    later = sum(stage.gradients for stage in stages[start + 1 :])
    yield Segment(start, start + 1, recomputed=False), _kept(stages[start], later, create_graph)
    held = live = stages[start].held_input
    forward = recorded = backward = cost = 0
    for place, stage in enumerate(stages[start:], start):
        # What a stage gets is there while it runs, whether or not it is saved.
        given = stage.held_input if place > start else 0
        forward = max(forward, held + given + stage.forward)
        recorded = max(recorded, live + given + stage.recorded)
        live += stage.residuals + (stage.saved_input if place > start else 0)
        backward = max(backward, live + stage.saved_output + stage.backward + later)
        cost += stage.cost
        # The recomputation begins when the cotangent of the output and the gradients of later stages are there.
        again = recorded + stage.output + sum(after.gradients for after in stages[place + 1 :])
        left = held + stage.output if create_graph else 0
        yield Segment(start, place + 1, recomputed=True), Need(forward, max(again, backward), held, left, cost)
        later -= stages[place + 1].gradients if place + 1 < len(stages) else 0


def _kept(stage: Stage, later: int, create_graph: bool) -> Need:
    kept = stage.saved_input + stage.residuals
    backward = kept + stage.saved_output + stage.backward + later
    return Need(stage.held_input + stage.recorded, backward, kept, kept + stage.tape if create_graph else 0, 0)


def _unbeaten(ways: list[Any], cost_matters: bool) -> Iterator[Any]:
    # Of the ways of less or equal peak: costs in rising order, and the least that is left at each cost or a lower one.
    costs: list[int] = []
    lefts: list[int] = []
    for way in sorted(ways, key=lambda way: way[:3]):
        cost, left = way[1] if cost_matters else 0, way[2]
        place = bisect.bisect_right(costs, cost)
        if place > 0 and lefts[place - 1] <= left:
            continue
        end = place
        while end < len(lefts) and lefts[end] >= left:
            end += 1
        costs[place:end], lefts[place:end] = [cost], [left]
        yield way


def _thinned(ways: list[Way]) -> list[Way]:
    if len(ways) <= _MOST_WAYS:
        return ways
    step = (len(ways) - 1) / (_MOST_WAYS - 1)
    return [ways[round(place * step)] for place in range(_MOST_WAYS)]
