"""The dtypes that Apex's own tests of O1 expect (NVIDIA/apex, tests/L0/run_amp), op by op, on a CPU."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmp
from fmp.policy import OpRules

HALVES = [torch.float16, torch.bfloat16]
FULL = torch.float32


def cast(fn, half, rules: OpRules | str = "apex"):
    return fmp.autocast(fn, fmp.Policy("f32", half, None, op_rules=rules))


@pytest.fixture(params=HALVES, ids=["f16", "bf16"])
def half(request):
    return request.param


@pytest.fixture(params=["full", "half"])
def given(request, half):
    """The dtype of the input."""
    return FULL if request.param == "full" else half


# --- test_basic_casts: name, callable of the input, its shape, what comes out ("half", "full" or as the input)


def _linear():
    layer = nn.Linear(64, 64)
    return [layer, lambda x: F.linear(x, layer.weight, layer.bias)], (16, 64), "half"


def _conv2d():
    layer = nn.Conv2d(16, 16, 3)
    return [layer, lambda x: F.conv2d(x, layer.weight, layer.bias)], (2, 16, 8, 8), "half"


def _softmax():
    return [nn.Softmax(1), lambda x: F.softmax(x, 1)], (16, 64), "full"


def _group_norm():
    return [nn.GroupNorm(4, 16)], (2, 16, 8, 8), "full"


def _mse_loss():
    target = torch.randn(16, 64)
    return [lambda x: nn.MSELoss()(x, target)], (16, 64), "full"


def _relu():
    return [nn.ReLU(), F.relu], (16, 64), "as given"


def _batch_norm():
    layer = nn.BatchNorm2d(16)
    return [layer], (2, 16, 8, 8), "as given"


def _matmul():
    other = torch.randn(64, 64)
    calls = [
        lambda x: x.matmul(other),
        lambda x: other.matmul(x),
        lambda x: x @ other,
        lambda x: other @ x,
    ]
    return calls, (64, 64), "half"


def _pow():
    return [lambda x: x.pow(2.0), lambda x: x**2.0], (16, 64), "full"


def _cpu():
    return [torch.Tensor.cpu], (16, 64), "full"


def _sum():
    return [torch.Tensor.sum, torch.sum], (16, 64), "full"


BASIC = [_linear, _conv2d, _softmax, _group_norm, _mse_loss, _relu, _batch_norm, _matmul, _pow, _cpu, _sum]


@pytest.mark.parametrize("make", BASIC, ids=lambda make: make.__name__.strip("_"))
def test_basic_casts(make, half, given):
    calls, shape, expected = make()
    dtype = {"half": half, "full": FULL, "as given": given}[expected]
    for call in calls:
        x = torch.randn(shape).to(given).requires_grad_()
        y = cast(call, half)(x)
        assert y.dtype == dtype
        (grad,) = torch.autograd.grad(y.float().sum(), x)
        assert grad.dtype == given
        assert grad.isfinite().all()


def test_batch_norm_in_eval_mode_matches_its_input(half, given):
    layer = nn.BatchNorm2d(16).eval()
    x = torch.randn(2, 16, 8, 8).to(given)
    mean, variance = layer.running_mean, layer.running_var
    assert cast(layer, half)(x).dtype == given
    assert cast(lambda x: F.batch_norm(x, mean, variance, layer.weight, layer.bias), half)(x).dtype == given


@pytest.mark.parametrize("loss", [nn.BCELoss(), F.binary_cross_entropy], ids=["module", "function"])
def test_binary_cross_entropy_refuses_half_until_it_is_allowed(loss, half):
    x, target = torch.rand(16, 64).to(half), torch.rand(16, 64)
    with pytest.raises(NotImplementedError, match=r"binary_cross_entropy on (f16|bf16) is banned: .*with_logits"):
        cast(loss, half)(x, target)
    assert torch.equal(cast(loss, half)(x.float(), target), loss(x.float(), target))
    allowed = OpRules.apex().full(F.binary_cross_entropy)
    assert torch.equal(cast(loss, half, allowed)(x, target), loss(x.float(), target))


# --- test_promotion


@pytest.fixture(params=["full", "half"])
def other(request, half):
    """The dtype of a second input."""
    return FULL if request.param == "full" else half


@pytest.mark.parametrize("op", [torch.atan2, torch.Tensor.atan2, torch.mul, torch.Tensor.mul, operator.mul])
def test_two_inputs_promote_to_the_widest(op, half, given, other):
    x, y = torch.randn(16).to(given).requires_grad_(), torch.randn(16).to(other)
    z = cast(op, half)(x, y)
    assert z.dtype == torch.promote_types(given, other)
    (grad,) = torch.autograd.grad(z.float().sum(), x)
    assert grad.dtype == given


def test_cat_promotes_to_the_widest(half, other):
    tensors = [*[torch.randn(16).to(half) for _ in range(5)], torch.randn(16).to(other)]
    assert cast(torch.cat, half)(tensors).dtype == other


def test_exp_in_place_only_in_full_precision(half):
    assert torch.equal(cast(torch.Tensor.exp_, half)(torch.ones(16)), torch.ones(16).exp())
    with pytest.raises(NotImplementedError, match="exp cannot write into a tensor of"):
        cast(torch.Tensor.exp_, half)(torch.ones(16, dtype=half))


def test_add_in_place_keeps_the_dtype_of_its_target(half, given, other):
    x, y = torch.randn(16).to(given).requires_grad_(), torch.randn(16).to(other)
    target = x.clone()
    z = cast(torch.Tensor.add_, half)(target, y)
    assert z is target
    assert z.dtype == given
    assert torch.equal(z, x + y.to(given))


# --- test_cache: train, evaluate without grad, train again, with the weights changed in place in between


class _Low(nn.Module):
    """Two uses of a weight in low precision."""

    first_loss = 1059072.0
    first_grad = torch.stack([torch.arange(504.0, 1528.0, 128.0) + 16.0 * row for row in range(8)])

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(64.0).reshape(8, 8).to(dtype))

    @staticmethod
    def loss(x, weight):
        return ((x @ weight) @ weight).sum()

    def forward(self, x):
        return self.loss(x, self.weight)


class _Full(_Low):
    """Two uses of a weight in full precision."""

    first_loss = 2496.0
    first_grad = 4.0 * torch.arange(16.0).reshape(2, 8)

    def __init__(self, dtype):
        super().__init__(dtype)
        self.weight = nn.Parameter(torch.arange(16.0).reshape(2, 8).to(dtype))

    @staticmethod
    def loss(x, weight):
        return (x + weight.pow(2) + weight.pow(2)).sum()


class _Promote(_Full):
    """Two uses of a weight in the widest dtype of the arguments."""

    first_loss = 1240.0
    first_grad = 2.0 * torch.arange(16.0).reshape(2, 8)

    @staticmethod
    def loss(x, weight):
        return ((x * weight) * weight).sum()


@pytest.mark.parametrize("module", [_Low, _Full, _Promote])
def test_cached_casts_give_the_same_gradients_in_training_evaluation_and_training_again(module, half, given):
    model, x, scale = module(given), torch.ones(2, 8), 4.0
    run = cast(model, half)

    def train():
        model.zero_grad()
        loss = run(x)
        (loss * scale).backward()
        assert [parameter.grad is not None for parameter in model.parameters()] == [True]
        assert model.weight.grad.dtype == given
        weight = model.weight.detach().float().requires_grad_()
        (reference,) = torch.autograd.grad(model.loss(x, weight), weight)
        assert torch.equal(model.weight.grad.float() / scale, reference)
        model.weight.data -= 1.0
        return loss, reference

    loss, grad = train()
    assert torch.equal(grad, module.first_grad)
    assert loss.dtype == FULL
    if module is _Low and half == torch.float16:
        assert loss.isinf()  # products beyond 65504, and yet the gradient is right
    else:
        assert loss.item() == pytest.approx(module.first_loss, rel=2.0**-9)
    with torch.no_grad():
        evaluated = run(x)
    train()
    with torch.no_grad():
        assert not torch.equal(run(x), evaluated)
