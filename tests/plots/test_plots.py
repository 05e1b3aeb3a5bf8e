"""Figures: nothing lost, nothing parsed, readable on light and on dark pages."""

from __future__ import annotations

import re

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from nsightkit import plots
from nsightkit.analysis.roofline.sol import Rates
from nsightkit.plots import looks, packing
from nsightkit.trace.model import Trace

HOSTILE = "void f<$\\frac{1}$>(\x1b[31m 加载 $x^{$\n<script>"
GAPS = pd.DataFrame(
    [("synchronization", 4, 2_000_000, 0.02), (HOSTILE, 1, 1_000, 0.00001), ("input-pipeline", 9, 40_000_000, 0.4)],
    columns=["cause", "count", "total_ns", "share_of_span"],
)
KERNELS = pd.DataFrame({"name": [HOSTILE, *(f"kernel_{i}" for i in range(1, 20))], "category": ["GEMM", HOSTILE] * 10})
KERNELS["count"] = np.arange(20) + 1
KERNELS["total_ns"] = np.arange(20, 0, -1) * 1_000_000
KERNELS["share"] = KERNELS["total_ns"] / KERNELS["total_ns"].sum()
OPERATORS = pd.DataFrame(
    [("matrix", 2e12, 1000.0, 4e6, 0.5), (HOSTILE, 1e9, 0.5, 1e6, np.nan), ("copy", 0, 0.0, 1e6, 0.9)],
    columns=["name", "flops", "intensity", "time_ns", "sol_datasheet"],
)
SHEET = Rates("datasheet", {"bf16": 1000.0, "fp32": 60.0}, 4000.0)
BYTES = pd.Series({"weights": 2e9, HOSTILE: 3e9, "unexplained": -1.0, "logits": 1e3})


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def _trace(count=100):
    rng = np.random.default_rng(3)
    start = np.sort(rng.integers(0, 10_000_000, count))
    kernels = pd.DataFrame({"start_ns": start, "end_ns": start + rng.integers(1, 3000, count)})
    names = ["step", HOSTILE, "backward"]
    ranges = pd.DataFrame({"start_ns": [0, 0, 5_000_000], "end_ns": [10_000_000, 5_000_000, 9_000_000], "name": names})
    frames = {
        "kernels": kernels.assign(stream=rng.integers(7, 9, count)),
        "memops": pd.DataFrame({"start_ns": [0], "end_ns": [500_000], "stream": [13]}),
        "ranges": ranges.assign(thread=5, kind="pushpop", level=[0, 1, 1], parent=[-1, 0, 0]),
    }
    return Trace.from_frames(frames)


def _texts(figure):
    figure.canvas.draw()
    return [text.get_text() for text in figure.findobj(mpl.text.Text)]


def _widths(axes):
    return [[bar.get_width() for bar in bars.patches] for bars in axes.containers]


def _luminance(colour):
    c = np.array(to_rgb(colour))
    return float(np.dot([0.2126, 0.7152, 0.0722], np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)))


@pytest.mark.parametrize("page", ["#ffffff", "#14181e"])
def test_colours_stand_out_from_light_and_dark_pages(page):
    named = [colour for name, colour in vars(looks).items() if name.isupper() and isinstance(colour, str)]
    for colour in (*named, *packing.COLOURS.values()):
        light, dark = sorted([_luminance(colour), _luminance(page)], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, colour  # WCAG 1.4.11, graphical objects


@pytest.mark.parametrize(
    ("draw", "arguments", "nothing"),
    [
        (plots.bars, (GAPS,), (GAPS[:0],)),
        (plots.bars, (KERNELS,), (KERNELS[:0],)),
        (plots.step_times, ({HOSTILE: [1.0, 2.0]},), ({},)),
        (plots.timeline, (_trace(),), (Trace.from_frames({}),)),
        (plots.stacks, ({HOSTILE: BYTES},), ({"a": BYTES[:0]},)),
        (plots.roofline, (OPERATORS, [SHEET], "bf16"), (OPERATORS[:0], [SHEET], "bf16")),
    ],
)
def test_hostile_names_are_text_and_nothing_to_draw_is_said(draw, arguments, nothing):
    figure = draw(*arguments, title=HOSTILE)
    assert "\n" not in "".join(_texts(figure))  # and neither mathtext nor a missing glyph raised
    assert figure.get_label().startswith(HOSTILE)
    assert re.search(r"\bno\b|nothing", draw(*nothing, title="T").get_label())


def test_bars_draw_every_row_and_lose_no_time():
    figure = plots.bars(GAPS)
    (axes,) = figure.axes
    assert _widths(axes) == [[40], [2], [0.001]]
    assert axes.get_xlabel() == "time (ms)"
    assert "waiting for data 40 ms · 40.0% · 9x" in figure.get_label()
    assert not figure.legends
    figure = plots.bars(KERNELS, top=5)
    assert np.concatenate(_widths(figure.axes[0])).sum() * 1e6 == pytest.approx(KERNELS["total_ns"].sum())
    assert "15 others" in _texts(figure)


def test_stacks_align_parts_by_name():
    gaps_ns = GAPS.set_index("cause")["total_ns"]
    figure = plots.stacks({"a": gaps_ns, "b": pd.Series({"input-pipeline": 7_000_000})}, quantity="time")
    assert _widths(figure.axes[0]) == [[2, 0], [40, 7]]  # what is too small to see is left out
    assert "b (waiting for data 7 ms)" in figure.get_label()


def test_timeline_has_a_lane_a_stream_and_a_level():
    axes = plots.timeline(_trace()).axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["CPU thread 5", "", "GPU stream 7", "GPU stream 8", "GPU stream 13"]
    figure = plots.timeline(_trace(), start_ns=2_000_000, end_ns=4_000_000)
    assert "GPU stream 13 0 events" in figure.get_label()
    (axes,) = figure.axes
    assert axes.get_xlim() == (0, 2_000_000)
    assert min(path.vertices[:, 0].min() for drawn in axes.collections for path in drawn.get_paths()) >= 0


@pytest.mark.parametrize("window", [(0, 96_000), (10_000, 58_000)])
def test_many_events_are_few_shapes_as_large_as_the_time_they_cover(window):
    start = np.arange(0, 96_000, 4)
    kernels = pd.DataFrame({"start_ns": start, "end_ns": start + 2, "name": "k"})
    figure = plots.timeline(Trace.from_frames({"kernels": kernels}), start_ns=window[0], end_ns=window[1])
    (drawn,) = figure.axes[0].findobj(PolyCollection)
    corners = [path.vertices for path in drawn.get_paths()]
    assert len(corners) < 1700
    area = sum(np.ptp(shape[:, 0]) * np.ptp(shape[:, 1]) for shape in corners)
    assert area == pytest.approx(0.72 * 0.5 * (window[1] - window[0]), rel=0.08)


def test_tables_write_and_escape_every_cell_and_heading():
    frame = pd.DataFrame(
        {
            "<b>": ["<img src=x onerror=alert(1)>", "k<float, 4>"],
            "total_ns": [1234567, 2],
            "share": [0.25, None],
            "fits": pd.array([True, None], "boolean"),
            "value": [1.23456, 2e-6],
            "rounded": [1.23456, 2.0],
            "nested": [["<i>", 2], None],
        }
    )
    shown = plots.table(frame, {"rounded": "{:.1f}"})._repr_html_()
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t", shown)
    head = ["&lt;b&gt;", "total", "share", "fits", "value", "rounded", "nested"]
    first = ["&lt;img src=x onerror=alert(1)&gt;", "1.235 ms", "25.0%", "yes", "1.235", "1.2", "&lt;i&gt;; 2"]
    assert cells == [*head, *first, "k&lt;float, 4&gt;", "2 ns", "-", "-", "2e-06", "2.0", "-"]
    assert "<i>" not in plots.table(frame, dict.fromkeys(frame, lambda _: "<i>"), missing="<i>")._repr_html_()


def test_stacks_divide_each_whole_and_leave_out_what_was_not_measured():
    columns = {
        HOSTILE: pd.Series({"forward": 1, "optimizer": 2, HOSTILE: 1}),
        "time": pd.Series({"optimizer": 3.0, "(unattributed)": 1.0}),
        "GPU": pd.Series({"forward": pd.NA}, dtype="Int64"),
    }
    figure = plots.stacks(columns)
    (axes,) = figure.axes
    np.testing.assert_allclose(_widths(axes), [[0.25, 0], [0.5, 0.75], [0.25, 0], [0, 0.25]])
    assert {"25%", "50%", "75%", "(unattributed)"} <= set(_texts(figure))
    assert "optimizer 75%, (unattributed) 25%" in figure.get_label()


def test_panels_say_what_is_missing():
    columns = {"step_ns": [1e6, 2.5e6], "share of idle": [None, 0.25], "TFLOP/s": [123456.0, 0.5]}
    figure = plots.panels(pd.DataFrame(columns, index=["a", HOSTILE]), list(columns))
    assert [axes.get_xlabel() for axes in figure.axes] == ["step (ms)", "share of idle", "TFLOP/s"]
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert texts == [["1 ms", "2.5 ms"], ["n/a", "25.0%"], ["123,456", "0.5"]]
    assert _widths(figure.axes[0]) == [[1.0, 2.5]]
    assert "share of idle (a n/a" in figure.get_label()


@pytest.mark.parametrize("speedups", [[0.8, 0.5], [1.5, 0.5], []])
def test_panels_hold_their_bars(speedups):
    (axes,) = plots.panels(pd.DataFrame({"speedup": speedups}), ["speedup"]).axes
    left, right = axes.get_xlim()
    assert left <= axes.dataLim.x0
    assert axes.dataLim.x1 <= right


def test_roofline_points_and_roofs():
    figure = plots.roofline(OPERATORS, [SHEET, Rates("other", {"fp32": 1.0}, 1.0)], "bf16")
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert lines["datasheet: 1,000 TFLOP/s, 4,000 GB/s"] == [[0.25, 1.0], [250.0, 1000.0], [3000.0, 1000.0]]
    assert lines["matrix, 50%"] == [[1000.0, 500.0]]
    assert len(lines) == 3  # a copy has no FLOPs
    assert "matrix 500 TFLOP/s" in figure.get_label()
