"""Optimizers that step through another one: what would train nothing is refused, and what is advised trains."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fmp.compat import amp
from tests.bits import same_bits

Optimizer = torch.optim.Optimizer


class Sam(Optimizer):
    """Has the groups of the optimizer that it makes."""

    def __init__(self, params: Any, **kwargs: Any):
        super().__init__(params, kwargs)
        self.base = torch.optim.SGD(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    def second_step(self) -> None:
        self.base.step()


class Twin(Optimizer):
    """Has groups of its own with the same parameters."""

    def __init__(self, params: Any, base: Optimizer):
        super().__init__(params, {})
        self.parts = {"base": [base]}

    def step(self, closure: Any = None) -> Any:
        return self.parts["base"][0].step(closure)


class Around(Optimizer):
    """Has the groups of the optimizer that it is given."""

    def __init__(self, base: Optimizer):
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Bare(Optimizer):
    """Does not call `super().__init__`."""

    def __init__(self, base: Optimizer):
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.zero_grad = base.zero_grad

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.125, momentum=0.5)


def backward(model: nn.Module, optimizer: Optimizer, factor: float = 1.0) -> None:
    with amp.scale_loss(model(torch.ones(4, 3)).square().mean() * factor, optimizer) as scaled:
        scaled.backward()


def start(model: nn.Module, optimizer: Optimizer, level: str) -> None:
    amp.initialize(model, optimizer, opt_level=level, half_dtype="bf16", loss_scale="dynamic", verbosity=0)


def test_an_inner_optimizer_on_masters_is_refused():
    model = nn.Linear(3, 2)
    optimizer = Sam(model.parameters(), lr=0.125)
    start(model, optimizer, "O2")
    backward(model, optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) of SGD: .* not reach the model, .* give the inner one to amp"):
        optimizer.second_step()


@pytest.mark.parametrize("around", [True, False])
def test_an_inner_optimizer_on_parameters_with_masters_is_refused(around):
    model = nn.Linear(3, 2)
    inner = sgd(model.parameters())
    optimizer = Twin(model.parameters(), inner)
    start(model, optimizer, "O2")
    backward(model, optimizer)
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(RuntimeError, match="masters would overwrite"):
        (optimizer if around else inner).step()
    assert same_bits(before, list(model.parameters()))


def test_an_inner_optimizer_that_would_not_skip_is_refused():
    model = nn.Linear(3, 2)
    optimizer = Sam(model.parameters(), lr=0.125)
    start(model, optimizer, "O1")
    backward(model, optimizer)
    optimizer.second_step()
    before = copy.deepcopy(list(model.parameters()))
    backward(model, optimizer, float("inf"))
    with pytest.raises(RuntimeError, match=r"overflowed, and it would not skip"):
        optimizer.second_step()
    assert same_bits(before, list(model.parameters()))


WRAPPED = {
    "shared groups, outside": lambda model, inner: Around(inner),
    "own groups, outside": lambda model, inner: Twin(model.parameters(), inner),
    "no hooks, outside": lambda model, inner: Bare(inner),
}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", [*WRAPPED, "shared groups, given", "own groups, given"])
def test_what_is_advised_trains_and_skips_as_without_a_wrapper(level, name):
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    model = copy.deepcopy(plain)
    trained = []
    for net, wraps in ((plain, False), (model, True)):
        inner = given = outer = sgd(net.parameters())
        if wraps and "given" in name:
            given = outer = Around(inner) if "shared" in name else Twin(net.parameters(), inner)
        start(net, given, level)
        if wraps and "given" not in name:
            outer = WRAPPED[name](net, inner)
        refused = wraps and name == "own groups, given" and level == "O2"
        for factor in (1.0, float("inf"), 1.0):
            outer.zero_grad()
            given.zero_grad()
            backward(net, given, factor)
            if refused:
                with pytest.raises(RuntimeError, match="give the inner one"):
                    outer.step()
            else:
                outer.step()
        amp.shutdown()
        trained.append([param.detach().clone() for param in net.parameters()])
    assert refused or same_bits(*trained)


def test_a_wrapper_is_no_name_for_what_it_wraps():
    model = nn.Linear(3, 2)
    inner = sgd(model.parameters())
    start(model, inner, "O2")
    with pytest.raises(RuntimeError, match="wraps another, name the one inside"):
        backward(model, Around(inner))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_an_optimizer_without_hooks_is_refused_before_anything_changes(level):
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"Bare does not call super\(\).__init__, .* wrap that afterwards"):
        start(model, Bare(sgd(model.parameters())), level)
    assert model.weight.dtype == torch.float32
    start(model, sgd(model.parameters()), level)


def test_other_optimizers_step_as_ever():
    model, other, unused = nn.Linear(3, 2), nn.Linear(3, 2), sgd([nn.Parameter(torch.ones(1))])
    optimizer, apart = sgd(model.parameters()), sgd(other.parameters())
    start(model, optimizer, "O2")
    backward(model, optimizer, float("inf"))
    before = copy.deepcopy(other.weight)
    other(torch.ones(1, 3)).sum().backward()
    apart.step()
    unused.step()
    assert not torch.equal(before, other.weight)
    amp.shutdown()
    optimizer.step()  # nobody looks any more
