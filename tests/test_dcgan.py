"""The DCGAN example: it trains as the imperative loop does, and its three scalers move on their own."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn.functional as F

import fmp
from tests.bits import same_bits

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = EXAMPLES / "dcgan.py"


@pytest.fixture
def example(monkeypatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(SCRIPT))


def make_gan(example: dict[str, Any], level: str, loss_scale: Any):
    models = example["make_models"](4, seed=0)
    policy = fmp.opt_level(level, half_dtype=torch.bfloat16)
    return example["make_gan"](models, policy=policy, loss_scale=loss_scale, learning_rate=2e-4, seed=0)


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    real = torch.rand(8, 1, 32, 32, generator=generator) * 2 - 1
    return {"real": real, "noise": torch.randn(8, 64, 1, 1, generator=generator)}


def scales(state) -> dict[str, float]:
    scalers = {**state.discriminator.loss_scale, **state.generator.loss_scale}
    return {name: scaler.loss_scale.item() for name, scaler in scalers.items()}


def skips(state) -> tuple[int, int]:
    return state.discriminator.skip_count["discriminator"].item(), state.generator.skip_count["generator"].item()


def test_it_trains_as_the_imperative_loop_does(example):
    state, step = make_gan(example, "O0", None)
    torch.manual_seed(0)
    models = {"discriminator": example["Discriminator"](4), "generator": example["Generator"](4)}
    for name, model in models.items():
        model.load_state_dict({**example["make_models"](4, seed=0)[name].params}, strict=False)
    optimizers = {
        name: torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999)) for name, model in models.items()
    }
    for seed in range(3):
        batch = batch_of(seed)
        state, metrics = step(state, batch)

        expected = {}
        discriminator, generator = models["discriminator"], models["generator"]
        discriminator.zero_grad()
        logits = discriminator(batch["real"])
        expected["real"] = F.binary_cross_entropy_with_logits(logits, torch.ones(8))
        expected["real"].backward()
        fake = generator(batch["noise"])
        expected["fake"] = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), torch.zeros(8))
        expected["fake"].backward()
        optimizers["discriminator"].step()
        generator.zero_grad()
        expected["generator"] = F.binary_cross_entropy_with_logits(discriminator(fake), torch.ones(8))
        expected["generator"].backward()
        optimizers["generator"].step()
        torch.testing.assert_close(metrics.loss, {name: loss.detach() for name, loss in expected.items()})

    for name, model in models.items():
        trained = getattr(state, name).params[name]
        torch.testing.assert_close(trained, {key: p.detach() for key, p in model.named_parameters()})
        torch.testing.assert_close(state.generator.buffers[name], dict(model.named_buffers()))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_step_is_pure_and_counts_the_statistics_as_dcgan_does(example, level):
    state, step = make_gan(example, level, "dynamic")
    first, _ = step(state, batch_of(0))
    again, _ = step(state, batch_of(0))
    assert same_bits(first, again)
    after, metrics = step(first, batch_of(1))
    # Each step shows the discriminator three batches, and the generator makes one.
    assert after.generator.buffers["discriminator"]["norm2.num_batches_tracked"] == 6
    assert after.generator.buffers["generator"]["norm1.num_batches_tracked"] == 2
    assert set(metrics.loss) == set(metrics.loss_scale) == {"real", "fake", "generator"}
    assert skips(after) == (0, 0)


def test_the_three_scalers_move_on_their_own(example):
    state, step = make_gan(example, "O2", fmp.DynamicLossScale(16.0, growth_interval=2))
    state, _ = step(state, batch_of(0))
    assert scales(state) == {"real": 16.0, "fake": 16.0, "generator": 16.0}

    bad = batch_of(1)
    bad["real"][0, 0, 0, 0] = float("inf")
    after, metrics = step(state, bad)
    assert scales(after) == {"real": 8.0, "fake": 32.0, "generator": 32.0}
    assert skips(after) == (1, 0)
    assert {name: bool(flag) for name, flag in metrics.skipped.items()} == {"discriminator": True, "generator": False}
    assert same_bits(after.discriminator.params, state.discriminator.params)
    assert not same_bits(after.generator.params, state.generator.params)
    # The statistics of the bad batch are gone, those of the other two are there.
    assert after.generator.buffers["discriminator"]["norm2.num_batches_tracked"] == 5
    assert fmp.all_finite(after.generator.buffers)

    bad = batch_of(2)
    bad["noise"][0] = float("nan")
    after, _ = step(after, bad)
    assert scales(after) == {"real": 8.0, "fake": 16.0, "generator": 16.0}
    assert skips(after) == (2, 1)
    after, _ = step(after, batch_of(3))
    assert scales(after) == {"real": 16.0, "fake": 16.0, "generator": 16.0}
    assert skips(after) == (2, 1)


def test_a_run_prints_its_table_and_draws_both_grids(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    tiny = ["--epochs", "2", "--width", "4", "--batch-size", "100", "--growth-interval", "40", "--output", "gan"]
    command = [sys.executable, str(SCRIPT), *tiny]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines() if re.match(r" +\d+ ", line)]
    assert len(rows) == 2
    first, last = ([float(word) for word in row[1:7]] for row in rows)
    # The discriminator learns to tell real digits from generated ones.
    assert last[0] < first[0] < 0.7
    assert last[1] < first[1] < 0.8
    assert first[3] < last[3]
    assert last[4] < first[4]
    assert [row[7:] for row in rows] == [["2^17", "2^17", "2^17", "0", "0"], ["2^18", "2^18", "2^18", "0", "0"]]
    assert plt.imread(tmp_path / "gan" / "digits.png").shape[:2] == (512, 1040)
    assert (tmp_path / "gan" / "state.fmp").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--opt-level", "02"], "with the letter O, not zero"),
        (["--half", "f32"], "invalid choice: 'f32'"),
        (["--loss-scale", "nan"], "nan"),
        (["--loss-scale", "often"], "use 'dynamic', 'none' or a positive number"),
        (["--learning-rate", "nan"], "must be a positive, finite number, got nan"),
        (["--learning-rate", "-1"], "must be a positive, finite number, got -1"),
        (["--epochs", "0"], "must be a positive whole number, got 0"),
        (["--batch-size", "1"], "--batch-size must be at least 2"),
        (["--batch-size", "5001"], "--batch-size must be at most 5000"),
        (["--growth-interval", "2.5"], "invalid count value: '2.5'"),
        (["--seed", "-1"], "must be at least 0 and below 2**32"),
        (["--output", __file__], "File exists"),
        (["--speed", "9"], "unrecognized arguments: --speed"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(example, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["dcgan.py", *arguments])
    with pytest.raises(SystemExit) as refusal:
        example["parse_arguments"]()
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err
