"""A recomputation reads what the call has read: variables, modules and containers as they were then."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import fmp
from tests.rematerialization.comparison import X, as_it_is, check, everywhere, plainly, under_grad


@everywhere
def test_modules_are_in_the_mode_of_the_call(run):
    class Scaling(nn.Module):
        def forward(self, x):
            return (x * (2 if self.training else 3)).sin()

    inner = Scaling()

    def loss(x, wrap):
        inner.train()
        y = wrap(lambda x: inner(x).sin())(x).sum()
        inner.eval()
        return y

    check(run, loss)
    inner.eval()
    under_grad(lambda x: loss(x, fmp.remat))
    assert not inner.training


@everywhere
def test_attributes_of_modules_are_those_of_the_call(run):
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor, self.table, self.calls = 2.0, {"f": [3.0]}, 0

        def forward(self, x):
            self.calls += 1
            return (x * self.factor * self.table["f"][0]).sin()

    def loss(x, wrap):
        module = Scaling()
        y = wrap(module)(x).sum()
        module.factor, module.table["f"][0] = 5.0, 7.0
        modules.append(module)
        return y

    modules = []
    check(run, loss)
    assert {(module.factor, module.table["f"][0]) for module in modules} == {(5.0, 7.0)}


@pytest.mark.parametrize("run", [under_grad, plainly])
def test_the_generator_of_a_module(run):
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.generators = [torch.Generator().manual_seed(0)]
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, x):
            noise = torch.rand(3, generator=self.generator) + torch.rand(3, generator=self.generators[0])
            return (x * noise).sin()

    check(run, lambda x, wrap: wrap(Noise())(x).sum())


@everywhere
def test_loop_variables_are_those_of_the_call(run):
    functions = [torch.sin, torch.exp, torch.tanh]
    modules = [nn.Linear(3, 3) for _ in range(3)]

    def helper_first(x, wrap):
        scale = 2.0

        def helper(x):
            return x * scale

        y = wrap(lambda x: helper(x).sin())(x)
        scale = 3.0
        return y.sum()

    def only_loops(x, wrap):
        for i in range(3):
            x = wrap(lambda x: functions[i](x * (i + 1)))(x)
        for module in modules:
            x = wrap(lambda x: module(x).sin())(x)
        return x.sum()

    check(run, only_loops)
    check(run, helper_first)


SCALE = 2.0


@everywhere
def test_global_variables_and_containers_are_those_of_the_call(run, monkeypatch):
    def loss(x, wrap):
        options, nested = {"scale": 2.0}, [[2.0], 3]
        monkeypatch.setitem(globals(), "SCALE", 2.0)
        y = wrap(lambda x, options: (x * options["scale"] * nested[0][0] * SCALE).sin())(x, options)
        options["scale"] = nested[0][0] = 5.0
        monkeypatch.setitem(globals(), "SCALE", 5.0)
        changed.append((options, nested))
        return y.sum()

    changed: list[Any] = []
    check(run, loss)
    assert SCALE == 5.0
    assert changed == [({"scale": 5.0}, [[5.0], 3])] * 2


@pytest.mark.parametrize("kind", [list, tuple, lambda items: {"a": items}, lambda items: ({"a": items},)])
def test_functional_call_around_a_module_in_a_container(kind):
    linear = nn.Linear(3, 3)

    class Inner(nn.Module):
        def __init__(self, held):
            super().__init__()
            self.held = held

        def forward(self, x):
            for module in fmp.tree.leaves(self.held):
                x = module(x).sin()
            return x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.held = linear, kind([linear])

        def forward(self, x, wrap):
            return wrap(Inner(self.held))(x)

    weights = {name: value.detach() * 3 + 1 for name, value in Outer().named_parameters()}

    def gradients(wrap, transform):
        if transform:
            return grad(lambda weights: functional_call(Outer(), weights, (X, wrap)).sum())(weights)
        leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
        found = torch.autograd.grad(functional_call(Outer(), leaves, (X, wrap)).sum(), list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    for transform in (False, True):
        torch.testing.assert_close(gradients(fmp.remat, transform), gradients(as_it_is, transform))


@pytest.mark.parametrize("kind", [list, tuple, lambda items: {"a": items}, lambda items: lambda: items[0]])
@everywhere
def test_tensors_in_a_container_of_a_module(run, kind):
    class Scaling(nn.Module):
        def __init__(self, held):
            super().__init__()
            self.held = held

        def forward(self, x):
            held = self.held() if callable(self.held) else fmp.tree.leaves(self.held)[0]
            return (x * held).sin()

    check(run, lambda x, wrap: wrap(Scaling(kind([x.exp()])))(x).sum())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_made_by_torch_jit_is_refused():
    traced: Any = torch.jit.trace(nn.Linear(3, 3), X)
    with pytest.raises(fmp.RematError, match=r"made by torch\.jit"):
        under_grad(lambda x: fmp.remat(traced)(x).sum())
