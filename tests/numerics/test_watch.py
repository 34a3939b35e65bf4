import numpy as np
import pytest
import torch

import fmp
from fmp import tree
from fmp.dtypes import parse_dtype
from fmp.numerics.record import record
from fmp.numerics.watch import watch_gradients
from fmp.testing import check_optimizer
from tests.numerics.recorded_steps import batches, make_step, params, run


def test_a_planted_underflow_is_measured():
    gradient = torch.ones(1000)
    gradient[:370] = 2.0**-25  # the largest number that float16 rounds to zero
    gradient[370:400] = 2.0**-24
    gradient[999] = -3.0
    tx = watch_gradients("fp16")
    updates, state = tx.update({"w": gradient}, tx.init({"w": gradient}), {"w": gradient})
    assert updates["w"] is gradient
    assert state.underflow["w"].item() == pytest.approx(0.37, abs=1e-7)
    assert (state.amax["w"].item(), state.zeros["w"].item(), state.count.item()) == (3.0, 0.0, 1)
    scaled = watch_gradients("fp16", scale=2.0)
    assert scaled.update({"w": gradient}, scaled.init({"w": gradient}), {"w": gradient})[1].underflow["w"] == 0


def test_the_scale_may_be_a_tensor():
    gradient = torch.tensor([2.0**-30, 2.0**-25, 1.0])
    scale = fmp.numerics.suggest_scale(gradient, "fp16")
    tx = watch_gradients(scale=scale)
    state = tx.update(gradient, tx.init(gradient), gradient)[1]
    assert (state.scale, state.underflow.item()) == (scale.item(), 0.0)
    for wrong, message in ((fmp.StaticLossScale(8.0), "pass its .loss_scale"), (torch.ones(2), r"got f32\[2\]")):
        with pytest.raises(TypeError, match=message):
            watch_gradients(scale=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"positive and finite, got -1\.0"):
        watch_gradients(scale=torch.tensor(-1.0))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("numel", [17, 300_000])
def test_underflow_is_what_the_cast_does(dtype, numel):
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-149, 20, (numel,), generator=generator)
    gradient = torch.ldexp(torch.rand(numel, generator=generator) * 2 - 1, exponents)
    gradient[::7] = 0.0
    tx = watch_gradients(dtype)
    state = tx.update(gradient, tx.init(gradient), gradient)[1]
    nonzero = gradient != 0
    lost = (gradient.to(parse_dtype(dtype)).float() == 0) & nonzero
    assert state.underflow.item() == pytest.approx(lost.sum().item() / nonzero.sum().item(), abs=1e-6)
    assert state.zeros.item() == pytest.approx(1 - nonzero.float().mean().item(), abs=1e-6)
    assert state.amax.item() == gradient.abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_any_dtype_pass_untouched(dtype):
    tx = watch_gradients("f8e5m2")
    grads = {"w": torch.tensor([1.0, 0.0], dtype=dtype), "hole": None, "empty": torch.ones(0, dtype=dtype)}
    leaves = {"w": torch.ones(2), "hole": torch.ones(3), "empty": torch.ones(0)}
    updates, state = tx.update(grads, tx.init(leaves), leaves)
    assert all(updates[key] is grads[key] for key in grads)
    assert state.zeros["w"].item() == 0.5
    assert [state.amax["empty"].item(), state.underflow["empty"].item(), state.zeros["empty"].item()] == [0.0, 0.0, 0.0]
    assert state.amax["hole"].isnan()


def test_a_leaf_that_is_no_float_is_not_watched():
    tx = watch_gradients()
    state = tx.init({"w": torch.ones(2), "ids": torch.arange(2), "none": None})
    assert state.measured["ids"] is None
    assert state.measured["none"] is None


def test_infinities_and_nan_show_in_the_amax():
    tx = watch_gradients()
    grads = {"inf": torch.tensor([1.0, -torch.inf]), "nan": torch.tensor([1.0, torch.nan])}
    state = tx.update(grads, tx.init(grads), grads)[1]
    assert state.amax["inf"] == torch.inf
    assert state.amax["nan"].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [10, 140_000])
@pytest.mark.parametrize("mapped", [False, True])
def test_nan_is_neither_zero_nor_lost(dtype, numel, mapped):
    gradient = torch.ones(numel, dtype=dtype)
    gradient[: numel // 2] = torch.nan
    gradient[-2:] = torch.tensor([0.0, 2.0**-24]) if dtype == torch.float16 else torch.tensor([0.0, 1e-12])
    tx = watch_gradients("f8e5m2")

    def after(gradient):
        return tx.update(gradient, tx.init(gradient), gradient)[1]

    state = torch.func.vmap(after)(gradient[None]) if mapped else after(gradient)
    assert state.zeros.item() == pytest.approx(1 / numel, abs=1e-6)
    assert state.underflow.item() == pytest.approx(1 / (numel - 1), abs=1e-6)
    assert state.amax.isnan().all()
    whole = torch.full((numel,), torch.nan, dtype=dtype)
    assert (after(whole).zeros.item(), after(whole).underflow.item()) == (0.0, 0.0)


def test_a_watcher_refuses_the_state_of_another():
    def step_by(*options, **more):
        return make_step(fmp.optim.chain(watch_gradients(*options, **more), fmp.optim.sgd(0.1)))

    old, new = step_by("bf16"), step_by("fp16")
    carry = record(old).init(old.init(params()))
    for other in (new, step_by("bf16", scale=2.0)):
        with pytest.raises(ValueError, match=r"that of watch_gradients\(torch.bfloat16, scale=1\).*the same format"):
            record(other)(carry, batches(1)[0])


def test_a_run_goes_on_with_another_format(tmp_path):
    old, new = (make_step(fmp.optim.chain(watch_gradients(form), fmp.optim.sgd(0.1))) for form in ("bf16", "fp16"))
    carry, _ = record(old)(record(old).init(old.init(params())), batches(1)[0])
    fmp.checkpoint.save(carry, tmp_path / "state.fmp")
    like = record(new).init(new.init(params()))
    state, history = fmp.checkpoint.load(like, tmp_path / "state.fmp")
    state = tree.unflatten(tree.structure(like[0]), tree.leaves(state))
    with pytest.raises(ValueError, match="the history has 'b' in bf16, and it is measured in f16; start a new history"):
        record(new)((state, history), batches(1)[0])
    carry, _ = record(new)(record(new).init(state), torch.full((4,), 2.0**-26))
    assert {form for _, _, form in carry[1].leaves} == {"f16"}
    assert carry[1].arrays()["grad_underflow/w"].tolist() == [1.0]


def test_a_state_without_the_watcher_is_refused():
    watched, plain = make_step(), make_step(fmp.optim.chain(fmp.optim.clip_by_value(1.0), fmp.optim.sgd(0.1)))
    history = record(watched).init(watched.init(params()))[1]
    with pytest.raises(KeyError, match="not the state of watch_gradients"):
        record(plain)((plain.init(params()), history), batches(1)[0])


def test_two_watchers_are_told_apart():
    optimizer = fmp.optim.named_chain(
        ("raw", watch_gradients()),
        ("clip", fmp.optim.clip_by_value(0.5)),
        ("clipped", watch_gradients("bf16")),
        ("sgd", fmp.optim.sgd(0.1)),
    )
    step = make_step(optimizer)
    _, history, _ = run(step, step.init(params()), [torch.full((4,), 3.0)])
    arrays = history.arrays()
    assert (arrays["grad_amax/raw/w"].item(), arrays["grad_amax/clipped/w"].item()) == (3.0, 0.5)
    assert history.leaves[0] == ("grad", "clipped/b", "bf16")


def test_the_watcher_obeys_the_laws_of_an_optimizer():
    check_optimizer(watch_gradients())


def test_watchers_of_groups_are_told_apart():
    groups = {
        "one": fmp.optim.chain(watch_gradients(), fmp.optim.sgd(0.1)),
        "two": fmp.optim.chain(watch_gradients("bf16"), fmp.optim.adam(0.1)),
    }
    step = make_step(fmp.optim.partition(groups, lambda path, leaf: "one" if path == "w" else "two"))
    _, history, _ = run(step, step.init(params()), [torch.full((4,), 3.0)])
    assert history.leaves == (("grad", "one/w", "f16"), ("grad", "two/b", "bf16"))
    masked = make_step(fmp.optim.masked(fmp.optim.chain(watch_gradients(), fmp.optim.sgd(0.1)), ["w"]))
    _, history, _ = run(masked, masked.init(params()), [torch.full((4,), 3.0)])
    assert history.leaves == (("grad", "w", "f16"),)
    assert history.arrays()["grad_amax/w"].tolist() == [3.0]


def test_accumulated_steps_are_unknown_until_the_last():
    optimizer = fmp.optim.accumulate(fmp.optim.chain(watch_gradients(), fmp.optim.sgd(0.1)), every=2)
    step = make_step(optimizer)
    _, history, _ = run(step, step.init(params()), batches(4))
    assert np.isnan(history.arrays()["grad_amax/w"]).tolist() == [True, False, True, False]


def test_leaves_are_recorded_by_path_and_skipped_steps_as_unknown():
    step = make_step(loss_scale=2.0**10, policy=fmp.opt_level("O0"))
    batch = torch.tensor([1.0, 1e-9, 0.0, 2.0])
    bad = torch.tensor([1.0, torch.inf, 0.0, 2.0])
    _, history, _ = run(step, step.init(params()), [batch, bad, batch])
    arrays = history.arrays()
    assert arrays["skipped"].tolist() == [False, True, False]
    for measure, value in (("amax", 2.0), ("underflow", 1 / 3), ("zeros", 0.25)):
        np.testing.assert_allclose(arrays[f"grad_{measure}/w"], [value, np.nan, value], rtol=1e-6)
    assert arrays["grad_amax/b"][0] == 1.0
