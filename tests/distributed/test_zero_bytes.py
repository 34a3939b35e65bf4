"""What steps send and keep: the counter against collectives of known size, and steps against ZeRO's arithmetic."""

import pytest
from hypothesis import given, strategies as st

from tests.bench.zero_bytes import Leaf, least_sent, least_state, measure
from tests.distributed import traffic_cases as cases
from tests.distributed.processes import run

LEAVES = st.lists(st.builds(Leaf, st.integers(1, 2**40), st.just(4), st.just(True)), min_size=1, max_size=4)


def test_the_arithmetic_of_mixed_precision() -> None:
    half = [Leaf(1000, 2, True)]
    assert [least_sent(half, zero, 4) for zero in (0, 1, 3)] == [6000, 4500, 6000]
    assert [least_state(half, zero, 4) for zero in (0, 1, 3)] == [14000, 3500, 3500]
    mixed = [*half, Leaf(8, 4, False)]  # in float32, without a master, and gathered once
    assert [least_sent(mixed, zero, 4) - least_sent(half, zero, 4) for zero in (0, 1, 3)] == [48, 48, 48]
    assert least_state(mixed, 0, 4) - least_state(half, 0, 4) == 8 * 12


@given(LEAVES, st.integers(1, 64))
def test_in_one_dtype_stage_one_sends_what_replication_does_and_stage_three_half_as_much_again(
    leaves: list[Leaf], ranks: int
) -> None:
    count = sum(leaf.count for leaf in leaves)
    replicated = least_sent(leaves, 0, ranks)
    assert replicated == pytest.approx(4 * 2 * count * (1 - 1 / ranks))
    assert least_sent(leaves, 1, ranks) == replicated
    assert least_sent(leaves, 3, ranks) == pytest.approx(1.5 * replicated)


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_of_known_size(ranks: int) -> None:
    words = 4 * cases.COUNT
    for found in run(ranks, cases.known):
        counted = {name: count for name, (count, _) in found.items()}
        assert counted == {
            "all-gather": (words + cases.COUNT + 1) * (ranks - 1),
            "reduce-scatter": 2 * words * (ranks - 1) // ranks,
            "all-reduce": 2 * words * (ranks - 1) // ranks,
        }
        for name in ("all-gather", "all-reduce"):
            count, sent = found[name]
            assert count <= sent <= 1.01 * count
        # gloo makes of a reduce-scatter an all-reduce.
        count, sent = found["reduce-scatter"]
        assert count <= sent <= 2.01 * count


def test_a_collective_of_unknown_size_is_not_left_out() -> None:
    assert run(1, cases.uncounted) == ["nobody has said how many bytes _c10d_functional::broadcast sends"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_step_sends_and_keeps_what_zero_asks_for(zero: int, ranks: int) -> None:
    for found in run(ranks, measure, zero):
        assert found.least_sent <= found.collectives <= 1.01 * found.least_sent
        assert found.state <= 1.01 * found.least_state
        # Nothing goes past the counter, except that gloo sends gradients twice in a reduce-scatter.
        twice = 0 if zero == 0 else 4 * (ranks - 1) / ranks
        assert found.collectives <= found.sockets <= 1.01 * (found.collectives + twice)
