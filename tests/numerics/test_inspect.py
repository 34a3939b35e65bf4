import argparse
import gc
import json
import sys
import weakref

import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st

from fmp import df11
from fmp.dtypes import parse_dtype
from fmp.numerics import cli
from fmp.numerics.inspection import TARGETS, inspect
from fmp.numerics.saved import is_saved_by_torch

FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def run(*words):
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers())
    options = parser.parse_args(["inspect", *map(str, words)])
    return options.run(options)


def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "layers.0.weight": torch.randn(128, 64, generator=generator).mul(0.02).bfloat16(),
        "norm.weight": torch.ones(64),
        "spoiled": torch.tensor([1.0, float("nan"), float("-inf"), 7e4, 1e-9, 0.0]),
        "ids": torch.arange(4),
        "empty": torch.zeros(0, 3),
        "zero": torch.zeros(3, dtype=torch.float16),
    }


@pytest.fixture
def file(tmp_path):
    safetensors.torch.save_file(weights(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def by_name(capsys):
    found = json.loads(capsys.readouterr().out)
    return {tensor["name"]: tensor for tensor in found["tensors"]}


def spread(dtype, numel=5000):
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-160 if dtype.itemsize > 2 else -30, 20, (numel,), generator=generator)
    values = torch.ldexp(torch.rand(numel, generator=generator, dtype=torch.float64) * 2 - 1, exponents)
    values[::9] = 0.0
    return values.to(dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_lost_is_what_the_cast_loses(dtype, target):
    tensor, into = spread(dtype), parse_dtype(target)
    lost = (inspect("w", tensor).lost or {})[target]
    values = tensor.double()
    numbers = values[values.isfinite() & (values != 0)]
    largest = torch.finfo(into).max
    # Casts to 8 bits saturate or not by version and device, so overflow is judged by rounding as if there were no end.
    rounded = numbers.float().to(into).double().abs()
    step = 2.0 ** torch.floor(torch.log2(torch.tensor(largest, dtype=torch.float64))) * torch.finfo(into).eps
    over = numbers.abs() > largest + step / 2 if into == torch.float8_e4m3fn else numbers.abs() >= largest + step / 2
    small = (rounded < torch.finfo(into).smallest_normal) & (rounded > 0)
    assert lost.zero == pytest.approx((rounded == 0).double().mean().item(), abs=1e-12)
    assert lost.subnormal == pytest.approx(small.double().mean().item(), abs=1e-12)
    assert lost.overflow == pytest.approx(over.double().mean().item(), abs=1e-12)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_range_and_counts(dtype):
    tensor = spread(dtype)
    found = inspect("w", tensor)
    values = tensor.double()
    numbers = values[values.isfinite() & (values != 0)].abs()
    assert found.smallest == numbers.min().item()
    assert found.largest == numbers.max().item()
    assert found.zeros == (values == 0).sum().item()
    assert found.infinities == values.isinf().sum().item()
    assert found.nans == values.isnan().sum().item()


def test_a_planted_loss():
    tensor = torch.ones(1000, dtype=torch.float32)
    tensor[:370], tensor[370:420], tensor[420:430] = 1e-9, 1e-6, 7e4
    lost = (inspect("w", tensor).lost or {})["f16"]
    assert (lost.zero, lost.subnormal, lost.overflow) == (0.37, 0.05, 0.01)


@given(numel=st.integers(0, 3000), scale=st.sampled_from([0.0, 0.02, 1e30]), seed=st.integers(0, 9))
def test_the_size_in_df11_is_that_of_a_compressed_tensor(numel, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(numel, generator=generator).mul(scale).bfloat16()
    assert inspect("w", tensor).df11_nbytes == df11.CompressedTensor.compress(tensor).nbytes


def test_any_shape_strides_and_dtype():
    assert inspect("w", torch.tensor(2.0)).largest == 2.0
    assert inspect("w", torch.ones(3, 4).T[::2].bfloat16()).largest == 1.0
    assert inspect("w", torch.ones(2, dtype=torch.complex64)).zeros is None
    found = inspect("w", torch.ones(2, 3, dtype=torch.bool))
    assert (found.described, found.numel, found.lost, found.df11_nbytes) == ("bool[2,3]", 6, None, None)


def test_pieces_add_up():
    tensor = torch.cat([torch.full((2**18 + 5,), 1e-9), torch.full((2**18,), 1.0), torch.full((1,), 1e5)])
    found = inspect("w", tensor)
    assert (found.lost or {})["f16"].zero == (2**18 + 5) / tensor.numel()
    assert (found.smallest, found.largest) == (tensor[0].item(), 1e5)


def test_json(file, capsys):
    assert run(file, "--json") == 0
    found = by_name(capsys)
    assert set(found) == set(weights())
    assert found["ids"] == {
        "name": "ids", "dtype": "i64", "shape": [4], "numel": 4, "smallest": None, "largest": None, "zeros": None,
        "infinities": None, "nans": None, "lost": None, "df11_nbytes": None, "file": "model.safetensors",
    }  # fmt: skip
    spoiled = found["spoiled"]
    assert (spoiled["nans"], spoiled["infinities"], spoiled["zeros"], spoiled["largest"]) == (1, 1, 1, 7e4)
    third = pytest.approx(1 / 3)
    assert spoiled["lost"]["f16"] == {"zero": third, "subnormal": 0.0, "overflow": third}
    assert found["empty"]["lost"] == {}
    assert found["layers.0.weight"]["shape"] == [128, 64]
    compressed = df11.CompressedTensor.compress(weights()["layers.0.weight"])
    assert found["layers.0.weight"]["df11_nbytes"] == compressed.nbytes


def test_table(file, capsys):
    pytest.importorskip("rich")
    assert run(file) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "spoiled" in line)
    assert row.split()[:3] == ["spoiled", "f32[6]", "1e-09"]
    assert "33.3 / 0 / 33.3" in row
    assert any(line.startswith("6 tensors, 8,192 bf16, 70 f32") for line in lines)
    assert any(line.startswith("infinities or NaN in 1 of 6 tensors, the first is spoiled") for line in lines)
    assert any("bf16 in DF11: 0.016 MB -> 0.011 MB" in line for line in lines)


def test_a_narrow_terminal_gets_a_narrow_table(file, capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "90")
    assert run(file) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("33.3 zero" in line for line in lines)


@pytest.mark.parametrize("columns", [20, 60, 75, 78, 90])
def test_nothing_is_left_out_on_a_narrower_terminal(tmp_path, capsys, monkeypatch, columns):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({**weights(), "model.layers.0.self_attn.q_proj": torch.full((2,), 0.5)}, path)
    assert run(path) == 0
    shown = capsys.readouterr().out
    for word in (
        "model.layers",
        "spoiled",
        "ids",
        "f32[6]",
        "7e+04",
        "16.7 %",
        "33.3 zero",
        "33.3 over",
        "10.9",
        "DF11",
    ):
        assert word in shown
    assert "model.layers.0.self_attn.q_proj f32[2]" in shown or columns > 70


def test_a_name_in_two_files_is_told_apart(tmp_path, capsys):
    for index in range(2):
        safetensors.torch.save_file({"w": torch.full((2,), index + 1.0)}, tmp_path / f"{index}.safetensors")
    assert run(tmp_path, "--json") == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert {(tensor["file"], tensor["name"], tensor["largest"]) for tensor in tensors} == {
        ("0.safetensors", "w", 1.0), ("1.safetensors", "w", 2.0)
    }  # fmt: skip
    pytest.importorskip("rich")
    assert run(tmp_path) == 0
    shown = capsys.readouterr().out
    assert "w (0.safetensors)" in shown
    assert "w (1.safetensors)" in shown


def test_names_cannot_style_the_table(tmp_path, capsys):
    pytest.importorskip("rich")
    safetensors.torch.save_file({"[red]\x1b[31mw": torch.ones(1)}, tmp_path / "model.safetensors")
    assert run(tmp_path / "model.safetensors") == 0
    assert "[red]\\x1b[31mw" in capsys.readouterr().out


def test_a_folder_of_shards_and_its_index(tmp_path, capsys):
    places = {}
    for index in range(2):
        name = f"layers.{index}.weight"
        safetensors.torch.save_file({name: torch.full((2,), index + 1.0)}, tmp_path / f"shard-{index}.safetensors")
        places[name] = f"shard-{index}.safetensors"
    safetensors.torch.save_file({"other": torch.ones(1)}, tmp_path / "adapter.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert run(tmp_path, "--json") == 0
    assert set(by_name(capsys)) == {*places, "other"}
    assert run(index, "--json") == 0
    found = by_name(capsys)
    assert set(found) == set(places)
    assert found["layers.1.weight"]["largest"] == 2.0


def test_compressed_weights_are_restored(tmp_path, capsys):
    plain = {"w": weights()["layers.0.weight"]}
    df11.save(df11.compress(plain), tmp_path / "model.safetensors")
    assert run(tmp_path / "model.safetensors", "--json") == 0
    found = by_name(capsys)["w"]
    assert found["dtype"] == "bf16"
    assert found["largest"] == plain["w"].abs().max().item()


def test_one_tensor_is_in_memory_at_a_time(tmp_path, capsys, monkeypatch):
    alive, most = weakref.WeakSet(), []
    safetensors.torch.save_file({str(index): torch.ones(8) for index in range(4)}, tmp_path / "model.safetensors")
    real = cli.inspect

    def watched(name, tensor):
        alive.add(tensor.untyped_storage())
        gc.collect()
        most.append(sum(1 for _ in alive))
        return real(name, tensor)

    monkeypatch.setattr(cli, "inspect", watched)
    assert run(tmp_path / "model.safetensors", "--json") == 0
    assert most == [1, 1, 1, 1]


def test_what_goes_wrong_is_one_line(tmp_path, capsys, monkeypatch):
    assert run(tmp_path / "missing", "--json") == 2
    assert "there is no file" in json.loads(capsys.readouterr().out)["error"]
    (tmp_path / "damaged.safetensors").write_bytes(b"nothing of the kind")
    assert run(tmp_path / "damaged.safetensors") == 1
    assert "not a safetensors file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.table", None)
    safetensors.torch.save_file(weights(), tmp_path / "model.safetensors")
    assert run(tmp_path / "model.safetensors") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: tables need rich")
    assert "`tools`" in error
    assert run(tmp_path / "model.safetensors", "--json") == 0


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_of_torch_save_is_read(file, tmp_path, capsys, is_zip):
    tree = {"model": weights(), "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}, "epoch": 7}
    torch.save(tree, tmp_path / "model.pt", _use_new_zipfile_serialization=is_zip)
    assert run(tmp_path / "model.pt", "--json") == 0
    found = by_name(capsys)
    assert run(file, "--json") == 0
    expected = by_name(capsys)
    assert found.pop("optimizer/state/0/step")["largest"] == 3.0
    for name, tensor in expected.items():
        assert found.pop(f"model/{name}") == {**tensor, "name": f"model/{name}", "file": "model.pt"}
    assert not found
    assert run(tmp_path / "model.pt") == 0
    assert "model/layers.0.weight" in capsys.readouterr().out


def test_a_file_of_torch_save_with_code_in_it_is_refused(tmp_path, capsys):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:200])
    for name, message in (
        ("whole.pt", "save the tensors alone: torch.save(module.state_dict(), path)"),
        ("cut.pt", "damaged"),
    ):
        assert run(tmp_path / name, "--json") == 2
        assert message in json.loads(capsys.readouterr().out)["error"]


def test_the_length_of_a_header_is_not_taken_for_torch_save(tmp_path):
    for head in (b"\x80\x02\x01\0\0\0\0\0", b"PK\x03\x04\0\0\0\0"):
        (tmp_path / "model.safetensors").write_bytes(head)
        assert not is_saved_by_torch(tmp_path / "model.safetensors")
