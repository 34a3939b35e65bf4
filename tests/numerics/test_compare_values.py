"""What `fmp.numerics.compare` takes for equal, and what not."""

import collections
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import fmp
from fmp.numerics import compare as typed_compare, differences

compare: Any = getattr(typed_compare, "compare", typed_compare)
value_difference: Any = differences.value_difference
ONES = torch.ones(4)


@dataclasses.dataclass
class Output:
    loss: Any


class Options(dict):
    pass


class Sealed:
    pass


WRAPS = {
    "number": lambda value: value.item(),
    "numbers": lambda value: {"loss": [value.item()]},
    "dataclass": Output,
    "dict of its own class": lambda value: Options(loss=value),
    "mapping": lambda value: collections.UserDict(loss=value),
    "numpy array": lambda value: value.numpy(),
    "numpy number": lambda value: value.numpy()[()],
    "text": lambda value: str(value.item()),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_results_of_every_kind_are_compared(wrap):
    def of(factor):
        return lambda x: WRAPS[wrap]((x * factor).sum())

    assert compare(of(2), of(2), ONES).is_equal
    comparison = compare(of(2), of(3), ONES)
    assert not comparison.is_equal
    (leaf,) = comparison.leaves
    assert leaf.relative_error == (math.inf if wrap == "text" else 0.5)
    assert leaf.path in str(comparison)


def test_what_nobody_can_compare_is_never_equal():
    comparison = compare(lambda x: {"a": x, "b": Sealed()}, lambda x: {"a": x, "b": Sealed()}, ONES)
    assert (comparison["result/a"].is_equal, comparison.is_equal) == (True, False)
    assert comparison.not_compared == ("result/b",)
    assert "not compared: result/b" in str(comparison)
    same = Sealed()
    assert compare(lambda: same, lambda: same).is_equal
    assert compare(lambda: None, lambda: None).is_equal
    assert not compare(lambda: None, lambda: 1.0).is_equal
    twice = compare(lambda x: {"a/b": x, "a": {"b": x}}, lambda x: {"a/b": x, "a": {"b": x * 2}}, ONES)
    assert [leaf.is_equal for leaf in twice.leaves] != [True, True]
    assert len(twice.leaves) == 2


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_whole_numbers_are_the_same_only_if_they_are(a, b):
    for x, y in ((a, b), (a, a), (a, max(-(2**63), a - 1))):
        for found in (value_difference("n", x, y), value_difference("n", torch.tensor([x]), torch.tensor([y]))):
            assert found.is_equal == (x == y)
            if x != y and x:
                assert found.relative_error == pytest.approx(abs(x - y) / abs(x), rel=1e-9)


def test_large_whole_numbers():
    found = compare(lambda x: x * 2**60, lambda x: x * 2**60 + 1, torch.tensor([1]))["result"]
    assert (found.is_equal, found.relative_error) == (False, 2.0**-60)
    unsigned = torch.tensor([2**63, 2**64 - 1], dtype=torch.uint64)
    assert value_difference("n", unsigned, unsigned.clone()).is_equal
    assert not value_difference("n", unsigned, torch.tensor([2**63, 2**64 - 2], dtype=torch.uint64)).is_equal
    assert not value_difference("n", unsigned, unsigned.view(torch.int64)).is_equal
    assert not value_difference("n", 10**400, 10**400 + 1).is_equal
    assert value_difference("n", 1, 10**400).relative_error == math.inf
    assert value_difference("n", True, 1.0).is_equal
    assert value_difference("n", math.nan, math.nan).is_equal
    assert value_difference("n", 1j, 2j).relative_error == 1.0
    assert value_difference("n", np.float32(0.5), torch.tensor(0.5)).is_equal


def test_the_ends_of_float64():
    largest = torch.finfo(torch.float64).max
    one = torch.ones(3, dtype=torch.float64)
    assert not compare(lambda x: x * largest, lambda x: x * math.inf, one[0]).is_equal
    comparison = compare(lambda x: x * 1.7e308, lambda x: x * -1.7e308, one)
    found = comparison["result"]
    assert (found.relative_error, found.cosine) == (2.0, pytest.approx(-1.0))
    assert comparison.parting.op == "mul"
    tiny = torch.tensor([5e-324], dtype=torch.float64)
    assert not value_difference("x", torch.cat([one, tiny]), torch.cat([one, tiny * 0])).is_equal
    assert value_difference("x", torch.eye(2).to_sparse(), torch.eye(2)).is_equal
    assert not value_difference("x", torch.tensor([largest, 1.0]), torch.tensor([largest, math.nan])).is_equal


# Steps


def loss_fn(params, batch):
    return (batch @ params["w"]).float().square().mean()


def step_of(level, optimizer=None, **options):
    policy = fmp.opt_level(level, half_dtype=torch.float16, **options.pop("overrides", {}))
    return fmp.train_step(loss_fn, optimizer or fmp.optim.adamw(1e-3), policy=policy, **options)


PARAMS = {"w": torch.randn(8, 4, generator=torch.Generator().manual_seed(0))}
BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("levels", [("O1", "O2"), ("O2", "O1"), ("O0", "O2"), ("O2", "O3")], ids="-".join)
def test_what_a_step_does_to_skip_is_not_paired(levels):
    a, b = [step_of(level, loss_scale=64.0) for level in levels]
    assert compare(a, b, a.init(PARAMS), BATCH).parting is None
    changed = step_of(levels[1], fmp.optim.adamw(1e-3, b2=0.9), loss_scale=64.0)
    found = compare(a, changed, a.init(PARAMS), BATCH).parting
    assert found.lines[0].startswith("fmp/optim/")


def test_microbatches_are_not_paired_with_a_whole_batch():
    a, b = step_of("O2", loss_scale=64.0), step_of("O2", loss_scale=64.0, accumulate=2)
    for pair in ((a, b), (b, a)):
        comparison = compare(*pair, pair[0].init(PARAMS), BATCH)
        assert comparison.parting is None
        assert comparison.op_counts[0] == comparison.op_counts[1] > 5
        assert comparison["update/w"].relative_error < 0.1
    changed = step_of("O2", fmp.optim.adamw(1e-3, b2=0.9), loss_scale=64.0, accumulate=2)
    assert compare(a, changed, a.init(PARAMS), BATCH).parting.lines[0].startswith("fmp/optim/")


@pytest.mark.parametrize(
    ("makes", "says"),
    [
        (step_of("O2"), "params/w is f16\\[8,4\\], and f32\\[8,4\\] in one of step_a"),
        (step_of("O1", fmp.optim.sgd(0.1), loss_scale="none"), "opt_state/"),
        (step_of("O1", loss_scale="dynamic"), "loss_scale/"),
        (step_of("O1", ema=0.9, loss_scale="none"), "ema/w is f32\\[8,4\\], and None"),
    ],
    ids=["dtype", "optimizer", "scale", "ema"],
)
def test_a_state_of_another_step_is_refused(makes, says):
    a = step_of("O1", loss_scale="none")
    state = makes.init(PARAMS)
    with pytest.raises(ValueError, match=f"step_a cannot use this state.*{says}"):
        compare(a, makes, state, BATCH)
    assert compare(makes, makes, state, BATCH).is_equal


def test_a_state_with_masters_of_another_form_is_refused():
    kahan = fmp.train_step(
        loss_fn, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2", half_dtype="bf16", master_weights="kahan")
    )
    f32 = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2", half_dtype="bf16"))
    for a, b in ((kahan, f32), (f32, kahan)):
        with pytest.raises(ValueError, match="step_a cannot use this state"):
            compare(a, b, b.init(PARAMS), BATCH)


def test_steps_that_record_are_compared_as_steps():
    a, b = [fmp.numerics.record(step_of(level, loss_scale=64.0)) for level in ("O0", "O2")]
    comparison = compare(a, b, a.init(a.step.init(PARAMS)), BATCH)
    assert comparison.parting is None
    assert 0 < comparison["params/w"].relative_error < 0.01


def test_random_generators_start_alike_in_both():
    closed_over = torch.Generator().manual_seed(0)

    def noisy(x, generator):
        return x + torch.rand(4, generator=generator) + torch.rand(4, generator=closed_over) + torch.rand(4)

    given_one = torch.Generator().manual_seed(1)
    assert compare(noisy, noisy, ONES, given_one).is_equal
    after_both = given_one.get_state()
    noisy(ONES, given_one.manual_seed(1))
    assert torch.equal(after_both, given_one.get_state())
    step = fmp.train_step(lambda p, b: (p * noisy(b, given_one)).sum(), fmp.optim.sgd(0.1))
    assert compare(step, step, step.init(ONES), ONES).is_equal


def test_the_worst_leaves_come_first():
    def first(x):
        return {"near": x, "turned": x, "equal": x, "count": torch.tensor(3)}

    def second(x):
        return {"near": x * 1.001, "turned": -x, "equal": x * 1, "count": torch.tensor(4)}

    found = compare(first, second, torch.ones(3))
    paths = {by: [leaf.path for leaf in found.worst(by)] for by in ("relative_error", "ulps", "cosine")}
    assert paths["relative_error"] == ["result/turned", "result/count", "result/near"]
    assert paths["ulps"] == ["result/turned", "result/near", "result/count"]  # whole numbers have no such units
    assert paths["cosine"][0] == "result/turned"
    lines = found.table("ulps", rows=1).splitlines()
    assert lines[0] == "1 of 4 leaves are equal"
    assert lines[1].split() == ["relative", "error", "cosine", "ulps", "leaf", "a", "b"]
    assert "result/turned" in lines[2]
    assert lines[3:] == ["and 2 more, which differ less by ulps"]
    assert str(found).startswith(found.table())
    with pytest.raises(ValueError, match="by must be one of 'relative_error', 'ulps', 'cosine', got 'ulp'"):
        found.worst("ulp")
