"""The prefix code of the published DFloat11 format, and the lookup tables that its readers walk.

The construction is fixed down to the last tie, so that equal weights give equal files, whoever writes them.
"""

import dataclasses
import heapq

import numpy as np
import numpy.typing as npt

# An entry of the tables is a symbol if it is below this, and 256 minus the number of a row otherwise.
FIRST_POINTER = 240
MAX_LENGTH = 32
MAX_ROWS = 257 - FIRST_POINTER

# Ends a stream; comes before every exponent where counts are equal.
_EOF = -1

Leaf = tuple[int, int, int]
"""A symbol, the length of its code, the code."""


@dataclasses.dataclass(frozen=True)
class Code:
    """A prefix code for exponents, with one code more that ends a stream.

    Attributes:
        lengths: u8[256], the bits of each exponent's code, 0 for one that does not occur.
        codes: u32[256], the codes, right-justified.
        end: Length and value of the code that fills up the last byte.
        luts: u8[rows + 1, 256], the lookup tables and, last, `lengths`.
    """

    lengths: npt.NDArray[np.uint8]
    codes: npt.NDArray[np.uint32]
    end: tuple[int, int]
    luts: npt.NDArray[np.uint8]


def build_code(counts: npt.NDArray[np.int64]) -> Code:
    """Builds the published code for given counts.

    It is a Huffman code over the exponents and an end symbol of count 1. Of nodes with equal counts, the one with the
    smaller first leaf goes first. A code of more than 32 bits is avoided by rounding the counts of the rarest exponents
    to 1, two of them, three, and so on; where counts tie, numpy's argpartition picks.

    The published encoder fails, or writes tables in which a walk need not end, where nothing stands before the end
    symbol's place in them. There, and only there, this one exchanges the end symbol's code with its neighbor's, which
    has the same length.

    Args:
        counts: i64[256], how often each exponent occurs; at least one is not 0.

    Raises:
        ValueError: If an exponent of 240 or more occurs, or the code needs more tables than the format can address.
    """
    present = {int(symbol): int(counts[symbol]) for symbol in np.flatnonzero(counts)}
    if max(present) >= FIRST_POINTER:
        raise ValueError(
            f"it has values with the biased exponent {max(present)}; the format holds finite values below 2**113 only"
        )
    leaves = _limited(present)
    try:
        tables = _tables(leaves)
    except _NothingBeforeEndError:
        leaves = _end_exchanged(leaves)
        tables = _tables(leaves)

    lengths, codes, end = np.zeros(256, np.uint8), np.zeros(256, np.uint32), (0, 0)
    for symbol, length, code in leaves:
        if symbol == _EOF:
            end = length, code
        else:
            lengths[symbol], codes[symbol] = length, code
    return Code(lengths, codes, end, np.concatenate([tables, lengths[None]]))


class _NothingBeforeEndError(Exception):
    """The end symbol's place in the tables cannot be filled with what stands before it."""


def _limited(counts: dict[int, int]) -> list[Leaf]:
    leaves = _huffman(counts)
    symbols, frequencies = np.array(list(counts)), np.array(list(counts.values()))
    rare = 2
    while max(length for _, length, _ in leaves) > MAX_LENGTH:
        rarest = symbols[np.argpartition(frequencies, rare)[:rare]]
        leaves = _huffman(counts | dict.fromkeys(rarest.tolist(), 1))
        rare += 1
    return leaves


def _huffman(counts: dict[int, int]) -> list[Leaf]:
    """Returns the leaves in the order of their codes, as left-justified numbers."""
    nodes = [(count, symbol, [(symbol, 0, 0)]) for symbol, count in ({_EOF: 1} | counts).items()]
    heapq.heapify(nodes)
    while len(nodes) > 1:
        count, first, zeros = heapq.heappop(nodes)
        other, _, ones = heapq.heappop(nodes)
        leaves = [(symbol, length + 1, code) for symbol, length, code in zeros]
        leaves += [(symbol, length + 1, code | 1 << length) for symbol, length, code in ones]
        heapq.heappush(nodes, (count + other, first, leaves))
    return nodes[0][2]


def _tables(leaves: list[Leaf]) -> npt.NDArray[np.uint8]:
    prefixes = sorted({_prefix(leaf) for leaf in leaves})
    if len(prefixes) > MAX_ROWS:
        raise ValueError(f"its code needs {len(prefixes)} lookup tables, and the format has room for {MAX_ROWS}")
    row_of = {prefix: row for row, prefix in enumerate(prefixes)}

    tables = np.full((len(prefixes), 256), -1, np.int64)
    for depth, value in prefixes[1:]:
        tables[row_of[depth - 1, value >> 8], value & 255] = 256 - row_of[depth, value]
    hole = None
    for symbol, length, code in leaves:
        depth, value = _prefix((symbol, length, code))
        free = 8 * (depth + 1) - length
        first = (code << free) & 255
        if symbol == _EOF:
            hole = row_of[depth, value], first, first + (1 << free)
        else:
            tables[row_of[depth, value], first : first + (1 << free)] = symbol
    assert hole is not None

    row, first, last = hole
    flat = tables.reshape(-1)
    left = flat[256 * row + first - 1] if row or first else -1
    # A pointer to the row itself, met at its beginning, would be followed forever.
    if left < 0 or (first == 0 and left == 256 - row):
        raise _NothingBeforeEndError
    tables[row, first:last] = left
    return tables.astype(np.uint8)


def _prefix(leaf: Leaf) -> tuple[int, int]:
    """Returns the whole bytes before a code's last one: how many, and their value."""
    _, length, code = leaf
    depth = (length - 1) // 8
    return depth, code >> (length - 8 * depth)


def _end_exchanged(leaves: list[Leaf]) -> list[Leaf]:
    # The end symbol is rarest and first, so its neighbor is always a leaf, the next one.
    place = next(index for index, leaf in enumerate(leaves) if leaf[0] == _EOF)
    (_, length, code), (symbol, _, other) = leaves[place : place + 2]
    return [*leaves[:place], (symbol, length, code), (_EOF, length, other), *leaves[place + 2 :]]
