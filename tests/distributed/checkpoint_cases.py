"""What the processes of the tests of checkpoints run."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import fmp
import fmp.distributed
from fmp import tree
from fmp.distributed import manifest, storage
from tests.bits import differing, same_bits

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]
SHAPES = [(7, 3), (4,), (3,), (1, 5), (0, 2), ()]  # with fewer rows than ranks, too
PLACES = ["plain", "shard", "columns", "replicate", "hybrid"]


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Makes a tensor of random bits, NaN payloads and all."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def full_state(seed: int = 0) -> dict[str, Any]:
    """Makes the same state on every rank, of plain tensors."""
    leaves = {
        f"{str(dtype).removeprefix('torch.')}/{index}": bits(dtype, shape, seed + index)
        for dtype in DTYPES
        for index, shape in enumerate(SHAPES if dtype == torch.bfloat16 else SHAPES[:1])
    }
    scaler = fmp.DynamicLossScale(2.0 ** (seed + 3), growth_interval=seed + 7).adjust(torch.tensor(True))
    return {"params": leaves, "scaler": scaler, "seed": torch.tensor(2**63 - 1 - seed), "none": None, "epoch": seed}


def blank_state() -> dict[str, Any]:
    """Makes what a resuming script has: the same structure with other values."""
    state = tree.map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, full_state())
    return {**state, "scaler": fmp.DynamicLossScale(), "epoch": -1}


def layout(name: str) -> tuple[DeviceMesh, list[Placement]]:
    """Makes the mesh and the placements that a name stands for."""
    size = dist.get_world_size()
    if name == "hybrid":
        return init_device_mesh("cpu", (2, size // 2)), [Replicate(), Shard(0)]
    placement = {"shard": Shard(0), "columns": Shard(1), "replicate": Replicate()}[name]
    return init_device_mesh("cpu", (size,)), [placement]


def placed(state: Any, name: str) -> Any:
    """Places the parameters of a state as a name says."""
    if name == "plain":
        return state
    mesh, placements = layout(name)

    def place(leaf: torch.Tensor) -> torch.Tensor:
        if any(isinstance(placement, Shard) and placement.dim >= leaf.ndim for placement in placements):
            return leaf
        return distribute_tensor(leaf, mesh, placements, src_data_rank=None)

    return {**state, "params": tree.map(place, state["params"])}


def local(state: Any) -> Any:
    """Takes this rank's parts of a state."""
    return tree.map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, state)


def names_here() -> list[str]:
    """Lists the placements that this process can have."""
    if not dist.is_initialized():
        return ["plain"]
    return [name for name in PLACES if name != "hybrid" or dist.get_world_size() >= 2]


def save_everywhere(folder: str) -> list[str]:
    """Saves one state in each placement; returns the folders."""
    size = dist.get_world_size() if dist.is_initialized() else 0
    folders = []
    for seed, name in enumerate(names_here()):
        folders.append(f"{folder}/{size}-{name}")
        state = placed(full_state(seed), name)
        fmp.distributed.Checkpoints(folders[-1]).save(state, seed)
    return folders


def load_everywhere(folders: list[str]) -> list[str]:
    """Loads the folders in each placement; returns what is wrong with what came back."""
    wrong = []
    for folder in folders:
        checkpoints = fmp.distributed.Checkpoints(folder)
        seed = checkpoints.latest()
        for name in names_here():
            like, wanted = placed(blank_state(), name), placed(full_state(seed or 0), name)
            before = local(like)
            loaded = checkpoints.load(like)
            places = [
                (leaf.placements, leaf.device_mesh, leaf.stride()) if isinstance(leaf, DTensor) else None
                for found in (loaded, wanted)
                for leaf in tree.leaves(found)
            ]
            if not same_bits(local(loaded), local(wanted)):
                wrong.append(f"{folder} as {name}: {differing(local(loaded), local(wanted))}")
            if places[: len(places) // 2] != places[len(places) // 2 :]:
                wrong.append(f"{folder} as {name}: placements")
            if not same_bits(before, local(like)):
                wrong.append(f"{folder} as {name}: `like` was written to")
    return wrong


def small(seed: int) -> dict[str, Any]:
    """Makes a small state, sharded if there are processes to share it."""
    weight = torch.arange(11.0).reshape(11, 1) + seed
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weight = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
    return {"w": weight, "count": torch.tensor(seed), "epoch": seed}


def error_of(call: Callable[[], Any]) -> str:
    """Returns the class and the message of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def disagreements(folder: str) -> dict[str, str]:
    """Does what only one rank gets wrong; returns the errors, which must come on all."""
    rank = dist.get_rank()
    checkpoints = fmp.distributed.Checkpoints(folder)
    checkpoints.save(small(1), 1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    odd = rank == 1
    errors = {}

    def saving(name: str, state: Any, step: int = 2) -> None:
        errors[name] = error_of(lambda: checkpoints.save(state, step))

    saving("another step", small(2), step=2 + rank)
    saving("another leaf", {**small(2), "count": torch.tensor(rank)})
    saving("another shape", {**small(2), "count": torch.zeros(1 + rank)})
    saving("an extra leaf", {**small(2), **({"extra": torch.zeros(1)} if odd else {})})
    saving("another value", {**small(2), "epoch": rank})
    saving("no tensor", {**small(2), "w": b"bytes" if odd else torch.zeros(1)})
    saving("no tensor anywhere", {**small(2), "w": b"bytes"})
    saving("a partial sum", {**small(2), "w": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)})

    def load(like: Any, step: int | None = None) -> Callable[[], Any]:
        return lambda: checkpoints.load(like, step)

    errors["another dtype in like"] = error_of(
        load({**small(0), "count": torch.zeros((), dtype=torch.int32 if odd else torch.int64)})
    )
    errors["no such step"] = error_of(load(small(0), 7))
    with mock.patch.object(manifest, "stamp", side_effect=OSError("unreadable")) if odd else contextlib.nullcontext():
        errors["an unreadable file"] = error_of(load(small(0)))
    with (
        mock.patch.object(FileSystemWriter, "write_data", side_effect=OSError("disk full"))
        if odd
        else contextlib.nullcontext()
    ):
        saving("a full disk", small(2))
        pending = checkpoints.save_async(small(2), 3)
        errors["a full disk behind"] = error_of(pending.wait)
        pending = checkpoints.save_async(small(2), 3)
        errors["a full disk before"] = error_of(lambda: checkpoints.save(small(2), 4))
    assert error_of(pending.wait) == errors["a full disk behind"]

    # After all that, nothing has changed, and everything works.
    assert checkpoints.steps() == [1], checkpoints.steps()
    assert same_bits(local(checkpoints.load(small(0))), local(small(1)))
    checkpoints.save(small(5), 5)
    assert same_bits(local(checkpoints.load(small(0))), local(small(5)))
    return errors


def saving_behind(folder: str) -> list[int]:
    """Saves in the background while training changes the state and uses the process group."""
    checkpoints = fmp.distributed.Checkpoints(folder, keep=2)
    gate = threading.Event()
    write = storage.write

    def slow_write(*args: Any) -> None:
        assert gate.wait(20)
        write(*args)

    state = {**small(1), "p": torch.nn.Parameter(torch.ones(3))}
    with mock.patch.object(storage, "write", slow_write):
        pending = checkpoints.save_async(state, 1)
        with torch.no_grad():
            for leaf in tree.leaves(local(state)):
                if isinstance(leaf, torch.Tensor):
                    leaf.zero_()
        assert checkpoints.latest() is None
        assert not pending.done()
        gate.set()
        for step in (2, 3, 4):
            total = torch.ones(1)
            for _ in range(20):
                dist.all_reduce(total)
            assert total == dist.get_world_size() ** 20
            pending = checkpoints.save_async({**small(step), "p": torch.ones(3)}, step)
        pending.wait()
    assert pending.done()
    loaded = checkpoints.load({**small(0), "p": torch.zeros(3)}, 3)
    assert same_bits(local(loaded), local({**small(3), "p": torch.ones(3)}))
    return checkpoints.steps()


def unchanged_first(folder: str) -> bool:
    """Changes a state in place while it is being saved, and looks at what was saved."""
    checkpoints = fmp.distributed.Checkpoints(folder)
    gate = threading.Event()
    write = storage.write

    def slow_write(*args: Any) -> None:
        assert gate.wait(20)
        write(*args)

    state = small(1)
    with mock.patch.object(storage, "write", slow_write):
        pending = checkpoints.save_async(state, 1)
        for leaf in (local(state)["w"], state["count"]):
            leaf.zero_()
        gate.set()
        pending.wait()
    return same_bits(local(checkpoints.load(small(0))), local(small(1)))


_CALLS = [
    *("os.mkdir", "os.fsync", "os.replace", "os.unlink", "os.rmdir", "os.chmod", "hashlib.file_digest"),
    *("torch.save", "pickle.dump", "torch.distributed.all_gather_object", "torch.distributed.gather_object"),
]


@contextlib.contextmanager
def killed_at(call: int, calls: list[str] | None = None) -> Iterator[list[str]]:
    """Kills this process at the `call`-th of the calls that a save consists of; 0 only lists them."""
    calls = [] if calls is None else calls

    def watched(name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return genuine(*args, **kwargs)

        return watch

    with contextlib.ExitStack() as stack:
        for name in _CALLS:
            module, _, attribute = name.rpartition(".")
            owner = __import__(module, fromlist=[attribute])
            stack.enter_context(mock.patch.object(owner, attribute, watched(name, getattr(owner, attribute))))
        yield calls


def train(folder: str, steps: list[int], victims: list[int], call: int, behind: bool = False) -> list[str]:
    """Saves a few steps; in the last save, the victims kill themselves at some call. Returns the calls."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    checkpoints = fmp.distributed.Checkpoints(folder, keep=2)
    for step in steps[:-1]:
        checkpoints.save(small(step), step)
    with killed_at(call if rank in victims else 0) as calls:
        if behind:
            checkpoints.save_async(small(steps[-1]), steps[-1]).wait()
        else:
            checkpoints.save(small(steps[-1]), steps[-1])
    return calls


def train_until_killed(folder: str, victims: list[int], seconds: float) -> None:
    """Saves once, then goes on saving until the victims die, and the others notice."""
    checkpoints = fmp.distributed.Checkpoints(folder, keep=2)
    step = (checkpoints.latest() or 0) + 1
    checkpoints.save(small(step), step)
    if dist.get_rank() in victims:
        threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        step += 1
        checkpoints.save(small(step), step)


def resume(folder: str) -> tuple[int | None, bool, list[int]]:
    """Loads the latest checkpoint and saves another; returns its step, whether it is whole, and what is left."""
    checkpoints = fmp.distributed.Checkpoints(folder, keep=2)
    latest = checkpoints.latest()
    whole = latest is None or same_bits(local(checkpoints.load(small(0))), local(small(latest)))
    for step in checkpoints.steps():
        whole = whole and same_bits(local(checkpoints.load(small(0), step)), local(small(step)))
    checkpoints.save(small(1000), 1000)
    whole = whole and same_bits(local(checkpoints.load(small(0))), local(small(1000)))
    return latest, whole, checkpoints.steps()


def still_gathering(folder: str) -> list[bool]:
    """Saves what a collective that nobody has waited for yet is still bringing."""
    checkpoints = fmp.distributed.Checkpoints(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.randn(2**16)
    sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    same = []
    for step, behind in enumerate([False, True]):
        state = {"w": sharded.redistribute(mesh, [Replicate()], async_op=True)}
        assert isinstance(state["w"].to_local(), AsyncCollectiveTensor)
        if behind:
            checkpoints.save_async(state, step).wait()
        else:
            checkpoints.save(state, step)
        same.append(same_bits(checkpoints.load({"w": torch.zeros(2**16)}), {"w": full}))
    return same
