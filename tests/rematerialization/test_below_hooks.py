"""A remat that works by torch.func, below the saved-tensor hooks of another remat or of torch."""

import pytest
import torch
from torch.func import jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import fmp

_WEIGHT = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
_X = torch.linspace(0.0, 1.0, 16).reshape(4, 4)


def _block(x, w):
    return torch.tanh(x @ w)


_INNER = {
    "bitwise": lambda x: fmp.remat(_block, determinism_check="bitwise")(x, _WEIGHT),
    "vmap": lambda x: vmap(fmp.remat(_block), (0, None))(x, _WEIGHT),
    "jvp": lambda x: jvp(lambda x: fmp.remat(_block)(x, _WEIGHT), (x,), (x,))[1],
    "transform inside": lambda x: fmp.remat(lambda x: vjp(torch.sin, x)[0])(x),
    "twice": lambda x: fmp.remat(lambda x: fmp.remat(_block, determinism_check="bitwise")(x, _WEIGHT))(x),
}


@pytest.mark.parametrize("name", _INNER)
def test_a_remat_around(name):
    inner = _INNER[name]

    def gradient(fn):
        x = _X.clone().requires_grad_()
        return torch.autograd.grad(fn(x).sin().sum(), x)[0]

    outer = fmp.remat(lambda x: inner(x))
    assert torch.equal(gradient(outer), gradient(inner))
    assert torch.equal(gradient(outer), gradient(inner))


def test_the_hooks_of_torch_are_named():
    with pytest.raises(fmp.RematError, match=r"below saved-tensor hooks.*use fmp\.remat instead"):
        checkpoint(_INNER["bitwise"], _X.clone().requires_grad_(), use_reentrant=False)
