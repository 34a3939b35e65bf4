"""NVRTC, the compiler of CUDA C that is a library: from text to machine code for one kind of GPU.

It needs neither a GPU, nor a driver, nor the CUDA toolkit. A CUDA build of torch brings it; elsewhere it is the package
`nvidia-cuda-nvrtc` (CUDA 13) or `nvidia-cuda-nvrtc-cu12`.
"""

import ctypes
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+)$")

# A product and a sum are contracted where the source says so, and nowhere else. Subnormal numbers stay what they are;
# when CuPy compiles a source, they become zero. Functions without a mark are the device's, lambdas among them.
OPTIONS = ("-std=c++17", "--fmad=false", "-default-device")


class NvrtcError(RuntimeError):
    """NVRTC is not installed, or refused a source."""


class Compiled(NamedTuple):
    """What came out of a compilation.

    Attributes:
        cubin: The machine code.
        log: What the compiler and the assembler said.
    """

    cubin: bytes
    log: str


def compile(text: str, name: str, arch: str, options: Sequence[str] = OPTIONS) -> Compiled:
    """Compiles CUDA C.

    Args:
        text: The source; it includes nothing.
        name: What messages call it.
        arch: The compute capability as the digits of `sm_90`, such as `"90"`.
        options: Further options.

    Returns:
        The machine code and the log.

    Raises:
        NvrtcError: If NVRTC is missing, does not know the architecture, or finds an error in the source; with what the
            compiler says.
    """
    library = _library()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
    try:
        given = [option.encode() for option in (*options, f"-arch=sm_{arch}")]
        status = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        log = _read(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog).rstrip(b"\0").decode()
        if status:
            raise NvrtcError(f"{name} for sm_{arch}: {_describe(status)}\n{log}")
        return Compiled(_read(program, library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN), log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> tuple[int, int]:
    """Returns NVRTC's version.

    Raises:
        NvrtcError: If it is missing.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def missing() -> str | None:
    """Says why NVRTC cannot be used, or None if it can."""
    try:
        version()
    except NvrtcError as error:
        return str(error)
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    problems = []
    for path in _candidates():
        try:
            if path.parent != Path():
                # It looks for this one by its bare name, which the loader knows once the library is loaded.
                for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(path))
        except OSError as error:
            problems.append(str(error))
    raise NvrtcError(
        "NVRTC, which compiles the CUDA kernels, was not found; install it with: pip install nvidia-cuda-nvrtc"
        + "".join(f"\n  {problem}" for problem in problems)
    )


def _candidates() -> Iterator[Path]:
    """Yields the libraries of installed packages, then the names that the loader may know.

    What is compiled by a newer CUDA than torch's, the driver may not load. So first comes the version of torch's, then
    the newest.
    """
    wanted = int((torch.version.cuda or "0").partition(".")[0])
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = [
        (int(match[1]), path)
        for folder in folders
        for pattern in ("cu[0-9]*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*")  # of CUDA 13, and of 12
        for path in folder.glob(pattern)
        if (match := _LIBRARY.search(path.name))
    ]
    found.sort(key=lambda item: (item[0] == wanted, *item), reverse=True)
    yield from (path for _, path in found)
    yield from (Path(f"libnvrtc.so.{major}") for major in sorted((13, 12), key=lambda major: major != wanted))


def _read(program: ctypes.c_void_p, size_of: Callable[..., int], read: Callable[..., int]) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        raise NvrtcError(_describe(status))


def _describe(status: int) -> str:
    describe = _library().nvrtcGetErrorString
    describe.restype = ctypes.c_char_p
    return describe(status).decode()
