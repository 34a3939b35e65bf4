"""cuda/scale.cu against plain torch, bit for bit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.cuda_executor import Module
from tests.kernels.harness import (
    NAMES,
    Buffer,
    chunks,
    finish,
    in_every_order,
    launch,
    module,
    needs_executor,
    numbers,
    same,
    table,
)

pytestmark = needs_executor
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FORMATS = [(F32, F32), (F16, F32), (BF16, F32), (F16, F16), (BF16, BF16)]
SIZES = [5, 0, 1, 137, 300, 3]


def scale_only(
    kernels: Module,
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    factor: float,
    *,
    divide: bool = True,
    chunk_size: int = 128,
    threads: int = 32,
    offsets: tuple[int, int] = (0, 0),
    in_place: bool = False,
    measure: bool = False,
    before: int = 0,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    sources = [Buffer(x, offsets[0]) for x in inputs]
    results = sources if in_place else [Buffer(torch.full_like(x, 9.0, dtype=dtype), offsets[1]) for x in inputs]
    sizes = [x.numel() for x in inputs]
    rows = table(
        [x.address(before) for x in sources],
        [0 if measure else y.address(before) for y in results],
        [before + size for size in sizes],
    )
    entries = chunks(sizes, chunk_size, before)
    partials = torch.full((len(entries), 2), float("nan"))
    by = torch.tensor(factor)
    launch(
        kernels,
        f"scale_{NAMES[inputs[0].dtype]}_{NAMES[dtype]}",
        len(entries),
        threads,
        (rows, entries, np.int32(chunk_size), by, np.int32(divide), partials),
        read=[rows, entries, by, *([] if in_place else sources)],
        written=[partials, *results],
    )
    return [result.tensor for result in results], partials


def scale(
    kernels: Module, inputs: Sequence[torch.Tensor], dtype: torch.dtype, factor: float, **options: Any
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    results, partials = scale_only(kernels, inputs, dtype, factor, **options)
    return results, *finish(kernels, partials)


def expected(inputs: Sequence[torch.Tensor], dtype: torch.dtype, factor: float, divide: bool) -> list[torch.Tensor]:
    by = torch.tensor(factor)
    return [(x.float() / by if divide else x.float() * by).to(dtype) for x in inputs]


def true_norm(results: Sequence[torch.Tensor]) -> float:
    return torch.cat([result.double() for result in results]).norm().item()


def check(inputs: Sequence[torch.Tensor], dtype: torch.dtype, factor: float, divide: bool, found: object) -> None:
    results, norm, finite = found  # pyright: ignore[reportGeneralTypeIssues]
    wanted = expected(inputs, dtype, factor, divide)
    assert all(map(same, results, wanted))
    assert finite.item() == all(bool(w.isfinite().all()) for w in wanted)
    size = true_norm(wanted)
    if not finite or size > 1.8e19:  # squares overflow
        assert not norm.isfinite() or norm.item() == pytest.approx(size, rel=1e-6)
    else:
        assert norm.item() == pytest.approx(size, rel=1e-6, abs=1e-22)


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize(("source", "target"), FORMATS)
def test_every_format_in_every_order(source: torch.dtype, target: torch.dtype, divide: bool) -> None:
    inputs = [numbers(size, source, spread=30.0) for size in SIZES]
    norms = set()
    for kernels in in_every_order("scale"):
        found = scale(kernels, inputs, target, 3.0, divide=divide)
        check(inputs, target, 3.0, divide, found)
        norms.add(found[1].item())
    assert len(norms) == 1


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("row", "place"), [(0, 4), (2, 0), (3, 0), (3, 135), (4, 127), (4, 128), (4, 299), (5, 2)])
def test_one_bad_number_anywhere_is_found(bad: float, row: int, place: int) -> None:
    inputs = [numbers(size, F16) for size in SIZES]
    inputs[row][place] = bad
    for offset in (0, 1):
        found = scale(module("scale", "checked"), inputs, F32, 8.0, offsets=(offset, offset))
        assert not found[2]
        check(inputs, F32, 8.0, True, found)


def test_what_overflows_as_a_product_or_as_a_cast_is_not_finite() -> None:
    kernels = module("scale", "checked")
    large = [torch.full((9,), 1e30)]
    assert scale(kernels, large, F32, 1.0)[2]
    assert not scale(kernels, large, F32, 2.0**100, divide=False)[2]
    half = [torch.full((9,), 60000.0, dtype=F16)]
    assert scale(kernels, half, F32, 2.0, divide=False)[2]
    assert not scale(kernels, half, F16, 2.0, divide=False)[2]


@pytest.mark.parametrize("exponent", [-149, -127, -126, -125, -1, 0, 24, 125, 126, 127])
@pytest.mark.parametrize("divide", [True, False])
def test_powers_of_two_as_far_as_they_go(exponent: int, divide: bool) -> None:
    inputs = [torch.cat([numbers(size), torch.tensor([1e38, 3e-39, 1e-45, 1.5, float("inf")])]) for size in (7, 60)]
    for factor in (2.0**exponent, 1.5 * 2.0**exponent, -(2.0**exponent), 0.0, float("inf")):
        check(inputs, F32, factor, divide, scale(module("scale", "checked"), inputs, F32, factor, divide=divide))


def test_finite_numbers_whose_squares_overflow_are_finite() -> None:
    _, norm, finite = scale(module("scale", "checked"), [torch.full((9,), 1e30)], F32, 1.0)
    assert finite
    assert norm.isinf()


@pytest.mark.parametrize(("source", "target"), FORMATS)
@pytest.mark.parametrize("offsets", [(1, 1), (3, 3), (0, 1), (2, 0), (0, 2), (0, 4), (5, 5)])
def test_slices_begin_anywhere(source: torch.dtype, target: torch.dtype, offsets: tuple[int, int]) -> None:
    inputs = [numbers(size, source) for size in SIZES]
    kernels = module("scale", "checked")
    check(inputs, target, 0.37, True, scale(kernels, inputs, target, 0.37, offsets=offsets))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("offset", [0, 3])
def test_results_may_overwrite_inputs(dtype: torch.dtype, offset: int) -> None:
    inputs = [numbers(size, dtype) for size in SIZES]
    for kernels in in_every_order("scale"):
        check(inputs, dtype, 7.0, True, scale(kernels, inputs, dtype, 7.0, in_place=True, offsets=(offset, offset)))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_measuring_writes_nothing_and_finds_the_same(dtype: torch.dtype) -> None:
    inputs = [numbers(size, dtype) for size in SIZES]
    kernels = module("scale", "checked")
    _, norm, finite = scale(kernels, inputs, F32, 3.0)
    untouched, *measured = scale(kernels, inputs, F32, 3.0, measure=True)
    assert measured == [norm, finite]
    assert all(bool((result == 9.0).all()) for result in untouched)


@pytest.mark.parametrize("factor", [1.0, 0.5, 1.5, 1 + 2.0**-11, 2.0**-13, 4 / 3])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_16_bit_number(dtype: torch.dtype, factor: float) -> None:
    everything = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    kernels = module("scale", "fast")
    for target in (F32, dtype):
        found = scale(kernels, [everything], target, factor, divide=False, chunk_size=65_536, threads=256)
        check([everything], target, factor, False, found)


@pytest.mark.parametrize("threads", [32, 64])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_thread_visits_more_than_it_loads_at_once(threads: int, offset: int) -> None:
    inputs = [numbers(size, BF16) for size in (3000, 4096)]
    kernels = module("scale", "checked")
    check(
        inputs,
        BF16,
        3.0,
        True,
        scale(kernels, inputs, BF16, 3.0, chunk_size=4096, threads=threads, offsets=(offset, offset)),
    )


@pytest.mark.parametrize(("source", "target"), FORMATS)
@pytest.mark.parametrize("offset", [0, 1])
def test_most_is_read_and_written_sixteen_bytes_at_a_time(
    source: torch.dtype, target: torch.dtype, offset: int
) -> None:
    kernels = module("scale", "checked")
    results = scale_only(kernels, [numbers(256, source)], target, 3.0, chunk_size=256, offsets=(offset, offset))[0]
    assert len(results) == 1
    width = 16 // target.itemsize
    packs = (256 - (width - offset) % width) // width
    assert kernels.accesses[16] == packs


def test_the_sum_is_rounded_once_for_a_square_and_a_sum() -> None:
    for x in torch.randn(30, 8):
        _, norm, _ = scale(module("scale", "checked"), [x], F32, 1.0)
        of_thread = torch.zeros(2, dtype=torch.float64)
        for column in x.double().view(2, 4).unbind(1):
            of_thread = (column * column + of_thread).float().double()
        assert norm.item() == of_thread.float().sum().double().sqrt().float().item()


def test_a_tensor_of_more_than_two_to_the_31_elements() -> None:
    inputs = [numbers(size, F16) for size in (300, 5)]
    found = scale(module("scale", "checked"), inputs, F32, 3.0, before=20_000_000 * 128)
    check(inputs, F32, 3.0, True, found)


@pytest.mark.parametrize("threads", [32, 64, 256])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_sum_that_is_exact_in_any_order_is_exact(threads: int, offset: int) -> None:
    inputs = [torch.arange(size).remainder(7).sub(3).float() for size in (1000, 77, 4)]
    kernels = module("scale", "checked")
    found = scale(kernels, inputs, F32, 0.5, threads=threads, chunk_size=512, offsets=(offset, offset))
    squares = torch.cat([x.double() * 2 for x in inputs]).square().sum()
    assert found[1].item() == squares.sqrt().float().item()


def test_nothing_has_the_norm_zero_and_is_finite() -> None:
    _, norm, finite = scale(module("scale", "checked"), [torch.empty(0)], F32, 2.0)
    assert norm == 0
    assert finite


@pytest.mark.parametrize("count", [1, 63, 64, 65, 300])
def test_finish_adds_in_float64_and_sees_every_flag(count: int) -> None:
    kernels = module("scale", "checked")
    partials = torch.zeros(count, 2)
    partials[:, 0] = 1.0
    partials[0, 0] = 2.0**30  # in float32 no 1 would count
    norm, finite = finish(kernels, partials)
    assert finite
    assert norm.item() == torch.tensor(2.0**30 + count - 1, dtype=torch.float64).sqrt().float().item()
    assert finish(kernels, partials, threads=1024)[0] == norm
    for place in (0, count // 2, count - 1):
        flagged = partials.clone()
        flagged.view(torch.int32)[place, 1] = 1
        assert not finish(kernels, flagged)[1]


def test_a_long_tensor_in_chunks_as_on_a_gpu() -> None:
    kernels = module("scale", "fast")
    inputs = [numbers(200_001, BF16), numbers(65_536, BF16), numbers(65_537, BF16)]
    found = scale(kernels, inputs, F32, 1024.0, chunk_size=65_536, threads=512, offsets=(1, 1))
    check(inputs, F32, 1024.0, True, found)


@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=5),
    formats=st.sampled_from(FORMATS),
    offsets=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    chunk_size=st.sampled_from([8, 64, 256]),
    threads=st.sampled_from([32, 64]),
    factor=st.floats(2.0**-20, 2.0**20, width=32),
    divide=st.booleans(),
)
def test_any_mix_of_sizes(
    sizes: list[int],
    formats: tuple[torch.dtype, torch.dtype],
    offsets: tuple[int, int],
    chunk_size: int,
    threads: int,
    factor: float,
    divide: bool,
) -> None:
    source, target = formats
    inputs = [numbers(size, source, seed=index) for index, size in enumerate(sizes)]
    found = scale(
        module("scale", "fast"),
        inputs,
        target,
        factor,
        divide=divide,
        offsets=offsets,
        chunk_size=chunk_size,
        threads=threads,
    )
    check(inputs, target, factor, divide, found)
