"""One group of the published DFloat11 format: the weights of a module, compressed with one code.

    v = sign << 15 | exponent << 7 | mantissa
    sign_mantissa = sign << 7 | mantissa, a byte a weight;    encoded_exponent = the exponents' codes, high bit first

The codes are cut, for the threads of a GPU, into chunks of 64 bits and blocks of 512 chunks. `gaps` holds the offset of
the first code that starts in each chunk, 5 bits each, and `output_positions` the index of the first weight whose code
starts in each block, and at the end the number of weights.
"""

import concurrent.futures
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fmp.df11_codec import acceleration
from fmp.df11_codec.published import loops, vectorized
from fmp.df11_codec.published.code import build_code
from fmp.df11_codec.published.tables import check_tables, one_step_table

T = TypeVar("T")
R = TypeVar("R")

_BLOCK_BYTES = 8 * loops.BLOCK
_GAP_BYTES = loops.BLOCK * 5 // 8
_LARGEST = 2**31 - 1
# Below, compiling the loops takes longer than running them with numpy.
_WORTH_COMPILING = 1 << 20

_PROBLEMS = {
    loops.INVALID_CODE: "no code begins at bit {bit} of encoded_exponent",
    loops.WRONG_GAP: "gaps disagrees with the codes at bit {bit} of encoded_exponent",
    loops.WRONG_POSITION: "output_positions disagrees with the codes at bit {bit} of encoded_exponent",
}


class UnsupportedError(ValueError):
    """The published format cannot hold these weights."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The arrays of a group, as they are stored.

    Attributes:
        luts: u8[rows + 1, 256], the lookup tables and, last, the length of each exponent's code.
        encoded_exponent: u8[bytes].
        sign_mantissa: u8[n].
        output_positions: u8[4 * (blocks + 1)], little-endian 32-bit numbers.
        gaps: u8[320 * blocks].
    """

    luts: npt.NDArray[np.uint8]
    encoded_exponent: npt.NDArray[np.uint8]
    sign_mantissa: npt.NDArray[np.uint8]
    output_positions: npt.NDArray[np.uint8]
    gaps: npt.NDArray[np.uint8]


def encode_group(bits: npt.NDArray[np.uint16], *, compiled: bool | None = None) -> Group:
    """Compresses weights as the published encoder does, byte for byte.

    It differs in one place: `output_positions` always has an entry for each block. The published encoder leaves one out
    where the last code runs over into a block of its own and ends with a byte.

    Args:
        bits: u16[n], bf16 weights as bits.
        compiled: Whether numba compiles the loops. None decides by what is installed, and by the size.

    Raises:
        UnsupportedError: If there are no weights or 2**31 of them, if one is 2**113 or more, infinite or NaN, or if
            the code needs too many tables.
    """
    if not 0 < len(bits) <= _LARGEST:
        raise UnsupportedError(f"it has {len(bits)} weights; the format holds 1 to {_LARGEST}")
    run = _loops(len(bits), compiled)
    counts = np.zeros(256, np.int64)
    run.count(bits, counts)
    try:
        code = build_code(counts)
    except ValueError as error:
        raise UnsupportedError(str(error)) from error

    size = -(-int(counts @ code.lengths.astype(np.int64)) // 8)
    if size > _LARGEST:
        raise UnsupportedError(f"its codes take {size} bytes; the format holds {_LARGEST}")
    blocks = -(-size // _BLOCK_BYTES)
    words = np.zeros(size // 8 + 2, np.uint64)
    gaps = np.zeros(blocks * loops.BLOCK + 1, np.uint8)
    positions = np.full(blocks + 2, len(bits), np.uint32)
    positions[0] = 0
    sign_mantissa = np.empty(len(bits), np.uint8)
    end = int(run.encode(bits, code.lengths, code.codes, words, gaps, positions, sign_mantissa))

    stream = words.byteswap().view(np.uint8)[:size].copy()
    if filling := -end % 8:
        length, value = code.end
        stream[-1] |= value >> length - filling if length >= filling else value << filling - length
    elif end - int(code.lengths[(bits[-1] >> 7) & 255]) < end // 64 * 64:
        gaps[end // 64] = 0  # nothing starts in this chunk, and the format records nothing
    return Group(
        code.luts, stream, sign_mantissa, positions[: blocks + 1].astype("<u4").view(np.uint8), _packed(gaps[:-1])
    )


def decode_group(group: Group, *, compiled: bool | None = None) -> npt.NDArray[np.uint16]:
    """Decompresses weights, and checks everything that the format says twice.

    The number of weights is that of `sign_mantissa`. The end of the stream is not looked at for an end symbol. One
    entry may be missing from `output_positions`, as published files lack it.

    Args:
        group: The arrays, as read from a file, with any sizes and contents.
        compiled: Whether numba compiles the loops. None decides by what is installed, and by the size.

    Returns:
        u16[n], bf16 weights as bits.

    Raises:
        ValueError: If the arrays do not fit each other. Damage in `sign_mantissa`, and damage that turns a code into
            another one of the same length, cannot be seen: the format has no checksum.
    """
    n, size = len(group.sign_mantissa), len(group.encoded_exponent)
    if not 0 < n <= _LARGEST or not 0 < size <= _LARGEST:
        raise ValueError(f"sign_mantissa has {n} bytes and encoded_exponent {size}; both must have 1 to {_LARGEST}")
    check_tables(group.luts)
    positions = _positions(group.output_positions, n, -(-size // _BLOCK_BYTES))
    gaps = _gaps(group.gaps, -(-size // _BLOCK_BYTES))

    words = np.zeros(size // 8 + 2, np.uint64)
    words.view(np.uint8)[:size] = group.encoded_exponent
    words.byteswap(inplace=True)
    chunks = -(-size // 8)
    bits = np.empty(n, np.uint16)
    run = _loops(n, compiled)
    table = one_step_table(group.luts)
    problem, bit = run.decode(words, gaps[:chunks], positions, table, group.luts, group.sign_mantissa, bits)
    if problem:
        raise ValueError(_PROBLEMS[problem].format(bit=bit))
    if -(-bit // 8) != size:
        raise ValueError(f"the codes end at bit {bit} of encoded_exponent, which has {8 * size}")
    # Where filling up the last byte begins a chunk, the published encoder records it.
    behind = gaps[-(-bit // 64) :] if bit % 64 == 0 else gaps[bit // 64 + 1 :]
    last = int(group.luts[-1, (bits[-1] >> 7) & 255])
    if bit - last < bit // 64 * 64 <= bit and bit // 64 < len(gaps) and int(gaps[bit // 64]) not in (0, bit % 64):
        raise ValueError(_PROBLEMS[loops.WRONG_GAP].format(bit=bit))
    if behind.any():
        raise ValueError("gaps has entries behind the last code")
    return bits


def in_parallel(function: Callable[[T], R], groups: Iterable[T]) -> Iterator[R]:
    """Maps a function over groups, in order, by as many threads as torch may use."""
    with concurrent.futures.ThreadPoolExecutor(torch.get_num_threads()) as pool:
        yield from pool.map(function, groups)


def _positions(stored: npt.NDArray[np.uint8], n: int, blocks: int) -> npt.NDArray[np.int64]:
    if len(stored) not in (4 * blocks, 4 * blocks + 4):
        raise ValueError(f"output_positions has {len(stored)} bytes; {blocks} blocks need {4 * blocks + 4}")
    positions = np.full(blocks + 1, n, np.int64)
    positions[: len(stored) // 4] = stored.copy().view("<u4")
    # The end of the last code may have a block of its own.
    steps = np.diff(positions)
    if positions[0] != 0 or positions[-1] != n or (steps[:-1] <= 0).any() or steps[-1] < 0:
        raise ValueError(f"output_positions is damaged: it must rise from 0 to the number of weights, {n}")
    return positions


def _packed(gaps: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.packbits((gaps[:, None] >> np.arange(4, -1, -1, dtype=np.uint8)) & 1)


def _gaps(stored: npt.NDArray[np.uint8], blocks: int) -> npt.NDArray[np.uint8]:
    if len(stored) != _GAP_BYTES * blocks:
        raise ValueError(f"gaps has {len(stored)} bytes; {blocks} blocks need {_GAP_BYTES * blocks}")
    return np.right_shift(np.packbits(np.unpackbits(stored).reshape(-1, 5), axis=1), 3, dtype=np.uint8).reshape(-1)


def _loops(n: int, compiled: bool | None) -> Any:
    if compiled is None:
        compiled = n >= _WORTH_COMPILING and acceleration.has_numba()
    return _compiled_loops() if compiled else vectorized


@functools.cache
def _compiled_loops() -> types.SimpleNamespace:
    functions = (loops.count, loops.encode, loops.decode)
    return types.SimpleNamespace(**{function.__name__: acceleration.compiled(function) for function in functions})
