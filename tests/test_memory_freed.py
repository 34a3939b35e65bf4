"""Memory that was there before a call and that the call frees."""

import pytest
import torch

import fmp
from tests.memory import peak_bytes

X = torch.randn(512, 16)
BIG = X.nbytes


def test_what_the_call_frees_is_free():
    def replaced(given):
        x = given.pop()
        y = x + 1
        del x
        return y * 2

    for given in ([X.clone()], [X.clone()]):
        assert fmp.memory.peak(replaced, given) == BIG
    held = [X.clone()]
    assert fmp.memory.peak(lambda: replaced(held)) == BIG
    kept = X.clone()
    assert fmp.memory.peak(replaced, [kept]) == 2 * BIG


def test_donated_state_is_free_before_the_end():
    def loss_fn(params, x):
        return (x @ params["a"] @ params["b"]).square().mean()

    params = {"a": torch.ones(16, 512), "b": torch.ones(512, 16)}
    for optimizer in (fmp.optim.adam(1e-3)._replace(fused=None), fmp.optim.sgd(0.1, momentum=0.9, fused=True)):
        step = fmp.train_step(loss_fn, optimizer, donate=True)
        step(step.init(params), X)
        states = [step.init(params)]
        real = peak_bytes(lambda states=states: step(states.pop(), X))
        assert fmp.memory.peak(step, step.init(params), X) == pytest.approx(real, rel=0.02)
