"""The table of number formats, against torch's own facts and casts."""

import math

import pytest
import torch

from fmp.numerics.formats import FORMATS, Format, number_format

PUBLISHED = {
    torch.float32: (3.4028234663852886e38, 2.0**-126, 2.0**-149, 23),
    torch.bfloat16: (3.3895313892515355e38, 2.0**-126, 2.0**-133, 7),
    torch.float16: (65504.0, 2.0**-14, 2.0**-24, 10),
    torch.float8_e4m3fn: (448.0, 2.0**-6, 2.0**-9, 3),
    torch.float8_e5m2: (57344.0, 2.0**-14, 2.0**-16, 2),
}
formats = pytest.mark.parametrize("item", list(FORMATS.values()), ids=lambda item: item.name)


@formats
def test_the_facts_are_those_of_the_standards_and_of_torch(item: Format):
    facts = (item.max, item.smallest_normal, item.smallest_subnormal, item.mantissa_bits)
    assert facts == PUBLISHED[item.dtype]
    info = torch.finfo(item.dtype)
    assert facts[:2] == (info.max, info.tiny)
    assert 2.0**-item.mantissa_bits == info.eps
    assert item.smallest_subnormal == info.tiny * info.eps


@formats
def test_limits_are_where_casts_change(item: Format):
    def cast(number: float) -> float:
        return torch.tensor(number, dtype=torch.float64).to(item.compared_in).to(item.dtype).double().item()

    up = 1 + 2.0**-14 if item.dtype.itemsize <= 2 else 1 + 2.0**-50
    assert cast(item.zero_up_to) == 0.0
    assert cast(item.zero_up_to * up) == item.smallest_subnormal
    assert cast(item.normal_from) == item.smallest_normal
    assert cast(item.normal_from / up) == item.smallest_normal - item.smallest_subnormal
    assert cast(item.max_rounded / up) == item.max
    limit = torch.tensor([item.max_rounded / up, item.max_rounded, item.max_rounded * up], dtype=torch.float64)
    assert item.overflows(limit).tolist() == [False, not item.max_is_even, True]
    if item.dtype != torch.float8_e4m3fn:  # which saturates in some versions of torch
        assert cast(item.max_rounded) == math.inf


def test_formats_go_by_dtype_and_by_name():
    assert number_format("fp16") is number_format(torch.float16) is FORMATS[torch.float16]
    assert number_format("f8e4m3").name == number_format("float8_e4m3fn").name == "f8e4m3"
    with pytest.raises(ValueError, match="int32 is no format to cast to; use one of f32, bf16, f16, f8e4m3, f8e5m2"):
        number_format(torch.int32)
    with pytest.raises(ValueError, match="'fp9' is not the name of a dtype"):
        number_format("fp9")
