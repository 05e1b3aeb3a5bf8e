"""Figures of single pages: what they draw lies where the numbers say, and they say it in words too."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from _lib import figures

HOSTILE = "void f<$\\frac{1}$>(\x1b[31m 加载 $x^{$\n<script>"


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    plt.close("all")


def drawn(figure: Any) -> Any:
    """The first axes of a figure that can be drawn, with no line break in its texts."""
    figure.canvas.draw()
    assert "\n" not in "".join(text.get_text() for text in figure.findobj(mpl.text.Text))
    return figure.axes[0]


def test_distributions_are_the_empirical_ones():
    times = np.array([5_000, 1_000, 3_000, 0, -7])  # the last two have no place on a logarithmic axis
    figure = figures.distributions({HOSTILE: times, "equal": [2_000] * 3}, title=HOSTILE)
    first, _ = drawn(figure).lines
    x, share = first.get_data()
    for time in (1_000, 2_999, 3_000, 5_000):
        place = np.searchsorted(x, time, side="right") - 1
        assert share[place] == pytest.approx(np.mean(times[times > 0] <= time))
    assert "median 3 µs of 3" in figure.get_label()


def test_changes_and_their_intervals_lie_where_they_are():
    rows = pd.DataFrame(
        [
            ("wall_ns", -4e6, -5e6, -3e6, "changed", "CPU"),
            (HOSTILE, 1e6, 0.5e6, 2e6, "within noise", None),
            ("few", 2e6, None, None, "inconclusive", None),
        ],
        columns=["name", "delta_ns", "low_ns", "high_ns", "significance", "clock"],
    )
    rows = rows.assign(before_ns=10_000_000, after_ns=10_000_000 + rows["delta_ns"])
    figure = figures.change_intervals(rows, title="A title")
    axes = drawn(figure)
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines if line.get_marker() != "None"}
    assert points == {"changed": [[-4, 0]], "within noise": [[1, 1]], "inconclusive": [[2, 2]]}
    segments = [segment for collection in axes.collections for segment in collection.get_segments()]
    assert sorted((begin[0], end[0]) for begin, end in segments) == [(-5, -3), (0.5, 2), (2, 2)]
    assert "wall (CPU) 10 ms then 6 ms, changed" in figure.get_label()


def test_a_rung_shows_its_bounds_and_its_time():
    rungs = pd.DataFrame({"rung": ["unfused", "fused"], "least_ns": [3e6, 2e6], "lower_ns": [2e6, 2e6]})
    figure = figures.ladder(rungs, {"goal": 4e6}, pd.Series({"unfused": 5e6}), title="A ladder")
    lower, fusing, measured = ([bar.get_width() for bar in part] for part in drawn(figure).containers)
    assert (lower, fusing, measured) == ([2, 2], [1, 0], [5, 0])
    assert "unfused 2 ms to 3 ms at best, 5 ms" in figure.get_label()
    assert "fused 2 ms at best, awaiting a GPU; lines at goal 4 ms" in figure.get_label()
    assert len(drawn(figures.ladder(rungs, {"goal": 4e6}, title="predicted")).containers) == 2


def test_memory_curves_have_lines_points_and_crosses():
    sizes = np.array([64, 128, 256])
    predicted = {"naive": (sizes, sizes**2 * 1e4), HOSTILE: (sizes, sizes * 1e5)}
    measured = {"naive": (sizes[:2], sizes[:2] ** 2 * 1.1e4), HOSTILE: ([], [])}
    figure = figures.memory_curves(predicted, measured, 5e8, {"naive": 256}, title="curves")
    lines = {line.get_marker(): line.get_xydata().tolist() for line in drawn(figure).lines if len(line.get_xdata())}
    assert lines["X"] == [[256, 5e8]]
    assert lines["o"] == [[64, 64**2 * 1.1e4], [128, 128**2 * 1.1e4]]
    assert "out of memory at 256" in figure.get_label()


def test_a_sweep_has_a_panel_a_direction_and_marks_its_ends():
    rows = []
    for direction, factor in (("forward", 1), ("backward", 2)):
        for context in (1024, 2048, 4096):
            rows.append(("naive", "fp32", direction, context, factor * context**2, "ok"))
    table = pd.DataFrame(rows, columns=["implementation", "precision", "direction", "context", "peak_bytes", "status"])
    table.loc[5, ["peak_bytes", "status"]] = [None, "oom"]
    forecast = table.tail(1).assign(largest_context=2900)
    figure = figures.sweep(table, "peak_bytes", limit_bytes=3e7, forecast=forecast, title="A sweep")
    curves = [line.get_ydata().tolist() for line in drawn(figure).lines if line.get_marker() == "."]
    assert curves == [[1024**2, 2048**2, 4096**2]]
    ends = {
        line.get_marker(): line.get_xydata().tolist() for line in figure.axes[1].lines if len(line.get_xdata()) == 1
    }
    assert ends == {"X": [[4096, 3e7]], "|": [[2900, 3e7]]}
    assert "naive, fp32 backward ran out of memory at 4096" in figure.get_label()


def test_waiting_and_transfer_are_as_long_as_they_last():
    """One collective a step; rank 1 comes 2 ms after the others, and the transfer takes 1 ms."""
    frame = pd.DataFrame({"rank": list(range(3)) * 4, "step": np.repeat(range(4), 3)})
    wait = np.where(frame["rank"] == 1, 0, 2_000_000)
    start = 10_000_000 * frame["step"] + 2_000_000 - wait
    frame = frame.assign(collective=frame["step"], start_ns=start, end_ns=start + wait + 1_000_000)
    arrivals = frame.assign(wait_ns=pd.array(wait, "Int64"))
    figure = figures.rank_arrivals(arrivals, title=HOSTILE)
    waits, transfers = drawn(figure).containers
    assert [bar.get_width() for bar in waits] == [2e6, 0, 2e6] * 2
    assert {bar.get_width() for bar in transfers} == {1e6}
    # Steps from the middle, drawn from their first arrival on.
    assert {bar.get_x() for bar in waits} == {0, 2e6, 10e6, 12e6}
    assert "rank 0 8 ms, rank 1 0 ns, rank 2 8 ms" in figure.get_label()
    assert "no collectives" in figures.rank_arrivals(arrivals[:0], title="T").get_label()
