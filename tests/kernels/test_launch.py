"""From a source to a launch, as far as it goes without a GPU: the cache, what is passed on, and what is said."""

import contextlib
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fmp
from fmp.kernels import launch, nvrtc, tables, trust

needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=nvrtc.missing() or "")


@needs_nvrtc
def test_a_source_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FMP_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    first = launch.cubin("loss_scale", "90")
    assert first.read_bytes().startswith(b"\x7fELF")
    assert launch.cubin("loss_scale", "80") != first
    monkeypatch.setattr(nvrtc, "compile", lambda *args: pytest.fail("compiled again"))
    assert launch.cubin("loss_scale", "90") == first
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FMP_CACHE_DIR", "~/deep/cache")
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


@pytest.fixture
def compiled(monkeypatch, tmp_path_factory):
    """Replaces the compiler; lists what it was asked for."""
    asked: list[str] = []
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(
        nvrtc, "compile", lambda text, name, arch: asked.append(name) or nvrtc.Compiled(b"\x7fELF machine code", "")
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    launch._temporary_folder.cache_clear()
    yield asked
    launch._temporary_folder.cache_clear()


@pytest.mark.parametrize("damage", [b"", b"\x7fELF mach", bytes(17), b"\x7fELF machine kode"])
def test_a_damaged_file_is_compiled_again(tmp_path, monkeypatch, compiled, damage):
    monkeypatch.setenv("FMP_CACHE_DIR", str(tmp_path))
    path = launch.cubin("sgd", "90")
    whole = path.read_bytes()
    path.write_bytes(damage)
    assert launch.cubin("sgd", "90").read_bytes() == whole
    assert launch.cubin("sgd", "90").read_bytes() == whole
    assert compiled == ["sgd.cu", "sgd.cu"]


@pytest.mark.parametrize("place", ["/proc/fmp", "file", "file/inside", "~no-such-user/fmp"])
def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch, compiled, place):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FMP_CACHE_DIR", place)
    path = launch.cubin("sgd", "90")
    assert path.read_bytes() == b"\x7fELF machine code"
    assert path.parent.name.startswith("fmp-")
    assert compiled == ["sgd.cu"]


def test_a_folder_that_can_only_be_read(tmp_path, monkeypatch, compiled):
    monkeypatch.setenv("FMP_CACHE_DIR", str(tmp_path))
    path = launch.cubin("sgd", "90")
    monkeypatch.setattr(launch, "atomic_write", lambda path: pytest.fail("written to"))
    assert launch.cubin("sgd", "90") == path


@pytest.mark.parametrize(("version", "first"), [("12.8", 12), ("13.0", 13), (None, 14)])
def test_the_compiler_of_torchs_cuda_is_preferred(tmp_path, monkeypatch, version, first):
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13", "cu14/lib/libnvrtc.so.14"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(torch.version, "cuda", version)
    paths = [path.name for path in nvrtc._candidates()]
    assert paths[0] == f"libnvrtc.so.{first}"
    assert paths[3] == ("libnvrtc.so.12" if first == 12 else "libnvrtc.so.13")
    assert sorted(paths[:3]) == ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so.14"]


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
        ("cuda", "13.0", True, ImportError("No module named 'cupy'"), "extra `cuda`"),
        ("cuda", "13.0", True, ValueError("numpy.dtype size changed"), "(ValueError: numpy.dtype size changed)"),
    ],
)
def test_it_says_what_is_missing(monkeypatch, device, cuda, gpu, cupy, reason):
    def load() -> Any:
        if cupy is not True:
            raise cupy

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
    monkeypatch.setattr(trust, "_verdicts", {})
    assert fmp.kernels.backends()["df11 on cuda"] == ("cuda", "for a fine card; tried before its first use")


def test_tables_are_made_once_for_a_list_of_tensors():
    rows, device = np.zeros(3, np.dtype([("address", np.uint64), ("size", np.int64)])), torch.device("cpu")
    rows["size"] = [5, 0, 9]
    table = tables.upload(rows, [5, 0, 9], 4, device)
    assert table.chunks.tolist() == [0 << 32 | 0, 0 << 32 | 1, 2 << 32 | 0, 2 << 32 | 1, 2 << 32 | 2]
    assert table.rows.view(torch.int64).tolist() == [0, 5, 0, 0, 0, 9]
    again = tables.upload(rows.copy(), [5, 0, 9], 4, device)
    assert all(one is other for one, other in zip(again, table, strict=True))
    rows["address"][1] = 64
    again = tables.upload(rows, [5, 0, 9], 4, device)
    assert again.rows is not table.rows
    assert again.chunks is table.chunks
    assert tables.upload(rows[:0], [], 4, device).chunks.tolist() == []
