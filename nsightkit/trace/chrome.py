"""Export to Chrome/Perfetto JSON: one process a GPU with a thread a stream, and the program's threads.

Slices and their `args` are named as Kineto names them. The file is for viewers: nsightkit reads the original trace, or
the Parquet tables that :mod:`nsightkit.trace.store` writes.

Perfetto draws what nests. Of two slices that overlap in part on one track it drops the second, without a word in the
picture, so events that do are drawn on a separate track beside it.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.errors import UsageError
from nsightkit.safe import json_text
from nsightkit.trace.clean import clean
from nsightkit.trace.files import replacing
from nsightkit.trace.model import Trace
from nsightkit.trace.nesting import crossings, lanes
from nsightkit.trace.output import require_free

__all__ = ["write"]

_Ints = npt.NDArray[np.int64]

_ROWS = 1 << 16  # events that are text at the same time
#: Tables of a GPU and what is added to the name of their track: copies and kernels of a stream run one after the other.
_GPU_TRACKS = {"kernels": "", "memops": "", "graphs": " graph replays", "syncs": " (sync)"}
_CPU_TABLES = ("ranges", "frames", "ops", "calls", "os_calls", "overhead")
#: Start/End ranges overlap at will, so they have tracks like those of streams.
_START_END = " start/end ranges"
#: What a synchronisation of all streams has for a stream.
_NO_STREAM = (-1, 4294967295)

_CATEGORIES = {
    "kernels": "kernel",
    "graphs": "graph_replay",
    "syncs": "cuda_sync",
    "frames": "python_function",
    "ops": "cpu_op",
    "calls": "cuda_runtime",
    "os_calls": "os_call",
    "overhead": "overhead",
}
_ON_GPU = ',"device":%d,"stream":%d,"correlation":%d'
_OF_GPU = ["device", "stream", "correlation"]
_SIZES = ["grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"]
_KERNEL = ',"grid":[%d,%d,%d],"block":[%d,%d,%d],"registers per thread":%d,"shared memory":%d,"graph node id":%d'
#: Numbers in the `args` of slices: their text, each member after a comma, and the columns that fill it.
_NUMBERS = {
    "kernels": (_ON_GPU + _KERNEL, _OF_GPU + _SIZES + ["registers", "shared_bytes", "graph_node"]),
    "memops": (_ON_GPU + ',"bytes":%d,"graph node id":%d', [*_OF_GPU, "bytes", "graph_node"]),
    "graphs": (_ON_GPU + ',"graph id":%d', [*_OF_GPU, "graph_id"]),
    "syncs": (_ON_GPU, _OF_GPU),
    "calls": (',"correlation":%d', ["correlation"]),
    "ops": (',"External id":%d', ["correlation"]),
}


def write(trace: Trace, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a trace as Chrome JSON, for Perfetto or chrome://tracing.

    Times are microseconds with three decimals since the trace's first event: viewers hold them as floats, which at
    microseconds since 1970 tell apart no less than 250 ns. The file appears only when it is whole. It holds no secrets:
    :func:`nsightkit.trace.clean.clean` has been through what is written.

    Parameters
    ----------
    trace : Trace
    path : path-like
        Gzipped when the name ends in ``.gz``.
    overwrite : bool
        Replace an existing file, unless it is the trace itself.

    Raises
    ------
    UsageError
        `path` is the file that the trace is read from, or is there already, or cannot be written.
    """
    path = Path(path)
    if trace.path is not None and path.exists() and Path(trace.path).exists() and path.samefile(trace.path):
        raise UsageError(f"{path} is the trace itself; give another name for the copy")
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
    track = _lay_out(events)
    # Python functions may have begun before the first event, and no viewer expects negative times.
    first_ns = int(events["start_ns"].min()) if len(events) else 0
    first_ns = min(0, first_ns)
    source = {"tool": trace.meta.tool, "tool_version": trace.meta.tool_version, "t0_ns": trace.t0_ns + first_ns}
    head = json_text({"displayTimeUnit": "ms", "nsightkit": source})
    metadata = _processes(trace, track) + _threads(trace, track)
    out.write(head[:-1].encode() + b', "traceEvents": [')
    out.write(",\n".join(map(json_text, metadata)).encode())  # events always have some
    for table, tracks in events.groupby("table", sort=False)["track"]:
        name = str(table)
        frame = trace.table(name)
        frame["start_ns"] -= first_ns
        frame["end_ns"] -= first_ns
        frame["pid"] = track["pid"].to_numpy()[tracks]
        frame["tid"] = track["tid"].to_numpy()[tracks]
        for begin in range(0, len(frame), _ROWS):
            lines = _slices(name, frame.iloc[begin : begin + _ROWS])
            out.write("".join(lines).encode())
    out.write(b"\n]}\n")


# --- tracks ---------------------------------------------------------------------------------------------------------


def _events(trace: Trace) -> pd.DataFrame:
    """All events: their times, and the process or GPU, the thread or stream and the kind of track they belong to."""
    frames = []
    for table, label in _GPU_TRACKS.items():
        frame = trace.table(table, ["start_ns", "end_ns", "device", "stream"])
        frame.columns = pd.Index(["start_ns", "end_ns", "owner", "queue"])
        frames.append(frame.assign(table=table, is_gpu=True, label=label))
    for table in _CPU_TABLES:
        frame = trace.table(table, ["start_ns", "end_ns", "process", "thread"])
        frame.columns = pd.Index(["start_ns", "end_ns", "owner", "queue"])
        frame["queue"] %= 1 << 24
        frame = frame.assign(table=table, is_gpu=False, label="")
        if table == "ranges":
            frame.loc[trace[table]["kind"] == "startend", "label"] = _START_END
        frames.append(frame)
    return pd.concat(frames, ignore_index=True).astype({"owner": "int64", "is_gpu": "bool"})


def _lay_out(events: pd.DataFrame) -> pd.DataFrame:
    """Give each event a track, on which nothing crosses; return the tracks."""
    queue = events.groupby(["is_gpu", "owner", "queue", "label"]).ngroup().to_numpy(np.int64)
    start = events["start_ns"].to_numpy(np.int64)
    end = events["end_ns"].to_numpy(np.int64)
    is_stack = (~events["is_gpu"] & (events["label"] == "")).to_numpy()
    crossing = np.zeros(len(events), bool)
    crossing[is_stack] = crossings(queue[is_stack], start[is_stack], end[is_stack])
    apart = crossing | ~is_stack
    lane = crossing.astype(np.int64)
    lane[apart] += lanes(queue[apart], start[apart], end[apart])
    events["lane"] = lane
    groups = events.groupby(["is_gpu", "owner", "queue", "label", "lane"])
    events["track"] = groups.ngroup()
    track = groups.size().index.to_frame(index=False)
    # In the order of drawing: ids of processes and GPUs may be equal, and Perfetto takes no more than 32 bits.
    track["pid"] = track.groupby(["is_gpu", "owner"]).ngroup() + 1
    track["tid"] = track.index + 1
    return track


def _processes(trace: Trace, track: pd.DataFrame) -> list[dict[str, Any]]:
    """Names of processes and GPUs, and the order in which they are drawn."""
    gpus = {gpu.device: gpu.name for gpu in trace.meta.gpus if gpu.name}
    metadata = []
    row: Any
    for order, row in enumerate(track.drop_duplicates("pid").itertuples()):
        name = f"process {row.owner}"
        if row.is_gpu:
            name = f"GPU {row.owner} {gpus.get(row.owner, '')}".rstrip()
        elif row.owner == -1:
            name = "profiler"
        metadata.append(_metadatum("process_name", row.pid, 0, name=name))
        metadata.append(_metadatum("process_sort_index", row.pid, 0, sort_index=order))
    return metadata


def _threads(trace: Trace, track: pd.DataFrame) -> list[dict[str, Any]]:
    """Names of threads and streams, and the order in which they are drawn."""
    names = trace.thread_names()
    metadata = []
    row: Any
    for order, row in enumerate(track.itertuples()):
        if row.is_gpu:
            name = "all streams" if row.queue in _NO_STREAM else f"stream {row.queue}"
        else:
            unnamed = "profiler" if row.owner == -1 else f"thread {row.queue}"
            name = names.get(row.owner << 24 | row.queue, unnamed)
        name += row.label
        if row.lane:
            name += f" overlap {row.lane}"
        metadata.append(_metadatum("thread_name", row.pid, row.tid, name=name))
        metadata.append(_metadatum("thread_sort_index", row.pid, row.tid, sort_index=order))
    return metadata


def _metadatum(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


# --- text -----------------------------------------------------------------------------------------------------------


def _slices(table: str, frame: pd.DataFrame) -> Iterator[str]:
    """Events of one table as JSON, each after a comma."""
    length = frame["end_ns"] - frame["start_ns"]
    place = zip(frame["pid"], frame["tid"], _us(frame["start_ns"]), _us(length), strict=True)
    for name, (pid, tid, start, duration), args in zip(_names(table, frame), place, _args(table, frame), strict=True):
        event = f'"ph":"X",{name},"pid":{pid},"tid":{tid},"ts":{start},"dur":{duration}'
        yield f',\n{{{event},"args":{{{args[1:]}}}}}'


def _us(ns: pd.Series[int]) -> Iterator[str]:
    """Microseconds with three decimals, from nanoseconds that are not negative."""
    return map("%d.%03d".__mod__, zip(ns // 1000, ns % 1000, strict=True))


def _names(table: str, frame: pd.DataFrame) -> Iterator[str]:
    """Category and name of slices, as Kineto has them."""
    if table == "memops":
        return map(_copy_name, frame["kind"], frame["src_kind"], frame["dst_kind"])
    if table == "ranges":
        return map(_range_name, frame["kind"], frame["name"])
    if table == "graphs":
        return itertools.repeat('"cat":"graph_replay","name":"CUDA graph"', len(frame))
    column = "kind" if table == "syncs" else "name"
    return map(_name, itertools.repeat(_CATEGORIES[table]), frame[column])


@functools.lru_cache(1 << 14)
def _name(category: str, name: str) -> str:
    return f'"cat":"{category}","name":{json_text(name)}'


def _range_name(kind: str, name: str) -> str:
    return _name("user_annotation" if kind == "annotation" else "nvtx", name)


def _copy_name(kind: str, source: str, target: str) -> str:
    if kind == "memset":
        return _name("gpu_memset", f"Memset ({target.title()})")
    return _name("gpu_memcpy", f"Memcpy {kind} ({source.title()} -> {target.title()})")


def _args(table: str, frame: pd.DataFrame) -> Iterator[str]:
    """Members of `args`, each after a comma."""
    texts: Iterator[str] = itertools.repeat("", len(frame))
    if table == "kernels":
        shared_bytes = frame["static_shared_bytes"].astype("int64") + frame["dynamic_shared_bytes"]
        frame = frame.assign(shared_bytes=shared_bytes)  # Kineto's is the sum
    if table in _NUMBERS:
        template, columns = _NUMBERS[table]
        texts = map(template.__mod__, map(tuple, frame[columns].to_numpy().tolist()))
    if table == "ops":
        return map(str.__add__, texts, map(_inputs, frame["inputs"]))
    return texts


@functools.lru_cache(1 << 14)
def _inputs(described: str) -> str:
    members = ""
    names = ("Input Dims", "Input type", "Concrete Inputs")
    for name, values in zip(names, json.loads(described or "[]"), strict=False):
        members += f',"{name}":{json_text(values)}'
    return members
