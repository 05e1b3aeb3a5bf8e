"""One replay of a schedule, with a change: each moment is the latest of the moments it waits for.

Moments are *cuts* of a thread (its delay from then on), ends of *segments* of a stream, and of collectives the arrival
of the last device and the departure of each. Each waits for others, and comes so much later than they do: all such
pairs are listed first, and then gone through once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.cuts import Cuts
from nsightkit.analysis.replay.model import NEVER, Bool, Change, Int, Played
from nsightkit.analysis.replay.operations import Program
from nsightkit.analysis.replay.streams import Gathered, Streams
from nsightkit.analysis.timeline.gaps.threads import Threads

__all__ = ["Layout", "Stages", "lay_out", "play"]


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """What the stages of reading found: all that a replay needs.

    Parameters
    ----------
    program : Program
    facts : Threads
        What each thread did.
    streams : Streams
    gathered : Gathered
    cuts : Cuts
    """

    program: Program
    facts: Threads
    streams: Streams
    gathered: Gathered
    cuts: Cuts

    @functools.cached_property
    def slot(self) -> Int:
        """The slot that each operation was launched in, -1 where its launch was not recorded."""
        return self.cuts.slot(self.program.by, self.program.begun)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Segments of the streams: runs of operations launched in one slot, with no wait in between.

    Parameters
    ----------
    order : ndarray of int64
        Operations by stream, those moved aside on new streams at the end.
    head, tail : ndarray of int64
        First and last place of each segment in `order`.
    opens : ndarray of bool
        Whether a segment is the first of its stream.
    waiting, awaited : ndarray of int64
        Segments that wait for others.
    target : ndarray of int64
        Segments that cuts wait for, in the order of ``Cuts.target``; -1 where nothing is left to wait for.
    meeting : ndarray of int64
        Segments of the collectives' operations.
    ending : ndarray of int64
        Segments that end a step on their stream.
    """

    order: Int
    head: Int
    tail: Int
    opens: Bool
    waiting: Int
    awaited: Int
    target: Int
    meeting: Int
    ending: Int


def lay_out(schedule: Stages, aside: Bool) -> Layout:
    """Cut the streams into segments.

    Parameters
    ----------
    schedule : Stages
    aside : ndarray of bool
        Operations moved to a new stream, one per device.

    Returns
    -------
    Layout
    """
    program = schedule.program
    meeting = schedule.gathered.operation
    device, _ = pd.factorize(program.device)
    stream = np.where(aside, program.stream[-1] + 1 + device, program.stream)
    order = np.lexsort((program.start, stream))
    first = _changes(stream[order])
    step = program.in_step[order]
    last = np.append(first[1:] | _changes(step)[1:], True)
    waiting, awaited = _pairs(schedule, aside, stream, order)
    target = _targets(schedule, aside)
    # A segment ends where something asks when it is done, and begins where a launch comes from another slot.
    # Operations without a recorded launch stay in the segment around them: only their order counts.
    slot = schedule.slot[order]
    ends = first | last | _among(order, awaited, target[target >= 0], meeting)
    begins = first | _among(order, waiting, meeting)
    begins |= _changes(slot) & (slot >= 0)
    begins[1:] |= ends[:-1]
    head = np.flatnonzero(begins)
    segment = np.empty(len(order), np.int64)
    segment[order] = np.cumsum(begins) - 1
    return Layout(
        order=order,
        head=head,
        tail=np.append(head[1:], len(order)) - 1,
        opens=first[head],
        waiting=segment[waiting],
        awaited=segment[awaited],
        target=np.where(target >= 0, segment[target], -1),
        meeting=segment[meeting],
        ending=segment[order[last & (step >= 0)]],
    )


def _changes(values: Int) -> Bool:
    """Where a value differs from the one before it; true of the first."""
    return np.append(True, values[1:] != values[:-1])


def _among(order: Int, *operations: Int) -> Bool:
    """Per place: whether its operation is one of some."""
    flag = np.zeros(len(order), bool)
    flag[np.concatenate(operations)] = True
    return flag[order]


def _pairs(schedule: Stages, aside: Bool, stream: Int, order: Int) -> tuple[Int, Int]:
    """Operations that wait for others. Nothing waits for those moved aside but work of the steps after theirs."""
    program = schedule.program
    waiting = schedule.streams.waiting
    awaited = schedule.streams.awaited
    kept = ~aside[waiting] & ~aside[awaited]
    columns = {"operation": order, "stream": stream[order], "device": program.device[order]}
    ops = pd.DataFrame({**columns, "step": program.in_step[order]})
    moved = aside[order]
    ends = ops[moved].drop_duplicates(["device", "step"], keep="last").sort_values("step")
    begins = ops[~moved & (ops["step"] > 0)].drop_duplicates(["stream", "step"]).sort_values("step")
    ends = ends.drop(columns="stream").rename(columns={"operation": "end"})
    joined = pd.merge_asof(begins, ends, on="step", by="device", allow_exact_matches=False).dropna()
    waiting = np.append(waiting[kept], joined["operation"])
    return waiting, np.append(awaited[kept], joined["end"]).astype(np.int64)


def _targets(schedule: Stages, aside: Bool) -> Int:
    """What cuts wait for: instead of an operation moved aside for the one before it in its stream, -1 for none."""
    program = schedule.program
    cuts = schedule.cuts
    last = np.maximum.accumulate(np.where(aside, -1, np.arange(len(aside))))
    last[program.stream[last] != program.stream] = -1
    # The call of a copy from pageable memory no longer waits for it; a read-back needs what stood before the copy.
    own = (cuts.copy[cuts.cut] == cuts.target) & program.staged[cuts.target] & aside[cuts.target]
    return np.where(own, -1, last[cuts.target])


# ---------------------------------------------------------------- moments and their waits


class _Waits(NamedTuple):
    """Moments, the moment that each waits for, and by how much it comes later than that."""

    moment: Int
    awaited: Int
    later: Int


class _Lines(NamedTuple):
    """Each segment as a line: its last end is max(the thread's delay + `ready`, the stream's last end + `lasting`).

    `alone` is from the start of its first operation to the end of its last one, `first` the first one's own time.
    """

    ready: Int
    lasting: Int
    alone: Int
    first: Int


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
    setting = _Setting(schedule, layout, change, change.moved(len(layout.order)), _away(schedule, change))
    lines = _lines(setting)
    waits = [*_of_threads(setting), *_of_segments(setting, lines), *_of_collectives(setting, lines)]
    at = _walk(setting, _Waits(*map(np.concatenate, zip(*waits, strict=True))))
    return _played(setting, lines, at)


def _away(schedule: Stages, change: Change) -> dict[int, intervals.Coverage]:
    """The time of each thread that a change takes away."""
    away = {}
    for thread, parts in change.away.items():
        start, end = intervals.union(*parts)
        away[thread] = intervals.Coverage(np.maximum(start, schedule.program.begin_ns), end)
    return away


@dataclasses.dataclass(frozen=True, eq=False)
class _Setting:
    """What every part of a replay looks at; moments are numbered: cuts, segments, collectives, departures from them."""

    schedule: Stages
    layout: Layout
    change: Change
    aside: Bool
    away: dict[int, intervals.Coverage]

    @property
    def segments(self) -> Int:
        """Moments at which segments end; those of cuts stand before them."""
        return len(self.schedule.cuts.end) + np.arange(len(self.layout.head))

    @property
    def meetings(self) -> Int:
        """Moments at which the last device arrives at the collective of each operation in one."""
        return len(self.schedule.cuts.end) + len(self.layout.head) + self.schedule.gathered.collective

    @property
    def departures(self) -> Int:
        """Moments at which these operations are over."""
        meetings = self.meetings
        return int(meetings.max(initial=0)) + 1 + np.arange(len(meetings))

    @property
    def over(self) -> Int:
        """Moments at which segments are over: those of collectives when the devices leave them."""
        over = self.segments
        over[self.layout.meeting] = self.departures
        return over

    def own(self, thread: Int, time: Int) -> Int:
        """Times of threads without what falls away before them."""
        out = time.astype(np.int64)
        for number, away in self.away.items():
            of_thread = thread == number
            out[of_thread] -= away.before(out[of_thread])
        return out

    def reached(self, thread: Int, time: Int, at: Int) -> Int:
        """When threads got to what they had got to at some times."""
        return np.asarray(self.own(thread, time) + at[self.schedule.cuts.slot(thread, time)])


def _lines(setting: _Setting) -> _Lines:
    layout = setting.layout
    program = setting.schedule.program
    streams = setting.schedule.streams
    lasting = np.maximum(program.lasting - setting.change.less_ns, 0)
    gap = np.where((lasting > 0) | (lasting == program.lasting), streams.gap, 0)
    # The latency after the call is the device's; what comes before it is the thread's own time.
    point = np.minimum(program.done, np.maximum(streams.ready, program.begun))
    own = setting.own(program.by, point) + streams.ready - point
    # Beside operations moved aside, one without a launch begins no earlier than it did.
    otherwise = program.start if setting.aside.any() else streams.ready
    ready = np.where(program.linked, own, otherwise)[layout.order]
    alone = (lasting + streams.held_ns)[layout.order]
    gap = gap[layout.order]
    # An operation takes `alone`, from when it is ready and `gap` has passed since the end before it. So a segment ends
    # at the latest of what its operations allow: that one is ready, then it and all behind it run without a pause.
    ends = np.cumsum(alone + gap)  # as if all operations stood in one stream that never pauses
    end = ends[layout.tail]
    start = (ends - alone)[layout.head]
    return _Lines(
        ready=end + np.maximum.reduceat(ready + alone - ends, layout.head),
        lasting=end - start + gap[layout.head],
        alone=end - start,
        first=lasting[layout.order[layout.head]],
    )


def _of_threads(setting: _Setting) -> Iterator[_Waits]:
    """The moment of a cut is the delay of its thread from then on: when it ends, less the thread's own time."""
    schedule = setting.schedule
    cuts = schedule.cuts
    begins = setting.own(cuts.thread, cuts.start)
    ends = setting.own(cuts.thread, cuts.end)
    # A thread goes on behind its cut before, for what the cut costs; a call whose copy was moved aside is as any.
    is_moved = (cuts.copy >= 0) & setting.aside[cuts.copy]
    cost = np.where(is_moved, schedule.streams.call_ns, cuts.cost)
    cut = np.flatnonzero(cuts.end > NEVER)
    yield _Waits(cut, cut - 1, (begins + cost - ends)[cut])
    if setting.change.arrivals:
        # A batch arrives regardless of any delay: the first moment has none.
        batch = np.flatnonzero(cuts.is_batch)
        yield _Waits(batch, np.zeros(len(batch), np.int64), (cuts.end - ends)[batch])
    # A thread goes on when another one has got to where it was.
    asks = np.flatnonzero(cuts.asked >= 0)
    asked = cuts.asked[asks]
    time = cuts.end[asks]
    yield _Waits(asks, cuts.slot(asked, time), setting.own(asked, time) - ends[asks])
    # A call returns when what it waits for is done.
    waits = cuts.is_full | (cuts.start < schedule.program.begin_ns) | setting.change.waits
    target = setting.layout.target
    pair = np.flatnonzero(waits[cuts.cut] & (target >= 0))
    call = cuts.cut[pair]
    yield _Waits(call, setting.over[target[pair]], (cuts.tail - ends)[call])


def _of_segments(setting: _Setting, lines: _Lines) -> Iterator[_Waits]:
    schedule = setting.schedule
    layout = setting.layout
    segments = setting.segments
    over = setting.over
    program = schedule.program
    head = layout.order[layout.head]
    # A segment begins when it has been launched, ...
    yield _Waits(segments, np.maximum(schedule.slot[head], 0), lines.ready)
    # ... behind the one before it in its stream, or what was there before, ...
    opens = np.flatnonzero(layout.opens)
    after = np.flatnonzero(~layout.opens)
    free = np.where(program.first[head], program.before[head], NEVER)  # a new stream was not there before
    yield _Waits(segments[opens], 0 * opens, (free + lines.lasting)[opens])
    yield _Waits(segments[after], over[after - 1], lines.lasting[after])
    # ... and when what it waits for on other streams is done.
    later = schedule.streams.after_ns + lines.alone[layout.waiting]
    yield _Waits(segments[layout.waiting], over[layout.awaited], later)


def _of_collectives(setting: _Setting, lines: _Lines) -> Iterator[_Waits]:
    """A device leaves a collective when the last one has arrived, and it has done its work."""
    # Each operation of a collective is a segment by itself. Its device arrives where it begins: its own time before
    # its end.
    operations = setting.segments[setting.layout.meeting]
    own_ns = lines.first[setting.layout.meeting]
    yield _Waits(moment=setting.meetings, awaited=operations, later=-own_ns)
    transfer_ns = setting.schedule.gathered.transfer_ns
    yield _Waits(moment=setting.departures, awaited=setting.meetings, later=transfer_ns)


def _turns(setting: _Setting) -> Int:
    """When each moment was in the recording: its turn in the replay."""
    layout = setting.layout
    cuts = setting.schedule.cuts
    head = layout.order[layout.head]
    slot = setting.schedule.slot[head]
    launched = np.where(slot >= 0, cuts.end[slot], NEVER)
    turn = np.full(int(setting.departures.max(initial=setting.segments[-1])) + 1, NEVER)
    turn[: len(cuts.end)] = cuts.end
    turn[setting.segments] = np.maximum(setting.schedule.program.start[head], launched)
    np.maximum.at(turn, setting.meetings, turn[setting.segments[layout.meeting]])
    turn[setting.departures] = turn[setting.meetings]
    return turn


def _walk(setting: _Setting, waits: _Waits) -> Int:
    """When each moment is: the latest that any of what it waits for allows."""
    turn = _turns(setting)
    # At equal times cuts come first, and departures from a collective after the arrivals.
    order = np.lexsort((waits.moment, turn[waits.moment]))
    at = [int(NEVER)] * len(turn)
    for first in np.flatnonzero(setting.schedule.cuts.end == NEVER).tolist():  # of each thread, which has no delay yet
        at[first] = 0
    moments, awaited, later = (column[order].tolist() for column in waits)
    for moment, before, after in zip(moments, awaited, later, strict=True):
        at[moment] = max(at[moment], at[before] + after)
    return np.array(at)


def _played(setting: _Setting, lines: _Lines, at: Int) -> Played:
    """When the window and its steps ended."""
    layout = setting.layout
    program = setting.schedule.program
    steps = program.steps
    over = at[setting.over]
    if not len(steps):
        begin = (over - lines.first)[layout.opens].min()
        return Played(int(over.max() - begin), np.empty(0, np.int64))
    first_ns = int(steps["start_ns"].iloc[0])
    begin_ns = int(steps["begin_ns"].iloc[0])
    moments = np.append(first_ns, steps["cpu_end_ns"])
    reached = setting.reached(np.full(len(moments), program.main), moments, at)
    begin = int(reached[0])
    ends = np.maximum.accumulate(reached[1:])
    # Work ends the step that it is launched in now.
    last = layout.order[layout.tail[layout.ending]]
    step = np.searchsorted(ends, setting.reached(program.by[last], program.begun[last], at), side="right")
    within = step < len(ends)
    np.maximum.at(ends, step[within], over[layout.ending[within]])
    ends = np.maximum.accumulate(ends)
    if begin_ns > first_ns:  # after a step that is left out
        begin = max(begin, begin_ns)
        ends = np.maximum(ends, begin)
    return Played(int(ends[-1] - begin), ends - begin)
