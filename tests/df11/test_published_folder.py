"""Folders of the published format: what is written, and that it is read again bit for bit."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import nn

import fmp
from fmp.df11 import read_dfloat11, write_dfloat11
from fmp.df11.compressed import CompressedTensor
from fmp.folders import atomic_folder
from tests.bits import same_bits

SAMPLE = Path(__file__).parent.parent / "data" / "df11_sample"
BLOCK = {r"blocks\.\d+": ["up", "down"], "head": []}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6, bias=False), nn.LayerNorm(6)


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("steps", torch.arange(3))
        if tied:
            self.head.weight = self.embed.weight


def model(tied: bool = False) -> Model:
    return Model(tied).bfloat16()


def on_meta(tied: bool = False) -> Model:
    with torch.device("meta"):
        return Model(tied)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return model().state_dict()


def test_published_model_is_read_bit_for_bit():
    original = load_file(SAMPLE / "original.safetensors")
    assert same_bits(read_dfloat11(SAMPLE / "single", original), original)


def test_published_model_is_written_byte_for_byte(tmp_path: Path):
    config = json.loads((SAMPLE / "single" / "config.json").read_text())
    original = load_file(SAMPLE / "original.safetensors")
    write_dfloat11(original, tmp_path / "again", config["dfloat11_config"]["pattern_dict"])
    assert names(tmp_path / "again") == names(SAMPLE / "single")
    for name in names(tmp_path / "again"):
        assert (tmp_path / "again" / name).read_bytes() == (SAMPLE / "single" / name).read_bytes()


@pytest.mark.parametrize("single_file", [True, False])
def test_round_trip(tmp_path: Path, state: dict[str, torch.Tensor], single_file: bool):
    before = fmp.tree.map(torch.clone, state)
    write_dfloat11(state, tmp_path / "df11", BLOCK, single_file=single_file)
    assert same_bits(state, before)
    found = read_dfloat11(tmp_path / "df11", on_meta())
    assert list(found) == list(on_meta().state_dict())
    assert same_bits(found, dict(state))
    on_meta().load_state_dict(found, assign=True)
    files = ["blocks_0.safetensors", "blocks_1.safetensors", "config.json", "head.safetensors", "model.safetensors"]
    assert names(tmp_path / "df11") == (["config.json", "model.safetensors"] if single_file else files)


def test_no_file_for_an_empty_rest(tmp_path: Path):
    write_dfloat11({"a.weight": torch.ones(2, 2).bfloat16()}, tmp_path / "df11", {"a": []}, single_file=False)
    assert names(tmp_path / "df11") == ["a.safetensors", "config.json"]


def test_trees_modules_and_compressed_nodes_write_the_same(tmp_path: Path):
    one = model()
    state = dict(one.state_dict())
    nested = {
        "embed": {"weight": state["embed.weight"]},
        "head": {"weight": CompressedTensor.compress(state["head.weight"])},
        "blocks": [
            {
                "up": {"weight": state[f"blocks.{i}.up.weight"].T.contiguous().T, "bias": state[f"blocks.{i}.up.bias"]},
                "down.weight": state[f"blocks.{i}.down.weight"],
                "norm": {name: state[f"blocks.{i}.norm.{name}"] for name in ("weight", "bias")},
            }
            for i in range(2)
        ],
        "steps": state["steps"],
    }
    for index, source in enumerate((one, state, nested)):
        write_dfloat11(source, tmp_path / str(index), BLOCK)
    first = (tmp_path / "0" / "model.safetensors").read_bytes()
    assert all((tmp_path / name / "model.safetensors").read_bytes() == first for name in ("1", "2"))


def test_tied_weights(tmp_path: Path):
    one = model(tied=True)
    write_dfloat11(one, tmp_path / "both", BLOCK | {"embed": []})
    assert same_bits(read_dfloat11(tmp_path / "both", on_meta(tied=True)), dict(one.state_dict()))
    write_dfloat11(one, tmp_path / "plain", {r"blocks\.\d+": ["up", "down"]})
    assert same_bits(read_dfloat11(tmp_path / "plain", one), dict(one.state_dict()))

    once = {name: tensor for name, tensor in one.state_dict().items() if name != "head.weight"}
    write_dfloat11(once, tmp_path / "once", {"embed": []})
    found = read_dfloat11(tmp_path / "once", on_meta(tied=True))
    assert found["head.weight"] is found["embed.weight"]
    assert same_bits(found, dict(one.state_dict()))
    with pytest.raises(KeyError, match=r"no tensor 'head\.weight'"):
        read_dfloat11(tmp_path / "once", on_meta(tied=False))


def test_empty_tensors(tmp_path: Path):
    state = {f"m.{name}.weight": torch.randn(shape).bfloat16() for name, shape in (("a", (2, 3)), ("b", (0, 5)))}
    write_dfloat11(state, tmp_path / "one", {"m": ["a", "b"]})
    assert same_bits(read_dfloat11(tmp_path / "one", state), state)
    for shape in ((0, 5), (0, 0)):
        with pytest.raises(ValueError, match=r"'m\.b'.*0 weights"):
            write_dfloat11({"m.b.weight": torch.zeros(shape).bfloat16()}, tmp_path / "none", {r"m\.b": []})
    assert names(tmp_path) == ["one"]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(2, 2), r"f32\[2,2\]"),
        (torch.ones(2, 2).half(), r"f16\[2,2\]"),
        (torch.ones(4).bfloat16(), r"bf16\[4\]"),
        (torch.ones(2, 2, 1, 1).bfloat16(), "two-dimensional"),
        (torch.tensor([[1.0, float("inf")]]).bfloat16(), "exponent 255"),
        (torch.tensor([[1.0, float("nan")]]).bfloat16(), "exponent 255"),
        (torch.tensor([[1.0, 1e37]]).bfloat16(), "exponent 249"),
        (torch.tensor([[2.0**113]]).bfloat16(), "exponent 240"),
        (torch.zeros(0, 4).bfloat16(), "0 weights"),
    ],
)
def test_what_the_format_cannot_hold(tmp_path: Path, weight: torch.Tensor, message: str):
    state = {"good.weight": torch.full((3, 3), -0.0).bfloat16(), "odd.weight": weight}
    with pytest.raises(ValueError, match=message):
        write_dfloat11(state, tmp_path / "df11", {"good|odd": []})
    assert names(tmp_path) == []
    write_dfloat11(state, tmp_path / "df11", {"good|odd": []}, unsupported="plain")
    stored = load_file(tmp_path / "df11" / "model.safetensors")
    assert "odd.weight" in stored
    assert "good.luts" in stored
    assert same_bits(read_dfloat11(tmp_path / "df11", state), state)


def test_one_odd_weight_leaves_its_whole_group_plain(tmp_path: Path):
    state = {"m.a.weight": torch.ones(3, 3).bfloat16(), "m.b.weight": torch.ones(3, 3)}
    write_dfloat11(state, tmp_path / "df11", {"m": ["a", "b"]}, unsupported="plain")
    assert same_bits(load_file(tmp_path / "df11" / "model.safetensors"), state)


def test_zeros_keep_their_signs(tmp_path: Path):
    state = {"a.weight": torch.tensor([[0.0, -0.0, 1e-40, -1e-40, 1.0]]).bfloat16()}
    write_dfloat11(state, tmp_path / "df11", {"a": []})
    assert same_bits(read_dfloat11(tmp_path / "df11", state), state)


def test_config_entries_are_kept(tmp_path: Path, state: dict[str, torch.Tensor]):
    write_dfloat11(state, tmp_path / "df11", BLOCK, config={"model_type": "tiny", "hidden_size": 6})
    config = json.loads((tmp_path / "df11" / "config.json").read_text())
    assert list(config) == ["model_type", "hidden_size", "dfloat11_config"]
    assert config["dfloat11_config"]["pattern_dict"] == BLOCK
    with pytest.raises(ValueError, match="dfloat11_config"):
        write_dfloat11(state, tmp_path / "other", BLOCK, config=config)
    with pytest.raises(TypeError):
        write_dfloat11(state, tmp_path / "other", BLOCK, config={"dtype": torch.bfloat16})
    assert names(tmp_path) == ["df11"]


@pytest.mark.parametrize(
    ("patterns", "error", "message"),
    [
        ({"nothing": []}, ValueError, "'nothing', which matches no module"),
        ({r"blocks\.0": ["up", "left"]}, KeyError, r"blocks\.0\.left\.weight"),
        ({"blocks": []}, KeyError, r"blocks\.weight"),
        ({r"blocks\.\d+": ["up"], r"blocks\.0": ["down"]}, ValueError, "both match the module"),
        ({r"blocks\.\d+": ["up"], r"blocks\.0\.up": []}, ValueError, "two groups"),
        ({r"blocks\.\d+": ["up", "up"]}, ValueError, "twice"),
        ({"head": "weight"}, TypeError, "lists of strings"),
        ({"head": [1]}, TypeError, "names of submodules"),
        ([], TypeError, "must be a dictionary"),
        ({"he(ad": []}, ValueError, "cannot be read"),
    ],
)
def test_patterns_that_do_not_fit(
    tmp_path: Path, state: dict[str, torch.Tensor], patterns: Any, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        write_dfloat11(state, tmp_path / "df11", patterns)
    assert names(tmp_path) == []


def test_inputs_that_do_not_fit(tmp_path: Path):
    weight = torch.ones(2, 2).bfloat16()
    target = tmp_path / "df11"
    with pytest.raises(TypeError, match="a must be a tensor, got int"):
        write_dfloat11({"a": 1}, target, {})
    with pytest.raises(TypeError, match="b must be a tensor, got None"):
        write_dfloat11({"b": None}, target, {})
    with pytest.raises(TypeError, match="meta"):
        write_dfloat11({"a": weight.to("meta")}, target, {})
    with pytest.raises(ValueError, match="single tensor"):
        write_dfloat11(weight, target, {})
    with pytest.raises(ValueError, match=r"two tensors of the tree have the name 'a\.b'"):
        write_dfloat11({"a.b": weight, "a": {"b": weight}}, target, {})
    with pytest.raises(ValueError, match=r"'a\.gaps' has the name of a part"):
        write_dfloat11({"a.weight": weight, "a.gaps": weight}, target, {"a": []})
    with pytest.raises(ValueError, match="single_file=True"):
        write_dfloat11({"a.b.weight": weight, "a_b.weight": weight}, target, {"a.b": []}, single_file=False)
    with pytest.raises(ValueError, match="single_file=True"):
        write_dfloat11({"model.weight": weight, "x": weight}, target, {"model": []}, single_file=False)
    with pytest.raises(ValueError, match="unsupported must be"):
        write_dfloat11({"a": weight}, target, {}, unsupported="skip")  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda x: write_dfloat11({"a": x}, target, {}))(weight)
    assert names(tmp_path) == []


def test_a_folder_is_never_half_written(
    tmp_path: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    write_dfloat11(state, tmp_path / "df11", BLOCK)
    before = (tmp_path / "df11" / "model.safetensors").read_bytes()
    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        write_dfloat11({"a": torch.ones(1)}, tmp_path / "df11", {}, overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        write_dfloat11(state, tmp_path / "new", BLOCK)
    assert names(tmp_path) == ["df11"]
    assert (tmp_path / "df11" / "model.safetensors").read_bytes() == before


def test_what_is_there_is_not_lost(tmp_path: Path, state: dict[str, torch.Tensor]):
    folder = tmp_path / "df11"
    folder.mkdir()
    write_dfloat11(state, folder, BLOCK, single_file=False)
    with pytest.raises(FileExistsError, match="not empty"):
        write_dfloat11(state, folder, BLOCK)
    write_dfloat11(state, folder, BLOCK, overwrite=True)
    assert names(folder) == ["config.json", "model.safetensors"]

    (folder / "tokenizer.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"'tokenizer\.json', which would be lost"):
        write_dfloat11(state, folder, BLOCK, overwrite=True)
    assert names(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    with pytest.raises(FileExistsError, match="is a file"):
        write_dfloat11(state, folder / "config.json", BLOCK, overwrite=True)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        write_dfloat11(state, tmp_path / "no" / "where", BLOCK)
    assert names(tmp_path) == ["df11"]


def test_files_that_come_while_writing_are_not_lost(tmp_path: Path):
    target = tmp_path / "df11"

    def race() -> None:
        with atomic_folder(target) as temporary:
            (temporary / "ours").touch()
            target.mkdir()
            (target / "theirs").touch()

    with pytest.raises(FileExistsError, match="not empty"):
        race()
    assert names(tmp_path) == ["df11"]
    assert names(target) == ["theirs"]


@pytest.mark.skipif(os.name != "posix", reason="needs symbolic links")
def test_a_link_to_a_folder_is_followed(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_dfloat11({"a": torch.ones(1)}, tmp_path / "link", {})
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == ["config.json", "model.safetensors"]
