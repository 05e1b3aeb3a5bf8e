"""Operations that wait for others: on another stream, recorded or inferred, and in collectives."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pandas as pd

from nsightkit.analysis.core.names import matching
from nsightkit.analysis.ranks.alignment import Meetings
from nsightkit.analysis.replay.latencies import Latencies
from nsightkit.analysis.replay.model import HELD_NS, Int, Unplayable, median, place
from nsightkit.analysis.replay.operations import Program

__all__ = ["Gathered", "StreamWaits", "collectives", "read"]

_WAIT_EVENT, _RECORD_EVENT = re.compile(r"StreamWaitEvent"), re.compile(r"EventRecord")
#: An operation that began this much later than launch and stream explain was kept waiting ...
_LATE_NS = 3_000
#: ... by one that ended at most this long before; so many of them are looked at.
_AFTER_NS, _LOOKED_AT = 25_000, 12
#: An operation may begin this much before the end of what it waits for: timestamps are not exact.
_EARLY_NS = 500
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
    start = program.start
    end = program.end
    first = program.first
    explained = np.maximum(program.before + latencies.gap, latencies.ready)
    told, told_of = _recorded(program)
    until = explained.copy()
    np.maximum.at(until, told, end[told_of])
    late = np.flatnonzero((start > until + _LATE_NS) & (program.linked | ~first))
    waits, on = _just_ended(program, late, explained[late])
    if len(waits) > _GUESSED * len(start):
        raise Unplayable(
            "too many of its operations seem to wait for other streams, and it records none of these waits"
        )
    waiting = np.append(waits, told)
    awaited = np.append(on, told_of)
    # Waits that held an operation up; the others were over long before.
    after = start[waiting] - end[awaited]
    binding = after[(after <= _AFTER_NS) & (start[waiting] > explained[waiting] + _LATE_NS)]
    after_ns = median(binding, _USUAL_NS)
    np.maximum.at(explained, waiting, end[awaited] + after_ns)
    # What held an operation that nothing explains is work outside the recording; it takes its time in any replay.
    late_ns = np.where(first & ~program.linked, 0, start - explained)
    held = late_ns > HELD_NS
    # A stream that was busy before the recording began is free when its first operation starts.
    ready = np.where(held & first, start, latencies.ready)
    return StreamWaits(waiting, awaited, after_ns, np.where(held & ~first, late_ns, 0), ready, len(waits))


def _just_ended(program: Program, late: Int, explained: Int) -> tuple[Int, Int]:
    """What late operations waited for: the last to end before them on another stream of their device, if one did."""
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
    found = awaited >= 0
    return late[found], awaited[found]


def _recorded(program: Program) -> tuple[Int, Int]:
    """What the program told streams to wait for, where that fits what happened.

    A call that makes a stream wait does not say for what: for the last work that the thread launched on another stream
    before it. The thread's next launch shows the stream.
    """
    calls = program.calls
    order = program.by_launch
    # Where no such call was recorded, an event that one stream records before work goes to another tells as much.
    told = matching(calls.names, _WAIT_EVENT)
    if not told.any():
        told = matching(calls.names, _RECORD_EVENT)
    thread = program.by[order]
    stream = program.stream[order]
    at = np.unique(place(thread, program.begun[order], calls.thread[told], calls.start[told]))
    at = at[at < len(order)]
    # Before each launch, the last one of the thread that went to another stream.
    changed = (stream[1:] != stream[:-1]) | (thread[1:] != thread[:-1])
    before = np.append(-1, np.where(changed, np.arange(len(changed)), -1))
    other = np.maximum.accumulate(before)[at]
    same = (other >= 0) & (thread[other] == thread[at])
    waiting = order[at[same]]
    awaited = order[other[same]]
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
    columns = {"operation": np.arange(len(program.start)), "device": program.device}
    here = pd.DataFrame({**columns, "start_ns": program.start - program.shift_ns})[program.collective]
    found = here.merge(Meetings(program.trace).met, on=["device", "start_ns"])
    transfer_ns = (found["end_ns"] - found["until_ns"]).to_numpy(np.int64)
    return Gathered(found["operation"].to_numpy(), found["collective"].to_numpy(np.int64), transfer_ns)
