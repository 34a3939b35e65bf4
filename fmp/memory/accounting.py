"""The bytes of what a train step keeps: the functions that make a first state make it here, without data.

They are `policy.cast_to_param` and `cast_to_compute`, `master.init` and `merge`, and the optimizer's own `init`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmp import master, optim, tree
from fmp.dtypes import full_precision, is_castable, short_name
from fmp.memory.first_state import first_state, state_of_number
from fmp.memory.model_sizes import ModelSizes
from fmp.optim import GradientTransformation
from fmp.policy import Policy

Tree = Any
Moments = torch.dtype | tuple[torch.dtype, torch.dtype]

OPTIMIZERS: dict[str, Callable[[], GradientTransformation]] = {
    "adam": lambda: optim.adam(1e-3),
    "adamw": lambda: optim.adamw(1e-3),
    "lamb": lambda: optim.lamb(1e-3),
    "lion": lambda: optim.lion(1e-3),
    "adafactor": lambda: optim.adafactor(1e-3),
    "rmsprop": lambda: optim.rmsprop(1e-3),
    "sgd": lambda: optim.sgd(1e-3),
    "sgd_momentum": lambda: optim.sgd(1e-3, momentum=0.9),
}
# Two moments of 8 bits, with a float32 scale for each block; leaves that are small keep float32.
EIGHT_BIT = ("adam8bit", "adamw8bit")
_BLOCK, _SMALL = 256, 4096


class Amount(NamedTuple):
    """How much there is of one kind.

    Attributes:
        nbytes: The bytes.
        text: What was counted, in words.
    """

    nbytes: int
    text: str = ""


def counted(value: Tree, note: str = "") -> Amount:
    """Counts the tensors of a tree."""
    tensors = [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
    by_dtype: dict[str, int] = {}
    for tensor in tensors:
        name = short_name(tensor.dtype)
        by_dtype[name] = by_dtype.get(name, 0) + tensor.nbytes
    names = sorted(by_dtype, key=lambda name: -by_dtype[name])
    return Amount(sum(by_dtype.values()), " ".join(filter(None, [", ".join(names), note])))


def params_and_masters(sizes: ModelSizes, policy: Policy) -> tuple[Tree, Tree, Tree]:
    """Makes what a step stores of the trained parameters, without data.

    Returns:
        The parameters, their masters, and the numbers that the optimizer works on.

    Raises:
        TypeError: If the form of the masters is not made for the dtype of a parameter.
    """
    params = policy.cast_to_param(sizes.trained)
    masters: Tree = tree.map(lambda leaf: None, params)
    if policy.master_form is not None:
        masters = master.init(params, form=policy.master_form)
    return params, masters, master.merge(params, masters, form=policy.master_form)


def compute_copies(params: Tree, policy: Policy) -> tuple[Tree, Tree]:
    """Makes what the model computes with, without data.

    Returns:
        The parameters as differentiated, and those that are copies of what is stored.
    """
    if policy.op_rules is not None:
        low = policy.compute_dtype

        def copy(leaf: Any) -> Tensor | None:
            return leaf.to(low) if low is not None and is_castable(leaf) and leaf.dtype != low else None

        return params, tree.map(copy, params)
    used = policy.cast_to_compute(params)
    return used, tree.map(lambda new, old: None if new is old else new, used, params)


def in_dtype(value: Tree, dtype: torch.dtype | None) -> Tree:
    """Makes the floating-point leaves anew in a dtype; None is float32 or wider."""
    return tree.map(
        lambda leaf: leaf.to(full_precision(leaf.dtype) if dtype is None else dtype) if is_castable(leaf) else None,
        value,
    )


def optimizer_state(
    optimizer: str | GradientTransformation, full: Tree, moments: Moments | None, is_number: bool
) -> tuple[Amount, Amount]:
    """Counts what an optimizer keeps.

    Args:
        optimizer: Its name, or the optimizer.
        full: What it works on, without data.
        moments: The dtype of what has dimensions; of the first and of the second moment, if these differ. What is no
            floating-point number keeps its own.
        is_number: Whether no shapes are known.

    Returns:
        What has dimensions, and the counts and other scalars.

    Raises:
        ValueError: If the name is unknown, or the state depends on shapes or names that are not known.
        TypeError: If it is no optimizer.
    """
    if isinstance(optimizer, str) and optimizer in EIGHT_BIT:
        if moments is not None:
            raise ValueError(f"moments: those of {optimizer} have 8 bits; leave the dtype out")
        sizes = [leaf.numel() for leaf in tree.leaves(full) if isinstance(leaf, Tensor)]
        return Amount(sum(map(_eight_bit, sizes)), f"8 bits, and f32 for each block of {_BLOCK}"), Amount(0)
    state = (state_of_number if is_number else first_state)(transformation(optimizer), full)
    slots = [leaf for leaf in tree.leaves(state) if isinstance(leaf, Tensor) and leaf.ndim]
    # A number of parameters does not say of how many leaves there is a count.
    scalars = [] if is_number else [leaf for leaf in tree.leaves(state) if isinstance(leaf, Tensor) and not leaf.ndim]
    if isinstance(moments, tuple):
        if not hasattr(state, "first_moment") or not hasattr(state, "second_moment"):
            raise ValueError("moments: two dtypes are for adam, adamw and lamb; give one")
        slots = [_recast(state.first_moment, moments[0]), _recast(state.second_moment, moments[1])]
    elif moments is not None:
        slots = _recast(slots, moments)
    return counted(slots), counted(scalars)


def transformation(optimizer: Any) -> GradientTransformation:
    """Returns the optimizer of a name, or the optimizer that was given.

    Args:
        optimizer: A `GradientTransformation`, or one of `OPTIMIZERS` by its name.

    Raises:
        TypeError: If it is neither.
        ValueError: If no optimizer has that name.
    """
    if isinstance(optimizer, GradientTransformation):
        return optimizer
    if not isinstance(optimizer, str):
        raise TypeError(f"optimizer must be a name or a GradientTransformation, got a {type(optimizer).__name__}")
    if optimizer not in OPTIMIZERS:
        names = ", ".join([*OPTIMIZERS, *EIGHT_BIT])
        raise ValueError(f"optimizer {optimizer!r} is not known; use one of {names}, or give the optimizer itself")
    return OPTIMIZERS[optimizer]()


def _recast(value: Tree, dtype: torch.dtype) -> Tree:
    """Makes the floating-point leaves anew in a dtype, and keeps the others."""
    return tree.map(lambda leaf: leaf.to(dtype) if is_castable(leaf) else leaf, value)


def _eight_bit(numbers: int) -> int:
    if numbers < _SMALL:
        return 2 * 4 * numbers
    return 2 * (numbers + 4 * math.ceil(numbers / _BLOCK))
