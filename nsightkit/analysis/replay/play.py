"""One replay of a schedule, with a change: each moment is the latest of the moments it waits for.

Moments are *cuts* of a thread (its delay from then on), ends of *segments* of a stream, and for collectives the arrival
of the last device and the departure of each device. A moment comes no earlier than each moment that it waits for, plus
a constant. All such pairs are listed first, and then gone through once, in the recorded order.
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
from nsightkit.analysis.replay.streams import Collectives, Streams
from nsightkit.analysis.timeline.gaps.threads import Threads


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The results of reading a trace, stage by stage: all that a replay needs.

    Parameters
    ----------
    program : Program
    facts : Threads
        What each thread did.
    streams : Streams
    collectives : Collectives
    cuts : Cuts
    """

    program: Program
    facts: Threads
    streams: Streams
    collectives: Collectives
    cuts: Cuts

    @functools.cached_property
    def slot(self) -> Int:
        """The slot that each operation was launched in, -1 where its launch was not recorded."""
        return self.cuts.slot_at(self.program.launch_thread, self.program.launch_start)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Segments of the streams: runs of operations launched in one slot, with no wait in between.

    Segments are numbered by stream, then time.

    Parameters
    ----------
    order : ndarray of int64
        Positions of the operations by stream and start, those moved aside on new streams at the end.
    head, tail : ndarray of int64
        First and last place of each segment in `order`.
    opens_stream : ndarray of bool
        Whether each segment is the first of its stream.
    waiting, awaited : ndarray of int64
        Pairs of segments: ``waiting[i]`` begins only when ``awaited[i]`` is over.
    target : ndarray of int64
        The segment that each pair of ``Cuts.target`` and ``Cuts.waiting_cut`` waits for; -1 where nothing is left to
        wait for.
    in_collective : ndarray of int64
        The segment of each operation in ``Collectives.operation``.
    ends_step : ndarray of int64
        Segments that end a step on their stream.
    """

    order: Int
    head: Int
    tail: Int
    opens_stream: Bool
    waiting: Int
    awaited: Int
    target: Int
    in_collective: Int
    ends_step: Int


def lay_out(schedule: Stages, aside: Bool) -> Layout:
    """Cut the streams into segments.

    Parameters
    ----------
    schedule : Stages
    aside : ndarray of bool
        Which operations move to a new stream, one per device.

    Returns
    -------
    Layout
    """
    program = schedule.program
    in_collective = schedule.collectives.operation
    device, _ = pd.factorize(program.device)
    # The new streams have the numbers after the last one, which is the highest.
    stream = np.where(aside, program.stream[-1] + 1 + device, program.stream)
    order = np.lexsort((program.start, stream))
    # From here on, flags are by place in `order`.
    is_first = _differs_from_previous(stream[order])
    step = program.launch_step[order]
    is_last_of_step = np.append(is_first[1:] | _differs_from_previous(step)[1:], True)
    waiting, awaited = _stream_waits(schedule, aside, stream, order)
    target = _cut_targets(schedule, aside)
    # A segment ends with an operation that something waits for, and begins where a launch comes from another slot.
    # Operations without a recorded launch (slot -1) stay in the segment around them: only their order counts.
    # A stream's first operation and those of collectives are segments by themselves: their starts are asked for.
    slot = schedule.slot[order]
    is_tail = is_first | is_last_of_step | _is_any_of(order, awaited, target[target >= 0], in_collective)
    is_head = is_first | _is_any_of(order, waiting, in_collective)
    is_head |= _differs_from_previous(slot) & (slot >= 0)
    is_head[1:] |= is_tail[:-1]
    head = np.flatnonzero(is_head)
    # The segment of each operation: the number of heads up to its place.
    segment = np.empty(len(order), np.int64)
    segment[order] = np.cumsum(is_head) - 1
    return Layout(
        order=order,
        head=head,
        tail=np.append(head[1:], len(order)) - 1,
        opens_stream=is_first[head],
        waiting=segment[waiting],
        awaited=segment[awaited],
        target=np.where(target >= 0, segment[target], -1),
        in_collective=segment[in_collective],
        ends_step=segment[order[is_last_of_step & (step >= 0)]],
    )


def _differs_from_previous(values: Int) -> Bool:
    """Flag the values that differ from the one before them, and the first."""
    return np.append(True, values[1:] != values[:-1])


def _is_any_of(order: Int, *operations: Int) -> Bool:
    """Flag the places in `order` that hold one of some operations."""
    flag = np.zeros(len(order), bool)
    flag[np.concatenate(operations)] = True
    return flag[order]


def _stream_waits(schedule: Stages, aside: Bool, stream: Int, order: Int) -> tuple[Int, Int]:
    """Pair the operations that wait with those on other streams that they wait for.

    A change may move operations (`aside`: copies or collectives) to a separate stream, to let them overlap with
    all other work. Only the work of later steps waits for these: the first operation of a step on each stream waits for
    the last one that was moved aside in any step before, on the same device. `stream` has the stream of each operation
    after that, and `order` is that of :class:`Layout`.
    """
    program = schedule.program
    waiting = schedule.streams.waiting
    awaited = schedule.streams.awaited
    is_kept = ~aside[waiting] & ~aside[awaited]
    ops = pd.DataFrame(
        {
            "operation": order,
            "stream": stream[order],
            "device": program.device[order],
            "step": program.launch_step[order],
        }
    )
    is_aside = aside[order]
    last_aside = ops[is_aside].drop_duplicates(["device", "step"], keep="last").sort_values("step")
    first_of_step = ops[~is_aside & (ops["step"] > 0)].drop_duplicates(["stream", "step"]).sort_values("step")
    last_aside = last_aside.drop(columns="stream").rename(columns={"operation": "awaited"})
    # The last step before each, never the same one; NaN for none, which also makes floats of positions.
    joined = pd.merge_asof(first_of_step, last_aside, on="step", by="device", allow_exact_matches=False).dropna()
    waiting = np.append(waiting[is_kept], joined["operation"])
    return waiting, np.append(awaited[is_kept], joined["awaited"]).astype(np.int64)


def _cut_targets(schedule: Stages, aside: Bool) -> Int:
    """Give the operations that cuts wait for, as ``Cuts.target``, with those moved aside replaced.

    Instead of one moved aside, a cut waits for the last one before it that stays in its stream, -1 for none.
    """
    program = schedule.program
    cuts = schedule.cuts
    # For each operation, itself or the last before it that stays: a running maximum, where those moved aside are -1.
    staying = np.maximum.accumulate(np.where(aside, -1, np.arange(len(aside))))
    staying[program.stream[staying] != program.stream] = -1  # that one is on an earlier stream
    # The call of a copy from pageable memory to the device no longer waits for it, as if the memory were pinned. The
    # call of a copy to the host still waits for the operation before the copy: it needs the result.
    is_own_copy = cuts.copy[cuts.waiting_cut] == cuts.target
    no_longer_waits = is_own_copy & program.is_staged_copy[cuts.target] & aside[cuts.target]
    return np.where(no_longer_waits, -1, staying[cuts.target])


# ---------------------------------------------------------------- moments and their waits


class _Waits(NamedTuple):
    """Pairs of moments: `moment[i]` comes no earlier than `awaited[i]` plus `delay_ns[i]`, which may be negative."""

    moment: Int
    awaited: Int
    delay_ns: Int


class _SegmentTimes(NamedTuple):
    """When segments end: at max(the thread's delay + `ready_end`, the stream's last end + `queued_ns`).

    Parameters
    ----------
    ready_end : ndarray of int64
        When each would end in an empty stream, if its thread had no delay, on the trace's clock.
    queued_ns : ndarray of int64
        From the end of the segment before each to its own end, where all of its operations are queued.
    running_ns : ndarray of int64
        From the start of its first operation to the end of its last one, where all are queued.
    first_ns : ndarray of int64
        The duration of its first operation.
    """

    ready_end: Int
    queued_ns: Int
    running_ns: Int
    first_ns: Int


def play(schedule: Stages, layout: Layout, change: Change) -> Played:
    """Replay a schedule with a change.

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
    setting = _Setting(schedule, layout, change, change.aside_mask(len(layout.order)), _removed_time(schedule, change))
    times = _segment_times(setting)
    waits = [
        *_waits_of_cuts(setting),
        *_waits_of_segments(setting, times),
        *_waits_instead_of_calls(setting, times),
        *_waits_of_collectives(setting, times),
    ]
    # Join the lists of pairs into one.
    moment_ns = _times_of_moments(setting, _Waits(*map(np.concatenate, zip(*waits, strict=True))))
    return _window_and_step_ends(setting, times, moment_ns)


def _removed_time(schedule: Stages, change: Change) -> dict[int, intervals.Coverage]:
    """Merge, by thread, the time that a change removes: from ``changes_from_ns`` on, as it has no effect before."""
    removed = {}
    for thread, parts in change.removed.items():
        start, end = intervals.union(*parts)
        removed[thread] = intervals.Coverage(np.maximum(start, schedule.program.changes_from_ns), end)
    return removed


@dataclasses.dataclass(frozen=True, eq=False)
class _Setting:
    """The schedule, its layout and the change: all that the parts of one replay need.

    It numbers the moments of the replay: first the cuts, then the ends of segments, then the arrival of the last device
    at each collective, then the departure of each device from each.
    """

    schedule: Stages
    layout: Layout
    change: Change
    aside: Bool
    removed: dict[int, intervals.Coverage]

    @property
    def segment_ends(self) -> Int:
        """The number of the moment at which each segment ends; in a collective, as if no device waited for others."""
        return len(self.schedule.cuts.end) + np.arange(len(self.layout.head))

    @property
    def last_arrivals(self) -> Int:
        """For each operation of a collective, the number of the moment at which the last device arrives at that."""
        return len(self.schedule.cuts.end) + len(self.layout.head) + self.schedule.collectives.collective

    @property
    def departures(self) -> Int:
        """For each operation of a collective, the number of the moment at which it is over."""
        last_arrivals = self.last_arrivals
        return int(last_arrivals.max(initial=0)) + 1 + np.arange(len(last_arrivals))

    @property
    def segment_overs(self) -> Int:
        """The number of the moment at which each segment is over: its end or, in a collective, the departure."""
        overs = self.segment_ends
        overs[self.layout.in_collective] = self.departures
        return overs

    def own_time(self, thread: Int, time: Int) -> Int:
        """When each thread would get, without delay, to where it was at each time: less what the change removed before.

        Times are ns on the trace's clock.
        """
        own_time = time.astype(np.int64)
        for number, removed in self.removed.items():
            of_thread = thread == number
            own_time[of_thread] -= removed.before(own_time[of_thread])
        return own_time

    def replayed(self, thread: Int, time: Int, moment_ns: Int) -> Int:
        """When each thread gets, in the replay, to where it was in the recording at each time: with its delay then.

        `moment_ns` is of :func:`_times_of_moments`, and of a cut the delay in its slot.
        """
        return np.asarray(self.own_time(thread, time) + moment_ns[self.schedule.cuts.slot_at(thread, time)])


def _segment_times(setting: _Setting) -> _SegmentTimes:
    """Reduce the operations of each segment to four numbers, which tell when it ends."""
    layout = setting.layout
    program = setting.schedule.program
    streams = setting.schedule.streams
    duration_ns = np.maximum(program.duration_ns - setting.change.less_ns, 0)
    # An operation that the change removes leaves no gap.
    gap_ns = np.where((duration_ns > 0) | (duration_ns == program.duration_ns), streams.gap_ns, 0)
    # The latency after the call is the device's and stays; what comes before it is the thread's own time. So a launch
    # counts as made when its call ends or, if the operation is ready before that (a staged copy), when it is ready.
    launched = np.minimum(program.launch_end, np.maximum(streams.ready, program.launch_start))
    own_ready = setting.own_time(program.launch_thread, launched) + streams.ready - launched
    # Where operations moved aside, one without a launch begins no earlier than it did.
    ready_without_launch = program.start if setting.aside.any() else streams.ready
    # By place in `layout.order` from here on.
    ready = np.where(program.has_launch, own_ready, ready_without_launch)[layout.order]
    running_ns = (duration_ns + streams.held_ns)[layout.order]
    gap_ns = gap_ns[layout.order]
    # An operation runs once it is ready and `gap_ns` has passed since the end before it. So a segment ends at the
    # latest that its operations allow: one is ready, then it and all behind it run without a pause. With `ends` as if
    # all operations ran in one stream that never pauses, operation i allows ready[i] + running_ns[i] + end - ends[i].
    ends = np.cumsum(running_ns + gap_ns)
    end = ends[layout.tail]
    start = (ends - running_ns)[layout.head]
    return _SegmentTimes(
        ready_end=end + np.maximum.reduceat(ready + running_ns - ends, layout.head),
        queued_ns=end - start + gap_ns[layout.head],
        running_ns=end - start,
        first_ns=duration_ns[layout.order[layout.head]],
    )


def _waits_of_cuts(setting: _Setting) -> Iterator[_Waits]:
    """List what cuts wait for. The moment of a cut is its thread's delay from then on: its end, less its own time."""
    schedule = setting.schedule
    cuts = schedule.cuts
    own_start = setting.own_time(cuts.thread, cuts.start)
    own_end = setting.own_time(cuts.thread, cuts.end)
    # A thread comes to a cut with the delay of its cut before. There it takes `before_wait_ns` instead of the recorded
    # wait, if nothing below makes it wait longer. A call whose copy was moved aside takes as long as any launch.
    # So its replayed end is at least own_start + the delay before + before_wait_ns; that less own_end is its new delay.
    is_moved = (cuts.copy >= 0) & setting.aside[cuts.copy]
    before_wait_ns = np.where(is_moved, schedule.streams.call_ns, cuts.before_wait_ns)
    cut = np.flatnonzero(cuts.end > NEVER)
    yield _Waits(moment=cut, awaited=cut - 1, delay_ns=(own_start + before_wait_ns - own_end)[cut])
    if setting.change.arrivals:
        # A batch arrives when it did in the recording: moment 0, a thread's first cut, is at 0, so `delay_ns` is all.
        batch = np.flatnonzero(cuts.is_batch)
        yield _Waits(moment=batch, awaited=np.zeros_like(batch), delay_ns=(cuts.end - own_end)[batch])
    # A thread goes on when the other thread has got to where it was at the end of the wait.
    cut = np.flatnonzero(cuts.other_thread >= 0)
    thread = cuts.other_thread[cut]
    end = cuts.end[cut]
    delay_ns = setting.own_time(thread, end) - own_end[cut]
    yield _Waits(moment=cut, awaited=cuts.slot_at(thread, end), delay_ns=delay_ns)
    # A call returns when what it waits for is done. Without blocking waits, only launches into a full queue wait, and
    # what comes before changes have an effect.
    has_to_wait = cuts.is_full_queue | (cuts.start < schedule.program.changes_from_ns) | setting.change.waits
    target = setting.layout.target
    pair = np.flatnonzero(has_to_wait[cuts.waiting_cut] & (target >= 0))
    call = cuts.waiting_cut[pair]
    delay_ns = (cuts.after_wait_ns - own_end)[call]
    yield _Waits(moment=call, awaited=setting.segment_overs[target[pair]], delay_ns=delay_ns)


def _waits_of_segments(setting: _Setting, times: _SegmentTimes) -> Iterator[_Waits]:
    """List what the ends of segments wait for: the launch, the segment before in the stream, those on other streams."""
    schedule = setting.schedule
    layout = setting.layout
    ends = setting.segment_ends
    overs = setting.segment_overs
    program = schedule.program
    head = layout.order[layout.head]  # the first operation of each segment
    # A segment begins when it has been launched, with its thread's delay (none without a launch: moment 0), ...
    yield _Waits(moment=ends, awaited=np.maximum(schedule.slot[head], 0), delay_ns=times.ready_end)
    # ... behind the segment before it in its stream or, as the first, behind what was there before it (in a new stream,
    # of operations moved aside, nothing); moment 0 is at 0, ...
    first = np.flatnonzero(layout.opens_stream)
    later = np.flatnonzero(~layout.opens_stream)
    free = np.where(program.is_first[head], program.previous_end[head], NEVER)
    yield _Waits(moment=ends[first], awaited=0 * first, delay_ns=(free + times.queued_ns)[first])
    yield _Waits(moment=ends[later], awaited=overs[later - 1], delay_ns=times.queued_ns[later])
    # ... and when what it waits for on other streams is done.
    delay_ns = schedule.streams.across_ns + times.running_ns[layout.waiting]
    yield _Waits(moment=ends[layout.waiting], awaited=overs[layout.awaited], delay_ns=delay_ns)


def _waits_instead_of_calls(setting: _Setting, times: _SegmentTimes) -> Iterator[_Waits]:
    """List what the GPU waits for where a change lets no call wait.

    What a call's thread launches next, up to its next cut, may need what the call waited for. Within a stream the order
    of operations keeps that.
    """
    if setting.change.waits:
        return
    cuts = setting.schedule.cuts
    layout = setting.layout
    head = layout.order[layout.head]  # the first operation of each segment
    stream = setting.schedule.program.stream[head]
    # A cut's slot has the cut's number: join the segments launched in it with the targets of the cut.
    by_cut = pd.DataFrame({"waiting": np.arange(len(head))}, setting.schedule.slot[head])
    targets = pd.DataFrame({"awaited": layout.target}, cuts.waiting_cut)
    pairs = targets[layout.target >= 0].join(by_cut, how="inner")
    pairs = pairs[stream[pairs["waiting"]] != stream[pairs["awaited"]]]
    delay_ns = setting.schedule.streams.across_ns + times.running_ns[pairs["waiting"]]
    yield _Waits(setting.segment_ends[pairs["waiting"]], setting.segment_overs[pairs["awaited"]], delay_ns)


def _waits_of_collectives(setting: _Setting, times: _SegmentTimes) -> Iterator[_Waits]:
    """List what collectives wait for: a device leaves when the last one has arrived and the transfer is over."""
    # Each operation of a collective is a segment by itself. Its device arrives when it begins. Beginnings of segments
    # are not moments of the replay: hence the end, less the duration.
    ends = setting.segment_ends[setting.layout.in_collective]
    duration_ns = times.first_ns[setting.layout.in_collective]
    yield _Waits(moment=setting.last_arrivals, awaited=ends, delay_ns=-duration_ns)
    transfer_ns = setting.schedule.collectives.transfer_ns
    yield _Waits(moment=setting.departures, awaited=setting.last_arrivals, delay_ns=transfer_ns)


def _recorded_times(setting: _Setting) -> Int:
    """When each moment came in the recording: the order in which the replay goes through them.

    Only the order counts, so each segment's end may come at its start, and a departure from a collective together with
    the last arrival: of equal times, the lower number goes first.
    """
    layout = setting.layout
    cuts = setting.schedule.cuts
    head = layout.order[layout.head]  # the first operation of each segment
    slot = setting.schedule.slot[head]
    slot_start = np.where(slot >= 0, cuts.end[slot], NEVER)
    recorded = np.full(int(setting.departures.max(initial=setting.segment_ends[-1])) + 1, NEVER)
    recorded[: len(cuts.end)] = cuts.end
    # A segment comes after the cut whose delay it has, even if timestamps are not exact.
    recorded[setting.segment_ends] = np.maximum(setting.schedule.program.start[head], slot_start)
    np.maximum.at(recorded, setting.last_arrivals, recorded[setting.segment_ends[layout.in_collective]])
    recorded[setting.departures] = recorded[setting.last_arrivals]
    return recorded


def _times_of_moments(setting: _Setting, waits: _Waits) -> Int:
    """Compute each moment's time, the earliest that its waits allow, in ns on the trace's clock; of a cut, its delay.

    One pass is enough: in the recorded order, a moment comes after those that it waits for.
    """
    recorded = _recorded_times(setting)
    # At equal times by number: cuts come first, and departures from a collective after the arrivals.
    order = np.lexsort((waits.moment, recorded[waits.moment]))
    moment_ns = [int(NEVER)] * len(recorded)
    for first_cut in np.flatnonzero(setting.schedule.cuts.end == NEVER).tolist():  # of each thread: without a delay
        moment_ns[first_cut] = 0
    moments, awaited, delays_ns = (column[order].tolist() for column in waits)
    for moment, other, delay_ns in zip(moments, awaited, delays_ns, strict=True):
        moment_ns[moment] = max(moment_ns[moment], moment_ns[other] + delay_ns)
    return np.array(moment_ns)


def _window_and_step_ends(setting: _Setting, times: _SegmentTimes, moment_ns: Int) -> Played:
    """Read off when the window and its steps ended; `moment_ns` is of :func:`_times_of_moments`."""
    layout = setting.layout
    program = setting.schedule.program
    steps = program.steps
    over = moment_ns[setting.segment_overs]
    if not len(steps):
        # The first segment of a stream is one operation: `first_ns` before its end it began.
        begin = (over - times.first_ns)[layout.opens_stream].min()
        return Played(int(over.max() - begin), np.empty(0, np.int64))
    first_start = int(steps["start_ns"].iloc[0])
    recorded_begin = int(steps["begin_ns"].iloc[0])
    boundaries = np.append(first_start, steps["cpu_end_ns"])
    replayed = setting.replayed(np.full(len(boundaries), program.step_thread), boundaries, moment_ns)
    begin = int(replayed[0])
    ends = np.maximum.accumulate(replayed[1:])
    # A step lasts at least to the end of the GPU work whose launch falls into it in the replay. `last` holds the last
    # operation of each recorded step on each stream.
    last = layout.order[layout.tail[layout.ends_step]]
    launched = setting.replayed(program.launch_thread[last], program.launch_start[last], moment_ns)
    step = np.searchsorted(ends, launched, side="right")
    in_steps = step < len(ends)
    np.maximum.at(ends, step[in_steps], over[layout.ends_step[in_steps]])
    ends = np.maximum.accumulate(ends)
    # A step's time begins where the GPU is done with what came before. For the first step, that is work which the
    # selection or the recording leaves out: the moment is not replayed, but taken from the recording.
    if recorded_begin > first_start:
        begin = max(begin, recorded_begin)
        ends = np.maximum(ends, begin)
    return Played(int(ends[-1] - begin), ends - begin)
