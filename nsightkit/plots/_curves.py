"""Samples: every step as a point."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from nsightkit.plots import style
from nsightkit.plots.looks import duration, spoken, time_unit


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
    series = _series(samples)
    figure, axes = style.new_figure(3.2 + 0.2 * ((len(series) + 1) // 2), title)
    if not series:
        return style.nothing(figure, axes, title, "no steps in this trace")
    longest = max(float(times.max()) for times in series.values())
    size, unit = time_unit(longest)
    sentences = []
    for (label, times), (colour, _), marker in zip(series.items(), cycle(style.LINES), cycle("osD^vP"), strict=False):
        median = float(np.median(times))
        axes.plot(np.arange(len(times)), times / size, marker, color=colour, markersize=5)
        axes.plot(np.arange(len(times)), np.full(len(times), median / size), color=colour)
        # One entry a series, of point and line; drawn nowhere, because a marker on the line would look like a step.
        entry = f"{style.plain(label, 40)}, median {duration(median)}"
        axes.plot([], [], marker, linestyle="-", color=colour, label=entry)
        sentences.append((label, f"median {duration(median)} of {len(times)}"))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel=each, ylabel=f"time ({unit})", ylim=(0, 1.15 * longest / size))
    style.legend(figure, 2)
    return style.described(figure, f"{title}, one point a {each}: {spoken(sentences)}.")


def _series(samples: pd.DataFrame | Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
    """The times that are known, by configuration."""
    if isinstance(samples, pd.DataFrame) and "wall_ns" in samples:
        columns = {"wall time": "wall_ns", "GPU busy": "busy_ns"}
        samples = {label: samples[column] for label, column in columns.items() if column in samples}
    series = {}
    for label, values in samples.items():
        times = pd.to_numeric(pd.Series(np.asarray(values))).dropna().to_numpy(dtype=float)
        if len(times):
            series[str(label)] = times
    return series
