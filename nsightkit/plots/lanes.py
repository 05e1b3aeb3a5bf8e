"""The rows of a timeline: CPU threads by nesting level, GPU streams, and a device's idle time by its cause."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from nsightkit.errors import plain
from nsightkit.plots.looks import duration, spoken
from nsightkit.trace.model import Trace, nesting

#: In place of a table's name: the time in which a device did nothing.
IDLE = "idle"
#: What names the events of each table of GPU work.
_NAME_COLUMN = {"kernels": "name", "memops": "kind", "graphs": "graph_id"}
_LABEL_SUFFIX = {"ranges": "", "ops": " ops", "calls": " CUDA calls"}


class RowLimits(NamedTuple):
    """The most rows of a timeline: nesting levels of a thread; streams and threads, of which the busiest have rows."""

    levels: int = 3
    streams: int = 8
    threads: int = 3


class Lane(NamedTuple):
    """Events of one table on a row: ``start_ns``, ``end_ns`` and ``name``."""

    table: str
    events: pd.DataFrame


class Row(NamedTuple):
    """A row with a lane for each table that has events on it; levels below the first of a thread have no label."""

    label: str
    lanes: list[Lane]


class Rows(NamedTuple):
    """Rows of a trace, from the top, and what was left out for want of room, in words."""

    rows: list[Row]
    left_out: str = ""


def outer_rows(trace: Trace, levels: int) -> list[Row]:
    """Find the rows of a small picture: GPU streams, and of CPU threads ranges, or framework ops without ranges.

    Parameters
    ----------
    trace : Trace
    levels : int
        Nesting levels of a thread.
    """
    return all_rows(trace, RowLimits(levels), tables=["ranges" if trace.size("ranges") else "ops"]).rows


def all_rows(
    trace: Trace,
    limits: RowLimits,
    idle: pd.DataFrame | None = None,
    *,
    tables: Iterable[str] = ("ranges", "ops", "calls"),
) -> Rows:
    """Find the rows of a large picture: ranges, framework ops and CUDA calls, GPU work and idle time.

    Parameters
    ----------
    trace : Trace
    limits : RowLimits
    idle : DataFrame, optional
        ``device, start_ns, end_ns, cause`` of gaps.
    tables : iterable of str
        Those of CPU threads: ``ranges``, ``ops``, ``calls``.
    """
    cpu_rows, thread_count = _cpu_rows(trace, tables, limits)
    gpu_rows, stream_count = _gpu_rows(trace, limits.streams, idle)
    left_out = ""
    if thread_count > limits.threads or stream_count > limits.streams:
        left_out = f"threads beyond {limits.threads} and streams beyond {limits.streams}, which had less to do"
    return Rows(cpu_rows + gpu_rows, left_out)


def alternative_text(rows: Sequence[Row], title: str, length_ns: int) -> str:
    """Describe a picture of rows in a sentence.

    Parameters
    ----------
    rows : sequence of Row
    title : str
    length_ns : int
        Of the window that is shown.
    """
    if not rows:
        return f"{title}: no events to draw."
    counts = []
    for row in rows:
        if row.label:  # deeper levels of a thread have none: their events mostly divide those on its first row
            count = sum(len(lane.events) for lane in row.lanes)
            counts.append((row.label, f"{count:,} events"))
    return f"{title}, lanes over {duration(length_ns)}: {spoken(counts)}."


def _cpu_rows(trace: Trace, tables: Iterable[str], limits: RowLimits) -> tuple[list[Row], int]:
    """Rows of the threads with most time in their outermost events, and how many threads there are in all."""
    frames = {}
    for table in tables:
        frame = trace.table(table, ["start_ns", "end_ns", "thread", "name"])
        if table == "ranges":
            nested = trace.table(table, ["level", "kind"])
            # Ranges by start and end overlap instead of nesting: they get level -1, a row of their own.
            frame["level"] = nested["level"].mask(nested["kind"] == "startend", -1)
        else:
            # Older profilers round to microseconds, so a child can outlive its parent by one.
            frame["level"], _ = nesting(frame["thread"], frame["start_ns"], frame["end_ns"], tolerance=1000)
        # A driver's call within one of the runtime's adds nothing to the outer one.
        levels = 1 if table == "calls" else limits.levels
        frames[table] = frame[frame["level"] < levels]
    outermost = pd.concat([frame[frame["level"] <= 0] for frame in frames.values()])
    busy_ns = (outermost["end_ns"] - outermost["start_ns"]).groupby(outermost["thread"]).sum()
    rows: list[Row] = []
    for thread in busy_ns.nlargest(limits.threads).index:
        # The lower 24 bits of an nsys thread are its id in the process, the upper ones the process.
        name = trace.meta.thread_names.get(thread) or f"thread {thread & 0xFFFFFF}"
        name = name.removesuffix(" (python)")  # which every thread of PyTorch's traces has
        for table, frame in frames.items():
            label = plain(f"CPU {name}{_LABEL_SUFFIX[table]}")
            for _, events in frame[frame["thread"] == thread].groupby("level"):
                rows.append(Row(label, [Lane(table, events)]))
                label = ""  # only the first level has one
    return rows, len(busy_ns)


def _gpu_rows(trace: Trace, most_streams: int, idle: pd.DataFrame | None) -> tuple[list[Row], int]:
    """Rows of the streams with most time, and of each device's idle time; and how many streams there are in all."""
    lanes_of_stream: dict[Any, list[Lane]] = {}  # by device and stream
    for table, name_column in _NAME_COLUMN.items():
        columns = ["start_ns", "end_ns", "device", "stream", name_column]
        work = trace.table(table, columns).rename(columns={name_column: "name"})
        for stream, events in work.groupby(["device", "stream"]):
            lanes_of_stream.setdefault(stream, []).append(Lane(table, events))
    shown = heapq.nlargest(most_streams, lanes_of_stream, key=lambda stream: _busy_ns(lanes_of_stream[stream]))
    devices = sorted({device for device, _ in lanes_of_stream})
    rows: list[Row] = []
    for device in devices:
        gpu = "GPU"
        if len(devices) > 1:
            gpu = f"GPU {device}"
        for stream in sorted(shown):
            if stream[0] == device:
                rows.append(Row(f"{gpu} stream {stream[1]}", lanes_of_stream[stream]))
        if idle is not None:
            gaps = idle.loc[idle["device"] == device, ["start_ns", "end_ns", "cause"]]
            if len(gaps):
                rows.append(Row(f"{gpu} idle, by cause", [Lane(IDLE, gaps.rename(columns={"cause": "name"}))]))
    return rows, len(lanes_of_stream)


def _busy_ns(lanes: list[Lane]) -> int:
    """The sum of the durations of all events; time in which several run counts once for each."""
    return sum(int((lane.events["end_ns"] - lane.events["start_ns"]).sum()) for lane in lanes)
