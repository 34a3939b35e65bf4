"""Damaged and malicious files of the published format: an error, or weights of the right shapes; never a crash."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from fmp.df11 import read_dfloat11, write_dfloat11
from fmp.df11.published.patterns import Patterns
from fmp.df11_codec.published.groups import Group, decode_group, encode_group
from tests.df11.published_oracle import gaussian, weights
from tests.df11.test_published_groups import COMPILED, PARTS

SKELETON = {"a.weight": (9, 11), "b.p.weight": (4, 5), "b.q.weight": (5, 3), "b.p.bias": (4,)}
PATTERNS = {"a": [], "b": ["p", "q"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    values = {name: torch.randn(shape).bfloat16() for name, shape in SKELETON.items()}
    write_dfloat11(values, tmp_path / "small", PATTERNS)
    return tmp_path / "small"


def flips(group: Group, part: str) -> list[tuple[int, Group]]:
    result = []
    for bit in range(8 * getattr(group, part).size):
        damaged = getattr(group, part).copy()
        damaged.reshape(-1)[bit // 8] ^= 128 >> bit % 8
        result.append((bit, dataclasses.replace(group, **{part: damaged})))
    return result


def outcome(group: Group, compiled: bool = False) -> np.ndarray | None:
    try:
        return decode_group(group, compiled=compiled)
    except ValueError:
        return None


@pytest.mark.parametrize("part", ["gaps", "output_positions"])
@pytest.mark.parametrize("compiled", COMPILED)
def test_each_flipped_bit_of_gaps_and_positions_is_noticed(part: str, compiled: bool):
    for bits in (gaussian(400), weights([100] * 40000)):
        # Most chunks are empty, or all alike.
        for bit, damaged in flips(encode_group(bits), part):
            if bit < 150 or bit % 31 == 0:
                assert outcome(damaged, compiled) is None, bit


def test_flipped_bits_of_the_tables_are_noticed():
    bits = np.concatenate([gaussian(700), weights([1, 60, 200])])
    group = encode_group(bits)
    assert len(group.luts) > 2
    # What repeats another entry, in the end symbol's place, may be read by nobody.
    outcomes = [outcome(damaged) for _, damaged in flips(group, "luts")]
    assert all(found is None or np.array_equal(found, bits) for found in outcomes)
    assert sum(found is not None for found in outcomes) < 20


@pytest.mark.parametrize("compiled", COMPILED)
def test_flipped_bits_of_the_codes_never_change_the_size(compiled: bool):
    bits = gaussian(700)
    outcomes = [outcome(damaged, compiled) for _, damaged in flips(encode_group(bits), "encoded_exponent")]
    assert all(found is None or found.shape == bits.shape for found in outcomes)
    assert sum(found is None for found in outcomes) > 0.25 * len(outcomes)


@pytest.mark.parametrize("compiled", COMPILED)
def test_backends_agree_on_what_is_damaged(compiled: bool):
    group = encode_group(gaussian(300, scale=1.0))
    for part in PARTS[:2]:
        for _, damaged in flips(group, part)[::3]:
            one, other = outcome(damaged, compiled), outcome(damaged, False)
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                np.testing.assert_array_equal(one, other)


@given(st.data())
def test_any_arrays_at_all(data: st.DataObject):
    group = encode_group(gaussian(data.draw(st.integers(1, 200))))
    part = data.draw(st.sampled_from(PARTS))
    size = getattr(group, part).size
    damaged = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8).copy()
    damaged = damaged.reshape(getattr(group, part).shape)
    found = outcome(dataclasses.replace(group, **{part: damaged}))
    assert found is None or found.shape == group.sign_mantissa.shape


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_another_size(part: str):
    group = encode_group(gaussian(5000))
    for size in (-1, 1, 400, 5000):
        stored = getattr(group, part)
        damaged = stored[:size] if size < 0 else np.concatenate([stored, np.zeros((size, *stored.shape[1:]), np.uint8)])
        assert outcome(dataclasses.replace(group, **{part: damaged})) is None, size
    assert outcome(dataclasses.replace(group, **{part: getattr(group, part)[:0]})) is None


def test_tables_that_loop_or_point_nowhere():
    group = encode_group(np.concatenate([gaussian(700), weights([1, 60, 200])]))
    rows = len(group.luts) - 1
    for row, value in ((0, 255), (rows - 1, 255), (0, 240), (rows - 1, 256 - rows)):
        for index in range(256):
            luts = group.luts.copy()
            luts[row, index] = value
            found = outcome(dataclasses.replace(group, luts=luts))
            assert found is None or found.shape == group.sign_mantissa.shape


def test_a_code_that_another_one_took_over():
    group = encode_group(weights(np.repeat(np.arange(100, 110), 3 ** np.arange(10))))
    symbol = int(np.flatnonzero(group.luts[-1] == 8)[0])
    place = int(np.flatnonzero(group.luts[0] == symbol)[0])
    luts = group.luts.copy()
    luts[0, place] = luts[0, place - 1]
    with pytest.raises(ValueError, match=f"exponent {symbol} has a length, but no code"):
        decode_group(dataclasses.replace(group, luts=luts))


@pytest.mark.parametrize("compiled", COMPILED)
def test_positions_that_do_not_rise(compiled: bool):
    group = encode_group(weights([100] * 100_000))
    positions = group.output_positions.view("<u4")
    assert positions.tolist() == [0, 32768, 65536, 98304, 100_000]
    for wrong in ([0, 65536, 32768], [0, 0, 65536], [0, 100_000, 100_000], [1, 32768, 65536], [0, 2**32 - 1, 65536]):
        damaged = np.array([*wrong, 98304, 100_000], "<u4").view(np.uint8)
        with pytest.raises(ValueError, match="must rise from 0"):
            decode_group(dataclasses.replace(group, output_positions=damaged), compiled=compiled)


def test_zero_streams_and_all_ones():
    group = encode_group(gaussian(3000))
    for value in (0, 255):
        assert outcome(dataclasses.replace(group, encoded_exponent=np.full_like(group.encoded_exponent, value))) is None


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_each_byte_of_a_file_flipped(folder: Path, mask: int):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    noticed = 0
    header = 8 + int.from_bytes(whole[:8], "little")
    # All of the header; of the parts, whose bits are tested one by one above, only some.
    for place in [*range(0, header, 1 if mask == 1 else 7), *range(header, len(whole), 7)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])
        try:
            found = read_dfloat11(folder, SKELETON)
        except (ValueError, KeyError):
            noticed += 1
        else:
            assert {name: tuple(tensor.shape) for name, tensor in found.items()} == SKELETON
    assert noticed > (header // 2 if mask == 1 else header // 14)


def test_truncated_files(folder: Path):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in [0, 1, 7, 8, 9, header - 1, header, header + 1, *range(header + 100, len(whole), 500), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged or incomplete"):
            read_dfloat11(folder, SKELETON)


@pytest.mark.parametrize("size", [0, 1, 20, -1])
def test_truncated_config(folder: Path, size: int):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[:size])
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_dfloat11(folder, SKELETON)


@pytest.mark.parametrize(
    "config",
    [
        *([], 1, {}, {"dfloat11_config": []}, {"dfloat11_config": {}}),
        {"dfloat11_config": {"threads_per_block": [256], "bytes_per_thread": 8, "pattern_dict": PATTERNS}},
        {"dfloat11_config": {"threads_per_block": [512], "bytes_per_thread": 4, "pattern_dict": PATTERNS}},
        *(
            {"dfloat11_config": {"threads_per_block": [512], "bytes_per_thread": 8, "pattern_dict": patterns}}
            for patterns in ([], {"a": 1}, {"a": [1]}, {"(": []}, {"(?=a)": []}, {"b": ["p", "p"]}, {"a": [""]})
        ),
    ],
)
def test_wrong_configs(folder: Path, config: object):
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json"):
        read_dfloat11(folder, SKELETON)


def test_deep_json_is_refused(folder: Path):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="not valid JSON"):
        read_dfloat11(folder, SKELETON)


@pytest.mark.parametrize("pattern", ["(?=a)a", "x" * 501, "(a{99}){99}", "(ab"])
def test_patterns_that_cannot_be_read_are_refused(pattern: str):
    with pytest.raises(ValueError, match=r"pattern_dict has the pattern .*, which cannot be read: "):
        Patterns({pattern: []})


def test_a_pattern_of_a_file_takes_no_time(folder: Path):
    # Python's engine would be busy for years.
    config = json.loads((folder / "config.json").read_text())
    config["dfloat11_config"]["pattern_dict"]["}+" * 12 + "x"] = []
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "}" * 60 + ".gaps": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"which no pattern in config\.json matches"):
        read_dfloat11(folder, SKELETON)


def test_names_may_be_long(tmp_path: Path):
    name = "blocks." * 60 + "7"
    values = {f"{name}.weight": torch.ones(2, 2).bfloat16()}
    write_dfloat11(values, tmp_path / "long", {r"(blocks\.)+\d+": []})
    assert f"{name}.luts" in load_file(tmp_path / "long" / "model.safetensors")
    assert read_dfloat11(tmp_path / "long", values).keys() == values.keys()


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"model\.layers\.\d+", "lm_head", r"transformer_blocks.\d+", r"(?:vision|text)\.blocks\.\d+\.attn"),
        *(r".*\.\d+?\.mlp", r"[()*+?]+", r"\(\*\+\?\{", "a|b|c|d|e|f|g"),
        *(r"^model\.layers\.[0-9]+$", r"(double|single)_blocks\.\d{1,2}", r"(?:\w+\.)*mlp", r"a(b(c|d)*)+"),
    ],
)
def test_usual_patterns_are_accepted(pattern: str):
    assert Patterns({pattern: []}).as_dict == {pattern: []}


def test_a_missing_file_and_folder(folder: Path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        read_dfloat11(folder, SKELETON)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_dfloat11(folder, SKELETON)
