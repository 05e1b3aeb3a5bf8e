"""Why the GPU was idle: every gap of a device, with exactly one cause and the evidence for it.

A gap is judged from the thread that launched the operation which ends it: what was that thread doing
between the moment the device ran dry and the moment the launch began? The first rule that holds decides:

1. recorded profiler overhead covers most of the gap: ``profiler``;
2. at least half of the time from "device ran dry" to "launch began" went to data loading (ranges or
   operators, by name) or to waits in the operating system outside CUDA calls: ``input-pipeline``;
3. the thread sat in a blocking call when the device ran dry: ``synchronization``, including the CPU time until
   its next launch;
4. it sat in a copy call, staging pageable memory, or the operation waited for a copy on another device:
   ``memory-transfer``;
5. consecutive launches with only launch calls and their framework operators between them:
   ``launch-overhead``;
6. other recorded CPU activity: ``cpu-work``;
7. else ``unknown``.

Work that changes threads (the forward pass launches from one thread, autograd from another) is
followed: up to its last CUDA call the thread that fed the device before is asked, then the one that launched. A
worker that merely waits to be handed work is not waiting for data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis import intervals, names
from nsightkit.analysis.intervals import Coverage, gpu_intervals, idle_gaps, launch_of, launches_of
from nsightkit.analysis.names import OPERATOR_RANGE, compiled, matching
from nsightkit.trace.model import GPU_TABLES, Trace
from nsightkit.trace.nesting import nesting

__all__ = ["CAUSES", "DATA_LOADING", "causes", "find", "memop_name", "summary"]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]

CAUSES = ("profiler", "input-pipeline", "synchronization", "memory-transfer", "launch-overhead", "cpu-work", "unknown")
_PROFILER, _INPUT, _SYNC, _TRANSFER, _LAUNCH, _CPU, _UNKNOWN = range(len(CAUSES))
_UNDECIDED = -1

#: Names of ranges and operators in which a program waits for its data.
DATA_LOADING = (
    r"(?i)data[\s_-]*load|dataloader|load(ing)?[\s_-]*(the[\s_-]*)?(data|batch|sample)|"
    r"(next|get|fetch|read|wait)(ing)?[\s_-]*(for[\s_-]*)?(the[\s_-]*|next[\s_-]*)?(data|batch|sample|input)|"
    r"input[\s_-]*(pipeline|wait)|^(data|batch|dataset)([\s_-]*(wait|time))?$|\b__next__\b|^next\(|data[\s_-]*(wait|fetch|fetching|time)\b|prefetch|collate"
)

#: OS calls in which a thread waits (for another thread or process, a timer, a socket, a disk), by name.
_OS_WAIT = re.compile(
    r"^(e?poll|ppoll|epoll_p?wait\d*|p?select|futex|sem_(timed)?wait|sem_clockwait|pthread_cond_(timed|clock)?wait|pthread_join|pthread_mutex_(timed)?lock|"
    r"pthread_rwlock_(rd|wr)lock|pthread_barrier_wait|sigwait(info)?|sigtimedwait|wait(pid|id|3|4)?|(clock_)?nanosleep|u?sleep|"
    r"p?readv?\d*|pread64|fread|fgets|getline|recv(from|msg|mmsg)?|accept4?|connect|msgrcv|mq_(timed)?receive|io_getevents|flock|fsync)(64)?$"
)

#: Calls that return only when the GPU has caught up.
_BLOCKING = re.compile(
    r"^(cuda|hip)(Device|Stream|Event|Thread|Context|Graph)Synchronize|^cu(Ctx|Stream|Event)Synchronize|"
    r"^(cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)|^(cuda|hip)(Malloc|Free)(?!.*Async)|^cuMem(Alloc|Free)(?!.*Async)"
)
_COPY = re.compile(r"^(cuda|hip|cu)Memcpy")
#: Calls that enqueue work, or cost next to nothing beside it.
_ENQUEUE = re.compile(
    r"Launch|^(cuda|hip|cu)(Memcpy|Memset).*Async|Event(Record|Query|Create|Destroy)|StreamWaitEvent|StreamIsCapturing|StreamGetCaptureInfo|"
    r"StreamQuery|GetLastError|PeekAtLastError|GetDevice|SetDevice|CtxGet|CtxSet|OccupancyMax|FuncGetAttribute|FuncSetAttribute|PointerGetAttribute"
)

#: Between two launches of an eager program pass microseconds. A longer silence says something else went on.
_EAGER_NS = 500_000
#: An operator without a launch that lasts this long is work of its own, not dispatch.
_HEAVY_OP_NS = 100_000
#: What a device takes to start an operation that lies in its queue.
_QUEUED_NS = 20_000


def summary(trace: Trace, min_ns: int = 0, data_loading: str = DATA_LOADING) -> pd.DataFrame:
    """Idle time by cause.

    Parameters
    ----------
    trace : Trace
    min_ns : int
        Leave out gaps shorter than this.
    data_loading : str
        Regular expression of the names of ranges and operators in which the program loads data.

    Returns
    -------
    DataFrame
        ``cause, count, total_ns, share_of_span``, by falling ``total_ns``; the share is of the sum of the devices'
        spans. Without `min_ns` and without a filter on the trace the totals sum to the idle time.
    """
    if trace is trace.whole and min_ns <= 0:
        # Small, and all that a second look needs.
        name = f"gap-causes-{_rules(data_loading)}"
        return trace.derived(name, _CODE, lambda: _by_cause(trace, 0, data_loading)).astype({"cause": object})
    return _by_cause(trace, min_ns, data_loading).astype({"cause": object})


def _by_cause(trace: Trace, min_ns: int, data_loading: str) -> pd.DataFrame:
    found, span = _found(trace, min_ns, data_loading), _span(trace)
    count = np.bincount(found.cause, minlength=len(CAUSES))
    # Exact in floats up to 2**53 ns, 104 days.
    total = np.bincount(found.cause, weights=found.end - found.start, minlength=len(CAUSES)).astype(np.int64)
    share = total / span if span else np.zeros(len(CAUSES))
    cause = pd.Categorical(CAUSES, categories=CAUSES)
    out = pd.DataFrame({"cause": cause, "count": count, "total_ns": total, "share_of_span": share})
    return out[count > 0].sort_values("total_ns", ascending=False, ignore_index=True)


def find(trace: Trace, min_ns: int = 0, data_loading: str = DATA_LOADING) -> pd.DataFrame:
    """Each gap with its cause and evidence.

    Parameters
    ----------
    trace : Trace
    min_ns : int
    data_loading : str
        As in :func:`summary`.

    Returns
    -------
    DataFrame
        ``device, start_ns, end_ns, duration_ns, cause, evidence``, by device and time. ``evidence`` is a dict:
        ``kind`` (call, range, op, os_call, copy, overhead or none), ``name, start_ns, end_ns, thread`` of what
        decided, ``launch`` (the call that ended the gap: ``name, start_ns, end_ns, thread``) and ``ended_by``
        (the operation that ended it).
    """
    found = _found(trace, min_ns, data_loading)
    return pd.DataFrame(
        {
            "device": found.device,
            "start_ns": found.start,
            "end_ns": found.end,
            "duration_ns": found.end - found.start,
            "cause": [CAUSES[c] for c in found.cause],
            "evidence": _Evidence(trace.whole, found).of_all(),
        }
    )


def causes(trace: Trace, min_ns: int = 0, data_loading: str = DATA_LOADING) -> pd.DataFrame:
    """Each gap with its cause and the name of what decided, for further arithmetic: :func:`find` without its dicts.

    Parameters
    ----------
    trace : Trace
    min_ns : int
    data_loading : str
        As in :func:`summary`.

    Returns
    -------
    DataFrame
        ``device, start_ns, end_ns, cause, kind, name, row``, by device and time; ``cause, kind, name`` are categories.
        ``row`` is that of the event in its table of ``trace.whole``, -1, with an empty name, where no event decided.
    """
    found = _found(trace, min_ns, data_loading)
    texts, code = [""], np.zeros(len(found.cause), np.int64)
    for kind, table in _EVIDENCE_TABLE.items():
        mine = np.flatnonzero((found.source == _E[kind]) & (found.source_row >= 0))
        if len(mine):
            column = "kind" if table == "memops" else "name"
            names = trace.whole.table(table, [column])[column].cat
            code[mine] = len(texts) + names.codes.to_numpy()[found.source_row[mine]]
            texts += [memop_name(str(n)) if table == "memops" else str(n) for n in names.categories]
    used, code = np.unique(code, return_inverse=True)
    # The same name in two tables is one name: categories are distinct.
    number, distinct = pd.factorize(np.array(texts, dtype=object)[used])
    return pd.DataFrame(
        {
            "device": found.device,
            "start_ns": found.start,
            "end_ns": found.end,
            "cause": pd.Categorical.from_codes(found.cause, pd.Index(CAUSES)),
            "kind": pd.Categorical.from_codes(found.source, pd.Index(_EVIDENCE)),
            "name": pd.Categorical.from_codes(number[code], pd.Index(distinct, dtype="str")),
            "row": found.source_row,
        },
        copy=False,
    )


@dataclasses.dataclass
class _Gaps:
    """The gaps, column by column; evidence as (table, row), table an index into `_EVIDENCE`."""

    device: Int
    start: Int
    end: Int
    table: Int  # of the operation that ends the gap, index into GPU_TABLES
    row: Int
    launch: Int  # row in calls, -1 unknown
    cause: Int
    source: Int
    source_row: Int


_EVIDENCE = ("none", "call", "range", "op", "os_call", "copy", "overhead")
_EVIDENCE_TABLE = {
    "call": "calls",
    "range": "ranges",
    "op": "ops",
    "os_call": "os_calls",
    "copy": "memops",
    "overhead": "overhead",
}
_E = {name: i for i, name in enumerate(_EVIDENCE)}


#: What the rules look at; one pass a table.
_COLUMNS = {
    "kernels": ["start_ns", "end_ns", "device", "process", "correlation"],
    "memops": ["start_ns", "end_ns", "device", "process", "correlation", "kind", "src_kind", "dst_kind"],
    "graphs": ["start_ns", "end_ns", "device", "process", "correlation"],
    "calls": ["start_ns", "end_ns", "thread", "correlation", "name"],
    "ranges": ["start_ns", "end_ns", "thread", "name"],
    "ops": ["start_ns", "end_ns", "thread", "name"],
    "os_calls": ["start_ns", "end_ns", "thread", "name"],
    "overhead": ["start_ns", "end_ns", "thread", "name"],
}
#: Gaps judged together; bounds memory.
_CHUNK = 200_000


#: Source files whose change makes kept causes stale.
_CODE = [__file__, intervals.__file__, names.__file__, inspect.getfile(nesting)]


def _rules(data_loading: str) -> str:
    """Names the rules in force in a cache."""
    return hashlib.blake2b(data_loading.encode(), digest_size=8).hexdigest()


def _found(trace: Trace, min_ns: int, data_loading: str) -> _Gaps:
    """The gaps of a trace, selected or whole, with their causes."""
    names = [f.name for f in dataclasses.fields(_Gaps)]
    whole = trace.whole
    frame = whole.derived(f"gaps-{_rules(data_loading)}", _CODE, lambda: _decide(whole, data_loading))
    keep = frame["end"].to_numpy() - frame["start"].to_numpy() >= min_ns
    if trace is not trace.whole:
        keep &= _selected(trace, frame)
    return _Gaps(*(frame[n].to_numpy() if keep.all() else frame[n].to_numpy()[keep] for n in names))


def _decide(whole: Trace, data_loading: str) -> pd.DataFrame:
    whole.prefetch(_COLUMNS)
    ops = gpu_intervals(whole)
    gaps = idle_gaps(whole, ops)
    after = gaps["after"].to_numpy()
    table, row = ops["table"].to_numpy(), ops["row"].to_numpy()
    # In start order the operation before `after` is the one that the device was fed just before.
    before_table, before_row = table[after - 1], row[after - 1]
    n = len(gaps)
    found = _Gaps(
        device=gaps["device"].to_numpy(),
        start=gaps["start_ns"].to_numpy(),
        end=gaps["end_ns"].to_numpy(),
        table=table[after],
        row=row[after],
        launch=np.full(n, -1, np.int32),
        cause=np.full(n, _UNDECIDED, np.int8),
        source=np.zeros(n, np.int8),
        source_row=np.full(n, -1, np.int32),
    )
    del ops, gaps, after, table, row
    threads = _Threads(whole, data_loading)
    for low in range(0, n, _CHUNK):
        part = slice(low, low + _CHUNK)
        chunk = _Gaps(*(getattr(found, f.name)[part] for f in dataclasses.fields(_Gaps)))
        chunk.launch[:] = launches_of(whole, chunk.table, chunk.row)
        fed_by = np.full(len(chunk.launch), -1, np.int64)
        if threads.several:
            before = launches_of(whole, before_table[part], before_row[part])
            known = before >= 0
            fed_by[known] = whole.table("calls", ["thread"])["thread"].to_numpy()[before[known]]
        _Judge(whole, chunk, fed_by, threads).run()
    found.cause[found.cause == _UNDECIDED] = _UNKNOWN
    return pd.DataFrame({f.name: getattr(found, f.name) for f in dataclasses.fields(_Gaps)}, copy=False)


def _bounds(trace: Trace) -> dict[int, tuple[int, int]]:
    """First start and last end of each device's operations."""
    bounds: dict[int, tuple[int, int]] = {}
    for name in GPU_TABLES:
        frame = trace.table(name, ["device", "start_ns", "end_ns"])
        device, start, end = (frame[c].to_numpy() for c in frame.columns)
        for one in pd.unique(device).tolist():
            mine = slice(None) if (device == one).all() else device == one
            first, last = int(start[mine].min()), int(end[mine].max())
            known = bounds.get(one, (first, last))
            bounds[one] = (min(first, known[0]), max(last, known[1]))
    return bounds


def _span(trace: Trace) -> int:
    return sum(last - first for first, last in _bounds(trace).values())


def _selected(trace: Trace, gaps: pd.DataFrame) -> Bool:
    """Of a filtered trace: gaps that end with a selected operation, but not with the first one of its device."""
    table, row = gaps["table"].to_numpy(), gaps["row"].to_numpy()
    keep = np.ones(len(gaps), bool)
    for number, name in enumerate(GPU_TABLES):
        mask = trace.mask(name)
        if mask is not None:
            of_table = np.flatnonzero(table == number)
            keep[of_table] = mask[row[of_table]]
    for device, (first, _) in _bounds(trace).items():
        keep &= (gaps["device"].to_numpy() != device) | (gaps["end"].to_numpy() > first)
    return keep


class _Track:
    """Some events of one thread, ordered by start."""

    def __init__(self, start: Int, end: Int, row: Int) -> None:
        if len(start) > 1 and (start[1:] < start[:-1]).any():
            order = np.argsort(start, kind="stable")
            start, end, row = start[order], end[order], row[order]
        self.start, self.end, self.row = start, end, row
        self._coverage: Coverage | None = None
        self._reach: Int | None = None
        self._parent: Int | None = None

    def __len__(self) -> int:
        return len(self.start)

    def subset(self, keep: Bool) -> _Track:
        return _Track(self.start[keep], self.end[keep], self.row[keep])

    @property
    def coverage(self) -> Coverage:
        if self._coverage is None:
            self._coverage = Coverage(self.start, self.end)
        return self._coverage

    def covered(self, start: Int, end: Int) -> Int:
        return self.coverage.of(start, end) if len(self) else np.zeros(len(start), np.int64)

    def open_at(self, at: Int) -> Int:
        """Position of an event open at each time (the one that lasts longest), -1 for none."""
        result = np.full(len(at), -1, np.int64)
        if not len(self):
            return result
        if self._reach is None:
            reach = np.maximum.accumulate(self.end)
            # Position of the event whose end the running maximum is.
            self._reach = np.maximum.accumulate(np.where(self.end == reach, np.arange(len(reach)), 0))
        i = np.searchsorted(self.start, at, side="right") - 1
        some = i >= 0
        longest = self._reach[i[some]]
        result[some] = np.where(self.end[longest] > at[some], longest, -1)
        return result

    def innermost_at(self, at: Int) -> Int:
        """Position of the event that began last among those open at each time, -1 for none."""
        i = np.searchsorted(self.start, at, side="right") - 1
        if not len(self):
            return np.full(len(at), -1, np.int64)
        if self._parent is None:
            _, self._parent = nesting(np.zeros(len(self), np.int64), self.start, self.end)
        parent = self._parent
        pending = np.flatnonzero((i >= 0) & (self.end[np.maximum(i, 0)] <= at))
        while len(pending):  # climbs one level a round, all gaps at once
            i[pending] = parent[i[pending]]
            pending = pending[(i[pending] >= 0) & (self.end[np.maximum(i[pending], 0)] <= at[pending])]
        return i

    def inside(self, outer: _Track) -> Int:
        """How many of my events begin and end within each event of `outer`."""
        low = np.searchsorted(self.start, outer.start, side="left")
        high = np.searchsorted(np.maximum.accumulate(self.end) if len(self) else self.end, outer.end, side="right")
        inside: Int = np.maximum(high - low, 0)
        return inside


_EMPTY = _Track(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


class _Threads:
    """The recorded activity of each thread, split by what it means for a gap; built when asked for."""

    def __init__(self, trace: Trace, data_loading: str) -> None:
        self._trace = trace
        self._data = compiled(data_loading, "data_loading")
        self._tracks: dict[tuple[str, int], _Track] = {}
        called = trace.table("calls", ["thread"])["thread"].to_numpy()
        #: whether more than one thread calls CUDA
        self.several = bool(len(called)) and bool((called != called[0]).any())
        self._flags: dict[str | None, Bool] = {}

    def _table(self, table: str, thread: int) -> _Track:
        key = (table, thread)
        if key not in self._tracks:
            if not self._trace.size(table):
                self._tracks[key] = _EMPTY
            else:
                frame = self._trace.table(table, ["start_ns", "end_ns", "thread"])
                rows = np.flatnonzero(frame["thread"].to_numpy() == thread).astype(np.int32)
                start = frame["start_ns"].to_numpy()[rows]
                if len(start) > 1 and (start[1:] < start[:-1]).any():
                    rows = rows[np.argsort(start, kind="stable")]
                    start = frame["start_ns"].to_numpy()[rows]
                self._tracks[key] = _Track(start, frame["end_ns"].to_numpy()[rows], rows)
        return self._tracks[key]

    def _named(self, table: str, thread: int, what: str, expression: re.Pattern[str]) -> _Track:
        """The events of a table whose name matches."""
        key = (f"{table}:{what}", thread)
        if key not in self._tracks:
            track = self._table(table, thread)
            if len(track):
                flags = f"{table}:{what}"
                if flags not in self._flags:
                    self._flags[flags] = matching(self._trace.table(table, ["name"])["name"], expression)
                track = track.subset(self._flags[flags][track.row])
            self._tracks[key] = track
        return self._tracks[key]

    def calls(self, thread: int) -> _Track:
        return self._table("calls", thread)

    def blocking(self, thread: int) -> _Track:
        key = ("calls:blocking+", thread)
        if key not in self._tracks:
            plain = self._named("calls", thread, "blocking", _BLOCKING)
            # A device-to-host copy into pageable memory blocks whatever its name says.
            copies = self._named("calls", thread, "copy", _COPY)
            if len(copies):
                pageable = self._pageable("DtoH")
                copies = copies.subset(pageable[copies.row])
            if len(copies):
                plain = _Track(
                    *(np.concatenate((getattr(plain, a), getattr(copies, a))) for a in ("start", "end", "row"))
                )
            self._tracks[key] = plain
        return self._tracks[key]

    def staging(self, thread: int) -> _Track:
        """Copy calls that move pageable memory."""
        key = ("calls:staging", thread)
        if key not in self._tracks:
            copies = self._named("calls", thread, "copy", _COPY)
            self._tracks[key] = copies.subset(self._pageable(None)[copies.row]) if len(copies) else _EMPTY
        return self._tracks[key]

    def uploads(self) -> Bool:
        """Per call: whether it launched a copy from pageable host memory to a device."""
        return self._pageable("HtoD")

    def _pageable(self, kind: str | None) -> Bool:
        if kind not in self._flags:
            flag = np.zeros(self._trace.size("calls"), bool)
            memops = self._trace.table("memops", ["process", "correlation", "kind", "src_kind", "dst_kind"])
            pageable = ((memops["src_kind"] == "pageable") | (memops["dst_kind"] == "pageable")).to_numpy()
            if kind is not None:
                pageable = pageable & (memops["kind"] == kind).to_numpy()
            if pageable.any():
                row = launch_of(
                    self._trace, memops["process"].to_numpy()[pageable], memops["correlation"].to_numpy()[pageable]
                )
                flag[row[row >= 0]] = True
            self._flags[kind] = flag
        return self._flags[kind]

    def other_calls(self, thread: int) -> _Track:
        """Calls that neither enqueue work nor are next to free (module loading, graph instantiation, …)."""
        key = ("calls:other", thread)
        if key not in self._tracks:
            track = self._table("calls", thread)
            if len(track):
                if "enqueue" not in self._flags:
                    self._flags["enqueue"] = matching(self._trace.table("calls", ["name"])["name"], _ENQUEUE)
                track = track.subset(~self._flags["enqueue"][track.row])
            self._tracks[key] = track
        return self._tracks[key]

    def data(self, thread: int) -> list[tuple[str, _Track]]:
        """Ranges and operators of data loading."""
        return [
            ("range", self._named("ranges", thread, "data", self._data)),
            ("op", self._named("ops", thread, "data", self._data)),
        ]

    def waits(self, thread: int) -> _Track:
        """OS waits outside CUDA calls."""
        key = ("os_calls:outside", thread)
        if key not in self._tracks:
            track = self._named("os_calls", thread, "wait", _OS_WAIT)
            calls = self.calls(thread)
            if len(track) and len(calls):
                # A wait within a CUDA call is the driver's; a wait that encloses one does not exist on a thread.
                within = calls.open_at(track.start) >= 0
                track = track.subset(~within)
            self._tracks[key] = track
        return self._tracks[key]

    def lone(self, thread: int) -> list[tuple[str, _Track]]:
        """Ranges, and operators of some length, in which nothing was launched."""
        key = ("lone", thread)
        if key not in self._tracks:
            calls = self.calls(thread)
            ranges = self._table("ranges", thread)
            if len(ranges):
                dispatch = self._framework_ranges()[ranges.row] & (ranges.end - ranges.start < _HEAVY_OP_NS)
                ranges = ranges.subset((calls.inside(ranges) == 0) & ~dispatch)
            self._tracks[key] = ranges
            ops = self._table("ops", thread)
            heavy = ops.subset(ops.end - ops.start >= _HEAVY_OP_NS) if len(ops) else _EMPTY
            self._tracks[("lone ops", thread)] = heavy.subset(calls.inside(heavy) == 0) if len(heavy) else _EMPTY
        return [("range", self._tracks[key]), ("op", self._tracks[("lone ops", thread)])]

    def _framework_ranges(self) -> Bool:
        """Per range: whether a framework emitted it for an operator."""
        if "framework" not in self._flags:
            self._flags["framework"] = matching(self._trace.table("ranges", ["name"])["name"], OPERATOR_RANGE)
        return self._flags["framework"]

    def dispatch(self, thread: int) -> _Track:
        """Operators with no other between them and a CUDA call. For its coverage; rows mean nothing."""
        key = ("dispatch", thread)
        if key not in self._tracks:
            ops, ranges, calls = self._table("ops", thread), self._table("ranges", thread), self.calls(thread)
            if len(ranges):
                ranges = ranges.subset(self._framework_ranges()[ranges.row])
            if len(ranges):
                ops = _Track(*(np.concatenate((getattr(ops, a), getattr(ranges, a))) for a in ("start", "end", "row")))
            if len(ops) and len(calls):
                direct = np.unique(ops.innermost_at(calls.start))
                keep = np.zeros(len(ops), bool)
                keep[direct[direct >= 0]] = True
                ops = ops.subset(keep)
            else:
                ops = _EMPTY
            self._tracks[key] = ops
        return self._tracks[key]

    def activity(self, thread: int) -> list[tuple[str, _Track]]:
        """All ranges and operators."""
        return [("op", self._table("ops", thread)), ("range", self._table("ranges", thread))]

    def overhead(self, thread: int) -> _Track:
        return self._table("overhead", thread)


class _Judge:
    """Applies the rules, each to all gaps that no earlier rule decided."""

    def __init__(self, trace: Trace, gaps: _Gaps, fed_by: Int, threads: _Threads) -> None:
        self._trace, self._gaps, self._fed_by, self._threads = trace, gaps, fed_by, threads

    def run(self) -> None:
        g = self._gaps
        known = g.launch >= 0
        thread = np.full(len(g.launch), -1, np.int64)
        begun, done = g.end.copy(), g.end.copy()
        if known.any():
            calls = self._trace.table("calls", ["start_ns", "end_ns", "thread"])
            at = g.launch[known]
            thread[known] = calls["thread"].to_numpy()[at]
            begun[known] = calls["start_ns"].to_numpy()[at]
            done[known] = calls["end_ns"].to_numpy()[at]
        for one in np.unique(thread).tolist():
            mine = np.flatnonzero(thread == one)
            if one == -1:
                self._without_launch(mine)
                continue
            fed_by = self._fed_by[mine]
            for other in np.unique(fed_by).tolist():
                part = mine[fed_by == other]
                handed = other not in (one, -1) and other >> 24 == one >> 24
                self._thread(part, one, other if handed else None, begun[part], done[part])

    def _set(self, gaps: Int, cause: int, source: str, rows: Int | None = None) -> None:
        self._gaps.cause[gaps] = cause
        self._gaps.source[gaps] = _E[source]
        if rows is not None:
            self._gaps.source_row[gaps] = rows

    def _without_launch(self, gaps: Int) -> None:
        g = self._gaps
        self._profiler(gaps, [-1])
        rest = gaps[g.cause[gaps] == _UNDECIDED]
        self._other_device(rest)

    def _profiler(self, gaps: Int, threads: list[int]) -> None:
        g = self._gaps
        for thread in dict.fromkeys([*threads, -1]):
            track = self._threads.overhead(thread)
            if not len(track) or not len(gaps):
                continue
            start, end = g.start[gaps], g.end[gaps]
            yes = 2 * track.covered(start, end) > end - start
            at = track.open_at((start[yes] + end[yes]) // 2)
            self._set(gaps[yes], _PROFILER, "overhead", np.where(at >= 0, track.row[np.maximum(at, 0)], -1))
            gaps = gaps[~yes]

    def _other_device(self, gaps: Int) -> None:
        """Operations that lay in the queue until a copy of their process on another device was done."""
        g = self._gaps
        if not len(gaps) or not self._trace.size("memops"):
            return
        memops = self._trace.table("memops", ["start_ns", "end_ns", "device", "process"])
        device, process = memops["device"].to_numpy(), memops["process"].to_numpy()
        if (device == device[0]).all() and (g.device[gaps] == device[0]).all():
            return
        of_op = np.zeros(len(gaps), np.int64)
        for number, name in enumerate(GPU_TABLES):
            mine = g.table[gaps] == number
            if mine.any():
                of_op[mine] = self._trace.table(name, ["process"])["process"].to_numpy()[g.row[gaps[mine]]]
        for one in np.unique(g.device[gaps]).tolist():
            for owner in np.unique(of_op).tolist():
                mine = gaps[(g.device[gaps] == one) & (of_op == owner)]
                rows = np.flatnonzero((device != one) & (process == owner))
                if not len(mine) or not len(rows):
                    continue
                track = _Track(memops["start_ns"].to_numpy()[rows], memops["end_ns"].to_numpy()[rows], rows)
                start, end = g.start[mine], g.end[mine]
                at = track.open_at((start + end) // 2)
                # What goes on after the operation began is not what it waited for.
                done = (at >= 0) & (track.end[np.maximum(at, 0)] <= end)
                yes = done & (2 * track.covered(start, end) >= end - start)
                self._set(mine[yes], _TRANSFER, "copy", track.row[at[yes]])

    def _thread(self, gaps: Int, thread: int, other: int | None, begun: Int, done: Int) -> None:
        """Gaps that `thread` ended, the device having been fed by `other` before (None: by `thread` itself)."""
        g, threads = self._gaps, self._threads
        asked = [thread] if other is None else [thread, other]

        def undecided() -> Int:
            return np.flatnonzero(g.cause[gaps] == _UNDECIDED)

        self._profiler(gaps, asked)

        dry = g.start[gaps]
        until = np.clip(begun, dry, g.end[gaps])  # when the launch began, within the gap
        handed = np.zeros(len(gaps), bool)
        over = dry  # when the work passed from `other` to `thread`
        if other is not None:
            last_here = _last_end(threads.calls(thread), begun)
            last_there = _last_end(threads.calls(other), begun)
            handed = last_there > last_here
            over = np.where(handed, np.clip(last_there, dry, until), dry)

        # 2. input pipeline
        left = undecided()
        for which in asked:
            if not len(left):
                break
            if which == other:
                left = left[handed[left]]
            self._input(gaps, left, which, dry, until, over, handed, begun, waits_after=which == thread)
            left = undecided()

        # 3. synchronization: who sat in a blocking call when the device ran dry
        for which in asked:
            left = undecided()
            if which == other:
                left = left[handed[left]]
            blocking = threads.blocking(which)
            if not len(left) or not len(blocking):
                continue
            # A nanosecond before the device ran dry: a call that returns at that very moment was waiting for it.
            at = blocking.open_at(dry[left] - 1)
            row = np.where(at >= 0, blocking.row[np.maximum(at, 0)], -1)
            # The upload that ends the gap: staging, rule 4.
            own_upload = (row == g.launch[gaps[left]]) & (row >= 0)
            if own_upload.any():
                own_upload &= threads.uploads()[np.maximum(row, 0)]
            yes = (at >= 0) & ~own_upload
            self._set(gaps[left[yes]], _SYNC, "call", row[yes])

        # 4. memory transfer
        left = undecided()
        staging = threads.staging(thread)
        if len(left) and len(staging):
            start, end = dry[left], g.end[gaps[left]]
            yes = 2 * staging.covered(start, end) >= end - start
            at = staging.open_at((start[yes] + end[yes]) // 2)
            self._set(
                gaps[left[yes]],
                _TRANSFER,
                "call",
                np.where(at >= 0, staging.row[np.maximum(at, 0)], g.launch[gaps[left[yes]]]),
            )
        left = undecided()
        queued = left[2 * (until[left] - dry[left]) <= g.end[gaps[left]] - dry[left]]
        self._other_device(gaps[queued])

        # 5. and 6. launches, or other work
        left = undecided()
        silent = left[until[left] <= dry[left]]  # launched before the device ran dry
        quick = g.end[gaps[silent]] - np.maximum(dry[silent], done[silent]) <= _QUEUED_NS
        self._set(gaps[silent[quick]], _LAUNCH, "call", g.launch[gaps[silent[quick]]])

        left = undecided()
        left = left[until[left] > dry[left]]
        # The launch call itself took most of the gap (lazy loading of a module, a full queue).
        length = g.end[gaps[left]] - dry[left]
        yes = 2 * (np.minimum(done[left], g.end[gaps[left]]) - until[left]) >= length
        self._set(gaps[left[yes]], _LAUNCH, "call", g.launch[gaps[left[yes]]])
        left = left[~yes]
        for which in asked:
            mine = left if which == thread else left[handed[left]]
            self._work(
                gaps,
                mine,
                which,
                np.where(handed, over, dry) if which == thread else dry,
                until if which == thread else over,
            )
            left = left[g.cause[gaps[left]] == _UNDECIDED]
        if not len(left):
            return
        # Nothing recorded in between: dispatch, if no longer than dispatch takes.
        window = until[left] - dry[left]
        follows = begun[left] > min(int(threads.calls(t).start[0]) for t in asked)
        yes = (window <= _EAGER_NS) & follows
        slow = np.flatnonzero(follows & ~yes)
        if len(slow):
            start, end = dry[left[slow]], until[left[slow]]
            launching = threads.dispatch(thread).covered(start, end) + threads.calls(thread).covered(start, end)
            yes[slow] = 2 * launching >= window[slow]
        self._set(gaps[left[yes]], _LAUNCH, "call", g.launch[gaps[left[yes]]])
        left = left[~yes]
        for which in asked:
            for kind, track in threads.activity(which):
                mine = left[g.cause[gaps[left]] == _UNDECIDED]
                if not len(mine) or not len(track):
                    continue
                yes = 2 * track.covered(dry[mine], until[mine]) >= until[mine] - dry[mine]
                hit = mine[yes]
                at = track.innermost_at((dry[hit] + until[hit]) // 2)
                at = np.where(at >= 0, at, track.innermost_at(np.maximum(until[hit] - 1, 0)))
                self._set(gaps[hit], _CPU, kind, np.where(at >= 0, track.row[np.maximum(at, 0)], -1))

    def _input(
        self,
        gaps: Int,
        left: Int,
        thread: int,
        dry: Int,
        until: Int,
        over: Int,
        handed: Bool,
        begun: Int,
        *,
        waits_after: bool,
    ) -> None:
        """Rule 2 on one thread."""
        threads = self._threads
        start, end = dry[left], until[left]
        window = end - start
        tracks = [*threads.data(thread), ("os_call", threads.waits(thread))]
        if not any(len(t) for _, t in tracks) or not len(left):
            return
        together = Coverage(np.concatenate([t.start for _, t in tracks]), np.concatenate([t.end for _, t in tracks]))
        covered = together.of(start, end)
        waits = tracks[-1][1]
        if handed[left].any() and len(waits):
            # While work passes between threads, a wait for the other thread is no wait for data: here one that began
            # before the hand-over, there one that outlasts the launch.
            point = over[left] if waits_after else begun[left]
            at = waits.open_at(point)
            mine = handed[left] & (at >= 0)
            low = np.maximum(waits.start[np.maximum(at, 0)], start)
            high = np.minimum(waits.end[np.maximum(at, 0)], end)
            excluded = np.where(mine, np.maximum(high - low, 0), 0)
            for _, track in tracks[:-1]:
                excluded -= np.where(mine, track.covered(low, np.maximum(high, low)), 0)
            covered = covered - np.maximum(excluded, 0)
        yes = (window > 0) & (2 * covered >= window) & (covered > 0)
        hit = left[yes]
        for kind, track in tracks:
            hit = hit[self._gaps.cause[gaps[hit]] == _UNDECIDED]
            if not len(track) or not len(hit):
                continue
            best = track.open_at((dry[hit] + until[hit]) // 2)
            last = np.searchsorted(track.start, until[hit], side="left") - 1
            overlaps = (last >= 0) & (track.end[np.maximum(last, 0)] > dry[hit])
            best = np.where(best >= 0, best, np.where(overlaps, last, -1))
            found = best >= 0
            self._set(gaps[hit[found]], _INPUT, kind, track.row[best[found]])
        rest = hit[self._gaps.cause[gaps[hit]] == _UNDECIDED]
        self._set(gaps[rest], _INPUT, "none")

    def _work(self, gaps: Int, left: Int, thread: int, start: Int, end: Int) -> None:
        """Rule 6 ahead of rule 5: ranges, operators or calls of their own fill most of the time before the launch."""
        g, threads = self._gaps, self._threads
        for kind, track in (*threads.lone(thread), ("call", threads.other_calls(thread))):
            left = left[(g.cause[gaps[left]] == _UNDECIDED) & (end[left] > start[left])]
            if not len(left):
                return
            if not len(track):
                continue
            # Of the whole wait, not only of this thread's part of it.
            window = np.maximum(np.clip(end[left], None, g.end[gaps[left]]) - g.start[gaps[left]], 1)
            yes = 2 * track.covered(start[left], end[left]) >= window
            hit = left[yes]
            at = track.innermost_at((start[hit] + end[hit]) // 2)
            last = np.maximum(np.searchsorted(track.start, end[hit], side="left") - 1, 0)
            self._set(gaps[hit], _CPU, kind, track.row[np.where(at >= 0, at, last)])


_NEVER = -(2**62)


def _last_end(calls: _Track, before: Int) -> Int:
    """End of the last call that began before each time; `_NEVER` when there is none."""
    i = np.searchsorted(calls.start, before, side="left") - 1
    if not len(calls):
        return np.full(len(before), _NEVER, np.int64)
    return np.where(i >= 0, calls.end[np.maximum(i, 0)], _NEVER)


def memop_name(kind: str) -> str:
    """Call a copy or memset what Nsight Systems calls it.

    Parameters
    ----------
    kind : str
        Of the model's ``memops``.
    """
    return kind if kind == "memset" else f"memcpy {kind}"


class _Evidence:
    """Turns (table, row) into what a person reads."""

    def __init__(self, trace: Trace, gaps: _Gaps) -> None:
        self._trace, self._gaps = trace, gaps

    def _events(self, table: str, rows: Int) -> list[dict[str, Any]]:
        columns = [
            "start_ns",
            "end_ns",
            "kind" if table == "memops" else "name",
            "device" if table == "memops" else "thread",
        ]
        part = self._trace.table(table, columns).iloc[rows]
        names = part[columns[2]].astype("str").tolist()
        if table == "memops":
            names = [memop_name(n) for n in names]
        return [
            {"name": n, "start_ns": int(s), "end_ns": int(e), columns[3]: int(t)}
            for n, s, e, t in zip(names, part["start_ns"], part["end_ns"], part[columns[3]], strict=True)
        ]

    def of_all(self) -> list[dict[str, Any]]:
        g = self._gaps
        out: list[dict[str, Any]] = [{"kind": "none"} for _ in range(len(g.cause))]
        for kind, table in _EVIDENCE_TABLE.items():
            mine = np.flatnonzero((g.source == _E[kind]) & (g.source_row >= 0))
            for i, event in zip(
                mine.tolist(), self._events(table, g.source_row[mine]) if len(mine) else [], strict=True
            ):
                out[i] = {"kind": kind, **event}
        launched = np.flatnonzero(g.launch >= 0)
        for i, event in zip(
            launched.tolist(), self._events("calls", g.launch[launched]) if len(launched) else [], strict=True
        ):
            out[i]["launch"] = event
        for number, table in enumerate(GPU_TABLES):
            mine = np.flatnonzero(g.table == number)
            if not len(mine):
                continue
            if table == "graphs":
                names = ["graph replay"] * len(mine)
            else:
                column = "name" if table == "kernels" else "kind"
                names = self._trace.table(table, [column])[column].iloc[g.row[mine]].astype("str").tolist()
            for i, name in zip(mine.tolist(), names, strict=True):
                out[i]["ended_by"] = memop_name(name) if table == "memops" else name
        return out
