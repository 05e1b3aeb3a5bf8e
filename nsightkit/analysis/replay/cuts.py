"""Where threads wait: calls that block, pauses until another thread is done, batches that arrive."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pandas as pd

from nsightkit.analysis.core.names import matching
from nsightkit.analysis.replay.latencies import Latencies
from nsightkit.analysis.replay.model import NEVER, Bool, Int, median, place
from nsightkit.analysis.replay.operations import Program

__all__ = ["Cuts", "read"]

_OF_DEVICE = re.compile(r"(Device|Ctx|Context|Thread)Synchronize")
_OF_EVENT = re.compile(r"EventSynchronize")
_ONLY_WAITS = re.compile(r"Synchronize")
#: Latencies for traces without an example, ns: typical of CUDA devices.
_RETURN_NS, _CALL_NS = 6_000, 4_000
#: A call returns at most this long after what it waited for; and by so much its end may seem to lie before that.
_AFTER_NS, _EARLY_NS = 25_000, 1_000


@dataclasses.dataclass(frozen=True, eq=False)
class Cuts:
    """The moments at which a thread's delay changes, by thread and time.

    Each opens a *slot*: until its next cut everything that the thread does is early or late by the same delay. A first
    cut, at `NEVER`, has no delay.

    Parameters
    ----------
    thread, start, end : ndarray of int64
    blocks, cost, tail, copy : ndarray of int64
        Cuts that wait for the GPU; what each takes before it waits, and after; and the copy that it returns with, -1
        for none.
    calls : int
        How many of these are calls that block; the others are launches into a full queue.
    target, call : ndarray of int64
        Operations that these wait for, and the position in `blocks` of each one that waits.
    asks, asked, asked_ns : ndarray of int64
        Cuts that wait for another thread, which, and for what that had got to at which time.
    arrives : ndarray of int64
        Cuts that wait for a batch.
    inferred : int
        Waits that the recording does not name.
    """

    thread: Int
    start: Int
    end: Int
    blocks: Int
    calls: int
    cost: Int
    tail: Int
    copy: Int
    target: Int
    call: Int
    asks: Int
    asked: Int
    asked_ns: Int
    arrives: Int
    inferred: int

    def slot(self, thread: Int, time: Int) -> Int:
        """The slot that threads are in at some times, -1 for unknown threads."""
        return place(self.thread, self.end, thread, time, side="right") - 1


def read(program: Program, latencies: Latencies, pauses: pd.DataFrame, arrivals: pd.DataFrame) -> Cuts:
    """Collect the cuts of all threads.

    Parameters
    ----------
    program : Program
    latencies : Latencies
    pauses, arrivals : DataFrame
        As :mod:`nsightkit.analysis.replay.waiting_threads` gives them.

    Returns
    -------
    Cuts
    """
    calls = program.calls
    rows = program.blocking
    last = _last_launched(program, pauses)
    own = _own_copies(program)
    awaited = np.where(own >= 0, own, _awaited(program, last))
    cost, tail, inferred = _costs(program, latencies, awaited, own)
    target, call = _targets(program, last, awaited)
    # A call that waits for nothing is as any other.
    waits, call = np.unique(call, return_inverse=True)
    rows = rows[waits]
    cost = cost[waits]
    tail = tail[waits]
    own = own[waits]
    # Launches into a full queue wait for the last operation that ended before they returned.
    full = latencies.full
    room = np.maximum(program.ended_by(program.done[full]), 0)
    room_ns = median(program.done[full] - program.end[room], 0)
    opening = pd.DataFrame({"thread": program.threads, "start_ns": NEVER, "end_ns": NEVER})
    blocking = pd.DataFrame({"thread": calls.thread[rows], "start_ns": calls.start[rows], "end_ns": calls.end[rows]})
    queue = pd.DataFrame({"thread": program.by[full], "start_ns": program.begun[full], "end_ns": program.done[full]})
    every = pd.concat([opening, blocking, queue, pauses, arrivals], ignore_index=True)
    order = np.lexsort((every["end_ns"], every["thread"]))
    sizes = len(opening), len(blocking) + len(queue), len(pauses)
    _, blocks, asks, arrives = np.split(np.argsort(order), np.cumsum(sizes))
    thread, start, end = (every[column].to_numpy(np.int64)[order] for column in opening)
    return Cuts(
        thread=thread,
        start=start,
        end=end,
        blocks=blocks,
        calls=len(rows),
        cost=np.append(cost, np.full(len(full), latencies.call_ns)),
        tail=np.append(tail, np.full(len(full), room_ns)),
        copy=np.append(own, np.full(len(full), -1)),
        target=np.append(target, room),
        call=np.append(call, len(rows) + np.arange(len(full))),
        asks=asks,
        asked=pauses["by"].to_numpy(np.int64),
        asked_ns=pauses["end_ns"].to_numpy(np.int64),
        arrives=arrives,
        inferred=inferred,
    )


def _costs(program: Program, latencies: Latencies, awaited: Int, own: Int) -> tuple[Int, Int, int]:
    """What blocking calls take before they wait, and after; and how many waits were inferred."""
    calls = program.calls
    rows = program.blocking
    start = calls.start[rows]
    end = calls.end[rows]
    returned = end - program.end[awaited]
    copies = own >= 0
    # A call that does more than wait, and returns long after the GPU was done, took its time for something else.
    waited = (awaited >= 0) & (matching(calls.names, _ONLY_WAITS)[rows] | copies | (returned <= _AFTER_NS))
    inferred = waited & ~copies
    cost = end - start
    quick_ns = median(cost[~waited], _CALL_NS)
    cost = np.where(waited, np.minimum(quick_ns, cost), cost)
    # The CPU's part of a copy from pageable memory lies before it: staging.
    cost = np.where(copies & program.staged[own], latencies.ready[own] - start, cost)
    # After its copy a call may still have to empty the staging buffer.
    tail = np.where(copies, np.maximum(returned, 0), median(returned[inferred], _RETURN_NS))
    return cost, tail, int(inferred.sum())


def _last_launched(program: Program, pauses: pd.DataFrame) -> Int:
    """Per stream and its launching thread, and per blocking call: the last operation launched before, -1 for none.

    A call waits for the work of its thread, and of those that hand over to it: others go on at their own pace.
    """
    calls = program.calls
    rows = program.blocking
    handed = set(zip(pauses["thread"], pauses["by"], strict=True))
    linked = np.flatnonzero(program.linked)
    ops = pd.DataFrame({"stream": program.stream[linked], "by": program.by[linked]}, linked)
    last = []
    for (_, by), group in ops.groupby(["stream", "by"]):
        launched = group.index.to_numpy()
        related = [thread for thread in program.threads.tolist() if thread == by or (thread, by) in handed]
        before = np.append(launched, -1)[np.searchsorted(program.begun[launched], calls.start[rows]) - 1]
        last.append(np.where(np.isin(calls.thread[rows], related), before, -1))
    return np.stack(last)


def _latest(last: Int, fits: Bool, time: Int) -> Int:
    """Per call: of what was launched last and fits, the operation of the latest time, -1 where none does."""
    best = np.argmax(np.where(fits, time, NEVER), axis=0)
    return np.where(fits.any(axis=0), last[best, np.arange(last.shape[1])], -1)


def _awaited(program: Program, last: Int) -> Int:
    """The operation that each call waited for: the last to drain, first of its thread's; -1 for none."""
    calls = program.calls
    rows = program.blocking
    start = calls.start[rows]
    end = calls.end[rows]
    thread = calls.thread[rows]
    ended = program.end[last]
    drained = (last >= 0) & (ended > start) & (ended <= end + _EARLY_NS)
    own = drained & (program.by[last] == thread) & (ended > end - _AFTER_NS)
    return _latest(last, np.where(own.any(axis=0), own, drained), ended)


def _own_copies(program: Program) -> Int:
    """The copy that each blocking call returns with, -1 for none."""
    copies = np.flatnonzero(program.own_copy)
    by_row = pd.Series(copies, program.launch[copies])
    return np.asarray(by_row.reindex(program.blocking, fill_value=-1))


def _targets(program: Program, last: Int, awaited: Int) -> tuple[Int, Int]:
    """Operations that blocking calls wait for, and the position of each one's call."""
    calls = program.calls
    rows = program.blocking
    of_device = matching(calls.names, _OF_DEVICE)[rows]
    of_event = matching(calls.names, _OF_EVENT)[rows]
    # A call that did not wait, and might in another schedule: for what was launched last.
    latest = _latest(last, last >= 0, program.begun[last])
    target = np.where((awaited < 0) & ~of_event, latest, awaited)
    single = np.flatnonzero((target >= 0) & ~of_device)
    # A wait for a device is one for all streams with work since the thread's last such wait.
    wide = np.flatnonzero(of_device)
    wide = wide[np.argsort(calls.thread[rows[wide]], kind="stable")]
    thread = calls.thread[rows[wide]]
    launched = last[:, wide]
    given = _latest(launched, program.by[launched] == thread, program.begun[launched])
    fits = (launched >= 0) & ((program.device[launched] == program.device[given]) | (given < 0))
    fits[:, 1:] &= (launched[:, 1:] != launched[:, :-1]) | (thread[1:] != thread[:-1])
    line, call = np.nonzero(fits)
    return np.append(target[single], launched[line, call]), np.append(single, wide[call])
