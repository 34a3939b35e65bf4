"""How far two tensors are apart that were computed for the same purpose, in formats that may differ."""

import enum
import math
import numbers
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmp import tree

# What says by == whether it is the same.
_COMPARABLE = (bool, int, float, complex, str, bytes, np.generic, enum.Enum, type, torch.dtype, torch.device)
_LEAST = 5e-324  # what is not the same has no relative error of zero
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class LeafDifference:
    """How far two leaves are apart.

    Attributes:
        path: Where they are.
        described: The dtype and shape of both, such as `("f32[3]", "bf16[3]")`.
        relative_error: The norm of a - b, divided by the norm of a. Entries that are not finite must be the same, else
            it is inf.
        cosine: The cosine of the angle between them, over the entries that are finite in both; 1 if one is zero and
            they are equal, 0 if only one is zero.
        ulps: The largest distance of two entries, in units of the last place of the coarser of the two formats, to
            which both are rounded; None for leaves that are not floating-point numbers.
    """

    path: str
    described: tuple[str, str]
    relative_error: float
    cosine: float
    ulps: int | None

    @property
    def is_equal(self) -> bool:
        """Whether all numbers are the same; the formats may differ."""
        return self.relative_error == 0.0


def leaf_difference(path: str, a: Tensor, b: Tensor) -> LeafDifference:
    """Compares two tensors of the same shape.

    Args:
        path: What to call them.
        a: The one that differences are relative to.
        b: The other one.

    Example:
        >>> found = leaf_difference("w", torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.125]).bfloat16())
        >>> round(found.relative_error, 6), found.ulps
        (0.025, 4)
    """
    a, b = [tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense() for tensor in (a, b)]
    wide_a, wide_b = _entries(a), _entries(b)
    is_finite = wide_a.isfinite() & wide_b.isfinite()
    return LeafDifference(
        path,
        (tree.describe(a), tree.describe(b)),
        relative_difference(a, b),
        _cosine(wide_a[is_finite], wide_b[is_finite]),
        _ulps(a, b),
    )


def value_difference(path: str, a: Any, b: Any) -> LeafDifference | None:
    """Compares two values that may be tensors, numbers, or anything that says whether it is equal.

    Args:
        path: What to call them.
        a: The one that differences are relative to.
        b: The other one.

    Returns:
        The difference; of what are neither numbers nor equal, the relative error is inf. None if nobody can say, or if
        the shapes differ.

    Example:
        >>> value_difference("loss", 2.0, 3.0).relative_error, value_difference("name", "a", "a").is_equal
        (0.5, True)
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return leaf_difference(path, a, b) if a.shape == b.shape else None
    described = (_described(a), _described(b))
    if _is_number(a) and _is_number(b):
        apart = _number_difference(a, b)
        return LeafDifference(path, described, apart, 1.0 if apart == 0.0 else _sign_of(a, b), None)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype.kind in "biufc" and b.dtype.kind in "biufc":
        found = value_difference(path, torch.from_numpy(a.copy()), torch.from_numpy(b.copy()))
        return found and replace(found, described=described)
    if a is b or (isinstance(a, _COMPARABLE) and isinstance(b, _COMPARABLE)):
        is_same = a is b or (type(a) is type(b) and a == b)
        return LeafDifference(path, described, 0.0 if is_same else math.inf, float(is_same), None)
    return None


def relative_difference(a: Tensor, b: Tensor, factor: float = 1.0) -> float:
    """Computes the norm of a - factor * b, divided by the norm of a; inf if what is not finite differs.

    Args:
        a: Numbers.
        b: As many.
        factor: What b is short of a.
    """
    if not (_is_inexact(a) or _is_inexact(b)) and factor == 1.0:
        return _whole_difference(a, b)
    a, b = _entries(a), _entries(b)
    is_same = (a == b * factor) | (a.isnan() & b.isnan())
    is_finite = a.isfinite() & b.isfinite()
    if is_same.all() or not is_same[~is_finite].all():
        return 0.0 if is_same.all() else math.inf
    a, b = a[is_finite], b[is_finite]
    # The difference of two numbers near the largest one is too large.
    size = max(_size(a), _size(b))
    a, b = (a / size, b / size) if size else (a, b)
    apart, norm = _norm(a - b * factor), _norm(a)
    return math.inf if norm == 0.0 else max(apart / norm, _LEAST)


def _whole_difference(a: Tensor, b: Tensor) -> float:
    """Computes the relative difference of whole numbers, which float64 cannot hold from 2^53 on."""
    wide_a, wide_b = _entries(a), _entries(b)
    unlike = _whole(a) != _whole(b)
    if a.dtype != b.dtype and torch.uint64 in (a.dtype, b.dtype):
        unlike |= (wide_a < 0) != (wide_b < 0)
    if not unlike.any():
        return 0.0
    exact = (_whole(a) - _whole(b)).to(torch.float64)  # small where both are the same in float64
    apart, size = _norm(torch.where(wide_a == wide_b, exact, wide_a - wide_b)), _norm(wide_a)
    return math.inf if size == 0.0 else apart / size


def _whole(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat.view(torch.int64) if tensor.dtype == torch.uint64 else flat.to(torch.int64)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) or (isinstance(value, Tensor) and value.ndim == 0)


def _number_difference(a: Any, b: Any) -> float:
    a, b = [value.item() if isinstance(value, Tensor | np.generic) else value for value in (a, b)]
    if a == b or (a != a and b != b):
        return 0.0
    # A Python integer has no limits; a quotient of two is as exact as a float can be.
    if isinstance(a, int) and isinstance(b, int):
        try:
            return max(abs(a - b) / abs(a), _LEAST) if a else math.inf
        except OverflowError:
            return math.inf
    dtype = torch.complex128 if isinstance(a, complex) or isinstance(b, complex) else torch.float64
    try:
        return relative_difference(torch.tensor([a], dtype=dtype), torch.tensor([b], dtype=dtype))
    except OverflowError:
        return math.inf


def _sign_of(a: Any, b: Any) -> float:
    try:
        return float(a * b > 0) - float(a * b < 0)
    except TypeError:  # complex numbers
        return 0.0


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return tree.describe(value)
    return f"{type(value).__name__} {value!r}" if isinstance(value, _COMPARABLE) else type(value).__name__


def _cosine(a: Tensor, b: Tensor) -> float:
    size_a, size_b = _size(a), _size(b)
    if not (size_a and size_b):
        return float(size_a == size_b)
    a, b = a / size_a, b / size_b
    cosine = torch.dot(a / torch.linalg.vector_norm(a), b / torch.linalg.vector_norm(b)).item()
    return max(-1.0, min(1.0, cosine))


def _size(values: Tensor) -> float:
    """Returns the largest power of two up to the largest magnitude, by which to divide is exact; 0 without any."""
    largest = values.abs().max().item() if values.numel() else 0.0
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest else 0.0


def _norm(values: Tensor) -> float:
    """Computes the norm; squares neither overflow nor vanish."""
    size = _size(values)
    return size * torch.linalg.vector_norm(values / size).item() if size else 0.0


def _entries(tensor: Tensor) -> Tensor:
    """Returns the entries in a row, in float64."""
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(-1).to(torch.float64)


def _ulps(a: Tensor, b: Tensor) -> int | None:
    if not (a.is_floating_point() and b.is_floating_point()):
        return None
    dtype = max(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    is_finite = (a.to(torch.float64).isfinite() & b.to(torch.float64).isfinite()).reshape(-1)
    ranks = [_ranks(tensor.to(dtype).reshape(-1))[is_finite] for tensor in (a, b)]
    if not ranks[0].numel():
        return 0
    same_sign = (ranks[0] < 0) == (ranks[1] < 0)
    apart = torch.where(same_sign, ranks[0] - ranks[1], 0).abs().max().item()
    across = torch.where(same_sign, 0, ranks[0].double().abs() + ranks[1].double().abs()).max().item()
    return max(int(apart), int(across))


def _ranks(values: Tensor) -> Tensor:
    """Numbers the values of a format in their order, from 0 at zero."""
    bits = values.view(_BITS[values.dtype.itemsize])
    magnitude = (bits & torch.iinfo(bits.dtype).max).to(torch.int64)
    return torch.where(bits < 0, -magnitude, magnitude)
