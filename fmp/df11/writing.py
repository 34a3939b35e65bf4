"""Writes files of weights, compressed or plain, one tensor at a time."""

import dataclasses
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fmp import files
from fmp.df11 import manifest, stored, tensor_file
from fmp.df11.compressed import CompressedTensor
from fmp.df11.manifest import Manifest, Record
from fmp.df11.tensor_file import Entry, TensorWriter

Weight = torch.Tensor | CompressedTensor
Progress = Callable[[Sequence["Source"]], Iterable["Source"]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor that is to be written.

    Attributes:
        name: Its name in the file.
        dtype: Its dtype.
        shape: Its shape.
        get: Returns the tensor, or the compressed one. It is called once, when its turn has come.
        compress: Whether to store it compressed.
        most_bytes: The bytes that it takes at most.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], Weight]
    compress: bool
    most_bytes: int


def source(name: str, weight: Weight) -> Source:
    """Describes a tensor that is in memory.

    Raises:
        TypeError: If it is not a plain tensor, or of a dtype that safetensors files do not have.
        ValueError: If it is on the meta device.
    """
    if weight.device.type == "meta":
        raise ValueError(f"{name} is on the meta device and has no values to save")
    if isinstance(weight, CompressedTensor):
        most_bytes = max(stored.most_bytes(weight.numel()), weight.nbytes)
        return Source(name, weight.dtype, tuple(weight.shape), lambda: weight, True, most_bytes)
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.layout != torch.strided:
        raise TypeError(f"{name} is a {type(weight).__name__}; a file of weights holds plain tensors")
    if weight.dtype not in tensor_file.CODES:
        raise TypeError(f"{name} has the dtype {weight.dtype}, which safetensors files do not have; convert it")
    return Source(name, weight.dtype, tuple(weight.shape), lambda: weight, False, weight.nbytes)


def write(
    sources: Sequence[Source],
    path: str | os.PathLike[str],
    *,
    tied: Mapping[str, str] | None = None,
    structure: Any = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress = iter,
) -> None:
    """Writes a file of compressed weights, atomically.

    Args:
        sources: The tensors, in the order in which they are to be listed.
        path: The file to create or replace.
        tied: Names for tensors that are another one.
        structure: How the names are nested, see `manifest.names_in`; None for a flat dict.
        metadata: What else to keep, for example the metadata of a file that is converted.
        progress: Wraps the tensors while they are written.

    Raises:
        ValueError: If a name is not one that a file can have.
        RuntimeError: If a tensor that is compressed here does not come back bit for bit.
        OSError: If the file cannot be written.
    """

    def contents(records: dict[str, Record]) -> Manifest:
        return Manifest(records, dict(tied or {}), structure, dict(metadata or {}))

    # No header is longer than one in which every number has as many digits as any can have.
    end = sum(source.most_bytes for source in sources)
    longest = {source.name: Entry(source.dtype, (*source.shape, end), end, end) for source in sources}
    forms = {source.name: max(stored.FORMS, key=len) if source.compress else None for source in sources}
    records = {source.name: Record(0, forms[source.name], source.shape) for source in sources}
    room = tensor_file.room_for(manifest.render(contents(records), longest))

    with files.atomic_write(path) as temporary, open(temporary, "r+b") as file:
        writer = TensorWriter(file, room)
        for source in progress(_by_alignment(sources)):
            records[source.name] = (
                _write_compressed(writer, source) if source.compress else _write_plain(writer, source)
            )
        header = manifest.render(contents(records), writer.entries)
        writer.finish(manifest.seal(header.ljust(room)))


def write_plain(
    sources: Sequence[Source], path: str | os.PathLike[str], *, metadata: Mapping[str, str], progress: Progress = iter
) -> None:
    """Writes an ordinary safetensors file, atomically. Arguments as for `write`; no source may be a compressed one."""
    ordered = _by_alignment(sources)
    starts = np.cumsum([0, *[source.most_bytes for source in ordered]]).tolist()
    entries = {
        source.name: Entry(source.dtype, source.shape, start, stop)
        for source, start, stop in zip(ordered, starts[:-1], starts[1:], strict=True)
    }
    header = tensor_file.render(entries, metadata)
    room = tensor_file.room_for(header)
    with files.atomic_write(path) as temporary, open(temporary, "r+b") as file:
        writer = TensorWriter(file, room)
        for source in progress(ordered):
            _write_plain(writer, source)
        writer.finish(header.ljust(room))


def _by_alignment(sources: Sequence[Source]) -> list[Source]:
    # Each tensor then begins at a multiple of its element's size. Compressed ones are filled up to a multiple of 8.
    return sorted(sources, key=lambda source: -8 if source.compress else -source.dtype.itemsize)


def _write_plain(writer: TensorWriter, source: Source) -> Record:
    weight = source.get()
    assert isinstance(weight, torch.Tensor)
    raw = tensor_file.raw_bytes(weight)
    writer.add(source.name, source.dtype, source.shape, [raw])
    return Record(zlib.crc32(raw.data))


def _write_compressed(writer: TensorWriter, source: Source) -> Record:
    weight = source.get()
    if isinstance(weight, torch.Tensor):
        checksum = zlib.crc32(tensor_file.raw_bytes(weight).data)
        weight = CompressedTensor.compress(weight)
    else:
        checksum = None
    node = weight.to("cpu")
    raw = tensor_file.raw_bytes(node.decompress())
    values_crc = zlib.crc32(raw.data)
    if checksum not in (None, values_crc):
        raise RuntimeError(f"{source.name} does not come back bit for bit, and is not written; please report this")
    form, pieces = stored.pack(node, raw.view(np.uint16))
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece.data.cast("B") if piece.size else b"", crc)
    writer.add(source.name, torch.uint8, [sum(piece.nbytes for piece in pieces)], pieces)
    return Record(crc, form, source.shape, values_crc)
