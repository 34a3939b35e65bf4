"""A norm that an opt level would keep in float32, and whose name does not tell, is warned of when a run begins."""

import functools

import pytest
import torch
from torch import nn

import fmp

MODULE = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4))
MODEL = fmp.functionalize(MODULE)
MISSED = (
    r"misses '1\.weight', '1\.bias', '1\.running_mean', '1\.running_var', '3\.weight', '3\.bias', which become f16: "
    r"give opt_level keep_full=model, .* names, keep_full=\['1', '3'\]; or keep_norm_fp32=False"
)


def forward(params, buffers, x):
    return MODEL.apply(params, buffers, x, train=True)


def by_global(params, batch, *, buffers):
    out, buffers = MODEL.apply(params, buffers, batch, train=True)
    return out.float().square().mean(), buffers


def by_helper(params, batch, *, buffers):
    run = lambda: forward(params, buffers, batch)
    out, buffers = run()
    return out.float().square().mean(), buffers


def by_argument(model, params, batch, *, buffers):
    out, buffers = model.apply(params, buffers, batch, train=True)
    return out.float().square().mean(), buffers


class Task:
    def __init__(self):
        self.model = MODEL

    def loss(self, params, batch, *, buffers):
        return by_argument(self.model, params, batch, buffers=buffers)

    def __call__(self, params, batch, *, buffers):
        return self.loss(params, batch, buffers=buffers)


def by_closure():
    model = MODEL
    return lambda params, batch, *, buffers: by_argument(model, params, batch, buffers=buffers)


def first(loss_fn, policy, model=MODEL, **options):
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=policy, **options)
    return step.init(model.params, buffers=model.buffers)


WAYS = {
    "global": by_global,
    "helper": by_helper,
    "closure": by_closure(),
    "partial": functools.partial(by_argument, MODEL),
    "method": Task().loss,
    "object": Task(),
}


@pytest.mark.parametrize("loss_fn", WAYS.values(), ids=WAYS)
def test_norms_without_telling_names_are_warned_of(loss_fn):
    with pytest.warns(UserWarning, match=MISSED) as caught:
        state = first(loss_fn, fmp.opt_level("O2"))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert state.params["1.weight"].dtype == torch.float16  # as it says


@pytest.mark.parametrize(
    "policy",
    [
        None,
        fmp.opt_level("O0"),
        fmp.opt_level("O1"),
        fmp.opt_level("O2", keep_full=MODEL),
        fmp.opt_level("O2", keep_full=MODULE),
        fmp.opt_level("O2", keep_full=["1", "3"]),
        fmp.opt_level("O2", keep_norm_fp32=False),
        fmp.opt_level("O3"),
        fmp.Policy("bf16", "bf16", "f32"),
    ],
    ids=str,
)
def test_a_policy_that_keeps_them_or_does_not_mean_to_is_silent(policy):
    for loss_fn in WAYS.values():
        first(loss_fn, policy)  # a warning is an error in these tests


def test_names_that_tell_and_other_models_are_silent():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.linear(x))

    named = fmp.functionalize(Net())
    first(functools.partial(by_argument, named), fmp.opt_level("O2"), named)
    low = fmp.functionalize(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16())  # in 16 bits already
    first(functools.partial(by_argument, low), fmp.opt_level("O2", "bf16"), low)
    plain = {"0.weight": torch.ones(4, 4), "1.weight": torch.ones(4)}  # not the parameters of the model
    fmp.train_step(by_global, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2")).init(plain, buffers=MODEL.buffers)


def test_a_model_among_several_is_found_under_its_key():
    def loss_fn(params, batch, *, buffers):
        out, _ = MODEL.apply(params["net"], buffers["net"], batch, train=True)
        return (out * params["scale"]).float().square().mean(), buffers

    params, buffers = {"net": MODEL.params, "scale": torch.ones(4)}, {"net": MODEL.buffers}
    keeping = lambda keep_full: fmp.opt_level("O2", keep_full=keep_full)
    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=keeping(()))
    with pytest.warns(UserWarning, match=r"misses 'net\.1\.weight', .* keep_full=\['net\.1', 'net\.3'\]"):
        step.init(params, buffers=buffers)
    for keep_full in (["net.1", "net.3"], nn.ModuleDict({"net": MODULE})):
        fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=keeping(keep_full)).init(params, buffers=buffers)


def test_it_warns_under_vmap_and_not_while_tracing():
    step = fmp.train_step(by_global, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2"))
    params, buffers = fmp.tree.map(lambda leaf: torch.stack([leaf] * 2), (MODEL.params, MODEL.buffers))
    init = torch.func.vmap(lambda params, buffers: step.init(params, buffers=buffers))
    with pytest.warns(UserWarning, match=MISSED):
        init(params, buffers)
    states = torch.compile(init, backend="aot_eager", fullgraph=True)(params, buffers)
    assert states.params["1.weight"].dtype == torch.float16


class Base(nn.Module):
    """A layer norm whose name does not tell, around which an adapter is trained."""

    def __init__(self):
        super().__init__()
        self.n1, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.n1(x))


BASE = Base()
FROZEN = fmp.functionalize(BASE)


def adapted(seen):
    def loss_fn(adapter, x, *, frozen):
        seen.append((frozen["n1.weight"].dtype, frozen["linear.weight"].dtype))
        out, _ = FROZEN.apply(frozen, {}, x)
        return (out + x @ adapter["down"] @ adapter["up"]).float().square().mean()

    return loss_fn


def adapted_step(seen, keep_full):
    step = fmp.train_step(adapted(seen), fmp.optim.sgd(0.1), policy=fmp.opt_level("O2", "bf16", keep_full=keep_full))
    return step, step.init({"down": torch.ones(4, 2), "up": torch.zeros(2, 4)})


@pytest.mark.parametrize("keep_full", [BASE, FROZEN, ["n1"], ["*n1*"]], ids=["module", "model", "name", "pattern"])
def test_norms_of_a_frozen_base_are_kept_by_name(keep_full):
    step, state = adapted_step(seen := [], keep_full)
    for _ in range(2):
        state, _ = step(state, torch.ones(3, 4), frozen=FROZEN.params)
    assert seen == [(torch.float32, torch.bfloat16)] * 2


def test_norms_of_a_frozen_base_that_are_cast_are_warned_of_once():
    step, state = adapted_step(seen := [], ())
    message = r"misses 'n1\.weight', 'n1\.bias', which become bf16: .*keep_full=\['n1'\]"
    with pytest.warns(UserWarning, match=message) as caught:
        state, _ = step(state, torch.ones(3, 4), frozen=FROZEN.params)
    assert [str(each.filename) for each in caught] == [__file__]
    step(state, torch.ones(3, 4), frozen=FROZEN.params)  # a warning is an error in these tests
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2
    low = fmp.cast(FROZEN.params, torch.bfloat16)  # of another step, which has not looked yet
    step, state = adapted_step([], ())
    step(state, torch.ones(3, 4), frozen=low)


def test_a_name_that_neither_the_state_nor_the_frozen_base_has_is_refused_by_the_call():
    step, state = adapted_step([], ["n2"])
    with pytest.raises(ValueError, match=r"keep_full names \['n2'\], but no leaf matches; .*'down', 'up', .*n1"):
        step(state, torch.ones(3, 4), frozen=FROZEN.params)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    _, metrics = compiled(state, torch.ones(3, 4), frozen=FROZEN.params)  # nothing is looked at while tracing
    assert metrics.loss.isfinite()


def test_one_of_two_models_may_be_frozen():
    nets = nn.ModuleDict({"G": Base(), "D": Base()})
    models, seen = {key: fmp.functionalize(net) for key, net in nets.items()}, []

    def loss_fn(params, z, *, frozen):
        seen.append((params["G"]["n1.weight"].dtype, frozen["D"]["n1.weight"].dtype))
        made, _ = models["G"].apply(params["G"], {}, z)
        out, _ = models["D"].apply(frozen["D"], {}, made.to(z.dtype))
        return out.float().mean()

    step = fmp.train_step(loss_fn, fmp.optim.sgd(0.1), policy=fmp.opt_level("O2", "bf16", keep_full=nets))
    step(step.init({"G": models["G"].params}), torch.randn(3, 4), frozen={"D": models["D"].params})
    assert seen == [(torch.float32, torch.float32)]
