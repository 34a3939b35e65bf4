"""What `loops` does, with numpy: the same results, for machines without numba and for groups too small to compile for.

Encoding takes a run of weights at a time, so that its temporary arrays stay in a cache. Decoding takes one step in all
chunks of a run at once: each chunk's first code is known from the gaps, and the next one from its length.
"""

import numpy as np
import numpy.typing as npt

from fmp.df11_codec.published.loops import BLOCK, INVALID_CODE, WRONG_GAP, WRONG_POSITION
from fmp.df11_codec.published.tables import walk

_RUN = 1 << 16
_CHUNKS = 1 << 13


def count(bits: npt.NDArray[np.uint16], counts: npt.NDArray[np.int64]) -> None:
    """Adds the number of times that each exponent occurs, as `loops.count` does."""
    for start in range(0, len(bits), _RUN):
        counts += np.bincount((bits[start : start + _RUN] >> 7) & 255, minlength=256)


def encode(
    bits: npt.NDArray[np.uint16],
    lengths: npt.NDArray[np.uint8],
    codes: npt.NDArray[np.uint32],
    words: npt.NDArray[np.uint64],
    gaps: npt.NDArray[np.uint8],
    positions: npt.NDArray[np.uint32],
    sign_mantissa: npt.NDArray[np.uint8],
) -> int:
    """Writes the codes one after the other, and where they start, as `loops.encode` does."""
    end = 0
    for start in range(0, len(bits), _RUN):
        run = bits[start : start + _RUN]
        sign_mantissa[start : start + _RUN] = ((run >> 8) & 128) | (run & 127)
        exponents = (run >> 7) & 255
        sizes = lengths[exponents].astype(np.int64)
        stops = np.cumsum(sizes)
        stops += end
        starts = stops - sizes
        _write(words, starts, stops, codes[exponents].astype(np.uint64))

        # The end of the run counts as a start: of the next one's first code, or of what fills up the last byte.
        starts = np.append(starts, stops[-1])
        chunks = starts >> 6
        is_first = np.diff(chunks, prepend=end >> 6 if start else 0) > 0
        chunks = chunks[is_first]
        gaps[chunks] = starts[is_first] & 63
        begins_block = chunks % BLOCK == 0
        positions[chunks[begins_block] // BLOCK] = start + np.flatnonzero(is_first)[begins_block]
        end = int(stops[-1])
    return end


def _write(
    words: npt.NDArray[np.uint64],
    starts: npt.NDArray[np.int64],
    stops: npt.NDArray[np.int64],
    codes: npt.NDArray[np.uint64],
) -> None:
    """Puts each code at its place, where nothing is yet."""
    places = starts >> 6
    room = 64 - (stops - (places << 6))
    split = np.flatnonzero(room < 0)
    tails = codes[split] << (64 + room[split]).astype(np.uint64)
    heads = codes << np.maximum(room, 0).astype(np.uint64)
    heads[split] = codes[split] >> (-room[split]).astype(np.uint64)
    # All codes of a word become one number, and at most one of them goes on in the next word.
    first = np.flatnonzero(np.diff(places, prepend=-1))
    words[places[first]] |= np.bitwise_or.reduceat(heads, first)
    words[places[split] + 1] |= tails


def decode(
    words: npt.NDArray[np.uint64],
    gaps: npt.NDArray[np.uint8],
    positions: npt.NDArray[np.int64],
    table: npt.NDArray[np.uint16],
    luts: npt.NDArray[np.uint8],
    sign_mantissa: npt.NDArray[np.uint8],
    bits: npt.NDArray[np.uint16],
) -> tuple[int, int]:
    """Reads the codes, and compares where they start with gaps and positions, as `loops.decode` does."""
    done, bit, n = 0, 0, len(bits)
    for start in range(0, len(gaps), _CHUNKS):
        if done == n:
            break
        chunks = np.arange(start, min(start + _CHUNKS, len(gaps)))
        symbols, sizes = _steps(words, chunks, gaps[chunks], table, luts)

        # Behind the last code, a walk finds whatever the end of the stream looks like.
        used = np.minimum(np.cumsum((sizes >= 0).sum(0)), n - done)
        counts = np.diff(used, prepend=0)
        real = np.arange(len(sizes))[:, None] < counts
        if (sizes[real] == 0).any():
            return INVALID_CODE, 64 * int(chunks[np.argwhere((sizes == 0) & real)[:, 1].min()])

        begins = done + used - counts
        here = counts > 0
        ends = 64 * chunks + gaps[chunks] + np.where(real, sizes, 0).sum(0)
        expected = np.append(bit, ends[:-1])
        wrong = here & (64 * chunks + gaps[chunks] != expected)
        if wrong.any():
            return WRONG_GAP, int(expected[np.argmax(wrong)])
        wrong = here & (chunks % BLOCK == 0) & (positions[chunks // BLOCK] != begins)
        if wrong.any():
            return WRONG_POSITION, int(expected[np.argmax(wrong)])

        decoded = slice(done, done + int(used[-1]))
        rest = sign_mantissa[decoded].astype(np.uint16)
        # Transposed, a chunk's symbols follow each other.
        exponents = symbols.T[real.T].astype(np.uint16)
        bits[decoded] = ((rest & 128) << 8) | (exponents << 7) | (rest & 127)
        done, bit = decoded.stop, int(ends[here][-1]) if here.any() else bit
    return (0, bit) if done == n else (WRONG_POSITION, bit)


def _steps(
    words: npt.NDArray[np.uint64],
    chunks: npt.NDArray[np.int64],
    gaps: npt.NDArray[np.uint8],
    table: npt.NDArray[np.uint16],
    luts: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int8]]:
    """Walks through all codes that start in each of some chunks.

    Returns:
        Symbols and lengths, [steps, chunks]. A length is 0 where no code was found, and -1 behind a chunk's last code.
    """
    here, beyond = words[chunks], words[chunks + 1] >> np.uint64(1)
    offsets = gaps.astype(np.int64)
    symbols = np.zeros((64, len(chunks)), np.uint8)
    sizes = np.full((64, len(chunks)), -1, np.int8)
    step = 0
    active = np.flatnonzero(offsets < 64)
    while len(active):
        at = offsets[active].astype(np.uint64)
        window = (here[active] << at) | (beyond[active] >> (np.uint64(63) - at))
        entries = table[window >> np.uint64(52)]
        symbol, size = (entries & 255).astype(np.uint8), (entries >> 8).astype(np.uint8)
        longer = np.flatnonzero(entries == 0)
        symbol[longer], size[longer] = walk(luts, window[longer])
        symbols[step, active], sizes[step, active] = symbol, size
        offsets[active] += np.where(size, size, 64)
        active = active[offsets[active] < 64]
        step += 1
    return symbols[:step], sizes[:step]
