"""Lossless compression of bf16 numbers, to about 10.6 bits each: whole arrays, in runs that threads share.

    encode    count the exponents of each run -> one code for all -> where each run starts -> pack each run
    decode    check that all parts fit -> where each chunk starts -> unpack each run

Runs are whole groups of chunks. They do not show in the result: it is the same for any number of threads, on any
machine, with numba and without.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from types import ModuleType
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from fmp.df11_codec import acceleration, huffman, layout, reference
from fmp.df11_codec.layout import CHUNK, GROUP, WORD_BITS, Encoded

T = TypeVar("T")
Backend = Literal["numba", "numpy"]

_RUN = 64 * GROUP * CHUNK  # a million numbers


def encode(
    bits: npt.NDArray[np.uint16], *, even_if_larger: bool = False, threads: int = 1, backend: Backend | None = None
) -> Encoded | None:
    """Compresses bf16 numbers. Any of the 65,536 patterns may occur, NaN with their payloads included.

    Args:
        bits: u16[numbers], the numbers' bits.
        even_if_larger: Whether to compress numbers that get larger by it.
        threads: How many threads share the work.
        backend: `"numba"` or `"numpy"`; by default what `best_backend` says. The result is the same.

    Returns:
        The compressed numbers; None where they would not take fewer bytes than the numbers, or there are none.

    Example:
        >>> bits = np.full(5000, 0x3F80, np.uint16)
        >>> encoded = encode(bits)
        >>> encoded.nbytes, bool((decode(encoded) == bits).all())
        (5924, True)
    """
    kernels, numbers = _kernels(backend or best_backend()), len(bits)
    if numbers == 0:
        return None
    runs = [bits[first : first + _RUN] for first in range(0, numbers, _RUN)]
    counts = _each(kernels.histogram, [(run,) for run in runs], threads)
    lengths = huffman.code_lengths(np.sum(counts, axis=0))
    run_bits = [int(count @ lengths.astype(np.int64)) for count in counts]
    sizes = layout.sizes(numbers, sum(run_bits))
    if sizes.nbytes >= bits.nbytes and not even_if_larger:
        return None

    codes = huffman.codes(lengths)
    # No run writes the word in which the first one starts, nor the one after the last code.
    stream = np.empty(sizes.words, np.uint64)
    stream[[0, -1]] = 0
    chunk_bits = np.empty(sizes.chunks, np.uint16)
    sign_mantissa = np.empty(numbers, np.uint8)
    starts = list(accumulate(run_bits[:-1], initial=0))
    work = []
    for index, (run, start) in enumerate(zip(runs, starts, strict=True)):
        numbers_of_run, chunks_of_run = _places(index)
        work.append((run, lengths, codes, start, stream, chunk_bits[chunks_of_run], sign_mantissa[numbers_of_run]))
    heads = _each(kernels.pack, work, threads)
    for start, head in zip(starts, heads, strict=True):
        stream[start // WORD_BITS] |= np.uint64(head)
    return Encoded(lengths, stream, chunk_bits, layout.group_starts(chunk_bits), sign_mantissa)


def decode(encoded: Encoded, *, threads: int = 1, backend: Backend | None = None) -> npt.NDArray[np.uint16]:
    """Restores the numbers that `encode` compressed, bit for bit.

    Args:
        encoded: The compressed numbers. They may come from an untrusted file: nothing outside of them is read or
            written.
        threads: How many threads share the work.
        backend: As for `encode`.

    Returns:
        u16[numbers], the numbers' bits.

    Raises:
        ValueError: If the parts do not fit together, or a chunk does not have the length that it should have. Damage
            that leaves all lengths as they are goes unnoticed: against that, files have checksums.
    """
    try:
        layout.check(encoded)
    except ValueError as error:
        raise ValueError(f"the compressed numbers are corrupt: {error}") from None
    kernels, numbers = _kernels(backend or best_backend()), encoded.sign_mantissa.size
    table = huffman.decode_table(encoded.code_lengths)
    bits = np.empty(numbers, np.uint16)
    work = []
    for index in range(-(-numbers // _RUN)):
        numbers_of_run, chunks_of_run = _places(index)
        chunk_bits = encoded.chunk_bits[chunks_of_run]
        starts = layout.chunk_starts(chunk_bits, int(encoded.group_starts[chunks_of_run.start // GROUP]))
        sign_mantissa = encoded.sign_mantissa[numbers_of_run]
        work.append((encoded.stream, starts, chunk_bits, table, sign_mantissa, bits[numbers_of_run]))
    for index, damaged in enumerate(_each(kernels.unpack, work, threads)):
        if damaged >= 0:
            chunk = _places(index)[1].start + damaged
            raise ValueError(
                f"the compressed numbers are corrupt: the codes of chunk {chunk} do not have the length "
                f"{encoded.chunk_bits[chunk]} that is kept for them"
            )
    return bits


def best_backend() -> Backend:
    """Returns `"numba"` where numba can be loaded, and `"numpy"`, which is about ten times slower, elsewhere."""
    return "numba" if acceleration.has_numba() else "numpy"


@functools.cache
def _kernels(backend: Backend) -> ModuleType:
    if backend not in ("numba", "numpy"):
        raise ValueError(f"backend must be 'numba' or 'numpy', got {backend!r}")
    # Loaded on first use: numba takes longer to load than all of fmp.
    return reference if backend == "numpy" else importlib.import_module("fmp.df11_codec.numba_codec")


def _places(index: int) -> tuple[slice, slice]:
    """Returns which numbers, and which chunks, a run has."""
    return slice(index * _RUN, (index + 1) * _RUN), slice(index * _RUN // CHUNK, (index + 1) * _RUN // CHUNK)


def _each(function: Callable[..., T], work: Sequence[tuple], threads: int) -> list[T]:
    if threads == 1 or len(work) == 1:
        return [function(*arguments) for arguments in work]
    with ThreadPoolExecutor(min(threads, len(work))) as pool:
        return list(pool.map(lambda arguments: function(*arguments), work))
