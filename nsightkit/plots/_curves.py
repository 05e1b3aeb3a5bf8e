"""Samples and shares: every step as a point, distributions, and how a share depends on a period."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import ArrayLike

from nsightkit.plots._style import (
    LINES,
    finished,
    name_rows,
    new_figure,
    nothing,
    plain,
    time_axis,
)
from nsightkit.plots.looks import BLUE, DARK_GREY, GREY, duration, spoken, time_unit


def step_times(
    samples: pd.DataFrame | Mapping[str, ArrayLike], *, each: str = "step", title: str = "Step times"
) -> Figure:
    """Every step's time as a point, the median as a line: the spread is part of the result.

    Parameters
    ----------
    samples : DataFrame or mapping of str to array of shape (steps,)
        Times in nanoseconds by configuration; or one row a step with ``wall_ns`` (and ``busy_ns``), as
        :func:`nsightkit.analysis.timeline.steps.summary` returns it.
    each : str, default "step"
        What a sample is of.
    title : str, default "Step times"

    Returns
    -------
    matplotlib.figure.Figure
    """
    if isinstance(samples, pd.DataFrame) and "wall_ns" in samples:
        named = {"wall time": "wall_ns", "GPU busy": "busy_ns"}
        samples = {label: samples[column] for label, column in named.items() if column in samples}
    numbers = {str(k): pd.to_numeric(pd.Series(np.asarray(v))).dropna() for k, v in samples.items()}
    values = {label: v.to_numpy(dtype=float) for label, v in numbers.items() if len(v)}
    figure, axes = new_figure(3.2 + 0.2 * ((len(values) + 1) // 2), title)
    if not values:
        return nothing(figure, axes, title, "no steps in this trace")
    longest = max(float(v.max()) for v in values.values())
    scale, unit = time_unit(longest)
    said = []
    for (label, v), (colour, _), marker in zip(values.items(), cycle(LINES), cycle("osD^vP"), strict=False):
        steps, median = np.arange(len(v)), float(np.median(v))
        axes.plot(steps, v / scale, marker, color=colour, markersize=5)
        axes.plot(steps, np.full(len(v), median / scale), color=colour)
        # One entry a series, of point and line; drawn nowhere, because a marker on the line would look like a step.
        axes.plot([], [], marker, ls="-", color=colour, label=f"{plain(label, 40)}, median {duration(median)}")
        said.append((label, f"median {duration(median)} of {len(v)}"))
    axes.xaxis.get_major_locator().set_params(integer=True)
    return finished(
        figure, axes, f"{title}, one point a {each}: {spoken(said)}.", legend=2, xlabel=each,
        ylabel=f"time ({unit})", ylim=(0, 1.15 * longest / scale),
    )  # fmt: skip


def distributions(samples: Mapping[str, ArrayLike], *, title: str = "How long they last") -> Figure:
    """Cumulative distributions of times: for each time, which share of the samples is at most that long.

    Parameters
    ----------
    samples : mapping of str to array of shape (n,)
        Times in nanoseconds by series; those of 0 or less have no place on a logarithmic axis and are left out.
    title : str, default "How long they last"

    Returns
    -------
    matplotlib.figure.Figure
    """
    series = _positive(samples)
    figure, axes = new_figure(3.6, title)
    if not series:
        return nothing(figure, axes, title, "no samples")
    first, last = min(v[0] for v in series.values()), max(v[-1] for v in series.values())
    said = []
    for (label, v), (colour, line) in zip(series.items(), cycle(LINES[:5]), strict=False):
        # From 0 at the left edge to 1 at the right one, so that a series of equal times is a step and not a dot.
        times = np.concatenate([[first / 1.5], v, [last * 1.5]])
        share = np.concatenate([[0.0], np.arange(1, len(v) + 1) / len(v), [1.0]])
        median = f"median {duration(float(np.median(v)))}"
        axes.step(
            times, share, where="post", color=colour, linestyle=line, linewidth=2,
            label=f"{plain(label, 40)}, {median}",
        )  # fmt: skip
        said.append((label, f"{median} of {len(v):,}"))
    time_axis(axes, "duration", first / 1.5, last * 1.5)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return finished(
        figure, axes, f"{title}, cumulative distributions of the duration: {spoken(said)}.",
        legend=min(len(series), 2), ylabel="share that is at most so long", ylim=(0, 1.03),
    )  # fmt: skip


def _positive(samples: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
    """Keep of each series what a logarithmic axis has a place for, in order, and the series that have any."""
    ordered = {label: np.sort(np.asarray(v, dtype=float)) for label, v in samples.items()}
    return {label: v[v > 0] for label, v in ordered.items() if (v > 0).any()}


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
    series = _positive(samples)
    figure, axes = new_figure(1.2 + 0.36 * max(len(series), 2), title)
    if not series:
        return nothing(figure, axes, title, "no samples")
    named = ("whislo", "q1", "med", "q3", "whishi")
    boxes = [dict(zip(named, np.percentile(v, (5, 25, 50, 75, 95)), strict=True)) for v in series.values()]
    axes.bxp(
        boxes, positions=np.arange(len(boxes)), orientation="horizontal", widths=0.6, patch_artist=True,
        manage_ticks=False, showfliers=False, boxprops={"facecolor": BLUE, "edgecolor": DARK_GREY},
        medianprops={"color": "white", "linewidth": 2}, whiskerprops={"color": DARK_GREY},
        capprops={"color": DARK_GREY},
    )  # fmt: skip
    # The extremes as small marks: on some millions of events each outlier as a point would be a solid line.
    for row, v in enumerate(series.values()):
        axes.plot([v[0], v[-1]], [row, row], linestyle="none", marker="|", color=GREY, markersize=6)
    name_rows(axes, series)
    axes.set_xscale("log")
    time_axis(axes, axis, *axes.get_xlim())
    said = [
        (label, f"median {duration(box['med'])}, middle half {duration(box['q1'])} to {duration(box['q3'])}")
        for label, box in zip(series, boxes, strict=True)
    ]
    return finished(figure, axes, f"{title}, box plots of the {axis}: {spoken(said, most=12)}.")


def share_curves(
    periods_ns: ArrayLike,
    shares: Mapping[str, ArrayLike],
    *,
    levels: Mapping[str, float],
    level: str = "level",
    title: str = "Share by period",
    axis: str = "period",
    share: str = "share",
) -> Figure:
    """Shares as functions of a period, with the levels they should be compared to.

    Parameters
    ----------
    periods_ns : array of shape (n,)
        Nanoseconds, positive and ascending.
    shares : mapping of str to array of shape (n,)
        0 to 1, by series.
    levels : mapping of str to float
        By series, 0 to 1: a thin line of its colour.
    level : str, default "level"
        What these are.
    title : str, default "Share by period"
    axis, share : str
        What the x and the y axis show.

    Returns
    -------
    matplotlib.figure.Figure
    """
    periods = np.asarray(periods_ns, dtype=float)
    figure, axes = new_figure(3.6, title)
    said = []
    for (label, given), (colour, line) in zip(shares.items(), cycle(LINES[:5]), strict=False):
        values = np.asarray(given, float)
        axes.plot(periods, values, color=colour, linestyle=line, linewidth=2, label=plain(label, 60))
        ends = [f"{value:.1%} at {duration(period)}" for value, period in zip(values, periods, strict=True)]
        said.append((label, f"from {ends[0]} to {ends[-1]}"))
        if label in levels:
            said.append((f"{level}, {label}", f"{levels[label]:.1%}"))
            axes.axhline(levels[label], color=colour, linewidth=0.9)
            axes.annotate(
                f"{level} {levels[label]:.1%}", (1, levels[label]), xycoords=("axes fraction", "data"),
                xytext=(0, -4), textcoords="offset points", ha="right", va="top", fontsize=9, color=colour,
            )  # fmt: skip
    time_axis(axes, axis, periods[0], periods[-1])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return finished(
        figure, axes, f"{title}, {share} against the {axis}: {spoken(said)}.", legend=min(len(shares), 2),
        ylabel=share, ylim=(0, 1.05),
    )  # fmt: skip
