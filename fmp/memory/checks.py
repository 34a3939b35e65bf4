"""Checks of numbers that are given as arguments, of Python, numpy or another library, and never flags."""

import contextlib
import math
from numbers import Integral, Real
from typing import Any

MOST_BYTES = 2**63
_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def is_number(value: Any) -> bool:
    """Says whether a value is a real number.

    Example:
        >>> is_number(3.5e9), is_number(True), is_number("7")
        (True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def parameter_count(name: str, text: str) -> float:
    """Reads a number of parameters as people write it.

    Raises:
        ValueError: If it is none, naming the argument.

    Example:
        >>> parameter_count("model", "7B"), parameter_count("model", "350M"), parameter_count("model", "3.5e9")
        (7000000000, 350000000, 3500000000.0)
    """
    scale = _SUFFIXES.get(text[-1:].lower())
    with contextlib.suppress(ValueError):
        number = float(text) if scale is None else float(text[:-1]) * scale
        if math.isfinite(number):
            return number if scale is None else round(number)
    raise ValueError(f"{name} must be a number of parameters such as 3.5e9, 350M or 7B, got {text!r}")


def whole(name: str, value: Any, least: int = 0, below: int | None = None) -> int:
    """Returns a whole number as Python's.

    Raises:
        ValueError: If it is none, or out of range, naming the argument.

    Example:
        >>> whole("devices", 8, least=1)
        8
    """
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    fits = fits and least <= int(value) and (below is None or int(value) < below)
    if not fits:
        limit = "" if below is None else f", below {below:,}"
        raise ValueError(f"{name} must be a whole number from {least}{limit}, got {value!r}")
    return int(value)


def amount(name: str, value: Any, what: str = "a number", *, below: float = MOST_BYTES) -> float:
    """Returns a number that is not negative as Python's.

    Raises:
        ValueError: If it is none, or out of range, naming the argument.

    Example:
        >>> amount("weight_bits", 11)
        11
    """
    if not is_number(value) or not 0 <= value < below or not math.isfinite(value):
        raise ValueError(f"{name} must be {what}, not negative and below {below:.3g}, got {value!r}")
    return int(value) if isinstance(value, Integral) else float(value)
