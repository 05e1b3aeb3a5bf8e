"""The rows of a timeline: CPU threads by nesting level, GPU streams, and a device's idle time by its cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from nsightkit.plots.looks import duration, spoken
from nsightkit.safe import plain
from nsightkit.trace.model import GPU_TABLES, Trace
from nsightkit.trace.nesting import nesting

#: In place of a table's name: the time in which a device did nothing.
IDLE = "idle"
_NAME_COLUMN = {"memops": "kind", "graphs": "graph_id", IDLE: "cause"}
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


def outer_lanes(trace: Trace, levels: int) -> Lanes:
    """Find what has room in a small picture: of CPU threads ranges only, or framework ops in a trace without ranges.

    Parameters
    ----------
    trace : Trace
    levels : int
        Nesting levels of a thread.
    """
    return all_lanes(trace, Most(levels), tables=["ranges" if trace.size("ranges") else "ops"])


def all_lanes(
    trace: Trace, most: Most, idle: pd.DataFrame | None = None, *, tables: Iterable[str] = ("ranges", "ops", "calls")
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
    lanes, threads = _cpu_lanes(trace, tables, most)
    gpu, streams = _gpu_lanes(trace, most.streams, len(lanes), idle)
    left_out = ""
    if threads > most.threads or streams > most.streams:
        left_out = f"threads beyond {most.threads} and streams beyond {most.streams}, which had less to do"
    return Lanes(lanes + gpu, left_out)


def in_words(lanes: Sequence[Lane], title: str, length_ns: int) -> str:
    """Describe a picture of lanes: its alternative text.

    Parameters
    ----------
    lanes : sequence of Lane
    title : str
    length_ns : int
        Of the window that is shown.
    """
    if not lanes:
        return f"{title}: no events to draw."
    sizes = [(lane.label, f"{len(lane.start):,} events") for lane in lanes if lane.label]
    return f"{title}, lanes over {duration(length_ns)}: {spoken(sizes)}."


def _cpu_lanes(trace: Trace, tables: Iterable[str], most: Most) -> tuple[list[Lane], int]:
    """Rows of the threads with most time in their outermost events, and how many threads there are."""
    frames = {}
    for table in tables:
        frame = trace.table(table, ["start_ns", "end_ns", "thread", "name"])
        if table == "ranges":
            frame["level"] = trace[table]["level"].to_numpy()
            frame.loc[(trace[table]["kind"] == "startend").to_numpy(), "level"] = -1  # these overlap instead of nesting
        else:
            # Older profilers round to microseconds, so a child can outlive its parent by one.
            frame["level"], _ = nesting(frame["thread"], frame["start_ns"], frame["end_ns"], tolerance=1000)
        frames[table] = frame
    outermost = pd.concat([frame[frame["level"] <= 0] for frame in frames.values()])
    busy_ns = (outermost["end_ns"] - outermost["start_ns"]).groupby(outermost["thread"]).sum()
    lanes: list[Lane] = []
    for thread in busy_ns.nlargest(most.threads).index:
        name = trace.meta.thread_names.get(thread) or f"thread {thread & 0xFFFFFF}"
        for table, frame in frames.items():
            # A driver's call within one of the runtime's adds nothing to the outer one.
            levels = 1 if table == "calls" else most.levels
            label = f"CPU {name}{_SUFFIX[table]}"
            shown = frame[(frame["thread"] == thread) & (frame["level"] < levels)]
            for _, events in shown.groupby("level"):
                lanes.append(_lane(label, table, events, len(lanes)))
                label = ""
    return lanes, len(busy_ns)


def _gpu_lanes(trace: Trace, most: int, row: int, idle: pd.DataFrame | None) -> tuple[list[Lane], int]:
    """Rows of the streams with most time, a lane for each of their tables, and how many streams there are."""
    frames = {}
    for table in GPU_TABLES:
        name = _NAME_COLUMN.get(table, "name")
        frames[table] = trace.table(table, ["start_ns", "end_ns", "device", "stream", name])
    work = pd.concat(frames.values())
    busy_ns = (work["end_ns"] - work["start_ns"]).groupby([work["device"], work["stream"]]).sum()
    shown = busy_ns.nlargest(most).index.sort_values()
    devices = sorted(work["device"].unique())
    lanes: list[Lane] = []
    for device in devices:
        gpu = f"GPU {device}" if len(devices) > 1 else "GPU"
        for stream in [stream for of, stream in shown if of == device]:
            for table, frame in frames.items():
                events = frame[(frame["device"] == device) & (frame["stream"] == stream)]
                if len(events):
                    lanes.append(_lane(f"{gpu} stream {stream}", table, events, row))
            row += 1
        if idle is not None and (idle["device"] == device).any():
            lanes.append(_lane(f"{gpu} idle, by cause", IDLE, idle[idle["device"] == device], row))
            row += 1
    return lanes, len(busy_ns)


def _lane(label: str, table: str, events: pd.DataFrame, row: int) -> Lane:
    names = pd.Categorical(events[_NAME_COLUMN.get(table, "name")]).remove_unused_categories()
    prefix = _PREFIX.get(table)
    if prefix:
        names = names.rename_categories(lambda name: name if name == "memset" else f"{prefix}{name}")
    return Lane(plain(label), table, events["start_ns"].to_numpy(), events["end_ns"].to_numpy(), names, row)
