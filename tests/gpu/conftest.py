"""Where the tests of this folder run: on a GPU if there is one, else on the CPU executor, where that can stand in."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from fmp.kernels import launch
from tests import cuda_executor
from tests.gpu.stand_in import on_executor
from tests.kernels.test_adam import exact_root


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device on which kernels are launched; what a test needs a GPU for, it skips or leaves out elsewhere."""
    if torch.cuda.is_available():
        if reason := launch.missing("cuda"):
            pytest.skip(reason)
        yield torch.device("cuda", torch.cuda.current_device())
        return
    if reason := cuda_executor.missing():
        pytest.skip(f"{launch.missing('cuda')}, and {reason}")
    with on_executor() as device:
        yield device


@pytest.fixture
def gpu() -> torch.device:
    """A GPU."""
    if reason := launch.missing("cuda"):
        pytest.skip(reason)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def sources(device: torch.device) -> Iterator[list[str]]:
    """The sources whose kernels were launched."""
    load, found = launch.module_on, []
    # The fixture monkeypatch might be undone after `device`, and bring back what that has put in place.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "module_on", lambda device, of: (found.append(of), load(device, of))[1])
        yield found


@pytest.fixture
def exact_root_on_a_cpu(device: torch.device) -> Iterator[None]:
    """There torch asks a library for roots whose last bit may be wrong; on a GPU, as in the kernels, they are exact."""
    with nullcontext() if device.type == "cuda" else exact_root():
        yield
