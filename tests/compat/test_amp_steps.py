"""Apex 1.7 and 1.13: optimizers on masters against plain torch, skipped steps, several models, optimizers, losses."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import StepLR

from fmp.compat import amp
from tests.bits import same_bits

HALVES = [torch.float16, torch.bfloat16]
F16, F32 = torch.float16, torch.float32

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adam, fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, foreach=True),
}


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def data(count: int = 6, bad: Sequence[int] = ()) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=generator) * (float("inf") if i in bad else 1.0) for i in range(count)]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def start(*args: Any, **kwargs: Any) -> Any:
    return amp.initialize(*args, **{"verbosity": 0} | kwargs)


class ByHand:
    """O2 or O3 written out in plain torch: a half model, its float32 masters, a loss scale that halves on overflow."""

    def __init__(self, model: nn.Module, make: Any, half: torch.dtype, masters: bool, scale: float, dynamic: bool):
        for part in model.modules():
            if not (masters and isinstance(part, _BatchNorm)):
                for tensor in [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
                    tensor.data = tensor.data.to(half) if tensor.is_floating_point() else tensor.data
        self.model, self.half, self.scale, self.dynamic = model, half, scale, dynamic
        self.params = list(model.parameters())
        self.masters = [p.detach().float().requires_grad_() if masters and p.dtype == half else p for p in self.params]
        self.optimizer = make(self.masters)

    def step(self, x: torch.Tensor, limit: float | None = None) -> None:
        for param in self.params:
            param.grad = None
        loss = loss_of(self.model(x.to(self.half)).float())
        (loss.float() * self.scale).backward()
        grads = [p.grad.float() / self.scale for p in self.params if p.grad is not None]
        if self.dynamic and not all(grad.isfinite().all() for grad in grads):
            self.scale /= 2
            return
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad.to(master.dtype)
        if limit is not None:
            nn.utils.clip_grad_norm_(self.masters, limit)
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)


# --- 1.7


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("scale", ["dynamic", 64.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_masters_by_hand_bit_for_bit(half, level, scale, name):
    make = OPTIMIZERS[name]
    bad = [2] if scale == "dynamic" else []
    model = net()
    hand = ByHand(copy.deepcopy(model), make, half, level == "O2", 2.0**16 if bad else 64.0, bool(bad))
    optimizer = make(model.parameters())
    start(model, optimizer, opt_level=level, half_dtype=half, loss_scale=scale, keep_batchnorm_fp32=level == "O2")
    for x in data(bad=bad):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model(x)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        # A skipped step has no part in BatchNorm's statistics by hand, and none here.
        hand.step(x)
        assert same_bits([p.detach() for p in amp.master_params(optimizer)], [p.detach() for p in hand.masters])
        assert same_bits(dict(model.named_buffers()), dict(hand.model.named_buffers()))
        assert same_bits([p.detach() for p in model.parameters()], [p.detach() for p in hand.params])
    mine, theirs = optimizer.state_dict()["state"], hand.optimizer.state_dict()["state"]
    assert same_bits(mine, theirs)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == hand.scale


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_scale_changes_nothing_in_float32(level):
    model = net()
    plain = copy.deepcopy(model)
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, plain)]
    # O1 without casts is what is left of it: its loss scaling.
    patch = False if level == "O1" else None
    start(model, optimizers[0], opt_level=level, loss_scale="dynamic", patch_torch_functions=patch)
    for x in data():
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.scale_loss(loss_of(model(x)), optimizers[0]) as scaled:
            scaled.backward()
        loss_of(plain(x)).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert same_bits(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("half", HALVES)
def test_clipping_the_masters(half):
    model = net()
    make = OPTIMIZERS["sgd"]
    hand = ByHand(copy.deepcopy(model), make, half, True, 256.0, False)
    optimizer = make(model.parameters())
    start(model, optimizer, opt_level="O2", half_dtype=half, loss_scale=256.0)
    for x in data():
        with amp.scale_loss(loss_of(model(x)), optimizer) as scaled:
            scaled.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        hand.step(x, limit=0.01)
    assert same_bits([p.detach() for p in amp.master_params(optimizer)], [p.detach() for p in hand.masters])


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_overflow_skips_one_step_and_changes_nothing(level, capsys):
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    start(model, optimizer, opt_level=level, half_dtype="bf16", loss_scale="dynamic", verbosity=1)
    good, bad = data(2, bad=[1])
    for x in (good, bad):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model(x)), optimizer) as scaled:
            scaled.backward()
        if x is bad:
            before = copy.deepcopy([list(amp.master_params(optimizer)), optimizer.state_dict()["state"]])
            params = [p.detach().clone() for p in model.parameters()]
            capsys.readouterr()
        optimizer.step()
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    )
    after = [list(amp.master_params(optimizer)), optimizer.state_dict()["state"]]
    assert same_bits(before, after)
    assert same_bits(params, [p.detach() for p in model.parameters()])
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model(good)), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not same_bits(params, [p.detach() for p in model.parameters()])


def test_a_skipped_step_says_nothing_when_silent_and_leaves_own_gradients(capsys):
    model = nn.Linear(4, 1)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    start(model, optimizer, opt_level="O1")
    with amp.scale_loss(model(data(1, bad=[0])[0]).sum(), optimizer) as scaled:
        scaled.backward()
    grad = model.weight.grad
    optimizer.step()
    assert model.weight.grad is grad
    assert capsys.readouterr().out == ""


def test_one_bad_pass_skips_the_window_once():
    model = nn.Linear(4, 1)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    start(model, optimizer, opt_level="O2")
    before = model.weight.clone()
    for x in data(3, bad=[0, 2]):
        with amp.scale_loss(model(x).mean() / 4, optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**14, "unskipped": 0}
    with amp.scale_loss(model(data(1)[0]).mean() / 4, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def closure() -> None:
    raise AssertionError("called")


def test_closures_are_refused_with_masters_and_in_skipped_steps():
    model = nn.Linear(4, 1)
    optimizer: Any = OPTIMIZERS["sgd"](model.parameters())
    start(model, optimizer, opt_level="O2")
    with amp.scale_loss(model(data(1)[0]).mean() / 8, optimizer) as scaled:
        scaled.backward()
    for args, kwargs in [((closure,), {}), ((), {"closure": closure})]:
        with pytest.raises(RuntimeError, match="closure"):
            optimizer.step(*args, **kwargs)
    optimizer.step(None)
    amp.shutdown()

    start(model, optimizer, opt_level="O1")
    optimizer.zero_grad()
    optimizer.step(lambda: model.weight.sum())
    with amp.scale_loss(model(data(1, bad=[0])[0]).sum(), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(closure)


def test_a_step_before_any_backward_does_nothing():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    start(model, optimizer, opt_level="O2")
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert same_bits(before, [p.detach() for p in model.parameters()])


def test_frozen_parameters_have_no_masters_until_they_train():
    model = nn.Linear(4, 1)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start(model, optimizer, opt_level="O2", loss_scale=1.0)
    assert [p.dtype for p in amp.master_params(optimizer)] == [F32, F16]
    model.bias.requires_grad_(True)
    assert [p.dtype for p in amp.master_params(optimizer)] == [F32, F32]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_parameters_join_in_the_middle_of_training(half, level):
    one, two = nn.Linear(4, 3), nn.Linear(3, 1)
    optimizer = torch.optim.Adam(one.parameters(), lr=0.1, eps=1e-4)
    start([one, two], optimizer, opt_level=level, half_dtype=half, loss_scale=8.0)

    def train() -> None:
        for x in data(2):
            with amp.scale_loss(loss_of(two(one(x))), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    moments = copy.deepcopy([optimizer.state[p]["exp_avg"] for p in amp.master_params(optimizer)])
    frozen = two.weight.detach().clone()
    two.zero_grad()
    optimizer.add_param_group({"params": two.parameters(), "lr": 0.5})
    assert same_bits(
        moments, [optimizer.state[p]["exp_avg"] for p in itertools.islice(amp.master_params(optimizer), 2)]
    )
    train()
    assert len({*amp.master_params(optimizer)}) == 4
    wide = F32 if level != "O3" else half
    assert {p.dtype for p in amp.master_params(optimizer)} == {wide}
    assert not torch.equal(frozen, two.weight)
    for param, master in zip([*one.parameters(), *two.parameters()], amp.master_params(optimizer), strict=True):
        assert torch.equal(param, master.to(param.dtype))


def test_a_single_tensor_joins():
    model, extra = nn.Linear(4, 1), nn.Parameter(torch.ones(1, dtype=F16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    start(model, optimizer, opt_level="O2", loss_scale=4.0)
    optimizer.add_param_group({"params": extra})
    with amp.scale_loss(extra.sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(extra.detach(), torch.tensor([0.5], dtype=F16))


def test_schedulers_work_around_the_step():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    start(model, optimizer, opt_level="O2")
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    for x in data(3, bad=[0]):
        with amp.scale_loss(loss_of(model(x)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.125


def test_masters_follow_a_model_that_loads_weights():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    start(model, optimizer, opt_level="O2", loss_scale=8.0)
    for x in data(2):
        with amp.scale_loss(loss_of(model(x)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    model.load_state_dict(model.state_dict())
    assert same_bits(masters, [p.detach() for p in amp.master_params(optimizer)])  # still those that were rounded
    zeros = {name: torch.zeros_like(value) for name, value in model[3].state_dict().items()}
    model[3].load_state_dict(zeros)
    after = [p.detach() for p in amp.master_params(optimizer)]
    assert same_bits(after[:4], masters[:4])
    assert not any(value.any() for value in after[4:])


def test_a_step_that_raises_can_be_made_again():
    class Failing(torch.optim.SGD):
        fails = True

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ArithmeticError
            return super().step(closure)

    model = nn.Linear(4, 2)
    optimizer = Failing(model.parameters(), lr=0.1)
    start(model, optimizer, opt_level="O1", half_dtype="bf16", loss_scale="dynamic")
    x = data(1)[0]
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        with amp.scale_loss(model(x).sum() * factor, optimizer) as scaled:
            scaled.backward()
        before = model.weight.detach().clone()
        optimizer.fails = True
        with pytest.raises(ArithmeticError):
            optimizer.step()
        assert model(x).dtype == torch.bfloat16  # casting goes on
        optimizer.fails = False
        optimizer.step()
        assert torch.equal(before, model.weight) == (factor > 1.0)
        assert model.weight.grad is not None


# --- 1.13: two models, two optimizers, three losses


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("num_losses", [1, 3])
@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_overflow_in_one_loss_skips_exactly_the_optimizers_that_it_uses(level, num_losses, bad):
    generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
    for_g, for_d = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, discriminator))
    models, (for_g, for_d) = start(
        [generator, discriminator],
        [for_g, for_d],
        opt_level=level,
        half_dtype="bf16",
        loss_scale="dynamic",
        num_losses=num_losses,
    )
    before = [m.weight.detach().clone() for m in models]
    factors = [float("inf") if bad == i else 1.0 for i in range(3)]
    ids = [i % num_losses for i in range(3)]
    z, real = torch.randn(4, 2), torch.randn(4, 3)

    with amp.scale_loss(loss_of(discriminator(real)) * factors[0], for_d, loss_id=ids[0]) as scaled:
        scaled.backward()
    fake = generator(z)
    with amp.scale_loss(loss_of(discriminator(fake.detach())) * factors[1], for_d, loss_id=ids[1]) as scaled:
        scaled.backward()
    for_d.step()
    for_g.zero_grad()
    with amp.scale_loss(-loss_of(discriminator(fake)) * factors[2], for_g, loss_id=ids[2]) as scaled:
        scaled.backward()
    for_g.step()

    stayed = [torch.equal(m.weight, old) for m, old in zip(models, before, strict=True)]
    assert stayed == [bad == 2, bad in (0, 1)]
    scales = [state["loss_scale"] for name, state in amp.state_dict().items() if name != "masters"]
    expected = [2.0**16] * num_losses
    if bad is not None:
        expected[ids[bad]] = 2.0**15
    assert scales == expected


def test_a_parameter_joins_an_optimizer_only_once():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    list(amp.master_params(optimizer))
    optimizer.add_param_group({"params": [model.weight]})
    with pytest.raises(ValueError, match=r"a parameter f16\[2, ?3\] is in two groups of one optimizer"):
        list(amp.master_params(optimizer))


def test_weights_that_are_swapped_out_and_back_keep_their_masters():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    average = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    masters = list(amp.master_params(optimizer))
    expected = [master.detach().clone() for master in masters]
    for _ in range(20):
        with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        expected = [value - 1e-5 for value in expected]
        own = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(average)
        assert not any(master.any() for master in masters)
        model.load_state_dict(own)
        assert all(torch.equal(master, value) for master, value in zip(masters, expected, strict=True))
