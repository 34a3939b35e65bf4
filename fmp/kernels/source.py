"""The CUDA sources as text that needs no other file."""

import re
from pathlib import Path

# Beside the package in a clone, inside it in a wheel; never on Python's path, where `cuda` is NVIDIA's package.
_FOLDERS = (Path(__file__).parents[1] / "_cuda", Path(__file__).parents[2] / "cuda")
_INCLUDE = re.compile(r'^[ \t]*#include "([^"]+)".*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#pragma once.*$", re.MULTILINE)


def folder() -> Path:
    """Finds the folder of the sources.

    Raises:
        FileNotFoundError: If this installation has none.
    """
    for candidate in _FOLDERS:
        if (candidate / "types.cuh").is_file():
            return candidate
    raise FileNotFoundError(f"the CUDA sources of fmp are in neither of {', '.join(map(str, _FOLDERS))}; reinstall fmp")


def names() -> list[str]:
    """Returns the names of the sources, each of which is compiled on its own."""
    return sorted(path.stem for path in folder().glob("*.cu"))


def text(name: str) -> str:
    """Reads a source, with everything that it includes put in its place.

    One text is what a cache of compiled kernels needs for its key, and what a compiler without include paths takes.

    Args:
        name: One of `names()`.

    Returns:
        The text. A file that is included twice is there once, where it comes first. In a compiler's message, names and
        line numbers are those of the original files.

    Raises:
        FileNotFoundError: If there is no such source, or it includes a file that is not there.
    """
    return _inlined(folder(), f"{name}.cu", set())


def _inlined(where: Path, name: str, seen: set[str]) -> str:
    path = where / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; the sources are {', '.join(names())}")
    seen.add(name)
    content = _ONCE.sub("", path.read_text(encoding="utf-8"))

    def include(found: re.Match[str]) -> str:
        line = content.count("\n", 0, found.start()) + 2
        inner = "" if found[1] in seen else _inlined(where, found[1], seen)
        return f'{inner}\n#line {line} "{name}"'

    return f'#line 1 "{name}"\n' + _INCLUDE.sub(include, content)
