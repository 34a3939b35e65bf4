"""Several losses, optimizers and scalers in one step, each skipping on its own."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import fmp
from fmp import tree
from tests.bits import differing, same_bits, snapshot

INF = float("inf")
KEYS = ("encoder", "head", "probe")


def params():
    return {"encoder": {"w": torch.ones(2)}, "head": torch.full((2,), 2.0), "probe": torch.full((), 3.0)}


def main(params, batch):
    return ((params["encoder"]["w"] * params["head"]).float() * batch["main"].float()).sum()


def probe(params, batch):
    return ((params["encoder"]["w"] * params["probe"]).float() * batch["probe"].float()).sum()


def batch_of(main=1.0, probe=1.0):
    return {"main": torch.tensor([main, 1.0]), "probe": torch.tensor([1.0, probe])}


USES = {"main": ["encoder", "head"], "probe": ["probe"]}


def two_losses(**options: Any):
    defaults: dict[str, Any] = {
        "loss_scale": fmp.DynamicLossScale(64.0, growth_interval=2),
        "uses": USES,
        "ema": 0.9,
    }
    optimizers = {
        "encoder": fmp.optim.sgd(0.125),
        "head": fmp.optim.adamw(0.1),
        "probe": fmp.optim.sgd(0.5, momentum=0.5),
    }
    return fmp.train_step({"main": main, "probe": probe}, optimizers, **{**defaults, **options})


# The states and metrics


def test_everything_is_keyed_by_loss_or_by_group():
    step = two_losses(policy=fmp.opt_level("O2"), has_aux={"main": False, "probe": False})
    state, metrics = step(step.init(params()), batch_of())
    for part in (state.params, state.master, state.opt_state, state.ema, state.skip_count):
        assert set(part) == set(KEYS)
    for part in (metrics.skipped, metrics.grad_norm):
        assert set(part) == set(KEYS)
    for part in (state.loss_scale, metrics.loss, metrics.aux, metrics.grads_finite, metrics.loss_scale):
        assert set(part) == {"main", "probe"}
    assert state.step.shape == state.seed.shape == ()


def test_each_group_gets_the_gradient_of_the_losses_that_use_it():
    step = two_losses(loss_scale=None, uses=None)
    state = step.init(params())
    _, metrics = step(state, batch_of())
    # Of main: encoder 2, head 1, probe 0. Of probe: encoder 3, head 0, probe 2.
    expected = {"encoder": (2 * 5.0**2) ** 0.5, "head": 2**0.5, "probe": 2.0}
    torch.testing.assert_close({key: norm.item() for key, norm in metrics.grad_norm.items()}, expected)

    _, metrics = two_losses(loss_scale=None)(state, batch_of())
    expected = {"encoder": (2 * 2.0**2) ** 0.5, "head": 2**0.5, "probe": 2.0}
    torch.testing.assert_close({key: norm.item() for key, norm in metrics.grad_norm.items()}, expected)


def test_all_losses_see_the_same_parameters():
    step = two_losses()
    state = step.init(params())
    together, metrics = step(state, batch_of())
    assert (metrics.loss["main"], metrics.loss["probe"]) == (4.0, 6.0)

    alone = fmp.train_step(
        lambda part, batch: probe({**params(), "probe": part}, batch), fmp.optim.sgd(0.5, momentum=0.5), ema=0.9
    )
    after, _ = alone(alone.init(params()["probe"]), batch_of())
    assert same_bits(together.params["probe"], after.params)
    assert same_bits(together.opt_state["probe"], after.opt_state)


def test_a_shared_group_equals_one_loss_that_is_the_sum():
    both = lambda params, batch: main(params, batch) + probe(params, batch)
    optimizer = fmp.optim.adamw(0.1)
    several = fmp.train_step({"main": main, "probe": probe}, optimizer, loss_scale={"main": 8.0, "probe": 2.0}, ema=0.9)
    one = fmp.train_step(both, optimizer, ema=0.9)
    state, other = several.init(params()), one.init(params())
    for _ in range(3):
        state, metrics = several(state, batch_of(2.0, -3.0))
        other, expected = one(other, batch_of(2.0, -3.0))
        torch.testing.assert_close(metrics.loss["main"] + metrics.loss["probe"], expected.loss)
        torch.testing.assert_close(metrics.grad_norm, expected.grad_norm)
    torch.testing.assert_close(tree.leaves(state.params), tree.leaves(other.params))
    torch.testing.assert_close(tree.leaves(state.ema), tree.leaves(other.ema))
    assert (state.step, state.skip_count) == (3, 0)


def test_one_loss_with_several_optimizers_equals_a_partition():
    optimizers = {"encoder": fmp.optim.sgd(0.1), "head": fmp.optim.adamw(0.1), "probe": fmp.optim.sgd(0.5)}
    both = lambda params, batch: main(params, batch) + probe(params, batch)
    several = fmp.train_step(both, optimizers, loss_scale=16.0)
    one = fmp.train_step(both, fmp.optim.partition(optimizers, {key: key for key in KEYS}), loss_scale=16.0)
    state, other = several.init(params()), one.init(params())
    for _ in range(3):
        state, metrics = several(state, batch_of())
        other, _ = one(other, batch_of())
    assert same_bits(state.params, other.params)
    assert metrics.loss.shape == metrics.loss_scale.shape == ()
    assert set(metrics.skipped) == set(KEYS)


def test_clipping_is_by_group():
    step = two_losses(loss_scale=None, clip_norm=1.0)
    _, metrics = step(step.init(params()), batch_of(main=0.0))
    state, _ = step(step.init(params()), batch_of(main=0.0))
    # The norm of encoder's gradient, (0, 2), is 2; that of probe's, 2.
    assert metrics.grad_norm["encoder"] == 2.0
    torch.testing.assert_close(state.params["encoder"]["w"], torch.tensor([1.0, 1.0 - 0.125]))
    torch.testing.assert_close(state.params["probe"], torch.tensor(3.0 - 0.5))


# Skipping


def touched(before, after):
    return {path.removesuffix("/w") for path in differing(before, after)}


def group_paths(*keys):
    full = {
        "encoder": {"params/encoder", "opt_state/encoder/count", "ema/encoder"},
        "head": {
            "params/head",
            "ema/head",
            *(f"opt_state/head/{name}" for name in ("count", "ages", "first_moment", "second_moment")),
        },
        "probe": {"params/probe", "opt_state/probe/count", "opt_state/probe/momentum", "ema/probe"},
    }
    return set().union(*(full[key] for key in keys))


def test_an_overflow_skips_exactly_the_groups_that_its_loss_uses():
    step = two_losses()
    state = step.init(params())
    after, metrics = step(state, batch_of(main=INF))
    assert {name: bool(flag) for name, flag in metrics.grads_finite.items()} == {"main": False, "probe": True}
    assert {key: bool(flag) for key, flag in metrics.skipped.items()} == {"encoder": True, "head": True, "probe": False}
    scales = {"loss_scale/main/loss_scale", "loss_scale/probe/growth_count"}
    assert touched(state, after) == {
        "step", "skip_count/encoder", "skip_count/head", *scales, *group_paths("probe")
    }  # fmt: skip
    assert (after.step, after.loss_scale["main"].loss_scale, after.loss_scale["probe"].loss_scale) == (1, 32.0, 64.0)

    after, metrics = step(state, batch_of(probe=INF))
    scales = {"loss_scale/probe/loss_scale", "loss_scale/main/growth_count"}
    assert touched(state, after) == {"step", "skip_count/probe", *scales, *group_paths("encoder", "head")}


def test_a_step_that_skips_every_group_does_not_count():
    step = two_losses()
    state = step.init(params())
    after, _ = step(state, batch_of(main=INF, probe=INF))
    assert touched(state, after) == {
        *(f"skip_count/{key}" for key in KEYS), "loss_scale/main/loss_scale", "loss_scale/probe/loss_scale"
    }  # fmt: skip


def test_an_overflow_in_either_loss_skips_a_shared_group():
    uses = {"main": ["encoder", "head"], "probe": ["encoder", "probe"]}
    step = two_losses(uses=uses)
    state = step.init(params())
    for batch, skipped in [
        (batch_of(main=INF), {"encoder", "head"}),
        (batch_of(probe=INF), {"encoder", "probe"}),
        (batch_of(main=INF, probe=INF), {"encoder", "head", "probe"}),
        (batch_of(), set()),
    ]:
        after, metrics = step(state, batch)
        assert {key for key, flag in metrics.skipped.items() if flag} == skipped
        assert fmp.all_finite(after)
        for key in KEYS:
            assert same_bits(state.params[key], after.params[key]) == (key in skipped)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8))
def test_each_loss_scale_moves_on_its_own(overflows):
    step = two_losses(
        loss_scale={
            "main": fmp.DynamicLossScale(64.0, growth_interval=2),
            "probe": fmp.DynamicLossScale(8.0, growth_interval=1),
        }
    )
    state = step.init(params())
    alone = {
        "main": fmp.DynamicLossScale(64.0, growth_interval=2),
        "probe": fmp.DynamicLossScale(8.0, growth_interval=1),
    }
    counts: dict[str, int] = dict.fromkeys(KEYS, 0)
    for bad_main, bad_probe in overflows:
        state, metrics = step(state, batch_of(INF if bad_main else 1.0, INF if bad_probe else 1.0))
        for name, bad in (("main", bad_main), ("probe", bad_probe)):
            assert metrics.loss_scale[name] == alone[name].loss_scale
            alone[name] = alone[name].adjust(torch.tensor(not bad))
            for key in USES[name]:
                counts[key] += bad
    assert same_bits(state.loss_scale, alone)
    assert {key: int(count) for key, count in state.skip_count.items()} == counts
    assert state.step == sum(not (main and probe) for main, probe in overflows)


def test_who_skips_is_decided_by_loss():
    step = two_losses(loss_scale={"main": "dynamic", "probe": None})
    state = step.init(params())
    _, metrics = step(state, batch_of(main=INF, probe=INF))
    assert {key: bool(flag) for key, flag in metrics.skipped.items()} == {"encoder": True, "head": True, "probe": False}
    assert same_bits(metrics.loss_scale, {"main": torch.tensor(2.0**16), "probe": torch.tensor(1.0)})

    step = two_losses(loss_scale={"main": "dynamic", "probe": None}, skip_nonfinite={"main": False, "probe": True})
    _, metrics = step(state, batch_of(main=INF, probe=INF))
    assert {key: bool(flag) for key, flag in metrics.skipped.items()} == {
        "encoder": False,
        "head": False,
        "probe": True,
    }


def test_a_bad_loss_that_does_not_skip_spoils_only_its_own_groups():
    step = two_losses(loss_scale={"main": None, "probe": 8.0})
    after, _ = step(step.init(params()), batch_of(main=INF))
    assert fmp.all_finite((after.params["probe"], after.opt_state["probe"]))
    assert not fmp.all_finite(after.params["head"])


# Buffers, seeds and auxiliary output


def with_buffers(factor):
    def loss_fn(params, batch, *, buffers, seed):
        value = (params["w"] * batch).sum() * factor
        return value, {"seen": buffers["seen"] * 10 + factor, "mean": buffers["mean"] + value.detach()}, {"seed": seed}

    return loss_fn


def test_buffers_pass_from_loss_to_loss_and_a_bad_loss_leaves_them():
    step = fmp.train_step(
        {"one": with_buffers(1), "two": with_buffers(2)}, fmp.optim.sgd(0.0), loss_scale=8.0, has_aux=True
    )
    state = step.init({"w": torch.ones(1)}, buffers={"seen": torch.tensor(0), "mean": torch.zeros(())})
    after, metrics = step(state, torch.ones(1))
    assert same_bits(after.buffers, {"seen": torch.tensor(12), "mean": torch.tensor(3.0)})
    assert metrics.aux["one"]["seed"] != metrics.aux["two"]["seed"]
    assert same_bits(step(state, torch.ones(1)), (after, metrics))

    bad = {"one": with_buffers(1), "two": with_buffers(INF)}
    step = fmp.train_step(bad, fmp.optim.sgd(0.0), loss_scale=8.0, has_aux=True)
    after, _ = step(
        step.init({"w": torch.ones(1)}, buffers={"seen": torch.tensor(0.0), "mean": torch.zeros(())}), torch.ones(1)
    )
    assert same_bits(after.buffers, {"seen": torch.tensor(1.0), "mean": torch.tensor(1.0)})


def test_a_loss_that_takes_no_buffers_does_not_round_those_of_another():
    def takes(params, batch, *, buffers):
        return params["w"].float().sum(), {"mean": buffers["mean"].float() + 2.0**-20}

    policy = fmp.Policy(torch.float32, torch.bfloat16, torch.float32)
    losses = {"takes": takes, "ignores": lambda params, batch: params["w"].float().sum()}
    step = fmp.train_step(losses, fmp.optim.sgd(0.1), policy=policy)
    state, _ = step(step.init({"w": torch.ones(1)}, buffers={"mean": torch.ones(1)}), None)
    assert same_bits(state.buffers["mean"], torch.tensor([1.0 + 2.0**-20]))


def test_one_of_several_losses_may_be_constant():
    losses = {"main": lambda params, batch: (params * batch).sum(), "off": lambda params, batch: torch.zeros(())}
    step = fmp.train_step(losses, fmp.optim.sgd(1.0))
    state, metrics = step(step.init(torch.ones(2)), torch.ones(2))
    assert metrics.loss["off"] == 0.0
    assert same_bits(state.params, torch.zeros(2))


def test_auxiliary_output_is_by_loss():
    losses = {"a": lambda p, b: p["w"].sum(), "b": lambda p, b: (p["w"].sum(), "text")}
    step = fmp.train_step(losses, fmp.optim.sgd(0.1), has_aux={"a": False, "b": True})
    _, metrics = step(step.init({"w": torch.ones(1)}), None)
    assert metrics.aux == {"a": None, "b": "text"}


def test_accumulation_with_several_losses():
    step, whole = two_losses(accumulate=2, loss_scale=None), two_losses(loss_scale=None)
    state = step.init(params())
    rows = {"main": torch.ones(2, 2), "probe": torch.ones(2, 2)}
    after, metrics = step(state, rows)
    expected, whole_metrics = whole(state, {name: leaf[:1] for name, leaf in rows.items()})
    torch.testing.assert_close(tree.leaves(after), tree.leaves(expected))
    torch.testing.assert_close(metrics.grad_norm, whole_metrics.grad_norm)


def test_a_step_with_several_losses_is_pure():
    step = two_losses(policy=fmp.opt_level("O2"), clip_norm=1.0, accumulate=2)
    batch = {"main": torch.ones(2, 2), "probe": torch.ones(2, 2)}
    state, _ = step(step.init(params()), batch)
    before = snapshot((state, batch))
    assert same_bits(step(state, batch), step(state, batch))
    assert same_bits((state, batch), before)


def test_alternating_updates_are_two_steps():
    def discriminate(params, batch, *, frozen):
        return ((params["d"] * (batch - frozen["g"])) ** 2).sum()

    def generate(params, batch, *, frozen):
        return ((frozen["d"] * (batch - params["g"])) ** 2).sum()

    steps = {
        "d": fmp.train_step(discriminate, fmp.optim.sgd(0.25), loss_scale="dynamic"),
        "g": fmp.train_step(generate, fmp.optim.sgd(0.25), loss_scale="dynamic"),
    }
    states = {name: step.init({name: torch.full((1,), 2.0)}) for name, step in steps.items()}
    states["d"], metrics = steps["d"](states["d"], torch.ones(1), frozen=states["g"].params)
    assert (metrics.loss, states["d"].params["d"]) == (4.0, 1.0)
    states["g"], metrics = steps["g"](states["g"], torch.ones(1), frozen=states["d"].params)
    assert (metrics.loss, states["g"].params["g"]) == (1.0, 1.5)


# What does not fit together


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_scale": {"mian": 1.0}}, KeyError, r"names the losses \['mian'\]; loss_fn names \['main', 'probe'\]"),
        ({"has_aux": {"main": True, "prob": False}}, KeyError, r"has_aux names the losses \['prob'\]"),
        ({"skip_nonfinite": {"prob": True}}, KeyError, r"skip_nonfinite names the losses \['prob'\]"),
        ({"uses": {"mian": ["encoder"]}}, KeyError, r"uses names the losses \['mian'\]"),
        ({"uses": {**USES, "main": ["decoder"]}}, KeyError, r"uses\['main'\] names \['decoder'\]; the optimizers are"),
        ({"uses": {**USES, "main": ["head"]}}, KeyError, r"no loss uses the optimizers \['encoder'\]"),
        ({"uses": {**USES, "main": "head"}}, TypeError, r"uses\['main'\] must be a list"),
        ({"uses": {**USES, "main": []}}, TypeError, r"uses\['main'\] must be a list of at least one"),
        ({"uses": ["encoder"]}, TypeError, "uses must be a dictionary"),
    ],
)
def test_dictionaries_must_agree(options, error, message):
    with pytest.raises(error, match=message):
        two_losses(**options)


@pytest.mark.parametrize(
    ("losses", "optimizers", "error", "message"),
    [
        ({}, fmp.optim.sgd(0.1), ValueError, "loss_fn must have non-empty strings as keys"),
        ({"": main}, fmp.optim.sgd(0.1), ValueError, "loss_fn must have non-empty strings as keys"),
        ({1: main}, fmp.optim.sgd(0.1), ValueError, r"loss_fn must have .* got \[1\]"),
        ({"a": None}, fmp.optim.sgd(0.1), TypeError, r"loss_fn\['a'\] must be a function"),
        (main, {}, ValueError, "optimizer must have non-empty strings as keys"),
        (main, {"": fmp.optim.sgd(0.1)}, ValueError, "optimizer must have non-empty strings"),
        (main, {"a": 0.1}, TypeError, r"optimizer\['a'\] must be a GradientTransformation .*, got 0.1"),
    ],
)
def test_names_of_losses_and_groups(losses, optimizers, error, message):
    with pytest.raises(error, match=message):
        fmp.train_step(losses, optimizers)


@pytest.mark.parametrize(
    ("given_params", "found"),
    [
        ({"encoder": torch.ones(1), "head": torch.ones(1)}, r"\['encoder', 'head'\]"),
        ({**params(), "extra": torch.ones(1)}, r"\['encoder', 'extra', 'head', 'probe'\]"),
        (torch.ones(1), "a Tensor"),
        ([torch.ones(1)], "a list"),
    ],
)
def test_parameters_must_have_the_keys_of_the_optimizers(given_params, found):
    with pytest.raises(KeyError, match=rf"keys of the optimizers, \['encoder', 'head', 'probe'\]; found {found}"):
        two_losses().init(given_params)
