"""cuda/sgd.cu against `update` of fmp.optim.sgd, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim
from fmp.optim.sgd import SgdState
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
DECAY, NESTEROV = 1, 2
Leaves = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Everything that one update depends on."""

    gradients: Leaves
    params: Leaves
    totals: Leaves
    ages: list[int]
    learning_rate: float = 0.03
    momentum: float = 0.9
    nesterov: bool = False
    dampening: float = 0.0
    decay: float = 0.1
    scale: float | None = 1024.0
    divide: bool = True
    clip: float | None = 0.3


def case(dtype: torch.dtype = F32, sizes: Sequence[int] = SIZES) -> Case:
    gradients, params, totals = ([numbers(size, seed=10 * kind) for size in sizes] for kind in range(3))
    return Case([(100 * gradient).to(dtype) for gradient in gradients], params, totals, list(range(len(sizes))))


def expected(of: Case) -> tuple[Leaves, Leaves]:
    def unscaled(gradient: torch.Tensor) -> torch.Tensor:
        wide = gradient.float()
        if of.scale is not None:
            wide = wide / torch.tensor(of.scale) if of.divide else wide * torch.tensor(of.scale)
        return wide if of.clip is None else wide * torch.tensor(of.clip)

    tx = optim.sgd(of.learning_rate, of.momentum, of.nesterov, of.decay, dampening=of.dampening)
    ages = [torch.tensor(age, dtype=torch.int32) for age in of.ages] if of.dampening else None
    state = SgdState(torch.tensor(0, dtype=torch.int32), of.totals if of.momentum else None, ages)
    updates, state = tx.update(list(map(unscaled, of.gradients)), state, of.params)
    return optim.apply_updates(of.params, updates), state.momentum or of.totals


def run(
    kernels: Module,
    of: Case,
    low: torch.dtype,
    *,
    with_low: bool = True,
    finite: bool | None = True,
    chunk_size: int = 128,
    threads: int = 32,
    offsets: Sequence[int] = (0, 0, 0, 0),
    before: int = 0,
) -> tuple[Leaves, Leaves, Leaves]:
    columns = [
        [Buffer(leaf, offset) for leaf in leaves]
        for leaves, offset in zip((of.gradients, of.params, of.totals), offsets, strict=False)
    ]
    lows = [Buffer(torch.full_like(param, 9.0, dtype=low), offsets[3]) for param in of.params]
    sizes = [param.numel() for param in of.params]
    flags = [(DECAY if of.decay else 0) | (NESTEROV if of.nesterov else 0) for _ in sizes]
    rows = table(
        *([buffer.address(before) for buffer in column] for column in columns[:2]),
        [buffer.address(before) if of.momentum else 0 for buffer in columns[2]],
        [buffer.address(before) if with_low else 0 for buffer in lows],
        [before + size for size in sizes],
        flags,
    )
    entries = chunks(sizes, chunk_size, before)
    gains = [1.0 - of.dampening if age else 1.0 for age in of.ages]
    weights = torch.tensor([[-of.learning_rate, of.momentum, gain, of.decay] for gain in gains])
    scalars = [None if value is None else torch.tensor(value) for value in (of.scale, of.clip, finite)]
    scale, clip, flag = (0 if scalar is None else scalar for scalar in scalars)
    launch(
        kernels,
        f"sgd_{NAMES[of.gradients[0].dtype]}_{NAMES[low]}",
        len(entries),
        threads,
        (rows, entries, np.int32(chunk_size), weights, scale, np.int32(of.divide), clip, flag),
        read=[rows, entries, weights, *scalars, *columns[0]],
        written=[*columns[1], *columns[2], *lows],
    )
    params, totals, casts = ([buffer.tensor for buffer in column] for column in (*columns[1:], lows))
    return params, totals, casts


def check(of: Case, low: torch.dtype, found: tuple[Leaves, Leaves, Leaves], with_low: bool = True) -> None:
    params, totals, casts = found
    wanted_params, wanted_totals = expected(of)
    assert all(map(same, params, wanted_params))
    assert all(map(same, totals, wanted_totals))
    for cast, param in zip(casts, wanted_params, strict=True):
        assert same(cast, param.to(low) if with_low else torch.full_like(cast, 9.0))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("gradient", "low"), FORMATS)
def test_every_format_in_every_order(gradient: torch.dtype, low: torch.dtype, nesterov: bool) -> None:
    of = replace(case(gradient), nesterov=nesterov)
    for kernels in in_every_order("sgd"):
        check(of, low, run(kernels, of, low))


@pytest.mark.parametrize(
    "change",
    [
        {"momentum": 0.0},
        {"momentum": 0.0, "decay": 0.0},
        {"momentum": 1.5},
        {"dampening": 0.4},
        {"decay": 0.0},
        {"decay": 0.0, "nesterov": True},
        {"scale": None},
        {"scale": 3.0},
        {"scale": 1 / 3, "divide": False},
        {"clip": None},
        {"learning_rate": 200.0},
    ],
    ids=str,
)
def test_every_number_reaches_its_place(change: dict[str, object]) -> None:
    of = replace(case(BF16), **change)  # pyright: ignore[reportArgumentType]
    check(of, BF16, run(module("sgd", "checked"), of, BF16))


@pytest.mark.parametrize(("gradient", "low"), FORMATS)
def test_a_skipped_step_leaves_every_byte(gradient: torch.dtype, low: torch.dtype) -> None:
    of = case(gradient)
    of.gradients[3][5] = float("nan")
    for kernels in in_every_order("sgd"):
        params, totals, casts = run(kernels, of, low, finite=False)
        assert all(map(same, [*params, *totals], [*of.params, *of.totals]))
        assert all(bool((cast == 9.0).all()) for cast in casts)


def test_without_a_flag_the_step_is_made_and_what_is_not_finite_goes_where_torch_lets_it() -> None:
    of = case(F16)
    for row, place in ((0, 4), (3, 0), (3, 136), (4, 128)):
        of.gradients[row][place] = float("inf")
        of.gradients[row][place - 1] = float("nan")
    check(of, F16, run(module("sgd", "checked"), of, F16, finite=None))


@pytest.mark.parametrize(("gradient", "low"), FORMATS)
@pytest.mark.parametrize(
    "offsets", [(1, 1, 1, 1), (3, 3, 3, 3), *(tuple(map(int, row)) for row in (*np.eye(4), *2 * np.eye(4)))]
)
def test_slices_begin_anywhere(gradient: torch.dtype, low: torch.dtype, offsets: tuple[int, ...]) -> None:
    of = case(gradient)
    check(of, low, run(module("sgd", "checked"), of, low, offsets=offsets))


def test_most_is_read_and_written_sixteen_bytes_at_a_time() -> None:
    of = case(F32, sizes=[256])
    kernels = module("sgd", "checked")
    for offset in (0, 1):
        check(of, BF16, run(kernels, of, BF16, chunk_size=256, offsets=[offset] * 4))
        assert kernels.accesses[16] == (256 - offset) // 4 * 4


def test_a_decay_of_zero_leaves_infinite_parameters_alone() -> None:
    of = replace(case(F32), decay=0.0)
    of.params[3][5:9] = float("inf")
    check(of, BF16, run(module("sgd", "checked"), of, BF16))


def test_tensors_of_more_than_two_to_the_31_elements() -> None:
    of = case(BF16)
    check(of, BF16, run(module("sgd", "checked"), of, BF16, before=20_000_000 * 128))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_full_precision_parameter_has_no_cast(momentum: float) -> None:
    of = replace(case(F32), momentum=momentum)
    found = run(module("sgd", "checked"), of, BF16, with_low=False, offsets=(2, 2, 2, 2))
    check(of, BF16, found, with_low=False)


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    formats=st.sampled_from(FORMATS),
    offsets=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    chunk_size=st.sampled_from([8, 64, 256]),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.01]),
    scale=st.one_of(st.none(), st.floats(2.0**-10, 2.0**20, width=32)),
)
def test_any_mix_of_sizes(
    sizes: list[int],
    formats: tuple[torch.dtype, torch.dtype],
    offsets: list[int],
    chunk_size: int,
    momentum: float,
    decay: float,
    scale: float | None,
) -> None:
    of = replace(case(formats[0], sizes), momentum=momentum, decay=decay, scale=scale)
    check(of, formats[1], run(module("sgd", "fast"), of, formats[1], offsets=offsets, chunk_size=chunk_size))
