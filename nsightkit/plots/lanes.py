"""What a timeline has rows for: CPU threads by nesting level, GPU streams, and what a device did not do."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from nsightkit.safe import plain
from nsightkit.trace.model import GPU_TABLES, Trace
from nsightkit.trace.nesting import nesting

#: In place of a table's name: what a device did not do.
IDLE = "idle"
#: The level of ranges that do not nest, below all others.
_FLAT = 1_000_000
_CALLED = {"kernels": "name", "memops": "kind", "graphs": "graph_id"}


class Most(NamedTuple):
    """How many rows there are at most: nesting levels of a thread; streams and threads, those with most time."""

    levels: int = 3
    streams: int = 8
    threads: int = 3


class Lane(NamedTuple):
    """Events drawn on one row, which they may share with other lanes; rows go from the smallest number down."""

    label: str
    table: str
    device: int  # -1 for a CPU thread
    start: np.ndarray
    end: np.ndarray
    names: pd.Categorical[str]
    row: float


class Lanes(NamedTuple):
    """Rows of a trace, and what was left out for want of room, in words."""

    lanes: list[Lane]
    left_out: str = ""


def find_lanes(trace: Trace, most: Most, *, detailed: bool = False) -> list[Lane]:
    """CPU threads by nesting level of their ranges (without any, of their framework ops), then GPU streams.

    Parameters
    ----------
    trace : Trace
    most : Most
    detailed : bool, default False
        Also a row a thread for the ranges that do not nest, and, in a trace without GPU work, the framework ops below
        the ranges.

    Returns
    -------
    list of Lane
    """
    gpu, _ = _gpu_lanes(trace, most.streams)
    lanes, _ = _cpu_lanes(_frames(trace, {"ranges": ""}, detailed), trace, most)
    if not trace.size("ranges") or (detailed and not gpu):
        ops, _ = _cpu_lanes(_frames(trace, {"ops": " ops" if lanes else ""}, False), trace, most)
        lanes += [lane._replace(row=lane.row + len(lanes)) for lane in ops]
    return lanes + gpu


def all_lanes(trace: Trace, most: Most, idle: pd.DataFrame) -> Lanes:
    """Find everything a thread and a device did: ranges, framework ops and CUDA calls, GPU work and idle time.

    Parameters
    ----------
    trace : Trace
    most : Most
    idle : DataFrame
        ``device, start_ns, end_ns, cause`` of gaps.

    Returns
    -------
    Lanes
    """
    frames = _frames(trace, {"ranges": "", "ops": " ops", "calls": " CUDA calls"}, True)
    lanes, threads = _cpu_lanes(frames, trace, most)
    gpu, streams = _gpu_lanes(trace, most.streams)
    several = len({lane.device for lane in gpu}) > 1
    for device, mine in idle.groupby("device"):
        label = f"GPU {device} idle, by cause" if several else "GPU idle, by cause"
        below = max((lane.row for lane in gpu if lane.device == device), default=_FLAT) + 0.5
        gpu.append(_lane(label, IDLE, int(str(device)), mine, mine["cause"].astype(str), below))
    hidden = [
        f"{count - shown:,} more {what}"
        for count, shown, what in ((threads, most.threads, "threads"), (streams, most.streams, "streams"))
        if count > shown
    ]
    said = [f"{' and '.join(hidden)}, which had less to do"] if hidden else []
    if any(f["level"].between(most.levels, _FLAT - 1).any() for (table, _), f in frames.items() if table != "calls"):
        said.append(f"what is nested deeper than {most.levels} levels")
    return Lanes(sorted(lanes + gpu, key=lambda lane: lane.row), "; ".join(said))


def _frames(trace: Trace, suffixes: dict[str, str], flat: bool) -> dict[tuple[str, str], pd.DataFrame]:
    """Events of CPU threads with their nesting levels, by table and what is added to a thread's label."""
    frames = {}
    for table, suffix in suffixes.items():
        if not trace.size(table):
            continue
        columns = ["start_ns", "end_ns", "thread", "name"]
        frame = trace.table(table, [*columns, "level", "kind"] if table == "ranges" else columns)
        if table == "ranges":
            frame["level"] = frame["level"].astype("int64").where(frame["kind"] != "startend", _FLAT)
        else:
            # Older profilers round to microseconds, so a child can outlive its parent by one.
            frame["level"], _ = nesting(frame["thread"], frame["start_ns"], frame["end_ns"], tolerance=1000)
        frames[table, suffix] = frame if flat else frame[frame["level"] < _FLAT]
    return frames


def _cpu_lanes(frames: dict[tuple[str, str], pd.DataFrame], trace: Trace, most: Most) -> tuple[list[Lane], int]:
    """Rows of the threads with most time in their outermost events, and how many threads there are."""
    columns = ["start_ns", "end_ns", "thread"]
    outermost = [frame.loc[frame["level"].isin([0, _FLAT]), columns] for frame in frames.values()]
    both = pd.concat([pd.DataFrame(columns=columns, dtype="int64"), *outermost])
    time = (both["end_ns"] - both["start_ns"]).groupby(both["thread"]).sum()
    lanes: list[Lane] = []
    for thread in time.nlargest(most.threads).index:
        name = f"CPU {trace.meta.thread_names.get(int(thread)) or f'thread {int(thread) & 0xFFFFFF}'}"
        for (table, suffix), frame in frames.items():
            # A driver's call within one of the runtime's says nothing that the outer one does not.
            deep = 1 if table == "calls" else most.levels
            mine = frame[(frame["thread"] == thread) & ((frame["level"] < deep) | (frame["level"] == _FLAT))]
            labels = {0: f"{name}{suffix}", _FLAT: f"{name} start/end"}
            for level, part in mine.groupby("level"):
                lanes.append(_lane(labels.get(int(str(level)), ""), table, -1, part, part["name"], len(lanes)))
    return lanes, len(time)


def _gpu_lanes(trace: Trace, most: int) -> tuple[list[Lane], int]:
    """Rows of the streams with most time, a lane for each of their tables, and how many streams there are."""
    columns = ["start_ns", "end_ns", "device", "stream"]
    frames = {t: trace.table(t, [*columns, _CALLED[t]]) for t in GPU_TABLES if trace.size(t)}
    every = pd.concat([pd.DataFrame(columns=columns, dtype="int64"), *(frame[columns] for frame in frames.values())])
    time = (every["end_ns"] - every["start_ns"]).groupby([every["device"], every["stream"]]).sum()
    several = len(time.index.unique(0)) > 1
    lanes = []
    for number, (device, stream) in enumerate(time.nlargest(most).index.sort_values()):
        label = f"GPU {device} stream {stream}" if several else f"GPU stream {stream}"
        for table, frame in frames.items():
            mine = frame[(frame["device"] == device) & (frame["stream"] == stream)]
            if len(mine):
                lanes.append(_lane(label, table, int(device), mine, mine[_CALLED[table]], _FLAT + number))
    return lanes, len(time)


def _lane(label: str, table: str, device: int, events: pd.DataFrame, called: pd.Series, row: float) -> Lane:
    names = pd.Categorical(called)
    if table == "memops":
        names = names.rename_categories(lambda kind: kind if kind == "memset" else f"copy {kind}")
    elif table == "graphs":
        names = names.rename_categories(lambda graph: f"CUDA graph {graph}")
    return Lane(plain(label), table, device, events["start_ns"].to_numpy(), events["end_ns"].to_numpy(), names, row)
