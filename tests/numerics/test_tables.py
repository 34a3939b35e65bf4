"""What prints itself as a table, and what still is a repr."""

import pytest
import torch
from torch.func import vmap

import fmp
from fmp.numerics import histogram, loss_in, lost_updates
from tests.numerics.recorded_steps import batches, make_step, params, run

GRADS = {"w": torch.tensor([1e-9, 1e-8, 1e-6, 1.0, 0.0]), "b": torch.tensor([1e5, 1.0])}


def test_a_loss_prints_the_leaves_that_lose_most_first():
    assert str(loss_in(GRADS, "f16")).splitlines() == [
        "lost in f16:",
        "leaf  nonzero  zero %  subnormal %  overflow %",
        "w           4      50           25           0",
        "b           2       0            0          50",
        "all         6    33.3         16.7        16.7",
    ]


def test_a_histogram_prints_where_the_numbers_lie():
    assert str(histogram({"w": torch.tensor([2.0**-9, 0.3, 0.4, 5.0, 0.0]), "b": torch.zeros(3)})).splitlines() == [
        "leaf  nonzero  from  median   to  zeros  inf  NaN",
        "b           0                         3    0    0",
        "w           4  2^-9    2^-2  2^2      1    0    0",
        "all         4  2^-9    2^-2  2^2      4    0    0",
    ]


def test_lost_updates_print_how_many():
    weights = {"w": torch.ones(4, dtype=torch.bfloat16)}
    printed = str(lost_updates(weights, {"w": torch.tensor([1e-3, 2e-3, 0.0, 0.5])}))
    assert [line.split() for line in printed.splitlines()] == [
        ["leaf", "updates", "lost", "lost", "%"],
        ["w", "3", "2", "66.7"],
        ["all", "3", "2", "66.7"],
    ]


MEASURES = {
    "loss": lambda tree: loss_in(tree, "f16"),
    "histogram": histogram,
    "updates": lambda tree: lost_updates(tree, tree),
}


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_members_print_together_and_what_has_no_values_as_before(measure):
    x = torch.randn(3, 4)
    inside: list[str] = []

    def of_member(row):
        found = measure({"w": row})
        inside.append(str(found))
        return found

    assert str(vmap(of_member)(x)) == str(measure({"w": x}))
    assert inside[0].startswith(type(measure({})).__name__ + "(")
    assert repr(measure({"w": x})).startswith(type(measure({})).__name__ + "(")
    assert str(measure({"w": x.to("meta")})).startswith(type(measure({})).__name__ + "(")
    assert str(measure({})).splitlines()[-1].split()[:2] == ["all", "0"]


def test_of_many_leaves_twenty_are_shown():
    printed = str(loss_in({f"{index:02}": torch.full((2,), 2.0**-index) for index in range(30)}, "f16")).splitlines()
    assert [line.split()[0] for line in printed[2:7]] == ["25", "26", "27", "28", "29"]
    assert printed[-2] == "and 10 more leaves, which lose no more"
    assert len(printed) == 24


def test_a_history_prints_its_first_and_last_step():
    _, history, _ = run(make_step(loss_scale=8.0), make_step(loss_scale=8.0).init(params()), batches(5), length=3)
    lines = str(history).splitlines()
    assert lines[0] == "5 steps, of which the last 3 are kept"
    assert lines[1].split() == ["metric", "step", "2", "step", "4"]
    losses = history.arrays()["loss"]
    assert lines[2].split() == ["loss", f"{losses[0]:.6g}", f"{losses[-1]:.6g}"]
    assert ["skipped", "False", "False"] in [line.split() for line in lines]
    assert lines[-1] == "and amax, underflow, zeros of 2 leaves, see arrays()"
    recorded = fmp.numerics.record(make_step())
    assert str(recorded.init(make_step().init(params()))[1]) == "0 steps, of which the last 0 are kept"
    assert repr(history).startswith("History(count=")
