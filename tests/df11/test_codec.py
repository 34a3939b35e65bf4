"""fmp.df11_codec.codec, layout, reference and numba_codec: every number comes back, and damage does no harm."""

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from fmp.df11_codec import codec, layout
from fmp.df11_codec.codec import Backend, decode, encode
from fmp.df11_codec.layout import CHUNK, GROUP, Encoded

HAS_NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
BACKENDS: list[Any] = [pytest.param("numba", marks=needs_numba), "numpy"]
EVERY_PATTERN = np.arange(2**16, dtype=np.uint16)
SIZES = [1, 2, 3, 19, 20, 21, CHUNK - 1, CHUNK, CHUNK + 1, GROUP * CHUNK - 1, GROUP * CHUNK, GROUP * CHUNK + 1]
SIZES += [2 * CHUNK, 5 * CHUNK + 7, 2 * GROUP * CHUNK, 3 * GROUP * CHUNK + CHUNK + 1]


def normal(numbers: int, *, scale: float = 0.02, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).standard_normal(numbers, dtype=np.float32) * np.float32(scale)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def packed(bits: Any, backend: Backend = "numpy", threads: int = 1) -> Encoded:
    encoded = encode(bits, even_if_larger=True, backend=backend, threads=threads)
    assert encoded is not None
    return encoded


def same(one: Encoded, other: Encoded) -> bool:
    parts = [(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(Encoded)]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in parts)


def with_numbers(encoded: Encoded, **changes: Any) -> Encoded:
    return dataclasses.replace(encoded, **changes)


def outcome(encoded: Encoded, backend: Backend) -> Any:
    """Returns what was decoded, or what the error says."""
    try:
        return decode(encoded, backend=backend)
    except ValueError as error:
        return str(error)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_RUN", GROUP * CHUNK)


@st.composite
def adversarial(draw: st.DrawFn) -> Any:
    """Numbers of few or many exponents, evenly or very unevenly spread, in any order."""
    exponents = draw(st.lists(st.integers(0, 255), min_size=1, max_size=40, unique=True))
    skew = draw(st.sampled_from([1.0, 0.5, 0.1]))
    numbers = draw(st.sampled_from([1, 7, CHUNK, CHUNK + 1, 3000]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = skew ** np.arange(len(exponents))
    chosen = random.choice(exponents, numbers, p=weights / weights.sum()).astype(np.uint16)
    if draw(st.booleans()):
        chosen.sort()
    return chosen << 7 | random.integers(0, 2**16, numbers, np.uint16) & 0x807F


@pytest.mark.parametrize("backend", BACKENDS)
@hypothesis.given(bits=adversarial())
def test_adversarial_numbers_come_back(backend: Backend, bits: Any) -> None:
    assert np.array_equal(decode(packed(bits, backend), backend=backend), bits)


@pytest.mark.parametrize("backend", BACKENDS)
@hypothesis.given(patterns=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=100))
def test_any_patterns_come_back(backend: Backend, patterns: list[int]) -> None:
    bits = np.array(patterns, np.uint16)
    assert np.array_equal(decode(packed(bits, backend), backend=backend), bits)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("numbers", SIZES)
def test_sizes_around_the_edges_of_chunks_and_groups(backend: Backend, numbers: int) -> None:
    bits = normal(numbers)
    encoded = packed(bits, backend)
    assert np.array_equal(decode(encoded, backend=backend), bits)
    assert same(encoded, packed(bits))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_patterns_come_back(backend: Backend) -> None:
    for bits in (EVERY_PATTERN, EVERY_PATTERN[::-1].copy(), np.random.default_rng(0).permutation(EVERY_PATTERN)):
        assert np.array_equal(decode(packed(bits, backend), backend=backend), bits)
        assert encode(bits, backend=backend) is None  # it would grow


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [[0], [0x7FC1], [0] * 5000, [0x3F80, 0xBF80] * 4000, [0, 0x7F80] * 3000])
def test_one_and_two_exponents(backend: Backend, bits: list[int]) -> None:
    array = np.array(bits, np.uint16)
    encoded = packed(array, backend)
    assert encoded.code_lengths.max() == 1
    assert int(encoded.chunk_bits.sum(dtype=np.int64)) == len(bits)
    assert np.array_equal(decode(encoded, backend=backend), array)


@needs_numba
@hypothesis.given(bits=adversarial())
def test_numba_writes_the_same_bytes(bits: Any) -> None:
    assert same(packed(bits, "numba"), packed(bits, "numpy"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("extra", [-1, 0, 1, CHUNK])
def test_runs_and_threads_do_not_show(backend: Backend, threads: int, extra: int, short_runs: None) -> None:
    # The second one has codes of one length, so that runs start at the beginning of a word.
    numbers = 4 * GROUP * CHUNK + extra
    for bits in (normal(numbers), np.resize(np.array([0, 0x7F80], np.uint16), numbers)):
        encoded = packed(bits, backend, threads)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "_RUN", 64 * GROUP * CHUNK)
            assert same(encoded, packed(bits))
        assert np.array_equal(decode(encoded, backend=backend, threads=threads), bits)


def test_the_layout_is_as_it_is_drawn() -> None:
    # The lengths are 1, 2, 3, 3; codes by symbol 0, 10, 110, 111, the first bit lowest.
    bits = np.array([1, 1, 1, 1, 2, 2, 3, 4], np.uint16) << 7 | np.uint16(0x8001)
    encoded = packed(bits)
    assert encoded.code_lengths[:6].tolist() == [0, 1, 2, 3, 3, 0]
    written = "0" * 4 + "10" * 2 + "110" + "111"
    assert [f"{word:064b}"[::-1] for word in encoded.stream] == [written.ljust(64, "0"), "0" * 64]
    assert encoded.chunk_bits.tolist() == [14]
    assert encoded.group_starts.tolist() == [0]
    assert encoded.sign_mantissa.tolist() == [0x81] * 8


def test_the_layout_over_chunks_and_groups() -> None:
    numbers = 2 * GROUP * CHUNK + 3
    bits = normal(numbers)
    encoded = packed(bits)
    lengths = encoded.code_lengths[bits >> 7 & 0xFF].astype(np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    assert encoded.chunk_bits.tolist() == [int(part.sum()) for part in np.split(lengths, range(CHUNK, numbers, CHUNK))]
    assert encoded.group_starts.tolist() == starts[:: GROUP * CHUNK].tolist()
    for group, start in enumerate(encoded.group_starts):
        chunk_starts = layout.chunk_starts(encoded.chunk_bits[GROUP * group :][:GROUP], start)
        assert chunk_starts.tolist() == starts[group * GROUP * CHUNK :: CHUNK][: len(chunk_starts)].tolist()
    assert len(encoded.stream) == -(-int(ends[-1]) // 64) + 1


def test_normal_weights_take_at_most_10_65_bits() -> None:
    bits = normal(2**20)
    encoded = encode(bits)
    assert encoded is not None
    assert 8 * encoded.nbytes / len(bits) < 10.65
    sizes = layout.sizes(len(bits), int(encoded.chunk_bits.sum(dtype=np.int64)))
    assert sizes.nbytes == encoded.nbytes


def test_what_would_grow_is_not_encoded() -> None:
    assert encode(np.zeros(0, np.uint16)) is None
    assert encode(np.zeros(10, np.uint16)) is None
    assert encode(np.zeros(1000, np.uint16)) is not None


def test_positions_beyond_32_bits() -> None:
    numbers = 2**32 + 1
    sizes = layout.sizes(numbers, 12 * numbers)
    assert (sizes.chunks, sizes.groups) == (2**23 + 1, 2**18 + 1)
    assert sizes.words == 12 * 2**26 + 2
    starts = layout.group_starts(np.full(2**20, 12 * CHUNK, np.uint16))
    assert starts[-1] == (2**20 - GROUP) * 12 * CHUNK > 2**32
    numbers_of_run, chunks_of_run = codec._places(2**13)
    assert numbers_of_run.start == 2**33
    assert chunks_of_run.start == 2**24


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_far_into_a_stream(backend: Backend) -> None:
    # The system gives memory to the pages only that are written to.
    bits = normal(GROUP * CHUNK + 5)
    kernels, start = codec._kernels(backend), 2**32 + 2**31 + 37
    encoded = packed(bits)
    stream = np.zeros(start // 64 + len(encoded.stream) + 1, np.uint64)
    chunk_bits, sign_mantissa = np.empty_like(encoded.chunk_bits), np.empty_like(encoded.sign_mantissa)
    codes = codec.huffman.codes(encoded.code_lengths)
    stream[start // 64] |= np.uint64(
        kernels.pack(bits, encoded.code_lengths, codes, start, stream, chunk_bits, sign_mantissa)
    )
    assert np.array_equal(chunk_bits, encoded.chunk_bits)
    starts = layout.chunk_starts(chunk_bits, start)
    table, found = codec.huffman.decode_table(encoded.code_lengths), np.empty_like(bits)
    assert kernels.unpack(stream, starts, chunk_bits, table, sign_mantissa, found) == -1
    assert np.array_equal(found, bits)


@pytest.mark.parametrize(
    ("backend", "numbers"), [pytest.param("numba", 2 * CHUNK + 9, marks=needs_numba), ("numpy", 90)]
)
def test_each_byte_flipped_raises_or_decodes(backend: Backend, numbers: int) -> None:
    bits = normal(numbers)
    encoded = packed(bits)
    raised = {}
    for field in dataclasses.fields(Encoded):
        part = getattr(encoded, field.name)
        for index in range(part.nbytes):
            for flip in (0x01, 0x80, 0xFF):
                damaged = part.copy()
                damaged.view(np.uint8)[index] ^= flip
                found = outcome(with_numbers(encoded, **{field.name: damaged}), backend)
                if isinstance(found, str):
                    assert found.startswith("the compressed numbers are corrupt: ")
                    raised[field.name] = raised.get(field.name, 0) + 1
                else:
                    assert found.shape == bits.shape
    # Lengths are kept twice over; codes are not, and signs and mantissas can be anything.
    for name in ("code_lengths", "chunk_bits", "group_starts"):
        assert raised[name] == 3 * getattr(encoded, name).nbytes
    assert raised["stream"] > encoded.stream.nbytes
    assert "sign_mantissa" not in raised


@pytest.mark.parametrize("backend", BACKENDS)
@hypothesis.given(seed=st.integers(0, 2**32), exponents=st.integers(1, 200))
def test_any_stream_raises_or_decodes(backend: Backend, seed: int, exponents: int) -> None:
    # All parts fit together; the words hold anything.
    random = np.random.default_rng(seed)
    bits = random.integers(0, exponents, 2 * CHUNK + 77).astype(np.uint16) << 7
    encoded = packed(bits)
    stream = random.integers(0, 2**64, len(encoded.stream), np.uint64)
    used = int(encoded.chunk_bits.sum(dtype=np.int64)) % 64
    stream[-2] &= np.uint64(2**used - 1) if used else ~np.uint64(0)
    stream[-1] = 0
    found = outcome(with_numbers(encoded, stream=stream), backend)
    assert "do not have the length" in found if isinstance(found, str) else found.shape == bits.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_code_that_nothing_has_ends(backend: Backend) -> None:
    encoded = packed(np.zeros(100, np.uint16))
    stream = encoded.stream.copy()
    stream[0] = 0b100
    with pytest.raises(ValueError, match="chunk 0 do not have the length 100"):
        decode(with_numbers(encoded, stream=stream), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_damaged_chunk_is_named(backend: Backend, short_runs: None) -> None:
    bits = normal(2 * GROUP * CHUNK)
    encoded = packed(bits)
    word = int(encoded.group_starts[1] + encoded.chunk_bits[GROUP] + encoded.chunk_bits[GROUP + 1] + 640) // 64
    stream = encoded.stream.copy()
    stream[word] = 2**64 - 1
    with pytest.raises(ValueError, match=rf"chunk {GROUP + 2} do not have the length {encoded.chunk_bits[GROUP + 2]} "):
        decode(with_numbers(encoded, stream=stream), backend=backend)


def test_parts_that_do_not_fit_are_refused() -> None:
    encoded = packed(normal(3 * CHUNK))
    moved = encoded.chunk_bits.copy()
    moved[:2] += np.array([2**16 - 1000, 1000], np.uint16)
    unused, guard = encoded.stream.copy(), encoded.stream.copy()
    unused[-2] |= np.uint64(2**63)
    guard[-1] = 1
    extra = {name: np.append(getattr(encoded, name), getattr(encoded, name)[-1:]) for name in ("stream", "chunk_bits")}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sign_mantissa": encoded.sign_mantissa[:CHUNK]}, "need 1 chunks"),
        ({"sign_mantissa": encoded.sign_mantissa[:0]}, "at least one number"),
        ({"stream": extra["stream"]}, "words"),
        ({"stream": encoded.stream[:-1]}, "words"),
        ({"stream": encoded.stream[:0]}, "words"),
        ({"stream": unused}, "bits after the last code"),
        ({"stream": guard}, "bits after the last code"),
        ({"chunk_bits": extra["chunk_bits"]}, "chunks"),
        ({"group_starts": encoded.group_starts[:0]}, "groups"),
        ({"group_starts": encoded.group_starts + 1}, "do not start"),
        ({"chunk_bits": moved}, "chunk 0 of 512 numbers cannot have"),
        ({"code_lengths": np.zeros(256, np.uint8)}, "256 lengths"),
        ({"code_lengths": np.full(256, 9, np.uint8)}, "not complete"),
    ]
    for changes, message in wrong:
        with pytest.raises(ValueError, match=message):
            decode(with_numbers(encoded, **changes))


def test_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'numba' or 'numpy'"):
        encode(np.zeros(5, np.uint16), backend="cuda")  # pyright: ignore[reportArgumentType]


PROGRAM = """
import numpy as np
from fmp.df11_codec import codec, huffman, numba_codec
from fmp.df11_codec.layout import CHUNK

assert numba_codec.histogram.stats.cache_path is None
# Exponent 0 has a code of one bit, and the last chunk 512 of these. Then codes of 12 bits are put there.
exponents = np.concatenate([np.repeat(np.arange(1, 13), 2 ** np.arange(12)), np.zeros(9 * CHUNK + 1, int)])
bits = exponents.astype(np.uint16) << 7
encoded = codec.encode(bits)
assert np.array_equal(codec.decode(encoded), bits)
longest = encoded.code_lengths.argmax()
code = int(huffman.codes(encoded.code_lengths)[longest])
assert (encoded.chunk_bits[-1], encoded.code_lengths[longest]) == (CHUNK, 12)
start = int(encoded.chunk_bits.sum(dtype=np.int64)) - CHUNK
hostile = sum(code << 12 * index for index in range(CHUNK)) << start % 64
for word in range(start // 64 + 1, len(encoded.stream) - 2):
    encoded.stream[word] = hostile >> 64 * (word - start // 64) & 2**64 - 1
for backend in ("numba", "numpy"):
    try:
        codec.decode(encoded, backend=backend)
    except ValueError as error:
        print(error)
"""


@needs_numba
def test_numba_checked_and_without_a_folder_for_its_cache(tmp_path: Path) -> None:
    # A copy that cannot be written to, for a user without a home, compiled such that each index is checked.
    root = Path(codec.__file__).parents[2]
    shutil.copytree(root / "fmp", tmp_path / "fmp", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "fmp" / "df11_codec" / "__pycache__").write_text("in the way of a folder")
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "NUMBA_BOUNDSCHECK": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("do not have the length 512") == 2
