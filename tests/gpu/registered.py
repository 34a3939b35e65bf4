"""Launches kernels on a GPU with the memory of the host, so that whatever calls the executor can call the device."""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fmp.kernels.launch import launch
from tests.gpu.stand_in import module

_PORTABLE_AND_MAPPED = 3


class Registered:
    """The kernels of one source on a GPU; answers as `tests.cuda_executor.Module` does.

    The tensors that `memory` names are registered with CUDA, so that the device reads and writes them where they are,
    at the same addresses. That is slow, and good enough to compare bits.

    Attributes:
        schedule: Accepted, and without effect; a device has an order of its own.
    """

    def __init__(self, of: str, device: torch.device):
        self._of, self._device = of, device
        self.schedule = "its own"

    @contextmanager
    def memory(self, *, written: Mapping[str, Any] = {}, read: Mapping[str, Any] = {}) -> Iterator[None]:
        """Lets the device use tensors and arrays of the host."""
        pages = _pages([*written.values(), *read.values()])
        cudart: Any = torch.cuda.cudart()
        registered = []
        try:
            for begin, end in pages:
                if int(error := cudart.cudaHostRegister(begin, end - begin, _PORTABLE_AND_MAPPED)):
                    pytest.skip(f"memory of the host cannot be registered here: {error}")
                registered.append(begin)
            yield
        finally:
            torch.cuda.synchronize(self._device)
            for begin in registered:
                cudart.cudaHostUnregister(begin)

    def get_function(self, name: str) -> Callable[..., None]:
        """Returns `kernel(grid, block, args)`, which waits for its end."""

        def run(grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
            launch(self._device, name, of=self._of, blocks=grid[0], threads=block[0], arguments=args)
            torch.cuda.synchronize(self._device)

        return run


def kernels_on(device: torch.device, of: str) -> Any:
    """The kernels of a source, for tensors of the host: on a GPU, or on the executor, which looks at every access."""
    return Registered(of, device) if device.type == "cuda" else module(of, "checked")


def _pages(items: Sequence[Any]) -> list[tuple[int, int]]:
    """Returns the stretches of whole pages in which tensors and arrays lie; each page may be registered once."""
    found: list[tuple[int, int]] = []
    for address, size in sorted(map(_extent, items)):
        begin, end = address // mmap.PAGESIZE * mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif size:
            found.append((begin, end))
    return found


def _extent(item: Any) -> tuple[int, int]:
    if isinstance(item, torch.Tensor):
        return item.data_ptr(), item.numel() * item.element_size()
    return item.ctypes.data, item.nbytes
