"""Functions of two vectors with remat somewhere inside, and what can be done with such a function."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vmap

import fmp
from fmp.dropout import SeededRandomness

vjp: Any = torch.func.vjp
Wrap = Callable[..., Any]
Fn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

HALF = fmp.opt_level("O1", half_dtype=torch.bfloat16)


def block(x, w):
    return torch.tanh(torch.tanh(w @ x) * x) * 0.5


def plain(wrap: Wrap) -> Fn:
    return lambda x, w: wrap(block)(x, w).sum()


def nested(wrap: Wrap) -> Fn:
    inner = wrap(block)
    return lambda x, w: wrap(lambda x, w: torch.sin(inner(inner(x, w), w)))(x, w).sum()


def closure(wrap: Wrap) -> Fn:
    def call(x, w):
        weights = {"first": [w, 3]}
        return wrap(lambda x: block(x, weights["first"][0]))(x).sum()

    return call


def partial(wrap: Wrap) -> Fn:
    return lambda x, w: wrap(functools.partial(block, w=w))(x).sum()


def policy_inside(wrap: Wrap) -> Fn:
    return lambda x, w: wrap(fmp.autocast(block, HALF))(x, w).sum()


def policy_outside(wrap: Wrap) -> Fn:
    return lambda x, w: fmp.autocast(wrap(block), HALF)(x, w).sum()


def seeded_dropout(wrap: Wrap) -> Fn:
    def call(x, w):
        with SeededRandomness(3):
            first = wrap(lambda x, w: F.dropout(block(x, w)))(x, w)
            return (wrap(lambda x: torch.sin(F.dropout(x)))(first) * F.dropout(x)).sum()

    return call


def dropout(wrap: Wrap) -> Fn:
    return lambda x, w: (wrap(lambda x, w: F.dropout(block(x, w)))(x, w) * F.dropout(x)).sum()


NORM = fmp.functionalize(nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()))


def batch_norm(wrap: Wrap) -> Fn:
    def call(x, w):
        params = {name: param * w[0, 0] for name, param in NORM.params.items()}
        out, buffers = wrap(NORM.apply)(params, NORM.buffers, w, train=True)
        return torch.sin(out @ x).sum() + buffers["0.running_mean"].sum()

    return call


def integers(wrap: Wrap) -> Fn:
    index = torch.tensor([2, 0, 1, 1])
    return lambda x, w: wrap(lambda x, w, index: block(x[index], w))(x, w, index).sum()


def aux(wrap: Wrap) -> Fn:
    def several(x, w, *, flag):
        y = block(x, w)
        return {"y": y, "again": y, "input": x, "note": ("text", 3, None, flag), "count": (y > 0).sum(), "view": x[:2]}

    def call(x, w):
        out = wrap(several)(x, w, flag=True)
        assert out["note"] == ("text", 3, None, True)
        assert out["again"] is out["y"]
        assert out["input"] is x
        assert out["count"].dtype == torch.int64
        return (out["y"] * 2 + out["again"]).sum() + (out["input"] * 3).sum() + out["view"].sum()

    return call


def keeping(saveable: Any) -> Callable[[Wrap], Fn]:
    def named(x, w):
        y = fmp.checkpoint_name(w @ x, "product")
        return torch.tanh(fmp.checkpoint_name(torch.tanh(y) * x, "gated")) * F.linear(x[None], w)[0]

    return lambda wrap: lambda x, w: wrap(named, saveable=saveable)(x, w).sum()


def _hyperbolic(op: Any, args: Any) -> bool:
    return op is torch.ops.aten.tanh.default


POLICIES = {
    "everything": fmp.saveable.everything,
    "nothing": fmp.saveable.nothing,
    "dots": fmp.saveable.dots,
    "dots_with_no_batch_dims": fmp.saveable.dots_with_no_batch_dims,
    "only_names": fmp.saveable.only_names("product"),
    "any_except_names": fmp.saveable.any_except_names("product"),
    "offload_names": fmp.saveable.offload_names("product", "gated"),
    "predicate": _hyperbolic,
}
CASES: dict[str, Callable[[Wrap], Fn]] = {
    "plain": plain,
    "nested": nested,
    "closure": closure,
    "partial": partial,
    "policy inside": policy_inside,
    "policy outside": policy_outside,
    "seeded dropout": seeded_dropout,
    "dropout": dropout,
    "BatchNorm": batch_norm,
    "integer inputs": integers,
    "aux outputs": aux,
    **{f"saveable.{name}": keeping(saveable) for name, saveable in POLICIES.items()},
}


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4, generator=generator), torch.randn(4, 4, generator=generator)


X, W = arguments()
XS = torch.stack([X, 2 * X, X.flip(0)])
_map = functools.partial(vmap, in_dims=(0, None), randomness="different")


def _backward(f: Fn) -> Any:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    f(x, w).backward()
    return x.grad, w.grad


def _autograd(f: Fn) -> Any:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    return torch.autograd.grad(f(x, w), (x, w))


def _twice(f: Fn) -> Any:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    first = torch.autograd.grad(f(x, w), x, create_graph=True)[0]
    return torch.autograd.grad(first.square().sum(), (x, w))


def _compiled(f: Fn) -> Any:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    return torch.autograd.grad(torch.compile(f, backend="aot_eager")(x, w), (x, w))


TRANSFORMS: dict[str, Callable[[Fn], Any]] = {
    "call": lambda f: f(X, W),
    "grad": lambda f: grad(f, (0, 1))(X, W),
    "fmp.grad": lambda f: fmp.grad(f, (0, 1))(X, W),
    "vjp": lambda f: vjp(f, X, W)[1](torch.ones(())),
    "vmap": lambda f: _map(f)(XS, W),
    "vmap(grad)": lambda f: _map(grad(f, (0, 1)))(XS, W),
    "grad(vmap)": lambda f: grad(lambda xs, w: _map(f)(xs, w).sum(), (0, 1))(XS, W),
    "jvp": lambda f: jvp(f, (X, W), (X.flip(0), W.t())),
    "linearize": lambda f: linearize(f, X, W)[1](X.flip(0), W.t()),
    "jacrev": lambda f: jacrev(lambda x, w: torch.stack([f(x, w), f(2 * x, w)]), (0, 1))(X, W),
    "jacfwd": lambda f: jacfwd(f, (0, 1), randomness="same")(X, W),
    "hessian": lambda f: hessian(f)(X, W),
    "grad(grad)": lambda f: grad(lambda x, w: grad(f)(x, w).square().sum(), (0, 1))(X, W),
    "jvp(grad)": lambda f: jvp(lambda x: grad(f)(x, W), (X,), (X.flip(0),)),
    "autograd.grad": _autograd,
    "autograd.grad twice": _twice,
    "backward": _backward,
    "compile": _compiled,
    "compile(grad)": lambda f: torch.compile(grad(f, (0, 1)), backend="aot_eager")(X, W),
}

REVERSE = ("grad", "vjp", "vmap(grad)", "jacrev", "hessian", "grad(grad)", "jvp(grad)")


def refused(case: str, transform: str) -> str | None:
    """Why a cell raises, with and without remat."""
    if (case, transform) == ("dropout", "hessian"):
        return "torch.func.hessian maps with randomness='error'"
    return None


def rounded(case: str, transform: str) -> str | None:
    """Why a cell is equal to rounding only: sums are formed in another order."""
    if transform == "grad(vmap)":
        return "the gradient of an operand that is not mapped is summed over the members once a call, not once a use"
    if case in ("dropout", "seeded dropout", "aux outputs") and transform in REVERSE:
        return "x is used inside and outside of the function: the uses inside are added up first"
    if (case, transform) == ("nested", "grad(grad)"):
        return "w is used inside and outside of the inner function: the uses inside are added up first"
    return None
