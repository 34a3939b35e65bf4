"""What fmp.numerics says about a step on two ranks is what it says about the step on one."""

import functools
from typing import Any

import pytest

from tests.distributed import numerics_cases as cases
from tests.distributed.processes import run


@functools.cache
def alone(case: str, *args: Any) -> Any:
    return run(1, getattr(cases, case), None, *args)[0]


@pytest.mark.parametrize(("zero", "is_compiled"), [(0, False), (1, False), (3, False), (1, True)])
def test_the_history_is_that_of_one_process(zero: int, is_compiled: bool) -> None:
    expected = alone("recorded")
    assert {"loss", "grad_amax/hidden", "grad_underflow/out", "param_amax/out"} <= expected.keys()
    for found in run(2, functools.partial(cases.recorded, zero, is_compiled=is_compiled)):
        assert found.keys() == expected.keys()
        for name, column in expected.items():
            assert found[name] == pytest.approx(column, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(("zero", "bad"), [(0, 0), (1, 1), (3, 0)])
def test_nan_of_another_rank_is_said_to_come_from_there(zero: int, bad: int) -> None:
    reports = run(2, cases.nonfinite, zero, bad)
    assert reports[bad][:2] == ("", "batch")
    op, leaf, text = reports[1 - bad]
    assert op == f"_c10d_functional.{'reduce_scatter_tensor' if zero else 'all_reduce'}_coalesced"
    assert leaf == ""
    assert "it came from another rank" in text


@pytest.mark.parametrize("zero", [1, 3])
def test_nothing_is_found_where_nothing_is_wrong(zero: int) -> None:
    assert run(2, cases.nothing_nonfinite, zero) == [True, True]


@pytest.mark.parametrize("zero", [1, 3])
def test_steps_are_compared_by_whole_tensors(zero: int) -> None:
    _, expected = alone("compared")
    assert {path for path, *_ in expected} == {"params/hidden", "params/out", "update/hidden", "update/out"}
    for is_equal, found in run(2, cases.compared, zero):
        assert is_equal
        assert {path for path, *_ in found} == {path for path, *_ in expected}
        for path, error, _ in found:
            assert error == pytest.approx({name: size for name, size, _ in expected}[path], rel=1e-3), path
