"""PyTorch profiler traces: the Chrome JSON that Kineto writes, of any age, gzipped or not.

The file is decoded in slices of a few megabytes with a typed decoder that skips what no table holds, so that memory
is bounded by the tables and not by the JSON. Times are converted as decimal text: microseconds with three decimals
need more digits than a float64 has once they pass 2**42, which both absolute epoch times and Kineto's own base do.
"""

from __future__ import annotations

import collections
import contextlib
import decimal
import gc
import gzip
import itertools
import json
import operator
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pacsv

from nsightkit.errors import TraceError
from nsightkit.trace import store
from nsightkit.trace.model import (
    GPU_TABLES,
    TABLES,
    TIME_COLUMNS,
    FrameSource,
    Gpu,
    Source,
    TraceMeta,
    categorical,
    complete,
)
from nsightkit.trace.nesting import nesting

__all__ = ["decode", "open_kineto", "short_kernel_name"]

_Ints = npt.NDArray[np.int64]
_T = TypeVar("_T")

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 2 << 20  # measured: fastest of 1, 2, 4, 8 and 16 MiB, and the smallest peak
_REMEDY = "give a trace that torch.profiler exported (export_chrome_trace)"
_AGAIN = "capture or copy it again"

#: Which table the events of a category fill. Names as Kineto prints them today, before 2022 (capitalised; compared in
#: lower case) and in our own exports; ``cuda_``, ``hip_``, ``xpu_`` runtimes and drivers are known by their ending.
#: Everything else (flows, Python functions, ``gpu_user_annotation``, which is a projection and not work) fills none.
_CATEGORIES = {
    "kernel": "kernels",
    "gpu_memcpy": "memops",
    "gpu_memset": "memops",
    "memcpy": "memops",
    "memset": "memops",
    "runtime": "calls",
    "driver": "calls",
    "cuda_sync": "syncs",
    "user_annotation": "ranges",
    "nvtx": "ranges",
    "cpu_op": "ops",
    "operator": "ops",
    "overhead": "overhead",
    "graph_replay": "graphs",
    "os_call": "os_calls",
}
_GPU_SIDE = ("kernels", "memops", "graphs", "syncs")
#: Columns of numbers, and the fields of an event's args (:class:`_Args`) that they are.
_NUMBERS_OF_GPU = {"process": "process", "correlation": "correlation"}
_NUMBERS = {
    "kernels": {
        "graph_node": "graph_node",
        "registers": "registers",
        "static_shared_bytes": "static_shared",
        "external_id": "external_id",
    },
    "memops": {"graph_node": "graph_node", "bytes": "bytes"},
    "graphs": {"graph_id": "graph_id"},
    "calls": {"correlation": "correlation"},
    "ops": {"correlation": "external_id"},
}
#: Accelerators with categories of their own. Some report kernels as GPUs do; what else they report fills no table.
_ACCELERATORS = {"mtia": "MTIA", "hpu": "HPU", "xpu": "XPU", "privateuse1": "PrivateUse1"}

#: `record_function` blocks that PyTorch itself opens and that old versions file among the operators.
_ANNOTATION = re.compile(r"ProfilerStep#\d+$|enumerate\(DataLoader\)#|Optimizer\.(step|zero_grad)#")
_CALL_SUFFIX = re.compile(r"(_pt(sz|ds))?(_v\d{4,})?(_pt(sz|ds))?$")  # `_v2` belongs to the name


_ABSENT = msgspec.Raw(b"")


class _Args(msgspec.Struct, gc=False, frozen=True):
    """What we use of an event's args. Any: the same key holds an int here and a string there."""

    correlation: Any = 0
    external_id: Any = msgspec.field(default=0, name="External id")
    device: Any = None
    stream: Any = None
    grid: Any = None
    block: Any = None
    registers: Any = msgspec.field(default=0, name="registers per thread")
    shared: Any = msgspec.field(default=0, name="shared memory")
    graph_node: Any = msgspec.field(default=0, name="graph node id")
    bytes: Any = 0
    sync_kind: Any = msgspec.field(default=None, name="cuda_sync_kind")
    name: Any = None  # of metadata events
    # of operators, where shapes were recorded; left undecoded, as few distinct ones stand for many operators
    dims: msgspec.Raw = msgspec.field(default=_ABSENT, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_ABSENT, name="Input type")
    values: msgspec.Raw = msgspec.field(default=_ABSENT, name="Concrete Inputs")
    # of kernels of collectives, and of the operators that launch them
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_size: Any = msgspec.field(default=None, name="Group size")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    source_rank: Any = msgspec.field(default=None, name="Src Rank")
    target_rank: Any = msgspec.field(default=None, name="Dst Rank")
    sequence: Any = msgspec.field(default=None, name="Seq")
    # written by our own export only
    static_shared: Any = msgspec.field(default=0, name="static shared memory")
    short_name: Any = msgspec.field(default=None, name="short name")
    process: Any = -1
    graph_id: Any = msgspec.field(default=0, name="graph id")
    domain: Any = ""
    kind: Any = "annotation"
    open: Any = False
    end_thread: Any = msgspec.field(default=None, name="end thread")
    duration_ns: Any = None


_NO_ARGS = _Args()
#: What is kept of a collective's description, by the names that Kineto and our own export give it.
COLLECTIVE = {
    "Collective name": "collective",
    "In msg nelems": "in_elements",
    "Out msg nelems": "out_elements",
    "dtype": "dtype",
    "Process Group Name": "group",
    "Process Group Description": "group_description",
    "Group size": "group_size",
    "Process Group Ranks": "group_ranks",
    "Src Rank": "source_rank",
    "Dst Rank": "target_rank",
}
_NO_TIME = _ABSENT


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: msgspec.Raw = _NO_TIME
    dur: msgspec.Raw = _NO_TIME
    args: _Args | None = None
    # written by our own export only: the process and thread of an event that is drawn elsewhere
    place: list[int] | None = None


class _Head(msgspec.Struct):
    """Top-level keys beside the events."""

    schema: Any = msgspec.field(default=None, name="schemaVersion")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    driver: Any = msgspec.field(default=None, name="cuda_driver_version")
    ours: Any = msgspec.field(default=None, name="nsightkit")  # written by our own export only


class _Document(_Head):
    events: list[_Event] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="traceEvents")


class _RawDocument(_Head):
    events: list[msgspec.Raw] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="traceEvents")


def open_kineto(path: str | os.PathLike[str], *, cache: bool = True) -> Source:
    """Open a PyTorch profiler trace.

    Parameters
    ----------
    path : path-like
        Chrome JSON as `export_chrome_trace` writes it (any version), or as :func:`nsightkit.trace.chrome.write`
        does; gzip is told by its magic bytes, not by the name. A bare JSON list of events is read too.
    cache : bool, default True
        Whether the tables of a big trace may be kept beside it.

    Returns
    -------
    Source
        All tables in memory, or from the cache. Times are the trace's own ``ts``, in nanoseconds.

    Raises
    ------
    TraceError
        The file is truncated, or JSON of another kind.
    """
    path = Path(path)

    def opened() -> Source:
        return FrameSource(*decode(path))

    return store.cached(path, opened, "kineto") if cache else opened()


def decode(path: str | os.PathLike[str]) -> tuple[dict[str, pd.DataFrame], TraceMeta]:
    """Every table of a PyTorch profiler trace.

    Parameters
    ----------
    path : path-like
        See :func:`open_kineto`.

    Returns
    -------
    frames : dict of str to DataFrame
        Keys and columns as in :data:`nsightkit.trace.model.TABLES`; times in nanoseconds on the trace's clock.
    meta : TraceMeta

    Raises
    ------
    TraceError
        The file is truncated, or JSON of another kind.
    """
    # Millions of objects are born and none of them is in a cycle: the collector would only walk them.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _decode(path).finish()
    finally:
        if collecting:
            gc.enable()


def short_kernel_name(name: str) -> str:
    """Reduce a demangled kernel name to the bare function name, as CUPTI's short name has it.

    Parameters
    ----------
    name : str
        ``void at::native::reduce_kernel<512, 1, …>(…)``

    Returns
    -------
    str
        ``reduce_kernel``
    """
    text = name.replace("(anonymous namespace)", "").replace("operator()", "operator")
    kept, depth = [], 0
    for piece in re.split(r"([<>(])", text):
        if piece == "(" and depth == 0:
            break
        depth += {"<": 1, ">": -1}.get(piece, 0)
        if depth == 0 and piece != ">":
            kept.append(piece)
    words = "".join(kept).split()
    return (words[-1].rsplit("::", 1)[-1] if words else "") or name


# --- from the file to JSON documents -------------------------------------------------------------------------------

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
#: Between two events. A quote inside a string is escaped, so this matches no string; should it match objects nested in
#: `args`, the slice is not JSON and the whole is decoded in one piece.
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id|args|s|bp)"\s*:)')
_OPEN = b'{"traceEvents":['


def _inputs(*parts: bytes) -> str:
    """Give an operator's inputs as one JSON text, the same however the file spaces them; "" for none."""
    if not any(parts):
        return ""
    try:
        lists = [json.loads(part) if part else [] for part in parts]
    except (ValueError, RecursionError):  # a number no Python takes; what its inputs were does not matter then
        return ""
    return json.dumps(lists, separators=(",", ":"))


class _BadJson(Exception):
    """The text is not JSON; carries the decoder's own words."""


def _decode(path: str | os.PathLike[str]) -> _Tables:
    try:
        with _bytes_of(path) as stream:
            return _tables(path, _slices(stream))
    except _BadJson:
        pass
    # Not JSON, or not sliceable: one piece then, and if need be mended.
    with _bytes_of(path) as stream:
        text, bare = _all_of(stream)
    try:
        return _tables(path, [text])
    except _BadJson as error:
        if not _EVENTS.search(text):
            raise TraceError(path, f"is not a PyTorch profiler trace ({error})", _REMEDY) from error
        try:
            tables = _tables(path, [_mended(text, bare)])
        except _BadJson as still:
            raise TraceError(path, f"holds broken JSON ({still})", _AGAIN) from still
        tables.notes.append(f"The JSON was malformed and was repaired ({error}).")
        return tables


@contextlib.contextmanager
def _bytes_of(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """The uncompressed bytes of a file, whose read errors are trace errors."""
    with open(path, "rb") as file:  # noqa: PTH123 - path-like
        packed = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        try:
            yield cast("BinaryIO", gzip.GzipFile(fileobj=file)) if packed else file
        except EOFError as error:
            raise TraceError(path, "is a truncated gzip file", _AGAIN) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(path, f"is a damaged gzip file ({error})", _AGAIN) from error


def _all_of(stream: BinaryIO) -> tuple[bytes, bool]:
    """Read the file as one document; also whether it was a bare list of events."""
    text = stream.read().removeprefix(b"\xef\xbb\xbf").strip()
    if text.startswith(b"["):
        return _OPEN + text[1:] + b"}", True
    return text, False


def _slices(stream: BinaryIO) -> Iterator[bytes]:
    """Cut the file into small documents of the same shape, each with some of the events."""
    rest = stream.read(_CHUNK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    close = b""
    if rest.startswith(b"["):
        rest, close = rest[1:], b"}"
    else:
        opening = _EVENTS.search(rest)
        while opening is None:
            block = stream.read(_CHUNK_BYTES)
            if not block:
                yield rest
                return
            rest += block
            opening = _EVENTS.search(rest)
        yield rest[: opening.end()] + b"]}"
        rest = rest[opening.end() :]
    while block := stream.read(_CHUNK_BYTES):
        cut = _last_cut(rest)
        if cut is None:  # laid out in no way we know: the rest in one piece
            rest += block + stream.read()
            break
        yield _OPEN + rest[: cut[0]] + b"]}"
        rest = rest[cut[1] :] + block
    yield _OPEN + rest + close


def _last_cut(text: bytes, window: int = 1 << 16) -> tuple[int, int] | None:
    for start in (max(0, len(text) - window), 0):
        last = None
        for last in _BETWEEN.finditer(text, start):  # noqa: B007
            pass
        if last is not None:
            return last.start() + 1, last.end()
    return None


def _mended(text: bytes, bare: bool) -> bytes:
    """JSON made of what profilers have been seen to write instead of it."""
    text = text.decode("utf-8", "replace").encode()
    # Control characters may stand in no string; outside they are white space at best.
    text = text.translate(bytes(max(c, 32) for c in range(256)))
    text = re.sub(rb'\\(?:(["\\/bfnrt])|u([0-9a-fA-F]{4}))|\\', _mended_escape, text)
    text = re.sub(rb"(?<=:)(\s*)-?(?:nan|inf(?:inity)?)\b", rb"\1null", text, flags=re.IGNORECASE)
    text = re.sub(rb",(?=\s*[\]}])", b"", text)
    if bare and not text.endswith(b"]}"):
        text = text[:-1].rstrip(b" ,") + b"]}"  # such a list may lack its end
    try:
        msgspec.json.decode(text, type=_RawDocument)
    except RecursionError:
        return text
    except msgspec.DecodeError as error:
        trailing = re.search(r"trailing characters \(byte (\d+)\)", str(error))
        if trailing:
            return text[: int(trailing[1]) - 1]
    return text


def _mended_escape(match: re.Match[bytes]) -> bytes:
    if match[2] and match[2][:1] in b"dD" and match[2][1:2] in b"89abcdefABCDEF":
        return b"\\ufffd"  # half of a surrogate pair
    return match[0] if match[1] or match[2] else b"\\\\"


# --- from documents to columns -------------------------------------------------------------------------------------


class _Codes(dict[Any, int]):
    """Numbers things in the order of their first appearance."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code

    def of(self, values: Iterable[Any]) -> _Ints:
        return np.fromiter(map(self.__getitem__, values), np.int64)


def _tables(path: str | os.PathLike[str], documents: Iterable[bytes]) -> _Tables:
    tables = _Tables()
    try:
        for text in documents:
            tables.add(text)
    except msgspec.ValidationError as error:
        raise TraceError(path, f"is JSON, but no Chrome trace ({error})", _REMEDY) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _BadJson(str(error)) from error
    if not tables.has_events:
        raise TraceError(path, "is JSON, but no Chrome trace (it has no traceEvents)", _REMEDY)
    if not tables.phased and (tables.seen or all(h.schema is None for h in tables.heads)):
        raise TraceError(path, "is JSON, but its traceEvents are not trace events", _REMEDY)
    return tables


class _Tables:
    """Columns of the events seen so far."""

    def __init__(self) -> None:
        self.heads: list[_Head] = []
        self.has_events = False
        self.seen = 0  # events of any kind
        self._skipped = collections.Counter[str]()  # events that fill no table, by category
        self.phased = 0  # events with a phase, which is what makes JSON a trace
        self.malformed = 0
        self.negative_start = 0
        self.negative_duration = 0
        self.whole_us = True
        self.notes: list[str] = []
        self.windows: list[tuple[int, int]] = []
        self.labels: list[tuple[Any, Any, str]] = []  # (pid, tid, thread name)
        self._names: dict[str, _Codes] = {table: _Codes() for table in TABLES}
        self._places = _Codes()  # (pid, tid)
        self._texts = _Codes()  # sync kinds, range kinds, domains
        self._inputs = _Codes()  # of operators: (dims, types, values), each JSON
        self._collectives = _Codes()  # of kernels: JSON
        self._collectives[""]
        self._announced: dict[int, tuple[int, int]] = {}  # {External id: (code in _collectives, sequence)}
        self._parts: dict[str, list[dict[str, npt.NDArray[Any]]]] = {table: [] for table in TABLES}
        self._table_of: dict[str | None, str | None] = {None: None}
        self._decode = msgspec.json.Decoder(_Document).decode

    def add(self, text: bytes) -> None:
        """Take the events of one document."""
        try:
            document = self._decode(text)
        except msgspec.ValidationError:
            document = self._salvaged(text)
        # not the document itself: it holds the events
        self.heads.append(
            _Head(document.schema, document.devices, document.distributed, document.driver, document.ours)
        )
        if document.events is msgspec.UNSET:
            return
        self.has_events = True
        events = document.events
        self.seen += len(events)
        table_of = self._table_of
        found: dict[str, list[_Event]] = {}
        for event in events:
            ph = event.ph
            if ph in ("X", "b"):
                try:
                    table = table_of[event.cat]
                except KeyError:
                    table = table_of[event.cat] = _table_of(event.cat or "")
                if table is None:
                    self._skipped[event.cat or ""] += 1
                    if event.cat == "Trace":
                        self._window(event)
                elif ph == "X" or (event.args is not None and event.args.duration_ns is not None):
                    found.setdefault(table, []).append(event)
            elif ph == "M":
                if event.name == "thread_name" and event.args is not None:
                    self.labels.append((*_place(event), str(event.args.name or "").strip()))
            elif not ph:
                self.malformed += 1
                self.phased -= 1
        self.phased += len(events)
        for table, rows in found.items():
            self._take(table, rows)

    def _salvaged(self, text: bytes) -> _Document:
        """Decode the document without the events that have no shape we know."""
        raw = msgspec.json.decode(text, type=_RawDocument)
        if raw.events is msgspec.UNSET:  # pragma: no cover - such a document has nothing that can be invalid
            return _Document()
        decoder = msgspec.json.Decoder(_Event)
        events = []
        for item in raw.events:
            try:
                events.append(decoder.decode(item))
            except msgspec.ValidationError:
                self.malformed += 1
        self.seen += len(raw.events) - len(events)
        return _Document(raw.schema, raw.devices, raw.distributed, raw.driver, raw.ours, events)

    def _window(self, event: _Event) -> None:
        start, ok = _nanoseconds([event.ts])
        length, ok_length = _nanoseconds([event.dur])
        if ok[0] and ok_length[0] and start[0] >= 0 and length[0] > 0:
            self.windows.append((int(start[0]), int(start[0] + length[0])))

    def _take(self, table: str, events: list[_Event]) -> None:
        start, valid = _nanoseconds([e.ts for e in events])
        duration, _ = _nanoseconds([e.dur for e in events])
        late = valid & (start >= 0)
        self.malformed += int((~valid).sum())
        self.negative_start += int((valid & ~late).sum())
        if not late.all():
            events = list(itertools.compress(events, late.tolist()))
            start, duration = start[late], duration[late]
        args = [e.args or _NO_ARGS for e in events]
        exact = [a.duration_ns for a in args] if table == "ranges" else []
        if any(d is not None for d in exact):
            duration = np.where([d is None for d in exact], duration, _ints(exact))
        self.negative_duration += int((duration < 0).sum())
        self.whole_us = self.whole_us and not (start % 1000).any()
        numbers = _NUMBERS_OF_GPU | _NUMBERS.get(table, {}) if table in _GPU_SIDE else _NUMBERS.get(table, {})
        columns = {
            "start_ns": start,
            "end_ns": start + np.maximum(duration, 0),
            "name": self._names[table].of(e.name or "" for e in events),
            "place": self._places.of(map(_place, events)),
            **{column: _ints(list(map(operator.attrgetter(field), args))) for column, field in numbers.items()},
        }
        if table in _GPU_SIDE:
            for column, drawn in (("device", "pid"), ("stream", "tid")):
                said, shown = (map(operator.attrgetter(name), of) for name, of in ((column, args), (drawn, events)))
                columns[column] = _ints([b if a is None else a for a, b in zip(said, shown, strict=True)])
        more = {"kernels": self._of_kernels, "syncs": self._of_syncs, "ops": self._of_ops, "ranges": self._of_ranges}
        if table in more:
            columns |= more[table](events, args)
        self._parts[table].append(columns)

    def _of_kernels(self, _events: Sequence[_Event], args: Sequence[_Args]) -> dict[str, npt.NDArray[Any]]:
        columns = {"short_name": self._texts.of(a.short_name for a in args)}
        for axis, values in (("grid", [a.grid for a in args]), ("block", [a.block for a in args])):
            columns |= {f"{axis}_{letter}": column for letter, column in zip("xyz", _triples(values).T, strict=True)}
        # Kineto has only the sum of static and dynamic.
        columns["dynamic_shared_bytes"] = _ints([a.shared for a in args]) - _ints([a.static_shared for a in args])
        columns["collective"] = self._collectives.of(map(_collective, args))
        columns["sequence"] = _ints([-1 if a.sequence is None else _int(a.sequence, -1) for a in args])
        return columns

    def _of_syncs(self, events: Sequence[_Event], args: Sequence[_Args]) -> dict[str, npt.NDArray[Any]]:
        kinds = (_sync_kind(a.sync_kind or e.name) for e, a in zip(events, args, strict=True))
        return {"kind": self._texts.of(kinds)}

    def _of_ops(self, _events: Sequence[_Event], args: Sequence[_Args]) -> dict[str, npt.NDArray[Any]]:
        for a in args:
            if a.collective is not None:
                code = self._collectives[_collective(a)]
                self._announced[_int(a.external_id, 0)] = (code, _int(a.sequence, -1))
        if any(a.dims or a.types or a.values for a in args):
            return {"inputs": self._inputs.of((bytes(a.dims), bytes(a.types), bytes(a.values)) for a in args)}
        # Shapes are rarely recorded, and operators many.
        return {"inputs": np.full(len(args), self._inputs[b"", b"", b""])}

    def _of_ranges(self, events: Sequence[_Event], args: Sequence[_Args]) -> dict[str, npt.NDArray[Any]]:
        own = (_place(e) for e in events)
        ends = (at if a.end_thread is None else (at[0], a.end_thread) for at, a in zip(own, args, strict=True))
        return {
            "domain": self._texts.of(str(a.domain) for a in args),
            "kind": self._texts.of(str(a.kind) for a in args),
            "open": np.array([a.open is True for a in args]),
            "end_place": self._places.of(ends),
        }

    # --- from columns to tables ---

    def finish(self) -> tuple[dict[str, pd.DataFrame], TraceMeta]:
        """All tables, and what is known about the capture."""
        raw: dict[str, dict[str, Any]] = {}
        for table, parts in self._parts.items():
            if parts:
                raw[table] = {c: np.concatenate([p[c] for p in parts]) for c in parts[0]}
            parts.clear()
        t0_ns = self._t0_ns()
        if t0_ns is None:
            self._drop_zero_starts(raw)
        else:
            for columns in raw.values():
                for column in TIME_COLUMNS:
                    columns[column] = columns[column] + t0_ns
        self._promote(raw)
        process, thread = self._identities(raw)
        texts = list(self._texts)
        frames: dict[str, pd.DataFrame] = {}
        for table, columns in raw.items():
            names = self._names["ops" if table == "ranges" and "from_ops" in columns else table]
            place = columns.pop("place")
            if table not in _GPU_SIDE:
                columns["process"], columns["thread"] = process[place], thread[place]
            codes = columns.pop("name")
            unique = list(names)
            if table == "memops":
                kinds = [_memop_kinds(n) for n in unique]
                for i, column in enumerate(("kind", "src_kind", "dst_kind")):
                    columns[column] = _category(codes, [k[i] for k in kinds])
            elif table == "calls":
                columns["name"] = _category(codes, [_CALL_SUFFIX.sub("", n, count=1) or n for n in unique])
            elif table == "kernels":
                columns["name"] = _category(codes, unique)
                columns["short_name"] = self._short_names(codes, unique, columns["short_name"], texts)
                self._describe(columns)
            elif table == "syncs":
                columns["kind"] = _category(columns["kind"], texts)
            elif table != "graphs":
                columns["name"] = _category(codes, unique)
            if table == "ops":
                columns["inputs"] = _category(columns["inputs"], [_inputs(*parts) for parts in self._inputs])
            if table == "ranges":
                self._nest(columns, thread, texts)
            for column, dtype in TABLES[table].items():
                if dtype == "int32" and columns[column].dtype == np.int64:
                    columns[column] = np.clip(columns[column], -(2**31), 2**31 - 1).astype(np.int32)
            frames[table] = complete(table, pd.DataFrame(columns, copy=False))
            columns.clear()
        _give_processes(frames)
        return frames, self._meta(frames, thread)

    def _t0_ns(self) -> int | None:
        """What our own export took off all times."""
        for head in self.heads:
            if isinstance(head.ours, dict):
                t0_ns = _int(head.ours.get("t0_ns"), None)
                if t0_ns is not None and abs(t0_ns) < 1 << 62:
                    return t0_ns
        return None

    def _describe(self, columns: dict[str, Any]) -> None:
        """Complete what kernels say of their collectives by what the operators that launched them say."""
        external = columns.pop("external_id")
        if self._announced:
            announced = np.array([(i, *what) for i, what in sorted(self._announced.items())], np.int64)
            at = np.minimum(np.searchsorted(announced[:, 0], external), len(announced) - 1)
            known = (announced[at, 0] == external) & (external != 0)
            code, sequence = columns["collective"], columns["sequence"]
            columns["collective"] = np.where(known & (code == 0), announced[at, 1], code)
            columns["sequence"] = np.where(known & (sequence < 0), announced[at, 2], sequence)
        columns["collective"] = _category(columns["collective"], list(self._collectives))

    def _drop_zero_starts(self, raw: dict[str, dict[str, Any]]) -> None:
        """Kineto clamps a start that it could not place to 0, hours before everything else."""
        if not any((c["start_ns"] == 0).any() for c in raw.values()):
            return
        positive = [c["start_ns"][c["start_ns"] > 0] for c in raw.values()]
        first = min((int(s.min()) for s in positive if len(s)), default=0)
        if first < 3600 * 10**9:
            return
        for columns in raw.values():
            keep = columns["start_ns"] > 0
            self.negative_start += int((~keep).sum())
            for column in columns:
                columns[column] = columns[column][keep]

    def _promote(self, raw: dict[str, dict[str, Any]]) -> None:
        """Old versions file the profiler's own annotations (steps, DataLoader, optimizer) under operators."""
        ops = raw.get("ops")
        if ops is None:
            return
        names = self._names["ops"]
        is_annotation = np.array([_ANNOTATION.match(n) is not None for n in names], bool)[ops["name"]]
        if not is_annotation.any():
            return
        rows = np.flatnonzero(is_annotation)
        moved: dict[str, npt.NDArray[Any]] = {c: ops[c][rows] for c in ("start_ns", "end_ns", "place")}
        old = list(names)
        moved["name"] = self._names["ranges"].of(old[i] for i in ops["name"][rows].tolist())
        moved["domain"] = np.full(len(rows), self._texts[""])
        moved["kind"] = np.full(len(rows), self._texts["annotation"])
        moved["open"] = np.zeros(len(rows), bool)
        moved["end_place"] = moved["place"]
        have = raw.get("ranges")
        raw["ranges"] = moved if have is None else {c: np.concatenate([have[c], moved[c]]) for c in moved}
        for column in ops:
            ops[column] = ops[column][~is_annotation]

    def _identities(self, raw: dict[str, dict[str, Any]]) -> tuple[_Ints, _Ints]:
        """Process and thread (``process << 24 | tid``) of every (pid, tid) seen."""
        used = set()
        for table, columns in raw.items():
            if table not in _GPU_SIDE:
                used.update(np.unique(columns["place"]).tolist())
                if "end_place" in columns:
                    used.update(np.unique(columns["end_place"]).tolist())
        processes: dict[Any, int] = {}
        taken: dict[int, set[int]] = {}
        odd: list[tuple[int, int]] = []
        process = np.full(len(self._places), -1, np.int64)
        thread = np.full(len(self._places), -1, np.int64)
        for (pid, tid), code in self._places.items():
            if code not in used:
                continue
            number = _int(pid, None)
            if number is None or not -1 <= number < 1 << 38:
                number = processes.setdefault(pid, -2 - len(processes))
            process[code] = number
            if number == -1:
                continue  # the profiler itself
            ident = _int(tid, None) if not isinstance(tid, str) or tid.isdecimal() else None
            if ident is not None and 0 <= ident < 1 << 24:
                taken.setdefault(number, set()).add(ident)
                thread[code] = number << 24 | ident
            else:
                odd.append((code, number))
        for code, number in odd:
            mine = taken.setdefault(number, set())
            ident = next(i for i in range(len(mine) + 1) if i not in mine)
            mine.add(ident)
            thread[code] = number << 24 | ident
        return process, thread

    @staticmethod
    def _short_names(codes: _Ints, names: list[str], given: _Ints, texts: list[Any]) -> pd.Categorical:
        derived = [short_kernel_name(n) for n in names]
        if all(texts[t] is None for t in np.unique(given).tolist()):
            return _category(codes, derived)
        both = _Codes()
        pairs = both.of(zip(codes.tolist(), given.tolist(), strict=True))
        return _category(pairs, [derived[c] if texts[t] is None else str(texts[t]) for c, t in both])

    def _nest(self, columns: dict[str, Any], thread: _Ints, texts: list[Any]) -> None:
        columns["end_thread"] = thread[columns.pop("end_place")]
        kind = columns["kind"]
        columns["domain"] = _category(columns["domain"], texts)
        columns["kind"] = _category(kind, texts)
        n = len(kind)
        level, parent = np.zeros(n, np.int32), np.full(n, -1, np.int64)
        nests = np.ones(n, bool) if "startend" not in self._texts else kind != self._texts["startend"]
        rows = np.flatnonzero(nests)
        depth, up = nesting(
            columns["thread"][rows],
            columns["start_ns"][rows],
            columns["end_ns"][rows],
            tolerance=1000 if self.whole_us else 0,
        )
        level[rows] = depth
        parent[rows] = np.where(up >= 0, rows[up], -1) if len(rows) else up
        columns["level"], columns["parent"] = level, parent

    def _meta(self, frames: dict[str, pd.DataFrame], thread: _Ints) -> TraceMeta:
        def first(field: str) -> Any:
            return next((v for h in self.heads if (v := getattr(h, field)) is not None), None)

        schema, driver, distributed = first("schema"), _int(first("driver"), None), first("distributed")
        meta = TraceMeta(tool="pytorch-profiler", schema=None if schema is None else str(schema))
        if driver:
            meta.driver = f"CUDA {driver // 1000}.{driver % 1000 // 10}"
        meta.gpus = _gpus(first("devices"))
        meta.distributed = dict(distributed) if isinstance(distributed, dict) else {}
        if self.windows:
            meta.window_ns = (min(w[0] for w in self.windows), max(w[1] for w in self.windows))
        places = {place: int(thread[code]) for place, code in self._places.items() if thread[code] != -1}
        for pid, tid, name in self.labels:
            # Old versions print the same thread id now as a number, now as a string.
            for key in ((pid, tid), (pid, str(tid))):
                if name and key in places:
                    meta.thread_names[places[key]] = name
        unread = self._unread()
        meta.missing = _missing(frames, bool(unread))
        self.notes.extend(
            f"Events of an accelerator that nsightkit does not read were left out: {count:,} of {name}."
            for name, count in unread.items()
        )
        _restore(meta, first("ours"))
        if self.whole_us and any(len(f) for f in frames.values()):
            self.notes.append("Times are whole microseconds (PyTorch before 2.4): short kernels last 0 or 1 µs.")
        for count, what in (
            (self.malformed, "malformed events (no phase or no usable time) were left out"),
            (self.negative_start, "events without a valid start (negative, or clamped to 0) were left out"),
            (self.negative_duration, "negative durations were set to 0"),
        ):
            if count:
                self.notes.append(f"{count} {what}.")
        meta.notes = self.notes
        return meta

    def _unread(self) -> collections.Counter[str]:
        """Count the events of accelerators that fill no table."""
        found = collections.Counter[str]()
        for category, count in self._skipped.items():
            if name := _ACCELERATORS.get(category.lower().partition("_")[0]):
                found[name] += count
        return found


def _place(event: _Event) -> tuple[Any, Any]:
    if event.place is not None and len(event.place) == 2:
        return event.place[0], event.place[1]
    return event.pid, event.tid


def _table_of(category: str) -> str | None:
    lower = category.lower()
    if lower.endswith(("_runtime", "_driver")):
        return "calls"
    return _CATEGORIES.get(lower)


def _missing(frames: dict[str, pd.DataFrame], unread: bool) -> list[str]:
    """Tables that were not recorded, as opposed to recorded and empty; work that nobody could read is not recorded."""

    def has(*tables: str) -> bool:
        return any(t in frames and len(frames[t]) for t in tables)

    missing = []
    if not has("kernels", "memops", "graphs", "calls", "syncs"):
        # The CPU side alone, whether no GPU was there or its activities were not asked for.
        missing += ["kernels", "memops", "graphs", "calls"]
    elif unread and not has(*GPU_TABLES):
        missing += GPU_TABLES
    elif not has("calls"):
        missing.append("calls")
    if not has("syncs"):
        missing.append("syncs")  # off unless asked for
    if not has("ranges", "ops"):
        missing += ["ranges", "ops"]
    elif not has("ops"):
        missing.append("ops")
    if not has("os_calls"):
        missing.append("os_calls")
    if not has("overhead", "calls"):
        missing.append("overhead")
    return [t for t in TABLES if t in missing]


def _restore(meta: TraceMeta, ours: Any) -> None:
    """Take over what our own export knew of the capture it was made from."""
    if not isinstance(ours, dict):
        return
    meta.tool = str(ours.get("tool") or meta.tool)
    for field in ("tool_version", "driver"):
        if ours.get(field):
            setattr(meta, field, str(ours[field]))
    if isinstance(ours.get("missing"), list):
        meta.missing = [t for t in TABLES if t in ours["missing"]]
    match ours.get("window_ns"):
        case [int(start), int(end)]:
            meta.window_ns = (start, end)


def _gpus(devices: Any) -> list[Gpu]:
    gpus = []
    for i, device in enumerate(devices if isinstance(devices, list) else []):
        if not isinstance(device, dict):
            continue
        major, minor = _int(device.get("computeMajor"), None), _int(device.get("computeMinor"), None)
        gpus.append(
            Gpu(
                device=_int(device.get("id"), i),
                name=str(device["name"]) if device.get("name") else None,
                sm_count=_int(device.get("numSms"), None),
                memory_bytes=_int(device.get("totalGlobalMem"), None),
                compute_capability=None if major is None or minor is None else f"{major}.{minor}",
            )
        )
    return gpus


def _give_processes(frames: dict[str, pd.DataFrame]) -> None:
    """GPU rows carry no process: theirs is that of the call that launched them.

    With several processes the call is found by correlation; where two processes use the same number, it is the last
    one that began before the operation did.
    """
    calls = frames.get("calls")
    cpu = [frames[t]["process"] for t in ("ops", "ranges") if t in frames and len(frames[t])]
    if calls is not None and len(calls):
        processes = calls["process"].value_counts().index
    elif cpu:
        processes = pd.concat(cpu).value_counts().index
    else:
        processes = pd.Index([0])
    for table in _GPU_SIDE:
        frame = frames.get(table)
        if frame is None or not len(frame):
            continue
        unknown = (frame["process"] < 0).to_numpy()
        if not unknown.any():
            continue
        process = frame["process"].to_numpy().copy()
        process[unknown] = processes[0]
        if len(processes) > 1 and calls is not None and len(calls):
            launching = calls.loc[calls["correlation"] != 0, ["correlation", "start_ns", "process"]].sort_values(
                "start_ns"
            )
            wanted = (
                frame.loc[unknown, ["correlation", "start_ns"]]
                .assign(row=np.flatnonzero(unknown))
                .sort_values("start_ns")
            )
            before = pd.merge_asof(wanted, launching, on="start_ns", by="correlation")
            # a clock that is off by a little may put the call after its kernel
            after = pd.merge_asof(wanted, launching, on="start_ns", by="correlation", direction="forward")
            owner = before["process"].fillna(after["process"])
            known = owner.notna().to_numpy()
            process[wanted["row"].to_numpy()[known]] = owner[known].astype("int64")
        frames[table] = frame.assign(process=process)


# --- values --------------------------------------------------------------------------------------------------------


def _collective(args: _Args) -> str:
    """Describe the collective that a kernel or an operator belongs to, as JSON; "" for none."""
    if args.collective is None:
        return ""
    known = {name: value for name, field in COLLECTIVE.items() if (value := getattr(args, field)) is not None}
    return json.dumps(known, separators=(",", ":"))


def _nanoseconds(raw: list[msgspec.Raw]) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Nanoseconds of JSON numbers in microseconds, exactly; and which of them are numbers at all.

    Arrow's decimal parser reads the text into 128-bit integers of thousandths: nothing passes through a float.
    """
    n = len(raw)
    try:
        column = pacsv.read_csv(
            pa.BufferReader(b"\n".join(raw) + b"\n"),
            read_options=pacsv.ReadOptions(column_names=["us"], use_threads=False, block_size=_CHUNK_BYTES),
            parse_options=pacsv.ParseOptions(ignore_empty_lines=False),
            convert_options=pacsv.ConvertOptions(
                column_types={"us": pa.decimal128(38, 3)}, null_values=["", "null"], strings_can_be_null=True
            ),
        )["us"].combine_chunks()
    except pa.ArrowInvalid:
        return _nanoseconds_slowly(raw)
    if len(column) != n:
        return _nanoseconds_slowly(raw)
    halves = np.frombuffer(column.buffers()[1], np.int64)[2 * column.offset :][: 2 * n]
    low, high = halves[::2], halves[1::2]
    valid = np.asarray(column.is_valid()) & (high == low >> 63) & (np.abs(low) < 1 << 62)
    return np.where(valid, low, 0), valid


def _nanoseconds_slowly(raw: list[msgspec.Raw]) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Do the same one by one, for what Arrow refuses: more than three decimals, text, booleans."""
    out = np.zeros(len(raw), np.int64)
    valid = np.zeros(len(raw), bool)
    for i, item in enumerate(raw):
        try:
            value = round(decimal.Decimal(bytes(item).decode().strip('"')) * 1000)
        except (decimal.InvalidOperation, ValueError, OverflowError):
            continue
        if abs(value) < 1 << 62:
            out[i], valid[i] = value, True
    return out, valid


def _int(value: Any, default: _T) -> int | _T:
    """Make an integer of what JSON holds in its place."""
    try:
        if isinstance(value, str):
            digits = re.fullmatch(r"\D*?(-?\d+)(?:\.0*)?\D*", value.strip())  # "7", "stream 7", "stream 7 (sync)"
            if digits is None:
                return default
            value = digits[1]
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if -(1 << 63) <= number < 1 << 63 else default


def _ints(values: Sequence[Any]) -> _Ints:
    try:
        return np.array(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_int(v, 0) for v in values], dtype=np.int64)


def _triples(values: Sequence[Any]) -> _Ints:
    """Three numbers a row, 0 for what is absent."""
    try:
        out = np.array(values, dtype=np.int64)
        if out.ndim == 2 and out.shape[1] == 3:
            return out
    except (TypeError, ValueError, OverflowError):
        pass
    rows = [([_int(x, 0) for x in v] if isinstance(v, list) else [])[:3] for v in values]
    return np.array([[*r, 0, 0, 0][:3] for r in rows], dtype=np.int64).reshape(-1, 3)


def _category(codes: _Ints, labels: Sequence[Any]) -> pd.Categorical:
    """Make a categorical of only the labels that occur; equal labels become one."""
    used, codes = np.unique(codes, return_inverse=True)
    merged = _Codes()
    renumber = merged.of(str(labels[i]) for i in used.tolist())
    return categorical(renumber[codes], list(merged))


def _sync_kind(name: Any) -> str:
    """`Stream Wait Event` → `stream-wait-event`; `Event Sync` → `event`."""
    return re.sub(r"\W+", "-", re.sub(r"\s*sync(hronize)?$", "", str(name or "").strip().lower())) or "unknown"


_COPY = re.compile(r"(unified )?\b([HDAP]to[HDAP])\b", re.IGNORECASE)
_LONG_COPY = re.compile(r"copy(Host|Device)To(Host|Device)", re.IGNORECASE)  # ROCm's names
_MEMORY_KINDS = ("pageable", "pinned", "device", "array", "managed", "device static", "managed static")


def _memop_kinds(name: str) -> tuple[str, str, str]:
    """Kind, source memory and destination memory out of `Memcpy HtoD (Pageable -> Device)`."""
    inside = re.search(r"\(([^()]*)\)\s*$", name)
    source, arrow, target = (inside[1] if inside else "").rpartition("->")
    if re.match(r"memset|fill", name, re.IGNORECASE):
        return "memset", "", _memory_kind(target)
    if short := _COPY.search(name):
        kind = f"{'unified ' if short[1] else ''}{short[2][0].upper()}to{short[2][-1].upper()}"
    elif long := _LONG_COPY.search(name):
        kind = f"{long[1][0].upper()}to{long[2][0].upper()}"
    else:
        kind = "other"
    return kind, _memory_kind(source if arrow else ""), _memory_kind(target if arrow else "")


def _memory_kind(text: str) -> str:
    kind = text.strip().lower()
    return kind if kind in _MEMORY_KINDS else "unknown"
