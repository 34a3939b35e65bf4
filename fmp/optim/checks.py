"""Checks of arguments, most when an optimizer is made: Python numbers are checked, tensors and schedules trusted."""

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch

from fmp import tree

_LARGEST_INT = torch.iinfo(torch.int64).max
_LEAF_TYPES = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_LARGEST_FLOAT = torch.finfo(torch.float32).max


def number(name: str, value: Any, *, low: float = 0.0, below: float = math.inf) -> None:
    """Checks one hyper-parameter.

    Args:
        name: Its name, for the message.
        value: A number, or a 0-dim tensor, whose value is never looked at.
        low: The smallest number allowed.
        below: The bound that the number must stay under.

    Raises:
        TypeError: If `value` is neither a number nor a tensor, or is complex.
        ValueError: If the number lies outside the bounds, is NaN or too large for torch, or the tensor has dimensions.

    Example:
        >>> number("b1", 1.0, below=1.0)
        Traceback (most recent call last):
        ValueError: b1 must be at least 0.0 and below 1.0, got 1.0
    """
    if isinstance(value, torch.Tensor):
        if value.ndim:
            raise ValueError(f"{name} must be a number or a 0-dim tensor, got {tree.describe(value)}")
        if value.is_complex():
            raise TypeError(f"{name} must be real, got {tree.describe(value)}")
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or a 0-dim tensor, got {value!r} of type {type(value).__name__}")
    if not low <= value < below:
        bound = "finite" if below == math.inf else f"below {below}"
        raise ValueError(f"{name} must be at least {low} and {bound}, got {value}")
    # torch computes with floats as float32, and with ints as int64.
    largest = _LARGEST_INT if isinstance(value, int) else _LARGEST_FLOAT
    if value > largest:
        raise ValueError(f"{name} must be at most {largest} if it is a {type(value).__name__}, got {value}")


def number_or_schedule(name: str, value: Any) -> None:
    """Checks a hyper-parameter that may also be a schedule, a function of the count of updates."""
    if not callable(value):
        number(name, value)


def steps(name: str, value: Any, *, low: int) -> None:
    """Checks a number of steps.

    Args:
        name: Its name, for the message.
        value: The number, an int.
        low: The smallest number allowed.

    Raises:
        TypeError: If `value` is not an int.
        ValueError: If it is below `low`, or too large for int64.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if not low <= value <= _LARGEST_INT:
        bound = f"at least {low}" if value < low else f"at most {_LARGEST_INT}"
        raise ValueError(f"{name} must be {bound}, got {value}")


def flag(name: str, value: Any) -> None:
    """Raises a `TypeError` if an argument is anything but True or False; `"no"` would count as true.

    Example:
        >>> flag("nesterov", "no")
        Traceback (most recent call last):
        TypeError: nesterov must be True or False, got 'no' of type str
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")


def items(name: str, value: Any) -> tuple[Any, ...]:
    """Returns the items of an argument that may be anything with an order, a generator included.

    Args:
        name: Its name, for the message.
        value: The argument.

    Raises:
        TypeError: If it has no items, or they have no order.

    Example:
        >>> items("values", (2 * x for x in range(3)))
        (0, 2, 4)
    """
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping | Set):
        raise TypeError(f"{name} must be a list or a tuple, got {value!r} of type {type(value).__name__}")
    return tuple(value)


def shown(value: Any) -> str:
    """Writes what came in place of an optimizer, for a message; those of torch write themselves over many lines."""
    if isinstance(value, torch.optim.Optimizer):
        return f"an instance of torch.optim.{type(value).__name__}"
    return repr(value)


def params_match(grads: Any, params: Any) -> tuple[list[Any], tree.Spec]:
    """Checks that parameters belong to the gradients.

    Args:
        grads: The gradients.
        params: What came as the third argument of `update`.

    Returns:
        The leaves of the gradients, and the structure of both trees.

    Raises:
        TypeError: If `params` is None and there are gradients.
        ValueError: If the trees differ in structure, as when None stands for a whole subtree of gradients.
    """
    leaves, spec = tree.flatten(grads)
    if params is None and any(leaf is not None for leaf in leaves):
        raise TypeError(
            "update needs the parameters, but params is None; call update(grads, state, params) with the tree that "
            "init had"
        )
    if _are_leaves(spec, params) or spec == tree.structure(params):
        return leaves, spec
    of_grads, of_params = set(tree.paths(grads)), set(tree.paths(params))
    if of_grads != of_params:  # nodes may be of different types, such as dict and OrderedDict
        path = min(of_grads ^ of_params)
        has, lacks = ("grads", "params") if path in of_grads else ("params", "grads")
        raise ValueError(
            f"{path or 'a single leaf'}: {has} has this leaf and {lacks} has not; the trees must have one structure, "
            "with None for each leaf that has no gradient"
        )
    return leaves, spec


def _are_leaves(spec: tree.Spec, params: Any) -> bool:
    # A comparison of structures would take the second tree apart, which takes twenty times as long.
    try:
        return _LEAF_TYPES.issuperset(map(type, spec.flatten_up_to(params)))
    except ValueError:
        return False
