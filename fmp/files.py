"""Files that are either whole or absent, and checksums that say so."""

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary file to write; when the block ends well, it becomes the file at `path`, all at once.

    Whoever opens `path`, at any moment and even after a power failure, finds the old file or the new one, never a part
    of one. When the block raises, the temporary file is removed and `path` is as it was. A process that is killed may
    leave a file `.fmp-*.tmp` behind.

    Args:
        path: The file to create, or to replace with one of the same permissions. A symbolic link is followed, not
            replaced.

    Yields:
        The temporary file, empty, in the folder of `path`.

    Raises:
        IsADirectoryError: If `path` is a folder.
        FileNotFoundError: If the folder of `path` does not exist.
        OSError: If `path` is something else than a file, such as a pipe or a device.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with atomic_write(f"{folder}/greeting") as temporary:
        ...         _ = temporary.write_text("hello")
        ...     os.listdir(folder)
        ['greeting']
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{os.fspath(path)!r} is a folder; give the name of a file in it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(target.parent)!r} does not exist; create it first")
    old_mode = target.stat().st_mode if target.exists() else None
    if old_mode is not None and not stat.S_ISREG(old_mode):
        raise OSError(f"{os.fspath(path)!r} is not a regular file, and would be lost; give another name")

    # A rename is atomic within one file system only, hence the same folder.
    temporary = target.with_name(f".fmp-{secrets.token_hex(8)}.tmp")
    try:
        mode = _create(temporary, old_mode)
        yield temporary
        # A writer may have put a private file of its own in place of ours.
        os.chmod(temporary, mode)
        sync(temporary)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    # Only now does the new name survive a power failure.
    sync(target.parent)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a tensor, in row-major order and on the host.

    Args:
        tensor: Any dense tensor, on any device, with any strides.

    Returns:
        u8[n], where n is the number of elements times their size. It shares memory with a contiguous host tensor.

    Example:
        >>> raw_bytes(torch.tensor([1.0, 2.0], dtype=torch.float16))
        tensor([ 0, 60,  0, 64], dtype=torch.uint8)
    """
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    # Strides that do not matter, of a tensor with at most one element, would not let it be viewed as bytes.
    host = host.contiguous() if host.numel() > 1 else host.clone(memory_format=torch.contiguous_format)
    return host.reshape(-1).view(torch.uint8)


def sha256(data: bytes | torch.Tensor) -> str:
    """Computes a checksum.

    Args:
        data: Bytes, or any dense tensor, whose `raw_bytes` count.

    Returns:
        The SHA-256 digest, 64 hexadecimal digits.

    Example:
        >>> sha256(torch.tensor([97, 98, 99], dtype=torch.uint8)) == sha256(b"abc")
        True
    """
    memory = raw_bytes(data).numpy().data if isinstance(data, torch.Tensor) else data
    return hashlib.sha256(memory).hexdigest()


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, would survive a power failure."""
    # Windows cannot open folders, and syncs only files that are open for writing.
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path, old_mode: int | None) -> int:
    """Creates a file, at no time more open than the one it replaces, and returns the permissions it should end with."""
    # Unlike tempfile, this gives a new file the permissions that the user's umask asks for.
    asked = 0o666 if old_mode is None else stat.S_IMODE(old_mode) | stat.S_IWUSR
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, asked)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode if old_mode is None else old_mode)
    finally:
        os.close(descriptor)


def is_lack_of_memory(error: Exception) -> bool:
    """Says whether an error is that of a host without enough memory: for torch, it is a RuntimeError."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
