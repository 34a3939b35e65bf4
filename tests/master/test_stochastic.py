"""The form `stochastic`: the mean of the rounded numbers is the number; the chance is a function of seed and place."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

import fmp
from fmp import master, random
from fmp.master import round_stochastically
from tests.bits import same_bits
from tests.host import NoHostSync
from tests.master.battery import HALVES
from tests.master.numbers import every_high_half, from_words, neighbors, words

INF, NAN = float("inf"), float("nan")
COUNT = 2**16


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_goes_to_a_neighbor_and_both_are_taken(dtype):
    full = every_high_half()
    full = full[full.abs() < torch.finfo(dtype).max]
    found = round_stochastically(full, dtype, seed=3)
    below, above = neighbors(full, dtype)
    assert found.dtype == dtype
    assert ((found.double() == below) | (found.double() == above)).all()
    between = below != above
    assert 0.2 < (found.double() == above)[between].double().mean() < 0.8


@given(words, st.integers(0, 2**40))
def test_bfloat16_goes_up_where_a_random_half_is_below_the_lost_half(values, seed):
    full = from_words(values)
    found = round_stochastically(full, torch.bfloat16, seed)
    low, high = full.view(torch.int32) & 0xFFFF, full.view(torch.int32) & -0x10000
    up = (random.bits(seed, full.shape) >> 16) < low
    expected = torch.where(up, high + 0x10000, high).view(torch.float32)
    usual = full.abs() < torch.finfo(torch.bfloat16).max
    assert torch.equal(found[usual].float(), expected[usual])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("fraction", [2.0**-10, 0.25, 0.5, 0.7, 1 - 2.0**-10])
@pytest.mark.parametrize("base", [1.0, -1.0, 3.0 * 2.0**-20, 2.0**-30])
def test_the_mean_is_the_number(dtype, fraction, base):
    start = torch.tensor([base]).to(dtype).float()
    below, above = (end.item() for end in neighbors(torch.nextafter(start, torch.tensor([INF])), dtype))
    value = torch.tensor(below + fraction * (above - below))
    chance = (value.double().item() - below) / (above - below)
    up = (round_stochastically(value.expand(COUNT), dtype, seed=11).double() == above).double().mean().item()
    assert up == pytest.approx(chance, abs=5 * math.sqrt(chance * (1 - chance) / COUNT))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_the_format_has_does_not_change(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    found = round_stochastically(every.float(), dtype, seed=5)
    number = ~every.isnan()
    assert same_bits(found[number], every[number])
    assert found[~number].isnan().all()


def test_the_largest_numbers():
    largest = torch.finfo(torch.float32).max
    full = torch.tensor([largest, -largest, 3.39e38, INF, -INF, NAN]).repeat_interleave(1000)
    found = round_stochastically(full, torch.bfloat16, seed=1).view(-1, 1000).float()
    limit = torch.finfo(torch.bfloat16).max
    assert (found[0] == limit).all()
    assert (found[1] == -limit).all()
    assert set(found[2].unique().tolist()) <= {limit, limit - 2.0**120}
    assert (found[3] == INF).all()
    assert (found[4] == -INF).all()
    assert found[5].isnan().all()


def test_the_largest_numbers_in_float16():
    full = torch.tensor([65504.0, 65519.0, 65535.0, 65536.0, 1e30, -65535.0, -65536.0]).repeat_interleave(1000)
    found = round_stochastically(full, torch.float16, seed=1).view(7, 1000)
    expected = torch.tensor([65504.0, 65504.0, 65504.0, INF, INF, -65504.0, -INF])
    assert torch.equal(found.float(), expected.unsqueeze(1).expand(7, 1000))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_shard_is_rounded_as_within_the_whole(dtype):
    full = torch.randn(40, 30)
    whole = round_stochastically(full, dtype, seed=9)
    index = torch.arange(1200).view(40, 30)
    for rows, columns in ((slice(0, 10), slice(None)), (slice(None), slice(7, 19))):
        shard = round_stochastically(full[rows, columns], dtype, seed=9, index=index[rows, columns])
        assert same_bits(shard, whole[rows, columns].contiguous())


def test_a_permuted_layout_is_rounded_by_place():
    full = torch.randn(40, 30)
    whole = round_stochastically(full, torch.bfloat16, seed=9)
    assert same_bits(round_stochastically(full.t().contiguous().t(), torch.bfloat16, seed=9), whole)


def test_members_under_vmap_are_rounded_as_alone():
    full, seeds = torch.randn(3, 50), torch.arange(3)
    mapped = torch.func.vmap(lambda values, seed: round_stochastically(values, torch.bfloat16, seed))(full, seeds)
    for index in range(3):
        assert same_bits(mapped[index], round_stochastically(full[index], torch.bfloat16, seeds[index]))


def test_leaves_of_a_tree_and_steps_are_rounded_independently():
    full = {"a": {"b": torch.full((COUNT,), 1.0 + 2.0**-8)}, "a/b": torch.full((COUNT,), 1.0 + 2.0**-8)}
    params = fmp.cast(full, torch.bfloat16)
    none = master.init(params, form="stochastic")
    split = lambda seed: master.split(full, params, none, form="stochastic", seed=seed)[0]
    first, second = split(1), split(2)
    draws = [draw > 1 for draw in (first["a"]["b"], first["a/b"], second["a"]["b"])]
    for index, one in enumerate(draws):
        for other in draws[:index]:
            assert (one == other).double().mean().item() == pytest.approx(0.5, abs=5 / 2 / math.sqrt(COUNT))
    assert same_bits(first, split(torch.tensor(1)))
    with_more = master.split({**full, "A": full["a/b"]}, {**params, "A": params["a/b"]}, {**none, "A": None},
                             form="stochastic", seed=1)[0]  # fmt: skip
    assert same_bits({key: with_more[key] for key in first}, first)


def test_without_a_seed_it_rounds_to_nearest():
    full = every_high_half()[:1000]
    params = full.to(torch.bfloat16)
    assert same_bits(master.split(full, params, None, form="stochastic"), (params, None))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_pass_straight_through(dtype):
    x = torch.tensor([0.0, -0.0, 1.0, 0.3, -1e-3, 1e-30])
    weights = torch.arange(6.0)
    rounded = lambda x: (round_stochastically(x, dtype, seed=0).float() * weights).sum()
    assert same_bits(torch.func.grad(rounded)(x), weights)
    assert torch.func.jvp(rounded, (x,), (torch.ones(6),))[1] == 15.0


def test_compiled_and_without_a_host_sync():
    x, seed = torch.randn(100), torch.tensor(4)
    call = lambda x, seed: round_stochastically(x, torch.bfloat16, seed)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(x, seed), call(x, seed))
    with NoHostSync():
        call(x, seed)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (torch.ones(2, dtype=torch.float64), torch.bfloat16),
        (torch.ones(2), torch.float32),
        (torch.ones(2), torch.int16),
    ],
)
def test_other_formats_are_refused(values, dtype):
    with pytest.raises(TypeError, match="stochastic rounding is from f32 to bf16 or f16"):
        round_stochastically(values, dtype, seed=0)


def test_a_gradient_that_nobody_asks_for_changes_no_bit():
    full = every_high_half()
    for dtype in HALVES:
        plain = round_stochastically(full, dtype, seed=2)
        assert same_bits(
            torch.func.vmap(lambda values, dtype=dtype: round_stochastically(values, dtype, 2))(full[None])[0], plain
        )
        assert same_bits(round_stochastically(full.clone().requires_grad_(), dtype, seed=2).detach(), plain)


def test_a_shard_is_rounded_as_within_the_whole_leaf():
    full = {"a": torch.rand(5, 3), "b": torch.rand(4)}
    params = fmp.cast(full, torch.bfloat16)
    nothing = {"a": None, "b": None}
    whole, _ = master.split(full, params, nothing, form="stochastic", seed=7)
    part, kept = {"a": full["a"][2:4], "b": full["b"]}, {"a": params["a"][2:4], "b": params["b"]}
    found, _ = master.split(part, kept, nothing, form="stochastic", seed=7, offsets={"a": 6, "b": 0})
    assert same_bits(found["a"], whole["a"][2:4])
    assert same_bits(found["b"], whole["b"])
    assert not same_bits(master.split(part, kept, nothing, form="stochastic", seed=7)[0]["a"], whole["a"][2:4])
