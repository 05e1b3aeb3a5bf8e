"""How a schedule falls into segments, between the points at which one part waits for another."""

from __future__ import annotations

import functools
import heapq
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.model import MOST_CUTS, NEVER, Bool, Int, kinds_of, rows_of

if TYPE_CHECKING:
    from nsightkit.analysis.replay.schedule import Schedule

__all__ = ["Layout", "Slots"]


class Slots:
    """Slots of the threads; the same for all changes.

    A *slot* is the time of a thread between two cuts: in it all that the thread does is early or late by the same
    delay.

    Parameters
    ----------
    of : Schedule
    """

    def __init__(self, of: Schedule) -> None:
        rows = np.concatenate([of.cut_rows, of.throttled])
        thread = np.concatenate([of.call_thread[rows], of.pause_thread, of.arrival_thread])
        start = np.concatenate([of.call_start[rows], of.pause_start, of.arrival_start])
        end = np.concatenate([of.call_end[rows], of.pause_end, of.arrival_end])
        #: the points at which a thread's delay changes, by thread and time; each opens a slot
        self.cut = np.lexsort((end, thread))
        self.cut_start, self.cut_end = start[self.cut], end[self.cut]
        self.threads: list[int] = of.threads.tolist()
        ordered = thread[self.cut]
        self.low = {t: int(np.searchsorted(ordered, t)) for t in self.threads}
        self.high = {t: int(np.searchsorted(ordered, t, side="right")) for t in self.threads}
        # Slot number: the cut's own place plus one a thread for what comes before its first.
        self.base = {t: self.low[t] + i for i, t in enumerate(self.threads)}
        self.count = len(self.cut_end) + len(self.threads)
        self.of_cut = np.empty(len(self.cut_end), np.int64)
        for t in self.threads:
            self.of_cut[self.low[t] : self.high[t]] = self.base[t] + 1 + np.arange(self.high[t] - self.low[t])
        #: the slot that each operation was launched in; -1 where its launch was not recorded
        self.of_operation = np.full(len(of.start), -1, np.int32)
        for mine in intervals.chunks(len(of.start)):
            launch = of.launch[mine]
            by = np.where(launch >= 0, of.call_thread[launch], -1)
            for t in kinds_of(by[by >= 0]).tolist():
                self.of_operation[mine][by == t] = self.at(t, of.call_start[launch[by == t]])

    def at(self, thread: int, time: Int) -> Int:
        """The slot in force on a thread at each time."""
        ends = self.cut_end[self.low[thread] : self.high[thread]]
        return np.asarray(self.base[thread] + np.searchsorted(ends, time, side="right"))


class Layout:
    """Segments of the streams; the same for all changes that move nothing aside.

    A *segment* is a run of operations of one stream that were launched in one slot and wait for nothing else.

    Parameters
    ----------
    of : Schedule
    aside : ndarray of bool, optional
        Operations that run on a stream of their own, one a device.
    """

    def __init__(self, of: Schedule, aside: Bool | None = None) -> None:
        self.of, self.aside = of, aside
        self._lay_order()
        self._lay_segments()

    def _lay_order(self) -> None:
        """The operations by stream, as they are played."""
        of, aside = self.of, self.aside
        self.order: Int | None = None
        self.stream, self.waiting, self.awaited = of.stream, of.waiting, of.awaited
        if aside is None:
            return
        stream = np.where(aside, of.device + np.int32(self._first_aside), of.stream)
        order = np.argsort(stream, kind="stable").astype(np.int32)
        # On the new streams by time, as they were launched.
        tail = np.flatnonzero(aside[order])
        part = order[tail]
        order[tail] = part[np.lexsort((of.start[part], of.device[part]))]
        self.order, self.stream = order, stream[order]
        number = np.arange(len(order), dtype=np.int32)
        self._place = np.empty(len(order), np.int32)
        self._place[order] = number
        # What is moved aside is not waited for; a value that is read back needs what stood before the copy, though.
        last = np.maximum.accumulate(np.where(aside, np.int32(-1), number))
        last[(last >= 0) & (of.stream[last] != of.stream)] = -1
        self._kept = last
        keep = ~aside[of.waiting] & ~aside[of.awaited]
        self.waiting, self.awaited = self._place[of.waiting[keep]], self._place[of.awaited[keep]]

    @functools.cached_property
    def _first_aside(self) -> int:
        return int(self.of.stream.max()) + 1

    def placed(self, rows: Int) -> Int:
        """Where operations of the schedule stand here."""
        return rows if self.order is None else np.asarray(self._place[rows])

    def ordered(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A column of the schedule in the order that it has here."""
        return column if self.order is None else column[self.order]

    def _lay_targets(self) -> tuple[Int, Int]:
        """What blocking calls wait for, where it stands here, and the number of each one's call."""
        of, aside = self.of, self.aside
        target, cut = of.cut_target, of.cut_of_target
        if aside is not None:
            kept = self._kept[target]
            # The call of a copy from pageable memory no longer waits for it; whoever else did waits for the rest.
            waits = (kept >= 0) & ~(of.cut_is_own[cut] & aside[target] & of.staged[target])
            target, cut = self._place[kept[waits]], cut[waits]
        #: where the targets of each call begin, and after the last one their number
        self.first_target = np.searchsorted(cut, np.arange(len(of.cut_rows) + 1)).tolist()
        return target, cut

    def _lay_segments(self) -> None:
        of, stream, n = self.of, self.stream, len(self.of.start)
        slots = self.ordered(of.slots.of_operation)
        in_step = None if of.in_step is None else self.ordered(of.in_step)
        launch = self.ordered(of.launch)
        first = np.append(True, stream[1:] != stream[:-1])
        #: where a segment begins, and what has to end one, for somebody asks when it is done
        breaks, needed = first.copy(), first.copy()  # where a stream begins, the window may
        breaks[1:] |= (slots[1:] != slots[:-1]) & (slots[1:] >= 0)
        breaks[self.waiting] = True
        needed[self.awaited] = True
        target, cut = self._lay_targets()
        needed[target] = True
        full = self.placed(of.full_target)
        needed[full] = True
        beside = np.empty(0, np.int64)
        if in_step is not None:
            last = np.append(first[1:] | (in_step[1:] != in_step[:-1]), True) & (in_step >= 0)
            needed |= last
            # What other threads launch belongs to the step that it is launched in, and in a replay that may be another.
            other = self.ordered(of.by_others)
            beside = np.flatnonzero(other)
            beside = np.union1d(beside[:: 1 + len(beside) // MOST_CUTS], np.flatnonzero(other & last))
            needed[beside] = True
        self._lay_crossing(target, cut, launch, needed)
        meeting = self.placed(of.meeting)
        breaks[meeting] = needed[meeting] = True
        breaks[1:] |= needed[:-1]
        self.head = np.flatnonzero(breaks)
        self.tail = np.append(self.head[1:], n) - 1
        self.stream_of = stream[self.head]
        # Operations without a recorded launch belong to whatever segment they are in: only their order counts.
        self.slot_of_head = np.maximum.reduceat(slots, self.head)
        self.begins = self.ordered(of.start)[self.head]
        self._segment = np.cumsum(breaks, dtype=np.int32) - 1
        self.waits_of: dict[int, list[int]] = {}
        for waits, on in zip(self.segments(self.waiting), self.segments(self.awaited), strict=True):
            self.waits_of.setdefault(waits, []).append(on)
        self.targets = self.segments(target)
        self.launch_of_tail, self.slot_of_tail = launch[self.tail], slots[self.tail]
        self.full = self.segments(full)
        self.meets = {segment: number for number, segment in enumerate(self.segments(meeting))}
        self.beside, self.beside_launch, self.beside_slot = self._segment[beside], launch[beside], slots[beside]
        self.step_parts: list[list[int]] = []
        if in_step is not None:
            ends = np.flatnonzero(last & ~other)
            self.step_parts = [[] for _ in range(len(of.steps))]
            for number, segment in zip(in_step[ends].tolist(), self.segments(ends), strict=True):
                self.step_parts[number].append(segment)
            if self.aside is not None:
                self._join_at_steps(in_step)
        # As long as all operations, and of no use for playing.
        del self.stream, self._segment
        if self.aside is not None:
            del self._place, self._kept

    def segments(self, at: Int) -> list[int]:
        """The segments that operations are in."""
        found: list[int] = self._segment[at].tolist()
        return found

    def _lay_crossing(self, target: Int, cut: Int, launch: Int, needed: Bool) -> None:
        """Which calls wait for what another thread launched: then it depends on what that has launched by then."""
        of, by = self.of, launch[target]
        thread = np.where(by >= 0, of.call_thread[np.maximum(by, 0)], -1)
        crosses = thread != of.call_thread[of.cut_rows[cut]]
        self.crosses = crosses.tolist()
        self.shared: set[int] = set(rows_of(self.stream[target[crosses]]).tolist())
        if self.shared:
            among = np.flatnonzero(np.isin(self.stream, list(self.shared)))
            needed[among[:: 1 + len(among) // MOST_CUTS]] = True

    def _join_at_steps(self, in_step: Int) -> None:
        """A step's work waits for what was moved aside in the step before."""
        aside = self.stream_of >= self._first_aside
        number = in_step[self.head]
        last_aside = {int(in_step[self.tail[s]]): s for s in np.flatnonzero(aside).tolist()}
        later = np.flatnonzero(~aside & (number > 0))
        step = number[later].astype(np.int64)
        _, first = np.unique(self.stream_of[later] * (int(number.max(initial=0)) + 1) + step, return_index=True)
        for segment, before in zip(later[first].tolist(), (step[first] - 1).tolist(), strict=True):
            if before in last_aside:
                self.waits_of.setdefault(segment, []).append(last_aside[before])

    @functools.cached_property
    def nodes(self) -> tuple[Int, Int]:
        """In which order cuts, segments and departures from collectives are walked, and the segments that meet."""
        cuts = self.of.slots
        slot_time = np.full(cuts.count, NEVER)
        slot_time[cuts.of_cut] = cuts.cut_end
        slot = self.slot_of_head
        key = np.maximum(self.begins, np.where(slot >= 0, slot_time[np.maximum(slot, 0)], NEVER))
        meeting = np.array([*self.meets], np.int64)
        gathered = np.full(int(self.of.meeting_of.max(initial=-1)) + 1, NEVER)
        np.maximum.at(gathered, self.of.meeting_of, key[meeting])
        # Cuts stand first: of two at one time, the cut; what leaves a collective stands behind the arrivals.
        times = np.concatenate([cuts.cut_end, key, gathered[self.of.meeting_of]])
        order = np.argsort(times, kind="stable")
        return order if self.aside is None else self._behind_what_was_moved(order), meeting

    def _behind_what_was_moved(self, order: Int) -> Int:
        """The order of the recording, but nothing before what it waits for: what is moved aside may last longer."""
        slots, n_cuts, n_nodes = self.of.slots, len(self.of.slots.cut), len(self.of.slots.cut) + len(self.head)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        leaves = {segment: n_nodes + number for segment, number in self.meets.items()}

        def end(segment: int) -> int:
            return leaves.get(segment, n_cuts + segment)

        waits = [(n_cuts + s, end(other)) for s, others in self.waits_of.items() for other in others]
        if all(rank[node] > rank[awaited] for node, awaited in waits):
            return order
        # All that a node is worked out from.
        of, opens = self.of, np.full(slots.count, -1, np.int64)
        opens[slots.of_cut] = np.arange(n_cuts)
        waits += [(i, i - 1) for t in slots.threads for i in range(slots.low[t] + 1, slots.high[t])]
        same = np.flatnonzero(self.stream_of[1:] == self.stream_of[:-1]).tolist()
        waits += [(n_cuts + s + 1, end(s)) for s in same]
        opened = np.where(self.slot_of_head >= 0, opens[self.slot_of_head], -1)
        waits += [(n_cuts + s, int(opened[s])) for s in np.flatnonzero(opened >= 0).tolist()]
        groups: dict[int, list[int]] = {}
        for segment, number in self.meets.items():
            groups.setdefault(int(of.meeting_of[number]), []).append(segment)
        waits += [(leaves[leaving], n_cuts + s) for group in groups.values() for s in group for leaving in group]
        n_block, n_full = len(of.cut_rows), len(of.cut_rows) + len(of.throttled)
        node_of = np.empty(n_cuts, np.int64)
        node_of[slots.cut] = np.arange(n_cuts)
        for number in range(n_block):
            asked = self.targets[self.first_target[number] : self.first_target[number + 1]]
            waits += [(int(node_of[number]), end(segment)) for segment in asked]
        waits += [(int(node_of[n_block + i]), end(segment)) for i, segment in enumerate(self.full)]
        # Other threads: who ends a pause, and whose rest a call waits for.
        rest = of.join_pause
        for numbers, threads, times in (
            (np.arange(n_full, n_full + len(of.pause_by)), of.pause_by, of.pause_end),
            (of.join_cut, of.pause_thread[rest], of.pause_start[rest]),
        ):
            for number, thread, time in zip(numbers.tolist(), threads.tolist(), times.tolist(), strict=True):
                by = int(opens[slots.at(thread, time)])
                waits += [(int(node_of[number]), by)] if by >= 0 else []
        return _sorted(waits, order, rank)


def _sorted(waits: list[tuple[int, int]], order: Int, rank: Int) -> Int:
    """Nodes in their order, but each behind those that it waits for."""
    left = np.zeros(len(order), np.int64)
    after: list[list[int]] = [[] for _ in range(len(order))]
    for node, awaited in waits:
        left[node] += 1
        after[awaited].append(node)
    remaining = left.tolist()
    ready = [int(rank[node]) for node in np.flatnonzero(left == 0)]
    heapq.heapify(ready)
    found = []
    while ready:
        node = int(order[heapq.heappop(ready)])
        found.append(node)
        for waiting in after[node]:
            remaining[waiting] -= 1
            if not remaining[waiting]:
                heapq.heappush(ready, int(rank[waiting]))
    # A circle cannot be put in order: what is in it stays in that of the recording.
    missing = np.setdiff1d(order, found, assume_unique=True)
    return np.append(np.array(found, np.int64), missing[np.argsort(rank[missing])])
