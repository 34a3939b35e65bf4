"""The one-pass form on parameters in a form of `fmp.master`: merge, the same step on float32, and split."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from fmp import master, optim, tree
from fmp.testing import check_optimizer
from tests.bits import same_bits

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MAKE: dict[str, Any] = {
    "adamw": lambda: optim.adamw(0.1),
    "adamw fused": lambda: optim.adamw(0.1, fused=True),
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "sgd fused": lambda: optim.sgd(0.1, momentum=0.9, fused=True),
}
FULL = {
    "blocks": [{"w": torch.linspace(-1, 1, 12).reshape(4, 3)}, {"w": torch.full((5,), 1.001)}],
    "head": torch.tensor(0.3),
    "norm": torch.linspace(0.9, 1.1, 3),
    "frozen": torch.ones(2),
    "ids": torch.arange(2),
    "hole": None,
}
FORMATS = [(form, dtype) for form, row in master.FORMS.items() for dtype in (BF16, F16) if dtype in row.dtypes]
every = pytest.mark.parametrize("name", MAKE)
every_format = pytest.mark.parametrize(("form", "dtype"), FORMATS)


def stored(form: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Makes parameters of which all but the norm are narrow, and what is beside them."""
    narrow = {**tree.cast(FULL, dtype), "norm": FULL["norm"].clone()}
    return narrow, master.init(narrow, FULL, form=form)


def grads(like: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    drawn = tree.map(
        lambda leaf: (
            torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
            if leaf is not None and leaf.is_floating_point()
            else None
        ),
        like,
    )
    return {**drawn, "frozen": None}


def seed_for(form: str, value: int = 3) -> torch.Tensor | None:
    return torch.tensor(value) if master.FORMS[form].takes_seed else None


def in_passes(tx: Any, g: Any, state: Any, params: Any, low: Any, form: str, **options: Any) -> Any:
    """Merges, makes the step on float32, and splits."""
    full, _, state = tx.fused(g, state, copy.deepcopy(master.merge(params, low, form=form)), **options)
    return *master.split(full, params, low, form=form, seed=seed_for(form)), state


@every
@every_format
@pytest.mark.parametrize("donate", [False, True])
def test_steps(name: str, form: str, dtype: torch.dtype, donate: bool) -> None:
    tx, (params, low) = MAKE[name](), stored(form, dtype)
    state = tx.init(params)
    for index in range(3):
        g = grads(params, index)
        factors = {"inv_scale": torch.tensor(0.5), "clip": torch.tensor(0.3)}
        expected = in_passes(tx, *copy.deepcopy((g, state, params, low)), form, **factors)
        given = g, state, params, low
        before = copy.deepcopy(given)
        params, low, state = tx.fused(
            g, state, params, low=low, form=form, seed=seed_for(form), donate=donate, **factors
        )
        assert donate or same_bits(given, before)
        assert same_bits((params, low, state), expected)
        assert not same_bits(params, before[2])
        assert same_bits((params["frozen"], params["ids"]), (before[2]["frozen"], before[2]["ids"]))


@every
@every_format
@pytest.mark.parametrize("donate", [False, True])
def test_a_skip_keeps_every_byte(name: str, form: str, dtype: torch.dtype, donate: bool) -> None:
    tx, (params, low) = MAKE[name](), stored(form, dtype)
    g, options = grads(params), {"form": form, "seed": seed_for(form)}
    state = tx.fused(g, tx.init(params), params, low=low, **options)[2]
    # What no step leaves behind, so that a step that adds nothing would change it.
    params["blocks"][0]["w"][0] = float("nan")
    low = tree.map(lambda rest: None if rest is None else torch.full_like(rest, 9), low)
    before = copy.deepcopy((params, low, state))
    bad = {**g, "head": torch.tensor(float("nan"), dtype=dtype)}
    given = copy.deepcopy(before)
    found = tx.fused(bad, given[2], given[0], low=given[1], finite=torch.tensor(False), donate=donate, **options)
    assert same_bits(found, before)
    taken = tx.fused(g, state, params, low=low, finite=torch.tensor(True), **options)
    assert same_bits(taken, tx.fused(g, state, params, low=low, **options))


@every
def test_the_remainder_is_exact(name: str) -> None:
    tx = MAKE[name]()
    params, low = {"w": torch.ones(5, dtype=BF16)}, {"w": torch.zeros(5, dtype=torch.int16)}
    full = {"w": torch.ones(5)}
    state, full_state = tx.init(params), tx.init(full)
    for index in range(4):
        g = {"w": torch.linspace(-1, 1, 5).add(0.1 * index).to(BF16)}
        params, low, state = tx.fused(g, state, params, low=low, form="remainder")
        full, _, full_state = tx.fused(g, full_state, full)
    assert same_bits((master.merge(params, low, form="remainder"), state), (full, full_state))


def test_chance_follows_the_seed_and_the_path() -> None:
    tx: Any = optim.sgd(1.0)
    params = {key: torch.ones(400, dtype=BF16) for key in "ab"}
    low, g = dict.fromkeys("ab"), {key: torch.full((400,), -(2.0**-9)) for key in "ab"}
    options = {"low": low, "form": "stochastic"}
    first, again, other = (tx.fused(g, tx.init(params), params, seed=seed, **options)[0] for seed in (1, 1, 2))
    assert same_bits(first, again)
    assert not same_bits(first["a"], other["a"])
    assert not same_bits(first["a"], first["b"])
    assert 0.1 < float((first["a"] > 1).float().mean()) < 0.5
    nearest, rest, _ = tx.fused(g, tx.init(params), params, **options)
    assert same_bits((nearest, rest), (params, low))


@every_format
def test_under_vmap_and_compile_it_is_update(form: str, dtype: torch.dtype) -> None:
    tx: Any = optim.adamw(0.1, fused=True)
    params, low = (part["blocks"][0]["w"] for part in stored(form, dtype))
    state, g, seed = tx.init(params), grads({"w": params})["w"], seed_for(form)

    def step(g: Any, state: Any, params: Any, finite: Any) -> Any:
        new, rest, state = tx.fused(g, state, params, low=low, form=form, seed=seed, finite=finite)
        return new, (params if rest is None else rest), state

    compile = torch.compile(step, backend="aot_eager", fullgraph=True)
    for finite in (torch.tensor(True), torch.tensor(False)):
        compiled = compile(g, state, params, finite)
        by_update = step_of_update(tx, g, state, params, low, form, seed, finite)
        assert same_bits(compiled, by_update)
        two = tree.map(lambda leaf: torch.stack([leaf, leaf]), (g, state, params, finite))
        members = torch.func.vmap(step)(*two)
        assert same_bits(tree.map(lambda leaf: leaf[1], members), by_update)


def step_of_update(tx: Any, g: Any, state: Any, params: Any, low: Any, form: str, seed: Any, finite: Any) -> Any:
    full = master.merge(params, low, form=form)
    updates, new_state = tx.update(g, state, full)
    new, rest = master.split(optim.apply_updates(full, updates), params, low, form=form, seed=seed)
    found = (new, params if rest is None else rest, new_state)
    return found if finite else (params, params if rest is None else low, state)


def test_gradients_pass_to_the_parameters() -> None:
    tx: Any = optim.sgd(0.5)
    params, rest = torch.ones(3, dtype=BF16), torch.zeros(3, dtype=torch.int16)

    def total(p: torch.Tensor) -> torch.Tensor:
        new, _, _ = tx.fused(torch.ones(3), tx.init(p), p, low=rest, form="remainder")
        return new.float().sum()

    assert same_bits(torch.func.grad(total)(params), torch.ones(3, dtype=BF16))


def test_what_does_not_fit_is_refused_and_nothing_is_overwritten() -> None:
    tx: Any = optim.sgd(0.1)
    params, low = stored("remainder", BF16)
    given = grads(params), tx.init(params), params
    before = copy.deepcopy((given, low))
    for options, error, message in (
        ({"form": "fp4"}, ValueError, "masters have no form 'fp4'; use one of"),
        ({"form": "f32"}, TypeError, "a master of the form 'f32' is in f32, and this one is in i16"),
        ({"seed": torch.tensor(0)}, ValueError, "only parameters in a form draw by a seed; pass form"),
        ({"form": "stochastic", "seed": torch.tensor(0.5)}, TypeError, "seed must hold integers"),
        ({"form": "stochastic", "seed": torch.zeros(2, dtype=torch.int64)}, ValueError, "seed must be a scalar"),
    ):
        with pytest.raises(error, match=message):
            tx.fused(*given, low=low, donate=True, **options)
    with pytest.raises(ValueError, match="parameters in the form 'stochastic' have no casts beside them"):
        tx.fused(*given, form="stochastic", cast_dtype=BF16)
    assert same_bits((given, low), before)


def test_the_law_finds_a_form_that_is_ignored_or_a_skip_that_is_not_made() -> None:
    tx: Any = optim.sgd(0.1, momentum=0.9)

    def never_skips(*args: Any, finite: Any, form: Any = None, **options: Any) -> Any:
        return tx.fused(*args, form=form, finite=finite if form is None else None, **options)

    def one_seed(*args: Any, seed: Any = None, **options: Any) -> Any:
        return tx.fused(*args, seed=None if seed is None else seed + 1, **options)

    for fused, message in ((never_skips, "that skips in the form 'f32'"), (one_seed, "in the form 'stochastic'")):
        with pytest.raises(AssertionError, match=message):
            check_optimizer(tx._replace(fused=fused), invariants=["fused_means_update"], examples=1)


@given(
    name=st.sampled_from(list(MAKE)),
    formats=st.sampled_from(FORMATS),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    wide=st.lists(st.booleans(), min_size=4, max_size=4),
    donate=st.booleans(),
)
def test_any_mix(name: str, formats: tuple[str, torch.dtype], sizes: list[int], wide: list[bool], donate: bool) -> None:
    (form, dtype), tx = formats, MAKE[name]()
    full = [torch.linspace(-2, 2, size) for size in sizes]
    params = [leaf.clone() if keep else leaf.to(dtype) for leaf, keep in zip(full, wide, strict=False)]
    low, g = master.init(params, full, form=form), [leaf.sin() for leaf in full]
    state = tx.init(params)
    expected = in_passes(tx, *copy.deepcopy((g, state, params, low)), form)
    assert same_bits(tx.fused(g, state, params, low=low, form=form, seed=seed_for(form), donate=donate), expected)
