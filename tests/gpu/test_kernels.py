"""The references of tests/kernels once more, for kernels that a device runs on the memory of the host."""

import itertools
import mmap
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fmp
from fmp.df11 import CompressedTensor
from fmp.df11_codec.published.groups import encode_group
from tests.bits import same_bits
from tests.df11.published_oracle import gaussian
from tests.gpu.registered import Registered, kernels_on
from tests.gpu.stand_in import on_executor
from tests.kernels import (
    test_adam,
    test_df11,
    test_df11_published,
    test_loss_scale,
    test_remainder,
    test_sgd,
    test_stochastic,
)
from tests.kernels.forms import CASES, Step, equal, run as run_form, state_of
from tests.kernels.harness import same

AS_ON_A_GPU: dict[str, Any] = {"chunk_size": 65_536, "threads": 512}
OFFSETS = [(0, 0, 0, 0, 0), (3, 3, 3, 3, 3), (1, 0, 2, 0, 1)]
LONG = 2**31 + 2**20


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(("gradient", "low"), test_adam.FORMATS)
def test_adam_is_update(device, gradient, low, decoupled, offsets):
    of = replace(test_adam.case(gradient, [5, 0, 1, 137, 3000]), decoupled=decoupled)
    test_adam.check(of, low, test_adam.run(kernels_on(device, "adam"), of, low, offsets=offsets, **AS_ON_A_GPU))


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("gradient", "low"), test_sgd.FORMATS)
def test_sgd_is_update(device, gradient, low, nesterov, offsets):
    of = replace(test_sgd.case(gradient, [5, 0, 1, 137, 3000]), nesterov=nesterov)
    test_sgd.check(of, low, test_sgd.run(kernels_on(device, "sgd"), of, low, offsets=offsets[:4], **AS_ON_A_GPU))


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_skipped_step_leaves_every_byte(device, low):
    of = test_adam.case(low)
    of.gradients[3][5] = float("nan")
    *state, casts = test_adam.run(kernels_on(device, "adam"), of, low, finite=False)
    for column, old in zip(state, (of.params, of.first, of.second), strict=True):
        assert all(map(same, column, old))
    assert all(bool((cast == 9.0).all()) for cast in casts)


def test_tensors_of_more_than_two_to_the_31_elements(device):
    of = test_adam.case(torch.bfloat16)
    found = test_adam.run(kernels_on(device, "adam"), of, torch.bfloat16, before=LONG, chunk_size=2**16)
    test_adam.check(of, torch.bfloat16, found)


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize(("name", "gradient"), test_remainder.KERNELS)
def test_the_form_with_a_remainder(device, name, gradient, offsets):
    of = CASES[name](gradient)
    params, rests = test_remainder.split(of.params)
    kernel = test_remainder.kernel(name, gradient)
    found = run_form(kernels_on(device, name), kernel, of, params, rests=rests, offsets=offsets, **AS_ON_A_GPU)
    assert equal(found, test_remainder.after(of, of.params))


@pytest.mark.parametrize("before", [0, LONG])
@pytest.mark.parametrize(("name", "gradient", "dtype"), test_stochastic.KERNELS)
def test_the_form_that_rounds_by_chance(device, name, gradient, dtype, before):
    of, seeds = CASES[name](gradient), test_stochastic.SEEDS
    params, kernel = test_stochastic.narrowed(of.params, dtype), test_stochastic.kernel(name, gradient, dtype)
    options = {"seeds": torch.tensor(seeds), "before": before, **AS_ON_A_GPU}
    found = run_form(kernels_on(device, name), kernel, of, params, **options)
    assert equal(found, test_stochastic.after(of, params, seeds, before))
    kept = run_form(kernels_on(device, name), kernel, of, params, finite=False, **options)
    assert equal(kept, Step(params, [], state_of(of)))


@pytest.mark.parametrize("in_place", [False, True])
def test_the_loss_scale_is_adjusted(device, in_place):
    scaler = fmp.DynamicLossScale(init_scale=64.0, growth_interval=2, max_scale=128.0, min_scale=24.0)
    for finite in (True, True, True, False, True, False, False, True, True, True, True):
        test_loss_scale.check(kernels_on(device, "loss_scale"), scaler, finite, in_place)
        scaler = scaler.adjust(torch.tensor(finite))


@pytest.mark.parametrize("kind", ["normal", "two exponents", "constant", "wide"])
def test_the_native_format(device, kind):
    tensors = [test_df11.weights(numbers, kind) for numbers in (1, 511, 513, 32 * 512 + 17)]
    nodes = [CompressedTensor.compress(tensor) for tensor in tensors]
    pairs = [(node, tensor) for node, tensor in zip(nodes, tensors, strict=True) if not node.is_raw]
    outs = [torch.zeros_like(tensor) for _, tensor in pairs]
    assert not any(test_df11.decode(kernels_on(device, "df11"), [node for node, _ in pairs], outs))
    assert same_bits(outs, [tensor for _, tensor in pairs])


def test_damaged_df11_is_reported(device):
    node = CompressedTensor.compress(test_df11.weights(5000))
    bad = test_df11.node_with(node, chunk_bits=node.chunk_bits + 1)
    assert test_df11.decode(kernels_on(device, "df11"), [bad], [torch.zeros(5000, dtype=torch.bfloat16)]) == [True]


@pytest.mark.parametrize("numbers", [1, 97, 5000])
def test_the_published_format(device, numbers):
    bits = gaussian(numbers, numbers)
    assert test_df11_published.restores(kernels_on(device, "df11_published"), encode_group(bits), bits)


def test_each_page_is_registered_once_and_given_back(monkeypatch):
    """A stand-in for CUDA notes what it would be told; the executor runs the kernel."""
    registered: dict[int, int] = {}
    seen: list[list[tuple[int, int]]] = []

    def register(begin: int, size: int, flags: int) -> int:
        assert begin % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        registered[begin] = size
        return 0

    def synchronize(device: torch.device) -> None:
        seen.append(sorted(registered.items()))

    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=registered.pop)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    of = test_sgd.case(torch.float16)
    with on_executor() as device:
        kernels: Any = Registered("sgd", device)
        test_sgd.check(of, torch.float16, test_sgd.run(kernels, of, torch.float16))
    assert not registered
    pages, after = seen
    assert pages == after
    assert all(begin + size < following for (begin, size), (following, _) in itertools.pairwise(pages))
