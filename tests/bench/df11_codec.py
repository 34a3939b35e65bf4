"""Measures how fast DF11 compresses and restores weights on one core, next to others in turns.

python -m tests.bench.df11_codec                     # half a minute
python -m tests.bench.df11_codec --numbers 67108864  # more weights
python -m tests.bench.df11_codec --save NAME         # keeps the table under tests/bench/results

zstandard, which compresses the exponents alone, and zipnn are measured if they are installed.
"""

import argparse
import importlib.util
import json
import platform
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

import fmp
from fmp.df11_codec import codec
from tests.bench.__main__ import RESULTS, processor

Bits = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Coder:
    """Something that compresses bf16 numbers.

    Attributes:
        encode: Maps the numbers to what it makes of them.
        decode: Maps that back.
        size: Counts its bytes.
    """

    name: str
    encode: Callable[[Bits], Any]
    decode: Callable[[Any], Bits]
    size: Callable[[Any], int]


@dataclass(frozen=True)
class Row:
    """What one coder reaches: megabytes of bf16 numbers a second of one core's time."""

    coder: str
    bits_a_weight: float
    encode: float
    decode: float
    decode_to_memcpy: float


def df11(backend: codec.Backend) -> Coder:
    """fmp's own."""
    return Coder(
        f"fmp, {backend}",
        lambda bits: codec.encode(bits, backend=backend, even_if_larger=True),
        lambda encoded: codec.decode(encoded, backend=backend),
        lambda encoded: encoded.nbytes,
    )


def planes(name: str, compress: Callable[[Any], bytes], decompress: Callable[[bytes], bytes]) -> Coder:
    """A compressor of bytes on the exponents, with signs and mantissas beside them."""

    def encode(bits: Bits) -> tuple[bytes, npt.NDArray[np.uint8]]:
        exponents = (bits >> 7).astype(np.uint8)
        return compress(exponents.data), (bits >> 8 & 0x80 | bits & 0x7F).astype(np.uint8)

    def decode(encoded: tuple[bytes, npt.NDArray[np.uint8]]) -> Bits:
        bits = np.frombuffer(decompress(encoded[0]), np.uint8).astype(np.uint16) << 7
        rest = encoded[1].astype(np.uint16)
        return (bits | (rest & 0x80) << 8 | rest & 0x7F).astype(np.uint16)

    return Coder(f"{name}, exponents", encode, decode, lambda encoded: len(encoded[0]) + encoded[1].nbytes)


def coders() -> list[Coder]:
    """Lists what can be measured here; the first one is the copy that others are compared with."""
    found = [Coder("memcpy", np.copy, np.copy, lambda bits: bits.nbytes)]
    if codec.best_backend() == "numba":
        found.append(df11("numba"))
    found.append(df11("numpy"))
    found.append(planes("zlib -1", lambda data: zlib.compress(data, 1), zlib.decompress))
    if importlib.util.find_spec("zstandard"):
        zstandard = importlib.import_module("zstandard")
        for level in (1, 3):
            compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
            found.append(planes(f"zstd -{level}", compressor.compress, decompressor.decompress))
    if importlib.util.find_spec("zipnn"):
        zipnn = importlib.import_module("zipnn").ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
        found.append(
            Coder(
                "zipnn",
                lambda bits: zipnn.compress(bytearray(bits.data.cast("B"))),
                lambda encoded: np.frombuffer(zipnn.decompress(encoded), np.uint16),
                len,
            )
        )
    return found


def measure(found: list[Coder], bits: Bits, rounds: int) -> list[Row]:
    """Times all coders, one after the other and again, by the time that the processor spends on them."""
    encoded = [coder.encode(bits) for coder in found]
    for coder, value in zip(found, encoded, strict=True):
        if not np.array_equal(coder.decode(value), bits):
            raise AssertionError(f"{coder.name} does not restore the numbers")
    times: dict[tuple[str, str], list[float]] = {}
    for _ in tqdm(range(rounds), desc="rounds"):
        for coder, value in zip(found, encoded, strict=True):
            for what, function, argument in (("encode", coder.encode, bits), ("decode", coder.decode, value)):
                start = time.process_time()
                function(argument)
                times.setdefault((coder.name, what), []).append(time.process_time() - start)
    speed = {key: bits.nbytes / statistics.median(values) / 1e6 for key, values in times.items()}
    copy = speed[found[0].name, "decode"]
    return [
        Row(
            coder.name,
            8 * coder.size(value) / bits.size,
            speed[coder.name, "encode"],
            speed[coder.name, "decode"],
            speed[coder.name, "decode"] / copy,
        )
        for coder, value in zip(found, encoded, strict=True)
    ]


def table(rows: list[Row]) -> str:
    """Writes rows as a Markdown table."""
    lines = [
        "| coder | bits a weight | encode, MB/s | decode, MB/s | decode / memcpy |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.coder} | {row.bits_a_weight:.3f} | {row.encode:,.0f} | {row.decode:,.0f} "
        f"| {row.decode_to_memcpy:.3f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=2**24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", help="keep the table under tests/bench/results by this name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    weights = torch.randn(arguments.numbers).mul_(0.02).bfloat16()
    rows = measure(coders(), weights.view(torch.int16).numpy().view(np.uint16), arguments.rounds)
    heading = (
        f"{date.today()}, {processor()}, one core, {arguments.numbers:,} weights of N(0, 0.02), "
        f"Python {platform.python_version()}, numpy {np.__version__}, fmp {fmp.__version__}"
    )
    text = f"{heading}\n\n{table(rows)}\n"
    print(f"\n{text}")
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{arguments.save}.md").write_text(text)
        (RESULTS / f"{arguments.save}.json").write_text(
            json.dumps({"heading": heading, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
