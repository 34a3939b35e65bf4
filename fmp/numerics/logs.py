"""Writes a history to files that other programs read: JSON lines, and event files of TensorBoard."""

import errno
import importlib
import json
import logging
import math
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy.typing as npt

from fmp.numerics.history import History, checked_history

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

_BLOCK = 2**16
_START = b'{"step": '
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def write_jsonl(history: History, path: str | os.PathLike[str]) -> int:
    r"""Appends the steps of a history to a file, one JSON object a line.

    Call it again and again, at least once in `history.length` steps: if the last line of the file is one of the steps
    of this history, as it is here, those after it are appended; otherwise all steps that are kept. Nothing that is in
    the file is ever changed, so after a resumed run a step may be there twice: the later line counts. All lines are
    written at once, and synced to disk. A line of a history that was cut off, when a machine failed, is removed. Steps
    are appended to those of another run too, with a warning: what the file has is neither a step of this history, but
    for its first, nor comes before them all.

    The file is locked meanwhile, where the system and its file system can (`flock`), so several processes may write to
    one. Each run appends all that it keeps whenever another has written last, so better give each a file of its own.

    Args:
        history: The history of one run. Its paths are the names: `{"step": 3, "loss": 0.5, "skipped": false, ...}`.
            What is not finite is written as a string, `"nan"`, `"inf"` or `"-inf"`, which `float` reads; JSON has no
            numbers for these.
        path: The file to create or to append to.

    Returns:
        The number of lines that were appended.

    Raises:
        TypeError: If `history` is no history.
        ValueError: If the history is one that `vmap` made, of several members; or if the file ends with something else
            than a line of a history.
        OSError: If the file cannot be written, or is a pipe or a device.

    Example:
        >>> import tempfile
        >>> recorded = fmp.numerics.record(lambda state, batch: (state, {"loss": state / batch}), length=10)
        >>> carry = recorded.init(torch.tensor(1.0), torch.tensor(0.0))
        >>> (state, history), metrics = recorded(carry, torch.tensor(0.0))
        >>> with tempfile.NamedTemporaryFile("r") as file:
        ...     write_jsonl(history, file.name), write_jsonl(history, file.name), file.read()
        (1, 0, '{"step": 0, "loss": "inf"}\n')
    """
    lines = _lines(history)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{os.fspath(path)!r} is not a regular file; give another name")
        _lock(file)
        last, tail, end = _ending(file)
        if not _is_a_line(last, tail):
            raise ValueError(f"{os.fspath(path)!r} ends with no line of a history; give the name of another file")
        new_line = b""
        if _is_whole(tail):  # all but the end of its line has been written
            last, new_line = tail + b"\n", b"\n"
        elif tail:
            file.truncate(end)
        after = next((index + 1 for index, line in enumerate(lines) if line == last), 0)
        is_mixed = bool(last) and bool(lines) and not after and not _is_same_run(file, last, lines)
        file.seek(0, os.SEEK_END)
        file.write(new_line + b"".join(lines[after:]))
        file.flush()
        os.fsync(file.fileno())
    if is_mixed:
        warnings.warn(
            f"{os.fspath(path)!r} held another run, up to step {_step(last)}; {len(lines)} steps of this one are "
            "behind it now; give each run a file of its own",
            stacklevel=2,
        )
    return len(lines) - after


def write_tensorboard(history: History, folder: str | os.PathLike[str], *, since: int = 0) -> int:
    """Writes the steps of a history to a new event file of TensorBoard.

    NaN and infinities are written as they are; TensorBoard marks these points.

    Args:
        history: The history of one run. Its paths are the tags.
        folder: The folder of the run; made if it is missing.
        since: The first step to write: what the last call returned.

    Returns:
        The number of steps so far, to pass as `since` the next time.

    Raises:
        ModuleNotFoundError: If tensorboardX is not installed.
        ValueError: If the history is one that `vmap` made, of several members.
        OSError: If a file cannot be written.

    Example:
        >>> import tempfile
        >>> recorded = fmp.numerics.record(lambda state, batch: (state, {"loss": state * batch}), length=10)
        >>> carry = recorded.init(torch.tensor(1.0), torch.tensor(2.0))
        >>> (state, history), metrics = recorded(carry, torch.tensor(2.0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_tensorboard(history, folder)
        1
    """
    columns = of_one_run(history)
    steps = columns.pop("step").tolist()
    count = int(history.count)
    try:
        writer = importlib.import_module("tensorboardX").SummaryWriter
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "tensorboardX":
            raise
        raise ModuleNotFoundError(
            "event files need tensorboardX, in the extra `tools` of fmp-torch: python -m pip install tensorboardX",
            name="tensorboardX",
        ) from error
    # Two files of one second would have one name.
    with _silent_about_nan(), writer(os.fspath(folder), filename_suffix=f".{since}-{count}") as events:
        for name, column in columns.items():
            for step, value in zip(steps, column.tolist(), strict=True):
                if step >= since:
                    events.add_scalar(name, value, step)
    return count


def of_one_run(history: History) -> dict[str, npt.NDArray]:
    """Returns the arrays of a history that is not mapped.

    Raises:
        TypeError: If it is no history.
        ValueError: If it is mapped.
    """
    if checked_history(history).count.ndim:
        raise ValueError(
            f"this history has {tuple(history.count.shape)} members; take one of them, with "
            "fmp.tree.map(lambda leaf: leaf[0], history)"
        )
    return history.arrays()


def _lines(history: History) -> list[bytes]:
    columns = of_one_run(history)
    # The shortest digits that give the number back in its own dtype.
    values = [[_plain(value) for value in column] for column in columns.values()]
    rows = zip(*values, strict=True)
    return [json.dumps(dict(zip(columns, row, strict=True)), allow_nan=False).encode() + b"\n" for row in rows]


def _plain(value: Any) -> Any:
    if value.dtype.kind != "f":
        return value.item()
    return float(str(value)) if math.isfinite(value) else str(value)


def _ending(file: BinaryIO) -> tuple[bytes, bytes, int]:
    """Returns the last whole line of a file, what comes after it, and where it ends."""
    start = file.seek(0, os.SEEK_END)
    tail = b""
    # A line has two ends, that of the line before and its own.
    while start and tail.count(b"\n") < 2:
        size = min(max(_BLOCK, len(tail)), start)
        start = file.seek(start - size)
        tail = file.read(size) + tail
    end = tail.rfind(b"\n") + 1
    return tail[tail.rfind(b"\n", 0, max(end - 1, 0)) + 1 : end], tail[end:], start + end


def _is_a_line(last: bytes, tail: bytes) -> bool:
    """Says whether a file with this end is one of a history, or empty. A few bytes alone may be anything."""
    if last and not _is_whole(last):
        return False
    return not tail or tail.startswith(_START) or (bool(last) and _START.startswith(tail))


def _is_same_run(file: BinaryIO, last: bytes, lines: list[bytes]) -> bool:
    """Says whether a history goes on from what is in a file: from its end, or, after a resumption, from before.

    The first step is not looked at: another run with the same seed has the same one.
    """
    if _step(last) < _step(lines[0]):
        return True
    ours = {line for line in lines if _step(line)}
    file.seek(0)
    return any(line in ours for line in file)


def _step(line: bytes) -> int:
    return json.loads(line)["step"]


def _is_whole(line: bytes) -> bool:
    if not line.startswith(_START):
        return False
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and type(found["step"]) is int


def _lock(file: BinaryIO) -> None:
    """Waits until no other process has the file, and keeps it until it is closed, where that is possible."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise


@contextmanager
def _silent_about_nan() -> Iterator[None]:
    """Keeps tensorboardX from a warning for each number of this thread that is not finite: they are meant."""
    thread = threading.get_ident()

    def from_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger = logging.getLogger("tensorboardX.x2num")
    logger.addFilter(from_elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(from_elsewhere)
