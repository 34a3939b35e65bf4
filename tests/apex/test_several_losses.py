"""Apex 1.4: `scale_loss` with several models, optimizers and losses, one scaler or many, against plain torch."""

from typing import Any

import pytest
import torch

import fmp
from fmp import tree
from tests.bits import same_bits

INF = float("inf")
HALVES = [torch.float16, torch.bfloat16]
LEVELS = ["O0", "O1", "O2", "O3"]
STEPS = 3


# Three models; one optimizer has two of them. The first loss uses both optimizers, the second one of them.
def start() -> Any:
    return {"pair": {"one": torch.tensor([1.0, 2.0]), "two": torch.tensor([3.0, 4.0])}, "single": torch.tensor([5.0])}


def first(params: Any, batch: Any) -> torch.Tensor:
    return ((params["pair"]["one"] * batch["first"]).sum() + (params["single"] * batch["first"][:1]).sum()).float()


def second(params: Any, batch: Any) -> torch.Tensor:
    return (params["pair"]["two"] * batch["second"]).sum().float()


LOSSES = {"first": first, "second": second}
USES = {"first": ["pair", "single"], "second": ["pair"]}


def batch_of(bad: str | None = None) -> Any:
    return {name: torch.tensor([INF if name == bad else 2.0, 1.0]) for name in LOSSES}


def by_torch(bad: list[str | None]) -> Any:
    """Trains in float32 with torch.optim, leaving out the optimizers that a bad loss uses."""
    params = tree.map(lambda leaf: leaf.requires_grad_(), start())
    optimizers = {
        "pair": torch.optim.SGD(tree.leaves(params["pair"]), lr=0.25, momentum=0.5),
        "single": torch.optim.SGD([params["single"]], lr=0.5),
    }
    for name in bad:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        for loss in LOSSES.values():
            loss(params, batch_of(name)).backward()
        for key, optimizer in optimizers.items():
            if name is None or key not in USES[name]:
                optimizer.step()
    return tree.map(torch.Tensor.detach, params)


HISTORIES: list[list[str | None]] = [
    [None] * STEPS,
    *([loss if step == at else None for step in range(STEPS)] for at in range(STEPS) for loss in LOSSES),
]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", HISTORIES, ids=lambda bad: ",".join(str(name) for name in bad))
def test_three_models_two_optimizers_and_two_losses(level, half, bad):
    policy = fmp.opt_level(level, half)
    optimizers = {"pair": fmp.optim.sgd(0.25, momentum=0.5), "single": fmp.optim.sgd(0.5)}
    step = fmp.train_step(LOSSES, optimizers, policy=policy, uses=USES, loss_scale=fmp.DynamicLossScale(1024.0))
    state = step.init(start())
    for name in bad:
        state, metrics = step(state, batch_of(name))
        assert {key for key, skipped in metrics.skipped.items() if skipped} == set(USES[name] if name else ())
    full = fmp.master.merge(state.params, state.master, form=policy.master_form or "f32")
    torch.testing.assert_close(fmp.cast(full, torch.float32), by_torch(bad), rtol=0.0, atol=0.0)
    for name in LOSSES:
        assert state.loss_scale[name].loss_scale == 1024.0 / (2 if name in bad else 1)


def test_one_scaler_for_several_losses_in_a_step_by_hand():
    policy = fmp.opt_level("O2")
    optimizers = {"pair": fmp.optim.sgd(0.25, momentum=0.5), "single": fmp.optim.sgd(0.5)}

    def step(masters: Any, opt_state: Any, scaler: Any, batch: Any) -> Any:
        total: Any = {key: tree.map(torch.zeros_like, masters[key]) for key in masters}
        good: dict[str, torch.Tensor] = {key: torch.tensor(True) for key in masters}
        for name, loss_fn in LOSSES.items():
            scaled = lambda p, f=loss_fn, s=scaler: s.scale(f(policy.cast_to_compute(p), fmp.cast(batch, torch.half)))
            grads = scaler.unscale(fmp.grad(scaled)(masters))
            finite = fmp.all_finite(grads)
            scaler = scaler.adjust(finite)  # at the exit of each scale_loss
            for key in USES[name]:
                total[key] = tree.map(torch.add, total[key], grads[key])
                good[key] = good[key] & finite
        for key, optimizer in optimizers.items():
            updates, after = optimizer.update(total[key], opt_state[key], masters[key])
            new = fmp.optim.apply_updates(masters[key], updates)
            masters = {**masters, key: fmp.select(good[key], new, masters[key])}
            opt_state = {**opt_state, key: fmp.select(good[key], after, opt_state[key])}
        return masters, opt_state, scaler

    for bad in HISTORIES:
        masters = start()
        opt_state = {key: optimizer.init(masters[key]) for key, optimizer in optimizers.items()}
        scaler = fmp.DynamicLossScale(1024.0)
        for name in bad:
            masters, opt_state, scaler = step(masters, opt_state, scaler, batch_of(name))
        assert same_bits(masters, by_torch(bad))
        assert scaler.loss_scale == 1024.0 / (1 if bad == HISTORIES[0] else 2)


@pytest.mark.parametrize("half", HALVES)
def test_the_loss_reported_is_not_scaled_and_in_float32(half):
    step = fmp.train_step(lambda w, x: (w * x).sum(), fmp.optim.sgd(0.1), policy=fmp.opt_level("O2", half))
    _, metrics = step(step.init(torch.ones(2)), torch.tensor([1.0, 2.0]))
    assert same_bits(metrics.loss, torch.tensor(3.0))


def test_a_static_scale_is_checked_unless_told_otherwise():
    def run(**options: Any) -> Any:
        policy = fmp.opt_level("O2", loss_scale=128.0)
        step = fmp.train_step(lambda w, x: (w * x).float().sum(), fmp.optim.sgd(0.5), policy=policy, **options)
        state = step.init(torch.ones(2))
        state, _ = step(state, torch.tensor([1.0, INF]))
        return state

    checked, as_apex = run(), run(skip_nonfinite=False)
    assert same_bits(checked.master, torch.ones(2))
    assert (checked.skip_count, as_apex.skip_count) == (1, 0)
    assert as_apex.master[0] == 0.5
    assert as_apex.master[1] == -INF
    assert checked.loss_scale.loss_scale == as_apex.loss_scale.loss_scale == 128.0


def test_delayed_unscaling_adds_scaled_gradients_and_unscales_once():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, generator=generator)
    batches = [torch.randn(5, 4, generator=generator) for _ in range(3)]
    scaler = fmp.DynamicLossScale(1024.0)
    loss_fn = lambda w, x: (x @ w).square().mean()

    scaled = [fmp.grad(lambda w, x=x: scaler.scale(loss_fn(w, x)))(weight) for x in batches]
    delayed = scaler.unscale(scaled[0] + scaled[1] + scaled[2])

    leaf = weight.clone().requires_grad_()
    for x in batches:
        loss_fn(leaf, x).backward()
    assert same_bits(delayed, leaf.grad)
    assert scaler.adjust(fmp.all_finite(delayed)).growth_count == 1  # one window of accumulation, one count


def test_a_loss_with_dimensions_is_refused():
    step = fmp.train_step(lambda w, x: w * x, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2"))
    with pytest.raises((TypeError, ValueError), match="scalar"):
        step(step.init(torch.ones(2)), torch.ones(2))


def test_an_error_in_the_loss_leaves_everything_as_it_was():
    def loss_fn(weight: torch.Tensor, batch: Any) -> torch.Tensor:
        if batch["bad"]:
            raise RuntimeError("out of memory, say")
        return (weight @ batch["x"]).float()

    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=fmp.opt_level("O1", "bf16"))
    state = step.init(torch.ones(2))
    with pytest.raises(RuntimeError, match="out of memory"):
        step(state, {"x": torch.ones(2), "bad": True})
    assert (torch.ones(2, 2) @ torch.ones(2)).dtype == torch.float32
    again, _ = step(state, {"x": torch.ones(2), "bad": False})
    torch.testing.assert_close(again.params, torch.full((2,), 0.9))
