"""How far two tensors are apart that were computed for the same purpose, in formats that may differ."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fmp import tree

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
    a, b = a.detach(), b.detach()
    wide_a, wide_b = _entries(a), _entries(b)
    is_finite = wide_a.isfinite() & wide_b.isfinite()
    finite_a, finite_b = wide_a[is_finite], wide_b[is_finite]
    norm_a, norm_b = _norm(finite_a), _norm(finite_b)
    either_is_zero = not (norm_a and norm_b)
    cosine = float(norm_a == norm_b) if either_is_zero else torch.dot(finite_a / norm_a, finite_b / norm_b).item()
    return LeafDifference(
        path,
        (tree.describe(a), tree.describe(b)),
        relative_difference(wide_a, wide_b),
        max(-1.0, min(1.0, cosine)),
        _ulps(a, b),
    )


def relative_difference(a: Tensor, b: Tensor, factor: float = 1.0) -> float:
    """Computes the norm of a - factor * b, divided by the norm of a; inf if what is not finite differs.

    Args:
        a: Numbers.
        b: As many.
        factor: What b is short of a.
    """
    a, b = _entries(a), _entries(b) * factor
    is_finite = a.isfinite() & b.isfinite()
    rest_a, rest_b = a[~is_finite], b[~is_finite]
    if not torch.equal(rest_a.nan_to_num(0.0), rest_b.nan_to_num(0.0)) or not torch.equal(
        rest_a.isnan(), rest_b.isnan()
    ):
        return math.inf
    a, b = a[is_finite], b[is_finite]
    apart, size = _norm(a - b), _norm(a)
    return 0.0 if apart == 0.0 else math.inf if size == 0.0 else apart / size


def _norm(numbers: Tensor) -> float:
    """Computes the norm; squares neither overflow nor vanish."""
    largest = numbers.abs().max().item() if numbers.numel() else 0.0
    return largest * torch.linalg.vector_norm(numbers / largest).item() if largest else 0.0


def _entries(tensor: Tensor) -> Tensor:
    """Returns the entries in a row, in float64."""
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
