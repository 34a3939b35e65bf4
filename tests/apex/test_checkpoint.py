"""Apex 1.8: saving and resuming, bit for bit, masters included, at any step, in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fmp
from fmp import tree
from tests.apex.resume_case import CASES, STEPS, case, run
from tests.bits import same_bits

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves every case before every step, and has another process finish all of these runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in CASES:
        step, state = case(name)
        for index in range(STEPS):
            fmp.checkpoint.save(state, folder / f"{name}.at{index}")
            state = run(step, state, index, index + 1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(__file__).with_name("resume_case.py")), str(folder)]
    subprocess.run(program, check=True, env=environment)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_goes_on_in_another_process_ends_with_the_same_bits(name, resumed):
    step, state = case(name)
    expected = run(step, state, 0, STEPS)
    assert expected.skip_count == 1  # the bad batch
    for index in range(STEPS):
        end = fmp.checkpoint.load(state, resumed / f"{name}.at{index}.end")
        assert same_bits(end, expected), index


@pytest.mark.parametrize("name", ["O2-f16", "O2-bf16"])
def test_masters_rebuilt_from_half_weights_would_end_elsewhere(name):
    """This is what Apex does."""
    step, state = case(name)
    middle = run(step, state, 0, 4)
    rounded = tree.map(lambda kept, param: None if kept is None else param.float(), middle.master, middle.params)
    lossy = tree.replace(middle, master=rounded)
    assert not same_bits(run(step, lossy, 4, STEPS), run(step, middle, 4, STEPS))


def test_scale_and_count_are_in_the_checkpoint(tmp_path):
    step, state = case("O2-f16")
    state = run(step, state, 0, 4)
    fmp.checkpoint.save(state, tmp_path / "state")
    loaded = fmp.checkpoint.load(case("O2-f16")[1], tmp_path / "state").loss_scale
    # One growth in the first two steps, a back-off in the third, one good step since.
    assert (loaded.loss_scale, loaded.growth_count) == (256.0, 1)
    assert (loaded.growth_interval, loaded.max_scale) == (2, 2.0**24)


def test_a_checkpoint_of_another_opt_level_is_refused(tmp_path):
    _, state = case("O2-bf16")
    fmp.checkpoint.save(state, tmp_path / "state")
    with pytest.raises(fmp.errors.CheckpointError, match="does not fit"):
        fmp.checkpoint.load(case("O1-bf16")[1], tmp_path / "state")


def test_weights_for_evaluation_are_float32_in_a_plain_module(tmp_path):
    policy = fmp.opt_level("O2", "f16")
    module = torch.nn.Linear(3, 2)
    model = fmp.functionalize(module)
    loss_fn = lambda params, x: model.apply(params, {}, x)[0].float().square().mean()
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=policy)
    state, _ = step(step.init(model.params), torch.ones(4, 3))
    full = fmp.master.merge(state.params, state.master, form=policy.master_form)
    torch.save(full, tmp_path / "weights.pt")
    module.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert same_bits(dict(module.state_dict()), dict(state.master))
