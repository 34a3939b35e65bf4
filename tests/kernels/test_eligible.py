"""Where kernels must not run: wherever something else than memory stands behind a tensor."""

from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fmp
from fmp import _compat
from fmp.kernels import eligible
from fmp.kernels.eligible import are_alike, usable
from tests.kernels.harness import needs_executor
from tests.kernels.on_executor import kernels_on_cpu

pytestmark = needs_executor


class Own(torch.Tensor):
    """A class of somebody's own."""


class Nothing(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_plain_tensors_of_a_device_with_kernels():
    tensors = [torch.randn(3), torch.nn.Parameter(torch.randn(2, 2).half(), requires_grad=False), torch.empty(0)]
    assert not usable("scale", tensors)
    with kernels_on_cpu():
        assert usable("scale", tensors)
        assert usable("scale", tensors, numbers=[torch.tensor(1.0), None])
        assert not usable("scale", [])
        assert not usable("scale", [], numbers=[torch.tensor(1.0)])


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2).as_subclass(Own),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2).to(torch.float8_e5m2),
        torch.zeros(4)[::2],
        torch.zeros(2, 1).expand(2, 3),
        torch.zeros(2, requires_grad=True),
        torch.zeros(2, dtype=torch.complex64).conj().imag,
        cast(Any, torch)._efficientzerotensor(2),
    ],
    ids=["class", "sparse", "meta", "f64", "int", "f8", "gaps", "expanded", "recorded", "negative", "zeros"],
)
def test_one_tensor_that_is_not(other):
    with kernels_on_cpu():
        assert not usable("scale", [torch.zeros(2), other])
        assert not usable("scale", [other, torch.zeros(2)])


@pytest.mark.parametrize("number", [torch.zeros(1), torch.tensor(1.0, dtype=torch.float64)], ids=["[1]", "f64"])
def test_a_number_that_is_none(number):
    with kernels_on_cpu():
        assert not usable("scale", [torch.zeros(2)], numbers=[number])


def test_what_autograd_does_not_record_may_require_gradients():
    with kernels_on_cpu(), torch.no_grad():
        assert usable("scale", [torch.zeros(2, requires_grad=True)])


def test_not_under_transforms():
    seen = []

    def note(x):
        seen.append(usable("scale", [torch.zeros(2)]) or usable("scale", [x.detach()]))
        return (x * x).sum()

    with kernels_on_cpu():
        torch.func.grad(note)(torch.ones(2))
        torch.func.vmap(note)(torch.ones(3, 2))
        torch.func.jvp(note, (torch.ones(2),), (torch.ones(2),))
        with forward_ad.dual_level():
            note(torch.ones(2))
    assert seen == [False] * 4


def test_not_in_a_mode_nor_with_a_tensor_that_is_not_there():
    with kernels_on_cpu():
        with Nothing():
            assert not usable("scale", [torch.zeros(2)])
        with FakeTensorMode():
            fake = torch.zeros(2)
            assert not usable("scale", [fake])
        assert not usable("scale", [fake])
        assert usable("scale", [torch.zeros(2)])


def test_not_while_compiling():
    scaler, grads = fmp.StaticLossScale(4.0), {"w": torch.ones(3)}
    with kernels_on_cpu() as names:
        found = torch.compile(scaler.unscale, backend="aot_eager", fullgraph=True)(grads)
        assert torch.equal(found["w"], torch.full((3,), 0.25))
        assert names == []


def test_a_wrapper_of_a_transform_that_has_ended_is_not_memory():
    kept = []
    torch.func.grad(lambda x: (kept.append(x.clone()), x.sum())[1])(torch.ones(2))
    assert _compat.wrapped_by_transform(kept[0])
    with kernels_on_cpu(), torch.no_grad():
        assert not usable("scale", kept)


def test_devices_are_not_mixed():
    with kernels_on_cpu():
        assert not eligible.are_plain([torch.zeros(2), torch.zeros(2, device="meta")])


def test_rows_lie_in_memory_in_one_order():
    x = torch.zeros(3, 4)
    across = torch.zeros(4, 3).t()
    deep = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert are_alike([[x, deep], [x.half(), deep.half()]])
    assert are_alike([[across], [across.clone()]])
    assert not are_alike([[x], [across]])
    assert not are_alike([[x[:, :2]]])
    assert not are_alike([[torch.zeros(2, 1).expand(2, 3)]])
