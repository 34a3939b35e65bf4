"""Runs a function in several processes that form one gloo process group, and brings back what it returns on each rank.

    losses = run(4, train, "adamw")  # train("adamw") on ranks 0 to 3; a list of four results

The processes are kept for the next call, so that torch is imported once a test session; each call has a process group
of its own. A call that fails ends all of them, and the next starts with fresh ones.
"""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.checkpoint", "fmp"])
_workers: list[tuple[Any, Connection]] = []
_GRACE = 3.0  # s; how long the other ranks may take to report, too, after one has failed


class RankError(AssertionError):
    """A function failed on some rank; the message holds the traceback of each that did."""


def run(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Calls a function on every rank of a new process group.

    Args:
        world_size: The number of processes.
        function: A function of a module, which the processes import. It finds the process group initialized, may make
            device meshes on it, and returns what can be pickled: plain tensors, no DTensors.
        *args: Its arguments, the same on every rank.
        timeout: Seconds that it may take.

    Returns:
        The results, by rank.

    Raises:
        RankError: If the function raises on a rank, a process ends, or time runs out.
    """
    _start(world_size)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            task = (function, args, rank, world_size, os.path.join(folder, "store"), timeout)
            _workers[rank][1].send_bytes(pickle.dumps(task))
        try:
            outcomes, failures = _gather(world_size, timeout)
        except BaseException:
            stop()  # or the next call would read the answers that nobody has read
            raise
    if failures or len(outcomes) < world_size:
        stop()
        silent = [rank for rank in range(world_size) if rank not in outcomes and rank not in failures]
        shown = [f"rank {rank} of {world_size}:\n{text}" for rank, text in sorted(failures.items())]
        shown += [f"no answer from the ranks {silent} within {timeout} s"] if silent else []
        raise RankError("\n".join(shown))
    return [outcomes[rank] for rank in range(world_size)]


def stop() -> None:
    """Ends all processes."""
    while _workers:
        process, connection = _workers.pop()
        connection.close()
        process.kill()
        process.join()


atexit.register(stop)


def _start(world_size: int) -> None:
    if any(not process.is_alive() for process, _ in _workers):
        stop()
    while len(_workers) < world_size:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        with _environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"):
            process.start()
        theirs.close()
        _workers.append((process, ours))


def _gather(world_size: int, timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
    outcomes: dict[int, Any] = {}
    failures: dict[int, str] = {}
    ranks = {_workers[rank][1]: rank for rank in range(world_size)}
    deadline = time.monotonic() + timeout
    while ranks and (ready := wait(list(ranks), max(deadline - time.monotonic(), 0.0))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = ranks.pop(connection)
            try:
                succeeded, answer = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                succeeded, answer = False, "the process ended"
            (outcomes if succeeded else failures)[rank] = answer
            if not succeeded:
                deadline = min(deadline, time.monotonic() + _GRACE)
    return outcomes, failures


def _serve(connection: Connection) -> None:
    """What a process does: one task after the other, until nobody asks any more."""
    torch.set_num_threads(1)
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _work(*pickle.loads(task))))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def _work(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, store: str, timeout: float
) -> Any:
    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    faulthandler.dump_traceback_later(0.9 * timeout, file=2)  # a rank that hangs says where
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )
    try:
        distributed.barrier()  # or one that is done soon would leave while others still connect to it
        with warnings.catch_warnings():
            return function(*args)
    finally:
        faulthandler.cancel_dump_traceback_later()
        distributed.destroy_process_group()


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
