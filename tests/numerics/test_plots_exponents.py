"""The picture of exponents: what is drawn where, and which percentages stand beside it."""

import importlib
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch.func import vmap

import fmp
from fmp.numerics.format_loss import loss_in
from fmp.numerics.formats import FORMATS
from fmp.numerics.histogram import histogram
from fmp.numerics.plots.exponents import Spread, bands, lost_bands, plot_exponents
from fmp.numerics.plots.figure import new_figure, tidy


def words(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_bars_and_ghost_stand_where_the_numbers_are():
    grads = {"w": torch.tensor([2.0**-20, 1.5 * 2.0**-20, 2.0**-10, 0.0])}
    figure = plot_exponents(histogram(grads), scale=2.0**8, title="Gradients")
    assert isinstance(figure, Figure)
    above: Any = figure.axes[0]
    assert above.get_title(loc="left") == "Gradients"
    bars, _, ghost = (patch.get_data() for patch in above.patches[:3])
    np.testing.assert_array_equal(bars.edges, np.arange(-20, -8))
    np.testing.assert_allclose(bars.values[[0, -1]], [200 / 3, 100 / 3])
    np.testing.assert_array_equal(ghost.edges, bars.edges + 8)
    np.testing.assert_array_equal(ghost.values, bars.values)
    assert above.get_xlim()[0] < -25
    assert above.get_xlim()[1] > 16
    assert "nonzero: 3\nzeros: 1" in words(figure)
    assert "0 → 0" in words(figure)


def test_shades_lie_where_the_format_changes():
    for item in FORMATS.values():
        limits = bands(item)
        assert limits["zero"][1] == limits["subnormal"][0] == math.log2(item.smallest_subnormal) - 1
        assert limits["subnormal"][1] == limits["normal"][0] == math.log2(item.smallest_normal)
        assert 2.0 ** limits["overflow"][0] == pytest.approx(item.max_rounded)
    figure: Any = plot_exponents(histogram({"w": torch.ones(3)}), formats=("f16", "f8e4m3"))
    rows = {(bar.get_x(), bar.get_x() + bar.get_width()) for bar in figure.axes[2].patches}
    assert {(-25.0, -14.0), (-10.0, -6.0)} <= rows
    assert [label.get_text() for label in figure.axes[2].get_yticklabels()] == ["f16", "f8e4m3"]


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f8e4m3", "f8e5m2"])
def test_percentages_are_those_of_exact_counts_up_to_what_a_limit_cuts(dtype):
    grads = {"w": torch.randn(20_000) * torch.exp2(torch.rand(20_000) * 60 - 50)}
    counted, loss = histogram(grads), loss_in(grads, dtype, 2.0**3)
    spread = Spread(counted.lowest, counted.overall.double().div(20_000).numpy())
    limits = lost_bands(FORMATS[loss.dtype])
    for name, exact in (("zero", loss.underflow), ("subnormal", loss.subnormal), ("overflow", loss.overflow)):
        assert spread.within(*limits[name], 3.0) == pytest.approx(exact.item(), abs=0.01)


def test_percentages_before_and_after_stand_beside_the_formats():
    grads = {"w": torch.cat([torch.full((37,), 2.0**-30), torch.full((63,), 1.0)])}
    figure = plot_exponents(histogram(grads), scale=2.0**10, formats=("f16",))
    assert [text for text in words(figure) if "→" in text] == ["37 → 0", "0 → 37", "0 → 0"]
    assert plot_exponents(histogram(grads)).axes[3].texts[1].get_text() == "37"


@pytest.mark.parametrize("scale", [1.0, 2.0**6, 1000.0])
def test_percentages_are_those_of_loss_in_or_marked(scale):
    formats = ("f16", "bf16", "f8e5m2", "f8e4m3")
    x = torch.randn(20_000) * torch.exp2(torch.rand(20_000) * 30 - 22)
    x = torch.cat([x, x / 100])
    figure = plot_exponents(histogram(x), scale=scale, formats=formats)
    shown = [text.get_text().split(" → ")[1] for text in figure.axes[3].texts if "→" in text.get_text()]
    losses = [loss_in(x, dtype, scale) for dtype in formats]
    counted = [getattr(loss, name).item() for name in ("underflow", "subnormal", "overflow") for loss in losses]
    for text, share in zip(shown, counted, strict=True):
        number = 0.05 if text.endswith("<0.1") else float(text.removeprefix("≈"))
        rounding = 0.5 if number >= 10 else 0.05
        assert number == pytest.approx(100 * share, abs=1.0 if text.startswith("≈") else rounding + 0.01)
    of_f16 = shown[0::4]
    assert any(map(float, (text.strip("≈<") for text in of_f16)))
    assert all("≈" not in text for text in of_f16) == (scale != 1000.0)
    assert shown[1] == shown[5] == shown[9] == "0"  # bfloat16 loses nothing
    assert shown[7].startswith("≈")  # numbers just below the smallest normal one of f8e4m3


def test_members_are_drawn_together_and_what_is_in_no_bin_is_named():
    members = vmap(histogram)({"w": torch.tensor([[1.0, math.inf], [math.nan, 2.0]])})
    assert "nonzero: 2\nzeros: 0\ninfinities: 1\nNaN: 1" in words(plot_exponents(members))
    assert "nonzero: 0\nzeros: 0" in words(plot_exponents(histogram({}), scale=torch.tensor(3.0)))


def test_it_draws_into_a_part_of_a_page_and_saves(tmp_path):
    page = new_figure(6.0, 8.0)
    pages: Any = page.subfigures(2, 1)
    part = pages[1]
    assert plot_exponents(histogram([torch.randn(50)]), into=part) is part
    page.savefig(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_axes_are_tidied_on_the_sides_that_are_asked_for():
    axes = new_figure(2.0, 2.0).subplots()
    tidy(axes, "Title", xlabel="x", ylabel="y", grid="x")
    assert (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()) == ("Title", "x", "y")
    assert [axes.spines[side].get_visible() for side in ("top", "left")] == [False, True]
    assert all(line.get_visible() for line in axes.get_xgridlines())
    assert not any(line.get_visible() for line in axes.get_ygridlines())


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="the extra `plot` of fmp-torch: python -m pip install matplotlib"):
        plot_exponents(histogram({}))


def test_a_broken_matplotlib_is_not_called_a_missing_one(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'kiwisolver'", name="kiwisolver")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="kiwisolver"):
        new_figure(1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": ()}, "formats must name at least one format"),
        ({"formats": ("i8",)}, "i8 is no format to cast to"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0.0"),
        ({"scale": math.nan}, "scale must be positive and finite, got nan"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plot_exponents(histogram({}), **options)


def test_a_tree_is_no_histogram():
    tree = {"w": torch.ones(2)}
    with pytest.raises(TypeError, match=r"got a dict; .* plot_exponents\(fmp.numerics.histogram\(tree\)\)"):
        plot_exponents(tree)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"formats must be a list of formats, got 'f16'; write \['f16'\]"):
        plot_exponents(histogram(tree), formats="f16")
    with pytest.raises(TypeError, match=r"a StaticLossScale; pass its \.loss_scale"):
        plot_exponents(histogram(tree), scale=fmp.StaticLossScale(8.0))  # type: ignore[arg-type]
