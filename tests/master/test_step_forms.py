"""The train step with each form of master weights: one battery of laws."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fmp
from fmp import master, tree
from fmp.master import FORMS
from fmp.step.advance import advance
from tests.bits import differing, same_bits, snapshot, storages
from tests.host import NoHostSync
from tests.master.battery import BY_DTYPE, CASES, named

BF16 = torch.bfloat16
every_form = pytest.mark.parametrize("case", CASES, ids=named)


def squares(params, batch):
    return sum(((leaf.float() - batch.float()) ** 2).sum() for leaf in tree.leaves(params))


def given_gradient(params, gradient):
    """A loss whose gradient is the batch."""
    pairs = zip(tree.leaves(params), tree.leaves(gradient), strict=True)
    return sum((leaf.float() * slope.float()).sum() for leaf, slope in pairs)


def step_of(case, loss_fn=squares, optimizer=None, dtype=BF16, **options):
    policy = fmp.opt_level("O2", dtype, master_weights=case.form)
    return fmp.train_step(loss_fn, optimizer or fmp.optim.adamw(0.01), policy=policy, **{"loss_scale": 8.0, **options})


def full_of(case, state):
    return master.merge(state.params, state.master, form=case.form)


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    w, v, norm = (torch.randn(size, generator=generator) for size in [(5, 3), (4,), (3,)])
    return {"w": w, "inner": [v], "norm": norm}


TARGETS = [torch.tensor(value) for value in (0.5, -0.25, float("inf"), 0.125, 1.0)]


def test_every_form_is_in_the_battery():
    assert {case.form for case in CASES} == set(FORMS)


@pytest.mark.parametrize(("case", "dtype"), BY_DTYPE, ids=named)
def test_what_a_state_holds(case, dtype):
    state = step_of(case, dtype=dtype).init(problem())
    rest = dtype if case.form == "kahan" else case.rest
    assert (state.params["w"].dtype, state.params["norm"].dtype) == (dtype, torch.float32)
    assert state.master["norm"] is None
    assert state.master["w"] is None if rest is None else state.master["w"].dtype == rest
    found = storages(state)
    assert len(found) == len(set(found))


@pytest.mark.parametrize(("case", "dtype"), BY_DTYPE, ids=named)
def test_masters_start_from_the_values_before_rounding(case, dtype):
    params = problem()
    full = full_of(case, step_of(case, dtype=dtype).init(params))
    if case.exact:
        assert same_bits(full, params)
    digits = case.digits if dtype == BF16 else 10
    for found, value in zip(tree.leaves(full), tree.leaves(params), strict=True):
        torch.testing.assert_close(found, value, rtol=2.0**-digits, atol=2.0**-24 if dtype == torch.float16 else 0.0)


def test_a_source_half_way_above_an_even_parameter_is_exact_with_a_remainder():
    params = {"w": torch.tensor([1.0 + 2.0**-8])}
    for case in CASES:
        if case.exact:
            assert same_bits(full_of(case, step_of(case).init(params)), params)


@pytest.mark.parametrize(("case", "dtype"), BY_DTYPE, ids=named)
def test_a_skipped_step_leaves_every_bit(case, dtype):
    step = step_of(case, dtype=dtype, ema=0.9, loss_scale=fmp.DynamicLossScale(8.0))
    state, _ = step(step.init(problem(), seed=3), TARGETS[0])
    after, metrics = step(state, torch.tensor(float("inf")))
    assert metrics.skipped
    assert differing(state, after) == {"skip_count", "loss_scale/loss_scale", "loss_scale/growth_count"}


@pytest.mark.parametrize(("case", "dtype"), BY_DTYPE, ids=named)
@settings(max_examples=10)
@given(values=st.lists(st.floats(-(2.0**14), 2.0**14, width=32), min_size=1, max_size=20))
def test_zero_gradients_change_no_parameter_and_no_master(case, dtype, values):
    step = step_of(case, given_gradient, fmp.optim.sgd(0.1, momentum=0.9), dtype)
    first = state = step.init({"w": torch.tensor(values)})
    for _ in range(2):
        state, _ = step(state, {"w": torch.zeros(len(values))})
    assert same_bits((state.params, state.master), (first.params, first.master))


@every_form
def test_updates_too_small_for_the_parameter_add_up(case):
    count = 4096
    step = step_of(case, given_gradient, fmp.optim.sgd(1.0))
    state = step.init({"w": torch.ones(count)})
    for _ in range(100):
        state, _ = step(state, {"w": torch.full((count,), 2.0**-13)})
    expected = 1.0 - 100 * 2.0**-13
    # Each stochastic step errs by less than a spacing of 2^-8, independently.
    tolerance = 2.0**-23 * 100 if case.exact else 2.0**-16 if case.rest else 5 * 2.0**-8 * (100 / count) ** 0.5
    assert full_of(case, state)["w"].mean().item() == pytest.approx(expected, abs=tolerance)
    nearest = torch.tensor(expected).to(BF16).float()
    assert state.params["w"].float().mean().item() == pytest.approx(float(nearest), abs=2.0**-8)


@pytest.mark.parametrize("case", [case for case in CASES if case.exact], ids=named)
def test_exact_forms_follow_float32_bit_for_bit(case):
    gradients = [fmp.cast(problem(seed), BF16) for seed in range(1, 20)]
    step = step_of(case, given_gradient, ema=0.9)
    exact = fmp.train_step(given_gradient, fmp.optim.adamw(0.01), loss_scale=8.0, ema=0.9)
    state, reference = step.init(problem()), exact.init(problem())
    for gradient in gradients:
        state, _ = step(state, gradient)
        reference, _ = exact(reference, gradient)
    assert same_bits(full_of(case, state), reference.params)
    assert same_bits((state.opt_state, state.ema), (reference.opt_state, reference.ema))


@pytest.mark.parametrize("case", [case for case in CASES if case.form in ("f32", "kahan")], ids=named)
def test_parameters_are_their_masters_rounded_to_nearest(case):
    step = step_of(case)
    state = step.init(problem())
    for target in TARGETS:
        state, _ = step(state, target)
        rounded = fmp.cast(full_of(case, state), BF16)
        assert same_bits(state.params, {**rounded, "norm": state.params["norm"]})


@every_form
def test_a_step_is_pure_and_asks_nothing_of_the_host(case):
    step = step_of(case, ema=0.9, clip_norm=1.0)
    state = step.init(problem(), seed=1)
    before = snapshot(state)
    with NoHostSync():
        once, again = step(state, TARGETS[0])[0], step(state, TARGETS[0])[0]
    assert same_bits(once, again)
    assert same_bits(state, before)
    found = storages(once)
    assert len(found) == len(set(found))
    assert not set(found) & set(storages(state.params))


def run(step, state, targets=TARGETS):
    for target in targets:
        state, _ = step(state, target)
    return state


@every_form
def test_a_donating_step_has_the_same_bits(case):
    keeping, donating = (step_of(case, ema=0.9, donate=donate) for donate in (False, True))
    assert same_bits(run(donating, donating.init(problem())), run(keeping, keeping.init(problem())))


@every_form
def test_a_compiled_step_has_the_same_bits_and_compiles_once(case):
    step = step_of(case, optimizer=fmp.optim.sgd(0.01), ema=0.9)
    fast = dataclasses.replace(step, advance=torch.compile(advance, backend="aot_eager", fullgraph=True))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert same_bits(run(fast, fast.init(problem())), run(step, step.init(problem())))


@every_form
def test_an_ensemble_equals_runs_of_its_members(case):
    step = step_of(case, ema=0.9)
    states = [step.init(problem(index), seed=index) for index in range(3)]
    ensemble = tree.map(lambda *leaves: None if leaves[0] is None else torch.stack(leaves), *states)
    for target in TARGETS:
        targets = target * torch.tensor([1.0, 0.5, 0.25])
        ensemble, _ = torch.func.vmap(step)(ensemble, targets)
        states = [step(state, target)[0] for state, target in zip(states, targets, strict=True)]
    for index, state in enumerate(states):
        assert same_bits(tree.map(lambda leaf: None if leaf is None else leaf[index].clone(), ensemble), state)


@every_form
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(case, tmp_path):
    step = step_of(case, ema=0.9)
    middle = run(step, step.init(problem(), seed=4), TARGETS[:3])
    fmp.checkpoint.save(middle, tmp_path / "state.fmp")
    restored = fmp.checkpoint.load(step.init(problem(1)), tmp_path / "state.fmp")
    assert same_bits(restored, middle)
    assert same_bits(run(step, restored, TARGETS[3:]), run(step, middle, TARGETS[3:]))


@every_form
def test_an_extended_state_keeps_its_leaves_and_their_future(case):
    step = step_of(case, ema=0.9)
    state = run(step, step.init(problem(), seed=2))
    extended = step.extend(state, {"a": torch.randn(7)})
    found = dict(tree.items(extended))
    assert all(same_bits(found[path], leaf) for path, leaf in tree.items(state))
    later, alone = run(step, extended), run(step, state)
    for part in ("params", "master", "ema"):
        assert same_bits({**getattr(later, part), "a": None}, {**getattr(alone, part), "a": None})


@every_form
def test_several_optimizers(case):
    optimizers = {"left": fmp.optim.adamw(0.01), "right": fmp.optim.adamw(0.01)}
    step = step_of(case, optimizer=optimizers)
    params = {"left": problem(), "right": problem()}
    state = run(step, step.init(params))
    for key in params:
        assert not same_bits(state.params[key]["w"], step.init(params).params[key]["w"])
    # The same leaves in two groups differ by the noise only, and only where there is some.
    assert same_bits(state.params["left"], state.params["right"]) == (case.rest is not None)


@every_form
def test_several_losses_that_share_parameters(case):
    step = step_of(case, loss_fn={"a": squares, "b": squares})
    twice = step_of(case, loss_fn=lambda params, batch: squares(params, batch) + squares(params, batch))
    found, expected = run(step, step.init(problem())), run(twice, twice.init(problem()))
    for one, other in zip(tree.leaves(full_of(case, found)), tree.leaves(full_of(case, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-6, atol=2.0**-6)


@every_form
def test_the_average_is_of_the_numbers_before_rounding(case):
    step = step_of(case, given_gradient, fmp.optim.sgd(1.0), ema=0.5)
    state, _ = step(step.init({"w": torch.ones(50)}), {"w": torch.full((50,), 2.0**-12)})
    assert same_bits(state.ema["w"], torch.full((50,), 1.0 - 2.0**-13))


@every_form
def test_the_derivative_by_initial_parameters_is_that_without_rounding(case):
    def outer(step):
        def run_from(w):
            state = run(step, step.init({"w": w}), [torch.tensor([1.0, 2.0, 3.0])] * 3)
            return (state.params["w"].float() ** 3).sum()

        return run_from

    w = torch.tensor([0.25, -0.5, 0.0])
    expected = torch.func.grad(outer(fmp.train_step(squares, fmp.optim.sgd(0.125))))(w)
    found = torch.func.grad(outer(step_of(case, optimizer=fmp.optim.sgd(0.125))))(w)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.0)


def stochastic_steps(seeds, steps, **options: Any):
    """The parameters after some steps whose updates are half way between two numbers."""
    policy = fmp.opt_level("O3", "bf16", master_weights="stochastic", loss_scale=8.0)
    step = fmp.train_step(given_gradient, fmp.optim.sgd(1.0), policy=policy, **options)
    found = []
    for seed in seeds:
        state = step.init({"w": torch.ones(1000)}, seed=seed)
        for _ in range(steps):
            state, _ = step(state, {"w": torch.full((1000,), -(2.0**-8))})
        found.append(state.params["w"])
    return found


def test_seeds_and_steps_draw_differently():
    one, other, again = stochastic_steps([0, 1, 0], steps=1)
    assert same_bits(one, again)
    assert 400 < (one != other).sum() < 600
    # The same draw in the second step would move each weight by two updates of one kind: to 1 or to 1 + 2^-6.
    (two,) = stochastic_steps([0], steps=2)
    assert 400 < (two == 1.0 + 2.0**-7).sum() < 600


def test_the_noise_of_the_rounding_is_not_that_of_the_loss():
    seen = []

    def loss_fn(params, batch, *, seed):
        seen.append(seed.clone())
        return given_gradient(params, batch)

    policy = fmp.opt_level("O3", "bf16", master_weights="stochastic")
    step = fmp.train_step(loss_fn, fmp.optim.sgd(1.0), policy=policy)
    state, _ = step(step.init(torch.ones(1000)), torch.full((1000,), -(2.0**-8)))
    up = fmp.master.round_stochastically(torch.full((1000,), 1.0 + 2.0**-8), BF16, seen[0])
    assert 400 < (up == state.params).sum() < 600
