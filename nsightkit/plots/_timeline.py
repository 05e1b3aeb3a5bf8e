"""The timeline: streams and threads over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

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
from nsightkit.trace.nesting import nesting

_GPU_KINDS = {"kernels": ("kernel", BLUE), "memops": ("copy or memset", GREEN), "graphs": ("CUDA graph", PURPLE)}
_RANGE_COLOUR = GREY

#: Horizontal resolution; a lane with more events than this is drawn by its coverage of these columns.
_COLUMNS = 1600


class Lane(NamedTuple):
    """Events drawn on one row, which they may share with other lanes; `names` is None where nobody asked for them."""

    label: str
    table: str
    device: int  # -1 for a CPU thread
    start: np.ndarray
    end: np.ndarray
    names: pd.Categorical[str] | None
    row: int


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
        figure, axes = new_figure(1.6)
        axes.set_title(plain(title), loc="left")
        nothing(axes, "no events to draw")
        figure.set_label(f"{title}: no events.")
        return figure
    first = int(min(lane.start.min() for lane in filled)) if start_ns is None else start_ns
    last = int(max(lane.end.max() for lane in filled)) if end_ns is None else end_ns
    last = max(last, first + 1)

    rows = {row: lane.label for lane in reversed(filled) for row in [lane.row]}
    place = {row: i for i, row in enumerate(sorted(rows))}
    figure, axes = new_figure(1.3 + 0.34 * max(len(place), 2))
    axes.set_title(plain(title), loc="left")
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


def find_lanes(
    trace: Trace, levels: int, most_streams: int, most_threads: int, *, detailed: bool = False
) -> list[Lane]:
    """CPU threads by nesting level, then GPU streams: whatever has events.

    Parameters
    ----------
    trace : Trace
    levels, most_streams, most_threads : int
        As in :func:`timeline`.
    detailed : bool, default False
        Also what GPU work is called, a row a thread for the ranges that do not nest, and, in a trace without GPU
        work, the framework ops beside the ranges.

    Returns
    -------
    list of Lane
        In the order of their rows.
    """
    ranged, on_gpu = bool(trace.size("ranges")), any(trace.size(table) for table in _GPU_KINDS)
    lanes: list[Lane] = []
    if ranged:
        lanes += _cpu_lanes(trace, "ranges", levels, most_threads, detailed)
    if not ranged or (detailed and not on_gpu):
        below = 1 + max((lane.row for lane in lanes), default=-1)
        for lane in _cpu_lanes(trace, "ops", levels, most_threads, False):
            label = f"{lane.label} ops" if ranged and lane.label else lane.label
            lanes.append(lane._replace(label=label, row=lane.row + below))
    return [lane for lane in (*lanes, *_gpu_lanes(trace, most_streams, detailed)) if len(lane.start)]


def _gpu_lanes(trace: Trace, most: int, names: bool) -> Iterator[Lane]:
    called = {"kernels": "name", "memops": "kind", "graphs": "graph_id"}
    frames = {}
    for table in _GPU_KINDS:
        if trace.size(table):
            frames[table] = trace.table(
                table, ["start_ns", "end_ns", "device", "stream", *([called[table]] if names else [])]
            )
    if not frames:
        return
    columns = ["start_ns", "end_ns", "device", "stream"]
    everything = pd.concat([frame[columns] for frame in frames.values()], ignore_index=True)
    time = (everything["end_ns"] - everything["start_ns"]).groupby([everything["device"], everything["stream"]]).sum()
    chosen = time.nlargest(most).index.sort_values()
    several = len(time.index.unique(0)) > 1
    for number, (device, stream) in enumerate(chosen):
        label = f"GPU {device} stream {stream}" if several else f"GPU stream {stream}"
        for table, frame in frames.items():
            mine = frame[(frame["device"] == device) & (frame["stream"] == stream)]
            name = _gpu_names(mine[called[table]], table) if names else None
            # CPU lanes come first; 10,000 keeps the streams below any number of them.
            start, end = mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy()
            yield Lane(label, table, int(device), start, end, name, 10_000 + number)


def _gpu_names(column: pd.Series, table: str) -> pd.Categorical[str]:
    values = pd.Categorical(column)
    texts = [str(text) for text in values.categories]
    if table == "memops":
        texts = [text if text == "memset" else f"copy {text}" for text in texts]
    elif table == "graphs":
        texts = [f"CUDA graph {text}" for text in texts]
    return pd.Categorical.from_codes(values.codes, pd.Index(texts, dtype="str"))


def _cpu_lanes(trace: Trace, table: str, levels: int, most: int, start_end: bool) -> Iterator[Lane]:
    if not trace.size(table):
        return
    columns = ["start_ns", "end_ns", "thread", "name"]
    frame = trace.table(table, [*columns, "level", "kind"] if table == "ranges" else columns)
    if table == "ops":
        # Older profilers round to microseconds, so a child can outlive its parent by one.
        level, _ = nesting(frame["thread"], frame["start_ns"], frame["end_ns"], tolerance=1000)
        frame = frame.assign(level=level, kind="pushpop")
    flat = frame["kind"] == "startend"
    nested = frame[~flat]
    outer = nested[nested["level"] == 0] if not (start_end and flat.any()) else frame[(frame["level"] == 0) | flat]
    time = (outer["end_ns"] - outer["start_ns"]).groupby(outer["thread"]).sum()
    row = 0
    for thread in time.nlargest(most).index:
        name = trace.meta.thread_names.get(int(thread)) or f"thread {int(thread) & 0xFFFFFF}"
        mine = nested[nested["thread"] == thread]
        parts = [(f"CPU {name}" if at == 0 else "", mine[mine["level"] == at]) for at in range(levels)]
        if start_end:
            parts.append((f"CPU {name} start/end", frame[flat & (frame["thread"] == thread)]))
        for label, part in parts:
            if len(part):
                start, end = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
                yield Lane(label, table, -1, start, end, pd.Categorical(part["name"]), row)
                row += 1


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
