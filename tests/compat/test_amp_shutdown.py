"""Shutdown gives back what is left, wherever it is by now, and always ends the session."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from fmp.compat import amp

F16, F32 = torch.float16, torch.float32


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.offset: Any
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offset = getattr(self, "offset", None)
        return self.layer(x if offset is None else x + offset)


def drop_bias(net: Any) -> None:
    net.layer.bias = None


def replace_layer(net: Any) -> None:
    net.layer = nn.Identity()


def delete_buffer(net: Any) -> None:
    del net.offset


def empty_buffer(net: Any) -> None:
    net.offset = None


def new_buffer(net: Any) -> None:
    net.offset = net.offset * 2.0


def count_instead(net: Any) -> None:
    net.offset = torch.tensor(3)


def freeze_as_buffer(net: Any) -> None:
    bias = net.layer.bias.detach()
    del net.layer.bias
    net.layer.register_buffer("bias", bias)


def pruned(net: Any) -> None:
    prune.l1_unstructured(net.layer, "weight", amount=2)


def pruned_for_good(net: Any) -> None:
    prune.l1_unstructured(net.layer, "weight", amount=2)
    prune.remove(net.layer, "weight")


def parametrized(net: Any) -> None:
    parametrize.register_parametrization(net.layer, "weight", Halved(), unsafe=True)


def fused(net: Any) -> None:
    net.layer.weight = nn.Parameter(net.layer.weight.detach() * 2.0)


CHANGES: list[Callable[[Any], None]] = [
    drop_bias,
    replace_layer,
    delete_buffer,
    empty_buffer,
    new_buffer,
    count_instead,
    freeze_as_buffer,
    pruned,
    pruned_for_good,
    parametrized,
    fused,
]


def train(net: Any, optimizer: torch.optim.Optimizer) -> None:
    with amp.scale_loss(net(torch.ones(4, 3)).square().mean(), optimizer) as scaled:
        scaled.backward()


def check_given_back(net: nn.Module, optimizer: torch.optim.Optimizer, grads: dict[Any, Any]) -> None:
    tensors = [*net.parameters(), *net.buffers(), *(p for group in optimizer.param_groups for p in group["params"])]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {F32}
    assert net(torch.ones(4, 3)).dtype == F32
    for param, grad in grads.items():
        torch.testing.assert_close(param.grad, grad)
    other = nn.Linear(1, 1)
    amp.initialize(other, opt_level="O3", verbosity=0)
    assert other.weight.dtype == F16


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_whose_tensors_have_moved_is_given_back(level, change):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    params = list(net.parameters())
    amp.initialize(net, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    train(net, optimizer)
    optimizer.step()
    train(net, optimizer)
    grads = {p: m.grad.float() for p, m in zip(params, amp.master_params(optimizer), strict=True) if m.grad is not None}
    values = [master.detach().float() for master in amp.master_params(optimizer)]
    change(net)
    amp.shutdown()
    assert [param for group in optimizer.param_groups for param in group["params"]] == params
    if change is not pruned_for_good:  # it writes into the weight
        assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))
    check_given_back(net, optimizer, grads)


def test_a_weight_norm_that_is_removed():
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(3, 2))
    net = nn.Sequential(layer)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    amp.initialize(net, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    train(net, optimizer)
    optimizer.step()
    nn.utils.remove_weight_norm(layer)
    assert layer.weight.dtype == F16
    amp.shutdown()
    check_given_back(net, optimizer, {})


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_module_that_refuses_its_buffer_costs_nothing_else(level):
    class Locked(Net):
        is_locked = False

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "offset" and self.is_locked:
                raise PermissionError("locked")
            super().__setattr__(name, value)

    net = Locked()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    amp.initialize(net, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    train(net, optimizer)
    optimizer.step()
    train(net, optimizer)
    grads = [master.grad for master in amp.master_params(optimizer)]
    net.is_locked = True
    with pytest.raises(PermissionError):
        amp.shutdown()
    for param, grad in zip(net.parameters(), grads, strict=True):
        assert param.dtype == F32
        assert grad is not None
        assert param.grad is not None
        assert torch.equal(param.grad, grad.float())
        assert optimizer.state[param]["momentum_buffer"].dtype == F32
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)


def test_tensors_that_were_not_cast_keep_their_dtypes():
    net = nn.Module()
    net.register_parameter("wide", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    net.register_parameter("narrow", nn.Parameter(torch.ones(2)))
    amp.initialize(net, opt_level="O3", cast_model_type=F32, verbosity=0)
    assert {param.dtype for param in net.parameters()} == {F32}
    amp.shutdown()
    assert [param.dtype for param in net.parameters()] == [torch.float64, F32]
