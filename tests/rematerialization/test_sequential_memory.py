"""The peak memory of remat_sequential: what is predicted, what is measured, and the best of even segments."""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint_sequential

import fmp
from fmp import tree
from fmp.rematerialization.segments import Segment
from tests.memory import peak_bytes


def mlp(x: torch.Tensor, weights: Any) -> torch.Tensor:
    for w in weights:
        x = torch.tanh(x @ w)
    return x


def mlps(*widths: int) -> tuple[Any, Any, torch.Tensor]:
    params = [[torch.randn(pair) / pair[0] ** 0.5] for pair in itertools.pairwise(widths)]
    return mlp, params, torch.randn(1024, widths[0])


def pyramid(x: torch.Tensor, weights: Any) -> torch.Tensor:
    return F.max_pool2d(F.gelu(F.conv2d(x, weights[0], padding=1)), 2)


def pyramids(*channels: int) -> tuple[Any, Any, torch.Tensor]:
    params = [[torch.randn(b, a, 3, 3) / (3 * a**0.5)] for a, b in itertools.pairwise(channels)]
    size = 2 ** len(channels)
    return pyramid, params, torch.randn(4, channels[0], size, size)


UNEVEN = {
    "wide and narrow": mlps(64, 256, 32, 512, 32, 32, 32, 256, 64, 64, 16),
    "wide first": mlps(512, 16, 512, 16, 512, 16, 16, 16, 16),
    "equal": mlps(*[64] * 10),
    "pyramid": pyramids(3, 8, 8, 16, 16),
}


def by_autograd(value: Any, params: Any) -> Any:
    params = tracked(params)
    return torch.autograd.grad(value(params), tree.leaves(params))


def by_torch_func(value: Any, params: Any) -> Any:
    return grad(value)(params)


def by_sample(value: Any, params: Any) -> Any:
    return vmap(grad(value), in_dims=(0,))(tree.map(lambda leaf: leaf.expand(2, *leaf.shape), params))


def with_params(block: Any, params: Any) -> list[Any]:
    return [functools.partial(block, weights=weights) for weights in params]


def tracked(params: Any) -> Any:
    return tree.map(lambda leaf: leaf.detach().requires_grad_(), params)


def peak(gradient: Any, chain: Any, segments: Any, measure: Any = fmp.memory.peak, **options: Any) -> int:
    block, params, x = chain

    def value(params):
        return fmp.remat_sequential(with_params(block, params), segments, **options)(x).sum()

    return measure(lambda: gradient(value, params))


# The profiler also counts what kernels allocate inside, which is much for convolutions, and random states.
@pytest.mark.parametrize(
    ("name", "measure"), [*((name, fmp.memory.peak) for name in UNEVEN), ("wide and narrow", peak_bytes)]
)
@pytest.mark.parametrize("gradient", [by_autograd, by_torch_func, by_sample])
def test_auto_is_never_worse_than_the_best_even_split(name, measure, gradient):
    chain = UNEVEN[name]
    even = [peak(gradient, chain, segments, measure) for segments in range(1, len(chain[1]) + 1)]
    assert peak(gradient, chain, "auto", measure) <= 1.01 * min(even)


@pytest.mark.parametrize("name", UNEVEN)
def test_the_prediction_is_what_is_measured(name):
    block, params, x = UNEVEN[name]
    plan = fmp.remat_sequential(with_params(block, tracked(params)), "auto").plan(x)
    assert plan.peak_bytes == pytest.approx(peak(by_autograd, UNEVEN[name], "auto"), rel=0.02)


def test_a_budget_is_kept_with_less_recomputation():
    chain = UNEVEN["equal"]
    block, params, x = chain
    fns = with_params(block, tracked(params))
    leanest: Any = fmp.remat_sequential(fns, "auto").plan(x)
    everything: Any = fmp.remat_sequential(fns, "auto", memory_budget=10**9).plan(x)
    assert everything.recomputed == 0
    assert everything.segments == (Segment(0, len(fns), False),)
    budget = leanest.peak_bytes + (everything.peak_bytes - leanest.peak_bytes) // 2
    between: Any = fmp.remat_sequential(fns, "auto", memory_budget=budget).plan(x)
    assert 0 < between.recomputed < leanest.recomputed
    assert peak(by_autograd, chain, "auto", memory_budget=budget) <= 1.01 * budget
    with pytest.raises(ValueError, match=f"memory_budget=1,000 .* least possible peak is {leanest.peak_bytes:,} bytes"):
        fmp.remat_sequential(fns, "auto", memory_budget=1000)(x)


@pytest.mark.parametrize("segments", [1, 2, 3, 9])
def test_a_number_of_segments_means_what_it_means_to_torch(segments):
    chain = UNEVEN["equal"]
    block, params, x = chain

    def rival(params):
        return checkpoint_sequential(with_params(block, params), segments, x, use_reentrant=False).sum()

    want = peak_bytes(lambda: by_autograd(rival, params))
    assert peak(by_autograd, chain, segments, peak_bytes) == pytest.approx(want, rel=0.02)
