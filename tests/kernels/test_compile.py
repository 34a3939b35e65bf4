"""What the compiler makes of the sources, without a GPU: that they compile, what they need, how wide they load."""

import functools
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fmp.kernels import nvrtc, source

ARCHS = ("80", "90", "100", "120")
# Two blocks of 512 threads on a multiprocessor with 65,536 registers, which is what hides the latency of memory.
MOST_REGISTERS = 64
WIDE_LOADS = {
    # the loads and stores, of 128 and of 64 bits, of a thread that loads as many packs as it may before it uses them
    "scale_f32_f32": {"LDG.E.128": 4, "STG.E.128": 4},
    "scale_f16_f32": {"LDG.E.64": 4, "STG.E.128": 4},
    "scale_bf16_f32": {"LDG.E.64": 4, "STG.E.128": 4},
    "scale_f16_f16": {"LDG.E.128": 4, "STG.E.128": 4},
    "scale_bf16_bf16": {"LDG.E.128": 4, "STG.E.128": 4},
    "axpby_f32_f32_f32": {"LDG.E.128": 4, "STG.E.128": 2},
    "axpby_f16_f32_f32": {"LDG.E.128": 2, "LDG.E.64": 2, "STG.E.128": 2},
    "axpby_bf16_f32_f32": {"LDG.E.128": 2, "LDG.E.64": 2, "STG.E.128": 2},
    "axpby_f16_f16_f16": {"LDG.E.128": 4, "STG.E.128": 2},
    "axpby_bf16_bf16_bf16": {"LDG.E.128": 4, "STG.E.128": 2},
    "adam_f32_f16": {"LDG.E.128": 4, "STG.E.128": 3, "STG.E.64": 1},
    "adam_f32_bf16": {"LDG.E.128": 4, "STG.E.128": 3, "STG.E.64": 1},
    "adam_f16_f16": {"LDG.E.128": 3, "LDG.E.64": 1, "STG.E.128": 3, "STG.E.64": 1},
    "adam_bf16_bf16": {"LDG.E.128": 3, "LDG.E.64": 1, "STG.E.128": 3, "STG.E.64": 1},
    "adam_f32_remainder": {"LDG.E.128": 3, "LDG.E.64": 2, "STG.E.128": 2, "STG.E.64": 2},
    "adam_bf16_remainder": {"LDG.E.128": 2, "LDG.E.64": 3, "STG.E.128": 2, "STG.E.64": 2},
    "adam_f32_stochastic_f16": {"LDG.E.128": 3, "LDG.E.64": 1, "STG.E.128": 2, "STG.E.64": 1},
    "adam_f32_stochastic_bf16": {"LDG.E.128": 3, "LDG.E.64": 1, "STG.E.128": 2, "STG.E.64": 1},
    "adam_f16_stochastic_f16": {"LDG.E.128": 2, "LDG.E.64": 2, "STG.E.128": 2, "STG.E.64": 1},
    "adam_bf16_stochastic_bf16": {"LDG.E.128": 2, "LDG.E.64": 2, "STG.E.128": 2, "STG.E.64": 1},
    "sgd_f32_f16": {"LDG.E.128": 3, "STG.E.128": 2, "STG.E.64": 1},
    "sgd_f32_bf16": {"LDG.E.128": 3, "STG.E.128": 2, "STG.E.64": 1},
    "sgd_f16_f16": {"LDG.E.128": 2, "LDG.E.64": 1, "STG.E.128": 2, "STG.E.64": 1},
    "sgd_bf16_bf16": {"LDG.E.128": 2, "LDG.E.64": 1, "STG.E.128": 2, "STG.E.64": 1},
    "sgd_f32_remainder": {"LDG.E.128": 2, "LDG.E.64": 2, "STG.E.128": 1, "STG.E.64": 2},
    "sgd_bf16_remainder": {"LDG.E.128": 1, "LDG.E.64": 3, "STG.E.128": 1, "STG.E.64": 2},
    "sgd_f32_stochastic_f16": {"LDG.E.128": 2, "LDG.E.64": 1, "STG.E.128": 1, "STG.E.64": 1},
    "sgd_f32_stochastic_bf16": {"LDG.E.128": 2, "LDG.E.64": 1, "STG.E.128": 1, "STG.E.64": 1},
    "sgd_f16_stochastic_f16": {"LDG.E.128": 1, "LDG.E.64": 2, "STG.E.128": 1, "STG.E.64": 1},
    "sgd_bf16_stochastic_bf16": {"LDG.E.128": 1, "LDG.E.64": 2, "STG.E.128": 1, "STG.E.64": 1},
}

needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=nvrtc.missing() or "")


def disassembler() -> str | None:
    """Finds nvdisasm on the path, or where the package nvidia-cuda-nvdisasm puts it."""
    folders = [Path(folder) for folder in sys.path if folder]
    found = [path for folder in folders for path in sorted(folder.glob("nvidia/cu*/bin/nvdisasm"))]
    return shutil.which("nvdisasm") or (str(found[0]) if found else None)


@functools.cache
def compiled(name: str, arch: str) -> nvrtc.Compiled:
    return nvrtc.compile(source.text(name), f"{name}.cu", arch, (*nvrtc.OPTIONS, "--ptxas-options=-v"))


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", source.names())
def test_every_source_fits_the_machine(name: str, arch: str) -> None:
    cubin, log = compiled(name, arch)
    assert cubin.startswith(b"\x7fELF")
    assert "warning" not in log
    entries = re.findall(r"Compiling entry function '(\w+)'", log)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert 0 < len(entries) == len(registers) == len(spills)
    assert set(spills) == {("0", "0", "0")}
    assert max(registers) <= MOST_REGISTERS


def disassembled(cubin: bytes, folder: Path) -> str:
    tool = disassembler()
    assert tool is not None
    file = folder / "kernels.cubin"
    file.write_bytes(cubin)
    return subprocess.run([tool, "-c", str(file)], capture_output=True, text=True, check=True).stdout


def accesses(sass: str) -> dict[str, Counter[str]]:
    """Counts the loads and stores of each kernel, by width and kind of memory."""
    parts = re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", sass, re.MULTILINE | re.DOTALL)
    return {entry: Counter(re.findall(r"\b(?:LD|ST)[GL]?\.[\w.]+", body)) for entry, body in parts}


needs_disassembler = pytest.mark.skipif(
    disassembler() is None, reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm"
)


@needs_nvrtc
@needs_disassembler
@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("name", sorted({entry.split("_")[0] for entry in WIDE_LOADS}))
def test_memory_is_read_and_written_sixteen_bytes_at_a_time(name: str, arch: str, tmp_path: Path) -> None:
    found = accesses(disassembled(compiled(name, arch).cubin, tmp_path))
    assert {entry for entry in WIDE_LOADS if entry.startswith(f"{name}_")} <= found.keys()
    for entry, counts in found.items():
        for instruction, least in WIDE_LOADS.get(entry, {}).items():
            assert counts[instruction] >= least, (entry, instruction, counts)
        # Neither through a pointer that the compiler takes for one to anywhere, nor to a thread's own memory.
        assert not [kind for kind in counts if kind.startswith(("LD.", "ST.", "LDL.", "STL."))], (entry, counts)


@needs_nvrtc
@needs_disassembler
def test_nothing_contracts_by_itself_nor_flushes_subnormal_numbers(tmp_path: Path) -> None:
    text = 'extern "C" __global__ void f(float* x) { x[0] = x[1] * x[2] + x[3]; x[4] = fmaf(x[5], x[6], x[7]); }'
    sass = disassembled(nvrtc.compile(text, "f.cu", "90").cubin, tmp_path)
    assert len(re.findall(r"\bFFMA\b", sass)) == 1
    assert len(re.findall(r"\bFMUL\b", sass)) == 1
    assert "FTZ" not in sass


@needs_nvrtc
def test_errors_name_the_source_and_its_line() -> None:
    broken = source.text("adam").replace("lerp(m, g,", "lerp(m, missing_name,")
    with pytest.raises(
        nvrtc.NvrtcError, match=r'(?s)adam.cu for sm_90.*adam.cu\(\d+\): error: .*"missing_name"'
    ) as caught:
        nvrtc.compile(broken, "adam.cu", "90")
    line = int(re.findall(r"adam.cu\((\d+)\)", str(caught.value))[0])
    assert "lerp(m, g," in (source.folder() / "adam.cu").read_text().splitlines()[line - 1]


@needs_nvrtc
def test_an_architecture_that_does_not_exist_is_refused() -> None:
    with pytest.raises(nvrtc.NvrtcError, match="sm_19"):
        nvrtc.compile("", "empty.cu", "19")


@needs_nvrtc
def test_the_version_is_that_of_a_cuda_release() -> None:
    major, minor = nvrtc.version()
    assert major >= 12
    assert minor >= 0


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([Path("libnvrtc.so.0"), Path("/nowhere/libnvrtc.so.1")]))
    nvrtc._library.cache_clear()
    try:
        with pytest.raises(nvrtc.NvrtcError, match=r"(?s)pip install nvidia-cuda-nvrtc.*libnvrtc.so.0.*nowhere"):
            nvrtc.compile("", "empty.cu", "90")
        assert "pip install" in (nvrtc.missing() or "")
    finally:
        nvrtc._library.cache_clear()


def test_installed_packages_come_first_and_the_newest_before_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder, file in (("cuda_nvrtc", "libnvrtc.so.12"), ("cu13", "libnvrtc.so.13"), ("cu13", "libnvrtc.alt.so.13")):
        (tmp_path / "nvidia" / folder / "lib").mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvidia" / folder / "lib" / file).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    found = [str(path.relative_to(tmp_path)) if path.is_absolute() else str(path) for path in nvrtc._candidates()]
    assert found == [
        "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "libnvrtc.so.13",
        "libnvrtc.so.12",
    ]


def test_a_source_is_one_text_in_which_every_file_is_once() -> None:
    text = source.text("adam")
    assert "#include" not in text
    assert "#pragma once" not in text
    assert all(
        text.count(f'#line 1 "{name}"') == 1 for name in ("adam.cu", "chunks.cuh", "types.cuh", "parameters.cuh")
    )
    assert (
        text.index("struct bf16_t {") < text.index("struct alignas(N * sizeof(T)) pack") < text.index("adam_bf16_bf16")
    )


def test_an_unknown_source_names_those_there_are() -> None:
    with pytest.raises(FileNotFoundError, match=r"typo.cu does not exist; the sources are adam, axpby"):
        source.text("typo")


def test_an_installation_without_sources_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "_FOLDERS", (tmp_path / "_cuda", tmp_path / "cuda"))
    with pytest.raises(FileNotFoundError, match="reinstall fmp"):
        source.names()
