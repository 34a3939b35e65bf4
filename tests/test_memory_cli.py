import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fmp.__main__ import main
from fmp.memory import cli
from fmp.memory.plan import plan


def run(*words: Any) -> int:
    return main(["plan", *map(str, words)])


def output(capsys: pytest.CaptureFixture[str], *words: Any) -> Any:
    assert run(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_of_the_readme(capsys):
    words = ["--params", "3.5e9", "--optimizer", "adamw", "--policy", "O2", "--zero", "1", "--gpus", "8"]
    assert run(*words) == 0
    shown = capsys.readouterr().out
    assert "3,500,000,000 parameters, adamw, O2, ZeRO 1 on 8 devices" in " ".join(shown.split())
    rows = [line.split() for line in shown.replace("│", " ").splitlines()]
    found = {row[0]: row[1:3] for row in rows if len(row) >= 3}
    assert found["params"] == ["7.00", "2.000"]
    assert found["masters"] == ["1.75", "0.500"]
    assert found["gradients"] == ["7.00", "2.000"]
    assert found["moments"] == ["3.50", "1.000"]
    assert found["total"] == ["19.25", "5.500"]
    assert "not counted: activations" in shown
    assert output(capsys, *words)["bytes"] == plan(3.5e9, "adamw", "O2", zero=1, devices=8).bytes


def test_units(capsys):
    assert run("--params", "3.5e9", "--unit", "GiB") == 0
    shown = capsys.readouterr().out
    assert "GiB" in shown
    assert "6.52" in shown


@pytest.mark.parametrize(
    ("text", "number"), [("3.5e9", 3.5e9), ("350M", 350e6), ("7B", 7e9), ("1.1b", 1.1e9), ("2k", 2000), ("12", 12)]
)
def test_numbers_of_parameters(capsys, text, number):
    assert output(capsys, "--params", text)["numbers"] == number
    assert plan(text).bytes == plan(number).bytes


@pytest.mark.parametrize(
    ("words", "warned"),
    [(["--zero", 1], True), (["--zero", 3, "--gpus", 1], True), (["--zero", 1, "--gpus", 2], False), ([], False)],
)
def test_zero_without_gpus_says_that_it_changes_nothing(capsys, words, warned):
    assert run("--params", "7B", "--json", *words) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["numbers"] == 7_000_000_000
    warning = (
        f"warning: --zero {words[1]} shares nothing out with one GPU; say among how many, with --gpus N\n"
        if warned
        else ""
    )
    assert shown.err == warning


def test_options_reach_the_plan(capsys):
    sizes = ["--layers", 32, "--hidden", 4096, "--heads", 32, "--sequence", 2048, "--batch", 2, "--vocabulary", 100]
    read = output(
        capsys, "--params", "1e6", "--half", "bf16", "--masters", "kahan", "--moments", "bf16", "--accumulate", 4,
        "--average", "--gradients", "f32", "--remat", "selective", *sizes,
    )  # fmt: skip
    assert read["bytes"]["params"] == read["bytes"]["masters"] == 2_000_000
    assert read["bytes"]["moments"] == read["bytes"]["gradients"] == read["bytes"]["accumulators"] == 4_000_000
    assert read["bytes"]["average"] == 4_000_000
    assert read["bytes"]["activations"] == 32 * 34 * 2048 * 2 * 4096 + 2 * 2048 * 100 * 10
    read = output(capsys, "--params", "1e6", "--policy", "O3", "--gradients", "f8e4m3", "--moments", "f8e4m3,f16")
    assert read["total"] == 6_000_000
    assert output(capsys, "--params", "1e6", "--optimizer", "none")["total"] == 2_000_000
    assert output(capsys, "--params", "1e6", "--gradients", "none")["total"] == 14_000_000
    assert output(capsys, "--params", "1e6", "--policy", "params=f32,compute=bf16,output=f32")["total"] == 16_000_000


def test_a_file_of_json(tmp_path: Path, capsys):
    path = tmp_path / "plan.json"
    assert run("--params", "7B", "--json", path) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(path.read_text())["total"] == 112_000_000_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "many"], "--params must be a number"),
        (["--params", "-5"], "not negative"),
        (["--params", "1e6", "--optimizer", "adamm"], "'adamm' is not known"),
        (["--params", "1e6", "--optimizer", "adafactor"], "in Python, fmp.memory.plan(module, 'adafactor') counts it"),
        (["--params", "1e6", "--policy", "O2", "--masters", "remainder"], "remainder"),
        (["--params", "1e6", "--policy", "f32", "--masters", "kahan"], "--masters is of an opt level"),
        (["--params", "1e6", "--policy", "f32", "--half", "bf16"], "--half is of an opt level"),
        (["--params", "1e6", "--policy", "O4"], "neither an opt level, O0, O1, O2, O3"),
        (["--params", "infB"], "--params must be a number"),
        (["--params", "nan"], "--params must be a number"),
        (["--params", "1e400"], "--params must be a number"),
        (["--params", "1e30"], "fewer than 2^60"),
        (["--params", "2.4e18"], "fewer than 2^60"),
        (["--params", "7B", "--policy", "params=f8e5m2,compute=f16,output=f32,master=kahan"], "form 'kahan'"),
        (["--params", "1e6", "--unit", "gigs"], "unit must be one of"),
        (["--params", "1e6", "--layers", "3"], "--hidden, --heads, --sequence"),
        (["--params", "1e6", "--remat", "full"], "Transformer"),
        (["--params", "1e6", "--gradients", "f33"], "f33"),
        (["--params", "1e6", "--json", "/no such folder/x"], "no such folder"),
    ],
)
def test_what_cannot_be_done(capsys, words, message):
    assert run(*words) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    if "--json" not in words:
        assert run(*words, "--json") == 2
        assert message in json.loads(capsys.readouterr().out)["error"]


def test_numbers_are_not_cut_by_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    assert run("--params", "175B", "--zero", "3", "--gpus", "8") == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: row[1:3] for row in rows if len(row) >= 3}
    assert found["moments"] == ["175.00", "1.000"]
    assert found["total"] == ["350.00", "2.000"]


def test_a_vocabulary_of_nothing_leaves_the_logits_out(capsys):
    words = ["--params", "1e6", "--layers", 2, "--hidden", 4, "--heads", 2, "--sequence", 3]
    assert output(capsys, *words, "--vocabulary", 0) == output(capsys, *words)


def test_errors_as_json(capsys):
    assert run("--params", "many", "--json") == 2
    assert "many" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("words", [[], ["--params", "1e6", "--zero", "4"], ["--params", "1e6", "--gpus", "0"]])
def test_words_that_are_not_understood(words):
    with pytest.raises(SystemExit) as stopped:
        run(*words)
    assert stopped.value.code == 2


def test_rich_is_named_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert run("--params", "1e6") == 2
    assert "extra `tools`" in capsys.readouterr().err
    assert run("--params", "1e6", "--json") == 0


def test_nothing_heavy_is_loaded_for_json():
    code = (
        "import sys; from fmp.__main__ import main; main(['plan', '--params', '7B', '--json', '-'])\n"
        "print([name for name in ('rich', 'matplotlib', 'torch._dynamo') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["numbers"] == 7_000_000_000
    assert done.stderr.strip() == "[]"


def test_the_help_names_every_optimizer(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    shown = "".join(capsys.readouterr().out.split())
    assert all(name in shown for name in (*cli.OPTIMIZERS, *cli.EIGHT_BIT) if name != "adafactor")
    assert "adafactor" not in shown
