"""Under a transform the recomputation leaves out products that no gradient reads, and only those.

Memory that nothing has written to is NaN here, so that whatever would read it shows.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fmp
from tests.rematerialization.comparison import X, as_it_is

UP, DOWN = torch.linspace(-1, 1, 15).reshape(3, 5), torch.linspace(1, -1, 15).reshape(5, 3)


@pytest.fixture(autouse=True)
def nan_for_no_value():
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def products_of(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        result = call()
    products = [event for event in profile.events() or () if event.name in ("aten::mm", "aten::addmm")]
    # Where a mode sees an operator, what it runs itself is inside.
    return result, sum("PythonDispatchMode" not in {child.name for child in event.cpu_children} for event in products)


def gradients(function, *, lean):
    loss = lambda weights: (fmp.remat(function) if lean else function)(X, weights).sin().sum()
    return products_of(lambda: grad(loss)((UP, DOWN)))


def residual(x, weights):
    return x + torch.tanh(x @ weights[0]) @ weights[1]


def linear(x, weights):
    return F.linear(F.linear(x, weights[0].T, torch.ones(5)).tanh(), weights[1].T)


def averaged(x, weights):
    return (torch.tanh(x @ weights[0]) @ weights[1]).to(torch.float64).mean(0).float()


def read_by_tanh(x, weights):
    return torch.tanh(torch.tanh(x @ weights[0]) @ weights[1])


def read_twice(x, weights):
    y = torch.tanh(x @ weights[0]) @ weights[1]
    return x + y + y.sin()


def multiplied(x, weights):
    y = torch.tanh(x @ weights[0]) @ weights[1]
    return (x + y) * weights[1].sum()


def written_to(x, weights):
    y = torch.tanh(x @ weights[0]) @ weights[1]
    return (y.add_(x)).relu()


def chosen(x, weights):
    y = torch.tanh(x @ weights[0]) @ weights[1]
    return y + x if y.sum() > 100 else y - x * x


class LaunchesItsOwn(torch.autograd.Function):
    """Reads values where no dispatch mode sees it, as what launches a kernel does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        with _disable_current_modes():
            return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 2 * ctx.saved_tensors[0].sqrt()


def launched(x, weights):
    y = (torch.tanh(x @ weights[0]) @ weights[1]).abs()
    z = x.abs() @ torch.eye(3)
    return z + LaunchesItsOwn.apply(z) + y


# By function: how many products a gradient takes without remat, and how many remat adds.
LEFT_OUT = {residual: (5, 1), linear: (5, 1), averaged: (5, 1)}
NEEDED = {read_by_tanh: (5, 2), read_twice: (5, 2), multiplied: (5, 2), written_to: (5, 2), chosen: (5, 2)}


@pytest.mark.parametrize(("function", "counts"), [*LEFT_OUT.items(), *NEEDED.items()])
def test_which_products_run(function, counts):
    plain, products = gradients(function, lean=False)
    found, lean_products = gradients(function, lean=True)
    assert (products, lean_products - products) == counts
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


def test_what_a_kernel_of_its_own_reads_is_there():
    plain, products = gradients(launched, lean=False)
    found, lean_products = gradients(launched, lean=True)
    assert lean_products == products + 3
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


TRANSFORMS = {
    "grad_and_value": grad_and_value,
    "vmap(grad)": lambda f: vmap(grad(f)),
    "grad(vmap)": lambda f: grad(lambda xs: vmap(f)(xs).sum()),
    "grad(grad)": lambda f: grad(lambda x: (grad(f)(x) ** 2).sum()),
    "jvp(grad)": lambda f: lambda x: jvp(grad(f), (x,), (x,)),
    "jacrev(jacrev)": lambda f: jacrev(jacrev(f)),
    "hessian": hessian,
}
NOT_BY_TORCH = {(chosen, "vmap(grad)"), (chosen, "grad(vmap)"), (launched, "jvp(grad)"), (launched, "hessian")}


PAIRS = [pair for pair in itertools.product([*LEFT_OUT, *NEEDED, launched], TRANSFORMS) if pair not in NOT_BY_TORCH]


@pytest.mark.parametrize(("function", "name"), PAIRS)
def test_under_transforms(function, name):
    def loss(call):
        return lambda x: call(x, (UP, DOWN)).sin().sum()

    x = torch.stack([X, X.sin()])
    plain, lean = (TRANSFORMS[name](loss(call)) for call in (function, fmp.remat(function)))
    torch.testing.assert_close(lean(x), plain(x))


@pytest.mark.parametrize("how", ["hook", "list", "print"])
def test_what_is_held_or_shown_has_its_value(how, capsys):
    holder = SimpleNamespace(values=[])

    def function(x, weights):
        y = torch.tanh(x @ weights[0]) @ weights[1]
        if how == "hook":
            y.register_hook(lambda cotangent: cotangent * y.detach().sign())
        elif how == "list":
            holder.values = [y.detach()]
        else:
            print(y.detach()[0, 0])
        return x + y

    plain = gradients(function, lean=False)[0]
    held, shown = holder.values, capsys.readouterr().out
    found = gradients(function, lean=True)[0]
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    if how == "list":
        torch.testing.assert_close(as_it_is(holder.values[0]), as_it_is(held[0]))
    assert "nan" not in shown + capsys.readouterr().out


@pytest.mark.parametrize("read", [lambda y: y.tanh().atanh(), lambda y: y if y.sum() < 100 else y * 0])
def test_a_value_that_is_read_the_second_time_only(read):
    seen = SimpleNamespace(calls=0)

    def function(x, weights):
        y = torch.tanh(x @ weights[0]) @ (weights[1] / 8)
        seen.calls += 1
        return x + (read(y) if seen.calls == 2 else y)

    lean = fmp.remat(function)
    plain = grad(lambda weights: residual(X, (weights[0], weights[1] / 8)).sin().sum())((UP, DOWN))
    for calls in (3, 5, 7):  # the first time once more, in full; then not tried again
        found = grad(lambda weights: lean(X, weights).sin().sum())((UP, DOWN))
        torch.testing.assert_close(found, plain)
        assert seen.calls == calls


def test_more_operators_the_second_time():
    seen = SimpleNamespace(calls=0)

    def function(x, weights):
        seen.calls += 1
        return residual(x if seen.calls % 2 else x.clone(), weights)

    lean = fmp.remat(function)
    for calls in (2, 4):
        found = grad(lambda weights: lean(X, weights).sin().sum())((UP, DOWN))
        torch.testing.assert_close(found, gradients(residual, lean=False)[0], rtol=0, atol=0)
        assert seen.calls == calls


class Looking(TorchDispatchMode):
    """Looks at all that operators return."""

    def __init__(self):
        super().__init__()
        self.found_nan = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and func is torch.ops.aten.add.Tensor:
            self.found_nan |= bool(output.isnan().any())
        return output


def test_who_looks_at_the_operators_sees_values():
    with Looking() as looking:
        gradients(residual, lean=True)
    assert not looking.found_nan


OPS = {
    "product": lambda x, y, w: x @ w,
    "bias": lambda x, y, w: torch.addmm(y, x, w),
    "batched": lambda x, y, w: torch.bmm(x[None], w[None])[0],
    "add": lambda x, y, w: x + y,
    "subtract": lambda x, y, w: y - x,
    "multiply": lambda x, y, w: x * y,
    "tanh": lambda x, y, w: x.tanh(),
    "turn": lambda x, y, w: x.T.contiguous().T,
    "sum": lambda x, y, w: x.sum(0, keepdim=True).expand(3, 3),
    "norm": lambda x, y, w: F.layer_norm(x, (3,)),
    "softmax": lambda x, y, w: x.softmax(-1),
    "in place": lambda x, y, w: x.clone().add_(y),
    "into": lambda x, y, w: torch.cat([x[:1], y[1:]]),
    "index": lambda x, y, w: x[torch.tensor([2, 0, 1])],
    "where": lambda x, y, w: torch.where(y > 0, x, y),
    "half": lambda x, y, w: x.bfloat16().float(),
    "detach": lambda x, y, w: y + x.detach(),
}


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9
    ),
    results=st.integers(1, 3),
)
def test_random_programs(steps, results):
    def program(x, w):
        values = [x, x + 1]
        for name, first, second in steps:
            values.append(OPS[name](values[-1 - first % len(values)], values[-1 - second % len(values)], w))
        return values[-results:]

    def loss(call):
        return lambda x, w: sum((value * (1 + place)).sum() for place, value in enumerate(call(x, w)))

    x, w = torch.linspace(-1, 1, 9).reshape(3, 3), torch.linspace(1, 2, 9).reshape(3, 3)
    found, expected = (grad(loss(call), (0, 1))(x, w) for call in (fmp.remat(program), program))
    torch.testing.assert_close(found, expected)
