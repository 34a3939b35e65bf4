"""Saves of this process take turns: one at a time for a folder, whatever object or thread asks for them."""

import dataclasses
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fmp.errors import CheckpointError

_log = logging.getLogger(__name__)


class PendingSave:
    """A save that goes on in the background.

    Attributes:
        step: The step that is saved.
    """

    def __init__(self, step: int, write: Callable[[], None]):
        self.step = step
        self._told = False
        # The interpreter waits for this thread before it ends.
        executor = ThreadPoolExecutor(1, thread_name_prefix="fmp-checkpoint")
        self._future = executor.submit(self._run, write)
        executor.shutdown(wait=False)

    def done(self) -> bool:
        """Says whether it has ended on this rank, well or not."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the checkpoint is complete.

        Args:
            timeout: Seconds to wait.

        Raises:
            CheckpointError: If it could not be written; on all ranks.
            TimeoutError: If the time is over. The save goes on.
        """
        error = self._future.exception(timeout)
        self._told = True
        if error is not None:
            raise error

    def _finish(self) -> BaseException | None:
        """Waits for the end, good or bad."""
        return self._future.exception()

    def _settle(self) -> None:
        """Waits for the end, and raises what nobody has been told yet."""
        error = self._finish()
        if error is not None and not self._told:
            self._told = True
            raise CheckpointError(f"the save of step {self.step} in the background failed: {error}") from error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            _log.error("the checkpoint of step %d could not be written: %s", self.step, error)
            raise


@dataclasses.dataclass(eq=False)
class Turns:
    """What this process does with one folder.

    Attributes:
        lock: Held by whoever begins a save, writes one in the foreground, or loads.
        pending: The last save in the background.
        written: The names of the checkpoints that have been begun and not ended; several if a signal handler saves.
    """

    # A signal handler may save in the middle of a save; it must not wait for itself.
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    pending: PendingSave | None = None
    written: set[str] = dataclasses.field(default_factory=set)

    def settle(self) -> None:
        """Waits for the save in the background, and raises its error if nobody has been told."""
        if self.pending is not None:
            self.pending._settle()
            self.pending = None

    def finish(self) -> None:
        """Waits for the save in the background, good or bad."""
        if self.pending is not None:
            self.pending._finish()


# Of the process, since a folder is: two objects must not write into it at once, nor one remove what the other writes.
_turns: dict[str, Turns] = {}
_guard = threading.Lock()


def turns_of(folder: Path) -> Turns:
    """Returns the turns of a folder, the same by whatever name it is called.

    Example:
        >>> turns_of(Path("runs")) is turns_of(Path("runs/../runs"))
        True
    """
    with _guard:
        return _turns.setdefault(os.path.realpath(folder), Turns())
