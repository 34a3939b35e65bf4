"""How one compressed tensor is stored in a file: as few bytes as a reader can check.

A tensor is one sequence of bytes, filled up with zeros to a multiple of 8, in one of three forms:

    huffman    stream | chunk_bits | code_lengths | sign_mantissa     the parts of `fmp.df11_codec.layout`
    deflate    sign_mantissa | exponents, u8, as a zlib stream
    raw        the bf16 numbers

`group_starts` follows from `chunk_bits` and is not stored. The number of words in the stream follows from the others.

Deflate finds repetitions, which a code for single exponents cannot see: the windowed sines in a learned front end, rows
that are equal, runs of zeros. Most weights have none, and of those a sample is compressed in vain. Deflate is slow; in
memory, such a tensor is a Huffman code like all others. Level 6 makes a tensor at most 1.3 % larger than level 9 does,
in a twentieth of the time where that is long. Readers take any level.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fmp.df11.compressed import CompressedTensor, empty
from fmp.df11.tensor_file import Entry
from fmp.df11_codec import huffman, layout
from fmp.df11_codec.layout import Encoded

FORMS = ("huffman", "deflate", "raw")
_ALIGNMENT = 8
_SAMPLE, _SAMPLES = 2**14, 2
_LEVEL, _PIECE = 6, 2**20
_WORTHWHILE = 0.95


def most_bytes(numel: int) -> int:
    """Returns how many bytes `pack` needs at most for a tensor that `CompressedTensor.compress` has compressed."""
    return 2 * numel + _ALIGNMENT


def fits(entry: Entry, form: str, shape: Sequence[int]) -> bool:
    """Says whether the bytes that a file has for a tensor can hold that many numbers. No memory is taken before."""
    numel = math.prod(shape)
    least = {"huffman": numel + huffman.SYMBOLS, "deflate": numel + 1, "raw": 2 * numel}[form]
    return entry.dtype == torch.uint8 and entry.shape == (entry.nbytes,) and least <= entry.nbytes


def pack(node: CompressedTensor, bits: npt.NDArray[np.uint16]) -> tuple[str, list[npt.NDArray[Any]]]:
    """Chooses a form for a compressed tensor.

    Args:
        node: The compressed tensor, on the host.
        bits: u16[numel], the numbers that it stands for.

    Returns:
        The form, and the pieces to be written one after the other.
    """
    pieces: list[npt.NDArray[Any]] = [bits]
    form = "raw" if node.is_raw else "huffman"
    if not node.is_raw:
        parts = (node.stream, node.chunk_bits, node.code_lengths, node.sign_mantissa)
        pieces = [part.contiguous().numpy() for part in parts]
    size = sum(piece.nbytes for piece in pieces)
    exponents = _deflated(bits, size - bits.size)
    if exponents is not None:
        form, pieces = "deflate", [_sign_mantissa(bits), exponents]
        size = bits.size + exponents.size
    return form, [*pieces, np.zeros(-size % _ALIGNMENT, np.uint8)]


def unpack(data: npt.NDArray[np.uint8], form: str, shape: Sequence[int]) -> CompressedTensor:
    """Reads what `pack` wrote.

    Args:
        data: The bytes, which may come from an untrusted file. The node may share their memory.
        form: The form.
        shape: The shape of the tensor, for which `fits` holds.

    Returns:
        The node that was packed.

    Raises:
        ValueError: If the bytes do not hold a tensor of this form and shape.
    """
    numel = math.prod(shape)
    if form == "huffman":
        return CompressedTensor.from_encoded(_encoded(data, numel), empty(torch.int16), shape)
    if form == "deflate":
        bits = _inflated(data, numel)
        return CompressedTensor.compress(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(shape))
    _check_padding(data[2 * numel :])
    return CompressedTensor.from_encoded(None, torch.from_numpy(data[: 2 * numel].view(np.int16)), shape)


def _encoded(data: npt.NDArray[np.uint8], numel: int) -> Encoded:
    chunks = layout.sizes(numel, 0).chunks
    rest = data.size - 2 * chunks - huffman.SYMBOLS - numel
    if rest < 0:
        raise ValueError(f"{data.size} bytes are too few for {numel} numbers")
    words = rest // 8
    stream, chunk_bits, code_lengths, sign_mantissa, padding = np.split(
        data, np.cumsum([8 * words, 2 * chunks, huffman.SYMBOLS, numel])
    )
    _check_padding(padding)
    lengths = chunk_bits.view(np.uint16)
    encoded = Encoded(code_lengths, stream.view(np.uint64), lengths, layout.group_starts(lengths), sign_mantissa)
    layout.check(encoded)
    return encoded


def _inflated(data: npt.NDArray[np.uint8], numel: int) -> npt.NDArray[np.uint16]:
    inflater = zlib.decompressobj()
    try:
        exponents = inflater.decompress(data[numel:].data, numel)
        # The end of the stream is noticed only when more is asked for.
        more = inflater.decompress(inflater.unconsumed_tail, 1)
    except zlib.error as error:
        raise ValueError(f"the exponents cannot be inflated: {error}") from None
    if len(exponents) != numel or more or not inflater.eof:
        raise ValueError(f"the zlib stream does not hold {numel} exponents")
    _check_padding(np.frombuffer(inflater.unused_data, np.uint8))
    sign_mantissa = data[:numel].astype(np.uint16)
    bits = np.frombuffer(exponents, np.uint8).astype(np.uint16)
    np.left_shift(bits, 7, out=bits)
    bits |= sign_mantissa & 0x7F
    bits |= (sign_mantissa & 0x80) << 8
    return bits


def _deflated(bits: npt.NDArray[np.uint16], limit: int) -> npt.NDArray[np.uint8] | None:
    """Deflates the exponents, if they take fewer bytes than the limit."""
    if bits.size > 2 * _SAMPLES * _SAMPLE:
        starts = np.linspace(0, bits.size - _SAMPLE, _SAMPLES).astype(int)
        sample = sum(len(zlib.compress(_exponents(bits[start : start + _SAMPLE]).data)) for start in starts)
        if sample / (_SAMPLES * _SAMPLE) > _WORTHWHILE * limit / bits.size:
            return None
    deflater, deflated = zlib.compressobj(_LEVEL), bytearray()
    # In pieces, between which it can be interrupted, and ends where it is in vain.
    for start in range(0, bits.size, _PIECE):
        deflated += deflater.compress(_exponents(bits[start : start + _PIECE]).data)
        if len(deflated) >= limit:
            return None
    deflated += deflater.flush()
    return np.frombuffer(deflated, np.uint8) if len(deflated) < limit else None


def _exponents(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    return (bits >> 7).astype(np.uint8)


def _sign_mantissa(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    return (bits >> 8 & 0x80 | bits & 0x7F).astype(np.uint8)


def _check_padding(padding: npt.NDArray[np.uint8]) -> None:
    if padding.size >= _ALIGNMENT or padding.any():
        raise ValueError("there are bytes after the end")
