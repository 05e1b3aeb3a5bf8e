"""What operations wait for: their launch, the operation before them in their stream, operations on other streams.

Latencies are constants, medians over the trace, not the recorded latency of each operation.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pandas as pd

from nsightkit.analysis.ranks.alignment import Meetings
from nsightkit.analysis.replay.model import UNEXPLAINED_NS, Bool, Int, Unplayable, median
from nsightkit.analysis.replay.operations import Program
from nsightkit.text import matching

#: Latencies for traces without an example, typical of CUDA devices: from a launch to the start on an idle stream, from
#: one operation to the next behind it in a queue, of a launch call, and from the end of one operation to the start of
#: one that waits for it on another stream.
_START_NS = 3_000
_NEXT_NS = 1_000
_CALL_NS = 4_000
_ACROSS_NS = 1_500
#: A launch waited for room in a full queue if its call took this many times the median and at least this long, while
#: so many operations were queued. CUDA's queues hold about a thousand.
SLOW_CALL = 10
_SLOW_NS = 20_000
_DEEP_QUEUE = 500
#: At most so many launches into a full queue are cuts, which takes time in each replay; the others keep their delays.
_MOST_FULL_QUEUE = 20_000
#: An operation was queued if the one before it in its stream ended this long after its own launch.
_QUEUED_NS = 10_000

_WAIT_EVENT = re.compile(r"StreamWaitEvent")
_RECORD_EVENT = re.compile(r"EventRecord")
#: An operation that began this much later than its launch and its stream explain waited for another stream ...
_LATE_NS = 3_000
#: ... if an operation there ended at most this long before. Of these operations, the last so many are candidates.
_AFTER_NS = 25_000
_MOST_CANDIDATES = 12
#: An operation may begin this much before the end of what it waits for: timestamps are not exact.
_EARLY_NS = 500
#: Share of operations with inferred waits above which nothing is replayed: the recorded streams are in doubt.
_MOST_INFERRED = 1 / 3


@dataclasses.dataclass(frozen=True, eq=False)
class Streams:
    """When operations can start. Times are ns on the trace's clock; arrays have one element per operation or pair.

    Parameters
    ----------
    ready : ndarray of int64
        When the launch of each has reached the device. For the first of a stream that was busy before the recording,
        when that stream was free.
    gap_ns : ndarray of int64
        The latency from the end of the operation before each one in its stream to its start, where it was queued.
    call_ns : int
        What a launch call takes.
    full_queue_ops : ndarray of int64
        Positions of operations whose launches waited for room in a full queue; of very many, some.
    waiting, awaited : ndarray of int64
        Pairs of positions: operation ``waiting[i]`` starts only when ``awaited[i]``, on another stream, is over, ...
    across_ns : int
        ... and this latency has passed.
    held_ns : ndarray of int64
        How long each operation waited in its stream with no recorded reason.
    inferred : int
        How many of the pairs the recording does not name.
    """

    ready: Int
    gap_ns: Int
    call_ns: int
    full_queue_ops: Int
    waiting: Int
    awaited: Int
    across_ns: int
    held_ns: Int
    inferred: int


@dataclasses.dataclass(frozen=True, eq=False)
class Collectives:
    """The kernels of collectives that several devices take part in.

    Parameters
    ----------
    operation : ndarray of int64
        The position of each kernel's operation.
    collective : ndarray of int64
        The number of the collective that each is a part of.
    transfer_ns : ndarray of int64
        From the arrival of the last device at the collective to the end of each.
    """

    operation: Int
    collective: Int
    transfer_ns: Int


def read(program: Program) -> Streams:
    """Estimate the latencies of a program, and find the waits between its streams.

    Parameters
    ----------
    program : Program

    Returns
    -------
    Streams

    Raises
    ------
    Unplayable
    """
    start = program.start
    is_first = program.is_first
    call_durations_ns = program.launch_end - program.launch_start
    is_launch_call = program.has_launch & ~program.is_blocking_copy
    call_ns = median(call_durations_ns[is_launch_call], otherwise=_CALL_NS)
    is_slow = is_launch_call & (call_durations_ns > SLOW_CALL * call_ns)
    ready, gap_ns = _ready_and_gap(program, is_slow, call_ns)
    full_queue_ops = _full_queue_ops(program, is_slow)
    # The earliest start that launch and stream allow; below, the waits between streams are added.
    explained = np.maximum(program.previous_end + gap_ns, ready)
    waiting, awaited, inferred = _waits_between_streams(program, explained)
    # The latency is the median over waits that delayed an operation: in the others, the awaited one was over before.
    apart_ns = start[waiting] - program.end[awaited]
    is_binding = (apart_ns <= _AFTER_NS) & (start[waiting] > explained[waiting] + _LATE_NS)
    across_ns = median(apart_ns[is_binding], otherwise=_ACROSS_NS)
    np.maximum.at(explained, waiting, program.end[awaited] + across_ns)
    # A delay that nothing explains comes from work outside the recording: it stays the same in any replay. An operation
    # that opens a stream, without a recorded launch, has none: it is `ready` at its recorded start.
    late_ns = np.where(is_first & ~program.has_launch, 0, start - explained)
    is_held = late_ns > UNEXPLAINED_NS
    return Streams(
        # A stream that was busy before the recording began is free when its first operation starts.
        ready=np.where(is_held & is_first, start, ready),
        gap_ns=gap_ns,
        call_ns=call_ns,
        full_queue_ops=full_queue_ops[:: 1 + len(full_queue_ops) // _MOST_FULL_QUEUE],  # every n-th of very many
        waiting=waiting,
        awaited=awaited,
        across_ns=across_ns,
        held_ns=np.where(is_held & ~is_first, late_ns, 0),
        inferred=inferred,
    )


# ---------------------------------------------------------------- latencies


def _full_queue_ops(program: Program, is_slow: Bool) -> Int:
    """Find the operations whose launch calls blocked until the queue had room.

    No trace records that: the sign is a slow call while hundreds of operations were queued, on all devices together. A
    slow call alone may have loaded a module or been interrupted.
    """
    launch_start = program.launch_start
    slow_ops = np.flatnonzero(is_slow & (program.launch_end - launch_start > _SLOW_NS))
    launched_before = np.searchsorted(np.sort(launch_start[program.has_launch]), launch_start[slow_ops])
    ended_before = np.searchsorted(program.end[program.order_by_end], launch_start[slow_ops])
    return slow_ops[launched_before - ended_before >= _DEEP_QUEUE]


def _ready_and_gap(program: Program, is_slow: Bool, call_ns: int) -> tuple[Int, Int]:
    """Estimate when each operation's launch reached the device, and the gap behind the operation before it if queued.

    The latency from launch to start and the gap are medians over operations of the same kind: of those that found the
    device idle, and of those that were queued.
    """
    has_launch = program.has_launch
    start = program.start
    launch_start = program.launch_start
    launch_end = program.launch_end
    previous_end = program.previous_end
    # A large copy from pageable memory is staged piece by piece: its first pieces move while the call goes on.
    is_piecewise = program.is_staged_copy & (start < launch_end)
    # A kind is a combination of table and three flags, as one number.
    kind = 8 * program.table + 4 * is_piecewise + 2 * program.is_staged_copy + program.is_blocking_copy
    found_idle = has_launch & (program.device_busy_until < launch_start) & ~is_piecewise
    was_queued = has_launch & ~program.is_first & (launch_end + _QUEUED_NS < previous_end)
    was_queued &= start - previous_end <= UNEXPLAINED_NS
    gap_ns = _medians_by_kind(start - previous_end, kind, sample=was_queued, otherwise=_NEXT_NS)
    # Count from the call's end, or from its start where the call returns only after its copy.
    launched = np.where(program.is_blocking_copy, launch_start, launch_end)
    ready = launched + _medians_by_kind(start - launched, kind, sample=found_idle, otherwise=_START_NS)
    # The work of a slow call is ready no earlier than the call's end, or its own start if that was before.
    ready[is_slow] = np.maximum(ready[is_slow], np.minimum(launch_end[is_slow], start[is_slow]))
    # The CPU stages pageable memory itself, until the copy begins. If the stream was busy until then, the start shows
    # only when that was free: staging is taken to be as fast as the copy.
    ready[is_piecewise] = start[is_piecewise]
    had_to_wait = is_piecewise & (previous_end > start - 2 * _START_NS)
    ready[had_to_wait] = np.minimum(launch_start + call_ns + program.duration_ns, start)[had_to_wait]
    # An operation without a recorded launch is always ready: only its place in the stream counts. The first of a stream
    # has nothing before it, so it keeps its start.
    ready[~has_launch] = start.min()
    opens_stream = ~has_launch & program.is_first
    ready[opens_stream] = start[opens_stream]
    return ready, gap_ns


def _medians_by_kind(values: Int, kind: Int, *, sample: Bool, otherwise: int) -> Int:
    """Give each operation the median of `values` over the operations of its kind in `sample`, else `otherwise`."""
    medians = pd.Series(values[sample]).groupby(kind[sample]).median()
    return medians.reindex(kind, fill_value=otherwise).to_numpy().astype(np.int64)


# ---------------------------------------------------------------- waits between streams


def _waits_between_streams(program: Program, explained: Int) -> tuple[Int, Int, int]:
    """Pair the operations that wait with those on other streams that they wait for; also count the inferred pairs.

    `explained` is the earliest start that each one's launch and own stream allow.
    """
    waiting, awaited = _recorded_waits(program)
    explained_by_waits = explained.copy()
    np.maximum.at(explained_by_waits, waiting, program.end[awaited])
    is_late = program.start > explained_by_waits + _LATE_NS
    # Leave out first operations of streams without a launch: when they could have started is unknown.
    late = np.flatnonzero(is_late & (program.has_launch | ~program.is_first))
    # What starts late in spite of its recorded waits waited for something else, which may have ended before those.
    ended_before = _ended_just_before(program, late, explained[late])
    is_found = ended_before >= 0
    inferred = int(is_found.sum())
    if inferred > _MOST_INFERRED * len(explained):
        raise Unplayable(
            "too many of its operations seem to wait for other streams, and it records none of these waits"
        )
    return np.append(late[is_found], waiting), np.append(ended_before[is_found], awaited), inferred


def _ended_just_before(program: Program, late: Int, explained: Int) -> Int:
    """Infer what late operations waited for: the last to end before each on another stream of its device, -1 for none.

    `late` holds their positions, `explained` the earliest start that the launch and own stream of each allow.
    """
    start = program.start[late]
    end = program.end
    order_by_end = program.order_by_end
    last = np.searchsorted(end[order_by_end], start + _EARLY_NS, side="right") - 1
    awaited = np.full(len(late), -1)
    for back in range(_MOST_CANDIDATES):  # the last to end, then the one before, ..., for all late operations at once
        other = order_by_end[np.maximum(last - back, 0)]
        # What ended before the operation could start anyway did not delay it.
        fits = (awaited < 0) & (start - end[other] <= _AFTER_NS) & (end[other] > explained - _LATE_NS)
        fits &= program.stream[other] != program.stream[late]
        fits &= program.process[other] == program.process[late]
        fits &= program.device[other] == program.device[late]
        # An operation waits only for what was launched before it.
        fits &= (program.launch_start[other] <= program.launch_start[late]) | ~program.has_launch[late]
        awaited[fits] = other[fits]
    return awaited


def _recorded_waits(program: Program) -> tuple[Int, Int]:
    """Pair operations with those their streams were told to wait for, where that fits what happened.

    The recorded call that makes a stream wait for an event names neither. We take the next launch of the calling thread
    as the one that waits, and the last work that this thread launched before it on another stream as the awaited one.
    """
    calls = program.calls
    # Where no such call was recorded, a recorded event is the sign: one stream records it before another waits for it.
    is_wait = matching(calls.names, _WAIT_EVENT)
    if not is_wait.any():
        is_wait = matching(calls.names, _RECORD_EVENT)
    waits = pd.DataFrame({"thread": calls.thread[is_wait], "time": calls.start[is_wait]}).sort_values("time")
    launches = pd.DataFrame({"thread": program.launch_thread, "time": program.launch_start, "stream": program.stream})
    launches = launches[program.has_launch].sort_values("time", kind="stable").rename_axis("operation").reset_index()
    by_thread = launches.groupby("thread")
    # For each launch, the last operation that its thread launched before it on another stream: for a run of launches
    # into one stream, the operation just before the run.
    is_same_stream = launches["stream"] == by_thread["stream"].shift()
    previous = by_thread["operation"].shift().mask(is_same_stream)
    launches["awaited"] = previous.groupby(launches["thread"]).ffill()
    # The thread's next launch after each wait; of several waits before one launch, one pair.
    pairs = pd.merge_asof(waits, launches, on="time", by="thread", direction="forward")
    pairs = pairs.dropna(subset="awaited").drop_duplicates("operation")
    waiting = pairs["operation"].to_numpy(np.int64)
    awaited = pairs["awaited"].to_numpy(np.int64)
    fits = program.end[awaited] <= program.start[waiting] + _EARLY_NS
    return waiting[fits], awaited[fits]


def find_collectives(program: Program) -> Collectives:
    """Find the collectives of several devices: none of them does its work before the last device has arrived.

    Parameters
    ----------
    program : Program

    Returns
    -------
    Collectives
    """
    nothing = np.empty(0, np.int64)
    if len(pd.unique(program.device)) < 2:
        return Collectives(nothing, nothing, nothing)
    columns = {"operation": np.arange(len(program.start)), "device": program.device, "start_ns": program.start}
    kernels = pd.DataFrame(columns)[program.is_collective]
    parts = kernels.merge(Meetings(program.trace).met, on=["device", "start_ns"])
    transfer_ns = (parts["end_ns"] - parts["until_ns"]).to_numpy(np.int64)  # `until_ns`: when the last device arrived
    return Collectives(parts["operation"].to_numpy(), parts["collective"].to_numpy(np.int64), transfer_ns)
