"""Chains of parts that only look, and of an optimizer with a one-pass form: they have it too, and see the same."""

import copy
import weakref
from typing import Any

import pytest
import torch

import fmp
from fmp import _compat, optim, tree
from fmp.held import Held
from fmp.numerics import watch_gradients
from fmp.optim.fused import Request, run_fused
from fmp.testing import check_optimizer
from tests.bits import differing, same_bits
from tests.optim.battery import grads, params
from tests.test_step_fused import BATCHES, CASES, PARAMS, loss_fn

CHAINS: dict[str, Any] = {
    "chain": lambda last: optim.chain(watch_gradients(), watch_gradients("bf16", scale=8.0), last),
    "named": lambda last: optim.named_chain(("z", watch_gradients()), ("a", last)),
    "nested": lambda last: optim.chain(
        optim.chain(watch_gradients()),
        optim.named_chain(("z", watch_gradients("bf16")), ("y", optim.chain())),
        optim.chain(watch_gradients("f8e5m2"), last),
    ),
}
every_chain = pytest.mark.parametrize("kind", CHAINS)
donated_or_not = pytest.mark.parametrize("donate", [False, True])


def watches(state):
    """Finds the states of the watchers, whatever they lie in."""
    if isinstance(state, fmp.numerics.WatchState):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if type(state) is tuple else ()
    return [watch for part in parts for watch in watches(part)]


def wide(given, *factors):
    for factor in factors:
        given = tree.map(lambda grad: None if grad is None else grad.float() * factor, given)
    return given


@pytest.mark.parametrize(
    ("tx", "has_it", "entrywise"),
    [
        (optim.chain(optim.sgd(0.1)), True, True),
        (optim.named_chain(("only", optim.sgd(0.1))), True, True),
        *[(make(optim.adamw(0.1)), True, False) for make in CHAINS.values()],
        (optim.chain(watch_gradients(), optim.lion(0.1)), False, True),
        (optim.chain(watch_gradients(), optim.clip_by_global_norm(1.0), optim.sgd(0.1)), False, True),
        (optim.chain(optim.sgd(0.1), watch_gradients()), False, True),
        (optim.chain(optim.ema(0.9), optim.sgd(0.1)), False, True),
        (optim.chain(optim.masked(watch_gradients(), ["w"]), optim.sgd(0.1)), False, True),
        (optim.chain(watch_gradients()), False, True),
        (optim.chain(), False, True),
    ],
)
def test_which_chains_have_a_one_pass_form(tx, has_it, entrywise):
    assert ((tx.fused is not None), tx.entrywise) == (has_it, entrywise)


@every_chain
@donated_or_not
@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_bits_of_one_without_it(case, kind, donate):
    tx = CHAINS[kind](optim.adamw(0.01))
    one_pass, usual = (fmp.train_step(loss_fn, t, **CASES[case], donate=donate) for t in (tx, tx._replace(fused=None)))
    found, expected = one_pass.init(PARAMS), usual.init(PARAMS)
    for batch in BATCHES:
        found, _ = one_pass(found, batch)
        expected, _ = usual(expected, batch)
        assert same_bits(found, expected), differing(found, expected)
    counts = [int(watch.count) for watch in watches(found.opt_state)]
    assert set(counts) == {2 if "loss_scale" in CASES[case] else 3}


@every_chain
@donated_or_not
@pytest.mark.parametrize("case", [case for case in CASES if "loss_scale" in CASES[case]])
def test_torchs_kernel_runs_and_a_skipped_step_keeps_what_was_measured(case, kind, donate, monkeypatch):
    calls, run = [], _compat.fused_adamw_
    monkeypatch.setattr(_compat, "fused_adamw_", lambda *args, **kwargs: calls.append(1) or run(*args, **kwargs))
    tx = CHAINS[kind](optim.adamw(0.01, fused=True))
    one_pass, usual = (fmp.train_step(loss_fn, t, **CASES[case], donate=donate) for t in (tx, tx._replace(fused=None)))
    state, _ = one_pass(one_pass.init(PARAMS), BATCHES[0])
    assert calls
    expected, _ = usual(usual.init(PARAMS), BATCHES[0])
    assert len(calls) == 1
    before = copy.deepcopy(state.opt_state)
    assert same_bits(watches(before), watches(expected.opt_state))
    assert all(watch.amax["w"] > 0 for watch in watches(before))
    state, metrics = one_pass(state, BATCHES[1])
    assert bool(metrics.skipped)
    assert same_bits(state.opt_state, before)


def test_donation_reuses_the_memory():
    step = fmp.train_step(loss_fn, CHAINS["chain"](optim.adamw(0.01, fused=True)), **CASES["o2"], donate=True)
    state = step.init(PARAMS)
    old = state.master["w"], state.opt_state[-1].first_moment["w"]
    state, _ = step(state, BATCHES[0])
    assert state.master["w"] is old[0]
    assert state.opt_state[-1].first_moment["w"] is old[1]


@every_chain
@donated_or_not
@pytest.mark.parametrize("factors", [(None, None), (0.25, None), (None, 0.3), (0.25, 0.3)])
def test_observers_see_gradients_as_update_does(kind, donate, factors):
    tx, values = CHAINS[kind](optim.adamw(0.1, fused=True)), params()
    state, given = tx.init(values), grads(values, torch.float16)
    given["layer"]["bias"] = None
    known = [torch.tensor(factor) for factor in factors if factor is not None]
    expected = watches(tx.update(wide(given, *known), state, values)[1])
    asked = {"donate": donate, "inv_scale": factors[0], "clip": factors[1]}
    asked = {name: torch.tensor(value) if isinstance(value, float) else value for name, value in asked.items()}
    before = copy.deepcopy(watches(state))
    for finite in (False, True):
        found = tx.fused(given, copy.deepcopy(state), copy.deepcopy(values), finite=torch.tensor(finite), **asked)
        assert tree.structure(found[2]) == tree.structure(state)
        assert same_bits(watches(found[2]), expected if finite else before)
    assert all(watch.measured["layer"]["bias"].isnan().all() for watch in expected)


def test_gradients_are_read_leaf_by_leaf():
    seen = []

    def observe(given, state, read):
        copies = []
        for grad in tree.leaves(given):
            assert sum(copy() is not None for copy in copies) == 0
            found = read(grad)
            if grad is not None:
                seen.append((grad.dtype, found.dtype))
                copies.append(weakref.ref(found))
            del found
        return state

    look = optim.GradientTransformation(lambda params: (), lambda g, s, p: (g, s), observe=observe)
    tx: Any = optim.chain(look, optim.adamw(0.1))
    values = params()
    tx.fused(grads(values, torch.float16), tx.init(values), values, inv_scale=0.5)
    assert seen == [(torch.float16, torch.float32)] * 3


@pytest.mark.parametrize("make", [optim.chain, lambda *parts: optim.named_chain(*zip("ab", parts, strict=True))])
def test_gradients_and_moments_are_held_by_the_last_part_alone(make):
    alive = []

    def fused(grads, state, params, **request):
        leaves = [weakref.ref(of["w"]) for of in (grads, state, params)]
        del grads, state, params
        alive.extend(leaf() is not None for leaf in leaves)
        return {}, None, {}

    last = optim.GradientTransformation(lambda p: tree.map(torch.zeros_like, p), lambda g, s, p: (g, s), fused)
    tx: Any = make(watch_gradients(), last)
    held = Held(grads={"w": torch.ones(3)}, state=tx.init({"w": torch.ones(3)}), params={"w": torch.ones(3)})
    run_fused(tx.fused, held, Request())
    assert alive == [False] * 3


def observer(observe):
    return optim.GradientTransformation(
        lambda params: {"count": torch.zeros(())}, lambda g, state, p: (g, state), observe=observe
    )


@donated_or_not
@pytest.mark.parametrize(
    ("observe", "error", "message"),
    [
        (lambda given, state, read: (given, state), TypeError, r"part 1 of the chain: its observe returned \(\{'w': "),
        (lambda given, state, read: None, TypeError, r"part 1 of the chain: its observe returned None, and its state "),
        (lambda given, state, read: {"count": torch.zeros(2)}, ValueError, r"^1/count: on_true is f32\[2\], on_false"),
    ],
)
def test_a_broken_observer_is_refused_before_anything_is_overwritten(observe, error, message, donate):
    tx: Any = optim.chain(watch_gradients(), observer(observe), optim.sgd(0.1, fused=True))
    values = {"w": torch.ones(3)}
    with pytest.raises(error, match=message):
        tx.fused({"w": torch.ones(3)}, tx.init(values), values, finite=torch.tensor(True), donate=donate)
    assert torch.equal(values["w"], torch.ones(3))


def test_errors_come_before_anything_is_overwritten():
    tx: Any = optim.chain(watch_gradients(), optim.sgd(0.1, fused=True))
    values = {"w": torch.ones(3)}
    state, given = tx.init(values), {"w": torch.ones(3)}
    with pytest.raises(ValueError, match=r"clip must be a number or a 0-dim tensor, got f32\[3\]"):
        tx.fused(given, state, values, clip=torch.ones(3), donate=True)
    with pytest.raises(TypeError, match="finite must be a boolean tensor"):
        tx.fused(given, state, values, finite=True, donate=True)
    foreign = optim.chain(watch_gradients("bf16"), optim.sgd(0.1)).init(values)
    with pytest.raises(ValueError, match=r"that of watch_gradients\(torch.bfloat16, scale=1\)"):
        tx.fused(given, foreign, values, donate=True)
    with pytest.raises(ValueError, match="zip"):
        tx.fused(given, state[:1], values, donate=True)
    assert torch.equal(values["w"], torch.ones(3))


def test_a_state_of_names_may_come_in_another_order():
    tx, values = CHAINS["named"](optim.adamw(0.1, fused=True)), params()
    state, given = tx.init(values), grads(values)
    expected = tx.fused(given, state, values)
    found = tx.fused(given, dict(sorted(state.items())), values)
    assert list(found[2]) == ["z", "a"]
    assert same_bits(found, expected)


@every_chain
def test_under_vmap_and_compile(kind):
    tx, values = CHAINS[kind](optim.adamw(0.1, fused=True)), {"w": torch.randn(3, 2)}
    state, given = tx.init(values), {"w": torch.randn(3, 2).half()}
    asked = {"inv_scale": torch.tensor(0.5), "clip": torch.tensor(0.25)}
    updates, expected = tx.update(wide(given, *asked.values()), state, values)
    stack = lambda leaf: None if leaf is None else torch.stack([leaf, leaf])
    fused = lambda given, finite: tx.fused(*given, finite=finite, cast_dtype=torch.float64, **asked)
    mapped = torch.func.vmap(fused)(tree.map(stack, (given, state, values)), torch.tensor([False, True]))
    for index, wanted in enumerate(((values, state), (optim.apply_updates(values, updates), expected))):
        own = tree.map(lambda leaf: None if leaf is None else leaf[index], (mapped[0], mapped[2]))
        torch.testing.assert_close(tree.leaves(own), tree.leaves(wanted), equal_nan=True)
    compiled = torch.compile(tx.fused, backend="aot_eager", fullgraph=True)
    found = compiled(given, state, values, finite=torch.tensor(True), **asked)
    torch.testing.assert_close(tree.leaves(found[2]), tree.leaves(expected))


@pytest.mark.parametrize("case", ["o2", "remainder"])
def test_a_step_compiled_and_mapped(case):
    tx = CHAINS["chain"](optim.adamw(0.01, fused=True))
    step, usual = (fmp.train_step(loss_fn, each, **CASES[case]) for each in (tx, tx._replace(fused=None)))
    state = step.init(PARAMS)
    expected, _ = usual(state, BATCHES[0])
    stack = lambda leaf: leaf if leaf is None else torch.stack([leaf, leaf])
    compiled, _ = torch.compile(step, backend="aot_eager", fullgraph=True)(state, BATCHES[0])
    mapped, _ = torch.func.vmap(step)(tree.map(stack, state), torch.stack([BATCHES[0]] * 2))
    for found in (compiled, tree.map(lambda leaf: leaf if leaf is None else leaf[1], mapped)):
        pairs = zip(tree.leaves(watches(found.opt_state)), tree.leaves(watches(expected.opt_state)), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-3) for a, b in pairs)


def test_groups_are_watched_each_by_itself():
    def both(params, batch):
        return loss_fn(params["a"], batch) + 3.0 * loss_fn(params["b"], batch)

    def run(change):
        groups = {key: change(CHAINS["chain"](optim.adamw(0.01))) for key in ("a", "b")}
        step = fmp.train_step(both, groups, **CASES["o2"], clip_norm=0.1, donate=True)
        state = step.init({"a": PARAMS, "b": PARAMS})
        for batch in BATCHES:
            state, _ = step(state, batch)
        return state

    found, expected = run(lambda tx: tx), run(lambda tx: tx._replace(fused=None))
    assert same_bits(found, expected), differing(found, expected)


def test_inside_of_a_partition_update_is_taken():
    tx = optim.partition({"all": CHAINS["chain"](optim.adamw(0.1, fused=True))}, lambda path, leaf: "all")
    assert (tx.fused, tx.observe) == (None, None)


@pytest.mark.parametrize("fused", [False, True])
def test_it_keeps_the_laws(fused):
    tx = CHAINS["chain"](optim.adamw(0.1, fused=fused))
    check_optimizer(tx, decays=True, compile=False, examples=3)
    check_optimizer(CHAINS["named"](optim.sgd(0.1, momentum=0.9, fused=fused)), compile=False, examples=3)
    check_optimizer(optim.chain(watch_gradients(), optim.chain(watch_gradients("bf16"))), compile=False, examples=3)
