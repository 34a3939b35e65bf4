"""One group of the published format: the same code, tables, stream and positions as the published encoder's."""

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from fmp.df11_codec.published import groups, loops
from fmp.df11_codec.published.code import build_code
from fmp.df11_codec.published.groups import Group, UnsupportedError, decode_group, encode_group
from tests.df11.published_oracle import gaussian, huffman, kernel, weights

SAMPLE = Path(__file__).parent.parent / "data" / "df11_sample"
PARTS = [field.name for field in dataclasses.fields(Group)]
COMPILED = [False, pytest.param(True, marks=pytest.mark.skipif(not importlib.util.find_spec("numba"), reason="numba"))]
LOOP = {119: 4, 120: 2, 121: 5, 122: 15, 123: 33, 124: 39, 125: 31, 126: 12, 127: 1, 128: 1}


def counted(counts: dict[int, int]) -> np.ndarray:
    full = np.zeros(256, np.int64)
    full[list(counts)] = list(counts.values())
    return full


def gaps_of(group: Group) -> np.ndarray:
    return np.packbits(np.unpackbits(group.gaps).reshape(-1, 5), axis=1)[:, 0] >> 3


def same(one: Group, other: Group) -> None:
    for part in PARTS:
        np.testing.assert_array_equal(getattr(one, part), getattr(other, part), part)


def round_trip(bits: np.ndarray, *, slow: bool = True) -> Group:
    group = encode_group(bits, compiled=False)
    np.testing.assert_array_equal(decode_group(group, compiled=False), bits)
    if slow:
        np.testing.assert_array_equal(kernel(group), bits)
    return group


def exponents_of(counts: dict[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(list(counts), list(counts.values())))


def test_two_exponents_as_published():
    stored = load_file(SAMPLE / "edge_two_symbols.safetensors")
    published = Group(*[stored[f"g.{part}"].numpy() for part in PARTS])
    original = [stored[f"original.{index}.weight"].view(torch.int16) for index in (0, 1)]
    bits = np.concatenate([part.numpy().view(np.uint16) for part in original])
    np.testing.assert_array_equal(decode_group(published), bits)
    same(encode_group(bits), published)


@pytest.mark.parametrize("exponents", range(1, 17))
@pytest.mark.parametrize(
    "skew", [lambda i: 20, lambda i: 1 + 200 * (i == 3), lambda i: 1 + 2**i // 64, lambda i: 1 + i * i % 7]
)
def test_few_exponents(exponents: int, skew: Callable[[int], int]):
    round_trip(weights(exponents_of({7 * i: skew(i) for i in range(exponents)})))


@pytest.mark.parametrize("bits", [[0], [0x8000], [0x3F80] * 9, [0x4000, 0x407F, 0xC000]])
def test_one_exponent(bits: list[int]):
    group = round_trip(np.array(bits, np.uint16))
    assert group.luts.shape == (2, 256)


@pytest.mark.parametrize("n", [*range(1, 131), 8191, 8192, 8193])
def test_sizes(n: int):
    round_trip(gaussian(n, seed=n))


# Codes of one bit, so that sizes are positions; 64 bits are a chunk, and 32768 a block.
@pytest.mark.parametrize("n", [7, 8, 9, 63, 64, 65, 127, 128, 129, 32767, 32768, 32769, 65535, 65536, 65537])
def test_edges_of_chunks_and_blocks(n: int):
    group = round_trip(weights([100] * n))
    assert len(group.output_positions) == 4 * (1 + -(-n // 32768))


@pytest.mark.parametrize("compiled", COMPILED)
def test_backends_write_the_same(compiled: bool):
    for bits in (gaussian(200_001), weights([100] * 65536), weights(exponents_of({i: 1 << i for i in range(17)}))):
        group = encode_group(bits, compiled=compiled)
        same(group, encode_group(bits, compiled=False))
        np.testing.assert_array_equal(decode_group(group, compiled=compiled), bits)


def test_loops_mean_the_same_as_plain_python(monkeypatch: pytest.MonkeyPatch):
    bits = np.concatenate([gaussian(3000), weights([100] * 33000)])
    group = encode_group(bits, compiled=False)
    monkeypatch.setattr(groups, "_loops", lambda n, compiled: loops)
    same(encode_group(bits), group)
    np.testing.assert_array_equal(decode_group(group), bits)


@pytest.mark.parametrize("compiled", COMPILED)
def test_codes_of_all_lengths(compiled: bool):
    # Fibonacci counts make the longest codes for the fewest weights.
    counts, pair = {}, (1, 1)
    for exponent in range(26):
        counts[100 + exponent] = pair[0]
        pair = pair[1], sum(pair)
    bits = weights(exponents_of(counts))
    group = encode_group(bits, compiled=compiled)
    assert group.luts[-1].max() == 26
    assert len(group.luts) == 5
    np.testing.assert_array_equal(decode_group(group, compiled=compiled), bits)


def test_all_finite_values_below_the_limit_and_none_above():
    every = np.arange(1 << 16).astype(np.uint16)
    supported = every[(every >> 7 & 255) < 240]
    round_trip(np.random.default_rng(0).permutation(supported), slow=False)
    for exponent in range(240, 256):
        with pytest.raises(UnsupportedError, match=f"biased exponent {exponent}"):
            encode_group(weights([100, exponent, 120]))


def test_refuses_what_has_no_place():
    with pytest.raises(UnsupportedError, match="0 weights"):
        encode_group(np.zeros(0, np.uint16))
    with pytest.raises(UnsupportedError, match="lookup tables"):
        encode_group(weights(exponents_of({0: 1 << 14} | dict.fromkeys(range(1, 240), 9))))


def codes_of(counts: dict[int, int]) -> dict[int, str]:
    code = build_code(counted(counts))
    length, value = code.end
    return {s: f"{code.codes[s]:0{code.lengths[s]}b}" for s in counts} | {-1: f"{value:0{length}b}"}


@given(st.dictionaries(st.integers(0, 239), st.integers(1, 40) | st.integers(1, 10**9), min_size=1, max_size=40))
def test_code_is_the_published_one(counts: dict[int, int]):
    expected = huffman(counts)
    if max(map(len, expected.values())) > 32:
        return
    found = codes_of(counts)
    if found != expected:
        # Only the end symbol may differ, exchanged with its neighbor, and only where it would begin its table.
        assert {s for s in found if found[s] != expected[s]} == {-1, next(s for s in found if found[s] == expected[-1])}
        assert set(expected[-1][(len(expected[-1]) - 1) // 8 * 8 :]) == {"0"}


def test_codes_end_at_32_bits():
    counts, pair = {}, (2, 3)
    for exponent in range(60):
        counts[exponent] = pair[0]
        pair = pair[1], sum(pair)
    assert max(map(len, huffman(counts).values())) > 32
    for rare in itertools.count(2):
        expected = huffman(counts | dict.fromkeys(range(rare), 1))  # no two are equal, so the first are the rarest
        if max(map(len, expected.values())) <= 32:
            break
    assert codes_of(counts) == expected


@given(st.dictionaries(st.integers(0, 239), st.integers(1, 3) | st.integers(1, 5000), min_size=1, max_size=60))
def test_every_walk_through_the_tables_ends(counts: dict[int, int]):
    assert_walks_end(counts)


@pytest.mark.parametrize("counts", [{5: 1}, {5: 9}, {5: 9, 6: 2}, LOOP])
def test_walks_end_where_the_published_tables_fail(counts: dict[int, int]):
    expected, found = huffman(counts), codes_of(counts)
    assert found != expected
    assert sorted(found.values()) == sorted(expected.values())
    assert_walks_end(counts)
    round_trip(weights(exponents_of(counts)))


def assert_walks_end(counts: dict[int, int]) -> None:
    luts = build_code(counted(counts)).luts
    codes = codes_of(counts)
    for symbol, code in codes.items():
        for filling in ("0" * 64, "1" * 64, "10" * 32):
            window, row = int((code + filling)[:64], 2), 0
            for shift in range(56, 0, -8):
                found = luts[row, window >> shift & 255]
                if found < 240:
                    break
                row = 256 - int(found)
            assert found < 240
            assert luts[-1, found] > 0
            assert found == symbol or symbol == -1


def spilled() -> np.ndarray:
    """The last code has more than 8 bits, ends with a byte, and all of that byte is in a block of its own."""
    counts = {i: max(1, 2 ** (i - 100) // 3) for i in range(100, 114)}
    for _ in range(100):
        exponents = np.append(exponents_of(counts), 100)
        lengths = build_code(np.bincount(exponents, minlength=256)).lengths
        bits = int(lengths[exponents].sum())
        if bits % 32768 == 8 and lengths[100] > 8:
            return weights(exponents)
        assert lengths[113] == 1
        counts[113] += (8 - bits) % 32768
    raise AssertionError("no such group was found")


@pytest.mark.parametrize("compiled", COMPILED)
def test_one_position_may_be_missing(compiled: bool):
    bits = spilled()
    group = encode_group(bits, compiled=compiled)
    assert len(group.encoded_exponent) % 4096 == 1
    np.testing.assert_array_equal(kernel(group), bits)
    assert not gaps_of(group)[512:].any()  # no code starts in the last block, and nothing fills up its byte
    short = dataclasses.replace(group, output_positions=group.output_positions[:-4])
    np.testing.assert_array_equal(decode_group(short, compiled=compiled), bits)
    for wrong in (group.output_positions[:-8], group.output_positions[:-1]):
        with pytest.raises(ValueError, match="output_positions has"):
            decode_group(dataclasses.replace(group, output_positions=wrong), compiled=compiled)


def test_end_of_stream_in_a_chunk_of_its_own():
    # Codes of 1 to 3 bits: the last one runs over the edge of a chunk, and what fills its byte begins the next one.
    for n in range(20, 400):
        bits = weights([100] * n + [101, 102, 103, 104, 104])
        group = round_trip(bits)
        lengths = group.luts[-1].astype(int)
        end = int(lengths[bits >> 7 & 255].sum())
        if end % 64 in (1, 2) and end % 64 < lengths[104]:
            assert gaps_of(group)[end // 64] == end % 64
            # It says nothing about a weight, so another writer may leave it out; but nothing else may stand there.
            for gap in range(32):
                gaps = gaps_of(group)
                gaps[end // 64] = gap
                other = np.packbits(gaps[:, None] >> np.arange(4, -1, -1, dtype=np.uint8) & 1)
                if gap in (0, end % 64):
                    np.testing.assert_array_equal(decode_group(dataclasses.replace(group, gaps=other)), bits)
                else:
                    with pytest.raises(ValueError, match="gaps disagrees"):
                        decode_group(dataclasses.replace(group, gaps=other))
            return
    pytest.fail("no such group was found")


def test_kernel_notices_wrong_gaps():
    group = encode_group(gaussian(500))
    broken = SimpleNamespace(**{part: getattr(group, part).copy() for part in PARTS})
    broken.gaps[1] ^= 0x40
    assert (kernel(broken) != kernel(group)).any()
