"""From a source to a launch, as far as it goes without a GPU: the cache, what is passed on, and what is said."""

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fmp
from fmp.kernels import launch, nvrtc, tables

needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=nvrtc.missing() or "")


@needs_nvrtc
def test_a_source_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FMP_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    first = launch.cubin("loss_scale", "90")
    assert first.read_bytes().startswith(b"\x7fELF")
    assert launch.cubin("loss_scale", "80") != first
    monkeypatch.setattr(nvrtc, "compile", lambda *args: pytest.fail("compiled again"))
    assert launch.cubin("loss_scale", "90") == first
    assert sorted(path.name[:16] for path in first.parent.iterdir()) == ["loss_scale-sm_80", "loss_scale-sm_90"]


@needs_nvrtc
def test_another_text_or_option_is_another_file(tmp_path, monkeypatch):
    monkeypatch.setenv("FMP_CACHE_DIR", str(tmp_path))
    first = launch.cubin("loss_scale", "90")
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-lineinfo"))
    assert launch.cubin("loss_scale", "90") != first


@needs_nvrtc
def test_what_cannot_be_compiled_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("FMP_CACHE_DIR", str(tmp_path))
    with pytest.raises(nvrtc.NvrtcError, match="sm_12345"):
        launch.cubin("loss_scale", "12345")
    assert list(tmp_path.iterdir()) == []


@needs_nvrtc
def test_kernels_are_loaded_from_the_file_and_run_on_torchs_stream(tmp_path, monkeypatch):
    """A stand-in for CuPy and for torch's GPU notes what they would be asked."""
    monkeypatch.setenv("FMP_CACHE_DIR", str(tmp_path))
    launches: list[Any] = []

    class RawModule:
        def __init__(self, *, path: str):
            self.path = path

        def get_function(self, name: str) -> Any:
            return lambda *args, **kwargs: launches.append((self.path, name, args, kwargs))

    monkeypatch.setattr(launch, "_cupy", lambda: SimpleNamespace(RawModule=RawModule))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    launch._module.cache_clear()
    device, arguments = torch.device("cuda", 3), [1, np.float32(2.0)]
    launch.launch(device, "adjust", of="loss_scale", blocks=0, threads=32, arguments=arguments)
    assert launches == []
    launch.launch(device, "adjust", of="loss_scale", blocks=2, threads=32, arguments=arguments)
    ((path, name, args, kwargs),) = launches
    assert path == str(launch.cubin("loss_scale", "90"))
    assert (name, args) == ("adjust", ((2,), (32,), (1, np.float32(2.0))))
    assert kwargs["stream"].ptr == 77
    launch._module.cache_clear()


@pytest.mark.parametrize(
    ("device", "cuda", "gpu", "cupy", "reason"),
    [
        ("cpu", "13.0", True, True, "the tensors are on cpu"),
        ("cuda", None, True, True, "built without CUDA"),
        ("cuda", "13.0", False, True, "no GPU"),
        ("cuda", "13.0", True, False, "extra `cuda`"),
    ],
)
def test_it_says_what_is_missing(monkeypatch, device, cuda, gpu, cupy, reason):
    def load() -> Any:
        if not cupy:
            raise ImportError("No module named 'cupy'")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(launch, "_cupy", load)
    found = launch.missing(device)
    assert found is not None
    assert reason in found


def test_backends_name_the_reason(monkeypatch):
    found = fmp.kernels.backends()
    assert found["df11 on cpu"].name in ("numba", "numpy")
    assert found["df11 on cuda"].name == found["df11 on cpu"].name or torch.cuda.is_available()
    monkeypatch.setattr(launch, "missing", lambda: "the fuse is blown")
    assert "the fuse is blown" in repr(fmp.kernels.backends())
    monkeypatch.setattr(launch, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a fine card")
    assert fmp.kernels.backends()["df11 on cuda"] == ("cuda", "compiled for a fine card")


def test_tables_are_made_once_for_a_list_of_tensors():
    rows, device = np.zeros(3, np.dtype([("address", np.uint64), ("size", np.int64)])), torch.device("cpu")
    rows["size"] = [5, 0, 9]
    table = tables.upload(rows, [5, 0, 9], 4, device)
    assert table.chunks.tolist() == [0 << 32 | 0, 0 << 32 | 1, 2 << 32 | 0, 2 << 32 | 1, 2 << 32 | 2]
    assert table.rows.view(torch.int64).tolist() == [0, 5, 0, 0, 0, 9]
    assert tables.upload(rows.copy(), [5, 0, 9], 4, device) is table
    rows["address"][1] = 64
    assert tables.upload(rows, [5, 0, 9], 4, device) is not table
    assert tables.upload(rows[:0], [], 4, device).chunks.tolist() == []
