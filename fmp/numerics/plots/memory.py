"""`fmp.numerics.plot_plan` and `plot_live_bytes`: where the bytes of a training run go."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fmp.memory.checks import is_number
from fmp.memory.measured import Timeline
from fmp.memory.planned import KINDS, Plan
from fmp.memory.units import unit_bytes
from fmp.numerics.plots.figure import BLUE, FAINT, GREEN, INK, MUTED, ORANGE, RED, VIOLET, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_COLORS = {
    "params": BLUE,
    "compute": "#8db4e2",
    "masters": VIOLET,
    "gradients": ORANGE,
    "accumulators": "#f3c78a",
    "moments": GREEN,
    "average": "#93cfb5",
    "buffers": "#7b8794",
    "batch": "#b3bcc5",
    "activations": "#dd7a72",
    "other": FAINT,
}
_SEEN = 0.04  # of the height: where a label fits into a part of a bar


def plot_plan(
    plans: Iterable[Plan] | Mapping[str, Plan],
    *,
    labels: Sequence[str] | None = None,
    capacity: float | None = None,
    unit: str | None = None,
    title: str = "Memory on each device",
    into: "SubFigure | None" = None,
) -> "Figure | SubFigure":
    """Draws plans side by side as stacked bars, for example by policy or by ZeRO stage.

    Args:
        plans: The plans, from left to right; at least one. Of a mapping, the keys are the labels.
        labels: What stands below each; by default what differs among them: optimizer, policy, ZeRO stage, devices.
        capacity: The bytes of a device, drawn as a line; None draws none.
        unit: `"GB"`, `"GiB"`, ...; by default that of the first plan.
        title: Stands above the picture.
        into: A part of a larger figure to draw into; None makes a new figure.

    Returns:
        The figure, or `into`.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If there is no plan, not a label for each, the unit is unknown, or `capacity` is not above zero.
        TypeError: If `plans` holds something else, or `labels` is a single string or given beside a mapping.

    Example:
        >>> import fmp
        >>> plans = [fmp.memory.plan(7.5e9, "adam", "O2", zero=stage, devices=64) for stage in range(4)]
        >>> figure = plot_plan(plans, capacity=80e9)  # doctest: +SKIP
        >>> figure.savefig("zero.png")  # doctest: +SKIP
    """
    if isinstance(plans, Mapping):
        if labels is not None:
            raise TypeError("labels are the keys of plans already, as it is a mapping; leave one of the two out")
        labels, plans = [str(name) for name in plans], plans.values()
    plans = _as_plans(plans)
    _check_capacity(capacity)
    if isinstance(labels, str):
        raise TypeError(f"labels must be a list with a string for each plan, got {labels!r}")
    if not plans:
        raise ValueError("plans must be a sequence of at least one plan, got none")
    labels = _differences(plans) if labels is None else list(labels)
    if len(labels) != len(plans):
        raise ValueError(f"there are {len(plans)} plans and {len(labels)} labels; give one for each")
    unit = plans[0].unit if unit is None else unit
    size = unit_bytes(unit)

    figure = into if into is not None else new_figure(2.6 + 1.4 * max(3, len(plans)), 4.4)
    axes = figure.subplots()
    places, bottom = range(len(plans)), np.zeros(len(plans))
    top = max([plan.total / size for plan in plans] + ([] if capacity is None else [capacity / size])) or 1.0
    for kind in KINDS:
        heights = np.array([plan.bytes[kind] / size for plan in plans])
        if heights.any():
            axes.bar(places, heights, 0.62, bottom, color=_COLORS[kind], label=kind, edgecolor="white", linewidth=0.6)
            for place, low, height in zip(places, bottom, heights, strict=True):
                if height > _SEEN * top:
                    axes.text(
                        place, low + height / 2, f"{height:.3g}", ha="center", va="center", fontsize=8,
                        color=INK if kind in ("compute", "accumulators", "average", "other") else "white",
                    )  # fmt: skip
            bottom += heights
    for place, total in zip(places, bottom, strict=True):
        axes.text(
            place, total + 0.012 * top, f"{total:,.3g}" if total < 1000 else f"{total:,.0f}",
            ha="center", va="bottom", color=INK, fontsize=9.5, fontweight="bold",
        )  # fmt: skip
    _draw_capacity(axes, capacity, size, unit)
    axes.set_ylim(0, 1.1 * top)
    axes.set_xlim(-0.6, len(plans) - 0.4)
    tidy(axes, title, ylabel=unit)
    axes.set_xticks(places, labels)
    axes.tick_params(axis="x", length=0, labelcolor=INK)
    _stack_legend(axes)
    return figure


def plot_live_bytes(
    timeline: Timeline,
    *,
    capacity: float | None = None,
    unit: str = "MB",
    title: str = "Live bytes of one step",
    into: "SubFigure | None" = None,
) -> "Figure | SubFigure":
    """Draws what is live after each op of a train step, by kind.

    Args:
        timeline: From `fmp.memory.measure_step`.
        capacity: The bytes of a device, drawn as a line; None draws none.
        unit: `"MB"`, `"GB"`, `"GiB"`, ...
        title: Stands above the picture.
        into: A part of a larger figure to draw into; None makes a new figure.

    Returns:
        The figure, or `into`.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If the unit is unknown, or `capacity` is not above zero.
        TypeError: If `timeline` is none.

    Example:
        >>> import fmp, torch
        >>> step = fmp.train_step(lambda w, x: (x @ w).square().mean(), fmp.optim.adamw(1e-3))
        >>> timeline = fmp.memory.measure_step(step, torch.randn(64, 64), torch.randn(8, 64))
        >>> figure = plot_live_bytes(timeline, unit="kB")  # doctest: +SKIP
        >>> figure.savefig("step.png")  # doctest: +SKIP
    """
    if not isinstance(timeline, Timeline):
        advice = "; a plan has one in `timeline` if it was made with measure=True" if timeline is None else ""
        kind = "None" if timeline is None else f"a {type(timeline).__name__}"
        raise TypeError(f"timeline must come from fmp.memory.measure_step, got {kind}{advice}")
    _check_capacity(capacity)
    size = unit_bytes(unit)
    figure = into if into is not None else new_figure(9.5, 4.4)
    axes = figure.subplots()
    ops = np.arange(len(timeline.ops))
    shown = {kind: np.array(values) / size for kind, values in timeline.live.items() if any(values)}
    axes.stackplot(
        ops, *shown.values(), labels=list(shown), colors=[_COLORS[kind] for kind in shown], step="post", linewidth=0
    )
    peak, place = timeline.peak / size, timeline.peak_index
    top = max(peak, 0.0 if capacity is None else capacity / size) or 1.0
    axes.set_ylim(0, 1.22 * top)
    axes.set_xlim(0, max(1, len(ops) - 1))
    _draw_phases(axes, timeline.phases)
    _draw_capacity(axes, capacity, size, unit)
    axes.plot([place], [peak], "o", color=RED, markersize=5, clip_on=False, zorder=5)
    left = place > len(ops) / 2
    axes.annotate(
        f"{peak:,.4g} {unit}, {timeline.ops[place].partition('.')[0]}", (place, peak), (-8 if left else 8, 5),
        textcoords="offset points", ha="right" if left else "left", color=RED, fontsize=9, fontweight="bold",
    )  # fmt: skip
    tidy(axes, title, xlabel="ops", ylabel=unit)
    _stack_legend(axes)
    return figure


def _as_plans(plans: Any) -> list[Plan]:
    if isinstance(plans, Plan):
        raise TypeError("plans must be a sequence of plans, got a single one; put it in a list, or give {name: plan}")
    if not isinstance(plans, Iterable):
        raise TypeError(f"plans must be a sequence of plans, got a {type(plans).__name__}")
    plans = list(plans)
    for index, plan in enumerate(plans):
        if not isinstance(plan, Plan):
            raise TypeError(f"plans[{index}] must come from fmp.memory.plan, got a {type(plan).__name__}")
    return plans


def _check_capacity(capacity: Any) -> None:
    if capacity is None:
        return
    if not is_number(capacity) or not 0 < capacity < math.inf:
        raise ValueError(f"capacity must be a finite number of bytes above 0, such as 80e9, got {capacity!r}")


def _differences(plans: Sequence[Plan]) -> list[str]:
    """Names each plan by what not all have in common."""
    columns = {
        "optimizer": [plan.optimizer for plan in plans],
        "policy": [plan.policy.replace(" ", "\n") for plan in plans],
        "zero": [f"ZeRO {plan.zero}" for plan in plans],
        "devices": [f"{plan.devices} devices" for plan in plans],
        "numbers": [f"{plan.numbers:.3g} parameters" for plan in plans],
    }
    differing = [column for column in columns.values() if len(set(column)) > 1] or [columns["policy"]]
    return ["\n".join(parts) for parts in zip(*differing, strict=True)]


def _draw_phases(axes: "Axes", phases: Sequence[str]) -> None:
    """Shades and names the phases; a run of one that is too short for its name has none."""
    starts = [0] + [index for index in range(1, len(phases)) if phases[index] != phases[index - 1]] + [len(phases)]
    for start, stop in itertools.pairwise(starts):
        axes.axvline(start, color="white" if start else FAINT, linewidth=0.8, zorder=3)
        if stop - start > 0.06 * len(phases):
            axes.text(
                (start + stop) / 2, 0.985, phases[start], transform=axes.get_xaxis_transform(), ha="center", va="top",
                color=MUTED, fontsize=9,
            )  # fmt: skip
            axes.axvline(start, ymin=0.9, color=FAINT, linewidth=0.8)


def _draw_capacity(axes: "Axes", capacity: float | None, size: int, unit: str) -> None:
    if capacity is not None:
        axes.axhline(capacity / size, color=RED, linewidth=1.3, linestyle="--", zorder=4)
        axes.text(
            0.995, capacity / size, f"{capacity / size:,.3g} {unit}", transform=axes.get_yaxis_transform(),
            ha="right", va="bottom", color=RED, fontsize=9,
        )  # fmt: skip


def _stack_legend(axes: "Axes") -> None:
    """Lists the kinds beside the picture, from the top of the stack down."""
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], names[::-1], loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=9,
        labelcolor=INK,
    )  # fmt: skip
