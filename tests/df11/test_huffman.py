"""fmp.df11_codec.huffman: the best lengths under a limit, canonical codes, and a table that agrees with both."""

import heapq
from itertools import product
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from fmp.df11_codec.huffman import MAX_LENGTH, SYMBOLS, check_lengths, code_lengths, codes, decode_table

COUNTS = st.lists(st.integers(0, 2**40), min_size=SYMBOLS, max_size=SYMBOLS).filter(any)
FEW = st.dictionaries(st.integers(0, SYMBOLS - 1), st.integers(1, 2**40), min_size=1, max_size=20)


def spread(few: dict[int, int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    counts = np.zeros(SYMBOLS, np.int64)
    counts[list(few)] = list(few.values())
    return counts


def cost(counts: Any, lengths: Any) -> int:
    return sum(int(count) * int(length) for count, length in zip(counts, lengths, strict=True))


def best_cost(counts: list[int], limit: int) -> int:
    """Tries all lengths for which a prefix code exists (Kraft)."""
    every = product(range(1, limit + 1), repeat=len(counts))
    return min(
        cost(counts, lengths) for lengths in every if sum(2 ** (limit - length) for length in lengths) <= 2**limit
    )


def huffman_cost(counts: list[int]) -> int:
    """Huffman's own construction, of any depth: each merge puts one more bit before all numbers below it."""
    heap, total = list(counts), 0
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


@hypothesis.given(st.lists(st.integers(1, 30), min_size=2, max_size=6), st.integers(3, 4))
def test_no_lengths_under_the_limit_are_cheaper(counts: list[int], limit: int) -> None:
    lengths = code_lengths(counts, limit=limit)
    assert lengths.max() <= limit
    assert sum(2.0 ** -int(length) for length in lengths) == 1
    assert cost(counts, lengths) == best_cost(counts, limit)


@hypothesis.given(st.lists(st.integers(1, 2**40), min_size=2, max_size=40))
def test_without_a_limit_that_binds_the_cost_is_huffmans(counts: list[int]) -> None:
    assert cost(counts, code_lengths(counts, limit=len(counts))) == huffman_cost(counts)


def test_fibonacci_counts_meet_the_limit() -> None:
    fibonacci = [1, 1]
    while len(fibonacci) < 40:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    counts = spread(dict(enumerate(fibonacci)))
    assert code_lengths(counts, limit=39).max() == 39
    limited = code_lengths(counts)
    assert limited.max() == MAX_LENGTH
    check_lengths(limited)


@hypothesis.given(st.one_of(COUNTS, FEW.map(spread)))
def test_lengths_are_complete_and_rarer_symbols_are_no_shorter(counts: Any) -> None:
    lengths = code_lengths(counts)
    check_lengths(lengths)
    assert ((lengths > 0) == (np.asarray(counts) > 0)).all()
    used = [(int(count), -int(length)) for count, length in zip(counts, lengths, strict=True) if count]
    assert all(first[1] <= second[1] for first in used for second in used if first[0] < second[0])


def test_equal_counts_are_ordered_by_symbol() -> None:
    assert code_lengths([1, 1, 1, 1, 1]).tolist() == [3, 3, 2, 2, 2]
    assert code_lengths([7] * SYMBOLS).tolist() == [8] * SYMBOLS
    assert code_lengths([1, 1, 1, 2]).tolist() == [2, 2, 2, 2]  # [3, 3, 2, 1] costs the same


def test_a_single_symbol_has_one_bit() -> None:
    lengths = code_lengths(spread({200: 9}))
    assert lengths.nonzero()[0].tolist() == [200]
    assert lengths[200] == 1
    table = decode_table(lengths)
    assert (table[0::2] == 1 << 8 | 200).all()
    assert (table[1::2] == 0).all()


@pytest.mark.parametrize("counts", [[0] * SYMBOLS, [], [1] * 9])
def test_what_has_no_code_is_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="symbols that occur"):
        code_lengths(counts, limit=3)


@hypothesis.given(st.one_of(COUNTS, FEW.map(spread)))
def test_each_window_of_the_table_begins_with_its_code(counts: Any) -> None:
    lengths = code_lengths(counts)
    found, table = codes(lengths), decode_table(lengths)
    assert table.dtype == np.uint16
    assert table.shape == (2**MAX_LENGTH,)
    if np.count_nonzero(lengths) == 1:
        return
    for window, entry in enumerate(table):
        symbol, length = int(entry) & 0xFF, int(entry) >> 8
        assert length == lengths[symbol] > 0
        assert window & ((1 << length) - 1) == found[symbol]


def test_codes_count_up_by_length_and_symbol() -> None:
    lengths = np.array([3, 1, 0, 3, 2], np.uint8)
    found = codes(lengths)
    written = [f"{found[symbol]:0{lengths[symbol]}b}"[::-1] for symbol in (1, 4, 0, 3)]
    assert written == ["0", "10", "110", "111"]


@pytest.mark.parametrize(
    "few", [{}, {3: 2}, {1: 1, 2: 2}, {1: 1, 2: 1, 3: 1}, {1: 13, 2: 1}, {1: 1, 2: 255}, {1: 1, 2: 2, 3: 3, 4: 4}]
)
def test_incomplete_and_impossible_lengths_are_refused(few: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="code"):
        check_lengths(spread(few).astype(np.uint8))


def test_lengths_of_another_alphabet_are_refused() -> None:
    with pytest.raises(ValueError, match="256 lengths"):
        check_lengths(np.ones(2, np.uint8))
