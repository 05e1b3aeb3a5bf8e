"""PyTorch profiler traces: the Chrome JSON that Kineto writes, of any age, gzipped or not.

The file is decoded in slices of a few megabytes with a typed decoder that skips what no table holds, so that memory
is bounded by the tables and not by the JSON. Times are converted as decimal text: microseconds with three decimals
need more digits than a float64 has once they pass 2**42, which both absolute epoch times and Kineto's own base do.
"""

from __future__ import annotations

import collections
import contextlib
import decimal
import functools
import gzip
import itertools
import json
import operator
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pacsv

from nsightkit.errors import TraceError
from nsightkit.trace import store
from nsightkit.trace.clean import private_names
from nsightkit.trace.files import uncollected
from nsightkit.trace.model import (
    EVENT_TABLES,
    GPU_TABLES,
    NEUTRAL,
    TABLES,
    TIME_COLUMNS,
    FrameSource,
    Gpu,
    Source,
    TraceMeta,
    capability,
    categorical,
    complete,
    lost_work,
)
from nsightkit.trace.nesting import nesting

__all__ = [
    "CHUNK_BYTES",
    "COLLECTIVE",
    "FORMS",
    "MEMBERS",
    "available_bytes",
    "decode",
    "documents",
    "first_that_decodes",
    "is_packed",
    "open_kineto",
    "short_kernel_name",
]

_Ints = npt.NDArray[np.int64]
_T = TypeVar("_T")

#: No time reaches it, so that the sum of two is below 2**63: 146 years.
_BEYOND_NS = 1 << 62
#: Of a number that is a time at most.
_DIGITS = 400
CHUNK_BYTES = 2 << 20  # measured: fastest of 1, 2, 4, 8 and 16 MiB, and the smallest peak
_REMEDY = "give a trace that torch.profiler exported (export_chrome_trace)"
_AGAIN = "capture or copy it again"

#: Which table the events of a category fill. Names as Kineto prints them today, before 2022 (capitalised; compared in
#: lower case) and in our own exports; ``cuda_``, ``hip_``, ``xpu_`` runtimes and drivers are known by their ending.
#: Everything else (flows, ``gpu_user_annotation``, which is a projection and not work) fills none.
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
    "python_function": "frames",
    "overhead": "overhead",
    "graph_replay": "graphs",
    "os_call": "os_calls",
}
_GPU_SIDE = ("kernels", "memops", "graphs", "syncs")
#: Accelerators with categories of their own. Some report kernels as GPUs do; what else they report fills no table.
_ACCELERATORS = {"mtia": "MTIA", "hpu": "HPU", "xpu": "XPU", "privateuse1": "PrivateUse1"}
#: What `tensorboard_trace_handler` calls its files: the host, the process, the time.
_WORKER = re.compile(r"(.+)_\d+\.\d{10,}(?:\.pt)?\.trace\.json(?:\.gz)?")
#: Any of these tables shows, where it has rows, that a table was recorded; for the rest only its own rows do.
_SHOWN_BY = {
    **dict.fromkeys(GPU_TABLES, (*_GPU_SIDE, "calls")),
    "ranges": ("ranges", "ops"),
    "overhead": ("overhead", "calls"),
}

#: `record_function` blocks that PyTorch itself opens and that old versions file among the operators.
_ANNOTATION = re.compile(r"ProfilerStep#\d+$|enumerate\(DataLoader\)#|Optimizer\.(step|zero_grad)#")
_CALL_SUFFIX = re.compile(r"(_pt(sz|ds))?(_v\d{4,})?(_pt(sz|ds))?$")  # `_v2` belongs to the name

#: Columns of numbers, and the members of an event's `args` that they are, in Kineto's files and in our own exports.
_GPU_MEMBERS = {"correlation": "correlation", "process": "process"}
MEMBERS = {
    "kernels": {
        **_GPU_MEMBERS,
        "registers": "registers per thread",
        "dynamic_shared_bytes": "shared memory",  # which is the sum of static and dynamic
        "static_shared_bytes": "static shared memory",
        "graph_node": "graph node id",
        "sequence": "Seq",
    },
    "memops": {**_GPU_MEMBERS, "bytes": "bytes", "graph_node": "graph node id"},
    "graphs": {**_GPU_MEMBERS, "graph_id": "graph id"},
    "syncs": _GPU_MEMBERS,
    "calls": {"correlation": "correlation"},
    "ops": {"correlation": "External id", "sequence": "Sequence number", "forward_thread": "Fwd thread id"},
}
#: What is kept of a collective's description, on its kernels and on the operators that launch them.
COLLECTIVE = (
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Process Group Name",
    "Process Group Description",
    "Group size",
    "Process Group Ranks",
    "Src Rank",
    "Dst Rank",
)
_ABSENT = msgspec.Raw(b"")
#: What we use of an event's args, and what stands for an absent one.
_ARGS: dict[str, Any] = {
    **{member: NEUTRAL.get(column, 0) for members in MEMBERS.values() for column, member in members.items()},
    **dict.fromkeys(COLLECTIVE),
    **dict.fromkeys(("device", "stream", "cuda_sync_kind", "kernel")),
    "name": None,  # of metadata events
    # left undecoded, as few distinct ones stand for many events
    **dict.fromkeys(("grid", "block", "Input Dims", "Input type", "Concrete Inputs"), _ABSENT),
    # written by our own export only
    **dict.fromkeys(("short name", "end thread", "duration_ns")),
    "process": -1,
    "domain": "",
    "kind": "annotation",
    "open": False,
}


def _field(member: str) -> str:
    return member.lower().replace(" ", "_")


# Any: the same member holds an int here and a string there.
_Members: Any = msgspec.defstruct(
    "_Members",
    [(_field(key), Any if absent is not _ABSENT else msgspec.Raw, absent) for key, absent in _ARGS.items()],
    rename={_field(key): key for key in _ARGS},
    frozen=True,
    gc=False,
)


class _Args(_Members, frozen=True, gc=False):  # type: ignore[call-arg,misc]
    """What we use of an event's args: :data:`_ARGS`, "External id" as ``external_id``."""


_NO_ARGS = _Args()


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: msgspec.Raw = _ABSENT
    dur: msgspec.Raw = _ABSENT
    args: _Args | None = None
    # written by our own export only: the process and thread of an event that is drawn elsewhere
    place: list[int] | None = None


class _Document(msgspec.Struct, Generic[_T]):
    events: list[_T] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="traceEvents")
    schema: Any = msgspec.field(default=None, name="schemaVersion")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    driver: Any = msgspec.field(default=None, name="cuda_driver_version")
    ours: Any = msgspec.field(default=None, name="nsightkit")  # written by our own export only
    file: Any = msgspec.field(default=None, name="traceName")


def open_kineto(path: str | os.PathLike[str], *, cache: bool = True) -> Source:
    """Open a PyTorch profiler trace.

    Parameters
    ----------
    path : path-like
        Chrome JSON as `export_chrome_trace` writes it (any version), or as :func:`nsightkit.trace.chrome.write`
        does; gzip is known by its magic bytes, not by the name. A bare JSON list of events is read too.
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
    return store.cached(Path(path), lambda: FrameSource(*decode(path)), "kineto" if cache else None)


@uncollected()
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
    tables, form, problem = first_that_decodes(path, lambda texts: _collected(path, texts))
    if form == "mended":
        tables.notes.append(f"The JSON was malformed and was repaired ({problem}).")
    return tables.finish()


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
    text = _without_arguments(name.replace("(anonymous namespace)", "").replace("operator()", "operator"))
    words = re.split("[<(]", text)[0].split()  # a "<" that is left is that of a name cut short
    return (words[-1].rsplit("::", 1)[-1] if words else "") or name


def _without_arguments(text: str) -> str:
    """Drop template arguments: all that stands between angle brackets that match."""
    kept: list[str] = []
    opened: list[int] = []  # of each "<" without its ">", its place in `kept`
    for piece in re.split("([<>])", text):
        if piece == ">" and opened:
            del kept[opened.pop() :]
            continue
        if piece == "<":
            opened.append(len(kept))
        kept.append(piece)
    return "".join(kept)


# --- from the file to JSON documents -------------------------------------------------------------------------------

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
#: All up to the last place between two events. A quote inside a string is escaped, so this ends in no string; should it
#: end between objects nested in `args`, the slice is not JSON and the whole is decoded in one piece.
_WHOLE = re.compile(rb'(?s)(.*\})\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id|args|s|bp)"\s*:)')
_OPEN = b'{"traceEvents":['
_BYTE_ORDER = b"\xef\xbb\xbf"
#: How a file may be decoded, the leanest way first.
FORMS = ("slices", "one piece", "mended")
_BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def first_that_decodes(path: str | os.PathLike[str], take: Callable[[Iterator[bytes]], _T]) -> tuple[_T, str, str]:
    """Take a file's documents: in slices, else in one piece, else in one piece and mended.

    Parameters
    ----------
    path : path-like
    take : callable
        Decodes an iterator of JSON documents.

    Returns
    -------
    object
        What `take` gave.
    str
        Which of :data:`FORMS` it decoded.
    str
        What was wrong with the form before.

    Raises
    ------
    TraceError
        It cannot be mended, or is not JSON.
    """
    try:
        return take(documents(path, "slices")), "slices", ""
    except _BROKEN as error:
        problem = str(error)
    text, bare = _document(path)
    try:
        return take(iter([text])), "one piece", problem
    except _BROKEN as error:
        problem = str(error)
    with contextlib.suppress(*_BROKEN):
        return take(iter([_mended(text, bare)])), "mended", problem
    raise TraceError(path, f"is not a PyTorch profiler trace, or holds broken JSON ({problem})", _AGAIN)


def documents(path: str | os.PathLike[str], form: str) -> Iterator[bytes]:
    """Give a file as JSON documents of the same shape, each with some of the events.

    Parameters
    ----------
    path : path-like
    form : str
        One of :data:`FORMS`.
    """
    if form == "slices":
        yield from _slices(path)
    else:
        text, bare = _document(path)
        yield _mended(text, bare) if form == "mended" else text


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Whether a file is gzipped, whatever its name.

    Parameters
    ----------
    path : path-like
    """
    with open(path, "rb") as file:  # noqa: PTH123 - path-like
        return file.read(2) == b"\x1f\x8b"


#: What a gzip file may unpack to. Each event of a profiler has times and numbers of its own: traces pack 10 to 35 to
#: one, and up to 55 to one when they are written again with wide margins. Deflate packs up to 1,030 to one.
_RATIO, SMALL_BYTES = 100, 16 << 20


def _blocks(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """A file's bytes, unpacked, as long as an honest file could hold them."""
    packed, size = is_packed(path), 0
    with open(path, "rb") as file:  # noqa: PTH123 - path-like
        stream: Any = gzip.GzipFile(fileobj=file) if packed else file
        try:
            while block := stream.read(CHUNK_BYTES):
                size += len(block)
                if packed and size > max(SMALL_BYTES, _RATIO * file.tell()):
                    problem = f"unpacks to more than {_RATIO} times its size, which no profiler's trace does"
                    raise TraceError(path, problem, "unpack it and look at it first")
                yield block
        except EOFError as error:
            raise TraceError(path, "is a truncated gzip file", _AGAIN) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(path, f"is a damaged gzip file ({error})", _AGAIN) from error


#: Bytes of memory that decoding in one piece and mending take at most for each such byte, besides :data:`_COPIES` of
#: the text: an event or its args; a value; a name; an escape.
_TAKES = {b"{": 450, b",": 64, b":": 32, b"\\": 64}
_COPIES = 3
#: Memory that a gzip file may take in one piece: so much for each of its bytes, and so much in any case.
_PIECE_RATIO, _SMALL_PIECE = 512, 512 << 20


def _in_one_piece(path: str | os.PathLike[str], blocks: Iterable[bytes]) -> bytes:
    """Join blocks, if what they decode to fits memory and what an honest file could hold."""
    left = room = available_bytes()
    if is_packed(path):
        left = room = min(room, max(_SMALL_PIECE, _PIECE_RATIO * os.stat(path).st_size))  # noqa: PTH116 - path-like
    parts = []
    for block in blocks:
        left -= _COPIES * len(block) + sum(block.count(sign) * size for sign, size in _TAKES.items())
        if left < 0:
            problem = "holds JSON that is broken or laid out unlike a profiler's, and takes more memory to decode than"
            raise TraceError(path, f"{problem} {room / 1e9:.2g} GB", "export it again with export_chrome_trace")
        parts.append(block)
    return b"".join(parts)


def available_bytes() -> int:
    """Memory that this process can still get; without a limit where the system does not say."""
    available = sys.maxsize
    for file, pattern, unit in (
        ("/proc/meminfo", r"(?m)^MemAvailable:\s*(\d+) kB$", 1024),
        ("/sys/fs/cgroup/memory.max", r"(\d+)", 1),
    ):
        with contextlib.suppress(OSError):
            if match := re.search(pattern, Path(file).read_text("ascii")):
                available = min(available, int(match[1]) * unit)
    return available


def _document(path: str | os.PathLike[str]) -> tuple[bytes, bool]:
    """A whole file as one JSON document, and whether it was a bare list of events."""
    text = _in_one_piece(path, _blocks(path)).removeprefix(_BYTE_ORDER).strip()
    bare = text.startswith(b"[")
    return _OPEN + text[1:] + b"}" if bare else text, bare


def _slices(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Cut the file into small documents of the same shape, each with some of the events."""
    blocks = _blocks(path)
    rest, begin, end = next(blocks, b"").removeprefix(_BYTE_ORDER).lstrip(), b"", b""
    if rest.startswith(b"["):
        rest, end = _OPEN + rest[1:], b"}"
    for block in blocks:
        found = _WHOLE.match(rest) if begin or _EVENTS.search(rest) else None
        if found is None:  # laid out in no way we know: the rest in one piece
            rest = _in_one_piece(path, itertools.chain((rest, block), blocks))
            break
        yield begin + found[1] + b"]}"
        rest, begin = rest[found.end() :] + block, _OPEN
    yield begin + rest + end


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
        msgspec.json.decode(text, type=_Document[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        if trailing := re.search(r"trailing characters \(byte (\d+)\)", str(error)):
            text = text[: int(trailing[1]) - 1]
    return text


def _mended_escape(match: re.Match[bytes]) -> bytes:
    if match[2] and match[2][:1] in b"dD" and match[2][1:2] in b"89abcdefABCDEF":
        return b"\\ufffd"  # half of a surrogate pair
    return match[0] if match[1] or match[2] else b"\\\\"


# --- from documents to columns -------------------------------------------------------------------------------------


def _numbering() -> dict[Any, int]:
    """Numbers things in the order of their first appearance."""
    return collections.defaultdict(itertools.count().__next__)


def _place(event: _Event, _args: Any = None) -> tuple[Any, Any]:
    return (event.pid, event.tid) if event.place is None or len(event.place) != 2 else (event.place[0], event.place[1])


def _collective(args: Any) -> str:
    """Describe the collective that a kernel or an operator belongs to, as JSON; "" where it belongs to none."""
    if args.collective_name is None:
        return ""
    known = {name: value for name in COLLECTIVE if (value := getattr(args, _field(name))) is not None}
    return json.dumps(known, separators=(",", ":"))


def _given_inputs(_event: _Event, args: Any) -> tuple[bytes, ...]:
    given = args.input_dims, args.input_type, args.concrete_inputs
    return tuple(map(bytes, given)) if any(given) else ()


_Made = dict[str, Callable[[_Event, Any], Any]]
_ON_GPU: _Made = {
    "device": lambda event, args: event.pid if args.device is None else args.device,
    "stream": lambda event, args: event.tid if args.stream is None else args.stream,
}
#: Further columns of numbers, and what they are of an event and its args.
_NUMBERS: dict[str, _Made] = {
    "kernels": {
        **_ON_GPU,
        "external_id": lambda _, args: args.external_id,
    },
    **dict.fromkeys(("memops", "graphs", "syncs"), _ON_GPU),
    "ranges": {"open": lambda _, args: args.open is True},
}
_NAMED: _Made = {"name": lambda event, _: event.name or ""}
_ON_CPU: _Made = {"thread": _place, **_NAMED}
#: Columns of anything else, which are numbers of distinct things until all things are known: a thread is a (pid, tid),
#: and of the others :data:`_TEXTS` knows the text.
_THINGS: dict[str, _Made] = {
    "kernels": {
        **_NAMED,
        "short_name": lambda event, args: (event.name or "",) if args.short_name is None else _text(args.short_name),
        "collective": lambda _, args: _collective(args),
        "grid": lambda _, args: bytes(args.grid),
        "block": lambda _, args: bytes(args.block),
    },
    "memops": dict.fromkeys(("kind", "src_kind", "dst_kind"), _NAMED["name"]),
    "syncs": {"kind": lambda event, args: _text(args.cuda_sync_kind) or event.name or ""},
    "ranges": {
        **_ON_CPU,
        "domain": lambda _, args: _text(args.domain),
        "kind": lambda _, args: _text(args.kind) or "annotation",
        "end_thread": lambda e, args: (_place(e)[0], args.end_thread) if _text(args.end_thread) else _place(e),
    },
    "ops": {
        **_ON_CPU,
        "inputs": _given_inputs,
    },
    "calls": {**_ON_CPU, "kernel": lambda _, args: _text(args.kernel) if args.kernel else ""},
    **dict.fromkeys(("os_calls", "overhead", "frames"), _ON_CPU),
}
#: The least value of columns that are not any number; it stands for what is out of range, too.
_LEAST = {
    "device": -1,
    **dict.fromkeys(("bytes", "registers", "static_shared_bytes", "dynamic_shared_bytes"), 0),
}
#: More of a kind than any capture has: analyses look at each by itself.
_MOST = {"process": 1_000, "thread": 10_000, "device": 1_000}
#: Columns that are numbered together, whatever their table.
_SHARED = {"thread": "threads", "end_thread": "threads", "collective": "collectives"}
#: What is counted of events that cannot be taken as they are.
_MALFORMED = "malformed events (no phase or no usable time) were left out"
_EARLY = "events without a valid start (negative, or clamped to 0) were left out"
_BACKWARDS = "negative durations were set to 0"
_WHOLE_US = "Times are whole microseconds (PyTorch before 2.4): short kernels last 0 or 1 µs."


@functools.lru_cache(1 << 16)
def _table_of(category: str | None) -> str | None:
    lower = (category or "").lower()
    return "calls" if lower.endswith(("_runtime", "_driver")) else _CATEGORIES.get(lower)


@functools.lru_cache(1 << 16)
def _annotates(name: str | None) -> bool:
    return _ANNOTATION.match(name or "") is not None


def _collected(path: str | os.PathLike[str], documents: Iterable[bytes]) -> _Tables:
    tables = _Tables(path)
    try:
        for text in documents:
            tables.add(text)
    except msgspec.ValidationError as error:
        raise TraceError(path, f"is JSON, but not a Chrome trace ({error})", _REMEDY) from error
    if not tables.has_events:
        raise TraceError(path, "is JSON, but not a Chrome trace (it has no traceEvents)", _REMEDY)
    if tables.phases.keys() <= {""} and (tables.phases or "schema" not in tables.head):
        raise TraceError(path, "is JSON, but its traceEvents are not trace events", _REMEDY)
    if tables.is_foreign:
        problem = "is a Chrome trace, but not of PyTorch's profiler (no event has a category that it writes)"
        raise TraceError(path, problem, _REMEDY)
    return tables


class _Tables:
    """Columns of the events seen so far."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self.head: dict[str, Any] = {}
        self.has_events = False
        self.phases = collections.Counter[str]()  # events by phase; to have one is what makes JSON a trace
        self.notes: list[str] = []
        self._faults = collections.Counter[str]()
        self._unread = collections.Counter[str]()  # events that fill no table, by category
        self._whole_us = True
        self._capture: tuple[int, int] | None = None  # start and end of the capture, where events say so
        self._labels: list[tuple[Any, Any, str]] = []  # (pid, tid, thread name)
        self._codes: dict[Any, dict[Any, int]] = collections.defaultdict(_numbering)
        self._codes["collectives"][""]  # its code is 0
        self._announced: dict[int, tuple[int, int]] = {}  # {External id: (code of the collective, sequence)}
        self._parts: dict[str, list[dict[str, npt.NDArray[Any]]]] = collections.defaultdict(list)
        self._decode = msgspec.json.Decoder(_Document[_Event]).decode

    @property
    def is_foreign(self) -> bool:
        """Whether there are events, but none that fills a table, nor anything else that the profiler writes."""
        written = self._parts or "Trace" in self._unread or {"schema", "ours"} & self.head.keys()
        return not written and any(category.lower().partition("_")[0] not in _ACCELERATORS for category in self._unread)

    def add(self, text: bytes) -> None:
        """Take the events of one document."""
        try:
            document = self._decode(text)
        except msgspec.ValidationError:
            document = self._salvaged(text)
        events = document.events
        given = ((key, getattr(document, key)) for key in document.__struct_fields__ if key != "events")
        self.head = {key: value for key, value in given if value is not None} | self.head
        if events is msgspec.UNSET:
            return
        self.has_events = True
        self.phases.update(event.ph for event in events)
        found: dict[str, list[_Event]] = {table: [] for table in TABLES}
        captures: list[_Event] = []
        for event in events:
            ph = event.ph
            if ph in ("X", "b"):
                table = _table_of(event.cat)
                if table is None:
                    self._unread[event.cat or ""] += 1
                    if event.cat == "Trace":
                        captures.append(event)
                elif ph == "X" or (event.args is not None and event.args.duration_ns is not None):
                    found["ranges" if table == "ops" and _annotates(event.name) else table].append(event)
            elif ph == "M" and event.name == "thread_name" and event.args is not None:
                self._labels.append((*_place(event), _text(event.args.name).strip()))
        if captures:
            self._widen(captures)
        for table, rows in found.items():
            if rows:
                self._take(table, rows)

    def _widen(self, captures: list[_Event]) -> None:
        """Take the start and end of the capture from the events that say so."""
        start, valid = _nanoseconds([event.ts for event in captures])
        duration, timed = _nanoseconds([event.dur for event in captures])
        usable = valid & timed & (start >= 0) & (duration > 0)
        if usable.any():
            begin, end = int(start[usable].min()), int((start + duration)[usable].max())
            known = self._capture or (begin, end)
            self._capture = min(begin, known[0]), max(end, known[1])

    def _salvaged(self, text: bytes) -> _Document[_Event]:
        """Decode the document without the events that have no shape we know."""
        raw = msgspec.json.decode(text, type=_Document[msgspec.Raw])
        decode, events = msgspec.json.Decoder(_Event).decode, []
        for item in raw.events or ():
            try:
                events.append(decode(item))
            except msgspec.ValidationError:
                self.phases[""] += 1
        return msgspec.structs.replace(raw, events=events)  # type: ignore[arg-type]

    def _codes_of(self, table: str, column: str) -> dict[Any, int]:
        return self._codes[_SHARED.get(column, (table, column))]

    def _take(self, table: str, events: list[_Event]) -> None:
        start, valid = _nanoseconds([e.ts for e in events])
        duration, _ = _nanoseconds([e.dur for e in events])
        args = [e.args or _NO_ARGS for e in events]
        if table == "ranges" and any(exact := [a.duration_ns for a in args]):
            duration = np.where([d is None for d in exact], duration, _ints(exact))
        valid &= duration < _BEYOND_NS - start
        placed = valid & (start >= 0)
        self._faults += {_MALFORMED: int((~valid).sum()), _EARLY: int((valid & ~placed).sum())}
        if not placed.all():
            events = list(itertools.compress(events, placed.tolist()))
            args = list(itertools.compress(args, placed.tolist()))
            start, duration = start[placed], duration[placed]
        self._faults[_BACKWARDS] += int((duration < 0).sum())
        self._whole_us = self._whole_us and not (start % 1000).any()
        columns: dict[str, Any] = {"start_ns": start, "end_ns": start + np.maximum(duration, 0)}
        for column, member in MEMBERS.get(table, {}).items():
            given = list(map(operator.attrgetter(_field(member)), args))
            columns[column] = _ints(given, NEUTRAL.get(column, 0))
        for column, number in _NUMBERS.get(table, {}).items():
            columns[column] = _ints(list(map(number, events, args)))
        for column, thing in _THINGS.get(table, {}).items():
            number_of = self._codes_of(table, column).__getitem__
            columns[column] = np.fromiter(map(number_of, map(thing, events, args)), np.int64)
        if table == "kernels":
            columns["dynamic_shared_bytes"] -= columns["static_shared_bytes"]
        elif table == "ops":
            self._announced |= {
                _int(a.external_id, 0): (self._codes["collectives"][_collective(a)], _int(a.seq, -1))
                for a in args
                if a.collective_name is not None
            }
        for column, least in _LEAST.items():
            if column in columns:
                columns[column] = _limited(columns[column], least, TABLES[table][column])
        self._parts[table].append(columns)

    # --- from columns to tables ---

    def finish(self) -> tuple[dict[str, pd.DataFrame], TraceMeta]:
        """All tables, and what is known about the capture."""
        raw: dict[str, dict[str, Any]] = {
            table: {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
            for table in TABLES
            if (parts := self._parts.pop(table, []))
        }
        ours = self.head["ours"] if isinstance(self.head.get("ours"), dict) else {}
        # What our own export took off all times.
        last_ns = max((int(columns["end_ns"].max()) for columns in raw.values() if len(columns["end_ns"])), default=0)
        t0_ns = _int(ours.get("t0_ns"), None, 1 - _BEYOND_NS, _BEYOND_NS - last_ns)
        if t0_ns is None:
            raw = self._without_clamped(raw)
            t0_ns = 0
        threads = self._threads()
        self._refuse_crowds("thread", threads)
        self._refuse_crowds("process", threads >> 24)
        self._refuse_crowds("device", *(columns["device"] for columns in raw.values() if "device" in columns))
        frames: dict[str, pd.DataFrame] = {}
        for table, columns in raw.items():
            for column in TIME_COLUMNS:
                columns[column] += t0_ns
            if table == "kernels":
                self._describe(columns)
            for column in _THINGS.get(table, {}):
                codes, things = columns.pop(column), self._codes_of(table, column)
                match column:
                    case "thread" | "end_thread":
                        columns[column] = threads[codes]
                    case "grid" | "block":
                        sizes = np.array(list(map(_three, things)), np.int64)[codes]
                        columns |= dict(zip((f"{column}_{axis}" for axis in "xyz"), sizes.T, strict=True))
                    case _:
                        columns[column] = categorical(codes, list(map(_TEXTS.get((table, column), str), things)))
            if "thread" in columns:
                columns["process"] = columns["thread"] >> 24
            if table == "ranges":
                columns["level"], columns["parent"] = nesting(
                    columns["thread"],
                    columns["start_ns"],
                    columns["end_ns"],
                    tolerance=1000 if self._whole_us else 0,
                    alone=np.asarray(columns["kind"] == "startend"),
                )
            frames[table] = complete(table, pd.DataFrame(columns, copy=False))
            columns.clear()
        _give_processes(frames)
        return frames, self._meta(frames, threads, ours)

    def _refuse_crowds(self, column: str, *parts: npt.NDArray[Any]) -> None:
        """Refuse more processes, threads or devices than a capture can have."""
        count = len(set[int]().union(*(np.unique(part).tolist() for part in parts)))
        if count > _MOST[column]:
            problem = f"has {count:,} different values in its columns {column}, more than {_MOST[column]:,}"
            raise TraceError(self._path, problem, "capture less at a time")

    def _without_clamped(self, raw: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Kineto clamps a start that it could not place to 0, hours before everything else."""
        starts = np.concatenate([np.empty(0, np.int64), *(columns["start_ns"] for columns in raw.values())])
        later = starts > 0
        if later.all() or not later.any() or starts[later].min() < 3600 * 10**9:
            return raw
        self._faults[_EARLY] += int((~later).sum())
        kept = {table: columns["start_ns"] > 0 for table, columns in raw.items()}
        return {table: {c: v[kept[table]] for c, v in columns.items()} for table, columns in raw.items()}

    def _describe(self, kernels: dict[str, Any]) -> None:
        """Complete what kernels say of their collectives by what the operators that launched them say."""
        external = kernels.pop("external_id")
        announced = pd.DataFrame.from_dict(self._announced, orient="index", columns=["collective", "sequence"])
        said = announced.drop(index=0, errors="ignore").reindex(external, fill_value=-1).astype("int64")
        code, sequence = kernels["collective"], kernels["sequence"]
        kernels["collective"] = np.where((code == 0) & (said["collective"] >= 0), said["collective"], code)
        kernels["sequence"] = np.where(sequence < 0, said["sequence"], sequence)

    def _threads(self) -> _Ints:
        """``process << 24 | tid`` of every (pid, tid) seen; -1 is the profiler itself."""
        unnamed, threads = _numbering(), []
        for pid, tid in self._codes["threads"]:
            process = _int(pid, None, -1, 1 << 38)
            ident = _int(tid, None, 0, 1 << 24) if not isinstance(tid, str) or tid.isdecimal() else None
            threads.append((-2 - unnamed[pid] if process is None else process, ident))
        taken = set(threads)
        free: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)
        for i, (process, ident) in enumerate(threads):
            if ident is None:
                threads[i] = process, next(n for n in free[process] if (process, n) not in taken)
        return np.array([-1 if process == -1 else process << 24 | (ident or 0) for process, ident in threads], np.int64)

    def _meta(self, frames: dict[str, pd.DataFrame], threads: _Ints, ours: dict[str, Any]) -> TraceMeta:
        head, driver = self.head, _int(self.head.get("driver"), 0)
        place_of = dict(zip(self._codes["threads"], threads.tolist(), strict=True))
        unread = {
            name: sum(n for c, n in self._unread.items() if c.lower().partition("_")[0] == start)
            for start, name in _ACCELERATORS.items()
        }
        lost = [] if frames.keys() & set(GPU_TABLES) or "calls" not in frames else lost_work(frames["calls"]["name"])
        # Work that was lost, or could not be read, was not recorded, other than work that did not happen.
        shown_by = _SHOWN_BY | dict.fromkeys(GPU_TABLES if lost or any(unread.values()) else (), GPU_TABLES)
        missing = [t for t in EVENT_TABLES if not any(len(frames.get(s, ())) for s in shown_by.get(t, (t,)))]
        self._faults[_MALFORMED] += self.phases[""]
        whole_us = self._whole_us and any(map(len, frames.values()))
        return TraceMeta(
            tool=_text(ours.get("tool")) or "pytorch-profiler",
            tool_version=_text(ours.get("tool_version")) or None,
            schema=_text(head.get("schema")) or None,
            driver=_text(ours.get("driver")) or (f"CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else None),
            gpus=_gpus(head.get("devices")),
            missing=[t for t in TABLES if t in ours["missing"]] if isinstance(ours.get("missing"), list) else missing,
            notes=[
                *self.notes,
                *lost,
                *(
                    f"Events of an accelerator that nsightkit does not read were left out: {count:,} of {name}."
                    for name, count in unread.items()
                    if count
                ),
                *([_WHOLE_US] if whole_us else []),
                *(f"{self._faults[w]} {w}." for w in (_MALFORMED, _EARLY, _BACKWARDS) if self._faults[w]),
            ],
            window_ns=self._window(ours.get("window_ns")),
            # Old versions print the same thread id now as a number, now as a string.
            thread_names={
                place_of[key]: name
                for pid, tid, name in self._labels
                for key in ((pid, tid), (pid, str(tid)))
                if name and place_of.get(key, -1) != -1
            },
            distributed=dict(head["distributed"]) if isinstance(head.get("distributed"), dict) else {},
            private=_private(head),
        )

    def _window(self, given: Any) -> tuple[int, int] | None:
        """Start and end of the capture: those that our own export gives, else of the events that say so."""
        if isinstance(given, list) and len(given) == 2:
            first, last = (_int(moment, None, 1 - _BEYOND_NS, _BEYOND_NS) for moment in given)
            if first is not None and last is not None:
                return min(first, last), max(first, last)
        return self._capture


def _private(head: dict[str, Any]) -> dict[str, str]:
    """What a trace says of the machine that wrote it, such as the file's name: host, process, time."""
    file = head.get("file")
    path = file[:4096] if isinstance(file, str) else ""
    pairs = [("", path)]
    worker = _WORKER.fullmatch(re.split(r"[/\\]", path)[-1])
    if worker:
        pairs.append(("HOSTNAME", worker[1]))
    distributed = head.get("distributed")
    if isinstance(distributed, dict):
        pairs += [(str(name), value) for name, value in distributed.items() if isinstance(value, str)]
    return private_names(pairs)


def _gpus(devices: Any) -> list[Gpu]:
    return [
        Gpu(
            device=_int(device.get("id"), i),
            name=_text(device.get("name")) or None,
            sm_count=_int(device.get("numSms"), None),
            memory_bytes=_int(device.get("totalGlobalMem"), None),
            compute_capability=capability(
                _int(device.get("computeMajor"), None), _int(device.get("computeMinor"), None)
            ),
        )
        for i, device in enumerate(devices if isinstance(devices, list) else [])
        if isinstance(device, dict)
    ]


def _give_processes(frames: dict[str, pd.DataFrame]) -> None:
    """GPU rows carry no process: theirs is that of the call that launched them.

    With several processes the call is found by correlation; where two processes use the same number, it is the last
    one that began before the operation did.
    """
    launched = ["correlation", "start_ns"]
    calls = frames.get("calls", complete("calls"))
    others = [frames[t] for t in ("ops", "ranges") if t in frames and not len(calls)]
    processes = pd.concat([frame["process"] for frame in (calls, *others)]).value_counts().index
    for table in frames.keys() & _GPU_SIDE:
        process = frames[table]["process"].copy()
        orphans = frames[table].loc[process < 0, launched].sort_values("start_ns")
        process[orphans.index] = processes[0] if len(processes) else 0
        if len(processes) > 1 and len(calls):
            launching = calls.loc[calls["correlation"] != 0, [*launched, "process"]].sort_values("start_ns")
            # Forward too: a clock that is off by a little may put the call after its kernel.
            for direction in ("forward", "backward"):
                found = pd.merge_asof(orphans, launching, on="start_ns", by="correlation", direction=direction)
                owner = found.set_index(orphans.index)["process"].dropna()
                process[owner.index] = owner.astype("int64")
        frames[table] = frames[table].assign(process=process)


# --- values --------------------------------------------------------------------------------------------------------


def _nanoseconds(raw: list[msgspec.Raw]) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Nanoseconds of JSON numbers in microseconds, exactly; and which of them are numbers at all.

    Arrow's decimal parser reads the text into 128-bit integers of thousandths: nothing passes through a float.
    """
    n = len(raw)
    column: Any = ()
    with contextlib.suppress(pa.ArrowInvalid):
        column = pacsv.read_csv(
            pa.BufferReader(b"\n".join(raw) + b"\n"),
            read_options=pacsv.ReadOptions(column_names=["us"], use_threads=False, block_size=CHUNK_BYTES),
            parse_options=pacsv.ParseOptions(ignore_empty_lines=False),
            convert_options=pacsv.ConvertOptions(
                column_types={"us": pa.decimal128(38, 3)}, null_values=["", "null"], strings_can_be_null=True
            ),
        )["us"].combine_chunks()
    if len(column) != n:  # more than three decimals, text, booleans
        column = pa.array(map(_decimal, raw), pa.decimal128(38, 3))
    halves = np.frombuffer(column.buffers()[1], np.int64)[2 * column.offset :][: 2 * n]
    low, high = halves[::2], halves[1::2]
    valid = np.asarray(column.is_valid()) & (high == low >> 63) & (low > -_BEYOND_NS) & (low < _BEYOND_NS)
    return np.where(valid, low, 0), valid


def _decimal(number: msgspec.Raw) -> decimal.Decimal | None:
    """Read one number, rounded to three decimals; None where it is not a number, or longer than any profiler's."""
    if len(bytes(number)) > _DIGITS:
        return None
    try:
        value = decimal.Decimal(bytes(number).decode().strip('"')).quantize(decimal.Decimal("0.001"))
    except (decimal.InvalidOperation, ValueError):
        return None
    return value if value.is_finite() else None


def _int(value: Any, default: _T, least: int = -(1 << 63), beyond: int = 1 << 63) -> int | _T:
    """Make an integer of what JSON holds in its place; the default where it is not one, or is out of range."""
    if isinstance(value, str):
        digits = re.fullmatch(r"\D*?(-?\d+)(?:\.0*)?\D*", value.strip())  # "7", "stream 7", "stream 7 (sync)"
        value = digits and digits[1]
    try:
        return number if least <= (number := int(value)) < beyond else default
    except (TypeError, ValueError, OverflowError):
        return default


def _ints(values: Sequence[Any], absent: int = 0) -> _Ints:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        column = np.array(values, dtype=np.int64)
        if column.ndim == 1:  # lists of the same length make a table
            return column
    return np.array([_int(v, absent) for v in values], dtype=np.int64)


def _limited(values: _Ints, least: int, dtype: str) -> npt.NDArray[Any]:
    """Replace numbers that are below the least, or do not fit the type, by the least."""
    fits = (values >= least) & (values <= np.iinfo(dtype).max)
    return np.where(fits, values, least).astype(dtype)


def _text(value: Any) -> str:
    """Take text or a number as text, and nothing else: lists in lists are long to spell out."""
    return str(value) if isinstance(value, (str, int, float)) else ""


def _three(text: bytes) -> list[int]:
    """Three numbers out of a list, 0 for what is absent or no size."""
    given: Any = None
    with contextlib.suppress(*_BROKEN):
        given = msgspec.json.decode(text)
    numbers = given if isinstance(given, list) else []
    return [_int(number, 0, 0, 1 << 31) for number in [*numbers[:3], 0, 0, 0][:3]]


def _inputs(parts: Sequence[bytes]) -> str:
    """Give an operator's inputs as one JSON text, however the file spaces them; "" where none are recorded."""
    try:
        return json.dumps([json.loads(part or b"[]") for part in parts], separators=(",", ":")) if any(parts) else ""
    except (ValueError, RecursionError):  # a number no Python takes; what its inputs were does not matter then
        return ""


def _sync_kind(name: str) -> str:
    """`Stream Wait Event` → `stream-wait-event`; `Event Sync` → `event`."""
    lower = name.strip().lower()
    ending = "synchronize" if lower.endswith("synchronize") else "sync"
    return re.sub(r"\W+", "-", lower.removesuffix(ending).rstrip()) or "unknown"


#: `Memcpy HtoD (…)`, and ROCm's `CopyHostToDevice`.
_COPY = re.compile(
    r"(unified )?\b([HDAP])to([HDAP])\b|copy([HD])(?:ost|evice)To([HD])(?:ost|evice)",
    re.IGNORECASE,
)
_MEMORY_KINDS = ("pageable", "pinned", "device", "array", "managed", "device static", "managed static")


def _memop_kinds(name: str) -> tuple[str, ...]:
    """Kind, source memory and destination memory out of `Memcpy HtoD (Pageable -> Device)`."""
    inside = re.search(r"\((?:([^()]*)->)?([^()]*)\)\s*$", name)
    source, target = inside.groups("") if inside else ("", "")
    if re.match("memset|fill", name, re.IGNORECASE):
        return "memset", "", _memory_kind(target)
    unified, *letters = copy.groups("") if (copy := _COPY.search(name)) else ("",)
    kind = unified.lower() + "to".join(letter.upper() for letter in letters if letter)
    return kind or "other", _memory_kind(source), _memory_kind(target if source else "")


def _memory_kind(text: str) -> str:
    kind = text.strip().lower()
    return kind if kind in _MEMORY_KINDS else "unknown"


#: By table and column: the text that such a thing stands for; for the rest it is the thing itself.
_TEXTS: dict[tuple[str, str], Callable[[Any], str]] = {
    ("kernels", "short_name"): lambda given: short_kernel_name(given[0]) if isinstance(given, tuple) else given,
    ("memops", "kind"): lambda name: _memop_kinds(name)[0],
    ("memops", "src_kind"): lambda name: _memop_kinds(name)[1],
    ("memops", "dst_kind"): lambda name: _memop_kinds(name)[2],
    ("calls", "name"): lambda name: _CALL_SUFFIX.sub("", name, count=1) or name,
    ("syncs", "kind"): _sync_kind,
    ("ops", "inputs"): _inputs,
}
