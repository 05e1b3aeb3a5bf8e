"""The recorded activity of each CPU thread, by its meaning for a device that waits for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core.intervals import Coverage, gpu_intervals, launch_of, merge
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import LOADER_RANGE, OPERATOR_RANGE, Expression, matching
from nsightkit.analysis.timeline import compiler, steps
from nsightkit.analysis.timeline.gaps.paint import (
    EVIDENCE,
    LABELS,
    TABLE_OF,
    Bool,
    Int,
    Layer,
    Paint,
    Track,
    Union,
    paint,
    together,
)
from nsightkit.analysis.timeline.overview import captured_window
from nsightkit.trace.model import LAUNCHES, Trace, process_of

__all__ = [
    "BEGIN_CAPTURE", "BLOCKING", "DATA", "EAGER_NS", "END_CAPTURE", "LOADS", "MESSAGES", "OS_WAIT", "UNIFIED",
    "UNKNOWN", "Threads",
]  # fmt: skip

# ---------------------------------------------------------------- names of calls, ranges and operators

_OF_DATA = (
    r"(data|batch|sample|input)(e?s)?(?![a-z])(?![\s_-]*(?!from|for|async|wait|time|queue|iter|load|fetch|next)[a-z])"
)
#: Names of ranges and operators in which a program waits for its data. Weights, layers and embeddings are not data.
DATA = re.compile(
    r"(?i)data[\s_-]*load|(?<![a-z])load(ing)?[\s_-]*(the[\s_-]*)?(next[\s_-]*)?" + _OF_DATA + r"|"
    r"(next|get|fetch|read|wait|prefetch)(ing)?[\s_-]*(for[\s_-]*)?(the[\s_-]*|next[\s_-]*)?" + _OF_DATA + r"|"
    r"(data|batch|sample|input)[\s_-]*(pipeline|wait|fetch|prefetch)|^(data|batch|dataset)([\s_-]*time)?$|"
    r"data[\s_-]*time\b|\b__next__\b|^next\(|collate"
)

ANY = re.compile(".")
#: Sleeps, which the program chose.
ASLEEP = re.compile(r"^((clock_)?nanosleep|u?sleep)(64)?$")
#: Input from a person at a terminal.
TERMINAL = re.compile(r"^(f?getw?[cs]|getw?char|v?w?scanf)$|std::cin\b")
#: OS calls in which a thread waits for another thread or process, a socket or a disk.
OS_WAIT = re.compile(
    r"^(e?poll|ppoll|epoll_p?wait\d*|p?select|futex|sem_(timed)?wait|sem_clockwait|pthread_cond_(timed|clock)?wait|"
    r"pthread_join|pthread_mutex_(timed)?lock|pthread_rwlock_(rd|wr)lock|pthread_barrier_wait|sigwait(info)?|"
    r"sigtimedwait|wait(pid|id|3|4)?|p?readv?\d*|pread64|fread|getdelim|getline|v?fw?scanf|recv(from|msg|mmsg)?|"
    r"accept4?|connect|msgrcv|mq_(timed)?receive|io_getevents|flock|fsync)(64)?$"
)
#: Those of them in which a thread may wait for another thread of its process.
FOR_A_THREAD = re.compile(r"^(futex|sem_|pthread_)")
#: Host calls of libraries that exchange data between processes; setting up a communicator is not among them.
MESSAGES = re.compile(r"^(P?MPI_(?!Init|Finalize)|uc[pst]_|nvshmemx?_|nccl(?!Comm)[A-Z])")

#: Calls that return only when the GPU has caught up.
BLOCKING = re.compile(
    r"^(cuda|hip)(Device|Stream|Event|Thread|Context|Graph)Synchronize|^cu(Ctx|Stream|Event)Synchronize|"
    r"^(cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)"
)
COPY = re.compile(r"^(cuda|hip|cu)Memcpy")
#: Pages of managed memory that move, without a launch and outside any stream.
UNIFIED = re.compile("^unified")
#: Calls that enqueue work, and cheap calls beside it.
ENQUEUES = re.compile(r"Launch|^(cuda|hip|cu)(Memcpy|Memset).*Async|Event(Record|Query|Create|Destroy)|StreamWaitEvent")
CHEAP = re.compile(
    r"StreamIsCapturing|StreamGetCaptureInfo|StreamQuery|GetLastError|PeekAtLastError|GetDevice|SetDevice|CtxGet|CtxSet|"
    r"OccupancyMax|FuncGetAttribute|FuncSetAttribute|PointerGetAttribute"
)

#: Overhead records about code that the driver loads or compiles; and all about the driver, a full queue included.
LOADS = re.compile(r"(?i)(module|function)s? loading|driver compiler|^dl(open|close)\b")
DRIVER = re.compile(LOADS.pattern + "|command buffer")
#: Calls that load or build code, and calls that build a graph.
BUILDS = re.compile(
    r"^cu(Module|Library)Load|^(cuda|hip)(Module|Library)Load|^cuLink(Create|Add|Complete)|^(nvrtc|hiprtc)CompileProgram"
)
SETS_UP = re.compile(
    r"Graph(Exec)?Instantiate|^ncclComm(Init|Split)|(?i:cuda_?graph[\s_-]*captur)|CUDAGraphNode\.record"
)
BEGIN_CAPTURE = re.compile("StreamBeginCapture")
END_CAPTURE = re.compile("StreamEndCapture")
#: Calls that may have to set something up before they do what they are for.
FIRST_TIMES = re.compile(r"Launch(?!HostFunc)|Malloc|Free|Alloc|Create|Register|DeviceProp|Occupancy|SetDevice")

# ---------------------------------------------------------------- what threads did

#: An outlying call takes this many times what nine tenths of the calls of its name take, and at least this long.
_TIMES = 10
_ONCE_NS = 1_000_000
_USUAL = 0.9
#: Between two launches of an eager program pass microseconds. A longer silence is something else.
EAGER_NS = 500_000
#: An operator without a launch that lasts this long is work, not dispatch.
_HEAVY_NS = 100_000
#: Pages of managed memory that move one after another, at most this far apart, are one run of faults.
_PAGES_NS = 100_000
#: How many answers about single threads to keep; bounds memory for traces with thousands of threads.
_KEPT = 20_000
#: The last 24 bits of a thread's number, the others being its process: of a thread of which nothing was recorded.
UNKNOWN = 0xFFFFFF


class Threads:
    """The recorded activity of each thread, split by what it means; each part is built when it is asked for.

    Parameters
    ----------
    trace : Trace
        Its filters do not count.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace.whole
        self.memo: dict[Any, Any] = {}
        called = self.trace.table("calls", ["thread"])["thread"].to_numpy()
        #: whether more than one thread calls CUDA
        self.several = bool((called != called[:1]).any())

    def forget(self) -> None:
        """Drop what is kept of single threads and processes once that is much."""
        if len(self.memo) > _KEPT:
            self.memo.clear()

    # --- the tables, thread by thread ---

    @kept
    def _by_thread(self, table: str) -> tuple[Int, Int, Track]:
        """The threads, where the events of each begin and those of the last end, and the events by thread."""
        events = self.trace.table(table, ["thread", "start_ns", "end_ns"])
        thread = events["thread"].to_numpy()
        start = events["start_ns"].to_numpy()
        order = np.lexsort((start, thread)).astype(np.int32)
        threads, count = np.unique(thread, return_counts=True)
        return threads, np.append(0, np.cumsum(count)), Track(start[order], events["end_ns"].to_numpy()[order], order)

    def _between(self, table: str, first: int, last: int) -> Track:
        """The events of the threads from `first` up to `last`, thread by thread."""
        threads, begin, events = self._by_thread(table)
        low, high = begin[np.searchsorted(threads, (first, last))]
        return events.at(slice(int(low), int(high)))

    @kept
    def events(self, table: str, thread: int) -> Track:
        """The events of a thread in a table."""
        return self._between(table, thread, thread + 1)

    def calls(self, thread: int) -> Track:
        """CUDA calls."""
        return self.events("calls", thread)

    @kept
    def _flag(self, table: str, expression: Expression) -> Bool:
        """Per row of a table: whether its name matches."""
        return matching(self.trace.table(table, ["name"])["name"], expression)

    @kept
    def named(self, table: str, thread: int, expression: Expression) -> Track:
        """The events of a thread whose name matches."""
        events = self.events(table, thread)
        if not len(events):
            return events
        flag = self._flag(table, expression)
        if flag.any():
            return events.subset(flag[events.row])
        return events.at(slice(0))

    def _named(self, label: str, kind: str, thread: int, expression: Expression) -> Layer:
        """The layer of a thread's events of one kind whose name matches."""
        return Layer(label, kind, self.named(TABLE_OF[kind], thread, expression))

    # --- CUDA calls ---

    @kept
    def _blocks(self) -> Bool:
        """Per call: whether it returns only when the GPU has caught up."""
        # A copy into pageable memory blocks even if its name ends in Async.
        return self._flag("calls", BLOCKING) | (self._pageable("dst_kind") & self._flag("calls", COPY))

    @kept
    def blocking(self, thread: int) -> Track:
        """Calls that return only when the GPU has caught up."""
        calls = self.calls(thread)
        return calls.subset(self._blocks()[calls.row])

    @kept
    def fed(self, thread: int) -> Int:
        """Starts of the calls that give a device new work and do not block."""
        calls = self.calls(thread)
        flag = self._flag("calls", LAUNCHES) & ~self._blocks()
        return calls.start[flag[calls.row]]

    @kept
    def _pageable(self, column: str) -> Bool:
        """Per call: whether it launched a copy whose ``src_kind`` or ``dst_kind`` is pageable memory of the host."""
        memops = self.trace.table("memops", ["process", "correlation", column])
        copies = memops[memops[column] == "pageable"]
        row = launch_of(self.trace, copies["process"], copies["correlation"])
        flag = np.zeros(self.trace.size("calls"), bool)
        flag[row[row >= 0]] = True
        return flag

    def _calls_of_label(self, thread: int) -> Iterator[Layer]:
        """Calls that neither enqueue work nor are cheap, and copy calls that move pageable memory."""
        calls = self.calls(thread)
        is_cheap = self._flag("calls", CHEAP)[calls.row] & (calls.length < _HEAVY_NS)
        is_cheap |= self._flag("calls", ENQUEUES)[calls.row]
        yield Layer("work", "call", calls.subset(~is_cheap))
        copies = self.named("calls", thread, COPY)
        is_staged = self._pageable("src_kind") | self._pageable("dst_kind")
        yield Layer("staging", "call", copies.subset(is_staged[copies.row]))

    # --- waiting ---

    def _waits(self, thread: int) -> Iterator[Layer]:
        """OS waits outside CUDA calls: for a person, for a thread that calls CUDA, else for data."""
        yield self._named("silence", "os_call", thread, TERMINAL)
        calls = self.calls(thread)
        waits = self.named("os_calls", thread, OS_WAIT)
        # A wait within a CUDA call is the driver's.
        waits = waits.subset(calls.covered(waits.start, waits.start + 1) == 0)
        handed = self._flag("os_calls", FOR_A_THREAD)[waits.row]
        if handed.any():
            in_calls = self._calls_of_process(process_of(thread)).of(waits.start, waits.end)
            handed &= in_calls > calls.covered(waits.start, waits.end)
        yield Layer("silence", "os_call", waits.subset(handed))
        yield Layer("data", "os_call", waits.subset(~handed))

    @kept
    def _calls_of_process(self, process: int) -> Coverage:
        """When any thread of a process was in a CUDA call."""
        return self._between("calls", process << 24, (process + 1) << 24).coverage

    # --- work ---

    def sleeps(self, thread: int) -> Track:
        """Waits that the program chose."""
        return self.named("os_calls", thread, ASLEEP)

    def _without_launch(self, track: Track, thread: int) -> Track:
        """Events in which their thread neither launched nor waited for the GPU."""
        if not len(track):
            return track
        calls = self.calls(thread)
        flag = self._flag("calls", LAUNCHES) | self._blocks()
        return track.subset(track.inside(calls.start[flag[calls.row]]) == 0)

    def _work(self, thread: int) -> Iterator[Layer]:
        """Sleeps, and operators of some length and ranges without a launch."""
        yield Layer("work", "os_call", self.sleeps(thread))
        ops = self.events("ops", thread)
        ops = ops.subset(ops.length >= _HEAVY_NS)
        yield Layer("work", "op", self._without_launch(ops, thread))
        ranges = self.events("ranges", thread)
        is_dispatch = self._flag("ranges", OPERATOR_RANGE)[ranges.row] & (ranges.length < _HEAVY_NS)
        yield Layer("work", "range", self._without_launch(ranges.subset(~is_dispatch), thread))

    @kept
    def dispatch(self, thread: int) -> Track:
        """Operators with no other between them and a CUDA call. For its coverage; rows mean nothing."""
        ops = together(self.events("ops", thread), self.named("ranges", thread, OPERATOR_RANGE))
        if not len(ops):
            return ops
        direct = ops.innermost_at(self.calls(thread).start)
        count = np.bincount(direct[direct >= 0], minlength=len(ops))
        # An operator that runs much longer than its calls take to dispatch does something else as well.
        return ops.subset((count > 0) & (ops.length <= count * EAGER_NS))

    def _silences(self, thread: int) -> Track:
        """Times between CUDA calls that are too long for dispatch, mostly not in operators that launch."""
        calls = self.calls(thread)
        # A silence runs from the end of a call to the start of the next; the first from the capture's beginning, the
        # last to its end.
        _, captured_until = captured_window(self.trace)
        silence_start = np.append(0, np.maximum.accumulate(calls.end))
        silence_end = np.append(calls.start, max(captured_until, int(silence_start[-1])))
        is_long = silence_end - silence_start > EAGER_NS
        if len(calls):
            is_long[0] = silence_start[0] < silence_end[0]  # before its first call a thread dispatches nothing
        at = np.flatnonzero(is_long)
        silences = Track(silence_start[at], silence_end[at], at)
        covered = self.dispatch(thread).covered(silences.start, silences.end)
        return silences.subset(2 * covered < silences.length)

    def _enclosing(self, thread: int, silences: Track) -> Iterator[Layer]:
        """Explanations of silences: samples, ranges and operators around them, a loader's threads at work."""
        for label, kind, track in (
            ("enclosed", "sample", self.named("samples", thread, ANY)),
            ("enclosed", "range", self.events("ranges", thread)),
            ("enclosed", "op", self.events("ops", thread)),
            ("data", "range", self._loader(process_of(thread))),
        ):
            near = silences.covered(track.start, track.end) > 0
            yield Layer(label, kind, track.subset(near), is_quiet=True)

    @kept
    def _loader(self, process: int) -> Track:
        """Ranges of libraries that load data on separate threads."""
        ranges = self.trace.table("ranges", ["name", "domain", "thread", "start_ns", "end_ns"])
        loads = matching(ranges["name"], LOADER_RANGE) | matching(ranges["domain"], LOADER_RANGE)
        loads &= process_of(ranges["thread"].to_numpy()) == process
        return _track(ranges[loads])

    # --- the profiler, what happens once, and pages ---

    @kept
    def _profiler(self, process: int) -> Track:
        """The profiler's work on any thread of a process, and what names none."""
        of_process = self._between("overhead", process << 24, (process + 1) << 24)
        overhead = together(of_process, self.events("overhead", -1))
        return overhead.subset(~self._flag("overhead", DRIVER)[overhead.row])

    @kept
    def _settled(self) -> int:
        """When the program is settled: from then on a compiler recompiles."""
        table = steps.find(self.trace)
        settled = table.loc[steps.is_settled(table["step"]), "start_ns"]
        if len(settled):
            return int(settled.min())
        return np.iinfo(np.int64).max

    def _once(self, thread: int) -> Iterator[Layer]:
        """Compilers, before and after the program is settled; captures, communicators, first calls, code that loads."""
        for kind, expression in (("op", compiler.COMPILES), ("range", compiler.COMPILES), ("call", BUILDS)):
            track = self.named(TABLE_OF[kind], thread, expression)
            is_early = track.start < self._settled()
            yield Layer("once", kind, track.subset(is_early))
            yield Layer("compile", kind, track.subset(~is_early))
        for kind in ("op", "range", "call"):
            yield self._named("once", kind, thread, SETS_UP)
        yield Layer("once", "call", self._captures(thread))
        yield Layer("once", "call", self._first_calls(thread))
        for number in (-1, thread):  # records that name no thread, and the thread's
            yield self._named("once", "overhead", number, LOADS)

    def _captures(self, thread: int) -> Track:
        """From each begin of a graph's capture to its end; with the row of the begin."""
        begin = self.named("calls", thread, BEGIN_CAPTURE)
        end = self.named("calls", thread, END_CAPTURE)
        at = np.searchsorted(end.start, begin.start)
        begin = begin.subset(at < len(end))
        return Track(begin.start, end.end[at[at < len(end)]], begin.row)

    def _first_calls(self, thread: int) -> Track:
        """Calls that set something up while no device was busy: else they may wait, as for a full queue."""
        calls = self.calls(thread)
        first = calls.subset(self._first()[calls.row])
        if not len(first):
            return first
        idle_ns = first.length - self._busy().of(first.start, first.end)
        return first.subset(idle_ns >= _ONCE_NS)

    @kept
    def _first(self) -> Bool:
        """Per call: whether it is long and the first of its name in its process, or long beside others of its name."""
        calls = self.trace.table("calls", ["thread", "duration_ns", "name"])
        length = calls["duration_ns"].to_numpy()
        long = self._flag("calls", FIRST_TIMES) & (length >= _ONCE_NS)
        if not long.any():
            return long
        calls["process"] = process_of(calls["thread"].to_numpy())
        # A call that launches a new kernel may load its code: leave it out of the ordinary ones.
        kernels = self.trace.table("kernels", ["process", "correlation", "name"]).drop_duplicates(["process", "name"])
        loads = launch_of(self.trace, kernels["process"], kernels["correlation"])
        ordinary = calls.drop(loads[loads >= 0]).groupby("name", observed=True)["duration_ns"]
        usual = ordinary.quantile(_USUAL, interpolation="lower").reindex(calls["name"]).fillna(0).to_numpy()
        is_new = ~calls.duplicated(["process", "name"]).to_numpy()
        return long & (is_new | (length >= _TIMES * usual))

    @kept
    def _busy(self) -> Coverage:
        """When any device had work."""
        ops = gpu_intervals(self.trace)
        return Coverage(ops["start_ns"], ops["end_ns"])

    @kept
    def _faults(self, process: int) -> Track:
        """Runs of pages of managed memory that moved one after another."""
        memops = self.trace.table("memops", ["start_ns", "end_ns", "process", "kind"])
        pages = _track(memops[matching(memops["kind"], UNIFIED) & (memops["process"] == process).to_numpy()])
        start, end = merge(pages.start, pages.end + _PAGES_NS)
        return Track(start, end - _PAGES_NS, pages.row[np.searchsorted(pages.start, start)])

    # --- the paint ---

    @kept
    def paint(self, thread: int) -> Paint:
        """Label each moment of a thread's time."""
        silences = self._silences(thread)
        named = [*self._waits(thread), *self._work(thread)]
        for label, kind, expression in (
            ("data", "op", DATA),
            ("data", "range", DATA),
            ("messages", "os_call", MESSAGES),
            ("messages", "range", MESSAGES),
        ):
            named.append(self._named(label, kind, thread, expression))
        calls = self.calls(thread)
        within = together(*(layer.track for layer in named)).covered(calls.start, calls.end) > 0
        layers = [Layer("silence", "none", silences)]
        layers.extend(self._enclosing(thread, silences))
        layers.extend(named)
        layers.append(Layer("dispatch", "none", calls.subset(within)))
        layers.extend(self._calls_of_label(thread))
        layers.append(Layer("faults", "copy", self._faults(process_of(thread))))
        layers.extend(self._once(thread))
        layers.append(Layer("profiler", "overhead", self._profiler(process_of(thread))))
        return paint(layers)

    # --- unions, for the replay ---

    def when(self, thread: int, labels: Sequence[str], kinds: Sequence[str] = EVIDENCE) -> Union:
        """When the thread's time had one of some labels, by events of some kinds."""
        return self.paint(thread).union(labels, kinds)

    def dispatch_free(self, thread: int) -> Union:
        """All that the thread did beside dispatching."""
        return self.when(thread, [label for label in LABELS if label != "profiler"])


def _track(events: pd.DataFrame) -> Track:
    """Some events of a whole table."""
    events = events.sort_values("start_ns", kind="stable")
    return Track(events["start_ns"].to_numpy(), events["end_ns"].to_numpy(), events.index.to_numpy())
