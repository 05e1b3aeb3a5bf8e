"""What each CPU thread did, sorted by what it means for a device that waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.intervals import Coverage, gpu_intervals, launch_of, launches_of
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import OPERATOR_RANGE, Expression, compiled, matching
from nsightkit.analysis.timeline.gaps import names
from nsightkit.analysis.timeline.gaps.names import BLOCKING, DATA_LOADING, FREES, UNIFIED
from nsightkit.analysis.timeline.gaps.paint import LABELS, Layer, Paint, Track, outside, paint, together
from nsightkit.trace.model import GPU_TABLES, LAUNCHES, Trace

__all__ = ["BLOCKING", "DATA_LOADING", "EAGER_NS", "FREES", "UNIFIED", "Threads", "Track"]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]
#: Start and end of disjoint intervals.
Union = tuple[Int, Int]

#: A call is a first one from this many times the median of its name, and from this long.
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
#: An outermost range with more launches than this names no work.
_MANY = 32
_LAST = np.iinfo(np.int64).max


def _run(ordered: Int, value: int) -> slice:
    """Where a value stands in a column that is in order."""
    return slice(int(np.searchsorted(ordered, value, "left")), int(np.searchsorted(ordered, value, "right")))


def _inside(begun: Int, outer: Track) -> Int:
    """How many of some times, in order, lie within each event."""
    return np.asarray(np.searchsorted(begun, outer.end) - np.searchsorted(begun, outer.start))


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
        self._data = names.DATA if data_loading == DATA_LOADING else compiled(data_loading, "data_loading")
        self.memo: dict[Any, Any] = {}
        called = self.trace.table("calls", ["thread"])["thread"].to_numpy()
        #: whether more than one thread calls CUDA, and more than one device had work
        self.several = bool((called != called[:1]).any())
        devices: set[int] = set()
        for table in GPU_TABLES:
            devices |= set(self.trace.table(table, ["device"])["device"].unique().tolist())
        self.several_devices = len(devices) > 1

    def forget(self) -> None:
        """Drop what is kept of single threads and processes once that is much."""
        if len(self.memo) > _KEPT:
            self.memo = {key: value for key, value in self.memo.items() if not any(type(part) is int for part in key)}

    # --- the tables, thread by thread ---

    @kept
    def _times(self, table: str) -> tuple[Int, Int]:
        """Starts and ends of a table's events."""
        frame = self.trace.table(table, ["start_ns", "end_ns"])
        return frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()

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
        return self._flag("calls", BLOCKING) | self.pageable("DtoH") & self._flag("calls", names.COPY)

    @kept
    def blocking(self, thread: int) -> Track:
        """Calls that return only when the GPU has caught up."""
        calls = self.calls(thread)
        return calls.subset(self._blocks()[calls.row])

    @kept
    def launches(self, thread: int) -> Int:
        """When the calls began that give a device work and do not block."""
        calls = self.calls(thread)
        return calls.start[(self._flag("calls", LAUNCHES) & ~self._blocks())[calls.row]]

    @kept
    def gave_work(self, thread: int) -> Int:
        """When the thread had given a device work: when launches began, and when copies that blocked ended."""
        blocking = self.blocking(thread)
        copies = blocking.end[self._flag("calls", names.COPY)[blocking.row]]
        return np.sort(np.concatenate([self.launches(thread), copies]))

    @kept
    def pageable(self, *kinds: str) -> Bool:
        """Per call: whether it launched a copy of one of some kinds from or to pageable host memory."""
        flag = np.zeros(self.trace.size("calls"), bool)
        memops = self.trace.table("memops", ["process", "correlation", "kind", "src_kind", "dst_kind"])
        staged = (memops["src_kind"] == "pageable") | (memops["dst_kind"] == "pageable")
        copies = memops[staged & memops["kind"].isin(kinds)]
        row = launch_of(self.trace, copies["process"], copies["correlation"])
        flag[row[row >= 0]] = True
        return flag

    def _staging(self, thread: int) -> Track:
        """Copy calls that move pageable memory."""
        copies = self.named("calls", thread, names.COPY)
        return copies.subset(self.pageable("HtoD", "DtoH", "HtoH", "DtoD", "PtoP")[copies.row])

    def _other_calls(self, thread: int) -> Track:
        """Calls that neither enqueue work nor are next to free (allocation, waits, …)."""
        calls = self.calls(thread)
        free = self._flag("calls", names.CHEAP)[calls.row] & (calls.end - calls.start < _HEAVY_NS)
        return calls.subset(~(self._flag("calls", names.ENQUEUES)[calls.row] | free))

    # --- waiting ---

    def sleeps(self, thread: int) -> Track:
        """Waits that the program chose."""
        return self.named("os_calls", thread, names.OS_CHOSEN)

    def _waits(self, thread: int) -> list[Layer]:
        """OS waits outside CUDA calls: for data, in ranges that are named for something else, for other threads."""
        waits = self.named("os_calls", thread, names.OS_WAIT)
        # A wait within a CUDA call is the driver's; a wait that encloses one does not exist on a thread.
        waits = waits.subset(self.calls(thread).open_at(waits.start) < 0)
        ranges = self.events("ranges", thread)
        around = ranges.innermost_at(waits.start)
        work = around >= 0
        work[work] = self._names_work(thread)[around[work]]
        named = Track(waits.start[work], waits.end[work], ranges.row[around[work]])
        waits = waits.subset(~work)
        handed = np.zeros(len(waits), bool)
        if self.several and len(waits):
            # Meanwhile another thread fed the device: not for data.
            everywhere = self._calls_of_fed(thread >> 24).of(waits.start, waits.end)
            handed = everywhere > self.calls(thread).covered(waits.start, waits.end)
            handed &= self._flag("os_calls", names.FOR_A_THREAD)[waits.row]
        return [
            Layer("silence", "os_call", waits.subset(handed)),
            Layer("work", "range", named),
            Layer("data", "os_call", waits.subset(~handed)),
        ]

    def _names_work(self, thread: int) -> Bool:
        """Per range of a thread: whether its name says what goes on in it. That of a whole step does not."""
        ranges = self.events("ranges", thread)
        launches = _inside(self.launches(thread), ranges)
        leaf = np.ones(len(ranges), bool)
        leaf[ranges.parent[ranges.parent >= 0]] = False
        whole = (ranges.parent < 0) & (launches > _MANY)
        general = self._flag("ranges", names.STEP)[ranges.row] & (launches > 0)
        loads = self._flag("ranges", self._data)[ranges.row]
        return np.asarray(((leaf & ~whole) | (launches == 0)) & ~general & ~loads)

    # --- work ---

    def _without_launch(self, track: Track, thread: int) -> Track:
        """The events in which their thread neither launched nor waited for the GPU."""
        waits = self.blocking(thread)
        waits = waits.subset(~self._flag("calls", names.ALLOCATES)[waits.row])  # they give the device nothing to do
        return track.subset(_inside(self.launches(thread), track) + _inside(waits.start, track) == 0)

    def _work(self, thread: int) -> list[Layer]:
        """Operators of some length and ranges in which nothing was launched, and sleeps that these do not name."""
        ranges, ops = self.events("ranges", thread), self.events("ops", thread)
        dispatch = self._flag("ranges", OPERATOR_RANGE)[ranges.row] & (ranges.end - ranges.start < _HEAVY_NS)
        return [
            Layer("work", "os_call", self.sleeps(thread)),
            Layer("work", "op", self._without_launch(ops.subset(ops.end - ops.start >= _HEAVY_NS), thread)),
            Layer("work", "range", self._without_launch(ranges.subset(~dispatch), thread)),
        ]

    @kept
    def dispatch(self, thread: int) -> Track:
        """Operators with no other between them and a CUDA call. For its coverage; rows mean nothing."""
        ops = together(self.events("ops", thread), self.named("ranges", thread, OPERATOR_RANGE))
        if not len(ops):
            return ops
        direct = ops.innermost_at(self.calls(thread).start)
        count = np.bincount(direct[direct >= 0], minlength=len(ops))
        # An operator that runs much longer than its calls take to dispatch does something else as well.
        return ops.subset((count > 0) & (ops.end - ops.start <= count * EAGER_NS))

    def _silences(self, thread: int) -> Track:
        """Times between CUDA calls that are too long for dispatch, mostly not in operators that launch."""
        calls = self.calls(thread)
        begun = np.append(0, np.maximum.accumulate(calls.end))
        ended = np.append(calls.start, max(self._end(), int(begun[-1])))
        long = ended - begun > EAGER_NS
        if len(calls):
            long[0] = begun[0] < ended[0]  # before its first call a thread dispatches nothing
        silences = Track(begun[long], ended[long], np.flatnonzero(long))
        covered = self.dispatch(thread).covered(silences.start, silences.end)
        return silences.subset(2 * covered < silences.end - silences.start)

    @kept
    def _end(self) -> int:
        """When the last event ended."""
        tables = (*GPU_TABLES, "calls", "ranges", "ops", "os_calls")
        return max(int(self._times(table)[1].max(initial=0)) for table in tables)

    @kept
    def samples(self, thread: int) -> Track:
        """Samples of the thread, running, outside CUDA calls: one that waits for the GPU may run, too."""
        samples = self.events("samples", thread)
        return samples.subset(self.calls(thread).open_at(samples.start) < 0)

    def _around(self, thread: int, silences: Track) -> list[Layer]:
        """What says something of silences: samples, ranges, operators."""
        layers = []
        for kind, table in (("sample", "samples"), ("range", "ranges"), ("op", "ops")):
            track = self.samples(thread) if kind == "sample" else self.events(table, thread)
            track = track.subset(silences.covered(track.start, track.end) > 0)
            if kind == "sample" and len(track):
                name = self.trace.table(table, ["name"])["name"].iloc[track.row]
                track = track.subset((name != "").to_numpy())
            layers.append(Layer("around", kind, track))
        return layers

    # --- the profiler, and what happens once ---

    @kept
    def _overhead(self, loads: bool, of: int) -> Track:
        """Overhead records of a thread or of a process, and those that say nothing of either."""
        order, thread, process = self._by_thread("overhead")
        runs = [_run(thread, -1), _run(thread, of), _run(process, of)]
        rows = np.unique(np.concatenate([order[run] for run in runs]))
        loading = self._flag("overhead", names.LOADING)[rows]
        chosen = loading if loads else ~loading & ~self._flag("overhead", names.BUFFER_FULL)[rows]
        return self._rows("overhead", rows[chosen])

    def _profiler(self, thread: int, process: int) -> list[Layer]:
        """The profiler's work on this thread, and that on others of the process while this one's devices were idle."""
        everywhere = self._overhead(False, process)
        if thread == -1:
            return [Layer("profiler", "overhead", everywhere)]
        here = self._overhead(False, thread)
        layers = [Layer("profiler", "overhead", here)]
        if len(everywhere) > len(here):
            busy = self._busy(self._fed().get(thread, frozenset()))
            start, end = outside(everywhere, Track(busy.start, busy.end, busy.start))
            row = everywhere.row[everywhere.open_at(start)]
            layers.insert(0, Layer("profiler", "overhead", Track(start, end, row)))
        return layers

    def _once(self, thread: int) -> list[Layer]:
        """What happens once: code that is loaded or compiled, graphs that are captured, calls that set something up."""
        return [
            Layer("once", "op", self.named("ops", thread, names.COMPILES)),
            Layer("once", "range", self.named("ranges", thread, names.COMPILES)),
            Layer("once", "os_call", self._waits_for_code(thread)),
            Layer("once", "call", self._captures(thread)),
            Layer("once", "call", self._first_calls(thread)),
            Layer("once", "overhead", self._overhead(True, thread)),
        ]

    def _captures(self, thread: int) -> Track:
        """From each begin of a graph's capture to its end; the row is that of the begin."""
        begin = self.named("calls", thread, names.BEGIN_CAPTURE)
        end = self.named("calls", thread, names.END_CAPTURE)
        at = np.searchsorted(end.start, begin.start)
        ended = at < len(end)
        return Track(begin.start[ended], end.end[at[ended]], begin.row[ended])

    def _waits_for_code(self, thread: int) -> Track:
        """Long waits for other threads right before the thread links or loads code: those were compiling it."""
        waits = self.named("os_calls", thread, names.FOR_A_THREAD)
        builds = self.named("calls", thread, names.BUILDS).start
        then = np.append(builds, _LAST)[np.searchsorted(builds, waits.end)]
        return waits.subset((waits.end - waits.start >= _ONCE_NS) & (then - waits.end <= EAGER_NS))

    def _first_calls(self, thread: int) -> Track:
        calls = self.calls(thread)
        first = calls.subset(self._first()[calls.row])
        if not len(first):
            return first
        # A call may take long because it waits for the device, as with a full launch queue.
        busy = self._busy(self._fed().get(thread, frozenset()))
        idle = first.end - first.start - busy.of(first.start, first.end)
        return first.subset(self._flag("calls", names.BUILDS)[first.row] | (idle >= _ONCE_NS))

    @kept
    def _first(self) -> Bool:
        """Per call: whether it builds or loads code or a graph, or set something up that later calls found in place."""
        calls = self.trace.table("calls", ["start_ns", "duration_ns", "name"])
        length, code = calls["duration_ns"].to_numpy(), calls["name"].cat.codes.to_numpy()
        builds, may = self._flag("calls", names.BUILDS), self._flag("calls", names.FIRST_TIMES)
        long = may & (length >= _ONCE_NS)
        if not long.any():
            return builds
        # Of few launches most may be first ones: what launches a new kernel says nothing of what is ordinary.
        known = ~self._loads_kernel()
        by_name = pd.Series(length[known]).groupby(code[known])
        usual = by_name.quantile(interpolation="lower")[by_name.size() >= _FEW]
        ordinary = usual.reindex(code).fillna(np.median(length[may])).to_numpy()
        first = long & (length >= _TIMES * ordinary)
        # What takes long again and again is not done once: such lengths are ordinary, too.
        rows = np.flatnonzero(first & known)
        done = (calls["start_ns"].rank().to_numpy()[rows] - 1) * _ROUNDS // len(calls)
        again = pd.DataFrame({"row": rows, "name": code[rows], "length": length[rows], "part": done}).groupby("name")
        often = 2 * again["part"].transform("nunique").to_numpy() >= _ROUNDS
        median = again["length"].transform("median").to_numpy()
        first[rows] &= ~often | (length[rows] >= _TIMES * median)
        return np.asarray(builds | first)

    def _loads_kernel(self) -> Bool:
        """Per call: whether it is the first in its process to launch a kernel of some name, whose code may load."""
        kernels = self.trace.table("kernels", ["process", "correlation", "name"])
        first = kernels.drop_duplicates(["process", "name"])
        row = launch_of(self.trace, first["process"], first["correlation"])
        flag = np.zeros(self.trace.size("calls"), bool)
        flag[row[row >= 0]] = True
        return flag

    # --- the devices ---

    @kept
    def _ops(self) -> pd.DataFrame:
        """What the devices did, by process and end."""
        return gpu_intervals(self.trace, "process").sort_values(["process", "end_ns"], kind="stable")

    @kept
    def work_by_end(self, process: int) -> pd.DataFrame:
        """What the devices did for a process, by end."""
        ops = self._ops()
        return ops.iloc[_run(ops["process"].to_numpy(), process)]

    @kept
    def _calls_of_fed(self, process: int) -> Coverage:
        """When any thread of a process that gave a device work was in a call."""
        order, _, of = self._by_thread("calls")
        run = _run(of, process)
        rows = order[run][self._feeds()[run]]
        start, end = self._times("calls")
        return Coverage(start[rows], end[rows])

    @kept
    def _feeds(self) -> Bool:
        """Per call, in order of threads: whether its thread gave a device work."""
        order, thread, _ = self._by_thread("calls")
        return np.isin(thread, pd.unique(thread[self._flag("calls", LAUNCHES)[order]]))

    @kept
    def _busy(self, devices: frozenset[int]) -> Coverage:
        """When any of some devices had work."""
        ops = gpu_intervals(self.trace)
        ops = ops[ops["device"].isin(devices)]
        return Coverage(ops["start_ns"].to_numpy(), ops["end_ns"].to_numpy())

    @kept
    def _fed(self) -> dict[int, frozenset[int]]:
        """The devices that each thread gave work."""
        ops = gpu_intervals(self.trace)
        call = launches_of(self.trace, ops["table"], ops["row"])
        thread = self.trace.table("calls", ["thread"])["thread"].to_numpy()[call[call >= 0]]
        pairs = pd.DataFrame({"thread": thread, "device": ops["device"].to_numpy()[call >= 0]}).drop_duplicates()
        fed = pairs.groupby("thread")["device"].agg(frozenset)
        return dict(zip(fed.index.tolist(), fed, strict=True))

    # --- the paint ---

    @kept
    def paint(self, thread: int, process: int) -> Paint:
        """Say what each moment of a thread's time was; of an unknown thread of a process only what the profiler did."""
        if thread == -1:
            always = np.array([0]), np.array([self._end()]), np.array([-1])
            return paint([Layer("silence", "none", Track(*always)), *self._profiler(thread, process)])
        silences = self._silences(thread)
        named = [
            *self._work(thread),
            *self._waits(thread),
            Layer("data", "op", self.named("ops", thread, self._data)),
            Layer("data", "range", self.named("ranges", thread, self._data)),
        ]
        calls = self.calls(thread)
        inside = together(*(layer.track for layer in named)).covered(calls.start, calls.end) > 0
        return paint(
            [
                Layer("silence", "none", silences),
                *self._around(thread, silences),
                *named,
                Layer("dispatch", "none", calls.subset(inside)),
                Layer("work", "call", self._other_calls(thread)),
                Layer("staging", "call", self._staging(thread)),
                *self._once(thread),
                *self._profiler(thread, process),
            ]
        )

    # --- unions, for further arithmetic ---

    def input_waits(self, thread: int) -> Union:
        """When the thread waited for data, outside its CUDA calls."""
        return self.paint(thread, thread >> 24).union("data")

    def thread_waits(self, thread: int) -> Union:
        """When it may have waited for another thread to bring them."""
        waits = self.named("os_calls", thread, names.FOR_A_THREAD)
        named = self.paint(thread, thread >> 24).union("data", kinds=("range", "op"))
        return outside(waits, Track(*named, named[0]))

    def own_work(self, thread: int) -> Union:
        """Work that is not a CUDA call."""
        return self.paint(thread, thread >> 24).union("work", kinds=("range", "op", "os_call"))

    def one_offs(self, thread: int) -> Union:
        """What happened once."""
        return self.paint(thread, thread >> 24).union("once")

    def profiler_time(self, thread: int) -> Union:
        """The profiler's work, on whatever thread."""
        return self.paint(thread, thread >> 24).union("profiler")

    def dispatch_free(self, thread: int) -> Union:
        """All that the thread did beside dispatching."""
        return self.paint(thread, thread >> 24).union(*(label for label in LABELS if label != "profiler"))
