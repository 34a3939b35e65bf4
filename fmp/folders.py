"""Folders that are either whole or absent."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from fmp.files import sync


@contextlib.contextmanager
def atomic_folder(
    path: str | os.PathLike[str], *, overwrite: bool = False, replaceable: Callable[[str], bool] = lambda name: True
) -> Iterator[Path]:
    """Gives a temporary folder to fill; when the block ends well, it becomes the folder at `path`, all at once.

    When the block raises, the temporary folder is removed and `path` is as it was. A process that is killed may leave a
    folder `.fmp-*.tmp` behind; killed in the moment of replacing an old folder, it may leave the old and the new one
    under such names.

    Args:
        path: The folder to create. It may exist if it is empty. A symbolic link is followed, not replaced.
        overwrite: Whether a folder that is not empty is replaced.
        replaceable: Says whether a file may be lost in that case, of a path below the folder with slashes.

    Yields:
        The temporary folder, empty, beside `path`.

    Raises:
        FileExistsError: If `path` is a file; or holds files, and `overwrite` is False or one is not replaceable.
        FileNotFoundError: If the folder of `path` does not exist.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     with atomic_folder(f"{parent}/letters") as temporary:
        ...         _ = (temporary / "a").write_text("alpha")
        ...     os.listdir(parent), os.listdir(f"{parent}/letters")
        (['letters'], ['a'])
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(target.parent)!r} does not exist; create it first")
    _check(target, overwrite, replaceable)

    temporary, old = (target.with_name(f".fmp-{secrets.token_hex(8)}.tmp") for _ in range(2))
    temporary.mkdir()
    try:
        yield temporary
        sync(temporary)
        # Files may have come there in the meantime.
        _check(target, overwrite, replaceable)
        if not target.is_dir() or not any(target.iterdir()):
            if target.is_dir() and os.name == "nt":
                target.rmdir()  # Windows renames to a free name only.
            os.replace(temporary, target)
        else:
            os.replace(target, old)
            try:
                os.replace(temporary, target)
            except BaseException:
                os.replace(old, target)
                raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # Only now does the new name survive a power failure.
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _check(target: Path, overwrite: bool, replaceable: Callable[[str], bool]) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise FileExistsError(f"{str(target)!r} is a file; give the name of a folder")
    names = sorted(os.listdir(target))
    if names and not overwrite:
        raise FileExistsError(f"the folder {str(target)!r} is not empty; give another one, or overwrite=True")
    files = sorted(file.relative_to(target).as_posix() for file in target.rglob("*") if not file.is_dir())
    foreign = [name for name in files if not replaceable(name)]
    if foreign:
        raise FileExistsError(f"the folder {str(target)!r} holds {foreign[0]!r}, which would be lost; move it first")
