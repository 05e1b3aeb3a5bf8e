"""A trace as a schedule: what each part takes alone, and what it waits for."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.ranks.alignment import Meetings
from nsightkit.analysis.replay.crowding import Crowding
from nsightkit.analysis.replay.model import HELD_NS, MOST_CUTS, NEVER, Bool, Change, Cuts, Int, Played, kinds_of, place
from nsightkit.analysis.replay.play import Layout, Play
from nsightkit.analysis.replay.waiting_threads import waits_for_data, waits_for_threads
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps.threads import BLOCKING, FREES, UNIFIED, Threads
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["ALLOCATES", "Schedule"]


_OF_DEVICE = re.compile(r"(Device|Ctx|Context|Thread)Synchronize")
_OF_EVENT = re.compile(r"EventSynchronize")
_ONLY_WAITS = re.compile(r"Synchronize")
ALLOCATES = re.compile(r"Malloc|Free|Alloc")
_WAIT_EVENT, _RECORD_EVENT = re.compile(r"StreamWaitEvent"), re.compile(r"EventRecord")

#: Latencies where a trace has no example of its own, ns: typical of CUDA devices.
_START_NS, _NEXT_NS, _RETURN_NS, _CALL_NS = 3_000, 1_000, 6_000, 4_000
#: What has begun this much later than launch and stream explain was kept waiting ...
_LATE_NS = 3_000
#: ... by what ended at most this long before; and so many that ended before it are looked at.
_AFTER_NS, _LOOKED_AT = 25_000, 12
#: What starts earlier than its launch, though by no more than this, shows that two clocks differ: this share does not.
_CLOCK_NS, _SURE = 100_000, 0.999
#: A launch into a full queue: so many operations wait already, and the call takes so many times its median.
_DEEP, _SLOW_CALL = 500, 10
#: Operations of one stream run one after another; where they overlap for more than this share, streams are not known.
_OVERLAP = 0.02
#: Of all operations, those that may be inferred to wait for another stream: beyond that, their streams are in doubt.
_GUESSED = 1 / 3
#: Work whose launch was not recorded, as a share of all GPU work, above which no schedule can be made.
_UNLINKED = 0.1
#: Launching threads, each of which may wait for any other; and pairs of a stream and a call that may wait for it.
_MOST_THREADS, _MOST_PAIRS = 256, 50_000_000
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


class Schedule:
    """A trace as a schedule.

    It is put together in the order of the methods: the operations, the calls that launched them, which threads waited
    for each other, the constants, what waited on which stream, and at last the *cuts*, at which threads wait.

    Parameters
    ----------
    trace : Trace
        Selected or whole; what is selected is played.

    Attributes
    ----------
    start, end, stream, device, table, launch, row : ndarray
        What is scheduled, by stream and time, with the row of the whole trace. A graph's replay, or whatever else one
        call launched together, is one operation.
    begun, done, by : ndarray of int64
        Start, end and thread of the launching calls; `NEVER` and -1 where the launch was not recorded.
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
        if self.unplayable is None:
            #: silences of threads that another one ended, and waits for data that somebody else prepares
            self.pauses = waits_for_threads(self)
            self.arrivals = waits_for_data(self)
            self._latencies()
            self._waits()
            self._meetings()
            self._cuts()

    # -- what there is

    def _operations(self) -> None:
        whole = self.trace.whole
        every = intervals.gpu_intervals(whole, "process", "stream", "correlation")
        # Pages of managed memory move when somebody touches them: that stands in no stream, and kernels last for it.
        moves = matching(whole.table("memops", ["kind"])["kind"], UNIFIED)
        if moves.any():
            pages = (every["table"] == GPU_TABLES.index("memops")).to_numpy(copy=True)
            pages[pages] = moves[every["row"].to_numpy()[pages]]
            every = every[~pages].reset_index(drop=True)
        every["launch"] = intervals.launch_of(whole, every["process"], every.pop("correlation")).astype(np.int32)
        self.shift_ns = self._behind_launches(every)
        every[["start_ns", "end_ns"]] += self.shift_ns
        reach = every.groupby("device")["end_ns"].cummax()
        every["stream"] = every.groupby(["process", "device", "stream"]).ngroup().astype(np.int32)
        #: when all that began on the device before each one had ended: with that in the past, nothing kept it
        every["device_before_ns"] = reach.groupby(every["device"]).shift(fill_value=NEVER)
        part = self.trace is not whole
        chosen = every[intervals.selected(self.trace, every["table"], every["row"])] if part else every
        if chosen.empty:
            self.unplayable = "there is no GPU work"
            return
        chosen = chosen.sort_values("stream", kind="stable", ignore_index=True)  # by device and start already
        ops, part_of = _joined(chosen)
        #: what the trace has of them: its table and row, and which operation it is a part of
        self.parts = chosen[["table", "row"]].assign(operation=part_of)
        lasting_ns = int((chosen["end_ns"] - chosen["start_ns"]).sum())
        columns = ["start_ns", "end_ns", "stream", "device", "table", "launch", "row"]
        # Each by itself, so that the others can go.
        self.start, self.end, self.stream, self.device, self.table, self.launch, self.row = (
            ops[column].to_numpy(copy=True) for column in columns
        )
        self._device_before_ns = ops["device_before_ns"].to_numpy(copy=True)
        self.process_of = np.zeros(int(self.stream.max()) + 1, np.int64)
        self.process_of[self.stream] = ops["process"]
        self.linked = self.launch >= 0
        self.first = np.append(True, self.stream[1:] != self.stream[:-1])
        # What stands first in its stream may have been launched before the recording began; later on it is lost.
        lost = ~self.linked & (np.maximum.accumulate(np.where(self.linked, self.stream, -1)) == self.stream)
        overlap = np.where(self.first[1:], 0, self.end[:-1] - self.start[1:]).clip(0)
        taken = self.end - self.start
        if taken[lost].sum() > _UNLINKED * lasting_ns or not self.linked.any():
            self.unplayable = "the calls that launched the GPU's work were not recorded"
        elif overlap.sum() > _OVERLAP * taken.sum():
            self.unplayable = "operations of one stream overlap: what ran after what is not known"
        #: what no operation can come before: of each stream, and of one that a change makes. What a selection leaves
        #: out happened when it did; what was selected cannot begin before that is over.
        self.released_ns = np.full(len(self.process_of), NEVER)
        self.earliest_ns = int(NEVER)
        if part:
            self.earliest_ns = int(self.start.min())
            begins = pd.Series(self.start[self.first], self.stream[self.first])
            earlier = every[every["start_ns"] < every["stream"].map(begins)].groupby("stream")["end_ns"].max()
            self.released_ns[earlier.index] = np.minimum(earlier, begins[earlier.index])
        #: when the operation before each one in its stream had ended
        self.before = np.where(self.first, self.released_ns[self.stream], np.roll(self.end, 1))

    def _behind_launches(self, ops: pd.DataFrame) -> int:
        """How far the devices' clock runs ahead of the CPU's: nothing starts before it is launched."""
        linked = (ops["launch"] >= 0).to_numpy()
        begun = self.trace.whole.table("calls", ["start_ns"])["start_ns"].to_numpy()[ops["launch"].to_numpy()[linked]]
        early = begun - ops["start_ns"].to_numpy()[linked]
        early = early[early < _CLOCK_NS]
        return max(int(np.quantile(early, _SURE, method="lower")), 0) if len(early) else 0

    def _calls(self) -> None:
        whole = self.trace.whole
        calls = whole.table("calls", ["start_ns", "end_ns", "thread", "name"])
        self.call_start, self.call_end, self.call_thread = (calls[c].to_numpy() for c in calls.columns[:3])
        self.names = calls["name"]
        self.begun, self.done, self.by = (
            np.where(self.linked, column[self.launch], none)
            for column, none in ((self.call_start, NEVER), (self.call_end, NEVER), (self.call_thread, -1))
        )
        blocks = matching(self.names, BLOCKING)
        copies = np.flatnonzero((self.table == GPU_TABLES.index("memops")) & self.linked)
        columns = whole.table("memops", ["kind", "src_kind", "dst_kind"])
        kinds = columns.iloc[self.row[copies]]
        pageable = ((kinds["src_kind"] == "pageable") | (kinds["dst_kind"] == "pageable")).to_numpy()
        #: copies whose call returns only when they are done, as that of pageable memory does
        self.own_copy, self.staged = np.zeros((2, len(self.start)), bool)
        returns = self.end[copies] <= self.done[copies] + 1_000
        self.own_copy[copies] = returns & (pageable | blocks[self.launch[copies]])
        self.staged[copies] = pageable & (kinds["kind"] != "DtoH").to_numpy()
        blocks[self.launch[self.own_copy]] = True
        if (kept := self.trace.mask("calls")) is not None:
            kept = kept.copy()
            kept[self.launch[self.linked]] = True
            blocks &= kept
        self.steps = steps.windows(self.trace)
        #: the thread and the process of the steps; what a change takes away it takes from where they begin
        self.main, self.process, self.begin_ns = (
            int(self.steps[c].iloc[0]) if len(self.steps) else int(NEVER) for c in ("thread", "process", "start_ns")
        )
        if self.trace is not whole and not len(self.steps):
            self.begin_ns = int(self.begun[self.linked].min())
        self.threads = np.union1d(kinds_of(self.by[self.linked]), self.steps["thread"])
        if len(self.threads) > _MOST_THREADS:
            self.unplayable = f"{len(self.threads):,} threads launched its work"
            return
        rows = np.flatnonzero(blocks & np.isin(self.call_thread, self.threads))
        rows = rows[np.lexsort((-self.call_end[rows], self.call_start[rows]))]
        # Of a runtime's call and the driver's inside it, or of one that was recorded twice, the outer one is meant.
        reach = pd.Series(self.call_end[rows]).groupby(self.call_thread[rows])
        self.blocking = rows[
            self.call_end[rows] > reach.cummax().groupby(self.call_thread[rows]).shift(fill_value=NEVER)
        ]
        if len(self.blocking) * len(self.process_of) > _MOST_PAIRS:
            self.unplayable = f"{len(self.blocking):,} calls may wait for {len(self.process_of):,} streams"

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
            names = rows.pop("name")
            found.append(rows[names.isin([n for n in names.cat.categories if chosen(str(n))]).to_numpy()])
        start, end, thread = (column.to_numpy() for _, column in pd.concat(found).items())
        return {one: intervals.merge(start[thread == one], end[thread == one]) for one in self.threads.tolist()}

    def dispatch(
        self, busy: Callable[[int], tuple[Int, Int]], launch_ns: int, late: Int | Sequence[int] = ()
    ) -> dict[int, tuple[Int, Int]]:
        """What dispatch between consecutive launches takes beyond a given time.

        Parameters
        ----------
        busy : callable
            Gives, for a thread, the intervals that are not dispatch.
        launch_ns : int
            What stays from the start of one launch to that of the next.
        late : ndarray of int
            Launches that came late for dispatch alone, whatever else lies between the one before and them.

        Returns
        -------
        dict of int to tuple of ndarray of int64
            Disjoint intervals a thread.
        """
        found: dict[int, tuple[Int, Int]] = {}
        calls = np.append(self.cut_rows, self.launch[self.staged])
        for thread in self.threads.tolist():
            launched = self.launch[self.by == thread]
            launched = launched[np.argsort(self.call_start[launched], kind="stable")]  # few runs, as a rule
            if len(launched) < 2:
                continue
            start = self.call_start[launched]
            mine, pauses = calls[self.call_thread[calls] == thread], self.pauses[self.pauses["thread"] == thread]
            own = (self.call_start[mine], self.call_end[mine])
            other = intervals.Coverage(
                *intervals.union(busy(thread), self.passive[thread], own, (pauses["start_ns"], pauses["end_ns"]))
            )
            between = np.diff(other.before(start))
            apart = np.diff(start) - between
            only = (apart > launch_ns) & ((between <= launch_ns) | np.isin(launched[1:], late))
            # Launches that follow each other as launches do, or in operators, have only dispatch between them.
            far = np.flatnonzero(only & (apart > _SLOW_CALL * np.median(apart)))
            only[far] = 2 * self.facts.dispatch(thread).covered(start[far], start[far + 1]) >= apart[far]
            away = start[:-1][only] + launch_ns, start[1:][only]
            found[thread] = intervals.common(away, (other.start, other.end), outside=True)
        return found

    # -- constants

    def _latencies(self) -> None:
        linked, start, begun, done = self.linked, self.start, self.begun, self.done
        meanwhile = self.staged & (start < done)  # staged piece by piece
        idle = linked & (self._device_before_ns < begun) & ~meanwhile
        queued = linked & ~self.first & (done + 10_000 < self.before)
        del self._device_before_ns
        #: ready = launch call's start or end + latency: whichever was the steadier
        self.ready = np.where(self.own_copy, begun + _CALL_NS, done) + _START_NS
        self.gap = np.full(len(start), _NEXT_NS, np.int32)
        kind = 8 * self.table + 4 * meanwhile + 2 * self.staged + self.own_copy
        for one in kinds_of(kind).tolist():
            mine = kind == one
            samples = _some(mine & idle)
            if len(samples):
                # A call that returns after its copy says nothing by its end, one that stages it nothing by its start.
                edges = [begun] if one & 1 else [done] if one & 2 else [done, begun]
                late = [start[samples] - edge[samples] for edge in edges]
                steady = int(np.argmin([np.median(np.abs(each - np.median(each))) for each in late]))
                np.add(edges[steady], int(np.median(late[steady])), out=self.ready, where=mine & linked)
            samples = _some(mine & queued)
            between = start[samples] - self.before[samples]
            between = between[between <= HELD_NS]
            self.gap[mine] = int(np.median(between)) if len(between) else _NEXT_NS
        # Of what runs behind a call that takes its time, the call's end says more.
        took, apart = done - begun, linked & ~self.own_copy
        self.call_ns = int(np.median(took[apart])) if apart.any() else _CALL_NS
        slow = apart & (took > _SLOW_CALL * self.call_ns)
        self.ready[slow] = np.maximum(self.ready[slow], np.minimum(done[slow], start[slow]))
        # The CPU stages pageable memory itself: until the copy begins or, where that had to wait, at the copy's pace.
        behind = meanwhile & (self.before > start - 2 * _START_NS)
        self.ready[meanwhile] = start[meanwhile]
        self.ready[behind] = np.minimum(begun + self.call_ns + self.end - start, start)[behind]
        # Launched before the recording began: it is where it is in its stream.
        self.ready[~linked] = start.min()
        lost = ~linked & self.first
        self.ready[lost] = start[lost]
        # Launches that waited for room in the queue.
        full = np.flatnonzero(slow & (took > 20_000))
        if len(full):
            launches, ends = np.sort(begun[linked]), np.sort(self.end)
            full = full[np.searchsorted(launches, begun[full]) - np.searchsorted(ends, begun[full]) >= _DEEP]
        #: per thread, time in which it only waited for that
        self.passive = {
            one: (begun[mine] + self.call_ns, done[mine])
            for one in self.threads.tolist()
            for mine in [full[self.by[full] == one]]
        }
        self.full = full[np.argsort(begun[full], kind="stable")][:: 1 + len(full) // MOST_CUTS]

    # -- who waits for what

    def _waits(self) -> None:
        """Pairs (operation, what it waits for on another stream)."""
        explained = np.maximum(self.before + self.gap, self.ready)
        told, told_of = self._recorded_waits()
        until = explained.copy()
        np.maximum.at(until, told, self.end[told_of])
        late = (self.start > until + _LATE_NS) & (self.linked | ~self.first)
        waits, on = self._just_ended(np.flatnonzero(late), explained)
        self.inferred += len(waits)
        if len(np.unique(waits)) > _GUESSED * len(self.start):
            self.unplayable = "its operations seem to wait for other streams again and again, and nothing in it says so"
        self.waiting, self.awaited = np.unique([np.append(waits, told), np.append(on, told_of)], axis=1)
        # What did wait, and for how long after: of others the end was long past.
        after = self.start[self.waiting] - self.end[self.awaited]
        binding = after[(after <= _AFTER_NS) & (self.start[self.waiting] > explained[self.waiting] + _LATE_NS)]
        self.after_ns = int(np.median(binding)) if len(binding) else 1_500
        # What stays unexplained is work that the recording does not contain; it takes its time in any replay.
        np.maximum.at(explained, self.waiting, self.end[self.awaited] + self.after_ns)
        late_ns = np.where(self.first & ~self.linked, 0, self.start - explained)
        held = late_ns > HELD_NS
        # A stream that was busy before the recording began is free when its first operation starts.
        busy = np.flatnonzero(held & self.first)
        free = pd.Series(self.start[busy], self.stream[busy]).reindex(
            np.arange(len(self.released_ns)), fill_value=NEVER
        )
        self.ready = np.maximum(self.ready, free.to_numpy()[self.stream])
        #: time for which each operation was held up so
        self.held_ns = np.where(held & ~self.first, late_ns, 0) if held.any() else np.broadcast_to(0, held.shape)
        del self.before

    def _just_ended(self, late: Int, explained: Int) -> tuple[Int, Int]:
        """What late operations waited for: what ended just before them, on their thread and device if anything did."""
        order = np.argsort(self.end, kind="stable")
        ends = self.end[order]
        waits, on = [late[:0]], [late[:0]]
        for same_device, same_thread in ((True, True), (True, False), (False, False)):
            left = late
            at = np.searchsorted(ends, self.start[left] + 500, side="right") - 1
            for _ in range(_LOOKED_AT if self.stream[0] != self.stream[-1] else 0):
                other = order[at]
                near = (at >= 0) & (self.start[left] - self.end[other] <= _AFTER_NS)
                near &= self.end[other] > explained[left] - _LATE_NS
                fits = near & (self.stream[other] != self.stream[left]) & (self._owner(other) == self._owner(left))
                # What is launched later is not waited for.
                fits &= (self.begun[other] <= self.begun[left]) | ~self.linked[left]
                if same_device:
                    fits &= self.device[other] == self.device[left]
                if same_thread:
                    fits &= self.linked[left] & (self.by[other] == self.by[left])
                waits.append(left[fits])
                on.append(other[fits])
                left, at = left[~fits & near], at[~fits & near] - 1
            late = np.setdiff1d(late, np.concatenate(waits))
        return np.concatenate(waits), np.concatenate(on)

    @functools.cached_property
    def _by_launch(self) -> tuple[Int, Int, Int]:
        """Operations in the order in which threads launched them, thread by thread; and those threads and times."""
        linked = np.flatnonzero(self.linked)
        order = linked[np.lexsort((self.begun[linked], self.by[linked]))]
        return order, self.by[order], self.begun[order]

    def _recorded_waits(self) -> tuple[Int, Int]:
        """What the program told streams to wait for, where that fits what happened.

        A call that makes a stream wait does not say for what: for the last work that the thread launched on
        another stream before it. The stream is that of the thread's next launch.
        """
        if self.stream[0] == self.stream[-1]:
            return np.empty((2, 0), np.int64)[0], np.empty((2, 0), np.int64)[1]
        # Where no such call was recorded, an event that one stream records before work goes to another tells as much.
        told = matching(self.names, _WAIT_EVENT)
        told = told if told.any() else matching(self.names, _RECORD_EVENT)
        kept = self.trace.mask("calls")
        calls = np.flatnonzero(told if kept is None else told & kept)
        order, thread, begun = self._by_launch
        stream = self.stream[order]
        # Of each launch, the last one before it on another stream.
        changed = (stream[1:] != stream[:-1]) | (thread[1:] != thread[:-1])
        last = np.maximum.accumulate(np.append(-1, np.where(changed, np.arange(len(changed)), -1)))
        asks = self.call_thread[calls]
        at = place(thread, begun, asks, self.call_start[calls])
        known = (at < len(order)) & np.isin(asks, thread)
        at, asks = at[known], asks[known]
        other = last[at]
        known = (thread[at] == asks) & (other >= 0) & (thread[other] == asks)
        at, other = order[at[known]], order[other[known]]
        fits = (self.end[other] <= self.start[at] + 500) & (self._owner(at) == self._owner(other))
        return at[fits], other[fits]

    def _meetings(self) -> None:
        """Collectives of several devices: none of them does its work before the last device has arrived."""
        columns = ["device", "start_ns"]
        several = len(kinds_of(self.device)) > 1
        empty = pd.DataFrame(columns=[*columns, "end_ns", "until_ns", "collective"], dtype=np.int64)
        met = Meetings(self.trace).met if several else empty
        mine = pd.DataFrame({"at": np.arange(len(self.start)), "device": self.device})
        mine["start_ns"] = self.start - self.shift_ns
        mine = mine[mine["start_ns"].isin(met["start_ns"])]
        found = met.merge(mine.drop_duplicates(columns), on=columns)
        #: positions in the schedule, the collective's number, and of each the time from the last arrival on
        self.meeting, self.meeting_of = found["at"].to_numpy(), found["collective"].to_numpy(np.int64)
        self.transfer_ns = (found["end_ns"] - found["until_ns"]).to_numpy(np.int64)

    def _cuts(self) -> None:
        """Where threads wait: blocking calls, launches into a full queue, pauses, batches that arrive."""
        calls, targets, of_target = self._blocking_calls()
        full, pauses, batches = self.full, self.pauses, self.arrivals
        room = np.maximum(self._ended_by(self.done[full]), 0)
        room_ns = int(np.median(self.done[full] - self.end[room])) if len(full) else 0
        cuts = [
            _cut(self.threads, NEVER, NEVER),
            calls,
            # Launches into a full queue wait for an operation to end.
            _cut(self.by[full], self.begun[full], self.done[full], cost=self.call_ns, tail=room_ns),
            _cut(pauses["thread"], pauses["start_ns"], pauses["end_ns"]),
            _cut(batches["thread"], batches["start_ns"], batches["end_ns"], arrival=batches["end_ns"]),
        ]
        at_queue, at_pauses = len(cuts[0]) + len(calls), len(cuts[0]) + len(calls) + len(full)
        every = pd.concat(cuts, ignore_index=True)
        order = np.lexsort((every["end"], every["thread"]))
        number = np.argsort(order)
        self.cuts = Cuts(**{str(column): values.to_numpy()[order] for column, values in every.items()})
        #: operations that cuts wait for, and the number of each one's cut
        self.target = np.append(targets, room)
        self.cut_of_target = number[np.append(len(cuts[0]) + of_target, at_queue + np.arange(len(full)))]
        #: cuts that wait for another thread, which, and for what that had got to at which time
        joining, rests = self._joining()
        self.asking = number[np.append(at_pauses + np.arange(len(pauses)), len(cuts[0]) + joining)]
        self.asked = np.append(pauses["by"], pauses["thread"][rests])
        self.asked_ns = np.append(pauses["end_ns"], pauses["start_ns"][rests])

    def _blocking_calls(self) -> tuple[pd.DataFrame, Int, Int]:
        """Blocking calls with the operations that they wait for: the last of each stream launched before them."""
        rows, names = self.blocking, self.names
        start, end, thread = self.call_start[rows], self.call_end[rows], self.call_thread[rows]
        of_device, of_event, allocates, frees = (
            matching(names, these)[rows] for these in (_OF_DEVICE, _OF_EVENT, ALLOCATES, FREES)
        )
        linked = np.flatnonzero(self.linked)
        streams = np.split(linked, np.flatnonzero(np.diff(self.stream[linked])) + 1)
        # In the order of the stream; a launch by another thread may have begun a little earlier.
        at = [np.searchsorted(np.maximum.accumulate(self.begun[mine]), start) - 1 for mine in streams]
        #: of each stream and call, the last operation, -1 where there is not any yet
        last = np.stack([np.append(mine, -1)[these] for mine, these in zip(streams, at, strict=True)])

        def latest(fits: Bool, time: Int) -> Int:
            """Of the streams that fit, the operation of the latest time, -1 where none does."""
            best = np.argmax(np.where(fits, time, NEVER), axis=0)
            return np.where(fits.any(axis=0), last[best, np.arange(len(rows))], -1)

        ended, mine = self.end[last], (last >= 0) & (self._owner(last) == thread >> 24)
        drained = mine & (ended > start) & (ended <= end + 1_000)
        # What the thread launched itself, and that ended just before; else whatever did.
        itself = drained & (self.by[last] == thread) & (ended > end - _AFTER_NS)
        awaited = latest(np.where(itself.any(axis=0), itself, drained), ended)
        # An event may lie before the end of its stream.
        events = np.flatnonzero(of_event & (awaited < 0))
        before = self._ended_by(end[events])
        hit = (before >= 0) & (self.end[before] > start[events]) & (self._owner(before) == thread[events] >> 24)
        awaited[events[hit]] = before[hit]
        copies = np.flatnonzero(self.own_copy)
        own = pd.Series(copies, self.launch[copies]).reindex(rows, fill_value=-1).to_numpy()
        awaited = np.where(own >= 0, own, awaited)
        waited = awaited >= 0
        # What did not wait, and might in another schedule: for what was launched last.
        default = np.where(of_event | allocates & ~frees, -1, latest(last >= 0, self.begun[last]))
        target = np.where(waited, awaited, default)
        returned = end - self.end[awaited]
        # What does not only wait, and returns long after the GPU was done, took its time for something else.
        only_waits = matching(names, _ONLY_WAITS)[rows]
        waited &= only_waits | frees | (own >= 0) | (returned <= _AFTER_NS)
        settled = waited & (own < 0) & ~allocates
        return_ns = int(np.median(returned[settled])) if settled.any() else _RETURN_NS
        cost = end - start
        quick = cost[~waited & ~allocates]
        quick_ns = int(min(np.median(quick), 20_000)) if len(quick) else _CALL_NS
        # After its copy a call may still have work of its own to do: to empty the staging buffer.
        tail = np.where(own >= 0, np.maximum(returned, 0), return_ns)
        cost = np.where(waited, np.minimum(quick_ns, cost), cost)
        # The CPU's part of a copy from pageable memory lies before it: staging.
        cost = np.where((own >= 0) & self.staged[own], self.ready[own] - start, cost)
        # What frees memory waits for an idle device, and all that it does from there on is its own work.
        idle = np.where(waited, np.clip(self.end[awaited], start, end), start)
        cost, tail, end = (np.where(frees, other, own) for other, own in ((0, cost), (0, tail), (idle, end)))
        keep = np.flatnonzero(waited | ((target >= 0) & (~allocates | frees)))
        self.cut_rows = rows[keep]
        self.inferred += int((waited & (own < 0))[keep].sum())
        # A call that waits for a device waits for all its streams.
        whole_device, device = (of_device & ~allocates | frees)[keep], self._device_of(self.cut_rows)
        stream, call = np.nonzero(
            mine[:, keep]
            & whole_device
            & ((device == -1) | (device == self.device[last[:, keep]]))
            & self._is_news(last[:, keep], [thread[keep], device, whole_device, frees[keep]])
        )
        single = np.flatnonzero(~whole_device)
        calls = _cut(thread[keep], start[keep], end[keep], cost[keep], tail[keep], own[keep])
        calls = calls.assign(blocks=True, frees=frees[keep])
        return calls, np.append(target[keep[single]], last[stream, keep[call]]), np.append(single, call)

    @staticmethod
    def _is_news(last: Int, alike: Sequence[np.ndarray]) -> Bool:
        """Which operations a call waits for that the one before it, of those that are alike, did not wait for."""
        order = np.lexsort(alike)
        same = np.logical_and.reduce([values[order[1:]] == values[order[:-1]] for values in alike])
        news = np.ones(last.shape, bool)
        news[:, order[1:]] = ~(same & (last[:, order[1:]] == last[:, order[:-1]]))
        return news

    def _joining(self) -> tuple[Int, Int]:
        """Calls of the steps' thread that blocked while a thread came to rest that it wakes again later.

        Nothing in the trace says whether they waited for that thread as well. Who hands over each time, and never
        before the last time's work was done, is taken to wait for that. Gives the numbers of such calls, and of the
        pauses that began meanwhile.
        """
        pause_start = self.pauses["start_ns"].to_numpy()
        rest = np.flatnonzero((self.pauses["by"] == self.main).to_numpy() & (pause_start > NEVER))
        mine = np.flatnonzero(self.call_thread[self.cut_rows] == self.main)
        start, end = self.call_start[self.cut_rows[mine]], self.call_end[self.cut_rows[mine]]
        at = np.searchsorted(start, pause_start[rest], side="right") - 1
        within = np.append(end, NEVER)[at] >= pause_start[rest]
        return mine[at[within]], rest[within]

    def _owner(self, at: Int) -> Int:
        """The process of some operations."""
        return np.asarray(self.process_of[self.stream[at]])

    def _ended_by(self, times: Int) -> Int:
        """The operation that ended last by each time, -1 where none had."""
        order = np.argsort(self.end, kind="stable") if len(times) else times
        at = np.searchsorted(self.end[order], times, side="right") - 1
        return np.where(at >= 0, order[at], -1)

    def _device_of(self, rows: Int) -> Int:
        """The device that a thread gave work last before each call: a call that waits for a device means that one."""
        if (self.device == self.device[0]).all():
            return np.full(len(rows), -1)
        order, thread, begun = self._by_launch
        at = place(thread, begun, self.call_thread[rows], self.call_start[rows]) - 1
        return np.where((at >= 0) & (thread[at] == self.call_thread[rows]), self.device[order[at]], -1)

    # -- playing

    #: the segments where nothing is moved aside, and what kernels lose to those beside them
    layout = functools.cached_property(Layout)
    crowding = functools.cached_property(Crowding)

    @functools.cached_property
    def recorded(self) -> Played:
        """The window and its steps as they were recorded."""
        ends = (self.steps["end_ns"] - self.steps["begin_ns"].min()).to_numpy()
        return Played(int(ends[-1] if len(ends) else self.end.max() - self.start.min()), ends)

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
            not change.arrivals and len(self.arrivals),
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
        if self.is_untouched(change) or not self.crowding.possible:
            return play.played()
        if self.crowding.factor is None:
            return dataclasses.replace(play.played(), crowded_ns=self.crowding.added_ns(*play.times()))
        given = self.end - self.start if change.durations_ns is None else change.durations_ns
        for _ in range(_ROUNDS):
            durations = self.crowding.durations_ns(given, *play.times())
            play = Play(self, layout, dataclasses.replace(change, durations_ns=durations))
        return play.played()

    # -- columns of the operations

    @functools.cached_property
    def collective(self) -> Bool:
        """Which operations are collectives."""
        table, out = self.trace.whole.table("kernels", ["name", "collective"]), np.zeros(len(self.start), bool)
        talks = (categorize(table["name"]) == "communication") | (table["collective"] != "").to_numpy()
        kernels = self.table == GPU_TABLES.index("kernels")
        out[kernels] = talks[self.row[kernels]]
        return out

    @functools.cached_property
    def slot(self) -> Int:
        """The slot that each operation was launched in, -1 where its launch was not recorded."""
        return np.where(self.linked, self.cuts.slot(self.by, self.begun), np.int32(-1))

    @functools.cached_property
    def in_step(self) -> Int:
        """The step that each operation was launched in, -1 for none."""
        at = steps.number(self.steps.assign(end_ns=self.steps["cpu_end_ns"]), self.begun)
        return np.where(self.process_of[self.stream] == self.process, at, -1).astype(np.int32)

    @functools.cached_property
    def by_others(self) -> Bool:
        """What other threads than that of the steps launched, in the steps' process."""
        return np.asarray(self.linked & (self.process_of[self.stream] == self.process) & (self.by != self.main))


def _joined(ops: pd.DataFrame) -> tuple[pd.DataFrame, Int]:
    """Make what one call launched together one operation, from the first start to the last end.

    Gives the operations, and the number of each one's among them.
    """
    launch = ops["launch"].to_numpy()
    together = (launch >= 0) & (np.bincount(launch + 1)[launch + 1] > 1)
    if not together.any():
        return ops, np.arange(len(ops), dtype=np.int32)
    several = ops[together].sort_values("start_ns", kind="stable")
    head = several["launch"].drop_duplicates()
    keep = ~together
    keep[head.index] = True
    place_of = np.cumsum(keep) - 1
    place_of[together] = pd.Series(place_of[head.index], head)[launch[together]]
    ends = several.groupby("launch")["end_ns"].max()
    ops = ops.assign(end_ns=ops["end_ns"].mask(together, ops["launch"].map(ends)).astype(np.int64))
    return ops[keep].reset_index(drop=True), place_of


def _cut(
    thread: Any,
    start: Any,
    end: Any,
    cost: Any = 0,
    tail: Any = 0,
    copy: Any = -1,
    arrival: Any = NEVER,
    blocks: Any = False,
    frees: Any = False,
) -> pd.DataFrame:
    """Cuts of one kind, with the columns of :class:`Cuts`."""
    return pd.DataFrame(locals())


def _some(mask: Bool) -> Int:
    """Enough of what is meant for a median."""
    rows = np.flatnonzero(mask)
    return rows[:: 1 + len(rows) // _ENOUGH]
