"""One replay of a schedule, with a change: each moment is the latest of those that it waits for.

Moments are *cuts* of a thread (its delay from then on), ends of *segments* of a stream, and departures from
collectives. Each waits for others, and comes so much later than they do: all such pairs are listed first, and then gone
through once.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import graphlib
import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.model import MOST_CUTS, NEVER, Bool, Change, Int, Played

if TYPE_CHECKING:
    from nsightkit.analysis.replay.schedule import Schedule

__all__ = ["Layout", "Play"]

#: Operations looked at together, at least; bounds memory.
_CHUNK = 1 << 18


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
        #: of each place the operation that stands there; what cuts wait for, and the cut of each
        self.order, stream, waiting, awaited = number, of.stream, of.waiting, of.awaited
        target, self.cut_of_target = of.target, of.cut_of_target
        first_aside = int(of.stream.max()) + 1
        if aside is not None:
            device = pd.factorize(of.device)[0].astype(np.int32)
            stream = np.where(aside, device + np.int32(first_aside), of.stream)
            self.order = np.argsort(stream, kind="stable").astype(np.int32)
            # On the new streams, which come last, by time.
            moved = self.order[len(number) - int(aside.sum()) :]
            moved[:] = moved[np.lexsort((of.start[moved], of.device[moved]))]
            stream = stream[self.order]
            # What is moved aside is not waited for; a value that is read back needs what stood before the copy, though.
            keep = ~aside[waiting] & ~aside[awaited]
            waiting, awaited = waiting[keep], awaited[keep]
            last = np.maximum.accumulate(np.where(aside, np.int32(-1), number))
            last[(last >= 0) & (of.stream[last] != of.stream)] = -1
            # A launch into a full queue waits for its room all the same.
            cut = of.cut_of_target
            kept = np.where(of.cuts.blocks[cut], last[target], target)
            # The call of a copy from pageable memory no longer waits for it; whoever else did waits for the rest.
            waits = (kept >= 0) & ~((of.cuts.copy[cut] >= 0) & aside[target] & of.staged[target])
            target, self.cut_of_target = kept[waits], cut[waits]
        place = np.empty_like(number)
        place[self.order] = number
        self._segments(stream, place[waiting], place[awaited], place[target], place[of.meeting])
        if aside is not None:
            self._join_at_steps(self.stream_of >= first_aside)
        #: where in the list of moments each segment's end is: what leaves a collective stands behind all segments
        self.end_at = len(of.cuts.end) + np.arange(len(self.head))
        self.end_at[self.meeting] = len(of.cuts.end) + len(self.head) + np.arange(len(self.meeting))

    def _segments(self, stream: Int, waiting: Int, awaited: Int, target: Int, meeting: Int) -> None:
        of, order = self.of, self.order
        laid = slice(None) if self.aside is None else order
        slots, in_step, by_others = (column[laid] for column in (of.slot, of.in_step, of.by_others))
        first = np.append(True, stream[1:] != stream[:-1])
        # Where a segment begins, and what has to end one, for somebody asks when it is done.
        breaks, needed = first.copy(), first.copy()  # where a stream begins, the window may
        breaks[1:] |= (slots[1:] != slots[:-1]) & (slots[1:] >= 0)
        breaks[waiting] = needed[awaited] = needed[target] = True
        # Which calls wait for what another thread launched: then it depends on what that has launched by then.
        cut = self.cut_of_target
        self.crosses = (of.by[order[target]] != of.cuts.thread[cut]) & of.cuts.blocks[cut]
        self.shared = np.unique(stream[target[self.crosses]])
        among = np.flatnonzero(np.isin(stream, self.shared))
        last = np.append(first[1:] | (in_step[1:] != in_step[:-1]), True) & (in_step >= 0)
        # What other threads launch belongs to the step that it is launched in, and in a replay that may be another.
        beside = np.flatnonzero(by_others)
        beside = np.union1d(beside[:: 1 + len(beside) // MOST_CUTS], np.flatnonzero(by_others & last))
        needed[among[:: 1 + len(among) // MOST_CUTS]] = needed[last] = needed[beside] = True
        breaks[meeting] = needed[meeting] = True
        breaks[1:] |= needed[:-1]
        self.head = np.flatnonzero(breaks)
        self.tail = np.append(self.head[1:], len(stream)) - 1
        self.stream_of, self.opens_stream = stream[self.head], first[self.head]
        # Operations without a recorded launch belong to whatever segment they are in: only their order counts.
        self.slot = slots[self.head]
        segment = np.cumsum(breaks, dtype=np.int32) - 1
        self.target, self.meeting, self.beside = segment[target], segment[meeting], segment[beside]
        self.waiting, self.awaited = segment[waiting], segment[awaited]
        self.beside_operation = order[beside]
        ends = np.flatnonzero(last & ~by_others)
        self.ends_step, self.step_ended = segment[ends], in_step[ends]

    def _join_at_steps(self, aside: Bool) -> None:
        """A step's work waits for what was moved aside in the step before."""
        in_step = self.of.in_step[self.order]
        moved = pd.Series(np.flatnonzero(aside), in_step[self.tail[aside]]).groupby(level=0).last()
        begins = pd.DataFrame({"stream": self.stream_of, "step": in_step[self.head]})[~aside]
        begins = begins[begins["step"] > 0].drop_duplicates()
        before = (begins["step"] - 1).map(moved).dropna().astype(np.int64)
        self.waiting, self.awaited = np.append(self.waiting, before.index), np.append(self.awaited, before)


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
            start, end = intervals.union(of.passive[thread], change.away.get(thread, ((), ())))
            if len(start):
                self._away[thread] = intervals.Coverage(np.maximum(start, of.begin_ns), end)
        self._lines()
        self._walk()

    def own(self, thread: Int, time: Int) -> Int:
        """Recorded time of threads without what falls away before it."""
        out = time.astype(np.int64)
        for one, away in self._away.items():
            mine = thread == one
            out[mine] -= away.before(out[mine])
        return out

    def _ready(self, mine: Int | slice) -> Int:
        """When operations could start for their launch's sake, if their threads had no delay."""
        of, launched = self.of, self.of.launch[mine] >= 0
        ready, thread = of.ready[mine], of.by[mine]
        if self._away:
            # The latency after the call is the device's; what comes before it is the thread's own time.
            point = np.minimum(of.done[mine], np.maximum(ready, of.begun[mine]))
            ready = np.where(launched, self.own(thread, point) + (ready - point), ready)
        if self.change.aside is not None:
            # When it was launched that stands in no order now is not known: it begins no earlier than it did.
            ready = np.where(launched, ready, of.start[mine])
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

    def _waits(self) -> Iterator[tuple[Int, Int, npt.NDArray[Any]]]:
        """Moments, what they wait for, and by how much they come later than that; kind by kind."""
        of, layout, change, cuts = self.of, self.layout, self.change, self.of.cuts
        segments = len(cuts.end) + np.arange(len(layout.head))
        # A thread goes on after its cut before, and what the cut costs; a call whose copy was moved aside, as any call.
        begins, returns = (self.own(cuts.thread, at) for at in (cuts.start, cuts.end))
        moved = False if change.aside is None else (cuts.copy >= 0) & change.aside[cuts.copy]
        cost = np.where(moved, of.call_ns, cuts.cost)
        cut = np.flatnonzero(cuts.thread[1:] == cuts.thread[:-1]) + 1
        yield cut, cut - 1, (begins + cost - returns)[cut]
        # A batch is there when it is there, whatever the delay: the first moment of all has none.
        cut = np.flatnonzero(cuts.arrival > NEVER) if change.arrivals else cut[:0]
        yield cut, 0 * cut, (cuts.arrival - returns)[cut]
        # A thread goes on when another one has got to where it was.
        cut = of.asking if change.hand_overs else of.asking[:0]
        asked, asked_ns = of.asked[: len(cut)], of.asked_ns[: len(cut)]
        yield cut, cuts.slot(asked, asked_ns), self.own(asked, asked_ns) - returns[cut]
        # A segment begins when it has been launched, ...
        yield segments, np.maximum(layout.slot, 0), self.a
        # ... behind the one before it in its stream, or what was there before, ...
        opens, free = layout.opens_stream, np.full(int(layout.stream_of.max()) + 1, of.earliest_ns)
        free[: len(of.released_ns)] = of.released_ns
        yield segments[opens], 0 * segments[opens], free[layout.stream_of[opens]] + self.b[opens]
        after = np.flatnonzero(~opens)
        yield segments[after], layout.end_at[after - 1], self.b[after]
        # ... and when what it waits for on other streams is done.
        yield segments[layout.waiting], layout.end_at[layout.awaited], of.after_ns + self.direct[layout.waiting]
        # A device leaves a collective when the last one has arrived, and it has done its work.
        meets = pd.DataFrame({"collective": of.meeting_of, "segment": layout.meeting, "after": of.transfer_ns})
        both = meets.assign(leaves=layout.end_at[layout.meeting]).merge(meets, on="collective", suffixes=("", "_of"))
        arrives = both["segment_of"].to_numpy()
        yield both["leaves"].to_numpy(), segments[arrives], both["after"].to_numpy() - self.first_ns[arrives]
        # A call returns when what it waits for is done, or what others had launched on its stream by then (~stream).
        # One that frees memory waits as long as it is called at all.
        called = self.own(cuts.thread, cuts.start + 1) > self.own(cuts.thread, cuts.start)
        waits = (cuts.start < of.begin_ns) | ~cuts.blocks | np.where(cuts.frees, called, change.waits)
        waits = waits[layout.cut_of_target]
        cut, target = layout.cut_of_target[waits], layout.target[waits]
        done = np.where(layout.crosses[waits], ~layout.stream_of[target], layout.end_at[target])
        yield cut, done, (cuts.tail - returns)[cut]

    def _order(self) -> Int:
        """Moments in the order of the recording."""
        layout, cuts = self.layout, self.of.cuts
        slot = np.where(layout.slot >= 0, cuts.end[np.maximum(layout.slot, 0)], NEVER)
        key = np.maximum(self.of.start[layout.order[layout.head]], slot)
        gathered = pd.Series(key[layout.meeting]).groupby(self.of.meeting_of).transform("max")
        # Cuts stand first: of two at one time, the cut; what leaves a collective stands behind the arrivals.
        return np.argsort(np.concatenate([cuts.end, key, gathered.to_numpy(np.int64)]), kind="stable")

    def _walk(self) -> None:
        """When each moment is: the latest that any of what it waits for allows."""
        layout, cuts = self.layout, self.of.cuts
        moment, other, later = (np.concatenate(column) for column in zip(*self._waits(), strict=True))
        rank = np.argsort(order := self._order())
        known = other >= 0
        if self.change.aside is not None and (rank[moment] <= rank[other])[known].any():
            rank = np.argsort(_behind(order, moment[known], other[known]))  # what is moved aside may last longer
        by_rank = np.argsort(rank[moment], kind="stable")
        moment, other, later = moment[by_rank], other[by_rank], later[by_rank]
        begins = self.own(cuts.thread, cuts.start)
        launched = {stream: self._launched(stream, rank) for stream in layout.shared.tolist()}
        at = [int(NEVER)] * len(rank)
        for first in np.flatnonzero(cuts.end == NEVER).tolist():  # of each thread, which has no delay yet
            at[first] = 0
        for number, awaited, after in zip(moment.data, other.data, later.data, strict=True):
            if awaited >= 0:
                time = at[awaited] + after
            else:
                time = launched[~awaited].done(begins[number] + at[number - 1], rank[number], at) + after
            if time > at[number]:  # noqa: PLR1730 - a call of max would cost as much as the rest
                at[number] = time
        self.delay, self.end_of = np.array(at[: len(cuts.end)]), np.array(at)[layout.end_at]

    def _launched(self, stream: int, rank: Int) -> _Launched:
        of, layout = self.of, self.layout
        alone = layout.end_at < len(of.cuts.end) + len(layout.head)  # segments outside collectives
        parts = np.flatnonzero((layout.stream_of == stream) & alone)
        parts = parts[np.argsort(rank[layout.end_at[parts]])]
        moments, last = layout.end_at[parts], layout.order[layout.tail[parts]]
        own = np.where(of.launch[last] >= 0, self.own(of.by[last], of.begun[last]), NEVER)
        slot = np.maximum(of.slot[last], 0)
        return _Launched(*(column.tolist() for column in (moments, rank[moments], own, slot)))

    def times(self) -> tuple[Int, Int]:
        """When each operation ran, in the order of the schedule.

        Returns
        -------
        start, end : ndarray of int64
        """
        layout, end_of = self.layout, self.end_of
        order, head, tail = layout.order, layout.head, layout.tail
        lasting, alone, total = self._parts(order)
        segment = np.repeat(np.arange(len(head)), tail - head + 1)
        # As soon as all launches up to it allow, or as its segment could for other reasons.
        launched = pd.Series(self._ready(order) + alone - total).groupby(segment).cummax().to_numpy()
        delay = self.delay[np.maximum(layout.slot, 0)]
        before = np.where(layout.opens_stream, NEVER, np.roll(end_of, 1))
        other = before - np.where(head > 0, total[np.maximum(head - 1, 0)], 0)
        late = end_of > np.maximum(launched[tail] + delay, other) + total[tail] + 1
        other = np.where(late, end_of - total[tail], other)
        end = np.empty(len(order), np.int64)
        end[order] = total + np.maximum(launched + delay[segment], other[segment])
        start = end.copy()
        start[order] -= lasting
        return start, end

    def _reached(self, thread: Int, time: Int) -> Int:
        """When threads got to what they had got to at some times."""
        return np.asarray(self.own(thread, time) + self.delay[self.of.cuts.slot(thread, time)])

    def played(self) -> Played:
        """When the window and its steps ended.

        Returns
        -------
        Played
        """
        of, layout, end_of, steps = self.of, self.layout, self.end_of, self.of.steps
        if not len(steps):
            begin = (end_of - self.first_ns)[layout.opens_stream].min()
            return Played(int(end_of.max() - begin), np.empty(0, np.int64))
        first_ns, begin_ns = (int(steps[column].iloc[0]) for column in ("start_ns", "begin_ns"))
        moments = np.append(first_ns, steps["cpu_end_ns"])
        begin, *reached = self._reached(np.full(len(moments), of.main), moments).tolist()
        ends = np.array(reached)
        np.maximum.at(ends, layout.step_ended, end_of[layout.ends_step])
        # What was launched beside ends the step that it is launched in now.
        called = self._reached(of.by[layout.beside_operation], of.begun[layout.beside_operation])
        at = np.searchsorted(np.maximum.accumulate(reached), called, side="right")
        within = at < len(ends)
        np.maximum.at(ends, at[within], end_of[layout.beside[within]])
        ends = np.maximum.accumulate(ends)
        if begin_ns > first_ns:  # behind a step that is not played
            begin = max(begin, begin_ns)
            ends = np.maximum(ends, begin)
        return Played(int(ends[-1] - begin), ends - begin)


@dataclasses.dataclass
class _Launched:
    """When each segment of a stream on which several threads launch had been launched, as far as a walk has got.

    Parameters
    ----------
    moments, rank : list of int
        The segments' ends, and when the walk gets to them.
    own, slot : list of int
        The launching threads' own time, and their slots.
    """

    moments: list[int]
    rank: list[int]
    own: list[int]
    slot: list[int]
    by: list[int] = dataclasses.field(default_factory=list)

    def done(self, time: int, now: int, at: list[int]) -> int:
        """When all was done that had been launched by a time."""
        number = len(self.by)
        while number < len(self.rank) and self.rank[number] < now:
            launched = self.own[number] + at[self.slot[number]]
            self.by.append(max(launched, self.by[-1]) if self.by else launched)
            number += 1
        before = bisect.bisect_right(self.by, time)
        return at[self.moments[before - 1]] if before else int(NEVER)


def _behind(order: Int, moments: Int, others: Int) -> Int:
    """Moments in their order, but each behind those that it waits for; a circle stays as it is in the order."""
    rank = np.argsort(order)
    graph: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
    for moment, other in zip(rank[moments].tolist(), rank[others].tolist(), strict=True):
        graph.add(moment, other)
    with contextlib.suppress(graphlib.CycleError):
        graph.prepare()
    ready: list[int] = []
    found: list[int] = []
    while graph.is_active():
        for place in graph.get_ready():
            heapq.heappush(ready, place)
        found.append(heapq.heappop(ready))
        graph.done(found[-1])
    return np.asarray(order[np.append(found, np.setdiff1d(np.arange(len(order)), found)).astype(np.int64)])
