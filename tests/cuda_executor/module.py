"""Launches kernels on the CPU with the arguments that CuPy takes."""

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.cuda_executor.build import build

SCHEDULES = ("forward", "reverse", "random threads", "random warps")


class LaunchError(RuntimeError):
    """A kernel did what it must not do; the message names the block, the thread and the line."""


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("read_only", ctypes.c_int),
        ("name", ctypes.c_char_p),
    )


class _Request(ctypes.Structure):
    """As scheduler.cpp declares it."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("schedule", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("cpu_seconds", ctypes.c_double),
        ("buffers", ctypes.c_void_p),
        ("buffer_count", ctypes.c_size_t),
        ("message", ctypes.c_char_p),
        ("message_size", ctypes.c_size_t),
        ("accesses", ctypes.c_void_p),
        ("stacks", ctypes.c_void_p),
    )


class Module:
    """The kernels of one .cu file; answers as a `cupy.RawModule` does.

    Attributes:
        names: The kernels.
        schedule: The order in which threads run, one of `SCHEDULES`.
        seed: What random schedules are drawn from.
        cpu_seconds: After how much work of its own a launch is stopped.
        accesses: How often the last launch read or wrote the buffers that it may write, by the number of bytes; empty
            unless the mode is "checked".

    Example:
        module = Module(Path("cuda/scale.cu"), "checked")
        with module.memory(read={"gradient": gradient}, written={"result": result}):
            module.get_function("scale_f32_f32")((1,), (256,), (table.data_ptr(), np.int32(1024)))
    """

    def __init__(self, source: Path, mode: str = "fast", defines: Sequence[str] = ()):
        self._path, self.names = build(source, mode, defines)
        self._library = ctypes.CDLL(os.fspath(self._path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self._buffers: list[tuple[str, int, int, bool]] = []
        self.schedule = "forward"
        self.seed = 1
        self.cpu_seconds = 20.0
        self.accesses: dict[int, int] = {}

    @contextmanager
    def memory(self, *, written: Mapping[str, Any] = {}, read: Mapping[str, Any] = {}) -> Iterator[None]:
        """Tells the checker which tensors or arrays the kernels may write, and which only read; all else is foreign."""
        before = self._buffers
        mine = [
            (name, *_extent(item), only)
            for items, only in ((written, False), (read, True))
            for name, item in items.items()
        ]
        self._buffers = [*before, *mine]
        try:
            yield
        finally:
            self._buffers = before

    def get_function(self, name: str) -> Callable[..., None]:
        """Returns `kernel(grid, block, args, shared_mem=0, stream=None)`."""
        if name not in self.names:
            raise KeyError(f"{name} is not among the kernels {self.names}")
        sizes = (ctypes.c_int * 256)()
        count = getattr(self._library, f"executor_sizes_{name}")(sizes)

        def launch(
            grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int = 0, stream: Any = None
        ) -> None:
            self._launch(name, list(sizes[:count]), grid, block, args, shared_mem)

        return launch

    def _launch(
        self,
        name: str,
        sizes: list[int],
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_bytes: int,
    ) -> None:
        if len(args) != len(sizes):
            raise TypeError(f"{name} takes {len(sizes)} arguments, got {len(args)}")
        values = [_as_bytes(f"{name}, argument {index}", value) for index, value in enumerate(args)]
        for index, (value, size) in enumerate(zip(values, sizes, strict=True)):
            if value.nbytes != size:
                raise TypeError(f"{name}, argument {index}: the kernel takes {size} bytes, got {value.nbytes}")
        if not 0 < np.prod(block) <= 1024 or np.prod(grid) < 1:
            raise ValueError(f"{name}: grid {tuple(grid)} and block {tuple(block)} cannot be launched")
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(value.ctypes.data for value in values))
        names = [name.encode() for name, *_ in self._buffers]
        rows = [
            (address, size, only, name) for name, (_, address, size, only) in zip(names, self._buffers, strict=True)
        ]
        buffers = (_Buffer * max(1, len(rows)))(*rows)
        message = ctypes.create_string_buffer(1024)
        counts = (ctypes.c_uint64 * 5)()
        request = _Request(
            kernel=ctypes.cast(getattr(self._library, f"executor_call_{name}"), ctypes.c_void_p),
            arguments=ctypes.addressof(pointers),
            grid=_three(grid),
            block=_three(block),
            shared_bytes=shared_bytes,
            schedule=SCHEDULES.index(self.schedule),
            seed=self.seed,
            cpu_seconds=self.cpu_seconds,
            buffers=ctypes.addressof(buffers),
            buffer_count=len(rows),
            message=ctypes.cast(message, ctypes.c_char_p),
            message_size=len(message),
            accesses=ctypes.addressof(counts),
            stacks=_stacks(self._library),
        )
        failed = self._library.executor_launch(ctypes.byref(request))
        self.accesses = {1 << power: count for power, count in enumerate(counts) if count}
        if failed:
            raise LaunchError(f"{name}: {self._with_lines(message.value.decode())}")

    def _with_lines(self, message: str) -> str:
        def line(found: re.Match[str]) -> str:
            # The return address is that of the instruction after the call.
            address = hex(int(found[1], 16) - 1)
            command = ["addr2line", "-e", os.fspath(self._path), address]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return os.path.basename(done.stdout.strip().split(" ")[0])

        return re.sub(r"pc\+(0x[0-9a-f]+)", line, message)


_made: list[int] = []


def _stacks(library: ctypes.CDLL) -> int:
    """Returns where the threads of all kernels of this process have their stacks."""
    if not _made:
        library.executor_stacks.restype = ctypes.c_void_p
        _made.append(library.executor_stacks())
    return _made[0]


def _as_bytes(what: str, value: Any) -> np.ndarray:
    """Returns an argument as CuPy passes it: a Python int takes eight bytes, a numpy value as many as its dtype has."""
    if isinstance(value, np.ndarray):
        if value.size != 1:
            raise TypeError(f"{what}: an array is passed by value and must have one entry, got the shape {value.shape}")
        return np.ascontiguousarray(value).reshape(1).copy()
    if isinstance(value, np.generic):
        return np.array([value])
    for kind, dtype in ((bool, np.bool_), (int, np.uint64), (float, np.float64)):
        if isinstance(value, kind):
            return np.array([value & (2**64 - 1) if kind is int else value], dtype)
    if value is None:
        return np.zeros(1, np.uint64)
    raise TypeError(f"{what}: CuPy takes no {type(value).__name__}; give its data_ptr(), or a numpy value")


def _extent(item: Any) -> tuple[int, int]:
    if isinstance(item, torch.Tensor):
        return item.data_ptr(), item.numel() * item.element_size()
    return item.ctypes.data, item.nbytes


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z
