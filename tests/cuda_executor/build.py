"""Compiles a .cu file and the executor into a shared library, once for each content."""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME = ("scheduler.cpp", "watchdog.cpp", "checker.cpp", "hooks.cpp")
MODES = {
    "fast": ["-O2"],
    # addr2line of binutils 2.40 takes one file for another in DWARF 5. After scalar replacement of aggregates, the
    # checker would see four accesses where the kernel makes one of sixteen bytes.
    "checked": [
        "-O1",
        "-gdwarf-4",
        "-fno-tree-sra",
        "-fsanitize=thread,undefined",
        "-fno-sanitize=vptr",
        "-fno-sanitize-recover=undefined",
    ],
}
# A GPU neither contracts a product and a sum behind our back nor removes a loop that never ends. Two libraries of one
# kernel must not share its shared memory, which g++ would have them do for templates.
COMMON = [
    "-std=c++20",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-finite-loops",
    "-fno-gnu-unique",
    "-Wall",
    "-fmax-errors=3",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-tsan",
]
_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(')


@functools.cache
def compiler() -> str | None:
    """Finds g++; no other compiler has the call-backs and the options that the executor needs."""
    return shutil.which("g++")


def missing() -> str | None:
    """Says why kernels cannot run on this machine, or None if they can."""
    return None if compiler() else "the CPU executor for CUDA needs g++, which is not installed"


def build(source: Path, mode: str = "fast", defines: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """Compiles a .cu file for the CPU.

    Args:
        source: The file; what it includes lies next to it.
        mode: A key of `MODES`.
        defines: Macros, as `"NAME"` or `"NAME=value"`.

    Returns:
        The library, and the names of the kernels in it.

    Raises:
        RuntimeError: If it does not compile; with what g++ says.
    """
    options = [*COMMON, *MODES[mode], *(f"-D{define}" for define in defines), f"-I{source.parent}"]
    text = _run([*options, "-E", "-x", "c++", str(source)])
    names = _ENTRY.findall(text)
    if not names:
        raise RuntimeError(f'{source} has no extern "C" __global__ function')
    key = _key(text, repr(options), *((HERE / name).read_text() for name in ("executor.h", "intrinsics.h")))
    runtime = _runtime()
    library = _folder() / f"{source.stem}-{mode}-{key}-{runtime.stem}.so"
    if not library.exists():
        wrapper = f'#include "executor.h"\n#include "{source.resolve()}"\n'
        wrapper += "".join(f"EXECUTOR_EXPORT({name})\n" for name in names)
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            kernels = _compiled(wrapper, [*options, f"-I{HERE}"], Path(scratch) / "kernels.o")
            made = Path(scratch) / "library.so"
            _run(["-shared", "-o", str(made), str(kernels), str(runtime)])
            os.replace(made, library)  # whoever builds the same at the same time replaces it by the same
    return library, names


def _runtime() -> Path:
    files = [HERE / name for name in (*RUNTIME, "executor.h", "intrinsics.h", "context.h", "launch.h")]
    target = _folder() / f"runtime{_key(*(file.read_text() for file in files), repr(COMMON))}.o"
    if not target.exists():
        wrapper = "".join(f'#include "{HERE / name}"\n' for name in RUNTIME)
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            os.replace(_compiled(wrapper, [*COMMON, "-O2"], Path(scratch) / "runtime.o"), target)
    return target


def _compiled(text: str, options: Sequence[str], target: Path) -> Path:
    source = target.with_suffix(".cpp")
    source.write_text(text)
    _run([*options, "-c", str(source), "-o", str(target)])
    return target


def _run(arguments: Sequence[str]) -> str:
    cxx = compiler()
    if cxx is None:
        raise RuntimeError(missing())
    done = subprocess.run([cxx, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ {' '.join(arguments)}\n{done.stderr}")
    return done.stdout


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"fmp-cuda-executor-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _key(*parts: str) -> str:
    cxx = compiler() or ""
    stamp = str(os.stat(os.path.realpath(cxx)).st_mtime_ns) if cxx else ""
    return hashlib.sha256("\0".join((cxx, stamp, *parts)).encode()).hexdigest()[:16]
