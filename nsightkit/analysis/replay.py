"""Play a recorded run again as a schedule, as it was or with a change made.

The schedule keeps what the recording says of each part alone: the CPU's own time between two calls, how long an
operation runs on the GPU, the order on a stream, who launched what, who waits for what. It does not keep when anything
happened: that follows. An operation starts when its launch has reached the device, the one before it on its stream has
ended, and what it waits for on other streams is done. A blocking call returns when what it waits for is done. Three
latencies stand between these, each a constant of the trace, the median of what was recorded: from a launch to the start
on an idle stream, from one operation to the next behind it in a queue, and from the end of the work to the return of
the call that waits. So the unchanged replay is a prediction as well, and its error says what a replay is worth.

Recordings rarely say which wait was for what. An operation that starts just after one on another stream has ended, and
later than its launch and its own stream explain, waited for it; a call that blocks waited for the stream that drained
just before it returned. ``Schedule.inferred`` counts these.

Arrays are reduced between *cuts* (blocking calls, waits between streams, launches into a full queue, ends of steps):
what lies between two cuts of a stream is one line, ``end = max(launching thread's delay + a, stream's last end + b)``.
Only the cuts are walked one by one.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis import intervals, steps
from nsightkit.analysis.gaps.threads import Threads
from nsightkit.analysis.meetings import Meetings
from nsightkit.analysis.names import matching
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["BLOCKING", "Change", "Played", "Schedule"]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]

#: Calls that return only when the GPU has caught up.
BLOCKING = re.compile(
    r"^(cuda|hip)(Device|Stream|Event|Thread|Context|Graph)Synchronize|^cu(Ctx|Stream|Event)Synchronize|"
    r"^(cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)|^(cuda|hip)(Malloc|Free)(?!.*Async)|^cuMem(Alloc|Free)(?!.*Async)"
)
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
#: Of more launches into a full queue than this, only some are walked; the others follow them.
_MOST_CUTS = 20_000
#: Operations of one stream run one after another; where they overlap for more than this share, streams are not known.
_OVERLAP = 0.02
#: Of all operations, those that may be inferred to wait for another stream: beyond that, their streams are in doubt.
_GUESSED = 1 / 3
#: Work whose launch was not recorded, as a share of all GPU work, above which no schedule can be made.
_UNLINKED = 0.1
_NEVER = np.iinfo(np.int64).min // 4


@dataclasses.dataclass(frozen=True)
class Change:
    """What is different in a replay; a field left out stays as recorded.

    Parameters
    ----------
    away : dict of int to (ndarray, ndarray)
        Per thread: disjoint, sorted intervals of its own time that fall away, ns on the trace's clock.
    waits : bool
        Whether blocking calls wait.
    arrivals : bool
        Whether batches that others prepare have to be waited for.
    durations_ns : ndarray of int64, optional
        Durations of the operations, in the order of ``Schedule.operations``.
    aside : ndarray of bool, optional
        Operations that run on a stream of their own, for which nothing waits before the step ends.
    """

    away: dict[int, tuple[Int, Int]] = dataclasses.field(default_factory=dict)
    waits: bool = True
    arrivals: bool = True
    durations_ns: Int | None = None
    aside: Bool | None = None


@dataclasses.dataclass(frozen=True)
class Played:
    """When things ended in a replay, ns since the window's start: the window, and each step."""

    wall_ns: int
    steps_ns: Int


@dataclasses.dataclass
class _Calls:
    """Calls of one thread that launch or block, ordered by start."""

    start: Int
    end: Int

    def fill(self, start: Int, end: Int, pause: float) -> Bool:
        """Whether all calls between two pauses lie in each window, and take up half of it."""
        low, high = np.searchsorted(self.start, start), np.searchsorted(self.start, end) - 1
        first, last = np.minimum(low, len(self.start) - 1), np.maximum(high, 0)
        before = np.where(low > 0, self.end[np.maximum(low - 1, 0)], _NEVER)
        after = np.where(high + 1 < len(self.start), self.start[np.minimum(high + 1, len(self.start) - 1)], -_NEVER)
        alone = (self.start[first] - before > pause) & (after - self.end[last] > pause)
        gaps = np.append(0, self.start[1:] - self.end[:-1])
        silent = np.cumsum(np.where(gaps > pause, gaps, 0))
        active = self.end[last] - self.start[first] - (silent[last] - silent[first])
        return np.asarray((high >= low) & alone & (2 * active >= end - start))


class Schedule:
    """A trace as a schedule.

    Parameters
    ----------
    trace : Trace
        Selected or whole; what is selected is played.
    without : set of str, optional
        Leaves parts of the model out, to show that it needs them: ``"syncs"``, ``"hand-overs"``, ``"waits"``.

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

    def __init__(self, trace: Trace, without: frozenset[str] | set[str] = frozenset()) -> None:
        self.trace, self.without = trace, without
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
        ops = intervals.gpu_intervals(trace)
        table, row = ops["table"].to_numpy(), ops["row"].to_numpy()
        n = len(ops)
        process, stream, kind = np.empty(n, np.int64), np.empty(n, np.int64), np.zeros(n, np.int8)
        for number, name in enumerate(GPU_TABLES):
            mine = slice(None) if (table == number).all() else table == number
            if n and (isinstance(mine, slice) or mine.any()):
                frame = trace.table(name, ["process", "stream"])
                process[mine] = frame["process"].to_numpy()[row[mine]]
                stream[mine] = frame["stream"].to_numpy()[row[mine]]
                kind[mine] = number
        launch = intervals.launches_of(trace, table, row)
        device = ops["device"].to_numpy()
        code = _codes(process, device, stream)
        duration = ops["end_ns"].to_numpy() - ops["start_ns"].to_numpy()
        if not n:
            self.unplayable = "there is no GPU work"
        columns: dict[str, npt.NDArray[Any]] = {
            "start_ns": ops["start_ns"].to_numpy(),
            "end_ns": ops["end_ns"].to_numpy(),
            "stream": code.astype(np.int32),
            "device": device,
            "process": process,
            "table": kind,
            "row": row,
            "launch": launch.astype(np.int32),
        }
        del ops, stream
        if n and (code != code[0]).any():
            order = np.argsort(code, kind="stable")  # by device and start already
            columns = {name: column[order] for name, column in columns.items()}
        #: position in the schedule of each operation of the trace, in the order in which they were met
        self.part_of: Int | None = None
        self.parts = pd.DataFrame({name: columns[name] for name in ("table", "row")}, copy=False)
        self.part_ns = columns["end_ns"] - columns["start_ns"]
        columns = self._joined(columns)
        self.operations = pd.DataFrame(columns, copy=False)
        self.start, self.end = columns["start_ns"], columns["end_ns"]
        self.stream, self.launch, self.process = columns["stream"], columns["launch"], columns["process"]
        self.device, self.table = columns["device"], columns["table"]
        self.first = np.ones(len(self.start), bool)
        self.first[1:] = self.stream[1:] != self.stream[:-1]
        if n:
            # What stands first in its stream may have been launched before the recording began; later on it is lost.
            lost = (self.launch < 0) & (
                np.maximum.accumulate(np.where(self.launch >= 0, self.stream, -1)) == self.stream
            )
            missing = int((self.end - self.start)[lost].sum())
            if missing > _UNLINKED * int(duration.sum()) or not (self.launch >= 0).any():
                self.unplayable = "the calls that launched the GPU's work were not recorded"
        before = np.append(_NEVER, self.end[:-1])
        overlap = np.where(self.first, 0, np.maximum(before - self.start, 0))
        if n and int(overlap.sum()) > _OVERLAP * int((self.end - self.start).sum()):
            self.unplayable = self.unplayable or "operations of one stream overlap: what ran after what is not known"

    def _joined(self, frame: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """What one call launched together becomes one operation, from the first start to the last end."""
        launch = frame["launch"]
        known = launch >= 0
        if not known.any():
            return frame
        several = known & (np.bincount(launch[known], minlength=1)[np.maximum(launch, 0)] > 1)
        if not several.any():
            return frame
        mine = np.flatnonzero(several)
        by_start = mine[np.lexsort((frame["start_ns"][mine], launch[mine]))]
        heads = np.flatnonzero(np.append(True, launch[by_start][1:] != launch[by_start][:-1]))
        head = by_start[heads]
        frame = dict(frame)
        frame["end_ns"] = frame["end_ns"].copy()
        frame["end_ns"][head] = np.maximum.reduceat(frame["end_ns"][by_start], heads)
        keep = ~several
        keep[head] = True
        place = np.cumsum(keep) - 1
        part_of = place.copy()
        part_of[by_start] = np.repeat(place[head], np.diff(np.append(heads, len(by_start))))
        self.part_of = part_of
        return {name: column[keep] for name, column in frame.items()}

    def _calls(self) -> None:
        whole = self.trace.whole
        calls = whole.table("calls", ["start_ns", "end_ns", "thread"])
        self.call_start, self.call_end, self.call_thread = (calls[c].to_numpy() for c in calls)
        names = whole.table("calls", ["name"])["name"]
        blocks = matching(names, BLOCKING)
        kept = self.trace.mask("calls")
        linked = self.launch[self.launch >= 0]
        memops = self.table == GPU_TABLES.index("memops")
        copies = np.flatnonzero(memops & (self.launch >= 0))
        #: copies whose call returns only when they are done, as that of pageable memory does
        self.own_copy = np.zeros(len(self.start), bool)
        if len(copies):
            table = self.trace.table("memops", ["kind", "src_kind", "dst_kind"]).iloc[
                self.operations["row"].to_numpy()[copies]
            ]
            pageable = (table["src_kind"] == "pageable").to_numpy() | (table["dst_kind"] == "pageable").to_numpy()
            back = (table["kind"] == "DtoH").to_numpy()
            row = self.launch[copies]
            inside = self.end[copies] <= self.call_end[row] + 1_000
            self.own_copy[copies] = inside & (pageable | blocks[row])
            blocks[row[self.own_copy[copies]]] = True
            self.staged = np.zeros(len(self.start), bool)
            self.staged[copies] = pageable & ~back
        else:
            self.staged = np.zeros(len(self.start), bool)
        if kept is not None:
            launching = np.zeros(len(blocks), bool)
            launching[linked] = True
            blocks &= kept | launching
        threads = _kinds(self.call_thread[linked])
        self.steps = steps.windows(self.trace)
        if len(self.steps):
            threads = np.unique(np.append(threads, self.steps["thread"].to_numpy()))
        rows = np.flatnonzero(blocks & np.isin(self.call_thread, threads))
        self.blocking = rows[np.argsort(self.call_start[rows], kind="stable")]
        self.names = names
        self.threads = threads

    def _beginning(self) -> None:
        """What a selection leaves out happened when it did; what was selected cannot begin before that is over."""
        #: what a change takes away it takes from here on
        self.begin_ns = int(self.steps["start_ns"].iloc[0]) if len(self.steps) else _NEVER
        #: what no operation can come before: of each stream, and of one that a change makes
        self.released_ns = np.full(int(self.stream.max()) + 1, _NEVER, np.int64)
        self.earliest_ns = _NEVER
        if self.trace is self.trace.whole:
            return
        self.earliest_ns = int(self.start.min())
        if not len(self.steps):
            self.begin_ns = int(self.call_start[self.launch[self.launch >= 0]].min())
        place = ["process", "device", "stream"]
        first = np.flatnonzero(self.first)
        mine = self.operations.iloc[first]
        mine = mine.assign(
            stream=[
                self.trace.table(GPU_TABLES[t], ["stream"])["stream"].iloc[r]
                for t, r in zip(mine["table"], mine["row"], strict=True)
            ]
        )
        every = pd.concat([self.trace.whole.table(t, [*place, "start_ns", "end_ns"]) for t in GPU_TABLES])
        both = mine.assign(at=first).merge(every, on=place, suffixes=("", "_before"))
        before = both[both["start_ns_before"] < both["start_ns"]].groupby("at")["end_ns_before"].max()
        self.released_ns[self.stream[before.index]] = np.minimum(before, self.start[before.index])

    # -- threads that wait for each other

    def _threads(self) -> None:
        """Silences of a thread that another one ended: it handed work over, or was done with what was handed to it."""
        facts, linked = self.facts, self.launch[self.launch >= 0]
        rows = _rows(np.concatenate([linked, self.blocking]))
        rows = rows[np.argsort(self.call_start[rows], kind="stable")]
        threads = self.threads.tolist()
        calls = {
            t: _Calls(self.call_start[mine], self.call_end[mine])
            for t in threads
            if len(mine := rows[self.call_thread[rows] == t])
        }
        if len(self.steps) and (last := calls.get(int(self.steps["thread"].iloc[0]))):
            # A thread that waits for others in the end has no call after that, but its last step ends.
            over = int(self.steps["cpu_end_ns"].iloc[-1])
            last.start, last.end = np.append(last.start, over), np.append(last.end, over)
        #: per thread, time in which it only waited for room in the queue
        self.passive: dict[int, list[tuple[Int, Int]]] = {t: [] for t in threads}
        found = [np.empty((4, 0), np.int64)]
        paces = [float(np.median(np.diff(c.start))) for c in calls.values() if len(c.start) > 1]
        pause = max(_PAUSE * min(paces, default=0.0), _HELD_NS)
        for one, mine in calls.items():
            others = {t: c for t, c in calls.items() if t != one and t >> 24 == one >> 24}
            if not others:
                continue
            # What is named for something else is not a silence; a range in which another thread is at work may be.
            begun, done = facts.own_work(one)
            handed = np.logical_or.reduce([theirs.fill(begun, done, pause) for theirs in others.values()])
            handed &= 2 * facts.sleeps(one).covered(begun, done) < done - begun
            parts = [(mine.start, np.maximum(mine.end, mine.start + 1)), (begun[~handed], done[~handed])]
            parts += [of(one) for of in (facts.input_waits, facts.one_offs, facts.profiler_time)]
            acted, rested = intervals.merge(*(np.concatenate([part[side] for part in parts]) for side in (0, 1)))
            start, end = np.append(_NEVER, rested[:-1]), acted
            long = end - start > pause
            start, end = start[long], end[long]
            latest = {other: self._latest(other, end) for other in others}
            # Before its first call a thread has nothing to do: whoever was at work before that began its work.
            begins = start == _NEVER
            acts = {other: (at > start) & (begins | (end - at <= _WAKE_NS)) for other, at in latest.items()}
            # It pauses for about as long where nobody wakes it: such pauses are its own.
            fills = {other: theirs.fill(start, end, pause) for other, theirs in others.items()}
            woken = np.logical_or.reduce([*acts.values(), *fills.values()])
            alone = np.sort((end - start)[(start > _NEVER) & ~woken])
            own = np.searchsorted(alone, (end - start) / _ALIKE) < np.searchsorted(alone, (end - start) * _ALIKE)
            hits = {other: (fills[other] | acts[other]) & ~own for other in others}
            # Where several may have, the one that may have the most often.
            by = np.full(len(end), -1, np.int64)
            for other in sorted(others, key=lambda t: int(hits[t].sum() + fills[t].sum())):
                by[hits[other]] = other
            kept = by >= 0
            found.append(np.stack([np.full(int(kept.sum()), one), start[kept], end[kept], by[kept]]))
        self.pause_thread, self.pause_start, self.pause_end, self.pause_by = np.concatenate(found, axis=1)

    def _latest(self, thread: int, at: Int) -> Int:
        """When anything that was recorded of a thread last began or ended before each time."""
        latest = np.full(len(at), _NEVER, np.int64)
        tables = [
            ("calls", self.facts.calls(thread)),
            *self.facts.activity(thread),
            ("os", self.facts.os_calls(thread)),
        ]
        for name, track in tables:
            for edges in (track.start, np.sort(track.end)) if name != "op" else (track.start,):
                if len(edges):
                    i = np.searchsorted(edges, at) - 1
                    latest = np.maximum(latest, np.where(i >= 0, edges[i], _NEVER))
        return latest

    def _arrivals(self) -> None:
        """Waits for data that somebody else prepares at a pace of its own: a batch is there when it is there.

        An OS call that waits for another process, or the name of PyTorch's loader with workers, says so. Else a wait is
        the thread's own time: it begins to load when it asks.
        """
        found = [np.empty((3, 0), np.int64)]
        for thread in self.threads.tolist():
            start, end = self.facts.input_waits(thread)
            if not len(start):
                continue
            parts = []
            for table, pattern in (("os_calls", _FOR_OTHERS), ("ranges", _WORKERS), ("ops", _WORKERS)):
                rows = self.trace.whole.table(table, ["start_ns", "end_ns", "thread", "name"])
                mine = rows[matching(rows["name"], pattern) & (rows["thread"] == thread).to_numpy()]
                parts.append((mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy()))
            waits = intervals.Coverage(*(np.concatenate([part[side] for part in parts]) for side in (0, 1)))
            long = (2 * waits.of(start, end) >= end - start) & (end - start >= _HELD_NS) & (start >= self.begin_ns)
            # Where waits are few and short, batches lie ready: nothing says how soon they could be.
            if _LIMITS * (end[long] - start[long]).sum() < end[-1] - start[0]:
                continue
            found.append(np.stack([np.full(int(long.sum()), thread), start[long], end[long]]))
        self.arrival_thread, self.arrival_start, self.arrival_end = np.concatenate(found, axis=1)

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
        rows = _rows(self.launch[self.launch >= 0])
        found = {}
        for thread in self.threads.tolist():
            start = np.sort(self.call_start[rows[self.call_thread[rows] == thread]])
            if len(start) < 2:
                continue
            cuts = self.cut_rows[self.call_thread[self.cut_rows] == thread]
            pauses = self.pause_thread == thread
            parts = [busy(thread), *self.passive[thread], (self.call_start[cuts], self.call_end[cuts])]
            parts.append((self.pause_start[pauses], self.pause_end[pauses]))
            copies = self.launch[self.staged & (self.launch >= 0)]
            copies = copies[self.call_thread[copies] == thread]
            parts.append((self.call_start[copies], self.call_end[copies]))
            other = intervals.Coverage(*(np.concatenate([part[side] for part in parts]) for side in (0, 1)))
            # Consecutive launches have nothing else between them.
            between = np.flatnonzero(other.of(start[:-1], start[1:]) <= launch_ns)
            between = between[self._dispatched(thread, start)[between]]
            long = between[start[between + 1] - start[between] > launch_ns]
            found[thread] = start[long] + launch_ns, start[long + 1]
        return found

    def _dispatched(self, thread: int, start: Int) -> Bool:
        """Whether launches follow each other as launches do, or are in operators, and so have only dispatch between."""
        apart = np.diff(start)
        usual: Bool = apart <= _SLOW_CALL * np.median(apart)
        far = np.flatnonzero(~usual)
        usual[far] = 2 * self.facts.dispatch(thread).covered(start[far], start[far + 1]) >= apart[far]
        return usual

    # -- constants

    def _latencies(self) -> None:
        linked = self.launch >= 0
        row = np.maximum(self.launch, 0)
        begun, done = self.call_start[row], self.call_end[row]
        before = self._before()
        meanwhile = self.staged & (self.start < done)  # staged piece by piece
        kind = self.table.astype(np.int64) * 8 + 4 * meanwhile + 2 * self.staged + self.own_copy
        idle = linked & (self._device_before() < begun) & ~meanwhile
        queued = linked & (done + 10_000 < before) & ~self.first
        #: ready = launch call's start or end + latency: whichever was the steadier
        self.ready = np.where(linked, np.where(self.own_copy, begun + _CALL_NS, done) + _START_NS, _NEVER)
        self.gap = np.full(len(self.start), _NEXT_NS, np.int64)
        for one in _kinds(kind).tolist():
            mine = kind == one
            samples = mine & idle
            if samples.any():
                from_start, from_end = self.start[samples] - begun[samples], self.start[samples] - done[samples]
                by = [
                    (_spread(from_end), int(np.median(from_end)), False),
                    (_spread(from_start), int(np.median(from_start)), True),
                ]
                # A call that returns after its copy says nothing by its end, one that stages it nothing by its start.
                by = by[1:] if one & 1 else by[:1] if one & 2 else by
                _, latency, of_start = min(by, key=lambda row: row[0])
                base = begun if of_start else done
                self.ready[mine & linked] = (base + latency)[mine & linked]
            samples = mine & queued
            if samples.any():
                between = self.start[samples] - before[samples]
                between = between[between <= _HELD_NS]
                self.gap[mine] = int(np.median(between)) if len(between) else _NEXT_NS
        # Of what runs behind a call that takes its time, the call's end says more.
        launches = _rows(self.launch[linked & ~self.own_copy])
        lasting = self.call_end[launches] - self.call_start[launches]
        self.call_ns = int(np.median(lasting)) if len(launches) else _CALL_NS
        slow = linked & ~self.own_copy & (done - begun > _SLOW_CALL * self.call_ns)
        self.ready[slow] = np.maximum(self.ready[slow], np.minimum(done[slow], self.start[slow]))
        # The CPU stages pageable memory itself: until the copy begins or, where that had to wait, at the copy's pace.
        behind = meanwhile & (before > self.start - 2 * _START_NS)
        paced = np.minimum(begun + self.call_ns + self.end - self.start, self.start)
        self.ready = np.where(meanwhile, np.where(behind, paced, self.start), self.ready)
        self._throttled(launches, lasting)
        if not linked.all():
            # Launched before the recording began: it is where it is in its stream.
            self.ready[~linked] = self.start.min()
            lost = ~linked & self.first
            self.ready[lost] = self.start[lost]

    def _before(self) -> Int:
        """When the operation before each one in its stream had ended."""
        before = np.append(_NEVER, self.end[:-1])
        before[self.first] = self.released_ns
        return before

    def _device_before(self) -> Int:
        """When all that began on the device before each operation had ended: with that in the past, nothing kept it."""
        every = intervals.gpu_intervals(self.trace.whole)
        device, start, end = (every[c].to_numpy() for c in ("device", "start_ns", "end_ns"))  # by device and start
        out = np.full(len(self.start), _NEVER, np.int64)
        for one in _kinds(self.device).tolist():
            on = slice(np.searchsorted(device, one), np.searchsorted(device, one, side="right"))
            mine = slice(None) if len(self.start) == len(device) == on.stop - on.start else self.device == one
            reach = np.maximum.accumulate(end[on])
            at = np.searchsorted(start[on], self.start[mine]) - 1
            out[mine] = np.where(at >= 0, reach[at], _NEVER)
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
        for one in _kinds(self.call_thread[slow]).tolist():
            mine = slow[self.call_thread[slow] == one]
            self.passive[one].append((self.call_start[mine] + self.call_ns, self.call_end[mine]))
        every = 1 + len(slow) // _MOST_CUTS
        self.throttled = slow[np.argsort(self.call_start[slow], kind="stable")][::every]

    # -- who waits for what

    def _waits(self) -> None:
        """Pairs (operation, what it waits for on another stream)."""
        explained = np.maximum(self.ready, self._before() + self.gap)
        linked = self.launch >= 0
        told, told_of = self._recorded_waits() if "waits" not in self.without else (np.empty(0, np.int64),) * 2
        until = explained.copy()
        np.maximum.at(until, told, self.end[told_of])
        late = np.flatnonzero((self.start > until + _LATE_NS) & (linked | ~self.first))
        waits: Int = np.empty(0, np.int64)
        on: Int = waits
        if len(late) and (self.stream != self.stream[0]).any() and "waits" not in self.without:
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
        begun = np.where(self.launch >= 0, self.call_start[np.maximum(self.launch, 0)], _NEVER)
        thread = np.where(self.launch >= 0, self.call_thread[np.maximum(self.launch, 0)], -1)
        waits, on = [late[:0]], [late[:0]]
        for same_device, same_thread in ((True, True), (True, False), (False, False)):
            left = late
            at = np.searchsorted(ends, self.start[left] + 500, side="right") - 1
            for _ in range(12):
                other = order[np.maximum(at, 0)]
                near = (at >= 0) & (self.start[left] - self.end[other] <= _AFTER_NS)
                near &= self.end[other] > explained[left] - _LATE_NS
                fits = near & (self.stream[other] != self.stream[left]) & (self.process[other] == self.process[left])
                # What is launched later is not waited for.
                fits &= (begun[other] <= begun[left]) | (self.launch[left] < 0)
                if same_device:
                    fits &= self.device[other] == self.device[left]
                if same_thread:
                    fits &= thread[other] == thread[left]
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
        free = np.full(int(self.stream.max()) + 1, _NEVER)
        free[self.stream[busy]] = self.start[busy]
        self.ready = np.maximum(self.ready, free[self.stream])
        held[busy] = False
        #: time for which each operation was held up so
        self.held_ns = np.where(held, late, 0)

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
        for one in _kinds(self.call_thread[calls]).tolist():
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
            fits = (self.end[other] <= self.start[at] + 500) & (self.process[at] == self.process[other])
            waits.append(at[fits])
            on.append(other[fits])
        return np.concatenate(waits), np.concatenate(on)

    def _meetings(self) -> None:
        """Collectives of several devices: none of them does its work before the last device has arrived."""
        self.meeting = np.empty(0, np.int64)  # positions in the schedule
        self.meeting_of = np.empty(0, np.int64)  # the collective's number
        self.transfer_ns = np.empty(0, np.int64)  # of each, from the last arrival on
        if len(_kinds(self.device)) < 2:
            return
        met = Meetings(self.trace).met
        mine = pd.MultiIndex.from_arrays([self.device, self.start])
        at = pd.Series(np.arange(len(mine)), mine)[lambda s: ~s.index.duplicated()]
        found = at.reindex(pd.MultiIndex.from_frame(met[["device", "start_ns"]])).to_numpy()
        known = ~np.isnan(found)
        self.meeting = found[known].astype(np.int64)
        self.meeting_of = met["collective"].to_numpy(np.int64)[known]
        self.transfer_ns = (met["end_ns"] - met["until_ns"]).to_numpy(np.int64)[known]

    def _cuts(self) -> None:
        """Blocking calls with the operations that they wait for: the last of each stream launched before them."""
        rows = self.blocking
        linked = np.flatnonzero(self.launch >= 0)
        begun = self.call_start[self.launch[linked]]
        streams = {}
        for one in _kinds(self.stream).tolist():
            mine = linked[self.stream[linked] == one]
            if len(mine):
                # In the order of the stream; a launch by another thread may have begun a little earlier.
                streams[one] = mine, np.maximum.accumulate(self.call_start[self.launch[mine]])
        order = np.argsort(begun, kind="stable")
        by_launch, launched = linked[order], begun[order]
        names = self.names
        of_device, of_event = matching(names, _OF_DEVICE)[rows], matching(names, _OF_EVENT)[rows]
        start, end = self.call_start[rows], self.call_end[rows]
        process = self.call_thread[rows] >> 24
        ends_order = np.argsort(self.end, kind="stable")
        ends = self.end[ends_order]
        last_of = {s: m[np.searchsorted(t, start, side="left") - 1] for s, (m, t) in streams.items()}
        none_yet = {s: np.searchsorted(t, start, side="left") == 0 for s, (_, t) in streams.items()}
        drained = np.full(len(rows), -1, np.int64)
        drained_ns = start.copy()
        sure = np.zeros(len(rows), bool)
        # What the thread launched itself, and that ended just before; else whatever did.
        for by_itself in (True, False):
            for s, last in last_of.items():
                ended = self.end[last]
                hit = ~none_yet[s] & (self.process[last] == process) & (ended > drained_ns) & (ended <= end + 1_000)
                if by_itself:
                    hit &= (self.call_thread[self.launch[last]] == self.call_thread[rows]) & (ended > end - _AFTER_NS)
                else:
                    hit &= ~sure
                drained[hit], drained_ns[hit] = last[hit], ended[hit]
            sure = drained >= 0
        # An event may lie before the end of its stream.
        at = np.searchsorted(ends, end, side="right") - 1
        event = of_event & (at >= 0)
        latest = ends_order[np.maximum(at, 0)]
        hit = event & (self.end[latest] > start) & (self.process[latest] == process) & (drained < 0)
        drained[hit] = latest[hit]
        own = dict(zip(self.launch[self.own_copy].tolist(), np.flatnonzero(self.own_copy).tolist(), strict=True))
        self.cut_own = np.array([own.get(int(r), -1) for r in rows], np.int64)
        drained = np.where(self.cut_own >= 0, self.cut_own, drained)
        waited = drained >= 0
        # What did not wait, and might in another schedule: for the last work of its thread, or of all streams.
        at = np.searchsorted(launched, start, side="left") - 1
        default = np.where(at >= 0, by_launch[np.maximum(at, 0)], -1) if len(by_launch) else np.full(len(rows), -1)
        allocates = matching(names, re.compile(r"Malloc|Free|Alloc"))[rows]
        target = np.where(waited, drained, np.where(of_event | allocates, -1, default))
        returned = end - self.end[np.maximum(drained, 0)]
        # An allocation that returns long after the GPU was done took its time for something else.
        waited &= ~allocates | (returned <= _AFTER_NS)
        settled = waited & (self.cut_own < 0) & ~allocates
        self.return_ns = int(np.median(returned[settled])) if settled.any() else _RETURN_NS
        cost = (end - start).astype(np.int64)
        quick = cost[~waited & ~allocates]
        self.quick_ns = int(min(np.median(quick), 20_000)) if len(quick) else _CALL_NS
        # After its copy a call may still have work of its own to do: to empty the staging buffer.
        tail = np.where(self.cut_own >= 0, np.maximum(returned, 0), self.return_ns)
        cost = np.where(waited, np.minimum(self.quick_ns, cost), cost)
        # The CPU's part of a copy from pageable memory lies before it: staging.
        at = np.maximum(self.cut_own, 0)
        cost = np.where((self.cut_own >= 0) & self.staged[at], self.ready[at] - start, cost)
        keep = waited | ((target >= 0) & ~allocates)
        whole_device = of_device & ~allocates
        device = self._device_of(rows)
        targets: list[list[int]] = []
        columns = list(last_of.items())
        for i in np.flatnonzero(keep).tolist():
            if whole_device[i]:
                targets.append(
                    [
                        int(last[i])
                        for s, last in columns
                        if not none_yet[s][i]
                        and self.process[last[i]] == process[i]
                        and device[i] in (-1, self.device[last[i]])
                    ]
                )
            else:
                targets.append([int(target[i])])
        self.cut_rows, self.cut_targets = rows[keep], targets
        self.cut_cost, self.cut_tail = cost[keep], tail[keep]
        self.cut_is_own, self.cut_own_copy = self.cut_own[keep] >= 0, np.maximum(self.cut_own[keep], 0)
        self.cut_waited = waited[keep]
        self.inferred += int((waited[keep] & ~self.cut_is_own).sum())
        # Launches into a full queue wait for an operation to end.
        full = self.throttled
        at = np.searchsorted(ends, self.call_end[full], side="right") - 1
        self.full_target = ends_order[np.maximum(at, 0)]
        after = self.call_end[full] - self.end[self.full_target]
        self.room_ns = int(np.median(after)) if len(full) else 0

    def _device_of(self, rows: Int) -> Int:
        """The device that a thread gave work last before each call: a call that waits for a device means that one."""
        out = np.full(len(rows), -1, np.int64)
        linked = np.flatnonzero(self.launch >= 0)
        thread, begun = self.call_thread[self.launch[linked]], self.call_start[self.launch[linked]]
        for one in _kinds(self.call_thread[rows]).tolist():
            mine, calls = linked[thread == one], np.flatnonzero(self.call_thread[rows] == one)
            order = np.argsort(begun[thread == one], kind="stable")
            at = np.searchsorted(begun[thread == one][order], self.call_start[rows[calls]]) - 1
            if len(mine):
                out[calls] = np.where(at >= 0, self.device[mine[order]][at], -1)
        return out

    # -- playing

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
        told, true = self.unchanged, self.recorded
        off = [abs(told.wall_ns - true.wall_ns) / max(true.wall_ns, 1)]
        if len(true.steps_ns):
            lasting = np.diff(np.append(0, true.steps_ns))
            replayed = np.diff(np.append(0, told.steps_ns))
            off += (np.abs(replayed - lasting) / np.maximum(lasting, 1)).tolist()
        return float(max(off))

    def is_untouched(self, change: Change) -> bool:
        """Whether a change takes nothing away that there is.

        Parameters
        ----------
        change : Change
        """
        waits = change.waits or not len(self.cut_rows)
        arrives = change.arrivals or not len(self.arrival_end)
        away = any(len(start) for start, _ in change.away.values())
        aside = change.aside is not None and bool(change.aside.any())
        return waits and arrives and not away and not aside and change.durations_ns is None

    def play(self, change: Change) -> Played:
        """Play the schedule.

        Parameters
        ----------
        change : Change

        Returns
        -------
        Played
        """
        return _Play(self, change).run()


def _kinds(values: Any) -> Int:
    """The few values that many have, in order: a hash of each would cost more than all the rest."""
    return np.sort(pd.unique(values)).astype(np.int64)


def _rows(rows: Any) -> Int:
    """Rows of a table, each once, in order."""
    return np.flatnonzero(np.bincount(rows)) if len(rows) else np.empty(0, np.int64)


def _codes(process: Int, device: npt.NDArray[Any], stream: Int) -> Int:
    """Number the streams of all devices and processes."""
    code = np.zeros(len(stream), np.int64)
    for column in (process, device, stream):
        if len(column) and (column != column[0]).any():
            values = pd.factorize(column, sort=True)[0]
            code = pd.factorize(code * (int(values.max()) + 1) + values, sort=True)[0]
    return code


def _spread(values: Int) -> float:
    return float(np.median(np.abs(values - np.median(values))))


class _Play:
    """One replay of a schedule, with a change."""

    def __init__(self, schedule: Schedule, change: Change) -> None:
        self.of, self.change = schedule, change
        self.stream, self.order = schedule.stream, None
        self.duration = schedule.end - schedule.start if change.durations_ns is None else change.durations_ns
        self._own_time()

    # -- the CPU's own time

    def _own_time(self) -> None:
        """Per clock, a function from recorded time to own time."""
        schedule, change = self.of, self.change
        self._away: dict[int, intervals.Coverage] = {}
        for thread in schedule.threads.tolist():
            parts = [*schedule.passive[thread], *([change.away[thread]] if thread in change.away else [])]
            parts = [part for part in parts if len(part[0])]
            if parts:
                start, end = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
                self._away[thread] = intervals.Coverage(np.maximum(start, schedule.begin_ns), end)

    def own(self, thread: int, time: Int) -> Int:
        """Recorded time without what falls away before it."""
        away = self._away.get(thread)
        return time if away is None else np.asarray(time - away.before(np.asarray(time, np.int64)), np.int64)

    @property
    def _same_time(self) -> bool:
        return not self._away

    # -- the schedule between cuts

    def run(self) -> Played:
        return _Run(self).played()


class _Run:
    """Lays a play out in segments and walks them."""

    def __init__(self, play: _Play) -> None:
        self.play, self.of, self.change = play, play.of, play.change
        self._lay_cuts()
        self._lay_operations()
        self._lay_segments()

    def _lay_cuts(self) -> None:
        """The points at which a thread's delay changes, by thread and time; each opens a slot."""
        of = self.of
        rows = np.concatenate([of.cut_rows, of.throttled])
        thread = np.concatenate([of.call_thread[rows], of.pause_thread, of.arrival_thread])
        start = np.concatenate([of.call_start[rows], of.pause_start, of.arrival_start])
        end = np.concatenate([of.call_end[rows], of.pause_end, of.arrival_end])
        order = np.lexsort((end, thread))
        self.cut = order
        self.cut_start, self.cut_end = start[order], end[order]
        self.threads = of.threads.tolist()
        self.low = {t: int(np.searchsorted(thread[order], t)) for t in self.threads}
        self.high = {t: int(np.searchsorted(thread[order], t, side="right")) for t in self.threads}
        # Slot number: the cut's own place plus one a thread for what comes before its first.
        self.base = {t: self.low[t] + i for i, t in enumerate(self.threads)}

    def slot(self, thread: int, time: Int) -> Int:
        """The slot in force on a thread at a time."""
        ends = self.cut_end[self.low[thread] : self.high[thread]]
        return self.base[thread] + np.searchsorted(ends, time, side="right")

    def _lay_operations(self) -> None:
        """Ready time without delay, and slot, of each operation."""
        of, play = self.of, self.play
        linked = of.launch >= 0
        row = np.maximum(of.launch, 0)
        self.ready = of.ready.copy()
        self.slots = np.full(len(of.start), -1, np.int32)
        if not linked.any():
            return
        for one in self.threads:
            mine = linked if len(self.threads) == 1 else linked & (of.call_thread[row] == one)
            called = of.call_start[row[mine]]
            self.slots[mine] = self.slot(one, called)
            if not play._same_time:
                # The latency after the call is the device's; what comes before it is the thread's own time.
                point = np.minimum(of.call_end[row[mine]], np.maximum(of.ready[mine], called))
                self.ready[mine] = play.own(one, point) + (of.ready[mine] - point)

    def _lay_segments(self) -> None:
        of, change = self.of, self.change
        n = len(of.start)
        duration, gap, stream = self.play.duration, of.gap, of.stream
        alone = duration
        if change.durations_ns is not None:
            gap = np.where(duration > 0, gap, 0)
        duration = duration + of.held_ns
        ready, slots, self.place = self.ready, self.slots, None
        waiting, awaited = of.waiting, of.awaited
        in_step = self._in_step()
        if change.aside is not None:
            order = np.argsort(np.where(change.aside, of.device + int(stream.max()) + 1, stream), kind="stable")
            moved = change.aside
            raise_to = np.where(moved, of.device + int(stream.max()) + 1, stream)[order]
            # On the new streams by time, as they were launched.
            tail = np.flatnonzero(moved[order])
            if len(tail):
                part = order[tail]
                order[tail] = part[np.lexsort((of.start[part], of.device[part]))]
            stream = raise_to
            duration, gap, alone = duration[order], gap[order], alone[order]
            # When it was launched that stands in no order now is not known: it begins no earlier than it did.
            ready = np.where(of.launch < 0, of.start, ready)
            ready, slots = ready[order], slots[order]
            place = np.empty(n, np.int64)
            place[order] = np.arange(n)
            keep = ~moved[of.waiting] & ~moved[of.awaited]
            waiting, awaited = place[of.waiting[keep]], place[of.awaited[keep]]
            self.place = place
            last = np.maximum.accumulate(np.where(moved, -1, np.arange(n)))
            self.kept = np.where((last >= 0) & (of.stream[np.maximum(last, 0)] == of.stream), last, -1)
            in_step = in_step[order] if in_step is not None else None
        self.stream_codes = stream
        first = np.ones(n, bool)
        first[1:] = stream[1:] != stream[:-1]
        breaks = first.copy()
        breaks[1:] |= (slots[1:] != slots[:-1]) & (slots[1:] >= 0)
        breaks[waiting] = True
        needed = first.copy()  # where a stream begins, the window may
        needed[awaited] = True
        targets = [self._placed(t) for t in of.cut_targets]
        flat = [t for ts in targets for t in ts]
        needed[flat] = True
        full = of.full_target if self.place is None else self.place[of.full_target]
        needed[full] = True
        beside = np.empty(0, np.int64)
        if in_step is not None:
            last = np.append((stream[1:] != stream[:-1]) | (in_step[1:] != in_step[:-1]), True)
            last &= in_step >= 0
            needed |= last
            # What other threads launch belongs to the step that it is launched in, and in a replay that may be another.
            other = self._by_others() if self.place is None else self._by_others()[order]
            beside = np.flatnonzero(other)
            beside = np.union1d(beside[:: 1 + len(beside) // _MOST_CUTS], np.flatnonzero(other & last))
            needed[beside] = True
        place_of = np.arange(n) if self.place is None else order
        thread_of = np.where(of.launch >= 0, of.call_thread[np.maximum(of.launch, 0)], -1)[place_of]
        crossing = [
            [bool(thread_of[t] != thread) for t in ts]
            for thread, ts in zip(of.call_thread[of.cut_rows].tolist(), targets, strict=True)
        ]
        shared = np.unique(
            [stream[t] for ts, cs in zip(targets, crossing, strict=True) for t, c in zip(ts, cs, strict=True) if c]
        ).astype(np.int64)
        among = np.zeros(int(stream.max()) + 1, bool)
        among[shared] = True
        among = np.flatnonzero(among[stream])
        needed[among[:: 1 + len(among) // _MOST_CUTS]] = True
        meeting = of.meeting if self.place is None else self.place[of.meeting]
        breaks[meeting] = True
        needed[meeting] = True
        breaks[1:] |= needed[:-1]
        head = np.flatnonzero(breaks)
        # Operations without a recorded launch belong to whatever segment they are in: only their order counts.
        slots = slots.copy()
        slot_of_head = np.maximum.reduceat(slots, head) if n else slots
        total = np.cumsum(gap + duration)
        tail = np.append(head[1:], n) - 1
        a = total[tail] + np.maximum.reduceat(ready + duration - total, head)
        b = total[tail] - np.where(head > 0, total[np.maximum(head - 1, 0)], 0)
        self.head, self.tail = head, tail
        self.a, self.b, self.slot_of_head = a, b, slot_of_head
        self.direct = duration[head] + total[tail] - total[head]
        self.first_duration = alone[head]
        self.segment_of = np.cumsum(breaks) - 1
        self.seg_stream = stream[head]
        self.begins = of.start if self.place is None else of.start[np.argsort(self.place)]
        self.waits_of: dict[int, list[int]] = {}
        for w, o in zip(self.segment_of[waiting].tolist(), self.segment_of[awaited].tolist(), strict=True):
            self.waits_of.setdefault(w, []).append(o)
        self.targets = [[int(self.segment_of[t]) for t in ts] for ts in targets]
        self.crossing, self.shared = crossing, set(shared.tolist())
        row = np.maximum(of.launch[place_of[tail]], 0)
        self.seg_called = of.call_start[row].copy()
        for one in self.threads:
            mine = of.call_thread[row] == one
            self.seg_called[mine] = self.play.own(one, self.seg_called[mine])
        self.seg_slot = np.where(of.launch[place_of[tail]] >= 0, self.slots[place_of[tail]], -1)
        self.full = self.segment_of[full].tolist()
        self.meets = dict(zip(self.segment_of[meeting].tolist(), range(len(meeting)), strict=True))
        self.step_parts: list[list[int]] = []
        self.beside = self.segment_of[beside]
        self.beside_place = beside if self.place is None else order[beside]
        if in_step is not None:
            ends = np.flatnonzero(last & ~other)
            number, segment = in_step[ends], self.segment_of[ends]
            parts: list[list[int]] = [[] for _ in range(len(of.steps))]
            for k, s in zip(number.tolist(), segment.tolist(), strict=True):
                parts[k].append(s)
            self.step_parts = parts
            if change.aside is not None:
                self._join_at_steps(in_step)

    def _placed(self, targets: list[int]) -> list[int]:
        """Targets of a blocking call on the streams as they are played; what was moved aside is not waited for."""
        aside, place = self.change.aside, self.place
        if place is None or aside is None:
            return targets
        # A value that is read back must be there all the same: what stood before the copy is waited for.
        kept = [self.kept[t] for t in targets if not (aside[t] and self.of.staged[t])]
        return [int(place[t]) for t in kept if t >= 0]

    def _in_step(self) -> npt.NDArray[np.int64] | None:
        of = self.of
        if not len(of.steps):
            return None
        row = np.maximum(of.launch, 0)
        at = steps.number(of.steps.assign(end_ns=of.steps["cpu_end_ns"]), of.call_start[row])
        ours = of.process == int(of.steps["process"].iloc[0])
        return np.where((of.launch >= 0) & ours, at, -1)

    def _by_others(self) -> Bool:
        """What other threads than that of the steps launched, in the steps' process."""
        of = self.of
        thread, process = (int(of.steps[column].iloc[0]) for column in ("thread", "process"))
        called = of.call_thread[np.maximum(of.launch, 0)]
        return np.asarray((of.launch >= 0) & (of.process == process) & (called != thread))

    def _join_at_steps(self, in_step: Int) -> None:
        """A step's work waits for what was moved aside in the step before."""
        aside = self.seg_stream > int(self.of.stream.max())
        number = in_step[self.head]
        last_aside: dict[int, list[int]] = {}
        for segment in np.flatnonzero(aside).tolist():
            last_aside.setdefault(int(in_step[self.tail[segment]]), []).append(segment)
        seen: set[tuple[int, int]] = set()
        for segment in np.flatnonzero(~aside & (number > 0)).tolist():
            key = int(self.seg_stream[segment]), int(number[segment])
            if key not in seen:
                seen.add(key)
                before = last_aside.get(key[1] - 1, [])
                if before:
                    self.waits_of.setdefault(segment, []).append(before[-1])

    def played(self) -> Played:
        of, play = self.of, self.play
        n_slots = len(self.cut_end) + len(self.threads)
        delay: list[float] = [0] * n_slots
        end_of: list[float] = [_NEVER] * len(self.head)
        stream_end: dict[int, float] = dict(enumerate(of.released_ns.tolist()))
        own_start = np.empty(len(self.cut_end), np.int64)
        own_end = np.empty(len(self.cut_end), np.int64)
        for c in self.threads:
            part = slice(self.low[c], self.high[c])
            own_start[part], own_end[part] = play.own(c, self.cut_start[part]), play.own(c, self.cut_end[part])
        # What each node has to come after, in the order of the recording.
        slot_time = np.full(n_slots, _NEVER, np.int64)
        slot_of_cut = np.empty(len(self.cut_end), np.int64)
        for c in self.threads:
            part = slice(self.low[c], self.high[c])
            slot_of_cut[part] = self.base[c] + 1 + np.arange(self.high[c] - self.low[c])
        slot_time[slot_of_cut] = self.cut_end
        begins = self.begins[self.head]
        key = np.maximum(begins, np.where(self.slot_of_head >= 0, slot_time[np.maximum(self.slot_of_head, 0)], _NEVER))
        meeting = np.array([*self.meets], np.int64)
        gathered = pd.Series(key[meeting]).groupby(of.meeting_of).transform("max").to_numpy()
        # Cuts stand first: of two at one time, the cut; what leaves a collective stands behind the arrivals.
        order = np.argsort(np.concatenate([self.cut_end, key, gathered]), kind="stable")
        n_cuts, n_nodes = len(self.cut_end), len(self.cut_end) + len(key)
        a, b, slot = self.a.tolist(), self.b.tolist(), self.slot_of_head.tolist()
        direct, stream = self.direct.tolist(), self.seg_stream.tolist()
        cut, own_s, own_e = self.cut.tolist(), own_start.tolist(), own_end.tolist()
        slot_of_cut_l = slot_of_cut.tolist()
        n_block = len(of.cut_rows)
        cost, tail = of.cut_cost, of.cut_tail
        if self.change.aside is not None:
            aside = of.cut_is_own & self.change.aside[of.cut_own_copy]
            cost = np.where(aside, of.call_ns, cost)
        cost, tail = cost.tolist(), tail.tolist()
        n_full = n_block + len(of.throttled)
        pause_own, pause_slot = np.empty(len(of.pause_by), np.int64), np.empty(len(of.pause_by), np.int64)
        for t in np.unique(of.pause_by).tolist():
            mine = of.pause_by == t
            pause_own[mine], pause_slot[mine] = play.own(t, of.pause_end[mine]), self.slot(t, of.pause_end[mine])
        over_of, over_slot = pause_own.tolist(), pause_slot.tolist()
        n_pause, arrivals = n_full + len(of.pause_by), of.arrival_end.tolist()
        skip_pauses = "hand-overs" in of.without
        waits = of.call_start[of.cut_rows] < of.begin_ns if not self.change.waits else np.ones(n_block, bool)
        waits = (waits & ("syncs" not in of.without)).tolist()
        after, room, call_ns = of.after_ns, of.room_ns, of.call_ns
        full, targets, waits_of = self.full, self.targets, self.waits_of
        meets, meeting_of, transfer = self.meets, of.meeting_of.tolist(), of.transfer_ns.tolist()
        last_arrival: dict[int, float] = {}
        seg_called, seg_slot, shared, crossing = (
            self.seg_called.tolist(),
            self.seg_slot.tolist(),
            self.shared,
            self.crossing,
        )
        launched: dict[int, list[float]] = {where: [] for where in shared}
        ended: dict[int, list[float]] = {where: [] for where in shared}
        lasting = self.first_duration.tolist()
        for node in order.tolist():
            if node >= n_nodes:  # a device leaves a collective
                number = node - n_nodes
                s = int(meeting[number])
                end_of[s] = stream_end[stream[s]] = last_arrival[meeting_of[number]] + transfer[number]
                continue
            if node >= n_cuts:
                s = node - n_cuts
                where = stream[s]
                end = stream_end.get(where, of.earliest_ns) + b[s]
                end = max(end, delay[slot[s]] + a[s] if slot[s] >= 0 else a[s])
                for other in waits_of.get(s, ()):
                    end = max(end, end_of[other] + after + direct[s])
                if s in meets:
                    group = meeting_of[meets[s]]
                    last_arrival[group] = max(last_arrival.get(group, _NEVER), end - lasting[s])
                    continue
                end_of[s] = end
                stream_end[where] = end
                if where in shared:
                    at = seg_called[s] + delay[seg_slot[s]] if seg_slot[s] >= 0 else _NEVER
                    launched[where].append(max(at, launched[where][-1]) if launched[where] else at)
                    ended[where].append(end)
                continue
            number = cut[node]
            mine = slot_of_cut_l[node]
            begun = own_s[node] + delay[mine - 1]
            if number >= n_pause:  # a batch arrives
                until = max(begun, arrivals[number - n_pause]) if self.change.arrivals else begun
            elif number >= n_full:  # another thread ends a pause
                until = (
                    begun if skip_pauses else max(begun, over_of[number - n_full] + delay[over_slot[number - n_full]])
                )
            elif number >= n_block:  # into a full queue
                done = end_of[full[number - n_block]] + room
                until = max(begun + call_ns, done)
            else:
                until = begun + cost[number]
                if waits[number]:
                    for target, by_other in zip(targets[number], crossing[number], strict=True):
                        if by_other:  # what it had launched by now
                            at = bisect.bisect_right(launched[stream[target]], begun)
                            done = ended[stream[target]][at - 1] if at else _NEVER
                        else:
                            done = end_of[target]
                        until = max(until, done + tail[number])
            delay[mine] = until - own_e[node]
        return self._read(delay, end_of)

    def _read(self, delay: list[float], end_of: list[float]) -> Played:
        of, play = self.of, self.play
        if not len(of.steps):
            ends = np.array(end_of)
            firsts = np.append(True, self.seg_stream[1:] != self.seg_stream[:-1])
            begin = (ends - self.first_duration)[firsts].min()
            return Played(int(ends.max() - begin), np.empty(0, np.int64))
        thread = int(of.steps["thread"].iloc[0])
        cpu = of.steps["cpu_end_ns"].to_numpy()
        slots = self.slot(thread, cpu)
        reached = play.own(thread, cpu) + np.array(delay)[slots]
        ends = reached.astype(np.int64)
        for k, parts in enumerate(self.step_parts):
            ends[k] = max([int(ends[k]), *(int(end_of[s]) for s in parts)])
        if len(self.beside):
            row, slots = of.launch[self.beside_place], self.slots[self.beside_place]
            called = of.call_start[row]
            for one in _kinds(of.call_thread[row]).tolist():
                mine = of.call_thread[row] == one
                called[mine] = play.own(one, called[mine])
            at = np.searchsorted(np.maximum.accumulate(reached), called + np.array(delay)[slots], side="right")
            within = at < len(ends)
            np.maximum.at(ends, at[within], np.array(end_of)[self.beside[within]].astype(np.int64))
        ends = np.maximum.accumulate(ends)
        first = of.steps["start_ns"].to_numpy()[:1]
        begin = int(play.own(thread, first)[0] + delay[int(self.slot(thread, first)[0])])
        if of.steps["begin_ns"].iloc[0] > first[0]:  # behind a step that is not played
            begin = max(begin, int(of.steps["begin_ns"].iloc[0]))
            ends = np.maximum(ends, begin)
        return Played(int(ends[-1] - begin), ends - begin)
