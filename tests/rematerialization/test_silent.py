"""Tensors that would lose their gradient without a word, in a result or on another way: remat raises."""

import collections
import dataclasses
import functools
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import fmp
from tests.rematerialization.comparison import X, check, everywhere, plainly, under_grad, under_vmap


class Output(collections.OrderedDict):
    pass


class Mapping(collections.UserDict):
    pass


class Sequence(list):
    pass


@dataclasses.dataclass
class Record:
    h: Any


OPAQUE = {
    "subclass of OrderedDict": (lambda h: Output(h=h), lambda result: result["h"]),
    "UserDict": (lambda h: Mapping(h=h), lambda result: result["h"]),
    "subclass of list": (lambda h: Sequence([h]), lambda result: result[0]),
    "dataclass": (lambda h: Record(h), lambda result: result.h),
    "nested dataclass": (lambda h: Record({"a": [h]}), lambda result: result.h["a"][0]),
    "namespace": (lambda h: types.SimpleNamespace(h=h), lambda result: result.h),
    "set": (lambda h: {h}, lambda result: next(iter(result))),
    "view of a dict": (lambda h: {"h": h}.values(), lambda result: next(iter(result))),
    "closure": (lambda h: lambda: h, lambda result: result()),
    "partial": (lambda h: functools.partial(torch.sin, h), lambda result: result()),
    "bound method": (lambda h: h.sin, lambda result: result()),
    "generator": (lambda h: (h for _ in range(1)), next),
    "map": (lambda h: map(torch.sin, [h]), next),
    "distribution": (
        lambda h: torch.distributions.Normal(h, 1.0, validate_args=False),
        lambda result: result.log_prob(torch.ones(())),
    ),
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_a_result_that_cannot_be_taken_apart(kind):
    make, take = OPAQUE[kind]

    def loss(x, wrap):
        return take(wrap(lambda x: make(x.sin() * x))(x)).sum()

    for run in (under_grad, under_vmap):
        with pytest.raises(fmp.RematError, match=r"the result is a .*return a dict, list, tuple or NamedTuple"):
            run(lambda x: loss(x, fmp.remat))
    with pytest.raises(fmp.RematError, match="the result is a"):
        plainly(lambda x: loss(x, functools.partial(fmp.remat, determinism_check="bitwise")))
    check(plainly, loss)


def test_the_error_names_the_leaf():
    with pytest.raises(fmp.RematError, match=r"the result 'a/1' is a .*test_silent\.Record"):
        under_grad(lambda x: fmp.remat(lambda x: {"a": [x.sin(), Record(x.sin())]})(x)["a"][0].sum())


def test_constants_and_known_containers_are_results():
    Point = collections.namedtuple("Point", "a b")

    def results(x):
        constants = (1, 2.0, 3j, "s", b"b", None, True, x.dtype, x.device, x.shape, torch.strided, range(3), int)
        containers = (collections.OrderedDict(h=x.sin()), collections.deque([x.cos()]), Point(x.tan(), 2))
        return constants, containers, types.SimpleNamespace(size=3), torch.relu, frozenset({1}), x.max(0)

    def loss(x, wrap):
        constants, (first, second, third), namespace, *_, best = wrap(results)(x)
        assert constants[:4] == (1, 2.0, 3j, "s")
        assert (constants[9], namespace.size) == (x.shape, 3)
        return (first["h"] * second[0] * third.a * third.b * best.values).sum()

    for run in (under_grad, under_vmap, plainly):
        check(run, loss)


def test_functions_that_run_only_after_the_call():
    async def later(x):
        return x

    def one_by_one(x):
        yield x

    for fn in (later, one_by_one, functools.partial(one_by_one, X)):
        with pytest.raises(TypeError, match="generator or async function"):
            fmp.remat(fn)


@pytest.mark.parametrize("fn", [lambda x: x.relu_(), nn.Sequential(nn.ReLU(inplace=True)), lambda x: x[:2].mul_(3)])
def test_a_change_in_place_under_vmap(fn):
    with pytest.raises(fmp.RematError, match=r"changed its argument 0.*in place"):
        vmap(grad(lambda x: fmp.remat(fn)(x * 1).sum()))(X)
    with pytest.raises(fmp.RematError, match=r"changed its argument 0.*in place"):
        grad(lambda x: vmap(fmp.remat(fn))(x * 1).sum())(X)
    with pytest.raises(fmp.RematError, match=r"changed its argument 0.*in place"):
        vmap(vmap(grad(lambda x: fmp.remat(fn)(x * 1).sum())))(X[None])


@pytest.mark.parametrize("run", [under_grad, under_vmap])
def test_a_view_cannot_be_changed(run):
    def of_the_argument(x, wrap):
        x = x * 1
        wrap(lambda x: x[0])(x).mul_(5)
        return (x * x).sum()

    def of_another_result(x, wrap):
        whole, part = wrap(lambda x: (lambda y: (y, y[0]))(x.sin()))(x)
        whole.mul_(5)
        return (part * part).sum()

    for loss in (of_the_argument, of_another_result):
        check(plainly, loss)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            run(lambda x, loss=loss: loss(x, fmp.remat))


@everywhere
def test_views_keep_their_gradients(run):
    def loss(x, wrap):
        first, rest, same = wrap(lambda x: (x[0], x.view(-1)[1:], x))(x)
        halves = wrap(lambda x: x.sin().view(-1)[:2].chunk(2))(x)
        return (first * x).sum() + (rest.sin() * halves[0]).sum() + (same * halves[1]).sum()

    check(run, loss)


@everywhere
def test_a_result_of_its_own_can_be_changed(run):
    check(run, lambda x, wrap: wrap(torch.sin)(x).mul_(2).sum())


class Leaving(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.early, self.items = how, None, []

    def forward(self, x):
        h = x.sin()
        if self.how == "new attribute":
            self.aux = h.sum()
        elif self.how == "attribute":
            self.early = h.sum()
        elif self.how == "buffer":
            self.register_buffer("extra", h.sum())
        else:
            self.items.append({"h": h.sum()}["h"])
        return h.tanh()


@pytest.mark.parametrize("how", ["new attribute", "attribute", "buffer", "list"])
def test_a_tensor_left_in_a_module(how):
    def loss(x, wrap):
        module = Leaving(how)
        y = wrap(module)(x).sum()
        found = {"new attribute": "aux", "attribute": "early", "buffer": "extra"}.get(how)
        return y + (module.items[0] if found is None else getattr(module, found))

    for run in (under_grad, under_vmap):
        with pytest.raises(fmp.RematError, match=r"put f32\[\] into .*return the tensor as well"):
            run(lambda x: loss(x, fmp.remat))
    check(plainly, loss)


AUX: Any = None


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("how", ["list", "dict", "nested", "nonlocal", "global"])
def test_a_tensor_left_in_a_container_or_variable(how, before, monkeypatch):
    monkeypatch.setitem(globals(), "AUX", None)

    def loss(x, wrap):
        global AUX
        start = x.cos().sum() if before else None
        items, table, nested, variable = [start], {"h": start}, [[start]], start
        AUX = start

        def f(x):
            global AUX
            nonlocal variable
            h = x.sin()
            if how == "list":
                items.append(h.sum())
            elif how == "dict":
                table["h"] = h.sum()
            elif how == "nested":
                nested[0].append(h.sum())
            elif how == "nonlocal":
                variable = h.sum()
            else:
                AUX = h.sum()
            return h.tanh()

        y = wrap(f)(x).sum()
        left = {"list": items[-1], "dict": table["h"], "nested": nested[0][-1], "nonlocal": variable, "global": AUX}
        return y + left[how]

    for run in (under_grad, under_vmap):
        with pytest.raises(fmp.RematError, match=r"put f32\[\] into (a list|a dict|the (global )?variable '\w+')"):
            run(lambda x: loss(x, fmp.remat))
    check(plainly, loss)


@everywhere
def test_numbers_may_be_left_anywhere(run):
    calls = 0
    record: list[Any] = []

    def f(x):
        nonlocal calls
        calls += 1
        record.append(x.shape)
        return x.sin().tanh()

    check(run, lambda x, wrap: wrap(f)(x).sum())
    assert len(record) == calls >= 2
