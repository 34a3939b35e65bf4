"""NVIDIA's compute-sanitizer watches all kernels for accesses out of bounds, races and wrong barriers."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import small

ROOT = Path(__file__).parents[2]


def sanitizers() -> Iterator[str]:
    """Yields where the tool may be: on the path, in a CUDA toolkit, in a package of NVIDIA's."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for folder in (None, *(f"{toolkit}/bin" for toolkit in toolkits if toolkit)):
        if found := shutil.which("compute-sanitizer", path=folder):
            yield found
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from (str(path) for path in Path(folder).rglob("compute-sanitizer") if os.access(path, os.X_OK))


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_it_finds_nothing(gpu, tool):
    sanitizer = next((path for path in sanitizers() if Path(path).is_file()), None)
    if sanitizer is None:
        pytest.skip("compute-sanitizer is neither on the path, nor in a CUDA toolkit, nor in a package of NVIDIA's")
    # Without the cache each tensor is an allocation of its own, beyond whose end nothing else lies.
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", small.__name__],
        cwd=ROOT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    if "not supported" in output:
        pytest.skip(f"compute-sanitizer cannot watch this device: {output[-300:]}")
    assert done.returncode == 0, output[-5000:]
    assert "ERROR SUMMARY: 0 errors" in output or "0 hazards" in output, output[-5000:]


def test_what_it_watches_runs(device):
    small.run(device)
