"""The optimizers on parameters in the form `remainder`, against fmp.optim between merge and split, bit for bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from fmp.master import remainder
from tests.kernels.forms import CASES, OFFSETS, Case, Leaves, Step, equal, expected, run, state_of
from tests.kernels.harness import NAMES, in_every_order, module, needs_executor

pytestmark = needs_executor
F32, BF16 = torch.float32, torch.bfloat16
KERNELS = [(name, gradient) for name in ("adam", "sgd") for gradient in (F32, BF16)]
INF, NAN = float("inf"), float("nan")
# Beyond the largest bfloat16 from 0x7f7f8000 on; between two neighbors at 0x...8000.
SPECIAL = [0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x00000001, 0x00008000]
SPECIAL += [0x007FFFFF, 0x00800000, 0x0000FFFF, 0x00007FFF, 0x00000000, 0x7F7F0000, 0x3F800000]


def split(full: Leaves) -> tuple[Leaves, Leaves]:
    params, rests = zip(*(remainder.split(leaf, BF16, None) for leaf in full), strict=True)
    return list(params), list(rests)


def merge(params: Leaves, rests: Leaves) -> Leaves:
    return list(map(remainder.merge, params, rests))


def kernel(name: str, gradient: torch.dtype) -> str:
    return f"{name}_{NAMES[gradient]}_remainder"


def at_rest(of: Case) -> Case:
    """Returns a case without gradients and moments."""
    for column in (of.gradients, *state_of(of)):
        for leaf in column:
            leaf.zero_()
    return of


def after(of: Case, full: Leaves) -> Step:
    params, state = expected(of, full)
    return Step(*split(params), state)


@pytest.mark.parametrize(("name", "gradient"), KERNELS)
def test_every_format_in_every_order(name: str, gradient: torch.dtype) -> None:
    of = CASES[name](gradient)
    params, rests = split(of.params)
    for kernels in in_every_order(name):
        assert equal(run(kernels, kernel(name, gradient), of, params, rests=rests), after(of, of.params))


@pytest.mark.parametrize(("name", "gradient"), KERNELS)
def test_a_skipped_step_leaves_every_byte(name: str, gradient: torch.dtype) -> None:
    of = CASES[name](gradient)
    of.gradients[3][5] = NAN
    params, rests = split(of.params)
    for kernels in in_every_order(name):
        found = run(kernels, kernel(name, gradient), of, params, rests=rests, finite=False)
        assert equal(found, Step(params, rests, state_of(of)))


@pytest.mark.parametrize(("name", "gradient"), KERNELS)
@pytest.mark.parametrize("offsets", OFFSETS)
def test_slices_begin_anywhere(name: str, gradient: torch.dtype, offsets: tuple[int, ...]) -> None:
    of = CASES[name](gradient)
    params, rests = split(of.params)
    found = run(module(name, "checked"), kernel(name, gradient), of, params, rests=rests, offsets=offsets)
    assert equal(found, after(of, of.params))


@pytest.mark.parametrize("name", CASES)
def test_special_numbers_stay_what_they_are_without_a_gradient(name: str) -> None:
    bits = torch.tensor(SPECIAL, dtype=torch.int32)
    specials = torch.cat((bits, bits | -(2**31))).view(F32)
    of = replace(at_rest(CASES[name](F32, sizes=[len(specials)])), decay=0.0)
    params, rests = split([specials])
    found = run(module(name, "checked"), kernel(name, F32), of, params, rests=rests)
    assert equal(found, after(of, [specials]))
    # Adding a step of 0 makes 0 of -0.
    assert torch.equal(merge(found.params, found.rests)[0], specials)


@pytest.mark.parametrize("name", CASES)
def test_numbers_go_beyond_the_largest_bfloat16_and_return(name: str) -> None:
    largest = torch.finfo(F32).max
    of = at_rest(CASES[name](F32, sizes=[6]))
    of = replace(of, learning_rate=2.0**120, decay=0.0, scale=None, clip=None)
    of.gradients[0].copy_(torch.tensor([-1.0, 1.0, 1.0, -1.0, INF, NAN]))
    params, rests = split([torch.tensor([3.385e38, -3.385e38, largest, -largest, 1.0, 1.0])])
    assert params[0].isinf().tolist() == [False, False, True, True, False, False]
    found = run(module(name, "checked"), kernel(name, F32), of, params, rests=rests)
    assert equal(found, after(of, merge(params, rests)))
    assert found.params[0].isinf().tolist()[:4] == [True, True, False, False]
    assert merge(found.params, found.rests)[0][:4].isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_any_two_halves_are_read_and_nan_leaves_no_rest(name: str) -> None:
    sizes = [400, 3]
    of = CASES[name](F32, sizes=sizes)
    generator = torch.Generator().manual_seed(1)
    halves = [[torch.randint(-(2**15), 2**15, (size,), generator=generator).short() for size in sizes] for _ in "hl"]
    halves[0][0][:8] = torch.tensor([0x7F80, 0x7F80, -0x80, -0x80, 0x7FFF, -1, 0, -0x8000])
    halves[1][0][:8] = torch.tensor([-1, 0, -0x8000, 1, 0x7FFF, -0x8000, -1, -1])
    params, rests = [half.view(BF16) for half in halves[0]], halves[1]
    found = run(module(name, "checked"), kernel(name, F32), of, params, rests=rests)
    assert equal(found, after(of, merge(params, rests)))
    nan = found.params[0].isnan()
    assert nan.any()
    assert not found.rests[0][nan].any()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("finite", [True, None])
def test_sgd_without_momentum_and_steps_that_nobody_checked(momentum: float, finite: bool | None) -> None:
    of = replace(CASES["sgd"](BF16), momentum=momentum)
    of.gradients[3][5:7] = torch.tensor([INF, NAN])
    params, rests = split(of.params)
    found = run(module("sgd", "checked"), kernel("sgd", BF16), of, params, rests=rests, finite=finite)
    assert equal(found, after(of, of.params))


@pytest.mark.parametrize(("name", "streams"), [("adam", 2), ("sgd", 1)])
def test_most_is_read_and_written_four_elements_at_a_time(name: str, streams: int) -> None:
    of = CASES[name](F32, sizes=[256])
    params, rests = split(of.params)
    kernels = module(name, "checked")
    for offset in (0, 1):
        found = run(kernels, kernel(name, F32), of, params, rests=rests, chunk_size=256, offsets=[offset] * 5)
        assert equal(found, after(of, of.params))
        packs = (256 - offset) // 4
        assert kernels.accesses[16] == 2 * streams * packs  # reads and writes of moments
        assert kernels.accesses[8] == 4 * packs  # and of both halves


@pytest.mark.parametrize("name", CASES)
def test_tensors_of_more_than_two_to_the_31_elements(name: str) -> None:
    of = CASES[name](BF16)
    params, rests = split(of.params)
    before = 20_000_000 * 128
    found = run(module(name, "checked"), kernel(name, BF16), of, params, rests=rests, before=before)
    assert equal(found, after(of, of.params))


@given(
    formats=st.sampled_from(KERNELS),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    offsets=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    chunk_size=st.sampled_from([8, 64, 256]),
    decay=st.sampled_from([0.0, 0.01]),
    scale=st.one_of(st.none(), st.floats(2.0**-10, 2.0**20, width=32)),
)
def test_any_mix_of_sizes(
    formats: tuple[str, torch.dtype],
    sizes: list[int],
    offsets: list[int],
    chunk_size: int,
    decay: float,
    scale: float | None,
) -> None:
    name, gradient = formats
    of = replace(CASES[name](gradient, sizes), decay=decay, scale=scale)
    params, rests = split(of.params)
    kernels = module(name, "fast")
    found = run(kernels, kernel(*formats), of, params, rests=rests, offsets=offsets, chunk_size=chunk_size)
    assert equal(found, after(of, of.params))
