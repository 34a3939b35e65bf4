"""Passes over lists of tensors, from Python to the kernels, against plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import fmp
from fmp import reductions
from fmp.kernels import loss_scale, multi_tensor, tables
from tests.kernels.harness import NAMES, needs_executor, numbers, same
from tests.kernels.on_executor import Watched, kernels_on_cpu

pytestmark = needs_executor
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [F32, F16, BF16]
MIX = [(5, F16), (0, F32), (137, F32), (1, BF16), (300, F16), (0, F16), (3, F32)]


def drawn(kinds: list[tuple[int, torch.dtype]], seed: int = 0, offset: int = 0) -> list[torch.Tensor]:
    return [numbers(size + offset, dtype, seed + i)[offset:] for i, (size, dtype) in enumerate(kinds)]


def true_norm(tensors: list[torch.Tensor]) -> float:
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors]).norm().item()


def watched(of: tuple[str, ...], read: list[torch.Tensor], run: Callable[[], Any]) -> Any:
    with kernels_on_cpu("checked"), Watched(of, read=read):
        return run()


@pytest.mark.parametrize("scale", [None, 8.0, 3.0])
@pytest.mark.parametrize("offset", [0, 1])
def test_measure(scale: float | None, offset: int) -> None:
    tensors, by = drawn(MIX, offset=offset), None if scale is None else torch.tensor(scale)
    before = [tensor.clone() for tensor in tensors]
    given = [*tensors] if by is None else [*tensors, by]
    norm, finite = watched(("scale",), given, lambda: multi_tensor.measure(tensors, by))
    assert norm.item() == pytest.approx(true_norm([tensor.float() / (scale or 1.0) for tensor in tensors]), rel=1e-6)
    assert (finite.item(), norm.dtype, finite.dtype) == (True, F32, torch.bool)
    assert all(map(same, tensors, before))


@pytest.mark.parametrize("scale", [8.0, 3.0])
@pytest.mark.parametrize("offset", [0, 1])
def test_unscale(scale: float, offset: int) -> None:
    tensors, by = drawn(MIX, offset=offset), torch.tensor(scale)
    found, norm, finite = watched(("scale",), [*tensors, by], lambda: multi_tensor.unscale(tensors, by))
    assert all(map(same, found, [tensor.float() / by for tensor in tensors]))
    assert norm.item() == pytest.approx(true_norm(found), rel=1e-6)
    assert finite
    if not offset:  # tensors that begin alike are added up in one order
        with kernels_on_cpu():
            assert same(norm, multi_tensor.measure(tensors, by).norm)


@pytest.mark.parametrize("factors", [(1.0, 1.0), (1 / 3, -0.7), (torch.tensor(0.1), 2.0)], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_axpby_of_every_pair_of_dtypes(factors: tuple[Any, Any], offset: int) -> None:
    pairs = [(x, y) for x in DTYPES for y in DTYPES]
    xs = drawn([(size, x) for size in (0, 7, 130) for x, _ in pairs], 1, offset)
    ys = drawn([(size, y) for size in (0, 7, 130) for _, y in pairs], 50, offset)
    a, b = (torch.as_tensor(factor) for factor in factors)
    given = [*xs, *ys, *[factor for factor in factors if isinstance(factor, torch.Tensor)]]
    call = lambda: multi_tensor.axpby(factors[0], xs, factors[1], ys)
    found, norm, finite = watched(("axpby", "scale"), given, call)
    assert all(map(same, found, [a * x.float() + b * y.float() for x, y in zip(xs, ys, strict=True)]))
    assert norm.item() == pytest.approx(true_norm(found), rel=1e-6)
    assert finite


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("row", [0, 2, 3, 4, 6])
def test_one_bad_number_in_any_group_is_found(bad: float, row: int) -> None:
    tensors = drawn(MIX)
    with kernels_on_cpu():
        assert multi_tensor.measure(tensors).finite
        tensors[row][-1] = bad
        assert not multi_tensor.measure(tensors).finite
        assert not multi_tensor.unscale(tensors, torch.tensor(2.0))[2]
        assert not multi_tensor.axpby(1.0, tensors, 1.0, [tensor.clone() for tensor in tensors])[2]


def test_nothing_but_empty_tensors() -> None:
    with kernels_on_cpu() as names:
        norm, finite = multi_tensor.measure([torch.empty(0), torch.empty(0, 3, dtype=F16)])
        assert (norm.item(), finite.item(), names) == (0.0, True, ["finish"])


def test_results_have_the_layout_of_what_they_are_made_of() -> None:
    across, deep = torch.randn(6, 4).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with kernels_on_cpu():
        found, _, _ = multi_tensor.unscale([across, deep.half()], torch.tensor(2.0))
        assert [one.stride() for one in found] == [across.stride(), deep.stride()]
        assert all(map(torch.equal, found, [across / 2, deep.half().float() / 2]))


@given(
    kinds=st.lists(st.tuples(st.integers(0, 300), st.sampled_from(DTYPES)), min_size=1, max_size=5),
    scale=st.floats(2.0**-10, 2.0**20, width=32),
)
def test_any_mix(kinds: list[tuple[int, torch.dtype]], scale: float) -> None:
    tensors, by = drawn(kinds), torch.tensor(scale)
    with kernels_on_cpu() as names:
        found, norm, finite = multi_tensor.unscale(tensors, by)
        assert sorted(names) == sorted(["finish", *{f"scale_{NAMES[dtype]}_f32" for size, dtype in kinds if size}])
    assert all(map(same, found, [tensor.float() / by for tensor in tensors]))
    assert finite.item() == all(bool(one.isfinite().all()) for one in found)
    if norm.isfinite():
        assert norm.item() == pytest.approx(true_norm(found), rel=1e-6, abs=1e-22)


def test_the_table_is_uploaded_once_for_a_list_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = tables._uploaded
    monkeypatch.setattr(
        tables, "_uploaded", lambda key: made.extend([key] if isinstance(key, tables._Rows) else []) or make(key)
    )
    tensors = drawn(MIX)
    with kernels_on_cpu():
        for scale in (1.0, 2.0, 3.0):
            multi_tensor.measure(tensors, torch.tensor(scale))
        assert len(made) == 3  # one for each dtype
        multi_tensor.measure([tensor.clone() for tensor in tensors])
        assert len(made) == 6


def test_the_scalers_use_them() -> None:
    grads = {"w": numbers(40, F16), "b": numbers(7), "none": None, "ids": torch.arange(3)}
    for scaler in (fmp.StaticLossScale(3.0), fmp.DynamicLossScale(64.0)):
        expected = scaler.unscale(grads)
        with kernels_on_cpu() as names:
            found = scaler.unscale(grads)
        assert names == ["scale_f32_f32", "scale_f16_f32", "finish"]
        assert same(found["w"], expected["w"])
        assert same(found["b"], expected["b"])
        assert found["none"] is None
        assert found["ids"] is grads["ids"]


def test_a_tree_that_no_kernel_takes_is_unscaled_by_torch() -> None:
    scaler = fmp.StaticLossScale(4.0)
    for other in (numbers(3, torch.float64), torch.ones(2, dtype=torch.complex64), torch.ones(2).to_sparse()):
        with kernels_on_cpu() as names:
            found = scaler.unscale([numbers(3), other])
        assert names == []
        assert torch.equal(found[1].to_dense(), (other / 4.0).to_dense())
    with kernels_on_cpu() as names:
        assert scaler.unscale({"none": None}) == {"none": None}


@pytest.mark.parametrize("finite", [True, False])
def test_adjust(finite: bool) -> None:
    scaler = fmp.DynamicLossScale(64.0, growth_interval=2, max_scale=128.0, min_scale=24.0)
    for _ in range(5):
        flag = torch.tensor(finite)
        expected = scaler.adjust(flag)
        with kernels_on_cpu() as names:
            found = scaler.adjust(flag)
        assert names == ["adjust"]
        assert same(found.loss_scale, expected.loss_scale)
        assert torch.equal(found.growth_count, expected.growth_count)
        assert found.loss_scale is not scaler.loss_scale
        scaler = expected


def test_adjust_touches_nothing_else() -> None:
    given = torch.tensor(True), torch.tensor(8.0), torch.tensor(1, dtype=torch.int32)
    rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "min_scale": 1.0, "max_scale": 64.0}
    scale, count = watched(("loss_scale",), list(given), lambda: loss_scale.adjust(*given, **rule))
    assert (scale.item(), count.item()) == (16.0, 0)


def test_reductions_use_them_and_agree_with_the_tree() -> None:
    values = {"w": numbers(40, F16), "b": numbers(7), "none": None, "ids": torch.arange(3)}
    expected = fmp.tree.global_norm(values)
    with kernels_on_cpu() as names:
        norm, finite = reductions.measure(values)
        assert names == ["scale_f32_f32", "scale_f16_f32", "finish"]
        assert same(reductions.global_norm(values), norm)
        assert reductions.all_finite(values)
        values["b"][3] = float("nan")
        assert not reductions.all_finite(values)
        assert reductions.all_finite({"ids": torch.arange(2)})
        assert reductions.global_norm([numbers(3, torch.float64)]).dtype == torch.float64
    assert finite
    torch.testing.assert_close(norm, expected)
