"""Parameters in a form of `fmp.master` on the kernels: bit for bit what merge, `update` and split give."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.overrides import TorchFunctionMode

import fmp
from fmp import master, optim, tree
from fmp.kernels import launch, optimizer, tables, trials, trust
from fmp.master.seeds import name_of, seed_of, word_of
from tests.bits import differing, same_bits
from tests.cuda_executor import Module
from tests.kernels.harness import folder, needs_executor, numbers
from tests.kernels.on_executor import Watched, exact_root, kernels_on_cpu
from tests.kernels.test_optimizer_launch import MAKE

pytestmark = needs_executor
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FORMATS = [("remainder", BF16), ("stochastic", BF16), ("stochastic", F16)]
SIZES = {"a": 137, "b.weight": 5, "b.bias": 0, "c": 1, "d": 300, "norm": 33}
every = pytest.mark.parametrize("name", MAKE)
every_format = pytest.mark.parametrize(("form", "dtype"), FORMATS)
both = pytest.mark.parametrize("donate", [False, True])


def stored(form: str, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """Makes parameters of which all but the norm are narrow, and what is beside them."""
    full = {key: numbers(size, seed=index) for index, (key, size) in enumerate(SIZES.items())}
    params = {key: leaf if key == "norm" else leaf.to(dtype) for key, leaf in full.items()}
    return params, master.init(params, full, form=form)


def grads(seed: int, *dtypes: torch.dtype) -> dict[str, Any]:
    return {
        key: (10 * numbers(size, seed=seed + index)).to(dtypes[index % len(dtypes)])
        for index, (key, size) in enumerate(SIZES.items())
    }


def seed_for(form: str, value: int = -5) -> torch.Tensor | None:
    return torch.tensor(value) if form == "stochastic" else None


def in_passes(
    tx: Any, g: Any, state: Any, params: Any, low: Any, form: str, *, factor: float = 1.0, seed: Any = None
) -> Any:
    """Merges, updates and splits; a leaf without gradient stays as it is."""
    g = tree.map(lambda leaf: None if leaf is None else leaf.float() * factor, g)
    full = master.merge(params, low, form=form)
    with exact_root():
        updates, state = tx.update(g, state, full)
    return *master.split(optim.apply_updates(full, updates), params, low, form=form, seed=seed), state


def plain(value: Any) -> Any:
    """Makes one NaN of all; devices differ in their signs and payloads."""

    def one(leaf: Any) -> Any:
        return torch.where(leaf.isnan(), torch.nan, leaf) if leaf is not None and leaf.is_floating_point() else leaf

    return tree.map(one, value)


def kernels_for(names: list[str]) -> set[str]:
    return {name.partition("_")[2].partition("_")[2] for name in names if name.startswith(("adam", "sgd"))}


@every
@both
@every_format
@pytest.mark.parametrize("grad_dtypes", [(F32,), (BF16,), (F16, F32, BF16)], ids=str)
def test_steps(name: str, donate: bool, form: str, dtype: torch.dtype, grad_dtypes: tuple[torch.dtype, ...]) -> None:
    tx, (params, low) = MAKE[name](), stored(form, dtype)
    state = tx.init(params)
    for index in range(3):
        g, seed = grads(10 * index + 1, *grad_dtypes), seed_for(form, index - 2**60)
        if index == 1:
            g["a"] = None
        expected = in_passes(tx, *copy.deepcopy((g, state, params, low)), form, factor=0.25, seed=seed)
        before = copy.deepcopy((g, state, params, low))
        given = [*tree.leaves(params), *tree.leaves(low)]
        with kernels_on_cpu() as names:
            found = tx.fused(
                g, state, params, low=low, inv_scale=0.5, clip=torch.tensor(0.5), form=form, seed=seed, donate=donate
            )
        narrow = {"remainder"} if form == "remainder" else {f"stochastic_{'f16' if dtype == F16 else 'bf16'}"}
        assert kernels_for(names) > narrow
        assert len(kernels_for(names)) == 2  # the norm goes through a launch of its own
        assert donate or same_bits((g, state, params, low), before)
        assert same_bits(plain(found), plain(expected)), differing(found, expected)
        params, low, state = found
        new = [*tree.leaves(params), *tree.leaves(low)]
        if donate:
            assert all(one is other for one, other in zip(given, new, strict=True))


@every
@both
@every_format
def test_a_skip_leaves_every_byte(name: str, donate: bool, form: str, dtype: torch.dtype) -> None:
    tx, (params, low) = MAKE[name](), stored(form, dtype)
    options = {"form": form, "seed": seed_for(form)}
    state = in_passes(tx, grads(1, BF16), tx.init(params), params, low, form)[2]
    params["d"].view(torch.int16)[:2] = torch.tensor([0x7FFF, -1], dtype=torch.int16)
    g = grads(5, BF16)
    g["d"][7] = float("nan")
    before = copy.deepcopy((params, low, state))
    with kernels_on_cpu() as names:
        found = tx.fused(g, state, params, low=low, finite=torch.tensor(False), donate=donate, **options)
    assert names
    assert same_bits(found, before)
    p, rest, s = copy.deepcopy(before)
    with kernels_on_cpu():
        taken = tx.fused(g, s, p, low=rest, finite=torch.tensor(True), **options)
        assert same_bits(taken, tx.fused(g, s, p, low=rest, **options))
    assert not same_bits(taken, before)


@every_format
def test_no_float32_copy_is_made(form: str, dtype: torch.dtype) -> None:
    size = 1000
    made: list[torch.Tensor] = []

    class Recorded(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.extend(part for part in tree.leaves(result) if isinstance(part, torch.Tensor))
            return result

    tx: Any = optim.adamw(0.1)
    params = {"w": torch.ones(size, dtype=dtype)}
    low, state, g = master.init(params, form=form), tx.init(params), {"w": torch.ones(size, dtype=dtype)}
    given = {part.data_ptr() for part in tree.leaves((params, low, state, g)) if part is not None}
    options = {"low": low, "form": form, "seed": seed_for(form)}
    with kernels_on_cpu() as names, Recorded():
        tx.fused(g, state, params, donate=True, **options)
    assert names
    assert [part.shape for part in made if part.numel() >= size and part.data_ptr() not in given] == []
    made.clear()
    with kernels_on_cpu(), Recorded():
        tx.fused(g, state, params, **options)
    moments = [part.data_ptr() for part in made if part.numel() >= size and part.dtype == F32]
    assert len({*moments} - given) == 2


def test_all_seeds_come_from_one_pass_and_are_those_of_split(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [("blocks", 0, "w"), ("blocks", "0", "w"), (), (3,), ("",), ("é",)]
    seeds = [torch.tensor(value) for value in (0, -1, 2**63 - 1, -(2**63), 77)]
    words = torch.tensor([word_of(name_of(path)) for path in paths])
    for seed in seeds:
        together = fmp.random.fold_in(seed, words)
        assert torch.equal(together, torch.stack([seed_of(path, seed) for path in paths]))
    seen: list[torch.Tensor] = []
    fold_in = fmp.random.fold_in
    monkeypatch.setattr(fmp.random, "fold_in", lambda *args: seen.append(fold_in(*args)) or seen[-1])
    tx, (params, _) = MAKE["sgd"](), stored("stochastic", BF16)
    nested = {"x": [params, {"y": params["a"]}]}
    g, low, seed = tree.map(torch.ones_like, nested), tree.map(lambda leaf: None, nested), torch.tensor(5)
    with kernels_on_cpu():
        tx.fused(g, tx.init(nested), nested, low=low, form="stochastic", seed=seed)
    (vector,) = seen
    seen.clear()
    master.split(tree.map(torch.Tensor.float, nested), nested, low, form="stochastic", seed=seed)
    assert torch.equal(vector, torch.stack(seen))
    assert len(vector) == len(params)


def test_numbers_that_share_memory_or_lie_otherwise() -> None:
    tx: Any = optim.sgd(0.1, momentum=0.9)
    whole = numbers(8, BF16)
    params, g = {"a": whole[:4], "b": whole[2:6]}, {"a": torch.ones(4), "b": torch.zeros(4)}
    low = master.init(params, form="remainder")
    before, expected = whole.clone(), in_passes(tx, g, tx.init(params), params, low, "remainder")
    with kernels_on_cpu() as names:
        found = tx.fused(g, tx.init(params), params, low=low, form="remainder", donate=True)
    assert names
    assert torch.equal(whole, before)
    assert same_bits(found, expected)
    p, g = numbers(24, BF16).reshape(6, 4).t(), torch.randn(4, 6)
    for form, runs in (("remainder", True), ("stochastic", False)):
        low, seed = master.init(p, form=form), seed_for(form)
        expected = in_passes(tx, g, tx.init(p), p, low, form, seed=seed)
        with kernels_on_cpu() as names:
            found = tx.fused(g, tx.init(p), p, low=low, form=form, seed=seed)
        assert same_bits(found, expected)
        # Without the form, the kernel for float32 may do the update between merge and split.
        assert [name for name in names if name.startswith("sgd")] == ["sgd_f32_remainder" if runs else "sgd_f32_bf16"]


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("kahan", {}),
        ("f32", {}),
        ("stochastic", {"seed": None}),
        ("remainder", {"low": {**dict.fromkeys(SIZES, torch.ones(3, dtype=torch.int16)), "a": None}}),
    ],
    ids=["kahan", "f32", "nearest", "a rest is missing"],
)
def test_what_no_kernel_takes_is_done_in_passes(form: str, change: Any) -> None:
    tx: Any = optim.adamw(0.1)
    params = {key: torch.linspace(-1, 1, 3).to(BF16) for key in ("a", "c")}
    low = master.init(params, form=form)
    low = {key: change["low"][key] for key in params} if "low" in change else low
    g = {key: torch.ones(3) for key in params}
    options = {"seed": seed_for(form), **change, "low": low}
    expected = in_passes(tx, g, tx.init(params), copy.deepcopy(params), low, form, seed=options["seed"])
    with kernels_on_cpu() as names, exact_root():
        found = tx.fused(g, tx.init(params), params, form=form, **options)
    assert not kernels_for(names) & {"remainder", "stochastic_bf16"}
    assert same_bits(found, expected)


def test_the_tables_of_a_donated_state_are_uploaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = tables._uploaded
    monkeypatch.setattr(
        tables, "_uploaded", lambda key: made.extend([key] if isinstance(key, tables._Rows) else []) or make(key)
    )
    for form, count in (("remainder", 2), ("stochastic", 3)):
        tx, (params, low) = MAKE["adamw"](), stored(form, BF16)
        state, g = tx.init(params), grads(1, BF16)
        with kernels_on_cpu():
            made.clear()
            for index in range(3):
                params, low, state = tx.fused(
                    g, state, params, low=low, form=form, seed=seed_for(form, index), donate=True
                )
        assert len(made) == count


@every_format
@pytest.mark.parametrize("of", ["adam", "sgd"])
def test_nothing_else_is_read_or_written(of: str, form: str, dtype: torch.dtype) -> None:
    sizes = (5, 0, 137)
    g, m, v = ([numbers(size, seed=10 * kind) for size in sizes] for kind in range(3))
    p, v = [numbers(size, dtype, 50) for size in sizes], [leaf.abs_() for leaf in v]
    low = master.init(p, form=form)
    g[0], rows, seeds = g[0].to(dtype), torch.rand(3, 8 if of == "adam" else 4), torch.tensor([1, -2, 3])
    factors = {"scale": torch.tensor(0.5), "clip": torch.tensor(0.5), "finite": torch.tensor(True)}
    moments = (m, v) if of == "adam" else (m,)
    written = [*p, *[leaf for column in (*moments, low) for leaf in column if leaf is not None]]
    read = [*g, rows, seeds, *factors.values()]
    own = None if form == "remainder" else seeds
    with kernels_on_cpu("checked") as names, Watched([of], read=read, written=written):
        optimizer.overwrite(of, g, p, moments, low, [1, 0, 1], rows, divide=False, form=form, seeds=own, **factors)
    assert len(names) == 2


FAULTS = {
    "remainder": [("(short)bits", "0"), ("if (finite && !*finite) return;", ""), ("+ 0x8000u) >> 16", ") >> 16")],
    "stochastic": [("seeds[here.row]", "seeds[0]"), ("first + i + k", "i"), ("min(rounded", "min(rounded + 1")],
}


@pytest.mark.parametrize("of", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])  # each is compiled anew
@pytest.mark.parametrize(("form", "fault"), [(form, fault) for form, faults in FAULTS.items() for fault in faults])
def test_a_wrong_kernel_is_refused(of: str, form: str, fault: Any, tmp_path: Any) -> None:
    found = 0
    for source in folder().iterdir():
        text = source.read_text()
        found += fault[0] in text
        (tmp_path / source.name).write_text(text.replace(*fault))
    assert found
    with kernels_on_cpu(trusted=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "module_on", lambda device, of: Module(tmp_path / f"{of}.cu", "fast"))
        with pytest.warns(RuntimeWarning, match=rf"the kernel '{of}_{form}' returns wrong numbers on cpu"):
            assert not trust.agrees(f"{of}_{form}", torch.device("cpu"))


@every_format
def test_a_form_that_is_not_trusted_leaves_the_other_kernels_alone(
    form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "TRIALS", {**trials.TRIALS, f"sgd_{form}": lambda device: False})
    tx, (params, low) = MAKE["sgd momentum"](), stored(form, dtype)
    g, seed = grads(1, dtype), seed_for(form)
    expected = in_passes(tx, g, tx.init(params), params, low, form, seed=seed)
    with kernels_on_cpu(trusted=False) as names, pytest.warns(RuntimeWarning, match=f"the kernel 'sgd_{form}'"):
        found = tx.fused(g, tx.init(params), params, low=low, form=form, seed=seed)
    assert same_bits(found, expected)
    assert names[-1] in ("sgd_f32_bf16", "sgd_bf16_bf16", "sgd_f16_f16")


@given(
    name=st.sampled_from(list(MAKE)),
    kinds=st.lists(st.tuples(st.integers(0, 300), st.sampled_from([F32, F16, BF16])), min_size=1, max_size=4),
    wide=st.lists(st.booleans(), min_size=4, max_size=4),
    formats=st.sampled_from(FORMATS),
    seed=st.integers(-(2**63), 2**63 - 1),
    donate=st.booleans(),
    finite=st.sampled_from([None, True, False]),
)
def test_any_mix(
    name: str, kinds: list[Any], wide: list[bool], formats: Any, seed: int, donate: bool, finite: bool | None
) -> None:
    (form, dtype), tx = formats, MAKE[name if name != "adamw mask" else "adamw"]()
    full = [numbers(size, seed=index) for index, (size, _) in enumerate(kinds)]
    params = [leaf if keep else leaf.to(dtype) for leaf, keep in zip(full, wide, strict=False)]
    low = master.init(params, full, form=form)
    g = [numbers(size, dtype, index + 20) for index, (size, dtype) in enumerate(kinds)]
    state, word = tx.init(params), torch.tensor(seed) if form == "stochastic" else None
    expected = in_passes(tx, g, state, params, low, form, seed=word)
    expected = copy.deepcopy((params, low, state)) if finite is False else expected
    flag = None if finite is None else torch.tensor(finite)
    with kernels_on_cpu():
        found = tx.fused(g, state, params, low=low, finite=flag, donate=donate, form=form, seed=word)
    assert same_bits(plain(found), plain(expected)), differing(found, expected)
