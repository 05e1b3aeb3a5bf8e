"""Export to Chrome/Perfetto JSON: one process a GPU with a thread a stream, the program's threads, and launch flows.

What is written is what Kineto would have, with a few more `args`, so :mod:`nsightkit.trace.kineto` reads it back to
the nanosecond and the viewers need nothing special.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from nsightkit.errors import UsageError
from nsightkit.trace.kineto import COLLECTIVE, short_kernel_name
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["write"]

_Ints = npt.NDArray[np.int64]
_Piece: TypeAlias = "str | pa.Array"

_ROWS = 1 << 16  # events that are text at the same time
_THREAD_MASK = (1 << 24) - 1
#: A stream's operations overlap at most this deep on tracks of their own; the rest shares the last one.
_LANES = 8


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace as Chrome JSON, for Perfetto, chrome://tracing or :func:`nsightkit.load`.

    Times are the trace's own clock in microseconds with three decimals, moved to begin at 0 when that clock is
    negative there. The file appears only when it is whole.

    Parameters
    ----------
    trace : Trace
    path : path-like
        Gzipped when the name ends in ``.gz``. An existing file is replaced, unless it is the trace itself.

    Raises
    ------
    UsageError
        `path` is the file that the trace is read from.
    """
    path = Path(path)
    if trace.path is not None and path.exists() and Path(trace.path).exists() and path.samefile(trace.path):
        raise UsageError(f"{path} is the trace itself; give another name for the copy")
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            if path.suffix == ".gz":
                # No name and no time in the header: the same trace gives the same bytes.
                with gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0) as packed:
                    _Export(trace).to(packed)
            else:
                _Export(trace).to(file)
        os.chmod(temporary, 0o666 & ~_umask())  # noqa: PTH101 - mkstemp made it private
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class _Export:
    """One trace on its way into a file."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.shift = max(trace.t0_ns, 0)
        self.processes = sorted(
            {
                int(p)
                for table in ("calls", "ranges", "ops", "os_calls", "overhead")
                for p in trace.table(table, ["process"])["process"].unique()
            }
        )
        self.gpu_pid: dict[int, int] = {}
        self.tracks: dict[tuple[int, int, str], int] = {}  # (device, stream, label) → tid

    def to(self, out: BinaryIO | gzip.GzipFile) -> None:
        """Write the whole document."""
        meta = self.trace.meta
        head: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms"}
        head["deviceProperties"] = [_device_properties(g) for g in meta.gpus]
        if meta.distributed:
            head["distributedInfo"] = meta.distributed
        moved = self.shift - self.trace.t0_ns
        head["nsightkit"] = {
            "tool": meta.tool,
            "tool_version": meta.tool_version,
            "driver": meta.driver,
            "missing": meta.missing,
            "window_ns": [t + moved for t in meta.window_ns] if meta.window_ns else None,
        }
        out.write(json.dumps(head, default=str)[:-1].encode() + b', "traceEvents": [')
        gpu = {table: self._gpu_side(table) for table in (*GPU_TABLES, "syncs")}
        first = ",\n".join(json.dumps(e) for e in self._metadata()).encode()
        out.write(first)
        for text in self._events(gpu):
            out.write(text if first else text.removeprefix(b","))
            first = text
        out.write(b"\n]}\n")

    # --- tracks ---

    def _gpu_side(self, table: str) -> pd.DataFrame:
        """Where on the screen each operation goes: a thread a stream, further ones where a stream overlaps itself."""
        frame = self.trace.table(table, ["start_ns", "end_ns", "device", "stream"])
        if not len(frame):
            return pd.DataFrame({"pid": np.empty(0, np.int64), "tid": np.empty(0, np.int64)})
        for device in sorted({int(d) for d in frame["device"].unique()} - self.gpu_pid.keys()):
            taken = {*self.processes, *self.gpu_pid.values()}
            self.gpu_pid[device] = device if device not in taken else max(taken) + 1 + device
        label = {"graphs": " graph replays", "syncs": " (sync)"}.get(table, "")
        lane = _lanes(frame)
        keys, which = np.unique(
            np.stack([frame["device"].to_numpy(np.int64), frame["stream"].to_numpy(np.int64), lane]),
            axis=1,
            return_inverse=True,
        )
        used = {(device, tid) for (device, _, _), tid in self.tracks.items()}
        tids = np.empty(keys.shape[1], np.int64)
        for i, (device, stream, depth) in enumerate(keys.T.tolist()):
            key = (device, stream, f"{label}{f' overlap {depth}' if depth else ''}")
            if key not in self.tracks:
                tid = stream if not key[2] and (device, stream) not in used else 1_000_000
                while (device, tid) in used:
                    tid += 1
                used.add((device, tid))
                self.tracks[key] = tid
            tids[i] = self.tracks[key]
        pid = frame["device"].map(self.gpu_pid).to_numpy(np.int64)
        return pd.DataFrame({"pid": pid, "tid": tids[which.reshape(-1)]})

    def _metadata(self) -> Iterator[dict[str, Any]]:
        names = {g.device: g.name for g in self.trace.meta.gpus}
        for order, (device, pid) in enumerate(sorted(self.gpu_pid.items())):
            label = f"GPU {device}" + (f" {names[device]}" if names.get(device) else "")
            yield _metadatum("process_name", pid, 0, name=label)
            yield _metadatum("process_sort_index", pid, 0, sort_index=1_000_000 + order)
        for order, ((device, stream, label), tid) in enumerate(sorted(self.tracks.items())):
            yield _metadatum("thread_name", self.gpu_pid[device], tid, name=f"stream {stream}{label}")
            yield _metadatum("thread_sort_index", self.gpu_pid[device], tid, sort_index=order)
        for process in self.processes:
            label = f"process {process}" if process >= 0 else "profiler"
            yield _metadatum("process_name", process, 0, name=label)
        for thread, name in self.trace.thread_names().items():
            yield _metadatum("thread_name", thread >> 24, thread & _THREAD_MASK, name=name)

    # --- events ---

    def _events(self, gpu: dict[str, pd.DataFrame]) -> Iterator[bytes]:
        for table, place in gpu.items():
            if len(place):
                yield from self._table(table, getattr(self, f"_{table}_args"), place)
        for table in ("calls", "ops", "os_calls", "overhead"):
            yield from self._table(table, getattr(self, f"_{table}_args"))
        yield from self._ranges()
        yield from self._flows(gpu)

    def _table(
        self, table: str, describe: Callable[[pd.DataFrame], list[_Piece]], place: pd.DataFrame | None = None
    ) -> Iterator[bytes]:
        frame = self.trace.table(table)
        if place is None:
            place = _cpu_place(frame)
        for rows in _slices(len(frame)):
            some, where = frame.iloc[rows], place.iloc[rows]
            yield _text(
                ',\n{"ph":"X",',
                *describe(some),
                *_placed(where),
                *self._timed(some["start_ns"]),
                ',"dur":',
                *_us((some["end_ns"] - some["start_ns"]).to_numpy()),
                "}",
            )

    def _timed(self, start: pd.Series[Any]) -> list[_Piece]:
        return [',"ts":', *_us(start.to_numpy() + self.shift)]

    def _kernels_args(self, some: pd.DataFrame) -> list[_Piece]:
        shared = some["static_shared_bytes"].astype("int64") + some["dynamic_shared_bytes"]
        pieces: list[_Piece] = ['"cat":"kernel","name":', _labels(some["name"]), ',"args":{', *_gpu_args(some)]
        pieces += [',"registers per thread":', _number(some["registers"]), ',"shared memory":', _number(shared)]
        pieces += [',"static shared memory":', _number(some["static_shared_bytes"])]
        pieces += [',"graph node id":', _number(some["graph_node"])]
        for field in ("grid", "block"):
            x, y, z = (_number(some[f"{field}_{axis}"]) for axis in "xyz")
            pieces += [f',"{field}":[', x, ",", y, ",", z, "]"]
        pieces += [_collectives(some["collective"]), _sequences(some["sequence"])]
        return [*pieces, _short_names(some["name"], some["short_name"]), "}"]

    def _memops_args(self, some: pd.DataFrame) -> list[_Piece]:
        names = _combined(some, ["kind", "src_kind", "dst_kind"], _memop_event)
        return [names, ',"args":{', *_gpu_args(some), ',"bytes":', _number(some["bytes"]),
                ',"graph node id":', _number(some["graph_node"]), "}"]  # fmt: skip

    def _graphs_args(self, some: pd.DataFrame) -> list[_Piece]:
        return ['"cat":"graph_replay","name":"CUDA graph","args":{', *_gpu_args(some),
                ',"graph id":', _number(some["graph_id"]), "}"]  # fmt: skip

    def _syncs_args(self, some: pd.DataFrame) -> list[_Piece]:
        kind = _labels(some["kind"])
        return ['"cat":"cuda_sync","name":', kind, ',"args":{', *_gpu_args(some), ',"cuda_sync_kind":', kind, "}"]

    def _calls_args(self, some: pd.DataFrame) -> list[_Piece]:
        return ['"cat":"cuda_runtime","name":', _labels(some["name"]),
                ',"args":{"correlation":', _number(some["correlation"]), "}"]  # fmt: skip

    def _ops_args(self, some: pd.DataFrame) -> list[_Piece]:
        return ['"cat":"cpu_op","name":', _labels(some["name"]),
                ',"args":{"External id":', _number(some["correlation"]), _inputs(some["inputs"]), "}"]  # fmt: skip

    def _os_calls_args(self, some: pd.DataFrame) -> list[_Piece]:
        return ['"cat":"os_call","name":', _labels(some["name"])]

    def _overhead_args(self, some: pd.DataFrame) -> list[_Piece]:
        return ['"cat":"overhead","name":', _labels(some["name"])]

    def _ranges(self) -> Iterator[bytes]:
        """Annotations; Start/End ranges overlap at will, which only asynchronous events may."""
        frame = self.trace.table("ranges")
        async_ = (frame["kind"] == "startend").to_numpy()
        place = _cpu_place(frame)
        for rows in _slices(len(frame)):
            for is_async in (False, True):
                mine = async_[rows] == is_async
                some, where = frame.iloc[rows][mine], place.iloc[rows][mine]
                if not len(some):
                    continue
                duration = (some["end_ns"] - some["start_ns"]).to_numpy()
                name: list[_Piece] = ['"name":', _labels(some["name"])]
                args: list[_Piece] = [
                    _combined(some, ["domain", "kind"], _range_args),
                    ',"open":',
                    _flag(some["open"]),
                    ',"end thread":',
                    _number(some["end_thread"] & _THREAD_MASK),
                ]
                category = _combined(some, ["kind"], _range_category)
                if not is_async:
                    yield _text(
                        ',\n{"ph":"X",', category, *name, ',"args":{', *args, "}", *_placed(where),
                        *self._timed(some["start_ns"]), ',"dur":', *_us(duration), "}",
                    )  # fmt: skip
                    continue
                ident: list[_Piece] = [',"id":', _number(pd.Series(some.index))]
                yield _text(
                    ',\n{"ph":"b",', category, *name, *ident, ',"args":{', *args, ',"duration_ns":',
                    _number(pd.Series(duration)), "}", *_placed(where), *self._timed(some["start_ns"]), "}",
                )  # fmt: skip
                yield _text(
                    ',\n{"ph":"e",', category, *name, *ident, *_placed(where), *self._timed(some["end_ns"]), "}"
                )

    def _flows(self, gpu: dict[str, pd.DataFrame]) -> Iterator[bytes]:
        """Arrows from the launching call (the outermost where driver and runtime share a number) to its GPU work."""
        calls = self.trace.table("calls", ["start_ns", "process", "thread", "correlation"])
        calls = calls[calls["correlation"] != 0].sort_values("start_ns", kind="stable")
        calls = calls.drop_duplicates(["process", "correlation"])
        calls = calls.assign(from_ns=calls["start_ns"], tid=calls["thread"] & _THREAD_MASK)
        first = 0
        for table in GPU_TABLES:
            if not len(gpu[table]) or not len(calls):
                continue
            ops = self.trace.table(table, ["start_ns", "process", "correlation"])
            ops = ops.assign(to_pid=gpu[table]["pid"], to_tid=gpu[table]["tid"])
            both = ops.merge(calls.drop(columns="start_ns"), on=["process", "correlation"], how="inner")
            both = both.assign(id=np.arange(first, first + len(both)))
            first += len(both)
            for rows in _slices(len(both)):
                some = both.iloc[rows]
                ident = _number(some["id"])
                start = _placed(some.rename(columns={"process": "pid"}))
                end = _placed(some[["to_pid", "to_tid"]].set_axis(["pid", "tid"], axis=1))
                flow = '"cat":"ac2g","name":"ac2g","id":'
                yield _text(
                    ',\n{"ph":"s",', flow, ident, *start, *self._timed(some["from_ns"]),
                    '},\n{"ph":"f","bp":"e",', flow, ident, *end, *self._timed(some["start_ns"]), "}",
                )  # fmt: skip


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


def _lanes(frame: pd.DataFrame) -> _Ints:
    """Give operations lanes, so that those of one lane of a stream do not overlap: 0 where a stream is in order."""
    lane = np.zeros(len(frame), np.int64)
    start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
    stream = frame.groupby(["device", "stream"], sort=False).ngroup().to_numpy()
    rows = np.lexsort((end, start, stream))
    for depth in range(1, _LANES + 1):
        if len(rows) < 2:
            break
        # the latest end among all earlier operations of the stream
        reached = pd.Series(end[rows]).groupby(stream[rows]).cummax().to_numpy()
        again = np.zeros(len(rows), bool)
        again[1:] = (stream[rows][1:] == stream[rows][:-1]) & (start[rows][1:] < reached[:-1])
        rows = rows[again]
        lane[rows] = min(depth, _LANES - 1)
    return lane


def _cpu_place(frame: pd.DataFrame) -> pd.DataFrame:
    tid = frame["thread"] & _THREAD_MASK
    return pd.DataFrame({"pid": frame["process"], "tid": tid.where(frame["process"] >= 0, 0)})


# --- text, a column at a time ---


def _slices(n: int) -> Iterator[slice]:
    return (slice(i, i + _ROWS) for i in range(0, n, _ROWS))


def _text(*pieces: _Piece) -> bytes:
    """Rows of text from columns of text and constants between them."""
    joined = pc.binary_join_element_wise(*pieces, "")
    return b"".join(_bytes_of(part) for part in (joined.chunks if isinstance(joined, pa.ChunkedArray) else [joined]))


def _bytes_of(text: pa.Array) -> bytes:
    """All strings of an array, one after the other: that is how Arrow holds them."""
    data = text.buffers()[2]
    offsets = np.frombuffer(text.buffers()[1], np.int64 if pa.types.is_large_string(text.type) else np.int32)
    first, last = int(offsets[text.offset]), int(offsets[text.offset + len(text)])
    return b"" if data is None else data.slice(first, last - first).to_pybytes()


def _number(values: pd.Series[Any]) -> pa.Array:
    return pa.array(values.to_numpy(np.int64)).cast(pa.string())


def _flag(values: pd.Series[Any]) -> pa.Array:
    return pa.array(values.to_numpy(bool)).cast(pa.string())


_THOUSANDTHS = pa.array([f"{i:03d}" for i in range(1000)])


def _us(ns: npt.NDArray[Any]) -> list[_Piece]:
    """Microseconds with three decimals; `ns` must not be negative."""
    whole, rest = np.divmod(ns.astype(np.int64), 1000)
    return [pa.array(whole).cast(pa.string()), ".", _THOUSANDTHS.take(pa.array(rest))]


def _labels(names: pd.Series[Any]) -> pa.Array:
    """JSON strings of a categorical."""
    texts = pa.array([json.dumps(str(n)) for n in names.cat.categories] or ['""'])
    return texts.take(pa.array(names.cat.codes.to_numpy(np.int64)))


def _collectives(described: pd.Series[Any]) -> _Piece:
    """Describe collectives as Kineto does: members of `args`."""
    texts = [""] * len(described.cat.categories)
    for i, text in enumerate(described.cat.categories):
        if text:
            known = {k: v for k, v in json.loads(str(text)).items() if k in COLLECTIVE}
            texts[i] = f",{json.dumps(known)[1:-1]}" if known else ""
    return pa.array(texts or [""]).take(pa.array(described.cat.codes.to_numpy(np.int64)))


def _sequences(number: pd.Series[Any]) -> _Piece:
    numbers = pa.array(number.to_numpy())
    said = pc.binary_join_element_wise(',"Seq":', numbers.cast(pa.string()), "")
    return pc.if_else(pc.greater_equal(numbers, 0), said, "")


def _inputs(inputs: pd.Series[Any]) -> pa.Array:
    """What Kineto writes of operators' inputs."""
    texts = [""] * len(inputs.cat.categories)
    for i, given in enumerate(inputs.cat.categories):
        if given:
            dims, types, values = (json.dumps(part) for part in json.loads(str(given)))
            texts[i] = f',"Input Dims":{dims},"Input type":{types},"Concrete Inputs":{values}'
    return pa.array(texts or [""]).take(pa.array(inputs.cat.codes.to_numpy(np.int64)))


def _combined(some: pd.DataFrame, columns: Sequence[str], text: Callable[..., str]) -> pa.Array:
    """Make a text of each combination of categories."""
    codes = np.stack([some[c].cat.codes.to_numpy(np.int64) for c in columns])
    keys, which = np.unique(codes, axis=1, return_inverse=True)
    texts = [text(*(str(some[c].cat.categories[k]) for c, k in zip(columns, key, strict=True))) for key in keys.T]
    return pa.array(texts).take(pa.array(which.reshape(-1)))


def _placed(where: pd.DataFrame) -> list[_Piece]:
    return [',"pid":', _number(where["pid"]), ',"tid":', _number(where["tid"])]


def _gpu_args(some: pd.DataFrame) -> list[_Piece]:
    fields = ("device", "stream", "correlation", "process")
    pieces: list[_Piece] = []
    for i, field in enumerate(fields):
        pieces += [f'{"," if i else ""}"{field}":', _number(some[field])]
    return pieces


def _short_names(names: pd.Series[Any], short: pd.Series[Any]) -> pa.Array:
    """Write the short name where it is not the one that follows from the name."""

    def text(name: str, given: str) -> str:
        return "" if short_kernel_name(name) == given else f',"short name":{json.dumps(given)}'

    return _combined(pd.DataFrame({"name": names, "short_name": short}), ["name", "short_name"], text)


def _memop_event(kind: str, source: str, target: str) -> str:
    if kind == "memset":
        return f'"cat":"gpu_memset","name":{json.dumps(f"Memset ({target.title()})")}'
    return f'"cat":"gpu_memcpy","name":{json.dumps(f"Memcpy {kind} ({source.title()} -> {target.title()})")}'


def _range_args(domain: str, kind: str) -> str:
    return f'"domain":{json.dumps(domain)},"kind":{json.dumps(kind)}'


def _range_category(kind: str) -> str:
    return f'"cat":"{"user_annotation" if kind == "annotation" else "nvtx"}",'
