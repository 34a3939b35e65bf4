"""What every test runs under: one thread, bounded hypothesis, no leftovers of the compiler, strict dtype promotion."""

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from torch._C import _autograd

from tests.promotion import StrictPromotion, compile_unwatched
from tests.slow import COLLECTED, is_slow

_hooks: Any = _autograd
torch.set_num_threads(1)
gc.set_threshold(20_000)  # to look for cycles after each 700 of the objects that Dynamo makes takes a tenth of its time
torch.compile = compile_unwatched(torch.compile)

# In CI the examples are the same every time: what fails there fails again under CI=true.
hypothesis.settings.register_profile("local", deadline=None, max_examples=25)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")


def pytest_configure(config: pytest.Config) -> None:
    # Its first use of forward-mode differentiation makes torch script its own decompositions.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit.:DeprecationWarning")
    # Its scripting is deprecated since torch 2.14; fmp refuses what it makes, and the tests make some.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit.:FutureWarning")
    # What torch before 2.13 says once in a process, wherever it is asked first.
    config.addinivalue_line("filterwarnings", "ignore:Warning. Profiler clears events:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:Sparse invariant checks are implicitly disabled:UserWarning")
    # Dynamo instantiates torch.autograd.Function when it traces one.
    config.addinivalue_line("filterwarnings", "ignore:.*Function.*should not be instantiated:DeprecationWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = [item.nodeid for item in items]  # before options leave out any
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Hides what the tests before have left on the heap, through which each `gc.collect()` would have to walk.

    It stays hidden: to walk through all of it once for each file takes minutes.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("mixed_dtypes"):
        yield
        return
    with StrictPromotion():
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    # A compilation that fails inside a transform can leave these off.
    if not _hooks._saved_tensors_hooks_is_enabled():
        _hooks._saved_tensors_hooks_enable()
