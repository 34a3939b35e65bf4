"""Modules of which torch sets attributes at each call, or caches values: recurrent, parametrized and pruned ones."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode

import fmp
from tests.rematerialization.comparison import as_it_is, plainly, under_grad

X = torch.linspace(-1.0, 1.0, 24).view(4, 2, 3)
BOTH = pytest.mark.parametrize("by_autograd", [False, True])


def gradients(module, wrap, by_autograd):
    """Gradients of a loss that calls the module twice, with respect to its parameters."""
    module = copy.deepcopy(module)

    def loss(params):
        out = 0.0
        for x in (X, X.cos()):
            y: Any = functional_call(module, params, (x,)) if params else module(x)
            out = out + (y[0] if isinstance(y, tuple) else y).sin().square().sum()
        return out

    call, module.forward = wrap(module.forward), lambda *args: call(*args)
    params = {name: param.detach().clone() for name, param in module.named_parameters()}
    if not by_autograd:
        return grad(loss)(params)
    return torch.autograd.grad(loss(None), list(module.parameters()))


@BOTH
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind, by_autograd):
    torch.manual_seed(0)
    module = kind(3, 5, 2)
    weights = module._flat_weights
    want, got = gradients(module, as_it_is, by_autograd), gradients(module, fmp.remat, by_autograd)
    torch.testing.assert_close(got, want)  # torch has another formula for a gradient that is recorded
    assert not any(gradient.requires_grad for gradient in fmp.tree.leaves(got))
    under_grad(lambda x: fmp.remat(module)(x.view(4, 1, 3))[0].sum())
    assert module._flat_weights is weights


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_recurrent_module_under_vmap_of_grad():
    torch.manual_seed(0)
    module = nn.LSTM(3, 5)

    def loss(x, wrap):
        return wrap(module)(x)[0].square().sum()

    want, got = (vmap(grad(lambda x, wrap=wrap: loss(x, wrap)))(X[None]) for wrap in (as_it_is, fmp.remat))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kernels_see", [torch.func.grad, fmp.grad])
def test_grad_mode_is_on_below_all_transforms_in_both_passes(kernels_see):
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.tanh.default:
                seen.append(torch.is_grad_enabled())
            return func(*args, **(kwargs or {}))

    with Seeing():
        kernels_see(lambda x: fmp.remat(torch.tanh)(x).sum())(X)
    assert seen == [True, True]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm, "prune"])
@pytest.mark.parametrize("differentiate", ["argument", "parameters", "autograd"])
def test_a_weight_that_a_hook_computes(make, differentiate):
    def run(wrap):
        torch.manual_seed(0)
        linear = nn.Linear(3, 3)
        linear = prune.random_unstructured(linear, "weight", 0.5) if make == "prune" else make(linear).eval()
        params = {name: param.detach() * 2 for name, param in linear.named_parameters()}

        def loss(params, x):
            y: Any = wrap(lambda params, x: functional_call(linear, params, (x,)))(params, x)
            return y.sin().sum() + linear.weight.square().sum()  # the hook has set this one

        if differentiate == "argument":
            # Here the hook runs inside, with parameters that are no argument.
            return grad(lambda x: wrap(linear)(x).sin().sum() + (linear.weight * x[0, 0]).sum())(X)
        if differentiate == "parameters":
            return grad(loss)(params, X)
        (wrap(linear)(X).sin().sum() + linear.weight.sum()).backward()
        return [param.grad for param in linear.parameters()]

    torch.testing.assert_close(run(fmp.remat), run(as_it_is))


@BOTH
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:RNN module weights are not part")
@pytest.mark.parametrize("is_pruned", [False, True])
def test_a_recurrent_weight_that_a_hook_computes(is_pruned, by_autograd):
    def run(wrap):
        torch.manual_seed(0)
        module: Any = nn.GRU(3, 4)
        if is_pruned:
            prune.l1_unstructured(module, "weight_hh_l0", amount=3)
        else:
            torch.nn.utils.weight_norm(module, "weight_hh_l0")
        if by_autograd:
            wrap(module)(X)[0].sin().sum().backward()
            return [param.grad for param in module.parameters()]
        return grad(lambda x: wrap(module)(x)[0].sin().sum())(X)

    torch.testing.assert_close(run(fmp.remat), run(as_it_is))


@pytest.mark.parametrize("gradient", [under_grad, plainly])
def test_a_weight_that_a_hook_has_computed_before(gradient):
    linear = prune.random_unstructured(nn.Linear(3, 3), "weight", 0.5)
    lean = fmp.remat(lambda x: (x @ linear.weight).sin())
    with pytest.raises(fmp.RematError, match="reads a weight that a hook sets"):
        gradient(lambda x: lean(x).sum())


def test_the_weight_of_the_call_before_is_not_kept():
    linear = prune.random_unstructured(nn.Linear(3, 3), "weight", 0.5)
    params = {name: param.detach() for name, param in linear.named_parameters()}
    weights = []
    for _ in range(3):
        grad(lambda params: functional_call(linear, params, (X,)).sum())(params)  # without remat, for comparison
        grad(lambda params: fmp.remat(lambda p: functional_call(linear, p, (X,)))(params).sum())(params)
        fmp.remat(linear)(X)  # and no backward pass
        weights.append(weakref.ref(linear.weight))
    del linear.weight
    gc.collect()
    assert [weight() for weight in weights] == [None] * 3


@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("where", ["around both passes", "around the first", "around the second", "filled before"])
@BOTH
def test_cached_parametrizations(make, where, by_autograd):
    def run(wrap):
        torch.manual_seed(0)
        linear = make(nn.Linear(3, 3)).eval()
        lean = wrap(lambda x: linear(x).sin())
        params = {name: param.detach() for name, param in linear.named_parameters()}

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = linear

            def forward(self, x):
                if where == "around the second":
                    return lean(lean(x))
                with parametrize.cached():
                    y = linear(x) if where == "filled before" else x
                    return lean(lean(y))

        twice = Twice()
        with parametrize.cached() if where in ("around both passes", "around the second") else torch.enable_grad():
            if by_autograd:
                twice(X).sum().backward()
                return [param.grad for param in linear.parameters()]
            inner = {f"linear.{name}": param for name, param in params.items()}
            return grad(lambda inner: functional_call(twice, inner, (X,)).sum())(inner)

    got = run(fmp.remat)
    torch.testing.assert_close(got, run(as_it_is))
    assert all(gradient.abs().max() > 0 for gradient in fmp.tree.leaves(got))


def test_methods_of_every_kind():
    class Maths:
        scale = 2.0

        @fmp.remat
        def method(self, x):
            return (x * self.scale).sin()

        @fmp.remat
        @staticmethod
        def above_static(x):
            return x.sin()

        @staticmethod
        @fmp.remat
        def below_static(x):
            return x.sin()

        @fmp.remat(saveable=fmp.saveable.dots)
        @classmethod
        def above_class(cls, x):
            return (x * cls.scale).sin()

        @classmethod
        @fmp.remat
        def below_class(cls, x):
            return (x * cls.scale).sin()

    maths: Any = Maths()
    for call, scale in [
        (maths.method, 2.0),
        *[(owner.above_static, 1.0) for owner in (maths, Maths)],
        *[(owner.below_static, 1.0) for owner in (maths, Maths)],
        *[(owner.above_class, 2.0) for owner in (maths, Maths)],
        *[(owner.below_class, 2.0) for owner in (maths, Maths)],
    ]:
        found = grad(lambda x, call=call: call(x).sum())(X)
        assert torch.equal(found, grad(lambda x, scale=scale: (x * scale).sin().sum())(X))
