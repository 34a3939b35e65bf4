"""Parameters added in the middle of training."""

import pytest
import torch

import fmp
from fmp import tree
from tests.bits import same_bits, snapshot, storages


def loss_fn(params, batch):
    leaves = [leaf for leaf in tree.leaves(params) if leaf is not None and leaf.dtype.is_floating_point]
    return sum(((leaf.float() - batch) ** 2).sum() for leaf in leaves)


def step_with(**options):
    return fmp.train_step(loss_fn, fmp.optim.adamw(0.1), policy=fmp.opt_level("O2", "bf16"), ema=0.9, **options)


def trained(step, params, steps=3, **options):
    state = step.init(params, **options)
    for _ in range(steps):
        state, _ = step(state, torch.tensor(0.5))
    return state


OLD = {"body": {"w": torch.tensor([1.0, 2.0]), "ids": torch.arange(2)}, "norm": torch.ones(1)}
NEW = {"body": {"v": torch.tensor([1.0 + 2.0**-20])}, "head": [torch.zeros(2), None]}


def test_old_leaves_keep_every_bit_and_new_ones_are_fresh():
    step = step_with()
    state = trained(step, OLD, seed=9)
    before = snapshot(state)
    extended = step.extend(state, NEW)
    assert same_bits(state, before)

    old, found = dict(tree.items(state)), dict(tree.items(extended))
    assert all(same_bits(found[path], leaf) for path, leaf in old.items())
    fresh = step.init(NEW)
    for part in ("params", "master", "ema"):
        assert same_bits(getattr(extended, part)["head"], getattr(fresh, part)["head"])
        assert same_bits(getattr(extended, part)["body"]["v"], getattr(fresh, part)["body"]["v"])
    assert same_bits(extended.master["body"]["v"], NEW["body"]["v"])
    for moment in (extended.opt_state.first_moment, extended.opt_state.second_moment):
        assert same_bits(moment["body"]["v"], torch.zeros(1))
    assert (extended.step, extended.opt_state.count, extended.seed) == (3, 3, 9)


def test_a_new_parameter_moves_as_in_a_run_of_its_own():
    step = step_with()
    extended, alone = step.extend(trained(step, OLD), NEW), step.init(NEW)
    for _ in range(4):
        extended, _ = step(extended, torch.tensor(0.5))
        alone, _ = step(alone, torch.tensor(0.5))
    assert same_bits(extended.master["body"]["v"], alone.master["body"]["v"])
    assert same_bits(extended.params["head"], alone.params["head"])
    assert (extended.opt_state.ages["body"]["v"], extended.opt_state.ages["body"]["w"]) == (4, 7)


def test_an_extended_state_shares_no_memory():
    step = step_with()
    state = trained(step, OLD)
    extended = step.extend(state, NEW)
    found = storages(extended)
    assert len(found) == len(set(found))
    assert not set(found) & set(storages((state, NEW)))


def test_training_goes_on_and_old_parameters_notice_nothing():
    step = step_with()
    state = trained(step, OLD)
    extended = step.extend(state, NEW)
    for _ in range(4):
        state, _ = step(state, torch.tensor(0.5))
        extended, metrics = step(extended, torch.tensor(0.5))
    assert not metrics.skipped
    assert same_bits(extended.params["body"]["w"], state.params["body"]["w"])
    assert same_bits(extended.ema["norm"], state.ema["norm"])
    assert same_bits(
        extended.params,
        fmp.cast(fmp.master.merge(extended.params, extended.master), torch.bfloat16)
        | {"norm": extended.params["norm"]},
    )
    assert extended.params["head"][0].abs().min() > 0.1


def test_a_skip_count_and_a_loss_scale_stay():
    step = step_with(loss_scale=fmp.DynamicLossScale(64.0, growth_interval=5))
    state = trained(step, OLD)
    state, _ = step(state, torch.tensor(float("inf")))
    extended = step.extend(state, NEW)
    assert (extended.skip_count, extended.loss_scale.loss_scale, extended.step) == (1, 32.0, 3)


def test_parameters_are_added_within_a_group():
    optimizers = {"body": fmp.optim.adamw(0.1), "norm": fmp.optim.sgd(0.1, momentum=0.9)}
    step = fmp.train_step(loss_fn, optimizers, policy=fmp.opt_level("O2", "bf16"), ema=0.9)
    state = trained(step, OLD)
    extended = step.extend(state, {"body": {"v": torch.ones(1)}})
    old, found = dict(tree.items(state)), dict(tree.items(extended))
    assert all(same_bits(found[path], leaf) for path, leaf in old.items())
    assert same_bits(extended.opt_state["body"].first_moment["v"], torch.zeros(1))
    with pytest.raises(KeyError, match="keys of the optimizers"):
        step.extend(state, {"head": torch.ones(1)})


def test_buffers_stay():
    def with_buffers(params, batch, *, buffers):
        return loss_fn(params, batch), {"n": buffers["n"] + 1}

    step = fmp.train_step(with_buffers, fmp.optim.sgd(0.1))
    state = trained(step, OLD, buffers={"n": torch.tensor(0)})
    assert step.extend(state, NEW).buffers["n"] == 3


def test_an_average_that_starts_late_starts_from_the_masters():
    policy = fmp.opt_level("O2", "bf16")
    before, after = (fmp.train_step(loss_fn, fmp.optim.adamw(0.1), ema=ema, policy=policy) for ema in (None, 0.9))
    state = trained(before, {"w": torch.tensor([1.0, 2.0])})
    assert same_bits(after.extend(state, {}).ema, state.master)


def test_nothing_added_is_a_copy():
    step = step_with()
    state = trained(step, OLD)
    assert same_bits(step.extend(state, {}), state)


def test_masters_of_parameters_that_the_policy_leaves_alone():
    policy = fmp.Policy(None, None, None, master_weights=True)
    step = fmp.train_step(loss_fn, fmp.optim.adamw(0.1), policy=policy)
    state = trained(step, {"w": torch.ones(2, dtype=torch.float16)})
    extended = step.extend(state, {"v": torch.ones(2, dtype=torch.float16)})
    assert tree.describe(extended.params) == "{'w': f16[2], 'v': f16[2]}"
    assert tree.describe(extended.master) == "{'w': f32[2], 'v': f32[2]}"
    extended, _ = step(extended, torch.tensor(0.5))
    assert tree.describe(extended.params) == "{'w': f16[2], 'v': f16[2]}"


@pytest.mark.parametrize(
    ("added", "error", "message"),
    [
        ({"norm": torch.ones(1)}, KeyError, "params/norm exists already"),
        ({"body": {"w": torch.ones(2)}}, KeyError, "params/body/w exists already"),
        ({"body": torch.ones(2)}, KeyError, "params/body exists already"),
        (
            {"norm": {"x": torch.ones(2)}},
            TypeError,
            "params/norm: parameters can only be added to a dictionary, found Tensor",
        ),
        ({"head": 1.0}, TypeError, "leaf 'head' is 1.0"),
        (torch.ones(2), TypeError, "params must be a dictionary of new parameters, got a Tensor"),
        (None, TypeError, "params must be a dictionary of new parameters, got a NoneType"),
        ([torch.ones(2)], TypeError, "params must be a dictionary of new parameters, got a list"),
    ],
)
def test_what_cannot_be_added(added, error, message):
    step = step_with()
    with pytest.raises(error, match=message):
        step.extend(step.init(OLD), added)


def test_nothing_can_be_added_to_a_list():
    step = step_with()
    with pytest.raises(TypeError, match="params: parameters can only be added to a dictionary, found list"):
        step.extend(step.init([torch.ones(2)]), {"w": torch.ones(2)})


def test_leaves_keep_apart_whose_paths_read_alike():
    step = fmp.train_step(lambda params, batch: params["a"]["b"].sum(), fmp.optim.sgd(0.1))
    state = step.init({"a": {"b": torch.zeros(1)}, "a/b": torch.full((1,), 7.0), 0: torch.ones(1)})
    extended = step.extend(state, {"0": torch.full((1,), 5.0), "a/c": torch.full((1,), 3.0)})
    assert (extended.params["a"]["b"], extended.params["a/b"], extended.params[0], extended.params["0"]) == (0, 7, 1, 5)


def test_the_scaler_of_the_state_stays_with_its_static_fields():
    step = step_with(loss_scale="dynamic")
    scaler = fmp.DynamicLossScale(8.0, growth_interval=5)
    state = tree.replace(trained(step, OLD), loss_scale=scaler)
    assert same_bits(step.extend(state, NEW).loss_scale, scaler)
    assert step.extend(state, NEW).loss_scale.growth_interval == 5
