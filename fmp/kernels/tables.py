"""Tables in device memory that say which tensors a launch works on, and which part of them each block.

    rows      a row for each tensor: the addresses of what belongs to it, and its size
    chunks    an entry for each block: row << 32 | number of the chunk in its tensor

A table is uploaded when a list of tensors is met for the first time; afterwards it is found by its content. So a step
that overwrites its state in place uploads nothing for it, and can be captured in a CUDA graph. The host waits for no
upload, which is made from pinned memory. What a captured graph reads at each replay stays for good.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

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


class _Upload(NamedTuple):
    """A table; on a GPU with the stream that it was uploaded on, and the event after which it is there."""

    table: Table
    stream: Any = None
    done: Any = None


_Key = tuple[bytes, tuple[int, ...], int, torch.device]
_MOST = 256
_known: OrderedDict[_Key, _Upload] = OrderedDict()  # the latest used last
# Nobody says when a graph is gone. A table has some kilobytes.
_read_by_graphs: list[Table] = []
# Pinned memory for tables that a graph uploads. While one is captured, none can be allocated.
_set_aside: list[torch.Tensor] = []
_RESERVE, _ALIGNMENT = 2**20, 16


def upload(rows: npt.NDArray[Any], sizes: Sequence[int], chunk_size: int, device: torch.device) -> Table:
    """Puts a table on a device, or finds it there.

    Args:
        rows: An array of rows, as the kernel declares them.
        sizes: For each row, how many elements its tensor has.
        chunk_size: How many elements a block works on.
        device: Where.
    """
    key = rows.tobytes(), tuple(sizes), chunk_size, device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _in_graph(key)
    if key not in _known:
        _known[key] = _uploaded(key)
        if len(_known) > _MOST:
            _known.popitem(last=False)
    _known.move_to_end(key)
    found = _known[key]
    if found.stream is not None and found.stream != (current := torch.cuda.current_stream(device)):
        current.wait_event(found.done)
        for part in found.table:
            part.record_stream(current)
    return found.table


def _uploaded(key: _Key) -> _Upload:
    host, device = _on_host(key), key[-1]
    if device.type != "cuda":
        return _Upload(Table(*[part.to(device) for part in host]))
    if not _set_aside or _set_aside[0].nbytes < _RESERVE // 2:
        _set_aside[:] = [torch.empty(_RESERVE, dtype=torch.uint8).pin_memory()]
    table = Table(*[part.pin_memory().to(device, non_blocking=True) for part in host])
    stream = torch.cuda.current_stream(device)
    return _Upload(table, stream, stream.record_event())


def _in_graph(key: _Key) -> Table:
    """Finds a table while a graph is captured, or lets the graph upload it."""
    if key in _known:  # whoever captures has waited for everything before
        _read_by_graphs.append(_known[key].table)
        return _known[key].table
    pinned = Table(*map(_in_reserve, _on_host(key)))
    _read_by_graphs.append(pinned)
    # For this launch only: outside of the graph it is not there before a replay.
    return Table(*[part.to(key[-1], non_blocking=True) for part in pinned])


def _in_reserve(part: torch.Tensor) -> torch.Tensor:
    size = -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not _set_aside or _set_aside[0].nbytes < size:
        return part.pin_memory()
    own, _set_aside[0] = _set_aside[0][: part.nbytes].view(part.dtype), _set_aside[0][size:]
    return own.copy_(part)


def _on_host(key: _Key) -> Table:
    rows, sizes, chunk_size, _ = key
    counts = np.array([-(-size // chunk_size) for size in sizes], np.int64)
    row = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    first = np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    chunks = row << 32 | np.arange(len(row), dtype=np.int64) - first
    content = torch.frombuffer(bytearray(rows), dtype=torch.uint8) if rows else torch.empty(0, dtype=torch.uint8)
    return Table(content, torch.from_numpy(chunks))
