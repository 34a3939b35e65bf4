import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fmp import df11, terminal
from fmp.__main__ import main
from fmp.df11 import writing
from tests.bits import same_bits


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "mlp.up.weight": torch.randn(96, 64, generator=generator).mul(0.02).bfloat16(),
        "mlp.down.weight": torch.randn(64, 96, generator=generator).bfloat16(),
        "norm.weight": torch.ones(64).bfloat16(),
        "full.weight": torch.randn(80, 80, generator=generator),
        "steps": torch.tensor(7),
        "empty": torch.empty(0, 3).bfloat16(),
    }


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    safetensors.torch.save_file(weights(), tmp_path / "plain.safetensors", {"format": "pt"})
    return tmp_path / "plain.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model as Hugging Face lays it out: two shards, their index, a configuration, and the weights as a pickle."""
    root = tmp_path / "model"
    (root / "1_Pooling").mkdir(parents=True)
    (root / ".cache").mkdir()
    places = {}
    for index in range(2):
        shard = f"model-{index + 1:05}-of-00002.safetensors"
        state = {f"layers.{index}.{name}": weight for name, weight in weights(index).items()}
        safetensors.torch.save_file(state, root / shard, {"format": "pt"})
        places |= dict.fromkeys(state, shard)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin", "1_Pooling/config.json", ".cache/lock"):
        (root / name).write_text(name)
    return root


def run(*words: Any) -> int:
    return main(["df11", *map(str, words)])


def output(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_file_is_compressed_and_restored(plain: Path, tmp_path: Path) -> None:
    small, back = tmp_path / "small", tmp_path / "back"
    assert run("compress", plain, small) == 0
    assert os.path.getsize(small) < 0.9 * os.path.getsize(plain)
    assert same_bits(df11.load(small, decompress=True), weights())
    assert [name for name, weight in df11.load(small).items() if isinstance(weight, df11.CompressedTensor)] == [
        "mlp.down.weight",
        "mlp.up.weight",
    ]
    assert run("verify", plain, small) == 0
    assert run("verify", small, plain) == 0
    assert run("verify", small) == 0
    assert run("decompress", small, back) == 0
    # Even the header is the one that the library wrote.
    assert back.read_bytes() == plain.read_bytes()


def test_a_folder_is_compressed_and_restored(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, back = tmp_path / "small", tmp_path / "back"
    assert run("compress", folder, small, "--json") == 0
    report = output(capsys)
    assert report["left_out"] == [".cache", "pytorch_model.bin"]
    shards = [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
    assert sorted(report["files"]) == shards
    for shard in shards:
        found = report["files"][shard]
        assert (
            found["bytes_out"] == os.path.getsize(small / shard) < found["bytes_in"] == os.path.getsize(folder / shard)
        )
        assert (found["tensors"], found["compressed"]) == (6, 2)
    copied = {"config.json", "tokenizer.json", "model.safetensors.index.json", "1_Pooling/config.json"}
    assert {str(file.relative_to(small)) for file in small.rglob("*") if file.is_file()} == {*shards, *copied}
    assert all((small / name).read_bytes() == (folder / name).read_bytes() for name in copied)

    both = {f"layers.{index}.{name}": weight for index in range(2) for name, weight in weights(index).items()}
    assert same_bits(df11.load(small, decompress=True), both)
    assert run("verify", folder, small) == 0
    assert run("decompress", small, back) == 0
    assert run("verify", folder, back) == 0
    assert all((back / shard).read_bytes() == (folder / shard).read_bytes() for shard in shards)


def test_a_saved_tree_is_restored_under_flat_names(tmp_path: Path) -> None:
    weight = weights()["mlp.up.weight"]
    df11.save(df11.compress({"blocks": [weight, {"bias": torch.ones(3)}], "tied": weight}), tmp_path / "small")
    assert run("decompress", tmp_path / "small", tmp_path / "back") == 0
    wanted = {"blocks/0": weight, "blocks/1/bias": torch.ones(3), "tied": weight}
    assert same_bits(safetensors.torch.load_file(tmp_path / "back"), wanted)
    assert run("verify", tmp_path / "small", tmp_path / "back") == 0


def test_what_is_compressed_can_be_chosen(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def compressed(*words: Any) -> set[str]:
        assert run("compress", plain, tmp_path / "small", "--overwrite", *words) == 0
        loaded = df11.load(tmp_path / "small")
        return {name for name, weight in loaded.items() if isinstance(weight, df11.CompressedTensor)}

    assert compressed("--select", "*.up.*", "norm") == {"mlp.up.weight"}
    assert compressed("--select", "*.up.*", "norm", "--min-numel", 64) == {"mlp.up.weight", "norm.weight"}
    assert compressed("--min-numel", 10**6) == set()
    assert "no tensor is compressed" in capsys.readouterr().out
    assert run("compress", plain, tmp_path / "other", "--select", "full") == 2
    assert "no bf16 tensor of --min-numel elements is named by --select full" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a bit": (
        lambda w: w["mlp.up.weight"].view(torch.int16)[3, 4].bitwise_xor_(1),
        "mlp.up.weight: 1 of 6144 elements",
    ),
    "a sign of zero": (lambda w: w.update(steps=torch.tensor(-7)), "steps: 1 of 1 elements differ"),
    "a shape": (lambda w: w.update(steps=torch.tensor([7])), r"steps: i64\[\] in one file, i64\[1\] in the other"),
    "a dtype": (
        lambda w: w.update(empty=torch.empty(0, 3)),
        r"empty: bf16\[0,3\] in one file, f32\[0,3\] in the other",
    ),
    "one less": (lambda w: w.pop("norm.weight"), "norm.weight: missing in .*other"),
    "one more": (lambda w: w.update(more=torch.ones(1)), "more: missing in .*small"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_verify_names_what_differs(
    change: Callable[[Any], Any], message: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = weights()
    change(other)
    safetensors.torch.save_file(other, tmp_path / "other")
    assert run("compress", plain, tmp_path / "small") == 0
    capsys.readouterr()
    assert run("verify", tmp_path / "small", tmp_path / "other", "--json") == 1
    report = output(capsys)
    assert report["equal"] is False
    assert len(report["differences"]) == 1
    assert re.match(message, report["differences"][0])


def test_verify_knows_negative_zero_and_nan(tmp_path: Path) -> None:
    one, other = torch.zeros(4096).bfloat16(), torch.full((4096,), float("nan")).bfloat16()
    for name, tensor in (("zero", one), ("minus", -one), ("nan", other)):
        safetensors.torch.save_file({"w": tensor}, tmp_path / name)
    assert run("verify", tmp_path / "zero", tmp_path / "minus") == 1
    assert run("compress", tmp_path / "nan", tmp_path / "small") == 0
    assert run("verify", tmp_path / "nan", tmp_path / "small") == 0


def test_damage_gives_one_line_and_exit_code_1(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("compress", folder, tmp_path / "small") == 0
    shard = tmp_path / "small" / "model-00002-of-00002.safetensors"
    contents = bytearray(shard.read_bytes())
    contents[-3000] ^= 4
    shard.write_bytes(contents)
    capsys.readouterr()
    for words in (["verify", tmp_path / "small"], ["verify", tmp_path / "small", folder]):
        assert run(*words) == 1
        assert "model-00002-of-00002.safetensors: layers.1." in capsys.readouterr().out
    assert run("decompress", tmp_path / "small", tmp_path / "back") == 1
    assert re.fullmatch(r"error: .*00002.safetensors: layers\.1\..*: damaged: .*\n", capsys.readouterr().err)
    # Neither the first shard nor a temporary folder is left.
    assert sorted(os.listdir(tmp_path)) == ["model", "small"]


def test_inspect_shows_bits_and_bounds(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compress", plain, tmp_path / "small") == 0
    capsys.readouterr()
    assert run("inspect", plain, "--json") == run("inspect", tmp_path / "small", "--json") == 0
    before, after = (
        {tensor["name"]: tensor for tensor in json.loads(line)["tensors"]}
        for line in capsys.readouterr().out.splitlines()
    )
    assert before.keys() == after.keys() == weights().keys()
    for name, weight in weights().items():
        assert (before[name]["bound"] is None) == (weight.dtype != torch.bfloat16 or not weight.numel())
        assert before[name]["bound"] == after[name]["bound"]
        assert before[name]["bits"] == (8 * weight.dtype.itemsize if weight.numel() else None)
        assert after[name]["shape"] == list(weight.shape)
    # The norm's weights are all 1: their exponent says nothing.
    assert after["norm.weight"]["bound"] == 8
    for name in ("mlp.up.weight", "mlp.down.weight"):
        assert after[name]["form"] in ("huffman", "deflate")
        assert 10 < after[name]["bound"] < after[name]["bits"] < 12
    assert run("inspect", tmp_path / "small") == 0
    text = capsys.readouterr().out
    assert re.search(r"mlp.up.weight +bf16\[96,64\] +(huffman|deflate) +1\d\.\d{3} +10\.\d{3}\n", text)
    assert re.search(r"12352 bf16 weights: 1\d\.\d{3} bits each, bound 10\.\d{3}", text)


def test_nothing_is_overwritten_without_being_asked(
    plain: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("old")
    assert run("compress", plain, tmp_path / "kept") == 2
    assert run("compress", folder, tmp_path / "full") == 2
    assert capsys.readouterr().err.count("give another name, or --overwrite") == 2
    assert run("compress", plain, plain, "--overwrite") == 2
    assert run("compress", plain, tmp_path / "full", "--overwrite") == 2
    assert run("compress", folder, tmp_path / "kept", "--overwrite") == 2
    assert (tmp_path / "kept").read_text() == "kept"
    assert os.listdir(tmp_path / "full") == ["config.json"]
    assert same_bits(safetensors.torch.load_file(plain), weights())

    assert run("compress", plain, tmp_path / "kept", "--overwrite") == 0
    assert run("compress", folder, tmp_path / "full", "--overwrite") == 0
    assert run("verify", folder, tmp_path / "full") == 0
    (tmp_path / "full" / "notes").write_text("mine")
    assert run("compress", folder, tmp_path / "full", "--overwrite") == 2
    assert (tmp_path / "full" / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compress", "nothing", "out"], "there is no file 'nothing'"),
        (["compress", "empty", "out"], "there are no safetensors files in 'empty'"),
        (["compress", "plain.safetensors", "no/out"], "the folder .* does not exist"),
        (["compress", "small", "out"], "small is compressed already"),
        (["verify", "small", "empty"], "there are no safetensors files"),
        (["verify", "small", "model"], "two files or two folders"),
        (["verify", "plain.safetensors"], "has no checksums"),
        (["inspect", "nothing"], "there is no file 'nothing'"),
    ],
)
def test_wrong_use_gives_one_line_and_exit_code_2(
    words: list[str], message: str, plain: Path, folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert run("compress", plain, "small") == 0
    capsys.readouterr()
    assert run(*words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(rf"error: .*{message}.*\n", printed.err)
    assert not Path("out").exists()


def test_other_files_are_told_apart(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no weights at all")
    assert run("compress", tmp_path / "text", tmp_path / "out") == 1
    assert "not a safetensors file" in capsys.readouterr().err
    assert run("decompress", plain, tmp_path / "out") == 1
    assert "not a file of compressed weights" in capsys.readouterr().err


def test_unknown_words_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["df11", "shrink"], ["df11", "compress", "a"], ["df11", "verify", "a", "--threads", "0"], ["df12"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
    assert "usage: " in capsys.readouterr().err


def test_without_words_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "df11" in capsys.readouterr().out
    assert main(["df11"]) == 0
    assert all(command in capsys.readouterr().out for command in ("compress",))


def test_a_weight_that_would_not_come_back_is_not_written(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = df11.CompressedTensor.compress
    wrong = staticmethod(lambda tensor: original(tensor + 1))
    monkeypatch.setattr(df11.CompressedTensor, "compress", wrong)
    assert run("compress", plain, tmp_path / "small") == 1
    assert "mlp.down.weight does not come back bit for bit" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["plain.safetensors"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_interruption_leaves_nothing(
    kind: str, plain: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(os.listdir(tmp_path))
    original, calls = writing._write_compressed, []

    def interrupted(writer: Any, source: Any) -> Any:
        calls.append(source.name)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(writer, source)

    monkeypatch.setattr(writing, "_write_compressed", interrupted)
    assert run("compress", plain if kind == "file" else folder, tmp_path / "small") == 130
    assert sorted(os.listdir(tmp_path)) == before
    assert len(calls) == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_bar_is_optional(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert run("compress", plain, tmp_path / "small") == 0
    assert list(terminal.with_bar("abc", [1, 2, 3], "")) == ["a", "b", "c"]
    monkeypatch.undo()
    assert list(terminal.with_bar("abc", [1, 2, 3], "")) == ["a", "b", "c"]
