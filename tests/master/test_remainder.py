"""The form `remainder`: no bit of a float32 number is lost."""

import pytest
import torch
from hypothesis import given

from fmp import master
from fmp.master import remainder
from tests.bits import same_bits
from tests.master.numbers import every_high_half, from_words, words

BF16_MAX = torch.finfo(torch.bfloat16).max


def check_exact(full):
    param, rest = remainder.split(full, torch.bfloat16, None)
    assert (param.dtype, rest.dtype) == (torch.bfloat16, torch.int16)
    found = remainder.merge(param, rest)
    number = ~full.isnan()
    assert same_bits(found[number], full[number])
    assert found[~number].isnan().all()
    assert param[~number].isnan().all()
    assert same_bits(remainder.split(found, torch.bfloat16, None), (param, rest))


def test_every_exponent_and_every_tie_is_exact():
    check_exact(every_high_half())


@given(words)
def test_every_pattern_of_bits_is_exact(values):
    check_exact(from_words(values))


def test_parameters_are_rounded_to_nearest_and_half_up():
    full = every_high_half()
    full = full[full.isfinite()]
    param, _ = remainder.split(full, torch.bfloat16, None)
    tie = full.view(torch.int32) & 0xFFFF == 0x8000
    assert same_bits(param[~tie], full[~tie].to(torch.bfloat16))
    beyond = torch.nextafter(full[tie], torch.full_like(full[tie], float("inf")).copysign(full[tie]))
    assert same_bits(param[tie], beyond.to(torch.bfloat16))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_overflows_comes_back(sign):
    largest = torch.tensor([torch.finfo(torch.float32).max]) * sign
    param, rest = remainder.split(largest, torch.bfloat16, None)
    assert same_bits(param, torch.tensor([sign * float("inf")], dtype=torch.bfloat16))
    assert same_bits(remainder.merge(param, rest), largest)
    param, rest = remainder.split(remainder.merge(param, rest) * 0.5, torch.bfloat16, None)
    assert same_bits(remainder.merge(param, rest), largest * 0.5)
    assert param.isfinite().all()


def test_infinity_is_told_from_what_overflows():
    infinity = torch.tensor([float("inf"), -float("inf")])
    param, rest = remainder.split(infinity, torch.bfloat16, None)
    assert same_bits(rest, torch.zeros(2, dtype=torch.int16))
    assert same_bits(remainder.merge(param, rest), infinity)


@given(words)
def test_init_meets_its_source_where_the_parameter_is_its_cast(values):
    source = from_words(values)
    source = source[~source.isnan()]
    param = source.to(torch.bfloat16)
    found = remainder.merge(param, remainder.init(param, source))
    # Half way above an even parameter, it falls short by one in the last place.
    short = (source.view(torch.int32) - found.view(torch.int32)).int()
    tie = (source.view(torch.int32) & 0x1FFFF) == 0x8000
    assert same_bits(short, tie.int())


def test_other_formats_are_refused_by_path():
    params = {"a": torch.ones(2, dtype=torch.bfloat16), "b": {"w": torch.ones(2, dtype=torch.float16)}}
    with pytest.raises(TypeError, match=r"b/w: masters of the form 'remainder' are for bf16, .* is f16\[2\]"):
        master.init(params, form="remainder")


def test_gradients_pass_through_the_parameter():
    def after(x):
        param, rest = remainder.split(x, torch.bfloat16, None)
        return (remainder.merge(param, rest) * weights).sum()

    weights = torch.tensor([1.0, 2.0, 4.0, 8.0])
    x = torch.tensor([0.0, -0.0, 1.0 + 2.0**-8, 0.3])  # the third is half way above an even parameter
    assert same_bits(torch.func.grad(after)(x), weights)
    assert torch.func.jvp(after, (x,), (torch.ones(4),))[1] == 15.0


def test_a_gradient_that_nobody_asks_for_changes_no_bit():
    full = every_high_half()
    pair = remainder.split(full, torch.bfloat16, None)
    differentiated = remainder.split(full.clone().requires_grad_(), torch.bfloat16, None)
    assert same_bits([part.detach() for part in differentiated], list(pair))
    merged = remainder.merge(pair[0].clone().requires_grad_(), pair[1])
    assert same_bits(merged.detach(), remainder.merge(*pair))
