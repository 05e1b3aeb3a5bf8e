"""Many traces beside each other: durations as boxes, figures as panels, the longest of each as small multiples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike

from nsightkit.plots._curves import time_axis
from nsightkit.plots._style import (
    BLUE,
    CATEGORY_COLOURS,
    DARK_GREY,
    GREY,
    duration,
    name_rows,
    new_figure,
    nothing,
    plain,
    spoken,
    time_unit,
)

_WHISKERS = (5, 25, 50, 75, 95)
_PREFIXES = ("void ", "autograd::engine::evaluate_function: ", "at::native::", "(anonymous namespace)::", "aten::")


def box_plots(samples: Mapping[str, ArrayLike], *, title: str = "How long they last", axis: str = "duration") -> Figure:
    """Distributions of times, one box a series: its middle half, its median, and whiskers at 5 and 95 %.

    Parameters
    ----------
    samples : mapping of str to array of shape (n,)
        Times in nanoseconds by series; those of 0 or less have no place on a logarithmic axis and are left out.
    title : str, default "How long they last"
    axis : str, default "duration"
        What the times are, for the x axis.

    Returns
    -------
    matplotlib.figure.Figure
    """
    values = {label: np.asarray(v, dtype=float) for label, v in samples.items()}
    series = {label: v[v > 0] for label, v in values.items() if (v > 0).any()}
    figure, axes = new_figure(1.2 + 0.36 * max(len(series), 2), title)
    if not series:
        return nothing(figure, axes, title, "no samples")
    boxes = []
    for label, v in series.items():
        low, first, median, third, high = np.percentile(v, _WHISKERS)
        boxes.append(
            {"label": label, "whislo": low, "q1": first, "med": median, "q3": third, "whishi": high, "fliers": []}
        )
    axes.bxp(
        boxes,
        positions=np.arange(len(boxes)),
        orientation="horizontal",
        widths=0.6,
        patch_artist=True,
        manage_ticks=False,
        showfliers=False,
        boxprops={"facecolor": BLUE, "edgecolor": DARK_GREY},
        medianprops={"color": "white", "linewidth": 2},
        whiskerprops={"color": DARK_GREY},
        capprops={"color": DARK_GREY},
    )
    # The extremes as small marks: on some millions of events each outlier as a point would be a solid line.
    for row, v in enumerate(series.values()):
        axes.plot([v.min(), v.max()], [row, row], linestyle="none", marker="|", color=GREY, markersize=6)
    name_rows(axes, series)
    axes.set_xscale("log")
    time_axis(axes, axis, *axes.get_xlim())
    said = [
        (label, f"median {duration(box['med'])}, middle half {duration(box['q1'])} to {duration(box['q3'])}")
        for label, box in zip(series, boxes, strict=True)
    ]
    figure.set_label(f"{title}, box plots of the {axis}: {spoken(said, most=12)}.")
    return figure


def panels(frame: pd.DataFrame, columns: Sequence[str], *, title: str = "Side by side") -> Figure:
    """Several figures of the same things: a row of bars for each thing, a panel for each column.

    Parameters
    ----------
    frame : DataFrame
        One row a thing; its index names it.
    columns : sequence of str
        The columns to draw. Those named ``share…`` are drawn in percent on a scale to at least 100 %, those ending in
        ``_ns`` as times, others as plain numbers. A missing value is drawn as none and said so.
    title : str, default "Side by side"

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, grid = plt.subplots(
        1, max(len(columns), 1), figsize=(7.6, 1.3 + 0.32 * max(len(frame), 2)), layout="constrained", sharey=True,
        squeeze=False,
    )  # fmt: skip
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize="large")
    said = []
    for axes, column in zip(grid[0], columns, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        values = pd.to_numeric(frame[column]).to_numpy(dtype=float)
        words, width, label = _readable(column, values)
        bars = axes.barh(np.arange(len(values)), np.nan_to_num(width), color=BLUE, height=0.66)
        axes.bar_label(bars, words, padding=3, fontsize=8)
        longest = float(np.nanmax(width)) if np.isfinite(width).any() else 0.0
        axes.set_xlim(0, longest * 1.45 or 1)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        if column.startswith("share"):
            axes.xaxis.set_major_formatter(PercentFormatter(1))  # its own decimals: small shares need some
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel(label, fontsize=9)
        said.append((label, "(" + spoken(zip(frame.index, words, strict=True), most=12) + ")"))
    name_rows(grid[0][0], frame.index, 24)
    figure.set_label(f"{title}, bars: {spoken(said)}.")
    return figure


def _readable(column: str, values: Any) -> tuple[list[str], Any, str]:
    """Give the values in words, as widths of bars, and the name of their axis."""
    known = np.isfinite(values)
    if column.endswith("_ns"):
        scale, unit = time_unit(float(np.nanmax(values)) if known.any() else 1.0)
        words = [duration(v) if ok else "none" for v, ok in zip(values, known, strict=True)]
        return words, values / scale, f"{column.removesuffix('_ns').replace('_', ' ')} ({unit})"
    if column.startswith("share"):
        name = column.removeprefix("share of ").removeprefix("share ")
        return [f"{v:.1%}" if ok else "none" for v, ok in zip(values, known, strict=True)], values, name
    words = [
        (f"{v:,.0f}" if abs(v) >= 100 else f"{v:.3g}") if ok else "none" for v, ok in zip(values, known, strict=True)
    ]
    return words, values, column


def small_multiples(
    tables: Mapping[str, pd.DataFrame], *, top: int = 5, columns: int = 2, title: str = "The longest of each"
) -> Figure:
    """One small chart a trace: the names that took most of its time, with one colour a category in all of them.

    Parameters
    ----------
    tables : mapping of str to DataFrame
        Results of :func:`nsightkit.analysis.timeline.kernels.summary`: ``name``, ``category``, ``total_ns``, ``share``.
    top : int, default 5
        Names a chart.
    columns : int, default 2
        Charts a row.
    title : str, default "The longest of each"

    Returns
    -------
    matplotlib.figure.Figure
    """
    shown = {label: table.nlargest(top, "total_ns") for label, table in tables.items() if len(table)}
    rows = -(-max(len(shown), 1) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(7.6, 0.9 + rows * (0.5 + 0.3 * top)), layout="constrained", squeeze=False, sharex=True
    )
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize="large")
    if not shown:
        return nothing(figure, grid[0][0], title, "nothing to draw")
    handles: dict[str, Any] = {}
    for axes, (label, table) in zip(grid.flat, shown.items(), strict=False):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(plain(label, 40), loc="left", fontsize=9)
        kinds = [str(kind) for kind in table["category"]]
        colours = [CATEGORY_COLOURS.get(kind, GREY) for kind in kinds]
        bars = axes.barh(np.arange(len(table)) + 0.26, table["share"], color=colours, height=0.34)
        axes.set_yticks([])
        # Names stand above their bars: beside them they would take the room of the chart, and on them hide it.
        for row, (name, share) in enumerate(zip(table["name"], table["share"], strict=True)):
            axes.annotate(
                f"{share:.0%}  {plain(_short(str(name)), 46)}", (0, row - 0.16), xytext=(3, 0),
                textcoords="offset points", va="center", fontsize=7.5,
            )  # fmt: skip
        axes.set_ylim(-0.5, top - 0.5)
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.tick_params(axis="x", labelsize=8)
        for kind, bar in zip(kinds, bars, strict=True):
            handles.setdefault(kind, bar)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    named = [kind for kind in CATEGORY_COLOURS if kind in handles]
    others = next((bar for kind, bar in handles.items() if kind not in CATEGORY_COLOURS), None)
    figure.legend(
        [handles[kind] for kind in named] + ([] if others is None else [others]),
        [plain(kind) for kind in named] + ([] if others is None else ["other"]),
        loc="outside lower center", ncols=4, frameon=False, fontsize=9,
    )  # fmt: skip
    said = [(label, f"{_short(str(t['name'].iloc[0]))} {t['share'].iloc[0]:.0%}") for label, t in shown.items()]
    figure.set_label(f"{title}, small bar charts; the first of each: {spoken(said, most=12)}.")
    return figure


def _short(name: str) -> str:
    """Drop what all such names begin with: it fills the room in which they differ."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
