import pytest
import torch
from hypothesis import given, strategies as st

from fmp import dtypes

ALL = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
FLOATING = [dtype for dtype in ALL if dtype.is_floating_point]


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype_is_parsed_from_its_names(dtype):
    name = str(dtype).removeprefix("torch.")
    for spelling in (dtype, name, f"torch.{name}", f" {name.upper()} "):
        assert dtypes.parse_dtype(spelling) == dtype
    if dtypes.short_name(dtype) != name:
        assert dtypes.parse_dtype(dtypes.short_name(dtype)) == dtype


def test_short_names_are_distinct():
    assert len({dtypes.short_name(dtype) for dtype in ALL}) == len(ALL)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("half", torch.float16),
        ("full", torch.float32),
        ("fp16", torch.float16),
        ("f16", torch.float16),
        ("float", torch.float32),
        ("double", torch.float64),
        ("BF16", torch.bfloat16),
        ("f8e4m3", torch.float8_e4m3fn),
    ],
)
def test_aliases(name, dtype):
    assert dtypes.parse_dtype(name) is dtype


@pytest.mark.parametrize("name", ["", "fp17", "strided", "nn", "Tensor", "float33", "torch.", "f16,f32"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=r"is not the name of a dtype; use one of .*bf16"):
        dtypes.parse_dtype(name)


@given(st.one_of(st.none(), st.integers(), st.floats(), st.binary(), st.just(float), st.just(torch.ones(1))))
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="expected a dtype or its name"):
        dtypes.parse_dtype(value)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_full_precision_is_never_narrower_than_float32_and_idempotent(dtype):
    wide = dtypes.full_precision(dtype)
    assert wide == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert dtypes.full_precision(wide) == wide


def test_full_precision_of_other_kinds():
    assert dtypes.full_precision(torch.complex32) == torch.complex64
    assert dtypes.full_precision(torch.complex128) == torch.complex128
    assert {dtypes.full_precision(dtype) for dtype in (torch.bool, torch.uint8, torch.int64)} == {torch.float32}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [*FLOATING, torch.complex32, torch.complex64, torch.int8, torch.bool], ids=str)
def test_only_floating_tensors_are_castable(dtype):
    assert dtypes.is_castable(torch.empty(2, dtype=dtype)) == dtype.is_floating_point


@pytest.mark.parametrize("leaf", [None, 1.0, 2, "f32", torch.float32, [torch.ones(1)]])
def test_nothing_else_is_castable(leaf):
    assert not dtypes.is_castable(leaf)


def test_parameters_are_castable():
    assert dtypes.is_castable(torch.nn.Parameter(torch.ones(2)))
