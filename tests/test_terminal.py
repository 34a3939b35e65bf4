"""How `python -m fmp df11` ends and what it prints, whatever names, readers and memory there are."""

import argparse
import errno
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from fmp import terminal
from fmp.__main__ import main
from fmp.df11 import tensor_file
from tests.df11.test_cli import output, plain as plain, run


def write(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_names_cannot_move_the_cursor(tmp_path: Path, capsys: Any) -> None:
    names = ["\x1b[31mred\nlayer.0  bf16[2]  plain", "\ud800", "r\u202eight", "\x7f", "layers.Å.weight"]
    header = {name: {"dtype": "BF16", "shape": [1], "data_offsets": [2 * i, 2 * i + 2]} for i, name in enumerate(names)}
    odd = write(tmp_path / "odd", header, bytes(10))
    other = write(tmp_path / "other", {}, b"")
    assert run("inspect", odd) == 0
    assert run("verify", odd, other) == 1
    assert run("compress", odd, tmp_path / "small") == 2  # No file of weights holds half a character.
    printed = "".join(capsys.readouterr())
    assert all(character.isprintable() or character == "\n" for character in printed)
    assert printed.count(r"\x1b[31mred\nlayer.0") == 2
    assert re.search(r"layers\.Å\.weight +bf16\[1\]", printed)
    assert run("verify", odd, other, "--json") == 1
    assert [line.split(": missing")[0] for line in output(capsys)["differences"]] == names


def test_names_can_be_printed_in_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors.torch.save_file({"Å": torch.ones(1)}, tmp_path / "w")
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert run("inspect", tmp_path / "w") == 0
    assert r"\xc5" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("words", [["inspect", "no\x1b[31mthing"], ["compress", "", "out"], ["compress", "plain", ""]])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_errors_are_printed_for_programs_too(
    words: list[str], place: int, plain: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(plain.parent)
    plain.rename("plain")
    assert run(*words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert run(*words[:place], "--json", *words[place:]) == 2
    again = capsys.readouterr()
    assert again.err == printed.err
    assert re.fullmatch(r"error: [ -~]+\n", again.err)
    assert list(json.loads(again.out)) == ["error"]
    assert not Path("out").exists()


def test_options_before_the_command_hold(plain: Path, capsys: Any) -> None:
    before = torch.get_num_threads()
    try:
        assert run("--json", "--threads", 3, "inspect", plain) == 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert output(capsys)["tensors"]


@pytest.mark.parametrize("word", ["-1", "1e3", "1.5", "nan", "", "0x10"])
def test_counts_are_whole_numbers(word: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("compress", "a", "b", f"--min-numel={word}")
    assert f"must be a whole number from 0, written in digits, got {word!r}" in capsys.readouterr().err


def test_no_tensor_is_too_small_for_min_numel_0(tmp_path: Path, capsys: Any) -> None:
    weights = {"": torch.ones(2000).bfloat16(), "a": torch.ones(1).bfloat16(), "e": torch.empty(0, 3).bfloat16()}
    safetensors.torch.save_file(weights, tmp_path / "w")
    assert run("compress", tmp_path / "w", tmp_path / "small", "--min-numel", 0, "--json") == 0
    assert output(capsys)["files"]["w"]["compressed"] == 3
    assert run("verify", tmp_path / "w", tmp_path / "small") == 0
    assert run("compress", tmp_path / "w", tmp_path / "small", "--overwrite", "--select", "*", "--min-numel", 1) == 0


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
@pytest.mark.parametrize("command", ["compress", "decompress", "verify", "inspect"])
def test_too_little_memory_is_no_damage(
    error: Exception, command: str, plain: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def read(self: Any, name: str) -> Any:
        raise error

    assert run("compress", plain, tmp_path / "small") == 0
    monkeypatch.setattr(tensor_file.TensorFile, "read", read)
    assert run(command, plain if command == "compress" else tmp_path / "small", *TARGETS[command]) == 2
    assert re.fullmatch(r"error: there is not enough memory.*\n", capsys.readouterr().err)


TARGETS = {"compress": ["out"], "decompress": ["out"], "verify": [], "inspect": []}


def test_a_file_that_says_it_is_huge(tmp_path: Path, capsys: Any) -> None:
    size = 1 << 42
    huge = write(tmp_path / "huge", {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}, b"")
    try:
        os.truncate(huge, huge.stat().st_size + size)
        np.empty(size, np.uint8)
    except OSError:
        pytest.skip("no file can be as large here")
    except MemoryError:
        pass
    else:
        pytest.skip("the system promises any amount of memory")
    assert run("verify", huge, huge) == 2
    assert re.fullmatch(r"error: there is not enough memory: .*\n", capsys.readouterr().err)


class Full(io.StringIO):
    """A file on a disk that is full."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def closed_pipe() -> Any:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("words", [["inspect"], ["verify"], ["inspect", "--json"], ["verify", "--json"]])
def test_an_output_that_cannot_be_written(words: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for name in ("one", "other"):
        safetensors.torch.save_file({name: torch.ones(1)}, tmp_path / name)
    words = [*words, str(tmp_path / "one"), *([str(tmp_path / "other")] if words[0] == "verify" else [])]
    with closed_pipe() as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run(*words) == 141
        pipe.write("this is lost, without an error at the end")
    monkeypatch.setattr(sys, "stdout", None)
    assert run(*words) == 2
    assert capsys.readouterr().err == "error: the standard output is closed\n"
    monkeypatch.setattr(sys, "stdout", Full())
    assert run(*words) == 2
    assert capsys.readouterr().err == "error: the standard output: No space left on device\n"


def test_a_table_that_nobody_reads(monkeypatch: Any) -> None:
    with closed_pipe() as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["plan", "--params", "7B"]) == 141
        pipe.write("this is lost, without an error at the end")


def test_other_ends_of_the_process_are_ends() -> None:
    def stop(options: Any) -> int:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        terminal.run(stop, argparse.Namespace(json=None))


def test_errors_that_nobody_reads(plain: Path, monkeypatch: Any) -> None:
    with closed_pipe() as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        assert run("inspect", "nothing") == 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())
    monkeypatch.setattr(sys, "stderr", None)
    assert run("inspect", "nothing") == 2
    assert run("inspect", plain) == 0


@pytest.mark.parametrize("words", [[], ["df11"], ["df11", "--help"], ["--version"]])
def test_help_that_nobody_reads(words: list[str], monkeypatch: Any) -> None:
    with closed_pipe() as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        try:
            code = main(words)
        except SystemExit as exit:
            code = exit.code
    assert code == 0
