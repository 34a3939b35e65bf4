"""The casts that a one-pass form writes: those of the new parameters, in the dtypes of the old ones."""

import copy
from typing import Any

import pytest
import torch

from fmp import optim, tree
from tests.bits import same_bits

MAKE: dict[str, Any] = {
    "adamw": lambda: optim.adamw(0.1),
    "adamw fused": lambda: optim.adamw(0.1, fused=True),
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "sgd fused": lambda: optim.sgd(0.1, momentum=0.9, fused=True),
}
every = pytest.mark.parametrize("name", MAKE)
PARAMS = {"a": torch.linspace(-1, 1, 7), "b": torch.ones(3), "ids": torch.arange(2)}
GRADS = {"a": torch.ones(7), "b": torch.ones(3), "ids": None}
LOW = {"a": PARAMS["a"].half(), "b": None, "ids": None}


@every
@pytest.mark.parametrize("donate", [False, True])
def test_they_are_those_of_the_new_parameters(name: str, donate: bool) -> None:
    tx = MAKE[name]()
    expected, _, state = tx.fused(GRADS, tx.init(PARAMS), PARAMS)
    given = copy.deepcopy(PARAMS)
    found = tx.fused(GRADS, tx.init(given), given, low=copy.deepcopy(LOW), donate=donate)
    assert same_bits(found, (expected, {"a": expected["a"].half(), "b": None, "ids": None}, state))


@every
@pytest.mark.parametrize("donate", [False, True])
def test_a_skip_keeps_them(name: str, donate: bool) -> None:
    tx, low = MAKE[name](), {"a": torch.full((7,), 9.0, dtype=torch.bfloat16), "b": None, "ids": None}
    state = tx.init(PARAMS)
    before = copy.deepcopy((PARAMS, low, state))
    given = copy.deepcopy(before)
    bad = {**GRADS, "a": torch.full((7,), float("nan"))}
    found = tx.fused(bad, given[2], given[0], low=given[1], finite=torch.tensor(False), donate=donate)
    assert same_bits(found, before)
    taken = tx.fused(GRADS, state, PARAMS, low=low, finite=torch.tensor(True))
    assert same_bits(taken, tx.fused(GRADS, state, PARAMS, low=low))


@every
def test_nothing_is_changed_without_donation(name: str) -> None:
    tx = MAKE[name]()
    given = (GRADS, tx.init(PARAMS), PARAMS)
    before = copy.deepcopy((given, LOW))
    tx.fused(*given, low=LOW)
    assert same_bits((given, LOW), before)


@every
def test_they_come_from_casts_or_from_a_dtype(name: str) -> None:
    tx = MAKE[name]()
    with pytest.raises(ValueError, match="fused takes either low, whose dtypes say what to cast to, or cast_dtype"):
        tx.fused(GRADS, tx.init(PARAMS), PARAMS, low=LOW, cast_dtype=torch.float16)


@every
def test_under_vmap_and_compile(name: str) -> None:
    tx = MAKE[name]()
    params, grads, low = ({"a": part["a"]} for part in (PARAMS, GRADS, LOW))
    state = tx.init(params)
    expected = optim.apply_updates(params, tx.update(grads, state, params)[0])["a"].half()
    stack = lambda leaf: None if leaf is None else torch.stack([leaf, leaf])
    mapped = torch.func.vmap(lambda g, s, p, low: tx.fused(g, s, p, low=low))(
        *(tree.map(stack, part) for part in (grads, state, params, low))
    )
    torch.testing.assert_close(mapped[1]["a"][1], expected)
    compiled = torch.compile(tx.fused, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(grads, state, params, low=low)[1]["a"], expected)
