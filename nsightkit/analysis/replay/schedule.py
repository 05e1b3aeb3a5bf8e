"""A trace as a schedule: what each part takes alone, and what it waits for."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.ranks.alignment import Meetings
from nsightkit.analysis.replay.crowding import Crowding
from nsightkit.analysis.replay.layout import Layout, Slots
from nsightkit.analysis.replay.model import MOST_CUTS, NEVER, Bool, Change, Int, Played, kinds_of
from nsightkit.analysis.replay.play import Play
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps.threads import BLOCKING, Threads
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["Schedule"]


_OF_DEVICE = re.compile(r"(Device|Ctx|Context|Thread)Synchronize|Malloc|Free|MemAlloc")
_OF_EVENT = re.compile(r"EventSynchronize")
_WAIT_EVENT, _RECORD_EVENT = re.compile(r"StreamWaitEvent"), re.compile(r"EventRecord")

#: Latencies where a trace has no example of its own, ns: typical of CUDA devices.
_START_NS, _NEXT_NS, _RETURN_NS, _CALL_NS = 3_000, 1_000, 6_000, 4_000
#: What has begun this much later than launch and stream explain was kept waiting ...
_LATE_NS = 3_000
#: ... by what ended at most this long before.
_AFTER_NS = 25_000
#: A launch into a full queue: so many operations wait already, and the call takes so many times its median.
_DEEP, _SLOW_CALL = 500, 10
#: A thread that waits for another is silent for this many times the usual time between two of its calls.
_PAUSE = 3
#: Threads that are at work in turns, this often, hand over to each other.
_TURNS = 3
#: Threads may have woken another about as often if their counts differ by less than this factor.
_ABOUT = 0.8
#: Pauses around what was handed over are longer than those in it, on average by this factor.
_LONGER = 1.5
#: Pauses whose lengths differ by less than this factor are alike.
_ALIKE = 1.15
#: Who is woken goes on at most this long after what woke it.
_WAKE_NS = 500_000
#: OS calls that wait for another thread or process; and the ranges in which PyTorch waits for its loader's workers.
_FOR_OTHERS = re.compile(r"poll|select|futex|sem_|pthread_cond|epoll|recv|accept|sigwait|^wait")
_WORKERS = re.compile(r"_MultiProcessing")
#: Who prepares batches sets the pace if the waits for them take at least one part in so many of the time.
_LIMITS = 10
#: What waited in its stream for longer than this, and for nothing that was recorded, was held up by other work.
_HELD_NS = 20_000
#: Operations of one stream run one after another; where they overlap for more than this share, streams are not known.
_OVERLAP = 0.02
#: Of all operations, those that may be inferred to wait for another stream: beyond that, their streams are in doubt.
_GUESSED = 1 / 3
#: Calls that end before they begin, as a share of all, above which their times are not to be trusted.
_REVERSED = 0.01
#: Work whose launch was not recorded, as a share of all GPU work, above which no schedule can be made.
_UNLINKED = 0.1
#: Of so many samples a median tells as much as that of all.
_ENOUGH = 200_000
#: How kernels slow each other down depends on when they run, and that on how they do: so often it is played anew.
_ROUNDS = 2
#: What is looked at of everything; one pass a table.
_GPU_COLUMNS = ("start_ns", "end_ns", "device", "process", "stream", "correlation")
_COLUMNS = {
    "kernels": (*_GPU_COLUMNS, "name", "collective"),
    "memops": (*_GPU_COLUMNS, "kind", "src_kind", "dst_kind"),
    "graphs": _GPU_COLUMNS,
    "calls": ("start_ns", "end_ns", "thread", "correlation", "name"),
}


@dataclasses.dataclass
class _Calls:
    """Calls of one thread that launch or block, ordered by start."""

    start: Int
    end: Int

    def fill(self, start: Int, end: Int, pause: float) -> Bool:
        """Whether all calls between two pauses lie in each window, and take up half of it.

        A thread that works in short bursts of its own pauses inside the window as it does around it.
        """
        low, high = np.searchsorted(self.start, start), np.searchsorted(self.start, end) - 1
        first, last = np.minimum(low, len(self.start) - 1), np.maximum(high, 0)
        before = np.where(low > 0, self.end[np.maximum(low - 1, 0)], NEVER)
        after = np.where(high + 1 < len(self.start), self.start[np.minimum(high + 1, len(self.start) - 1)], -NEVER)
        gaps = np.append(0, self.start[1:] - self.end[:-1])
        silent, times = (np.cumsum(np.where(gaps > pause, each, 0)) for each in (gaps, 1))
        inside, pauses = silent[last] - silent[first], times[last] - times[first]
        around = np.minimum(self.start[first] - before, after - self.end[last])
        alone = (around > pause) & (around > _LONGER * inside / np.maximum(pauses, 1))
        active = self.end[last] - self.start[first] - inside
        return np.asarray((high >= low) & alone & (2 * active >= end - start))

    def alternate(self, start: Int, end: Int) -> Bool:
        """Whether each window holds calls, if it is windows that hold all calls: two threads that take turns."""
        low, high = np.searchsorted(self.start, start), np.searchsorted(self.start, end)
        turns = high > low
        outside = low[1:] > high[:-1]
        return np.asarray(turns & (not outside.any()) & (int(turns.sum()) >= _TURNS))


class Schedule:
    """A trace as a schedule.

    Parameters
    ----------
    trace : Trace
        Selected or whole; what is selected is played.

    Attributes
    ----------
    operations : DataFrame
        What is scheduled, by stream and time: ``start_ns, end_ns, stream, device, table, row, launch``. A graph's
        replay, or whatever else one call launched together, is one operation.
    inferred : int
        Waits that the recording does not name.
    unplayable : str or None
        Why no schedule can be made.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        trace.prefetch(_COLUMNS)
        #: what each thread did
        self.facts = Threads(trace)
        self.inferred = 0
        self.unplayable: str | None = None
        self._operations()
        if self.unplayable is None:
            self._calls()
            self._beginning()
            self._threads()
            self._arrivals()
            self._latencies()
            self._waits()
            self._meetings()
            self._cuts()

    # -- what there is

    def _operations(self) -> None:
        trace = self.trace
        ops = intervals.gpu_intervals(trace, "process", "stream", "correlation")
        n, device = len(ops), ops["device"].to_numpy()
        code = _codes(ops["process"].to_numpy(), device, ops["stream"].to_numpy())
        at = np.zeros(int(code.max(initial=-1)) + 1, np.int64)
        at[code] = np.arange(n)
        #: each stream, and its process
        self.streams = ops[["process", "device", "stream"]].iloc[at]
        self.process_of = self.streams["process"].to_numpy()
        if not n:
            self.unplayable = "there is no GPU work"
        columns: dict[str, npt.NDArray[Any]] = {
            "start_ns": ops["start_ns"].to_numpy(),
            "end_ns": ops["end_ns"].to_numpy(),
            "stream": code.astype(np.int32),
            "device": device,
            "table": ops["table"].to_numpy(),
            "row": ops["row"].to_numpy(),
            "launch": intervals.launch_of(trace, ops["process"], ops["correlation"]).astype(np.int32),
            "device_before_ns": self._device_before(ops),
        }
        del ops
        if n and int(code.max()):  # several streams
            order = np.argsort(code, kind="stable")  # by device and start already
            columns = {name: column[order] for name, column in columns.items()}
        self.parts = pd.DataFrame({name: columns[name] for name in ("table", "row")}, copy=False)
        lasting = columns["end_ns"] - columns["start_ns"]
        #: position in the schedule of each operation of the trace, in the order in which they were met
        self.part_of = self._join(columns)
        #: how long each of them lasted
        self.part_ns = None if self.part_of is None else lasting
        #: when all that began on the device before each one had ended: with that in the past, nothing kept it
        self._device_before_ns = columns.pop("device_before_ns")
        self.operations = pd.DataFrame(columns, copy=False)
        self.start, self.end = columns["start_ns"], columns["end_ns"]
        self.stream, self.launch = columns["stream"], columns["launch"]
        self.device, self.table = columns["device"], columns["table"]
        self.first = np.ones(len(self.start), bool)
        self.first[1:] = self.stream[1:] != self.stream[:-1]
        if n:
            # What stands first in its stream may have been launched before the recording began; later on it is lost.
            lost = (self.launch < 0) & (
                np.maximum.accumulate(np.where(self.launch >= 0, self.stream, -1)) == self.stream
            )
            missing = int((self.end - self.start)[lost].sum())
            if missing > _UNLINKED * int(lasting.sum()) or not (self.launch >= 0).any():
                self.unplayable = "the calls that launched the GPU's work were not recorded"
        overlap = self.end[:-1] - self.start[1:]
        if n and int(overlap[(overlap > 0) & ~self.first[1:]].sum()) > _OVERLAP * int((self.end - self.start).sum()):
            self.unplayable = self.unplayable or "operations of one stream overlap: what ran after what is not known"

    def _join(self, frame: dict[str, npt.NDArray[Any]]) -> Int | None:
        """Make what one call launched together one operation, from the first start to the last end."""
        launch = frame["launch"]
        known = launch >= 0
        several = known & (np.bincount(launch[known], minlength=1)[np.maximum(launch, 0)] > 1)
        if not several.any():
            return None
        mine = np.flatnonzero(several)
        by_start = mine[np.lexsort((frame["start_ns"][mine], launch[mine]))]
        heads = np.flatnonzero(np.append(True, launch[by_start][1:] != launch[by_start][:-1]))
        head = by_start[heads]
        frame["end_ns"] = frame["end_ns"].copy()  # the trace's own
        frame["end_ns"][head] = np.maximum.reduceat(frame["end_ns"][by_start], heads)
        keep = ~several
        keep[head] = True
        place = np.cumsum(keep) - 1
        part_of = place.copy()
        part_of[by_start] = np.repeat(place[head], np.diff(np.append(heads, len(by_start))))
        frame.update({name: column[keep] for name, column in frame.items()})
        return part_of

    def _calls(self) -> None:
        whole = self.trace.whole
        calls = whole.table("calls", ["start_ns", "end_ns", "thread"])
        self.call_start, self.call_end, self.call_thread = (calls[c].to_numpy() for c in calls)
        if int((self.call_end < self.call_start).sum()) > _REVERSED * len(calls):
            self.unplayable = "calls end before they begin"
        self.names = whole.table("calls", ["name"])["name"]
        blocks = matching(self.names, BLOCKING)
        kept = self.trace.mask("calls")
        #: which calls launched what is scheduled
        self.launching = np.zeros(len(calls), bool)
        self.launching[self.launch[self.launch >= 0]] = True
        copies = np.flatnonzero((self.table == GPU_TABLES.index("memops")) & (self.launch >= 0))
        columns = self.trace.table("memops", ["kind", "src_kind", "dst_kind"])
        table = columns.iloc[self.operations["row"].to_numpy()[copies]]
        pageable = (table["src_kind"] == "pageable").to_numpy() | (table["dst_kind"] == "pageable").to_numpy()
        row = self.launch[copies]
        #: copies whose call returns only when they are done, as that of pageable memory does
        self.own_copy, self.staged = np.zeros((2, len(self.start)), bool)
        self.own_copy[copies] = (self.end[copies] <= self.call_end[row] + 1_000) & (pageable | blocks[row])
        self.staged[copies] = pageable & (table["kind"] != "DtoH").to_numpy()
        blocks[self.launch[self.own_copy]] = True
        if kept is not None:
            blocks &= kept | self.launching
        self.steps = steps.windows(self.trace)
        #: the thread and the process of the steps
        self.main, self.process = (
            int(self.steps[c].iloc[0]) if len(self.steps) else int(NEVER) for c in ("thread", "process")
        )
        self.threads = np.union1d(kinds_of(self.call_thread[self.launching]), self.steps["thread"])
        rows = np.flatnonzero(blocks & np.isin(self.call_thread, self.threads))
        self.blocking = rows[np.argsort(self.call_start[rows], kind="stable")]

    def _beginning(self) -> None:
        """What a selection leaves out happened when it did; what was selected cannot begin before that is over."""
        #: what a change takes away it takes from here on
        self.begin_ns = int(self.steps["start_ns"].iloc[0]) if len(self.steps) else int(NEVER)
        #: what no operation can come before: of each stream, and of one that a change makes
        self.released_ns = np.full(int(self.stream.max()) + 1, NEVER, np.int64)
        self.earliest_ns = int(NEVER)
        if self.trace is self.trace.whole:
            return
        self.earliest_ns = int(self.start.min())
        if not len(self.steps):
            self.begin_ns = int(self.call_start[self.launch[self.launch >= 0]].min())
        place, first = [*self.streams], np.flatnonzero(self.first)
        every = pd.concat([self.trace.whole.table(t, [*place, "start_ns", "end_ns"]) for t in GPU_TABLES])
        both = self.streams.assign(at=first, begun=self.start[first]).merge(every, on=place)
        before = both[both["start_ns"] < both["begun"]].groupby("at")["end_ns"].max()
        self.released_ns[self.stream[before.index]] = np.minimum(before, self.start[before.index])

    # -- threads that wait for each other

    def _threads(self) -> None:
        """Silences of a thread that another one ended: it handed work over, or was done with what was handed to it."""
        facts = self.facts
        threads = self.threads.tolist()
        #: per thread, time in which it only waited for room in the queue
        self.passive: dict[int, list[tuple[Int, Int]]] = {t: [] for t in threads}
        kept = self.launching.copy()
        kept[self.blocking] = True
        rows = np.flatnonzero(kept)
        rows = rows[np.argsort(self.call_start[rows], kind="stable")]
        calls = {
            t: _Calls(self.call_start[mine], self.call_end[mine])
            for t in threads
            if len(mine := rows[self.call_thread[rows] == t])
        }
        if last := calls.get(self.main):
            # A thread that waits for others in the end has no call after that, but its last step ends.
            over = int(self.steps["cpu_end_ns"].iloc[-1])
            last.start, last.end = np.append(last.start, over), np.append(last.end, over)
        found = [np.empty((4, 0), np.int64)]
        paces = [float(np.median(np.diff(c.start))) for c in calls.values() if len(c.start) > 1]
        pause = max(_PAUSE * min(paces, default=0.0), _HELD_NS)
        waits = {t: intervals.Coverage(*facts.input_waits(t)) for t in calls}
        for one, mine in calls.items():
            others = {t: c for t, c in calls.items() if t != one and t >> 24 == one >> 24}
            if not others:
                continue
            # What is named for something else is not a silence; a range in which another thread is at work may be.
            begun, done = facts.own_work(one)
            handed = np.logical_or.reduce([theirs.fill(begun, done, pause) for theirs in others.values()])
            handed &= 2 * facts.sleeps(one).covered(begun, done) < done - begun
            acted, rested = intervals.union(
                (mine.start, np.maximum(mine.end, mine.start + 1)),
                (begun[~handed], done[~handed]),
                # A worker that waits to be handed work is not waiting for data.
                intervals.common((waits[one].start, waits[one].end), facts.thread_waits(one), outside=True),
                facts.one_offs(one),
                facts.profiler_time(one),
            )
            start, end = np.append(NEVER, rested[:-1]), acted
            long = end - start > pause
            start, end = start[long], end[long]
            latest = {other: self._latest(other, end) for other in others}
            # Before its first call a thread has nothing to do: whoever was at work before that began its work.
            begins = start == NEVER
            acts = {other: (at > start) & (begins | (end - at <= _WAKE_NS)) for other, at in latest.items()}
            # It pauses for about as long where nobody wakes it: such pauses are its own.
            fills = {
                other: theirs.fill(start, end, pause) | theirs.alternate(start, end) for other, theirs in others.items()
            }
            woken = np.logical_or.reduce([*acts.values(), *fills.values()])
            alone = np.sort((end - start)[(start > NEVER) & ~woken])
            own = np.searchsorted(alone, (end - start) / _ALIKE) < np.searchsorted(alone, (end - start) * _ALIKE)
            # A thread that is silent while another waits for data, until that has it, waits for the same.
            same = {other: _end_with(waits[other], start, end) for other in others}
            hits = {other: (fills[other] | acts[other]) & (~own | same[other]) for other in others}
            # Where several may have, the one that may have the most often; of about as many, that of the steps.
            often = {other: int(hits[other].sum() + fills[other].sum()) for other in others}
            most = _ABOUT * max(often.values())
            by = np.full(len(end), -1, np.int64)
            for other in sorted(
                others, key=lambda t: (often[t] >= most, often[t] >= most and t == self.main, often[t])
            ):
                by[hits[other]] = other
            kept = by >= 0
            found.append(np.stack([np.full(int(kept.sum()), one), start[kept], end[kept], by[kept]]))
        self.pause_thread, self.pause_start, self.pause_end, self.pause_by = np.concatenate(found, axis=1)

    def _latest(self, thread: int, at: Int) -> Int:
        """When anything that was recorded of a thread last began or ended before each time."""
        latest = np.full(len(at), NEVER, np.int64)
        every = ("calls", self.facts.calls(thread)), *self.facts.activity(thread), ("os", self.facts.os_calls(thread))
        for name, track in every:
            for edges in (track.start, np.sort(track.end)) if name != "op" else (track.start,):
                latest = np.maximum(latest, np.append(NEVER, edges)[np.searchsorted(edges, at)])
        return latest

    def _arrivals(self) -> None:
        """Waits for data that somebody else prepares at a pace of its own: a batch is there when it is there.

        An OS call that waits for another process, or the name of PyTorch's loader with workers, says so. Else a wait is
        the thread's own time: it begins to load when it asks.
        """
        for_others, workers = self.when(_FOR_OTHERS.search, "os_calls"), self.when(_WORKERS.search, "ranges", "ops")
        found = [np.empty((3, 0), np.int64)]
        for thread in self.threads.tolist():
            start, end = self.facts.input_waits(thread)
            if not len(start):
                continue
            waits = intervals.Coverage(*intervals.union(for_others[thread], workers[thread]))
            long = (2 * waits.of(start, end) >= end - start) & (end - start >= _HELD_NS) & (start >= self.begin_ns)
            mine = self.pause_thread == thread
            handed = intervals.Coverage(self.pause_start[mine], self.pause_end[mine])
            long &= 2 * handed.of(start, end) < end - start
            # Where waits are few and short, batches lie ready: nothing says how soon they could be.
            if _LIMITS * (end[long] - start[long]).sum() < end[-1] - start[0]:
                continue
            found.append(np.stack([np.full(int(long.sum()), thread), start[long], end[long]]))
        self.arrival_thread, self.arrival_start, self.arrival_end = np.concatenate(found, axis=1)

    def when(self, chosen: Callable[[str], Any], *tables: str) -> dict[int, tuple[Int, Int]]:
        """When events whose name is chosen were open on each of the threads.

        Parameters
        ----------
        chosen : callable
            Whether a name is meant.
        *tables : str

        Returns
        -------
        dict of int to tuple of ndarray of int64
            Disjoint intervals a thread.
        """
        found = []
        for table in tables:
            rows = self.trace.whole.table(table, ["start_ns", "end_ns", "thread", "name"])
            names = rows.pop("name").cat
            flags = [bool(chosen(str(name))) for name in names.categories]
            found.append(rows[np.array([*flags, False])[names.codes.to_numpy()]])
        rows = pd.concat(found)
        start, end, thread = (rows[column].to_numpy() for column in rows)
        return {one: intervals.merge(start[thread == one], end[thread == one]) for one in self.threads.tolist()}

    def dispatch(self, busy: Callable[[int], tuple[Int, Int]], launch_ns: int) -> dict[int, tuple[Int, Int]]:
        """What dispatch between consecutive launches takes beyond a given time.

        Parameters
        ----------
        busy : callable
            Gives, for a thread, the intervals that are not dispatch.
        launch_ns : int
            What stays from the start of one launch to that of the next.

        Returns
        -------
        dict of int to tuple of ndarray of int64
            Disjoint intervals a thread.
        """
        found = {}
        calls = np.append(self.cut_rows, self.launch[self.staged & (self.launch >= 0)])
        for thread in self.threads.tolist():
            start = self.call_start[self.launching & (self.call_thread == thread)]
            if len(start) < 2:
                continue
            start.sort(kind="stable")  # few runs, as a rule
            mine, pauses = calls[self.call_thread[calls] == thread], self.pause_thread == thread
            parts = [busy(thread), *self.passive[thread], (self.call_start[mine], self.call_end[mine])]
            parts.append((self.pause_start[pauses], self.pause_end[pauses]))
            other = intervals.Coverage(*intervals.union(*parts))
            apart = np.diff(start)
            usual_ns = _SLOW_CALL * np.median(apart)
            only = apart > launch_ns
            for part in intervals.chunks(len(apart)):
                only[part] &= np.diff(other.before(start[part.start : part.stop + 1])) <= launch_ns
            # Launches that follow each other as launches do, or in operators, have only dispatch between them.
            far = np.flatnonzero(only & (apart > usual_ns))
            only[far] = 2 * self.facts.dispatch(thread).covered(start[far], start[far + 1]) >= apart[far]
            begun, done = start[:-1][only], start[1:][only]
            begun += launch_ns
            found[thread] = begun, done
        return found

    # -- constants

    def _latencies(self) -> None:
        linked = self.launch >= 0
        meanwhile, idle, queued = np.empty((3, len(linked)), bool)
        #: ready = launch call's start or end + latency: whichever was the steadier
        self.ready = np.empty(len(linked), np.int64)
        for mine in intervals.chunks(len(linked)):
            begun, done = self._called(mine)
            meanwhile[mine] = self.staged[mine] & (self.start[mine] < done)  # staged piece by piece
            idle[mine] = (self._device_before_ns[mine] < begun) & ~meanwhile[mine]
            queued[mine] = done + 10_000 < self._before(mine)
            self.ready[mine] = np.where(self.own_copy[mine], begun + _CALL_NS, done) + _START_NS
        del self._device_before_ns
        idle &= linked
        queued &= linked & ~self.first
        self.ready[~linked] = NEVER
        kind = 8 * self.table + 4 * meanwhile + 2 * self.staged + self.own_copy
        self.gap = np.full(len(self.start), _NEXT_NS, np.int32)
        for one in kinds_of(kind).tolist():
            mine = kind == one
            samples = _some(mine & idle)
            if len(samples):
                # A call that returns after its copy says nothing by its end, one that stages it nothing by its start.
                both = [self.call_end, self.call_start]
                edges = both[1:] if one & 1 else both[:1] if one & 2 else both
                late = [self.start[samples] - edge[self.launch[samples]] for edge in edges]
                steady = int(np.argmin([_spread(each) for each in late]))
                edge, latency = edges[steady], int(np.median(late[steady]))
                for part in intervals.chunks(len(mine)):
                    at = edge[np.maximum(self.launch[part], 0)]
                    np.add(at, latency, out=self.ready[part], where=(mine & linked)[part])
            samples = _some(mine & queued)
            if len(samples):
                between = self.start[samples] - self._before(samples)
                between = between[between <= _HELD_NS]
                self.gap[mine] = int(np.median(between)) if len(between) else _NEXT_NS
        # Of what runs behind a call that takes its time, the call's end says more.
        apart = self.launching.copy()
        apart[self.launch[self.own_copy]] = False
        launches = np.flatnonzero(apart)
        took = self.call_end - self.call_start
        lasting = took[launches]
        self.call_ns = int(np.median(lasting)) if len(launches) else _CALL_NS
        long = took > _SLOW_CALL * self.call_ns
        slow = np.flatnonzero(linked & ~self.own_copy & long[self.launch])
        self.ready[slow] = np.maximum(self.ready[slow], np.minimum(self._called(slow)[1], self.start[slow]))
        # The CPU stages pageable memory itself: until the copy begins or, where that had to wait, at the copy's pace.
        piecewise = np.flatnonzero(meanwhile)
        start, end = self.start[piecewise], self.end[piecewise]
        behind = self._before(piecewise) > start - 2 * _START_NS
        paced = np.minimum(self._called(piecewise)[0] + self.call_ns + end - start, start)
        self.ready[piecewise] = np.where(behind, paced, start)
        self._throttled(launches, lasting)
        if not linked.all():
            # Launched before the recording began: it is where it is in its stream.
            self.ready[~linked] = self.start.min()
            lost = ~linked & self.first
            self.ready[lost] = self.start[lost]

    def _called(self, at: Int | slice) -> tuple[Int, Int]:
        """Start and end of the calls that launched some operations, of any call where that was not recorded."""
        row = np.maximum(self.launch[at], 0)
        return self.call_start[row], self.call_end[row]

    def _before(self, at: Int | slice) -> Int:
        """When the operation before each of some in its stream had ended."""
        at = np.arange(*at.indices(len(self.end))) if isinstance(at, slice) else at
        return np.where(self.first[at], self.released_ns[self.stream[at]], self.end[at - 1])

    def _device_before(self, ops: pd.DataFrame) -> Int:
        """When all that began on its device before each operation, selected or not, had ended."""
        whole = self.trace is self.trace.whole
        every = ops if whole else intervals.gpu_intervals(self.trace.whole)  # by device and start
        device, start, end = (every[c].to_numpy() for c in ("device", "start_ns", "end_ns"))
        asked, begins = ops["device"].to_numpy(), ops["start_ns"].to_numpy()
        out = np.empty(len(ops), np.int64)
        for one in kinds_of(asked).tolist():
            on, mine = (slice(*np.searchsorted(column, [one, one + 1])) for column in (device, asked))
            reach = np.concatenate([[NEVER], np.maximum.accumulate(end[on])])
            out[mine] = reach[:-1] if whole else reach[np.searchsorted(start[on], begins[mine])]
        return out

    def _throttled(self, launches: Int, lasting: Int) -> None:
        """Launches that waited for room in the queue."""
        self.throttled = np.empty(0, np.int64)
        slow = launches[lasting > np.maximum(_SLOW_CALL * self.call_ns, 20_000)]
        if not len(slow):
            return
        begun = np.sort(self.call_start[self.launch[self.launch >= 0]])
        ended = np.sort(self.end)
        waiting = np.searchsorted(begun, self.call_start[slow]) - np.searchsorted(ended, self.call_start[slow])
        slow = slow[waiting >= _DEEP]
        for one in kinds_of(self.call_thread[slow]).tolist():
            mine = slow[self.call_thread[slow] == one]
            self.passive[one].append((self.call_start[mine] + self.call_ns, self.call_end[mine]))
        every = 1 + len(slow) // MOST_CUTS
        self.throttled = slow[np.argsort(self.call_start[slow], kind="stable")][::every]

    # -- who waits for what

    def _waits(self) -> None:
        """Pairs (operation, what it waits for on another stream)."""
        explained = self._before(slice(None)) + self.gap
        np.maximum(explained, self.ready, out=explained)
        linked = self.launch >= 0
        told, told_of = self._recorded_waits()
        until = explained.copy()
        np.maximum.at(until, told, self.end[told_of])
        late = np.flatnonzero((self.start > until + _LATE_NS) & (linked | ~self.first))
        none: Int = np.empty(0, np.int64)
        waits, on = none, none
        if len(late) and (self.stream != self.stream[0]).any():
            waits, on = self._just_ended(late, explained)
        self.inferred += len(waits)
        if len(np.unique(waits)) > _GUESSED * len(self.start):
            self.unplayable = "its operations seem to wait for other streams again and again, and nothing in it says so"
        pairs = np.unique(np.stack([np.append(waits, told), np.append(on, told_of)]), axis=1)
        self.waiting, self.awaited = pairs[0], pairs[1]
        # What did wait, and for how long after: of others the end was long past.
        after = self.start[self.waiting] - self.end[self.awaited]
        binding = after[(after <= _AFTER_NS) & (self.start[self.waiting] > explained[self.waiting] + _LATE_NS)]
        self.after_ns = int(np.median(binding)) if len(binding) else 1_500
        self._held(explained)

    def _just_ended(self, late: Int, explained: Int) -> tuple[Int, Int]:
        """What late operations waited for: what ended just before them, on their thread and device if anything did."""
        order = np.argsort(self.end, kind="stable")
        ends = self.end[order]
        waits, on = [late[:0]], [late[:0]]
        for same_device, same_thread in ((True, True), (True, False), (False, False)):
            left = late
            at = np.searchsorted(ends, self.start[left] + 500, side="right") - 1
            for _ in range(12):
                other = order[np.maximum(at, 0)]
                near = (at >= 0) & (self.start[left] - self.end[other] <= _AFTER_NS)
                near &= self.end[other] > explained[left] - _LATE_NS
                fits = (
                    near
                    & (self.stream[other] != self.stream[left])
                    & (self.process_of[self.stream[other]] == self.process_of[self.stream[left]])
                )
                # What is launched later is not waited for.
                mine, theirs = self.launch[left], self.launch[other]
                begun = np.where(theirs >= 0, self.call_start[theirs], NEVER)
                fits &= (begun <= self.call_start[mine]) | (mine < 0)
                if same_device:
                    fits &= self.device[other] == self.device[left]
                if same_thread:
                    fits &= (mine >= 0) & (theirs >= 0) & (self.call_thread[theirs] == self.call_thread[mine])
                waits.append(left[fits])
                on.append(other[fits])
                left, at = left[~fits & near], at[~fits & near] - 1
                if not len(left):
                    break
            late = np.setdiff1d(late, np.concatenate(waits))
        return np.concatenate(waits), np.concatenate(on)

    def _held(self, explained: Int) -> None:
        """What stays unexplained is work that the recording does not contain; it takes its time in any replay."""
        until = explained.copy()
        np.maximum.at(until, self.waiting, self.end[self.awaited] + self.after_ns)
        late = self.start - until
        late[self.first & (self.launch < 0)] = 0
        held = late > _HELD_NS
        # A stream that was busy before the recording began is free when its first operation starts.
        busy = np.flatnonzero(held & self.first)
        for first in busy.tolist():
            theirs = slice(*np.searchsorted(self.stream, [self.stream[first], self.stream[first] + 1]))
            self.ready[theirs] = np.maximum(self.ready[theirs], self.start[first])
        held[busy] = False
        #: time for which each operation was held up so
        self.held_ns = np.where(held, late, 0) if held.any() else np.broadcast_to(np.int64(0), late.shape)

    def _recorded_waits(self) -> tuple[Int, Int]:
        """What the program told streams to wait for, where that fits what happened.

        A call that makes a stream wait does not say for what: for the last work that the thread launched on
        another stream before it. The stream is that of the thread's next launch.
        """
        none = np.empty(0, np.int64), np.empty(0, np.int64)
        if not (self.stream != self.stream[:1]).any():
            return none
        # Where no such call was recorded, an event that one stream records before work goes to another tells as much.
        told = matching(self.names, _WAIT_EVENT)
        calls = np.flatnonzero(told if told.any() else matching(self.names, _RECORD_EVENT))
        kept = self.trace.mask("calls")
        if kept is not None:
            calls = calls[kept[calls]]
        linked = np.flatnonzero(self.launch >= 0)
        begun, thread = self.call_start[self.launch[linked]], self.call_thread[self.launch[linked]]
        waits, on = [none[0]], [none[0]]
        for one in kinds_of(self.call_thread[calls]).tolist():
            mine = calls[self.call_thread[calls] == one]
            own = np.flatnonzero(thread == one)
            own = own[np.argsort(begun[own], kind="stable")]
            stream = self.stream[linked[own]]
            # Of each launch, the last one before it on another stream.
            changed = np.append(False, stream[1:] != stream[:-1])
            last_other = np.maximum.accumulate(np.where(changed, np.arange(len(stream)) - 1, -1))
            at = np.searchsorted(begun[own], self.call_start[mine])
            at = at[(at < len(own)) & (at > 0)]
            other = np.where(stream[at - 1] == stream[at], last_other[at - 1], at - 1)
            at, other = linked[own[at[other >= 0]]], linked[own[other[other >= 0]]]
            fits = (self.end[other] <= self.start[at] + 500) & (
                self.process_of[self.stream[at]] == self.process_of[self.stream[other]]
            )
            waits.append(at[fits])
            on.append(other[fits])
        return np.concatenate(waits), np.concatenate(on)

    def _meetings(self) -> None:
        """Collectives of several devices: none of them does its work before the last device has arrived."""
        place = ["device", "start_ns"]
        several = len(kinds_of(self.device)) > 1
        empty = pd.DataFrame(columns=[*place, "end_ns", "until_ns", "collective"], dtype=np.int64)
        met = Meetings(self.trace).met if several else empty
        at = np.flatnonzero(np.isin(self.start, met["start_ns"]))
        mine = pd.DataFrame({"device": self.device[at], "start_ns": self.start[at], "at": at}).drop_duplicates(place)
        found = met.merge(mine, on=place)
        #: positions in the schedule, the collective's number, and of each the time from the last arrival on
        self.meeting, self.meeting_of = found["at"].to_numpy(), found["collective"].to_numpy(np.int64)
        self.transfer_ns = (found["end_ns"] - found["until_ns"]).to_numpy(np.int64)

    def _cuts(self) -> None:
        """Blocking calls with the operations that they wait for: the last of each stream launched before them."""
        rows, names = self.blocking, self.names
        start, end, process = self.call_start[rows], self.call_end[rows], self.call_thread[rows] >> 24
        of_device, of_event = matching(names, _OF_DEVICE)[rows], matching(names, _OF_EVENT)[rows]
        linked, last_of, none_yet = np.flatnonzero(self.launch >= 0), {}, {}
        for one in kinds_of(self.stream[linked]).tolist():
            mine = linked[slice(*np.searchsorted(self.stream[linked], [one, one + 1]))]
            # In the order of the stream; a launch by another thread may have begun a little earlier.
            at = np.searchsorted(np.maximum.accumulate(self.call_start[self.launch[mine]]), start, side="left")
            last_of[one], none_yet[one] = mine[at - 1], at == 0
        drained = np.full(len(rows), -1, np.int64)
        drained_ns = start.copy()
        sure = np.zeros(len(rows), bool)
        # What the thread launched itself, and that ended just before; else whatever did.
        for by_itself in (True, False):
            for s, last in last_of.items():
                ended = self.end[last]
                hit = ~none_yet[s] & (self.process_of[s] == process) & (ended > drained_ns) & (ended <= end + 1_000)
                if by_itself:
                    hit &= (self.call_thread[self.launch[last]] == self.call_thread[rows]) & (ended > end - _AFTER_NS)
                else:
                    hit &= ~sure
                drained[hit], drained_ns[hit] = last[hit], ended[hit]
            sure = drained >= 0
        # An event may lie before the end of its stream.
        events = np.flatnonzero(of_event & (drained < 0))
        if len(events):
            latest = self._ended_by(end[events])
            hit = (self.end[latest] > start[events]) & (self.process_of[self.stream[latest]] == process[events])
            drained[events[hit & (latest >= 0)]] = latest[hit & (latest >= 0)]
        own_copies = np.flatnonzero(self.own_copy)
        own = pd.Series(own_copies, self.launch[own_copies]).reindex(rows, fill_value=-1).to_numpy()
        drained = np.where(own >= 0, own, drained)
        waited = drained >= 0
        # What did not wait, and might in another schedule: for what was launched last.
        default, launched_ns = np.full(len(rows), -1), np.full(len(rows), NEVER)
        for s, last in last_of.items():
            begun = self.call_start[self.launch[last]]
            later = ~none_yet[s] & (begun > launched_ns)
            default[later], launched_ns[later] = last[later], begun[later]
        allocates = matching(names, re.compile(r"Malloc|Free|Alloc"))[rows]
        target = np.where(waited, drained, np.where(of_event | allocates, -1, default))
        returned = end - self.end[np.maximum(drained, 0)]
        # An allocation that returns long after the GPU was done took its time for something else.
        waited &= ~allocates | (returned <= _AFTER_NS)
        settled = waited & (own < 0) & ~allocates
        return_ns = int(np.median(returned[settled])) if settled.any() else _RETURN_NS
        cost = (end - start).astype(np.int64)
        quick = cost[~waited & ~allocates]
        quick_ns = int(min(np.median(quick), 20_000)) if len(quick) else _CALL_NS
        # After its copy a call may still have work of its own to do: to empty the staging buffer.
        tail = np.where(own >= 0, np.maximum(returned, 0), return_ns)
        cost = np.where(waited, np.minimum(quick_ns, cost), cost)
        # The CPU's part of a copy from pageable memory lies before it: staging.
        cost = np.where((own >= 0) & self.staged[own], self.ready[own] - start, cost)
        keep = waited | ((target >= 0) & ~allocates)
        whole_device = of_device & ~allocates
        device = self._device_of(rows)
        single = np.flatnonzero(keep & ~whole_device)
        cut_of, targets = [single], [target[single]]
        for s, last in last_of.items():
            theirs = ~none_yet[s] & (self.process_of[s] == process) & ((device == -1) | (device == self.device[last]))
            each = np.flatnonzero(keep & whole_device & theirs)
            cut_of.append(each)
            targets.append(last[each])
        by_call = np.argsort(np.concatenate(cut_of), kind="stable")
        self.cut_rows = rows[keep]
        self.inferred += int((waited & (own < 0))[keep].sum())
        # Launches into a full queue wait for an operation to end.
        full = self.throttled
        full_target = np.maximum(self._ended_by(self.call_end[full]), 0) if len(full) else full
        after = self.call_end[full] - self.end[full_target]
        room_ns = int(np.median(after)) if len(full) else 0
        # All cuts: blocking calls, such launches, pauses that another thread ends, batches that arrive.
        calls, pauses, batches = np.append(self.cut_rows, full), len(self.pause_by), len(self.arrival_end)
        self.cut_thread = np.concatenate([self.call_thread[calls], self.pause_thread, self.arrival_thread])
        self.cut_start = np.concatenate([self.call_start[calls], self.pause_start, self.arrival_start])
        self.cut_end = np.concatenate([self.call_end[calls], self.pause_end, self.arrival_end])
        #: what it takes of its own, what it takes after what it waits for, and the copy that it returns with, or -1
        others = np.repeat([self.call_ns, 0], [len(full), pauses + batches])
        self.cut_cost = np.append(cost[keep], others)
        self.cut_tail = np.append(tail[keep], np.repeat([room_ns, 0], [len(full), pauses + batches]))
        self.cut_copy = np.append(own[keep], np.full(len(others), -1))
        #: when its batch is there
        self.cut_arrival = np.append(np.full(len(calls) + pauses, NEVER), self.arrival_end)
        #: operations that it waits for, and the number of each one's cut
        self.cut_target = np.append(np.concatenate(targets)[by_call], full_target)
        of_call = (np.cumsum(keep) - 1)[np.concatenate(cut_of)[by_call]]
        self.cut_of_target = np.append(of_call, len(self.cut_rows) + np.arange(len(full)))
        #: cuts that wait for another thread, which, and for what that had got to at which time
        joining, rests = self._joining()
        self.asking = np.append(len(calls) + np.arange(pauses), joining)
        self.asked = np.append(self.pause_by, self.pause_thread[rests])
        self.asked_ns = np.append(self.pause_end, self.pause_start[rests])

    def _joining(self) -> tuple[Int, Int]:
        """Calls of the steps' thread that blocked while a thread came to rest that it wakes again later.

        Nothing in the trace says whether they waited for that thread as well. Who hands over each time, and never
        before the last time's work was done, is taken to wait for that. Gives the numbers of such calls, and of the
        pauses that began meanwhile.
        """
        rest = np.flatnonzero((self.pause_by == self.main) & (self.pause_start > NEVER))
        mine = np.flatnonzero(self.call_thread[self.cut_rows] == self.main)
        start, end = self.call_start[self.cut_rows[mine]], self.call_end[self.cut_rows[mine]]
        at = np.searchsorted(start, self.pause_start[rest], side="right") - 1
        within = np.append(end, NEVER)[at] >= self.pause_start[rest]
        return mine[at[within]], rest[within]

    def _ended_by(self, times: Int) -> Int:
        """The operation that ended last by each time, -1 where none had."""
        order = np.argsort(self.end, kind="stable")
        at = np.searchsorted(self.end[order], times, side="right") - 1
        return np.where(at >= 0, order[np.maximum(at, 0)], -1)

    def _device_of(self, rows: Int) -> Int:
        """The device that a thread gave work last before each call: a call that waits for a device means that one."""
        if (self.device == self.device[0]).all():
            return np.full(len(rows), -1, np.int64)
        linked = np.flatnonzero(self.launch >= 0)
        begun, thread = self.call_start[self.launch[linked]], self.call_thread[self.launch[linked]]
        launches = pd.DataFrame({"at": begun, "thread": thread, "device": self.device[linked]})
        calls = pd.DataFrame({"at": self.call_start[rows], "thread": self.call_thread[rows]})
        launches = launches.sort_values("at", kind="stable")
        found = pd.merge_asof(calls, launches, on="at", by="thread", allow_exact_matches=False)
        return found["device"].fillna(-1).to_numpy(np.int64)

    # -- playing

    #: the slots of the threads, the segments where nothing is moved aside, and what kernels lose to those beside them
    slots = functools.cached_property(Slots)
    layout = functools.cached_property(Layout)
    crowding = functools.cached_property(Crowding)

    @functools.cached_property
    def recorded(self) -> Played:
        """The window and its steps as they were recorded."""
        if len(self.steps):
            begin = int(self.steps["begin_ns"].iloc[0])
            ends = self.steps["end_ns"].to_numpy() - begin
            return Played(int(ends[-1]), ends)
        return Played(int(self.end.max() - self.start.min()), np.empty(0, np.int64))

    @functools.cached_property
    def unchanged(self) -> Played:
        """The unchanged replay."""
        return self.play(Change())

    @property
    def error(self) -> float:
        """Largest deviation of the unchanged replay from the recording: of the window, or of any step."""
        ours, true = (np.append(played.wall_ns, played.each_ns) for played in (self.unchanged, self.recorded))
        return float((np.abs(ours - true) / np.maximum(true, 1)).max())

    def is_untouched(self, change: Change) -> bool:
        """Whether a change takes nothing away that there is.

        Parameters
        ----------
        change : Change
        """
        takes = (
            not change.waits and len(self.cut_rows),
            not change.arrivals and len(self.arrival_end),
            not change.hand_overs and len(self.asking),
            any(len(start) for start, _ in change.away.values()),
            change.aside is not None and change.aside.any(),
            change.durations_ns is not None,
        )
        return not any(takes)

    def play(self, change: Change) -> Played:
        """Play the schedule.

        Parameters
        ----------
        change : Change

        Returns
        -------
        Played
        """
        layout = self.layout if change.aside is None else Layout(self, change.aside)
        play = Play(self, layout, change)
        played = play.played()
        if self.is_untouched(change) or not self.crowding.possible:
            return played
        if self.crowding.factor is None:
            return dataclasses.replace(played, crowded_ns=self.crowding.added_ns(*play.times()))
        given = self.end - self.start if change.durations_ns is None else change.durations_ns
        for _ in range(_ROUNDS):
            durations = self.crowding.durations_ns(given, *play.times())
            play = Play(self, layout, dataclasses.replace(change, durations_ns=durations))
            played = play.played()
        return played

    @functools.cached_property
    def collective(self) -> Bool:
        """Which operations are collectives."""
        table, out = self.trace.table("kernels", ["name", "collective"]), np.zeros(len(self.start), bool)
        talks = (categorize(table["name"]) == "communication") | (table["collective"] != "").to_numpy()
        kernels = self.table == GPU_TABLES.index("kernels")
        out[kernels] = talks[self.operations["row"].to_numpy()[kernels]]
        return out

    @functools.cached_property
    def in_step(self) -> Int:
        """The step that each operation was launched in, -1 for none."""
        on_cpu = self.steps.assign(end_ns=self.steps["cpu_end_ns"])
        at = steps.number(on_cpu, self.call_start[np.maximum(self.launch, 0)])
        ours = self.process_of[self.stream] == self.process
        return np.where((self.launch >= 0) & ours, at, -1).astype(np.int32)

    @functools.cached_property
    def by_others(self) -> Bool:
        """What other threads than that of the steps launched, in the steps' process."""
        others = self.call_thread[np.maximum(self.launch, 0)] != self.main
        return np.asarray((self.launch >= 0) & (self.process_of[self.stream] == self.process) & others)


def _codes(process: Int, device: npt.NDArray[Any], stream: Int) -> Int:
    """Number the streams of all devices and processes."""
    code = np.zeros(len(stream), np.int64)
    for column in (process, device, stream):
        if len(column) and (column != column[0]).any():
            values = pd.factorize(column, sort=True)[0]
            code = pd.factorize(code * (int(values.max()) + 1) + values, sort=True)[0]
    return code


def _end_with(waits: intervals.Coverage, start: Int, end: Int) -> Bool:
    """Whether waits take up most of each window, and the last of them ends shortly before it does."""
    at = np.searchsorted(waits.end, end, side="right") - 1
    got = np.append(waits.end, NEVER)[at]
    return np.asarray((got > start) & (end - got <= _WAKE_NS) & (2 * waits.of(start, end) >= end - start))


def _some(mask: Bool) -> Int:
    """Enough of what is meant for a median."""
    rows = np.flatnonzero(mask)
    return rows[:: 1 + len(rows) // _ENOUGH]


def _spread(values: Int) -> float:
    return float(np.median(np.abs(values - np.median(values))))
