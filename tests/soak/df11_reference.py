"""Readers of both DF11 formats written out once more, bit by bit: what the code under test must agree with.

They know the formats from their descriptions, `fmp.df11_codec.layout`, `fmp.df11.stored`, `fmp.df11.manifest` and
`fmp.df11_codec.published.groups`, and share no code with them. `Refused` is raised for what they cannot read.
"""

import json
import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

Bits = np.ndarray
Tensor = tuple[str, tuple[int, ...], bytes]
"""A safetensors dtype, a shape, the bytes."""

_CHUNK, _LONGEST = 512, 12


class Refused(Exception):
    """The bytes are not those of a file of this kind."""


def require(condition: Any, reason: str) -> None:
    """Raises unless a condition holds."""
    if not condition:
        raise Refused(reason)


def parts_of(file: bytes) -> tuple[dict[str, Any], bytes, bytes]:
    """Takes a safetensors file apart: the parsed header, its bytes, the data."""
    size = int.from_bytes(file[:8], "little")
    require(8 + size <= len(file), "the header does not fit")
    header = file[8 : 8 + size]
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise Refused("the header is no JSON") from error
    require(isinstance(parsed, dict), "the header is no object")
    return parsed, header, file[8 + size :]


def container(file: bytes) -> dict[str, Tensor]:
    """Reads all tensors of a file of compressed weights, by name; tied ones are left out."""
    parsed, header, data = parts_of(file)
    metadata = parsed.pop("__metadata__")
    version, checksum = metadata["fmp_df11"].split(" ")
    zeroed = header.replace(f" {checksum}".encode(), b" 00000000", 1)
    require(version == "1" and checksum == f"{zlib.crc32(zeroed):08x}", "the header's checksum")
    manifest = json.loads(metadata["manifest"])
    found: dict[str, Tensor] = {}
    for name, entry in parsed.items():
        start, stop = entry["data_offsets"]
        stored, record = data[start:stop], manifest["tensors"][name]
        if isinstance(record, str):
            require(record == f"{zlib.crc32(stored):08x}", "a checksum")
            found[name] = entry["dtype"], tuple(entry["shape"]), stored
            continue
        form, shape, values_crc, crc = record
        require(crc == f"{zlib.crc32(stored):08x}", "a checksum")
        raw = unpacked(stored, form, math.prod(shape)).tobytes()
        require(values_crc == f"{zlib.crc32(raw):08x}", "the checksum of the values")
        found[name] = "BF16", tuple(shape), raw
    return found


def unpacked(stored: bytes, form: str, numel: int) -> Bits:
    """Restores one tensor of a file: u16[numel]."""
    array = np.frombuffer(stored, np.uint8)
    if form == "raw":
        _require_padding(stored[2 * numel :])
        return array[: 2 * numel].view(np.uint16)
    if form == "deflate":
        inflater = zlib.decompressobj()
        exponents = np.frombuffer(inflater.decompress(stored[numel:]), np.uint8)
        require(len(exponents) == numel and inflater.eof, "the number of exponents")
        _require_padding(inflater.unused_data)
        return _numbers(array[:numel], exponents)
    chunks = -(-numel // _CHUNK)
    words = (len(array) - 2 * chunks - 256 - numel) // 8
    stream, rest = array[: 8 * words], array[8 * words :]
    chunk_bits, lengths = rest[: 2 * chunks].view(np.uint16), rest[2 * chunks : 2 * chunks + 256]
    _require_padding(rest[2 * chunks + 256 + numel :].tobytes())
    return huffman(lengths, stream, chunk_bits, rest[2 * chunks + 256 :][:numel])


def huffman(lengths: Bits, stream: Bits, chunk_bits: Bits, sign_mantissa: Bits) -> Bits:
    """Decodes the stream of fmp's own layout: canonical codes, the first bit in the lowest bit of the first byte."""
    codes: dict[tuple[int, int], int] = {}
    code = last = 0
    for length, symbol in sorted((int(length), symbol) for symbol, length in enumerate(lengths) if length):
        require(length <= _LONGEST, "a code of more than 12 bits")
        code <<= length - last
        codes[length, code] = symbol
        code, last = code + 1, length
    bits = np.unpackbits(stream, bitorder="little")
    exponents = np.zeros(len(sign_mantissa), np.uint8)
    place = 0
    for index in range(len(exponents)):
        if index % _CHUNK == 0:
            require(place == int(chunk_bits[: index // _CHUNK].sum(dtype=np.int64)), "where a chunk starts")
        exponents[index], place = _next(codes, bits, place, _LONGEST)
    require(place == int(chunk_bits.sum(dtype=np.int64)), "where the last chunk ends")
    require(len(bits) == 64 * (-(-place // 64) + 1) and not bits[place:].any(), "what follows the last code")
    return _numbers(sign_mantissa, exponents)


def group(luts: Bits, encoded: Bits, sign_mantissa: Bits, positions: Bits, gaps: Bits) -> Bits:
    """Decodes a group of the published format, one code after the other, and compares gaps and positions with them."""
    lengths, rows = luts[-1], luts[:-1]
    bits = np.concatenate([np.unpackbits(encoded), np.zeros(64, np.uint8)])
    count = len(sign_mantissa)
    exponents, starts = np.zeros(count, np.uint8), []
    place = 0
    for index in range(count):
        starts.append(place)
        row, at = 0, place
        while True:
            require(at + 8 <= len(bits) and row < len(rows), "where a code ends")
            symbol = int(rows[row][int(np.packbits(bits[at : at + 8])[0])])
            if symbol < 240:
                break
            row, at = 256 - symbol, at + 8
        require(lengths[symbol], "a code without a length")
        exponents[index], place = symbol, place + int(lengths[symbol])
    require(-(-place // 8) == len(encoded), "where the codes end")
    stored_gaps = np.packbits(np.unpackbits(gaps).reshape(-1, 5), axis=1)[:, 0] >> 3
    first_of_chunk, first_of_block = {}, {}
    for index, start in enumerate(starts):
        first_of_chunk.setdefault(start // 64, start % 64)
        first_of_block.setdefault(start // (64 * 512), index)
    require(all(int(stored_gaps[chunk]) == gap for chunk, gap in first_of_chunk.items()), "a gap")
    kept = np.frombuffer(positions.tobytes(), "<u4")
    require(all(int(kept[block]) == index for block, index in first_of_block.items()), "a position")
    return _numbers(sign_mantissa, exponents)


def _require_padding(padding: bytes) -> None:
    require(len(padding) < 8 and not any(padding), "what follows a tensor")


def _next(codes: dict[tuple[int, int], int], bits: Bits, place: int, longest: int) -> tuple[int, int]:
    code = 0
    for length in range(1, longest + 1):
        require(place + length <= len(bits), "the stream ends")
        code = code << 1 | int(bits[place + length - 1])
        if (length, code) in codes:
            return codes[length, code], place + length
    raise Refused("no code begins here")


def _numbers(sign_mantissa: Bits, exponents: Bits) -> Bits:
    rest = sign_mantissa.astype(np.uint16)
    return (rest & 0x80) << 8 | exponents.astype(np.uint16) << 7 | rest & 0x7F


def tensors(file: bytes) -> Iterator[tuple[str, Tensor]]:
    """Iterates over the tensors of a plain safetensors file."""
    parsed, _, data = parts_of(file)
    for name, entry in parsed.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            yield name, (entry["dtype"], tuple(entry["shape"]), data[start:stop])
