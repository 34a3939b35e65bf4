"""Reading a folder of the published format: with and without a skeleton, and every way in which the two may not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fmp.df11 import read_dfloat11, write_dfloat11
from fmp.errors import DF11Error
from tests.bits import same_bits
from tests.df11.test_published_folder import BLOCK, model


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return model().state_dict()


@pytest.fixture
def folder(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    write_dfloat11(state, tmp_path / "df11", BLOCK)
    return tmp_path / "df11"


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_patterns(folder: Path, patterns: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["dfloat11_config"]["pattern_dict"] = patterns
    (folder / "config.json").write_text(json.dumps(config))


def test_without_a_skeleton(folder: Path, state: dict[str, torch.Tensor]):
    with pytest.raises(ValueError, match="holds no shapes"):
        read_dfloat11(folder)
    with pytest.raises(ValueError, match="holds no shapes"):
        read_dfloat11(folder, state, flat=True)
    found = read_dfloat11(folder, flat=True)
    assert sorted(found) == list(found) == sorted(state)
    assert found["head.weight"].shape == (54,)
    assert found["steps"].dtype == torch.int64
    assert same_bits({name: found[name].reshape(state[name].shape) for name in state}, dict(state))


def test_results_share_no_memory(folder: Path, state: dict[str, torch.Tensor]):
    found = read_dfloat11(folder, state)
    save_file(found, folder.parent / "again.safetensors")
    for tensor in found.values():
        tensor.zero_()
    assert same_bits(read_dfloat11(folder, state), dict(state))


def test_other_names_than_the_skeleton(folder: Path, state: dict[str, torch.Tensor]):
    with pytest.raises(KeyError, match=r"no tensor 'more'"):
        read_dfloat11(folder, {**state, "more": torch.ones(1)})
    for name in ("steps", "head.weight", "blocks.1.down.weight"):
        with pytest.raises(KeyError, match=f"no tensor '{name}'"):
            read_dfloat11(folder, {other: tensor for other, tensor in state.items() if other != name})


@pytest.mark.parametrize(
    ("name", "shape"), [("steps", (4,)), ("head.weight", (9, 7)), ("blocks.0.up.weight", (60, 2)), ("embed.weight", ())]
)
def test_other_shapes_than_the_skeleton(
    folder: Path, state: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]
):
    shapes = {other: tuple(tensor.shape) for other, tensor in state.items()} | {name: shape}
    with pytest.raises(ValueError, match=rf"'{name}' has"):
        read_dfloat11(folder, shapes)


def test_other_kinds_than_the_skeleton(folder: Path, state: dict[str, torch.Tensor]):
    for name, tensor in (("steps", torch.ones(3)), ("embed.weight", torch.ones(9, 6, dtype=torch.int64))):
        with pytest.raises(ValueError, match=f"'{name}' is stored as"):
            read_dfloat11(folder, {**state, name: tensor})
    with pytest.raises(ValueError, match=r"'head\.weight' is compressed bf16"):
        read_dfloat11(folder, {**state, "head.weight": torch.ones(9, 6, dtype=torch.int64)})
    for skeleton in (3, {"a": "b"}, {"a": (1, -1)}, {"a": (True, 4)}, {"a": 4}):
        with pytest.raises(TypeError, match="skeleton"):
            read_dfloat11(folder, skeleton)  # pyright: ignore[reportArgumentType]


def test_a_dtype_that_torch_cannot_read_is_named(folder: Path, state: dict[str, torch.Tensor]):
    entry = b'{"q":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    (folder / "more.safetensors").write_bytes(len(entry).to_bytes(8, "little") + entry + b"ab")
    with pytest.raises(DF11Error, match="'q' has the dtype F4, which cannot be read"):
        read_dfloat11(folder, {**state, "q": (4,)})


def test_the_default_device_does_not_matter(tmp_path: Path, state: dict[str, torch.Tensor]):
    with torch.device("meta"):
        write_dfloat11(state, tmp_path / "df11", BLOCK)
        found = read_dfloat11(tmp_path / "df11", state)
    assert same_bits(found, dict(state))


@pytest.mark.parametrize("part", ["luts", "encoded_exponent", "sign_mantissa", "output_positions", "gaps"])
def test_parts_that_are_missing_or_wrong(folder: Path, state: dict[str, torch.Tensor], part: str):
    key = f"blocks.1.{part}"
    whole = load_file(folder / "model.safetensors")[key].clone()
    for wrong in (whole.long(), whole.view(torch.int8), whole[None], whole[:0]):
        edit(folder, lambda tensors, wrong=wrong: tensors.update({key: wrong.contiguous()}))
        with pytest.raises(ValueError, match=r"blocks\.1"):
            read_dfloat11(folder, state)
    edit(folder, lambda tensors: tensors.pop(key))
    with pytest.raises(KeyError, match=f"'{key}' is missing"):
        read_dfloat11(folder, state)
    with pytest.raises(KeyError, match=f"'{key}' is missing"):
        read_dfloat11(folder, flat=True)


def test_wrong_split_positions(folder: Path, state: dict[str, torch.Tensor]):
    for wrong in ([], [60, 60], [-1], [121], [59], [61]):
        edit(
            folder,
            lambda tensors, wrong=wrong: tensors.update({"blocks.0.split_positions": torch.tensor(wrong).long()}),
        )
        with pytest.raises(ValueError, match=r"blocks\.0"):
            read_dfloat11(folder, state)
    edit(folder, lambda tensors: tensors.update({"blocks.0.split_positions": torch.tensor([200])}))
    with pytest.raises(ValueError, match=r"blocks\.0\.split_positions"):
        read_dfloat11(folder, flat=True)


def test_missing_extra_and_doubled_shards(tmp_path: Path, state: dict[str, torch.Tensor]):
    folder = tmp_path / "df11"
    write_dfloat11(state, folder, BLOCK, single_file=False)
    (folder / "copy.safetensors").write_bytes((folder / "head.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"'head\.\w+' is in copy.safetensors and in head.safetensors"):
        read_dfloat11(folder, state)
    save_file({"stranger": torch.ones(1)}, folder / "copy.safetensors")
    with pytest.raises(KeyError, match="no tensor 'stranger'"):
        read_dfloat11(folder, state)
    (folder / "copy.safetensors").unlink()
    (folder / "blocks_1.safetensors").unlink()
    with pytest.raises(KeyError, match=r"no tensor 'blocks\.1\.up\.weight'"):
        read_dfloat11(folder, state)


def test_weights_in_two_places(folder: Path, state: dict[str, torch.Tensor]):
    edit(folder, lambda tensors: tensors.update({"head.weight": state["head.weight"]}))
    with pytest.raises(ValueError, match=r"'head\.weight' is in the group 'head', and stored in another place"):
        read_dfloat11(folder, state)


def test_order_in_pattern_dict_is_noticed_by_sizes_only(tmp_path: Path):
    state = {f"m.{name}.weight": torch.randn(size, 4).bfloat16() for name, size in (("a", 2), ("b", 2), ("c", 3))}
    write_dfloat11(state, tmp_path / "df11", {"m": ["a", "b", "c"]})
    edit_patterns(tmp_path / "df11", {"m": ["a", "c", "b"]})
    with pytest.raises(ValueError, match=r"'m\.c\.weight' has 8 weights.*order in pattern_dict"):
        read_dfloat11(tmp_path / "df11", state)
    edit_patterns(tmp_path / "df11", {"m": ["b", "a", "c"]})
    swapped = read_dfloat11(tmp_path / "df11", state)
    assert same_bits(swapped["m.a.weight"], state["m.b.weight"])
    edit_patterns(tmp_path / "df11", {"m": ["a", "b"]})
    with pytest.raises(ValueError, match="3 tensors, and pattern_dict"):
        read_dfloat11(tmp_path / "df11", flat=True)
    with pytest.raises(KeyError, match=r"no tensor 'm\.c\.weight'"):
        read_dfloat11(tmp_path / "df11", state)
    edit_patterns(tmp_path / "df11", {})
    with pytest.raises(ValueError, match="which no pattern"):
        read_dfloat11(tmp_path / "df11", state)
