"""How large and how small the entries of a tensor are, against what its format can hold."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fmp import _compat, tree

# How near to the largest number of a format an overflow is near.
NEAR = 0.98


@dataclass(frozen=True)
class Magnitude:
    """What one tensor holds, as numbers on the host.

    Attributes:
        described: Its dtype and shape, such as `f16[4,8]`.
        dtype: Its dtype.
        smallest: The smallest magnitude of the finite entries; NaN if there are none.
        largest: The largest one, likewise.
        count: How many entries it has.
        nans: How many of them are NaN.
        plus_infs: How many are inf.
        minus_infs: How many are -inf.
    """

    described: str
    dtype: torch.dtype
    smallest: float
    largest: float
    count: int
    nans: int = 0
    plus_infs: int = 0
    minus_infs: int = 0

    @property
    def infs(self) -> int:
        """How many entries are inf or -inf."""
        return self.plus_infs + self.minus_infs

    @property
    def is_finite(self) -> bool:
        """Whether there is neither inf nor NaN."""
        return not (self.nans or self.infs)

    @property
    def of_max(self) -> float:
        """The largest magnitude as a fraction of the largest number of the format."""
        return self.largest / torch.finfo(self.dtype).max

    @property
    def is_near_max(self) -> bool:
        """Whether it nearly overflows. The 8-bit formats are scaled to use all they have, and never count as near."""
        return self.dtype.itemsize > 1 and self.is_finite and self.of_max >= NEAR

    @property
    def nonfinite(self) -> str:
        """Says how many entries are not finite, such as `3 of 8 inf`; empty if all are."""
        counts = ((self.nans, "NaN"), (self.plus_infs, "inf"), (self.minus_infs, "-inf"))
        found = ", ".join(f"{count} {name}" for count, name in counts if count)
        return f"{found} of {self.count}" if found else ""


def is_measurable(value: object) -> bool:
    """Says whether a value is a tensor with floating-point or complex numbers that can be read."""
    if not isinstance(value, Tensor) or not (value.dtype.is_floating_point or value.dtype.is_complex):
        return False
    if is_lazy(value):
        return False
    is_dense = value.layout in (torch.strided, torch.sparse_coo) and not value.is_nested
    if not is_dense or value.is_meta or value.dtype == torch.float4_e2m1fn_x2:
        return False
    return not _compat.is_zero_tensor(value) and _dense(value).numel() > 0


def measure(tensor: Tensor) -> Magnitude:
    """Measures a tensor: in two passes, and in a few more if not all of its entries are finite.

    Args:
        tensor: A measurable tensor, on any device.
    """
    values = entries(tensor)
    low, high = torch.aminmax(values)
    low, high, smallest = torch.stack([low, high, torch.linalg.vector_norm(values, -math.inf)]).tolist()
    counts = (0, 0, 0)
    largest = max(abs(low), abs(high))
    if not math.isfinite(low + high):
        found = [values.isnan().sum(), (values == math.inf).sum(), (values == -math.inf).sum()]
        counts = torch.stack(found).tolist()
        rest = values[torch.isfinite(values)].abs()
        smallest, largest = [item.item() for item in torch.aminmax(rest)] if rest.numel() else (math.nan, math.nan)
    return Magnitude(tree.describe(tensor), tensor.dtype, smallest, largest, tensor.numel(), *counts)


def entries(tensor: Tensor) -> Tensor:
    """Returns the entries as real numbers of a format that torch can compare; a complex one has a dimension more."""
    values = _dense(tensor.detach())
    if values.dtype.is_complex:
        values = torch.view_as_real(values.resolve_conj())
    values = values.resolve_neg()
    return values.float() if values.dtype.itemsize == 1 else values


def _dense(tensor: Tensor) -> Tensor:
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor
