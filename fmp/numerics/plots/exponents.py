"""`fmp.numerics.plot_exponents`: where the numbers of a tree lie within the ranges of the formats.

The picture of Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, figure 3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np
import torch

from fmp.numerics.formats import Format, number_format
from fmp.numerics.histogram import Histogram
from fmp.numerics.plots.figure import BLUE, INK, MUTED, ORANGE, new_figure, tidy
from fmp.numerics.scale_argument import Scale, scale_as_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_SHADES = {"zero": "#f4cfcb", "subnormal": "#fbe6bd", "normal": "#d3ebdc", "overflow": "#e5d3ee"}
_SEEN = 1e-5  # a bin with a smaller share of the numbers cannot be seen
_WHOLE = 1e-3  # of a bin: less than this cannot be seen, such as what rounding to f16 takes across a limit


@overload
def plot_exponents(
    histogram: Histogram,
    *,
    scale: Scale | None = ...,
    formats: Sequence[torch.dtype | str] = ...,
    title: str = ...,
    into: None = None,
) -> "Figure": ...
@overload
def plot_exponents(
    histogram: Histogram,
    *,
    scale: Scale | None = ...,
    formats: Sequence[torch.dtype | str] = ...,
    title: str = ...,
    into: "SubFigure",
) -> "SubFigure": ...
def plot_exponents(
    histogram: Histogram,
    *,
    scale: Scale | None = None,
    formats: Sequence[torch.dtype | str] = ("f16", "bf16", "f8e5m2", "f8e4m3"),
    title: str = "Magnitudes",
    into: "SubFigure | None" = None,
) -> "Figure | SubFigure":
    """Draws an exponent histogram above the ranges of the formats, and where a scale would move it.

    The ranges of the first format shade the histogram too. Beside each range stands which percentage of the nonzero
    finite numbers the format loses, as they are and after scaling: zero, subnormal and overflow. These are read from
    the bins, and are what `fmp.numerics.loss_in` counts, but where a limit cuts a bin with numbers in it: it is divided
    evenly then, and a `≈` stands before the percentage. That is so for subnormal numbers and overflows of 8-bit
    formats, and at any limit if the scale is no power of two. Leaves, microbatches and members of an ensemble are drawn
    together.

    Args:
        histogram: From `fmp.numerics.histogram`.
        scale: Draws a ghost of the histogram, multiplied by this loss scale; None draws none.
        formats: The formats to compare with, as dtypes or names; at least one.
        title: Stands above the picture.
        into: A part of a larger figure to draw into; None makes a new figure.

    Returns:
        The figure, or `into`.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        TypeError: If `histogram` is no histogram, `formats` no list, or the scale no number.
        ValueError: If a format is unknown, there is none, or the scale is not positive and finite.

    Example:
        >>> grads = {"w": torch.randn(1000) * 1e-7}
        >>> figure = plot_exponents(fmp.numerics.histogram(grads), scale=2.0**12)
        >>> len(figure.axes)  # figure.savefig("gradients.png") writes it
        4
    """
    if not isinstance(histogram, Histogram):
        raise TypeError(
            f"histogram must be what fmp.numerics.histogram returns, got a {type(histogram).__name__}; of a tree of "
            "numbers, draw plot_exponents(fmp.numerics.histogram(tree))"
        )
    if isinstance(formats, str | torch.dtype):
        raise TypeError(f"formats must be a list of formats, got {formats!r}; write [{formats!r}]")
    shown = [number_format(dtype) for dtype in formats]
    if not shown:
        raise ValueError("formats must name at least one format")
    shift = None if scale is None else math.log2(scale_as_number(scale))
    counts = histogram.counts.reshape(-1, histogram.counts.shape[-1]).sum(0).cpu().numpy()
    spread = Spread(histogram.lowest, counts / max(1, counts.sum()))

    figure = into if into is not None else new_figure(10.0, 3.4 + 0.34 * len(shown))
    grid = figure.subplots(2, 2, width_ratios=(3, 1), height_ratios=(2.8, 0.34 * len(shown) + 0.1))
    (above, legend), (below, table) = grid
    for axes in (legend, table):
        axes.set_axis_off()
    below.sharex(above)
    _draw_spread(above, spread, shift, shown[0])
    tidy(above, title, ylabel="% of the nonzero numbers")
    above.tick_params(axis="x", labelbottom=False)
    _draw_ranges(below, shown)
    _write_legend(legend, above, histogram, int(counts.sum()))
    _write_losses(table, spread, shift, shown)
    return figure


@dataclass(frozen=True)
class Spread:
    """How numbers spread over the powers of two.

    Attributes:
        lowest: The exponent of the first bin.
        shares: The share of the numbers in each bin; one in all.
    """

    lowest: int
    shares: np.ndarray

    def within(self, low: float, high: float, shift: float = 0.0) -> float:
        """Returns the share of the numbers between two powers after a shift; a bin that one cuts is divided evenly."""
        start = self.lowest + shift + np.arange(len(self.shares))
        overlap = np.clip(np.minimum(start + 1, high) - np.maximum(start, low), 0.0, 1.0)
        return float((self.shares * overlap).sum())

    def cuts(self, low: float, high: float, shift: float = 0.0) -> bool:
        """Says whether one of two powers cuts a bin, after a shift, with numbers in it that can be seen."""
        places = [power - shift - self.lowest for power in (low, high) if math.isfinite(power)]
        cut = [math.floor(place) for place in places if abs(place - round(place)) > _WHOLE]
        return any(0 <= index < len(self.shares) and self.shares[index] > _SEEN for index in cut)

    def ends(self) -> tuple[int, int]:
        """Returns the powers between which there is something to see; (0, 0) if there is nothing."""
        seen = np.flatnonzero(self.shares > _SEEN)
        return (self.lowest + int(seen[0]), self.lowest + int(seen[-1]) + 1) if len(seen) else (0, 0)


def bands(item: Format) -> dict[str, tuple[float, float]]:
    """Returns the powers of two between which a format makes numbers zero, subnormal, normal, or too large."""
    zero, normal, over = (math.log2(limit) for limit in (item.zero_up_to, item.smallest_normal, item.max_rounded))
    return {
        "zero": (-math.inf, zero),
        "subnormal": (zero, normal),
        "normal": (normal, over),
        "overflow": (over, math.inf),
    }


def lost_bands(item: Format) -> dict[str, tuple[float, float]]:
    """Returns the same for what is lost: just below the smallest normal number, numbers are rounded up to it."""
    found, normal = bands(item), math.log2(item.normal_from)
    return {"zero": found["zero"], "subnormal": (found["zero"][1], normal), "overflow": found["overflow"]}


def _draw_spread(axes: "Axes", spread: Spread, shift: float | None, first: Format) -> None:
    """Draws the histogram and its ghost, shaded by the bands of a format."""
    low, high = spread.ends()
    percent = 100 * spread.shares[low - spread.lowest : high - spread.lowest]
    edges = np.arange(low, high + 1)
    limits = bands(first)
    moved = shift or 0.0
    start = min(low, low + moved, limits["zero"][1]) - 4
    stop = max(high, high + moved, limits["overflow"][0]) + 7
    axes.stairs(percent, edges, fill=True, color=BLUE, alpha=0.85, label="as they are", zorder=2)
    if shift is not None:
        label = f"times $2^{{{shift:g}}}$" if shift == round(shift) else f"times {2**shift:,.4g}"
        axes.stairs(percent, edges + shift, fill=True, color=ORANGE, alpha=0.25, zorder=3)
        axes.stairs(percent, edges + shift, color=ORANGE, linewidth=1.6, label=label, zorder=4)
    for name, (left, right) in limits.items():
        left, right = max(left, start), min(right, stop)
        axes.axvspan(left, right, color=_SHADES[name], alpha=0.5, linewidth=0, zorder=0)
        if right - left > 0.06 * (stop - start):
            look = {"ha": "center", "va": "top", "color": MUTED, "fontsize": 8.5}
            axes.text((left + right) / 2, 0.985, name, transform=axes.get_xaxis_transform(), **look)
    axes.set_xlim(start, stop)
    axes.set_ylim(0, 1.18 * max(percent.max(initial=0.0), 1.0))


def _draw_ranges(axes: "Axes", shown: Sequence[Format]) -> None:
    """Draws a row for each format: the powers at which numbers become zero, subnormal, normal or too large."""
    start, stop = axes.get_xlim()
    for row, item in enumerate(shown):
        for name, (left, right) in bands(item).items():
            left, right = max(left, start), min(right, stop)
            if left < right:
                axes.barh(row, right - left, 0.74, left, color=_SHADES[name], linewidth=0)
    tidy(axes, xlabel=r"$\log_2\,|x|$", grid="")
    axes.set_yticks(range(len(shown)), [item.name for item in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)


def _write_legend(legend: "Axes", drawn: "Axes", histogram: Histogram, nonzero: int) -> None:
    """Writes what the colors mean, and what is in no bin."""
    legend.legend(*drawn.get_legend_handles_labels(), loc="upper left", frameon=False, fontsize=9, labelcolor=INK)
    zeros, infinities, nans = (int(part.sum()) for part in (histogram.zeros, histogram.infinities, histogram.nans))
    lines = [f"nonzero: {nonzero:,}", f"zeros: {zeros:,}"]
    lines += [f"{name}: {count:,}" for name, count in (("infinities", infinities), ("NaN", nans)) if count]
    legend.text(0.04, 0.0, "\n".join(lines), transform=legend.transAxes, va="bottom", color=MUTED, fontsize=8.5)


def _write_losses(table: "Axes", spread: Spread, shift: float | None, shown: Sequence[Format]) -> None:
    """Writes what each format loses, in percent, before and after scaling."""
    table.set_ylim(len(shown) - 0.4, -0.6)
    table.set_xlim(0, 1)
    for column, name in enumerate(("zero", "subnormal", "overflow")):
        place = 0.17 + 0.36 * column
        table.text(place, -0.75, f"{name} %", ha="center", va="bottom", color=MUTED, fontsize=8.5)
        for row, item in enumerate(shown):
            band = lost_bands(item)[name]
            moves = (0.0,) if shift is None else (0.0, shift)
            shares = [spread.within(*band, moved) for moved in moves]
            texts = ["≈" * spread.cuts(*band, moved) + _percent(spread.within(*band, moved)) for moved in moves]
            color = INK if any(shares) else MUTED
            table.text(place, row, " → ".join(texts), ha="center", va="center", color=color, fontsize=9)


def _percent(share: float) -> str:
    percent = 100 * share
    if percent == 0.0:
        return "0"
    if percent < 0.1:
        return "<0.1"
    return f"{percent:.0f}" if percent >= 10 else f"{percent:.1f}"
