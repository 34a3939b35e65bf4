"""Tables in device memory that say which tensors a launch works on, and which part of them each block.

    rows      a row for each tensor: the addresses of what belongs to it, and its size
    chunks    an entry for each block: row << 32 | number of the chunk in its tensor

Each of the two is uploaded when it is met for the first time, and then found by its content while it is among the
latest. So a step that overwrites its state in place uploads nothing for it. Where addresses change, such as those of
gradients, rows are uploaded, some kilobytes; chunks depend on sizes alone. The host waits for no upload, which is made
from pinned memory, and may be captured in a CUDA graph. What a captured graph reads at each replay stays for good.
"""

import threading
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


class _Rows(NamedTuple):
    """Rows as the host has them."""

    content: bytes
    device: torch.device

    def on_host(self) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(self.content, np.uint8).copy())


class _Chunks(NamedTuple):
    """What entries depend on."""

    sizes: tuple[int, ...]
    chunk_size: int
    device: torch.device

    def on_host(self) -> torch.Tensor:
        counts = np.array([-(-size // self.chunk_size) for size in self.sizes], np.int64)
        row = np.repeat(np.arange(len(self.sizes), dtype=np.int64), counts)
        first = np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
        return torch.from_numpy(row << 32 | np.arange(len(row), dtype=np.int64) - first)


_Key = _Rows | _Chunks


class _Upload(NamedTuple):
    """A part of a table; on a GPU with the stream that it was uploaded on, and the event after which it is there."""

    part: torch.Tensor
    stream: Any = None
    done: Any = None


class _Known:
    """The latest uploads.

    Args:
        most: How many bytes they may take; the latest one is kept in any case.
    """

    def __init__(self, most: int = 2**25):
        self._most, self._bytes = most, 0
        self._uploads: OrderedDict[_Key, _Upload] = OrderedDict()  # the latest used last

    def find(self, key: _Key) -> _Upload | None:
        if key in self._uploads:
            self._uploads.move_to_end(key)
        return self._uploads.get(key)

    def add(self, key: _Key, upload: _Upload) -> None:
        self._uploads[key] = upload
        self._bytes += _size(upload)
        while self._bytes > self._most and len(self._uploads) > 1:
            self._bytes -= _size(self._uploads.popitem(last=False)[1])


def _size(upload: _Upload) -> int:
    return max(upload.part.nbytes, 512)  # the least that torch takes of a GPU


_lock = threading.RLock()  # a thread for each GPU, or autograd's, may be here
_known = _Known()
# Nobody says when a graph is gone.
_read_by_graphs: list[torch.Tensor] = []
# Pinned memory for what a graph uploads: while one is captured, none can be allocated. It is for several uploads as
# large as the largest so far.
_set_aside: list[torch.Tensor] = []
_largest = [0]
_RESERVE, _UPLOADS, _ALIGNMENT = 2**20, 8, 16


def upload(rows: npt.NDArray[Any], sizes: Sequence[int], chunk_size: int, device: torch.device) -> Table:
    """Puts a table on a device, or finds it there. Any thread may ask.

    Args:
        rows: An array of rows, as the kernel declares them.
        sizes: For each row, how many elements its tensor has.
        chunk_size: How many elements a block works on.
        device: Where.
    """
    keys = _Rows(rows.tobytes(), device), _Chunks(tuple(sizes), chunk_size, device)
    with _lock:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return Table(*map(_in_graph, keys))
        return Table(*map(_found, keys))


def _found(key: _Key) -> torch.Tensor:
    found = _known.find(key)
    if found is None:
        found = _uploaded(key)
        _known.add(key, found)
    if found.stream is not None and found.stream != (current := torch.cuda.current_stream(key.device)):
        current.wait_event(found.done)
        found.part.record_stream(current)
    return found.part


def _uploaded(key: _Key) -> _Upload:
    host, device = key.on_host(), key.device
    if device.type != "cuda":
        return _Upload(host.to(device))
    _largest[0] = max(_largest[0], host.nbytes)
    reserve = max(_RESERVE, _UPLOADS * _largest[0])
    if not _set_aside or _set_aside[0].nbytes < reserve // 2:
        _set_aside[:] = [torch.empty(reserve, dtype=torch.uint8, device="cpu").pin_memory()]
    part = host.pin_memory().to(device, non_blocking=True)
    stream = torch.cuda.current_stream(device)
    return _Upload(part, stream, stream.record_event())


def _in_graph(key: _Key) -> torch.Tensor:
    """Finds a part of a table while a graph is captured, or lets the graph upload it."""
    found = _known.find(key)
    if found is not None:  # whoever captures has waited for everything before
        _read_by_graphs.append(found.part)
        return found.part
    pinned = _in_reserve(key.on_host())
    _read_by_graphs.append(pinned)
    # For this launch only: outside of the graph it is not there before a replay.
    return pinned.to(key.device, non_blocking=True)


def _in_reserve(part: torch.Tensor) -> torch.Tensor:
    size = -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not _set_aside or _set_aside[0].nbytes < size:
        return part.pin_memory()
    own, _set_aside[0] = _set_aside[0][: part.nbytes].view(part.dtype), _set_aside[0][size:]
    return own.copy_(part)
