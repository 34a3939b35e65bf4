"""Whole runs under torchrun in which a rank is killed: they are started again, and end as if nothing had happened."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fmp.distributed import Checkpoints
from tests.bits import same_bits
from tests.distributed import killed_run

ROOT = Path(__file__).parents[2]
STEPS, EVERY = killed_run.STEPS, killed_run.EVERY


@dataclass(frozen=True)
class Run:
    """What a run did.

    Attributes:
        starts: The complete checkpoints that each attempt found.
        losses: By attempt, the loss of each step, and the scale that it had.
        state: The last checkpoint, in full.
    """

    starts: list[list[int]]
    losses: list[dict[int, tuple[str, float]]]
    state: Any


def torchrun(folder: Path, *options: str) -> Run:
    """Trains on two processes, and reads what they have left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command += ["-m", killed_run.__name__, str(folder), *options]
    # torchrun would let every attempt read the addresses that the last one left in its store (pytorch #135712).
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert finished.returncode == 0, finished.stderr
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    starts = [line["complete"] for line in lines if "complete" in line]
    losses: list[dict[int, tuple[str, float]]] = [{} for _ in starts]
    for line in lines:
        if "step" in line:
            losses[line["attempt"]][line["step"]] = line["loss"], line["scale"]
    like = killed_run.first_state(killed_run.make_step(None))  # in one process, in full
    return Run(starts, losses, Checkpoints(folder / "checkpoints").load(like, STEPS))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = torchrun(tmp_path_factory.mktemp("whole"))
    assert run.starts == [[]]
    [losses] = run.losses
    assert [*losses] == [*range(1, STEPS + 1)]
    assert len({loss for loss, _ in losses.values()}) == STEPS
    assert len({scale for _, scale in losses.values()}) > 1
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "step", "function", "options", "complete", "reached"),
    [
        # In a step: parameters have been gathered, gradients are about to be sent.
        (1, 6, "fmp._compat.collectives.reduce_scatter", [], [2, 4], 5),
        # In the first step, with nothing saved yet.
        (0, 1, "fmp._compat.collectives.reduce_scatter", [], [], 0),
        # In a save: while a rank writes its part.
        (1, 6, "torch.save", [], [2, 4], 6),
        # When all is written except the manifest.
        (0, 6, "os.replace", [], [2, 4], 6),
        # When the checkpoint is complete, and the oldest is being removed.
        (0, 6, "shutil.rmtree", [], [4, 6], 6),
        # While the next step runs.
        (0, 6, "os.replace", ["--behind"], [2, 4], None),
    ],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(
    uninterrupted: Run,
    tmp_path: Path,
    rank: int,
    step: int,
    function: str,
    options: list[str],
    complete: list[int],
    reached: int | None,
) -> None:
    run = torchrun(tmp_path, *options, "--kill", str(rank), str(step), function)
    assert (tmp_path / "killed").exists()
    assert run.starts == [[], complete]  # it was killed once, and lost no checkpoint
    before, after = run.losses
    assert [*after] == [*range(max(complete, default=0) + 1, STEPS + 1)]
    if reached is not None:
        assert [*before] == [*range(1, reached + 1)]
    [expected] = uninterrupted.losses
    assert {**expected, **before} == expected  # bit for bit, also where a step was made twice
    assert {**expected, **after} == expected
    assert same_bits(run.state, uninterrupted.state)
