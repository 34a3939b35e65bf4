"""Reads the fields of a policy from what Python code or a command line gives, and refuses what makes no sense."""

import re
from collections.abc import Sequence
from typing import Any

import torch

from fmp.dtypes import parse_dtype, short_name
from fmp.master import FORMS
from fmp.patterns import matcher
from fmp.policy.op_rules import OpRules

# Formats with more than one number in a byte; not every release of torch has one.
_PACKED = frozenset({getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name)})


def as_dtype(name: str, value: Any) -> torch.dtype | None:
    """Reads a floating-point dtype from a dtype or its name; None and `"none"` mean to leave tensors as they are.

    Args:
        name: The name of the field, for messages.
        value: What was given.

    Raises:
        TypeError: If `value` is neither a dtype, nor a string, nor None.
        ValueError: If it names no dtype, or one that is not floating-point or that torch cannot cast to.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
        return None
    try:
        dtype = parse_dtype(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if not dtype.is_floating_point:
        raise ValueError(f"{name} must be a floating-point dtype, got {short_name(dtype)}")
    if dtype in _PACKED:
        raise ValueError(f"{name}: torch cannot cast to {short_name(dtype)}, which packs several numbers into a byte")
    return dtype


def as_flag(name: str, value: Any) -> bool:
    """Reads a switch from a bool or from `"true"` or `"false"` in any case, as a command line gives it.

    Args:
        name: The name of the field, for messages.
        value: What was given.

    Raises:
        TypeError: If `value` is neither a bool nor a string.
        ValueError: If it is another string.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")
    flags = {"true": True, "false": False}
    if value.strip().lower() not in flags:
        raise ValueError(f"{name} must be 'True' or 'False', got {value!r}")
    return flags[value.strip().lower()]


def as_masters(value: Any) -> bool | str:
    """Reads whether there are masters, or their form; `"f32"` is what True means, and `"none"` what False does.

    Args:
        value: What was given.

    Raises:
        TypeError: If `value` is neither a bool nor a string.
        ValueError: If it names no form.
    """
    forms = ", ".join(map(repr, FORMS))
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise TypeError(f"master_weights must be True, False or one of {forms}, got {value!r}")
    name = value.strip().lower()
    if name in ("true", "false", "f32", "none"):
        return name in ("true", "f32")
    if name not in FORMS:
        raise ValueError(f"master_weights must be 'True', 'False' or one of {forms}, got {value!r}")
    return name


def as_loss_scale(value: Any) -> float | str | None:
    """Reads a loss scale: `"dynamic"`, a positive number or its string, None or `"none"`.

    Args:
        value: What was given.

    Raises:
        TypeError: If `value` is none of these, such as a scaler.
        ValueError: If a string is another one, or the number or its inverse is not positive and finite in float32.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(
            f"loss_scale must be 'dynamic', a number or None, got {value!r} of type {type(value).__name__}; "
            "give a scaler object to train_step"
        )
    if isinstance(value, str) and value.strip().lower() in ("dynamic", "none"):
        return "dynamic" if value.strip().lower() == "dynamic" else None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"loss_scale {value!r}: use 'dynamic', 'none' or a positive number") from None
    smallest = torch.finfo(torch.float32).tiny
    if not smallest <= number <= 1.0 / smallest:
        raise ValueError(f"loss_scale must be positive and finite, with a finite inverse in float32, got {value!r}")
    return number


def as_op_rules(value: Any) -> OpRules | None:
    """Reads op rules: an object, the name of a list, None or `"none"`.

    Args:
        value: What was given.

    Raises:
        TypeError: If `value` is none of these.
        ValueError: If there is no list of that name.
    """
    if value is None or isinstance(value, OpRules):
        return value
    if not isinstance(value, str):
        raise TypeError(f"op_rules must be a fmp.OpRules, 'apex', 'torch' or None, got {value!r}")
    named = {"none": None, "apex": OpRules.apex(), "torch": OpRules.torch()}
    if value.strip().lower() not in named:
        raise ValueError(f"op_rules {value!r}: use 'apex', 'torch' or 'none', or build a fmp.OpRules")
    return named[value.strip().lower()]


def as_patterns(patterns: Any) -> tuple[str, ...]:
    """Reads name patterns: one, or a sequence of them, which the string form of a policy can carry.

    Args:
        patterns: What was given.

    Raises:
        TypeError: If it is no sequence of strings.
        ValueError: If a pattern is empty, holds what the string form cannot, or has a range that is empty.
    """
    if isinstance(patterns, str):
        patterns = (patterns,)
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"keep_full must be a sequence of name patterns, got {patterns!r}")
    for pattern in patterns:
        if not pattern or pattern != pattern.strip() or re.search("[,=|]", pattern):
            raise ValueError(
                f"keep_full: pattern {pattern!r} is empty, or has outer spaces or one of ',', '=', '|', which the "
                "string form of a policy cannot carry; write '?' in their place"
            )
        try:
            matcher([pattern])
        except (ValueError, re.error):
            raise ValueError(f"keep_full: pattern {pattern!r} has an empty or reversed range in brackets") from None
    return tuple(patterns)
