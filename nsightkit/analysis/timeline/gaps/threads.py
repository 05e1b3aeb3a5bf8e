"""What each CPU thread did, sorted by what it means for a device that waits for it."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.intervals import Coverage, common, gpu_intervals, launch_of, launches_of, union
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import OPERATOR_RANGE, Expression, compiled, matching
from nsightkit.trace.model import GPU_TABLES, LAUNCHES, Trace
from nsightkit.trace.nesting import nesting

__all__ = ["BLOCKING", "DATA_LOADING", "EAGER_NS", "EVENT_WAIT", "FREES", "UNIFIED", "Threads", "Track", "together"]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]
#: Start and end of disjoint intervals.
Union = tuple[Int, Int]

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
_DATA = re.compile(DATA_LOADING)

_OS_SLEEP = re.compile(r"^((clock_)?nanosleep|u?sleep)(64)?$")
#: OS calls in which a thread waits for another thread or process, a socket or a disk. Sleeps are not among them.
_OS_WAIT = re.compile(
    r"^(e?poll|ppoll|epoll_p?wait\d*|p?select|futex|sem_(timed)?wait|sem_clockwait|pthread_cond_(timed|clock)?wait|pthread_join|pthread_mutex_(timed)?lock|"
    r"pthread_rwlock_(rd|wr)lock|pthread_barrier_wait|sigwait(info)?|sigtimedwait|wait(pid|id|3|4)?|"
    r"p?readv?\d*|pread64|fread|f?get(w?c|w?char|w?s|delim|line)|v?f?w?scanf|recv(from|msg|mmsg)?|accept4?|connect|msgrcv|mq_(timed)?receive|io_getevents|flock|fsync)(64)?$"
)

#: Those of them in which a thread may wait for another thread of its process.
_FOR_A_THREAD = re.compile(r"^(futex|sem_|pthread_)")

#: Calls that return only when the GPU has caught up.
BLOCKING = re.compile(
    r"^(cuda|hip)(Device|Stream|Event|Thread|Context|Graph)Synchronize|^cu(Ctx|Stream|Event)Synchronize|"
    r"^(cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)|^(cuda|hip)(Malloc|Free)(?!.*Async)|^cuMem(Alloc|Free)(?!.*Async)"
)
_ALLOCATES = re.compile(r"Malloc|Free|MemAlloc")
#: Calls that wait until the device is idle, and only then do what they are for.
FREES = re.compile(r"^(cuda|hip|cuMem)Free(?!.*(Async|Host))")
_COPY = re.compile(r"^(cuda|hip|cu)Memcpy")
#: Pages of managed memory that move: nobody launches them, they stand in no stream.
UNIFIED = re.compile("^unified")
EVENT_WAIT = re.compile(r"StreamWaitEvent")
#: Calls that enqueue work, and those that cost next to nothing beside it unless they take long for once.
_ENQUEUE = re.compile(r"Launch|^(cuda|hip|cu)(Memcpy|Memset).*Async|Event(Record|Query|Create|Destroy)|StreamWaitEvent")
_CHEAP = re.compile(
    r"StreamIsCapturing|StreamGetCaptureInfo|StreamQuery|GetLastError|PeekAtLastError|GetDevice|SetDevice|CtxGet|CtxSet|"
    r"OccupancyMax|FuncGetAttribute|FuncSetAttribute|PointerGetAttribute"
)

#: Overhead records that CUPTI and Nsight Systems write about the driver and the loader, not about themselves:
#: what they load and compile for the first time, and a command buffer that is full because the GPU is behind.
_LOADING = re.compile(r"(?i)(module|function)s? loading|driver compiler|^dl(open|close)\b")
_BUFFER_FULL = re.compile(r"(?i)command buffer")
#: A kind that the tool was too old to know. Within a call that may set something up, it is loading.
_UNNAMED = re.compile(r"(?i)^unknown$")
#: Calls that load or build code, or a graph; and the names under which compilers record themselves, and NCCL that it
#: sets up a communicator.
_BUILDS = re.compile(
    r"^cu(Module|Library)Load|^(cuda|hip)(Module|Library)Load|^hipModuleLoad|^cuLink(Create|Add|Complete)|Graph(Exec)?Instantiate|"
    r"^(nvrtc|hiprtc)CompileProgram"
)
_COMPILES = re.compile(
    r"(?i)\(dynamo_timed\)|CUDAGraphNode\.record|_compile\.(compile_inner|<locals>)|\b(inductor|backend|triton|jit|nvrtc)[\s_.:]*compil|"
    r"nvrtc::|\bcompile_?fx\b|\bcompile_?(kernel|fusion|program|module|graph)\b|::compile\w*|async_compile|triton\.compile|"
    r"\bautotun(e|ing)|cuda_?graph[\s_-]*captur|^ncclComm(Init|Split)|^Xla(Compile|EmitGpuAsm|Autotuner)"
)
_BEGIN_CAPTURE, _END_CAPTURE = re.compile("StreamBeginCapture"), re.compile("StreamEndCapture")
#: Calls that may have to set something up before they do what they are for.
_FIRST_TIMES = re.compile(r"Launch(?!HostFunc)|Malloc|Free|Alloc|Create|Register|DeviceProp|Occupancy|SetDevice")
#: A call of them is a first one from this many times the median of its name, and from this long.
_TIMES, _ONCE_NS = 10, 1_000_000
#: A name called less often has no ordinary length of its own.
_FEW = 3
#: What takes long in half of so many parts of a program, with as many calls each, takes long again and again.
_ROUNDS = 10

#: Between two launches of an eager program pass microseconds. A longer silence says something else went on.
EAGER_NS = 500_000
#: An operator without a launch that lasts this long is work of its own, not dispatch.
_HEAVY_NS = 100_000
#: So many answers are kept of single threads; of a trace with thousands of them, the last ones.
_KEPT = 20_000
#: Ranges around whole steps of a program, by name, and an outermost range with more launches than this, name no work.
_STEP = re.compile(r"(?i)step|iter|epoch|batch|train|loop|profil")
_MANY = 32


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

    def subset(self, keep: Bool) -> Track:
        """Those of the events that a mask keeps."""
        at = np.flatnonzero(keep)  # they are few, as a rule
        return self if len(at) == len(self) else Track(self.start[at], self.end[at], self.row[at])

    @functools.cached_property
    def coverage(self) -> Coverage:
        """The union of the events."""
        return Coverage(self.start, self.end)

    def covered(self, start: Int, end: Int) -> Int:
        """How much of each window the events cover, in ns."""
        return self.coverage.of(start, end)

    @functools.cached_property
    def _longest(self) -> Int:
        """Position of the event that lasts longest among those up to each."""
        reach = np.maximum.accumulate(self.end)
        return np.asarray(np.maximum.accumulate(np.where(self.end == reach, np.arange(len(reach)), 0)))

    def open_at(self, at: Int) -> Int:
        """Position of an event open at each time (the one that lasts longest), -1 where there is not any."""
        i = np.searchsorted(self.start, at, side="right") - 1
        begun = np.flatnonzero(i >= 0)
        longest = self._longest[i[begun]]
        i[begun] = np.where(self.end[longest] > at[begun], longest, -1)
        return i

    @functools.cached_property
    def parent(self) -> Int:
        """Position of the event around each event, -1 where there is not any."""
        return nesting(np.zeros(len(self), np.int64), self.start, self.end)[1]

    def innermost_at(self, at: Int) -> Int:
        """Position of the event that began last among those open at each time, -1 where there is not any."""
        i = np.searchsorted(self.start, at, side="right") - 1
        begun = np.flatnonzero(i >= 0)
        while len(begun):  # climbs one level a round, all times at once
            over = begun[self.end[i[begun]] <= at[begun]]
            i[over] = self.parent[i[over]]
            begun = over[i[over] >= 0]
        return i


@dataclasses.dataclass(eq=False)
class Work:
    """What the devices did for one process, by end.

    Parameters
    ----------
    start, end, device : ndarray of int
    table, row : ndarray of int
        As :func:`nsightkit.analysis.core.intervals.gpu_intervals` has them.
    elsewhere : ndarray of int
        Position of the last one before each that ran on another device, -1 where there is not any.
    """

    start: Int
    end: Int
    device: Int
    table: Int
    row: Int
    elsewhere: Int


_EMPTY = Track(*(np.empty(0, np.int64) for _ in range(3)))


def together(*tracks: Track) -> Track:
    """The events of several tracks; their rows mean something only if all are from one table."""
    some = [t for t in tracks if len(t)] or [_EMPTY]
    if len(some) == 1:
        return some[0]
    order = np.argsort(np.concatenate([t.start for t in some]), kind="stable")
    return Track(*(np.concatenate([getattr(t, a) for t in some])[order] for a in ("start", "end", "row")))


def _run(ordered: Int, value: int) -> slice:
    """Where a value stands in a column that is in order."""
    return slice(int(np.searchsorted(ordered, value, "left")), int(np.searchsorted(ordered, value, "right")))


def _inside(begun: Int, outer: Track) -> Int:
    """How many of some times, in order, lie within each event."""
    return np.asarray(np.searchsorted(begun, outer.end) - np.searchsorted(begun, outer.start))


def _outside(track: Track, other: Track) -> Union:
    """The union of some events without that of others."""
    return common((track.start, track.end), (other.start, other.end), outside=True)


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
        self.trace = trace.whole
        # Ours looks around itself, which an expression of somebody else may not.
        self._data = _DATA if data_loading == DATA_LOADING else compiled(data_loading, "data_loading")
        self.memo: dict[Any, Any] = {}
        called = self.trace.table("calls", ["thread"])["thread"].to_numpy()
        #: whether more than one thread calls CUDA, and more than one device had work
        self.several = bool((called != called[:1]).any())
        columns = [self.trace.table(t, ["device"])["device"].to_numpy() for t in GPU_TABLES if self.trace.size(t)]
        self.several_devices = any((c != columns[0][0]).any() for c in columns)

    # --- the tables, thread by thread ---

    @kept
    def _times(self, table: str) -> tuple[Int, Int]:
        """Starts and ends of a table's events."""
        frame = self.trace.table(table, ["start_ns", "end_ns"])
        return frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()

    def forget(self) -> None:
        """Drop what is kept of single threads and processes once that is much."""
        if len(self.memo) > _KEPT:
            self.memo = {key: value for key, value in self.memo.items() if not any(type(part) is int for part in key)}

    @kept
    def _by_thread(self, table: str) -> tuple[Int, Int, Int]:
        """Rows of a table thread by thread, and the thread and the process of each."""
        thread = self.trace.table(table, ["thread"])["thread"].to_numpy()
        order = np.argsort(thread, kind="stable").astype(np.int32)
        return order, thread[order], thread[order] >> 24

    def _rows(self, table: str, rows: Int) -> Track:
        start, end = self._times(table)
        rows = rows[np.argsort(start[rows], kind="stable")]
        return Track(start[rows], end[rows], rows)

    @kept
    def events(self, table: str, thread: int) -> Track:
        """What a table has of a thread."""
        order, of, _ = self._by_thread(table)
        return self._rows(table, order[_run(of, thread)])

    @kept
    def _flag(self, table: str, expression: Expression) -> Bool:
        """Per row of a table: whether its name matches."""
        return matching(self.trace.table(table, ["name"])["name"], expression)

    @kept
    def named(self, table: str, thread: int, expression: Expression) -> Track:
        """The events of a table whose name matches."""
        track = self.events(table, thread)
        return track.subset(self._flag(table, expression)[track.row]) if len(track) else track

    def calls(self, thread: int) -> Track:
        """CUDA calls."""
        return self.events("calls", thread)

    # --- CUDA calls ---

    @kept
    def _blocks(self) -> Bool:
        """Per call: whether it returns only when the GPU has caught up."""
        # A device-to-host copy into pageable memory blocks whatever its name says.
        return self._flag("calls", BLOCKING) | self.pageable("DtoH") & self._flag("calls", _COPY)

    @kept
    def blocking(self, thread: int) -> Track:
        """Calls that return only when the GPU has caught up."""
        calls = self.calls(thread)
        return calls.subset(self._blocks()[calls.row])

    def frees(self, thread: int) -> Track:
        """Calls that free the device's memory, for which it has to be idle."""
        return self.named("calls", thread, FREES)

    @kept
    def launches(self, thread: int) -> Int:
        """When the calls began that give a device work and do not block."""
        calls = self.calls(thread)
        return calls.start[(self._flag("calls", LAUNCHES) & ~self._blocks())[calls.row]]

    @kept
    def gave_work(self, thread: int) -> Int:
        """When the thread had given a device work: when launches began, and when copies that blocked ended."""
        blocking = self.blocking(thread)
        copies = blocking.end[self._flag("calls", _COPY)[blocking.row]]
        return np.sort(np.concatenate([self.launches(thread), copies]))

    @kept
    def staging(self, thread: int) -> Track:
        """Copy calls that move pageable memory."""
        copies = self.named("calls", thread, _COPY)
        return copies.subset(self.pageable(None)[copies.row])

    @kept
    def pageable(self, kind: str | None) -> Bool:
        """Per call: whether it launched a copy of one kind, or of any, from or to pageable host memory."""
        flag = np.zeros(self.trace.size("calls"), bool)
        memops = self.trace.table("memops", ["process", "correlation", "kind", "src_kind", "dst_kind"])
        copies = memops[(memops["src_kind"] == "pageable") | (memops["dst_kind"] == "pageable")]
        copies = copies if kind is None else copies[copies["kind"] == kind]
        row = launch_of(self.trace, copies["process"], copies["correlation"])
        flag[row[row >= 0]] = True
        return flag

    @kept
    def other_calls(self, thread: int) -> Track:
        """Calls that neither enqueue work nor are next to free (allocation, graph instantiation, …)."""
        calls = self.calls(thread)
        free = self._flag("calls", _CHEAP)[calls.row] & (calls.end - calls.start < _HEAVY_NS)
        return calls.subset(~(self._flag("calls", _ENQUEUE)[calls.row] | free))

    # --- waiting ---

    def data(self, thread: int) -> list[tuple[str, Track]]:
        """Ranges and operators of data loading."""
        return [("range", self.named("ranges", thread, self._data)), ("op", self.named("ops", thread, self._data))]

    def sleeps(self, thread: int) -> Track:
        """Sleeps that the program chose."""
        return self.named("os_calls", thread, _OS_SLEEP)

    @kept
    def waits(self, thread: int) -> tuple[Track, Track]:
        """OS waits outside CUDA calls: those outside ranges that are named for something else than data, and the rest.

        Rows of the rest are those of the ranges.
        """
        waits = self.named("os_calls", thread, _OS_WAIT)
        # A wait within a CUDA call is the driver's; a wait that encloses one does not exist on a thread.
        waits = waits.subset(self.calls(thread).open_at(waits.start) < 0)
        ranges = self.events("ranges", thread)
        around = ranges.innermost_at(waits.start)
        work = around >= 0
        work[work] = self._names_work(thread)[around[work]]
        return waits.subset(~work), Track(waits.start[work], waits.end[work], ranges.row[around[work]])

    def _names_work(self, thread: int) -> Bool:
        """Per range of a thread: whether its name says what goes on in it. That of a whole step does not."""
        ranges = self.events("ranges", thread)
        launches = _inside(self.launches(thread), ranges)
        leaf = np.ones(len(ranges), bool)
        leaf[ranges.parent[ranges.parent >= 0]] = False
        whole = (ranges.parent < 0) & (launches > _MANY)
        general = self._flag("ranges", _STEP)[ranges.row] & (launches > 0)
        loads = self._flag("ranges", self._data)[ranges.row]
        return np.asarray(((leaf & ~whole) | (launches == 0)) & ~general & ~loads)

    # --- work ---

    @kept
    def lone(self, thread: int) -> list[tuple[str, Track]]:
        """Ranges, and operators of some length, in which nothing was launched."""
        ranges, ops = self.events("ranges", thread), self.events("ops", thread)
        dispatch = self._flag("ranges", OPERATOR_RANGE)[ranges.row] & (ranges.end - ranges.start < _HEAVY_NS)
        ranges = ranges.subset(~dispatch & self._without_launch(ranges, thread))
        ops = ops.subset(ops.end - ops.start >= _HEAVY_NS)
        return [("range", ranges), ("op", ops.subset(self._without_launch(ops, thread)))]

    @kept
    def samples(self, thread: int) -> Track:
        """Samples of the thread, running, outside CUDA calls: one that waits for the GPU may run, too."""
        samples = self.events("samples", thread)
        return samples.subset(self.calls(thread).open_at(samples.start) < 0)

    def _without_launch(self, track: Track, thread: int) -> Bool:
        """Per event: whether its thread neither launched nor waited for the GPU in it."""
        waits = self.blocking(thread)
        waits = waits.subset(~self._flag("calls", _ALLOCATES)[waits.row])  # they give the device nothing to do
        return np.asarray(_inside(self.launches(thread), track) + _inside(waits.start, track) == 0)

    @kept
    def dispatch(self, thread: int) -> Track:
        """Operators with no other between them and a CUDA call. For its coverage; rows mean nothing."""
        ops = together(self.events("ops", thread), self.named("ranges", thread, OPERATOR_RANGE))
        direct = ops.innermost_at(self.calls(thread).start)
        count = np.bincount(direct[direct >= 0], minlength=len(ops))
        # An operator that runs much longer than its calls take to dispatch does something else as well.
        return ops.subset((count > 0) & (ops.end - ops.start <= count * EAGER_NS))

    # --- the profiler, and what happens once ---

    @kept
    def _overhead(self, loads: bool, of: int) -> Track:
        """Overhead records of a thread or of a process, and those that say nothing of either."""
        order, thread, process = self._by_thread("overhead")
        if not len(order):
            return _EMPTY
        runs = [_run(thread, -1), _run(thread, of), _run(process, of)]
        rows = np.unique(np.concatenate([order[run] for run in runs]))
        loading = self._loading()[rows]
        chosen = loading if loads else ~loading & ~self._flag("overhead", _BUFFER_FULL)[rows]
        return self._rows("overhead", rows[chosen])

    @kept
    def _loading(self) -> Bool:
        """Per overhead record: whether the driver or the loader did something for the first time."""
        start, thread = (
            self.trace.table("overhead", ["start_ns", "thread"])[c].to_numpy() for c in ("start_ns", "thread")
        )
        loading, unnamed = self._flag("overhead", _LOADING).copy(), self._flag("overhead", _UNNAMED)
        rows = np.flatnonzero(unnamed)
        by_thread: dict[Any, Any] = pd.Series(rows).groupby(thread[rows]).indices
        for number, at in by_thread.items():
            loading[rows[at]] = self.named("calls", int(number), _FIRST_TIMES).open_at(start[rows[at]]) >= 0
        return loading

    def profiler(self, process: int) -> Track:
        """The profiler's own work on whatever thread of a process; what the driver loads is not its work."""
        return self._overhead(False, process)

    def once(self, thread: int) -> list[tuple[str, Track]]:
        """What happens once: code that is loaded or compiled, graphs that are captured, calls that set something up."""
        return [
            ("overhead", self._overhead(True, thread)),
            ("call", self._first_calls(thread)),
            ("call", self._captures(thread)),
            ("os_call", self._waits_for_code(thread)),
            ("range", self.named("ranges", thread, _COMPILES)),
            ("op", self.named("ops", thread, _COMPILES)),
        ]

    @kept
    def _captures(self, thread: int) -> Track:
        """From each begin of a graph's capture to its end; the row is that of the begin."""
        begin, end = (self.named("calls", thread, of) for of in (_BEGIN_CAPTURE, _END_CAPTURE))
        at = np.searchsorted(end.start, begin.start)
        ended = at < len(end)
        return Track(begin.start[ended], end.end[at[ended]], begin.row[ended])

    @kept
    def _waits_for_code(self, thread: int) -> Track:
        """Long waits for other threads right before the thread links or loads code: those were compiling it."""
        waits, builds = self.named("os_calls", thread, _FOR_A_THREAD), self.named("calls", thread, _BUILDS).start
        then = np.append(builds, np.iinfo(np.int64).max)[np.searchsorted(builds, waits.end)]
        return waits.subset((waits.end - waits.start >= _ONCE_NS) & (then - waits.end <= EAGER_NS))

    @kept
    def _work(self) -> dict[str, Int]:
        """What the devices did, by process and end."""
        ops = gpu_intervals(self.trace, "process")
        order = np.lexsort((ops["end_ns"], ops["process"]))
        return {str(column): values.to_numpy()[order] for column, values in ops.items()}

    @kept
    def work_by_end(self, process: int) -> Work:
        """What the devices did for a process."""
        work = self._work()
        run = _run(work["process"], process)
        device = work["device"][run]
        changes = np.where(device[1:] != device[:-1], np.arange(len(device) - 1), -1) if len(device) else device
        elsewhere = np.maximum.accumulate(np.append(-1, changes))[: len(device)]
        return Work(work["start_ns"][run], work["end_ns"][run], device, work["table"][run], work["row"][run], elsewhere)

    @kept
    def _first_calls(self, thread: int) -> Track:
        calls = self.calls(thread)
        first = calls.subset(self._first()[calls.row])
        if not len(first):
            return first
        # A call may take long because it waits for the device, as with a full launch queue.
        idle = first.end - first.start - self._busy(thread).of(first.start, first.end)
        return first.subset(self._flag("calls", _BUILDS)[first.row] | (idle >= _ONCE_NS))

    @kept
    def _first(self) -> Bool:
        """Per call: whether it builds or loads code or a graph, or set something up that later calls found in place."""
        calls = self.trace.table("calls", ["start_ns", "duration_ns", "name"])
        length, code = calls["duration_ns"], calls["name"].cat.codes
        builds, may = self._flag("calls", _BUILDS), self._flag("calls", _FIRST_TIMES)
        long = may & (length >= _ONCE_NS).to_numpy()
        # Of few launches most may be first ones: what launches a new kernel says nothing of what is ordinary.
        known = ~self._loads_kernel() if long.any() else np.ones(len(length), bool)
        each = length[known & code.isin(code[long].unique()).to_numpy()].groupby(code)
        ordinary = each.quantile(interpolation="lower").where(each.size() >= _FEW, length[may].median())
        first = long & (length >= _TIMES * code.map(ordinary).fillna(length[may].median())).to_numpy()
        if (rows := np.flatnonzero(first & known)).size:
            # What takes long again and again is not done once: such lengths are ordinary, too.
            done = (calls["start_ns"].rank().to_numpy()[rows] - 1) * _ROUNDS // len(calls)
            parts = pd.Series(done).groupby(code.to_numpy()[rows]).transform("nunique").to_numpy()
            again = rows[2 * parts >= _ROUNDS]
            first[again] = length[again] >= _TIMES * length[again].groupby(code).transform("median")
        return np.asarray(builds | first)

    def _loads_kernel(self) -> Bool:
        """Per call: whether it is the first in its process to launch a kernel of some name, whose code may load."""
        kernels = self.trace.table("kernels", ["process", "correlation", "name"])
        first = kernels.drop_duplicates(["process", "name"])
        row, flag = (
            launch_of(self.trace, first["process"], first["correlation"]),
            np.zeros(self.trace.size("calls"), bool),
        )
        flag[row[row >= 0]] = True
        return flag

    # --- unions, for further arithmetic ---

    def input_waits(self, thread: int) -> Union:
        """When the thread waited for data, without its CUDA calls and without waits for work of other threads."""
        waits, _ = self.waits(thread)
        if self.several and len(waits):
            everywhere = self._calls_of_fed(thread >> 24).of(waits.start, waits.end)
            handed = everywhere > self.calls(thread).covered(waits.start, waits.end)
            waits = waits.subset(~handed | ~self._flag("os_calls", _FOR_A_THREAD)[waits.row])
        return _outside(together(*(t for _, t in self.data(thread)), waits), self.calls(thread))

    def thread_waits(self, thread: int) -> Union:
        """The OS waits for another thread, outside CUDA calls and ranges that name something."""
        waits, _ = self.waits(thread)
        waits = waits.subset(self._flag("os_calls", _FOR_A_THREAD)[waits.row])
        return _outside(waits, together(*(t for _, t in self.data(thread))))

    def own_work(self, thread: int) -> Union:
        """Named work in which nothing was launched, and sleeps: without CUDA calls and without waits for data."""
        work = together(*(t for _, t in self.lone(thread)), self.sleeps(thread))
        start, end = self.input_waits(thread)
        return _outside(work, together(self.calls(thread), Track(start, end, start)))

    def one_offs(self, thread: int) -> Union:
        """What happened once."""
        return union(*((track.start, track.end) for _, track in self.once(thread)))

    def profiler_time(self, thread: int) -> Union:
        """The profiler's work on this thread, and that on others of the process while this one's devices were idle."""
        here, everywhere = self._overhead(False, thread), self.profiler(thread >> 24)
        if len(everywhere) == len(here):
            return union((here.start, here.end))
        busy = self._busy(thread)
        return union((here.start, here.end), _outside(everywhere, Track(busy.start, busy.end, busy.start)))

    def dispatch_free(self, thread: int) -> Union:
        """All that the thread did beside dispatching: waits, work, one-offs, other calls, silences too long for it.

        Those are times between CUDA calls, mostly not in operators that launch.
        """
        calls = self.calls(thread)
        reach = np.maximum.accumulate(calls.end)[:-1]
        long = np.flatnonzero(calls.start[1:] - reach > EAGER_NS)
        gaps = Track(reach[long], calls.start[1:][long], long)
        silent = gaps.subset(2 * self.dispatch(thread).covered(gaps.start, gaps.end) < gaps.end - gaps.start)
        waits, sleeps = self.named("os_calls", thread, _OS_WAIT), self.sleeps(thread)
        parts = (self.input_waits(thread), self.own_work(thread), self.one_offs(thread))
        others = (waits, sleeps, self.other_calls(thread), silent)
        return union(*parts, *((track.start, track.end) for track in others))

    @kept
    def _calls_of_fed(self, process: int) -> Coverage:
        """When any thread of a process that gave a device work was in a call."""
        order, _, of = self._by_thread("calls")
        run = _run(of, process)
        start, end = self._times("calls")
        rows = order[run][self._feeds()[run]]
        return Coverage(start[rows], end[rows])

    @kept
    def _feeds(self) -> Bool:
        """Per call, in order of threads: whether its thread gave a device work."""
        return np.isin(self._by_thread("calls")[1], list(self._fed()))

    def _busy(self, thread: int) -> Coverage:
        """When a device had work to which this thread gives work."""
        return self._busy_any(self._fed().get(thread, frozenset()))

    @kept
    def _busy_any(self, devices: frozenset[int]) -> Coverage:
        """When any of some devices had work."""
        ops = gpu_intervals(self.trace)
        mine = np.isin(ops["device"], list(devices))
        return Coverage(ops["start_ns"].to_numpy()[mine], ops["end_ns"].to_numpy()[mine])

    @kept
    def _fed(self) -> dict[int, frozenset[int]]:
        """The devices that each thread gave work."""
        ops = gpu_intervals(self.trace)
        call = launches_of(self.trace, ops["table"], ops["row"])
        thread = self.trace.table("calls", ["thread"])["thread"].to_numpy()[call[call >= 0]]
        pairs = pd.DataFrame({"thread": thread, "device": ops["device"].to_numpy()[call >= 0]}).drop_duplicates()
        fed = pairs.groupby("thread")["device"].agg(frozenset)
        return dict(zip(fed.index.tolist(), fed, strict=True))
