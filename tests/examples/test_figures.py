"""Figures of single pages: what they draw lies where the numbers say, and they say it in words too."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from _lib import counters as planted_counters
from _lib import figures

from nsightkit.analysis.roofline import counters

HOSTILE = "void f<$\\frac{1}$>(\x1b[31m 加载 $x^{$\n<script>"


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    plt.close("all")


def texts(figure: Any) -> list[str]:
    figure.canvas.draw()
    return [text.get_text() for text in figure.findobj(mpl.text.Text)]


def test_distributions_are_the_empirical_ones() -> None:
    times = np.array([5_000, 1_000, 3_000, 0, -7])  # the last two have no place on a logarithmic axis
    figure = figures.distributions({HOSTILE: times, "equal": [2_000] * 3}, title=HOSTILE)
    first, equal = figure.axes[0].lines
    x, share = first.get_data()
    for time in (1_000, 2_999, 3_000, 5_000):
        place = np.searchsorted(x, time, side="right") - 1
        assert share[place] == pytest.approx(np.mean(times[times > 0] <= time))
    assert set(np.round(equal.get_ydata(), 6)) == {0, 0.333333, 0.666667, 1}
    assert "median 3 µs of 3" in figure.get_label()
    assert "\n" not in "".join(texts(figure))


def test_share_curves_show_levels_and_say_their_ends() -> None:
    figure = figures.share_curves([1e3, 1e6], {HOSTILE: [0.25, 1.0], "b": [1, 1]}, {HOSTILE: 0.2}, title="shares")
    assert "true share 20.0%" in texts(figure)
    assert "25.0% at 1 µs to 100.0% at 1 ms" in figure.get_label()


def changes(*rows: tuple[str, float, float | None, float | None, str]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["name", "delta_ns", "low_ns", "high_ns", "significance"])
    return frame.assign(before_ns=10_000_000, after_ns=10_000_000 + frame["delta_ns"])


def test_changes_and_their_intervals_lie_where_they_are() -> None:
    rows = changes(
        ("wall_ns", -4e6, -5e6, -3e6, "changed"),
        (HOSTILE, 1e6, 0.5e6, 2e6, "within noise"),
        ("few", 2e6, None, None, "inconclusive"),
    ).assign(clock=["CPU", None, None])
    figure = figures.change_intervals(rows, title="A title")
    assert "\n" not in "".join(texts(figure))
    (axes,) = figure.axes
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines if line.get_marker() != "None"}
    assert points == {"changed": [[-4, 0]], "within noise": [[1, 1]], "inconclusive": [[2, 2]]}
    segments = [segment for collection in axes.collections for segment in collection.get_segments()]
    assert sorted((begin[0], end[0]) for begin, end in segments) == [(-5, -3), (0.5, 2), (2, 2)]
    assert "wall (CPU) 10 ms then 6 ms, changed" in figure.get_label()
    assert len(figures.change_intervals(pd.concat([rows] * 9), title="many", top=7).axes[0].get_yticklabels()) == 7


def test_a_rung_shows_its_bounds_and_its_time() -> None:
    rungs = pd.DataFrame({"rung": ["unfused", "fused"], "least_ns": [3e6, 2e6], "lower_ns": [2e6, 2e6]})
    figure = figures.ladder(rungs, {"goal": 4e6}, pd.Series({"unfused": 5e6}), title="A ladder")
    lower, fusing, measured = ([bar.get_width() for bar in part] for part in figure.axes[0].containers)
    assert (lower, fusing, measured) == ([2, 2], [1, 0], [5, 0])
    assert "unfused 2 ms to 3 ms at best, 5 ms" in figure.get_label()
    assert "fused 2 ms at best, awaiting a GPU; lines at goal 4 ms" in figure.get_label()
    assert len(figures.ladder(rungs, {"goal": 4e6}, title="predicted").axes[0].containers) == 2
    figure.canvas.draw()


def test_memory_curves_have_lines_points_and_crosses() -> None:
    sizes = np.array([64, 128, 256])
    figure = figures.memory_curves(
        {"naive": (sizes, sizes**2 * 1e4), HOSTILE: (sizes, sizes * 1e5)},
        {"naive": (sizes[:2], sizes[:2] ** 2 * 1.1e4), HOSTILE: ([], [])},
        5e8,
        {"naive": 256},
        title="curves",
    )
    (axes,) = figure.axes
    crosses = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "X" and len(line.get_xdata())]
    assert crosses == [[[256, 5e8]]]
    points = [line for line in axes.lines if line.get_linestyle() == "None" and line.get_marker() == "o"]
    assert points[0].get_ydata().tolist() == (sizes[:2] ** 2 * 1.1e4).tolist()
    assert "out of memory at 256" in figure.get_label()
    figure.canvas.draw()


def test_a_sweep_has_a_panel_a_direction_and_marks_its_ends() -> None:
    rows = []
    for direction, factor in (("forward", 1), ("backward", 2)):
        for context in (1024, 2048, 4096):
            peak = factor * context**2
            failed = direction == "backward" and context == 4096
            row = {"implementation": "naive", "precision": "fp32", "direction": direction, "context": context}
            rows.append(row | {"peak_bytes": None if failed else peak, "status": "oom" if failed else "ok"})
    table = pd.DataFrame(rows)
    forecast = table[table["status"] == "oom"].assign(largest_context=2900)
    figure = figures.sweep(table, "peak_bytes", limit_bytes=3e7, forecast=forecast, title="A sweep")
    figure.canvas.draw()
    forward, backward = figure.axes
    drawn = [line.get_ydata().tolist() for line in forward.lines if line.get_marker() == "."]
    assert drawn == [[1024**2, 2048**2, 4096**2]]
    ends = {line.get_marker(): line.get_xydata().tolist() for line in backward.lines if len(line.get_xdata()) == 1}
    assert ends == {"X": [[4096, 3e7]], "|": [[2900, 3e7]]}
    assert "naive, fp32 backward ran out of memory at 4096" in figure.get_label()


def test_every_kernel_lies_in_the_region_of_its_class() -> None:
    table = counters.summary(planted_counters.counters()[0])
    figure = figures.limiter_map(table.assign(name=HOSTILE), title="Planted (synthetic)")
    (axes,) = figure.axes
    (image,) = axes.images
    regions = {text.get_text(): text.get_position() for text in axes.texts}
    for line, row in zip(axes.lines, table.itertuples(), strict=True):
        assert line.get_xydata().tolist() == [[row.memory_pct, row.sm_pct]]
        x, y = regions[row.classification]
        assert image.get_array()[int(row.sm_pct), int(row.memory_pct)] == image.get_array()[int(y), int(x)]
    assert "\n" not in "".join(texts(figure))
    assert "at 93 % of compute and 45 % of memory" in figure.get_label()


def test_lateness_is_a_dot_a_step() -> None:
    frame = pd.DataFrame({"rank": [0, 1] * 4, "step": np.repeat(range(4), 2)})
    figure = figures.rank_lateness(frame, pd.Series([0.0, 2e6] * 4), title="T")
    dots = [collection.get_offsets()[:, 0].tolist() for collection in figure.axes[0].collections]
    assert dots == [[0.0] * 4, [2.0] * 4]
    assert "rank 1 2 ms" in figure.get_label()
