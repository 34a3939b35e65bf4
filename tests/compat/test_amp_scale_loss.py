"""Apex 1.4 to 1.6: the scaled loss, gradients across backward passes, and the loss scaler."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from fmp.compat import amp
from tests.bits import same_bits

HALVES = [torch.float16, torch.bfloat16]
F16, F32 = torch.float16, torch.float32
LEVELS = ["O0", "O1", "O2", "O3"]


class Weights(nn.Module):
    """Two parameters, one of which norm layers would keep in float32."""

    def __init__(self, size: int = 4):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1.0, 1.0, size))
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x * self.w)


def start(*args: Any, **kwargs: Any) -> Any:
    return amp.initialize(*args, **{"verbosity": 0} | kwargs)


def linear(level: str, optimizer_class: Any = torch.optim.SGD, **kwargs: Any) -> tuple[Any, Any]:
    model = nn.Linear(3, 2)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    # In fp16 the gradients of these losses overflow at O1's first scale.
    wide = {"half_dtype": "bf16", "loss_scale": "dynamic"} if level == "O1" else {}
    return start(model, optimizer, opt_level=level, **wide | kwargs)


def backward(model: nn.Module, x: torch.Tensor, optimizers: Any, factor: float = 1.0, **kwargs: Any) -> None:
    with amp.scale_loss(model(x).float().sum() * factor, optimizers, **kwargs) as scaled:
        scaled.backward()


def grads(optimizer: Any) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in amp.master_params(optimizer)]


def scale_of(index: int = 0) -> float:
    return amp.state_dict()[f"loss_scaler{index}"]["loss_scale"]


X = torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.25, 8.0]])


# --- 1.4


def test_without_initialize_it_is_a_runtime_error():
    with pytest.raises(RuntimeError, match=r"call amp\.initialize"), amp.scale_loss(torch.ones(()), []):
        pass


def test_the_loss_is_upcast_then_scaled_and_may_have_many_elements():
    _, optimizer = linear("O2", loss_scale=2.0**20)
    for loss in (torch.ones((), dtype=F16), torch.ones(3, dtype=F16), torch.ones(3, dtype=torch.bfloat16)):
        with amp.scale_loss(loss, optimizer) as scaled:
            assert scaled.dtype == F32
            assert torch.equal(scaled, torch.full_like(loss, 2.0**20, dtype=F32))


@pytest.mark.parametrize("loss", [3.0, None, torch.arange(2)])
def test_what_is_no_loss_is_refused(loss):
    _, optimizer = linear("O1")
    with pytest.raises(TypeError, match="loss must be"), amp.scale_loss(loss, optimizer):
        pass


@pytest.mark.parametrize(("index", "fine"), [(0, True), (1, True), (-1, True), (-2, True), (2, False), (-3, False)])
def test_loss_id_indexes_a_list(index, fine):
    model, optimizer = linear("O1", num_losses=2)
    if fine:
        backward(model, X, optimizer, factor=math.inf, loss_id=index)
        assert scale_of(index % 2) == 2.0**15
        assert scale_of((index + 1) % 2) == 2.0**16
    else:
        with pytest.raises(IndexError, match="num_losses"):
            backward(model, X, optimizer, loss_id=index)


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_a_static_scale_of_one_without_masters_does_nothing(level):
    _, optimizer = linear(level)
    grad = optimizer.param_groups[0]["params"][0].grad = torch.ones_like(optimizer.param_groups[0]["params"][0])
    loss = torch.ones((), dtype=F16)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype == F32
        assert optimizer.param_groups[0]["params"][0].grad is grad
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: [o], lambda o: (o,), lambda o: [o, o]])
def test_gradients_are_unscaled_once_for_one_or_many_optimizers(level, wrap):
    model, optimizer = linear(level, half_dtype="bf16", loss_scale=128.0)
    backward(model, X, wrap(optimizer))
    weight, bias = grads(optimizer)
    expected = X.sum(0).expand(2, 3)
    assert torch.equal(weight, expected.to(weight.dtype))
    assert torch.equal(bias, torch.full_like(bias, 2.0))


@pytest.mark.parametrize("clears", [False, True])
def test_two_optimizers_share_a_parameter_and_its_master(clears):
    biases = {}
    for level in ("O0", "O2"):
        model = nn.Linear(3, 2)
        nn.init.constant_(model.bias, 0.5)  # a number of float16, which masters start from
        one, two = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.25))
        start(model, [one, two], opt_level=level, loss_scale=4.0)
        first = list(amp.master_params(one))
        assert all(a is b for a, b in zip(first, amp.master_params(two), strict=True))
        for _ in range(2):
            backward(model, X, [one, two])
            one.step()
            if clears:  # each steps on a gradient of its own
                one.zero_grad()
                backward(model, X, [one, two])
            two.step()
            two.zero_grad()
        biases[level] = first[1].detach().clone()
        assert torch.equal(model.bias, first[1].to(model.bias.dtype))
        amp.shutdown()
    assert torch.equal(biases["O2"], biases["O0"])


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("who", ["optimizer", "model"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_delayed_gradient_can_be_cleared(level, who, set_to_none):
    model, optimizer = linear(level, half_dtype="bf16", loss_scale=8.0)
    backward(model, X, optimizer, factor=100.0, delay_unscale=True)
    (optimizer if who == "optimizer" else model).zero_grad(set_to_none=set_to_none)
    backward(model, X, optimizer)
    assert torch.equal(grads(optimizer)[1].float(), torch.full((2,), 2.0))


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_shutdown_leaves_no_scaled_gradient(level, steps, delayed):
    model, optimizer = linear(level, half_dtype="bf16", loss_scale=1024.0)
    backward(model, X, optimizer, delay_unscale=delayed)
    if steps and not delayed:
        optimizer.step()
        optimizer.zero_grad()
    amp.shutdown()
    assert model.bias.dtype == F32
    if steps and not delayed:
        assert model.bias.grad is None
    else:
        assert model.bias.grad is not None
        assert model.bias.grad.dtype == F32
        assert torch.equal(model.bias.grad, torch.full((2,), 2.0))


def test_blocks_of_optimizers_that_share_a_parameter_do_not_nest():
    model = nn.Linear(3, 2)
    one, two = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    start(model, [one, two], opt_level="O1", loss_scale=8.0, half_dtype="bf16")

    def nested():
        with amp.scale_loss(model(X).sum(), one) as scaled:
            scaled.backward()
            backward(model, X, two)

    with pytest.raises(RuntimeError, match="their optimizers share a parameter: leave the first block before"):
        nested()
    assert model.bias.grad is None
    backward(model, X, two)
    assert torch.equal(grads(two)[1], torch.full((2,), 2.0))


@pytest.mark.parametrize("optimizers", [None, 3, {"a": 1}, ["sgd"]])
def test_what_is_no_optimizer_is_refused(optimizers):
    linear("O1")
    with pytest.raises(TypeError, match="optimizers must be"), amp.scale_loss(torch.ones(()), optimizers):
        pass


def test_an_unknown_optimizer_is_refused():
    model, _ = linear("O1")
    with pytest.raises(RuntimeError, match=r"not given to amp\.initialize"):
        backward(model, X, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_leaves_everything_as_it_was(level):
    model, optimizer = linear(level, half_dtype="bf16", loss_scale="dynamic")
    backward(model, X, optimizer)
    before, state = grads(optimizer), amp.state_dict()
    model_grads = [p.grad for p in model.parameters()]

    def interrupted() -> None:
        with amp.scale_loss(model(X).sum() * math.inf, optimizer) as scaled:
            scaled.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert same_bits(grads(optimizer), before)
    assert all(a.grad is b for a, b in zip(model.parameters(), model_grads, strict=True))
    assert same_bits(amp.state_dict(), state)
    values = [p.detach().clone() for p in amp.master_params(optimizer)]
    optimizer.step()  # not skipped
    assert not same_bits(values, [p.detach() for p in amp.master_params(optimizer)])
    backward(model, X, optimizer)


def test_blocks_of_one_optimizer_do_not_nest():
    model, optimizer = linear("O1")
    with pytest.raises(RuntimeError, match="inside of scale_loss"), amp.scale_loss(model(X).sum(), optimizer):
        backward(model, X, optimizer)
    backward(model, X, optimizer)


def test_a_step_inside_of_the_block_is_refused():
    model, optimizer = linear("O1")
    with pytest.raises(RuntimeError, match="leave the block"), amp.scale_loss(model(X).sum(), optimizer):
        optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("scale", ["dynamic", 8.0, 1.0])
def test_parameters_of_float64_train_in_float64(level, scale):
    param = nn.Parameter(torch.full((2,), 1.0 / 3.0, dtype=torch.float64))
    expected = param.detach() - 0.1
    optimizer = torch.optim.SGD([param], lr=0.1)
    start(nn.Linear(2, 2), optimizer, opt_level=level, loss_scale=scale)
    with amp.scale_loss(param.sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert list(amp.master_params(optimizer)) == [param]
    assert torch.equal(param, expected)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_parameters_that_cannot_be_scaled_are_refused_before_anything_changes(level):
    model = nn.Linear(2, 2)
    extra = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [extra]}], lr=0.1)
    match = r"optimizers\[0\]\.param_groups\[1\]\['params'\]\[0\] of SGD is c64\[3\]"
    with pytest.raises(TypeError, match=match):
        start(model, optimizer, opt_level=level, loss_scale="dynamic")
    assert model.weight.dtype == torch.float32
    extra.requires_grad_(False)
    start(model, optimizer, opt_level=level, loss_scale="dynamic")
    extra.requires_grad_(True)
    with pytest.raises(TypeError, match=r"c64\[3\]"), amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer):
        pass


@pytest.mark.parametrize("index", ["0", None, 1.0, slice(0, 1)])
def test_a_loss_id_that_is_no_integer_is_named(index):
    model, optimizer = linear("O1")
    with pytest.raises(TypeError, match="loss_id must be an integer"), amp.scale_loss(model(X).sum(), optimizer, index):
        pass


def test_delay_overflow_check_leaves_the_scale_and_the_step():
    model, optimizer = linear("O1")
    backward(model, X, optimizer, factor=math.inf, delay_overflow_check=True)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**16, "unskipped": 0}
    optimizer.step()
    assert not all(p.isfinite().all() for p in model.parameters())


# --- delay_unscale


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_gradients_stay_scaled_and_are_unscaled_together(level):
    model, optimizer = linear(level, half_dtype="bf16", loss_scale=128.0)
    backward(model, X, optimizer, delay_unscale=True)
    assert torch.equal(model.bias.grad, torch.full_like(model.bias, 256.0))
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 0
    backward(model, X, optimizer)
    assert torch.equal(grads(optimizer)[1].float(), torch.full((2,), 4.0))
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_delayed_pass_after_a_normal_one_does_not_mix_scales(level):
    model, optimizer = linear(level, half_dtype="bf16", loss_scale=128.0)
    for delay in (False, True, True, False):
        backward(model, X, optimizer, delay_unscale=delay)
    assert torch.equal(grads(optimizer)[1].float(), torch.full((2,), 8.0))


def test_a_delayed_pass_of_another_scaler_is_rescaled():
    model, optimizer = linear("O1", num_losses=2)
    backward(model, X, optimizer, factor=math.inf, loss_id=1)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, X, optimizer, loss_id=0, delay_unscale=True)
    backward(model, X, optimizer, loss_id=1)
    assert torch.equal(grads(optimizer)[1], torch.full((2,), 4.0))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_on_scaled_gradients_is_refused_unless_they_are_gone(level):
    model, optimizer = linear(level, half_dtype="bf16", loss_scale=128.0)
    backward(model, X, optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="delay_unscale"):
        optimizer.step()
    model.zero_grad()
    optimizer.step()
    backward(model, X, optimizer)
    assert torch.equal(grads(optimizer)[1].float(), torch.full((2,), 2.0))


def test_overflow_in_a_delayed_pass_skips_the_window():
    model, optimizer = linear("O2")
    before = model.weight.clone()
    backward(model, X, optimizer, factor=math.inf, delay_unscale=True)
    backward(model, X, optimizer, factor=2.0**-8)
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert scale_of() == 2.0**15


# --- 1.5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("clear", ["optimizer", "optimizer zeros", "model", "model zeros", "late", "both"])
def test_passes_accumulate_in_the_dtype_of_the_masters_in_every_order_of_clearing(level, half, clear):
    model, optimizer = linear(level, half_dtype=half, loss_scale=64.0)

    def zero() -> None:
        if clear.startswith("optimizer") or clear in ("late", "both"):
            optimizer.zero_grad(set_to_none=not clear.endswith("zeros"))
        if clear.startswith("model") or clear == "both":
            model.zero_grad(set_to_none=not clear.endswith("zeros"))

    for _ in range(3):
        if clear != "late":
            zero()
        for factor in (1.0, 2.0**-12, 2.0**-12):
            backward(model, X, optimizer, factor=factor)
        bias = grads(optimizer)[1]
        expected = 2.0 + 2 * 2.0**-11
        narrow = bias.dtype != F32
        assert torch.equal(bias, torch.full_like(bias, 2.0 if narrow else expected))
        optimizer.step()
        if clear == "late":
            zero()


def test_masters_need_no_clearing_at_all():
    model, optimizer = linear("O2", loss_scale=64.0)
    for _ in range(3):
        backward(model, X, optimizer)
        assert torch.equal(grads(optimizer)[1], torch.full((2,), 2.0))
        optimizer.step()
        assert grads(optimizer) == [None, None]


def test_without_masters_what_is_not_cleared_accumulates_as_in_torch():
    model, optimizer = linear("O1")
    for count in (1, 2, 3):
        backward(model, X, optimizer)
        assert torch.equal(grads(optimizer)[1], torch.full((2,), 2.0 * count))
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_parameter_that_a_pass_does_not_reach_keeps_its_gradient(level):
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    start([one, two], optimizer, opt_level=level, half_dtype="bf16", loss_scale=16.0)
    backward(one, X, optimizer)
    before = grads(optimizer)
    backward(two, X, optimizer)
    after = grads(optimizer)
    assert same_bits(before[:2], after[:2])
    assert before[2:] == [None, None]
    assert same_bits(before[:2], after[2:])


def test_parameters_in_float32_beside_masters_accumulate_as_well():
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start(model, optimizer, opt_level="O2", loss_scale=4.0)
    x = torch.randn(5, 4)
    backward(model, x, optimizer)
    single = grads(optimizer)
    backward(model, x, optimizer)
    assert [p.dtype for p in model.parameters()] == [F16, F32, F32]
    assert same_bits([2 * grad for grad in single], grads(optimizer))


def test_only_the_incoming_gradient_is_checked_not_what_was_there():
    model, optimizer = linear("O1")
    model.bias.grad = torch.full((2,), math.inf)
    backward(model, X, optimizer)
    assert scale_of() == 2.0**16
    assert torch.equal(model.bias.grad, torch.full((2,), math.inf))


def test_passes_with_different_scalers_add_up():
    model, optimizer = linear("O2", num_losses=2)
    backward(model, X, optimizer, loss_id=1, factor=math.inf)
    optimizer.step()
    backward(model, X, optimizer, factor=2.0**-10)
    backward(model, X, optimizer, factor=2.0**-10, loss_id=1)
    assert (scale_of(0), scale_of(1)) == (2.0**16, 2.0**15)
    assert torch.equal(grads(optimizer)[1], torch.full((2,), 2 * 2.0**-9))


# --- 1.6


def overflowing(model: nn.Module, optimizer: Any) -> None:
    backward(model, X, optimizer, factor=math.inf)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("bounds", "first"),
    [({}, 2.0**16), ({"max_loss_scale": 2.0**10}, 2.0**10), ({"min_loss_scale": 2.0**18}, 2.0**18)],
)
def test_the_first_dynamic_scale(bounds, first):
    linear("O1", **bounds)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": first, "unskipped": 0}


def test_the_scale_halves_on_overflow_and_doubles_after_2000_clean_passes():
    model, optimizer = linear("O1", max_loss_scale=2.0**17)
    overflowing(model, optimizer)
    overflowing(model, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**14, "unskipped": 0}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 1998}})
    backward(model, X, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**16, "unskipped": 1999}
    backward(model, X, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**17, "unskipped": 0}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**17, "unskipped": 1999}})
    backward(model, X, optimizer)
    assert scale_of() == 2.0**17


@pytest.mark.parametrize(("floor", "lowest"), [(None, 2.0**-126), (0, 2.0**-126), (2.0**10, 2.0**10)])
def test_the_scale_stops_at_its_floor_and_never_at_zero(floor, lowest):
    model, optimizer = linear("O1", min_loss_scale=floor)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": lowest * 2, "unskipped": 0}})
    for _ in range(3):
        overflowing(model, optimizer)
    assert scale_of() == lowest


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_static_scale_counts_and_does_not_check_unless_asked(level, capsys):
    model, optimizer = linear(level, half_dtype="bf16", loss_scale=4.0)
    overflowing(model, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 4.0, "unskipped": 1}
    assert not model.weight.isfinite().all()
    amp.shutdown()

    model, optimizer = linear(level, half_dtype="bf16", loss_scale=4.0, skip_nonfinite=True, verbosity=1)
    overflowing(model, optimizer)
    assert model.weight.isfinite().all()
    assert "Skipping step, loss scaler 0 loss scale stays 4.0" in capsys.readouterr().out


def test_a_check_under_a_scale_of_one():
    model, optimizer = linear("O3", skip_nonfinite=True)
    overflowing(model, optimizer)
    assert model.weight.isfinite().all()


def test_gradients_whose_sum_overflows_are_fine():
    param = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([param], lr=1e-38)
    start(nn.Linear(2, 2), optimizer, opt_level="O1", max_loss_scale=1.0)
    with amp.scale_loss((param * 3e38).sum(), optimizer) as scaled:
        scaled.backward()
    assert scale_of() == 1.0
    assert param.grad is not None
    assert torch.equal(param.grad, torch.full((4,), 3e38))


def test_gradients_that_overflow_when_unscaled_to_half_are_found():
    model, optimizer = linear("O3", loss_scale="dynamic", max_loss_scale=2.0**-10)
    backward(model, X, optimizer, factor=2.0**16)
    assert scale_of() == 2.0**-11


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_number_is_enough(bad):
    model, optimizer = linear("O1")
    with amp.scale_loss(model(X).sum(), optimizer) as scaled:
        scaled.backward()
        model.weight.grad[1, 2] = bad
    assert scale_of() == 2.0**15


def test_sparse_gradients():
    table: Any = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    start(table, optimizer, opt_level="O1")
    before = table.weight.detach().clone()
    for _ in range(2):
        with amp.scale_loss(table(torch.tensor([1, 1])).sum(), optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    change = (before - table.weight.detach()).sum(1)
    assert torch.equal(change, torch.tensor([0.0, 8.0, 0.0, 0.0, 0.0]))
