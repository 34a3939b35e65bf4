"""remat_sequential(..., "auto"): what a function keeps is no fake tensor after the chain was measured."""

import functools

import pytest
import torch
from torch import nn
from torch.func import grad

import fmp
from fmp.live_fakes import Fakes

_WEIGHT = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
_X = torch.linspace(0.0, 1.0, 16).reshape(4, 4)


class _Cache:
    def __init__(self):
        self.kept = {}

    def __call__(self, size):
        if size not in self.kept:
            self.kept[size] = torch.ones(size, size).tril()
        return self.kept[size]


class _CachingModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(len(x), 1)
        return torch.tanh(x @ _WEIGHT) * self.mask


class _Memory:
    kept = None

    def __call__(self, x):
        if self.kept is None:
            self.kept = x.detach().tanh()
        return x @ _WEIGHT + self.kept


class _Last:
    def __call__(self, x):
        self.last = x.detach().tanh()
        return x @ _WEIGHT + self.last


def _masked(mask):
    return lambda x: torch.tanh(x @ _WEIGHT) * mask(4)


def _dictionary():
    kept = {}

    def mask(size):
        if size not in kept:
            kept[size] = torch.ones(size, size).tril()
        return kept[size]

    return mask


_CACHING = {
    "lru_cache": lambda: _masked(functools.lru_cache(lambda size: torch.ones(size, size).tril())),
    "object": lambda: _masked(_Cache()),
    "dictionary": lambda: _masked(_dictionary()),
    "module": _CachingModule,
    "last": _Last,
}


def _loss(fns, segments):
    return lambda x: fmp.remat_sequential(fns, segments)(x).sum()


@pytest.mark.parametrize("name", _CACHING)
def test_a_cache_holds_real_tensors_afterwards(name):
    first = _CACHING[name]()
    fns = [first, lambda x: x @ _WEIGHT]
    x = _X.clone().requires_grad_()
    (found,) = torch.autograd.grad(_loss(fns, "auto")(x), x)
    (want,) = torch.autograd.grad(fns[1](_CACHING[name]()(x)).sum(), x)
    assert torch.equal(found, want)
    assert type(first(_X)) is torch.Tensor


@pytest.mark.parametrize("name", ["lru_cache", "object"])
def test_a_cache_holds_real_tensors_under_a_transform(name):
    first = _CACHING[name]()
    fns = [first, lambda x: x @ _WEIGHT]
    found = grad(_loss(fns, "auto"))(_X)
    assert torch.equal(found, grad(lambda x: fns[1](_CACHING[name]()(x)).sum())(_X))


def test_what_is_kept_of_the_input_is_refused():
    with pytest.raises(fmp.RematError, match=r"keeps a tensor that depends on its input, f32\[4,4\].*clear it"):
        _loss([_Memory(), torch.sin], "auto")(_X.clone().requires_grad_())


def test_what_is_kept_of_the_input_is_refused_under_a_transform():
    with pytest.raises(fmp.RematError, match=r"keeps a tensor that depends on its input, f32\[4,4\].*clear it"):
        grad(_loss([_Last(), torch.sin], "auto"))(_X)


def test_a_module_gets_back_what_it_held():
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = None

        def forward(self, x):
            if self.kept is None:
                self.kept = x.detach().tanh()
            return x @ _WEIGHT + self.kept

    module = Remembering()
    fmp.remat_sequential([module, torch.sin], "auto").plan(_X.clone().requires_grad_())
    assert module.kept is None


def test_fake_tensors_in_a_cycle_are_not_alive():
    fakes = Fakes()
    with fakes:
        kept = torch.ones(2)
        cycle = [torch.ones(3)]
        cycle.append(cycle)  # pyright: ignore[reportArgumentType]
    del cycle
    assert [tensor.shape for tensor in fakes.alive()] == [kept.shape]
