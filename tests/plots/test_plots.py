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
from nsightkit.plots import looks
from nsightkit.trace.model import Trace

HOSTILE = "void f<$\\frac{1}$>(\x1b[31m 加载 $x^{$\n<script>"


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


@pytest.fixture
def gaps():
    return pd.DataFrame(
        {
            "cause": ["synchronization", HOSTILE, "input-pipeline"],
            "count": [4, 1, 9],
            "total_ns": [2_000_000, 1_000, 40_000_000],
            "share_of_span": [0.02, 0.00001, 0.4],
        }
    )


@pytest.fixture
def kernels():
    n = 20
    total = np.arange(n, 0, -1) * 1_000_000
    return pd.DataFrame(
        {
            "name": [HOSTILE, *(f"kernel_{i}" for i in range(1, n))],
            "category": (["GEMM", "softmax", HOSTILE, "other"] * n)[:n],
            "count": np.arange(n) + 1,
            "total_ns": total,
            "share": total / total.sum(),
        }
    )


def _trace(n_kernels=100):
    rng = np.random.default_rng(3)
    start = np.sort(rng.integers(0, 10_000_000, n_kernels))
    kernels = pd.DataFrame(
        {"start_ns": start, "end_ns": start + rng.integers(1, 3000, n_kernels), "stream": rng.integers(7, 9, n_kernels)}
    )
    memops = pd.DataFrame({"start_ns": [0], "end_ns": [500_000], "stream": [13]})
    ranges = pd.DataFrame(
        {
            "start_ns": [0, 0, 5_000_000],
            "end_ns": [10_000_000, 5_000_000, 9_000_000],
            "thread": 5,
            "name": ["step", HOSTILE, "backward"],
            "kind": "pushpop",
            "level": [0, 1, 1],
            "parent": [-1, 0, 0],
        }
    )
    return Trace.from_frames({"kernels": kernels, "memops": memops, "ranges": ranges})


def _draw(figure):
    figure.canvas.draw()
    return [t.get_text() for t in figure.findobj(mpl.text.Text)]


def _luminance(colour):
    c = np.array(to_rgb(colour))
    return float(np.dot([0.2126, 0.7152, 0.0722], np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)))


@pytest.mark.parametrize("page", ["#ffffff", "#14181e"])
@pytest.mark.parametrize(
    "colour", sorted({v for k, v in vars(looks).items() if k.isupper() and isinstance(v, str) and v[0] == "#"})
)
def test_colours_stand_out_from_light_and_dark_pages(colour, page):
    light, dark = sorted([_luminance(colour), _luminance(page)], reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3  # WCAG 1.4.11, graphical objects


def test_bars_draw_every_cause(gaps):
    figure = plots.bars(gaps)
    _draw(figure)
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [40, 2, 0.001]
    assert axes.get_xlabel() == "time (ms)"
    assert "input-pipeline 40.0 ms · 40.0% · 9x" in figure.get_label()


def test_bars_lose_no_time(kernels):
    figure = plots.bars(kernels, top=5)
    texts = _draw(figure)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert len(widths) == 6
    assert sum(widths) * 1e6 == pytest.approx(kernels["total_ns"].sum())
    assert "15 others" in texts


def test_before_after_aligns_rows_by_name(gaps):
    after = gaps.iloc[[2]].assign(total_ns=7_000_000)
    figure = plots.before_after(gaps, after, labels=("a", "b"))
    _draw(figure)
    axes = figure.axes[0]
    before_bars, after_bars = (c for c in axes.containers if hasattr(c, "patches"))
    assert [b.get_width() for b in before_bars] == [40, 2, 0.001]
    assert [b.get_width() for b in after_bars] == [7, 0, 0]
    assert "input-pipeline 40.0 ms then 7.00 ms" in figure.get_label()


@pytest.mark.parametrize(
    "samples",
    [{"a": [1e6, 2e6, 9e6], "b": [1e6]}, pd.DataFrame({"wall_ns": [1e6, 2e6, 9e6]})],
    ids=["mapping", "frame"],
)
def test_step_times_draw_every_sample(samples):
    figure = plots.step_times(samples)
    _draw(figure)
    points = figure.axes[0].lines[0]
    np.testing.assert_array_equal(points.get_ydata(), [1, 2, 9])
    assert "median 2.00 ms" in figure.get_label()


@pytest.mark.parametrize("figure", ["bars of gaps", "bars of kernels", "before_after", "timeline", "step_times"])
def test_hostile_names_are_drawn_as_text(figure, gaps, kernels):
    made = {
        "bars of gaps": lambda: plots.bars(gaps, title=HOSTILE),
        "bars of kernels": lambda: plots.bars(kernels, title=HOSTILE),
        "before_after": lambda: plots.before_after(gaps, gaps, labels=(HOSTILE, HOSTILE), title=HOSTILE),
        "timeline": lambda: plots.timeline(_trace(), title=HOSTILE),
        "step_times": lambda: plots.step_times({HOSTILE: [1.0, 2.0]}, title=HOSTILE),
    }[figure]()
    assert "\n" not in "".join(_draw(made))  # and neither mathtext nor a missing glyph raised


@pytest.mark.parametrize(
    "make",
    [
        lambda: plots.bars(pd.DataFrame(columns=["cause", "count", "total_ns", "share_of_span"])),
        lambda: plots.bars(pd.DataFrame(columns=["name", "category", "count", "total_ns", "share"])),
        lambda: plots.before_after(*2 * [pd.DataFrame(columns=["cause", "total_ns"])]),
        lambda: plots.step_times(pd.DataFrame(columns=["wall_ns", "busy_ns"])),
        lambda: plots.timeline(Trace.from_frames({})),
    ],
    ids=["bars of gaps", "bars of kernels", "before_after", "step_times", "timeline"],
)
def test_nothing_to_draw_is_said(make):
    figure = make()
    _draw(figure)
    assert figure.get_label()
    assert any("no" in t.get_text() for t in figure.axes[0].texts)


def test_timeline_has_a_lane_a_stream_and_a_level():
    figure = plots.timeline(_trace())
    _draw(figure)
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels == ["CPU thread 5", "", "GPU stream 7", "GPU stream 8", "GPU stream 13"]


def test_timeline_draws_only_the_window():
    figure = plots.timeline(_trace(), start_ns=2_000_000, end_ns=4_000_000)
    _draw(figure)
    assert figure.axes[0].get_xlim() == (0, 2)
    for collection in figure.axes[0].collections:
        corners = np.concatenate([p.vertices[:, 0] for p in collection.get_paths()])
        assert corners.min() >= 0


def test_timeline_of_a_big_trace_draws_few_shapes():
    figure = plots.timeline(_trace(300_000))
    _draw(figure)
    shapes = sum(len(c.get_paths()) for c in figure.axes[0].collections if isinstance(c, PolyCollection))
    assert shapes < 5000


@pytest.mark.parametrize("window", [(0, 96_000), (10_000, 58_000)])
def test_a_lane_of_many_events_counts_overlaps_once(window):
    rng = np.random.default_rng(1)
    start = np.sort(rng.integers(0, 90_000, 9000))
    end = start + rng.integers(0, 60, 9000)
    ticks = np.zeros(96_000, bool)  # one a unit of time
    for s, e in zip(start, end, strict=True):
        ticks[s:e] = True
    kernels = pd.DataFrame({"start_ns": start, "end_ns": end, "device": 0, "stream": 7, "name": "k"})
    figure = plots.timeline(
        Trace.from_frames({"kernels": kernels}), start_ns=window[0] - start[0], end_ns=window[1] - start[0]
    )
    (drawn,) = figure.axes[0].collections
    (path,) = drawn.get_paths()
    x, y = path.vertices[:-1].T
    area = abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
    assert area == pytest.approx(0.72 * ticks[window[0] : window[1]].sum() / 1e3, rel=1e-6)


def test_inputs_are_left_alone(gaps, kernels):
    before = gaps.copy(), kernels.copy()
    plots.bars(gaps)
    plots.bars(kernels)
    plots.before_after(gaps, gaps)
    pd.testing.assert_frame_equal(gaps, before[0])
    pd.testing.assert_frame_equal(kernels, before[1])


def test_tables_say_yes_and_no():
    frame = pd.DataFrame({"fits": [True, False], "known": pd.array([True, None], dtype="boolean")})
    html = plots.table(frame).to_html()
    assert re.findall(r">([^<>\s]+)</td>", html) == ["yes", "yes", "no", "-"]


def test_tables_escape_names_whatever_their_format():
    hostile = "<img src=x onerror=alert(1)>"
    frame = pd.DataFrame({"name": [hostile, "void k<float, 4>(T1)"], "total_ns": [1234567, 2], "share": [0.25, None]})
    html = plots.table(frame).to_html() + plots.table(frame, {"name": "{}"}).to_html()
    assert "<img" not in html
    assert "k&lt;float, 4&gt;" in html
    assert "1,234,567" in html
    assert "25.0%" in html
    assert ">-<" in html


def test_share_bars_divide_each_whole_and_leave_out_what_was_not_measured():
    columns = {
        HOSTILE: pd.Series({"forward": 1, "backward": 2, HOSTILE: 1}),
        "time": pd.Series({"backward": 3.0, "(unattributed)": 1.0}),
        "GPU": pd.Series({"forward": pd.NA}, dtype="Int64"),
    }
    figure = plots.share_bars(columns, title=HOSTILE)
    texts = _draw(figure)
    axes = figure.axes[0]
    widths = np.array([[bar.get_width() for bar in part.patches] for part in axes.containers])
    np.testing.assert_allclose(widths, [[0.25, 0], [0.5, 0.75], [0.25, 0], [0, 0.25]])
    assert len(axes.get_yticks()) == 2
    assert {"25%", "50%", "75%", "(unattributed)"} <= set(texts)
    assert "backward 75%, (unattributed) 25%" in figure.get_label()


def test_phases_of_a_step_differ_in_colour_though_one_is_named_like_a_kind_of_work():
    phases = pd.Series({"forward": 3, "backward": 6, "optimizer": 1, "(unattributed)": 1})
    figure = plots.share_bars({"CPU": phases})
    assert len({bar.get_facecolor() for bar in figure.axes[0].patches}) == len(phases)


def test_share_bars_of_nothing_say_so():
    assert "nothing to divide in this trace" in _draw(plots.share_bars({"GPU": pd.Series({"a": 0})}))


def test_panels_say_what_is_missing():
    frame = pd.DataFrame(
        {"step_ns": [1e6, 2.5e6], "share of idle": [None, 0.25], "TFLOP/s": [123456.0, 0.5]}, index=["a", HOSTILE]
    )
    figure = plots.panels(frame, list(frame.columns), title="T")
    assert [axes.get_xlabel() for axes in figure.axes] == ["step (ms)", "share of idle", "TFLOP/s"]
    texts = [[t.get_text() for t in axes.texts] for axes in figure.axes]
    assert texts == [["1.00 ms", "2.50 ms"], ["none", "25.0%"], ["123,456", "0.5"]]
    widths = [[bar.get_width() for bar in axes.patches] for axes in figure.axes]
    assert widths[0] == [1.0, 2.5]
    assert "share of idle (a none" in figure.get_label()
    figure.canvas.draw()


def test_roofline_points_and_roofs():
    from nsightkit.analysis.roofline.sol import Rates

    table = pd.DataFrame(
        {
            "name": ["matrix", HOSTILE, "copy"],
            "flops": [2e12, 1e9, 0],
            "intensity": [1000.0, 0.5, 0.0],
            "time_ns": [4e6, 1e6, 1e6],
            "sol_datasheet": [0.5, np.nan, 0.9],
        }
    )
    sheet, measured = Rates("datasheet", {"bf16": 1000.0}, 4000.0), Rates("measured", {"bf16": 800.0}, 3500.0)
    figure = plots.roofline(table, [sheet, measured, Rates("no such unit", {"fp32": 1.0}, 1.0)], "bf16", title="R")
    lines = figure.axes[0].lines
    roofs = [line for line in lines if line.get_linestyle() != "None" and len(line.get_xdata()) > 1]
    assert [line.get_ydata().max() for line in roofs] == [1000, 800]
    x, y = (np.asarray(f(), float) for f in (roofs[0].get_xdata, roofs[0].get_ydata))
    slope = x < 250
    np.testing.assert_allclose(y[slope] / x[slope], 4.0)  # 4000 GB/s
    points = {line.get_label(): line for line in lines if line.get_linestyle() == "None"}
    assert points["matrix, 50%"].get_xydata().tolist() == [[1000.0, 500.0]]
    assert len(points) == 2  # a copy has no FLOPs
    assert "datasheet (1,000 TFLOP/s, 4,000 GB/s)" in figure.get_label()
    figure.canvas.draw()
    assert "no operations" in plots.roofline(table.head(0), [sheet], "bf16").get_label()
    # Every operation is there, a few of them by name; lower ceilings begin where the memory's roof passes them.
    many = pd.concat([table, table.assign(name="again", time_ns=1e5)] * 3, ignore_index=True)
    many.loc[0, "intensity"] = np.nan  # of unknown bytes
    low = Rates("datasheet", {"bf16": 1000.0, "fp32": 60.0}, 4000.0)
    figure = plots.roofline(many, [low], "bf16", lower=("fp32", "fp8"), top=4)
    named = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    (others,) = [line for line in named if line.get_label() == "7 shorter ones"]
    assert len(others.get_xdata()) == 7
    assert len(named) == 4 + 1
    (ceiling,) = [line for line in figure.axes[0].lines if list(line.get_ydata()) == [60.0, 60.0]]
    assert ceiling.get_xdata()[0] == 15
    assert "; 7 more" in figure.get_label()
    figure.canvas.draw()
