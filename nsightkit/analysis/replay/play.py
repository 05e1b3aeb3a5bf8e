"""One replay of a schedule, with a change: the cuts walked one by one, what lies between them in a line each."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.layout import Layout
from nsightkit.analysis.replay.model import NEVER, Change, Int, Played

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
            start, end = intervals.union(*of.passive[thread], change.away.get(thread, ((), ())))
            if len(start):
                early = start[0] < of.begin_ns
                self._away[thread] = intervals.Coverage(np.maximum(start, of.begin_ns) if early else start, end)
        self._lines()

    def own(self, thread: Int, time: Int) -> Int:
        """Recorded time of threads without what falls away before it."""
        out = time.astype(np.int64)
        for one, away in self._away.items():
            mine = thread == one
            out[mine] -= away.before(out[mine])
        return out

    def _ready(self, mine: Int | slice) -> Int:
        """When operations could start for their launch's sake, if their threads had no delay."""
        of = self.of
        ready, launch = of.ready[mine], of.launch[mine]
        if self._away:
            row = np.maximum(launch, 0)
            # The latency after the call is the device's; what comes before it is the thread's own time.
            point = np.minimum(of.call_end[row], np.maximum(ready, of.call_start[row]))
            ready = np.where(launch >= 0, self.own(of.call_thread[row], point) + (ready - point), ready)
        if self.change.aside is not None:
            # When it was launched that stands in no order now is not known: it begins no earlier than it did.
            ready = np.where(launch >= 0, ready, of.start[mine])
        return np.asarray(ready)

    def _lines(self) -> None:
        """Each segment as a line: its last end is max(delay + a, the stream's last end + b)."""
        layout = self.layout
        self.a, self.b, self.direct, self.first_ns = np.empty((4, len(layout.head)), np.int64)
        low = 0
        while low < len(layout.head):
            begin = int(layout.head[low])
            high = max(low + 1, int(np.searchsorted(layout.tail, begin + _CHUNK)))
            mine: Int | slice = slice(begin, int(layout.tail[high - 1]) + 1)
            if self.change.aside is not None:
                mine = layout.order[mine]
            head, tail, some = layout.head[low:high] - begin, layout.tail[low:high] - begin, slice(low, high)
            lasting, alone, total = self._parts(mine)
            self.b[some] = total[tail] - np.where(head > 0, total[np.maximum(head - 1, 0)], 0)
            #: from the start of a segment's first operation to the end of its last one, and the first one's own time
            self.direct[some] = alone[head] + total[tail] - total[head]
            self.first_ns[some] = lasting[head]
            self.a[some] = total[tail] + np.maximum.reduceat(self._ready(mine) + alone - total, head)
            low = high

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
        layout = self.layout
        order, head, tail, slot = layout.order, layout.head, layout.tail, layout.slot_of_head
        lasting, alone, total = self._parts(order)
        segment = np.repeat(np.arange(len(head)), tail - head + 1)
        # As soon as all launches up to it allow, or as its segment could for other reasons.
        launched = pd.Series(self._ready(order) + alone - total).groupby(segment).cummax().to_numpy()
        delay = np.where(slot >= 0, self.delay[np.maximum(slot, 0)], 0)
        before = np.append(NEVER, self.end_of[:-1])
        before[layout.opens_stream] = NEVER
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
        of, layout, change, slots = self.of, self.layout, self.change, self.of.slots
        never = int(NEVER)
        delay: list[float] = [0] * slots.count
        end_of: list[float] = [never] * len(layout.head)
        # A stream that a change makes begins with what is played.
        stream_end: list[float] = [of.earliest_ns] * (int(layout.stream_of.max()) + 1)
        stream_end[: len(of.released_ns)] = of.released_ns.tolist()
        # What lies between two cuts: segments of streams, and slots of threads. Each number is read once: views of the
        # columns are as fast as lists of them, and take no memory.
        a, b, slot, direct = self.a.data, self.b.data, layout.slot_of_head.data, self.direct.data
        stream, first_ns = layout.stream_of.data, self.first_ns.data
        begins_at, returns_at = (self.own(slots.thread, at).data for at in (slots.start, slots.end))
        cut, slot_of_cut = slots.cut.data, slots.of_cut.data
        # What a cut waits for: its own cost, segments, where other threads are, and a moment.
        cost, tail = of.cut_cost.data, of.cut_tail.data
        if change.aside is not None:  # a blocking call without its copy takes what any call takes
            cost = np.where((of.cut_copy >= 0) & change.aside[of.cut_copy], of.call_ns, of.cut_cost).data
        targets, first_target, crosses = layout.targets.data, layout.first_target.data, layout.crosses.data
        waits = (of.cut_start < of.begin_ns) | (np.arange(len(cut)) >= len(of.cut_rows)) | change.waits
        waiting = waits.data
        asked: dict[int, list[tuple[int, int]]] = {}
        if change.hand_overs:
            for number, asks in zip(of.asking.tolist(), self._where(of.asked, of.asked_ns), strict=True):
                asked.setdefault(number, []).append(asks)
        arrives = (of.cut_arrival if change.arrivals else np.full(len(cut), NEVER)).data
        # What a segment waits for beside its thread and its stream: few do.
        after, waits_of, shared, meets = of.after_ns, layout.waits_of, layout.shared, layout.meets
        meeting_of, transfer = of.meeting_of.tolist(), of.transfer_ns.tolist()
        last_arrival: dict[int, float] = {}
        known = np.flatnonzero(np.isin(layout.stream_of, list(shared)) & (layout.launch_of_tail >= 0))
        row = layout.launch_of_tail[known]
        launched_by = dict(zip(known.tolist(), self._where(of.call_thread[row], of.call_start[row]), strict=True))
        launched: dict[int, list[float]] = {where: [] for where in shared}
        ended: dict[int, list[float]] = {where: [] for where in shared}
        more = {*waits_of, *meets, *(s for s, where in enumerate(stream if shared else ()) if where in shared)}
        order, meeting = layout.nodes
        met, n_cuts, n_nodes = meeting.tolist(), len(cut), len(cut) + len(end_of)
        for node in order.data:
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
                    time, by = launched_by.get(s, (never, None))
                    at = time if by is None else time + delay[by]
                    launched[where].append(max(at, launched[where][-1]) if launched[where] else at)
                    ended[where].append(end)
                continue
            number, mine = cut[node], slot_of_cut[node]
            begun = begins_at[node] + delay[mine - 1]
            until = max(begun + cost[number], arrives[number])
            for i in range(first_target[number], first_target[number + 1]) if waiting[number] else ():
                target = targets[i]
                done = end_of[target]
                if crosses[i]:  # what it had launched by now
                    before = bisect.bisect_right(launched[stream[target]], begun)
                    done = ended[stream[target]][before - 1] if before else never
                until = max(until, done + tail[number])
            for time, by in asked.get(number, ()):
                until = max(until, time + delay[by])
            delay[mine] = until - returns_at[node]
        self.delay, self.end_of = np.array(delay), np.array(end_of)
        return self._read()

    def _where(self, threads: Int, time: Int) -> list[tuple[int, int]]:
        """Where threads are at some times: their own time, and the slot, by whose delay they get there."""
        return list(zip(self.own(threads, time).tolist(), self.of.slots.at(threads, time).tolist(), strict=True))

    def _reached(self, threads: Int, time: Int) -> npt.NDArray[Any]:
        """When threads got to what they had got to at some times."""
        return np.asarray(self.own(threads, time) + self.delay[self.of.slots.at(threads, time)])

    def _read(self) -> Played:
        of, layout, end_of = self.of, self.layout, self.end_of
        if not len(of.steps):
            begin = (end_of - self.first_ns)[layout.opens_stream].min()
            return Played(int(end_of.max() - begin), np.empty(0, np.int64))
        main = np.full(len(of.steps), of.main)
        reached = self._reached(main, of.steps["cpu_end_ns"].to_numpy())
        ends = reached.astype(np.int64)
        for k, parts in enumerate(layout.step_parts):
            ends[k] = max([int(ends[k]), *(int(end_of[s]) for s in parts)])
        row = layout.beside_launch
        called = self._reached(of.call_thread[row], of.call_start[row])
        at = np.searchsorted(np.maximum.accumulate(reached), called, side="right")
        within = at < len(ends)
        np.maximum.at(ends, at[within], end_of[layout.beside[within]].astype(np.int64))
        ends = np.maximum.accumulate(ends)
        first_ns, begin_ns = (int(of.steps[column].iloc[0]) for column in ("start_ns", "begin_ns"))
        begin = int(self._reached(main[:1], np.array([first_ns]))[0])
        if begin_ns > first_ns:  # behind a step that is not played
            begin = max(begin, begin_ns)
            ends = np.maximum(ends, begin)
        return Played(int(ends[-1] - begin), ends - begin)
