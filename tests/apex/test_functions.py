"""Apex 1.9: functions of one's own, registered or decorated, custom autograd functions, and casting switched off."""

import types
from typing import Any

import pytest
import torch

import fmp

HALVES = [torch.float16, torch.bfloat16]
F32 = torch.float32


def library() -> Any:
    """Makes a module of somebody else's functions: they say in which dtype they ran."""
    return types.SimpleNamespace(
        attend=lambda x, y: (x @ y, x.dtype),
        distance=lambda x, y: ((x - y).square().sum(), x.dtype),
        mix=lambda x, y: (torch.lerp(x, y, 0.5), x.dtype),
    )


@pytest.mark.parametrize("half", HALVES)
def test_functions_of_a_library_are_replaced_by_decorated_ones(half):
    mylib = library()
    mylib.attend = fmp.low_precision(mylib.attend)
    mylib.distance = fmp.full_precision(mylib.distance)
    mylib.mix = fmp.promote(mylib.mix)

    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        return mylib.attend(x, y)[1], mylib.distance(x, y)[1], mylib.mix(x, y)[1], mylib.mix(x, x)[1]

    wide, narrow = torch.ones(2, 2), torch.ones(2, 2, dtype=half)
    policy = fmp.opt_level("O1", half)
    assert fmp.autocast(model, policy)(narrow, wide) == (half, F32, F32, half)
    assert fmp.autocast(model, policy)(wide, wide) == (half, F32, F32, F32)
    # Apex's decorators do nothing while amp is off.
    assert model(wide, wide) == (F32, F32, F32, F32)


@pytest.mark.parametrize("half", HALVES)
def test_functions_of_torch_are_registered_as_rules(half):
    rules = fmp.OpRules.apex().full(torch.sigmoid).low("outer").promote("hypot")
    policy = fmp.opt_level("O1", half, op_rules=rules)
    x, y = torch.ones(2, dtype=half), torch.ones(2)

    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.sigmoid().dtype, torch.outer(y, y).dtype, torch.hypot(x, y).dtype

    assert fmp.autocast(model, policy)(x, y) == (F32, half, F32)


def test_what_does_not_exist_cannot_be_registered():
    with pytest.raises(ValueError, match="sigmoyd"):
        fmp.OpRules.apex().full("sigmoyd")


class Cube(torch.autograd.Function):
    """A function whose backward mixes what it saved with the gradient, and so needs both in one dtype."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        assert x.dtype == grads[0].dtype
        return 3.0 * x * x * grads[0]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("decorate", "full"), [(fmp.low_precision, False), (fmp.full_precision, True)])
def test_a_custom_autograd_function_trains_in_the_precision_that_it_is_given(decorate, full, half):
    cube = decorate(Cube.apply)
    seen: list[torch.dtype] = []

    def loss_fn(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = cube(x @ weight)
        seen.append(out.dtype)
        return out.float().sum()

    step = fmp.train_step(loss_fn, fmp.optim.sgd(1.0), policy=fmp.opt_level("O1", half, loss_scale=4.0))
    x = torch.tensor([[1.0, 0.5], [0.25, 2.0]])
    state, _ = step(step.init(torch.ones(2)), x)
    assert seen == [F32 if full else half]
    grad = (3.0 * (x @ torch.ones(2)) ** 2) @ x
    assert state.params.dtype == F32
    torch.testing.assert_close(state.params, 1.0 - grad, rtol=4 * torch.finfo(half).eps, atol=0.0)


@pytest.mark.parametrize("half", HALVES)
def test_casts_are_switched_off_for_a_function(half):
    """`amp.disable_casts` does so for a block of code."""
    inner = lambda x, y: ((x @ y).dtype, y.softmax(-1).dtype)
    off = fmp.autocast(inner, fmp.Policy(None, None, None))
    x = torch.ones(2, 2)
    narrow = x.to(half)

    def model(x: torch.Tensor, narrow: torch.Tensor) -> Any:
        return inner(x, narrow), off(x, x), off(narrow, narrow), inner(x, narrow)

    cast = (half, F32)
    assert fmp.autocast(model, fmp.opt_level("O1", half))(x, narrow) == (cast, (F32, F32), (half, half), cast)


def test_a_function_that_fails_leaves_no_casts_behind():
    """`amp.disable_casts` leaves them off after an error."""

    def model(x: torch.Tensor) -> Any:
        with pytest.raises(RuntimeError, match="on purpose"):
            fmp.autocast(fail, fmp.Policy(None, None, None))()
        return (x @ x).dtype

    def fail() -> None:
        raise RuntimeError("on purpose")

    x = torch.ones(2, 2)
    assert fmp.autocast(model, fmp.opt_level("O1", "bf16"))(x) == torch.bfloat16
    assert (x @ x).dtype == F32
