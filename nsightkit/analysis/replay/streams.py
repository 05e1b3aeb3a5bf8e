"""Operations that wait for others: on another stream, recorded or inferred, and in collectives."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pandas as pd

from nsightkit.analysis.core.names import matching
from nsightkit.analysis.ranks.alignment import Meetings
from nsightkit.analysis.replay.latencies import Latencies
from nsightkit.analysis.replay.model import HELD_NS, NEVER, Bool, Int, Unplayable, kinds_of, place
from nsightkit.analysis.replay.operations import Operations, Program

__all__ = ["Gathered", "StreamWaits", "collectives", "read"]

_WAIT_EVENT, _RECORD_EVENT = re.compile(r"StreamWaitEvent"), re.compile(r"EventRecord")
#: An operation that began this much later than launch and stream explain was kept waiting ...
_LATE_NS = 3_000
#: ... by one that ended at most this long before; so many of them are looked at.
_AFTER_NS, _LOOKED_AT = 25_000, 12
#: From the end of one operation to the start of one that waits for it, where the trace has no example.
_USUAL_NS = 1_500
#: Share of operations with inferred waits above which the streams are in doubt.
_GUESSED = 1 / 3


@dataclasses.dataclass(frozen=True, eq=False)
class StreamWaits:
    """Waits between streams.

    Parameters
    ----------
    waiting, awaited : ndarray of int64
        Pairs of operations.
    after_ns : int
        From the end of the one to the start of the other.
    held_ns : ndarray of int64
        Time that each operation lay in its stream with no recorded reason.
    ready : ndarray of int64
        When each could start for its launch's sake: not before a stream that was busy at the beginning is free.
    inferred : int
        Waits that the recording does not name.
    """

    waiting: Int
    awaited: Int
    after_ns: int
    held_ns: Int
    ready: Int
    inferred: int


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """Collectives of several devices: positions of operations, each one's collective, and its time after the last."""

    operation: Int
    collective: Int
    transfer_ns: Int


def read(program: Program, latencies: Latencies) -> StreamWaits:
    """Find the waits between streams.

    Parameters
    ----------
    program : Program
    latencies : Latencies

    Returns
    -------
    StreamWaits

    Raises
    ------
    Unplayable
    """
    operations = program.operations
    start, end = operations.start, operations.end
    explained = np.maximum(operations.before + latencies.gap, latencies.ready)
    told, told_of = _recorded(program)
    until = explained.copy()
    np.maximum.at(until, told, end[told_of])
    late = (start > until + _LATE_NS) & (operations.linked | ~operations.first)
    waits, on = _just_ended(operations, np.flatnonzero(late), explained)
    if len(np.unique(waits)) > _GUESSED * len(start):
        raise Unplayable(
            "too many of its operations seem to wait for other streams, and it records none of these waits"
        )
    waiting, awaited = np.unique([np.append(waits, told), np.append(on, told_of)], axis=1)
    # Waits that held an operation up; the others were over long before.
    after = start[waiting] - end[awaited]
    binding = after[(after <= _AFTER_NS) & (start[waiting] > explained[waiting] + _LATE_NS)]
    after_ns = int(np.median(binding)) if len(binding) else _USUAL_NS
    np.maximum.at(explained, waiting, end[awaited] + after_ns)
    held_ns, free_ns = _held(operations, explained)
    return StreamWaits(waiting, awaited, after_ns, held_ns, np.maximum(latencies.ready, free_ns), len(waits))


def _held(operations: Operations, explained: Int) -> tuple[Int, Int]:
    """Time that operations lay in their streams with no recorded reason, and from when on each stream is free.

    What held them is work that the recording does not contain; it takes its time in any replay.
    """
    first = operations.first
    late_ns = np.where(first & ~operations.linked, 0, operations.start - explained)
    held = late_ns > HELD_NS
    # A stream that was busy before the recording began is free when its first operation starts.
    busy = np.flatnonzero(held & first)
    free = np.full(len(operations.released_ns), NEVER)
    free[operations.stream[busy]] = operations.start[busy]
    return np.where(held & ~first, late_ns, 0), free[operations.stream]


def _just_ended(operations: Operations, late: Int, explained: Int) -> tuple[Int, Int]:
    """What late operations waited for: what ended just before them, on their thread and device if anything did."""
    waits, on = [late[:0]], [late[:0]]
    if operations.stream[0] == operations.stream[-1]:
        return waits[0], on[0]
    start, end = operations.start, operations.end
    for nearness in range(3):
        left = late
        at = np.searchsorted(end[operations.by_end], start[left] + 500, side="right") - 1
        for _ in range(_LOOKED_AT):
            other = operations.by_end[at]
            near = (at >= 0) & (start[left] - end[other] <= _AFTER_NS) & (end[other] > explained[left] - _LATE_NS)
            fits = near & _may_wait(operations, left, other, nearness)
            waits.append(left[fits])
            on.append(other[fits])
            left, at = left[~fits & near], at[~fits & near] - 1
        late = np.setdiff1d(late, np.concatenate(waits))
    return np.concatenate(waits), np.concatenate(on)


def _may_wait(operations: Operations, left: Int, other: Int, nearness: int) -> Bool:
    """Whether operations may wait for others: on their device (up to 1) and thread (0 only), if need be on neither."""
    linked = operations.linked[left]
    fits = operations.stream[other] != operations.stream[left]
    fits &= operations.process[other] == operations.process[left]
    # What is launched later is not waited for.
    fits &= (operations.begun[other] <= operations.begun[left]) | ~linked
    if nearness < 2:
        fits &= operations.device[other] == operations.device[left]
    if nearness < 1:
        fits &= linked & (operations.by[other] == operations.by[left])
    return np.asarray(fits)


def _recorded(program: Program) -> tuple[Int, Int]:
    """What the program told streams to wait for, where that fits what happened.

    A call that makes a stream wait does not say for what: for the last work that the thread launched on another stream
    before it. The thread's next launch shows the stream.
    """
    operations, calls = program.operations, program.calls
    if operations.stream[0] == operations.stream[-1]:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # Where no such call was recorded, an event that one stream records before work goes to another tells as much.
    told = matching(calls.names, _WAIT_EVENT)
    if not told.any():
        told = matching(calls.names, _RECORD_EVENT)
    selected = program.trace.mask("calls")
    rows = np.flatnonzero(told if selected is None else told & selected)
    at, other = _launches_around(operations, calls.thread[rows], calls.start[rows])
    fits = operations.end[other] <= operations.start[at] + 500
    fits &= operations.process[at] == operations.process[other]
    return at[fits], other[fits]


def _launches_around(operations: Operations, asks: Int, time: Int) -> tuple[Int, Int]:
    """What threads launched next after some times, and last before that on another stream; where there are both."""
    order = operations.by_launch
    thread, stream = operations.by[order], operations.stream[order]
    changed = (stream[1:] != stream[:-1]) | (thread[1:] != thread[:-1])
    last = np.maximum.accumulate(np.append(-1, np.where(changed, np.arange(len(changed)), -1)))
    at = place(thread, operations.begun[order], asks, time)
    known = (at < len(order)) & np.isin(asks, thread)
    at, asks = at[known], asks[known]
    other = last[at]
    known = (thread[at] == asks) & (other >= 0) & (thread[other] == asks)
    return order[at[known]], order[other[known]]


def collectives(program: Program) -> Gathered:
    """Collectives of several devices: none of them does its work before the last device has arrived.

    Parameters
    ----------
    program : Program

    Returns
    -------
    Gathered
    """
    operations = program.operations
    none = np.empty(0, np.int64)
    if len(kinds_of(operations.device)) < 2:
        return Gathered(none, none, none)
    met = Meetings(program.trace).met
    starts = operations.start - operations.shift_ns
    at = np.flatnonzero(np.isin(starts, met["start_ns"]))
    here = pd.DataFrame({"at": at, "device": operations.device[at], "start_ns": starts[at]})
    found = met.merge(here.drop_duplicates(["device", "start_ns"]), on=["device", "start_ns"])
    transfer_ns = (found["end_ns"] - found["until_ns"]).to_numpy(np.int64)
    return Gathered(found["at"].to_numpy(), found["collective"].to_numpy(np.int64), transfer_ns)
