"""What optimizers keep that look at values, paths or shapes, against the states that they make."""

from typing import Any

import pytest
import torch

import fmp
from fmp import optim, tree
from fmp.memory import first_state
from fmp.memory.plan import plan

PARAMS = {"w.weight": torch.zeros(100, 100), "w.bias": torch.zeros(100), "s": torch.zeros(())}
ADAMW = optim.from_torch(torch.optim.AdamW, lr=1e-3)


def nbytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor))


def label_of(path: str, leaf: Any) -> str:
    return "a" if "weight" in path else "b"


TRANSFORMATIONS = {
    "AdamW": ADAMW,
    "NAdam": optim.from_torch(torch.optim.NAdam, lr=1e-3),
    "Adafactor": optim.from_torch(torch.optim.Adafactor, lr=1e-3),
    "momentum": optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9),
    "by path": optim.partition({"a": ADAMW, "b": optim.sgd(0.1)}, label_of),
    "by label": optim.partition({"a": ADAMW, "b": optim.sgd(0.1)}, {"w.weight": "a", "w.bias": "b", "s": "b"}),
    "masked": optim.masked(ADAMW, ["w.weight"]),
    "frozen": optim.chain(ADAMW, optim.freeze(["w.bias"])),
    "accumulated": optim.accumulate(ADAMW, 2),
}


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_state_that_looks_at_values(name, at_once, monkeypatch):
    if not at_once:
        monkeypatch.setattr(first_state, "_FEW", 0)
    tx = TRANSFORMATIONS[name]
    made = plan(PARAMS, tx)
    assert made.moments + made.other == nbytes(tx.init(PARAMS))
    with torch.device("meta"):
        assert plan(PARAMS, tx).bytes == made.bytes


def test_the_moments_of_one_group():
    made = plan({name: PARAMS[name] for name in ("w.weight", "w.bias")}, TRANSFORMATIONS["by path"])
    assert (made.moments, made.other) == (80_000, 12)


def test_leaves_that_are_too_large_to_make():
    with torch.device("meta"):
        large = torch.empty(2**27)
    with pytest.raises(ValueError, match=r"w: the optimizer looks at values, and .* too large to make"):
        plan({"w": large}, ADAMW)


def test_an_optimizers_own_error_is_raised():
    def init(params):
        if len(params) > 1:
            raise RuntimeError("my own")
        return {"m": torch.zeros(3)}

    for params in (PARAMS, {"a": torch.zeros(2**20), "b": torch.zeros(2)}):
        with pytest.raises(RuntimeError, match="my own"):
            plan(params, optim.GradientTransformation(init, lambda grads, state, params: (grads, state)))


def test_state_that_is_not_of_floats_keeps_its_dtype():
    def init(params):
        return {"codes": torch.zeros(8, 8, dtype=torch.int8), "moments": torch.zeros(8, 8)}

    tx = optim.GradientTransformation(init, lambda grads, state, params: (grads, state))
    assert plan({"w": torch.zeros(8, 8)}, tx).moments == 64 + 256
    assert plan({"w": torch.zeros(8, 8)}, tx, moments="bf16").moments == 64 + 128


def test_numbers_of_parameters():
    for numbers in (1000, 7e9):
        assert plan(numbers, ADAMW).moments == 8 * numbers
        assert plan(numbers, optim.accumulate(optim.adam(1e-3), 4)).moments == 12 * numbers
    assert plan(1000, optim.partition({"all": optim.adam(0.1)}, lambda path, leaf: "all")).moments == 8000
    assert plan({"w": (30, 40)}, "adafactor").moments == 4 * 70


@pytest.mark.parametrize("numbers", [1000, 7e9])
@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        ("adafactor", "depends on the shapes"),
        (optim.adafactor(1e-3), "depends on the shapes"),
        (TRANSFORMATIONS["Adafactor"], "depends on the shapes"),
        (TRANSFORMATIONS["by path"], "depends on names; give a module"),
        (optim.chain(optim.partition({"a": optim.adam(0.1), "b": optim.sgd(0.1)}, label_of)), "depends on names"),
        (TRANSFORMATIONS["by label"], "give a module"),
        (TRANSFORMATIONS["masked"], "give a module"),
        (TRANSFORMATIONS["frozen"], "give a module"),
        (
            optim.GradientTransformation(
                lambda params: [leaf for path, leaf in tree.items(params) if "bias" in path],
                lambda grads, state, params: (grads, state),
            ),
            "depends on names",
        ),
    ],
)
def test_a_number_has_neither_shapes_nor_names(optimizer, match, numbers):
    with pytest.raises(ValueError, match=match):
        plan(numbers, optimizer)


def test_a_layer_that_is_kept_in_float32_may_be_named():
    policy = fmp.Policy("bf16", "bf16", "f32", keep_full=["*.bias"])
    assert plan(PARAMS, "adam", policy).params == 2 * 10_000 + 4 * 100 + 2
