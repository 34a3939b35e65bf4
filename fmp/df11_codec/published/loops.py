"""The two loops over weights, as numba compiles them; without it, `vectorized` does the same with numpy.

They are plain Python, and run as such, slowly. Numbers that are shifted are u64 throughout, because numba turns a sum
of signed and unsigned ones into a float.
"""

from typing import Any

import numpy as np

Array = Any

BLOCK = 512
"""Chunks of 64 bits in a block."""

INVALID_CODE, WRONG_GAP, WRONG_POSITION = 1, 2, 3
"""What `decode` finds."""


def count(bits: Array, counts: Array) -> None:
    """Adds the number of times that each exponent occurs in u16[n] to i64[256]."""
    for value in bits:
        counts[(value >> 7) & 255] += 1


def encode(
    bits: Array, lengths: Array, codes: Array, words: Array, gaps: Array, positions: Array, sign_mantissa: Array
) -> int:
    """Writes the codes one after the other, and where they start.

    Args:
        bits: u16[n], the weights.
        lengths: u8[256].
        codes: u32[256].
        words: u64[chunks + 1], becomes the stream. It starts as zeros, as do the next two.
        gaps: u8[chunks + 1], becomes the offset of the first code in each chunk, and of the stream's end.
        positions: u32[blocks + 2], becomes the index of the first code in each block; what lies behind the end is kept.
        sign_mantissa: u8[n], becomes the rest of the weights.

    Returns:
        The length of the stream in bits.
    """
    word, used, chunk = np.uint64(0), np.int64(0), np.int64(0)
    for index in range(len(bits)):
        value = bits[index]
        sign_mantissa[index] = ((value >> 8) & 128) | (value & 127)
        exponent = (value >> 7) & 255
        code = np.uint64(codes[exponent])
        room = np.int64(64) - used - np.int64(lengths[exponent])
        if room > 0:
            word |= code << np.uint64(room)
            used = 64 - room
        else:
            words[chunk] = word | (code >> np.uint64(-room))
            word = code << np.uint64(64 + room) if room < 0 else np.uint64(0)
            used = -room
            chunk += 1
            gaps[chunk] = used
            if chunk % BLOCK == 0:
                positions[chunk // BLOCK] = index + 1
    words[chunk] = word
    return int(64 * chunk + used)


def decode(
    words: Array, gaps: Array, positions: Array, table: Array, luts: Array, sign_mantissa: Array, bits: Array
) -> tuple[int, int]:
    """Reads the codes, and compares where they start with what `gaps` and `positions` say.

    Args:
        words: u64[chunks + 1], the stream.
        gaps: u8[chunks].
        positions: i64[blocks + 1], rising from 0 to n.
        table: u16[4096], by the next 12 bits: the length of a code and, in the low byte, its symbol; 0 for others.
        luts: u8[rows + 1, 256], checked.
        sign_mantissa: u8[n].
        bits: u16[n], becomes the weights.

    Returns:
        0 and the length of the stream in bits; or what is wrong, and at which bit.
    """
    rows, bit = len(luts) - 1, np.int64(0)
    for block in range(len(positions) - 1):
        index, stop = np.int64(positions[block]), np.int64(positions[block + 1])
        if index == stop:
            break
        chunk, last = np.int64(block * BLOCK), np.int64(block * BLOCK + BLOCK)
        offset = np.int64(gaps[chunk])
        if offset != bit - 64 * chunk:
            return WRONG_GAP, int(bit)
        while index < stop and chunk < last:
            here, beyond = words[chunk], words[chunk + 1] >> np.uint64(1)
            while offset < 64 and index < stop:
                window = (here << np.uint64(offset)) | (beyond >> np.uint64(63 - offset))
                entry = table[window >> np.uint64(52)]
                if entry == 0:
                    symbol, shift = np.int64(luts[0, window >> np.uint64(56)]), np.int64(48)
                    while symbol >= 240 and shift >= 32:
                        symbol = np.int64(luts[256 - symbol, (window >> np.uint64(shift)) & np.uint64(255)])
                        shift -= 8
                    length = np.int64(luts[rows, symbol])
                    if length == 0:
                        return INVALID_CODE, int(64 * chunk + offset)
                else:
                    symbol, length = np.int64(entry & 255), np.int64(entry >> 8)
                rest = np.int64(sign_mantissa[index])
                bits[index] = ((rest & 128) << 8) | (symbol << 7) | (rest & 127)
                offset += length
                index += 1
            bit = 64 * chunk + offset
            if offset >= 64:
                offset -= 64
                chunk += 1
                if index < stop and chunk < last and gaps[chunk] != offset:
                    return WRONG_GAP, int(bit)
        if index < stop or (block + 2 < len(positions) and index < len(bits) and chunk < last):
            return WRONG_POSITION, int(bit)
    return 0, int(bit)
