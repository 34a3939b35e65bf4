"""Checks of hyper-parameters when an optimizer is made: Python numbers are checked, tensors and schedules trusted."""

import math
from typing import Any

import torch

from fmp import tree


def number(name: str, value: Any, *, low: float = 0.0, below: float = math.inf) -> None:
    """Checks one hyper-parameter.

    Args:
        name: Its name, for the message.
        value: A number, or a 0-dim tensor, whose value is never looked at.
        low: The smallest number allowed.
        below: The bound that the number must stay under.

    Raises:
        TypeError: If `value` is neither a number nor a tensor.
        ValueError: If the number lies outside the bounds or is NaN, or the tensor has dimensions.

    Example:
        >>> number("b1", 1.0, below=1.0)
        Traceback (most recent call last):
        ValueError: b1 must be at least 0.0 and below 1.0, got 1.0
    """
    if isinstance(value, torch.Tensor):
        if value.ndim:
            raise ValueError(f"{name} must be a number or a 0-dim tensor, got {tree.describe(value)}")
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or a 0-dim tensor, got {value!r} of type {type(value).__name__}")
    if not low <= value < below:
        bound = "finite" if below == math.inf else f"below {below}"
        raise ValueError(f"{name} must be at least {low} and {bound}, got {value}")


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
        ValueError: If it is below `low`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
