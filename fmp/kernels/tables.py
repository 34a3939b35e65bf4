"""Tables in device memory that say which tensors a launch works on, and which part of them each block.

    rows      a row for each tensor: the addresses of what belongs to it, and its size
    chunks    an entry for each block: row << 32 | number of the chunk in its tensor

A table is uploaded when a list of tensors is met for the first time; afterwards it is found by its content. So a step
that overwrites its state in place uploads nothing, and can be captured in a CUDA graph.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class Table(NamedTuple):
    """A table on a device.

    Attributes:
        rows: u8[bytes], the rows.
        chunks: i64[blocks], the entries.
    """

    rows: torch.Tensor
    chunks: torch.Tensor


def upload(rows: npt.NDArray[np.void], sizes: Sequence[int], chunk_size: int, device: torch.device) -> Table:
    """Puts a table on a device, or finds it there.

    Args:
        rows: A structured array, as the kernel declares its rows.
        sizes: For each row, how many elements its tensor has.
        chunk_size: How many elements a block works on.
        device: Where.
    """
    return _uploaded(rows.tobytes(), tuple(sizes), chunk_size, device)


@functools.lru_cache(maxsize=256)
def _uploaded(rows: bytes, sizes: tuple[int, ...], chunk_size: int, device: torch.device) -> Table:
    counts = np.array([-(-size // chunk_size) for size in sizes], np.int64)
    row = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    first = np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    chunks = row << 32 | np.arange(len(row), dtype=np.int64) - first
    content = torch.frombuffer(bytearray(rows), dtype=torch.uint8) if rows else torch.empty(0, dtype=torch.uint8)
    return Table(content.to(device), torch.from_numpy(chunks).to(device))
