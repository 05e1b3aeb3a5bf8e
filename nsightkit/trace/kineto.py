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
from nsightkit.text import Json, short_name
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
    is_large,
    lost_work,
    nesting,
    private_names,
    process_of,
    uncollected,
)

_Ints = npt.NDArray[np.int64]
_Frames = dict[str, pd.DataFrame]
_T = TypeVar("_T")

#: No time reaches it (146 years), so that the sum of two is below 2**63.
_TIME_LIMIT_NS = 1 << 62
#: What is read and decoded at a time. Measured: fastest of 1, 2, 4, 8 and 16 MB, and the smallest peak of memory.
CHUNK_BYTES = 2_000_000
_REMEDY = "give a trace that torch.profiler exported (export_chrome_trace)"
_CAPTURE_AGAIN = "capture or copy it again"

#: Which table the events of a category fill. Categories as Kineto writes them today and before 2022 (capitalised then;
#: compared in lower case). Of ``cuda_``, ``hip_`` and ``xpu_`` runtimes and drivers, :func:`_table_of` looks at the
#: ending. All other categories (flows, ``gpu_user_annotation``, which is a projection rather than work) fill none.
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
    "trace": "captures",  # what the profiler recorded, from start to end: no table of the trace model
}
_GPU_EVENT_TABLES = ("kernels", "memops", "syncs")
#: The process to which torch.autograd.profiler, before Kineto, writes its operators.
_OLD_PROFILER = "CPU functions"
#: A table was recorded if any of these tables has rows; a table that is not listed, if it has rows itself.
_SHOWN_BY = {
    **dict.fromkeys(GPU_TABLES, (*_GPU_EVENT_TABLES, "calls")),
    "ranges": ("ranges", "ops"),
    "overhead": ("overhead", "calls"),
}
#: What `tensorboard_trace_handler` calls its files: host (the group), process and time.
_WORKER = re.compile(r"(?:.*[/\\])?([^/\\]+)_\d+\.\d{10,}(?:\.pt)?\.trace\.json(?:\.gz)?")
#: `record_function` blocks that PyTorch itself opens and that old versions file among the operators.
_ANNOTATION = re.compile(r"ProfilerStep#\d+$|enumerate\(DataLoader\)#|Optimizer\.(step|zero_grad)#")
#: Endings of calls: the kind of default stream (`_ptsz`) and the version of CUDA (`_v7000`). `_v2` belongs to the name.
_CALL_SUFFIX = re.compile(r"(_pt(sz|ds))?(_v\d{4,})?(_pt(sz|ds))?$")
#: More than any capture has. Analyses look at each process and thread by itself, which would take forever.
_MOST_PROCESSES = 1_000
_MOST_THREADS = 10_000
_HOUR_NS = 3_600_000_000_000
_SIZE_COLUMNS = ["grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"]
_WHOLE_US_NOTE = "Times are whole microseconds (PyTorch before 2.4): short kernels last 0 or 1 µs."


# --- what is decoded -----------------------------------------------------------------------------------------------

_ABSENT = msgspec.Raw(b"")
#: Process and thread ids, of which some traces make texts or fractions.
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
#: What JSON calls the members of `args` that have another name here.
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
    """The members that we use of an event's args. Any of them may hold an int in one trace and a string in another."""

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
    """An event of the Chrome trace format: ``ts`` is its start and ``dur`` its duration, in µs.

    ``ph`` is its phase: X for an event with a duration, M for metadata such as a thread's name; we read no others.
    """

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: _Id = None
    tid: _Id = None
    ts: msgspec.Raw = _ABSENT
    dur: msgspec.Raw = _ABSENT
    args: _Args = _Args()


class _Device(msgspec.Struct, rename="camel"):
    """What a trace says of a GPU."""

    id: int = 0
    name: str = ""
    compute_major: int | None = None
    compute_minor: int | None = None


class _Document(msgspec.Struct, rename="camel"):
    """The members that we use of a trace, or of a slice of it (:func:`_trace_documents`)."""

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
    if not cache or not is_large(path):
        return _decode_trace(path)
    from nsightkit.trace import store

    return store.cached(path, lambda: _decode_trace(path), "kineto")


@uncollected()
def _decode_trace(path: Path) -> Source:
    """Decode a trace into tables in memory."""
    reader = _Reader(path)
    try:
        for document in _trace_documents(path):
            reader.add(document)
    except msgspec.ValidationError as error:
        problem = f"is JSON, but not a Chrome trace ({error})"
        if "got `array`" in str(error):
            problem = "is a bare list, as other tools write and torch.autograd.profiler did before PyTorch 1.8.1"
        raise TraceError(path, problem, _REMEDY) from error
    except _JSON_ERRORS as error:
        raise TraceError(path, f"is not valid JSON ({error})", _CAPTURE_AGAIN) from error
    return reader.finish()


# --- from the file to JSON documents -------------------------------------------------------------------------------

_EVENTS_START = re.compile(rb'"traceEvents"\s*:\s*\[')
#: All up to the last comma between two objects that begin like events; they may also be nested in `args`. The list of
#: devices is not cut: the first key of its objects is "id".
_COMPLETE_EVENTS = re.compile(rb'(?s)(.*\})\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|s|bp)"\s*:)')
_DOCUMENT_START = b'{"traceEvents":['
_JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: How many times its size a gzip file may unpack to. As times and numbers differ from event to event, traces pack 10 to
#: 35 to one, and up to 55 to one when they are written again with wide margins. Deflate packs up to 1,030 to one.
_MOST_EXPANSION = 100
#: What a gzip file of any size may unpack to.
_SMALL_BYTES = 16_000_000
#: The longest piece of a file without a place to cut it: decoding takes up to 38 times as much memory.
_MOST_UNCUT_BYTES = 16_000_000


def _unpacked_blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, unpacked; refuse a gzip file that unpacks to more than any trace does."""
    unpacked_bytes = 0
    with path.open("rb") as file:
        is_packed = file.peek(2)[:2] == b"\x1f\x8b"  # how a gzip file begins
        stream: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        try:
            while block := stream.read(CHUNK_BYTES):
                unpacked_bytes += len(block)
                # `file.tell()`: how much of the gzip file has been read.
                if is_packed and unpacked_bytes > max(_SMALL_BYTES, _MOST_EXPANSION * file.tell()):
                    problem = f"unpacks to more than {_MOST_EXPANSION} times its size, which no profiler's trace does"
                    raise TraceError(path, problem, "unpack it and look at it first")
                yield block
        except EOFError as error:
            raise TraceError(path, "is a truncated gzip file", _CAPTURE_AGAIN) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(path, f"is a damaged gzip file ({error})", _CAPTURE_AGAIN) from error


def _trace_documents(path: Path) -> Iterator[_Document]:
    """Cut the file into small documents of the same shape, each with some of the events, and decode them.

    A file of gigabytes would take several times that in memory if it were decoded as a whole. The first document
    also has the members that stand before the events in the file, and the last those behind them.
    """
    decode = msgspec.json.Decoder(_Document).decode
    opening = b""  # the first document begins as the file does
    rest = b""  # what is read and not decoded yet
    for block in _unpacked_blocks(path):
        rest += block
        cut = None
        if opening or _EVENTS_START.search(rest):
            cut = _COMPLETE_EVENTS.match(rest)
        if len(rest) > _MOST_UNCUT_BYTES:
            problem = (
                f"holds {_MOST_UNCUT_BYTES // 1_000_000} MB of JSON that is broken, or laid out unlike a profiler's"
            )
            raise TraceError(path, problem, "export it again with export_chrome_trace")
        if cut is not None:
            try:
                document = decode(b"".join((opening, memoryview(rest)[: cut.end(1)], b"]}")))
            except msgspec.ValidationError:  # one of _JSON_ERRORS, but of complete JSON: more of it will not help
                raise
            except _JSON_ERRORS:
                continue  # perhaps the cut is between two objects in an event: try again with the next block
            yield document
            opening = _DOCUMENT_START
            rest = rest[cut.end() :]
    yield decode(opening + rest)


# --- from documents to columns -------------------------------------------------------------------------------------
#
# Columns of anything but integers hold codes at first: each distinct value, such as a name or a (pid, tid), gets the
# next number. When all events are read, the codes are replaced by what is made of the values, once for each.


def _numbering() -> dict[Any, int]:
    """Return a dict that gives each new key the next of the numbers 0, 1, 2, … when it is looked up."""
    return collections.defaultdict(itertools.count().__next__)


def _text_column(codes: Any, values: Iterable[Any], wording: Callable[[Any], str]) -> pd.Categorical:
    """Make a column of texts: each code is the position of one of `values`, which `wording` turns into a text."""
    positions, distinct_codes = pd.factorize(codes)
    value_of_code = list(values)
    return categorical(positions, [wording(value_of_code[code]) for code in distinct_codes])


@functools.lru_cache(65_536)
def _table_of(category: str) -> str | None:
    """Name the table that events of a category fill; None if they fill none."""
    lower = category.lower()
    if lower.endswith(("_runtime", "_driver")):
        return "calls"
    return _CATEGORIES.get(lower)


def _collective_json(event: _Event) -> str:
    """Describe the collective that a kernel or an operator belongs to, as JSON; "" for none."""
    if event.args.collective is None:
        return ""
    description = {}
    for field, name in _COLLECTIVE.items():
        value = getattr(event.args, field)
        if value is not None:
            description[name] = value
    return json.dumps(description, separators=(",", ":"))


def _raw_kernel(event: _Event) -> bytes:
    """Return the name of the kernel that a call launches, as JSON."""
    return bytes(event.args.kernel)


def _raw_sizes(event: _Event) -> tuple[bytes, bytes]:
    """Return the sizes of a kernel's grid and block, as JSON."""
    return bytes(event.args.grid), bytes(event.args.block)


def _raw_inputs(event: _Event) -> tuple[bytes, bytes, bytes]:
    """Return the dims, types and values of an operator's inputs, as JSON."""
    args = event.args
    return bytes(args.input_dims), bytes(args.input_types), bytes(args.input_values)


#: Columns of integers, by table; each is a member of an event's args.
_ON_GPU = ("device", "stream", "correlation")
_INTEGER_COLUMNS = {
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
#: Where args do not name the device and the stream: old versions have the device for a pid, and the stream for a tid.
_OLD_PLACES = {"device": operator.attrgetter("pid"), "stream": operator.attrgetter("tid")}
#: The value of an event that each column of codes stands for.
_CODED_VALUES: dict[str, Callable[[_Event], Any]] = {
    "thread": operator.attrgetter("pid", "tid"),
    "name": operator.attrgetter("name"),
    "kernel": _raw_kernel,
    "sizes": _raw_sizes,
    "inputs": _raw_inputs,
    "collective": _collective_json,
}
#: Columns of codes, by table.
_ON_CPU = ("thread", "name")
_CODED_COLUMNS = {
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
    """Collects the events of documents in columns, and makes the tables of them.

    ``_columns_by_table`` has a list for each table, with a dict of columns for each document. ``_codes`` has, for each
    column of codes, a dict from values to codes (:func:`_numbering`); a thread's value is its (pid, tid).
    ``_document`` has the members of all documents, without the events.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._document = _Document()
        self._left_out_count = 0  # events
        self._unread_counts = collections.Counter[str]()  # of events that belong to no table, by category
        self._has_old_profiler = False
        self._has_whole_us_only = True  # old versions round times to µs, so a child may end after its parent
        self._thread_names: dict[int, str] = {}  # by code of the thread
        self._codes = {column: _numbering() for column in _CODED_VALUES}  # of each value, its code
        self._codes["collective"][""]  # this look-up gives "", no collective, the code 0
        self._columns_by_table = collections.defaultdict[str, list[dict[str, _Ints]]](list)  # a dict for each document

    def add(self, document: _Document) -> None:
        """Add the events and the other members of one document."""
        if document.nsightkit is not None:
            remedy = "open it in Perfetto, or convert the original trace to .parquet to read it again"
            raise TraceError(self._path, "is a timeline that nsightkit wrote for a viewer", remedy)
        if document.trace_events is not None:
            self._sort_by_table(document.trace_events)
            document.trace_events = []  # that there are events is all that `finish` needs
        # The first document has the members before the events, and the last those behind them: keep all.
        for field in document.__struct_fields__:
            value = getattr(document, field)
            if value or field == "trace_events":
                setattr(self._document, field, value)

    def _sort_by_table(self, events: list[_Event]) -> None:
        """Add each event to the table of its category, and note the names of threads."""
        rows: dict[str, list[_Event]] = {table: [] for table in _CODED_COLUMNS}
        for event in events:
            if event.ph == "X":
                table = _table_of(event.cat)
                # Old versions of PyTorch file "ProfilerStep#3" among the operators. "#" first: the regex takes longer.
                if table == "ops" and "#" in event.name and _ANNOTATION.match(event.name):
                    table = "ranges"
                if table is not None:
                    rows[table].append(event)
                elif event.pid == _OLD_PROFILER:  # no category at all: the file is of a profiler that we do not read
                    self._has_old_profiler = True
                else:
                    self._unread_counts[event.cat] += 1
            elif event.ph == "M" and event.name == "thread_name":
                thread = self._codes["thread"][event.pid, event.tid]
                self._thread_names[thread] = _plain_text(event.args.name).strip()
        for table, table_events in rows.items():
            if table_events:
                self._add_rows(table, table_events)

    def _add_rows(self, table: str, events: list[_Event]) -> None:
        """Add events to the columns of a table; leave out those without a usable start."""
        start, is_time = _nanoseconds([event.ts for event in events])
        duration, _ = _nanoseconds([event.dur for event in events])  # 0 where absent or damaged
        is_time &= (start >= 0) & (duration < _TIME_LIMIT_NS - start)
        if not is_time.all():
            self._left_out_count += int((~is_time).sum())
            events = list(itertools.compress(events, is_time.tolist()))
            start = start[is_time]
            duration = duration[is_time]
        self._has_whole_us_only = self._has_whole_us_only and not (start % 1000).any()
        columns = {"start_ns": start, "end_ns": start + np.maximum(duration, 0)}
        arguments = [event.args for event in events]
        for column in _INTEGER_COLUMNS.get(table, ()):
            values = list(map(operator.attrgetter(column), arguments))
            if column in _OLD_PLACES and None in values:  # old versions have the device as pid, the stream as tid
                places = map(_OLD_PLACES[column], events)
                values = [place if value is None else value for value, place in zip(values, places, strict=True)]
            columns[column] = _integers_in_json(values, NEUTRAL.get(column, 0))
        for column in _CODED_COLUMNS[table]:
            code_of = self._codes[column].__getitem__
            columns[column] = np.fromiter(map(code_of, map(_CODED_VALUES[column], events)), np.int64)
        self._columns_by_table[table].append(columns)

    # --- from columns to tables ---

    def finish(self) -> Source:
        """Return a source of all tables, with the description of the capture."""
        if self._document.trace_events is None:
            raise TraceError(self._path, "is JSON, but not a Chrome trace (it has no traceEvents)", _REMEDY)
        # Kineto writes the version of its schema even where it recorded no event.
        if not self._columns_by_table and not self._document.schema_version:
            problem = "is a Chrome trace, but not of PyTorch's profiler (no event has a category that it writes)"
            if self._has_old_profiler:
                problem = "is an export of torch.autograd.profiler before PyTorch 1.8.1, which records no kernels"
            raise TraceError(self._path, problem, _REMEDY)
        threads = _thread_ids(self._codes["thread"])
        frames = self._make_frames(threads)
        self._leave_out_unplaced_events(frames)
        window_ns = _capture_window(frames.pop("captures", None))  # no table of the trace model
        _describe_collectives(frames)
        for table, frame in frames.items():
            self._decode_columns(table, frame)
        _set_processes_of_gpu_rows(frames)
        meta = self._describe_capture(frames)
        meta.window_ns = window_ns
        meta.thread_names = {int(threads[code]): name for code, name in self._thread_names.items() if name}
        return FrameSource(frames, meta)

    def _make_frames(self, threads: _Ints) -> _Frames:
        """Make tables of the columns, and add each row's process; `threads` has the thread of each code."""
        processes = process_of(threads)
        # Analyses look at each thread and process by itself: with a forged million of them they would never end.
        for noun, ids, most in (("threads", threads, _MOST_THREADS), ("processes", processes, _MOST_PROCESSES)):
            count = len(np.unique(ids))
            if count > most:
                raise TraceError(self._path, f"has {count:,} {noun}, more than {most:,}", "capture less at a time")
        frames: _Frames = {}
        for table, parts in self._columns_by_table.items():
            columns = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
            frame = pd.DataFrame(columns, copy=False)
            parts.clear()  # the memory is needed for the next table
            if "thread" in frame:
                frame["process"] = processes[frame["thread"]]
                frame["thread"] = threads[frame["thread"]]
            frames[table] = frame
        return frames

    def _leave_out_unplaced_events(self, frames: _Frames) -> None:
        """Leave out events at 0 if all others come an hour later: Kineto sets a start that it cannot place to 0."""
        starts = pd.concat([frame["start_ns"] for frame in frames.values()]) if frames else pd.Series()
        if not starts[starts > 0].min() >= _HOUR_NS:  # nor where there is none above 0: the minimum is NaN
            return
        self._left_out_count += int((starts == 0).sum())
        for table, frame in frames.items():
            frames[table] = frame[frame["start_ns"] > 0].reset_index(drop=True)

    def _decode_columns(self, table: str, frame: pd.DataFrame) -> None:
        """Replace codes by what is made of the values that they stand for; add the nesting of ranges."""
        if table == "kernels":
            sizes = np.array(list(map(_grid_and_block, self._codes["sizes"]))).reshape(-1, len(_SIZE_COLUMNS))
            frame[_SIZE_COLUMNS] = sizes[frame["sizes"]]  # `sizes` has a row for each code
        if table == "ranges":
            frame["kind"] = categorical(np.zeros(len(frame), np.int8), ["annotation"])
            self._add_nesting(frame)
        codes = frame.copy(deep=False)  # texts replace the codes in `name`, of which `short_name` is made, too
        for column, (coded_column, wording) in _TEXT_COLUMNS.get(table, _NAME_COLUMN).items():
            frame[column] = _text_column(codes[coded_column], self._codes[coded_column], wording)

    def _add_nesting(self, ranges: pd.DataFrame) -> None:
        """Add each range's level and parent."""
        tolerance_ns = 1000 if self._has_whole_us_only else 0  # rounding to µs may end a child after its parent
        level, parent = nesting(ranges["thread"], ranges["start_ns"], ranges["end_ns"], tolerance_ns)
        ranges["level"] = level
        ranges["parent"] = parent

    def _describe_capture(self, frames: _Frames) -> TraceMeta:
        """Describe what the profiler recorded and on which GPUs, except for its window and the names of threads."""
        document = self._document
        notes = []
        # If calls launched kernels and no table of the GPU has a row, the profiler lost them.
        if "calls" in frames and frames.keys().isdisjoint(GPU_TABLES):
            notes = lost_work(frames["calls"]["name"])
            # The profiler of another accelerator has a separate category for its work. It counts as lost, too.
            for category, count in self._unread_counts.most_common(1):
                events = f"{count:,} events of {short_name(category)}"
                notes.append(f"{events} were not read: perhaps an accelerator's, other than NVIDIA's and AMD's GPUs.")
        missing = _missing_tables(frames, is_lost=bool(notes))
        if self._has_whole_us_only and frames:
            notes.append(_WHOLE_US_NOTE)
        if self._left_out_count:
            notes.append(f"{self._left_out_count:,} events without a usable start were left out.")
        gpus = []
        for device in document.device_properties:
            version = capability(device.compute_major, device.compute_minor)
            gpus.append(Gpu(device.id, device.name or None, version))
        return TraceMeta(
            tool="pytorch-profiler",
            schema=str(document.schema_version) or None,
            gpus=gpus,
            missing=missing,
            notes=notes,
            distributed=document.distributed_info,
            private=_private_names(document),
        )


def _describe_collectives(frames: _Frames) -> None:
    """Complete the kernels' descriptions of their collectives by those of the operators that launched them.

    The columns ``collective`` hold codes here, 0 for none. The trace model's ``ops.correlation`` and
    ``kernels.sequence`` (a collective's number, -1 for none) are filled here, too.
    """
    operators = frames.get("ops")
    kernels = frames.get("kernels")
    if operators is not None:
        operators["correlation"] = operators["external_id"]  # of `ops`, that column is Kineto's External id
    if kernels is not None:
        kernels["sequence"] = kernels["collective_sequence"]
    if operators is None or kernels is None:
        return
    # The operators that launch collectives, by the id that their kernels have, too.
    launching = operators[(operators["collective"] > 0) & (operators["external_id"] > 0)]
    # Each id once, as `map` below requires.
    launching = launching.drop_duplicates("external_id", keep="last").set_index("external_id")
    for column, operator_column, absent in (("collective", "collective", 0), ("sequence", "collective_sequence", -1)):
        of_operator = kernels["external_id"].map(launching[operator_column]).fillna(absent).astype("int64")
        kernels[column] = kernels[column].where(kernels[column] != absent, of_operator)


def _capture_window(captures: pd.DataFrame | None) -> tuple[int, int] | None:
    """Return start and end of the capture, ns; None where no event records it."""
    if captures is None:
        return None
    # An event without a length would make an empty window, in which nothing lies.
    captures = captures[captures["end_ns"] > captures["start_ns"]]
    if captures.empty:
        return None
    return int(captures["start_ns"].min()), int(captures["end_ns"].max())


def _missing_tables(frames: _Frames, *, is_lost: bool) -> list[str]:
    """List the tables that were not recorded, those of a GPU's work also where the profiler lost it (`is_lost`)."""
    tables_with_rows = {table for table, frame in frames.items() if len(frame)}
    missing = []
    for table in EVENT_TABLES:
        is_recorded = not tables_with_rows.isdisjoint(_SHOWN_BY.get(table, (table,)))
        if not is_recorded or (is_lost and table in GPU_TABLES):
            missing.append(table)
    return missing


def _private_names(document: _Document) -> dict[str, str]:
    """Collect the names of people and machines in what a trace says about itself, such as the name of its file."""
    path = document.trace_name[:4096]  # no system has longer ones, and patterns would search a forged one for long
    worker = _WORKER.fullmatch(path)
    host = worker[1] if worker else ""
    # Without a variable's name, only the owner of a home folder is looked for in the path.
    return private_names([("", path), ("HOSTNAME", host), *document.distributed_info.items()])


def _thread_ids(places: Iterable[tuple[Any, Any]]) -> _Ints:
    """Return the column ``thread`` of our tables, ``process << 24 | thread id``, of every (pid, tid).

    -1 is the profiler itself.

    A pid or tid may also be a name, or too large. It gets a number that no system gives out: processes -2, -3, …;
    threads count down from the largest of 24 bits, by their code.
    """
    pid_numbers = _numbering()
    ids = []
    for code, (pid, tid) in enumerate(places):
        # A process takes the 38 bits above a thread's 24: the 62 bits in all leave one unused below int64's sign, so
        # that the thread behind the last, a bound of searches by process, still fits.
        process = _integer_in_json(pid, default=-2 - pid_numbers[pid], least=-1, beyond=1 << 38)
        thread = _integer_in_json(tid, default=(1 << 24) - 1 - code, least=0, beyond=1 << 24)
        ids.append(-1 if process == -1 else process << 24 | thread)
    return np.array(ids, np.int64)


def _set_processes_of_gpu_rows(frames: _Frames) -> None:
    """Set the process of GPU rows to the one that launches: PyTorch profiles one process per file."""
    process = 0  # where no table of the CPU has a row
    # The last of these tables that has rows decides: calls know best, then operators.
    for table in ("ranges", "ops", "calls"):
        if table in frames and len(frames[table]):
            process = int(frames[table]["process"].mode()[0])
    for table in frames.keys() & _GPU_EVENT_TABLES:
        frames[table]["process"] = process


# --- values --------------------------------------------------------------------------------------------------------


def _nanoseconds(raw: list[msgspec.Raw]) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Turn JSON numbers of microseconds into nanoseconds, exactly, and return a mask of those that are times, too.

    All others are 0. Arrow's decimals have 128 bits: nothing passes through a float.
    """
    us = _parse_us_as_csv(raw)
    if len(us) != len(raw):  # some are written in another way: one by one
        us = pa.array(list(map(_parse_us_as_decimal, raw)), _US)
    # A number of µs with three decimals is stored as 1000 times its value: ns, in two halves of 64 bits. If it fits in
    # the lower half, the upper one only repeats its sign: 0 or -1.
    halves = np.frombuffer(us.buffers()[1], np.int64, 2 * len(us))
    ns = halves[::2]
    fits_in_64_bits = halves[1::2] == ns >> 63
    is_time = np.asarray(us.is_valid()) & fits_in_64_bits & (np.abs(ns) < _TIME_LIMIT_NS)
    return np.where(is_time, ns, 0), is_time


#: A decimal number with three decimals; and how Arrow reads one a line, the fastest of several parsers.
_US = pa.decimal128(38, 3)
_ONE_NUMBER_A_LINE = (
    pacsv.ReadOptions(column_names=["us"], use_threads=False, block_size=CHUNK_BYTES),
    pacsv.ParseOptions(ignore_empty_lines=False),
    pacsv.ConvertOptions(column_types={"us": _US}, null_values=["", "null"], strings_can_be_null=True),
)


def _parse_us_as_csv(raw: list[msgspec.Raw]) -> Any:
    """Parse microseconds of at most three decimals, as profilers write them; return nothing if any is different.

    Arrow's CSV reader parses all of them in one call, exactly: much faster than a `Decimal` for each.
    """
    lines = pa.BufferReader(b"\n".join(raw) + b"\n")
    with contextlib.suppress(pa.ArrowInvalid):
        return pacsv.read_csv(lines, *_ONE_NUMBER_A_LINE)["us"].combine_chunks()
    return ()


def _parse_us_as_decimal(raw: msgspec.Raw) -> decimal.Decimal | None:
    """Parse a number of microseconds, also in quotes or with an exponent, to three decimals; None for anything else."""
    with contextlib.suppress(UnicodeDecodeError, decimal.InvalidOperation):
        us = decimal.Decimal(str(raw, "utf-8").strip('"'))
        if abs(us) * 1000 < _TIME_LIMIT_NS:  # of NaN an InvalidOperation
            return us.quantize(decimal.Decimal("0.001"))
    return None


def _integer_in_json(value: Any, default: _T, least: int = -(1 << 63), beyond: int = 1 << 63) -> int | _T:
    """Convert what JSON holds in the place of an integer; `default` unless it is one from `least` to `beyond` - 1.

    PyTorch before 2022 writes ids as text, such as "7" or "stream 7", where later versions write numbers.
    """
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


def _integers_in_json(values: list[Any], default: int) -> _Ints:
    """Convert a column of what JSON holds in the place of integers, the quick way if all are numbers."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return np.fromiter(values, np.int64, len(values))
    return np.array([_integer_in_json(value, default) for value in values], dtype=np.int64)


def _launched_kernel(raw: bytes) -> str:
    """Decode the name of the kernel that a call launches; "" where it is absent or damaged."""
    with contextlib.suppress(ValueError, *_JSON_ERRORS):  # ValueError: an integer of more digits than Python reads
        return _plain_text(msgspec.json.decode(raw or b"null"))
    return ""


def _call_name(name: str) -> str:
    """Drop the version from the name of a call: ``cudaLaunchKernel_v7000`` is ``cudaLaunchKernel``."""
    return _CALL_SUFFIX.sub("", name, count=1) or name


def _plain_text(value: Any) -> str:
    """Return a text or a number as text, "" for anything else: deeply nested lists take long to write as text."""
    if isinstance(value, (str, int, float)):
        return str(value)
    return ""


def _grid_and_block(sizes: tuple[bytes, bytes]) -> list[int]:
    """Decode the three sizes of a grid and of a block, such as ``[8,1,1]``; three times 0 for any other text."""
    numbers: list[int] = []
    for text in sizes:
        try:
            numbers += msgspec.json.decode(text, type=tuple[int, int, int])
        except _JSON_ERRORS:
            numbers += [0, 0, 0]
    return numbers


def _inputs_text(parts: tuple[bytes, ...]) -> str:
    """Join the JSON of an operator's dims, types and values in one list; "" where none is recorded."""
    if not any(parts):
        return ""
    texts = [str(part or b"[]", "utf-8", "replace") for part in parts]
    return f"[{','.join(texts)}]"


#: Template arguments without others in them; how deep they nest at most; and how much is looked at of a name.
_INNERMOST_ARGUMENTS = re.compile("<[^<>]*>")
_MOST_NESTED = 20
_MOST_NAME_LETTERS = 10_000


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
    # Without the brackets that open no argument list: the name ends at the first that is left.
    text = name[:_MOST_NAME_LETTERS].replace("(anonymous namespace)", "").replace("operator()", "operator")
    for _ in range(_MOST_NESTED):  # from the inside out
        text = _INNERMOST_ARGUMENTS.sub("", text)
    words = re.split("[<(]", text)[0].split()  # a remaining "<" belongs to a name cut short
    if words:
        return words[-1].rpartition("::")[2]
    return name


def _sync_kind(name: str) -> str:
    """Read the kind of a synchronization from its name: `Stream Wait Event` → `stream-wait-event`."""
    return name.lower().removesuffix("sync").strip().replace(" ", "-") or "unknown"  # "Event Sync" → "event"


#: `Memcpy HtoD (…)`, and ROCm's `CopyHostToDevice` without the small letters.
_COPY = re.compile(r"([HDAP])[Tt]o([HDAP])\b")
#: `Memcpy HtoD (Pageable -> Device)`, `Memset (Device)`.
_MEMORIES = re.compile(r".*\((?:([^()]*)->)?([^()]*)\)\s*", re.DOTALL)
_MEMORY_KINDS = ("pageable", "pinned", "device", "array", "managed", "device static", "managed static")


def _memop_kind(name: str) -> str:
    """Read the kind of a copy or memset from its name: HtoD, DtoH, …, memset, or other.

    NVIDIA's profiler writes ``Memcpy HtoD (…)``, AMD's ``CopyHostToDevice``, which is HToD once its words are letters.
    """
    if _is_memset(name):
        return "memset"
    copy = _COPY.search(name.replace("Host", "H").replace("Device", "D"))
    if copy:
        return f"{copy[1]}to{copy[2]}"
    return "other"


def _is_memset(name: str) -> bool:
    """Check that an operation is a memset; ROCm calls it a fill."""
    return name.lower().startswith(("memset", "fill"))


def _source_kind(name: str) -> str:
    """Read from a copy's name the kind of memory it reads; "" for a memset, which reads none."""
    if _is_memset(name):
        return ""
    return _memory_kind(name, 1)


def _target_kind(name: str) -> str:
    """Read from the name of a copy or memset the kind of memory it writes."""
    return _memory_kind(name, 2)


def _memory_kind(name: str, group: int) -> str:
    """Read the kind of memory in a group of :data:`_MEMORIES`; unknown where the name has none that we know."""
    memories = _MEMORIES.fullmatch(name)
    kind = str(memories and memories[group]).strip().lower()  # "none" without a match
    if kind in _MEMORY_KINDS:
        return kind
    return "unknown"


#: Text columns of each table: the column of codes that each is made of, and the function that turns the value of a code
#: into a text. Tables that are not listed have `_NAME_COLUMN`.
_TEXT_COLUMNS: Json = {
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
_NAME_COLUMN = {"name": ("name", str)}
