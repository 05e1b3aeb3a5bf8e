"""What operations wait for: their launch, the one before them in their stream, others on other streams.

Latencies are constants of a trace, not what was recorded of each operation.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pandas as pd

from nsightkit.analysis.core.names import matching
from nsightkit.analysis.ranks.alignment import Meetings
from nsightkit.analysis.replay.model import HELD_NS, Bool, Int, Unplayable, median
from nsightkit.analysis.replay.operations import Program

__all__ = ["SLOW_CALL", "Gathered", "Streams", "collectives", "read"]

#: Latencies for traces without an example, ns: typical of CUDA devices. The last is from the end of one operation to
#: the start of one that waits for it on another stream.
_START_NS = 3_000
_NEXT_NS = 1_000
_CALL_NS = 4_000
_ACROSS_NS = 1_500
#: A launch into a full queue: so many operations wait already, and the call takes so many times its median.
_DEEP = 500
SLOW_CALL = 10
_SLOW_NS = 20_000
#: Of more launches into a full queue than this, only some are walked; the others follow them.
_MOST_CUTS = 20_000
#: An operation lay in the queue if the one before it ended this much later than its launch.
_QUEUED_NS = 10_000

_WAIT_EVENT = re.compile(r"StreamWaitEvent")
_RECORD_EVENT = re.compile(r"EventRecord")
#: An operation that began this much later than launch and stream explain was kept waiting ...
_LATE_NS = 3_000
#: ... by one that ended at most this long before; so many of them are looked at.
_AFTER_NS = 25_000
_LOOKED_AT = 12
#: An operation may begin this much before the end of what it waits for: timestamps are not exact.
_EARLY_NS = 500
#: Share of operations with inferred waits above which the streams are in doubt.
_GUESSED = 1 / 3


@dataclasses.dataclass(frozen=True, eq=False)
class Streams:
    """When operations can start.

    Parameters
    ----------
    ready : ndarray of int64
        When each could start for its launch's sake: not before a stream that was busy at the beginning is free.
    gap : ndarray of int64
        From the operation before each one in its queue to its start.
    call_ns : int
        What a launch call takes.
    full : ndarray of int64
        Operations whose launches waited for room in a full queue; some of very many.
    waiting, awaited : ndarray of int64
        Pairs of operations: the one starts when the other, on another stream, is over, ...
    after_ns : int
        ... and so much time has passed.
    held_ns : ndarray of int64
        Time that each operation lay in its stream with no recorded reason.
    inferred : int
        How many of the pairs the recording does not name.
    """

    ready: Int
    gap: Int
    call_ns: int
    full: Int
    waiting: Int
    awaited: Int
    after_ns: int
    held_ns: Int
    inferred: int


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """Collectives of several devices: positions of operations, each one's collective, and its time after the last."""

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
    first = program.first
    took = program.done - program.begun
    launched = program.linked & ~program.own_copy
    call_ns = median(took[launched], _CALL_NS)
    slow = launched & (took > SLOW_CALL * call_ns)
    ready, gap = _ready(program, slow, call_ns)
    full = _full(program, slow)
    explained = np.maximum(program.before + gap, ready)
    waiting, awaited, inferred = _waits(program, explained)
    # Waits that held an operation up; the others were over long before.
    after = start[waiting] - program.end[awaited]
    binding = (after <= _AFTER_NS) & (start[waiting] > explained[waiting] + _LATE_NS)
    after_ns = median(after[binding], _ACROSS_NS)
    np.maximum.at(explained, waiting, program.end[awaited] + after_ns)
    # What held an operation that nothing explains is work outside the recording; it takes its time in any replay.
    late_ns = np.where(first & ~program.linked, 0, start - explained)
    held = late_ns > HELD_NS
    return Streams(
        # A stream that was busy before the recording began is free when its first operation starts.
        ready=np.where(held & first, start, ready),
        gap=gap,
        call_ns=call_ns,
        full=full[:: 1 + len(full) // _MOST_CUTS],
        waiting=waiting,
        awaited=awaited,
        after_ns=after_ns,
        held_ns=np.where(held & ~first, late_ns, 0),
        inferred=inferred,
    )


# ---------------------------------------------------------------- latencies


def _full(program: Program, slow: Bool) -> Int:
    """Operations whose slow launches found hundreds of others in the queue."""
    begun = program.begun
    full = np.flatnonzero(slow & (program.done - begun > _SLOW_NS))
    launched_before = np.searchsorted(np.sort(begun[program.linked]), begun[full])
    ended_before = np.searchsorted(program.end[program.by_end], begun[full])
    return full[launched_before - ended_before >= _DEEP]


def _ready(program: Program, slow: Bool, call_ns: int) -> tuple[Int, Int]:
    """When operations could start, and the gap behind the one before each in its queue: medians of its kind."""
    linked = program.linked
    start = program.start
    begun = program.begun
    done = program.done
    own_copy = program.own_copy
    before = program.before
    meanwhile = program.staged & (start < done)  # staged piece by piece
    kind = 8 * program.table + 4 * meanwhile + 2 * program.staged + own_copy
    idle = linked & (program.device_before < begun) & ~meanwhile
    queued = linked & ~program.first & (done + _QUEUED_NS < before) & (start - before <= HELD_NS)
    gap = _medians(start - before, kind, queued, _NEXT_NS)
    edge = np.where(own_copy, begun, done)  # a call that returns after its copy ends too late
    ready = edge + _medians(start - edge, kind, idle, _START_NS)
    # Of an operation behind a call that takes its time, the call's end says more.
    ready[slow] = np.maximum(ready[slow], np.minimum(done[slow], start[slow]))
    # The CPU stages pageable memory itself: until the copy begins or, where that had to wait, at the copy's pace.
    ready[meanwhile] = start[meanwhile]
    behind = meanwhile & (before > start - 2 * _START_NS)
    ready[behind] = np.minimum(begun + call_ns + program.lasting, start)[behind]
    # Launched before the recording began: only its place in the stream counts.
    ready[~linked] = start.min()
    lost = ~linked & program.first
    ready[lost] = start[lost]
    return ready, gap


def _medians(values: Int, kind: Int, sample: Bool, otherwise: int) -> Int:
    """The median of the sampled values of its kind, for each operation."""
    medians = pd.Series(values[sample]).groupby(kind[sample]).median()
    return medians.reindex(kind, fill_value=otherwise).to_numpy().astype(np.int64)


# ---------------------------------------------------------------- waits between streams


def _waits(program: Program, explained: Int) -> tuple[Int, Int, int]:
    """Operations and those they wait for on other streams, recorded or inferred, and how many were inferred."""
    told, told_of = _recorded(program)
    until = explained.copy()
    np.maximum.at(until, told, program.end[told_of])
    late = np.flatnonzero((program.start > until + _LATE_NS) & (program.linked | ~program.first))
    awaited = _just_ended(program, late, explained[late])
    waits = awaited >= 0
    inferred = int(waits.sum())
    if inferred > _GUESSED * len(explained):
        raise Unplayable(
            "too many of its operations seem to wait for other streams, and it records none of these waits"
        )
    return np.append(late[waits], told), np.append(awaited[waits], told_of), inferred


def _just_ended(program: Program, late: Int, explained: Int) -> Int:
    """What late operations waited for: the last to end before them on another stream of their device, -1 for none."""
    start = program.start[late]
    end = program.end
    by_end = program.by_end
    last = np.searchsorted(end[by_end], start + _EARLY_NS, side="right") - 1
    awaited = np.full(len(late), -1)
    for back in range(_LOOKED_AT):
        other = by_end[np.maximum(last - back, 0)]
        fits = (awaited < 0) & (start - end[other] <= _AFTER_NS) & (end[other] > explained - _LATE_NS)
        fits &= program.stream[other] != program.stream[late]
        fits &= program.process[other] == program.process[late]
        fits &= program.device[other] == program.device[late]
        # What is launched later is not waited for.
        fits &= (program.begun[other] <= program.begun[late]) | ~program.linked[late]
        awaited[fits] = other[fits]
    return awaited


def _recorded(program: Program) -> tuple[Int, Int]:
    """What the program told streams to wait for, where that fits what happened.

    A call that makes a stream wait does not say for what: for the last work that the thread launched on another stream
    before it. The thread's next launch shows the stream.
    """
    calls = program.calls
    # Where no such call was recorded, an event that one stream records before work goes to another tells as much.
    told = matching(calls.names, _WAIT_EVENT)
    if not told.any():
        told = matching(calls.names, _RECORD_EVENT)
    waits = pd.DataFrame({"thread": calls.thread[told], "time": calls.start[told]}).sort_values("time")
    launches = pd.DataFrame({"thread": program.by, "time": program.begun, "stream": program.stream})
    launches = launches[program.linked].sort_values("time", kind="stable").rename_axis("operation").reset_index()
    by_thread = launches.groupby("thread")
    # Before each launch, the last one of the thread that went to another stream.
    is_same = launches["stream"] == by_thread["stream"].shift()
    before = by_thread["operation"].shift().mask(is_same)
    launches["other"] = before.groupby(launches["thread"]).ffill()
    pairs = pd.merge_asof(waits, launches, on="time", by="thread", direction="forward")
    pairs = pairs.dropna(subset="other").drop_duplicates("operation")
    waiting = pairs["operation"].to_numpy(np.int64)
    awaited = pairs["other"].to_numpy(np.int64)
    fits = program.end[awaited] <= program.start[waiting] + _EARLY_NS
    return waiting[fits], awaited[fits]


def collectives(program: Program) -> Gathered:
    """Collectives of several devices: none of them does its work before the last device has arrived.

    Parameters
    ----------
    program : Program

    Returns
    -------
    Gathered
    """
    none = np.empty(0, np.int64)
    if len(pd.unique(program.device)) < 2:
        return Gathered(none, none, none)
    columns = {"operation": np.arange(len(program.start)), "device": program.device, "start_ns": program.start}
    here = pd.DataFrame(columns)[program.collective]
    gathered = here.merge(Meetings(program.trace).met, on=["device", "start_ns"])
    transfer_ns = (gathered["end_ns"] - gathered["until_ns"]).to_numpy(np.int64)
    return Gathered(gathered["operation"].to_numpy(), gathered["collective"].to_numpy(np.int64), transfer_ns)
