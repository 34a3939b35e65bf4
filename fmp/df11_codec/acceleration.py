"""Whether numba compiles the loops over all numbers: decided here, once, for all of `fmp.df11`."""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any


@functools.cache
def has_numba() -> bool:
    """Says whether numba can be loaded. Loading it takes a second, so this is for the first use, not for the import.

    It is optional: where it is not installed, numpy does its work. Where it is installed and broken, for example
    because it is too old for the installed numpy, numpy does it too, and a warning says so once.
    """
    try:
        numba = importlib.import_module("numba")
        compiled(lambda: None, numba)
    except Exception as error:  # What a broken package raises can be anything.
        if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            warnings.warn(
                f"numba is installed and cannot be used, so that fmp.df11 takes ten times as long ({reason}); "
                "reinstall it: pip install --upgrade numba",
                RuntimeWarning,
                stacklevel=2,
            )
        return False
    return True


def compiled(function: Callable[..., Any], numba: Any = None) -> Callable[..., Any]:
    """Has numba compile a function when it is first called, keep it on disk, and release the interpreter's lock."""
    numba = numba or importlib.import_module("numba")
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # There is no folder for the cache that can be written to.
        return numba.njit(nogil=True)(function)
