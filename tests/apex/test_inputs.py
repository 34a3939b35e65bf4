"""Apex 1.3: what comes into a model is cast, whatever carries it, and what goes out."""

import copy
import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import fmp
from fmp import tree
from tests.bits import same_bits

HALVES = [torch.float16, torch.bfloat16]


class Images:
    """A batch as libraries of data sets have it, cast by a method; some of them change themselves."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor, names: list[str]):
        self.pixels, self.labels, self.names = pixels, labels, names

    def to(self, dtype: torch.dtype) -> "Images":
        return Images(self.pixels.to(dtype), self.labels, self.names)


class Selfish(Images):
    def to(self, dtype: torch.dtype) -> "Images":
        self.pixels = self.pixels.to(dtype)
        return self


@dataclasses.dataclass
class Record:
    pixels: torch.Tensor
    labels: torch.Tensor

    def to(self, dtype: torch.dtype) -> "Record":
        return Record(self.pixels.to(dtype), self.labels)


def classes() -> list[Any]:
    pixels, labels = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1])
    return [Images(pixels, labels, ["a", "b"]), Selfish(pixels, labels, ["a", "b"]), Record(pixels, labels)]


def recorder(seen: list[Any]) -> Any:
    def loss_fn(weight: torch.Tensor, batch: Any) -> torch.Tensor:
        seen.append((type(batch), batch.pixels.dtype, batch.labels.dtype))
        return (batch.pixels @ weight).float().sum()

    return loss_fn


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("batch", classes(), ids=lambda batch: type(batch).__name__)
def test_a_batch_of_ones_own_class_is_cast_by_its_method_and_stays_as_it_is(batch, half):
    seen: list[Any] = []
    step = fmp.train_step(recorder(seen), fmp.optim.sgd(1.0), policy=fmp.opt_level("O2", half, loss_scale=8.0))
    before = copy.deepcopy(vars(batch))
    state, metrics = step(step.init(torch.ones(2)), batch)
    assert seen == [(seen[0][0], half, torch.int64)]
    assert isinstance(batch, seen[0][0])
    assert same_bits(vars(batch), before)
    assert metrics.loss == 10
    assert same_bits(state.master, torch.tensor([-3.0, -5.0]))


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_where_the_batch_stays_in_float32_so_does_one_of_ones_own_class(level):
    for batch in classes():
        seen: list[Any] = []
        policy = fmp.opt_level(level, "bf16")
        step = fmp.train_step(recorder(seen), fmp.optim.sgd(1.0), policy=policy)
        step(step.init(torch.ones(2)), batch)
        assert seen[0][1:] == (torch.float32, torch.int64)


def test_functions_cast_ones_own_classes_too():
    call = fmp.autocast(lambda batch: batch, fmp.opt_level("O2", "bf16", cast_model_outputs="bf16"))
    for batch in classes():
        assert call(batch).pixels.dtype == torch.bfloat16
        assert batch.pixels.dtype == torch.float32


@pytest.mark.parametrize("batch", classes(), ids=lambda batch: type(batch).__name__)
def test_a_class_that_cannot_be_split_is_not_accumulated(batch):
    step = fmp.train_step(recorder([]), fmp.optim.sgd(1.0), accumulate=2)
    with pytest.raises(
        TypeError, match=r"batch: images is a .*cannot be split into accumulate=2 .* fmp.tree.dataclass"
    ):
        step(step.init(torch.ones(2)), {"images": batch})


@tree.dataclass
class Pixels:
    pixels: torch.Tensor
    labels: torch.Tensor


def test_a_tree_dataclass_needs_no_method_and_is_split():
    seen: list[Any] = []
    policy = fmp.opt_level("O2", "bf16")
    step = fmp.train_step(recorder(seen), fmp.optim.sgd(1.0), policy=policy, accumulate=2)
    state, _ = step(step.init(torch.ones(2)), Pixels(*vars(classes()[2]).values()))
    assert seen == [(Pixels, torch.bfloat16, torch.int64)] * 2
    assert same_bits(state.master, torch.tensor([-1.0, -2.0]))


class Pair(NamedTuple):
    x: torch.Tensor
    rest: Any


def test_containers_keep_their_types_and_only_floats_are_cast():
    """Apex makes a dict of every mapping, and fails with named tuples."""
    batch = Pair(torch.ones(2), OrderedDict(z=[torch.ones(2).double(), torch.arange(2)], a=(None, "text", 3)))
    cast = fmp.autocast(lambda batch: batch, fmp.opt_level("O2", cast_model_outputs="f16"))(batch)
    assert type(cast) is Pair
    assert list(cast.rest) == ["z", "a"]
    assert type(cast.rest) is OrderedDict
    assert [leaf.dtype for leaf in (cast.x, *cast.rest["z"])] == [torch.float16, torch.float16, torch.int64]
    assert cast.rest["a"] == (None, "text", 3)


def test_arrays_of_numpy_are_refused():
    """Apex lets them pass, and whatever uses them runs in float64."""
    step = fmp.train_step(lambda w, x: w.sum(), fmp.optim.sgd(1.0), policy=fmp.opt_level("O2"))
    with pytest.raises(TypeError, match="numpy array; pass tensors"):
        step(step.init(torch.ones(2)), {"x": np.ones(2)})


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize(
    ("outputs", "dtype"), [(None, torch.float32), ("bf16", torch.bfloat16), ("f64", torch.float64)]
)
def test_outputs_are_float32_unless_told_otherwise(level, outputs, dtype):
    policy = fmp.opt_level(level, "bf16", cast_model_outputs=outputs)
    model = fmp.functionalize(torch.nn.Linear(2, 2))
    params = policy.cast_to_param(model.params)
    out, _ = fmp.autocast(model.apply, policy)(params, {}, torch.ones(1, 2))
    assert out.dtype == dtype


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_inside_of_a_loss_a_model_returns_what_it_computes_in(level, half):
    """Apex casts the model's output to float32 before the loss sees it."""
    model = fmp.functionalize(torch.nn.Linear(2, 2))
    seen: list[torch.dtype] = []

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        out, _ = model.apply(params, {}, x)
        seen.append(out.dtype)
        return out.float().sum()

    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=fmp.opt_level(level, half))
    step(step.init(model.params), torch.ones(1, 2))
    assert seen == [torch.float32 if level == "O0" else half]
