"""Each kernel of scale.cu and axpby.cu on a device: torch's bits, both those of its CPU and those of the device itself.

Bit for bit but for two things: a NaN keeps being one, with other bits; and sums, which each machine adds up in an order
of its own, are right to 1e-6.
"""

from collections.abc import Sequence

import pytest
import torch

from tests.gpu import by_hand
from tests.gpu.by_hand import placed
from tests.kernels.harness import numbers, same

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SCALED = [(F32, F32), (F16, F32), (BF16, F32), (F16, F16), (BF16, BF16)]
ADDED = [(F32, F32, F32), (F16, F32, F32), (BF16, F32, F32), (F16, F16, F16), (BF16, BF16, BF16)]
SIZES = [5, 0, 1, 137, 66_001, 3]


def check(
    results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], norm: torch.Tensor, finite: torch.Tensor
) -> None:
    assert all(same(result.cpu(), expected.cpu()) for result, expected in zip(results, wanted, strict=True))
    assert finite.item() == all(bool(expected.isfinite().all()) for expected in wanted)
    if finite:
        true = torch.cat([expected.double() for expected in wanted]).norm().item()
        assert norm.item() == pytest.approx(true, rel=1e-6, abs=1e-22)


def quotients(
    inputs: Sequence[torch.Tensor], target: torch.dtype, factor: torch.Tensor, divide: bool
) -> list[torch.Tensor]:
    # A factor on another device than the tensor would be turned into its inverse first.
    return [(x.float() / factor if divide else x.float() * factor).to(target) for x in inputs]


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("offsets", [(0, 0), (3, 3), (0, 1), (5, 0)])
@pytest.mark.parametrize(("source", "target"), SCALED)
def test_scale(device, source, target, offsets, divide):
    contents = [numbers(size, source, spread=30.0) for size in SIZES]
    inputs = [placed(content, device, offsets[0]) for content in contents]
    outputs = by_hand.empty_like(inputs, target, offsets[1])
    factor = torch.tensor(3.0, device=device)
    norm, finite = by_hand.scale(inputs, outputs, factor, divide=divide)
    check(outputs, quotients(contents, target, factor.cpu(), divide), norm, finite)
    check(outputs, quotients(inputs, target, factor, divide), norm, finite)
    measured = by_hand.scale(inputs, None, factor, divide=divide, target=target)
    check(outputs, outputs, *measured)
    assert all(same(x.cpu(), content) for x, content in zip(inputs, contents, strict=True))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_scale_in_place(device, dtype):
    contents = [numbers(size, dtype) for size in SIZES]
    tensors, factor = [placed(content, device, 1) for content in contents], torch.tensor(7.0, device=device)
    norm, finite = by_hand.scale(tensors, tensors, factor)
    check(tensors, quotients(contents, dtype, factor.cpu(), True), norm, finite)


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0**-13, 4 / 3])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_16_bit_number_is_converted_as_on_a_cpu(device, dtype, factor):
    everything = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for target in (F32, dtype):
        outputs = by_hand.empty_like([everything.to(device)], target)
        factor_on_device = torch.tensor(factor, device=device)
        by_hand.scale([everything.to(device)], outputs, factor_on_device, divide=False)
        assert same(outputs[0].cpu(), (everything.float() * factor_on_device.cpu()).to(target))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 4, 65_535, 65_536, 66_000])
def test_one_bad_number_anywhere_is_found(device, bad, place):
    tensor = placed(numbers(66_001, F16), device)
    tensor[place] = bad
    assert not by_hand.scale([tensor], None, torch.tensor(8.0, device=device))[1]


@pytest.mark.parametrize("offsets", [(0, 0, 0), (3, 3, 3), (0, 2, 1)])
@pytest.mark.parametrize("formats", ADDED)
def test_axpby(device, formats, offsets):
    contents = [[numbers(size, dtype, seed) for size in SIZES] for seed, dtype in enumerate(formats[:2])]
    xs, ys = [[placed(x, device, offset) for x in xs] for xs, offset in zip(contents, offsets, strict=False)]
    outputs = by_hand.empty_like(xs, formats[2], offsets[2])
    a, b = torch.tensor(1 / 3, device=device), torch.tensor(-0.7, device=device)
    norm, finite = by_hand.axpby(a, xs, b, ys, outputs)
    for x_tensors, y_tensors, of_x, of_y in ((*contents, a.cpu(), b.cpu()), (xs, ys, a, b)):
        pairs = zip(x_tensors, y_tensors, strict=True)
        check(outputs, [(of_x * x.float() + of_y * y.float()).to(formats[2]) for x, y in pairs], norm, finite)


@pytest.mark.parametrize("target", [F32, F16])
def test_more_than_two_to_the_31_elements(gpu, target):
    size = 2**31 + 70_001
    if (free := torch.cuda.mem_get_info(gpu)[0]) < (needed := (2 + target.itemsize) * size + 2**30):
        pytest.skip(f"needs {needed >> 20} MiB of free device memory, got {free >> 20}")
    tensor, output = torch.zeros(size, dtype=F16, device=gpu), torch.full((size,), 9.0, dtype=target, device=gpu)
    end = placed(numbers(100_000, F16), gpu)
    tensor[-100_000:], tensor[:100_000] = end, end
    factor = torch.tensor(3.0, device=gpu)
    norm, finite = by_hand.scale([tensor], [output], factor)
    (wanted,) = quotients([end], target, factor, True)
    assert same(output[:100_000], wanted)
    assert same(output[-100_000:], wanted)
    assert not output[100_000:-100_000].any()
    check([output[-100_000:]], [wanted], norm / 2**0.5, finite)
