"""Results that do not depend on what vmap maps, beside some that do: their gradients count once, not once a member."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fmp

GENERATOR = torch.Generator().manual_seed(5)
X, Z, W = [torch.randn(*shape, generator=GENERATOR, dtype=torch.float64) for shape in ((3, 4), (2, 4), (4, 4))]
Fn = Callable[..., Any]


def block(x: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Depends on both, on one, on the other, and on neither of what is mapped."""
    return torch.tanh(x @ w * z).sum(), torch.sin(x @ w).sum(), torch.cos(z @ w).sum(), (w @ w).sin().sum()


def chosen(results: tuple[Tensor, ...], which: tuple[int, ...]) -> Tensor:
    return torch.stack([results[place] * (place + 1.0) for place in which]).sum()


WHICH = [(3,), (0, 3), (1, 2), (2, 3), (0, 1, 2, 3)]

MAPPINGS: dict[str, Callable[[Fn, tuple[int, ...]], Callable[[Tensor], Tensor]]] = {
    "one": lambda f, which: lambda w: vmap(lambda x: chosen(f(x, Z[0], w), which))(X).sum(),
    "of results": lambda f, which: (
        lambda w: chosen(tuple([each.sum() for each in vmap(lambda x: f(x, Z[0], w))(X)]), which)
    ),
    "two": lambda f, which: lambda w: vmap(lambda x: vmap(lambda z: chosen(f(x, z, w), which))(Z).sum())(X).sum(),
    "two, the other way": lambda f, which: (
        lambda w: vmap(lambda z: vmap(lambda x: chosen(f(x, z, w), which))(X).sum())(Z).sum()
    ),
    "two of results": lambda f, which: (
        lambda w: chosen(
            tuple([each.sum() for each in vmap(lambda x: vmap(lambda z: f(x, z, w))(Z))(X)]),
            which,
        )
    ),
}

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda loss: grad(loss)(W),
    "vjp": lambda loss: vjp(loss, W)[1](torch.tensor(0.5, dtype=W.dtype)),
    "jvp": lambda loss: jvp(loss, (W,), (W.sin(),)),
    "jacrev": lambda loss: jacrev(loss)(W),
    "jacfwd": lambda loss: jacfwd(loss)(W),
    "grad(grad)": lambda loss: grad(lambda w: grad(loss)(w).sin().sum())(W),
    "hessian": lambda loss: hessian(loss)(W),
    "vmap(grad)": lambda loss: vmap(grad(loss))(torch.stack([W, W.cos()])),
    "autograd": lambda loss: _by_autograd(loss),
    "autograd twice": lambda loss: _by_autograd(lambda w: grad(loss)(w).sin().sum()),
}


def _by_autograd(loss: Callable[[Tensor], Tensor]) -> Tensor:
    w = W.clone().requires_grad_()
    return torch.autograd.grad(loss(w), w)[0]


@pytest.mark.parametrize("which", WHICH, ids=str)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_are_those_of_the_function(transform, mapping, which):
    got, want = [TRANSFORMS[transform](MAPPINGS[mapping](wrapped, which)) for wrapped in (fmp.remat(block), block)]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [{"saveable": fmp.saveable.dots}, {"determinism_check": "none"}, {"determinism_check": "bitwise"}],
    ids=str,
)
def test_so_they_are_with_every_option(options):
    loss = MAPPINGS["two"]
    got, want = [grad(loss(wrapped, (0, 1, 2, 3)))(W) for wrapped in (fmp.remat(block, **options), block)]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_nested_remat_and_a_train_step():
    def penalized(w: Tensor, x: Tensor, wrap: Callable[[Fn], Fn]) -> Tensor:
        inner = wrap(lambda x, w: (torch.tanh(x @ w), w.square().mean()))
        outer = wrap(lambda x, w: (inner(x, w)[0].sum(), inner(x, w)[1]))
        return vmap(lambda row: torch.stack(outer(row, w)).sum())(x).mean()

    ends = []
    for wrap in (fmp.remat, lambda fn: fn):
        step = fmp.train_step(lambda w, x, wrap=wrap: penalized(w, x, wrap), fmp.optim.sgd(0.1))
        ends.append(step(step.init(W), X)[0].params)
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


def test_a_cotangent_that_is_infinite_stays_in_its_result():
    """As of a scaled loss in float16: the other members get zeros, not zero times infinity."""

    def loss(wrap: Callable[[Fn], Fn], w: Tensor) -> Tensor:
        made = vmap(lambda x: wrap(lambda x, w: (x * w, w * 1.0))(x, w))(X[:, 0])
        return made[0].sum() + made[1].sum() * torch.inf

    w = torch.tensor(2.0, dtype=torch.float64)
    for wrap in (fmp.remat, lambda fn: fn):
        assert grad(lambda w, wrap=wrap: loss(wrap, w))(w) == torch.inf
