"""Kernels follow torch's current stream and device, and a source is compiled once for all."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import fmp
from fmp.kernels import launch, nvrtc
from tests.bits import same_bits
from tests.gpu import by_hand
from tests.gpu.steps import make_batch, make_params, make_step
from tests.kernels.harness import numbers, same


@contextmanager
def busy_stream(device: torch.device) -> Iterator[None]:
    """Makes another stream the current one, with work on it that takes a while; the old one waits for it at the end.

    The executor has no streams: what is launched runs at once.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        matrix = torch.ones(4096, 4096, device=device)
        for _ in range(10):
            matrix = matrix @ matrix
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def test_a_launch_comes_after_what_its_stream_has_been_given(device):
    content = numbers(70_001)
    source, factor = torch.zeros(70_001, device=device), torch.tensor(2.0, device=device)
    outputs = by_hand.empty_like([source], torch.float32)
    late = content.to(device)
    with busy_stream(device):
        source.copy_(late)
        norm, finite = by_hand.scale([source], outputs, factor)
        found = outputs[0].clone()
    assert same(found.cpu(), content / 2)
    assert finite.item()
    assert norm.item() == pytest.approx((content.double() / 2).norm().item(), rel=1e-6)


def test_many_streams_at_once(device):
    contents = [numbers(3000 + index, seed=index) for index in range(8)]
    sources = [content.to(device) for content in contents]
    factors = [torch.tensor(float(index + 1), device=device) for index in range(8)]
    outputs = by_hand.empty_like(sources, torch.float32)
    for source, factor, output in zip(sources, factors, outputs, strict=True):
        with busy_stream(device):
            for _ in range(5):
                by_hand.scale([source], [output], factor)
    for content, factor, output in zip(contents, factors, outputs, strict=True):
        assert same(output.cpu(), content / factor.cpu())


def test_a_step_on_another_stream_is_the_same_step(device):
    step = make_step()
    states = [step.init(make_params(device)) for _ in range(2)]
    batches = [make_batch(seed, device, overflow=seed == 1) for seed in range(4)]
    for batch in batches:
        states[0], _ = step(states[0], batch)
    with busy_stream(device):
        for batch in batches:
            states[1], _ = step(states[1], batch)
    assert same_bits(*states)


def test_another_device_than_the_current_one(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    step, states = make_step(), []
    for device in (torch.device("cuda", index) for index in (0, 1)):
        with torch.cuda.device(0):
            state = step.init(make_params(device))
            for seed in range(3):
                state, _ = step(state, make_batch(seed, device))
        states.append(fmp.tree.map(lambda leaf: leaf if leaf is None else leaf.cpu(), state))
    assert same_bits(*states)


def test_the_first_launch_compiles_and_later_ones_find_it(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("FMP_CACHE_DIR", str(tmp_path))
    compiled: list[str] = []
    compile = nvrtc.compile

    def note(text: str, name: str, arch: str) -> nvrtc.Compiled:
        compiled.append(name)
        return compile(text, name, arch)

    monkeypatch.setattr(nvrtc, "compile", note)
    tensor, factor = torch.ones(100, device=gpu), torch.tensor(2.0, device=gpu)
    for process in range(2):
        launch._module.cache_clear()  # as in a process that has just begun
        for _ in range(2):
            norm, _ = by_hand.scale([tensor], None, factor)
            assert norm.item() == 5.0, process
        assert compiled == ["scale.cu"]
    launch._module.cache_clear()
