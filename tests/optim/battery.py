"""Every optimizer and wrapper, one row each; tests/optim/test_laws.py holds all rows to the same laws."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fmp import optim, tree
from fmp.dtypes import is_castable
from fmp.numerics import watch_gradients
from fmp.optim import schedules

Tree = Any


class Row(NamedTuple):
    """An optimizer under test.

    Attributes:
        name: What pytest prints.
        make: Makes the optimizer.
        decays: Whether a parameter changes although its gradient is zero.
        mixes: Whether code that is not ours mixes floating-point dtypes in it.
        cannot: The laws that it breaks, by the name of their test in test_laws.py, each with the reason.
    """

    name: str
    make: Callable[[], optim.GradientTransformation]
    decays: bool = False
    mixes: bool = False
    cannot: Mapping[str, str] = MappingProxyType({})


AT_ZERO = "test_the_gradient_through_a_zero_gradient_is_finite"
ROOT = {AT_ZERO: "torch takes the root of zero, whose derivative is infinite"}
RADAM = ROOT | {"test_update_is_differentiable": "the rectification of its first five steps has a NaN derivative"}
OVERWRITES = dict.fromkeys(["test_update_is_differentiable", AT_ZERO], "its step overwrites what its derivative needs")
ADAFACTOR = {
    AT_ZERO: "it has no option `differentiable`",
    "test_vmap_is_a_loop": "it looks at numbers on the host",
    "test_compiled_is_eager_and_compiles_once": "it looks at numbers on the host",
    "test_update_is_differentiable": "it has no option `differentiable`",
}
MUON = {
    AT_ZERO: "it has no option `differentiable`",
    "test_vmap_is_a_loop": "it rounds to bfloat16, and batched products round otherwise",
    "test_update_is_differentiable": "it has no option `differentiable`",
}

ROWS = [
    Row("sgd", lambda: optim.sgd(0.1)),
    Row("sgd momentum", lambda: optim.sgd(0.1, momentum=0.9)),
    Row("sgd nesterov", lambda: optim.sgd(0.1, momentum=0.9, nesterov=True)),
    Row("sgd decay", lambda: optim.sgd(0.1, momentum=0.9, weight_decay=0.1, dampening=0.2), decays=True),
    Row("adam", lambda: optim.adam(0.1)),
    Row(
        "adam tensors", lambda: optim.adam(torch.tensor(0.1), torch.tensor(0.9), torch.tensor(0.99), torch.tensor(1e-8))
    ),
    Row("adam l2", lambda: optim.adam(0.1, weight_decay=0.1), decays=True),
    Row("adamw", lambda: optim.adamw(0.1, weight_decay=0.1), decays=True),
    Row("adamw mask", lambda: optim.adamw(0.1, weight_decay=0.1, mask=["*.weight"]), decays=True),
    Row("schedule", lambda: optim.adam(schedules.linear(0.2, 0.1, transition_steps=5))),
    Row("clip", lambda: optim.clip_by_global_norm(0.5)),
    Row("chain", lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1)), decays=True),
    Row("watch", lambda: optim.chain(watch_gradients(), optim.adamw(0.1, fused=True)), decays=True),
    Row("freeze", lambda: optim.chain(optim.freeze(["layer"]), optim.adam(0.1))),
    Row(
        "partition",
        lambda: optim.partition(
            {"matrix": optim.adam(0.1), "other": optim.sgd(0.1, momentum=0.9)},
            lambda path, leaf: "matrix" if leaf.ndim == 2 else "other",
        ),
    ),
    Row("inject", lambda: optim.inject_hyperparams(optim.adam)(learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-8)),
    Row(
        "inject schedule",
        lambda: optim.inject_hyperparams(optim.adamw)(
            learning_rate=schedules.exponential_decay(0.1, 10, 0.5), weight_decay=0.1, mask=lambda path: "bias" in path
        ),
        decays=True,
    ),
    Row("lamb", lambda: optim.lamb(0.1)),
    Row("lamb decay", lambda: optim.lamb(0.1, weight_decay=0.1), decays=True),
    Row("lamb mask", lambda: optim.lamb(0.1, weight_decay=0.1, mask=["*.weight"]), decays=True),
    Row("lamb schedule", lambda: optim.lamb(schedules.linear(0.2, 0.1, transition_steps=5))),
    Row(
        "lamb tensors",
        lambda: optim.lamb(*(torch.tensor(value) for value in (0.1, 0.9, 0.99, 1e-6, 0.1))),
        decays=True,
    ),
    Row("lion", lambda: optim.lion(0.1, weight_decay=0.0)),
    Row("lion decay", lambda: optim.lion(0.1), decays=True),
    Row("lion mask", lambda: optim.lion(0.1, weight_decay=0.1, mask=lambda path: "bias" not in path), decays=True),
    Row("lion schedule", lambda: optim.lion(schedules.exponential_decay(0.1, 10, 0.5), weight_decay=0.0)),
    Row("lion tensors", lambda: optim.lion(*(torch.tensor(value) for value in (0.1, 0.9, 0.99, 0.1))), decays=True),
    # LARC leaves a zero gradient alone, decay and all.
    Row("larc", lambda: optim.chain(optim.larc(0.1), optim.sgd(0.1, momentum=0.9))),
    Row("larc scaling", lambda: optim.larc(0.1, clip=False, weight_decay=0.1)),
    Row("larc schedule", lambda: optim.larc(schedules.linear(0.0, 0.1, transition_steps=5), weight_decay=0.1)),
    Row(
        "larc tensors",
        lambda: optim.larc(
            torch.tensor(0.1), torch.tensor(0.02), eps=torch.tensor(1e-8), weight_decay=torch.tensor(0.1)
        ),
    ),
    Row("rmsprop", lambda: optim.rmsprop(0.1)),
    Row("rmsprop momentum", lambda: optim.rmsprop(0.1, momentum=0.9)),
    Row("rmsprop centered", lambda: optim.rmsprop(0.1, centered=True)),
    Row(
        "rmsprop decay",
        lambda: optim.rmsprop(0.1, decay=0.9, weight_decay=0.1, momentum=0.9, centered=True),
        decays=True,
    ),
    Row("rmsprop schedule", lambda: optim.rmsprop(schedules.linear(0.2, 0.1, transition_steps=5))),
    Row(
        "rmsprop tensors",
        lambda: optim.rmsprop(*(torch.tensor(value) for value in (0.1, 0.9, 1e-8, 0.1, 0.9)), centered=True),
        decays=True,
    ),
    Row("rmsprop inject", lambda: optim.inject_hyperparams(optim.rmsprop)(learning_rate=0.1, momentum=0.9)),
    Row("adafactor", lambda: optim.adafactor(0.1)),
    Row(
        "adafactor decay",
        lambda: optim.adafactor(schedules.cosine_decay(0.2, 9), -0.6, 1e-30, 1e-2, 2.0, weight_decay=0.1),
        decays=True,
    ),
    Row("adafactor tensors", lambda: optim.adafactor(*map(torch.tensor, (0.1, -0.8, 1e-6, 1e-3, 1.5)))),
    Row("ema", lambda: optim.ema(0.9)),
    Row("ema biased", lambda: optim.chain(optim.sgd(0.1), optim.ema(torch.tensor(0.9), debias=False))),
    Row("accumulate", lambda: optim.accumulate(optim.adam(0.1), every=2)),
    Row("accumulate chain", lambda: optim.accumulate(optim.chain(optim.freeze(["*.bias"]), optim.sgd(0.1)), every=3)),
    Row("masked", lambda: optim.chain(optim.masked(optim.ema(0.9), ["*.weight"]), optim.sgd(0.1))),
    Row("named chain", lambda: optim.named_chain(("value", optim.clip_by_value(0.5)), ("adam", optim.adam(0.1)))),
    Row("clip by value", lambda: optim.clip_by_value(torch.tensor(0.5))),
    Row("warm-up", lambda: optim.sgd(schedules.warmup_cosine_decay(0.1, 0.2, 2, 7), momentum=0.9)),
    Row("torch sgd", lambda: optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    Row(
        "torch sgd dampening",
        lambda: optim.from_torch(torch.optim.SGD, lr=schedules.linear(0.2, 0.1, 5), momentum=0.9, dampening=0.2),
    ),
    Row("torch adam", lambda: optim.from_torch(torch.optim.Adam, lr=torch.tensor(0.1)), cannot=ROOT),
    Row("torch adamw", lambda: optim.from_torch(torch.optim.AdamW, lr=0.1, amsgrad=True), decays=True, cannot=ROOT),
    Row("torch adadelta", lambda: optim.from_torch(torch.optim.Adadelta)),
    Row("torch adagrad", lambda: optim.from_torch(torch.optim.Adagrad, lr_decay=0.1), cannot=ROOT),
    Row("torch adamax", lambda: optim.from_torch(torch.optim.Adamax, lr=0.1)),
    Row("torch asgd", lambda: optim.from_torch(torch.optim.ASGD, t0=2), decays=True, cannot=OVERWRITES),
    Row("torch nadam", lambda: optim.from_torch(torch.optim.NAdam, lr=0.1), cannot=ROOT),
    Row("torch radam", lambda: optim.from_torch(torch.optim.RAdam, lr=0.1), cannot=RADAM),
    Row("torch rmsprop", lambda: optim.from_torch(torch.optim.RMSprop, momentum=0.9, centered=True), cannot=ROOT),
    Row("torch rprop", lambda: optim.from_torch(torch.optim.Rprop), cannot=OVERWRITES),
    Row("torch adafactor", lambda: optim.from_torch(torch.optim.Adafactor, lr=0.1), cannot=ADAFACTOR),
    Row(
        "torch muon",
        lambda: optim.partition(
            {"matrix": optim.from_torch(torch.optim.Muon), "other": optim.sgd(0.1)},
            lambda path, leaf: "matrix" if leaf.ndim == 2 else "other",
        ),
        decays=True,
        mixes=True,
        cannot=MUON,
    ),
]


def params(dtype: torch.dtype = torch.float32) -> Tree:
    """Makes parameters of all kinds: nested, a scalar, an integer, and none."""
    return {
        "layer": {"weight": torch.randn(3, 2).to(dtype), "bias": torch.randn(2).to(dtype)},
        "scale": torch.randn(()).to(dtype),
        "ids": torch.arange(3),
        "hole": None,
    }


def grads(like: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Makes random gradients for the floating-point leaves of a tree, None for the others."""
    return tree.map(
        lambda leaf: torch.randn(leaf.shape).to(dtype or leaf.dtype) if is_castable(leaf) else None,
        like,
    )
