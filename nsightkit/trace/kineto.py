"""PyTorch profiler traces: the Chrome JSON that Kineto writes, of any age, gzipped or not.

The file is decoded in slices of a few megabytes with a typed decoder that skips what no table holds, so that memory
is bounded by the tables rather than the JSON. Times are converted as decimal text: microseconds with three decimals
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
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pacsv

from nsightkit.errors import TraceError
from nsightkit.safe import Json
from nsightkit.trace import store
from nsightkit.trace.clean import private_names
from nsightkit.trace.files import uncollected
from nsightkit.trace.model import (
    EVENT_TABLES,
    GPU_TABLES,
    NEUTRAL,
    FrameSource,
    Gpu,
    Source,
    TraceMeta,
    capability,
    categorical,
    lost_work,
)
from nsightkit.trace.nesting import nesting

__all__ = ["CHUNK_BYTES", "open_kineto", "short_kernel_name"]

_Ints = npt.NDArray[np.int64]
_Frames = dict[str, pd.DataFrame]
_T = TypeVar("_T")

#: No time reaches it, so that the sum of two is below 2**63: 146 years.
_BEYOND_NS = 1 << 62
CHUNK_BYTES = 2 << 20  # measured: fastest of 1, 2, 4, 8 and 16 MiB, and the smallest peak
_REMEDY = "give a trace that torch.profiler exported (export_chrome_trace)"
_AGAIN = "capture or copy it again"

#: Which table the events of a category fill. Names as Kineto prints them today and before 2022 (capitalised; compared
#: in lower case); ``cuda_``, ``hip_``, ``xpu_`` runtimes and drivers are known by their ending. Everything else (flows,
#: ``gpu_user_annotation``, which is a projection rather than work) fills none.
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
    "cpu_op": "ops",
    "operator": "ops",
    "python_function": "frames",
    "overhead": "overhead",
    "trace": "captures",  # what the profiler recorded, from start to end: no table of the model
}
_GPU_SIDE = ("kernels", "memops", "syncs")
#: The process to which torch.autograd.profiler, before Kineto, writes its operators.
_OLD_PROFILER = "CPU functions"
#: Any of these tables shows, where it has rows, that a table was recorded; for the rest only its own rows do.
_SHOWN_BY = {
    **dict.fromkeys(GPU_TABLES, (*_GPU_SIDE, "calls")),
    "ranges": ("ranges", "ops"),
    "overhead": ("overhead", "calls"),
}
#: What `tensorboard_trace_handler` calls its files: the host, the process, the time.
_WORKER = re.compile(r"(?:.*[/\\])?([^/\\]+)_\d+\.\d{10,}(?:\.pt)?\.trace\.json(?:\.gz)?")
#: `record_function` blocks that PyTorch itself opens and that old versions file among the operators.
_ANNOTATION = re.compile(r"ProfilerStep#\d+$|enumerate\(DataLoader\)#|Optimizer\.(step|zero_grad)#")
_CALL_SUFFIX = re.compile(r"(_pt(sz|ds))?(_v\d{4,})?(_pt(sz|ds))?$")  # `_v2` belongs to the name
#: More of a kind than any capture has: analyses look at each by itself.
_MOST_PROCESSES = 1_000
_MOST_THREADS = 10_000
_HOUR_NS = 3600 * 10**9
_SIZES = ["grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"]
_WHOLE_US = "Times are whole microseconds (PyTorch before 2.4): short kernels last 0 or 1 µs."


# --- what is decoded -----------------------------------------------------------------------------------------------

_ABSENT = msgspec.Raw(b"")
_Id = int | float | str | None
#: What JSON calls the fields of a collective.
_COLLECTIVE = {
    "collective": "Collective name",
    "elements_in": "In msg nelems",
    "elements_out": "Out msg nelems",
    "dtype": "dtype",
    "group": "Process Group Name",
    "group_size": "Group size",
    "ranks": "Process Group Ranks",
}
_RENAMED = {
    **_COLLECTIVE,
    "external_id": "External id",
    "registers": "registers per thread",
    "dynamic_shared_bytes": "shared memory",
    "graph_node": "graph node id",
    "collective_sequence": "Seq",
    "sequence": "Sequence number",
    "forward_thread": "Fwd thread id",
    "input_dims": "Input Dims",
    "input_types": "Input type",
    "input_values": "Concrete Inputs",
}


class _Args(msgspec.Struct, rename=_RENAMED, frozen=True, gc=False):
    """What we use of an event's args. The same member holds an int here and a string there."""

    device: Any = None
    stream: Any = None
    correlation: Any = 0
    external_id: Any = 0
    registers: Any = 0
    dynamic_shared_bytes: Any = 0  # and static
    graph_node: Any = 0
    bytes: Any = 0
    sequence: Any = -1
    forward_thread: Any = -1
    name: Any = None  # of metadata events
    # Left undecoded, as many events share few distinct ones.
    kernel: msgspec.Raw = _ABSENT
    grid: msgspec.Raw = _ABSENT
    block: msgspec.Raw = _ABSENT
    input_dims: msgspec.Raw = _ABSENT
    input_types: msgspec.Raw = _ABSENT
    input_values: msgspec.Raw = _ABSENT
    # What PyTorch writes of a collective, on its kernels and on the operators that launch them.
    collective: Any = None
    elements_in: Any = None
    elements_out: Any = None
    dtype: Any = None
    group: Any = None
    group_size: Any = None
    ranks: Any = None
    collective_sequence: Any = -1


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: _Id = None
    tid: _Id = None
    ts: msgspec.Raw = _ABSENT
    dur: msgspec.Raw = _ABSENT
    args: _Args = _Args()


class _Device(msgspec.Struct, rename="camel"):
    id: int = 0
    name: str = ""
    compute_major: int | None = None
    compute_minor: int | None = None


class _Document(msgspec.Struct, rename="camel"):
    trace_events: list[_Event] | None = None
    schema_version: int | str = ""
    device_properties: list[_Device] = []
    distributed_info: Json = {}
    trace_name: str = ""
    nsightkit: Any = None  # marks what nsightkit.trace.chrome writes


def open_kineto(path: Path, *, cache: bool = True) -> Source:
    """Open a PyTorch profiler trace.

    Parameters
    ----------
    path : Path
        Chrome JSON as `export_chrome_trace` writes it (any version); gzip is known by its magic bytes, not by the
        name.
    cache : bool, default True
        Whether the tables of a big trace may be kept beside it.

    Returns
    -------
    Source
        All tables in memory, or from the cache. Times are the trace's own ``ts``, in nanoseconds.

    Raises
    ------
    TraceError
        The file is truncated, not JSON, or JSON of another kind.
    """
    return store.cached(path, lambda: _decoded(path), "kineto" if cache else None)


@uncollected()
def _decoded(path: Path) -> Source:
    reader = _Reader(path)
    try:
        for document in _documents(path):
            reader.add(document)
    except msgspec.ValidationError as error:
        problem = f"is JSON, but not a Chrome trace ({error})"
        if "got `array`" in str(error):
            problem = "is a bare list, as other tools write and torch.autograd.profiler did before PyTorch 1.8.1"
        raise TraceError(path, problem, _REMEDY) from error
    except _BROKEN as error:
        raise TraceError(path, f"is not valid JSON ({error})", _AGAIN) from error
    return reader.finish()


# --- from the file to JSON documents -------------------------------------------------------------------------------

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
#: All up to the last place between two events, or between objects nested in `args`.
_WHOLE = re.compile(rb'(?s)(.*\})\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id|args|s|bp)"\s*:)')
_OPEN = b'{"traceEvents":['
_BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: What a gzip file may unpack to. Times and numbers differ from event to event: traces pack 10 to 35 to
#: one, and up to 55 to one when they are written again with wide margins. Deflate packs up to 1,030 to one.
_RATIO = 100
_SMALL_BYTES = 16 << 20
#: A piece of a file that cannot be cut: decoding takes up to 38 times as much memory.
_MOST_BYTES = 16 << 20


def _blocks(path: Path) -> Iterator[bytes]:
    """A file's bytes, unpacked, as long as an honest file could hold them."""
    size = 0
    with path.open("rb") as file:
        is_packed = file.peek(2)[:2] == b"\x1f\x8b"
        stream: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        try:
            while block := stream.read(CHUNK_BYTES):
                size += len(block)
                if is_packed and size > max(_SMALL_BYTES, _RATIO * file.tell()):
                    problem = f"unpacks to more than {_RATIO} times its size, which no profiler's trace does"
                    raise TraceError(path, problem, "unpack it and look at it first")
                yield block
        except EOFError as error:
            raise TraceError(path, "is a truncated gzip file", _AGAIN) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(path, f"is a damaged gzip file ({error})", _AGAIN) from error


def _documents(path: Path) -> Iterator[_Document]:
    """Cut the file into small documents of the same shape, each with some of the events, and decode them."""
    decode = msgspec.json.Decoder(_Document).decode
    head = b""
    rest = b""
    for block in _blocks(path):
        rest += block
        cut = None
        if head or _EVENTS.search(rest):
            cut = _WHOLE.match(rest)
        if len(rest) > _MOST_BYTES:
            problem = f"holds {_MOST_BYTES >> 20} MiB of JSON that is broken, or laid out unlike a profiler's"
            raise TraceError(path, problem, "export it again with export_chrome_trace")
        if cut is not None:
            try:
                document = decode(b"".join((head, memoryview(rest)[: cut.end(1)], b"]}")))
            except msgspec.ValidationError:
                raise
            except _BROKEN:
                continue  # cut between objects in an event, perhaps: the slice grows by the next block
            yield document
            head = _OPEN
            rest = rest[cut.end() :]
    yield decode(head + rest)


# --- from documents to columns -------------------------------------------------------------------------------------


def _numbering() -> dict[Any, int]:
    """Number distinct things in the order of their first appearance."""
    return collections.defaultdict(itertools.count().__next__)


def _texts(codes: Any, things: Iterable[Any], text: Callable[[Any], str]) -> pd.Categorical:
    """Make a column of texts of the numbers of things."""
    used, numbers = pd.factorize(codes)
    known = list(things)
    return categorical(used, [text(known[number]) for number in numbers])


@functools.lru_cache(1 << 16)
def _table_of(category: str) -> str | None:
    lower = category.lower()
    if lower.endswith(("_runtime", "_driver")):
        return "calls"
    return _CATEGORIES.get(lower)


def _collective(event: _Event) -> str:
    """Describe the collective that a kernel or an operator belongs to, as JSON; "" for none."""
    if event.args.collective is None:
        return ""
    known = {}
    for field, name in _COLLECTIVE.items():
        value = getattr(event.args, field)
        if value is not None:
            known[name] = value
    return json.dumps(known, separators=(",", ":"))


def _kernel(event: _Event) -> bytes:
    return bytes(event.args.kernel)


def _sizes(event: _Event) -> tuple[bytes, bytes]:
    return bytes(event.args.grid), bytes(event.args.block)


def _inputs(event: _Event) -> tuple[bytes, bytes, bytes]:
    args = event.args
    return bytes(args.input_dims), bytes(args.input_types), bytes(args.input_values)


#: Columns of numbers: what of an event's args they are.
_ON_GPU = ("device", "stream", "correlation")
_NUMBERS = {
    "kernels": (
        *_ON_GPU,
        "registers",
        "dynamic_shared_bytes",
        "graph_node",
        "collective_sequence",
        "external_id",
    ),
    "memops": (*_ON_GPU, "bytes", "graph_node"),
    "syncs": _ON_GPU,
    "calls": ("correlation",),
    "ops": ("external_id", "sequence", "forward_thread", "collective_sequence"),
}
#: Old versions say the device by the process only, and the stream by the thread.
_INSTEAD = {"device": operator.attrgetter("pid"), "stream": operator.attrgetter("tid")}
#: Columns of anything else, which are numbers of distinct things until all things are known, and these things.
_MADE_OF: dict[str, Callable[[_Event], Any]] = {
    "thread": operator.attrgetter("pid", "tid"),
    "name": operator.attrgetter("name"),
    "kernel": _kernel,
    "sizes": _sizes,
    "inputs": _inputs,
    "collective": _collective,
}
_ON_CPU = ("thread", "name")
_THINGS = {
    "kernels": ("name", "sizes", "collective"),
    "memops": ("name",),
    "syncs": ("name",),
    "calls": (*_ON_CPU, "kernel"),
    "ranges": _ON_CPU,
    "ops": (*_ON_CPU, "inputs", "collective"),
    "frames": _ON_CPU,
    "overhead": _ON_CPU,
    "captures": (),
}


class _Reader:
    """Columns of the events seen so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head = _Document()
        self._left_out = 0
        self._is_old = False
        self._whole_us = True
        self._thread_names: dict[int, str] = {}  # by code of the thread
        self._numbers = {thing: _numbering() for thing in _MADE_OF}
        self._numbers["collective"][""]  # is 0
        self._parts = collections.defaultdict[str, list[dict[str, _Ints]]](list)  # columns by table

    def add(self, document: _Document) -> None:
        """Take the events of one document."""
        if document.nsightkit is not None:
            remedy = "open it in Perfetto, or convert the original trace to .parquet to read it again"
            raise TraceError(self._path, "is a timeline that nsightkit wrote for a viewer", remedy)
        if document.trace_events is not None:
            self._sort(document.trace_events)
            document.trace_events = []
        # The first document has the members before the events, and the last those behind them.
        for field in document.__struct_fields__:
            value = getattr(document, field)
            if value or field == "trace_events":
                setattr(self._head, field, value)

    def _sort(self, events: list[_Event]) -> None:
        """Take events, each into the table of its category."""
        rows: dict[str, list[_Event]] = {table: [] for table in _THINGS}
        for event in events:
            if event.ph == "X":
                table = _table_of(event.cat)
                if table == "ops" and "#" in event.name and _ANNOTATION.match(event.name):
                    table = "ranges"
                if table is not None:
                    rows[table].append(event)
                elif event.pid == _OLD_PROFILER:
                    self._is_old = True
            elif event.ph == "M" and event.name == "thread_name":
                thread = self._numbers["thread"][event.pid, event.tid]
                self._thread_names[thread] = _text(event.args.name).strip()
        for table, of_table in rows.items():
            if of_table:
                self._take(table, of_table)

    def _take(self, table: str, events: list[_Event]) -> None:
        start, is_time = _nanoseconds([event.ts for event in events])
        duration, _ = _nanoseconds([event.dur for event in events])
        is_time &= (start >= 0) & (duration < _BEYOND_NS - start)
        if not is_time.all():
            self._left_out += int((~is_time).sum())
            events = list(itertools.compress(events, is_time.tolist()))
            start = start[is_time]
            duration = duration[is_time]
        self._whole_us = self._whole_us and not (start % 1000).any()
        columns = {"start_ns": start, "end_ns": start + np.maximum(duration, 0)}
        arguments = [event.args for event in events]
        for column in _NUMBERS.get(table, ()):
            values = list(map(operator.attrgetter(column), arguments))
            if column in _INSTEAD and None in values:
                places = map(_INSTEAD[column], events)
                values = [place if value is None else value for value, place in zip(values, places, strict=True)]
            columns[column] = _integers(values, NEUTRAL.get(column, 0))
        for column in _THINGS[table]:
            number = self._numbers[column].__getitem__
            columns[column] = np.fromiter(map(number, map(_MADE_OF[column], events)), np.int64)
        self._parts[table].append(columns)

    # --- from columns to tables ---

    def finish(self) -> Source:
        """All tables, and the description of the capture."""
        if self._head.trace_events is None:
            raise TraceError(self._path, "is JSON, but not a Chrome trace (it has no traceEvents)", _REMEDY)
        if not self._parts and not self._head.schema_version:
            problem = "is a Chrome trace, but not of PyTorch's profiler (no event has a category that it writes)"
            if self._is_old:
                problem = "is an export of torch.autograd.profiler before PyTorch 1.8.1, which records no kernels"
            raise TraceError(self._path, problem, _REMEDY)
        threads = _thread_ids(self._numbers["thread"])
        frames = self._frames(threads)
        self._leave_out_clamped(frames)
        window_ns = _window(frames.pop("captures", None))
        _describe(frames)
        for table, frame in frames.items():
            self._spell_out(table, frame)
        _give_processes(frames)
        meta = self._meta(frames)
        meta.window_ns = window_ns
        meta.thread_names = {int(threads[code]): name for code, name in self._thread_names.items() if name}
        return FrameSource(frames, meta)

    def _frames(self, threads: _Ints) -> _Frames:
        for noun, values, most in (("threads", threads, _MOST_THREADS), ("processes", threads >> 24, _MOST_PROCESSES)):
            count = len(np.unique(values))
            if count > most:
                raise TraceError(self._path, f"has {count:,} {noun}, more than {most:,}", "capture less at a time")
        frames: _Frames = {}
        for table, parts in self._parts.items():
            columns = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
            frame = pd.DataFrame(columns, copy=False)
            parts.clear()
            if "thread" in frame:
                frame["thread"] = threads[frame["thread"]]
                frame["process"] = frame["thread"].to_numpy() >> 24
            frames[table] = frame
        return frames

    def _leave_out_clamped(self, frames: _Frames) -> None:
        """Kineto clamps a start that it could not place to 0, hours before everything else."""
        starts = pd.concat([frame["start_ns"] for frame in frames.values()]) if frames else pd.Series()
        if not starts[starts > 0].min() >= _HOUR_NS:
            return
        self._left_out += int((starts == 0).sum())
        for table, frame in frames.items():
            frames[table] = frame[frame["start_ns"] > 0].reset_index(drop=True)

    def _spell_out(self, table: str, frame: pd.DataFrame) -> None:
        """Replace codes by the values that they stand for: names, sizes, descriptions."""
        if table == "kernels":
            sizes = np.array(list(map(_six, self._numbers["sizes"]))).reshape(-1, len(_SIZES))
            frame[_SIZES] = sizes[frame["sizes"]]
        if table == "ranges":
            frame["kind"] = categorical(np.zeros(len(frame), np.int8), ["annotation"])
            self._nest(frame)
        codes = frame.copy(deep=False)
        for column, (thing, text) in _TEXTS.get(table, _NAMES).items():
            frame[column] = _texts(codes[thing], self._numbers[thing], text)

    def _nest(self, ranges: pd.DataFrame) -> None:
        """Add each range's level and parent."""
        tolerance_ns = 0
        if self._whole_us:  # rounding may end a child after its parent
            tolerance_ns = 1000
        level, parent = nesting(ranges["thread"], ranges["start_ns"], ranges["end_ns"], tolerance_ns)
        ranges["level"] = level
        ranges["parent"] = parent

    def _meta(self, frames: _Frames) -> TraceMeta:
        head = self._head
        notes = []
        if "calls" in frames and frames.keys().isdisjoint(GPU_TABLES):
            notes = lost_work(frames["calls"]["name"])
        missing = _missing(frames, is_lost=bool(notes))
        if self._whole_us and frames:
            notes.append(_WHOLE_US)
        if self._left_out:
            notes.append(f"{self._left_out:,} events without a usable start were left out.")
        gpus = []
        for device in head.device_properties:
            version = capability(device.compute_major, device.compute_minor)
            gpus.append(Gpu(device.id, device.name or None, version))
        return TraceMeta(
            tool="pytorch-profiler",
            schema=str(head.schema_version) or None,
            gpus=gpus,
            missing=missing,
            notes=notes,
            distributed=head.distributed_info,
            private=_private(head),
        )


def _describe(frames: _Frames) -> None:
    """Complete the kernels' descriptions of their collectives by those of the operators that launched them."""
    operators = frames.get("ops")
    kernels = frames.get("kernels")
    if operators is not None:
        operators["correlation"] = operators["external_id"]
    if kernels is not None:
        kernels["sequence"] = kernels["collective_sequence"]
    if operators is None or kernels is None:
        return
    announcing = operators[(operators["collective"] > 0) & (operators["external_id"] > 0)]
    announcing = announcing.drop_duplicates("external_id", keep="last").set_index("external_id")
    for column, announced, absent in (("collective", "collective", 0), ("sequence", "collective_sequence", -1)):
        values = kernels["external_id"].map(announcing[announced]).fillna(absent).astype("int64")
        kernels[column] = kernels[column].where(kernels[column] != absent, values)


def _window(captures: pd.DataFrame | None) -> tuple[int, int] | None:
    """Start and end of the capture, if events record it."""
    if captures is None:
        return None
    captures = captures[captures["end_ns"] > captures["start_ns"]]
    if captures.empty:
        return None
    return int(captures["start_ns"].min()), int(captures["end_ns"].max())


def _missing(frames: _Frames, *, is_lost: bool) -> list[str]:
    """Name the tables that were not recorded, such as the work of a GPU that the profiler lost."""
    recorded = {table for table, frame in frames.items() if len(frame)}
    missing = []
    for table in EVENT_TABLES:
        is_shown = not recorded.isdisjoint(_SHOWN_BY.get(table, (table,)))
        if not is_shown or (is_lost and table in GPU_TABLES):
            missing.append(table)
    return missing


def _private(head: _Document) -> dict[str, str]:
    """Names of the machine that wrote a trace, also from the file's name: host, process, time."""
    path = head.trace_name[:4096]
    worker = _WORKER.fullmatch(path)
    host = ""
    if worker:
        host = worker[1]
    return private_names([("", path), ("HOSTNAME", host), *head.distributed_info.items()])


def _thread_ids(places: Iterable[tuple[Any, Any]]) -> _Ints:
    """``process << 24 | tid`` of every (pid, tid); -1 is the profiler itself. Names get numbers that nothing has."""
    unnamed = _numbering()
    ids = []
    for code, (pid, tid) in enumerate(places):
        process = _int(pid, -2 - unnamed[pid], -1, 1 << 38)
        thread = _int(tid, (1 << 24) - 1 - code, 0, 1 << 24)
        ids.append(-1 if process == -1 else process << 24 | thread)
    return np.array(ids, np.int64)


def _give_processes(frames: _Frames) -> None:
    """Give GPU rows the process that launches: PyTorch profiles one process per file."""
    process = 0
    # The last of these tables that has rows decides: calls know best, then operators.
    for table in ("ranges", "ops", "calls"):
        if table in frames and len(frames[table]):
            process = int(frames[table]["process"].mode()[0])
    for table in frames.keys() & _GPU_SIDE:
        frames[table]["process"] = process


# --- values --------------------------------------------------------------------------------------------------------


def _nanoseconds(raw: list[msgspec.Raw]) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Nanoseconds of JSON numbers in microseconds, exactly, and a mask of the valid ones.

    Arrow's decimals have 128 bits: nothing passes through a float.
    """
    us = _thousandths(raw)
    if len(us) != len(raw):
        us = pa.array(list(map(_decimal, raw)), _US)
    # Each decimal is stored as a whole number of its last digit, in two halves of 64 bits.
    halves = np.frombuffer(us.buffers()[1], np.int64, 2 * len(us))
    ns = halves[::2]
    is_time = np.asarray(us.is_valid()) & (halves[1::2] == ns >> 63) & (np.abs(ns) < _BEYOND_NS)
    return np.where(is_time, ns, 0), is_time


#: How Arrow reads a number a line; of several parsers the fastest.
_US = pa.decimal128(38, 3)
_ONE_NUMBER_A_LINE = (
    pacsv.ReadOptions(column_names=["us"], use_threads=False, block_size=CHUNK_BYTES),
    pacsv.ParseOptions(ignore_empty_lines=False),
    pacsv.ConvertOptions(column_types={"us": _US}, null_values=["", "null"], strings_can_be_null=True),
)


def _thousandths(raw: list[msgspec.Raw]) -> Any:
    """Numbers of at most three decimals, as profilers write them; nothing if any is different."""
    lines = pa.BufferReader(b"\n".join(raw) + b"\n")
    with contextlib.suppress(pa.ArrowInvalid):
        return pacsv.read_csv(lines, *_ONE_NUMBER_A_LINE)["us"].combine_chunks()
    return ()


def _decimal(raw: msgspec.Raw) -> decimal.Decimal | None:
    """Any number of microseconds, also in quotes or with an exponent, to three decimals; None where it is no time."""
    with contextlib.suppress(UnicodeDecodeError, decimal.InvalidOperation):
        us = decimal.Decimal(str(raw, "utf-8").strip('"'))
        if abs(us) * 1000 < _BEYOND_NS:  # an error where it is not a number
            return us.quantize(decimal.Decimal("0.001"))
    return None


def _int(value: Any, default: _T, least: int = -(1 << 63), beyond: int = 1 << 63) -> int | _T:
    """Make an integer of what JSON holds in its place; the default where it is not one, or is out of range."""
    if isinstance(value, str):
        digits = re.fullmatch(r"\D*?(-?\d+)(?:\.0*)?\D*", value.strip())  # "7", "stream 7", "stream 7 (sync)"
        value = digits and digits[1]
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    if least <= number < beyond:
        return number
    return default


def _integers(values: list[Any], default: int) -> _Ints:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return np.fromiter(values, np.int64, len(values))
    return np.array([_int(value, default) for value in values], dtype=np.int64)


def _launched_kernel(raw: bytes) -> str:
    with contextlib.suppress(ValueError, *_BROKEN):  # a number no Python takes
        return _text(msgspec.json.decode(raw or b"null"))
    return ""


def _call_name(name: str) -> str:
    return _CALL_SUFFIX.sub("", name, count=1) or name


def _text(value: Any) -> str:
    """Take text or a number as text, and nothing else: lists in lists are long to spell out."""
    if isinstance(value, (str, int, float)):
        return str(value)
    return ""


def _six(sizes: tuple[bytes, bytes]) -> list[int]:
    """The sizes of a grid and of a block, 0 for other texts."""
    numbers: list[int] = []
    for text in sizes:
        try:
            numbers += msgspec.json.decode(text, type=tuple[int, int, int])
        except _BROKEN:
            numbers += [0, 0, 0]
    return numbers


def _inputs_text(parts: tuple[bytes, ...]) -> str:
    """Give an operator's inputs as one JSON text; "" where none are recorded."""
    if not any(parts):
        return ""
    texts = [str(part or b"[]", "utf-8", "replace") for part in parts]
    return f"[{','.join(texts)}]"


#: Template arguments without any in them, how often they nest, and how long a name is looked at.
_INNERMOST = re.compile("<[^<>]*>")
_DEEPEST = 20
_LONGEST = 10_000


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
    text = name[:_LONGEST].replace("(anonymous namespace)", "").replace("operator()", "operator")
    for _ in range(_DEEPEST):
        text = _INNERMOST.sub("", text)
    words = re.split("[<(]", text)[0].split()  # a remaining "<" belongs to a name cut short
    if words:
        return words[-1].rpartition("::")[2]
    return name


def _sync_kind(name: str) -> str:
    """`Stream Wait Event` → `stream-wait-event`; `Event Sync` → `event`."""
    return name.lower().removesuffix("sync").strip().replace(" ", "-") or "unknown"


#: `Memcpy HtoD (…)`, and ROCm's `CopyHostToDevice` without the small letters.
_COPY = re.compile(r"([HDAP])[Tt]o([HDAP])\b")
#: `Memcpy HtoD (Pageable -> Device)`, `Memset (Device)`.
_MEMORIES = re.compile(r".*\((?:([^()]*)->)?([^()]*)\)\s*", re.DOTALL)
_MEMORY_KINDS = ("pageable", "pinned", "device", "array", "managed", "device static", "managed static")


def _memop_kind(name: str) -> str:
    if _is_memset(name):
        return "memset"
    copy = _COPY.search(name.replace("Host", "H").replace("Device", "D"))
    if copy:
        return f"{copy[1]}to{copy[2]}"
    return "other"


def _is_memset(name: str) -> bool:
    return name.lower().startswith(("memset", "fill"))


def _source_kind(name: str) -> str:
    if _is_memset(name):
        return ""
    return _memory_kind(name, 1)


def _target_kind(name: str) -> str:
    return _memory_kind(name, 2)


def _memory_kind(name: str, group: int) -> str:
    memories = _MEMORIES.fullmatch(name)
    kind = str(memories and memories[group]).strip().lower()
    if kind in _MEMORY_KINDS:
        return kind
    return "unknown"


#: Of each table, the columns of texts, the things that they are made of, and how. Other tables have names.
#: Text columns of each table: the column of codes that each is made from, and the function that words what a code
#: stands for.
_TEXTS: Json = {
    "kernels": {"name": ("name", str), "short_name": ("name", short_kernel_name), "collective": ("collective", str)},
    "memops": {
        "kind": ("name", _memop_kind),
        "src_kind": ("name", _source_kind),
        "dst_kind": ("name", _target_kind),
    },
    "syncs": {"kind": ("name", _sync_kind)},
    "calls": {"name": ("name", _call_name), "kernel": ("kernel", _launched_kernel)},
    "ops": {"name": ("name", str), "inputs": ("inputs", _inputs_text)},
}
_NAMES = {"name": ("name", str)}
