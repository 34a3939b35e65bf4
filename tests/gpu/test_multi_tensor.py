"""Lists of tensors on a device, of any dtypes and sizes: what torch's own operations compute there, bit for bit.

Norms are right to 1e-6: each device adds up squares in an order of its own.
"""

import pytest
import torch

import fmp
from fmp import reductions
from fmp.kernels import eligible, multi_tensor
from tests.bits import same_bits
from tests.gpu.by_hand import placed
from tests.kernels.harness import numbers, same

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SIZES = [5, 0, 1, 137, 66_001, 3, 1000]
DTYPES = [F16, BF16, F32, F16, F32, BF16, F16]


def mixed(device: torch.device, seed: int = 0, offset: int = 0) -> list[torch.Tensor]:
    contents = [numbers(size, dtype, seed) for size, dtype in zip(SIZES, DTYPES, strict=True)]
    return [placed(content, device, offset * index % 5) for index, content in enumerate(contents)]


def is_norm(norm: torch.Tensor, of: list[torch.Tensor]) -> bool:
    true = torch.cat([tensor.double().flatten() for tensor in of]).norm().item()
    return norm.item() == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("factor", [1024.0, 3.0])
def test_unscale_and_measure(device, factor, offset):
    tensors, scale = mixed(device, offset=offset), torch.tensor(factor, device=device)
    assert eligible.usable("scale", tensors, numbers=[scale])
    results, norm, finite = multi_tensor.unscale(tensors, scale)
    wanted = [tensor.float() / scale for tensor in tensors]
    assert all(map(same, results, wanted))
    assert is_norm(norm, wanted)
    assert is_norm(multi_tensor.measure(tensors, scale).norm, wanted)
    assert finite.item()
    tensors[4][66_000] = float("nan")
    assert not multi_tensor.unscale(tensors, scale)[2].item()
    assert not multi_tensor.measure(tensors, scale).finite.item()


@pytest.mark.parametrize("numbers_on_device", [False, True])
def test_axpby(device, numbers_on_device):
    xs, ys = mixed(device, 1), [tensor.flip(0) for tensor in mixed(device, 2, offset=1)]
    a, b = (torch.tensor(value, device=device) if numbers_on_device else value for value in (0.25, -3.0))
    assert eligible.usable("axpby", xs, ys)
    results, norm, finite = multi_tensor.axpby(a, xs, b, ys)
    wanted = [a * x.float() + b * y.float() for x, y in zip(xs, ys, strict=True)]
    assert all(map(same, results, wanted))
    assert is_norm(norm, wanted)
    assert finite.item()


def test_scaler_and_reductions_say_the_same_as_without_kernels(device, monkeypatch):
    scaler = fmp.tree.map(lambda leaf: leaf.to(device), fmp.DynamicLossScale(init_scale=1024.0))
    results = []
    for usable in (True, False):
        if not usable:
            monkeypatch.setattr(eligible, "has_kernels", lambda device: False)
        for bad in (False, True):
            grads = dict(zip("abcdefg", mixed(device), strict=True))
            grads["e"][7] = float("inf") if bad else 0.0
            unscaled = scaler.unscale(grads)
            norm, finite = reductions.measure(unscaled)
            assert same_bits(finite, reductions.all_finite(unscaled))
            assert same_bits(norm, reductions.global_norm(unscaled))
            results.append((unscaled, finite, scaler.adjust(finite), norm))
    for (*with_kernels, norm), (*without, other_norm) in zip(results[:2], results[2:], strict=True):
        assert same_bits(with_kernels, without)
        assert norm.item() == pytest.approx(other_norm.item(), rel=1e-6)
