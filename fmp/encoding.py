"""Python values in JSON: exact, without pickle, and checked when they are read."""

import json
import math
import re
import types
import typing
from typing import Any

import torch

from fmp.dtypes import parse_dtype

_KINDS = (bool, int, float, str, types.NoneType, tuple, frozenset, torch.Size, torch.dtype, torch.device)


def encode(value: Any) -> Any:
    """Writes a Python value such that JSON can hold it: exactly, or where that cannot be done, as its repr.

    Args:
        value: None, a bool, int, float, str, torch dtype, device or Size, or a tuple or frozenset of these; of anything
            else, the repr is written, without addresses.

    Returns:
        What `json.dumps(..., allow_nan=False)` accepts.

    Example:
        >>> encode((1, math.inf)), encode(range(3))
        ({'tuple': [1, {'float': 'inf'}]}, {'repr': 'range(0, 3)'})
    """
    try:
        return _encode_exactly(value)
    except TypeError:
        return {"repr": re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))}


def decode(encoded: Any) -> Any:
    """Reads a value that `encode` wrote exactly.

    Raises:
        TypeError, ValueError, RuntimeError: If `encode` cannot have written it, or wrote its repr.

    Example:
        >>> decode({"tuple": [1, {"float": "inf"}]})
        (1, inf)
    """
    if not isinstance(encoded, dict | list):
        return encoded
    match encoded:
        case {"float": str(content)}:
            return float(content)
        case {"tuple": list(parts)}:
            return tuple(decode(part) for part in parts)
        case {"frozenset": list(parts)}:
            return frozenset(decode(part) for part in parts)
        case {"Size": list(parts)}:
            return torch.Size([decode(part) for part in parts])
        case {"dtype": str(content)}:
            return parse_dtype(content)
        case {"device": str(content)}:
            return torch.device(content)
    raise ValueError(f"a value of the unknown kind {encoded!r}")


def is_opaque(encoded: Any) -> bool:
    """Says whether `encode` wrote a repr, which can be compared but not read."""
    return isinstance(encoded, dict) and isinstance(encoded.get("repr"), str)


def fits(value: Any, hint: Any) -> bool:
    """Says whether a value that `decode` returned may stand in a field with a type hint.

    Args:
        value: The value.
        hint: The hint. One that names none of the types that `decode` returns, such as `Any`, allows everything; what
            is in a tuple or frozenset is not looked at.

    Example:
        >>> fits(3, float), fits("abc", int), fits(None, int | None)
        (True, False, True)
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind not in _KINDS:
        return True
    return type(value) in {float: (float, int), tuple: (tuple, torch.Size)}.get(kind, (kind,))


def _encode_exactly(value: Any) -> Any:
    # JSON has no infinities and no NaN; it keeps every bit of the other floats.
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is float:
        return {"float": repr(value)}
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return {type(value).__name__: [_encode_exactly(part) for part in value]}
    if type(value) is frozenset:
        # Sets of strings come in another order in every process.
        return {"frozenset": sorted((_encode_exactly(part) for part in value), key=json.dumps)}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise TypeError(type(value).__name__)
