"""Checkpoints of several processes: any placement reads any other, and no rank fails, or hangs, alone."""

import os
from pathlib import Path

import pytest

from tests.distributed import checkpoint_cases as cases
from tests.distributed.processes import run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = str(tmp_path_factory.mktemp("everywhere"))
    written = cases.save_everywhere(folder)
    for size in (1, 2, 4):
        written += run(size, cases.save_everywhere, folder)[0]
    return written


def test_every_placement_was_written(folders: list[str]) -> None:
    assert len(folders) == 1 + 4 + 5 + 5
    files = [len(list(Path(folder).glob("*/*.distcp"))) for folder in folders]
    assert files == [1] + [1] * 4 + [2] * 5 + [4] * 5


@pytest.mark.parametrize("size", [0, 1, 2, 4])
def test_any_placement_reads_any_other_bit_for_bit(folders: list[str], size: int) -> None:
    found = run(size, cases.load_everywhere, folders) if size else [cases.load_everywhere(folders)]
    assert found == [[]] * max(size, 1)


def test_what_one_rank_gets_wrong_is_raised_on_all(tmp_path: Path) -> None:
    first, second = run(2, cases.disagreements, str(tmp_path))
    assert first == second
    for name, message in {
        "another step": "CheckpointError: the step is not the same on the ranks 0 and 1",
        "another leaf": "CheckpointError: count is not the same on the ranks 0 and 1; a leaf that differs between",
        "another shape": "CheckpointError: count is not the same on the ranks 0 and 1",
        "an extra leaf": "CheckpointError: extra is not the same on the ranks 0 and 1",
        "another value": "CheckpointError: epoch is not the same on the ranks 0 and 1",
        "no tensor": "CheckpointError: on rank 1 of 2: TypeError: w is a bytes; a checkpoint holds tensors",
        "no tensor anywhere": "TypeError: w is a bytes; a checkpoint holds tensors",
        "a partial sum": "ValueError: w: its placements are (Partial(sum),), a sum not yet taken; redistribute it",
        "another dtype in like": f"CheckpointError: {tmp_path}/000001-step-1: on rank 1 of 2: the checkpoint does not "
        "fit `like`:\n  count is i64[] in the file and i32[] in `like`",
        "no such step": f"CheckpointError: on rank 0 of 2: {tmp_path}: no checkpoint of step 7; the complete ones are",
        "an unreadable file": f"CheckpointError: {tmp_path}/000001-step-1: on rank 1 of 2: OSError: unreadable",
        "a full disk": "CheckpointError: the checkpoint could not be written: on rank 1 of 2: OSError: disk full",
        "a full disk behind": "CheckpointError: the checkpoint could not be written: on rank 1 of 2: OSError: disk",
        "a full disk before": "CheckpointError: the save of step 3 in the background failed: the checkpoint could not",
    }.items():
        assert first.pop(name).startswith(message)
    assert first == {}


@pytest.mark.parametrize("size", [1, 2])
def test_saving_in_the_background_while_training_goes_on(tmp_path: Path, size: int) -> None:
    assert run(size, cases.saving_behind, str(tmp_path)) == [[3, 4]] * size
    assert sorted(os.listdir(tmp_path)) == ["000003-step-3", "000004-step-4"]


def test_a_change_right_after_save_async_is_not_saved(tmp_path: Path) -> None:
    assert run(2, cases.unchanged_first, str(tmp_path)) == [True, True]


def test_what_is_still_on_its_way_is_waited_for(tmp_path: Path) -> None:
    assert run(2, cases.still_gathering, str(tmp_path)) == [[True, True]] * 2
