"""The main example: all precisions reach the same loss, and a resumed run ends as one that was never stopped."""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fmp

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "train_lm.py"
TINY = ["--width", "32", "--heads", "2", "--layers", "1", "--context", "32", "--batch", "8", "--save-every", "15"]

# The example adds a mask of zeros and infinities, which a half policy casts, to scores in float32: no digit is lost.
pytestmark = pytest.mark.mixed_dtypes


@pytest.fixture
def example(monkeypatch) -> dict[str, Any]:
    monkeypatch.setenv("MPLBACKEND", "agg")
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def train(example, monkeypatch, capsys) -> Callable[..., str]:
    """Runs the example in this process; it leaves its checkpoint in `out`."""

    def run(out: Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *TINY, "--out", str(out), *arguments])
        example["main"]()
        return capsys.readouterr().out

    return run


def start(out: Path, *arguments: str) -> str:
    """Runs the example in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, str(SCRIPT), *TINY, "--out", str(out), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def saved(out: Path) -> dict[str, str]:
    """Returns digests of the tensors of a checkpoint; pytest takes minutes to show how long bytes differ."""
    tensors = safetensors.torch.load_file(out / "state.fmp")
    return {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def validation_loss(output: str) -> float:
    found = re.search(r"validation\s+([\d.]+)", output)
    assert found is not None
    return float(found[1])


def test_all_precisions_reach_the_same_validation_loss(tmp_path, train):
    steps = ["--steps", "150"]
    reference = validation_loss(train(tmp_path / "O0", "--opt-level", "O0", *steps))
    assert reference < 2.9  # a byte has 5.55 nats when all are equally likely, and 3.26 in this text by frequency alone
    for level in ("O1", "O2"):
        for half in ("bf16", "fp16"):
            loss = validation_loss(train(tmp_path / level / half, "--opt-level", level, "--half", half, *steps))
            assert loss == pytest.approx(reference, rel=0.01)
    assert (tmp_path / "O2" / "fp16" / "training.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "another_process"),
    [
        (["--half", "fp16"], True),
        (["--opt-level", "O1", "--half", "fp16"], False),
        (["--opt-level", "O0", "--accumulate", "2", "--donate"], False),
    ],
)
def test_a_run_that_is_killed_and_resumed_ends_bit_identical(tmp_path, train, monkeypatch, arguments, another_process):
    save = fmp.checkpoint.save
    saves: list[Path] = []

    def save_and_copy(state, path):
        save(state, path)
        saves.append(path)
        if len(saves) == 1:
            shutil.copytree(path.parent, tmp_path / "killed")

    # The checkpoint of step 15 is what a run leaves that is killed soon after.
    monkeypatch.setattr(fmp.checkpoint, "save", save_and_copy)
    train(tmp_path / "whole", "--steps", "30", *arguments)
    assert len(saves) == 2

    resume = start if another_process else train
    output = resume(tmp_path / "resumed", "--steps", "30", "--resume", str(tmp_path / "killed"), *arguments)
    assert "trained     15 steps" in output
    whole, killed = saved(tmp_path / "whole"), saved(tmp_path / "killed")
    assert saved(tmp_path / "resumed") == whole
    assert killed.keys() == whole.keys()
    assert killed != whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--opt-level", "02"], "with the letter O, not zero"),
        (["--opt-level", "O3", "--half", "f32"], "half_dtype must be a 16-bit format"),
        (["--opt-level", "O0", "--keep-norm-fp32", "True"], "everything is float32 already"),
        (["--opt-level", "O1", "--keep-norm-fp32", "True"], "all parameters stay in float32"),
        (["--loss-scale", "-1"], "loss_scale must be positive"),
    ],
)
def test_flags_that_make_no_sense_are_refused(example, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *arguments])
    with pytest.raises(SystemExit) as refusal:
        example["parse_arguments"]()
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path, train):
    train(tmp_path, "--steps", "2")
    with pytest.raises(fmp.errors.CheckpointError, match=r"params/blocks\.0\.contract\.weight.*bf16\[32,128\]"):
        train(tmp_path / "other", "--steps", "4", "--width", "64", "--resume", str(tmp_path))


def test_the_distribution_has_the_version_of_the_package():
    assert re.fullmatch(r"\d+\.\d+\.\d+", fmp.__version__)
