"""Curves over a logarithmic time axis: how durations are distributed, how a share depends on a period."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter
from numpy.typing import ArrayLike

from nsightkit.plots._style import (
    BLUE,
    GREEN,
    GREY,
    OCHRE,
    PURPLE,
    VERMILION,
    duration,
    new_figure,
    nothing,
    plain,
    spoken,
    time_unit,
)

# Told apart without colour, too.
_STYLES = ((BLUE, "-"), (VERMILION, "--"), (GREEN, "-."), (PURPLE, ":"), (OCHRE, (0, (5, 1, 1, 1, 1, 1))))


def distributions(
    samples: Mapping[str, ArrayLike], *, title: str = "How long they last", axis: str = "duration"
) -> Figure:
    """Cumulative distributions of times: for each time, which share of the samples is at most that long.

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
    sorted_ns = {label: np.sort(np.asarray(v, dtype=float)) for label, v in samples.items()}
    series = {label: v[v > 0] for label, v in sorted_ns.items() if (v > 0).any()}
    figure, axes = new_figure(3.6, title)
    if not series:
        return nothing(figure, axes, title, "no samples")
    first, last = min(v[0] for v in series.values()), max(v[-1] for v in series.values())
    for (label, v), (colour, line) in zip(series.items(), _STYLES * len(series), strict=False):
        # From 0 at the left edge to 1 at the right one, so that a series of equal times is a step and not a dot.
        times = np.concatenate([[first / 1.5], v, [last * 1.5]])
        share = np.concatenate([[0.0], np.arange(1, len(v) + 1) / len(v), [1.0]])
        middle = duration(float(np.median(v)))
        name = f"{plain(label, 40)}, median {middle}"
        axes.step(times, share, where="post", color=colour, linestyle=line, linewidth=2, label=name)
    time_axis(axes, axis, first / 1.5, last * 1.5)
    axes.set_ylabel("share that is at most so long")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylim(0, 1.03)
    _legend(figure, len(series))
    said = [(k, f"median {duration(float(np.median(v)))} of {len(v):,}") for k, v in series.items()]
    figure.set_label(f"{title}, cumulative distributions of the {axis}: {spoken(said)}.")
    return figure


def share_curves(
    periods_ns: ArrayLike,
    shares: Mapping[str, ArrayLike],
    *,
    levels: Mapping[str, float] | None = None,
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
    levels : mapping of str to float, optional
        Horizontal lines, 0 to 1.
    title : str, default "Share by period"
    axis, share : str
        What the x and the y axis show.

    Returns
    -------
    matplotlib.figure.Figure
    """
    periods = np.asarray(periods_ns, dtype=float)
    figure, axes = new_figure(3.6, title)
    for (label, values), (colour, line) in zip(shares.items(), _STYLES * max(len(shares), 1), strict=False):
        axes.plot(periods, np.asarray(values, float), color=colour, linestyle=line, linewidth=2, label=plain(label, 60))
    for label, level in (levels or {}).items():
        axes.axhline(level, color=GREY, linewidth=1.5)
        axes.annotate(
            f"{plain(label, 60)}, {level:.1%}",
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(0, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=9,
        )
    time_axis(axes, axis, periods[0], periods[-1])
    axes.set_ylabel(share)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylim(0, 1.05)
    _legend(figure, len(shares))
    ends = duration(periods[0]), duration(periods[-1])
    said = []
    for label, values in shares.items():
        first, last = np.asarray(values, float)[[0, -1]]
        said.append((label, f"from {first:.1%} at {ends[0]} to {last:.1%} at {ends[1]}"))
    flat = [(k, f"{v:.1%}") for k, v in (levels or {}).items()]
    figure.set_label(f"{title}, {share} against the {axis}: {spoken([*said, *flat])}.")
    return figure


def _legend(figure: Figure, entries: int) -> None:
    # Below the axes: curves leave no corner free that could be relied on. Two columns fit the width with long labels.
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=min(entries, 2))


def time_axis(axes: Any, label: str, first: float, last: float) -> None:
    axes.set_xscale("log")
    axes.set_xlim(first, last)
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0,) if last / first > 100 else (1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ns, _: tick(ns)))
    axes.set_xlabel(label)


def tick(ns: float) -> str:
    scale, unit = time_unit(ns * 1.0000001)  # a decade that floating point puts just below itself
    return f"{ns / scale:g} {unit}"
