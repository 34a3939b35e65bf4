"""frozen changes nothing: every kind of function under every transform, against bf16 weights."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fmp
from fmp import tree
from fmp.dropout import SeededRandomness
from tests.bits import differing
from tests.rematerialization.cases import HALF, TRANSFORMS, Fn

Wrap = Callable[..., Any]
Case = Callable[[Wrap, Any], Fn]

GENERATOR = torch.Generator().manual_seed(11)
PLAIN = [
    {
        "up": torch.randn(1024, 4, generator=GENERATOR).bfloat16(),
        "down": (torch.randn(4, 1024, generator=GENERATOR) / 32).bfloat16(),
    }
    for _ in range(3)
]
COMPRESSED = fmp.df11.compress(PLAIN)
WEIGHTS = tree.map(lambda weight: fmp.df11.FrozenWeight(fmp.df11.compress(weight, min_numel=0)), PLAIN)


def block(weights, x, w):
    """A bf16 base, and an adapter `w` in fp32 that is multiplied with half of it."""
    hidden = torch.tanh(weights["up"].float() @ torch.tanh(w @ x))
    return torch.tanh(weights["down"].float() @ hidden + weights.get("bias", 0)) * x


def chain(wrap: Wrap, base: Any) -> Fn:
    def call(x, w):
        for weights in base:
            x = wrap(block)({**weights, "bias": w[0]}, x, w)
        return x.sum()

    return call


def shared(wrap: Wrap, base: Any) -> Fn:
    """The same weights in two calls, and in two places of one call."""
    twice = wrap(lambda left, x, w, *, right: block({"up": left["up"], "down": right["down"]}, x, w))
    return lambda x, w: twice(base[0], twice(base[0], x, w, right=base[0]), w, right=base[1]).sum()


def nested(wrap: Wrap, base: Any) -> Fn:
    """Blocks inside of a block that has weights of its own, and closes over theirs."""
    inner = wrap(block)

    def outer(weights, x, w):
        return torch.sin(block(weights, inner(base[1], inner(base[2], x, w), w), w))

    return lambda x, w: wrap(outer)(base[0], x, w).sum()


def inside_of_remat(wrap: Wrap, base: Any) -> Fn:
    inner = wrap(block)
    both = fmp.remat(lambda first, second, x, w: torch.sin(inner(second, inner(first, x, w), w)))
    return lambda x, w: both(base[0], base[1], x, w).sum()


def closure(wrap: Wrap, base: Any) -> Fn:
    return lambda x, w: wrap(lambda weights, x: block(weights, x, {"w": [w]}["w"][0]))(base[0], x).sum()


def partial(wrap: Wrap, base: Any) -> Fn:
    return lambda x, w: wrap(functools.partial(block, base[0], w=w))(
        wrap(functools.partial(block, base[1]))(x, w)
    ).sum()


def policy_inside(wrap: Wrap, base: Any) -> Fn:
    cast = fmp.autocast(block, HALF)
    return lambda x, w: wrap(cast)(base[1], wrap(cast)(base[0], x, w), w).sum()


def policy_outside(wrap: Wrap, base: Any) -> Fn:
    return fmp.autocast(chain(wrap, base), HALF)


def seeded_dropout(wrap: Wrap, base: Any) -> Fn:
    dropped = wrap(lambda weights, x, w: F.dropout(block(weights, x, w)))

    def call(x, w):
        with SeededRandomness(3):
            return dropped(base[1], dropped(base[0], x, w), w).sum()

    return call


def dropout(wrap: Wrap, base: Any) -> Fn:
    dropped = wrap(lambda weights, x, w: F.dropout(block(weights, x, w)))
    return lambda x, w: (dropped(base[1], dropped(base[0], x, w), w) * torch.rand(4)).sum()


SAVEABLE = {
    "all": lambda op, args: True,
    "dots": fmp.saveable.dots,
    "only_names": fmp.saveable.only_names("product"),
    "offload_names": fmp.saveable.offload_names("product", "gated"),
}


def keeping(saveable: Any) -> Case:
    def named(weights, x, w):
        y = fmp.checkpoint_name(weights["up"].float() @ x, "product")
        y = torch.tanh(weights["down"].float() @ fmp.checkpoint_name(torch.tanh(y), "gated"))
        return torch.tanh(w @ y) * x

    def made(wrap: Wrap, base: Any) -> Fn:
        lean = wrap(named, saveable=saveable)
        return lambda x, w: lean(base[1], lean(base[0], x, w), w).sum()

    return made


CASES: dict[str, Case] = {
    "chain": chain,
    "shared": shared,
    "nested": nested,
    "inside of remat": inside_of_remat,
    "closure": closure,
    "partial": partial,
    "policy inside": policy_inside,
    "policy outside": policy_outside,
    "seeded dropout": seeded_dropout,
    "dropout": dropout,
    **{f"saveable.{name}": keeping(saveable) for name, saveable in SAVEABLE.items()},
}


DECODING = ("shared", "closure", "inside of remat", "policy inside", "policy outside", "dropout")


def cells(cases: Iterable[str], compiled: Sequence[str]) -> list[Any]:
    """Lists every case under every transform; of what is compiled, which takes seconds, most cells are slow tests."""
    return [
        pytest.param(case, name, marks=[pytest.mark.slow] if "compile" in name and case not in compiled else [])
        for case in cases
        for name in TRANSFORMS
    ]


def without_remat(fn: Any, **options: Any) -> Any:
    return fn


def run(case: str, transform: str, wrap: Wrap, base: Any) -> Any:
    torch.manual_seed(7)
    result = TRANSFORMS[transform](CASES[case](wrap, base))
    return result, torch.rand(1)  # what is drawn afterwards is the same, too


def rounded(transform: str) -> bool:
    """Whether `fmp.remat` of the same function, too, adds up the uses of `x` and `w` in another order.

    For some cases under grad(vmap) it depends on the processor: MKL splits a product of another shape in another way.
    """
    return transform in ("grad(grad)", "grad(vmap)")


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch.func.linearize itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler
@pytest.mark.mixed_dtypes  # a policy multiplies bf16 by fp32
@pytest.mark.parametrize(("case", "transform"), cells(CASES, compiled=["policy outside"]))
def test_same_results_as_with_plain_weights(case, transform):
    if (case, transform) == ("dropout", "hessian"):  # torch.func.hessian maps with randomness="error"
        for wrap, base in ((without_remat, PLAIN), (fmp.df11.frozen, COMPRESSED)):
            with pytest.raises(RuntimeError, match="randomness"):
                run(case, transform, wrap, base)
        return
    got, want = run(case, transform, fmp.df11.frozen, COMPRESSED), run(case, transform, without_remat, PLAIN)
    assert tree.structure(want) == tree.structure(got)
    if not rounded(transform):
        assert differing(want, got) == set()
        return
    assert differing(run(case, transform, fmp.remat, PLAIN), got) == set()
    tolerance = 2e-2 if case.startswith("policy") else 1e-5
    for left, right in zip(tree.leaves(want), tree.leaves(got), strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.mixed_dtypes
@pytest.mark.parametrize(("case", "transform"), cells(DECODING, compiled=["policy outside"]))
def test_so_have_tensors_that_decode_themselves(case, transform):
    if (case, transform) == ("dropout", "hessian"):
        pytest.skip("torch.func.hessian maps with randomness='error'")
    got, want = [run(case, transform, without_remat, base) for base in (WEIGHTS, PLAIN)]
    assert tree.structure(want) == tree.structure(got)
    assert differing(want, got) == set()
