"""The rows of a timeline: CPU threads by nesting level, GPU streams, and a device's idle time by its cause."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd

from nsightkit.safe import plain
from nsightkit.trace.model import GPU_TABLES, Trace
from nsightkit.trace.nesting import nesting

#: In place of a table's name: the time in which a device did nothing.
IDLE = "idle"
#: The level of ranges that do not nest, below all others.
_FLAT = 1_000_000
_NAME_COLUMN = {"kernels": "name", "memops": "kind", "graphs": "graph_id", IDLE: "cause"}
_PREFIX = {"memops": "copy ", "graphs": "CUDA graph "}
_SUFFIX = {"ranges": "", "ops": " ops", "calls": " CUDA calls"}


class Most(NamedTuple):
    """How many rows there are at most: nesting levels of a thread; streams and threads, those with most time."""

    levels: int = 3
    streams: int = 8
    threads: int = 3


class Lane(NamedTuple):
    """Events drawn on one row, which they may share with other lanes; row 0 is the topmost."""

    label: str
    table: str
    start: np.ndarray
    end: np.ndarray
    names: pd.Categorical[str]
    row: int


class Lanes(NamedTuple):
    """Rows of a trace, and what was left out for want of room, in words."""

    lanes: list[Lane]
    left_out: str = ""


def find_lanes(trace: Trace, most: Most) -> list[Lane]:
    """Find the ranges of CPU threads (without any, their framework ops) and the work on GPU streams.

    Parameters
    ----------
    trace : Trace
    most : Most

    Returns
    -------
    list of Lane
    """
    table = "ranges" if trace.size("ranges") else "ops"
    return all_lanes(trace, most, tables=[table]).lanes


def all_lanes(
    trace: Trace, most: Most, idle: pd.DataFrame | None = None, *, tables: Iterable[str] = tuple(_SUFFIX)
) -> Lanes:
    """Find everything a thread and a device did: ranges, framework ops and CUDA calls, GPU work and idle time.

    Parameters
    ----------
    trace : Trace
    most : Most
    idle : DataFrame, optional
        ``device, start_ns, end_ns, cause`` of gaps.
    tables : iterable of str
        Those of CPU threads: ``ranges``, ``ops``, ``calls``.

    Returns
    -------
    Lanes
    """
    frames = {table: _with_levels(trace, table) for table in tables if trace.size(table)}
    cpu, threads = _cpu_lanes(trace, frames, most)
    gpu, streams = _gpu_lanes(trace, most.streams, len(cpu), idle)
    notes = []
    hidden = max(threads - most.threads, 0) + max(streams - most.streams, 0)
    if hidden:
        notes.append(f"{hidden:,} more threads and streams, which had less to do")
    for table, frame in frames.items():
        is_cut = frame["level"].between(most.levels, _FLAT - 1).any()
        if is_cut and table != "calls":
            notes.append(f"{table} nested deeper than {most.levels} levels")
    return Lanes(cpu + gpu, "; ".join(notes))


def _with_levels(trace: Trace, table: str) -> pd.DataFrame:
    """Events of CPU threads with their nesting levels."""
    columns = ["start_ns", "end_ns", "thread", "name"]
    if table == "ranges":
        frame = trace.table(table, [*columns, "level", "kind"])
        frame["level"] = frame["level"].astype("int64").where(frame["kind"] != "startend", _FLAT)
    else:
        frame = trace.table(table, columns)
        # Older profilers round to microseconds, so a child can outlive its parent by one.
        frame["level"], _ = nesting(frame["thread"], frame["start_ns"], frame["end_ns"], tolerance=1000)
    return frame


def _cpu_lanes(trace: Trace, frames: dict[str, pd.DataFrame], most: Most) -> tuple[list[Lane], int]:
    """Rows of the threads with most time in their outermost events, and how many threads there are."""
    if not frames:
        return [], 0
    outermost = pd.concat([frame[frame["level"].isin([0, _FLAT])] for frame in frames.values()])
    busy_ns = (outermost["end_ns"] - outermost["start_ns"]).groupby(outermost["thread"]).sum()
    lanes: list[Lane] = []
    for thread in busy_ns.nlargest(most.threads).index:
        name = trace.meta.thread_names.get(int(thread)) or f"thread {int(thread) & 0xFFFFFF}"
        for table, frame in frames.items():
            # A driver's call within one of the runtime's adds nothing to the outer one.
            levels = 1 if table == "calls" else most.levels
            is_shown = (frame["level"] < levels) | (frame["level"] == _FLAT)
            labels = {0: f"CPU {name}{_SUFFIX[table]}", _FLAT: f"CPU {name} start/end"}
            for level, events in frame[is_shown & (frame["thread"] == thread)].groupby("level"):
                label = labels.get(int(str(level)), "")
                lanes.append(_lane(label, table, events, len(lanes)))
    return lanes, len(busy_ns)


def _gpu_lanes(trace: Trace, most: int, row: int, idle: pd.DataFrame | None) -> tuple[list[Lane], int]:
    """Rows of the streams with most time, a lane for each of their tables, and how many streams there are."""
    columns = ["start_ns", "end_ns", "device", "stream"]
    frames = {table: trace.table(table, [*columns, _NAME_COLUMN[table]]) for table in GPU_TABLES if trace.size(table)}
    if not frames:
        return [], 0
    work = pd.concat([frame[columns] for frame in frames.values()])
    busy_ns = (work["end_ns"] - work["start_ns"]).groupby([work["device"], work["stream"]]).sum()
    shown = sorted(busy_ns.nlargest(most).index)
    devices = sorted(work["device"].unique())
    lanes: list[Lane] = []
    for device in devices:
        gpu = f"GPU {device}" if len(devices) > 1 else "GPU"
        for stream in [stream for where, stream in shown if where == device]:
            for table, frame in frames.items():
                events = frame[(frame["device"] == device) & (frame["stream"] == stream)]
                if len(events):
                    lanes.append(_lane(f"{gpu} stream {stream}", table, events, row))
            row += 1
        if idle is not None:
            gaps = idle[idle["device"] == device]
            if len(gaps):
                lanes.append(_lane(f"{gpu} idle, by cause", IDLE, gaps, row))
            row += 1
    return lanes, len(busy_ns)


def _lane(label: str, table: str, events: pd.DataFrame, row: int) -> Lane:
    names = pd.Categorical(events[_NAME_COLUMN.get(table, "name")])
    prefix = _PREFIX.get(table)
    if prefix:
        names = names.rename_categories(lambda name: name if name == "memset" else f"{prefix}{name}")
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    return Lane(plain(label), table, start, end, names, row)
