"""Forward mode over remat, and over its gradients, where there is nothing to push, or where memory is shared."""

from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jvp, linearize, vmap

import fmp
from tests.bits import same_bits
from tests.rematerialization.comparison import as_it_is

X = torch.linspace(-1.0, 1.0, 12).view(4, 3)
vjp: Any = torch.func.vjp


def second(x, y):
    return y.sin().sum()


IGNORED = {
    "jacfwd(grad), ignored": lambda wrap: jacfwd(grad(wrap(second), 0), 1)(X, X),
    "jacfwd(grad), both": lambda wrap: jacfwd(grad(wrap(second), 0), (0, 1))(X, X),
    "jvp(grad)": lambda wrap: jvp(grad(wrap(second), 0), (X, X), (X, X))[1],
    "linearize(grad)": lambda wrap: linearize(grad(wrap(second), 0), X, X)[1](X, X),
    "vmap(jacfwd(grad))": lambda wrap: vmap(jacfwd(grad(wrap(second), 0), 1))(X, X),
    "hessian": lambda wrap: hessian(wrap(second), (0, 1))(X, X),
    "no tensor": lambda wrap: jacfwd(lambda x: wrap(lambda x: (3, None))(x)[0] * x)(X),
    "integers": lambda wrap: jacfwd(lambda x: wrap(lambda x: (x > 0).sum())(x) * x)(X),
    "constants": lambda wrap: jacfwd(wrap(lambda x: (torch.ones(3), x.detach(), x.sin())))(X),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch.func.linearize itself
@pytest.mark.parametrize("how", IGNORED)
def test_zeros_where_there_is_nothing_to_push(how):
    assert same_bits(IGNORED[how](fmp.remat), IGNORED[how](as_it_is))


EXPANDED = {
    "gradient of sum": lambda x: x.sum(),
    "gradient of mean": lambda x: x.mean(0),
    "argument": lambda x: x.expand(2, 4, 3),
    "result": lambda x: x[:1].sin().expand(4, 3),
    "constant": lambda x: torch.ones(3).expand(4, 3) * 1,
    "overlapping": lambda x: x.reshape(-1).sin().unfold(0, 3, 1),
}
FORWARD = {
    "jvp": lambda f: jvp(f, (X,), (X,))[1],
    "jacfwd": lambda f: jacfwd(f)(X),
    "jvp(grad)": lambda f: jvp(grad(lambda x: f(x).sum()), (X,), (X,))[1],
    "jvp(jvp(grad))": lambda f: jvp(lambda x: jvp(grad(lambda x: f(x).sum()), (x,), (X,))[1], (X,), (X,))[1],
    "jvp(vmap(grad))": lambda f: jvp(vmap(grad(lambda x: f(x).sum())), (X.expand(2, 4, 3),), (X.expand(2, 4, 3),))[1],
    "jvp of the pullback": lambda f: jvp(lambda c: vjp(f, X)[1](c)[0], (f(X),), (f(X),))[1],
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", EXPANDED)
@pytest.mark.parametrize("how", FORWARD)
def test_results_whose_entries_share_memory(how, kind):
    fn = EXPANDED[kind]
    assert same_bits(FORWARD[how](fmp.remat(fn)), FORWARD[how](fn))


@pytest.mark.parametrize("inner", [fmp.saveable.nothing, fmp.saveable.dots, lambda op, args: True])
def test_a_policy_around_another_where_forward_mode_was_on_at_the_call(inner):
    def nested(x, wrap):
        inside = wrap(lambda x: (x.sin() * 2).tanh(), saveable=inner)
        return wrap(lambda x: (inside(x * 3) * x).sum(), saveable=lambda op, args: True)(x)

    def pushed(wrap):
        return grad(lambda x: jvp(lambda x: nested(x, wrap), (x,), (x,))[1])(X)

    torch.testing.assert_close(pushed(fmp.remat), pushed(lambda fn, **options: fn))
