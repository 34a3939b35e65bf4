"""What a cast to a narrow format would lose of the numbers in a tree."""

import math
from typing import Any

import torch

from fmp import _compat, tree
from fmp.dtypes import short_name
from fmp.numerics.counting import floating, fraction, stacked
from fmp.numerics.formats import Format, number_format
from fmp.numerics.parts import summed
from fmp.numerics.scale_argument import Scale, checked_scale
from fmp.numerics.tables import by_leaf, percent, together

Tree = Any


@tree.dataclass
class FormatLoss:
    """What a cast would do to the nonzero finite numbers of a tree, a row for each leaf; `str` makes a table of it.

    The fields are counts, so they may be summed over steps or over processes. What vmap or microbatches add stands
    before the other dimensions.

    Attributes:
        total: i64[leaves], the nonzero finite numbers.
        zeroed: i64[leaves], those that become zero.
        denormalized: i64[leaves], those that become subnormal numbers, with fewer digits.
        overflowed: i64[leaves], those that are too large, so that the cast gives inf or NaN, or saturates.
        names: The paths of the leaves.
        dtype: The format.
    """

    total: torch.Tensor
    zeroed: torch.Tensor
    denormalized: torch.Tensor
    overflowed: torch.Tensor
    names: tuple[str, ...] = tree.static()
    dtype: torch.dtype = tree.static()

    @property
    def underflow(self) -> torch.Tensor:
        """f32[], the fraction of all numbers that become zero."""
        return fraction(self.zeroed.sum(-1), self.total.sum(-1))

    @property
    def subnormal(self) -> torch.Tensor:
        """f32[], the fraction of all numbers that become subnormal."""
        return fraction(self.denormalized.sum(-1), self.total.sum(-1))

    @property
    def overflow(self) -> torch.Tensor:
        """f32[], the fraction of all numbers that overflow."""
        return fraction(self.overflowed.sum(-1), self.total.sum(-1))

    @property
    def leaf_underflow(self) -> torch.Tensor:
        """f32[leaves], the fraction of each leaf that becomes zero."""
        return fraction(self.zeroed, self.total)

    @property
    def leaf_subnormal(self) -> torch.Tensor:
        """f32[leaves], the fraction of each leaf that becomes subnormal."""
        return fraction(self.denormalized, self.total)

    @property
    def leaf_overflow(self) -> torch.Tensor:
        """f32[leaves], the fraction of each leaf that overflows."""
        return fraction(self.overflowed, self.total)

    def __str__(self) -> str:
        fields = (self.total, self.zeroed, self.denormalized, self.overflowed)
        counts = together(torch.stack(fields, -1), ndim=2)
        if counts is None:
            return repr(self)
        leaves = counts.tolist()
        rows = [
            (name, f"{total:,}", *[percent(part / max(total, 1)) for part in parts])
            for name, (total, *parts) in zip((*self.names, "all"), [*leaves, counts.sum(0).tolist()], strict=True)
        ]
        heading = ("leaf", "nonzero", "zero %", "subnormal %", "overflow %")
        lost = [((zero + large) / max(total, 1), small / max(total, 1)) for total, zero, small, large in leaves]
        return "\n".join([f"lost in {short_name(self.dtype)}:", *by_leaf(heading, rows, lost)])


def loss_in(values: Tree, dtype: torch.dtype | str, scale: Scale = 1.0) -> FormatLoss:
    """Measures what a cast to a format would lose, if the numbers were multiplied by a scale before.

    For each nonzero finite entry of each leaf, with `y = (leaf.to(float32) * scale).to(dtype)`, ties rounded to even:

        underflow   y = 0
        subnormal   0 < |y| < the smallest normal number
        overflow    |leaf * scale| exceeds the largest number by half a step: y is inf or NaN, or it saturated

    A leaf in float64 is multiplied in float64. The counts are what torch's own cast does, number by number, but no
    cast is made. There is no host sync; it works under vmap, with a scale for each member too, and in a compiled step,
    as `aux` of the loss too.

    Args:
        values: Any tree, of gradients for example, best from float32 or bfloat16: what a float16 backward pass has lost
            comes as zero, and zeros do not count. Real floating-point tensors count; all else is ignored.
        dtype: float16, bfloat16, float8_e4m3fn, float8_e5m2 or float32, or a name of one.
        scale: What the numbers are multiplied by: a positive number or a scalar tensor, such as the loss scale.

    Returns:
        The counts, and fractions of them, for each leaf and overall.

    Raises:
        ValueError: If the format is another one, or the scale is not positive and finite.
        TypeError: If the scale is neither a number nor a scalar tensor, or the tree holds a `LocalShard`, of which
            other ranks have other rows.

    Example:
        >>> grads = {"w": torch.tensor([1e-9, 1e-8, 1e-6, 1.0]), "b": torch.tensor([0.0, 1e5])}
        >>> loss = loss_in(grads, torch.float16)
        >>> loss.underflow, loss.subnormal, loss.overflow
        (tensor(0.4000), tensor(0.2000), tensor(0.2000))
        >>> loss.names, loss.leaf_underflow, loss_in(grads, torch.float16, scale=16.0).leaf_underflow
        (('b', 'w'), tensor([0.0000, 0.5000]), tensor([0.0000, 0.2500]))
        >>> print(loss)
        lost in f16:
        leaf  nonzero  zero %  subnormal %  overflow %
        b           1       0            0         100
        w           4      50           25           0
        all         5      40           20          20
    """
    target = number_format(dtype)
    scale = checked_scale(scale)
    names, leaves = floating(values, "the loss")
    counts = [summed(lambda part: _lost(part, target, scale), leaf) for leaf in leaves]
    rows = stacked(counts, (4,), values)
    return FormatLoss(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], names, target.dtype)


def _lost(leaf: torch.Tensor, target: Format, scale: Scale) -> torch.Tensor:
    """Counts one leaf, i64[4]: nonzero finite numbers, and those that become zero, subnormal or too large."""
    magnitude = leaf.abs()
    counted = (magnitude > 0) & (magnitude < math.inf)
    product = scaled(magnitude, target, scale)
    zeroed = counted & (product <= target.zero_up_to)
    below_normal = counted & (product < target.normal_from)
    overflowed = counted & target.overflows(product)
    total, zeros, small, large = map(_compat.count_true, (counted, zeroed, below_normal, overflowed))
    return torch.stack([total, zeros, small - zeros, large])


def scaled(magnitude: torch.Tensor, target: Format, scale: Scale) -> torch.Tensor:
    """Multiplies, and rounds to where the limits of the format are exact."""
    factor = scale.to(magnitude.dtype) if isinstance(scale, torch.Tensor) else scale
    return (magnitude * factor).to(target.compared_in)
