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

from nsightkit.safe import Json, json_text
from nsightkit.trace.clean import clean
from nsightkit.trace.files import replacing, require_free
from nsightkit.trace.model import TIME_COLUMNS, Trace

__all__ = ["write"]

_Ints = npt.NDArray[np.int64]

_ROWS = 1 << 16  # events that are text at the same time
_GPU_TABLES = ("kernels", "memops", "graphs", "syncs")
_CPU_TABLES = ("ranges", "frames", "ops", "calls", "os_calls", "overhead")
#: So many operations of a stream can overlap: a GPU runs no more than 128 grids at a time (CUDA C++ Programming Guide,
#: "maximum number of resident grids per device").
_LANES = 128
#: Columns that the `args` of a slice leave out: name and place stand outside them, the others add nothing.
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
        # No name and no time in the header: the same trace gives the same bytes.
        with gzip.GzipFile("", "wb", 5, file, 0) as packed:
            _write_document(cleaned, packed)


def _write_document(trace: Trace, out: BinaryIO | gzip.GzipFile) -> None:
    events = _events(trace)
    # Python functions may have begun before the first event, and no viewer expects negative times.
    first_ns = int(events["start_ns"].to_numpy().min(initial=0))
    source = {"tool": trace.meta.tool, "tool_version": trace.meta.tool_version, "t0_ns": trace.t0_ns + first_ns}
    head = json_text({"displayTimeUnit": "ms", "nsightkit": source})
    out.write(head[:-1].encode() + b', "traceEvents": [')
    out.write(",\n".join(map(json_text, _names(trace, events))).encode())  # events always have some
    for table, placed in events.groupby("table", sort=False):
        frame = trace.table(str(table))
        if "name" not in frame:
            frame["name"] = frame.get("kind", "CUDA graph")
        frame["start_ns"] -= first_ns
        frame["end_ns"] -= first_ns
        frame["pid"] = placed["pid"].to_numpy()
        frame["tid"] = placed["tid"].to_numpy()
        for begin in range(0, len(frame), _ROWS):
            for line in _slices(str(table), frame.iloc[begin : begin + _ROWS]):
                out.write(line.encode())
    out.write(b"\n]}\n")


def _slices(table: str, frame: pd.DataFrame) -> Iterator[str]:
    """Events as JSON, each after a comma."""
    shown = frame[frame.columns.difference(_NOT_SHOWN, sort=False)]
    args = ["{}"] * len(frame)
    if not shown.empty:
        text = shown.to_json(orient="records", lines=True)
        args = text.replace("\x7f", r"\u007f").split("\n")  # DEL is the one invisible character that pandas leaves
    columns = (
        frame["name"].map(json_text),  # pandas would escape more than Perfetto understands
        frame["pid"],
        frame["tid"],
        _microseconds(frame["start_ns"]),
        _microseconds(frame["end_ns"] - frame["start_ns"]),
        args,
    )
    for name, pid, tid, start, duration, described in zip(*columns, strict=False):
        event = f'"ph":"X","cat":"{table}","name":{name},"pid":{pid},"tid":{tid},"ts":{start},"dur":{duration}'
        yield f',\n{{{event},"args":{described}}}'


def _microseconds(ns: pd.Series[int]) -> Iterator[str]:
    """Microseconds with three decimals, from nanoseconds that are not negative."""
    return map("%d.%03d".__mod__, zip(ns // 1000, ns % 1000, strict=True))


# --- tracks ---------------------------------------------------------------------------------------------------------


def _events(trace: Trace) -> pd.DataFrame:
    """All events: their times, the process or GPU and the thread or stream they belong to, and the track they get."""
    frames = []
    for table in (*_GPU_TABLES, *_CPU_TABLES):
        is_gpu = table in _GPU_TABLES
        place = ["device", "stream"] if is_gpu else ["process", "thread"]
        frame = trace.table(table, [*TIME_COLUMNS, *place])
        frame.columns = pd.Index([*TIME_COLUMNS, "owner", "queue"])
        frames.append(frame.astype("int64").assign(table=table, is_gpu=is_gpu))
    events = pd.concat(frames, ignore_index=True).astype({"is_gpu": bool})
    queue = ["is_gpu", "owner", "queue"]
    number = events.groupby(queue).ngroup()
    events["lane"] = _lanes(number.to_numpy(), events["start_ns"].to_numpy(), events["end_ns"].to_numpy())
    # In the order of drawing: ids of processes and GPUs may be equal, and Perfetto takes no more than 32 bits.
    events["pid"] = events.groupby(queue[:2]).ngroup() + 1
    events["tid"] = events.groupby([*queue, "lane"]).ngroup() + 1
    return events


def _lanes(queue: npt.NDArray[Any], start: _Ints, end: _Ints) -> _Ints:
    """Give each event the first lane of its queue on which it nests; beyond :data:`_LANES` they share the last."""
    lanes = np.zeros(len(queue), np.int64)
    before = None
    stacks: list[list[int]] = []  # of each lane, the ends of the events that are open
    for row in np.lexsort((-end, start, queue)).tolist():
        if queue[row] != before:
            before = queue[row]
            stacks = [[]]
        lane = 0
        while not _fits(stacks[lane], start[row], end[row]) and lane < _LANES - 1:
            lane += 1
            if lane == len(stacks):
                stacks.append([])
        stacks[lane].append(end[row])
        lanes[row] = lane
    return lanes


def _fits(ends: list[int], start: int, end: int) -> bool:
    """Close what has ended, and check whether an event lies within what is open."""
    while ends and ends[-1] <= start:
        ends.pop()
    return not ends or end <= ends[-1]


def _names(trace: Trace, events: pd.DataFrame) -> list[Json]:
    """Name processes and GPUs, threads and streams."""
    gpus = {gpu.device: gpu.name or "" for gpu in trace.meta.gpus}
    threads = trace.thread_names()
    metadata = []
    row: Any
    for row in events.drop_duplicates("tid").sort_values("tid").itertuples():
        if row.is_gpu:
            process = f"GPU {row.owner} {gpus.get(row.owner, '')}".rstrip()
            thread = f"stream {row.queue}"
        elif row.owner == -1:
            process = "profiler"
            thread = "profiler"
        else:
            process = f"process {row.owner}"
            thread = threads.get(row.queue, f"thread {row.queue % (1 << 24)}")
        if row.lane:
            thread += f" overlap {row.lane}"
        metadata.append({"ph": "M", "name": "process_name", "pid": row.pid, "tid": 0, "args": {"name": process}})
        metadata.append({"ph": "M", "name": "thread_name", "pid": row.pid, "tid": row.tid, "args": {"name": thread}})
    return metadata
