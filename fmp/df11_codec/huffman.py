"""Huffman codes of at most 12 bits for the 256 exponents of bf16, and the table that decodes them with one look-up.

    counts i64[256] -> lengths u8[256] -> codes u16[256] (to write) and table u16[4096] (to read)

The lengths alone are kept; codes and table follow from them. 12 bits cost 0.005 bits a weight more than codes of any
length, and make the table small enough (8 KiB) for a first-level cache, or for the shared memory of a GPU.
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_LENGTH = 12
SYMBOLS = 256

# Each number of 12 bits, turned around.
_REVERSED = np.zeros(2**MAX_LENGTH, np.uint16)
for _bit in range(MAX_LENGTH):
    _REVERSED |= ((np.arange(2**MAX_LENGTH) >> _bit & 1) << MAX_LENGTH - 1 - _bit).astype(np.uint16)


def code_lengths(counts: npt.NDArray[np.int64] | Sequence[int], *, limit: int = MAX_LENGTH) -> npt.NDArray[np.uint8]:
    """Finds the best code lengths of at most `limit` bits, by package-merge.

    A symbol of length L is a coin of value 2**-L for each L up to `limit`, and each of these coins costs the symbol's
    count. The cheapest set of coins that is worth `len(symbols) - 1` is found from the smallest coins up:

        level 1:     the coins worth 2**-limit, by cost
        level i + 1: the coins worth twice as much, and the pairs of neighbors of level i, by cost
        last level:  take the first 2 * len(symbols) - 2; a pair stands for two entries one level down

    The length of a symbol is the number of its coins that are taken. Equal costs are ordered by symbol, coins before
    pairs, so that the lengths are the same everywhere.

    Args:
        counts: How often each symbol occurs; i64[256] for exponents. Any number of symbols up to `2**limit`.
        limit: The length that no code may exceed.

    Returns:
        u8 of the shape of `counts`: the length of each symbol's code, 0 for a symbol that does not occur. A symbol
        that is the only one has length 1.

    Raises:
        ValueError: If no symbol occurs, or more than `limit` bits can tell apart.

    Example:
        >>> code_lengths([5, 0, 1, 1, 2]).tolist()
        [1, 0, 3, 3, 2]
        >>> code_lengths([5, 0, 1, 1, 2], limit=2).tolist()
        [2, 0, 2, 2, 2]

    Source: Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", JACM 37 (1990).
    """
    costs = [int(count) for count in counts]
    symbols = sorted((symbol for symbol, cost in enumerate(costs) if cost), key=lambda symbol: (costs[symbol], symbol))
    if not 0 < len(symbols) <= 2**limit:
        raise ValueError(f"counts has {len(symbols)} symbols that occur; codes of {limit} bits are for 1 to {2**limit}")
    lengths = np.zeros(len(costs), np.uint8)
    if len(symbols) == 1:
        lengths[symbols] = 1
        return lengths

    coins = [(costs[symbol], False) for symbol in symbols]
    levels = [coins]
    for _ in range(limit - 1):
        below = [cost for cost, _ in levels[-1]]
        pairs = [(first + second, True) for first, second in zip(below[::2], below[1::2], strict=False)]
        levels.append(sorted(coins + pairs))

    taken = 2 * len(symbols) - 2
    for level in reversed(levels):
        pairs_taken = sum(is_pair for _, is_pair in level[:taken])
        lengths[symbols[: taken - pairs_taken]] += 1
        taken = 2 * pairs_taken
    return lengths


def codes(lengths: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Numbers the codes in the canonical way: by length, then by symbol, each one more than the code before it.

    Args:
        lengths: u8[256], as `code_lengths` returns them.

    Returns:
        u16[256]: the codes, with the bit that is written first lowest. (As in Deflate, RFC 1951: the numbers count up
        in the other order of bits, and are then turned around.)

    Example:
        >>> [f"{code:0{length}b}" for code, length in zip(codes(np.array([1, 2, 3, 3], np.uint8)), [1, 2, 3, 3])]
        ['0', '01', '011', '111']
    """
    symbols, starts = _places(lengths)
    found = np.zeros(len(lengths), np.uint16)
    found[symbols] = _REVERSED[starts]
    return found


def decode_table(lengths: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Makes the table that maps the next 12 bits of a stream to the symbol whose code they begin with.

    Args:
        lengths: u8[256], which `check_lengths` accepts.

    Returns:
        u16[4096]: `length << 8 | symbol` for each number whose lowest bit comes first in the stream. Every entry is
        set. Of a code with one symbol, half of the entries stand for nothing; their length is 0. It cannot be written
        to, as the next ones who ask get the same.
    """
    return _table(lengths.tobytes())


def check_lengths(lengths: npt.NDArray[np.uint8]) -> None:
    """Raises unless lengths are those of a complete code: one that gives every sequence of bits a meaning.

    Raises:
        ValueError: If a length is above 12, or the sum of 2**-length is not 1. A single symbol has length 1.
    """
    used = lengths[lengths > 0].astype(np.int64)
    if len(lengths) != SYMBOLS or used.size == 0 or used.max() > MAX_LENGTH:
        raise ValueError(f"a code has {SYMBOLS} lengths of at most {MAX_LENGTH}, got {lengths.tolist()}")
    if used.tolist() != [1] and np.sum(1 << (MAX_LENGTH - used)) != 1 << MAX_LENGTH:
        raise ValueError(f"the code is not complete: its lengths are {sorted(used.tolist())}")


@functools.lru_cache(maxsize=256)
def _table(lengths: bytes) -> npt.NDArray[np.uint16]:
    # What is decoded, for each block of a model and again for its gradient, has codes that were met before.
    known = np.frombuffer(lengths, np.uint8)
    symbols, _ = _places(known)
    sizes = known[symbols]
    entries = np.repeat(sizes.astype(np.uint16) << 8 | symbols.astype(np.uint16), 1 << MAX_LENGTH - sizes.astype(int))
    table = np.zeros(2**MAX_LENGTH, np.uint16)
    table[_REVERSED[: len(entries)]] = entries
    table.flags.writeable = False
    return table


def _places(lengths: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Returns the symbols in the order of their codes, and each code as the highest of 12 bits, the others 0."""
    symbols = np.argsort(lengths, kind="stable")
    symbols = symbols[lengths[symbols] > 0]
    ends = np.cumsum(1 << MAX_LENGTH - lengths[symbols].astype(np.int64))
    return symbols, np.concatenate([np.zeros(1, np.int64), ends[:-1]])
