"""Safetensors files, one tensor at a time: neither reading nor writing ever holds the whole file in memory.

    8 bytes     the size of the header, little-endian
    header      JSON: {"__metadata__": {...}, "name": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]}, ...}
    data        the bytes of the tensors, next to each other, without gaps

The safetensors library reads these files too. It takes all tensors at once to write, though, and this one cannot know
the size of a compressed tensor before it has compressed it: the header gets the room that it can need at most, and is
written last.
"""

import dataclasses
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from fmp import files
from fmp.errors import DF11Error

MAX_HEADER = 100_000_000  # The library refuses larger ones.
METADATA = "__metadata__"
_MAX_NDIM = 64

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the header says about one tensor; start and stop count from the beginning of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return self.stop - self.start


class TensorFile:
    """A safetensors file that is open for reading.

    Args:
        path: The file.

    Attributes:
        path: The file.
        header: The bytes of its header.
        metadata: What the header keeps under `__metadata__`.
        entries: What it says about each tensor, in the order of the header.

    Raises:
        DF11Error: If it is no safetensors file, or its header does not fit its size.
        OSError: If it cannot be read, or is a pipe or a device.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        # To open a pipe would wait for whoever writes to it.
        if not os.path.isdir(path) and not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file; copy what it gives to one")
        self._file = open(path, "rb")  # noqa: SIM115 - closed by `close`
        try:
            size = os.fstat(self._file.fileno()).st_size
            length = int.from_bytes(self._file.read(8), "little")
            self._start = 8 + length
            if size < 8 or self._start > size or length > MAX_HEADER:
                raise DF11Error("not a safetensors file, or an incomplete one: its header does not fit into it")
            self.header = self._file.read(length)
            self.metadata, self.entries = _parse(self.header, size - self._start)
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Reads the bytes of one tensor, and nothing else, into memory of their own.

        Args:
            name: The name of the tensor.

        Returns:
            u8[nbytes].

        Raises:
            KeyError: If the file has no tensor of that name.
            DF11Error: If the file has become shorter since it was opened.
        """
        entry = self.entries[name]
        # The header has been checked: there are no more bytes than the file has.
        data = np.empty(entry.nbytes, np.uint8)
        self._file.seek(self._start + entry.start)
        if self._file.readinto(data.data) != entry.nbytes:
            raise DF11Error(f"{name}: the file has become shorter while it was read")
        return data

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorWriter:
    """Writes a safetensors file, one tensor after the other, and the header last.

    Args:
        file: An empty file, open for reading and writing.
        room: How many bytes the header will have. JSON may end with spaces.

    Attributes:
        entries: What the header has to say about each tensor so far.
    """

    def __init__(self, file: BinaryIO, room: int) -> None:
        self._file, self._room = file, room
        self.entries: dict[str, Entry] = {}
        self._stop = 0
        file.seek(8 + room)

    def add(self, name: str, dtype: torch.dtype, shape: Iterable[int], parts: Iterable[npt.NDArray[Any]]) -> None:
        """Writes one tensor, of one or more pieces."""
        start = self._stop
        for part in parts:
            self._file.write(part.data.cast("B") if part.size else b"")
            self._stop += part.nbytes
        self.entries[name] = Entry(dtype, tuple(shape), start, self._stop)

    def finish(self, header: bytes) -> None:
        """Writes the header, which fills the room for it."""
        if len(header) != self._room:
            raise AssertionError(f"the header has {len(header)} bytes, and the room for it {self._room}")
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header)


def render(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Writes a header.

    Raises:
        ValueError: If a name is not valid Unicode, is the one that is reserved, or the header is too long to be read.
    """
    if METADATA in entries:
        raise ValueError(f"a tensor cannot be called {METADATA!r} in a safetensors file; rename it")
    contents: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for name, entry in entries.items():
        offsets = [entry.start, entry.stop]
        contents[name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    try:
        header = json.dumps(contents, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a name is not valid Unicode, near {error.object[max(error.start - 40, 0) :][:60]!r}"
        ) from None
    if len(header) > MAX_HEADER - 8:
        raise ValueError(f"the names of {len(entries)} tensors do not fit into the header of a safetensors file")
    return header


def room_for(header: bytes) -> int:
    """Returns the room to reserve for a header, such that the data begins at a multiple of 8."""
    return -(-len(header) // 8) * 8


def raw_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Returns the bytes of a tensor, in row-major order and on the host."""
    return files.raw_bytes(tensor).numpy()


def parse_json(text: bytes | str) -> Any:
    """Reads JSON in which no object has two values of one name.

    Raises:
        DF11Error: If it is not JSON of this kind.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_float=_refuse, parse_constant=_refuse)
    # Deep nesting ends in a RecursionError, numbers of many digits in a ValueError.
    except (ValueError, RecursionError) as error:
        raise DF11Error(f"the header is damaged: {error}") from None


def is_count(value: Any) -> bool:
    """Says whether a value from JSON is a whole number that a size can be."""
    return type(value) is int and 0 <= value < 2**63


def is_shape(value: Any) -> bool:
    """Says whether a value from JSON is the shape that a tensor can have."""
    # Not even the product of millions of sizes should be computed. Strides must fit, also where there are no elements.
    if not isinstance(value, list) or len(value) > _MAX_NDIM or not all(map(is_count, value)):
        return False
    return math.prod(max(size, 1) for size in value) < 2**63


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    for name, value in pairs:
        if name in contents:
            raise ValueError(f"{name!r} occurs twice")
        contents[name] = value
    return contents


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not a whole number")


def _parse(header: bytes, data_size: int) -> tuple[dict[str, str], dict[str, Entry]]:
    contents = parse_json(header)
    if not isinstance(contents, dict):
        raise DF11Error("the header is damaged: it is not an object")
    metadata = contents.pop(METADATA, {})
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise DF11Error(f"the header is damaged: {METADATA} does not map names to strings")
    entries = {name: _entry(name, value) for name, value in contents.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise DF11Error(f"{name}: its bytes begin at {entry.start}, and those before it end at {end}")
        end = entry.stop
    if end != data_size:
        raise DF11Error(f"incomplete or damaged: the tensors have {end} bytes, and the file holds {data_size}")
    return metadata, entries


def _entry(name: str, value: Any) -> Entry:
    match value:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, stop], **rest} if not rest:
            if is_shape(shape) and is_count(start) and is_count(stop) and code in _DTYPES:
                dtype = _DTYPES[code]
                if stop - start == math.prod(shape) * dtype.itemsize:
                    return Entry(dtype, tuple(shape), start, stop)
    raise DF11Error(f"{name}: the header is damaged, or of another kind: it says {str(value)[:200]}")
