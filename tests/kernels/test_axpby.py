"""cuda/axpby.cu against plain torch, bit for bit."""

from collections.abc import Sequence

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
FORMATS = [(F32, F32, F32), (F16, F32, F32), (BF16, F32, F32), (F16, F16, F16), (BF16, BF16, BF16)]
SIZES = [5, 0, 1, 137, 300, 3]

Found = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]


def axpby(
    kernels: Module,
    a: float,
    xs: Sequence[torch.Tensor],
    b: float,
    ys: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    over: str = "",
    chunk_size: int = 128,
    offsets: tuple[int, int, int] = (0, 0, 0),
    before: int = 0,
) -> Found:
    x_buffers, y_buffers = [Buffer(x, offsets[0]) for x in xs], [Buffer(y, offsets[1]) for y in ys]
    results = [Buffer(torch.full_like(x, 9.0, dtype=dtype), offsets[2]) for x in xs]
    results = {"x": x_buffers, "y": y_buffers}.get(over, results)
    sizes = [x.numel() for x in xs]
    ends = [before + size for size in sizes]
    rows = table(*([item.address(before) for item in column] for column in (x_buffers, y_buffers, results)), ends)
    entries = chunks(sizes, chunk_size, before)
    partials = torch.full((len(entries), 2), float("nan"))
    of_x, of_y = torch.tensor(a), torch.tensor(b)
    inputs = [*(x_buffers if over != "x" else ()), *(y_buffers if over != "y" else ())]
    launch(
        kernels,
        "axpby_" + "_".join(NAMES[kind] for kind in (xs[0].dtype, ys[0].dtype, dtype)),
        len(entries),
        32,
        (rows, entries, np.int32(chunk_size), of_x, of_y, partials),
        read=[rows, entries, of_x, of_y, *inputs],
        written=[partials, *results],
    )
    return [result.tensor for result in results], *finish(module("scale", "fast"), partials)


def check(a: float, xs: Sequence[torch.Tensor], b: float, ys: Sequence[torch.Tensor], dtype: torch.dtype, found: Found):
    results, norm, finite = found
    wanted = [
        (torch.tensor(a) * x.float() + torch.tensor(b) * y.float()).to(dtype) for x, y in zip(xs, ys, strict=True)
    ]
    assert all(map(same, results, wanted))
    assert finite.item() == all(bool(w.isfinite().all()) for w in wanted)
    if finite:
        assert norm.item() == pytest.approx(torch.cat(wanted).double().norm().item(), rel=1e-6, abs=1e-22)


def operands(formats: tuple[torch.dtype, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [numbers(size, formats[0], 1) for size in SIZES], [numbers(size, formats[1], 2) for size in SIZES]


@pytest.mark.parametrize("formats", FORMATS)
def test_every_format_in_every_order(formats: tuple[torch.dtype, ...]) -> None:
    xs, ys = operands(formats)
    for kernels in in_every_order("axpby"):
        check(1 / 3, xs, -0.7, ys, formats[2], axpby(kernels, 1 / 3, xs, -0.7, ys, formats[2]))


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(
    "offsets", [(1, 1, 1), (0, 0, 2), (0, 2, 0), (2, 0, 0), (0, 0, 4), (0, 4, 0), (2, 2, 2), (3, 3, 3)]
)
def test_slices_begin_anywhere(formats: tuple[torch.dtype, ...], offsets: tuple[int, int, int]) -> None:
    xs, ys = operands(formats)
    found = axpby(module("axpby", "checked"), 2.5, xs, 1.0, ys, formats[2], offsets=offsets)
    check(2.5, xs, 1.0, ys, formats[2], found)


@pytest.mark.parametrize(
    ("formats", "over"), [(FORMATS[0], "x"), (FORMATS[0], "y"), (FORMATS[2], "y"), (FORMATS[3], "x")]
)
def test_the_result_may_overwrite_an_operand(formats: tuple[torch.dtype, ...], over: str) -> None:
    xs, ys = operands(formats)
    for kernels in in_every_order("axpby"):
        check(0.1, xs, 1.0, ys, formats[2], axpby(kernels, 0.1, xs, 1.0, ys, formats[2], over=over))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(("row", "place"), [(0, 4), (2, 0), (3, 0), (4, 127), (4, 128), (4, 299)])
@pytest.mark.parametrize("side", [0, 1])
def test_one_bad_number_anywhere_is_found(bad: float, row: int, place: int, side: int) -> None:
    both = operands(FORMATS[1])
    both[side][row][place] = bad
    found = axpby(module("axpby", "checked"), 0.5, both[0], 0.5, both[1], F32)
    assert not found[2]
    check(0.5, both[0], 0.5, both[1], F32, found)


def test_a_thread_visits_more_than_it_loads_at_once() -> None:
    x, y = numbers(2000, BF16, 1), numbers(2000, F32, 2)
    found = axpby(module("axpby", "checked"), 0.5, [x], 2.0, [y], F32, chunk_size=1024)
    check(0.5, [x], 2.0, [y], F32, found)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("offset", [0, 1])
def test_most_is_read_and_written_sixteen_bytes_at_a_time(formats: tuple[torch.dtype, ...], offset: int) -> None:
    kernels = module("axpby", "checked")
    x, y = numbers(256, formats[0], 1), numbers(256, formats[1], 2)
    axpby(kernels, 0.5, [x], 2.0, [y], formats[2], chunk_size=256, offsets=(offset, offset, offset))
    width = 16 // formats[2].itemsize
    packs = (256 - (width - offset) % width) // width
    assert kernels.accesses[16] == packs


def test_the_sum_is_rounded_once_for_a_square_and_a_sum() -> None:
    for x in torch.randn(30, 8):
        _, norm, _ = axpby(module("axpby", "checked"), 1.0, [x], 0.0, [x], F32)
        of_thread = torch.zeros(2, dtype=torch.float64)
        for column in x.double().view(2, 4).unbind(1):
            of_thread = (column * column + of_thread).float().double()
        assert norm.item() == of_thread.float().sum().double().sqrt().float().item()


def test_tensors_of_more_than_two_to_the_31_elements() -> None:
    xs, ys = operands(FORMATS[1])
    found = axpby(module("axpby", "checked"), 0.5, xs, 2.0, ys, F32, before=20_000_000 * 128)
    check(0.5, xs, 2.0, ys, F32, found)


def test_a_sum_that_overflows_is_not_finite() -> None:
    kernels = module("axpby", "checked")
    half = [torch.full((9,), 60000.0, dtype=F16)]
    assert axpby(kernels, 1.0, half, 0.0, half, F16)[2]
    assert not axpby(kernels, 1.0, half, 1.0, half, F16)[2]
    large = [torch.full((9,), 3e38)]
    assert not axpby(kernels, 1.0, large, 1.0, large, F32)[2]


@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    formats=st.sampled_from(FORMATS),
    offsets=st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)),
    chunk_size=st.sampled_from([8, 64, 256]),
    a=st.floats(-100, 100, width=32),
    b=st.floats(-100, 100, width=32),
)
def test_any_mix_of_sizes(
    sizes: list[int],
    formats: tuple[torch.dtype, ...],
    offsets: tuple[int, int, int],
    chunk_size: int,
    a: float,
    b: float,
) -> None:
    xs = [numbers(size, formats[0], seed=index) for index, size in enumerate(sizes)]
    ys = [numbers(size, formats[1], seed=index + 50) for index, size in enumerate(sizes)]
    found = axpby(module("axpby", "fast"), a, xs, b, ys, formats[2], chunk_size=chunk_size, offsets=offsets)
    check(a, xs, b, ys, formats[2], found)
