"""How a schedule falls into segments, between the points at which one part waits for another."""

from __future__ import annotations

import functools
import heapq
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.model import MOST_CUTS, NEVER, Bool, Int

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
        #: the points at which a thread's delay changes, by thread and time; each opens a slot
        self.cut = np.lexsort((of.cut_end, of.cut_thread))
        self.thread, self.start, self.end = (column[self.cut] for column in (of.cut_thread, of.cut_start, of.cut_end))
        self.threads = of.threads
        # A slot's number: the place of the cut that opens it, and one more a thread for what comes before its first.
        self.of_cut = np.arange(len(self.cut)) + np.searchsorted(self.threads, self.thread) + 1
        self.count = len(self.cut) + len(self.threads)
        #: the slot that each operation was launched in; -1 where its launch was not recorded
        self.of_operation = np.empty(len(of.start), np.int32)
        for mine in intervals.chunks(len(of.start)):
            launch = of.launch[mine]
            self.of_operation[mine] = self.at(np.where(launch >= 0, of.call_thread[launch], -1), of.call_start[launch])

    def at(self, thread: Int, time: Int) -> Int:
        """The slot in force on a thread at each time, -1 where there is not any thread."""
        out = np.full(len(time), -1, np.int32)
        for number, one in enumerate(self.threads.tolist()):
            mine = thread == one
            low, high = np.searchsorted(self.thread, [one, one + 1])
            out[mine] = low + number + np.searchsorted(self.end[low:high], time[mine], side="right")
        return out


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
        number = np.arange(len(of.start), dtype=np.int32)
        #: of each place the operation that stands there, and of each operation its place; what cuts wait for, and each
        #: one's cut
        if aside is None:
            self.order = self._place = number  # as the schedule has them
            self._waiting, self._awaited = of.waiting, of.awaited
            stream, self._target, self.cut_of_target = of.stream, of.cut_target, of.cut_of_target
        else:
            stream = self._lay_order(aside, number)
        self.first_target = np.searchsorted(self.cut_of_target, np.arange(len(of.cut_thread) + 1))
        self._lay_segments(stream)
        del self._place

    def _laid(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A column of the operations, in the order of the layout."""
        return column if self.aside is None else column[self.order]

    def _lay_order(self, aside: Bool, number: Int) -> Int:
        """Put the operations in the order in which they are played, by stream."""
        of = self.of
        self._first_aside = int(of.stream.max()) + 1
        stream = np.where(aside, of.device + np.int32(self._first_aside), of.stream)
        self.order = np.argsort(stream, kind="stable").astype(np.int32)
        # On the new streams by time, as they were launched.
        tail = np.flatnonzero(aside[self.order])
        part = self.order[tail]
        self.order[tail] = part[np.lexsort((of.start[part], of.device[part]))]
        self._place = np.empty_like(number)
        self._place[self.order] = number
        # What is moved aside is not waited for; a value that is read back needs what stood before the copy, though.
        last = np.maximum.accumulate(np.where(aside, np.int32(-1), number))
        last[(last >= 0) & (of.stream[last] != of.stream)] = -1
        keep = ~aside[of.waiting] & ~aside[of.awaited]
        self._waiting, self._awaited = self._place[of.waiting[keep]], self._place[of.awaited[keep]]
        # A launch into a full queue waits for its room all the same.
        target, cut = of.cut_target, of.cut_of_target
        kept = np.where(cut < len(of.cut_rows), last[target], target)
        # The call of a copy from pageable memory no longer waits for it; whoever else did waits for the rest.
        waits = (kept >= 0) & ~((of.cut_copy[cut] >= 0) & aside[target] & of.staged[target])
        self._target, self.cut_of_target = self._place[kept[waits]], cut[waits]
        return stream[self.order]

    def _lay_segments(self, stream: Int) -> None:
        of, target = self.of, self._target
        columns = of.slots.of_operation, of.launch, of.in_step, of.by_others
        slots, launch, in_step, by_others = map(self._laid, columns)
        first = np.append(True, stream[1:] != stream[:-1])
        #: where a segment begins, and what has to end one, for somebody asks when it is done
        breaks, needed = first.copy(), first.copy()  # where a stream begins, the window may
        breaks[1:] |= (slots[1:] != slots[:-1]) & (slots[1:] >= 0)
        breaks[self._waiting] = True
        needed[self._awaited] = needed[target] = True
        # Which calls wait for what another thread launched: then it depends on what that has launched by then.
        thread = np.where(launch[target] >= 0, of.call_thread[launch[target]], -1)
        crosses = (thread != of.cut_thread[self.cut_of_target]) & (self.cut_of_target < len(of.cut_rows))
        self.crosses, self.shared = crosses, set(stream[target[crosses]].tolist())
        among = np.flatnonzero(np.isin(stream, list(self.shared)))
        needed[among[:: 1 + len(among) // MOST_CUTS]] = True
        last = np.append(first[1:] | (in_step[1:] != in_step[:-1]), True) & (in_step >= 0)
        # What other threads launch belongs to the step that it is launched in, and in a replay that may be another.
        beside = np.flatnonzero(by_others)
        beside = np.union1d(beside[:: 1 + len(beside) // MOST_CUTS], np.flatnonzero(by_others & last))
        needed[last] = needed[beside] = True
        meeting = self._place[of.meeting]
        breaks[meeting] = needed[meeting] = True
        breaks[1:] |= needed[:-1]
        self.head = np.flatnonzero(breaks)
        self.tail = np.append(self.head[1:], len(stream)) - 1
        self.stream_of, self.opens_stream = stream[self.head], first[self.head]
        # Operations without a recorded launch belong to whatever segment they are in: only their order counts.
        self.slot_of_head = np.maximum.reduceat(slots, self.head)
        self.launch_of_tail = launch[self.tail]
        segment = np.cumsum(breaks, dtype=np.int32) - 1
        self.targets, awaited = segment[target], segment[self._awaited].tolist()
        self.waits_of: dict[int, list[int]] = {}
        for waits, on in zip(segment[self._waiting].tolist(), awaited, strict=True):
            self.waits_of.setdefault(waits, []).append(on)
        self.meets = {s: number for number, s in enumerate(segment[meeting].tolist())}
        self.beside, self.beside_launch = segment[beside], launch[beside]
        self.step_parts: list[list[int]] = [[] for _ in range(len(of.steps))]
        ends = np.flatnonzero(last & ~by_others)
        for number, s in zip(in_step[ends].tolist(), segment[ends].tolist(), strict=True):
            self.step_parts[number].append(s)
        if self.aside is not None:
            self._join_at_steps(in_step)

    def _join_at_steps(self, in_step: Int) -> None:
        """A step's work waits for what was moved aside in the step before."""
        aside = self.stream_of >= self._first_aside
        number = in_step[self.head]
        last_aside = {int(in_step[self.tail[s]]): s for s in np.flatnonzero(aside).tolist()}
        later = np.flatnonzero(~aside & (number > 0))
        firsts = pd.DataFrame({"stream": self.stream_of[later], "step": number[later]}, later).drop_duplicates()
        for segment, step in zip(firsts.index.tolist(), firsts["step"].tolist(), strict=True):
            if step - 1 in last_aside:
                self.waits_of.setdefault(segment, []).append(last_aside[step - 1])

    @functools.cached_property
    def nodes(self) -> tuple[Int, Int]:
        """In which order cuts, segments and departures from collectives are walked, and the segments that meet."""
        slots, slot, meeting_of = self.of.slots, self.slot_of_head, self.of.meeting_of
        slot_time = np.full(slots.count, NEVER)
        slot_time[slots.of_cut] = slots.end
        begins = self.of.start[self.order[self.head]]
        key = np.maximum(begins, np.where(slot >= 0, slot_time[np.maximum(slot, 0)], NEVER))
        meeting = np.array([*self.meets], np.int64)
        gathered = np.full(int(meeting_of.max(initial=-1)) + 1, NEVER)
        np.maximum.at(gathered, meeting_of, key[meeting])
        # Cuts stand first: of two at one time, the cut; what leaves a collective stands behind the arrivals.
        order = np.argsort(np.concatenate([slots.end, key, gathered[meeting_of]]), kind="stable")
        return order if self.aside is None else self._behind_what_was_moved(order), meeting

    def _behind_what_was_moved(self, order: Int) -> Int:
        """The order of the recording, but nothing before what it waits for: what is moved aside may last longer."""
        of, slots, n_cuts = self.of, self.of.slots, len(self.of.slots.cut)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        leaves = {segment: n_cuts + len(self.head) + number for segment, number in self.meets.items()}

        def end(segment: int) -> int:
            return leaves.get(segment, n_cuts + segment)

        waits = [(n_cuts + s, end(other)) for s, others in self.waits_of.items() for other in others]
        if all(rank[node] > rank[awaited] for node, awaited in waits):
            return order
        # All that a node is worked out from: the cut before it, the segment before it, the cut that opened its slot ...
        opens = np.full(slots.count, -1, np.int64)
        opens[slots.of_cut] = np.arange(n_cuts)
        waits += [(i, i - 1) for i in (np.flatnonzero(slots.thread[1:] == slots.thread[:-1]) + 1).tolist()]
        waits += [(n_cuts + s, end(s - 1)) for s in np.flatnonzero(~self.opens_stream).tolist()]
        opened = np.where(self.slot_of_head >= 0, opens[self.slot_of_head], -1)
        waits += [(n_cuts + s, int(opened[s])) for s in np.flatnonzero(opened >= 0).tolist()]
        # ... of who leaves a collective all arrivals, of a cut what it waits for, and whom it asks.
        groups: dict[int, list[int]] = {}
        for segment, number in self.meets.items():
            groups.setdefault(int(of.meeting_of[number]), []).append(segment)
        waits += [(leaves[leaving], n_cuts + s) for group in groups.values() for s in group for leaving in group]
        node_of = np.empty(n_cuts, np.int64)
        node_of[slots.cut] = np.arange(n_cuts)
        nodes = node_of[self.cut_of_target].tolist()
        waits += [(node, end(segment)) for node, segment in zip(nodes, self.targets.tolist(), strict=True)]
        by = opens[slots.at(of.asked, of.asked_ns)]
        waits += zip(node_of[of.asking[by >= 0]].tolist(), by[by >= 0].tolist(), strict=True)
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
