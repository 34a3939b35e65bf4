"""The segments that the dynamic program finds, against trying them all in a simulation of both passes."""

from collections.abc import Iterator, Sequence

import hypothesis
import pytest
from hypothesis import strategies

from fmp.rematerialization.segments import Segment, Stage, best_way

few = strategies.integers(0, 12)


@strategies.composite
def chains(draw: strategies.DrawFn, longest: int = 6) -> list[Stage]:
    stages: list[Stage] = []
    given = 0
    for _ in range(draw(strategies.integers(1, longest))):
        output = draw(few)
        stages.append(
            Stage(
                held_input=given,
                saved_input=draw(strategies.sampled_from([0, given])),
                residuals=draw(few),
                saved_output=draw(strategies.sampled_from([0, output])),
                output=output,
                forward=output + draw(few),
                recorded=output + draw(few),
                backward=output + draw(few),
                gradients=draw(strategies.integers(0, 2)),
                tape=draw(few),
                cost=draw(strategies.integers(0, 4)),
            )
        )
        given = output
    return stages


def every_way(start: int, count: int) -> Iterator[tuple[Segment, ...]]:
    if start == count:
        yield ()
        return
    kept = Segment(start, start + 1, False)
    for segment in (kept, *(Segment(start, stop, True) for stop in range(start + 1, count + 1))):
        for rest in every_way(segment.stop, count):
            yield (segment, *rest)


def simulated(stages: Sequence[Stage], segments: Sequence[Segment], create_graph: bool) -> tuple[int, int]:
    """Goes through both passes and notes what is live; returns the peak, and the cost of recomputation."""
    live = peak = cost = 0
    kept: list[int] = []
    for start, stop, recomputed in segments:
        first = stages[start]
        if recomputed:
            kept.append(first.held_input)
            live += first.held_input
            for place in range(start, stop):
                given = stages[place].held_input if place > start else 0
                peak = max(peak, live + given + stages[place].forward)
        else:
            kept.append(first.saved_input + first.residuals)
            peak = max(peak, live + first.held_input + first.recorded)
            live += kept[-1]
    for start, stop, recomputed in reversed(segments):
        before = live
        for place in range(start, stop) if recomputed else ():
            stage = stages[place]
            given, saved = (stage.held_input, stage.saved_input) if place > start else (0, 0)
            peak = max(peak, live + given + stage.recorded + stages[stop - 1].output)
            live += stage.residuals + saved
            cost += stage.cost
        gradients = 0
        for place in reversed(range(start, stop)):
            stage = stages[place]
            peak = max(peak, live + gradients + stage.saved_output + stage.backward)
            gradients += stage.gradients
            live -= stage.residuals + (stage.saved_input if place > start else 0)
        live = before + gradients
        if create_graph:
            live += stages[stop - 1].output if recomputed else stages[start].tape
        else:
            live -= kept.pop()
    return peak, cost


@hypothesis.given(chains(), strategies.booleans(), strategies.integers(0, 100))
def test_best_of_all_ways(stages, create_graph, budget):
    found = [simulated(stages, segments, create_graph) for segments in every_way(0, len(stages))]
    least = min(found)
    best = best_way(stages, create_graph)
    assert (best.peak, best.cost) == least
    assert simulated(stages, best.segments(), create_graph) == least
    within = [cost for peak, cost in found if peak <= budget]
    way = best_way(stages, create_graph, budget)
    assert (way.peak <= budget) == bool(within)
    assert way.cost == min(within, default=least[1])
    assert simulated(stages, way.segments(), create_graph) == (way.peak, way.cost)


def unit(cost: int = 1) -> Stage:
    return Stage(1, 1, 0, 0, 1, 1, 1, 1, 0, 0, cost)


@pytest.mark.parametrize("count", [9, 25, 100])
def test_a_chain_of_equal_stages_needs_the_square_root_of_its_memory(count):
    root = round(count**0.5)
    assert best_way([unit()] * count).peak <= 2 * root + 1
    assert best_way([unit()] * count, budget=count + 2).cost == 0


def test_the_ends_of_the_search():
    chain = [unit(cost) for cost in (5, 1, 3, 4)]
    everything = best_way(chain, budget=10**9)
    assert everything.cost == 0
    assert [segment.recomputed for segment in everything.segments()] == [False] * 4
    too_little = best_way(chain, budget=1)
    assert too_little == best_way(chain)
    assert too_little.peak > 1


@hypothesis.given(chains(longest=30), strategies.booleans())
def test_no_kind_of_even_segments_needs_less(stages, create_graph):
    best = best_way(stages, create_graph)
    count = len(stages)
    for number in range(1, count + 1):
        size = count // number
        last = size * (number - 1)
        split = [Segment(start, start + size, True) for start in range(0, last, size)]
        split += [Segment(place, place + 1, False) for place in range(last, count)]
        assert best.peak <= simulated(stages, split, create_graph)[0]
