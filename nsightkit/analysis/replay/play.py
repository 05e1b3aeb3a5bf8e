"""One replay of a schedule, with a change: each moment is the latest of the moments it waits for.

Moments are *cuts* of a thread (its delay from then on), ends of *segments* of a stream, and departures from
collectives. Each waits for others, and comes so much later than they do: all such pairs are listed first, and then gone
through once.
"""

from __future__ import annotations

import bisect
import dataclasses
import graphlib
from collections.abc import Iterator

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.layout import Layout
from nsightkit.analysis.replay.model import NEVER, Change, Int, Played
from nsightkit.analysis.replay.stages import Stages

__all__ = ["play"]

#: Operations looked at together, at least; bounds memory.
_CHUNK = 1 << 18


def play(schedule: Stages, layout: Layout, change: Change) -> Played:
    """Play a schedule.

    Parameters
    ----------
    schedule : Stages
    layout : Layout
        Of the schedule, with what `change` moves aside.
    change : Change

    Returns
    -------
    Played
    """
    setting = _Setting(schedule, layout, change, _clock(schedule, change))
    lines = _lines(setting)
    pairs = _Pairs(*(np.concatenate(column) for column in zip(*_waits(setting, lines), strict=True)))
    at = _walk(setting, pairs)
    end_of = at[setting.end_at]
    delay = at[: len(schedule.cuts.end)]
    return _played(setting, lines, delay, end_of)


@dataclasses.dataclass(frozen=True, eq=False)
class _Clock:
    """Recorded time of threads, without what falls away."""

    away: dict[int, intervals.Coverage]

    def own(self, thread: Int, time: Int) -> Int:
        """Times of threads without what falls away before them."""
        out = time.astype(np.int64)
        for number, away in self.away.items():
            of_thread = thread == number
            out[of_thread] -= away.before(out[of_thread])
        return out


def _clock(schedule: Stages, change: Change) -> _Clock:
    away = {}
    for thread, passive in schedule.latencies.passive.items():
        start, end = intervals.union(passive, change.away.get(thread, ((), ())))
        if len(start):
            away[thread] = intervals.Coverage(np.maximum(start, schedule.program.begin_ns), end)
    return _Clock(away)


@dataclasses.dataclass(frozen=True, eq=False)
class _Setting:
    """What every part of a replay looks at."""

    schedule: Stages
    layout: Layout
    change: Change
    clock: _Clock

    @property
    def segments(self) -> Int:
        """Moments at which segments end; those of cuts stand before them."""
        return len(self.schedule.cuts.end) + np.arange(len(self.layout.head))

    @property
    def end_at(self) -> Int:
        """Moments at which segments are over: those of collectives when the devices leave them, behind all segments."""
        moments = self.segments
        meeting = self.layout.meeting
        moments[meeting] = len(self.schedule.cuts.end) + len(moments) + np.arange(len(meeting))
        return moments

    def reached(self, thread: Int, time: Int, delay: Int) -> Int:
        """When threads got to what they had got to at some times."""
        return np.asarray(self.clock.own(thread, time) + delay[self.schedule.cuts.slot(thread, time)])


@dataclasses.dataclass(frozen=True, eq=False)
class _Lines:
    """Each segment as a line: its last end is max(the thread's delay + `ready`, the stream's last end + `lasting`).

    `alone` is from the start of its first operation to the end of its last one, `first` the first one's own time.
    """

    ready: Int
    lasting: Int
    alone: Int
    first: Int


@dataclasses.dataclass(frozen=True, eq=False)
class _Pairs:
    """Moments, the moment that each waits for (~stream: what was launched on it by then), and how much later it is."""

    moment: Int
    awaited: Int
    later: Int


def _lines(setting: _Setting) -> _Lines:
    layout = setting.layout
    lines = _Lines(*np.empty((4, len(layout.head)), np.int64))
    low = 0
    while low < len(layout.head):
        begin = int(layout.head[low])
        high = max(low + 1, int(np.searchsorted(layout.tail, begin + _CHUNK)))
        places = layout.order[begin : int(layout.tail[high - 1]) + 1]
        part = slice(low, high)
        head, tail = layout.head[part] - begin, layout.tail[part] - begin
        lasting, alone, total = _durations(setting, places)
        lines.lasting[part] = total[tail] - np.where(head > 0, total[np.maximum(head - 1, 0)], 0)
        lines.alone[part] = alone[head] + total[tail] - total[head]
        lines.first[part] = lasting[head]
        ready = _ready(setting, places) + alone - total
        lines.ready[part] = total[tail] + np.maximum.reduceat(ready, head)
        low = high
    return lines


def _durations(setting: _Setting, places: Int) -> tuple[Int, Int, Int]:
    """How long operations last, also with the time they are held, and the sum of that and the gaps up to each."""
    schedule, durations = setting.schedule, setting.change.durations_ns
    lasting, gap = schedule.lasting[places], schedule.latencies.gap[places]
    if durations is not None:
        lasting = durations[places]
        gap = np.where(lasting > 0, gap, 0)
    alone = lasting + schedule.waits.held_ns[places]
    return lasting, alone, np.cumsum(alone + gap)


def _ready(setting: _Setting, places: Int) -> Int:
    """When operations could start for their launch's sake, if their threads had no delay."""
    operations = setting.schedule.operations
    launched, ready = operations.linked[places], setting.schedule.waits.ready[places]
    # The latency after the call is the device's; what comes before it is the thread's own time.
    point = np.minimum(operations.done[places], np.maximum(ready, operations.begun[places]))
    own = setting.clock.own(operations.by[places], point) + (ready - point)
    # Beside operations moved aside, one without a launch begins no earlier than it did.
    otherwise = ready if setting.change.aside is None else operations.start[places]
    return np.where(launched, own, otherwise)


def _waits(setting: _Setting, lines: _Lines) -> Iterator[tuple[Int, Int, Int]]:
    """Moments, what they wait for, and by how much they come later than that; kind by kind."""
    yield from _waits_of_threads(setting)
    yield from _waits_of_segments(setting, lines)
    yield _departures(setting, lines)
    yield _returns(setting)


def _waits_of_threads(setting: _Setting) -> Iterator[tuple[Int, Int, Int]]:
    schedule, change, clock, cuts = setting.schedule, setting.change, setting.clock, setting.schedule.cuts
    begins, returns = clock.own(cuts.thread, cuts.start), clock.own(cuts.thread, cuts.end)
    # A thread goes on after its cut before, and what the cut costs; a call whose copy was moved aside, as any call.
    cost = cuts.cost
    if change.aside is not None:
        cost = np.where((cuts.copy >= 0) & change.aside[cuts.copy], schedule.latencies.call_ns, cost)
    cut = np.flatnonzero(cuts.thread[1:] == cuts.thread[:-1]) + 1
    yield cut, cut - 1, (begins + cost - returns)[cut]
    if change.arrivals:
        # A batch arrives regardless of the thread's delay: the first moment has none.
        cut = np.flatnonzero(cuts.arrival > NEVER)
        yield cut, 0 * cut, (cuts.arrival - returns)[cut]
    if change.hand_overs:
        # A thread goes on when another one has got to where it was.
        later = clock.own(cuts.asked, cuts.asked_ns) - returns[cuts.asking]
        yield cuts.asking, cuts.slot(cuts.asked, cuts.asked_ns), later


def _waits_of_segments(setting: _Setting, lines: _Lines) -> Iterator[tuple[Int, Int, Int]]:
    schedule, layout, segments, end_at = setting.schedule, setting.layout, setting.segments, setting.end_at
    # A segment begins when it has been launched, ...
    yield segments, np.maximum(layout.slot, 0), lines.ready
    # ... behind the one before it in its stream, or what was there before, ...
    released_ns = schedule.operations.released_ns
    # Streams beyond those of operations are of work moved aside; a selection may have fewer than its whole trace.
    free = np.full(max(int(layout.stream.max()) + 1, len(released_ns)), schedule.operations.earliest_ns)
    free[: len(released_ns)] = released_ns
    opens, after = np.flatnonzero(layout.opens), np.flatnonzero(~layout.opens)
    yield segments[opens], 0 * opens, free[layout.stream[opens]] + lines.lasting[opens]
    yield segments[after], end_at[after - 1], lines.lasting[after]
    # ... and when what it waits for on other streams is done.
    yield segments[layout.waiting], end_at[layout.awaited], schedule.waits.after_ns + lines.alone[layout.waiting]


def _departures(setting: _Setting, lines: _Lines) -> tuple[Int, Int, Int]:
    """A device leaves a collective when the last one has arrived, and it has done its work."""
    gathered, layout = setting.schedule.gathered, setting.layout
    columns = {"collective": gathered.collective, "segment": layout.meeting}
    meets = pd.DataFrame(columns)
    leaves = meets.assign(leaves=setting.end_at[layout.meeting], after=gathered.transfer_ns)
    both = leaves.merge(meets, on="collective", suffixes=("", "_of"))
    arrives = both["segment_of"].to_numpy()
    return both["leaves"].to_numpy(), setting.segments[arrives], both["after"].to_numpy() - lines.first[arrives]


def _returns(setting: _Setting) -> tuple[Int, Int, Int]:
    """A call returns when what it waits for is done, or what others had launched on its stream by then (~stream)."""
    layout, cuts = setting.layout, setting.schedule.cuts
    waits = ~cuts.blocks | (cuts.start < setting.schedule.program.begin_ns) | setting.change.waits
    waits = waits[layout.cut_of_target]
    cut, target = layout.cut_of_target[waits], layout.target[waits]
    done = np.where(layout.crosses[waits], ~layout.stream[target], setting.end_at[target])
    returns = setting.clock.own(cuts.thread[cut], cuts.end[cut])
    return cut, done, cuts.tail[cut] - returns


def _ranks(setting: _Setting, pairs: _Pairs) -> Int:
    """The turn of each moment: the recorded one, unless operations moved aside last longer than it allows."""
    layout, cuts = setting.layout, setting.schedule.cuts
    slot = np.where(layout.slot >= 0, cuts.end[np.maximum(layout.slot, 0)], NEVER)
    key = np.maximum(setting.schedule.operations.start[layout.order[layout.head]], slot)
    gathered = pd.Series(key[layout.meeting]).groupby(setting.schedule.gathered.collective).transform("max")
    # At equal times cuts come first, and departures from a collective after the arrivals.
    order = np.argsort(np.concatenate([cuts.end, key, gathered.to_numpy(np.int64)]), kind="stable")
    rank = np.argsort(order)
    if setting.change.aside is None:
        return rank
    return _behind(rank, pairs)


def _behind(rank: Int, pairs: _Pairs) -> Int:
    """Turns in which each moment comes after the moments it waits for; a circle stays as it is."""
    known = pairs.awaited >= 0
    moment, awaited = rank[pairs.moment[known]], rank[pairs.awaited[known]]
    if (moment > awaited).all():
        return rank
    sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
    for turn, before in zip(moment.tolist(), awaited.tolist(), strict=True):
        sorter.add(turn, before)
    try:
        turns = np.fromiter(sorter.static_order(), np.int64)
    except graphlib.CycleError:
        return rank
    turns = np.append(turns, np.setdiff1d(np.arange(len(rank)), turns))
    return np.argsort(turns)[rank]


def _walk(setting: _Setting, pairs: _Pairs) -> Int:
    """When each moment is: the latest that any of what it waits for allows."""
    cuts, layout = setting.schedule.cuts, setting.layout
    rank = _ranks(setting, pairs)
    in_turn = np.argsort(rank[pairs.moment], kind="stable")
    moment, awaited, later = pairs.moment[in_turn], pairs.awaited[in_turn], pairs.later[in_turn]
    begins = setting.clock.own(cuts.thread, cuts.start)
    shared = np.unique(layout.stream[layout.target[layout.crosses]])
    launched = {stream: _launched(setting, stream, rank) for stream in shared.tolist()}
    at = [int(NEVER)] * len(rank)
    for first in np.flatnonzero(cuts.end == NEVER).tolist():  # of each thread, which has no delay yet
        at[first] = 0
    for number, before, after in zip(moment.tolist(), awaited.tolist(), later.tolist(), strict=True):
        if before >= 0:
            time = at[before] + after
        else:
            time = launched[~before].done(begins[number] + at[number - 1], rank[number], at) + after
        if time > at[number]:  # noqa: PLR1730 - a call of max would cost as much as the rest
            at[number] = time
    return np.array(at)


@dataclasses.dataclass
class _Launched:
    """When each segment of a stream on which several threads launch had been launched, as far as a walk has got.

    Parameters
    ----------
    moments, rank : list of int
        The segments' ends, and when the walk gets to them.
    own, slot : list of int
        The launching threads' own time, and their slots.
    by : list of int
        When each was launched, so far.
    """

    moments: list[int]
    rank: list[int]
    own: list[int]
    slot: list[int]
    by: list[int] = dataclasses.field(default_factory=list)

    def done(self, time: int, now: int, at: list[int]) -> int:
        """When everything was done that had been launched by a time."""
        number = len(self.by)
        while number < len(self.rank) and self.rank[number] < now:
            launched = self.own[number] + at[self.slot[number]]
            self.by.append(max(launched, self.by[-1]) if self.by else launched)
            number += 1
        before = bisect.bisect_right(self.by, time)
        return at[self.moments[before - 1]] if before else int(NEVER)


def _launched(setting: _Setting, stream: int, rank: Int) -> _Launched:
    layout, operations, end_at = setting.layout, setting.schedule.operations, setting.end_at
    alone = end_at == setting.segments  # segments outside collectives
    parts = np.flatnonzero((layout.stream == stream) & alone)
    parts = parts[np.argsort(rank[end_at[parts]])]
    moments, last = end_at[parts], layout.order[layout.tail[parts]]
    own = setting.clock.own(operations.by[last], operations.begun[last])
    own = np.where(operations.linked[last], own, NEVER)
    slot = np.maximum(setting.schedule.slot[last], 0)
    return _Launched(moments.tolist(), rank[moments].tolist(), own.tolist(), slot.tolist())


def _played(setting: _Setting, lines: _Lines, delay: Int, end_of: Int) -> Played:
    """When the window and its steps ended."""
    schedule, layout = setting.schedule, setting.layout
    program, steps = schedule.program, schedule.program.steps
    if not len(steps):
        begin = (end_of - lines.first)[layout.opens].min()
        return Played(int(end_of.max() - begin), np.empty(0, np.int64))
    first_ns, begin_ns = int(steps["start_ns"].iloc[0]), int(steps["begin_ns"].iloc[0])
    moments = np.append(first_ns, steps["cpu_end_ns"])
    reached = setting.reached(np.full(len(moments), program.main), moments, delay)
    begin, ends = int(reached[0]), _ends_of_steps(setting, reached[1:], delay, end_of)
    if begin_ns > first_ns:  # after a step that is left out
        begin = max(begin, begin_ns)
        ends = np.maximum(ends, begin)
    return Played(int(ends[-1] - begin), ends - begin)


def _ends_of_steps(setting: _Setting, cpu_ends: Int, delay: Int, end_of: Int) -> Int:
    """When each step and all before it are over, on the CPU and on the devices."""
    layout, operations = setting.layout, setting.schedule.operations
    ends = cpu_ends.copy()
    np.maximum.at(ends, layout.step_ended, end_of[layout.ends_step])
    # What was launched beside ends the step that it is launched in now.
    beside = layout.beside_operation
    called = setting.reached(operations.by[beside], operations.begun[beside], delay)
    at = np.searchsorted(np.maximum.accumulate(cpu_ends), called, side="right")
    within = at < len(ends)
    np.maximum.at(ends, at[within], end_of[layout.beside[within]])
    return np.asarray(np.maximum.accumulate(ends))
