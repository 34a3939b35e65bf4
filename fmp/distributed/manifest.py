"""The manifest of a checkpoint on disk: the last file to be written, and the one that makes the others a checkpoint.

It holds the outline of the tree and a stamp, size and SHA-256, of every other file in the folder. It appears all at
once, when everything else is on disk. A folder without it is half of a checkpoint.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fmp import files
from fmp.errors import CheckpointError
from fmp.outline import Entry, check_entry, seal, unseal

T = TypeVar("T")

NAME = "fmp_manifest"

_FORMAT, _VERSION = "fmp.distributed", 1


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What a file must be, byte for byte."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: The step that it was saved at.
        entries: The outline of the tree, as `fmp.outline.outline` writes it. Distributed tensors have their global
            shape; where their parts are is not recorded, since any other placement can read them.
        stamps: A stamp for each file, by name.
    """

    step: int
    entries: dict[str, Entry]
    stamps: dict[str, Stamp]


def is_complete(folder: Path) -> bool:
    """Says whether a folder holds a complete checkpoint, which is to say, a manifest."""
    return (folder / NAME).is_file()


def write(folder: Path, manifest: Manifest) -> None:
    """Makes the files in a folder a checkpoint, atomically; they must be on disk."""
    contents = {
        **{"format": _FORMAT, "version": _VERSION, "step": manifest.step, "entries": manifest.entries},
        "files": {name: dataclasses.asdict(stamp) for name, stamp in manifest.stamps.items()},
    }
    with files.atomic_write(folder / NAME) as temporary:
        temporary.write_text(seal(contents), encoding="utf-8")


def read(folder: Path) -> Manifest:
    """Reads and checks the manifest of a folder, not the other files.

    Raises:
        CheckpointError: If there is none, or it is damaged or of another format.
    """
    return _read(folder, _manifest)


def read_label(folder: Path) -> tuple[int, dict[str, Stamp]]:
    """Reads the step and the stamps alone, which is quick where there are many leaves.

    Raises:
        CheckpointError: If there is no manifest, or it is damaged or of another format.
    """
    return _read(folder, _label)


def stamp(path: Path) -> Stamp:
    """Reads a file once, piece by piece, and returns its stamp.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     stamp(Path(file.name)).size
        0
    """
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Stamp(file.tell(), digest)


def verify(folder: Path, stamps: Mapping[str, Stamp], names: Iterable[str]) -> None:
    """Raises unless files are what their stamps say.

    Args:
        folder: Where they are.
        stamps: The stamps, by name.
        names: Which of them to read.

    Raises:
        CheckpointError: If one is missing, cut or damaged; the message names it.
    """
    for name in names:
        check_size(folder, name, stamps[name])
        if stamp(folder / name) != stamps[name]:
            raise CheckpointError(f"{name} is damaged, its checksum does not match")


def check_size(folder: Path, name: str, wanted: Stamp) -> None:
    """Raises unless a file is there and has its size; it is not read.

    Raises:
        CheckpointError: If it is missing or cut; the message names it.
    """
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{name} is missing")
    size = path.stat().st_size
    if size != wanted.size:
        raise CheckpointError(f"{name} is {'cut' if size < wanted.size else 'too long'}: {size} bytes of {wanted.size}")


def _read(folder: Path, parse: Callable[[Any], T]) -> T:
    if not is_complete(folder):
        raise CheckpointError(f"it has no {NAME}, so it was never completed, or fmp did not write it")
    try:
        text = (folder / NAME).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{NAME} is damaged: {error}") from error
    contents = unseal(text)
    try:
        found = contents["format"], contents["version"]
        if found == (_FORMAT, _VERSION):
            return parse(contents)
    # Whoever can write a file can write a matching checksum into it.
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{NAME} is not one that fmp writes: {error}") from error
    raise CheckpointError(
        f"it has the format {found[0]!r}, version {found[1]!r}; this fmp reads version {_VERSION} of {_FORMAT!r}, so "
        "use the fmp that wrote it"
    )


def _manifest(contents: Any) -> Manifest:
    step, stamps = _label(contents)
    entries = contents["entries"]
    for path, entry in entries.items():
        check_entry(path, entry)
    return Manifest(step, entries, stamps)


def _label(contents: Any) -> tuple[int, dict[str, Stamp]]:
    step, stamps = contents["step"], contents["files"]
    if type(step) is not int:
        raise TypeError(f"the step is {step!r}")
    for name, fields in stamps.items():
        # A name that leads out of the folder is not one of its files.
        if os.path.basename(name) != name or {key: type(value) for key, value in fields.items()} != {
            **{"size": int, "sha256": str}
        }:
            raise ValueError(f"the file {name!r} has the stamp {fields!r}")
    return step, {name: Stamp(**fields) for name, fields in stamps.items()}
