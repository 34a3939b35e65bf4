"""cuda/adam.cu against `update` of fmp.optim.adam and adamw, bit for bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim
from fmp.optim.adam import AdamState
from fmp.optim.adam_coefficients import coefficients_of
from tests.cuda_executor import Module
from tests.kernels.harness import (
    NAMES,
    Buffer,
    chunks,
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
FORMATS = [(F32, F16), (F32, BF16), (F16, F16), (BF16, BF16)]
SIZES = [5, 0, 1, 137, 300, 3]
COUPLED, DECOUPLED = 1, 2


@dataclass(frozen=True)
class Case:
    """Everything that one update depends on."""

    gradients: list[torch.Tensor]
    params: list[torch.Tensor]
    first: list[torch.Tensor]
    second: list[torch.Tensor]
    ages: list[int]
    learning_rate: float | torch.Tensor = 3e-3
    b1: float | torch.Tensor = 0.9
    b2: float | torch.Tensor = 0.999
    eps: float = 1e-8
    decay: float = 0.1
    decoupled: bool = True
    scale: float | None = 1024.0
    divide: bool = True
    clip: float | None = 0.3


def case(dtype: torch.dtype = F32, sizes: Sequence[int] = SIZES, seed: int = 0) -> Case:
    def drawn(kind: int) -> list[torch.Tensor]:
        return [numbers(size, seed=seed + 10 * kind) for size in sizes]

    return Case(
        gradients=[(100 * gradient).to(dtype) for gradient in drawn(0)],
        params=drawn(1),
        first=drawn(2),
        second=[moment.abs() for moment in drawn(3)],
        ages=[3 * index for index in range(len(sizes))],
    )


Leaves = list[torch.Tensor]


@contextmanager
def exact_root() -> Iterator[None]:
    """Makes `update` take roots as IEEE 754 and a GPU do; torch on a CPU asks MKL, whose last bit may be wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("fmp.optim.adam"), "square_root", lambda x: x.double().sqrt().to(x.dtype))
        yield


def expected(of: Case) -> tuple[Leaves, Leaves, Leaves]:
    def unscaled(gradient: torch.Tensor) -> torch.Tensor:
        wide = gradient.float()
        if of.scale is not None:
            wide = wide / torch.tensor(of.scale) if of.divide else wide * torch.tensor(of.scale)
        return wide if of.clip is None else wide * torch.tensor(of.clip)

    make = optim.adamw if of.decoupled else optim.adam
    tx = make(of.learning_rate, b1=of.b1, b2=of.b2, eps=of.eps, weight_decay=of.decay)
    ages = [torch.tensor(age, dtype=torch.int32) for age in of.ages]
    state = AdamState(torch.tensor(0, dtype=torch.int32), ages, of.first, of.second)
    updates, state = tx.update(list(map(unscaled, of.gradients)), state, of.params)
    return optim.apply_updates(of.params, updates), state.first_moment, state.second_moment


def coefficients(of: Case) -> torch.Tensor:
    rows = coefficients_of(
        of.params,
        [torch.tensor(age) for age in of.ages],
        of.learning_rate,
        of.b1,
        of.b2,
        of.eps,
        of.decay if of.decoupled else 0.0,
    )
    return torch.tensor(
        [
            [
                row.first_weight,
                row.second_weight,
                1.0 - row.second_weight,
                row.step_size,
                row.eps,
                row.shrink,
                0.0 if of.decoupled else of.decay,
                0.0,
            ]
            for row in rows
            if row is not None
        ]
    )


def run(
    kernels: Module,
    of: Case,
    low: torch.dtype,
    *,
    with_low: bool = True,
    finite: bool | None = True,
    chunk_size: int = 128,
    threads: int = 32,
    offsets: Sequence[int] = (0, 0, 0, 0, 0),
    before: int = 0,
) -> tuple[Leaves, Leaves, Leaves, Leaves]:
    columns = [
        [Buffer(leaf, offset) for leaf in leaves]
        for leaves, offset in zip((of.gradients, of.params, of.first, of.second), offsets, strict=False)
    ]
    lows = [Buffer(torch.full_like(param, 9.0, dtype=low), offsets[4]) for param in of.params]
    sizes = [param.numel() for param in of.params]
    flags = [(DECOUPLED if of.decoupled else COUPLED) if of.decay else 0 for _ in sizes]
    rows = table(
        *([buffer.address(before) for buffer in column] for column in columns),
        [buffer.address(before) if with_low else 0 for buffer in lows],
        [before + size for size in sizes],
        flags,
    )
    entries = chunks(sizes, chunk_size, before)
    scalars = [None if value is None else torch.tensor(value) for value in (of.scale, of.clip, finite)]
    scale, clip, flag = (0 if scalar is None else scalar for scalar in scalars)
    weights = coefficients(of)
    launch(
        kernels,
        f"adam_{NAMES[of.gradients[0].dtype]}_{NAMES[low]}",
        len(entries),
        threads,
        (rows, entries, np.int32(chunk_size), weights, scale, np.int32(of.divide), clip, flag),
        read=[rows, entries, weights, *scalars, *columns[0]],
        written=[*columns[1], *columns[2], *columns[3], *lows],
    )
    params, first, second, casts = ([buffer.tensor for buffer in column] for column in (*columns[1:], lows))
    return params, first, second, casts


def check(of: Case, low: torch.dtype, found: tuple[Leaves, Leaves, Leaves, Leaves], with_low: bool = True) -> None:
    *state, casts = found
    with exact_root():
        wanted = expected(of)
    for column, wanted_column in zip(state, wanted, strict=True):
        assert all(map(same, column, wanted_column))
    for cast, param in zip(casts, wanted[0], strict=True):
        assert same(cast, param.to(low) if with_low else torch.full_like(cast, 9.0))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(("gradient", "low"), FORMATS)
def test_every_format_in_every_order(gradient: torch.dtype, low: torch.dtype, decoupled: bool) -> None:
    of = replace(case(gradient), decoupled=decoupled)
    for kernels in in_every_order("adam"):
        check(of, low, run(kernels, of, low))


def test_it_is_close_to_torch_on_a_cpu_as_it_is() -> None:
    of = case()
    for found, wanted in zip(run(module("adam", "checked"), of, BF16), expected(of), strict=False):
        assert all(torch.allclose(*pair, rtol=1e-6, atol=1e-9) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {"b1": 0.3},
        {"b1": 0.6},
        {"b1": 0.5},
        {"b2": 0.0},
        {"b2": 0.4},
        {"decay": 0.0},
        {"scale": None},
        {"scale": 3.0},
        {"scale": 1 / 3, "divide": False},
        {"clip": None},
        {"clip": None, "scale": None},
        {"eps": 0.1},
        {"learning_rate": torch.tensor(0.02)},
        {"learning_rate": 200.0},
        {"b1": torch.tensor(0.8), "b2": torch.tensor(0.95)},
    ],
    ids=str,
)
def test_every_number_reaches_its_place(change: dict[str, object], decoupled: bool) -> None:
    of = replace(case(BF16), decoupled=decoupled, **change)  # pyright: ignore[reportArgumentType]
    check(of, BF16, run(module("adam", "checked"), of, BF16))


def test_without_a_first_moment_the_step_is_that_of_the_gradient() -> None:
    of = replace(case(BF16), b1=0.0)
    for gradient in of.gradients:  # zeros come out with one sign or the other, as torch finds them in a vector or not
        gradient[gradient == 0] = 1.0
    check(of, BF16, run(module("adam", "checked"), of, BF16))


@pytest.mark.parametrize(("gradient", "low"), FORMATS)
def test_a_skipped_step_leaves_every_byte(gradient: torch.dtype, low: torch.dtype) -> None:
    of = case(gradient)
    of.gradients[3][5] = float("nan")
    for kernels in in_every_order("adam"):
        params, first, second, casts = run(kernels, of, low, finite=False)
        assert all(map(same, [*params, *first, *second], [*of.params, *of.first, *of.second]))
        assert all(bool((cast == 9.0).all()) for cast in casts)


def test_without_a_flag_the_step_is_made_and_what_is_not_finite_goes_where_torch_lets_it() -> None:
    of = case(F16)
    for row, place in ((0, 4), (3, 0), (3, 136), (4, 128)):
        of.gradients[row][place] = float("inf")
        of.gradients[row][place - 1] = float("nan")
    of.gradients[4][7] = 65504.0  # its square, unscaled, is beyond float16 but not float32
    check(of, F16, run(module("adam", "checked"), of, F16, finite=None))


@pytest.mark.parametrize("low", [F16, BF16])
def test_no_nan_is_cast_to_a_number(low: torch.dtype) -> None:
    of = case()
    of.params[3][:5] = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32).view(F32)
    casts = run(module("adam", "checked"), of, low)[3]
    assert casts[3][:5].isnan().all()


@pytest.mark.parametrize(("gradient", "low"), FORMATS)
@pytest.mark.parametrize(
    "offsets", [(1, 1, 1, 1, 1), (3, 3, 3, 3, 3), *(tuple(map(int, row)) for row in (*np.eye(5), *2 * np.eye(5)))]
)
def test_slices_begin_anywhere(gradient: torch.dtype, low: torch.dtype, offsets: tuple[int, ...]) -> None:
    of = case(gradient)
    check(of, low, run(module("adam", "checked"), of, low, offsets=offsets))


def test_most_is_read_and_written_sixteen_bytes_at_a_time() -> None:
    of = case(F32, sizes=[256])
    kernels = module("adam", "checked")
    for offset in (0, 1):
        check(of, BF16, run(kernels, of, BF16, chunk_size=256, offsets=[offset] * 5))
        assert kernels.accesses[16] == (256 - offset) // 4 * 6


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_decay_of_zero_leaves_infinite_parameters_alone(decoupled: bool) -> None:
    of = replace(case(F32), decoupled=decoupled, decay=0.0)
    of.params[3][5:9] = float("inf")
    check(of, BF16, run(module("adam", "checked"), of, BF16))


def test_tensors_of_more_than_two_to_the_31_elements() -> None:
    of = case(BF16)
    check(of, BF16, run(module("adam", "checked"), of, BF16, before=20_000_000 * 128))


@pytest.mark.parametrize("low", [F16, BF16])
@pytest.mark.parametrize("offset", [0, 2])
def test_a_full_precision_parameter_has_no_cast(low: torch.dtype, offset: int) -> None:
    of = case(F32)
    found = run(module("adam", "checked"), of, low, with_low=False, offsets=[offset] * 5)
    check(of, low, found, with_low=False)


def test_long_tensors_in_chunks_as_on_a_gpu() -> None:
    of = case(BF16, sizes=[100_001, 65_536, 7])
    check(of, BF16, run(module("adam", "fast"), of, BF16, chunk_size=65_536, threads=512, offsets=[1] * 5))


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    formats=st.sampled_from(FORMATS),
    offsets=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    chunk_size=st.sampled_from([8, 64, 256]),
    decoupled=st.booleans(),
    decay=st.sampled_from([0.0, 0.01, 1.0]),
    scale=st.one_of(st.none(), st.floats(2.0**-10, 2.0**20, width=32)),
    divide=st.booleans(),
)
def test_any_mix_of_sizes(
    sizes: list[int],
    formats: tuple[torch.dtype, torch.dtype],
    offsets: list[int],
    chunk_size: int,
    decoupled: bool,
    decay: float,
    scale: float | None,
    divide: bool,
) -> None:
    of = replace(case(formats[0], sizes), decoupled=decoupled, decay=decay, scale=scale, divide=divide)
    check(of, formats[1], run(module("adam", "fast"), of, formats[1], offsets=offsets, chunk_size=chunk_size))
