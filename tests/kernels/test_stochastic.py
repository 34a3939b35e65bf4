"""The optimizers on parameters in the form `stochastic`, against fmp.optim and fmp.master.stochastic, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import random
from fmp.master.stochastic import round_stochastically
from tests.kernels.forms import CASES, OFFSETS, Case, Leaves, Step, equal, expected, run, state_of
from tests.kernels.harness import NAMES, in_every_order, module, needs_executor

pytestmark = needs_executor
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FORMATS = [(F32, F16), (F32, BF16), (F16, F16), (BF16, BF16)]
KERNELS = [(name, *formats) for name in ("adam", "sgd") for formats in FORMATS]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0]
INF, NAN = float("inf"), float("nan")


def kernel(name: str, gradient: torch.dtype, dtype: torch.dtype) -> str:
    return f"{name}_{NAMES[gradient]}_stochastic_{NAMES[dtype]}"


def narrowed(leaves: Leaves, dtype: torch.dtype) -> Leaves:
    return [leaf.to(dtype) for leaf in leaves]


def drawn(full: Leaves, dtype: torch.dtype, seeds: Sequence[int], before: int = 0) -> Leaves:
    """Rounds each leaf by its seed, as the last elements of a tensor with `before` more in front."""
    return [
        round_stochastically(leaf, dtype, seed, index=torch.arange(before, before + leaf.numel()))
        for leaf, seed in zip(full, seeds, strict=True)
    ]


def after(of: Case, params: Leaves, seeds: Sequence[int], before: int = 0) -> Step:
    full, state = expected(of, narrowed(params, F32))
    return Step(drawn(full, params[0].dtype, seeds, before), [], state)


def rounded(values: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Brings a parameter from 0 to the values by one step of SGD, and returns what is stored."""
    of = CASES["sgd"](F32, sizes=[values.numel()])
    of = replace(of, learning_rate=1.0, momentum=0.0, decay=0.0, scale=None, clip=None)
    of.gradients[0].copy_(-values)
    params = [torch.where(values.signbit(), -0.0, 0.0).to(dtype)]
    kernels = module("sgd", "checked")
    seeds = torch.tensor([seed])
    return run(kernels, kernel("sgd", F32, dtype), of, params, seeds=seeds, finite=None, chunk_size=1024).params[0]


def check_rounding(values: torch.Tensor, dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    found = rounded(values, dtype, seed)
    wanted = round_stochastically(values, dtype, seed)
    assert equal(Step([found], [], []), Step([wanted], [], []))
    return found


@pytest.mark.parametrize(("name", "gradient", "dtype"), KERNELS)
def test_every_format_in_every_order(name: str, gradient: torch.dtype, dtype: torch.dtype) -> None:
    of = CASES[name](gradient)
    params = narrowed(of.params, dtype)
    wanted = after(of, params, SEEDS)
    for kernels in in_every_order(name):
        found = run(kernels, kernel(name, gradient, dtype), of, params, seeds=torch.tensor(SEEDS))
        assert equal(found, wanted)


@pytest.mark.parametrize(("name", "gradient", "dtype"), KERNELS)
def test_a_skipped_step_leaves_every_byte(name: str, gradient: torch.dtype, dtype: torch.dtype) -> None:
    of = CASES[name](gradient)
    of.gradients[3][5] = NAN
    params = narrowed(of.params, dtype)
    for kernels in in_every_order(name):
        found = run(kernels, kernel(name, gradient, dtype), of, params, seeds=torch.tensor(SEEDS), finite=False)
        assert equal(found, Step(params, [], state_of(of)))


@pytest.mark.parametrize(("name", "gradient", "dtype"), KERNELS)
@pytest.mark.parametrize("offsets", OFFSETS)
def test_slices_begin_anywhere(name: str, gradient: torch.dtype, dtype: torch.dtype, offsets: tuple[int, ...]) -> None:
    of = CASES[name](gradient)
    params = narrowed(of.params, dtype)
    kernels = module(name, "checked")
    found = run(kernels, kernel(name, gradient, dtype), of, params, seeds=torch.tensor(SEEDS), offsets=offsets)
    assert equal(found, after(of, params, SEEDS))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_numbers_of_every_magnitude(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (8192,), generator=generator).to(torch.int32)
    check_rounding(bits.view(F32), dtype)
    # Those between the smallest subnormal number of float16 and the smallest normal one, and those around the largest.
    check_rounding(torch.rand(512, generator=generator) * 2.0**-13, dtype)
    check_rounding(torch.rand(512, generator=generator) * 2.0**-22, dtype)
    check_rounding(65504.0 + 64 * torch.rand(512, generator=generator), dtype)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_what_the_format_has_stays(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, 7).to(torch.int16).view(dtype)
    info = torch.finfo(dtype)
    chosen = [0.0, -0.0, INF, -INF, NAN, info.max, info.min, info.tiny, -info.smallest_normal * info.eps]
    numbers = torch.cat((torch.tensor(chosen, dtype=dtype), every))
    found = check_rounding(numbers.to(F32), dtype)
    nan = numbers.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.int16), numbers[~nan].view(torch.int16))


@pytest.mark.parametrize(("dtype", "beyond"), [(F16, [65504.01, 65519.9, 65520.0, 65535.99]), (BF16, [3.4e38])])
def test_less_than_a_step_beyond_the_largest_number_is_never_infinite(dtype: torch.dtype, beyond: list[float]) -> None:
    values = torch.tensor(beyond * 8 + [-value for value in beyond])
    assert torch.equal(
        check_rounding(values, dtype).abs(), torch.full_like(values, torch.finfo(dtype).max, dtype=dtype)
    )


def test_from_a_step_beyond_the_largest_float16_on_it_is_infinite() -> None:
    values = torch.tensor([65536.0, 65537.0, 1e6, 3.4e38, -65536.0, -1e20])
    assert check_rounding(values, F16).isinf().all()


@pytest.mark.parametrize(("dtype", "digits"), [(F16, 13), (BF16, 16)])
def test_the_way_is_compared_with_the_threshold_to_the_last_bit(dtype: torch.dtype, digits: int) -> None:
    """With the bits that are cut off as large as those of the word it stays below, with one more it goes up."""
    seed, size = 11, 200
    cut = random.bits(seed, (size,)) >> (32 - digits)
    base = torch.tensor(1.5).view(torch.int32)
    at = check_rounding((base + cut.int()).view(F32), dtype, seed)
    above = check_rounding((base + cut.int() + 1).view(F32), dtype, seed)
    assert (at == 1.5).all()
    assert (above == 1.5 + torch.finfo(dtype).eps).all()


def test_the_smallest_float16_is_reached_beyond_the_threshold() -> None:
    seed, size, smallest = 12, 200, 2.0**-24
    threshold = ((random.bits(seed, (size,)) >> 9) * 2 + 1).float() * 2.0**-24
    at = threshold * smallest
    assert (check_rounding(at, F16, seed) == 0).all()
    assert (check_rounding(at.nextafter(torch.tensor(1.0)), F16, seed) == smallest).all()


@pytest.mark.parametrize(("name", "dtype"), [("adam", BF16), ("sgd", F16)])
def test_tensors_of_more_than_two_to_the_32_elements(name: str, dtype: torch.dtype) -> None:
    of = CASES[name](dtype)
    params = narrowed(of.params, dtype)
    # Chunks of 96 elements, so that the 2^32nd lies within one.
    for before in (2**32 // 96 * 96, 40_000_000 * 96, 2**31 // 96 * 96):
        kernels = module(name, "checked")
        seeds = torch.tensor(SEEDS)
        found = run(kernels, kernel(name, dtype, dtype), of, params, seeds=seeds, before=before, chunk_size=96)
        assert equal(found, after(of, params, SEEDS, before))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("finite", [True, None])
def test_sgd_without_momentum_and_steps_that_nobody_checked(momentum: float, finite: bool | None) -> None:
    of = replace(CASES["sgd"](F16), momentum=momentum)
    of.gradients[3][5:7] = torch.tensor([INF, NAN])
    params = narrowed(of.params, F16)
    seeds = torch.tensor(SEEDS)
    found = run(module("sgd", "checked"), kernel("sgd", F16, F16), of, params, seeds=seeds, finite=finite)
    assert equal(found, after(of, params, SEEDS))


@pytest.mark.parametrize(("name", "streams"), [("adam", 2), ("sgd", 1)])
def test_most_is_read_and_written_four_elements_at_a_time(name: str, streams: int) -> None:
    of = CASES[name](F32, sizes=[256])
    params = narrowed(of.params, BF16)
    kernels = module(name, "checked")
    for offset in (0, 1):
        found = run(
            kernels,
            kernel(name, F32, BF16),
            of,
            params,
            seeds=torch.tensor(SEEDS[5:]),
            chunk_size=256,
            offsets=[offset] * 5,
        )
        assert equal(found, after(of, params, SEEDS[5:]))
        packs = (256 - offset) // 4
        assert kernels.accesses[16] == 2 * streams * packs  # reads and writes of moments
        assert kernels.accesses[8] == 2 * packs  # and of parameters


@given(
    formats=st.sampled_from(KERNELS),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    offsets=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    chunk_size=st.sampled_from([8, 64, 256]),
    decay=st.sampled_from([0.0, 0.01]),
    scale=st.one_of(st.none(), st.floats(2.0**-10, 2.0**20, width=32)),
    seed=st.integers(-(2**63), 2**63 - 4),
)
def test_any_mix_of_sizes(
    formats: tuple[str, torch.dtype, torch.dtype],
    sizes: list[int],
    offsets: list[int],
    chunk_size: int,
    decay: float,
    scale: float | None,
    seed: int,
) -> None:
    name, gradient, dtype = formats
    of = replace(CASES[name](gradient, sizes), decay=decay, scale=scale)
    params = narrowed(of.params, dtype)
    seeds = [seed + row for row in range(len(sizes))]
    found = run(
        module(name, "fast"),
        kernel(*formats),
        of,
        params,
        seeds=torch.tensor(seeds),
        offsets=offsets,
        chunk_size=chunk_size,
    )
    assert equal(found, after(of, params, seeds))
