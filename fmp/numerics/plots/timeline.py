"""Pictures of a history: loss and loss scale over time, and what each leaf's gradient loses, step by step."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fmp.numerics.columns import column
from fmp.numerics.history import History
from fmp.numerics.logs import of_one_run
from fmp.numerics.plots.figure import BLUE, FAINT, GREEN, INK, MUTED, ORANGE, RED, VIOLET, literal, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = (BLUE, ORANGE, GREEN, VIOLET, INK)
_MOST_LEAVES = 40  # more names than this cannot be read
_MOST_STEPS = 400


def plot_scale(history: History) -> "Figure":
    """Draws the loss, and below it the base-2 logarithm of the loss scale, with a red tick at each skipped step.

    Args:
        history: The history of one run, from a step that `fmp.train_step` made, or another whose metrics have a `loss`.
            Several losses, `loss/a` and `loss/b`, make several curves. A metric that is missing leaves its panel out.

    Returns:
        The figure, which `figure.savefig(path)` writes.

    Raises:
        ValueError: If the metrics have neither a loss nor a loss scale, or the history is one that `vmap` made.
        ModuleNotFoundError: If matplotlib is not installed.

    Example:
        >>> step = fmp.train_step(lambda w, x: (w * x).sum(), fmp.optim.sgd(0.1), loss_scale="dynamic")
        >>> recorded = fmp.numerics.record(step)
        >>> carry = recorded.init(step.init(torch.ones(2)))
        >>> carry, metrics = recorded(carry, torch.ones(2))
        >>> figure = plot_scale(carry[1])
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['loss', 'log2 of the loss scale']
    """
    columns = of_one_run(history)
    panels = [name for name in ("loss", "loss_scale") if _curves(columns, name)]
    if not panels:
        raise ValueError(f"the history has neither a loss nor a loss scale; it has {sorted(columns)[:10]}")
    figure = new_figure(9.0, 1.6 + 2.1 * len(panels))
    rows: Any = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=[2, 1][: len(panels)])
    axes = dict(zip(panels, rows[:, 0], strict=True))
    steps, skipped = columns["step"], _skipped(columns)
    count = f"{skipped.sum():,} of {len(steps):,} steps skipped" + (" (red)" if skipped.any() else "")
    if "loss" in axes:
        _draw_curves(axes["loss"], steps, _curves(columns, "loss"))
        tidy(axes["loss"], f"Loss and loss scale: {count}" if len(panels) > 1 else f"Loss: {count}", ylabel="loss")
    if "loss_scale" in axes:
        scales = {name: np.log2(values) for name, values in _curves(columns, "loss_scale").items()}
        _draw_curves(axes["loss_scale"], steps, scales, drawstyle="steps-mid")
        tidy(axes["loss_scale"], "" if "loss" in axes else f"Loss scale: {count}", ylabel="log2 of the loss scale")
        axes["loss_scale"].yaxis.get_major_locator().set_params(integer=True)
    for each in axes.values():
        _mark(each, steps[skipped], steps)
    rows[-1, 0].set_xlabel("step")
    return figure


def plot_underflow(history: History, *, zeros: bool = True, kind: str = "grad") -> "Figure":
    """Draws how much of each leaf underflows, step by step: a row for each leaf, from 0 to 100 %.

    Steps that were skipped, in which nothing is known, are gray. With more than 400 steps, each cell is the mean of
    some neighbors, and with more than 40 leaves, only some of them are named.

    Args:
        history: The history of one run, with `watch_gradients` in the optimizer, or parameters measured by `record`.
        zeros: Whether entries that are zero from the start count as well: in gradients from float16, those are where
            the losses are. Without, only what the format would lose of the others counts.
        kind: `"grad"` for gradients, `"param"` for parameters.

    Returns:
        The figure, which `figure.savefig(path)` writes.

    Raises:
        ValueError: If no leaves of that kind are in the history, or the history is one that `vmap` made.
        ModuleNotFoundError: If matplotlib is not installed.

    Example:
        >>> optimizer = fmp.optim.chain(fmp.numerics.watch_gradients("fp16"), fmp.optim.sgd(0.1))
        >>> step = fmp.train_step(lambda w, x: (w * x).sum(), optimizer)
        >>> recorded = fmp.numerics.record(step)
        >>> carry = recorded.init(step.init(torch.ones(4)))
        >>> carry, metrics = recorded(carry, torch.tensor([1.0, 1e-9, 0.0, 1.0]))
        >>> figure = plot_underflow(carry[1])
        >>> figure.axes[0].images[0].get_array().tolist()
        [[50.0]]
    """
    columns = of_one_run(history)
    paths = [path for found, path, _ in history.leaves if found == kind]
    if not paths:
        hint = "put fmp.numerics.watch_gradients() into the optimizer" if kind == "grad" else "record(step, params=...)"
        raise ValueError(f"the history has no leaves of the kind {kind!r}; {hint}")
    lost = np.stack([_lost(columns, kind, path, zeros) for path in paths])
    steps = columns["step"]
    width = -(-len(steps) // _MOST_STEPS) or 1
    cells = _means(100.0 * lost, width)

    figure = new_figure(9.5, 1.5 + 0.22 * min(max(len(paths), 5), _MOST_LEAVES))
    axes: Axes = figure.subplots()
    start, stop = (steps[0] - 0.5, steps[0] + width * cells.shape[1] - 0.5) if len(steps) else (-0.5, 0.5)
    axes.set_facecolor(FAINT)
    image = axes.imshow(
        np.ma.masked_invalid(cells),
        aspect="auto",
        interpolation="nearest",
        cmap="magma_r",
        vmin=0.0,
        vmax=100.0,
        extent=(start, stop, len(paths) - 0.5, -0.5),
    )
    every = -(-len(paths) // _MOST_LEAVES)
    axes.set_yticks(range(0, len(paths), every), [literal(path) or "(the only leaf)" for path in paths[::every]])
    what = "gradient" if kind == "grad" else "parameter"
    form = " or ".join(sorted({form for found, _, form in history.leaves if found == kind}))
    title = f"How much of each {what} is zero in {form}" if zeros else f"How much of each nonzero {what} {form} loses"
    means = f", the mean of {width} a cell" if width > 1 else ""
    unknown = "; gray: not measured, as it was skipped" if np.isnan(cells).any() else ""
    tidy(axes, title, xlabel=f"step{means}{unknown}", grid="")
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.04)
    bar.set_label("%", color=MUTED)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(color=FAINT, labelcolor=MUTED, labelsize=9)
    return figure


def _curves(columns: dict[str, npt.NDArray], name: str) -> dict[str, npt.NDArray]:
    """Returns a metric, or by loss or group what belongs to it."""
    return {
        path.removeprefix(name).removeprefix("/"): np.asarray(values, np.float64)
        for path, values in columns.items()
        if path == name or path.startswith(f"{name}/")
    }


def _skipped(columns: dict[str, npt.NDArray]) -> npt.NDArray[np.bool_]:
    found = [values > 0 for values in _curves(columns, "skipped").values()]
    return np.any(found, axis=0) if found else np.zeros(len(columns["step"]), bool)


def _draw_curves(axes: "Axes", steps: npt.NDArray, curves: dict[str, npt.NDArray], **style: Any) -> None:
    for index, values in enumerate(curves.values()):
        shown = np.where(np.isfinite(values), values, np.nan)
        marker = "o" if len(steps) == 1 else None
        color = _COLORS[index % len(_COLORS)]
        axes.plot(steps, shown, color=color, linewidth=1.2, marker=marker, markersize=3, label=str(index), **style)
    if len(curves) > 1:
        legend = axes.legend(frameon=False, fontsize=9, labelcolor=MUTED)
        # A legend leaves out labels that begin with an underscore, so the names come in afterwards.
        for text, name in zip(legend.get_texts(), curves, strict=True):
            text.set_text(literal(name) or "all")


def _mark(axes: "Axes", skipped: npt.NDArray, steps: npt.NDArray) -> None:
    """Puts a red tick on the lower edge for each skipped step."""
    if len(skipped):
        axes.vlines(skipped, 0.0, 0.06, color=RED, linewidth=1.2, transform=axes.get_xaxis_transform(), label="skipped")
    if len(steps):
        axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)


def _lost(columns: dict[str, npt.NDArray], kind: str, path: str, zeros: bool) -> npt.NDArray:
    underflow, zero = (columns[column(kind, measure, path)] for measure in ("underflow", "zeros"))
    return zero + (1.0 - zero) * underflow if zeros else underflow


def _means(values: npt.NDArray, width: int) -> npt.NDArray:
    """Averages neighboring columns, where they are known."""
    padding = np.full((len(values), -values.shape[1] % width), np.nan)
    grouped = np.concatenate([values, padding], axis=1).reshape(len(values), -1, width)
    known = np.isfinite(grouped)
    total = np.where(known, grouped, 0.0).sum(-1)
    return np.where(known.any(-1), total / np.maximum(known.sum(-1), 1), np.nan)
