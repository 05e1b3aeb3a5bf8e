"""Bars and points: tables of times as pictures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from nsightkit.plots._style import (
    BLUE,
    CAUSE_COLOURS,
    GREEN,
    GREY,
    OCHRE,
    PURPLE,
    RED,
    VERMILION,
    duration,
    first_rows,
    label_bars,
    name_rows,
    new_figure,
    nothing,
    plain,
    spoken,
    time_unit,
)

_SERIES = (BLUE, VERMILION, GREEN, PURPLE, OCHRE, RED)


def gap_bars(gaps: pd.DataFrame, *, title: str = "GPU idle time by cause") -> Figure:
    """Idle time of the GPU by cause.

    Parameters
    ----------
    gaps : DataFrame
        One row a cause with ``cause``, ``count``, ``total_ns`` and ``share_of_span`` (0 to 1), as
        :func:`nsightkit.analysis.timeline.gaps.summary` returns it.
    title : str, default "GPU idle time by cause"

    Returns
    -------
    matplotlib.figure.Figure
    """
    rows = gaps.sort_values("total_ns", ascending=False, kind="stable")
    figure, axes = new_figure(1.2 + 0.36 * max(len(rows), 2), title)
    if rows.empty:
        return nothing(figure, axes, title, "no gaps between GPU operations in this trace")
    scale, unit = time_unit(rows["total_ns"].max())
    labels = [
        f"{duration(total)} · {share:.1%} of span"
        for total, share in zip(rows["total_ns"], rows["share_of_span"], strict=True)
    ]
    colours = [CAUSE_COLOURS.get(cause, GREY) for cause in rows["cause"]]
    bars = axes.barh(np.arange(len(rows)), rows["total_ns"].to_numpy() / scale, color=colours, height=0.68)
    label_bars(axes, bars, labels)
    axes.margins(x=0.5)
    name_rows(axes, rows["cause"])
    axes.set_xlabel(f"idle time ({unit})")
    figure.set_label(f"{title}, horizontal bars: {spoken(zip(rows['cause'], labels, strict=True))}.")
    return figure


def kernel_bars(kernels: pd.DataFrame, *, top: int = 12, title: str = "GPU time by kernel") -> Figure:
    """GPU time of the kernels (or kernel categories) that took most of it.

    Parameters
    ----------
    kernels : DataFrame
        One row a kernel with ``name``, ``total_ns``, ``share`` (0 to 1) and ``count``, and ``category`` where there is
        one, as :func:`nsightkit.analysis.timeline.kernels.summary` returns it.
    top : int, default 12
        How many to draw; the rest becomes one bar.
    title : str, default "GPU time by kernel"

    Returns
    -------
    matplotlib.figure.Figure
    """
    rows = kernels.sort_values("total_ns", ascending=False, kind="stable")
    shown = first_rows(rows, top, "name", ("total_ns", "share", "count"))
    figure, axes = new_figure(1.2 + 0.34 * max(len(shown), 2), title)
    if rows.empty:
        return nothing(figure, axes, title, "no kernels in this trace")
    names = [str(name) for name in shown["name"]]
    groups = [str(group) for group in shown.get("category", shown["name"])]
    if len(rows) > top:
        groups[-1] = ""  # the others
    kinds = [group for group in dict.fromkeys(groups) if group]
    by_category = (
        "category" in rows and len(kinds) > 1 and bool((rows["category"].astype(str) != rows["name"].astype(str)).any())
    )
    palette = dict(zip(kinds, _SERIES, strict=False)) if by_category else dict.fromkeys(kinds, BLUE)
    scale, unit = time_unit(shown["total_ns"].max())
    labels = [f"{share:.1%} · {count:,} runs" for share, count in zip(shown["share"], shown["count"], strict=True)]
    colours = [palette.get(group, GREY) for group in groups]
    bars = axes.barh(np.arange(len(names)), shown["total_ns"].to_numpy() / scale, color=colours, height=0.68)
    label_bars(axes, bars, labels)
    name_rows(axes, names, 40)
    if by_category:
        handles = [bars[groups.index(kind)] for kind in palette]
        words = [plain(kind) for kind in palette]
        axes.legend(handles, words, loc="lower right", frameon=False, fontsize=9, title="category")
    axes.set_xlabel(f"time on the GPU ({unit})")
    figure.set_label(f"{title}, horizontal bars: {spoken(zip(names, labels, strict=True))}.")
    return figure


def before_after(
    before: pd.DataFrame,
    after: pd.DataFrame,
    *,
    key: str = "cause",
    value: str = "total_ns",
    labels: tuple[str, str] = ("before", "after"),
    title: str = "Before and after",
    axis: str = "time",
    top: int = 10,
) -> Figure:
    """Two results beside each other, row by row, to see whether the bottleneck moved.

    Parameters
    ----------
    before, after : DataFrame
        Results of the same analysis, one row a ``key``.
    key : str, default "cause"
        The column that names a row.
    value : str, default "total_ns"
        The column drawn, in nanoseconds.
    labels : tuple of str, default ("before", "after")
    title : str, default "Before and after"
    axis : str, default "time"
        What the times are, for the x axis.
    top : int, default 10
        How many rows, by the larger of the two.

    Returns
    -------
    matplotlib.figure.Figure
    """
    both = pd.DataFrame(
        {
            "before": before.groupby(before[key].astype(str), sort=False)[value].sum(),
            "after": after.groupby(after[key].astype(str), sort=False)[value].sum(),
        }
    ).fillna(0)
    both = both.loc[both.max(axis=1).sort_values(ascending=False, kind="stable").index].head(top)
    figure, axes = new_figure(1.2 + 0.46 * max(len(both), 2), title)
    if both.empty:
        return nothing(figure, axes, title, "nothing to compare")
    scale, unit = time_unit(both.to_numpy().max())
    rows = np.arange(len(both))
    for column, label, offset, colour, hatch in (
        ("before", labels[0], -0.2, VERMILION, None),
        ("after", labels[1], 0.2, BLUE, "//"),  # hatched: told apart without colour
    ):
        bars = axes.barh(
            rows + offset, both[column] / scale, height=0.36, color=colour, label=plain(label), hatch=hatch
        )
        label_bars(axes, bars, [duration(v) for v in both[column]])
    name_rows(axes, both.index)
    axes.set_xlabel(f"{axis} ({unit})")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    pairs = [(name, f"{duration(b)} then {duration(a)}") for name, b, a in both.itertuples()]
    figure.set_label(f"{title}, pairs of bars ({labels[0]}, {labels[1]}): {spoken(pairs)}.")
    return figure


def step_times(
    samples: pd.DataFrame | Mapping[str, ArrayLike], *, title: str = "Step times", unit: str | None = None
) -> Figure:
    """Every step's time as a point, the median as a line: the spread is part of the result.

    Parameters
    ----------
    samples : DataFrame or mapping of str to array of shape (steps,)
        Times in nanoseconds by configuration; or one row a step with ``wall_ns`` (and ``busy_ns``), as
        :func:`nsightkit.analysis.timeline.steps.summary` returns it.
    title : str, default "Step times"
    unit : {"s", "ms", "µs", "ns"}, optional
        Of the y axis; the one that reads well when omitted.

    Returns
    -------
    matplotlib.figure.Figure
    """
    if isinstance(samples, pd.DataFrame) and "wall_ns" in samples:
        named = {"wall time": "wall_ns", "GPU busy": "busy_ns"}
        series = {label: samples[column] for label, column in named.items() if column in samples}
    else:
        series = {str(k): pd.Series(np.asarray(v)) for k, v in samples.items()}
    values = {label: pd.to_numeric(s).dropna().to_numpy(dtype=float) for label, s in series.items()}
    values = {label: v for label, v in values.items() if len(v)}
    figure, axes = new_figure(3.2 + 0.2 * ((len(values) + 1) // 2), title)
    if not values:
        return nothing(figure, axes, title, "no steps in this trace")
    scales = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}
    scale, shown = (scales[unit], unit) if unit else time_unit(max(float(v.max()) for v in values.values()))
    for (label, v), colour, marker in zip(values.items(), _SERIES * len(values), "osD^vP" * len(values), strict=False):
        steps = np.arange(len(v))
        axes.plot(steps, v / scale, marker, color=colour, markersize=5)
        median = float(np.median(v))
        axes.plot(steps, np.full(len(v), median / scale), color=colour)
        # One entry a series, of point and line; drawn nowhere, because a marker on the line would look like a step.
        axes.plot([], [], marker, ls="-", color=colour, label=f"{plain(label, 40)}, median {duration(median)}")
    axes.set_xlabel("step")
    axes.set_ylabel(f"time ({shown})")
    axes.set_ylim(0, 1.15 * max(float(v.max()) for v in values.values()) / scale)
    axes.xaxis.get_major_locator().set_params(integer=True)
    # Below: of several series some points are everywhere.
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    said = [(k, f"median {duration(float(np.median(v)))} of {len(v)} steps") for k, v in values.items()]
    figure.set_label(f"{title}, one point a step: {spoken(said)}.")
    return figure
