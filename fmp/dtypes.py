"""Facts about number formats: their names, how to parse them, and which format is wide enough to compute in."""

from collections.abc import Mapping

import torch
from torch import nn

_NAMES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
_ALIASES: dict[str, torch.dtype] = {
    **_NAMES,
    "full": torch.float32,
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
}
_SHORT = {dtype: name for name, dtype in _NAMES.items()}


def short_name(dtype: torch.dtype) -> str:
    """Returns the compact name of a dtype, as used in shapes like `f32[3,4]`.

    Args:
        dtype: Any torch dtype.

    Returns:
        `"f32"`, `"bf16"`, `"i64"`, ...; torch's own name where fmp has no shorter one.

    Example:
        >>> short_name(torch.bfloat16), short_name(torch.quint8)
        ('bf16', 'quint8')
    """
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def parse_dtype(value: "str | torch.dtype") -> torch.dtype:
    """Reads a dtype from a torch dtype or from any of its usual names.

    Args:
        value: A dtype, or a name: `"bf16"`, `"bfloat16"`, `"torch.bfloat16"`, `"half"`, `"full"`, ...

    Returns:
        The torch dtype.

    Raises:
        ValueError: If the name is not one of a dtype.
        TypeError: If `value` is neither a dtype nor a string.

    Example:
        >>> parse_dtype("bf16"), parse_dtype("torch.float32"), parse_dtype("half")
        (torch.bfloat16, torch.float32, torch.float16)
    """
    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise TypeError(f"expected a dtype or its name, got {value!r} of type {type(value).__name__}")
    name = value.strip().removeprefix("torch.").lower()
    dtype = _ALIASES.get(name) or getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value!r} is not the name of a dtype; use one of {', '.join(_ALIASES)}")
    return dtype


def is_castable(leaf: object) -> bool:
    """Says whether a precision policy may cast a leaf: floating-point tensors only, never complex or integer ones.

    Example:
        >>> is_castable(torch.ones(2)), is_castable(torch.arange(2)), is_castable(1.5), is_castable(None)
        (True, False, False, False)
    """
    return isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point


def casts_itself(leaf: object) -> bool:
    """Says whether a leaf is an object that holds tensors and casts them by its method `to`, as batch classes do.

    Modules are none, since they are changed in place.

    Example:
        >>> class Batch:
        ...     def to(self, dtype): ...
        >>> casts_itself(Batch()), casts_itself(torch.ones(2)), casts_itself(None)
        (True, False, False)
    """
    if isinstance(leaf, torch.Tensor | nn.Module | Mapping | type):
        return False
    return callable(getattr(leaf, "to", None))


def full_precision(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to accumulate in: float32, or wider where the values already are.

    Args:
        dtype: The dtype of the values.

    Returns:
        `promote_types(dtype, float32)`; float32 also for the 8-bit formats, which torch does not promote.

    Example:
        >>> full_precision(torch.float16), full_precision(torch.float64), full_precision(torch.complex64)
        (torch.float32, torch.float64, torch.complex64)
    """
    if dtype.itemsize == 1:
        return torch.float32
    return torch.promote_types(dtype, torch.float32)
