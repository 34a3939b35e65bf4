"""Processes that are killed in the middle of a save: the last complete checkpoint is found and loads, and no other."""

import os
import random
from pathlib import Path

import pytest

from tests.distributed import checkpoint_cases as cases
from tests.distributed.processes import RankError, run


def die_in_a_fork(folder: Path, steps: list[int], call: int, behind: bool) -> bool:
    """Saves in a child of this process; says whether it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            cases.train(str(folder), steps, [0], call, behind)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("behind", [False, True])
def test_a_lone_process_killed_at_any_call(tmp_path: Path, behind: bool) -> None:
    calls = cases.train(str(tmp_path / "whole"), [1, 2, 3], [0], 0, behind)
    complete = calls.index("os.replace") + 1
    assert {"os.mkdir", "os.fsync", "os.replace", "os.unlink", "torch.save", "hashlib.file_digest"} <= {*calls}
    for call in range(1, len(calls) + 1):
        folder = tmp_path / str(call)
        assert die_in_a_fork(folder, [1, 2, 3], call, behind)
        latest, whole, left = cases.resume(str(folder))
        assert (latest, whole) == (3 if call > complete else 2, True)
        assert left == [latest, 1000]
        # What was half written, or half removed, is gone.
        assert [name.split("-step-")[1] for name in sorted(os.listdir(folder))] == [str(latest), "1000"]
    assert not die_in_a_fork(tmp_path / "other", [1, 2, 3], len(calls) + 1, behind)


def test_the_first_save_killed_leaves_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run(1, cases.train, str(tmp_path), [1], [0], 6)
    assert run(1, cases.resume, str(tmp_path)) == [(None, True, [1000])]


@pytest.mark.parametrize(("victims", "kills"), [([0], 3), ([1], 2), ([0, 1], 2)])
def test_ranks_killed_at_each_phase(tmp_path: Path, victims: list[int], kills: int) -> None:
    calls = run(2, cases.train, str(tmp_path / "whole"), [1, 2, 3], victims, 0)[victims[0]]
    complete = calls.index("os.replace") + 1 if 0 in victims else None
    # Spread evenly, from the first call to the last.
    for call in {1 + index * (len(calls) - 1) // (kills - 1) for index in range(kills)}:
        folder = str(tmp_path / str(call))
        with pytest.raises(RankError, match="the process ended"):
            run(2, cases.train, folder, [1, 2, 3], victims, call)
        latest, whole, left = run(2, cases.resume, folder)[0]
        assert whole
        assert latest in ([2, 3] if complete is None else [3 if call > complete else 2])
        assert left == [latest, 1000]


def test_ranks_killed_at_any_moment(tmp_path: Path) -> None:
    last = 0
    for seed, victims in enumerate([[0], [0, 1, 2, 3]]):
        with pytest.raises(RankError, match="the process ended"):
            run(4, cases.train_until_killed, str(tmp_path), victims, random.Random(seed).uniform(0.0, 0.3))
        half = [path for path in tmp_path.iterdir() if not (path / "fmp_manifest").exists()]
        assert len(half) <= 2  # one half written, one half removed
        # Fewer processes go on.
        latest, whole, _ = run(2, cases.resume, str(tmp_path))[0]
        assert whole
        assert latest is not None
        assert latest > last
        last = 1000
