"""The example about memory: all arrangements train to the same bits, and each saves what it says it saves."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "deep_net_memory.py"
COUNT, SEED = "must be at least 1 and below 2**31", "--seed must be at least 0 and below 2**32"


@pytest.fixture
def script(monkeypatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, str(SCRIPT), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def rows(output: str) -> dict[str, list[str]]:
    lines = [line.split() for line in output.splitlines()]
    start = next(index for index, words in enumerate(lines) if words[0] == "arrangement") + 1
    return {words[0]: words[1:] for words in lines[start : start + 6]}


def test_all_arrangements_end_in_the_same_bits_and_save_memory(tmp_path):
    output = run(tmp_path, "--steps", "3", "--depth", "12", "--batch-size", "8", "--out", "pictures")
    table = rows(output)
    assert list(table) == ["everything", "dots", "nothing", "sqrt(n)", "auto", "halfway"]
    assert {words[-1] for words in table.values()} == {"yes"}
    assert len({words[3] for words in table.values()}) == 1
    peak, kept = [{name: float(words[place]) for name, words in table.items()} for place in (0, 1)]
    assert peak["auto"] <= min(peak.values())
    assert peak["auto"] < peak["sqrt(n)"] < peak["everything"]
    assert peak["auto"] < peak["halfway"] < peak["everything"]
    assert kept["nothing"] < kept["dots"] < kept["everything"]
    assert all(kept[name] < peak[name] for name in table)
    share = dict(re.findall(r"^(auto|halfway) .*: (\d+)% of the forward pass", output, re.MULTILINE))
    assert 0 < int(share["halfway"]) < int(share["auto"]) <= 100
    assert (tmp_path / "pictures" / "memory.png").stat().st_size > 10_000


def test_the_smallest_network_works_too(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--steps=1", "--depth=1", "--batch-size=1", f"--out={tmp_path}"])
    script["main"]()
    assert {words[-1] for words in rows(capsys.readouterr().out).values()} == {"yes"}


def test_other_bits_are_noticed(script, tmp_path, monkeypatch, capsys):
    honest = script["make_arrangements"]

    def off_by_a_little(*args):
        arrangements = honest(*args)
        arrange = arrangements["dots"]
        return {**arrangements, "dots": lambda functions: lambda x: arrange(functions)(x) * (1 + 2.0**-20)}

    monkeypatch.setitem(script["main"].__globals__, "make_arrangements", off_by_a_little)
    monkeypatch.setattr(sys, "argv", ["x", "--steps=1", "--depth=3", "--batch-size=2", f"--out={tmp_path}"])
    with pytest.raises(SystemExit, match=r"other bits than the first: dots$"):
        script["main"]()
    assert [name for name, words in rows(capsys.readouterr().out).items() if words[-1] == "no"] == ["dots"]


def test_the_network_has_the_depth_that_was_asked_for(script):
    for depth in (1, 2, 3, 7):
        layers = script["make_layers"](depth)
        assert len(layers) == depth + 4
        functions = script["make_functions"](layers, [layer.params for layer in layers])
        logits = script["one_after_the_other"](functions)(torch.zeros(2, 32, 32, 1))
        assert logits.shape == (2, 10)


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        *[(option, ["0", "-3", str(2**31)], f"--{option} {COUNT}") for option in ("steps", "depth", "batch-size")],
        ("steps", ["x"], "invalid int value"),
        ("seed", ["-1", str(2**32), "9" * 30], SEED),
        ("out", [str(ROOT / "README.md"), str(ROOT / "README.md" / "x")], "--out: "),
    ],
)
def test_bad_options_are_refused_by_name(script, option, values, message, monkeypatch, capsys):
    for value in values:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), f"--{option}={value}"])
        with pytest.raises(SystemExit) as stop:
            script["parse_arguments"]()
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
