"""What all pictures share: figures that nothing has to close, their colors, and matplotlib, loaded on first use."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, FAINT = "#1f2933", "#616e7c", "#d9dee5"  # text and axes; what explains them; grids and frames
BLUE, ORANGE, RED, GREEN, VIOLET = "#2f6fbb", "#e08a1e", "#c8372d", "#2c9a6b", "#8058a5"


def new_figure(width: float, height: float) -> "Figure":
    """Makes an empty figure whose axes, titles and legends arrange themselves.

    It is not registered with pyplot: it needs no display and no `close`, and goes when nobody holds it.

    Args:
        width: In inches.
        height: In inches.

    Returns:
        The figure; `figure.savefig(path)` writes it.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        module = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "pictures need matplotlib, the extra `plot` of fmp-torch: python -m pip install matplotlib",
            name="matplotlib",
        ) from error
    return module.Figure(figsize=(width, height), layout="constrained", facecolor="white")


def literal(text: str) -> str:
    r"""Returns what draws a text as it is, also one with `$`, which matplotlib takes for a formula.

    Example:
        >>> print(literal("price in $ or $/h"))
        price in \$ or \$/h
    """
    return text.replace("$", r"\$")


def tidy(axes: "Axes", title: str = "", *, xlabel: str = "", ylabel: str = "", grid: str = "y") -> None:
    """Titles and labels axes in the look that all pictures share: two spines, a faint grid behind the data.

    Args:
        axes: What to change.
        title: Stands above, to the left.
        xlabel: Stands below.
        ylabel: Stands to the left.
        grid: Where the lines of the grid cross: `"x"`, `"y"`, `"both"` or `""` for none.
    """
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.set_xlabel(xlabel, color=MUTED)
    axes.set_ylabel(ylabel, color=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(FAINT)
    axes.tick_params(which="both", color=FAINT, labelcolor=MUTED, labelsize=9)
    axes.set_axisbelow(True)
    if grid == "x" or grid == "y" or grid == "both":
        axes.grid(True, axis=grid, color=FAINT, linewidth=0.6)
