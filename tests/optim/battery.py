"""Every optimizer and wrapper, one row each; tests/optim/test_laws.py holds all rows to the same laws."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fmp import optim, tree
from fmp.dtypes import is_castable
from fmp.optim import schedules

Tree = Any


class Row(NamedTuple):
    """An optimizer under test.

    Attributes:
        name: What pytest prints.
        make: Makes the optimizer.
        decays: Whether a parameter changes although its gradient is zero.
    """

    name: str
    make: Callable[[], optim.GradientTransformation]
    decays: bool = False


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
