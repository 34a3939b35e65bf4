"""Looking into steps that measure what they do, and that give their state away."""

import math
from typing import Any

import pytest
import torch

import fmp
from fmp.numerics import compare as typed_compare, nonfinite

find_nonfinite: Any = nonfinite.find_nonfinite
compare: Any = getattr(typed_compare, "compare", typed_compare)


def told(fn, *args) -> Any:
    report = find_nonfinite(fn, *args)
    return None if report is None else (report.level, report.kind, report.op or report.leaf)


def watched(**options):
    watch = fmp.numerics.watch_gradients()
    tx = options.pop("wrap", lambda tx: tx)(fmp.optim.chain(watch, fmp.optim.sgd(0.1)))
    return fmp.train_step(lambda p, b: (p["a"] * b).sum() + p["b"].sum(), tx, **options)


def params():
    return {"a": torch.ones(4), "b": torch.ones(4)}


WRAPS = {
    "alone": lambda tx: tx,
    "frozen": lambda tx: fmp.optim.chain(fmp.optim.freeze({"a": False, "b": True}), tx),
    "accumulated": lambda tx: fmp.optim.accumulate(tx, 2),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_is_not_measured_yet_is_no_mistake(wrap):
    step, x = watched(wrap=WRAPS[wrap], loss_scale="dynamic"), torch.ones(4)
    recorded = fmp.numerics.record(step)
    carry = recorded.init(step.init(params()))
    assert told(step, carry[0], x) is None
    assert told(recorded, carry, x) is None
    skipped, metrics = recorded(carry, x * math.inf)
    assert metrics.skipped
    assert told(recorded, skipped, x) is None
    report = find_nonfinite(recorded, carry, x / 0)
    assert (report.level, report.leaf) == ("error", "batch")


def donating(p, b):
    return (p["a"] * b).sum()


STEP = fmp.train_step(donating, fmp.optim.adamw(0.1), donate=True)


@pytest.mark.parametrize("find", [find_nonfinite, lambda fn, *args: compare(fn, fn, *args)])
def test_a_donating_step_leaves_the_state_wherever_it_is(find):
    x = torch.ones(4)

    def wrapped(state, batch):
        return STEP(state, batch)

    state = STEP.init(params())
    recorded, of_wrapped = fmp.numerics.record(STEP), fmp.numerics.record(wrapped)
    carry, other = recorded.init(STEP.init(params())), of_wrapped.init(STEP.init(params()), x)
    before = fmp.tree.map(lambda leaf: None if leaf is None else leaf.clone(), (state, carry, other))
    find(wrapped, state, x)
    find(recorded, carry, x)
    find(of_wrapped, other, x)
    now = fmp.tree.leaves((state, carry, other))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(fmp.tree.leaves(before), now, strict=True))
    calls: list[Any] = [(wrapped, state), (recorded, carry), (of_wrapped, other)]
    for fn, given_state in calls:
        fn(given_state, x)
