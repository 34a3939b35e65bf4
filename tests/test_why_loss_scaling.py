"""The example on loss scaling: float16 really loses the painter's gradients, and each kind of scaling saves more."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fmp

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "why_loss_scaling.py"
RUNS = ["float32", "unscaled", "static", "dynamic", "per loss"]


@pytest.fixture
def script(monkeypatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


def rows(output: str, first: str, count: int, width: int) -> dict[str, list[str]]:
    lines = output.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(first)) + 1
    return {line[:width].strip(): line[width:].split() for line in lines[start : start + count]}


def test_unscaled_training_loses_all_and_each_scaling_saves_more(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, str(SCRIPT), "--steps=100", "--out=pictures"]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "pictures" / "page.png").stat().st_size > 50_000

    table = rows(finished.stdout, "run", 5, 10)
    assert list(table) == RUNS
    lost = {name: float(table[name][4].rstrip("%")) for name in RUNS[1:]}
    assert lost["unscaled"] == 100.0
    assert lost["static"] > lost["dynamic"] > 5.0 > 1.0 > lost["per loss"]
    errors = {name: float(words[6]) for name, words in table.items()}
    assert errors["unscaled"] > 5 * errors["float32"]
    assert errors["static"] > 1.3 * errors["float32"]
    assert errors["static"] > errors["dynamic"] > errors["per loss"]
    assert errors["per loss"] < 1.05 * errors["float32"]
    readers = [float(words[5]) for words in table.values()]
    assert max(readers) < 1.2 * min(readers)  # nothing in the reader's loss tells that the painter learns nothing
    scales = {name: [int(word.removeprefix("2^")) for word in words[:2]] for name, words in table.items()}
    assert scales["unscaled"] == [0, 0]
    assert scales["per loss"][1] > scales["per loss"][0] + 5

    formats = rows(finished.stdout, "gradients", 8, 18)
    assert formats["paint      f16"] == ["100.0", "0.0", "0.0", "0.0", "0.0", "0.0"]
    assert formats["read       f16"][5] == "100.0"
    assert formats["paint      bf16"][0] == formats["read       bf16"][5] == "0.0"


def test_gradients_of_activations_are_those_of_autograd(script):
    params, (batch,) = script["make_params"](0), script["make_batches"](0, 1)
    found = script["activation_gradients"](script["paint_loss"], params, batch)
    code = script["encode"](params, batch[0], {})
    hidden = torch.tanh(script["dense"](params["painter"]["first"], code))
    pixels = script["dense"](params["painter"]["second"], hidden).requires_grad_()
    loss = (pixels.sigmoid() - batch[0]).square().mean()
    torch.testing.assert_close(found["pixels"], torch.autograd.grad(loss, pixels)[0])
    assert not found["logits"].any()  # of the other loss
    # The gradient of a bias is the sum of those of what it is added to.
    biases = fmp.grad(script["paint_loss"])(params, batch)
    torch.testing.assert_close(found["pixels"].sum(0), biases["painter"]["second"]["bias"])


def test_lost_gradients_are_those_that_come_out_as_zero(script):
    params, (batch,) = script["make_params"](0), script["make_batches"](0, 1)

    def measure(weight: float, scale: float) -> float:
        loss_fn = script["weighted"](script["paint_loss"], weight)
        return script["lost_in_float16"](loss_fn, params, batch, torch.tensor(scale))

    assert measure(1e-6, 1.0) == 1.0
    assert measure(1e-6, 2.0**24) < 0.01
    assert measure(1.0, 2.0**10) < 0.01


def test_losses_are_averaged_with_those_before(script):
    losses = torch.tensor([4.0, 0.0, 2.0])
    torch.testing.assert_close(script["smooth"](losses, 2), torch.tensor([4.0, 2.0, 1.0]))


def test_a_training_that_diverges_says_so(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--steps=20", "--learning-rate=1e6", f"--out={tmp_path}"])
    with pytest.raises(SystemExit, match="the training diverged; take a smaller --learning-rate"):
        script["main"]()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[
            ([f"--{option}={value}"], f"--{option} must be at least 1 and below 2**31")
            for option in ("steps", "growth-interval")
            for value in (0, 2**31)
        ],
        *[
            ([f"--{option}={value}"], f"--{option} must be above 0 and at most 1e6")
            for option in ("learning-rate", "paint-weight")
            for value in ("0", "nan", "1e7")
        ],
        (["--seed=-1"], "--seed must be at least 0 and below 2**32"),
        ([f"--out={ROOT / 'README.md'}"], "--out: "),
    ],
)
def test_bad_options_are_refused_by_name(script, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    with pytest.raises(SystemExit) as stop:
        script["parse_arguments"]()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
