"""The three stories of the examples: each proves itself against a plain loop, and the test reads what it printed."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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


@pytest.mark.parametrize("name", ["ensemble", "private_gradients", "maml"])
def test_a_run_of_no_steps_is_refused(name, monkeypatch, capsys):
    script = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, "--steps", "0"])
    with pytest.raises(SystemExit):
        runpy.run_path(script)["parse_arguments"]()
    assert "must be at least 1" in capsys.readouterr().err
