"""One replay of a schedule, with a change: the cuts walked one by one, what lies between them in a line each."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.layout import Layout
from nsightkit.analysis.replay.model import NEVER, Change, Int, Played, kinds_of

if TYPE_CHECKING:
    from nsightkit.analysis.replay.schedule import Schedule

__all__ = ["Play"]

#: Operations looked at together, at least; bounds memory.
_CHUNK = 1 << 18


class Play:
    """A replay.

    Parameters
    ----------
    of : Schedule
    layout : Layout
        Of the schedule, with what `change` moves aside.
    change : Change
    """

    def __init__(self, of: Schedule, layout: Layout, change: Change) -> None:
        self.of, self.layout, self.change = of, layout, change
        self._away: dict[int, intervals.Coverage] = {}
        for thread in of.threads.tolist():
            parts = [*of.passive[thread], *([change.away[thread]] if thread in change.away else [])]
            parts = [part for part in parts if len(part[0])]
            if parts:
                start, end = intervals.union(*parts)
                self._away[thread] = intervals.Coverage(np.maximum(start, of.begin_ns), end)
        self._lines()

    def own(self, thread: int, time: Int) -> Int:
        """Recorded time of a thread without what falls away before it."""
        away = self._away.get(thread)
        return time if away is None else np.asarray(time - away.before(np.asarray(time, np.int64)), np.int64)

    def _own_of(self, thread: Int, time: Int) -> Int:
        """The same, of many threads."""
        out = time.copy()
        for one in kinds_of(thread).tolist():
            mine = thread == one
            out[mine] = self.own(one, time[mine])
        return out

    def _ready(self, mine: Int | slice) -> Int:
        """When operations could start for their launch's sake, if their threads had no delay."""
        of = self.of
        ready, launch = of.ready[mine], of.launch[mine]
        if self._away:
            row = np.maximum(launch, 0)
            # The latency after the call is the device's; what comes before it is the thread's own time.
            point = np.minimum(of.call_end[row], np.maximum(ready, of.call_start[row]))
            ready = np.where(launch >= 0, self._own_of(of.call_thread[row], point) + (ready - point), ready)
        if self.change.aside is not None:
            # When it was launched that stands in no order now is not known: it begins no earlier than it did.
            ready = np.where(launch >= 0, ready, of.start[mine])
        return np.asarray(ready)

    def _lines(self) -> None:
        """Each segment as a line: its last end is max(delay + a, the stream's last end + b)."""
        head, tail = self.layout.head, self.layout.tail
        self.a, self.b, self.direct, self.first_ns = np.empty((4, len(head)), np.int64)
        low = 0
        while low < len(head):
            high = max(low + 1, int(np.searchsorted(tail, head[low] + _CHUNK)))
            self._lines_of(low, high)
            low = high

    def _lines_of(self, low: int, high: int) -> None:
        """The lines of some segments."""
        layout = self.layout
        begin = int(layout.head[low])
        head, tail = layout.head[low:high] - begin, layout.tail[low:high] - begin
        mine: Int | slice = slice(begin, int(layout.tail[high - 1]) + 1)
        if layout.order is not None:
            mine = layout.order[mine]
        lasting, alone, total = self._parts(mine)
        self.b[low:high] = total[tail] - np.where(head > 0, total[np.maximum(head - 1, 0)], 0)
        #: from the start of a segment's first operation to the end of its last one, and the first one's own time
        self.direct[low:high] = alone[head] + total[tail] - total[head]
        self.first_ns[low:high] = lasting[head]
        self.a[low:high] = total[tail] + np.maximum.reduceat(self._ready(mine) + alone - total, head)

    def _parts(self, mine: Int | slice) -> tuple[Int, Int, Int]:
        """How long operations last, with what holds them up, and the sum of that up to each."""
        of, given = self.of, self.change.durations_ns
        lasting = of.end[mine] - of.start[mine] if given is None else given[mine]
        gap = of.gap[mine] if given is None else np.where(lasting > 0, of.gap[mine], 0)
        alone = lasting + of.held_ns[mine]
        return lasting, alone, np.cumsum(alone + gap)

    def times(self) -> tuple[Int, Int]:
        """When each operation ran, in the order of the schedule.

        Returns
        -------
        start, end : ndarray of int64
        """
        of, layout = self.of, self.layout
        order = np.arange(len(of.start)) if layout.order is None else layout.order
        lasting, alone, total = self._parts(order)
        head, tail, slot = layout.head, layout.tail, layout.slot_of_head
        segment = np.repeat(np.arange(len(head)), tail - head + 1)
        # As soon as all launches up to it allow, or as its segment could for other reasons.
        launched = pd.Series(self._ready(order) + alone - total).groupby(segment).cummax().to_numpy()
        delay = np.where(slot >= 0, self.delay[np.maximum(slot, 0)], 0)
        before = np.append(NEVER, self.end_of[:-1])
        before[np.append(True, layout.stream_of[1:] != layout.stream_of[:-1])] = NEVER
        other = before - np.where(head > 0, total[np.maximum(head - 1, 0)], 0)
        late = self.end_of > np.maximum(launched[tail] + delay, other) + total[tail] + 1
        other[late] = (self.end_of - total[tail])[late]
        end = np.empty(len(order), np.int64)
        end[order] = total + np.maximum(launched + delay[segment], other[segment])
        start = end.copy()
        start[order] -= lasting
        return start, end

    def played(self) -> Played:
        """Walk the schedule.

        Returns
        -------
        Played
        """
        of, layout, change = self.of, self.layout, self.change
        slots = of.slots
        delay: list[float] = [0] * slots.count
        end_of: list[float] = [int(NEVER)] * len(layout.head)
        # A stream that a change makes begins with what is played.
        stream_end: list[float] = [of.earliest_ns] * (int(layout.stream_of.max()) + 1)
        stream_end[: len(of.released_ns)] = of.released_ns.tolist()
        own_start, own_end = slots.cut_start.copy(), slots.cut_end.copy()
        for t in slots.threads if self._away else ():
            part = slice(slots.low[t], slots.high[t])
            own_start[part], own_end[part] = self.own(t, own_start[part]), self.own(t, own_end[part])
        begins_at, returns_at = own_start.tolist(), own_end.tolist()
        order, meeting = layout.nodes
        n_cuts, n_nodes = len(slots.cut_end), len(slots.cut_end) + len(layout.head)
        a, b, slot = self.a.tolist(), self.b.tolist(), layout.slot_of_head.tolist()
        direct, stream, first_ns = self.direct.tolist(), layout.stream_of.tolist(), self.first_ns.tolist()
        cut, slot_of_cut = slots.cut.tolist(), slots.of_cut.tolist()
        cost, tail = self._costs().tolist(), of.cut_tail.tolist()
        n_block = len(of.cut_rows)
        n_full = n_block + len(of.throttled)
        n_pause = n_full + len(of.pause_by)
        over_at, over_slot = self._on_threads(of.pause_by, of.pause_end)
        rest = of.join_pause
        rest_at, rest_slot = self._on_threads(of.pause_thread[rest], of.pause_start[rest])
        rests: dict[int, list[int]] = {}
        for joined, number in enumerate(of.join_cut.tolist()):
            rests.setdefault(number, []).append(joined)
        arrivals, skip_pauses = of.arrival_end.tolist(), "hand-overs" in of.without
        waits = np.ones(n_block, bool) if change.waits else of.call_start[of.cut_rows] < of.begin_ns
        waiting = (waits & ("syncs" not in of.without)).tolist()
        after, room, call_ns = of.after_ns, of.room_ns, of.call_ns
        full, waits_of = layout.full, layout.waits_of
        targets, first_target, crosses = layout.targets, layout.first_target, layout.crosses
        meets, met, meeting_of, transfer = (
            layout.meets,
            meeting.tolist(),
            of.meeting_of.tolist(),
            of.transfer_ns.tolist(),
        )
        last_arrival: dict[int, float] = {}
        shared = layout.shared
        launched_at, launched_slot = self._launched()
        launched: dict[int, list[float]] = {where: [] for where in shared}
        ended: dict[int, list[float]] = {where: [] for where in shared}
        # Of most segments only their thread and their stream matter.
        more = {*waits_of, *meets, *(s for s, where in enumerate(stream if shared else ()) if where in shared)}
        never = int(NEVER)
        for node in order.tolist():
            if node >= n_nodes:  # a device leaves a collective
                number = node - n_nodes
                s = met[number]
                end_of[s] = stream_end[stream[s]] = last_arrival[meeting_of[number]] + transfer[number]
                continue
            if node >= n_cuts:
                s = node - n_cuts
                where = stream[s]
                end = stream_end[where] + b[s]
                launched_end = delay[slot[s]] + a[s] if slot[s] >= 0 else a[s]
                end = max(end, launched_end)
                if s not in more:
                    end_of[s] = stream_end[where] = end
                    continue
                for other in waits_of.get(s, ()):
                    end = max(end, end_of[other] + after + direct[s])
                if s in meets:
                    group = meeting_of[meets[s]]
                    last_arrival[group] = max(last_arrival.get(group, never), end - first_ns[s])
                    continue
                end_of[s] = stream_end[where] = end
                if where in shared:
                    at = launched_at[s] + delay[launched_slot[s]] if launched_slot[s] >= 0 else never
                    launched[where].append(max(at, launched[where][-1]) if launched[where] else at)
                    ended[where].append(end)
                continue
            number, mine = cut[node], slot_of_cut[node]
            begun = begins_at[node] + delay[mine - 1]
            if number >= n_pause:  # a batch arrives
                until = max(begun, arrivals[number - n_pause]) if change.arrivals else begun
            elif number >= n_full:  # another thread ends a pause
                p = number - n_full
                until = begun if skip_pauses else max(begun, over_at[p] + delay[over_slot[p]])
            elif number >= n_block:  # into a full queue
                until = max(begun + call_ns, end_of[full[number - n_block]] + room)
            else:
                until = begun + cost[number]
                for i in range(first_target[number], first_target[number + 1]) if waiting[number] else ():
                    target = targets[i]
                    done = end_of[target]
                    if crosses[i]:  # what it had launched by now
                        at = bisect.bisect_right(launched[stream[target]], begun)
                        done = ended[stream[target]][at - 1] if at else never
                    until = max(until, done + tail[number])
                for joined in rests.get(number, ()):
                    until = max(until, rest_at[joined] + delay[rest_slot[joined]])
            delay[mine] = until - returns_at[node]
        self.delay, self.end_of = np.array(delay), np.array(end_of)
        return self._read(self.delay, self.end_of)

    def _costs(self) -> Int:
        """What a blocking call takes of its own; without its copy, what any call takes."""
        of, aside = self.of, self.change.aside
        cost: Int = of.cut_cost
        if aside is None:
            return cost
        return np.asarray(np.where(of.cut_is_own & aside[of.cut_own_copy], of.call_ns, cost))

    def _on_threads(self, threads: Int, time: Int) -> tuple[list[int], list[int]]:
        """Where threads are at some times: their own time, and the slot."""
        slots = np.empty(len(threads), np.int64)
        for thread in kinds_of(threads).tolist():
            mine = threads == thread
            slots[mine] = self.of.slots.at(thread, time[mine])
        return self._own_of(threads, time).tolist(), slots.tolist()

    def _launched(self) -> tuple[list[int], list[int]]:
        """Where its thread was when it launched the last operation of each segment: its own time, and its slot."""
        of, layout = self.of, self.layout
        if not layout.shared:
            return [], []
        known = layout.launch_of_tail >= 0
        row = np.maximum(layout.launch_of_tail, 0)
        return self._own_of(of.call_thread[row], of.call_start[row]).tolist(), np.where(
            known, layout.slot_of_tail, -1
        ).tolist()

    def _read(self, delay: Int, end_of: Int) -> Played:
        of, layout = self.of, self.layout
        if not len(of.steps):
            first = np.append(True, layout.stream_of[1:] != layout.stream_of[:-1])
            begin = (end_of - self.first_ns)[first].min()
            return Played(int(end_of.max() - begin), np.empty(0, np.int64))
        thread = int(of.steps["thread"].iloc[0])
        cpu = of.steps["cpu_end_ns"].to_numpy()
        reached = self.own(thread, cpu) + delay[of.slots.at(thread, cpu)]
        ends = reached.astype(np.int64)
        for k, parts in enumerate(layout.step_parts):
            ends[k] = max([int(ends[k]), *(int(end_of[s]) for s in parts)])
        if len(layout.beside):
            row = layout.beside_launch
            called = self._own_of(of.call_thread[row], of.call_start[row]) + delay[layout.beside_slot]
            at = np.searchsorted(np.maximum.accumulate(reached), called, side="right")
            within = at < len(ends)
            np.maximum.at(ends, at[within], end_of[layout.beside[within]].astype(np.int64))
        ends = np.maximum.accumulate(ends)
        first = of.steps["start_ns"].to_numpy()[:1]
        begin = int((self.own(thread, first) + delay[of.slots.at(thread, first)])[0])
        if of.steps["begin_ns"].iloc[0] > first[0]:  # behind a step that is not played
            begin = max(begin, int(of.steps["begin_ns"].iloc[0]))
            ends = np.maximum(ends, begin)
        return Played(int(ends[-1] - begin), ends - begin)
