"""Fake tensors in place of real ones: which are replaced, which cannot be, and that all is put back."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import fmp
from fmp import _compat

X, W = torch.randn(512, 16), torch.randn(16, 16) / 4
BIG = X.nbytes


def test_fake_stand_ins_share_storage_where_the_tensors_do():
    x = torch.zeros(8)

    def same(a, b):
        assert a.untyped_storage()._cdata == b.untyped_storage()._cdata
        assert isinstance(SHARED, type(a))
        assert b.storage_offset() == 2
        return SHARED + 1

    assert fmp.memory.peak(same, x, x[2:].view(2, 3), fake=True) == SHARED.nbytes


SHARED = torch.ones(100)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen = self.seen + 1
        return x * 2


def test_a_module_that_sets_a_buffer_anew_keeps_its_own():
    module = Counter()
    before = module.seen
    assert fmp.memory.peak(module, X, fake=True) == BIG + 16
    assert module.seen is before


@pytest.mark.parametrize(
    "make",
    [
        lambda: FakeTensorMode().from_tensor(X),
        lambda: torch.eye(3).to_sparse(),
        lambda: TwoTensor(X.clone(), X.clone()),
    ],
)
def test_what_has_no_fake_stand_in(make):
    with pytest.raises(ValueError, match="leave out fake=True"):
        fmp.memory.peak(lambda x: x, make(), fake=True)
    assert _compat.dispatch_modes() == []


class Holder:
    def __init__(self) -> None:
        self.weight, self.layer, self.inner = W, nn.Linear(16, 16), {"scale": torch.ones(16)}

    def __call__(self, x):
        self.last = self.layer(x @ self.weight) * self.inner["scale"]
        return self.last

    def method(self, x):
        return self(x)


def test_attributes_of_objects_are_replaced_for_a_while():
    holder = Holder()
    outer = SimpleNamespace(inner=holder)
    calls = (holder.method, holder, lambda x: holder(x), partial(Holder.__call__, holder), lambda x: outer.inner(x))
    for call in calls:
        before = dict(vars(holder))
        found = fmp.memory.peak(call, X, fake=True)
        assert vars(holder).keys() == before.keys()
        assert all(vars(holder)[name] is value for name, value in before.items())
        assert type(holder.layer.weight) is nn.Parameter
        assert found == fmp.memory.peak(call, X)
        vars(holder).pop("last")


def test_a_tensor_that_no_stand_in_replaces():
    class Slotted:
        __slots__ = ("weight",)

        def __init__(self) -> None:
            self.weight = W

    holder = Slotted()
    assert fmp.memory.peak(lambda x: x @ holder.weight, X) == BIG
    with pytest.raises(ValueError, match="pass it as an argument"):
        fmp.memory.peak(lambda x: x @ holder.weight, X, fake=True)
    with pytest.raises(ValueError, match=r"looks at the values of tensors \(aten\._local_scalar_dense"):
        fmp.memory.peak(lambda x: x * x.sum().item(), X, fake=True)
    with pytest.raises(ValueError, match="looks at the values"):
        fmp.memory.saved_residuals(lambda x: x[x > 0], X, fake=True)
    with pytest.raises(AssertionError, match="mine"):
        fmp.memory.peak(_fails, X, fake=True)
    assert _compat.dispatch_modes() == []


def _fails(x):
    raise AssertionError("mine")
