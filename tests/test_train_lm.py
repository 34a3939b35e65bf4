"""The main example: all precisions reach the same loss, and a resumed run ends as one that was never stopped."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import fmp

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "train_lm.py"
TINY = ["--width", "32", "--heads", "2", "--layers", "1", "--context", "32", "--batch", "8", "--save-every", "15"]


def train(out: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, str(SCRIPT), *TINY, "--out", str(out), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def saved(out: Path) -> dict[str, bytes]:
    tensors = safetensors.torch.load_file(out / "state.fmp")
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def validation_loss(output: str) -> float:
    found = re.search(r"validation\s+([\d.]+)", output)
    assert found is not None
    return float(found[1])


def test_all_precisions_reach_the_same_validation_loss(tmp_path):
    steps = ["--steps", "150"]
    reference = validation_loss(train(tmp_path / "O0", "--opt-level", "O0", *steps))
    assert reference < 2.9  # a byte has 5.55 nats when all are equally likely, and 3.26 in this text by frequency alone
    for level in ("O1", "O2"):
        for half in ("bf16", "fp16"):
            loss = validation_loss(train(tmp_path / level / half, "--opt-level", level, "--half", half, *steps))
            assert loss == pytest.approx(reference, rel=0.01)
    assert (tmp_path / "O2" / "fp16" / "training.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments",
    [
        ["--half", "fp16"],
        ["--opt-level", "O1", "--half", "fp16"],
        ["--opt-level", "O0", "--accumulate", "2", "--donate"],
    ],
)
def test_a_run_that_is_killed_and_resumed_ends_bit_identical(tmp_path, arguments):
    train(tmp_path / "whole", "--steps", "30", *arguments)
    # The checkpoint of step 15 is what a run leaves that is killed soon after.
    interrupt = (
        "import runpy, sys, fmp; save = fmp.checkpoint.save\n"
        "def save_and_die(state, path):\n    save(state, path); raise SystemExit(9)\n"
        "fmp.checkpoint.save = save_and_die; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    out = tmp_path / "killed"
    command = [sys.executable, "-c", interrupt, str(SCRIPT), *TINY, "--out", str(out), "--steps", "30", *arguments]
    assert subprocess.run(command, capture_output=True, env=environment).returncode == 9
    shutil.copytree(out, tmp_path / "resumed")

    output = train(tmp_path / "resumed", "--steps", "30", "--resume", str(out), *arguments)
    assert "trained     15 steps" in output
    whole, killed = saved(tmp_path / "whole"), saved(out)
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
def test_flags_that_make_no_sense_are_refused(tmp_path, arguments, message):
    with pytest.raises(AssertionError, match=message):
        train(tmp_path, "--steps", "2", *arguments)


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    train(tmp_path, "--steps", "2")
    with pytest.raises(AssertionError, match=r"params/blocks\.0\.contract\.weight.*bf16\[32,128\]"):
        train(tmp_path / "other", "--steps", "4", "--width", "64", "--resume", str(tmp_path))


def test_the_distribution_has_the_version_of_the_package():
    assert re.fullmatch(r"\d+\.\d+\.\d+", fmp.__version__)
