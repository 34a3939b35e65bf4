"""The folder of a run: who writes into it, what is removed from it, and what never is."""

import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fmp.distributed import Checkpoints, manifest, places, storage
from fmp.errors import CheckpointError
from tests.bits import same_bits
from tests.distributed.checkpoint_cases import error_of


def state(seed: int = 0) -> dict[str, Any]:
    return {"w": torch.arange(6.0) + seed, "epoch": seed}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds every save up, halfway, until the event is set."""
    gate, write = threading.Event(), storage.write

    def slow_write(*args: Any) -> None:
        assert gate.wait(20)
        write(*args)

    monkeypatch.setattr(storage, "write", slow_write)
    return gate


def test_two_objects_do_not_remove_what_the_other_writes(tmp_path: Path, slow: threading.Event) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    folders = [tmp_path / "run", tmp_path / "link", tmp_path / "run" / ".." / "run"]
    timer = threading.Timer(0.2, slow.set)
    pending = Checkpoints(folders[0]).save_async(state(1), 1)
    timer.start()
    Checkpoints(folders[1]).save(state(2), 2)
    assert pending.done()  # it was waited for
    Checkpoints(folders[2]).save(state(3), 3)
    timer.join()
    pending.wait()
    assert names(tmp_path / "run") == ["000001-step-1", "000002-step-2", "000003-step-3"]
    assert Checkpoints(folders[0]).steps() == [1, 2, 3]


def test_threads_take_turns(tmp_path: Path) -> None:
    checkpoints, errors = Checkpoints(tmp_path, keep=None), []

    def save(step: int) -> None:
        try:
            if step % 2:
                checkpoints.save(state(step), step)
            else:
                checkpoints.save_async(state(step), step)
            checkpoints.load(state())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(step,)) for step in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(checkpoints.steps()) == [0, 1, 2, 3, 4, 5]
    assert all(same_bits(checkpoints.load(state(), step), state(step)) for step in range(6))


def test_an_error_behind_one_object_is_told_by_another(tmp_path: Path) -> None:
    with mock.patch.object(storage, "write", side_effect=OSError("disk full")):
        Checkpoints(tmp_path).save_async(state(1), 1)
        message = "CheckpointError: the save of step 1 in the background failed: disk full"
        assert error_of(lambda: Checkpoints(tmp_path).save(state(2), 2)) == message
    Checkpoints(tmp_path).save(state(3), 3)
    assert names(tmp_path) == ["000002-step-3"]


def test_what_fmp_did_not_make_stays(tmp_path: Path) -> None:
    (tmp_path / "000099-step-5").mkdir()
    (tmp_path / "000099-step-5" / "precious.txt").write_text("x")
    (tmp_path / "000100-step-6").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "000101-step-7").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "000102-step-8").symlink_to(tmp_path / "nowhere")
    before = names(tmp_path)
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        checkpoints.save(state(), step)
    assert names(tmp_path) == sorted([*before, "000104-step-2"])
    assert (tmp_path / "000099-step-5" / "precious.txt").read_text() == "x"
    assert checkpoints.steps() == [2]


def test_a_half_is_marked_from_its_beginning_and_removed(tmp_path: Path, slow: threading.Event) -> None:
    checkpoints = Checkpoints(tmp_path)
    pending = checkpoints.save_async(state(1), 1)
    assert names(tmp_path / "000001-step-1") == ["fmp_unfinished"]
    slow.set()
    pending.wait()
    assert names(tmp_path / "000001-step-1") == [".metadata", "__0_0.distcp", "fmp_manifest"]
    with mock.patch.object(storage, "written_files", side_effect=OSError("cut")), pytest.raises(OSError, match="cut"):
        checkpoints.save(state(2), 2)
    half = tmp_path / "000002-step-2"
    assert names(half) == [".metadata", "__0_0.distcp", "fmp_unfinished"]
    (half / "deep").mkdir()
    (half / "deep" / "notes").touch()
    (tmp_path / "000003-step-3").mkdir()  # as after a kill between the folder and its mark
    checkpoints.save(state(4), 4)
    assert names(tmp_path) == ["000001-step-1", "000004-step-4"]


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    checkpoints = Checkpoints(run, keep=2)
    checkpoints.save(state(1), 1)
    archive.mkdir()
    shutil.move(run / "000001-step-1", archive)
    (run / "000001-step-1").symlink_to(archive / "000001-step-1")
    assert same_bits(checkpoints.load(state()), state(1))
    for step in (2, 3):
        checkpoints.save(state(step), step)
    assert names(run) == ["000002-step-2", "000003-step-3"]
    assert same_bits(Checkpoints(archive).load(state()), state(1))


def test_a_relative_folder_is_the_one_of_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: threading.Event
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints("run")
    pending = checkpoints.save_async(state(1), 1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    slow.set()
    pending.wait()
    checkpoints.save(state(2), 2)
    assert checkpoints.steps() == Checkpoints(tmp_path / "run").steps() == [1, 2]
    assert same_bits(checkpoints.load(state()), state(2))
    assert names(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("what", ["os.replace", "os.unlink"])
def test_an_old_checkpoint_that_cannot_be_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state(1), 1)
    old = tmp_path / "000001-step-1"
    genuine = getattr(os, what.removeprefix("os."))

    def fails(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(path).parent == old:
            raise PermissionError("read only")
        return genuine(path, *args, **kwargs)

    with mock.patch(what, fails):
        checkpoints.save(state(2), 2)
    assert names(tmp_path) == ["000001-step-1", "000002-step-2"]
    if what == "os.replace":
        assert checkpoints.steps() == [1, 2]
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage() == f"the old checkpoint {old} could not be removed: read only"
    else:
        assert checkpoints.steps() == [2]  # half removed, and still marked as fmp's
        assert "fmp_unfinished" in names(old)
    checkpoints.save(state(3), 3)
    assert names(tmp_path) == ["000003-step-3"]


@pytest.mark.parametrize("keep", [2, 3, None])
def test_a_renamed_folder_is_no_checkpoint_of_that_step(tmp_path: Path, keep: int | None) -> None:
    checkpoints = Checkpoints(tmp_path, keep)
    for step in (1, 2, 3):
        checkpoints.save(state(step), step)
    shutil.move(tmp_path / "000003-step-3", tmp_path / "000009-step-77")
    assert checkpoints.latest() == 2
    assert checkpoints.steps() == ([2] if keep == 2 else [1, 2])
    assert same_bits(checkpoints.load(state()), state(2))
    message = "000009-step-77 holds step 3, so it was renamed; call it 000009-step-3 to load it"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(state(), 77)

    checkpoints.save(state(10), 10)
    assert checkpoints.steps() == ([2, 10] if keep == 2 else [1, 2, 10])
    checkpoints.save(state(77), 77)
    assert checkpoints.steps() == {2: [10, 77], 3: [2, 10, 77], None: [1, 2, 10, 77]}[keep]
    assert same_bits(checkpoints.load(state(), 77), state(77))
    # Its own name makes it a checkpoint again; it never went.
    shutil.move(tmp_path / "000009-step-77", tmp_path / "000009-step-3")
    assert same_bits(checkpoints.load(state(), 3), state(3))


def cut(checkpoint: Path) -> None:
    os.truncate(checkpoint / "__0_0.distcp", 100)


def lose_a_file(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()


def damage_the_manifest(checkpoint: Path) -> None:
    os.truncate(checkpoint / "fmp_manifest", 100)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (cut, "__0_0.distcp is cut: 100 bytes of"),
        (lose_a_file, ".metadata is missing"),
        (damage_the_manifest, "the manifest is damaged"),
    ],
)
def test_a_damaged_checkpoint_takes_nobodys_place(
    tmp_path: Path, damage: Callable[[Path], None], complaint: str
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(state(step), step)
    damage(tmp_path / "000003-step-3")
    assert checkpoints.steps() == [2, 3]
    assert error_of(lambda: checkpoints.load(state())).startswith(
        f"CheckpointError: {tmp_path / '000003-step-3'}: {complaint}"
    )
    assert same_bits(checkpoints.load(state(), 2), state(2))
    checkpoints.save(state(4), 4)
    assert checkpoints.steps() == [2, 3, 4]
    checkpoints.save(state(5), 5)
    assert names(tmp_path) == ["000004-step-4", "000005-step-5"]  # those before them are old now, whole or not


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=None)
    for step in (1, 2):
        checkpoints.save(state(step), step)
        cut(tmp_path / f"00000{step}-step-{step}")
    checkpoints.save(state(5), 2)
    assert names(tmp_path) == ["000001-step-1", "000003-step-2"]
    assert same_bits(checkpoints.load(state()), state(5))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (places, "make"),
        (Path, "touch"),
        (storage, "write"),
        (manifest, "stamp"),
        (manifest, "write"),
        (places, "unmark"),
    ],
)
@pytest.mark.parametrize("keep", [1, 3])
def test_a_signal_handler_may_save_in_the_middle_of_a_save(
    tmp_path: Path, owner: Any, name: str, after: bool, keep: int
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run", keep)
    checkpoints.save(state(1), 1)
    genuine = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if not after:
            signal.raise_signal(signal.SIGUSR1)
        result = genuine(*args, **kwargs)
        signal.raise_signal(signal.SIGUSR1)
        return result

    def save(*_: Any) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        Checkpoints(tmp_path / "link", keep).save(state(3), 3)

    before = signal.signal(signal.SIGUSR1, save)
    try:
        with mock.patch.object(owner, name, interrupted):
            checkpoints.save(state(2), 2)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sorted(checkpoints.steps()) == ([1, 2, 3] if keep == 3 else [3])
    for step in checkpoints.steps():
        assert same_bits(checkpoints.load(state(), step), state(step))
    assert len(names(tmp_path / "run")) == keep


def test_a_save_that_failed_leaves_a_half_that_the_next_one_removes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for owner, name in ((storage, "write"), (manifest, "write"), (places, "make")):
        with mock.patch.object(owner, name, side_effect=OSError("full")), pytest.raises(OSError, match="full"):
            checkpoints.save(state(1), 1)
    checkpoints.save(state(2), 2)
    assert [path.name[6:] for path in tmp_path.iterdir()] == ["-step-2"]
