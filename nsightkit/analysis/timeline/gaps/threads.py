"""The recorded activity of each CPU thread, painted by its meaning for a device that waits for it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.intervals import Coverage, captured_window, expand_runs, gpu_intervals, launch_of, merge
from nsightkit.analysis.timeline import compiler, steps
from nsightkit.text import LOADER_RANGE, OPERATOR_RANGE, Expression, matching
from nsightkit.trace.model import LAUNCHES, Trace, memoised, nesting, process_of

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]
#: Starts and ends of disjoint intervals, in order.
Intervals = tuple[Int, Int]

#: The table that each kind of evidence is from.
TABLE_OF = {
    "call": "calls",
    "range": "ranges",
    "op": "ops",
    "os_call": "os_calls",
    "copy": "memops",
    "overhead": "overhead",
    "sample": "samples",
}
#: Kinds of evidence, numbered by position.
EVIDENCE_KINDS = ("none", *TABLE_OF)
#: Labels of a thread's time, and the cause of a gap that each names; of two with equal time in a gap, the first counts.
#: ``enclosed`` is a silence longer than dispatch takes, with a range or an operator around it, or with samples of the
#: running thread.
CAUSE_OF_LABEL = {
    "profiler": "profiler",
    "once": "start-up",
    "compile": "recompilation",
    "faults": "memory-transfer",
    "data": "input-pipeline",
    "staging": "memory-transfer",
    "messages": "communication",
    "work": "cpu-work",
    "dispatch": "launch-overhead",
    "enclosed": "cpu-work",
    "silence": "unknown",
}
#: Labels, numbered by position.
LABELS = tuple(CAUSE_OF_LABEL)
#: Launch calls of ordinary length and the framework's work around them.
DISPATCH = LABELS.index("dispatch")
_ENCLOSED = LABELS.index("enclosed")


@dataclasses.dataclass(eq=False)
class Track:
    """Some events of one thread.

    Parameters
    ----------
    start, end : ndarray of int
        Nanoseconds, ordered by start.
    row : ndarray of int
        In the table they are from.
    """

    start: Int
    end: Int
    row: Int

    def __len__(self) -> int:
        return len(self.start)

    @property
    def length(self) -> Int:
        """How long each event lasts, in ns."""
        return self.end - self.start

    def at(self, positions: Int | slice) -> Track:
        """Keep the events at some positions."""
        return Track(self.start[positions], self.end[positions], self.row[positions])

    def subset(self, keep: Bool) -> Track:
        """Keep the events that a mask selects."""
        if keep.all():
            return self
        return self.at(np.flatnonzero(keep))

    @functools.cached_property
    def coverage(self) -> Coverage:
        """The union of the events."""
        return Coverage(self.start, self.end)

    def covered(self, start: Int, end: Int) -> Int:
        """How much of each window the events cover, in ns."""
        if not len(start):  # do not merge the events for nothing
            return start
        return self.coverage.of(start, end)

    def count_inside(self, times: Int) -> Int:
        """Count the sorted times within each event: from its start on, before its end."""
        before = np.searchsorted(times, self.start)
        return np.searchsorted(times, self.end) - before

    @functools.cached_property
    def parent(self) -> Int:
        """Position of the innermost event around each event, -1 for none."""
        one_thread = np.zeros(len(self), np.int64)
        _, parent = nesting(one_thread, self.start, self.end)
        return parent

    def innermost_at(self, at: Int) -> Int:
        """Position of the last event to begin among those open at each time, -1 for none."""
        event = np.searchsorted(self.start, at, side="right") - 1
        climbing = np.flatnonzero(event >= 0)
        # From an event that is over to the one around it, one level a round, all times at once.
        while len(climbing):
            over = climbing[self.end[event[climbing]] <= at[climbing]]
            event[over] = self.parent[event[over]]
            climbing = over[event[over] >= 0]
        return event


def together(*tracks: Track) -> Track:
    """Merge several tracks by start. Where they come from different tables, their `row` has no meaning any more."""
    start = np.concatenate([track.start for track in tracks])
    end = np.concatenate([track.end for track in tracks])
    row = np.concatenate([track.row for track in tracks])
    order = np.argsort(start, kind="stable")
    return Track(start, end, row).at(order)


class Layer(NamedTuple):
    """Events that paint a label of `LABELS`; `kind`, of `EVIDENCE_KINDS`, names their table.

    A quiet layer paints over the labels ``silence`` and ``enclosed`` only.
    """

    label: str
    kind: str
    track: Track
    is_quiet: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Paint:
    """The pieces of a thread's time, in order; time that no piece covers is dispatch.

    Parameters
    ----------
    start, end : ndarray of int
        Nanoseconds.
    label, kind : ndarray of int
        Positions in `LABELS` and `EVIDENCE_KINDS`.
    row : ndarray of int
        Of the event, in the table of its kind.
    """

    start: Int
    end: Int
    label: Int
    kind: Int
    row: Int

    @functools.cached_property
    def _coverage(self) -> dict[int, Coverage]:
        """When each label holds, by its position in `LABELS`; only labels that occur."""
        coverage = {}
        for label in np.unique(self.label).tolist():
            of_label = self.label == label
            coverage[label] = Coverage(self.start[of_label], self.end[of_label])
        return coverage

    def shares(self, start: Int, end: Int) -> Int:
        """How much of each window each label holds, in ns: one row per label, one column per window."""
        label_ns = np.zeros((len(LABELS), len(start)), np.int64)
        for label, coverage in self._coverage.items():
            label_ns[label] = coverage.of(start, end)
        # What no piece covers is dispatch.
        label_ns[DISPATCH] = np.maximum(end - start, 0) - label_ns.sum(axis=0)
        return label_ns

    def intervals_labelled(self, labels: Sequence[str], kinds: Sequence[str] = EVIDENCE_KINDS) -> Intervals:
        """Merge the pieces that have one of `labels` from an event of one of `kinds`; by default of any kind."""
        chosen = np.isin(self.label, [LABELS.index(label) for label in labels])
        chosen &= np.isin(self.kind, [EVIDENCE_KINDS.index(kind) for kind in kinds])
        return merge(self.start[chosen], self.end[chosen])

    def overlaps(self, start: Int, end: Int, label: Int) -> pd.DataFrame:
        """Find the pieces inside each window that have the label asked for: ``window, kind, row, overlap_ns``.

        `label` has one label per window; `kind` and `row` name the event that made the piece, see :class:`Paint`.
        """
        first = np.searchsorted(self.end, start, side="right")  # the first piece to end in or after the window
        beyond = np.searchsorted(self.start, end)  # the first piece to start after it
        window, piece = expand_runs(first, np.maximum(beyond - first, 0))
        has_label = self.label[piece] == label[window]
        window = window[has_label]
        piece = piece[has_label]
        overlap_ns = np.minimum(self.end[piece], end[window]) - np.maximum(self.start[piece], start[window])
        columns = {"window": window, "kind": self.kind[piece], "row": self.row[piece], "overlap_ns": overlap_ns}
        return pd.DataFrame(columns)


def paint(layers: Sequence[Layer]) -> Paint:
    """Paint a thread's time, each layer over those before it; of a layer, the event that began last shows.

    A quiet layer shows only where the label so far is ``enclosed`` or ``silence``.
    """
    # Between neighbouring edges nothing begins or ends: the events open at the piece's start hold to its end.
    edges = np.zeros(0, np.int64)
    for layer in layers:
        edges = np.concatenate([edges, layer.track.start, layer.track.end])
    edges = np.unique(edges)
    piece_start = edges[:-1]
    label = np.full(len(piece_start), DISPATCH, np.int8)
    kind = np.zeros(len(piece_start), np.int8)
    row = np.full(len(piece_start), -1, np.int32)
    for layer in layers:
        event = layer.track.innermost_at(piece_start)
        covered = np.flatnonzero(event >= 0)
        if layer.is_quiet:
            covered = covered[label[covered] >= _ENCLOSED]  # the last labels: enclosed and silence
        label[covered] = LABELS.index(layer.label)
        kind[covered] = EVIDENCE_KINDS.index(layer.kind)
        row[covered] = layer.track.row[event[covered]]
    pieces = np.flatnonzero(label != DISPATCH)  # `Paint` takes the rest for dispatch
    return Paint(piece_start[pieces], edges[1:][pieces], label[pieces], kind[pieces], row[pieces])


# ---------------------------------------------------------------- names of calls, ranges and operators

#: Data as an object: "batch", "samples"; "data from", "data queue"; not part of another name, as in "batch norm".
_DATA_NOUN = (
    r"(data|batch|sample|input)(e?s)?(?![a-z])(?![\s_-]*(?!from|for|async|wait|time|queue|iter|load|fetch|next)[a-z])"
)
#: Names of ranges and operators in which a program waits for its data. Weights, layers and embeddings are not data.
DATA = re.compile(
    r"(?i)data[\s_-]*load|(?<![a-z])load(ing)?[\s_-]*(the[\s_-]*)?(next[\s_-]*)?" + _DATA_NOUN + r"|"
    r"(next|get|fetch|read|wait|prefetch)(ing)?[\s_-]*(for[\s_-]*)?(the[\s_-]*|next[\s_-]*)?" + _DATA_NOUN + r"|"
    r"(data|batch|sample|input)[\s_-]*(pipeline|wait|fetch|prefetch)|^(data|batch|dataset)([\s_-]*time)?$|"
    r"data[\s_-]*time\b|\b__next__\b|^next\(|collate"
)

#: Any name.
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

#: A call that sets something up takes at least this long,
_SETUP_NS = 1_000_000
#: and unless it is the first of its name, this many times what this share of the calls of its name take at most.
_OUTLYING_FACTOR = 10
_ORDINARY_SHARE = 0.9
#: An eager program launches every few microseconds. A silence longer than this is something else than dispatch.
EAGER_NS = 500_000
#: An operator without a launch that lasts this long is work, not dispatch.
_LEAST_WORK_NS = 100_000
#: Pages of managed memory that move one after another, at most this far apart, are one run of faults.
_BETWEEN_PAGES_NS = 100_000
#: How many memoised answers to keep; bounds memory for traces with thousands of threads.
_MOST_KEPT = 20_000
#: Stands in the last 24 bits of the number of a thread of which nothing was recorded; the other bits are its process.
UNKNOWN = 0xFFFFFF


class Threads:
    """The recorded activity of each thread, split by what it means for the GPU; each part is built on first use.

    Parameters
    ----------
    trace : Trace
        Its filters do not count.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace.whole
        #: Answers of the methods marked `memoised`.
        self.memo: dict[Any, Any] = {}
        called = self.trace.table("calls", ["thread"])["thread"].to_numpy()
        #: Whether more than one thread calls CUDA.
        self.has_several_threads = bool((called != called[:1]).any())

    def forget(self) -> None:
        """Drop all memoised answers once there are many: they grow with the number of threads."""
        if len(self.memo) > _MOST_KEPT:
            self.memo.clear()

    # --- the tables, thread by thread ---

    @memoised
    def _events_by_thread(self, table: str) -> tuple[Int, Int, Track]:
        """Sort a table's events by thread, then start.

        Returns the threads' numbers, ascending; offsets, where the events of ``threads[i]`` are
        ``offsets[i]:offsets[i + 1]``; and the events.
        """
        events = self.trace.table(table, ["thread", "start_ns", "end_ns"])
        thread = events["thread"].to_numpy()
        start = events["start_ns"].to_numpy()
        order = np.lexsort((start, thread)).astype(np.int32)
        threads, count = np.unique(thread, return_counts=True)
        offsets = np.append(0, np.cumsum(count))
        return threads, offsets, Track(start[order], end=events["end_ns"].to_numpy()[order], row=order)

    def _events_of_threads(self, table: str, first: int, last: int) -> Track:
        """The events of the threads with numbers from `first` to before `last`, thread by thread, each by start."""
        threads, offsets, events = self._events_by_thread(table)
        low, high = offsets[np.searchsorted(threads, (first, last))]
        return events.at(slice(int(low), int(high)))

    @memoised
    def events(self, table: str, thread: int) -> Track:
        """The events of a thread in a table, by start."""
        return self._events_of_threads(table, thread, thread + 1)

    def calls(self, thread: int) -> Track:
        """The thread's CUDA calls."""
        return self.events("calls", thread)

    @memoised
    def _is_named(self, table: str, expression: Expression) -> Bool:
        """Per row of a table: whether its name matches."""
        return matching(self.trace.table(table, ["name"])["name"], expression)

    @memoised
    def named(self, table: str, thread: int, expression: Expression) -> Track:
        """The events of a thread whose name matches."""
        events = self.events(table, thread)
        is_named = self._is_named(table, expression)
        if not is_named.any():  # the usual case: do not look at each event
            return events.at(slice(0))
        return events.subset(is_named[events.row])

    def _named_layer(self, label: str, kind: str, thread: int, expression: Expression) -> Layer:
        """The layer of a thread's events of one kind whose name matches."""
        return Layer(label, kind, self.named(TABLE_OF[kind], thread, expression))

    # --- CUDA calls ---

    @memoised
    def _is_blocking(self) -> Bool:
        """Per call: whether it returns only when the GPU has caught up."""
        # A copy into pageable memory blocks even if its name ends in Async.
        return self._is_named("calls", BLOCKING) | (self._moves_pageable("dst_kind") & self._is_named("calls", COPY))

    @memoised
    def blocking(self, thread: int) -> Track:
        """The thread's calls that return only when the GPU has caught up."""
        calls = self.calls(thread)
        return calls.subset(self._is_blocking()[calls.row])

    @memoised
    def launch_starts(self, thread: int) -> Int:
        """Starts of the thread's calls that give a device new work; those that block count as waits."""
        calls = self.calls(thread)
        is_launch = self._is_named("calls", LAUNCHES) & ~self._is_blocking()
        return calls.start[is_launch[calls.row]]

    @memoised
    def _moves_pageable(self, column: str) -> Bool:
        """Per call: whether it launched a copy whose ``src_kind`` or ``dst_kind`` is pageable memory of the host.

        CUDA copies such memory through a separate buffer, so the call keeps the thread busy or waits.
        """
        memops = self.trace.table("memops", ["process", "correlation", column])
        copies = memops[memops[column] == "pageable"]
        row = launch_of(self.trace, copies["process"], copies["correlation"])
        is_pageable = np.zeros(self.trace.size("calls"), bool)
        is_pageable[row[row >= 0]] = True
        return is_pageable

    def _working_calls(self, thread: int) -> Iterator[Layer]:
        """Label calls that neither enqueue work nor are cheap as work, and copies of pageable memory as staging.

        Calls that wait for the GPU count as work, too; the rule for gaps overrules that where the wait is the cause.
        """
        calls = self.calls(thread)
        is_dispatch = self._is_named("calls", CHEAP)[calls.row] & (calls.length < _LEAST_WORK_NS)
        is_dispatch |= self._is_named("calls", ENQUEUES)[calls.row]
        yield Layer("work", "call", calls.subset(~is_dispatch))
        copies = self.named("calls", thread, COPY)
        is_staged = self._moves_pageable("src_kind") | self._moves_pageable("dst_kind")
        yield Layer("staging", "call", copies.subset(is_staged[copies.row]))

    # --- waiting ---

    def _os_waits(self, thread: int) -> Iterator[Layer]:
        """Label waits in OS calls: for a person or for another thread that calls CUDA as silence, others as data."""
        yield self._named_layer("silence", "os_call", thread, TERMINAL)
        calls = self.calls(thread)
        waits = self.named("os_calls", thread, OS_WAIT)
        # Leave out waits that begin within a CUDA call: those are the driver's.
        waits = waits.subset(calls.covered(waits.start, waits.start + 1) == 0)
        is_for_thread = self._is_named("os_calls", FOR_A_THREAD)[waits.row]
        if is_for_thread.any():
            # Another thread was in a CUDA call meanwhile if all threads' calls cover more of the wait than its own.
            of_process_ns = self._calls_of_process(process_of(thread)).of(waits.start, waits.end)
            is_for_thread &= of_process_ns > calls.covered(waits.start, waits.end)
        yield Layer("silence", "os_call", waits.subset(is_for_thread))
        yield Layer("data", "os_call", waits.subset(~is_for_thread))

    @memoised
    def _calls_of_process(self, process: int) -> Coverage:
        """When any thread of a process was in a CUDA call."""
        # The threads of a process are numbered from its own number, shifted by 24 bits, up to the next process's.
        return self._events_of_threads("calls", process << 24, (process + 1) << 24).coverage

    # --- work ---

    def sleeps(self, thread: int) -> Track:
        """The thread's calls of ``sleep`` and the like: waits that the program chose."""
        return self.named("os_calls", thread, ASLEEP)

    def _without_launch(self, track: Track, thread: int) -> Track:
        """Keep the events of a track in which the thread neither launched nor waited for the GPU."""
        if not len(track):
            return track
        calls = self.calls(thread)
        is_gpu_call = self._is_named("calls", LAUNCHES) | self._is_blocking()
        return track.subset(track.count_inside(calls.start[is_gpu_call[calls.row]]) == 0)

    def _work(self, thread: int) -> Iterator[Layer]:
        """Label as work: sleeps, and ranges and operators that launch nothing, except short operators (dispatch)."""
        yield Layer("work", "os_call", self.sleeps(thread))
        ops = self.events("ops", thread)
        ops = ops.subset(ops.length >= _LEAST_WORK_NS)
        yield Layer("work", "op", self._without_launch(ops, thread))
        ranges = self.events("ranges", thread)
        # Some profilers record operators as ranges: there, too, short ones are dispatch.
        is_dispatch = self._is_named("ranges", OPERATOR_RANGE)[ranges.row] & (ranges.length < _LEAST_WORK_NS)
        yield Layer("work", "range", self._without_launch(ranges.subset(~is_dispatch), thread))

    @memoised
    def dispatch(self, thread: int) -> Track:
        """Operators that make CUDA calls themselves, not through an operator inside.

        They come from two tables, operators and ranges, so only their times can be used, not their rows.
        """
        ops = together(self.events("ops", thread), self.named("ranges", thread, OPERATOR_RANGE))
        if not len(ops):
            return ops
        caller = ops.innermost_at(self.calls(thread).start)
        call_count = np.bincount(caller[caller >= 0], minlength=len(ops))
        # An operator that takes longer than dispatch of its calls can take does something else as well.
        return ops.subset((call_count > 0) & (ops.length <= call_count * EAGER_NS))

    def _silences(self, thread: int) -> Track:
        """Times between CUDA calls, too long for dispatch, of which operators that make CUDA calls hold under half.

        Their `row` has no meaning.
        """
        calls = self.calls(thread)
        # A silence runs from the end of a call to the start of the next; the first from time 0, when the trace begins,
        # the last to the capture's end.
        _, captured_until = captured_window(self.trace)
        silence_start = np.append(0, np.maximum.accumulate(calls.end))
        silence_end = np.append(calls.start, max(captured_until, int(silence_start[-1])))
        is_long = silence_end - silence_start > EAGER_NS
        if len(calls):
            is_long[0] = silence_start[0] < silence_end[0]  # before its first call a thread dispatches nothing
        long_silences = np.flatnonzero(is_long)
        silences = Track(silence_start[long_silences], silence_end[long_silences], long_silences)
        covered = self.dispatch(thread).covered(silences.start, silences.end)
        # What operators that make CUDA calls fill for the most part is slow dispatch, not a silence.
        return silences.subset(2 * covered < silences.length)

    def _explained_silences(self, thread: int, silences: Track) -> Iterator[Layer]:
        """Explain silences by what overlaps them: the thread's samples, ranges and operators; a loader's threads.

        An event may reach beyond a silence. Its layer is quiet: it shows only where nothing but silence was painted.
        """
        for label, kind, track in (
            ("enclosed", "sample", self.named("samples", thread, ANY)),  # a sample without a name explains nothing
            ("enclosed", "range", self.events("ranges", thread)),
            ("enclosed", "op", self.events("ops", thread)),
            ("data", "range", self._loader_ranges(process_of(thread))),
        ):
            is_in_silence = silences.covered(track.start, track.end) > 0
            yield Layer(label, kind, track.subset(is_in_silence), is_quiet=True)

    @memoised
    def _loader_ranges(self, process: int) -> Track:
        """Ranges of data-loading libraries, on any thread of a process."""
        ranges = self.trace.table("ranges", ["name", "domain", "thread", "start_ns", "end_ns"])
        loads = matching(ranges["name"], LOADER_RANGE) | matching(ranges["domain"], LOADER_RANGE)
        loads &= process_of(ranges["thread"].to_numpy()) == process
        return _ordered_track(ranges[loads])

    # --- the profiler, what happens once, and pages ---

    @memoised
    def _profiler_overhead(self, process: int) -> Track:
        """The profiler's work on any thread of a process, and that of which no thread is recorded (-1)."""
        # A thread's number is its process, then 24 bits.
        of_process = self._events_of_threads("overhead", process << 24, (process + 1) << 24)
        overhead = together(of_process, self.events("overhead", -1))
        return overhead.subset(~self._is_named("overhead", DRIVER)[overhead.row])

    @memoised
    def _settled_from_ns(self) -> int:
        """When the first settled step starts: from then on a compiler recompiles. Without one, the largest int64."""
        table = steps.find(self.trace)
        settled_starts = table.loc[steps.is_settled(table["step"]), "start_ns"]
        if len(settled_starts):
            return int(settled_starts.min())
        return np.iinfo(np.int64).max

    def _setting_up(self, thread: int) -> Iterator[Layer]:
        """Label compilers and code loads in settled steps as compile; earlier ones, and any other set-up, as once.

        At the start a program has to compile and set up, and does so once. In settled steps (:func:`steps.is_settled`)
        a compiler compiles again, which can be avoided.
        """
        for kind, expression in (("op", compiler.COMPILES), ("range", compiler.COMPILES), ("call", BUILDS)):
            track = self.named(TABLE_OF[kind], thread, expression)
            is_early = track.start < self._settled_from_ns()
            yield Layer("once", kind, track.subset(is_early))
            yield Layer("compile", kind, track.subset(~is_early))
        for kind in ("op", "range", "call"):
            yield self._named_layer("once", kind, thread, SETS_UP)
        yield Layer("once", "call", self._graph_captures(thread))
        yield Layer("once", "call", self._setup_calls(thread))
        for number in (-1, thread):  # -1: records that name no thread
            yield self._named_layer("once", "overhead", number, LOADS)

    def _graph_captures(self, thread: int) -> Track:
        """Captures of CUDA graphs: each from its begin call to the next end call, with the row of the begin call."""
        begin = self.named("calls", thread, BEGIN_CAPTURE)
        end = self.named("calls", thread, END_CAPTURE)
        next_end = np.searchsorted(end.start, begin.start)
        has_end = next_end < len(end)
        begin = begin.subset(has_end)
        return Track(begin.start, end.end[next_end[has_end]], begin.row)

    def _setup_calls(self, thread: int) -> Track:
        """Calls that set something up, with `_SETUP_NS` or more in which no device was busy.

        While a device is busy, a long call may just wait for it, as a launch into a full queue does.
        """
        calls = self.calls(thread)
        setup = calls.subset(self._may_set_up()[calls.row])
        if not len(setup):
            return setup
        idle_ns = setup.length - self._busy().of(setup.start, setup.end)
        return setup.subset(idle_ns >= _SETUP_NS)

    @memoised
    def _may_set_up(self) -> Bool:
        """Per call: whether it is long, and either the first of its name in its process or far longer than the usual.

        Such a call may load code or reserve memory before its actual work, which costs time only once.
        """
        calls = self.trace.table("calls", ["thread", "start_ns", "duration_ns", "name"])
        length_ns = calls["duration_ns"].to_numpy()
        is_long = self._is_named("calls", FIRST_TIMES) & (length_ns >= _SETUP_NS)
        if not is_long.any():
            return is_long
        calls["process"] = process_of(calls["thread"].to_numpy())
        # A call that launches a new kernel may load its code: leave it out of the ordinary ones.
        kernels = self.trace.table("kernels", ["process", "correlation", "name", "start_ns"])
        kernels = kernels.iloc[_first_of_each_name(kernels)]
        first_launch = launch_of(self.trace, kernels["process"], kernels["correlation"])
        ordinary = calls.drop(first_launch[first_launch >= 0]).groupby("name", observed=True)["duration_ns"]
        ordinary_ns = ordinary.quantile(_ORDINARY_SHARE, interpolation="lower")
        # Where every call of a name launched a new kernel, none is ordinary, and any long one may set something up.
        usual_ns = ordinary_ns.reindex(calls["name"]).fillna(0).to_numpy()
        is_first = calls.index.isin(_first_of_each_name(calls))
        return is_long & (is_first | (length_ns >= _OUTLYING_FACTOR * usual_ns))

    @memoised
    def _busy(self) -> Coverage:
        """When a device of any process had work."""
        ops = gpu_intervals(self.trace)
        return Coverage(ops["start_ns"], ops["end_ns"])

    @memoised
    def _page_faults(self, process: int) -> Track:
        """Runs of page faults: pages of managed memory that moved one after another."""
        memops = self.trace.table("memops", ["start_ns", "end_ns", "process", "kind"])
        pages = _ordered_track(memops[matching(memops["kind"], UNIFIED) & (memops["process"] == process).to_numpy()])
        # Merge pages as if each lasted until the latest start of a next one in its run; a run has its first page's row.
        start, end = merge(pages.start, pages.end + _BETWEEN_PAGES_NS)
        return Track(start, end - _BETWEEN_PAGES_NS, pages.row[np.searchsorted(pages.start, start)])

    # --- the paint ---

    @memoised
    def paint(self, thread: int) -> Paint:
        """Label each moment of a thread's time; of layers that overlap, the later one shows.

        So the layers go from the weakest evidence (no CUDA call was made) to the strongest (the profiler worked).
        """
        silences = self._silences(thread)
        named = [*self._os_waits(thread), *self._work(thread)]
        for label, kind, expression in (
            ("data", "op", DATA),
            ("data", "range", DATA),
            ("messages", "os_call", MESSAGES),
            ("messages", "range", MESSAGES),
        ):
            named.append(self._named_layer(label, kind, thread, expression))
        calls = self.calls(thread)
        # CUDA calls within the named events are dispatch again, except those that a later layer labels.
        is_within = together(*(layer.track for layer in named)).covered(calls.start, calls.end) > 0
        layers = [
            Layer("silence", "none", silences),
            *self._explained_silences(thread, silences),
            *named,
            Layer("dispatch", "none", calls.subset(is_within)),
            *self._working_calls(thread),
            Layer("faults", "copy", self._page_faults(process_of(thread))),
            *self._setting_up(thread),
            Layer("profiler", "overhead", self._profiler_overhead(process_of(thread))),
        ]
        return paint(layers)

    # --- unions, for the replay ---

    def when(self, thread: int, labels: Sequence[str], kinds: Sequence[str] = EVIDENCE_KINDS) -> Intervals:
        """When the thread's time had one of `labels`, from an event of one of `kinds`; by default of any kind."""
        return self.paint(thread).intervals_labelled(labels, kinds)

    def dispatch_free(self, thread: int) -> Intervals:
        """When the thread did not dispatch: it did other work or waited, or the profiler worked."""
        return self.when(thread, LABELS)

    def other_work(self, thread: int) -> Intervals:
        """When the thread did other work than dispatch, or waited. What the profiler does is no work of the thread."""
        return self.when(thread, [label for label in LABELS if label != "profiler"])


def _first_of_each_name(events: pd.DataFrame) -> Int:
    """Rows of the first event of each name in each process, by start: tables are not in order of time."""
    return events.groupby(["process", "name"], observed=True)["start_ns"].idxmin().to_numpy(np.int64)


def _ordered_track(events: pd.DataFrame) -> Track:
    """Make a track of some rows of a table, whose index still numbers the table's rows."""
    events = events.sort_values("start_ns", kind="stable")
    return Track(events["start_ns"].to_numpy(), events["end_ns"].to_numpy(), events.index.to_numpy())
