"""The example: one table for any number of processes, printed once."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ["--steps=12", "--width=16", "--blocks=2", "--opt-level=O0"]


def table(*launcher: str, options: tuple[str, ...] = ()) -> dict[int, tuple[float, float]]:
    """Loss and megabytes of state by zero."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(ROOT / "examples" / "train_distributed.py"), *SMALL, *options]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert len(lines) == 5, finished.stdout
    rows = [line.split() for line in lines[2:]]
    return {int(zero): (float(loss), float(held)) for zero, loss, held, _ in rows}


def test_processes_reach_the_same_loss_with_less_state_on_each():
    alone = table()
    together = table("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert alone.keys() == together.keys() == {0, 1, 3}
    losses = [loss for loss, _ in (*alone.values(), *together.values())]
    assert max(losses) - min(losses) <= 1e-4 * max(losses)
    assert together[0][1] == alone[0][1]
    for zero in (1, 3):
        assert alone[zero][1] == alone[0][1]
        assert together[zero][1] <= 0.51 * alone[0][1]
