"""What each row of the optimizer battery should do to one parameter: torch.optim in float64, or the equations.

An oracle is a function of one leaf, `oracle(step, path, p, g, slot) -> p`: the number of updates before, the path
of the leaf, its value and gradient in float64, and a dictionary that it may keep state in.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fmp import optim
from tests.optim.battery import ROWS, Row

Tensor = torch.Tensor
Leaf = Callable[[int, str, Tensor, Tensor, dict[str, Any]], Tensor]
Rate = float | Callable[[int], float]


class Oracle(NamedTuple):
    """What one optimizer should do.

    Attributes:
        leaf: The update of one leaf.
        max_norm: What the norm of all gradients together is clipped to before.
        slack: The relative error of an update that the row's own arithmetic has beyond rounding each op.
    """

    leaf: Leaf
    max_norm: float | None = None
    slack: float = 0.0


def over(cls: type[torch.optim.Optimizer], rate: Rate | None = None, **options: Any) -> Leaf:
    """A class of torch, one instance a parameter."""

    def leaf(step: int, path: str, p: Tensor, g: Tensor, slot: dict[str, Any]) -> Tensor:
        if "optimizer" not in slot:
            slot["param"] = torch.nn.Parameter(p.clone())
            known = {} if rate is None else {"lr": at(rate, 0)}
            slot["optimizer"] = cls([slot["param"]], **known, **options)
        param, optimizer = slot["param"], slot["optimizer"]
        if rate is not None:
            optimizer.param_groups[0]["lr"] = at(rate, slot.setdefault("count", 0))
            slot["count"] += 1
        param.data.copy_(p)
        param.grad = g.clone()
        optimizer.step()
        return param.detach().clone()

    return leaf


def at(rate: Rate, count: int) -> float:
    """The learning rate of an update."""
    return rate(count) if callable(rate) else rate


def added(step: int, path: str, p: Tensor, g: Tensor, slot: dict[str, Any]) -> Tensor:
    """The gradient is the update."""
    return p + g


def adamw(rate: Rate, weight_decay: float, decays: Callable[[str], bool]) -> Leaf:
    """AdamW, with decay for some of the parameters."""
    with_decay, without = (over(torch.optim.AdamW, rate, weight_decay=decay) for decay in (weight_decay, 0.0))
    return lambda step, path, *rest: (with_decay if decays(path) else without)(step, path, *rest)


def lamb(
    rate: Rate, b1: float = 0.9, b2: float = 0.999, decay: float = 0.0, decays: Callable[[str], bool] | None = None
) -> Leaf:
    """You et al. 2020, algorithm 2, with the identity for phi."""

    def leaf(step: int, path: str, p: Tensor, g: Tensor, slot: dict[str, Any]) -> Tensor:
        m = slot["m"] = b1 * slot.get("m", 0.0) + (1.0 - b1) * g
        v = slot["v"] = b2 * slot.get("v", 0.0) + (1.0 - b2) * g * g
        t = slot["t"] = slot.get("t", 0) + 1
        u = (m / (1.0 - b1**t)) / ((v / (1.0 - b2**t)).sqrt() + 1e-6)
        u = u + (decay if decays is None or decays(path) else 0.0) * p
        ratio = p.norm() / u.norm() if p.any() and u.any() else torch.ones_like(p.norm())
        return p - at(rate, t - 1) * ratio * u

    return leaf


def lion(
    rate: Rate, decay: float, b1: float = 0.9, b2: float = 0.99, decays: Callable[[str], bool] | None = None
) -> Leaf:
    """Chen et al. 2023, algorithm 2."""

    def leaf(step: int, path: str, p: Tensor, g: Tensor, slot: dict[str, Any]) -> Tensor:
        m, t = slot.get("m", torch.zeros_like(p)), slot.get("t", 0)
        direction = (b1 * m + (1.0 - b1) * g).sign()
        slot["m"], slot["t"] = b2 * m + (1.0 - b2) * g, t + 1
        return p - at(rate, t) * (direction + (decay if decays is None or decays(path) else 0.0) * p)

    return leaf


def larc(
    rate: Rate,
    then: Leaf,
    trust: float = 0.02,
    clip: bool = True,
    decay: float = 0.0,
) -> Leaf:
    """The gradients that Apex's LARC hands on, and what becomes of them."""

    def leaf(step: int, path: str, p: Tensor, g: Tensor, slot: dict[str, Any]) -> Tensor:
        t = slot["larc"] = slot.get("larc", -1) + 1
        if p.any() and g.any():
            factor = trust * p.norm() / (g.norm() + decay * p.norm() + 1e-8)
            eta = at(rate, t)
            if clip:
                factor = (factor / eta).clamp(max=1.0) if eta else torch.ones_like(factor)
            g = factor * (g + decay * p)
        return then(step, path, p, g, slot)

    return leaf


def ema(decay: float, then: Leaf, *, debias: bool = True) -> Leaf:
    """The moving average of the gradients, and what becomes of it."""

    def leaf(step: int, path: str, p: Tensor, g: Tensor, slot: dict[str, Any]) -> Tensor:
        m = slot["average"] = decay * slot.get("average", 0.0) + (1.0 - decay) * g
        t = slot["age"] = slot.get("age", 0) + 1
        return then(step, path, p, m / (1.0 - decay**t) if debias else m, slot)

    return leaf


def accumulated(every: int, then: Leaf) -> Leaf:
    """The mean of some gradients at a time."""

    def leaf(step: int, path: str, p: Tensor, g: Tensor, slot: dict[str, Any]) -> Tensor:
        slot["sum"] = slot.get("sum", 0.0) + g
        slot["calls"] = slot.get("calls", 0) + 1
        return then(step, path, p, slot.pop("sum") / every, slot) if slot["calls"] % every == 0 else p

    return leaf


def where(chosen: Callable[[str, Tensor], bool], these: Leaf, others: Leaf) -> Leaf:
    """One or the other, by path and leaf."""
    return lambda step, path, p, g, slot: (these if chosen(path, p) else others)(step, path, p, g, slot)


def unchanged(step: int, path: str, p: Tensor, g: Tensor, slot: dict[str, Any]) -> Tensor:
    """The parameter stays."""
    return p


def falling(count: int) -> float:
    """Linear from 0.2 to 0.1, in 5 updates."""
    return 0.2 - 0.1 * min(count, 5) / 5


def rising(count: int) -> float:
    """Linear from 0 to 0.1, in 5 updates."""
    return 0.1 * min(count, 5) / 5


def warm(count: int) -> float:
    """From 0.1 to 0.2 in 2 updates, then half a cosine down to 0 at update 7."""
    return 0.1 + 0.05 * count if count < 2 else 0.1 * (1.0 + math.cos(math.pi * min(count - 2, 5) / 5))


def halving(count: int) -> float:
    """A tenth, half as much every 10 updates."""
    return 0.1 * 0.5 ** (count / 10)


def f32(value: float) -> float:
    """The float32 nearest to a number: what a row has whose hyper-parameters are tensors."""
    return torch.tensor(value).item()


def is_weight(path: str) -> bool:
    """Whether `*.weight` matches."""
    return path.endswith("/weight") or path == "weight"


def is_bias(path: str) -> bool:
    """Whether `bias` is in it."""
    return "bias" in path


O = torch.optim
MOMENTUM = over(O.SGD, 0.1, momentum=0.9)
SGD, ADAM = over(O.SGD, 0.1), over(O.Adam, 0.1)
MUON = where(lambda path, p: p.ndim == 2, over(O.Muon), SGD)
# 1 - b**t in float32, for tensors of b: relative to 1 - b, which is 0.01, eight roundings.
TENSORS = 8 * 2.0**-24 / 0.01

ORACLES: Mapping[str, Oracle] = {
    "sgd": Oracle(SGD),
    "sgd momentum": Oracle(MOMENTUM),
    "sgd nesterov": Oracle(over(O.SGD, 0.1, momentum=0.9, nesterov=True)),
    "sgd decay": Oracle(over(O.SGD, 0.1, momentum=0.9, weight_decay=0.1, dampening=0.2)),
    "sgd fused": Oracle(MOMENTUM),
    "adam": Oracle(ADAM),
    "adam fused": Oracle(over(O.Adam, 0.1, weight_decay=0.1)),
    "adam tensors": Oracle(over(O.Adam, 0.1, betas=(f32(0.9), f32(0.99))), slack=TENSORS),
    "adam l2": Oracle(over(O.Adam, 0.1, weight_decay=0.1)),
    "adamw": Oracle(over(O.AdamW, 0.1, weight_decay=0.1)),
    "adamw fused": Oracle(over(O.AdamW, 0.1, weight_decay=0.1)),
    "adamw mask": Oracle(adamw(0.1, 0.1, is_weight)),
    "schedule": Oracle(over(O.Adam, falling)),
    "clip": Oracle(added, max_norm=0.5),
    "chain": Oracle(over(O.AdamW, 0.1), max_norm=0.5),
    "partition": Oracle(where(lambda path, p: p.ndim == 2, ADAM, MOMENTUM)),
    "inject": Oracle(ADAM, slack=2.0**-12),
    "inject schedule": Oracle(adamw(halving, 0.1, is_bias)),
    "lamb": Oracle(lamb(0.1)),
    "lamb decay": Oracle(lamb(0.1, decay=0.1)),
    "lamb mask": Oracle(lamb(0.1, decay=0.1, decays=is_weight)),
    "lamb schedule": Oracle(lamb(falling)),
    "lamb tensors": Oracle(lamb(0.1, b1=f32(0.9), b2=f32(0.99), decay=0.1), slack=TENSORS),
    "lion": Oracle(lion(0.1, 0.0)),
    "lion decay": Oracle(lion(0.1, 1e-3)),
    "lion mask": Oracle(lion(0.1, 0.1, decays=lambda path: not is_bias(path))),
    "lion schedule": Oracle(lion(halving, 0.0)),
    "lion tensors": Oracle(lion(0.1, 0.1, b1=f32(0.9), b2=f32(0.99))),
    "larc": Oracle(larc(0.1, MOMENTUM)),
    "larc scaling": Oracle(larc(0.1, added, clip=False, decay=0.1)),
    "larc schedule": Oracle(larc(rising, added, decay=0.1)),
    "larc tensors": Oracle(larc(0.1, added, decay=0.1)),
    "rmsprop": Oracle(over(O.RMSprop, 0.1)),
    "rmsprop momentum": Oracle(over(O.RMSprop, 0.1, momentum=0.9)),
    "rmsprop centered": Oracle(over(O.RMSprop, 0.1, centered=True)),
    "rmsprop decay": Oracle(over(O.RMSprop, 0.1, alpha=0.9, weight_decay=0.1, momentum=0.9, centered=True)),
    "rmsprop schedule": Oracle(over(O.RMSprop, falling)),
    "rmsprop tensors": Oracle(
        over(O.RMSprop, 0.1, alpha=f32(0.9), weight_decay=0.1, momentum=0.9, centered=True), slack=TENSORS
    ),
    "rmsprop inject": Oracle(over(O.RMSprop, 0.1, momentum=0.9)),
    "adafactor": Oracle(over(O.Adafactor, 0.1, eps=(2.0**-23, 1e-3))),
    "adafactor tensors": Oracle(over(O.Adafactor, 0.1, beta2_decay=-0.8, eps=(1e-6, 1e-3), d=1.5), slack=2.0**-16),
    "ema": Oracle(ema(0.9, added)),
    "ema biased": Oracle(ema(f32(0.9), lambda step, path, p, g, slot: p - 0.1 * g, debias=False)),
    "accumulate": Oracle(accumulated(2, ADAM)),
    "accumulate chain": Oracle(accumulated(3, where(lambda path, p: path.endswith("bias"), unchanged, SGD))),
    "masked": Oracle(where(lambda path, p: is_weight(path), ema(0.9, SGD), SGD)),
    "named chain": Oracle(lambda step, path, p, g, slot: ADAM(step, path, p, g.clamp(-0.5, 0.5), slot)),
    "clip by value": Oracle(lambda step, path, p, g, slot: p + g.clamp(-0.5, 0.5)),
    "warm-up": Oracle(over(O.SGD, warm, momentum=0.9)),
    "torch sgd": Oracle(over(O.SGD, 0.1, momentum=0.9, nesterov=True)),
    "torch sgd dampening": Oracle(over(O.SGD, falling, momentum=0.9, dampening=0.2)),
    "torch adam": Oracle(ADAM),
    "torch adamw": Oracle(over(O.AdamW, 0.1, amsgrad=True)),
    "torch adadelta": Oracle(over(O.Adadelta)),
    "torch adagrad": Oracle(over(O.Adagrad, lr_decay=0.1)),
    "torch adamax": Oracle(over(O.Adamax, 0.1)),
    "torch asgd": Oracle(over(O.ASGD, t0=2)),
    "torch nadam": Oracle(over(O.NAdam, 0.1)),
    "torch radam": Oracle(over(O.RAdam, 0.1)),
    "torch rmsprop": Oracle(over(O.RMSprop, momentum=0.9, centered=True)),
    "torch rprop": Oracle(over(O.Rprop)),
    "torch adafactor": Oracle(over(O.Adafactor, 0.1, eps=(2.0**-23, 1e-3))),
    "torch muon": Oracle(MUON),
}

FUSED = [
    Row("sgd fused", lambda: optim.sgd(0.1, momentum=0.9, fused=True)),
    Row("adam fused", lambda: optim.adam(0.1, weight_decay=0.1, fused=True), decays=True),
    Row("adamw fused", lambda: optim.adamw(0.1, weight_decay=0.1, fused=True), decays=True),
]
# A row without an oracle is one that needs parameters of certain names.
BY_NAME = {row.name: row for row in [*ROWS, *FUSED] if row.name in ORACLES}
NOT_MAPPED = [row.name for row in ROWS if "test_vmap_is_a_loop" in row.cannot]
