"""What a cast loses: planted losses, every 16-bit and 8-bit number against torch's casts, and the best scale."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.func import vmap

import fmp
from fmp.numerics.format_loss import FormatLoss, loss_in
from fmp.numerics.suggestion import suggest_scale
from tests.bits import same_bits

TARGETS = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
# The largest magnitudes that round to a finite number, by the standards' rule: to nearest, ties to even.
ROUNDS_DOWN_BELOW = {
    torch.float16: 65520.0,
    torch.bfloat16: 2.0**128 - 2.0**119,
    torch.float8_e4m3fn: math.nextafter(464.0, math.inf),
    torch.float8_e5m2: 61440.0,
}
targets = pytest.mark.parametrize("target", TARGETS, ids=str)


def counts(loss: FormatLoss) -> torch.Tensor:
    return torch.stack([loss.total, loss.zeroed, loss.denormalized, loss.overflowed], -1)


def by_cast(x: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Counts as torch's cast says, i64[n, 4], a row a number."""
    cast = x.to(target).to(torch.float64).abs()
    counted = x.isfinite() & (x != 0)
    too_large = ~cast.isfinite() | (x.double().abs() >= ROUNDS_DOWN_BELOW[target])  # newer casts to e4m3 saturate
    small = (cast > 0) & (cast < torch.finfo(target).tiny)
    return torch.stack([counted, counted & (cast == 0), counted & small, counted & too_large], -1).long()


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@targets
@pytest.mark.parametrize("source", TARGETS, ids=str)
def test_every_number_of_a_format_is_judged_as_its_cast_is(source, target):
    numbers = all_numbers(source)
    found = counts(vmap(lambda x: loss_in({"x": x}, target))(numbers))
    assert torch.equal(found.squeeze(1), by_cast(numbers.float(), target))


@targets
def test_ties_between_neighbors_and_what_is_next_to_them_round_as_in_the_cast(target):
    finite = all_numbers(target).float()
    finite = finite[finite.isfinite()].unique()
    ties = torch.cat([(finite[1:] / 2 + finite[:-1] / 2), torch.tensor([ROUNDS_DOWN_BELOW[target], 464.0])])
    x = torch.cat([ties, torch.nextafter(ties, torch.tensor(math.inf)), torch.nextafter(ties, torch.tensor(-math.inf))])
    found = counts(vmap(lambda x: loss_in({"x": x}, target))(x))
    assert torch.equal(found.squeeze(1), by_cast(x, target))


@targets
def test_float64_is_rounded_to_float32_first_as_torch_does(target):
    info = torch.finfo(target)
    limits = torch.tensor([info.tiny * info.eps / 2, info.tiny * (1 - info.eps / 2)], dtype=torch.float64)
    x = torch.cat([limits * (1 + sign * 2.0**-power) for sign in (-1, 1) for power in (20, 40, 50)])
    x = torch.cat([x, torch.tensor([1e-320, 1e300, 1e39, -1e-46], dtype=torch.float64)])
    found = counts(vmap(lambda x: loss_in({"x": x}, target))(x))
    assert torch.equal(found.squeeze(1), by_cast(x, target))


@targets
@given(scale=st.floats(2.0**-20, 2.0**40, width=32), seed=st.integers(0, 1000))
def test_the_scale_multiplies_in_float32_before_the_cast(target, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, generator=generator) * torch.exp2(torch.randint(-40, 10, (200,), generator=generator))
    expected = by_cast(x * scale, target).sum(0)
    assert torch.equal(counts(loss_in([x], target, scale)).squeeze(0), expected)
    assert torch.equal(counts(loss_in([x], target, torch.tensor(scale))).squeeze(0), expected)


def test_a_planted_underflow_is_measured():
    # Of 1000 numbers, 370 lie at or below 2^-25, which float16 rounds to zero.
    lost = torch.cat([torch.full((369,), 2.9e-8), torch.tensor([2.0**-25])])
    kept = torch.cat([torch.tensor([3e-8]), torch.full((629,), 1e-3)])
    w = torch.cat([lost, kept, torch.zeros(77), torch.tensor([math.inf, math.nan])])
    grads = {"w": w[torch.randperm(len(w))], "b": torch.ones(1000)}
    loss = loss_in(grads, "fp16")
    assert loss.names == ("b", "w")
    assert loss.total.tolist() == [1000, 1000]
    torch.testing.assert_close(loss.leaf_underflow, torch.tensor([0.0, 0.37]))
    torch.testing.assert_close(loss.leaf_subnormal, torch.tensor([0.0, 0.001]))
    torch.testing.assert_close(loss.underflow, torch.tensor(0.185))
    assert loss_in(grads, "bf16").underflow == loss_in(grads, "fp16", 1024.0).underflow == 0


@pytest.mark.parametrize("scale", [16, torch.tensor(16), torch.tensor(16.0), torch.tensor(16.0).half(), np.float32(16)])
def test_a_scale_may_be_any_number(scale):
    x = torch.tensor([2.0**-29, 2.0**-30, 1.0])
    assert counts(loss_in(x, "f16", scale)).tolist() == counts(loss_in(x, "f16", 16.0)).tolist() == [[3, 2, 0, 0]]


def test_a_planted_overflow_is_measured():
    loss = loss_in(torch.cat([torch.full((3,), 500.0), torch.full((5,), -40.0)]), "f8e4m3", 10.0)
    torch.testing.assert_close(loss.overflow, torch.tensor(0.375))
    torch.testing.assert_close(loss.leaf_overflow, torch.tensor([0.375]))
    assert loss.dtype == torch.float8_e4m3fn


def test_the_fractions_of_nothing_are_zero():
    for tree in ({}, None, {"ids": torch.arange(2), "none": None}, {"w": torch.zeros(3)}, [torch.ones(0)]):
        loss = loss_in(tree, torch.bfloat16)
        assert loss.underflow == loss.subnormal == loss.overflow == 0
        assert suggest_scale(tree, torch.bfloat16) == 1


def test_only_float64_loses_anything_in_float32():
    x = [torch.tensor([1e-50, 1e-40, 1.0, 1e39], dtype=torch.float64), torch.tensor([2.0**-149])]
    assert counts(loss_in(x, "f32")).tolist() == [[4, 1, 1, 1], [1, 0, 1, 0]]


def measures(tree: Any, scale: torch.Tensor) -> Any:
    return loss_in(tree, torch.float16, scale), suggest_scale(tree, torch.float16, margin=2)


def test_members_and_compiled_calls_measure_the_same():
    trees = {"w": torch.randn(3, 40) * torch.tensor([[1e-9], [1e-7], [1.0]]), "h": torch.randn(3, 7).half()}
    scales = torch.tensor([1.0, 16.0, 65536.0])
    apart = [measures(fmp.tree.map(lambda leaf: leaf[i], trees), scales[i]) for i in range(3)]
    loss, suggested = vmap(measures)(trees, scales)
    assert same_bits(counts(loss), torch.stack([counts(one) for one, _ in apart]))
    assert loss.overflow.shape == suggested.shape == (3,)
    assert loss.underflow[0] > 0.5 > loss.underflow[1]
    assert same_bits(suggested, torch.stack([scale for _, scale in apart]))
    compiled = torch.compile(vmap(measures), backend="aot_eager", fullgraph=True)(trees, scales)
    assert same_bits(compiled, (loss, suggested))


@pytest.mark.parametrize("compile", [False, True])
def test_they_are_aux_of_a_step(compile):
    def loss_fn(params, batch):
        products = {"products": params["w"] * batch}
        return products["products"].float().sum(), measures(products, torch.tensor(1.0))

    policy = fmp.opt_level("O2", half_dtype=torch.bfloat16)
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=policy, has_aux=True, compile=compile)
    _, metrics = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, 2.0**-30]))
    assert metrics.aux[0].underflow == 0.5
    assert metrics.aux[1] == 2.0**6  # 2^-30 becomes 2^-24, and no scale that leaves room for the 1 makes it normal


def best_power(tree: Any, target: str) -> int:
    """Finds the power by trying all: it loses least; of several, 1 if it is among them, else the smallest."""
    tried = {}
    for power in range(-126, 127):
        loss = loss_in(tree, target, 2.0**power)
        tried[power] = tuple(int(part.sum()) for part in (loss.overflowed, loss.zeroed, loss.denormalized))
    ties = [power for power, lost in tried.items() if lost == min(tried.values())]
    return 0 if 0 in ties else ties[0]


@settings(max_examples=10)  # each tries 253 powers of two
@given(
    seed=st.integers(0, 10_000),
    leaf_dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
@pytest.mark.parametrize("target", ["f16", "bf16", "f8e4m3", "f8e5m2", "f32"])
def test_no_power_of_two_loses_less_than_the_suggested_one(target, seed, leaf_dtype):
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    # Powers of two, and short mantissas, so that many numbers lie on a limit.
    mantissa = 1 + torch.randint(9, (10,), generator=generator) / 8 * torch.randint(2, (10,), generator=generator)
    exponent = torch.rand(10, generator=generator) * draw(90) + draw(160) - 120
    x = torch.ldexp(mantissa.double(), exponent.int()).to(leaf_dtype)
    special = torch.tensor([math.inf, math.nan, 0.0], dtype=leaf_dtype)
    tree = {"x": -x[:5], "y": torch.cat([x[5:], special[: draw(4)]]), "ids": torch.arange(3)}
    suggested = suggest_scale(tree, target)
    assert suggested.dtype == torch.float32
    assert suggested.log2().item() == best_power(tree, target)


def test_head_room_is_kept():
    def suggested(*numbers: float, margin: int = 0) -> float:
        return suggest_scale({"w": torch.tensor(numbers)}, torch.float16, margin=margin).item()

    assert suggested(2.0**-38, 1.0) == 2.0**14  # 2^-24 is the smallest number above zero; 2^15 would do as well
    assert suggested(2.0**-38, 1.0, margin=1) == 2.0**14
    assert suggested(2.0**-38, 1.0, margin=2) == 1.0  # it is lost anyway
    assert suggested(1e-5, 1.0) == 8.0  # nothing is subnormal any more
    assert suggested(0.5, 1.0) == 1.0
    assert suggested(1e6, 1.0) == 2.0**-14  # 1 overflows; this is the smallest that keeps all normal
    assert suggested(1e6, 2.0**-20) == 2.0**-4


def test_a_few_numbers_decide_nothing():
    body, noise = torch.full((99_990,), 2.0**-20), torch.full((10,), 2.0**-36)
    grads = {"w": body, "noise": noise, "zeros": torch.zeros(5_000), "one": torch.ones(1)}
    assert suggest_scale(grads, "f16") == 2.0**6  # all of the body is normal, and 10 of 100,001 numbers become zero
    assert suggest_scale(grads, "f16", tolerance=0.0) == 2.0**12
    assert suggest_scale(grads, "f16", tolerance=9e-5) == 2.0**12  # 10 are too many
    assert suggest_scale({**grads, "one": torch.full((1,), 2.0**15)}, "f16") == 1  # a single overflow counts
    # All of the body is lost anyway, and the one that is left counts.
    assert suggest_scale({**grads, "one": torch.full((1,), 2.0**40)}, "f16") == 2.0**-54


@given(seed=st.integers(0, 1000), tolerance=st.floats(0.0, 0.4))
def test_the_smallest_power_within_the_tolerance_is_taken(seed, tolerance):
    generator = torch.Generator().manual_seed(seed)
    x = torch.exp2(torch.randn(300, generator=generator) * 6 - 20)

    def kept(power: int) -> tuple[int, int]:
        loss = loss_in(x, "f16", 2.0**power)
        nonzero = 300 - int(loss.zeroed)
        return nonzero, nonzero - int(loss.denormalized)

    powers = [power for power in range(-20, 60) if not loss_in(x, "f16", 2.0**power).overflow]
    nonzero, normal = kept(powers[-1])
    within = []
    for power in powers:
        if nonzero - kept(power)[0] <= tolerance * nonzero and normal - kept(power)[1] <= tolerance * normal:
            within.append(power)
    assert suggest_scale(x, "f16", tolerance=tolerance).log2().item() == max(0, min(within))


def test_what_no_power_helps_does_not_count():
    hopeless = torch.tensor([1e200, 1e-300, 2.0**-30, 1.0], dtype=torch.float64)
    assert suggest_scale([hopeless], torch.float16) == 2.0 ** best_power([hopeless], "f16")
    assert suggest_scale([torch.tensor([math.inf, math.nan])], torch.float16) == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: loss_in({}, torch.int8), ValueError, "int8 is no format to cast to"),
        (lambda: loss_in({}, "f16", 0.0), ValueError, "scale must be positive and finite, got 0.0"),
        (lambda: loss_in({}, "f16", math.inf), ValueError, "scale must be positive and finite, got inf"),
        (lambda: loss_in({}, "f16", True), TypeError, "scale must be a number or a scalar tensor, got True"),
        (lambda: loss_in({}, "f16", torch.ones(2)), TypeError, r"real scalar tensor, got f32\[2\]"),
        (lambda: loss_in({}, "f16", fmp.StaticLossScale(8.0)), TypeError, "a StaticLossScale; pass its .loss_scale"),  # type: ignore[arg-type]
        (lambda: suggest_scale({}, "f64"), ValueError, "f64 is no format to cast to"),
        (lambda: suggest_scale({}, "f16", margin=-1), ValueError, "margin must lie between 0 and 126, got -1"),
        (lambda: suggest_scale({}, "f16", margin=1.0), TypeError, "margin must be an int, got 1.0"),  # type: ignore[arg-type]
        (lambda: suggest_scale({}, "f16", tolerance=1.0), ValueError, "from 0 to below 1, got 1.0"),
        (lambda: suggest_scale({}, "f16", tolerance="0"), TypeError, "tolerance must be a fraction"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
