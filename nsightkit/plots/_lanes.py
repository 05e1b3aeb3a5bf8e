"""What a timeline has rows for: GPU streams, and CPU threads by nesting level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from nsightkit.trace.model import GPU_TABLES, Trace
from nsightkit.trace.nesting import nesting

#: In place of a table's name: what a device did not do.
IDLE = "idle"


class Lane(NamedTuple):
    """Events drawn on one row, which they may share with other lanes; `names` is None where nobody asked for them."""

    label: str
    table: str
    device: int  # -1 for a CPU thread
    start: np.ndarray
    end: np.ndarray
    names: pd.Categorical[str] | None
    row: int


class Lanes(NamedTuple):
    """Rows of a trace, and what was left out for want of room, in words."""

    lanes: list[Lane]
    left_out: str = ""


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
    ranged, on_gpu = bool(trace.size("ranges")), any(trace.size(table) for table in GPU_TABLES)
    lanes: list[Lane] = []
    if ranged:
        lanes += _cpu_lanes(trace, "ranges", levels, most_threads, detailed)
    if not ranged or (detailed and not on_gpu):
        below = 1 + max((lane.row for lane in lanes), default=-1)
        for lane in _cpu_lanes(trace, "ops", levels, most_threads, False):
            label = f"{lane.label} ops" if ranged and lane.label else lane.label
            lanes.append(lane._replace(label=label, row=lane.row + below))
    return [lane for lane in (*lanes, *_gpu_lanes(trace, most_streams, detailed)) if len(lane.start)]


def all_lanes(trace: Trace, levels: int, most_streams: int, most_threads: int, idle: pd.DataFrame) -> Lanes:
    """Find everything a thread and a device did: ranges, framework ops and CUDA calls, GPU work and idle time.

    Parameters
    ----------
    trace : Trace
    levels, most_streams, most_threads : int
        As in :func:`nsightkit.plots.timeline`.
    idle : DataFrame
        ``device, start_ns, end_ns, cause`` of gaps.

    Returns
    -------
    Lanes
    """
    parts: dict[int, list[tuple[str, str, pd.DataFrame]]] = {}  # of each thread: table, label, events
    time: dict[int, int] = {}
    deepest = 0
    for table, suffix in (("ranges", ""), ("ops", " ops"), ("calls", " CUDA calls")):
        if not trace.size(table):
            continue
        frame = _nested(trace, table)
        flat = frame["kind"] == "startend"
        outermost = frame[flat | (frame["level"] == 0)]
        lasting = (outermost["end_ns"] - outermost["start_ns"]).groupby(outermost["thread"]).sum()
        for thread, total in zip(lasting.index.tolist(), lasting.tolist(), strict=True):
            time[thread] = time.get(thread, 0) + total
        # A driver's call within one of the runtime's says nothing that the outer one does not.
        deep = 1 if table == "calls" else levels
        deepest = max(deepest, 0 if table == "calls" else int(frame["level"].max()) + 1)
        for thread, mine in _by(frame[~flat & (frame["level"] < deep)], "thread"):
            nested = [(table, suffix if at == 0 else "", part) for at, part in _by(mine, "level")]
            parts.setdefault(thread, []).extend(nested)
        for thread, mine in _by(frame[flat], "thread"):
            parts.setdefault(thread, []).append((table, " start/end", mine))
    threads = sorted(parts, key=lambda thread: -time.get(thread, 0))
    names = trace.thread_names()
    lanes: list[Lane] = []
    for thread in threads[:most_threads]:
        name = f"CPU {names.get(thread) or f'thread {thread & 0xFFFFFF}'}"
        for number, (table, suffix, part) in enumerate(parts[thread]):
            label = f"{name}{suffix}" if suffix or number == 0 else ""
            start, end = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
            lanes.append(Lane(label, table, -1, start, end, pd.Categorical(part["name"]), len(lanes)))
    gpu = list(_gpu_lanes(trace, most_streams, True))
    lanes += gpu
    several = len({lane.device for lane in gpu}) > 1
    for device, mine in _by(idle, "device"):
        label = f"GPU {device} idle, by cause" if several else "GPU idle, by cause"
        start, end = mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy()
        # Below the device's streams.
        row = max((lane.row for lane in gpu if lane.device == device), default=10_000)
        lanes.append(Lane(label, IDLE, device, start, end, pd.Categorical(mine["cause"].astype(str)), row))
    streams = pd.concat(
        [trace.table(table, ["device", "stream"]).drop_duplicates() for table in GPU_TABLES], ignore_index=True
    ).drop_duplicates()
    hidden = [
        f"{count - most:,} more {what}"
        for count, most, what in ((len(threads), most_threads, "threads"), (len(streams), most_streams, "streams"))
        if count > most
    ]
    said = [f"{' and '.join(hidden)}, which had less to do"] if hidden else []
    if deepest > levels:
        said.append(f"what is nested deeper than {levels} levels")
    return Lanes(_in_rows([lane for lane in lanes if len(lane.start)]), "; ".join(said))


def _in_rows(lanes: list[Lane]) -> list[Lane]:
    """Number the rows from top to bottom; a device's idle time lies below its streams."""
    order = sorted(range(len(lanes)), key=lambda i: (lanes[i].row, lanes[i].table == IDLE))
    numbers: dict[tuple[int, bool], int] = {}
    return [
        lanes[i]._replace(row=numbers.setdefault((lanes[i].row, lanes[i].table == IDLE), len(numbers))) for i in order
    ]


def _by(frame: pd.DataFrame, column: str) -> list[tuple[int, pd.DataFrame]]:
    return [(int(str(key)), part) for key, part in frame.groupby(column)]


def _nested(trace: Trace, table: str) -> pd.DataFrame:
    columns = ["start_ns", "end_ns", "thread", "name"]
    frame = trace.table(table, [*columns, "level", "kind"] if table == "ranges" else columns)
    if table == "ranges":
        return frame
    # Older profilers round to microseconds, so a child can outlive its parent by one.
    level, _ = nesting(frame["thread"], frame["start_ns"], frame["end_ns"], tolerance=1000)
    return frame.assign(level=level, kind="pushpop")


def _gpu_lanes(trace: Trace, most: int, names: bool) -> Iterator[Lane]:
    called = {"kernels": "name", "memops": "kind", "graphs": "graph_id"}
    frames = {}
    for table in GPU_TABLES:
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
    frame = _nested(trace, table)
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
