"""Calls of one module in several threads do not find each other's tensors in it."""

import _thread
import sys
import threading

import pytest
import torch
from torch import nn
from torch.func import grad

import fmp
from fmp.rematerialization import exclusive

X = torch.linspace(-1.0, 1.0, 12).view(4, 3)


@pytest.fixture
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("by_autograd", [False, True])
def test_one_module_in_many_threads(by_autograd):
    torch.manual_seed(0)
    linear = nn.Linear(3, 3)
    module, weight = nn.Sequential(linear, nn.Tanh()), linear.weight

    def gradient():
        if not by_autograd:
            return grad(lambda x: fmp.remat(module)(x).sum())(X)
        return torch.autograd.grad(fmp.remat(module)(X).sum(), weight)[0]

    want, found = gradient(), []

    def work():
        for _ in range(20):
            try:
                found.append(torch.equal(gradient(), want))
            except Exception as error:
                found.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 120
    assert linear.weight is weight


def test_a_module_that_is_not_let_go_raises(monkeypatch):
    module, taken, done = nn.Linear(3, 3), threading.Event(), threading.Event()
    monkeypatch.setattr(exclusive, "_PATIENCE", 0.01)

    def work():
        with exclusive.hold(frozenset([id(module)])):
            taken.set()
            done.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    taken.wait(30)
    with pytest.raises(fmp.RematError, match="another thread has held a module"):
        fmp.remat(module)(X)

    def work_of_autograd():
        found.append(fmp.remat(module)(X))
        ended.set()

    found, ended = [], threading.Event()
    _thread.start_new_thread(work_of_autograd, ())  # such a thread may work for the one that holds the module
    assert ended.wait(30)
    assert torch.equal(found[0], module(X))
    done.set()
    thread.join()
    assert fmp.remat(module)(X).shape == X.shape
