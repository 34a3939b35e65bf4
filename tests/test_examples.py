"""The three stories of the examples: each proves itself against a plain loop, and the test reads what it printed."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ["--opt-level=O0", "--width=16", "--heads=2", "--layers=1", "--context=16"]


def run(name: str, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def proof(output: str) -> float:
    found = re.fullmatch(r"proof .*: (\S+)", output.splitlines()[-1])
    assert found is not None, output
    return float(found[1])


def table(output: str, first: str, rows: int) -> list[list[str]]:
    """Returns the words of some lines after the one that starts with a given word."""
    lines = [line.split() for line in output.splitlines()]
    start = next(index for index, words in enumerate(lines) if words and words[0] == first) + 1
    return lines[start : start + rows]


def test_members_of_an_ensemble_skip_on_their_own_and_end_as_in_a_loop(tmp_path):
    output = run("ensemble", tmp_path, "--steps", "40", "--out", "pictures")
    assert proof(output) <= 0.01
    skipped = [int(row[4]) for row in table(output, "member", 8)]
    assert skipped[0] == 0
    assert skipped == sorted(skipped)
    assert skipped[-1] > 10
    scales = [int(row[3].removeprefix("2^")) for row in table(output, "member", 8)]
    assert scales[0] == 16 + 40 // 10
    assert scales == sorted(scales, reverse=True)
    assert (tmp_path / "pictures" / "scales.png").stat().st_size > 10_000


def test_private_gradients_equal_a_loop_and_come_again_with_the_seed(tmp_path):
    output = run("private_gradients", tmp_path, "--steps", "150")
    assert proof(output) <= 0.05
    assert "same seed, same bits: yes" in output
    clipped = re.search(r"200 samples against a loop, (\d+) of them clipped", output)
    assert clipped is not None
    assert 0 < int(clipped[1]) < 200  # both branches of the clipping are in the proof
    rows = [[float(word) for word in row] for row in table(output, "noise", 6)]
    assert rows[0][3] > 0.8
    assert rows[-1][2] > rows[0][2]
    epsilons = [row[1] for row in rows]
    assert epsilons == sorted(epsilons, reverse=True)


def test_the_accountant_of_the_example_gives_the_published_epsilon():
    epsilon = runpy.run_path(str(ROOT / "examples" / "private_gradients.py"))["epsilon"]
    # Abadi et al. 2016, section 3.2.
    published = epsilon(noise_multiplier=4.0, steps=10_000, sampling_rate=0.01, delta=1e-5)
    assert published == pytest.approx(1.26, abs=0.01)


def test_the_meta_gradient_equals_a_loop_and_adapting_helps(tmp_path):
    output = run("maml", tmp_path, "--steps", "500", "--out", "pictures")
    assert proof(output) <= 1e-5
    rows = table(output, "k", 5)
    losses = {int(row[0]): float(row[1]) for row in rows}
    assert losses[10] < losses[1] < losses[0]
    assert losses[10] < float(rows[-1][2])
    assert (tmp_path / "pictures" / "sinusoid.png").stat().st_size > 10_000


COUNT, RATE = "must be at least 1 and below 2**31", "must be above 0 and at most 1e6"
SEED, FOLDER = "--seed must be at least 0 and below 2**32", "--out: "
COUNTS = {
    "ensemble": ["steps"],
    "private_gradients": ["steps"],
    "maml": ["steps", "inner-steps"],
    "train_lm": ["steps", "batch", "accumulate", "warm-up", "context", "width", "heads", "layers", "save-every"],
}
RATES = {"private_gradients": ["learning-rate", "max-norm"], "maml": ["inner-rate", "learning-rate"]}
RATES["train_lm"] = ["learning-rate"]


@pytest.mark.parametrize(
    ("name", "option", "values", "message"),
    [
        *[(name, option, ["0", "-3", str(2**31)], COUNT) for name, options in COUNTS.items() for option in options],
        *[
            (name, option, ["nan", "inf", "0", "-0.1", "1e39"], RATE)
            for name, options in RATES.items()
            for option in options
        ],
        *[(name, "seed", ["-1", str(2**32), "9" * 30], SEED) for name in COUNTS],
        *[
            (name, "out", [str(ROOT / "README.md"), str(ROOT / "README.md" / "x")], FOLDER)
            for name in COUNTS
            if name[0] != "p"
        ],
        ("train_lm", "opt-level", ["O7"], "opt level 'O7' is not known"),
        ("train_lm", "half", ["fp8"], "'fp8' is not the name of a dtype"),
        ("train_lm", "loss-scale", ["nan", "x"], "loss_scale"),
        ("train_lm", "keep-norm-fp32", ["maybe"], "keep_norm_fp32 must be"),
        ("train_lm", "master-weights", ["x"], "master_weights must be"),
        ("train_lm", "text", ["/no/such/file"], "--text: there is no /no/such/file"),
        ("train_lm", "accumulate", ["3"], "--batch 16 must be a multiple of --accumulate 3"),
    ],
)
def test_bad_options_are_refused_by_name(name, option, values, message, monkeypatch, capsys):
    script = str(ROOT / "examples" / f"{name}.py")
    parse = runpy.run_path(script)["parse_arguments"]
    for value in values:
        monkeypatch.setattr(sys, "argv", [script, f"--{option}={value}"])
        with pytest.raises(SystemExit) as stop:
            parse()
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("maml", ["--inner-rate=100"], "the inner loop diverges within 5 steps; take a smaller --inner-rate"),
        ("maml", ["--learning-rate=10"], "MAML: the training diverged; take a smaller"),
        ("train_lm", ["--learning-rate=1e6", *TINY], "the training diverged; take a smaller --learning-rate"),
    ],
)
def test_a_training_that_diverges_says_so(name, arguments, message, tmp_path, monkeypatch):
    script = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, "--steps=20", f"--out={tmp_path}", *arguments])
    with pytest.raises(SystemExit, match=message):
        runpy.run_path(script)["main"]()
