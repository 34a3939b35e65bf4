"""Whether a kernel is believed: it is tried once, and never used if it does not agree with torch."""

import warnings

import pytest
import torch

import fmp
from fmp.kernels import launch, trials, trust
from tests.cuda_executor import Module
from tests.kernels.harness import folder, needs_executor
from tests.kernels.on_executor import kernels_on_cpu

pytestmark = needs_executor
CPU = torch.device("cpu")


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
    assert not trust.was_refused(kernel)


FAULTS = {
    "scale": [("x / f.by", "x / f.by * 1.0000001f"), ("!is_finite(result)", "result != result")],
    "axpby": [("__fmul_rn(of_y, to_f32(of.y.v[k]))", "to_f32(of.y.v[k])")],
    "adam": [
        ("m = lerp(", "m += lerp("),
        ("if (finite && !*finite) return;", ""),
        ("of_tensor.shrink, p, u", "0, p, u"),
    ],
    "sgd": [("g * of_tensor.gain", "g"), ("if (!low) return;", "return;"), ("if (finite && !*finite) return;", "")],
    "loss_scale": [("grown > max_scale ? max_scale : grown", "grown"), ("grow ? 0 : count", "count")],
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
    found = 0
    for source in folder().iterdir():
        text = source.read_text()
        found += fault[0] in text
        (tmp_path / source.name).write_text(text.replace(*fault))
    assert found
    # A patch that outlived `kernels_on_cpu` would bring back what that had put in place.
    with kernels_on_cpu(trusted=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "module_on", lambda device, of: Module(tmp_path / f"{of}.cu", "fast"))
        with pytest.warns(RuntimeWarning, match=rf"the kernel '{kernel}' returns wrong numbers on cpu, so torch's"):
            assert not trust.agrees(kernel, CPU)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not trust.agrees(kernel, CPU)
        assert trust.was_refused(kernel)


def test_a_kernel_that_cannot_be_launched_is_refused(untried, monkeypatch):
    monkeypatch.setattr(launch, "module_on", lambda device, of: launch.cubin(of, "12345"))
    scaler = fmp.StaticLossScale(4.0)
    with pytest.warns(RuntimeWarning, match="the kernel 'scale' cannot run"):
        assert scaler.unscale(torch.ones(2)).tolist() == [0.25, 0.25]
    assert scaler.unscale(torch.ones(2)).tolist() == [0.25, 0.25]


def test_what_is_around_the_caller_changes_nothing(untried):
    policy = fmp.opt_level("O1", "bf16")
    assert fmp.autocast(lambda: trust.agrees("scale", CPU), policy)()


def test_while_a_graph_is_captured_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(trust, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not trust.agrees("scale", torch.device("cuda", 0))
    assert trust._verdicts == {}


def test_backends_say_so(monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda device="cuda": None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a fine card")
    monkeypatch.setattr(trust, "_verdicts", {("adam", torch.device("cuda", 0)): False})
    found = fmp.kernels.backends()
    assert found["adam on cuda"].name == "torch"
    assert found["sgd on cuda"] == ("cuda", "compiled for a fine card")
    assert found["loss scale on cpu"].name == "torch"
