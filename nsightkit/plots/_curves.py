"""Samples: every step as a point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.figure import Figure

from nsightkit.plots import style
from nsightkit.plots.looks import duration, spoken, time_unit


def step_times(samples: Mapping[str, Sequence[float]], *, each: str = "step", title: str = "Step times") -> Figure:
    """Draw every step's time as a point and the median as a line, since the spread is part of the result.

    Parameters
    ----------
    samples : mapping of str to sequence of float
        Times in nanoseconds by configuration.
    each : str, default "step"
        What a sample is of.
    title : str, default "Step times"

    Returns
    -------
    matplotlib.figure.Figure
    """
    series = {label: np.asarray(values, dtype=float) for label, values in samples.items() if len(values)}
    figure, axes = style.new_figure(3.2 + 0.1 * len(series), title)
    if not series:
        return style.draw_nothing(figure, axes, title, "no steps in this trace")
    longest_ns = max(times.max() for times in series.values())
    unit_ns, unit = time_unit(longest_ns)
    sentences = []
    for (label, times), colour, marker in zip(series.items(), cycle(style.SERIES), cycle("osD^vP"), strict=False):
        median_ns = float(np.median(times))
        legend_entry = f"{style.plain(label, 40)}, median {duration(median_ns)}"
        axes.plot(times / unit_ns, marker, color=colour, markersize=5, label=legend_entry)
        axes.plot([0, len(times) - 1], [median_ns / unit_ns] * 2, color=colour)
        sentences.append((label, f"median {duration(median_ns)} of {len(times)}"))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel=each, ylabel=f"time ({unit})", ylim=(0, 1.15 * longest_ns / unit_ns))
    style.legend(figure, 2)
    return style.described(figure, f"{title}, one point a {each}: {spoken(sentences)}.")
