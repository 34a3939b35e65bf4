"""The three loops over all numbers, compiled by numba: the results of `fmp.df11_codec.reference`, one core per run.

The loops release the interpreter's lock, so that threads can work on several runs at once. To decode, one look-up
yields up to four exponents:

    entry of the wide table    bits << 40 | count << 32 | four exponents, the first one lowest
    per look-up                store all four bytes, move on by count; take the bits off the window
    per window of 64 bits      five look-ups of at most 12 bits

(One exponent a look-up, four or eight chunks at a time, is half as fast; several chunks at a time with the wide table
too, as the compiler then does not make one store of four bytes.)
"""

import numpy as np
import numpy.typing as npt

from fmp.df11_codec.acceleration import compiled
from fmp.df11_codec.layout import CHUNK

# In numba, a signed and an unsigned number of 64 bits make a float.
_U = np.uint64
_ROUND, _WORD_SHIFT = _U(63), _U(6)
_ONE, _CODE, _LENGTH_SHIFT = _U(1), _U(0xFFFF), _U(16)
_WINDOW = _U(0xFFF)
_BYTE, _COUNT_SHIFT, _BITS_SHIFT = _U(0xFF), _U(32), _U(40)
_MAX_LENGTH, _PER_LOOKUP, _LOOKUPS = 12, 4, 5
_PER_WINDOW = _U(_PER_LOOKUP * _LOOKUPS)


def pack(
    bits: npt.NDArray[np.uint16],
    lengths: npt.NDArray[np.uint8],
    codes: npt.NDArray[np.uint16],
    start: int,
    stream: npt.NDArray[np.uint64],
    chunk_bits: npt.NDArray[np.uint16],
    sign_mantissa: npt.NDArray[np.uint8],
) -> int:
    """Encodes a run of chunks, as `reference.pack` does."""
    codebook = lengths.astype(np.uint32) << 16 | codes
    return int(_pack(bits, codebook, start, stream, chunk_bits, sign_mantissa, CHUNK))


def unpack(
    stream: npt.NDArray[np.uint64],
    starts: npt.NDArray[np.int64],
    chunk_bits: npt.NDArray[np.uint16],
    table: npt.NDArray[np.uint16],
    sign_mantissa: npt.NDArray[np.uint8],
    bits: npt.NDArray[np.uint16],
) -> int:
    """Decodes a run of chunks, as `reference.unpack` does."""
    return int(_unpack(stream, starts, chunk_bits, table, _wide_table(table), sign_mantissa, bits, CHUNK))


@compiled
def histogram(bits):
    """Counts the exponents of bf16 numbers, as `reference.histogram` does."""
    # Four counts in turn: adding to what was just added to would have to wait.
    counts = np.zeros((4, 256), np.int64)
    whole = len(bits) // 4 * 4
    for i in range(0, whole, 4):
        for part in range(4):
            counts[part, bits[i + part] >> 7 & 0xFF] += 1
    for i in range(whole, len(bits)):
        counts[0, bits[i] >> 7 & 0xFF] += 1
    return counts.sum(axis=0)


@compiled
def _pack(bits, codebook, start, stream, chunk_bits, sign_mantissa, chunk):
    first = _U(start) >> _WORD_SHIFT
    word, used, open_word, head = first, _U(start) & _ROUND, _U(0), _U(0)
    for c in range(len(chunk_bits)):
        low, high = c * chunk, min((c + 1) * chunk, len(bits))
        begin = (word << _WORD_SHIFT) + used
        i = low
        while i < high:
            # Four codes have at most 48 bits, and are put into the stream as one.
            value, size = _U(0), _U(0)
            if i + 4 <= high:
                for part in range(4):
                    entry = _U(codebook[bits[i + part] >> 7 & 0xFF])
                    value |= (entry & _CODE) << size
                    size += entry >> _LENGTH_SHIFT
                i += 4
            else:
                entry = _U(codebook[bits[i] >> 7 & 0xFF])
                value, size = entry & _CODE, entry >> _LENGTH_SHIFT
                i += 1
            open_word |= value << used
            if word == first:
                head = open_word
            else:
                stream[word] = open_word
            # What does not fit begins the next word. Shifted twice, since a shift by all 64 bits is not defined.
            rest = (value >> _ONE) >> (_ROUND - used)
            used += size
            full = used >> _WORD_SHIFT
            open_word = rest if full else open_word
            word += full
            used &= _ROUND
        chunk_bits[c] = (word << _WORD_SHIFT) + used - begin
        for i in range(low, high):
            sign_mantissa[i] = (bits[i] >> 8 & 0x80) | (bits[i] & 0x7F)
    if word != first:
        stream[word] = open_word
    return head


@compiled
def _wide_table(table):
    wide = np.zeros(len(table), np.uint64)
    for window in range(len(table)):
        used, count, entry = 0, 0, _U(0)
        while count < _PER_LOOKUP:
            length = table[window >> used] >> 8
            if length == 0 or used + length > _MAX_LENGTH:
                break
            entry |= _U(table[window >> used] & 0xFF) << _U(8 * count)
            used += length
            count += 1
        # What no code begins with counts as a number of no bits: decoding goes on, and the length does not come out.
        wide[window] = entry | _U(max(count, 1)) << _COUNT_SHIFT | _U(used) << _BITS_SHIFT
    return wide


@compiled
def _window(stream, position):
    word, shift = min(position >> _WORD_SHIFT, _U(len(stream) - 2)), position & _ROUND
    return stream[word] >> shift | stream[word + _ONE] << _ONE << (_ROUND - shift)


@compiled
def _unpack(stream, starts, chunk_bits, table, wide_table, sign_mantissa, bits, chunk):
    exponents = np.empty(chunk, np.uint8)
    damaged = -1
    for c in range(len(starts)):
        low = c * chunk
        size = min(chunk, len(bits) - low)
        position, count = _U(starts[c]), _U(0)
        while count + _PER_WINDOW <= _U(size):
            window = _window(stream, position)
            for _ in range(_LOOKUPS):
                entry = wide_table[window & _WINDOW]
                for part in range(_PER_LOOKUP):
                    exponents[count + _U(part)] = entry >> _U(8 * part)
                count += entry >> _COUNT_SHIFT & _BYTE
                window >>= entry >> _BITS_SHIFT
                position += entry >> _BITS_SHIFT
        while count < _U(size):
            entry = table[_window(stream, position) & _WINDOW]
            exponents[count] = entry
            count += _ONE
            position += _U(entry >> 8)
        if position != _U(starts[c]) + _U(chunk_bits[c]) and damaged < 0:
            damaged = c
        for i in range(size):
            rest = np.uint16(sign_mantissa[low + i])
            bits[low + i] = (rest & 0x80) << 8 | np.uint16(exponents[i]) << 7 | (rest & 0x7F)
    return damaged
