"""`fmp.numerics.histogram`: how the magnitudes in a tree spread over the powers of two."""

import math
from typing import Any

import torch

from fmp import _compat, tree
from fmp.numerics.counting import floating, stacked
from fmp.numerics.parts import summed
from fmp.numerics.tables import by_leaf, together

Tree = Any

_F32_EXPONENTS = (-149, 127)  # from the smallest subnormal to the largest number
_F64_EXPONENTS = (-1074, 1023)


@tree.dataclass
class Histogram:
    """Counts of numbers by binary exponent, a row for each leaf; `str` makes a table of it.

    Histograms of one model add up: `a.counts + b.counts`.

    Bin `i` counts the numbers with `2^edges[i] <= |x| < 2^edges[i + 1]`. Every number is counted exactly once: in a
    bin, as a zero, as an infinity or as a NaN. What vmap or microbatches add stands before the other dimensions.

    Attributes:
        counts: i64[leaves, bins].
        zeros: i64[leaves].
        infinities: i64[leaves].
        nans: i64[leaves].
        names: The paths of the leaves.
        lowest: The exponent of the first bin.
    """

    counts: torch.Tensor
    zeros: torch.Tensor
    infinities: torch.Tensor
    nans: torch.Tensor
    names: tuple[str, ...] = tree.static()
    lowest: int = tree.static()

    @property
    def edges(self) -> torch.Tensor:
        """f32[bins + 1], the edges of the bins as powers of two: whole numbers."""
        bins = self.counts.shape[-1]
        return torch.arange(self.lowest, self.lowest + bins + 1, dtype=torch.float32, device=self.counts.device)

    @property
    def overall(self) -> torch.Tensor:
        """i64[bins], the counts of all leaves together."""
        return self.counts.sum(-2)

    def __str__(self) -> str:
        others = torch.stack([self.zeros, self.infinities, self.nans], -1)
        counts = together(torch.cat([self.counts, others], -1), ndim=2)
        if counts is None:
            return repr(self)
        rows = [
            (name, *self._row(row)) for name, row in zip((*self.names, "all"), [*counts, counts.sum(0)], strict=True)
        ]
        return "\n".join(by_leaf(("leaf", "nonzero", "from", "median", "to", "zeros", "inf", "NaN"), rows))

    def _row(self, counts: torch.Tensor) -> list[str]:
        """Writes how many numbers there are, the bins of the smallest, the median and the largest one, and the rest."""
        bins, (zeros, infinities, nans) = counts[:-3], counts[-3:].tolist()
        total, below = int(bins.sum()), bins.cumsum(0)
        powers = ["", "", ""]
        if total:
            ranks = torch.tensor([1, (total + 1) // 2, total])
            powers = [f"2^{self.lowest + index}" for index in torch.searchsorted(below, ranks).tolist()]
        return [f"{total:,}", *powers, f"{zeros:,}", f"{infinities:,}", f"{nans:,}"]


def histogram(values: Tree) -> Histogram:
    """Counts the numbers of a tree by binary exponent.

    It makes no host sync, and works under vmap, where each member has its own counts, and in a compiled step, as `aux`
    of the loss too. float16, bfloat16 and the 8-bit formats are counted exactly, subnormal numbers included.

    Args:
        values: Any tree. Real floating-point tensors count; integers, None and whatever else is there do not.

    Returns:
        The histogram, with bins from 2^-149 to 2^127; from 2^-1074 to 2^1023 if a leaf is float64.

    Raises:
        TypeError: If the tree holds a `LocalShard`, of which other ranks have other rows.

    Example:
        >>> result = histogram({"w": torch.tensor([1.0, 1.5, -0.25, 0.0]), "step": torch.tensor(3)})
        >>> filled = result.overall > 0
        >>> result.names, result.edges[:-1][filled], result.overall[filled], result.zeros
        (('w',), tensor([-2.,  0.]), tensor([1, 2]), tensor([1]))
        >>> print(result)
        leaf  nonzero  from  median   to  zeros  inf  NaN
        w           3  2^-2     2^0  2^0      1    0    0
        all         3  2^-2     2^0  2^0      1    0    0
    """
    names, leaves = floating(values, "the histogram")
    lowest, highest = _F64_EXPONENTS if any(leaf.dtype == torch.float64 for leaf in leaves) else _F32_EXPONENTS
    bins = highest - lowest + 1
    counts = [summed(lambda part: _count(part, lowest, bins), leaf) for leaf in leaves]
    rows = stacked(counts, (bins + 3,), values)
    return Histogram(rows[:, :bins], rows[:, bins], rows[:, bins + 1], rows[:, bins + 2], names, lowest)


def _count(leaf: torch.Tensor, lowest: int, bins: int) -> torch.Tensor:
    """Counts one leaf, i64[bins + 3]: by exponent, then zeros, infinities and NaNs."""
    magnitude = leaf.abs().reshape(-1)
    binned = (magnitude > 0) & (magnitude < math.inf)
    # frexp writes a number as a mantissa from one half to one, and an exponent: one more than that of the bin.
    index = torch.where(binned, torch.frexp(magnitude).exponent - (lowest + 1), bins)
    one = torch.ones((), dtype=torch.int64, device=leaf.device)
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=leaf.device).index_add(0, index, one.expand(index.shape))
    zeros = _compat.count_true(magnitude == 0)
    infinities = _compat.count_true(magnitude == math.inf)
    rest = torch.stack([zeros, infinities, counts[bins] - zeros - infinities])
    return torch.cat([counts[:bins], rest])
