"""What a function reaches, by name."""

import collections
import dataclasses
import functools
from typing import Any

import torch
from torch import nn

import fmp
from fmp.numerics.named import leaves_of, named_tensors, random_generators

table = torch.ones(2)
holding_itself: list[Any] = [torch.zeros(1)]
holding_itself.append(holding_itself)


def helper(x):
    return x + table


class Options(dict):
    pass


@dataclasses.dataclass
class Output:
    loss: Any
    parts: Any = None


class Box:
    table = 1.0


def names(fn, *args, **kwargs):
    return [item.path for item in named_tensors(fn, args, kwargs)]


def test_leaves_of_what_no_tree_knows():
    value = {"a": Options(x=1, y=Output(2, [3])), "b": collections.UserDict(z=4), 5: (None,)}
    assert dict(leaves_of(value)) == {
        "a/x": 1,
        "a/y/loss": 2,
        "a/y/parts/0": 3,
        "b/z": 4,
        "5/0": None,
    }
    assert list(leaves_of(7)) == [("", 7)]
    assert [path for path, _ in leaves_of(holding_itself)] == ["0"]
    shared = [1]
    assert list(leaves_of((shared, shared))) == [("0/0", 1), ("1/0", 1)]


def test_arguments_come_first_and_none_is_lost():
    w = torch.zeros(2)
    found = list(named_tensors(lambda table, box: table.sum() * box.table, (w, Box()), {}))
    assert [(item.path, item.tensor is w) for item in found] == [("table", True)]
    tensors = {"b/c": torch.zeros(1), "b": {"c": torch.ones(1)}}
    found = list(named_tensors(lambda a: a, (tensors,), {}))
    assert [item.path for item in found] == ["a/b/c", "a/b/c"]
    assert {item.tensor.item() for item in found} == {0.0, 1.0}
    assert names(lambda a, b: a, w, w) == ["a"]
    assert names(lambda *args, **kwargs: 0, w, k=torch.ones(1)) == ["args/0", "kwargs/k"]


def test_what_functions_close_over():
    offset, generator = torch.ones(1), torch.Generator()
    model = nn.Linear(1, 1)
    assert names(lambda x: helper(x) + offset, torch.zeros(2)) == ["x", "offset", "helper/table"]
    assert names(lambda x: [y + offset for y in model(x)], torch.zeros(1)) == [
        "x",
        "model/weight",
        "model/bias",
        "offset",
    ]
    assert names(functools.partial(helper, x=offset)) == ["x", "table"]
    assert names(lambda: holding_itself) == ["holding_itself/0"]
    assert names(model.forward, offset) == ["input", "weight", "bias"]
    assert names(nn.LazyLinear(3), offset) == ["input"]
    step = fmp.train_step(lambda p, b: (p + offset * torch.rand(1, generator=generator)).sum(), fmp.optim.sgd(0.1))
    state = step.init(torch.ones(1))
    recorded = fmp.numerics.record(step)
    assert "offset" in names(step, state, offset * 1)
    assert random_generators(recorded, (recorded.init(state), offset), {}) == [generator]
    assert random_generators(lambda x: x, (generator,), {}) == [generator]


def test_measurements_are_told_apart():
    step = fmp.train_step(
        lambda p, b: (p * b).sum(), fmp.optim.chain(fmp.numerics.watch_gradients(), fmp.optim.sgd(0.1))
    )
    recorded = fmp.numerics.record(step)
    carry = recorded.init(step.init(torch.ones(2)))
    measured = {item.path for item in named_tensors(recorded, (carry, torch.ones(2)), {}) if item.is_measurement}
    assert {"carry/0/opt_state/0/measured", "carry/1/table"} <= measured
    assert not any("params" in path for path in measured)


def test_a_compressed_weight_has_one_name():
    weight = fmp.df11.compress(torch.ones(8, 8).bfloat16())
    assert set(names(lambda p: p, {"w": weight})) == {"p/w"}
