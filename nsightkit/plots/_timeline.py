"""The timeline: streams and threads over time, as a figure, and as a page's element that zooms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from nsightkit.errors import UsageError
from nsightkit.plots import style
from nsightkit.plots.lanes import Rows, alternative_text, outer_rows
from nsightkit.plots.looks import BLUE, DARK_GREY, GREEN, GREY, PURPLE, duration, time_unit
from nsightkit.plots.packing import InteractiveTimeline, items, merged, pack
from nsightkit.trace.model import Trace

#: Of tables of GPU work: label in the legend and colours. Other tables have names and greys.
_GPU_LOOKS = {
    "kernels": ("kernel", (BLUE,)),
    "memops": ("copy or memset", (GREEN,)),
    "graphs": ("CUDA graph", (PURPLE,)),
}

#: Horizontal resolution: neighbours that are shorter than a column are drawn as one mark.
_PIXEL_COLUMNS = 1600
#: Characters of the size of names that fit across the axes, and the most names on a lane.
_CHARACTERS_ACROSS = 78
_MOST_NAMES = 40
#: Half of the height of a lane.
_HALF_HEIGHT = 0.36
#: Lowest mark, as a share of the lane's height: two pixels.
_LOWEST_SHARE = 0.06


def timeline(
    trace: Trace,
    *,
    start_ns: int = 0,
    end_ns: int | None = None,
    levels: int = 3,
    title: str = "Timeline",
) -> Figure:
    """Draw GPU streams and CPU ranges over time.

    Events that are narrower than a column of the figure are drawn together, as high as the share of time that they
    cover: a stream that is half idle looks half idle. The eight streams and the three CPU threads with most time are
    drawn.

    Parameters
    ----------
    trace : Trace
    start_ns, end_ns : int, optional
        The window to draw, nanoseconds on the trace's clock; all of the trace when omitted.
    levels : int, default 3
        How many nesting levels of CPU ranges (or framework ops, in a trace without ranges) to draw a thread.
    title : str, default "Timeline"

    Returns
    -------
    matplotlib.figure.Figure
    """
    rows = outer_rows(trace, levels)
    if not rows:
        figure, axes = style.new_figure(1.6, title)
        return style.draw_nothing(figure, axes, title, "no events to draw")
    if end_ns is None:
        end_ns = max(int(lane.events["end_ns"].max()) for row in rows for lane in row.lanes)
    length_ns = max(end_ns - start_ns, 1)
    figure, axes = style.new_figure(1.3 + 0.34 * max(len(rows), 2), title)
    visible_rows = []
    for number, row in enumerate(rows):
        visible_lanes = []
        for lane in row.lanes:
            events = lane.events[(lane.events["end_ns"] > start_ns) & (lane.events["start_ns"] < start_ns + length_ns)]
            visible_lanes.append(lane._replace(events=events))
            start = (events["start_ns"].to_numpy() - start_ns).clip(0)
            end = (events["end_ns"].to_numpy() - start_ns).clip(max=length_ns)
            # Marks are drawn without names, so any column will do.
            _draw_marks(axes, number, lane.table, items(start, end - start, name=start), length_ns)
            if lane.table not in _GPU_LOOKS:
                _write_names(axes, number, start, end, events["name"].to_numpy(), length_ns)
        visible_rows.append(row._replace(lanes=visible_lanes))
    style.name_rows(axes, [row.label for row in rows], 30)
    scale, unit = time_unit(length_ns)
    since = ""
    if start_ns:
        since = f" since {duration(start_ns)}"
    axes.set_xlabel(f"time{since} ({unit})")
    style.in_unit(axes.xaxis, scale)
    axes.set(xlim=(0, length_ns), ylim=(len(rows) - 0.4, -0.6))
    style.legend(figure, 3)
    return style.described(figure, alternative_text(visible_rows, title, length_ns))


def _draw_marks(axes: Any, row: int, table: str, events: pd.DataFrame, length_ns: int) -> None:
    """Draw the events of a table on a row; `events` as :func:`items` makes them, in ns from the window's start.

    Events shorter than a pixel column are merged into one mark per column, and a mark's height is the share of its
    width in which something ran: half of the row for a stream that is half idle.
    """
    column_ns = max(length_ns // _PIXEL_COLUMNS, 1)
    marks = merged(events, column_ns)
    # At least a column wide and two pixels high: a 2 µs kernel in a 10 s window must not vanish. Not as high as the
    # row: it must not look like a column full of work.
    width_ns = marks["length"].clip(column_ns)
    busy_share = (marks["busy"] / width_ns).clip(_LOWEST_SHARE, 1)
    bottom = row + _HALF_HEIGHT
    # The y axis points down, so a mark's bottom is the larger number.
    top = bottom - 2 * _HALF_HEIGHT * busy_share
    corners: Any = style.rectangles(marks["start"], marks["start"] + width_ns, top, bottom)
    # Two shades of grey in turn for names: adjacent ranges must not read as one.
    legend_label, colours = _GPU_LOOKS.get(table, ("", (GREY, DARK_GREY)))
    axes.add_collection(PolyCollection(corners, facecolors=colours, label=legend_label))


def _write_names(axes: Any, row: int, start: np.ndarray, end: np.ndarray, names: Any, length_ns: int) -> None:
    """Write the names of the longest events into them, where at least four characters fit."""
    room = (end - start) / length_ns * _CHARACTERS_ACROSS  # characters that fit into each event
    for i in np.argsort(-room)[:_MOST_NAMES]:
        if room[i] >= 4:
            # What PyTorch writes before all names of a row would be all that fits.
            name = names[i].removeprefix("aten::").replace("ProfilerStep#", "step ")
            text = style.plain(name, int(room[i]))
            axes.text(
                (start[i] + end[i]) / 2,
                row,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color="white",
                clip_on=True,
            )


def interactive_timeline(
    traces: Mapping[str, Trace], *, levels: int = 3, title: str = "Timeline", most_bytes: int = 250_000
) -> InteractiveTimeline:
    """Make a timeline of GPU streams and CPU ranges, to zoom and pan in a page without any network.

    Several traces lie above each other on one time axis, each from its own start. A stream has a row, and so has a
    nesting level of a thread. Where events are narrower than a pixel, the height of a column is the share of time
    they cover. Where the events do not fit in `most_bytes`, short neighbours are merged, with a note below;
    counts and sums of durations stay exact. Without scripts the page shows a sentence.

    Parameters
    ----------
    traces : mapping of str to Trace
        What to show, by label; a single one needs none (``{"": trace}``).
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
    if not traces:
        raise UsageError("an interactive timeline needs a trace")
    rows = {label: Rows(outer_rows(trace, levels)) for label, trace in traces.items()}
    return pack(rows, title=title, most_bytes=most_bytes)
