"""The recorded activity of each CPU thread, by its meaning for a device that waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.intervals import Coverage, common, gpu_intervals, launch_of, launches_of
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import LOADER_RANGE, OPERATOR_RANGE, Expression, compiled, matching
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps import names
from nsightkit.analysis.timeline.gaps.paint import LABELS, Layer, Paint, Track, outside, paint, together
from nsightkit.trace.model import GPU_TABLES, LAUNCHES, Trace

__all__ = ["EAGER_NS", "Threads"]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]
#: Start and end of disjoint intervals.
Union = tuple[Int, Int]

#: An outlying call takes this many times what nine tenths of the calls of its name take, and at least this long.
_TIMES, _ONCE_NS = 10, 1_000_000
_USUAL = 0.9
#: Between two launches of an eager program pass microseconds. A longer silence is something else.
EAGER_NS = 500_000
#: An operator without a launch that lasts this long is work, not dispatch.
_HEAVY_NS = 100_000
#: Pages of managed memory that move one after another, at most this far apart, are one run of faults.
_PAGES_NS = 100_000
#: A program is settled when this many steps are over.
_SETTLED = 2
#: How many answers about single threads to keep; bounds memory for traces with thousands of threads.
_KEPT = 20_000
_NEVER = np.iinfo(np.int64).max
_ALL = slice(None)


@kept
def _matches(trace: Trace, table: str, expression: Expression) -> Bool:
    """Per name of a table: whether it matches; one more for no name."""
    names = trace.table(table, ["name"])["name"].cat.categories.astype(str).tolist()
    return np.array([*(expression.search(name) is not None for name in names), False])


class Threads:
    """The recorded activity of each thread, split by what it means; each part is built when it is asked for.

    Parameters
    ----------
    trace : Trace
        Its filters do not count.
    data_loading : str
        Regular expression of the names of ranges and operators in which the program loads data.
    """

    def __init__(self, trace: Trace, data_loading: str = names.DATA_LOADING) -> None:
        self.trace = trace.whole
        # Ours uses lookaround, which an expression of a user may not.
        self._data = names.DATA if data_loading == names.DATA_LOADING else compiled(data_loading, "data_loading")
        self.memo: dict[Any, Any] = {}
        called = self.trace.table("calls", ["thread"])["thread"].to_numpy()
        #: whether more than one thread calls CUDA
        self.several = bool((called != called[:1]).any())

    def forget(self) -> None:
        """Drop what is kept of single threads and processes once that is much."""
        if len(self.memo) > _KEPT:
            self.memo = {key: value for key, value in self.memo.items() if not any(type(part) is int for part in key)}

    # --- the tables, thread by thread ---

    @kept
    def _times(self, table: str) -> tuple[Int, Int]:
        frame = self.trace.table(table, ["start_ns", "end_ns"])
        return frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()

    @kept
    def _by_thread(self, table: str) -> tuple[Int, Int, Int]:
        """Rows of a table thread by thread, the threads, and where each one's rows begin and the last one's end."""
        thread = self.trace.table(table, ["thread"])["thread"].to_numpy()
        order = np.argsort(thread, kind="stable").astype(np.int32)
        threads, count = np.unique(thread, return_counts=True)
        return order, threads, np.append(0, np.cumsum(count))

    def _rows_of(self, table: str, first: int, last: int) -> Int:
        """Rows of the threads from `first` to `last`."""
        order, threads, begin = self._by_thread(table)
        low, high = np.searchsorted(threads, first, "left"), np.searchsorted(threads, last, "right")
        return order[begin[low] : begin[high]]

    def _track(self, table: str, rows: Int) -> Track:
        start, end = self._times(table)
        rows = rows[np.argsort(start[rows], kind="stable")]
        return Track(start[rows], end[rows], rows)

    @kept
    def events(self, table: str, thread: int) -> Track:
        """The events of a thread in a table."""
        return self._track(table, self._rows_of(table, thread, thread))

    def _of_process(self, table: str, process: int) -> Track:
        """The events of all threads of a process."""
        return self._track(table, self._rows_of(table, process << 24, (process << 24) + 0xFFFFFF))

    def _flag(self, table: str, expression: Expression, rows: Int | slice = _ALL) -> Bool:
        """Per row of a table, or of some rows: whether its name matches."""
        codes = self.trace.table(table, ["name"])["name"].cat.codes.to_numpy()
        return np.asarray(_matches(self.trace, table, expression)[codes[rows]])

    def _matching(self, table: str, track: Track, expression: Expression) -> Track:
        if not len(track):
            return track
        return track.subset(self._flag(table, expression, track.row))

    @kept
    def named(self, table: str, thread: int, expression: Expression) -> Track:
        """The events of a thread whose name matches."""
        return self._matching(table, self.events(table, thread), expression)

    def calls(self, thread: int) -> Track:
        """CUDA calls."""
        return self.events("calls", thread)

    # --- CUDA calls ---

    @kept
    def _blocks(self) -> Bool:
        """Per call: whether it returns only when the GPU has caught up."""
        # A device-to-host copy into pageable memory blocks even if its name ends in Async.
        return self._flag("calls", names.BLOCKING) | self.pageable("DtoH") & self._flag("calls", names.COPY)

    @kept
    def blocking(self, thread: int) -> Track:
        """Calls that return only when the GPU has caught up."""
        calls = self.calls(thread)
        return calls.subset(self._blocks()[calls.row])

    @kept
    def launches(self, thread: int) -> Int:
        """Starts of the calls that give a device work and do not block."""
        calls = self.calls(thread)
        return calls.start[self._flag("calls", LAUNCHES, calls.row) & ~self._blocks()[calls.row]]

    @kept
    def gave_work(self, thread: int) -> Int:
        """When the thread had given a device work: when launches began, and when copies that blocked ended."""
        copies = self._matching("calls", self.blocking(thread), names.COPY)
        return np.sort(np.concatenate([self.launches(thread), copies.end]))

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

    def _calls_of_label(self, thread: int) -> list[Layer]:
        """Calls that neither enqueue work nor are cheap, and copy calls that move pageable memory."""
        calls = self.calls(thread)
        cheap = self._flag("calls", names.CHEAP, calls.row) & (calls.end - calls.start < _HEAVY_NS)
        others = calls.subset(~(self._flag("calls", names.ENQUEUES, calls.row) | cheap))
        copies = self.named("calls", thread, names.COPY)
        staged = copies.subset(self.pageable("HtoD", "DtoH", "HtoH", "DtoD", "PtoP")[copies.row])
        return [Layer("work", "call", others), Layer("staging", "call", staged)]

    # --- waiting ---

    def sleeps(self, thread: int) -> Track:
        """Waits that the program chose."""
        return self.named("os_calls", thread, names.ASLEEP)

    def _waits(self, thread: int) -> list[Layer]:
        """OS waits outside CUDA calls: for a person, for a thread that feeds the device, else for data."""
        waits = self.named("os_calls", thread, names.OS_WAIT)
        # A wait within a CUDA call is the driver's.
        calls = self.calls(thread)
        waits = waits.subset(calls.open_at(waits.start) < 0)
        handed = np.zeros(len(waits), bool)
        if self.several and len(waits):
            everywhere = self._calls_of_fed(thread >> 24).of(waits.start, waits.end)
            handed = everywhere > calls.covered(waits.start, waits.end)
            handed &= self._flag("os_calls", names.FOR_A_THREAD, waits.row)
        return [
            Layer("silence", "os_call", self.named("os_calls", thread, names.TERMINAL)),
            Layer("silence", "os_call", waits.subset(handed)),
            Layer("data", "os_call", waits.subset(~handed)),
        ]

    # --- work ---

    def _without_launch(self, track: Track, thread: int) -> Track:
        """The events in which their thread neither launched nor waited for the GPU."""
        busy = track.inside(self.launches(thread)) + track.inside(self.blocking(thread).start)
        return track.subset(busy == 0)

    def _work(self, thread: int) -> list[Layer]:
        """Sleeps, and operators of some length and ranges without a launch."""
        ranges, ops = self.events("ranges", thread), self.events("ops", thread)
        operator = self._flag("ranges", OPERATOR_RANGE, ranges.row)
        dispatch = operator & (ranges.end - ranges.start < _HEAVY_NS)
        heavy = ops.end - ops.start >= _HEAVY_NS
        return [
            Layer("work", "os_call", self.sleeps(thread)),
            Layer("work", "op", self._without_launch(ops.subset(heavy), thread)),
            Layer("work", "range", self._without_launch(ranges.subset(~dispatch), thread)),
        ]

    def _named_otherwise(self, thread: int) -> list[Layer]:
        """Operators and ranges in which data is loaded, and host calls that exchange messages."""
        return [
            Layer("data", "op", self.named("ops", thread, self._data)),
            Layer("data", "range", self.named("ranges", thread, self._data)),
            Layer("messages", "os_call", self.named("os_calls", thread, names.MESSAGES)),
            Layer("messages", "range", self.named("ranges", thread, names.MESSAGES)),
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
        at = np.flatnonzero(long)
        silences = Track(begun[at], ended[at], at)
        if not len(at):
            return silences
        covered = self.dispatch(thread).covered(silences.start, silences.end)
        return silences.subset(2 * covered < silences.end - silences.start)

    @kept
    def _end(self) -> int:
        """When the last event ended."""
        tables = (*GPU_TABLES, "calls", "ranges", "ops", "os_calls")
        return max(int(self._times(table)[1].max(initial=0)) for table in tables)

    @kept
    def samples(self, thread: int) -> Track:
        """Named samples of the thread outside CUDA calls, in which a thread may run while it waits for the GPU."""
        samples = self.events("samples", thread)
        if not len(samples):
            return samples
        samples = samples.subset(self.calls(thread).open_at(samples.start) < 0)
        name = self.trace.table("samples", ["name"])["name"].iloc[samples.row]
        return samples.subset((name != "").to_numpy())

    def _enclosing(self, thread: int, silences: Track) -> list[Layer]:
        """Explanations of silences: samples, ranges and operators around them, a loader's threads at work."""
        if not len(silences):
            return []
        layers = []
        tracks = {"range": self.events("ranges", thread), "op": self.events("ops", thread)}
        for kind, track in {"sample": self.samples(thread), **tracks}.items():
            over = silences.covered(track.start, track.end) > 0
            layers.append(Layer("enclosed", kind, track.subset(over)))
        loader = self._loader(thread >> 24)
        if len(loader):
            start, end = common((silences.start, silences.end), (loader.start, loader.end))
            layers.append(Layer("data", "range", Track(start, end, loader.row[loader.open_at(start)])))
        return layers

    @kept
    def _loader(self, process: int) -> Track:
        """Ranges of libraries that load data on separate threads."""
        ranges = self.trace.table("ranges", ["name", "domain", "process"])
        loads = matching(ranges["name"], LOADER_RANGE) | matching(ranges["domain"], LOADER_RANGE)
        return self._track("ranges", np.flatnonzero(loads & (ranges["process"] == process).to_numpy()))

    # --- the profiler, what happens once, and pages ---

    def _overheads(self, track: Track) -> tuple[Track, Track]:
        """Overhead records of the profiler, and those about code that the driver loads."""
        loads = self._flag("overhead", names.LOADS, track.row)
        full = self._flag("overhead", names.FULL, track.row)
        return track.subset(~loads & ~full), track.subset(loads)

    @kept
    def _overhead(self, first: int, last: int) -> tuple[Track, Track]:
        """:meth:`_overheads` of some threads, with the records that name neither a thread nor a process."""
        rows = np.union1d(self._rows_of("overhead", -1, -1), self._rows_of("overhead", first, last))
        return self._overheads(self._track("overhead", rows))

    def _profiler(self, thread: int, process: int) -> list[Layer]:
        """The profiler's work on this thread, and that on others of the process while this one's devices were idle."""
        everywhere, _ = self._overhead(process << 24, (process << 24) + 0xFFFFFF)
        if thread == -1:
            return [Layer("profiler", "overhead", everywhere)]
        here, _ = self._overhead(thread, thread)
        layers = [Layer("profiler", "overhead", here)]
        if len(everywhere) > len(here):
            busy = self._busy(self._fed().get(thread, frozenset()))
            start, end = outside(everywhere, Track(busy.start, busy.end, busy.start))
            row = everywhere.row[everywhere.open_at(start)]
            layers.insert(0, Layer("profiler", "overhead", Track(start, end, row)))
        return layers

    @kept
    def _settled(self) -> int:
        """When the program is settled: from then on a compiler recompiles."""
        begun = steps.find(self.trace)["start_ns"]
        return int(begun.iloc[_SETTLED]) if len(begun) > _SETTLED else _NEVER

    def _once(self, thread: int) -> list[Layer]:
        """Compilers, before and after the program is settled; captures, communicators, first calls, code that loads."""
        layers = []
        for kind, table, expression in (
            ("op", "ops", names.COMPILES),
            ("range", "ranges", names.COMPILES),
            ("call", "calls", names.BUILDS),
        ):
            track = self.named(table, thread, expression)
            early = track.start < self._settled()
            layers += [Layer("once", kind, track.subset(early)), Layer("compile", kind, track.subset(~early))]
        _, loads = self._overhead(thread, thread)
        return [
            *layers,
            Layer("once", "op", self.named("ops", thread, names.SETS_UP)),
            Layer("once", "range", self.named("ranges", thread, names.SETS_UP)),
            Layer("once", "call", self.named("calls", thread, names.SETS_UP)),
            Layer("once", "call", self._captures(thread)),
            Layer("once", "call", self._first_calls(thread)),
            Layer("once", "overhead", loads),
        ]

    def _captures(self, thread: int) -> Track:
        """From each begin of a graph's capture to its end; with the row of the begin."""
        begin = self.named("calls", thread, names.BEGIN_CAPTURE)
        end = self.named("calls", thread, names.END_CAPTURE)
        at = np.searchsorted(end.start, begin.start)
        ended = at < len(end)
        return Track(begin.start[ended], end.end[at[ended]], begin.row[ended])

    def _first_calls(self, thread: int) -> Track:
        """Calls that set something up while the device was idle: with a busy one they may wait, as for a full queue."""
        calls = self.calls(thread)
        first = calls.subset(self._first()[calls.row])
        if not len(first):
            return first
        busy = self._busy(self._fed().get(thread, frozenset()))
        idle_ns = first.end - first.start - busy.of(first.start, first.end)
        return first.subset(idle_ns >= _ONCE_NS)

    @kept
    def _first(self) -> Bool:
        """Per call: whether it is long and the first of its name in its process, or long beside others of its name."""
        calls = self.trace.table("calls", ["thread", "duration_ns", "name"])
        length = calls["duration_ns"].to_numpy()
        long = self._flag("calls", names.FIRST_TIMES) & (length >= _ONCE_NS)
        if not long.any():
            return np.asarray(long)
        process, code = calls["thread"].to_numpy() >> 24, calls["name"].cat.codes.to_numpy()
        new = ~pd.DataFrame({"process": process, "name": code}).duplicated().to_numpy()
        # A call that launches a new kernel may load its code: leave it out of the ordinary ones.
        known = ~self._loads_kernel()
        usual = pd.Series(length[known]).groupby(code[known]).quantile(_USUAL, interpolation="lower")
        ordinary = usual.reindex(code).fillna(0).to_numpy()
        return np.asarray(long & (new | (length >= _TIMES * ordinary)))

    def _loads_kernel(self) -> Bool:
        """Per call: whether its process launches a kernel of some name for the first time, whose code may load."""
        kernels = self.trace.table("kernels", ["process", "correlation", "name"])
        first = kernels.drop_duplicates(["process", "name"])
        row = launch_of(self.trace, first["process"], first["correlation"])
        flag = np.zeros(self.trace.size("calls"), bool)
        flag[row[row >= 0]] = True
        return flag

    @kept
    def _faults(self, process: int) -> Track:
        """Runs of pages of managed memory that moved one after another."""
        memops = self.trace.table("memops", ["start_ns", "end_ns", "process", "kind"])
        rows = np.flatnonzero(matching(memops["kind"], names.UNIFIED) & (memops["process"] == process).to_numpy())
        pages = self._track("memops", rows)
        reach = np.maximum.accumulate(pages.end)
        first = np.ones(len(pages), bool)
        first[1:] = pages.start[1:] > reach[:-1] + _PAGES_NS
        at = np.flatnonzero(first)
        last = np.append(at[1:], len(pages)) - 1
        return Track(pages.start[at], reach[last[: len(at)]], pages.row[at])

    # --- the devices ---

    @kept
    def _calls_of_fed(self, process: int) -> Coverage:
        """When any thread of a process that gave a device work was in a call."""
        calls = self._of_process("calls", process)
        thread = self.trace.table("calls", ["thread"])["thread"].to_numpy()[calls.row]
        fed = pd.unique(thread[self._flag("calls", LAUNCHES, calls.row)])
        return calls.subset(np.isin(thread, fed)).coverage

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
        """Label each moment of a thread's time; of an unknown thread (-1) only pages and the profiler are known."""
        faults = Layer("faults", "copy", self._faults(process))
        if thread == -1:
            always = Track(np.array([0]), np.array([self._end()]), np.array([-1]))
            return paint([Layer("silence", "none", always), faults, *self._profiler(thread, process)])
        silences = self._silences(thread)
        named = [*self._waits(thread), *self._work(thread), *self._named_otherwise(thread)]
        calls = self.calls(thread)
        inside = together(*(layer.track for layer in named)).covered(calls.start, calls.end) > 0
        return paint(
            [
                Layer("silence", "none", silences),
                *self._enclosing(thread, silences),
                *named,
                Layer("dispatch", "none", calls.subset(inside)),
                *self._calls_of_label(thread),
                faults,
                *self._once(thread),
                *self._profiler(thread, process),
            ]
        )

    # --- unions, for the replay ---

    def when(self, thread: int, labels: Iterable[str], kinds: Iterable[str] | None = None) -> Union:
        """When the thread's time had one of some labels, by events of some kinds."""
        painted = self.paint(thread, thread >> 24)
        if kinds is None:
            return painted.union(*labels)
        return painted.union(*labels, kinds=tuple(kinds))

    def input_waits(self, thread: int) -> Union:
        """When the thread waited for data, outside its CUDA calls."""
        return self.when(thread, ["data"])

    def thread_waits(self, thread: int) -> Union:
        """When it may have waited for another thread to bring them."""
        waits = self.named("os_calls", thread, names.FOR_A_THREAD)
        start, end = self.when(thread, ["data"], ["range", "op"])
        return outside(waits, Track(start, end, start))

    def own_work(self, thread: int) -> Union:
        """Work that is not a CUDA call."""
        return self.when(thread, ["work"], ["range", "op", "os_call"])

    def once(self, thread: int) -> Union:
        """What happened once."""
        return self.when(thread, ["once"])

    def compiling(self, thread: int) -> Union:
        """What was compiled again."""
        return self.when(thread, ["compile"])

    def messages(self, thread: int) -> Union:
        """Host calls that exchange messages."""
        return self.when(thread, ["messages"])

    def profiler(self, thread: int) -> Union:
        """The profiler's work, on whatever thread."""
        return self.when(thread, ["profiler"])

    def dispatch_free(self, thread: int) -> Union:
        """All that the thread did beside dispatching."""
        return self.when(thread, [label for label in LABELS if label != "profiler"])
