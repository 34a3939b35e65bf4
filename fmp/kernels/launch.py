"""Loads compiled kernels and launches them, on the current stream of torch and without a copy of anything.

    text of the source -> NVRTC -> cubin, kept in a folder -> cupy.RawModule(path=) -> function(grid, block, arguments)

CuPy is not given the text: it would compile it such that subnormal numbers become zero, and its cache does not see what
is included.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fmp.files import atomic_write
from fmp.kernels import nvrtc, source


class Stream(NamedTuple):
    """What CuPy wants of a stream."""

    ptr: int


def missing(device: torch.device | str = "cuda") -> str | None:
    """Says why kernels cannot run on a device, or None if they can.

    Args:
        device: Where the tensors are.
    """
    if torch.device(device).type != "cuda":
        return f"the tensors are on {torch.device(device).type}; the kernels are for NVIDIA GPUs"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    try:
        _cupy()
    except Exception as error:  # what a broken package raises can be anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"CuPy cannot be loaded ({reason}); install fmp with the extra `cuda`"
    return nvrtc.missing()


def launch(device: torch.device, name: str, *, of: str, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
    """Launches a kernel on torch's current stream of a device.

    Args:
        device: Where all tensors are whose addresses are among the arguments. They must live until this returns; what
            is freed afterwards is given away again only in the order of the stream.
        name: The kernel.
        of: The source, `cuda/<of>.cu`.
        blocks: How many blocks; with none, nothing is launched.
        threads: The threads of a block.
        arguments: Addresses as ints, numbers as numpy values of the kernel's types.

    Raises:
        NvrtcError: If the source cannot be compiled here.
        ImportError: If CuPy cannot be loaded.
    """
    if not blocks:
        return
    function = module_on(device, of).get_function(name)
    if device.type != "cuda":
        function((blocks,), (threads,), tuple(arguments))
        return
    with torch.cuda.device(device):
        stream = Stream(torch.cuda.current_stream(device).cuda_stream)
        function((blocks,), (threads,), tuple(arguments), stream=stream)


def module_on(device: torch.device, of: str) -> Any:
    """Loads the kernels of a source for a device: once for each."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _module(index, of)


def cubin(of: str, arch: str) -> Path:
    """Compiles a source, or finds what was compiled before.

    Args:
        of: The source, `cuda/<of>.cu`.
        arch: The compute capability as the digits of `sm_90`, such as `"90"`.

    Returns:
        The file with the machine code. It is in the folder `FMP_CACHE_DIR`, by default `fmp` in the user's cache; or,
        where that cannot be written to, in a temporary one of this process.

    Raises:
        NvrtcError: If it cannot be compiled.
        OSError: If the temporary folder cannot be written to.
    """
    text = source.text(of)
    key = repr((text, arch, nvrtc.OPTIONS, nvrtc.version()))
    stem = f"{of}-sm_{arch}-{_digest(key.encode())}"
    folder = _folder()
    if found := _intact(folder, stem):
        return found
    compiled = nvrtc.compile(text, f"{of}.cu", arch).cubin
    try:
        return _written(folder, stem, compiled)
    except OSError:
        return _written(_temporary_folder(), stem, compiled)


def _intact(folder: Path, stem: str) -> Path | None:
    """Finds a file that was compiled before. Its name ends with a digest of its content, so a damaged one is seen."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{stem}-*.cubin"):
            if path.stem == f"{stem}-{_digest(path.read_bytes())}":
                return path
    return None


def _written(folder: Path, stem: str, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{_digest(content)}.cubin"
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _folder() -> Path:
    given = os.environ.get("FMP_CACHE_DIR")
    folder = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fmp"
    try:
        return folder.expanduser()
    except RuntimeError:  # the user has no home
        return _temporary_folder()


@functools.cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="fmp-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _module(index: int, of: str) -> Any:
    major, minor = torch.cuda.get_device_capability(index)
    with torch.cuda.device(index):
        return _cupy().RawModule(path=str(cubin(of, f"{major}{minor}")))


@functools.cache
def _cupy() -> Any:
    with contextlib.suppress(AttributeError):  # a half-installed CuPy lacks its parts
        cupy = importlib.import_module("cupy")
        if callable(cupy.RawModule):
            return cupy
    raise ImportError("cupy has no RawModule")
