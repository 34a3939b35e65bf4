"""Inference tensors that a function under remat reads, with ordinary autograd."""

import pytest
import torch
from torch import nn

import fmp

with torch.inference_mode():
    _CONSTANT = torch.linspace(1.0, 2.0, 4)


class _Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", _CONSTANT)

    def forward(self, x):
        return x.sin() + self.bias


_FUNCTIONS = {
    "closure": lambda: lambda x: fmp.remat(lambda x: x.sin() + _CONSTANT)(x),
    "argument": lambda: lambda x: fmp.remat(lambda c, x: x.sin() + c)(_CONSTANT, x),
    "buffer": lambda: fmp.remat(_Biased()),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_an_inference_tensor_is_read(name):
    x = torch.linspace(0.0, 1.0, 4, requires_grad=True)
    value = _FUNCTIONS[name]()(x)
    assert torch.equal(value, x.sin() + _CONSTANT)
    (found,) = torch.autograd.grad(value.sum(), x)
    assert torch.equal(found, x.cos())
    assert torch.equal(_FUNCTIONS[name]()(x.detach()), x.detach().sin() + _CONSTANT)
