"""One thread at a time: while the tensors of a module are swapped for a call, no other call may find them.

    hold(modules)     wait until no other thread holds one of them; then they are this thread's until the end

All modules of a call are taken at once, so that two calls do not wait for each other. A thread that holds modules may
take them again, for a call within a call.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fmp.errors import RematError

# So long a thread waits, in seconds. Longer means that the other one waits for it in turn.
_PATIENCE = 600.0

_changed = threading.Condition()
_held: dict[int, list[frozenset[int]]] = {}  # by thread


@contextmanager
def hold(modules: frozenset[int]) -> Iterator[None]:
    """Keeps modules from the calls of other threads.

    Args:
        modules: Their ids.

    Raises:
        RematError: If another thread does not let go of one.
    """
    thread = threading.get_ident()
    with _changed:
        # A thread that Python has not begun is one of autograd, and the thread that waits for it may hold the module.
        if not _is_foreign() and not _changed.wait_for(lambda: _is_free(modules, thread), _PATIENCE):
            raise RematError(
                f"remat: another thread has held a module of this call for {_PATIENCE:.0f} s; give each thread a copy "
                "of the module"
            )
        _held.setdefault(thread, []).append(modules)
    try:
        yield
    finally:
        with _changed:
            _held[thread].remove(modules)
            if not _held[thread]:
                del _held[thread]
            _changed.notify_all()


def _is_foreign() -> bool:
    return threading.current_thread().name.startswith("Dummy-")


def _is_free(modules: frozenset[int], thread: int) -> bool:
    others = [taken for other, taken in _held.items() if other != thread]
    return all(modules.isdisjoint(each) for taken in others for each in taken)
