"""What each CPU thread did, sorted by what it means for a device that waits for it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from nsightkit.analysis.core.intervals import Coverage, gpu_intervals, launch_of, launches_of, merge, union
from nsightkit.analysis.core.names import OPERATOR_RANGE, compiled, matching
from nsightkit.trace.model import Trace
from nsightkit.trace.nesting import nesting

__all__ = ["BLOCKING", "DATA_LOADING", "EAGER_NS", "Threads", "Track"]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]

_OF_DATA = (
    r"(data|batch|sample|input)(e?s)?(?![a-z])(?![\s_-]*(?!from|for|async|wait|time|queue|iter|load|fetch|next)[a-z])"
)
#: Names of ranges and operators in which a program waits for its data. Weights, layers and embeddings are not data.
DATA_LOADING = (
    r"(?i)data[\s_-]*load|(?<![a-z])load(ing)?[\s_-]*(the[\s_-]*)?(next[\s_-]*)?" + _OF_DATA + r"|"
    r"(next|get|fetch|read|wait|prefetch)(ing)?[\s_-]*(for[\s_-]*)?(the[\s_-]*|next[\s_-]*)?" + _OF_DATA + r"|"
    r"(data|batch|sample|input)[\s_-]*(pipeline|wait|fetch|prefetch)|^(data|batch|dataset)([\s_-]*time)?$|"
    r"data[\s_-]*time\b|\b__next__\b|^next\(|collate"
)

_OS_SLEEP = re.compile(r"^((clock_)?nanosleep|u?sleep)(64)?$")
#: OS calls in which a thread waits (for another thread or process, a socket, a disk), by name; sleeps are no such wait.
_OS_WAIT = re.compile(
    r"^(e?poll|ppoll|epoll_p?wait\d*|p?select|futex|sem_(timed)?wait|sem_clockwait|pthread_cond_(timed|clock)?wait|pthread_join|pthread_mutex_(timed)?lock|"
    r"pthread_rwlock_(rd|wr)lock|pthread_barrier_wait|sigwait(info)?|sigtimedwait|wait(pid|id|3|4)?|"
    r"p?readv?\d*|pread64|fread|fgets|getline|recv(from|msg|mmsg)?|accept4?|connect|msgrcv|mq_(timed)?receive|io_getevents|flock|fsync)(64)?$"
)

#: Of these, the calls in which a thread may wait for another thread of its process.
_FOR_A_THREAD = re.compile(r"^(futex|sem_|pthread_)")

#: Calls that return only when the GPU has caught up.
BLOCKING = re.compile(
    r"^(cuda|hip)(Device|Stream|Event|Thread|Context|Graph)Synchronize|^cu(Ctx|Stream|Event)Synchronize|"
    r"^(cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)|^(cuda|hip)(Malloc|Free)(?!.*Async)|^cuMem(Alloc|Free)(?!.*Async)"
)
_ALLOCATES = re.compile(r"Malloc|Free|MemAlloc")
_COPY = re.compile(r"^(cuda|hip|cu)Memcpy")
#: Calls that give a device work.
_LAUNCH = re.compile(r"Launch(?!HostFunc)|^(cuda|hip|cu)(Memcpy|Memset)")
_EVENT_WAIT = re.compile(r"StreamWaitEvent")
#: Calls that enqueue work, or cost next to nothing beside it.
_ENQUEUE = re.compile(
    r"Launch|^(cuda|hip|cu)(Memcpy|Memset).*Async|Event(Record|Query|Create|Destroy)|StreamWaitEvent|StreamIsCapturing|StreamGetCaptureInfo|"
    r"StreamQuery|GetLastError|PeekAtLastError|GetDevice|SetDevice|CtxGet|CtxSet|OccupancyMax|FuncGetAttribute|FuncSetAttribute|PointerGetAttribute"
)

#: Overhead records that CUPTI and Nsight Systems write about the driver and the loader, not about themselves:
#: what they load and compile for the first time, and a command buffer that is full because the GPU is behind.
_LOADING = re.compile(r"(?i)(module|function)s? loading|driver compiler|^dl(open|close)\b")
_BUFFER_FULL = re.compile(r"(?i)command buffer")
#: Calls that load or build code, or a graph; and the names under which compilers record themselves.
_BUILDS = re.compile(
    r"^cu(Module|Library)Load|^(cuda|hip)(Module|Library)Load|^hipModuleLoad|^cuLink(Create|Add|Complete)|Graph(Exec)?Instantiate|"
    r"^(nvrtc|hiprtc)CompileProgram"
)
_COMPILES = re.compile(
    r"(?i)\(dynamo_timed\)|CUDAGraphNode\.record|_compile\.(compile_inner|<locals>)|\b(inductor|backend|triton|jit|nvrtc)[\s_.:]*compil|"
    r"nvrtc::|\bcompile_?fx\b|\bcompile_?(kernel|fusion|program|module|graph)\b|::compile\w*|async_compile|triton\.compile|"
    r"\bautotun(e|ing)|cuda_?graph[\s_-]*captur"
)
_BEGIN_CAPTURE, _END_CAPTURE = re.compile("StreamBeginCapture"), re.compile("StreamEndCapture")
#: Calls that may have to set something up before they do what they are for.
_FIRST_TIMES = re.compile(r"Launch(?!HostFunc)|Malloc|Free|Alloc|Create")
#: A call of them is a first one from this many times the median of its name, and from this long.
_TIMES, _ONCE_NS = 10, 1_000_000
#: A name called less often has no ordinary length of its own.
_FEW = 3

#: Between two launches of an eager program pass microseconds. A longer silence says something else went on.
EAGER_NS = 500_000
#: An operator without a launch that lasts this long is work of its own, not dispatch.
_HEAVY_NS = 100_000
#: Ranges around whole steps of a program, by name, and an outermost range with more launches than this, name no work.
_STEP = re.compile(r"(?i)step|iter|epoch|batch|train|loop|profil")
_MANY = 32


class Track:
    """Some events of one thread.

    Parameters
    ----------
    start, end : ndarray of int
        Nanoseconds, ordered by start.
    row : ndarray of int
        In the table they are from.
    """

    def __init__(self, start: Int, end: Int, row: Int) -> None:
        self.start, self.end, self.row = start, end, row
        self._coverage: Coverage | None = None
        self._reach: Int | None = None
        self._parent: Int | None = None

    def __len__(self) -> int:
        return len(self.start)

    def subset(self, keep: Bool) -> Track:
        """Those of the events that a mask keeps."""
        at = np.flatnonzero(keep)  # they are few, as a rule
        return self if len(at) == len(self) else Track(self.start[at], self.end[at], self.row[at])

    @property
    def coverage(self) -> Coverage:
        """The union of the events."""
        if self._coverage is None:
            self._coverage = Coverage(self.start, self.end)
        return self._coverage

    def covered(self, start: Int, end: Int) -> Int:
        """How much of each window the events cover, in ns."""
        return self.coverage.of(start, end) if len(self) else np.zeros(len(start), np.int64)

    def open_at(self, at: Int) -> Int:
        """Position of an event open at each time (the one that lasts longest), -1 where there is not any."""
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

    @property
    def parent(self) -> Int:
        """Position of the event around each event, -1 where there is not any."""
        if self._parent is None:
            _, self._parent = nesting(np.zeros(len(self), np.int64), self.start, self.end)
        return self._parent

    def innermost_at(self, at: Int) -> Int:
        """Position of the event that began last among those open at each time, -1 where there is not any."""
        i = np.searchsorted(self.start, at, side="right") - 1
        if not len(self):
            return np.full(len(at), -1, np.int64)
        parent = self.parent
        pending = np.flatnonzero((i >= 0) & (self.end[np.maximum(i, 0)] <= at))
        while len(pending):  # climbs one level a round, all times at once
            i[pending] = parent[i[pending]]
            pending = pending[(i[pending] >= 0) & (self.end[np.maximum(i[pending], 0)] <= at[pending])]
        return i


_EMPTY = Track(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


def _together(*tracks: Track) -> Track:
    """The events of several tracks; their rows mean something only if all are from one table."""
    some = [t for t in tracks if len(t)]
    if len(some) < 2:
        return some[0] if some else _EMPTY
    start, end, row = (np.concatenate([getattr(t, a) for t in some]) for a in ("start", "end", "row"))
    order = np.argsort(start, kind="stable")
    return Track(start[order], end[order], row[order])


def _inside(begun: Int, outer: Track) -> Int:
    """How many of some times, in order, lie within each event."""
    within: Int = np.searchsorted(begun, outer.end) - np.searchsorted(begun, outer.start)
    return within


class Threads:
    """The recorded activity of each thread, split by what it means; each part is built when it is asked for.

    Parameters
    ----------
    trace : Trace
        Its filters do not count.
    data_loading : str
        Regular expression of the names of ranges and operators in which the program loads data.
    """

    def __init__(self, trace: Trace, data_loading: str = DATA_LOADING) -> None:
        self._trace = trace.whole
        self._data = compiled(data_loading, "data_loading")
        self._tracks: dict[tuple[str, int], Track] = {}
        self._flags: dict[str, Bool] = {}
        self._launches: dict[int, Int] = {}
        self._covered: dict[frozenset[int], Coverage] = {}
        self._feeds: dict[int, set[int]] | None = None
        called = self._trace.table("calls", ["thread"])["thread"].to_numpy()
        #: whether more than one thread calls CUDA
        self.several = bool(len(called)) and bool((called != called[0]).any())

    # --- the tables, thread by thread ---

    def _rows(self, table: str, rows: Int) -> Track:
        frame = self._trace.table(table, ["start_ns", "end_ns"])
        start = frame["start_ns"].to_numpy()[rows]
        if len(start) > 1 and (start[1:] < start[:-1]).any():
            rows = rows[np.argsort(start, kind="stable")]
            start = frame["start_ns"].to_numpy()[rows]
        return Track(start, frame["end_ns"].to_numpy()[rows], rows)

    def _table(self, table: str, thread: int) -> Track:
        key = (table, thread)
        if key not in self._tracks:
            if not self._trace.size(table):
                self._tracks[key] = _EMPTY
            else:
                of = self._trace.table(table, ["thread"])["thread"].to_numpy()
                self._tracks[key] = self._rows(table, np.flatnonzero(of == thread).astype(np.int32))
        return self._tracks[key]

    def _flag(self, table: str, what: str, expression: re.Pattern[str]) -> Bool:
        """Per row of a table: whether its name matches."""
        key = f"{table}:{what}"
        if key not in self._flags:
            self._flags[key] = matching(self._trace.table(table, ["name"])["name"], expression)
        return self._flags[key]

    def _named(self, table: str, thread: int, what: str, expression: re.Pattern[str]) -> Track:
        """The events of a table whose name matches."""
        key = (f"{table}:{what}", thread)
        if key not in self._tracks:
            track = self._table(table, thread)
            self._tracks[key] = track.subset(self._flag(table, what, expression)[track.row]) if len(track) else track
        return self._tracks[key]

    def calls(self, thread: int) -> Track:
        """CUDA calls."""
        return self._table("calls", thread)

    def os_calls(self, thread: int) -> Track:
        """Calls of the operating system."""
        return self._table("os_calls", thread)

    def activity(self, thread: int) -> list[tuple[str, Track]]:
        """All operators and ranges."""
        return [("op", self._table("ops", thread)), ("range", self._table("ranges", thread))]

    # --- CUDA calls ---

    def blocking(self, thread: int) -> Track:
        """Calls that return only when the GPU has caught up."""
        key = ("calls:blocking+", thread)
        if key not in self._tracks:
            plain = self._named("calls", thread, "blocking", BLOCKING)
            # A device-to-host copy into pageable memory blocks whatever its name says.
            copies = self._named("calls", thread, "copy", _COPY)
            if len(copies):
                blocks = self._flag("calls", "blocking", BLOCKING)
                copies = copies.subset(self._pageable("DtoH")[copies.row] & ~blocks[copies.row])
            self._tracks[key] = _together(plain, copies)
        return self._tracks[key]

    def launches(self, thread: int) -> Int:
        """When the calls began that give a device work and do not block."""
        if thread not in self._launches:
            calls = self.calls(thread)
            begun = calls.start
            if len(calls):
                blocks = self._flag("calls", "blocking", BLOCKING) | self._pageable("DtoH")
                begun = begun[(self._flag("calls", "launch", _LAUNCH) & ~blocks)[calls.row]]
            self._launches[thread] = begun
        return self._launches[thread]

    def event_waits(self, thread: int) -> Track:
        """Calls that make a stream wait for an event."""
        return self._named("calls", thread, "event wait", _EVENT_WAIT)

    def staging(self, thread: int) -> Track:
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
        key = f"pageable:{kind}"
        if key not in self._flags:
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
            self._flags[key] = flag
        return self._flags[key]

    def other_calls(self, thread: int) -> Track:
        """Calls that neither enqueue work nor are next to free (allocation, graph instantiation, …)."""
        key = ("calls:other", thread)
        if key not in self._tracks:
            track = self._table("calls", thread)
            self._tracks[key] = track.subset(~self._flag("calls", "enqueue", _ENQUEUE)[track.row])
        return self._tracks[key]

    # --- waiting ---

    def data(self, thread: int) -> list[tuple[str, Track]]:
        """Ranges and operators of data loading."""
        return [
            ("range", self._named("ranges", thread, "data", self._data)),
            ("op", self._named("ops", thread, "data", self._data)),
        ]

    def sleeps(self, thread: int) -> Track:
        """Sleeps that the program chose."""
        return self._named("os_calls", thread, "sleep", _OS_SLEEP)

    def waits(self, thread: int) -> Track:
        """OS waits outside CUDA calls, and outside ranges that are named for something else than data loading."""
        key = ("os_calls:outside", thread)
        if key not in self._tracks:
            track = self._named("os_calls", thread, "wait", _OS_WAIT)
            calls, ranges = self.calls(thread), self._table("ranges", thread)
            if len(track) and len(calls):
                # A wait within a CUDA call is the driver's; a wait that encloses one does not exist on a thread.
                track = track.subset(calls.open_at(track.start) < 0)
            self._tracks["os_calls:in work", thread] = _EMPTY
            if len(track) and len(ranges):
                around = ranges.innermost_at(track.start)
                work = (around >= 0) & self._names_work(thread)[np.maximum(around, 0)]
                self._tracks["os_calls:in work", thread] = Track(
                    track.start[work], track.end[work], ranges.row[around[work]]
                )
                track = track.subset(~work)
            self._tracks[key] = track
        return self._tracks[key]

    def waits_in_work(self, thread: int) -> Track:
        """The other OS waits, those in ranges that are named for something else; rows are those of the ranges."""
        self.waits(thread)
        return self._tracks["os_calls:in work", thread]

    def _names_work(self, thread: int) -> Bool:
        """Per range of a thread: whether its name says what goes on in it. That of a whole step does not."""
        ranges = self._table("ranges", thread)
        launches = _inside(self.launches(thread), ranges)
        leaf = np.ones(len(ranges), bool)
        leaf[ranges.parent[ranges.parent >= 0]] = False
        whole = (ranges.parent < 0) & (launches > _MANY)
        general = self._flag("ranges", "step", _STEP)[ranges.row] & (launches > 0)
        loads = self._flag("ranges", "data", self._data)[ranges.row]
        named: Bool = ((leaf & ~whole) | (launches == 0)) & ~general & ~loads
        return named

    # --- work ---

    def lone(self, thread: int) -> list[tuple[str, Track]]:
        """Ranges, and operators of some length, in which nothing was launched."""
        key = ("lone", thread)
        if key not in self._tracks:
            ranges = self._table("ranges", thread)
            if len(ranges):
                dispatch = self._flag("ranges", "framework", OPERATOR_RANGE)[ranges.row]
                dispatch &= ranges.end - ranges.start < _HEAVY_NS
                ranges = ranges.subset(self._without_launch(ranges, thread) & ~dispatch)
            self._tracks[key] = ranges
            ops = self._table("ops", thread)
            heavy = ops.subset(ops.end - ops.start >= _HEAVY_NS) if len(ops) else _EMPTY
            self._tracks["lone ops", thread] = (
                heavy.subset(self._without_launch(heavy, thread)) if len(heavy) else _EMPTY
            )
        return [("range", self._tracks[key]), ("op", self._tracks["lone ops", thread])]

    def _without_launch(self, track: Track, thread: int) -> Bool:
        """Per event: whether its thread neither launched nor waited for the GPU in it."""
        waits = self.blocking(thread)
        if len(waits):  # an allocation gives the device nothing to do
            waits = waits.subset(~self._flag("calls", "allocates", _ALLOCATES)[waits.row])
        return np.asarray(_inside(self.launches(thread), track) + _inside(waits.start, track) == 0)

    def dispatch(self, thread: int) -> Track:
        """Operators with no other between them and a CUDA call. For its coverage; rows mean nothing."""
        key = ("dispatch", thread)
        if key not in self._tracks:
            ops, ranges, calls = self._table("ops", thread), self._table("ranges", thread), self.calls(thread)
            if len(ranges):
                ranges = ranges.subset(self._flag("ranges", "framework", OPERATOR_RANGE)[ranges.row])
            ops = _together(ops, ranges)
            if len(ops) and len(calls):
                direct = ops.innermost_at(calls.start)
                count = np.bincount(direct[direct >= 0], minlength=len(ops))
                # An operator that runs much longer than its calls take to dispatch does something else as well.
                ops = ops.subset((count > 0) & (ops.end - ops.start <= count * EAGER_NS))
            else:
                ops = _EMPTY
            self._tracks[key] = ops
        return self._tracks[key]

    # --- the profiler, and what happens once ---

    def _overhead(self, what: str, of: int) -> Track:
        """Overhead records of a thread or of a process, and those that say nothing of either."""
        key = (f"overhead:{what}", of)
        if key not in self._tracks:
            if not self._trace.size("overhead"):
                self._tracks[key] = _EMPTY
                return _EMPTY
            thread = self._trace.table("overhead", ["thread"])["thread"].to_numpy()
            loading = self._flag("overhead", "loading", _LOADING)
            chosen = loading if what == "loading" else ~loading & ~self._flag("overhead", "full", _BUFFER_FULL)
            chosen = chosen & ((thread == -1) | (thread == of) | (thread >> 24 == of))
            self._tracks[key] = self._rows("overhead", np.flatnonzero(chosen).astype(np.int32))
        return self._tracks[key]

    def profiler(self, process: int) -> Track:
        """The profiler's own work on whatever thread of a process; what the driver loads is not its work."""
        return self._overhead("profiler", process)

    def once(self, thread: int) -> list[tuple[str, Track]]:
        """What happens once: code that is loaded or compiled, graphs that are captured, calls that set something up."""
        return [
            ("overhead", self._overhead("loading", thread)),
            ("call", self._first_calls(thread)),
            ("call", self._captures(thread)),
            ("range", self._named("ranges", thread, "compiles", _COMPILES)),
            ("op", self._named("ops", thread, "compiles", _COMPILES)),
        ]

    def _captures(self, thread: int) -> Track:
        """From each begin of a graph's capture to its end; the row is that of the begin."""
        key = ("captures", thread)
        if key not in self._tracks:
            begin = self._named("calls", thread, "begin capture", _BEGIN_CAPTURE)
            end = self._named("calls", thread, "end capture", _END_CAPTURE)
            at = np.searchsorted(end.start, begin.start)
            ended = at < len(end)
            last = end.end[at[ended]]
            self._tracks[key] = Track(begin.start[ended], last, begin.row[ended])
        return self._tracks[key]

    def _first_calls(self, thread: int) -> Track:
        key = ("calls:first", thread)
        if key not in self._tracks:
            if "first" not in self._flags:
                self._flags["first"] = self._first()
            track = self._table("calls", thread)
            track = track.subset(self._flags["first"][track.row])
            if len(track):
                # A call may take long because it waits for the device, as with a full launch queue.
                idle = track.end - track.start - self._busy(thread).of(track.start, track.end)
                track = track.subset(self._flag("calls", "builds", _BUILDS)[track.row] | (idle >= _ONCE_NS))
            self._tracks[key] = track
        return self._tracks[key]

    def _first(self) -> Bool:
        """Per call: whether it builds or loads code or a graph, or set something up that later calls found in place."""
        calls = self._trace.table("calls", ["start_ns", "end_ns", "name"])
        found = self._flag("calls", "builds", _BUILDS).copy()
        may = self._flag("calls", "first times", _FIRST_TIMES)
        length = calls["end_ns"].to_numpy() - calls["start_ns"].to_numpy()
        long = np.flatnonzero(may & (length >= _ONCE_NS))
        if not len(long):
            return found
        code = calls["name"].cat.codes.to_numpy()
        overall = float(np.median(length[may]))
        for one in np.unique(code[long]).tolist():  # names of calls are few
            mine = length[code == one]
            ordinary = float(np.median(mine)) if len(mine) >= _FEW else overall
            of_name = long[code[long] == one]
            found[of_name[length[of_name] >= _TIMES * ordinary]] = True
        return found

    # --- unions, for further arithmetic: start and end of disjoint intervals ---

    def input_waits(self, thread: int) -> tuple[Int, Int]:
        """When the thread waited for data, without its CUDA calls and without waits for work of other threads."""
        waits = self.waits(thread)
        if self.several and len(waits):
            for other in self._fed():
                if other != thread and other >> 24 == thread >> 24:
                    handed = self.calls(other).covered(waits.start, waits.end) > 0
                    waits = waits.subset(~handed | ~self._flag("os_calls", "thread", _FOR_A_THREAD)[waits.row])
        return self._outside(_together(*(t for _, t in self.data(thread)), waits), self.calls(thread))

    def thread_waits(self, thread: int) -> tuple[Int, Int]:
        """The OS waits for another thread, outside CUDA calls and ranges that name something."""
        waits = self.waits(thread)
        if not len(waits):
            return waits.start, waits.end
        waits = waits.subset(self._flag("os_calls", "thread", _FOR_A_THREAD)[waits.row])
        return self._outside(waits, _together(*(t for _, t in self.data(thread))))

    def own_work(self, thread: int) -> tuple[Int, Int]:
        """Named work in which nothing was launched, and sleeps: without CUDA calls and without waits for data."""
        work = _together(*(t for _, t in self.lone(thread)), self.sleeps(thread))
        start, end = self.input_waits(thread)
        return self._outside(work, _together(self.calls(thread), Track(start, end, start)))

    def one_offs(self, thread: int) -> tuple[Int, Int]:
        """What happened once."""
        all_of_it = _together(*(t for _, t in self.once(thread)))
        return merge(all_of_it.start, all_of_it.end)

    def profiler_time(self, thread: int) -> tuple[Int, Int]:
        """The profiler's work on this thread, and that on others of the process while this one's devices were idle."""
        here = self._overhead("profiler", thread)
        start, end = merge(here.start, here.end)
        everywhere = self.profiler(thread >> 24)
        if len(everywhere) > len(here):
            busy = self._busy(thread)
            s, e = self._outside(everywhere, Track(busy.start, busy.end, busy.start))
            start, end = union((start, end), (s, e))
        return start, end

    def dispatch_free(self, thread: int) -> tuple[Int, Int]:
        """All that the thread did beside dispatching: waits, work, one-offs, other calls, silences too long for it."""
        parts = [self.input_waits(thread), self.own_work(thread), self.one_offs(thread)]
        others = (
            self._named("os_calls", thread, "wait", _OS_WAIT),
            self.sleeps(thread),
            self.other_calls(thread),
            self._silences(thread),
        )
        parts += [(t.start, t.end) for t in others]
        return union(*parts)

    def _silences(self, thread: int) -> Track:
        """Times between CUDA calls that are too long for dispatch, and mostly not in operators that launch."""
        calls = self.calls(thread)
        if len(calls) < 2:
            return _EMPTY
        reach = np.maximum.accumulate(calls.end)[:-1]
        long = np.flatnonzero(calls.start[1:] - reach > EAGER_NS)
        start, end = reach[long], calls.start[1:][long]
        silent = 2 * self.dispatch(thread).covered(start, end) < end - start
        return Track(start[silent], end[silent], long[silent])

    @staticmethod
    def _outside(track: Track, other: Track) -> tuple[Int, Int]:
        """The union of some events without that of others."""
        start, end = merge(track.start, track.end)
        if not len(start) or not len(other):
            return start, end
        cut_start, cut_end = merge(other.start, other.end)
        # What is covered begins and ends where the number of open intervals changes.
        near = (cut_end > start[0]) & (cut_start < end[-1])
        cut_start, cut_end = cut_start[near], cut_end[near]
        at = np.concatenate((start, end, cut_start, cut_end))
        mine, cut = len(start), len(cut_start)
        step = np.concatenate((np.full(mine, 2), np.full(mine, -2), np.full(cut, -1), np.full(cut, 1)))
        order = np.argsort(at, kind="stable")
        at, inside = at[order], np.cumsum(step[order])
        low, high = at[:-1], at[1:]
        keep = (inside[:-1] == 2) & (high > low)
        return merge(low[keep], high[keep])

    def _busy(self, thread: int) -> Coverage:
        """When a device had work to which this thread gives work."""
        devices = frozenset(self._fed().get(thread, ()))
        if devices not in self._covered:
            ops = gpu_intervals(self._trace)
            device = ops["device"].to_numpy()
            mine = (
                np.isin(device, list(devices)) if (device != device[:1]).any() else np.full(len(device), bool(devices))
            )
            self._covered[devices] = Coverage(ops["start_ns"].to_numpy()[mine], ops["end_ns"].to_numpy()[mine])
        return self._covered[devices]

    def _fed(self) -> dict[int, set[int]]:
        """The devices that each thread gave work."""
        if self._feeds is None:
            ops = gpu_intervals(self._trace)
            call = launches_of(self._trace, ops["table"], ops["row"])
            known = call >= 0
            thread = self._trace.table("calls", ["thread"])["thread"].to_numpy()[call[known]]
            device = ops["device"].to_numpy()[known]
            self._feeds = {}
            for one in np.unique(device).tolist():
                for feeder in np.unique(thread[device == one]).tolist():
                    self._feeds.setdefault(feeder, set()).add(one)
        return self._feeds
