"""Rounding to the grid of a format by arithmetic, and the forms under a compiler that leaves casts out."""

import pytest
import torch
from hypothesis import given

from fmp.master import kahan
from fmp.master.rounding import nearest_by_arithmetic, straight_through
from tests.bits import same_bits
from tests.master.battery import HALVES
from tests.master.numbers import every_high_half, from_words, words


def check_nearest(full, dtype):
    full = full[~full.isnan()]
    assert same_bits(nearest_by_arithmetic(full, dtype), full.to(dtype).float())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_by_arithmetic_is_what_a_cast_does(dtype):
    check_nearest(every_high_half(), dtype)
    assert nearest_by_arithmetic(torch.tensor([float("nan")]), dtype).isnan().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@given(words)
def test_also_for_any_pattern_of_bits(dtype, values):
    check_nearest(from_words(values), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_its_gradient_is_that_of_a_cast(dtype):
    x = torch.tensor([0.3, -0.0, 1e-30, 7.0])
    assert same_bits(torch.func.grad(lambda x: nearest_by_arithmetic(x, dtype).sum())(x), torch.ones(4))


def test_straight_through_changes_no_bit():
    source = every_high_half()
    value = source.flip(0)
    source, value = source[~value.isnan()], value[~value.isnan()]
    assert same_bits(straight_through(value, source.clone().requires_grad_()).detach(), value)


def test_inductor_keeps_the_error_of_a_rounding():
    full = torch.cat([torch.randn(1000), torch.tensor([1.0 + 2.0**-7 + 2.0**-8 - 2.0**-23, 1e-30, -0.0, 1e6])])
    split = lambda full: kahan.split(full, torch.bfloat16, None)
    # Else Inductor writes a value out wherever it is used, and within it those before, which takes over a minute.
    compiled = torch.compile(split, fullgraph=True, options={"realize_opcount_threshold": 8})
    assert same_bits(compiled(full), split(full))
