"""The legacy example: a script for Apex runs with one import changed, and in O0 it does what a plain loop does."""

import ast
import os
import re
import runpy
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fmp.compat import amp

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = EXAMPLES / "legacy_apex_script.py"


def start(out: Path, *arguments: str) -> list[tuple[float, float]]:
    """Runs the script in a process of its own; returns loss and accuracy by epoch."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments, "--output", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return epochs_of(run.stdout)


def epochs_of(output: str) -> list[tuple[float, float]]:
    return [(float(loss), float(right)) for loss, right in re.findall(r"loss ([\d.]+)  accuracy ([\d.]+)", output)]


@pytest.fixture
def train(monkeypatch, capsys) -> Callable[..., list[tuple[float, float]]]:
    """Runs the script in this process; returns loss and accuracy by epoch."""

    def run(out: Path, *arguments: str) -> list[tuple[float, float]]:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--output", str(out)])
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        finally:
            amp.shutdown()
        return epochs_of(capsys.readouterr().out)

    return run


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory) -> tuple[list[tuple[float, float]], Path]:
    out = tmp_path_factory.mktemp("O0")
    return start(out, "--opt-level", "O0", "--epochs", "2"), out / "checkpoint.pt"


def test_only_the_import_of_amp_is_ours():
    source = SCRIPT.read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = [ast.unparse(node) for node in imports if "fmp" in ast.unparse(node)]
    assert ours == ["from fmp.compat import amp"]
    assert "from fmp.compat import amp  # was: from apex import amp\n" in source
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert "amp" in names
    assert "fmp" not in names


def test_in_o0_it_equals_a_plain_loop(in_float32, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    script: dict[str, Any] = runpy.run_path(str(SCRIPT))
    torch.manual_seed(1)
    loader, _ = script["make_loaders"](Namespace(batch_size=64))
    model = script["Net"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        total = 0.0
        model.train()
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        losses.append(total / len(loader))
        script["test"](model, torch.device("cpu"), script["make_loaders"](Namespace(batch_size=64))[1])

    epochs, checkpoint = in_float32
    assert [loss for loss, _ in epochs] == [float(f"{loss:.6f}") for loss in losses]
    trained = torch.load(checkpoint)["model"]
    assert trained.keys() == model.state_dict().keys()
    assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_in_half_the_loss_falls_as_in_float32(tmp_path, train, in_float32, level):
    epochs = train(tmp_path, "--opt-level", level, "--epochs", "2")
    (first, _), (last, accuracy) = epochs
    (expected_first, _), (expected_last, expected_accuracy) = in_float32[0]
    assert last < first / 2
    assert first == pytest.approx(expected_first, rel=0.1)
    assert last == pytest.approx(expected_last, rel=0.1)
    assert accuracy == pytest.approx(expected_accuracy, abs=2.0)


def test_it_resumes_with_its_loss_scale(tmp_path, train):
    ((first, _),) = train(tmp_path / "first", "--opt-level", "O2", "--loss-scale", "dynamic", "--epochs", "1")
    saved = torch.load(tmp_path / "first" / "checkpoint.pt")
    scaler = saved["amp"]["loss_scaler0"]
    assert scaler["loss_scale"] == 2.0**16
    assert scaler["unskipped"] == 4000 // 64
    assert all(tensor.dtype == torch.float32 for tensor in saved["model"].values() if tensor.is_floating_point())

    resume = ["--resume", str(tmp_path / "first" / "checkpoint.pt"), "--epochs", "2"]
    ((second, _),) = train(tmp_path / "second", "--opt-level", "O2", "--loss-scale", "dynamic", *resume)
    assert second < first / 2
    scaler = torch.load(tmp_path / "second" / "checkpoint.pt")["amp"]["loss_scaler0"]
    assert scaler["unskipped"] == 2 * (4000 // 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "100000"], "argument --batch-size: must be from 2 to 4000, the number of images, got 100000"),
        (["--batch-size", "1"], "argument --batch-size"),
        (["--batch-size", "many"], "invalid int value: 'many'"),
        (["--epochs", "0"], "argument --epochs: must be at least 1, got 0"),
        (["--lr", "nan"], "argument --lr: must be above 0 and finite, got nan"),
        (["--lr", "-1"], "argument --lr"),
        (["--momentum", "2"], "argument --momentum: must be at least 0 and below 1, got 2.0"),
        (["--clip", "-1"], "argument --clip: must be above 0, got -1.0"),
        (["--clip", "0"], "argument --clip"),
        (["--clip", "nan"], "argument --clip"),
        (["--seed", "-1"], "argument --seed"),
        (["--output", __file__], "argument --output: "),
        (["--resume", "nowhere.pt"], "argument --resume: there is no file nowhere.pt"),
        (["--resume", str(EXAMPLES)], "argument --resume: there is no file"),
        (["--resume", __file__], "is no checkpoint of this script: "),
        (["--opt-level", "O9"], "got 'O9'"),
        (["--opt-level", "O1", "--keep-batchnorm-fp32", "True"], "keep_batchnorm_fp32=True at O1"),
        (["--opt-level", "O2", "--keep-batchnorm-fp32", "x"], "keep_batchnorm_fp32 must be True, False"),
        (["--loss-scale", "True"], "loss_scale must be 'dynamic', a number or its string, got 'True'"),
        (["--loss-scale", "0"], "loss_scale must be positive"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message, tmp_path, monkeypatch, capsys):
    refusal = refused(["--output", str(tmp_path), *arguments], monkeypatch, capsys)
    assert message in refusal


def test_a_checkpoint_that_is_not_one_of_this_run_is_refused(tmp_path, monkeypatch, capsys):
    path = tmp_path / "other.pt"
    torch.save({"model": {}}, path)
    arguments = ["--output", str(tmp_path), "--resume", str(path)]
    assert "is no checkpoint of this script: " in refused(arguments, monkeypatch, capsys)


def test_a_run_that_has_ended_already_says_so(tmp_path, in_float32, monkeypatch, capsys):
    arguments = ["--opt-level", "O0", "--resume", str(in_float32[1]), "--epochs", "2", "--output", str(tmp_path)]
    assert "has 2 already, so give more, got 2" in refused(arguments, monkeypatch, capsys)


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the script, which must end by one line of argparse, and returns that line."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["legacy_apex_script.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    amp.shutdown()
    assert end.value.code == 2
    usage, line, rest = capsys.readouterr().err.rpartition("legacy_apex_script.py: error: ")
    assert usage.startswith("usage: ")
    assert rest.count("\n") == 1
    return line + rest
