"""Export to Chrome/Perfetto JSON: one process a GPU with a thread a stream, the program's threads, and launch flows.

What is written is what Kineto would have, with a few more `args`, so :mod:`nsightkit.trace.kineto` reads it back to
the nanosecond and the viewers need nothing special.

Perfetto draws what nests. Of two slices that overlap in part on one track it drops the second, without a word in the
picture, so events that do are moved to a track of their own beside it; ``place`` says where they belong.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from nsightkit.errors import UsageError
from nsightkit.safe import json_text
from nsightkit.trace.clean import clean
from nsightkit.trace.files import replacing
from nsightkit.trace.kineto import COLLECTIVE, MEMBERS, short_kernel_name
from nsightkit.trace.model import GPU_TABLES, NEUTRAL, Trace
from nsightkit.trace.nesting import crossings, lanes
from nsightkit.trace.output import require_free

__all__ = ["write"]

_Ints = npt.NDArray[np.integer[Any]]
#: Text of rows: constants and columns of text, in the order in which they stand.
_Pieces: TypeAlias = "list[str | pa.Array]"
#: Members of JSON objects, whose values are JSON.
_Members: TypeAlias = "dict[str, str | pa.Array | _Pieces]"

_ROWS = 1 << 16  # events that are text at the same time
_THREAD_MASK = (1 << 24) - 1
#: Perfetto takes 32 bits of a process or thread id, and thread 0 of a process for its main thread.
_LARGEST_ID = (1 << 32) - 1
#: Tables whose events are slices on their thread's track.
_CPU_TABLES = ("ranges", "frames", "ops", "calls", "os_calls", "overhead")
#: What shares a track, by table: copies and kernels of a stream run one after the other. And what a track is called.
_GPU_TRACKS = {"kernels": 0, "memops": 0, "graphs": 1, "syncs": 2}
_LABELS = ("", " graph replays", " (sync)")
#: Ids of arrows that slices carry, beyond those that a viewer may give to the others.
_FIRST_BOUND = 1 << 40
#: What a synchronisation of all streams has for a stream.
_NO_STREAM = (-1, 4294967295)


def write(trace: Trace, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a trace as Chrome JSON, for Perfetto, chrome://tracing or :func:`nsightkit.load`.

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
    export = _Export(clean(trace))
    # No name and no time in the header: the same trace gives the same bytes.
    with replacing(path) as file, gzip.GzipFile("", "wb", 5, file, 0) if path.suffix == ".gz" else file as out:
        export.to(out)


class _Export:
    """One trace on its way into a file."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        processes = {int(p) for table in _CPU_TABLES for p in trace.table(table, ["process"])["process"].unique()}
        #: ids under which processes are written: their own, where Perfetto can take them
        self.pid: dict[int, int] = {p: p for p in sorted(processes) if 0 < p <= _LARGEST_ID}
        self.gpu_pid: dict[int, int] = {}
        for process in sorted(processes):
            self.pid.setdefault(process, self._free_pid())
        self.metadata = [
            _metadatum("process_name", pid, 0, name=f"process {process}" if process >= 0 else "profiler")
            for process, pid in self.pid.items()
        ]
        self.place = self._cpu_places() | self._gpu_places()
        #: arrows that slices carry themselves, by row: the row of the call; -1 for none
        self.bound = {table: np.full(len(place), -1, np.int64) for table, place in self.place.items()}
        self.arrows = self._arrows()

    def _free_pid(self) -> int:
        return max([999_999, *self.pid.values(), *self.gpu_pid.values()]) + 1

    def to(self, out: BinaryIO | gzip.GzipFile) -> None:
        """Write the whole document."""
        meta = self.trace.meta
        kept = ("tool", "tool_version", "driver", "missing", "window_ns")
        head = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "deviceProperties": [_device_properties(g) for g in meta.gpus],
            **({"distributedInfo": meta.distributed} if meta.distributed else {}),
            "nsightkit": {"t0_ns": self.trace.t0_ns, **{field: getattr(meta, field) for field in kept}},
        }
        out.write(json_text(head)[:-1].encode() + b', "traceEvents": [')
        out.write(",\n".join(map(json_text, self.metadata)).encode())  # there is some wherever there are events
        out.writelines(self._events())
        out.write(b"\n]}\n")

    # --- tracks ---

    def _gpu_places(self) -> dict[str, pd.DataFrame]:
        """Where on the screen each operation goes: a thread a stream, further ones where a stream overlaps itself."""
        frames = {table: self.trace.table(table, ["start_ns", "end_ns", "device", "stream"]) for table in _GPU_TRACKS}
        events = pd.concat([f.assign(label=_GPU_TRACKS[t]) for t, f in frames.items()], ignore_index=True)
        names = {gpu.device: f" {gpu.name}" for gpu in self.trace.meta.gpus if gpu.name}
        for order, device in enumerate(sorted(events["device"].unique().tolist())):
            taken = {*self.pid.values(), *self.gpu_pid.values()}
            pid = self.gpu_pid[device] = device if device >= 0 and device not in taken else self._free_pid()
            self.metadata += [
                _metadatum("process_name", pid, 0, name=f"GPU {device}{names.get(device, '')}"),
                _metadatum("process_sort_index", pid, 0, sort_index=1_000_000 + order),
            ]
        queue = events.groupby(["device", "stream", "label"]).ngroup().to_numpy(np.int64)
        events["lane"] = lanes(queue, events["start_ns"].to_numpy(), events["end_ns"].to_numpy())
        events["pid"] = events["device"].map(self.gpu_pid).astype("int64")
        tracks, tids = events.groupby(["pid", "stream", "label", "lane"]), []
        streams = {*events[["pid", "stream"]].itertuples(index=False, name=None)}
        for order, (pid, stream, label, lane) in enumerate(tracks.size().index.tolist()):
            main = 0 < stream <= _LARGEST_ID and (label, lane) == (0, 0)
            free = (tid for tid in itertools.count(1_000_000 + order) if (pid, tid) not in streams)
            tids.append(stream if main else next(free))
            streams.add((pid, tids[-1]))
            name = "all streams" if stream in _NO_STREAM else f"stream {stream}"
            beside = f" overlap {lane}" if lane else ""
            self.metadata += [
                _metadatum("thread_name", pid, tids[-1], name=f"{name}{_LABELS[label]}{beside}"),
                _metadatum("thread_sort_index", pid, tids[-1], sort_index=order),
            ]
        events["tid"] = np.array(tids, np.int64)[tracks.ngroup()]
        return _split(events[["pid", "tid"]], events["start_ns"], frames)

    def _cpu_places(self) -> dict[str, pd.DataFrame]:
        """Where each event of the program goes: its thread, or a track beside it if it crosses another event."""
        frames = {t: self.trace.table(t, ["start_ns", "end_ns", "process", "thread"]) for t in _CPU_TABLES}
        events = pd.concat(frames.values(), ignore_index=True)
        start, end, process = (events[c].to_numpy(np.int64) for c in ("start_ns", "end_ns", "process"))
        tid = np.where(process == -1, 0, events["thread"] & _THREAD_MASK)  # -1: the profiler, on no thread it names
        place = pd.DataFrame({"own_pid": process, "own_tid": tid, "lane": -1})
        thread = place.groupby(["own_pid", "own_tid"]).ngroup().to_numpy(np.int64)
        crossing = np.zeros(len(events), bool)
        at_will = (self.trace.table("ranges", ["kind"])["kind"] == "startend").to_numpy()  # the first of the tables
        rows = np.setdiff1d(np.arange(len(events)), np.flatnonzero(at_will), assume_unique=True)
        while len(rows):
            found = crossings(thread[rows], start[rows], end[rows])
            crossing[rows[found]] = True
            # Without them, what was nested in them may be seen to cross something else.
            rows = rows[~found & np.isin(thread[rows], thread[rows[found]])]
        place.loc[crossing, "lane"] = lanes(thread[crossing], start[crossing], end[crossing])
        place = place.assign(pid=place["own_pid"].map(self.pid).astype("int64"), tid=tid)
        apart = crossing | (tid == 0)
        place["moved"] = apart | (place["pid"] != process)
        tracks = place[apart].groupby(["own_pid", "own_tid", "lane"])
        # No thread of the model has such an id.
        beside = {key: _THREAD_MASK + 1 + number for number, key in enumerate(tracks.size().index.tolist())}
        place.loc[apart, "tid"] = np.array(list(beside.values()), np.int64)[tracks.ngroup()]
        self._name_threads(beside)
        return _split(place, events["start_ns"], frames)

    def _name_threads(self, beside: dict[tuple[int, int, int], int]) -> None:
        """Name threads and the tracks beside them: {(process, thread, lane): id of the track}."""
        names = {(thread >> 24, thread & _THREAD_MASK): name for thread, name in self.trace.thread_names().items()}
        for (process, tid), name in names.items():
            drawn = self.pid.get(process, process), beside.get((process, tid, -1), tid)
            own = {} if drawn == (process, tid) else {"place": [process, tid]}
            self.metadata.append(_metadatum("thread_name", *drawn, name=name) | own)
        for (process, own_tid, lane), tid in beside.items():
            name = names.get((process, own_tid), "profiler" if process == -1 else f"thread {own_tid}")
            overlap = f" overlap {lane + 1}" if lane >= 0 else ""
            self.metadata.append(_metadatum("thread_name", self.pid[process], tid, name=f"{name}{overlap}"))

    # --- events ---

    def _events(self) -> Iterator[bytes]:
        for table in (*GPU_TABLES, "syncs", *_CPU_TABLES[1:], "ranges"):
            frame = self.trace.table(table)
            # Start/End ranges overlap at will, which only asynchronous events may.
            at_will = (frame["kind"] == "startend").to_numpy() if table == "ranges" else np.zeros(len(frame), bool)
            for rows in _slices(len(frame)):
                if len(own := rows[~at_will[rows]]):
                    yield self._complete(table, frame.iloc[own])
                if len(asynchronous := rows[at_will[rows]]):
                    yield self._begin_and_end(frame.iloc[asynchronous])
        yield from self._flows()

    def _complete(self, table: str, some: pd.DataFrame) -> bytes:
        call, direction = self.bound[table][some.index], "flow_in" if table in GPU_TABLES else "flow_out"
        bound, args = call >= 0, _args(table, some)
        return _text(
            {
                "ph": '"X"',
                **_HEADS[table](some),
                **({"args": args} if args else {}),
                **_placed(self.place[table].iloc[some.index]),
                "ts": _us(some["start_ns"]),
                "dur": _us(some["end_ns"] - some["start_ns"]),
                **(
                    {"bind_id": _where(bound, call + _FIRST_BOUND), direction: _where(bound, bound)}
                    if bound.any()
                    else {}
                ),
            }
        )

    def _begin_and_end(self, some: pd.DataFrame) -> bytes:
        event = {**_HEADS["ranges"](some), "id": _plain(some.index)}
        place = _placed(self.place["ranges"].iloc[some.index])
        args = _object({**_range_args(some), "duration_ns": _plain(some["end_ns"] - some["start_ns"])})
        return _text(
            {"ph": '"b"', **event, "args": args, **place, "ts": _us(some["start_ns"])},
            {"ph": '"e"', **event, **place, "ts": _us(some["end_ns"])},
        )

    def _flows(self) -> Iterator[bytes]:
        for rows in _slices(len(self.arrows)):
            some = self.arrows.iloc[rows]
            flow = {"cat": '"ac2g"', "name": '"ac2g"', "id": _plain(rows)}
            begin = {"ph": '"s"', **flow, **_placed(some), "ts": _us(some["start_ns"])}
            end = _placed(some[["to_pid", "to_tid"]].set_axis(["pid", "tid"], axis=1))
            yield _text(begin, {"ph": '"f"', "bp": '"e"', **flow, **end, "ts": _us(some["to_ns"])})

    def _arrows(self) -> pd.DataFrame:
        """Arrows from the launching call (the outermost where driver and runtime share a number) to its GPU work.

        A viewer finds the slices at an arrow's ends by track and time. Where that is ambiguous, because another slice
        begins there at the same time, the two slices carry the arrow themselves.
        """
        calls = self.trace.table("calls", ["start_ns", "process", "correlation"])
        drawn = ["pid", "tid", "shares"]
        calls = calls.assign(row=np.arange(len(calls))).join(self.place["calls"][drawn])
        calls = calls[calls["correlation"] != 0].sort_values("start_ns", kind="stable")
        calls = calls.drop_duplicates(["process", "correlation"])
        arrows = []
        for table in GPU_TABLES:
            ops = self.trace.table(table, ["start_ns", "process", "correlation"]).rename(columns={"start_ns": "to_ns"})
            ops = ops.assign(to_row=np.arange(len(ops))).join(self.place[table][drawn].add_prefix("to_"))
            both = calls.merge(ops, on=["process", "correlation"], how="inner")
            unclear = both["shares"] | both["to_shares"]
            for name, row in (("calls", "row"), (table, "to_row")):
                self.bound[name][both.loc[unclear, row]] = both.loc[unclear, "row"]
            arrows.append(both[~unclear])
        return pd.concat(arrows, ignore_index=True)


def _split(place: pd.DataFrame, start: pd.Series[Any], frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Give each table its rows of what was made of all of them, and whether another slice begins there just then."""
    place = place.assign(shares=place[["pid", "tid"]].assign(start=start).duplicated(keep=False))
    ends = np.cumsum([len(frame) for frame in frames.values()]).tolist()
    return {
        t: place[end - len(f) : end].reset_index(drop=True) for (t, f), end in zip(frames.items(), ends, strict=True)
    }


def _metadatum(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _device_properties(gpu: Any) -> dict[str, Any]:
    major, _, minor = (gpu.compute_capability or "").partition(".")
    known = {
        "id": gpu.device,
        "name": gpu.name,
        "totalGlobalMem": gpu.memory_bytes,
        "numSms": gpu.sm_count,
        "computeMajor": int(major) if major.isdecimal() else None,
        "computeMinor": int(minor) if minor.isdecimal() else None,
    }
    return {key: value for key, value in known.items() if value is not None}


# --- text, a column at a time ---


def _slices(n: int) -> Iterator[_Ints]:
    return (np.arange(i, min(i + _ROWS, n)) for i in range(0, n, _ROWS))


def _text(*events: _Members) -> bytes:
    """Events as text, all of one row before the next, each after a comma."""
    pieces = [piece for members in events for piece in (",\n", *_object(members))]
    joined: _Pieces = []  # each piece costs a pass over the rows
    for is_constant, some in itertools.groupby(pieces, lambda piece: isinstance(piece, str)):
        run = list(some)
        joined += ["".join(run)] if is_constant else run
    return "".join(pc.binary_join_element_wise(*joined, "").to_pylist()).encode()


def _object(members: _Members, *further: pa.Array) -> _Pieces:
    """Text of JSON objects, one a row; `further` are members as text. A member is left out where it is null."""
    pieces: _Pieces = ["{"]
    for key, value in members.items():
        name = f'{"," if len(pieces) > 1 else ""}"{key}":'
        if isinstance(value, pa.Array) and value.null_count:
            some = value.null_count < len(value)
            pieces += [pc.binary_join_element_wise(name, value, "").fill_null("")] if some else []
        else:
            pieces += [name, *(value if isinstance(value, list) else [value])]
    return [*pieces, *further, "}"]


def _plain(values: npt.ArrayLike) -> pa.Array:
    """Numbers or truths as JSON has them."""
    return pa.array(np.asarray(values)).cast(pa.string())


_THOUSANDTHS = pa.array([f"{i:03d}" for i in range(1000)])


def _us(ns: npt.ArrayLike) -> _Pieces:
    """Microseconds with three decimals; `ns` must not be negative."""
    whole, rest = np.divmod(np.asarray(ns, np.int64), 1000)
    return [_plain(whole), ".", _THOUSANDTHS.take(pa.array(rest))]


def _each(column: pd.Series[Any], text: Callable[[str], str | None] = json_text) -> pa.Array:
    """Make a text of each category, by default the category as a JSON string."""
    texts = pa.array([text(str(category)) for category in column.cat.categories] or [""])
    return texts.take(pa.array(column.cat.codes.to_numpy(np.int64)))


def _collective(described: str) -> str:
    """Describe a collective as Kineto does: members of `args`."""
    known = {k: v for k, v in json.loads(described or "{}").items() if k in COLLECTIVE}
    return f",{json_text(known)[1:-1]}" if known else ""


def _inputs(given: str) -> str:
    """What Kineto writes of an operator's inputs."""
    names = ("Input Dims", "Input type", "Concrete Inputs")
    return (
        "".join(f',"{name}":{json_text(of)}' for name, of in zip(names, json.loads(given), strict=True))
        if given
        else ""
    )


def _combined(some: pd.DataFrame, columns: Sequence[str], text: Callable[..., str | None]) -> pa.Array:
    """Make a text of each combination of categories."""
    codes = np.stack([some[c].cat.codes.to_numpy(np.int64) for c in columns])
    keys, which = np.unique(codes, axis=1, return_inverse=True)
    texts = [text(*(str(some[c].cat.categories[k]) for c, k in zip(columns, key, strict=True))) for key in keys.T]
    return pa.array(texts, pa.string()).take(pa.array(which.reshape(-1)))


def _where(said: npt.ArrayLike, values: npt.ArrayLike) -> pa.Array:
    """Values as JSON has them, null where they are not to be said."""
    return pc.if_else(pa.array(np.asarray(said)), _plain(values), pa.scalar(None, pa.string()))


def _placed(where: pd.DataFrame) -> _Members:
    place: _Members = {"pid": _plain(where["pid"]), "tid": _plain(where["tid"])}
    if "moved" in where:
        own = pc.binary_join_element_wise("[", _plain(where["own_pid"]), ",", _plain(where["own_tid"]), "]", "")
        place["place"] = pc.if_else(pa.array(where["moved"].to_numpy()), own, pa.scalar(None, pa.string()))
    return place


def _args(table: str, some: pd.DataFrame) -> _Pieces:
    """What Kineto has in the `args` of slices, and what it has no place for; nothing for some tables."""
    if table == "kernels":
        both = some["static_shared_bytes"].astype("int64") + some["dynamic_shared_bytes"]
        some = some.assign(dynamic_shared_bytes=both)  # Kineto's is the sum
    numbers = ({"device": "device", "stream": "stream"} if "device" in some else {}) | MEMBERS.get(table, {})
    members: _Members = {
        member: _where(some[column] >= 0, some[column]) if column in NEUTRAL else _plain(some[column])
        for column, member in numbers.items()
    }
    further = []
    match table:
        case "kernels":
            for field in ("grid", "block"):
                x, y, z = (_plain(some[f"{field}_{axis}"]) for axis in "xyz")
                members[field] = ["[", x, ",", y, ",", z, "]"]
            members["short name"] = _combined(some, ["name", "short_name"], _short_name)
            further = [_each(some["collective"], _collective)]
        case "syncs":
            members["cuda_sync_kind"] = _each(some["kind"])
        case "calls":
            members["kernel"] = _each(some["kernel"], lambda kernel: json_text(kernel) if kernel else None)
        case "ops":
            further = [_each(some["inputs"], _inputs)]
        case "ranges":
            members |= _range_args(some)
    return _object(members, *further) if members else []


def _range_args(some: pd.DataFrame) -> _Members:
    end_thread = _plain(some["end_thread"] & _THREAD_MASK)
    texts = {column: _each(some[column]) for column in ("domain", "kind")}
    return {"open": _plain(some["open"]), "end thread": end_thread, **texts}


def _short_name(name: str, given: str) -> str | None:
    """Write the short name where it is not the one that follows from the name."""
    return None if short_kernel_name(name) == given else json_text(given)


def _copy_name(kind: str, source: str, target: str) -> str:
    copied = f"Memcpy {kind} ({source.title()} -> {target.title()})"
    return json_text(f"Memset ({target.title()})" if kind == "memset" else copied)


def _head(category: str, column: str = "name") -> Callable[[pd.DataFrame], _Members]:
    return lambda some: {"cat": f'"{category}"', "name": _each(some[column])}


#: By table: category and name of its slices, as Kineto has them.
_HEADS: dict[str, Callable[[pd.DataFrame], _Members]] = {
    "kernels": _head("kernel"),
    "memops": lambda some: {
        "cat": _each(some["kind"], lambda kind: '"gpu_memset"' if kind == "memset" else '"gpu_memcpy"'),
        "name": _combined(some, ["kind", "src_kind", "dst_kind"], _copy_name),
    },
    "graphs": lambda _: {"cat": '"graph_replay"', "name": '"CUDA graph"'},
    "syncs": _head("cuda_sync", "kind"),
    "calls": _head("cuda_runtime"),
    "ranges": lambda some: {
        "cat": _each(some["kind"], lambda kind: '"user_annotation"' if kind == "annotation" else '"nvtx"'),
        "name": _each(some["name"]),
    },
    "frames": _head("python_function"),
    "ops": _head("cpu_op"),
    "os_calls": _head("os_call"),
    "overhead": _head("overhead"),
}
