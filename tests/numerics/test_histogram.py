"""Exponent histograms, against plain Python."""

import math

import pytest
import torch
from torch.func import vmap

import fmp
from fmp.numerics.histogram import Histogram, histogram
from tests.bits import same_bits

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def counted(result: Histogram, leaf: int = 0) -> dict[int, int]:
    pairs = zip(result.edges.tolist(), result.counts[leaf].tolist(), strict=False)
    return {int(edge): count for edge, count in pairs if count}


def every_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_is_in_the_bin_of_its_exponent(dtype):
    numbers = every_number(dtype)
    result = histogram({"w": numbers})
    expected: dict[int, int] = {}
    for number in numbers.double().tolist():
        if math.isfinite(number) and number:
            exponent = math.frexp(number)[1] - 1
            expected[exponent] = expected.get(exponent, 0) + 1
    assert counted(result) == expected
    infinite, nan = int(numbers.isinf().sum()), int(numbers.isnan().sum())
    assert (result.zeros.item(), result.infinities.item(), result.nans.item()) == (2, infinite, nan)
    total = result.overall.sum() + result.zeros + result.infinities + result.nans
    assert total.item() == 2**16


@pytest.mark.parametrize("dtype", FLOATS)
def test_bins_start_at_powers_of_two(dtype):
    result = histogram({"w": torch.tensor([1.0, 1.75, 2.0, -0.5, 0.75], dtype=dtype)})
    assert counted(result) == {0: 2, 1: 1, -1: 2}


def test_the_ends_of_both_ranges_are_counted():
    info = torch.finfo(torch.float32)
    assert counted(histogram(torch.tensor([2.0**-149, info.max]))) == {-149: 1, 127: 1}
    wide = histogram([torch.tensor([2.0**-1074, 1.7e308], dtype=torch.float64), torch.tensor([2.0**-149])])
    assert counted(wide) == {-1074: 1, 1023: 1}
    assert counted(wide, 1) == {-149: 1}
    assert wide.edges[-1] == 1024


def test_only_floating_leaves_have_rows():
    tree = {
        "a": {"w": torch.ones(3)},
        "ids": torch.arange(3),
        "none": None,
        "z": [torch.zeros(2), 1.0],
        "c": 1j * torch.ones(1),
    }
    result = histogram(tree)
    assert result.names == ("a/w", "z/0")
    assert result.overall.sum() == 3
    assert result.zeros.tolist() == [0, 2]


@pytest.mark.parametrize("tree", [{}, None, {"ids": torch.arange(2)}, {"w": torch.ones(0, 3)}])
def test_trees_without_numbers_have_empty_histograms(tree):
    result = histogram(tree)
    assert result.overall.shape == (277,)
    assert result.overall.sum() == result.zeros.sum() == 0


def test_members_and_compiled_calls_count_the_same():
    trees = {"w": torch.randn(3, 4, 5) * 1e-6, "h": torch.randn(3, 7).half()}
    apart = [histogram(fmp.tree.map(lambda leaf: leaf[i], trees)) for i in range(3)]
    together = vmap(histogram)(trees)
    assert same_bits(together.counts, torch.stack([result.counts for result in apart]))
    assert together.overall.shape == (3, 277)
    compiled = torch.compile(vmap(histogram), backend="aot_eager", fullgraph=True)(trees)
    assert same_bits(compiled, together)
    assert compiled.names == together.names


@pytest.mark.parametrize("compile", [False, True])
def test_it_is_aux_of_a_step(compile):
    def loss_fn(params, batch):
        hidden = params["w"] * batch
        return hidden.float().square().mean(), histogram({"hidden": hidden})

    step = fmp.train_step(
        loss_fn, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2"), loss_scale="dynamic", accumulate=2, has_aux=True,
        compile=compile,
    )  # fmt: skip
    _, metrics = step(step.init({"w": torch.ones(2)}), torch.tensor([[1.0, 2.0], [0.0, 4.0]]))
    assert isinstance(metrics.aux, Histogram)
    assert metrics.aux.counts.shape == (2, 1, 277)  # a histogram for each microbatch
    assert metrics.aux.zeros.tolist() == [[0], [1]]


def test_the_input_stays_differentiable_and_unchanged():
    x = torch.randn(5, requires_grad=True)
    before = x.detach().clone()
    result = histogram(x)
    assert not any(leaf.requires_grad for leaf in fmp.tree.leaves(result))
    assert torch.equal(x, before)
