import sys
from typing import Any

import numpy as np
import pytest
import torch

import fmp
from fmp import tree
from fmp.numerics.record import record
from fmp.numerics.watch import watch_gradients

pytest.importorskip("matplotlib")
from fmp.numerics.plots.timeline import plot_scale, plot_underflow


def run(batches, *, length=100, watch=None, **options):
    optimizer = fmp.optim.sgd(0.1)
    optimizer = optimizer if watch is None else fmp.optim.chain(watch, optimizer)
    step = fmp.train_step(lambda params, batch: (params["w"] * batch).sum(), optimizer, **options)
    recorded = record(step, length=length)
    carry = recorded.init(step.init({"w": torch.ones(4)}))
    for batch in batches:
        carry, _ = recorded(carry, batch)
    return carry[1]


GOOD, BAD = torch.tensor([1.0, 1e-9, 0.0, 2.0]), torch.full((4,), torch.inf)


def axes_of(figure) -> Any:
    return figure.axes


def cells_of(figure) -> Any:
    return figure.axes[0].images[0].get_array()


def drawn(axes):
    return [np.asarray(line.get_ydata()) for line in axes.lines]


def test_the_scale_is_drawn_below_the_loss_with_ticks_where_steps_were_skipped():
    scaler = fmp.DynamicLossScale(2.0**10)
    history = run([GOOD, BAD, GOOD, BAD, GOOD], loss_scale=scaler)
    figure = plot_scale(history)
    loss, scale = axes_of(figure)
    expected = history.arrays()["loss"]
    np.testing.assert_allclose(drawn(loss)[0], np.where(np.isfinite(expected), expected, np.nan))
    assert drawn(scale)[0].tolist() == [10.0, 10.0, 9.0, 9.0, 8.0]
    for axes in (loss, scale):
        (ticks,) = axes.collections
        assert [segment[0, 0] for segment in ticks.get_segments()] == [1.0, 3.0]
        assert ticks.get_colors()[0][0] > 0.7  # red
    assert loss.get_title(loc="left") == "Loss and loss scale: 2 of 5 steps skipped (red)"


def test_several_losses_have_a_curve_and_a_name_each():
    step = fmp.train_step(
        {name: lambda params, batch: (params["w"] * batch).sum() for name in ("one", "two")},
        {"w": fmp.optim.sgd(0.1)},
        loss_scale={"one": 4.0, "two": 16.0},
    )
    recorded = record(step)
    carry = recorded.init(step.init({"w": torch.ones(4)}))
    for _ in range(3):
        carry, _ = recorded(carry, GOOD)
    loss, scale = axes_of(plot_scale(carry[1]))
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["one", "two"]
    assert [curve[0] for curve in drawn(scale)] == [2.0, 4.0]


def test_a_step_of_one_s_own_may_report_only_a_loss():
    recorded = record(lambda state, batch: (state, {"loss": batch}))
    carry = recorded.init({}, torch.tensor(1.0))
    assert len(plot_scale(carry[1]).axes) == 1  # no step at all
    carry, _ = recorded(carry, torch.tensor(1.0))
    assert [axes.get_ylabel() for axes in plot_scale(carry[1]).axes] == ["loss"]
    nothing = record(lambda state, batch: (state, {"other": batch}))
    with pytest.raises(ValueError, match="neither a loss nor a loss scale"):
        plot_scale(nothing.init({}, torch.tensor(1.0))[1])


def test_underflow_is_a_cell_for_each_leaf_and_step():
    history = run([GOOD, BAD, GOOD], watch=watch_gradients("fp16"), loss_scale=1.0)
    figure = plot_underflow(history)
    np.testing.assert_allclose(cells_of(figure).filled(-1.0), [[50.0, -1.0, 50.0]], rtol=1e-5)
    cells = cells_of(plot_underflow(history, zeros=False))
    np.testing.assert_allclose(cells.filled(-1.0), [[100 / 3, -1.0, 100 / 3]], rtol=1e-5)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["w"]
    assert figure.axes[0].get_title(loc="left") == "How much of each gradient is zero in f16"
    assert "gray" in figure.axes[0].get_xlabel()


def test_many_steps_and_leaves_are_thinned_out(tmp_path):
    names = {f"layer{index}": torch.ones(2) for index in range(100)}
    recorded = record(lambda state, batch: ({"params": state["params"]}, batch), length=900, params="fp16")
    carry = recorded.init({"params": names}, torch.tensor(1.0))
    for _ in range(3):
        carry, _ = recorded(carry, torch.tensor(1.0))
    history = tree.replace(carry[1], count=torch.tensor(901))
    figure = plot_underflow(history, kind="param")
    axes = figure.axes[0]
    assert cells_of(figure).shape == (100, 300)
    assert len(axes.get_yticklabels()) <= 40
    assert axes.get_xlabel() == "step, the mean of 3 a cell"
    figure.savefig(tmp_path / "underflow.png")
    assert (tmp_path / "underflow.png").stat().st_size > 5000


def test_names_are_drawn_as_they_are(tmp_path):
    names = ["$\\a$", "_b", "$", "c_$x^$"]
    losses = {name: torch.tensor(index + 1.0) for index, name in enumerate(names)}
    recorded = record(lambda state, batch: (state, {"loss": losses, "loss_scale": losses}), params="fp16")
    carry = recorded.init({"params": {name: torch.ones(2) for name in names}}, torch.tensor(1.0))
    carry, _ = recorded(carry, torch.tensor(1.0))
    scale = plot_scale(carry[1])
    for axes in axes_of(scale):
        shown = dict(zip([text.get_text() for text in axes.get_legend().get_texts()], drawn(axes), strict=True))
        assert set(shown) == {name.replace("$", r"\$") for name in names}
    assert [curve[0] for curve in drawn(axes_of(scale)[0])] == [
        carry[1].arrays()[f"loss/{n}"][0] for n in sorted(names)
    ]
    underflow = plot_underflow(carry[1], kind="param")
    scale.savefig(tmp_path / "scale.png")  # a formula that is none would raise here
    underflow.savefig(tmp_path / "underflow.png")
    labels = [label.get_text() for label in underflow.axes[0].get_yticklabels()]
    assert labels == [name.replace("$", r"\$") for name in sorted(names)]


def test_nan_is_not_drawn_as_zero():
    history = run([torch.full((4,), torch.nan)], watch=watch_gradients("fp16"))
    assert cells_of(plot_underflow(history)).tolist() == [[0.0]]
    assert np.isnan(history.arrays()["grad_amax/w"]).all()


def test_pictures_say_what_they_lack(monkeypatch):
    history = run([GOOD])
    with pytest.raises(ValueError, match="watch_gradients"):
        plot_underflow(history)
    with pytest.raises(ValueError, match="params="):
        plot_underflow(history, kind="param")
    mapped = tree.map(lambda leaf: torch.stack([leaf, leaf]), history)
    with pytest.raises(ValueError, match="take one of them"):
        plot_scale(mapped)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        plot_scale(history)
