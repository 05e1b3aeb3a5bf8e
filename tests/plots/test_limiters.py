"""The map of limiters: every kernel in the region that the rule gives it."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from _lib import counters as planted_counters

from nsightkit import plots
from nsightkit.analysis.roofline import counters as analysis

HOSTILE = "void f<$\\frac{1}$>(\x1b[31m 加载 $x^{$\n<script>"


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def test_every_kernel_lies_in_the_region_of_its_class() -> None:
    report, truth = planted_counters.counters()
    table = analysis.summary(report)
    figure = plots.limiter_map(table, title="Planted (synthetic)")
    (axes,) = figure.axes
    (image,) = axes.images
    grid, colours = image.get_array(), image.cmap.colors
    regions = {text.get_text(): text.get_position() for text in axes.texts}
    assert set(regions) == {"compute-bound", "memory-bound", "latency-bound", "balanced"}

    def colour(x: float, y: float) -> tuple[float, ...]:
        return tuple(colours[grid[int(y), int(x)]])

    by_class = {name: colour(*place) for name, place in regions.items()}
    assert len(set(by_class.values())) == 4
    points = [(line.get_xdata()[0], line.get_ydata()[0], line.get_label()) for line in axes.lines]
    assert len(points) == len(truth) == 6
    for (x, y, label), row in zip(points, table.itertuples(), strict=True):
        assert (x, y) == (row.memory_pct, row.sm_pct)
        assert label.endswith(row.classification)
        assert colour(x, y) == by_class[row.classification]
    for x, y in np.random.default_rng(0).uniform(0, 100, (200, 2)):
        middle = int(x) + 0.5, int(y) + 0.5
        assert colour(x, y) == by_class[analysis.classify(middle[1], middle[0])]
    for name, place in regions.items():
        assert analysis.classify(place[1], place[0]) == name
    said = figure.get_label()
    assert said.startswith("Planted (synthetic)")
    assert "at 93 % of compute and 45 % of memory" in said


def test_names_come_before_kernels_and_hostile_ones_are_drawn() -> None:
    table = pd.DataFrame(
        {"kernel": [HOSTILE, "k"], "sm_pct": [50.0, 10.0], "memory_pct": [90.0, 5.0], "classification": ["m", "l"]}
    )
    figure = plots.limiter_map(table, title=HOSTILE)
    figure.canvas.draw()
    assert "\x1b" not in figure.axes[0].lines[0].get_label()
    figure = plots.limiter_map(table.assign(name=["one", "two"]))
    assert [line.get_label() for line in figure.axes[0].lines] == ["one: m", "two: l"]


def test_without_throughputs_it_says_so() -> None:
    table = analysis.summary(planted_counters.counters()[0])
    table.loc[0, "sm_pct"] = np.nan
    assert len(plots.limiter_map(table).axes[0].lines) == 5
    assert "no kernels" in plots.limiter_map(table.assign(sm_pct=np.nan)).get_label()
    many = pd.concat([table.iloc[1:2]] * 40)
    assert len(plots.limiter_map(many).axes[0].lines) == 40
