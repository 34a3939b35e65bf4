"""Pictures of memory: every bar, every band and every line is where the numbers say."""

import importlib
import sys
from typing import Any

import pytest
import torch

import fmp
from fmp.memory.measured import Timeline, measure_step
from fmp.memory.plan import plan
from fmp.numerics.plots.memory import plot_live_bytes, plot_plan

PLANS = [plan(7.5e9, "adam", "O2", zero=stage, devices=64) for stage in range(4)]
TIMELINE = Timeline(
    ("start", "mm.default", "add.Tensor", "where.self"),
    ("start", "forward", "backward", "update"),
    {"params": (4, 4, 4, 8), "gradients": (0, 0, 3, 0), "activations": (0, 9, 1, 0), "other": (0, 0, 0, 0)},
)


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_bar_for_each_plan_and_a_part_for_each_kind():
    figure = plot_plan(PLANS)
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3"]
    assert axes.get_ylabel() == "GB"
    heights = {str(bars.get_label()): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert list(heights) == ["params", "masters", "gradients", "moments"]
    for kind, found in heights.items():
        assert found == pytest.approx([each.bytes[kind] / 1e9 for each in PLANS])
    tops = [max(bar.get_y() + bar.get_height() for bar in bars) for bars in zip(*axes.containers, strict=True)]
    assert tops == pytest.approx([120.0, 31.40625, 16.640625, 1.875])
    assert {"120", "31.4", "16.6", "1.88"} <= set(texts(axes))
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["moments", "gradients", "masters", "params"]


def test_the_line_of_a_device_is_within_the_picture():
    axes: Any = plot_plan(PLANS[2:], capacity=80e9, unit="GiB").axes[0]
    (line,) = axes.lines
    assert line.get_ydata()[0] == pytest.approx(80e9 / 2**30)
    assert axes.get_ylim()[1] > 80e9 / 2**30
    assert axes.get_ylabel() == "GiB"
    assert "74.5 GiB" in texts(axes)


def test_labels_name_what_differs():
    def labels(*plans):
        return [tick.get_text() for tick in plot_plan(plans).axes[0].get_xticklabels()]

    assert labels(plan(1000, "adam", "O0"), plan(1000, "adam", "O2")) == ["O0", "O2"]
    assert labels(plan(1000, "adam", "O2"), plan(1000, "lion", "O2")) == ["adam", "lion"]
    assert labels(plan(1000, "adam", "O2")) == ["O2"]
    assert labels(plan(1000, None), plan(2000, None)) == ["1e+03 parameters", "2e+03 parameters"]
    own = plot_plan(PLANS, labels=["a", "b", "c", "d"]).axes[0].get_xticklabels()
    assert [tick.get_text() for tick in own] == ["a", "b", "c", "d"]


def test_bands_are_as_high_as_the_live_bytes():
    axes = plot_live_bytes(TIMELINE, unit="B").axes[0]
    tops = {band.get_label(): band.get_paths()[0].get_extents().y1 for band in axes.collections}
    assert list(tops) == ["params", "gradients", "activations"]
    assert tops["activations"] == 13 == TIMELINE.peak
    assert tops["params"] == 8
    assert any("13 B, mm" in text for text in texts(axes))
    assert axes.get_ylim()[1] > 13
    capacity = plot_live_bytes(TIMELINE, unit="B", capacity=100).axes[0]
    assert capacity.get_ylim()[1] > 100


def test_a_measured_step_names_its_phases():
    step = fmp.train_step(lambda w, x: (x @ w).square().mean(), fmp.optim.adamw(1e-3), policy=fmp.opt_level("O2"))
    timeline = measure_step(step, torch.randn(64, 64), torch.randn(8, 64))
    figure = plot_live_bytes(timeline, unit="kB", title="One step")
    axes = figure.axes[0]
    assert {"backward", "update"} <= set(texts(axes))
    assert axes.get_title(loc="left") == "One step"


def test_pictures_fit_into_a_part_of_a_larger_one(tmp_path):
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 8), layout="constrained")
    above, below = figure.subfigures(2, 1)
    assert plot_plan(PLANS, into=above) is above
    assert plot_live_bytes(TIMELINE, into=below) is below
    figure.savefig(tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 10_000


def test_empty_plans_and_wrong_arguments():
    plot_plan([plan({}, None)])
    with pytest.raises(ValueError, match="at least one plan"):
        plot_plan([])
    with pytest.raises(ValueError, match="4 plans and 1 labels"):
        plot_plan(PLANS, labels=["a"])
    for call in (lambda: plot_plan(PLANS, unit="gigs"), lambda: plot_live_bytes(TIMELINE, unit="gigs")):
        with pytest.raises(ValueError, match="GiB"):
            call()


def test_what_is_drawn_is_checked():
    assert len(plot_plan(each for each in PLANS).axes[0].get_xticklabels()) == 4
    wrong: dict[str, Any] = {"a single one": PLANS[0], "got a int": 3, r"plans\[1\]": [PLANS[0], TIMELINE]}
    for match, plans in wrong.items():
        with pytest.raises(TypeError, match=match):
            plot_plan(plans)
    with pytest.raises(TypeError, match="labels must be a list"):
        plot_plan(PLANS[:2], labels="ab")
    nothing: Any = plan(5).timeline
    with pytest.raises(TypeError, match="got None; a plan has one in `timeline` if it was made with measure=True"):
        plot_live_bytes(nothing)
    for capacity in (float("inf"), float("nan"), 0, -5, "80GB", True):
        limits: Any = {"capacity": capacity}
        with pytest.raises(ValueError, match="capacity must be a finite number"):
            plot_plan(PLANS, **limits)
        with pytest.raises(ValueError, match="capacity must be a finite number"):
            plot_live_bytes(TIMELINE, **limits)


def test_matplotlib_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="extra `plot`"):
        plot_plan(PLANS)


def test_plans_may_have_names():
    axes: Any = plot_plan({"one": PLANS[1], "none": PLANS[0]}).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["one", "none"]
    drawn: Any = plot_plan([PLANS[1], PLANS[0]], labels=["one", "none"]).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [bar.get_height() for bar in drawn.patches]
    with pytest.raises(TypeError, match="labels are the keys of plans already"):
        plot_plan({"one": PLANS[1]}, labels=["two"])
    with pytest.raises(ValueError, match="at least one plan, got none"):
        plot_plan({})
