"""The timeline: streams and threads over time."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nsightkit.plots._lanes import find_lanes
from nsightkit.plots._style import (
    BLUE,
    DARK_GREY,
    GREEN,
    GREY,
    PURPLE,
    duration,
    new_figure,
    nothing,
    plain,
    spoken,
    time_unit,
)
from nsightkit.trace.model import Trace

_GPU_KINDS = {"kernels": ("kernel", BLUE), "memops": ("copy or memset", GREEN), "graphs": ("CUDA graph", PURPLE)}
_RANGE_COLOUR = GREY

#: Horizontal resolution; a lane with more events than this is drawn by its coverage of these columns.
_COLUMNS = 1600


def timeline(
    trace: Trace,
    *,
    start_ns: int | None = None,
    end_ns: int | None = None,
    levels: int = 3,
    most_streams: int = 8,
    most_threads: int = 3,
    title: str = "Timeline",
) -> Figure:
    """GPU streams and CPU ranges over time.

    A lane that holds more events than the figure has columns is drawn by the share of each column that events
    cover, so millions of kernels cost one histogram and a stream that is half idle looks half idle.

    Parameters
    ----------
    trace : Trace
    start_ns, end_ns : int, optional
        The window to draw, nanoseconds on the trace's clock; all of it when omitted.
    levels : int, default 3
        How many nesting levels of CPU ranges (or framework ops, in a trace without ranges) to draw a thread.
    most_streams : int, default 8
        How many GPU streams to draw, the ones with most time.
    most_threads : int, default 3
        How many CPU threads to draw, the ones with most time.
    title : str, default "Timeline"

    Returns
    -------
    matplotlib.figure.Figure
    """
    filled = find_lanes(trace, levels, most_streams, most_threads)
    if not filled:
        return nothing(*new_figure(1.6, title), title, "no events to draw")
    first = int(min(lane.start.min() for lane in filled)) if start_ns is None else start_ns
    last = int(max(lane.end.max() for lane in filled)) if end_ns is None else end_ns
    last = max(last, first + 1)

    rows = {row: lane.label for lane in reversed(filled) for row in [lane.row]}
    place = {row: i for i, row in enumerate(sorted(rows))}
    figure, axes = new_figure(1.3 + 0.34 * max(len(place), 2), title)
    scale, unit = time_unit(last - first)
    used: dict[str, str] = {}
    for lane in filled:
        inside = (lane.end > first) & (lane.start < last)
        start = (np.clip(lane.start[inside], first, last) - first) / scale
        end = (np.clip(lane.end[inside], first, last) - first) / scale
        kind, colour = _GPU_KINDS.get(lane.table, ("", _RANGE_COLOUR))
        _draw(axes, (start, end), place[lane.row], colour, (last - first) / scale)
        if kind:
            used[kind] = colour
        if lane.names is not None:
            _write_names(axes, (start, end), lane.names[inside], place[lane.row], (last - first) / scale)
    axes.set_xlim(0, (last - first) / scale)
    axes.set_ylim(len(place) - 0.4, -0.6)
    axes.set_yticks(list(place.values()), labels=[plain(rows[row], 30) for row in place], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time since {duration(first)} ({unit})" if first else f"time ({unit})")
    if used:
        axes.legend(
            handles=[Patch(color=colour, label=name) for name, colour in used.items()],
            ncols=len(used),
            frameon=False,
            fontsize=9,
            loc="lower right",
            bbox_to_anchor=(1, 1),
        )
    said = [(lane.label, f"{len(lane.start):,} events") for lane in filled if lane.label]
    figure.set_label(f"{title}, lanes over {duration(last - first)}: {spoken(said)}.")
    return figure


def _draw(axes: Any, spans: tuple[np.ndarray, np.ndarray], row: int, colour: str, width: float) -> None:
    start, end = spans
    height = 0.72
    if not len(start):
        return
    if len(start) <= _COLUMNS:
        # At least one column wide: a 2 µs kernel in a 10 s window must not vanish.
        end = np.maximum(end, start + width / _COLUMNS)
        corners = np.empty((len(start), 4, 2))
        corners[:, [0, 3], 0], corners[:, [1, 2], 0] = start[:, None], end[:, None]
        corners[:, :2, 1], corners[:, 2:, 1] = row - height / 2, row + height / 2
        # Two shades of grey in turn: adjacent ranges must not read as one.
        shades = [colour, DARK_GREY] if colour == GREY else [colour]
        axes.add_collection(PolyCollection(list(corners), facecolors=shades, edgecolors="none"))
        return
    share = _coverage(start, end, width)
    edges = np.linspace(0, width, _COLUMNS + 1)
    low = np.repeat(row + height / 2, 2 * _COLUMNS)
    axes.fill_between(
        np.repeat(edges, 2)[1:-1], low, row + height / 2 - height * np.repeat(share, 2), color=colour, linewidth=0
    )


def _coverage(start: np.ndarray, end: np.ndarray, width: float) -> np.ndarray:
    """Share of each column that the union of the intervals covers; overlapping events count once."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    # Each interval's part that no earlier one covers: those parts are disjoint, so their lengths may be added.
    begin = np.maximum(start, np.concatenate([[-np.inf], end[:-1]]))
    begin, end = begin[end > begin], end[end > begin]
    edges = np.linspace(0, width, _COLUMNS + 1)
    covered = np.concatenate([[0.0], np.cumsum(end - begin)])

    def until(x: np.ndarray) -> np.ndarray:
        i = np.searchsorted(begin, x, side="right")
        over = np.where(i > 0, np.maximum(end[np.maximum(i, 1) - 1] - x, 0), 0)
        return np.asarray(covered[i] - over)

    return np.clip(np.diff(until(edges)) / (width / _COLUMNS), 0, 1)


def _write_names(axes: Any, spans: tuple[np.ndarray, np.ndarray], names: Any, row: int, width: float) -> None:
    start, end = spans
    room = (end - start) / width * 78  # characters of size 8 that fit across the axes
    widest = np.argsort(room)[::-1][:40]
    for i in widest[room[widest] >= 4]:
        name = plain(names[i], max(int(room[i]), 2))
        axes.text((start[i] + end[i]) / 2, row, name, ha="center", va="center", fontsize=8, color="white", clip_on=True)
