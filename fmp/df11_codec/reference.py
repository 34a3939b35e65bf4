"""The three loops over all numbers, in numpy: what they mean, and what serves where numba is not installed.

Each works on a run of consecutive chunks, a million numbers or so, and keeps nothing beyond it.
"""

import numpy as np
import numpy.typing as npt

from fmp.df11_codec.huffman import MAX_LENGTH, SYMBOLS
from fmp.df11_codec.layout import CHUNK, WORD_BITS

_ONE, _WORD_BITS = np.uint64(1), np.uint64(WORD_BITS)
_WINDOW = np.uint64(2**MAX_LENGTH - 1)


def histogram(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """Counts the exponents of bf16 numbers: i64[256]."""
    return np.bincount(_exponents(bits), minlength=SYMBOLS)


def pack(
    bits: npt.NDArray[np.uint16],
    lengths: npt.NDArray[np.uint8],
    codes: npt.NDArray[np.uint16],
    start: int,
    stream: npt.NDArray[np.uint64],
    chunk_bits: npt.NDArray[np.uint16],
    sign_mantissa: npt.NDArray[np.uint8],
) -> int:
    """Encodes a run of chunks.

    Args:
        bits: u16[numbers], the bf16 numbers of the run.
        lengths: u8[256], the lengths of the codes.
        codes: u16[256], the codes, as `huffman.codes` returns them.
        start: The position in bits at which the run starts.
        stream: The stream of all runs. The words after that in which the run starts are written to it, up to the one
            in which the next run starts.
        chunk_bits: u16[chunks], filled with the lengths of this run's chunks.
        sign_mantissa: u8[numbers], filled with this run's signs and mantissas.

    Returns:
        The word in which the run starts, with the bits of this run only. The run before writes that word, perhaps at
        the same time, so that the caller must put the two together.
    """
    exponents = _exponents(bits)
    sizes = lengths[exponents].astype(np.int64)
    chunk_bits[:] = np.add.reduceat(sizes, np.arange(0, len(bits), CHUNK))
    sign_mantissa[:] = (bits >> 8 & 0x80) | (bits & 0x7F)

    ends = start + np.cumsum(sizes)
    positions = ends - sizes
    values = codes[exponents].astype(np.uint64)
    first_word = start // WORD_BITS
    words = positions // WORD_BITS - first_word
    shifts = (positions % WORD_BITS).astype(np.uint64)
    run = np.zeros(int(ends[-1]) // WORD_BITS - first_word + 1, np.uint64)
    # All codes that begin in one word are next to each other, and at most one of them goes on into the next word.
    begins = np.flatnonzero(np.diff(words, prepend=-1))
    run[words[begins]] = np.bitwise_or.reduceat(values << shifts, begins)
    spills = np.flatnonzero(ends > (words + first_word + 1) * WORD_BITS)
    run[words[spills] + 1] |= values[spills] >> (_WORD_BITS - shifts[spills])
    stream[first_word + 1 : first_word + len(run)] = run[1:]
    return int(run[0])


def unpack(
    stream: npt.NDArray[np.uint64],
    starts: npt.NDArray[np.int64],
    chunk_bits: npt.NDArray[np.uint16],
    table: npt.NDArray[np.uint16],
    sign_mantissa: npt.NDArray[np.uint8],
    bits: npt.NDArray[np.uint16],
) -> int:
    """Decodes a run of chunks, all of them in lock step.

    Args:
        stream: The stream of all runs, at least two words. No other word is read, whatever it holds.
        starts: i64[chunks], the position in bits at which each chunk of this run starts.
        chunk_bits: u16[chunks], the length of each chunk.
        table: u16[4096], as `huffman.decode_table` returns it.
        sign_mantissa: u8[numbers], signs and mantissas of this run.
        bits: u16[numbers], filled with the bf16 numbers.

    Returns:
        The index of the first chunk in which the codes do not have the length that it should have; -1 if there is none.
    """
    chunks, rest = len(starts), len(bits) - CHUNK * (len(starts) - 1)
    last_pair = np.uint64(len(stream) - 2)
    positions = starts.astype(np.uint64)
    exponents = np.zeros((CHUNK, chunks), np.uint16)
    for index in range(min(CHUNK, len(bits))):
        # The last chunk of a tensor may be a short one.
        live = positions if index < rest else positions[:-1]
        words = np.minimum(live // _WORD_BITS, last_pair)
        shifts = live % _WORD_BITS
        # Shifted twice, since a shift by all 64 bits is not defined.
        following = stream[words + _ONE] << _ONE << (_WORD_BITS - _ONE - shifts)
        entries = table[(stream[words] >> shifts | following) & _WINDOW]
        live += entries >> 8
        exponents[index, : len(entries)] = entries & 0xFF
    bits[:] = exponents.T.reshape(-1)[: len(bits)] << 7
    bits |= (sign_mantissa & np.uint16(0x80)) << 8 | (sign_mantissa & np.uint16(0x7F))
    damaged = np.flatnonzero(positions != starts.astype(np.uint64) + chunk_bits)
    return int(damaged[0]) if damaged.size else -1


def _exponents(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.intp]:
    return (bits >> 7 & 0xFF).astype(np.intp)
