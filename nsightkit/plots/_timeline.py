"""The timeline: streams and threads over time, as a figure, and as a page's element that zooms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from nsightkit.analysis.core import intervals
from nsightkit.errors import UsageError
from nsightkit.plots import style
from nsightkit.plots.lanes import Lanes, Most, find_lanes
from nsightkit.plots.looks import BLUE, DARK_GREY, GREEN, GREY, PURPLE, duration, spoken, time_unit
from nsightkit.plots.packing import InteractiveTimeline, pack
from nsightkit.plots.style import new_figure, nothing, plain, rectangles
from nsightkit.trace.model import Trace

_KINDS = {"kernels": ("kernel", BLUE), "memops": ("copy or memset", GREEN), "graphs": ("CUDA graph", PURPLE)}

#: Horizontal resolution; a lane with more events than this is drawn by its coverage of these columns.
_COLUMNS = 1600
#: Characters of the size of names that fit across the axes, and the most names on a lane.
_CHARACTERS, _MOST_NAMES = 78, 40
#: Half of the height of a lane.
_HALF = 0.36


def timeline(
    trace: Trace,
    *,
    start_ns: int | None = None,
    end_ns: int | None = None,
    levels: int = 3,
    title: str = "Timeline",
) -> Figure:
    """GPU streams and CPU ranges over time.

    A lane that holds more events than the figure has columns is drawn by the share of each column that events
    cover, so millions of kernels cost one histogram and a stream that is half idle looks half idle. The eight streams
    and the three CPU threads with most time are drawn.

    Parameters
    ----------
    trace : Trace
    start_ns, end_ns : int, optional
        The window to draw, nanoseconds on the trace's clock; all of it when omitted.
    levels : int, default 3
        How many nesting levels of CPU ranges (or framework ops, in a trace without ranges) to draw a thread.
    title : str, default "Timeline"

    Returns
    -------
    matplotlib.figure.Figure
    """
    lanes = find_lanes(trace, Most(levels=levels))
    if not lanes:
        return nothing(*new_figure(1.6, title), title, "no events to draw")
    first = min(int(lane.start.min()) for lane in lanes) if start_ns is None else start_ns
    last = max(int(lane.end.max()) for lane in lanes) if end_ns is None else end_ns
    length_ns = max(last - first, 1)
    scale, unit = time_unit(length_ns)
    labels = {lane.row: plain(lane.label, 30) for lane in lanes}
    figure, axes = new_figure(1.3 + 0.34 * max(len(labels), 2), title)
    kinds: dict[str, str] = {}
    for lane in lanes:
        inside = (lane.end > first) & (lane.start < last)
        edges = np.stack([lane.start[inside], lane.end[inside]]) - first
        start, end = edges.clip(0, length_ns)
        kind, colour = _KINDS.get(lane.table, ("", GREY))
        if len(start) > _COLUMNS:
            _draw_shares(axes, start, end, lane.row, colour, np.linspace(0, length_ns, _COLUMNS + 1), scale)
        elif len(start):
            # At least a column wide: a 2 µs kernel in a 10 s window must not vanish.
            wide_end = np.maximum(end, start + length_ns / _COLUMNS)
            shapes = rectangles(start / scale, wide_end / scale, lane.row - _HALF, lane.row + _HALF)
            # Two shades of grey in turn: adjacent ranges must not read as one.
            shades = [colour] if kind else [GREY, DARK_GREY]
            axes.add_collection(PolyCollection(shapes, facecolors=shades, edgecolors="none"))
        if kind and len(start):
            kinds[kind] = colour
        elif not kind:
            _write_names(axes, start / scale, end / scale, lane.names[inside], lane.row, length_ns / scale)
    axes.set_yticks(list(labels), labels=list(labels.values()), fontsize=9)
    axes.tick_params(axis="y", length=0)
    for kind, colour in kinds.items():
        axes.plot([], [], "s", color=colour, markersize=9, label=kind)  # for the legend alone
    is_late = first > 0.01 * length_ns  # else the difference cannot be seen
    axes.set_xlabel(f"time since {duration(first)} ({unit})" if is_late else f"time ({unit})")
    axes.set(xlim=(0, length_ns / scale), ylim=(max(labels) + 0.6, -0.6))
    sizes = [(lane.label, f"{len(lane.start):,} events") for lane in lanes if lane.label]
    sentence = f"{title}, lanes over {duration(length_ns)}: {spoken(sizes)}."
    style.legend(figure, len(kinds))
    return style.described(figure, sentence)


def _draw_shares(
    axes: Any, start: np.ndarray, end: np.ndarray, row: int, colour: str, columns: np.ndarray, scale: float
) -> None:
    """Draw a lane by the share of each column that events cover."""
    columns = columns.astype(np.int64)
    covered = intervals.Coverage(start, end).of(columns[:-1], columns[1:])
    share = np.repeat(covered / np.maximum(np.diff(columns), 1), 2)
    sides = np.repeat(columns, 2)[1:-1] / scale
    low = row + _HALF
    axes.fill_between(sides, low, low - 2 * _HALF * share, color=colour, linewidth=0)


def _write_names(axes: Any, start: np.ndarray, end: np.ndarray, names: Any, row: int, width: float) -> None:
    """Write the names of the longest events into them."""
    room = (end - start) / width * _CHARACTERS
    for i in np.argsort(-room)[:_MOST_NAMES]:
        if room[i] >= 4:
            middle = (start[i] + end[i]) / 2
            text = plain(names[i], int(room[i]))
            axes.text(middle, row, text, ha="center", va="center", fontsize=8, color="white", clip_on=True)


def interactive_timeline(
    traces: Trace | Mapping[str, Trace],
    *,
    levels: int = 3,
    title: str = "Timeline",
    most_bytes: int = 250_000,
) -> InteractiveTimeline:
    """GPU streams and CPU ranges over time, to zoom and pan in a page without any network.

    Several traces lie above each other on one time axis, each from its own start. A stream has a row, and so has a
    nesting level of a thread. Where events are narrower than a pixel, the height of a column is the share of time
    they cover. Where the events do not fit in `most_bytes`, the shortest neighbours are merged; the page says so, and
    counts and sums of durations stay exact. Without scripts the page shows static figures.

    Parameters
    ----------
    traces : Trace or mapping of str to Trace
        What to show, by label.
    levels : int, default 3
        How many nesting levels of CPU ranges (or framework ops, in a trace without ranges) to show a thread.
    title : str, default "Timeline"
    most_bytes : int, default 250_000
        Size of the packed events in the page. Many traces of many differently named ranges can need more.

    Returns
    -------
    InteractiveTimeline

    Raises
    ------
    UsageError
        No trace.
    """
    several = {"": traces} if isinstance(traces, Trace) else traces
    if not several:
        raise UsageError("an interactive timeline needs a trace")
    lanes = {label: Lanes(find_lanes(trace, Most(levels=levels))) for label, trace in several.items()}
    return pack(lanes, title=title, most_bytes=most_bytes)
