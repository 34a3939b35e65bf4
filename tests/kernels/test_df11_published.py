"""The decoder of the published format: what the CPU decodes, in every schedule; and damage, which it reports."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

from fmp.df11 import read_dfloat11, write_dfloat11
from fmp.df11_codec.published.groups import Group, decode_group, encode_group
from fmp.errors import DF11Error
from fmp.kernels import df11_published, eligible, launch, nvrtc, trust
from tests.bits import same_bits
from tests.cuda_executor import SCHEDULES, LaunchError, Module
from tests.df11.published_oracle import gaussian, weights
from tests.kernels import harness
from tests.kernels.harness import needs_executor

pytestmark = needs_executor
SAMPLE = Path(__file__).parents[1] / "data" / "df11_sample"
PARTS = df11_published.Parts._fields
BLOCK_BITS = 8 * 4096


def decode(module: Module, group: Group) -> tuple[np.ndarray, bool]:
    """Launches the kernel, and returns the numbers and whether they are damaged."""
    out, damaged = np.zeros(len(group.sign_mantissa), np.uint16), np.zeros(1, np.uint32)
    read = {part: getattr(group, part) for part in PARTS}
    sizes = len(group.luts) - 1, len(group.encoded_exponent), len(out), len(group.output_positions) // 4
    pointers = [array.ctypes.data for array in (*read.values(), out, damaged)]
    blocks = -(-len(group.encoded_exponent) // 4096)
    with module.memory(read=read, written={"out": out, "damaged": damaged}):
        kernel = module.get_function("df11_published_decode")
        kernel((blocks,), (512,), (*pointers, *(np.uint32(size) for size in sizes)))
    return out, bool(damaged[0])


def restores(module: Module, group: Group, bits: np.ndarray) -> bool:
    out, damaged = decode(module, group)
    return not damaged and np.array_equal(out, bits)


@pytest.fixture(scope="module", params=["fast", "checked"])
def module(request: pytest.FixtureRequest) -> Module:
    return harness.module("df11_published", request.param)


@pytest.fixture(scope="module")
def checked() -> Module:
    return harness.module("df11_published", "checked")


@pytest.fixture
def on_executor(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the product launch its kernels on the CPU; returns the sources that it asks for."""
    kernels, asked = harness.module("df11_published", "fast"), []
    monkeypatch.setattr(eligible, "has_kernels", lambda device: True)
    monkeypatch.setattr(trust, "_verdicts", {("df11_published", torch.device("cpu")): None})
    monkeypatch.setattr(launch, "module_on", lambda device, of: (asked.append(of), kernels)[1])
    return asked


def with_exponents(counts: dict[int, int]) -> np.ndarray:
    exponents = np.repeat(list(counts), list(counts.values()))
    return weights(np.random.default_rng(len(exponents)).permutation(exponents))


def sample(name: str) -> tuple[Group, np.ndarray]:
    stored = load_file(SAMPLE / "single" / "model.safetensors")
    group = Group(**{part: stored[f"{name}.{part}"].numpy() for part in PARTS})
    return group, decode_group(group)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_published_sample(module, schedule):
    module.schedule = schedule
    for name in ("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"):
        assert restores(module, *sample(name)), name
    stored = load_file(SAMPLE / "edge_two_symbols.safetensors")
    original = torch.cat([stored[f"original.{index}.weight"].flatten() for index in (0, 1)]).view(torch.int16)
    group = Group(**{part: stored[f"g.{part}"].numpy() for part in PARTS})
    assert restores(module, group, original.numpy().view(np.uint16))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sizes_at_the_edges(module, schedule):
    """One exponent makes codes of one bit: 64 in each chunk, 32768 in a block, which is as many as fit."""
    module.schedule = schedule
    for n in (1, 2, 7, 8, 9, 63, 64, 65, 129, BLOCK_BITS - 1, BLOCK_BITS, BLOCK_BITS + 1):
        bits = weights([100] * n, n)
        assert restores(module, encode_group(bits), bits), n
    for n in (1, 23, 24, 25, 97, 700):
        bits = gaussian(n, n)
        assert restores(module, encode_group(bits), bits), n


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_codes_of_all_lengths(module, schedule):
    module.schedule = schedule
    fibonacci = [1, 1]
    while len(fibonacci) < 22:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    deep = with_exponents({5 * i: count for i, count in enumerate(fibonacci)})
    flat = with_exponents(dict.fromkeys(range(240), 5))
    wide = with_exponents({i: 16 if i < 32 else 8 if i < 208 else 4 for i in range(240)})
    for bits in (deep, flat, wide):
        assert restores(module, encode_group(bits), bits)
    assert encode_group(deep).luts[-1].max() > 16
    assert len(encode_group(wide).luts) == 18


def long_codes() -> Group:
    """Codes of 1 to 32 bits in four tables, for which the writer would need millions of weights."""
    lengths = np.zeros(256, np.uint8)
    lengths[1:32], lengths[32:34] = np.arange(1, 32), (32, 32)
    luts = np.zeros((5, 256), np.uint8)
    codes = {}
    for symbol in range(1, 34):
        length = int(lengths[symbol])
        code = (1 << length) - 2 if symbol < 33 else (1 << length) - 1
        codes[symbol] = f"{code:0{length}b}"
        row, last = divmod(length - 1, 8)
        first = (code << 7 - last) & 255
        luts[row, first : first + (1 << 7 - last)] = symbol
    luts[:3, 255] = 255, 254, 253
    luts[4] = lengths
    symbols = np.random.default_rng(0).permutation(np.tile(np.arange(1, 34), 3))
    text = "".join(codes[symbol] for symbol in symbols)
    starts = np.cumsum([0, *(len(codes[symbol]) for symbol in symbols)])
    gaps = np.zeros(512, np.uint8)
    for start in starts[-2::-1]:
        gaps[start // 64] = start % 64
    stream = np.packbits([int(bit) for bit in text])
    positions = np.array([0, len(symbols)], "<u4").view(np.uint8)
    packed = np.packbits((gaps[:, None] >> np.arange(4, -1, -1)) & 1)
    return Group(luts, stream, np.arange(len(symbols), dtype=np.uint8), positions, packed)


def test_codes_of_32_bits(module):
    group = long_codes()
    bits = decode_group(group)
    assert set(np.unique(bits >> 7 & 255)) == set(range(1, 34))
    for module.schedule in SCHEDULES:
        assert restores(module, group, bits)


def test_what_is_no_code_is_found_where_the_next_chunk_happens_to_fit(checked):
    """Bit 10 is set and begins no code; the next chunk's first code starts at bit 10, which is where it would end."""
    luts, stream, gaps = np.zeros((2, 256), np.uint8), np.zeros(16, np.uint8), np.zeros(320, np.uint8)
    luts[0, :128], luts[1, 100] = 100, 1
    positions = np.array([0, 65], "<u4").view(np.uint8)
    stream[1], gaps[:2] = 0b00100000, (0b00000_010, 0b10_000000)
    assert agrees(checked, Group(luts, stream, np.zeros(65, np.uint8), positions, gaps))
    stream[1], gaps[:2], positions[0:8] = 0, 0, np.array([0, 128], "<u4").view(np.uint8)
    assert not agrees(checked, Group(luts, stream, np.zeros(128, np.uint8), positions, gaps))


def test_an_entry_that_is_missing_at_the_end(module):
    bits = weights([100] * (BLOCK_BITS + 5))
    group = encode_group(bits)
    assert restores(module, dataclasses.replace(group, output_positions=group.output_positions[:-4]), bits)


@pytest.mark.parametrize("part", ["sign_mantissa", "encoded_exponent", "output_positions", "gaps", "luts"])
def test_parts_that_begin_anywhere(checked, part):
    bits = gaussian(3000)
    group = encode_group(bits)
    stored = getattr(group, part)
    for shift in (1, 4, 7):
        moved = np.zeros(stored.size + shift, np.uint8)[shift:].reshape(stored.shape)
        moved[...] = stored
        assert restores(checked, dataclasses.replace(group, **{part: moved}), bits)


def outcome(group: Group) -> np.ndarray | None:
    try:
        return decode_group(group)
    except ValueError:
        return None


def agrees(module: Module, group: Group) -> bool:
    """Decodes what may be damaged, compares with the CPU, and returns whether it is."""
    expected, (out, damaged) = outcome(group), decode(module, group)
    assert damaged == (expected is None)
    if expected is not None:
        np.testing.assert_array_equal(out, expected)
    return damaged


def with_part(group: Group, part: str, content: np.ndarray) -> Group:
    stored = getattr(group, part)
    return dataclasses.replace(group, **{part: content.view(np.uint8).reshape(-1, *stored.shape[1:])})


def flipped(group: Group, part: str, bit: int) -> Group:
    content = getattr(group, part).copy()
    content.reshape(-1)[bit // 8] ^= 128 >> bit % 8
    return with_part(group, part, content)


SMALL, ALIKE, LARGE = gaussian(700), weights([100] * (BLOCK_BITS + 100)), gaussian(40_000)


@pytest.mark.parametrize("part", ["gaps", "output_positions", "encoded_exponent"])
def test_flipped_bits_are_found_where_the_cpu_finds_them(checked, part):
    """Each is survived: the checker sees every access. What is not reported is what the CPU makes of it."""
    checked.schedule = "reverse"
    noticed = 0
    for bits, most in ((SMALL, 150), (ALIKE, 40), (LARGE, 25)):
        group = encode_group(bits)
        assert not agrees(checked, group)
        size = 8 * getattr(group, part).size
        places = {*range(min(most // 2, size)), *range(0, size, size // most + 1), size - 1}
        noticed += sum(agrees(checked, flipped(group, part, bit)) for bit in places)
    assert noticed > 50


def test_gaps_behind_the_last_code(checked):
    """Where the last code ends in a chunk of its own, its end may be there, or nothing; further on, nothing."""
    spilled = set()
    for n in range(1, 131, 3):
        for bits in (weights([100] * n), gaussian(n)):
            group = encode_group(bits)
            assert restores(checked, group, bits)
            chunks = -(-len(group.encoded_exponent) // 8)
            gaps = np.packbits(np.unpackbits(group.gaps).reshape(-1, 5), axis=1)[:, 0] >> 3
            for chunk in (chunks - 1, chunks, chunks + 1):
                for gap in {0, 1, int(gaps[chunk]) ^ 1, int(gaps[chunk]) ^ 8}:
                    other = gaps.copy()
                    other[chunk] = gap
                    packed = np.packbits((other[:, None] >> np.arange(4, -1, -1, dtype=np.uint8)) & 1)
                    damaged = agrees(checked, with_part(group, "gaps", packed))
                    if not damaged and gap != gaps[chunk]:
                        spilled.add(chunk - chunks)
    assert spilled == {-1}


def test_flipped_bits_of_the_tables_are_survived(checked):
    checked.schedule = "forward"
    group = encode_group(np.concatenate([SMALL, weights([1, 60, 200])]))
    assert len(group.luts) > 2
    for bit in range(0, 8 * group.luts.size, 23):
        damaged = flipped(group, "luts", bit)
        out, found = decode(checked, damaged)
        expected = outcome(damaged)
        if expected is not None:
            assert not found
            np.testing.assert_array_equal(out, expected)


def test_truncated_parts(checked):
    """Of sizes that the host cannot know to be wrong."""
    checked.schedule = "random threads"
    for bits in (SMALL, LARGE):
        group = encode_group(bits)
        size = len(group.encoded_exponent)
        for missing in [0, 1, 2, 3, 4, 7, 8, 9, 12, 60, 100, size % 4096 - 1]:
            short = with_part(group, "encoded_exponent", group.encoded_exponent[: size - missing])
            assert agrees(checked, short) == (missing > 0)
        for missing in [0, 1, 2, 3, 8, 24, 25, 26, 100, 699]:
            short = with_part(group, "sign_mantissa", group.sign_mantissa[: len(bits) - missing])
            assert agrees(checked, short) == (missing > 0)
        for tables in range(1, len(group.luts) - 1):
            decode(checked, with_part(group, "luts", group.luts[: tables + 1]))


def test_positions_that_do_not_rise(checked):
    group = encode_group(weights([100] * 100_000))
    right = [0, 32768, 65536, 98304, 100_000]
    assert group.output_positions.view("<u4").tolist() == right
    wrongs = [[0, 65536, 32768], [0, 0, 65536], [0, 100_000, 100_000], [1, 32768, 65536], [0, 2**32 - 1, 65536]]
    for wrong in [*wrongs, [0, 32768, 65536 + 2**24]]:
        assert agrees(checked, with_part(group, "output_positions", np.array([*wrong, *right[3:]], "<u4")))
    for last in (0, 98304, 99_999, 100_001, 2**32 - 1):
        assert agrees(checked, with_part(group, "output_positions", np.array([*right[:4], last], "<u4")))


@given(
    st.sampled_from([SMALL, ALIKE, gaussian(17)]),
    st.sets(st.sampled_from(PARTS), min_size=1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([256, 16, 1]),
    st.sampled_from(SCHEDULES),
)
@settings(max_examples=60)
def test_noise_neither_hangs_nor_leaves_its_memory(checked, bits, parts, seed, kinds, schedule):
    checked.schedule = schedule
    random, group = np.random.default_rng(seed), encode_group(bits)
    values = random.integers(0, 256, kinds, np.uint8)
    for part in sorted(parts):
        content = random.choice(values, getattr(group, part).size)
        group = with_part(group, part, content)
    if "luts" in parts:  # without those of a code, nothing can be said of the numbers
        decode(checked, group)
    else:
        agrees(checked, group)


def test_tables_that_lead_back_to_themselves(checked):
    """A walk ends after four of them."""
    group = encode_group(np.concatenate([SMALL, weights([1, 60, 200])]))
    for value in (255, 254, 240):
        luts = group.luts.copy()
        luts[:-1] = value
        assert decode(checked, dataclasses.replace(group, luts=luts))[1]
    longest = dataclasses.replace(group, luts=np.concatenate([luts[:1]] * 17 + [np.full((1, 256), 255, np.uint8)]))
    assert decode(checked, longest)[1]


def test_the_checker_watches_these_launches(checked):
    group = encode_group(SMALL)
    short = group.gaps[:-250]
    with pytest.raises(LaunchError, match=r"out of bounds|where no buffer is"):
        decode(checked, dataclasses.replace(group, gaps=short))


def tensors(group: Group) -> df11_published.Parts:
    return df11_published.Parts(*(torch.from_numpy(getattr(group, part)) for part in PARTS))


def as_bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def test_the_way_to_the_gpu(on_executor):
    for bits in (SMALL, LARGE, SMALL):
        out, damaged = df11_published.decode(tensors(encode_group(bits)))
        assert damaged.shape == ()
        assert not damaged
        assert same_bits(out, as_bf16(bits))
        assert df11_published.decode(tensors(flipped(encode_group(bits), "gaps", 9)))[1]
    assert set(on_executor) == {"df11_published"}


def test_a_group_is_checked_as_on_the_cpu(on_executor):
    cpu, group = torch.device("cpu"), encode_group(SMALL)
    assert same_bits(df11_published.restore(group, cpu), as_bf16(SMALL))
    for part in PARTS:
        for bit in range(0, 8 * getattr(group, part).size, 97):
            damaged = flipped(group, part, bit)
            expected = outcome(damaged)
            if expected is None:
                with pytest.raises(ValueError, match=r"luts|encoded_exponent|output_positions|gaps"):
                    df11_published.restore(damaged, cpu)
            else:
                assert same_bits(df11_published.restore(damaged, cpu), as_bf16(expected))


def test_folders_are_decoded_by_the_kernel(on_executor, tmp_path):
    original = load_file(SAMPLE / "original.safetensors")
    assert same_bits(read_dfloat11(SAMPLE / "single", original, device="cpu"), original)
    assert len(on_executor) == 4
    weight = as_bf16(SMALL).reshape(20, 35)
    write_dfloat11({"a.weight": weight, "a.bias": weight[0]}, tmp_path / "df11", {"a": []})
    path = tmp_path / "df11" / "model.safetensors"
    whole = bytearray(path.read_bytes())
    place = whole.index(encode_group(SMALL).gaps.tobytes())
    whole[place + 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(DF11Error, match="the group 'a' is damaged: gaps disagrees with the codes at bit"):
        read_dfloat11(tmp_path / "df11", {"a.weight": (20, 35), "a.bias": (35,)}, device="cpu")


def test_folders_are_decoded_by_the_host_where_the_kernel_cannot(on_executor, monkeypatch):
    def refuse(device: torch.device, of: str) -> Any:
        raise nvrtc.NvrtcError("df11_published.cu for sm_70")

    monkeypatch.setattr(trust, "_verdicts", {})
    monkeypatch.setattr(launch, "module_on", refuse)
    original = load_file(SAMPLE / "original.safetensors")
    with pytest.warns(RuntimeWarning, match="the kernel 'df11_published' cannot run .* so the host decodes") as warned:
        assert same_bits(read_dfloat11(SAMPLE / "single", original, device="cpu"), original)
    assert len(warned) == 1


def test_folders_go_to_the_device():
    original = load_file(SAMPLE / "original.safetensors")
    found = read_dfloat11(SAMPLE / "single", original, device="meta")
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in original.items()}
    assert {tensor.device.type for tensor in found.values()} == {"meta"}


@pytest.mark.parametrize(
    ("name", "change", "error", "match"),
    [
        ("luts", lambda part: part[:, :255].contiguous(), ValueError, r"luts must be u8\[2 to 18, 256\]"),
        ("luts", lambda part: part[:1], ValueError, "luts must be"),
        ("luts", lambda part: part.repeat(9, 1)[:19], ValueError, "luts must be"),
        ("luts", lambda part: part.flatten(), ValueError, "luts must be"),
        ("encoded_exponent", lambda part: part[:0], ValueError, "must have 1 to 2147483647"),
        ("encoded_exponent", lambda part: part.repeat(60), ValueError, "output_positions has 8 bytes"),
        ("sign_mantissa", lambda part: part[:0], ValueError, "must have 1 to 2147483647"),
        ("output_positions", lambda part: part[:3], ValueError, "1 blocks need 8"),
        ("output_positions", lambda part: part.repeat(2), ValueError, "1 blocks need 8"),
        ("gaps", lambda part: part[:-1], ValueError, "1 blocks need 320"),
        ("gaps", lambda part: part.repeat(2), ValueError, "1 blocks need 320"),
        ("gaps", lambda part: part.int(), TypeError, "gaps must be contiguous"),
        ("sign_mantissa", lambda part: part.repeat(2)[::2], TypeError, "sign_mantissa must be contiguous"),
        ("output_positions", lambda part: part.to("meta"), TypeError, "output_positions must be .* on cpu"),
    ],
)
def test_parts_that_do_not_fit_are_not_launched(monkeypatch, name, change, error, match):
    monkeypatch.setattr(launch, "module_on", lambda device, of: pytest.fail("launched"))
    parts: Any = tensors(encode_group(SMALL))
    with pytest.raises(error, match=match):
        df11_published.decode(parts._replace(**{name: change(getattr(parts, name))}))
