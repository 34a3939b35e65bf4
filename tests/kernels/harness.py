"""What the tests of the kernels share: tables, memory between guard bands, launches on the CPU executor."""

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fmp.kernels import source
from tests.cuda_executor import SCHEDULES, Module, missing

_BAND, _MARK = 64, 0x5A
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

needs_executor = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@functools.cache
def module(name: str, mode: str) -> Module:
    return Module(folder() / f"{name}.cu", mode)


def folder() -> Path:
    """Returns where the sources are; mutate.py has others."""
    return Path(os.environ.get("FMP_TEST_CUDA") or source.folder())


def in_every_order(name: str) -> Iterator[Module]:
    """Yields the checked kernels of a source once for each schedule; what they compute must not depend on it."""
    kernels = module(name, "checked")
    for schedule in SCHEDULES:
        kernels.schedule = schedule
        yield kernels
    kernels.schedule = SCHEDULES[0]


class Buffer:
    """A copy of a tensor in memory whose neighbors show whether anyone wrote past its ends.

    Attributes:
        tensor: The copy, `offset` elements after an address that is a multiple of 64 bytes.
    """

    def __init__(self, content: torch.Tensor, offset: int = 0):
        begin = _BAND + offset * content.element_size()
        end = begin + content.numel() * content.element_size()
        self._bytes = torch.full((end + _BAND,), _MARK, dtype=torch.uint8)
        self._range = begin, end
        self.tensor = self._bytes[begin:end].view(content.dtype)
        self.tensor.copy_(content)

    def address(self, before: int = 0) -> int:
        """Returns the address of the tensor, or of one that has so many more elements before it."""
        return self.tensor.data_ptr() - before * self.tensor.element_size()

    def intact(self) -> bool:
        begin, end = self._range
        return bool((self._bytes[:begin] == _MARK).all() and (self._bytes[end:] == _MARK).all())


def table(*columns: Sequence[int]) -> torch.Tensor:
    """Packs columns of pointers, sizes and flags into the rows that a kernel reads."""
    return torch.tensor(list(zip(*columns, strict=True)), dtype=torch.int64)


def chunks(sizes: Sequence[int], chunk_size: int, before: int = 0) -> torch.Tensor:
    """Lists the chunks of tensors; of tensors with `before` more elements in front, only those after them."""
    first = before // chunk_size
    entries = [row << 32 | first + chunk for row, size in enumerate(sizes) for chunk in range(-(-size // chunk_size))]
    return torch.tensor(entries, dtype=torch.int64)


def launch(
    kernels: Module,
    name: str,
    blocks: int,
    threads: int,
    args: Sequence[Any],
    *,
    read: Sequence[Any] = (),
    written: Sequence[Any] = (),
) -> None:
    """Launches a kernel, unless there is nothing to do, and tells the checker what it may touch."""
    if not blocks:
        return

    def named(kind: str, items: Sequence[Any]) -> dict[str, Any]:
        tensors = [item.tensor if isinstance(item, Buffer) else item for item in items if item is not None]
        return {f"{kind} {index}": tensor for index, tensor in enumerate(tensors) if tensor.numel()}

    with kernels.memory(read=named("input", read), written=named("output", written)):
        pointers = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        kernels.get_function(name)((blocks,), (threads,), pointers)
    assert all(item.intact() for item in (*read, *written) if isinstance(item, Buffer))


def finish(kernels: Module, partials: torch.Tensor, threads: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the kernel that makes the norm and the flag out of what the blocks found."""
    norm, finite = torch.full((), -1.0), torch.zeros((), dtype=torch.bool)
    args = (partials, np.int64(len(partials)), norm, finite)
    launch(kernels, "finish", 1, threads, args, read=[partials], written=[norm, finite])
    return norm, finite


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Says whether two tensors have the same bits, apart from those of NaN, which differ from machine to machine."""
    nan = expected.isnan()
    bits = torch.int32 if expected.element_size() == 4 else torch.int16
    equal = found.view(bits) == expected.view(bits)
    return found.dtype == expected.dtype and bool((found.isnan() == nan).all() and (equal | nan).all())


def numbers(size: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """Draws numbers of both signs, among them zeros, subnormal ones and many magnitudes."""
    generator = torch.Generator().manual_seed(seed * 1000 + size)
    values = torch.randn(size, generator=generator) * spread
    exponents = torch.randint(-30, 3, (size,), generator=generator)
    special = torch.tensor([0.0, -0.0, 6e-8, -1e-7, 1e-40, 1.0])
    values = torch.where(torch.rand(size, generator=generator) < 0.5, values, torch.ldexp(values, exponents))
    chosen = special[torch.randint(0, len(special), (size,), generator=generator)]
    return torch.where(torch.rand(size, generator=generator) < 0.05, chosen, values).to(dtype)
