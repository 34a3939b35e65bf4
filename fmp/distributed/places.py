"""The folders of a run's checkpoints: `000007-step-1200` is the seventh one begun, at step 1200.

Only rank 0 makes and removes them. The order is that of saving, not that of steps: after a run went back to an earlier
step, its new checkpoints are the latest ones.
"""

import contextlib
import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Iterator, Set
from pathlib import Path

from fmp.distributed import manifest, storage
from fmp.errors import CheckpointError

_MARK = "fmp_unfinished"  # the file that says of half a checkpoint that it is one, and may be removed
_log = logging.getLogger(__name__)
_NAME = re.compile(r"(\d{6,})-step-(\d+)")


@dataclasses.dataclass(frozen=True)
class Place:
    """The folder of one checkpoint."""

    serial: int
    step: int
    path: Path

    def is_complete(self) -> bool:
        """Says whether the checkpoint was written to its end."""
        return manifest.is_complete(self.path)

    def saved_step(self) -> int:
        """Says at which step the checkpoint was saved; another one than its name says if the folder was renamed."""
        try:
            return manifest.read_label(self.path)[0]
        except (CheckpointError, OSError):
            return self.step  # nobody knows better; whoever loads it hears what is wrong

    def looks_whole(self) -> bool:
        """Says whether the manifest is that of the step, and each file is there with its size; no file is read."""
        try:
            step, stamps = manifest.read_label(self.path)
            for name, stamp in stamps.items():
                manifest.check_size(self.path, name, stamp)
        except (CheckpointError, OSError):
            return False
        return step == self.step


def parse(path: Path) -> Place | None:
    """Reads the name of a folder; None if it is not that of a checkpoint.

    Example:
        >>> parse(Path("runs/000007-step-1200")).step
        1200
    """
    match = _NAME.fullmatch(path.name)
    return Place(int(match[1]), int(match[2]), path) if match else None


def begun(folder: Path) -> list[Place]:
    """Lists all checkpoints, complete or not, in the order they were begun in."""
    if not folder.is_dir():
        return []
    found = [place for path in folder.iterdir() if (place := parse(path))]
    return sorted(found, key=lambda place: place.serial)


def complete(folder: Path) -> Iterator[Place]:
    """Iterates over the complete checkpoints, those saved last first, and leaves out folders that were renamed."""
    return (place for place in reversed(begun(folder)) if place.is_complete() and place.saved_step() == place.step)


def steps(folder: Path) -> list[int]:
    """Lists the steps of the complete checkpoints; one that was saved twice counts as saved the second time."""
    latest_first = dict.fromkeys(place.step for place in complete(folder))
    return [*reversed(latest_first)]


def latest(folder: Path) -> int | None:
    """Returns the step of the complete checkpoint that was saved last, or None if there is none."""
    return next((place.step for place in complete(folder)), None)


def next_name(folder: Path, step: int, written: Set[str]) -> str:
    """Names a new checkpoint, after those that are there or about to be."""
    places = [*begun(folder), *[parse(folder / name) for name in written]]
    serial = max((place.serial for place in places if place is not None), default=0) + 1
    return f"{serial:06d}-step-{step}"


def make(path: Path, written: Set[str]) -> None:
    """Creates a folder to write a checkpoint into, marked as unfinished, and removes those that were never finished.

    What has the name of a checkpoint, but neither the mark nor a manifest, is someone else's and stays.

    Args:
        path: The folder.
        written: The names of those that are being written right now, and stay, too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for place in begun(path.parent):
        if not (place.is_complete() or place.path.is_symlink() or place.path.name in written):
            _remove(place.path)
    path.mkdir()
    (path / _MARK).touch()


def unmark(path: Path) -> None:
    """Takes the mark off a checkpoint that is complete; if it stays, it does no harm."""
    with contextlib.suppress(OSError):
        (path / _MARK).unlink()


def remove_old(folder: Path, keep: int | None) -> None:
    """Removes all complete checkpoints but the last ones, one for each step.

    Those that are visibly damaged do not count, and stay for as long as they are younger than the oldest one that does.
    Folders that were renamed neither count nor go. Of a symbolic link only the link is removed. What cannot be removed
    is logged, and tried again by the next save.

    Args:
        folder: Where they are.
        keep: How many to leave, at least 1, or None for all.
    """
    found = [place for place in begun(folder) if place.is_complete()]
    if len({place.step for place in found}) == len(found) <= (keep or len(found)):
        return  # before any manifest is read
    kept: set[int] = set()
    old: list[Place] = []
    for place in reversed(found):
        if place.step in kept or len(kept) == keep:
            old.append(place)
        elif place.looks_whole():
            kept.add(place.step)
    for place in reversed(old):
        if place.saved_step() == place.step:
            _remove_complete(place.path)


def _remove_complete(path: Path) -> None:
    try:
        if path.is_symlink():
            path.unlink()
            return
        # From here on it is no checkpoint any more, but one half removed.
        os.replace(path / manifest.NAME, path / _MARK)
    except OSError as error:
        _log.warning("the old checkpoint %s could not be removed: %s", path, error)
        return
    _remove(path)


def _remove(path: Path) -> None:
    """Removes a marked folder, as far as that is possible, or an empty one."""
    mark = path / _MARK
    if not mark.is_file():
        with contextlib.suppress(OSError):
            path.rmdir()  # only if it is empty, since a process was killed before the mark came, or after it went
        return
    # The mark goes last, or nobody would know whose the rest is.
    for each in path.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
        elif each != mark:
            with contextlib.suppress(OSError):
                each.unlink()
    if [*path.iterdir()] == [mark]:
        shutil.rmtree(path, ignore_errors=True)


def find(folder: Path, step: int | None) -> Place:
    """Finds the complete checkpoint of a step, or the one saved last.

    Raises:
        CheckpointError: If there is none; the message says what is there instead.
    """
    for place in complete(folder):
        if step is None or place.step == step:
            return place
    notes = ["no checkpoint" if step is None else f"no checkpoint of step {step}"]
    if found := steps(folder):
        notes.append(f"the complete ones are those of the steps {found}")
    for place in begun(folder):
        if place.is_complete() and (saved := place.saved_step()) != place.step:
            name = f"{place.serial:06d}-step-{saved}"
            notes.append(f"{place.path.name} holds step {saved}, so it was renamed; call it {name} to load it")
    if half := [place.path.name for place in begun(folder) if not place.is_complete()]:
        notes.append(f"never completed, or not written by fmp, are {half}")
    if (folder / storage.INDEX).is_file():
        notes.append("the folder is itself a checkpoint of torch.distributed.checkpoint that fmp did not write")
    if not folder.is_dir():
        notes.append("there is no such folder")
    raise CheckpointError(f"{folder}: {'; '.join(notes)}")
