"""The form `kahan`: a parameter and its rounding error."""

import pytest
import torch
from hypothesis import given

from fmp import master
from fmp.master import kahan
from tests.bits import same_bits
from tests.master.battery import HALVES
from tests.master.numbers import every_high_half, from_words, words


def check(full, dtype):
    param, rest = kahan.split(full, dtype, None)
    assert param.dtype == rest.dtype == dtype
    found = kahan.merge(param, rest)
    assert same_bits(found.to(dtype)[~full.isnan()], param[~full.isnan()])
    assert param[full.isnan()].isnan().all()
    assert same_bits(kahan.split(found, dtype, None)[0], param)
    assert same_bits(kahan.merge(*kahan.split(found, dtype, None)), found)
    kept = param.isfinite()
    # Half a digit of the error, and the error is at most half a digit of the parameter.
    info = torch.finfo(dtype)
    spacing = full[kept].double().abs().clamp(min=info.smallest_normal) * info.eps
    error_spacing = (spacing / 2).clamp(min=info.smallest_normal) * info.eps
    assert ((found[kept].double() - full[kept].double()).abs() <= error_spacing / 2).all()
    assert same_bits(found[~kept].nan_to_num(0.0, 1.0, -1.0), param[~kept].float().nan_to_num(0.0, 1.0, -1.0))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_sum_rounds_to_the_parameter_and_is_close_to_the_number(dtype):
    check(every_high_half(), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@given(words)
def test_also_for_any_pattern_of_bits(dtype, values):
    check(from_words(values), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_taking_a_sum_apart_again_changes_no_bit(dtype):
    pair = kahan.split(every_high_half(), dtype, None)
    finite = pair[0].isfinite()
    again = kahan.split(kahan.merge(*pair), dtype, None)
    assert same_bits([part[finite] for part in again], [part[finite] for part in pair])


def test_an_error_just_below_a_tie_does_not_move_the_parameter_in_the_next_step():
    # 1 + 2^-7 is odd in bf16; the error, 2^-8 less 2^-23, rounds to 2^-8, and the sum of both to even.
    full = torch.tensor([1.0 + 2.0**-7 + 2.0**-8 - 2.0**-23])
    pair = kahan.split(full, torch.bfloat16, None)
    assert [part.item() for part in pair] == [1.0 + 2.0**-6, -(2.0**-8)]
    assert same_bits(kahan.split(kahan.merge(*pair), torch.bfloat16, None), pair)


def test_what_overflows_is_inf_and_stays_inf():
    param, rest = kahan.split(torch.tensor([1e6, -1e6, float("inf")]), torch.float16, None)
    assert kahan.merge(param, rest).tolist() == [float("inf"), -float("inf"), float("inf")]


def test_a_thousand_small_updates_in_bfloat16():
    params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    rest = master.init(params, form="kahan")
    for _ in range(1000):
        full = master.merge(params, rest, form="kahan")
        params, rest = master.split({"w": full["w"] - 1e-3}, params, rest, form="kahan")
    # 17 digits: each of a thousand steps errs by at most 2^-17, and without a rest none would have moved the weight.
    assert master.merge(params, rest, form="kahan")["w"].item() == pytest.approx(0.0, abs=1000 * 2.0**-17)


def test_eight_bits_are_refused():
    with pytest.raises(TypeError, match=r"params: masters of the form 'kahan' are for bf16 and f16, .* is f8e4m3\[2\]"):
        master.init(torch.ones(2).to(torch.float8_e4m3fn), form="kahan")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_are_those_of_the_identity(dtype):
    after = lambda x: kahan.merge(*kahan.split(x, dtype, None)).sum()
    x = torch.tensor([0.0, 1.0, 0.3, 1e6])
    assert torch.func.grad(after)(x).isfinite().all()
    assert same_bits(torch.func.grad(after)(x[:3]), torch.ones(3))
