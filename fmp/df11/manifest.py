"""What the header of a file of compressed weights holds beyond a plain safetensors file, and how it is protected.

The metadata has two entries:

    fmp_df11     "1 0a1b2c3d"     the version of the format; the CRC-32 of the header, with zeros in its own place
    manifest     JSON: {
        "tensors":      {"wte": ["huffman", [50257, 768], "crc of the bf16 bytes", "crc of the stored bytes"],
                         "bias": "crc of the bytes", ...},
        "tied":         {"lm_head": "wte"},     tensors that are another one
        "structure":    null                    a flat dict of these names; or how they are nested
        "metadata":     {"format": "pt"}        what a converted file had in its own metadata
    }

The first entry comes first in the header, where it is found without parsing, in any version. Its checksum covers names,
dtypes, shapes and offsets, and with the manifest the checksums of all tensors.
"""

import dataclasses
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fmp.df11 import stored, tensor_file
from fmp.df11.tensor_file import Entry
from fmp.errors import DF11Error

VERSION = 1
_KEY, _MANIFEST = "fmp_df11", "manifest"
_PREFIX = f'{{"{tensor_file.METADATA}":{{"{_KEY}":"'.encode()
_DIGITS = b"00000000"


@dataclasses.dataclass(frozen=True)
class Record:
    """What is kept of one tensor.

    Attributes:
        crc: The CRC-32 of the tensor's bytes, as it is stored.
        form: How a compressed tensor is stored, see `fmp.df11.stored`; None for a plain one.
        shape: The shape of a compressed tensor. That of a plain one is in the header.
        values_crc: The CRC-32 of the bf16 bytes of a compressed tensor.
    """

    crc: int
    form: str | None = None
    shape: tuple[int, ...] = ()
    values_crc: int = 0


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a file holds: a record a tensor, names for tensors that are another one, and how the names are nested."""

    tensors: dict[str, Record]
    tied: dict[str, str] = dataclasses.field(default_factory=dict)
    structure: Any = None
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)


def is_compressed(header: bytes) -> bool:
    """Says whether a safetensors header is one of compressed weights."""
    return header.startswith(_PREFIX)


def render(manifest: Manifest, entries: Mapping[str, Entry]) -> bytes:
    """Writes the header of a file.

    Raises:
        ValueError: As for `tensor_file.render`.
    """
    contents = {
        "tensors": {name: _to_json(record) for name, record in manifest.tensors.items()},
        "tied": manifest.tied,
        "structure": manifest.structure,
        "metadata": manifest.metadata,
    }
    text = json.dumps(contents, ensure_ascii=False, separators=(",", ":"))
    return tensor_file.render(entries, {_KEY: f"{VERSION} {_DIGITS.decode()}", _MANIFEST: text})


def seal(header: bytes) -> bytes:
    """Puts the checksum into a header that has its final length."""
    place = _checksum_place(header)
    return header[: place.start] + _hex(zlib.crc32(header)).encode() + header[place.stop :]


def read(header: bytes, metadata: Mapping[str, str], entries: Mapping[str, Entry]) -> Manifest:
    """Reads the manifest, and checks that it fits the rest of the header.

    Raises:
        DF11Error: If it does not, is damaged, or is of another version.
    """
    check(header)
    contents = tensor_file.parse_json(metadata.get(_MANIFEST, ""))
    match contents:
        case {"tensors": dict(tensors), "tied": dict(tied), "structure": structure, "metadata": dict(kept), **rest}:
            if rest or not all(isinstance(value, str) for value in [*tied.values(), *kept.values()]):
                raise DF11Error("the manifest is not one that fmp writes")
        case _:
            raise DF11Error("the manifest is not one that fmp writes")
    if tensors.keys() != entries.keys():
        name = min(tensors.keys() ^ entries.keys())
        raise DF11Error(f"{name}: it is in the header or in the manifest, but not in both")
    for name, target in tied.items():
        if name in tensors or target not in tensors:
            raise DF11Error(f"{name}: it is tied to {target}, which is not in the file, or is a tensor of its own")
    records = {name: _from_json(name, value, entries[name]) for name, value in tensors.items()}
    if structure is not None:
        _check_structure(structure, [*tensors, *tied])
    return Manifest(records, tied, structure, kept)


def check(header: bytes) -> None:
    """Raises unless a header has a version that can be read, and its checksum is right. Nothing is parsed.

    Raises:
        DF11Error: If it has not.
    """
    if not is_compressed(header):
        raise DF11Error("not a file of compressed weights; `python -m fmp df11 compress` makes one")
    place = _checksum_place(header)
    version = header[len(_PREFIX) : place.start - 1]
    if version != str(VERSION).encode():
        raise DF11Error(
            f"it has version {version.decode(errors='replace')!r} of the format, and this fmp reads version {VERSION}; "
            "use the fmp that wrote it, or a newer one"
        )
    zeroed = header[: place.start] + _DIGITS + header[place.stop :]
    if header[place] != _hex(zlib.crc32(zeroed)).encode():
        raise DF11Error("the header is damaged: its checksum does not match")


def names_in(structure: Any) -> Iterator[str]:
    """Iterates over the names in a structure.

    A structure is a name, `{"none": None}`, `{"dict": {key: structure}}`, `{"list": [structure]}` or
    `{"tuple": [structure]}`.

    Args:
        structure: What the manifest says.

    Yields:
        The names, in the order of the leaves.

    Raises:
        DF11Error: If it is something else, at whatever depth; only when that is reached.
        RecursionError: If it is nested too deeply.
    """
    match structure:
        case str():
            yield structure
        case {"none": None} if len(structure) == 1:
            return
        case {"dict": dict(children)} if len(structure) == 1:
            for child in children.values():
                yield from names_in(child)
        case {"list": list(parts)} | {"tuple": list(parts)} if len(structure) == 1:
            for part in parts:
                yield from names_in(part)
        case _:
            raise DF11Error(f"the structure in the manifest is damaged: {str(structure)[:200]}")


def _check_structure(structure: Any, names: Iterable[str]) -> None:
    try:
        if sorted(names_in(structure)) == sorted(names):
            return
    except RecursionError:
        pass
    raise DF11Error("the structure in the manifest does not have every tensor once")


def _checksum_place(header: bytes) -> slice:
    start = header.find(b" ", len(_PREFIX), len(_PREFIX) + 32) + 1
    if not start or header[start + len(_DIGITS) : start + len(_DIGITS) + 1] != b'"':
        raise DF11Error("the header is damaged: it has no version and checksum")
    return slice(start, start + len(_DIGITS))


def _to_json(record: Record) -> Any:
    if record.form is None:
        return _hex(record.crc)
    return [record.form, list(record.shape), _hex(record.values_crc), _hex(record.crc)]


def _from_json(name: str, value: Any, entry: Entry) -> Record:
    match value:
        case str(crc) if _is_hex(crc):
            return Record(int(crc, 16))
        case [str(form), list(shape), str(values_crc), str(crc)] if _is_hex(values_crc) and _is_hex(crc):
            if form in stored.FORMS and tensor_file.is_shape(shape) and stored.fits(entry, form, shape):
                return Record(int(crc, 16), form, tuple(shape), int(values_crc, 16))
    raise DF11Error(f"{name}: the manifest is damaged: it says {str(value)[:200]}")


def _hex(crc: int) -> str:
    return f"{crc:08x}"


def _is_hex(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{8}", text) is not None
