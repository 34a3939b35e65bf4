"""What `python -m fmp df11` takes from a folder, what it leaves out and says so, and what it never opens."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fmp import df11
from fmp.errors import DF11Error
from tests.df11.test_cli import folder as folder, output, plain as plain, run

posix = pytest.mark.skipif(os.name != "posix", reason="needs symbolic links, pipes and permissions")


def test_an_index_must_fit_the_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["layers.0.more"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(places))
    assert run("compress", folder, tmp_path / "small") == 1
    assert "the tensor layers.0.more is missing, and the index names it" in capsys.readouterr().err
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert run("compress", folder, tmp_path / "small") == 1
    assert "the file 'model-00001-of-00002.safetensors' is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 100_000, "", "null", "[]", "5", '{"a": 5}', '{"weight_map": null}', '{"weight_map": ["a"]}'),
        *('{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["b"]}}', '{"weight_map": {"a": null}}', "\xff"),
    ],
)
def test_an_index_of_any_contents_is_refused(text: str, folder: Path, tmp_path: Path, capsys: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    assert run("compress", folder, tmp_path / "small") == 1
    assert re.fullmatch(
        r"error: .*model.safetensors.index.json: this index cannot be read: .*\n", capsys.readouterr().err
    )


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/outside.safetensors", "1_Pooling/../../x", "..", "/"])
def test_an_index_names_no_file_outside_of_the_folder(shard: str, folder: Path, tmp_path: Path, capsys: Any) -> None:
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    assert run("compress", folder, tmp_path / "small") == 1
    assert "outside of its folder" in capsys.readouterr().err
    with pytest.raises(DF11Error, match="outside of its folder"):
        df11.load(folder)


@pytest.mark.parametrize("shard", [".cache/w.safetensors", "w.bin", "no\0thing", "\ud800", "", ".", "x" * 5000])
def test_an_index_names_only_files_that_are_read(shard: str, folder: Path, tmp_path: Path, capsys: Any) -> None:
    safetensors.torch.save_file({"w": torch.ones(1)}, folder / ".cache" / "w.safetensors")
    safetensors.torch.save_file({"w": torch.ones(1)}, folder / "w.bin")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    assert run("verify", folder, folder) == 1
    assert "is missing among the safetensors files of the model" in capsys.readouterr().err


@posix
def test_links_are_followed_and_what_is_left_out_is_named(folder: Path, tmp_path: Path, capsys: Any) -> None:
    for name in ("elsewhere", "model/.hidden"):
        (tmp_path / name).mkdir()
        safetensors.torch.save_file({"more": torch.ones(64, 64).bfloat16()}, tmp_path / name / "more.safetensors")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "1_Pooling" / "loop").symlink_to(folder)
    assert run("compress", folder, tmp_path / "small", "--json") == 0
    report = output(capsys)
    assert sorted(report["files"])[0] == "linked/more.safetensors"
    assert sorted(report["left_out"]) == [".cache", ".hidden", "1_Pooling/loop", "pytorch_model.bin"]
    assert not (tmp_path / "small" / "linked").is_symlink()
    assert "more" in df11.load(tmp_path / "small")

    assert run("verify", folder, tmp_path / "small") == 0
    text = capsys.readouterr().out
    assert text.endswith("equal bit for bit\n")
    assert re.search(r"model/\.hidden: left out, as its name begins with a dot\n", text)
    assert re.search(r"1_Pooling/loop: left out, as it is a link to a folder that it is in\n", text)
    (tmp_path / "small" / "linked" / "more.safetensors").unlink()
    assert run("verify", folder, tmp_path / "small", "--json") == 1
    assert output(capsys)["differences"] == [f"linked/more.safetensors: missing in {tmp_path / 'small'}"]


def test_an_unreadable_subfolder_is_an_error(folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    scandir = os.scandir

    def closed(path: Any) -> Any:
        if Path(path).name == "1_Pooling":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert run("compress", folder, tmp_path / "small") == 2
    assert "1_Pooling: Permission denied" in capsys.readouterr().err


def test_one_folder_inside_of_the_other_is_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    for target in (
        folder / "small",
        folder / "1_Pooling" / "small",
        folder.parent,
        tmp_path / "model" / ".." / "model",
    ):
        assert run("compress", folder, target, "--overwrite") == 2
        assert re.search("inside of the other|OUT is IN", capsys.readouterr().err)
    assert (folder / "config.json").exists()
    assert not (folder / "small").exists()


@posix
@pytest.mark.parametrize("command", ["compress", "decompress", "verify", "inspect"])
def test_a_pipe_is_refused(command: str, tmp_path: Path, capsys: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert run(command, tmp_path / "pipe", *([tmp_path / "out"] if "compress" in command else [])) == 2
    assert "pipe is not a regular file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@posix
@pytest.mark.parametrize(
    ("mode", "mask", "wanted"), [(0o600, 0o022, 0o600), (0o644, 0o022, 0o644), (0o666, 0o027, 0o640)]
)
def test_nothing_private_becomes_public(
    mode: int, mask: int, wanted: int, plain: Path, folder: Path, tmp_path: Path
) -> None:
    def permissions(path: Path) -> int:
        return path.stat().st_mode & 0o777

    plain.chmod(mode)
    (folder / "config.json").chmod(mode)
    (folder / "1_Pooling").chmod(mode | 0o100)
    before = os.umask(mask)
    try:
        assert run("compress", plain, tmp_path / "small") == 0
        assert run("compress", folder, tmp_path / "smaller") == 0
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert permissions(tmp_path / "small") == permissions(tmp_path / "smaller" / "config.json") == wanted
    assert permissions(tmp_path / "smaller" / "1_Pooling" / "config.json") & ~wanted == 0
    assert permissions(tmp_path / "smaller" / "1_Pooling") & 0o077 & ~mode == 0
