"""fmp.df11_codec.acceleration: without numba, and with a broken one, numpy does all of its work."""

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fmp.df11_codec import acceleration, codec, reference
from fmp.df11_codec.codec import decode, encode
from fmp.df11_codec.published import groups


@pytest.fixture(autouse=True)
def undecided() -> Iterator[None]:
    acceleration.has_numba.cache_clear()
    yield
    acceleration.has_numba.cache_clear()


def served_by_numpy() -> bool:
    bits = np.resize(np.array([0x3F80, 0x4000], np.uint16), 2000)
    encoded = encode(bits)
    assert encoded is not None
    assert np.array_equal(decode(encoded), bits)
    return codec._kernels(codec.best_backend()) is reference and groups._loops(1 << 40, None) is groups.vectorized


def test_numba_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with warnings.catch_warnings(record=True) as found:
        assert served_by_numpy()
    assert not found


BROKEN = {
    "an extension that does not load": ImportError("DLL load failed"),
    "another module that is missing": ModuleNotFoundError("No module named 'llvmlite'", name="llvmlite"),
    "a name that numpy has no more": AttributeError("module 'numpy' has no attribute 'long'"),
    "anything else": SystemError("initialization failed\nwithout an exception"),
}


@pytest.mark.parametrize("error", [*BROKEN.values(), None], ids=[*BROKEN, "a package without contents"])
def test_a_broken_numba_is_told_once(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "numba" and error is not None:
                raise error

    monkeypatch.delitem(sys.modules, "numba", raising=False)
    if error is None:
        monkeypatch.setitem(sys.modules, "numba", ModuleType("numba"))
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.warns(RuntimeWarning, match="numba is installed and cannot be used") as found:
        assert served_by_numpy()
    assert str(error or "njit").split()[0] in str(found[0].message)
    assert len(found) == 1
    # The second time, a warning would be an error here.
    assert served_by_numpy()
