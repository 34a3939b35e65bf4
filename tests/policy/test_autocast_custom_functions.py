"""Functions of one's own, `torch.autograd.Function`, cast op by op: the same with and without transforms."""

from typing import Any

import pytest
import torch
from torch.func import grad, vmap

import fmp
from tests.bits import same_bits

# The functions below add what has two dtypes.
pytestmark = pytest.mark.mixed_dtypes

BF16, F32 = torch.bfloat16, torch.float32
APEX = fmp.Policy("f32", "bf16", None, op_rules="apex")
seen: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen():
    seen.clear()


def note(where: str, *values: torch.Tensor) -> None:
    if not torch.compiler.is_compiling():  # it lets no custom function write elsewhere
        seen.append((where, *[value.dtype for value in values]))


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Low, full, promote."""
    low = x @ w
    full = torch.exp(low / 8.0)
    out = low + full
    note("forward", low, full, out)
    return out


def gradients(x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low = x @ w
    inner = grad * (1.0 + torch.exp(low / 8.0) / 8.0)
    dx, dw = inner @ w.T, x.T @ inner
    note("backward", low, inner, dx)
    return dx, dw


class Old(torch.autograd.Function):
    """In the old style, which no transform takes."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return product(x, w)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return gradients(x, w, grad)


class WithRule(torch.autograd.Function):
    """Mapped by torch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return product(x, w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return gradients(x, w, grad)


class Gradients(torch.autograd.Function):
    """The backward pass of the next one, as an op with a batching rule."""

    @staticmethod
    def forward(x, w, grad):
        return gradients(x, w, grad)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, x, w, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w, grad = (
            value if dim is not None else value.expand(info.batch_size, *value.shape)
            for value, dim in zip((x, w, grad), in_dims, strict=True)
        )
        pairs = [gradients(*one) for one in zip(x, w, grad, strict=True)]
        return tuple(torch.stack(parts) for parts in zip(*pairs, strict=True)), (0, 0)


class WithStaticmethod(torch.autograd.Function):
    """With a batching rule of its own."""

    @staticmethod
    def forward(x, w):
        return product(x, w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return Gradients.apply(*ctx.saved_tensors, grad)

    @staticmethod
    def vmap(info, in_dims, x, w):  # pyright: ignore[reportIncompatibleMethodOverride]
        assert in_dims == (0, None)
        return product(x, w), 0


class Nested(torch.autograd.Function):
    """Calls another one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return WithRule.apply(torch.tanh(x), w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        dx, dw = gradients(torch.tanh(x), w, grad)
        return dx * (1.0 - torch.tanh(x) ** 2), dw


NEW = [WithRule, WithStaticmethod, Nested]
FORWARD, BACKWARD = ("forward", BF16, F32, F32), ("backward", F32, F32, F32)


def inputs(members: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(members, 4, 4, generator=generator), torch.randn(4, 4, generator=generator)


def loss_of(function: Any) -> Any:
    return lambda w, x: function.apply(x, w).float().square().mean()


def taped(function: Any, policy: fmp.Policy, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    leaf = w.clone().requires_grad_()
    return torch.autograd.grad(fmp.autocast(loss_of(function), policy)(leaf, x), leaf)[0]


@pytest.mark.parametrize("function", [Old, *NEW])
def test_the_body_is_cast_eagerly_and_its_backward_is_not(function):
    x, w = inputs()
    out = fmp.autocast(function.apply, APEX)(x[0], w)
    assert (seen, out.dtype) == ([FORWARD], F32)
    seen.clear()
    assert taped(function, APEX, x[0], w).dtype == F32
    assert seen == [FORWARD, BACKWARD]


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("function", NEW)
def test_transforms_cast_it_alike(function, where):
    x, w = inputs()
    cast = lambda transform, fn: (
        transform(fmp.autocast(fn, APEX)) if where == "inside" else fmp.autocast(transform(fn), APEX)
    )
    expected = [taped(function, APEX, one, w) for one in x]
    seen.clear()
    assert same_bits(cast(grad, loss_of(function))(w, x[0]), expected[0])
    assert seen == [FORWARD, BACKWARD]
    seen.clear()
    values = cast(lambda fn: vmap(fn, in_dims=(0, None)), function.apply)(x, w)
    assert set(seen) == {FORWARD}
    torch.testing.assert_close(values, torch.stack([fmp.autocast(function.apply, APEX)(one, w) for one in x]))
    seen.clear()
    found = cast(lambda fn: vmap(grad(fn), in_dims=(None, 0)), loss_of(function))(w, x)
    assert set(seen) == {FORWARD, BACKWARD}
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-2, atol=1e-3)
    seen.clear()
    of_all = lambda w, x: vmap(loss_of(function), in_dims=(None, 0))(w, x).sum()
    torch.testing.assert_close(cast(grad, of_all)(w, x), torch.stack(expected).sum(0), rtol=1e-2, atol=1e-2)
    # What a batching rule of one's own calls, torch differentiates itself.
    assert set(seen) == ({FORWARD} if function is WithStaticmethod else {FORWARD, BACKWARD})


@pytest.mark.parametrize("function", [Old, *NEW])
def test_a_backward_pass_inside_of_autocast_is_not_cast_either(function):
    x, w = inputs()
    leaf = w.clone().requires_grad_()
    inside = fmp.autocast(lambda w: torch.autograd.grad(loss_of(function)(w, x[0]), w)[0], APEX)(leaf)
    assert seen == [FORWARD, BACKWARD]
    assert same_bits(inside, taped(function, APEX, x[0], w))
    fmp.autocast(lambda w: loss_of(function)(w, x[0]).backward(), APEX)(leaf)
    assert seen[-2:] == [FORWARD, BACKWARD]
    assert same_bits(leaf.grad, inside)


@pytest.mark.parametrize("function", NEW)
def test_another_policy_around_or_within(function):
    x, w = inputs()
    f16 = fmp.Policy("f32", "f16", None, op_rules="apex")
    off = fmp.Policy(None, None, None)
    one, mapped = (lambda fn: fn), (lambda fn: vmap(grad(fn), in_dims=(None, 0)))
    for outer, inner, low in [(APEX, f16, torch.float16), (APEX, off, F32), (off, APEX, BF16)]:
        for transform, value in [(one, x[0]), (grad, x[0]), (mapped, x)]:
            seen.clear()
            fmp.autocast(transform(fmp.autocast(loss_of(function), inner)), outer)(w, value)
            assert {record[1] for record in seen if record[0] == "forward"} == {low}


@pytest.mark.parametrize("function", [WithRule, Nested])
def test_compiled_and_taped(function):
    x, w = inputs()
    expected = taped(function, APEX, x[0], w)
    cast = torch.compile(fmp.autocast(loss_of(function), APEX), backend="aot_eager", fullgraph=True)
    leaf = w.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(cast(leaf, x[0]), leaf)[0], expected, rtol=1e-2, atol=1e-3)
