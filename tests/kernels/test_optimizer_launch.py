"""The one-pass form of optimizers on the kernels: bit for bit what `update` and `apply_updates` give."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import optim, tree
from fmp.kernels import optimizer, tables
from fmp.optim import schedules
from tests.bits import same_bits
from tests.kernels.harness import needs_executor, numbers
from tests.kernels.on_executor import Watched, exact_root, kernels_on_cpu

pytestmark = needs_executor
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SIZES = {"a": 137, "b.weight": 5, "b.bias": 0, "c": 1, "d": 300}

MAKE: dict[str, Any] = {
    "sgd": lambda **fused: optim.sgd(0.1, **fused),
    "sgd momentum": lambda **fused: optim.sgd(0.1, momentum=0.9, weight_decay=0.1, **fused),
    "sgd nesterov": lambda **fused: optim.sgd(torch.tensor(0.1), momentum=0.9, nesterov=True, **fused),
    "adam": lambda **fused: optim.adam(0.1, weight_decay=0.1, **fused),
    "adamw": lambda **fused: optim.adamw(schedules.linear(0.2, 0.1, transition_steps=5), **fused),
    "adamw mask": lambda **fused: optim.adamw(0.1, weight_decay=0.5, mask=["*.weight"], **fused),
    "adamw no decay": lambda **fused: optim.adamw(0.1, weight_decay=0.0, **fused),
    "sgd dampening": lambda: optim.sgd(0.1, momentum=0.9, dampening=0.3),
    "sgd tensors": lambda: optim.sgd(
        torch.tensor(0.1), momentum=torch.tensor(0.8), dampening=torch.tensor(0.5), weight_decay=torch.tensor(0.1)
    ),
    "adam tensors": lambda: optim.adam(
        torch.tensor(0.1), torch.tensor(0.8), torch.tensor(0.95), torch.tensor(1e-6), torch.tensor(0.1)
    ),
    "adamw tensors": lambda: optim.adamw(0.1, 0.5, torch.tensor(0.0), weight_decay=torch.tensor(0.1)),
}
every = pytest.mark.parametrize("name", MAKE)


def params(seed: int = 0) -> dict[str, torch.Tensor]:
    return {key: numbers(size, seed=seed + index) for index, (key, size) in enumerate(SIZES.items())}


def grads(seed: int, *dtypes: torch.dtype) -> dict[str, Any]:
    return {
        key: (10 * numbers(size, seed=seed + index)).to(dtypes[index % len(dtypes)])
        for index, (key, size) in enumerate(SIZES.items())
    }


def by_update(tx: Any, g: Any, state: Any, p: Any, factor: float = 1.0) -> tuple[Any, Any]:
    g = tree.map(lambda leaf: None if leaf is None else leaf.float() * factor, g)
    with exact_root():
        updates, state = tx.update(g, state, p)
        return optim.apply_updates(p, updates), state


@every
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtypes", [(F32,), (F16,), (F16, F32, BF16)], ids=str)
def test_steps(name: str, donate: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    tx, values = MAKE[name](), params()
    state, found, found_state = tx.init(values), copy.deepcopy(values), tx.init(values)
    for index in range(4):
        g = grads(10 * index + 1, *dtypes)
        if index == 2:
            g["a"] = None
        values, state = by_update(tx, g, state, values)
        before = copy.deepcopy((g, found_state, found))
        with kernels_on_cpu() as names:
            new, low, new_state = tx.fused(g, found_state, found, donate=donate)
        assert names
        assert low is None
        assert donate or same_bits((g, found_state, found), before)
        found, found_state = new, new_state
        assert same_bits((found, found_state), (values, state))


@pytest.mark.parametrize("name", [name for name in MAKE if "tensors" not in name and "dampening" not in name])
def test_the_option_fused_changes_nothing_here(name: str) -> None:
    values, g = params(), grads(1, F16)
    for flag in (False, True):
        tx = MAKE[name](fused=flag)
        expected, state = by_update(tx, g, tx.init(values), values)
        with kernels_on_cpu():
            assert same_bits(tx.fused(g, tx.init(values), values), (expected, None, state))


@every
@pytest.mark.parametrize("donate", [False, True])
def test_casts_are_written_in_the_same_pass(name: str, donate: bool) -> None:
    tx, values = MAKE[name](), tree.map(lambda leaf: leaf.abs() + 1.0, params())
    g = grads(1, F16, BF16, F32)
    low = dict(zip(values, [F16, BF16, BF16, None, F16], strict=True))
    low = {key: None if dtype is None else values[key].to(dtype) for key, dtype in low.items()}
    g["d"] = None  # its cast stays what it is
    expected, state = by_update(tx, g, tx.init(values), values, 0.25)
    expected_low = {key: None if cast is None else expected[key].to(cast.dtype) for key, cast in low.items()}
    before, given = copy.deepcopy(low), list(low.values())
    with kernels_on_cpu() as names:
        found = tx.fused(
            g, tx.init(values), copy.deepcopy(values), inv_scale=torch.tensor(0.5), clip=0.5, low=low, donate=donate
        )
    assert names
    assert same_bits(found, (expected, expected_low, state))
    in_place = all(one is other for one, other in zip(found[1].values(), given, strict=True))
    assert in_place == donate
    assert donate or same_bits(low, before)


@every
@pytest.mark.parametrize("donate", [False, True])
def test_a_skip_leaves_every_byte(name: str, donate: bool) -> None:
    tx, values = MAKE[name](), params()
    _, state = by_update(tx, grads(1, F16), tx.init(values), values)
    low = {key: torch.full_like(leaf, 9.0, dtype=F16) for key, leaf in values.items()}
    g = grads(5, F16)
    g["d"][7] = float("nan")
    before = copy.deepcopy((values, low, state))
    with kernels_on_cpu() as names:
        found = tx.fused(g, state, values, finite=torch.tensor(False), low=low, donate=donate)
    assert names
    assert same_bits(found, before)
    with kernels_on_cpu():
        taken = tx.fused(grads(5, F16), *copy.deepcopy(before[::-2]), finite=torch.tensor(True))
        assert same_bits(taken, tx.fused(grads(5, F16), *copy.deepcopy(before[::-2])))


@every
def test_donated_memory_is_overwritten_and_autograd_can_tell(name: str) -> None:
    tx, values = MAKE[name](), params()
    state = tx.init(values)
    versions = [leaf._version for leaf in values.values()]
    with kernels_on_cpu():
        found, _, found_state = tx.fused(grads(1, F16), state, values, donate=True)
    assert all(found[key] is values[key] for key in values)
    assert all(leaf._version > version for leaf, version in zip(values.values(), versions, strict=True))
    for old, new in zip(tree.leaves(state), tree.leaves(found_state), strict=True):
        assert new is old or old is None or old.dtype != F32


def test_memory_that_is_shared_is_not_overwritten() -> None:
    tx: Any = optim.sgd(0.1, momentum=0.9)
    whole = torch.randn(8)
    for values, g, low in (
        ({"a": whole, "b": whole}, {"a": torch.ones(8), "b": torch.zeros(8)}, None),
        ({"a": whole[:4], "b": whole[2:6]}, {"a": torch.ones(4), "b": torch.zeros(4)}, None),
        ({"a": whole[:4]}, {"a": whole[3:7]}, None),
        ({"a": whole[:4]}, {"a": torch.ones(4)}, {"a": whole[:2].view(F16)}),
    ):
        before = whole.clone()
        expected, state = by_update(tx, g, tx.init(values), values)
        with kernels_on_cpu() as names:
            found, _, found_state = tx.fused(g, tx.init(values), values, low=low, donate=True)
        assert names
        assert torch.equal(whole, before)
        assert same_bits((found, found_state), (expected, state))


def test_layouts_may_differ() -> None:
    tx: Any = optim.adamw(0.1)
    for p in (torch.randn(6, 4).t(), torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last)):
        g = torch.randn(p.shape)
        expected = by_update(tx, g, tx.init(p), p)
        with kernels_on_cpu() as names:
            found, low, state = tx.fused(g, tx.init(p), p, low=p.half())
        assert names == ["adam_f32_f16"]
        assert same_bits((found, state), expected)
        assert same_bits(low, expected[0].half())


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.double(),
        lambda p: p.bfloat16(),
        lambda p: torch.randn(2 * len(p))[::2],
        lambda p: torch.nn.Parameter(p),
    ],
    ids=["f64", "bf16", "gaps", "recorded"],
)
def test_what_the_kernel_does_not_take_gets_update(change: Any) -> None:
    tx: Any = optim.adamw(0.1)
    values = {"a": change(torch.randn(5)), "b": torch.randn(3)}
    g = {"a": torch.ones(5), "b": torch.ones(3)}
    expected = by_update(tx, g, tx.init(values), values)
    with kernels_on_cpu() as names:
        found, _, state = tx.fused(g, tx.init(values), values)
    assert not [name for name in names if name.startswith("adam")]
    assert all(torch.equal(one, other) for one, other in zip(found.values(), expected[0].values(), strict=True))
    assert int(state.count) == 1


def test_casts_in_eight_bits_are_made_by_torch() -> None:
    tx: Any = optim.sgd(0.1)
    values = {"a": torch.linspace(-1, 1, 9)}
    low = {"a": values["a"].to(torch.float8_e4m3fn)}
    with kernels_on_cpu() as names:
        found, new_low, _ = tx.fused({"a": torch.ones(9)}, tx.init(values), values, low=low)
    assert names == []
    assert torch.equal(new_low["a"].float(), found["a"].to(torch.float8_e4m3fn).float())


def test_the_table_of_a_donated_state_is_uploaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = tables._uploaded
    monkeypatch.setattr(
        tables, "_uploaded", lambda key: made.extend([key] if isinstance(key, tables._Rows) else []) or make(key)
    )
    for name in MAKE:
        tx, values, g = MAKE[name](), params(), grads(1, F16)
        state, low = tx.init(values), tree.map(lambda leaf: leaf.half(), values)
        with kernels_on_cpu():
            made.clear()
            for _ in range(3):
                values, low, state = tx.fused(g, state, values, low=low, donate=True)
            assert len(made) == 1, name


def test_nothing_else_is_read_or_written() -> None:
    g, p, m, v = ([numbers(size, seed=10 * kind) for size in (5, 0, 137)] for kind in range(4))
    g[0], low = g[0].half(), [p[0].bfloat16(), p[1].half(), None]
    rows = torch.rand(3, 8)
    factors: dict[str, Any] = {"scale": torch.tensor(0.5), "clip": torch.tensor(0.5), "finite": torch.tensor(True)}
    written = [*p, *m, *v, *[cast for cast in low if cast is not None]]
    with kernels_on_cpu("checked") as names, Watched(["adam"], read=[*g, rows, *factors.values()], written=written):
        optimizer.overwrite("adam", g, p, (m, [x.abs_() for x in v]), low, [2, 0, 1], rows, divide=False, **factors)
    assert sorted(names) == ["adam_f32_bf16"]
    with kernels_on_cpu("checked") as names, Watched(["sgd"], read=[*g, rows, *factors.values()], written=written):
        optimizer.overwrite("sgd", g, p, (None,), low, [1, 0, 1], rows[:, :4].contiguous(), divide=True, **factors)
    assert sorted(names) == ["sgd_f32_bf16"]


@given(
    name=st.sampled_from(list(MAKE)),
    kinds=st.lists(st.tuples(st.integers(0, 300), st.sampled_from([F32, F16, BF16])), min_size=1, max_size=4),
    casts=st.lists(st.sampled_from([F16, BF16, None]), min_size=4, max_size=4),
    donate=st.booleans(),
    finite=st.sampled_from([None, True, False]),
)
def test_any_mix(name: str, kinds: list[Any], casts: list[Any], donate: bool, finite: bool | None) -> None:
    tx = MAKE[name if name != "adamw mask" else "adamw"]()
    values = [numbers(size, seed=index) for index, (size, _) in enumerate(kinds)]
    g = [numbers(size, dtype, index + 20) for index, (size, dtype) in enumerate(kinds)]
    low = [None if dtype is None else p.to(dtype) for p, dtype in zip(values, casts, strict=False)]
    state = tx.init(values)
    expected, new_state = by_update(tx, g, state, values)
    wanted = expected, [None if cast is None else p.to(cast.dtype) for p, cast in zip(expected, low, strict=True)]
    wanted = copy.deepcopy((values, low, state) if finite is False else (*wanted, new_state))
    flag = None if finite is None else torch.tensor(finite)
    with kernels_on_cpu():
        assert same_bits(tx.fused(g, state, values, low=low, finite=flag, donate=donate), wanted)
