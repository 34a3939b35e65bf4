"""Whether a kernel is believed: it is tried once, and never used if it does not agree with torch."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fmp
from fmp.kernels import launch, trials, trust
from tests.cuda_executor import Module
from tests.kernels.harness import folder, needs_executor
from tests.kernels.on_executor import kernels_on_cpu

pytestmark = needs_executor
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def untried():
    with kernels_on_cpu(trusted=False) as names:
        yield names


@pytest.mark.parametrize("kernel", trials.TRIALS)
def test_each_kernel_agrees_and_is_tried_once(kernel, untried):
    assert trust.agrees(kernel, CPU)
    tried = len(untried)
    assert tried > 0
    assert trust.agrees(kernel, CPU)
    assert len(untried) == tried
    assert trust.found(kernel) == {CPU: None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kernel", trials.TRIALS)
def test_the_default_dtype_changes_nothing(kernel, dtype, untried):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert trust.agrees(kernel, CPU)
    finally:
        torch.set_default_dtype(before)


def test_the_default_device_changes_nothing(untried):
    with torch.device("meta"):
        assert all(trust.agrees(kernel, CPU) for kernel in ("scale", "adam_stochastic", "df11", "df11_published"))


# By the file, since a kernel consists of several.
FAULTS = {
    "scale": [
        ("scale.cu", "!is_finite(result)", "result != result"),
        ("factors.cuh", "x / f.by", "x * (1.0f / f.by)"),
        ("chunks.cuh", "(long long)(entry & 0xffffffffu) * chunk_size", "0ll"),
        ("chunks.cuh", "const int at = i + k * threads;\n      if (at < packs) use", "const int at = i;\n      use"),
        ("reduce.cuh", "distance = 16; distance", "distance = 8; distance"),
        ("scale.cu", "i < count; i += blockDim.x", "i < count && i < blockDim.x; i += blockDim.x"),
    ],
    "axpby": [
        ("axpby.cu", "__fmul_rn(of_y, to_f32(of.y.v[k]))", "to_f32(of.y.v[k])"),
        ("axpby.cu", "nonfinite |= !is_finite(result)", "nonfinite = !is_finite(result)"),
        ("chunks.cuh", "const int at = i + k * threads;\n      if (at < packs) use", "const int at = i;\n      use"),
    ],
    "adam": [
        ("adam.cu", "m = lerp(", "m += lerp("),
        ("adam.cu", "if (finite && !*finite) return;", ""),
        ("adam.cu", "of_tensor.shrink, p, u", "0, p, u"),
        ("adam.cu", "ADAM(adam_f32_bf16, float, cast_form<bf16_t>)", "ADAM(adam_f32_bf16, float, cast_form<f16_t>)"),
        ("adam.cu", "row.flags & COUPLED_DECAY", "row.flags & 4"),
        ("adam.cu", "row.flags & DECOUPLED_DECAY", "true"),
        ("adam.cu", "1.0f - weight, to)", "1.0f - weight, from)"),
        ("types.cuh", "bits + 0x7fffu + (bits >> 16 & 1u)", "bits + 0x8000u"),
        ("types.cuh", "is_nan ? (u16)0x7fff :", "false ? (u16)0x7fff :"),
        ("types.cuh", "> 0x7f800000u", ">= 0x7f800000u"),
        ("factors.cuh", "number ? *number : 1.0f", "number ? *number : 2.0f"),
    ],
    "sgd": [
        ("sgd.cu", "g * of_tensor.gain", "g"),
        ("parameters.cuh", "if (!low) return;", "return;"),
        ("sgd.cu", "if (finite && !*finite) return;", ""),
        ("sgd.cu", "SGD(sgd_f32_bf16, float, cast_form<bf16_t>)", "SGD(sgd_f32_bf16, float, cast_form<f16_t>)"),
        ("sgd.cu", "row.flags & NESTEROV", "true"),
        ("sgd.cu", "row.flags & DECAY", "true"),
        ("sgd.cu", "float direction = g;", "float direction = 0.0f;"),
    ],
    "loss_scale": [
        ("loss_scale.cu", "grown > max_scale ? max_scale : grown", "grown"),
        ("loss_scale.cu", "grow ? 0 : count", "count"),
        ("loss_scale.cu", "count >= growth_interval", "count == growth_interval"),
    ],
    "df11": [
        ("df11.cu", "lane >= distance", "lane > distance"),
        ("df11.cu", "if (!fits_together) atomicOr", "if (false) atomicOr"),
        ("chunks.cuh", "(long long)(entry & 0xffffffffu) * chunk_size", "0ll"),
    ],
    "df11_published": [
        ("df11_published.cu", "before + until - own", "until - own"),
        ("df11_published.cu", "out + first, head", "out, head"),
        ("df11_published.cu", "atomicOr(damaged, 1u)", "(void)damaged"),
    ],
}


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        pytest.param(kernel, fault, marks=[pytest.mark.slow] if index else [])  # each is compiled anew
        for kernel, faults in FAULTS.items()
        for index, fault in enumerate(faults)
    ],
)
def test_a_wrong_kernel_is_refused_with_one_warning(kernel, fault, tmp_path):
    name, right, wrong = fault
    for source in folder().iterdir():
        (tmp_path / source.name).write_text(source.read_text())
    text = (tmp_path / name).read_text()
    assert right in text
    (tmp_path / name).write_text(text.replace(right, wrong))
    # A patch that outlived `kernels_on_cpu` would bring back what that had put in place.
    with kernels_on_cpu(trusted=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "module_on", lambda device, of: Module(tmp_path / f"{of}.cu", "fast"))
        with pytest.warns(
            RuntimeWarning, match=rf"the kernel '{kernel}' returns wrong numbers on cpu, so (torch's|the)"
        ):
            assert not trust.agrees(kernel, CPU)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not trust.agrees(kernel, CPU)
        assert trust.found(kernel) == {CPU: "returns wrong numbers"}


def test_a_kernel_that_cannot_be_launched_is_refused(untried, monkeypatch):
    monkeypatch.setattr(launch, "module_on", lambda device, of: launch.cubin(of, "12345"))
    scaler = fmp.StaticLossScale(4.0)
    with pytest.warns(RuntimeWarning, match="the kernel 'scale' cannot run"):
        assert scaler.unscale(torch.ones(2)).tolist() == [0.25, 0.25]
    assert scaler.unscale(torch.ones(2)).tolist() == [0.25, 0.25]


def test_what_is_around_the_caller_changes_nothing(untried):
    policy = fmp.opt_level("O1", "bf16")
    assert fmp.autocast(lambda: trust.agrees("scale", CPU), policy)()


def test_while_a_graph_is_captured_nothing_is_tried(untried, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not trust.agrees("scale", GPU)
    assert untried == []
    assert trust.found("scale") == {}


def test_threads_try_a_kernel_once(untried):
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: trust.agrees("loss_scale", CPU), range(8)))
    once = len(untried)
    untried.clear()
    assert trials.TRIALS["loss_scale"](CPU)
    assert len(untried) == once


@pytest.fixture
def card(untried, monkeypatch):
    """A GPU on which trials end as the test says: with a result, or an error."""
    results: dict[str, Any] = {}

    def trial(kernel: str) -> bool:
        if isinstance(results[kernel], Exception):
            raise results[kernel]
        return results[kernel]

    for kernel in trials.TRIALS:
        monkeypatch.setitem(trials.TRIALS, kernel, lambda device, kernel=kernel: trial(kernel))
    monkeypatch.setattr(launch, "missing", lambda device="cuda": None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a fine card")
    return results


@pytest.mark.filterwarnings("ignore:the kernel:RuntimeWarning", "ignore:.*CUDA is not available:UserWarning")
def test_backends_say_what_trials_have_found(card):
    card |= {"adam_remainder": False, "sgd": True, "df11": RuntimeError("sm_70")}
    assert [trust.agrees(kernel, GPU) for kernel in card] == [False, True, False]
    found = fmp.kernels.backends()
    assert found["adam with a remainder on cuda"] == ("torch", "the kernel returns wrong numbers on cuda:0")
    assert found["adam on cuda"] == ("cuda", "for a fine card; tried before its first use")
    assert found["sgd on cuda"] == ("cuda", "compiled for a fine card, and tried")
    assert found["df11 on cuda"].name == found["df11 on cpu"].name
    assert (
        found["df11 on cuda"].why == "on the host, with copies: the kernel cannot run (RuntimeError: sm_70) on cuda:0"
    )
    assert found["published df11 on cuda"].name == "cuda"
    assert found["loss scale on cpu"].name == "torch"


@pytest.mark.filterwarnings("ignore:the kernel:RuntimeWarning", "ignore:.*CUDA is not available:UserWarning")
def test_each_kernel_does_one_piece_of_work_on_a_gpu(card):
    works = {work for work, backend in fmp.kernels.backends().items() if backend.name == "cuda"}
    assert works == {work for work in fmp.kernels.backends() if work.endswith("cuda")}
    for kernel in trials.TRIALS:
        card[kernel] = False
        assert not trust.agrees(kernel, GPU)
        left = {work for work, backend in fmp.kernels.backends().items() if backend.name == "cuda"}
        assert len(works - left) == 1, kernel
        works = left
    assert works == set()
