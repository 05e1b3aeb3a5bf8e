"""Changes as points with intervals: where they lie, how sure they are, and what is said of them."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from nsightkit import plots

HOSTILE = "void f<$\\frac{1}$>(\x1b[31m 加载 $x^{$\n<script>"


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def rows(*given: tuple[str, float, float | None, float | None, str]) -> pd.DataFrame:
    frame = pd.DataFrame(given, columns=["name", "delta_ns", "low_ns", "high_ns", "significance"])
    return frame.assign(before_ns=10_000_000, after_ns=10_000_000 + frame["delta_ns"])


def test_points_and_intervals_lie_where_the_changes_do():
    frame = rows(
        ("wall_ns", -4e6, -5e6, -3e6, "significant"),
        ("kernel", 1e6, 0.5e6, 2e6, "within noise"),
        ("few", 2e6, None, None, "cannot tell"),
    )
    figure = plots.change_intervals(frame, title="A title")
    figure.canvas.draw()
    axes = figure.axes[0]
    points = {line.get_label(): line.get_xydata() for line in axes.lines if line.get_marker() != "None"}
    np.testing.assert_allclose(points["significant"], [[-4, 0]])
    np.testing.assert_allclose(points["within noise"], [[1, 1]])
    np.testing.assert_allclose(points["cannot tell"], [[2, 2]])
    segments = [s for c in axes.collections for s in c.get_segments()]
    assert sorted((round(s[0][0], 3), round(s[1][0], 3)) for s in segments) == [(-5, -3), (0.5, 2), (2, 2)]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["wall", "kernel", "few"]
    assert axes.get_xlabel().startswith("change of a step's time (ms)")
    assert "wall 10.0 ms then 6.00 ms, significant" in figure.get_label()


def test_names_say_clocks_and_are_text():
    frame = rows((HOSTILE, 1e3, 0, 2e3, "unsure"), (HOSTILE, 1e3, 0, 2e3, "negligible")).assign(clock=["CPU", np.nan])
    figure = plots.change_intervals(frame, title=HOSTILE)
    figure.canvas.draw()
    assert "\n" not in "".join(t.get_text() for t in figure.findobj(mpl.text.Text))
    frame["name"] = ["forward", "backward"]
    names = [t.get_text() for t in plots.change_intervals(frame).axes[0].get_yticklabels()]
    assert names == ["forward (CPU)", "backward"]


def test_only_the_first_are_drawn_and_nothing_is_said():
    many = rows(*((f"row {i}", i, i, i, "within noise") for i in range(30)))
    assert len(plots.change_intervals(many, top=7).axes[0].get_yticklabels()) == 7
    empty = plots.change_intervals(many.head(0))
    empty.canvas.draw()
    assert "nothing to compare" in empty.get_label()
    assert any("nothing" in t.get_text() for t in empty.axes[0].texts)
