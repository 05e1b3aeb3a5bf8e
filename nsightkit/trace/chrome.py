"""Export to Chrome/Perfetto JSON: one process a GPU with a thread a stream, and the program's threads.

The file is for viewers: nsightkit reads the original trace, or the Parquet tables that :mod:`nsightkit.trace.store`
writes.

Perfetto draws what nests. Of two slices that overlap in part on one track it drops the second, without a word in the
picture, so events that do are drawn on a separate track beside it.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.text import Json, json_text
from nsightkit.trace.clean import clean
from nsightkit.trace.files import replacing, require_free
from nsightkit.trace.model import TIME_COLUMNS, Trace

_Ints = npt.NDArray[np.int64]

#: Events that are turned into text at a time, which bounds the memory they take.
_ROWS_AT_ONCE = 65_536
_GPU_TABLES = ("kernels", "memops", "graphs", "syncs")
_CPU_TABLES = ("ranges", "frames", "ops", "calls", "os_calls", "overhead")
#: Tracks of one stream or thread. No more operations of a stream can overlap: a GPU runs at most 128 grids at a time
#: (CUDA C++ Programming Guide, "maximum number of resident grids per device").
_MOST_LANES = 128
#: Columns that the `args` of a slice leave out: times, name and track stand outside them, the others add nothing.
_NOT_SHOWN = [*TIME_COLUMNS, "name", "short_name", "pid", "tid", "process", "thread", "end_thread", "level", "parent"]


def write(trace: Trace, path: Path, *, overwrite: bool = False) -> None:
    """Write a trace as Chrome JSON, for Perfetto or chrome://tracing.

    Times are microseconds with three decimals since the trace's first event: viewers hold them as floats, which at
    microseconds since 1970 tell apart no less than 250 ns. The file appears only when it is whole. It holds no secrets:
    :func:`nsightkit.trace.clean.clean` has been through what is written.

    Parameters
    ----------
    trace : Trace
    path : Path
        Gzipped when the name ends in ``.gz``.
    overwrite : bool
        Replace an existing file.

    Raises
    ------
    UsageError
        `path` is there already, or cannot be written.
    """
    require_free(path, overwrite=overwrite)
    cleaned = clean(trace)
    with replacing(path) as file:
        if path.suffix != ".gz":
            _write_document(cleaned, file)
            return
        # Without a file name and a time in gzip's header the same trace gives the same bytes.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=5, fileobj=file, mtime=0) as packed:
            _write_document(cleaned, packed)


def _write_document(trace: Trace, out: BinaryIO | gzip.GzipFile) -> None:
    """Write a clean trace as one JSON object, whose list ``traceEvents`` is written in pieces."""
    events = _placed_events(trace)
    # Python functions may have begun before the first event, and no viewer expects negative times.
    first_ns = int(events["start_ns"].to_numpy().min(initial=0))
    source = {"tool": trace.meta.tool, "tool_version": trace.meta.tool_version, "t0_ns": trace.t0_ns + first_ns}
    head = json_text({"displayTimeUnit": "ms", "nsightkit": source})
    out.write(head[:-1].encode() + b', "traceEvents": [')  # without the brace that closes `head`
    # Each track has a name, so that something stands before the first slice and its comma.
    out.write(",\n".join(map(json_text, _track_names(trace, events))).encode())
    for table, tracks in events.groupby("table", sort=False):
        frame = trace.table(str(table))
        if "name" not in frame:
            frame["name"] = frame.get("kind", "CUDA graph")  # copies and syncs have a kind, graphs have none
        frame["start_ns"] -= first_ns
        frame["end_ns"] -= first_ns
        # `tracks` has the rows of `frame`, in the same order.
        frame["pid"] = tracks["pid"].to_numpy()
        frame["tid"] = tracks["tid"].to_numpy()
        for begin in range(0, len(frame), _ROWS_AT_ONCE):
            for line in _chrome_events(str(table), frame.iloc[begin : begin + _ROWS_AT_ONCE]):
                out.write(line.encode())
    out.write(b"\n]}\n")


def _chrome_events(table: str, frame: pd.DataFrame) -> Iterator[str]:
    """Yield a table's events as the JSON objects of ``traceEvents``, which Perfetto draws as slices.

    pandas makes the `args` of all rows at once, as one call of :func:`json.dumps` for each row would be slow.
    """
    shown = frame[frame.columns.difference(_NOT_SHOWN, sort=False)]
    args_texts = ["{}"] * len(frame)
    if not shown.empty:
        text = shown.to_json(orient="records", lines=True)
        # DEL is the one invisible character that pandas does not escape.
        args_texts = text.replace("\x7f", r"\u007f").split("\n")
    columns = (
        frame["name"].map(json_text),  # pandas would escape more than Perfetto understands
        frame["pid"],
        frame["tid"],
        _microseconds(frame["start_ns"]),
        _microseconds(frame["end_ns"] - frame["start_ns"]),
        args_texts,  # the last is empty: pandas ends its text with a line break
    )
    for name, pid, tid, start, duration, args in zip(*columns, strict=False):
        event = f'"ph":"X","cat":"{table}","name":{name},"pid":{pid},"tid":{tid},"ts":{start},"dur":{duration}'
        yield f',\n{{{event},"args":{args}}}'


def _microseconds(ns: pd.Series[int]) -> Iterator[str]:
    """Write nanoseconds, none of them negative, as microseconds with three decimals: 12345 as ``12.345``."""
    return map("%d.%03d".__mod__, zip(ns // 1000, ns % 1000, strict=True))


# --- tracks ---------------------------------------------------------------------------------------------------------


def _placed_events(trace: Trace) -> pd.DataFrame:
    """Give each event of the trace a track: a row per event, ``table`` by ``table`` in the order of its rows.

    Its ``owner`` is a process or a GPU (``is_gpu``), its ``queue`` a thread or a stream, and its ``lane`` one of the
    tracks that draw a queue, 0 for the first; ``pid`` and ``tid`` are the numbers of owner and track in the file.
    """
    frames = []
    for table in (*_GPU_TABLES, *_CPU_TABLES):
        is_gpu = table in _GPU_TABLES
        place = ["device", "stream"] if is_gpu else ["process", "thread"]
        frame = trace.table(table, [*TIME_COLUMNS, *place])
        frame.columns = pd.Index([*TIME_COLUMNS, "owner", "queue"])
        frames.append(frame.astype("int64").assign(table=table, is_gpu=is_gpu))
    events = pd.concat(frames, ignore_index=True)
    owner_key = ["is_gpu", "owner"]
    queue_key = [*owner_key, "queue"]
    queue_number = events.groupby(queue_key).ngroup()
    events["lane"] = _viewer_lanes(queue_number.to_numpy(), events["start_ns"].to_numpy(), events["end_ns"].to_numpy())
    # Number owners and tracks from 1, processes first: the trace's own ids would not do, as a process and a GPU may
    # share one, and Perfetto takes ids of 32 bits only.
    events["pid"] = events.groupby(owner_key).ngroup() + 1
    events["tid"] = events.groupby([*queue_key, "lane"]).ngroup() + 1
    return events


def _viewer_lanes(queue: npt.NDArray[Any], start: _Ints, end: _Ints) -> _Ints:
    """Give each event a lane: the first track of its stream or thread on which it overlaps no other event in part.

    Perfetto would drop an event that begins inside another and ends after it. `queue` numbers the streams and threads.
    Events beyond :data:`_MOST_LANES` share the last lane.
    """
    lanes = np.zeros(len(queue), np.int64)
    current_queue = None
    open_ends: list[list[int]] = []  # of each lane, the ends of the events that are open, the innermost last
    # Queue by queue, by start; of equal starts the longest event comes first, as it holds the others.
    for row in np.lexsort((-end, start, queue)).tolist():
        if queue[row] != current_queue:
            current_queue = queue[row]
            open_ends = [[]]
        lane = 0
        while not _nests(open_ends[lane], start[row], end[row]) and lane < _MOST_LANES - 1:
            lane += 1
            if lane == len(open_ends):
                open_ends.append([])
        open_ends[lane].append(end[row])
        lanes[row] = lane
    return lanes


def _nests(open_ends: list[int], start: int, end: int) -> bool:
    """Drop the ends that `start` has passed, then check that no event is open or the innermost lasts until `end`."""
    while open_ends and open_ends[-1] <= start:
        open_ends.pop()
    return not open_ends or end <= open_ends[-1]


def _track_names(trace: Trace, events: pd.DataFrame) -> list[Json]:
    """List the metadata events that name the process or GPU, and the thread or stream, of each track.

    `events` are those of :func:`_placed_events`.
    """
    gpus = {gpu.device: gpu.name or "" for gpu in trace.meta.gpus}
    threads = trace.thread_names()
    metadata = []
    row: Any
    for row in events.drop_duplicates("tid").sort_values("tid").itertuples():
        if row.is_gpu:
            process = f"GPU {row.owner} {gpus.get(row.owner, '')}".rstrip()
            thread = f"stream {row.queue}"
        elif row.owner == -1:  # the profiler's own time, on no thread that the source names
            process = "profiler"
            thread = "profiler"
        else:
            process = f"process {row.owner}"
            thread_id = row.queue % (1 << 24)  # the lower 24 bits, below the process id
            thread = threads.get(row.queue, f"thread {thread_id}")
        if row.lane:
            thread += f" overlap {row.lane}"
        metadata.append({"ph": "M", "name": "process_name", "pid": row.pid, "tid": 0, "args": {"name": process}})
        metadata.append({"ph": "M", "name": "thread_name", "pid": row.pid, "tid": row.tid, "args": {"name": thread}})
    return metadata
