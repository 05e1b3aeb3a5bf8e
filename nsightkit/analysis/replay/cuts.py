"""Where threads wait: blocking calls, launches into a full queue, pauses, batches that arrive."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pandas as pd

from nsightkit.analysis.core.names import matching
from nsightkit.analysis.replay.latencies import Latencies
from nsightkit.analysis.replay.model import NEVER, Bool, Int, place
from nsightkit.analysis.replay.operations import Operations, Program

__all__ = ["Cuts", "read"]

_OF_DEVICE = re.compile(r"(Device|Ctx|Context|Thread)Synchronize")
_OF_EVENT = re.compile(r"EventSynchronize")
_ONLY_WAITS = re.compile(r"Synchronize")
#: Latencies for traces without an example, ns: typical of CUDA devices.
_RETURN_NS, _CALL_NS = 6_000, 4_000
#: A call that does not wait costs at most this much.
_QUICK_NS = 20_000
#: A call returns at most this long after what it waited for.
_AFTER_NS = 25_000
#: The columns of a cut, and their values where they do not apply.
_COLUMNS = {"cost": 0, "tail": 0, "copy": -1, "arrival": NEVER, "blocks": False}


@dataclasses.dataclass(frozen=True, eq=False)
class Cuts:
    """The moments at which a thread's delay changes, by thread and time.

    Each opens a *slot*: until its next cut everything that the thread does is early or late by the same delay. A first
    cut, at `NEVER`, has no delay.

    Parameters
    ----------
    thread, start, end : ndarray of int64
    cost, tail : ndarray of int64
        What a cut takes before it waits, and after.
    copy : ndarray of int64
        The copy that it returns with, -1 for none.
    arrival : ndarray of int64
        When the batch that it waits for is there.
    blocks : ndarray of bool
        Whether it is a call that waits for the GPU.
    target, cut_of_target : ndarray of int64
        Operations that cuts wait for, and the number of each one's cut.
    asking, asked, asked_ns : ndarray of int64
        Cuts that wait for another thread, which, and for what that had got to at which time.
    rows : ndarray of int64
        Of the blocking calls.
    inferred : int
        Waits that the recording does not name.
    """

    thread: Int
    start: Int
    end: Int
    cost: Int
    tail: Int
    copy: Int
    arrival: Int
    blocks: Bool
    target: Int
    cut_of_target: Int
    asking: Int
    asked: Int
    asked_ns: Int
    rows: Int
    inferred: int

    def slot(self, thread: Int, time: Int) -> Int:
        """The slot that threads are in at some times, -1 for unknown threads."""
        return place(self.thread, self.end, thread, time, side="right") - 1


@dataclasses.dataclass(frozen=True, eq=False)
class _Blocking:
    """Blocking calls as cuts, and the operations that they wait for with the number of each one's call."""

    cuts: pd.DataFrame
    rows: Int
    target: Int
    of_target: Int
    inferred: int


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
    blocking = _blocking_calls(program, latencies)
    queue, room = _full_queues(program.operations, latencies)
    times = {"start_ns": "start", "end_ns": "end"}
    tables = [
        pd.DataFrame({"thread": program.threads, "start": NEVER, "end": NEVER}),
        blocking.cuts,
        queue,
        pauses[["thread", "start_ns", "end_ns"]].rename(columns=times),
        arrivals.rename(columns=times).assign(arrival=arrivals["end_ns"]),
    ]
    every = pd.concat(tables, ignore_index=True)
    for column, otherwise in _COLUMNS.items():
        known = every[column].astype(object).where(every[column].notna(), otherwise)
        every[column] = known.astype(type(otherwise))
    at = np.cumsum([len(table) for table in tables])
    order = np.lexsort((every["end"], every["thread"]))
    number = np.argsort(order)
    cut_of_target = np.append(at[0] + blocking.of_target, at[1] + np.arange(len(room)))
    return Cuts(
        **{str(column): values.to_numpy()[order] for column, values in every.items()},
        target=np.append(blocking.target, room),
        cut_of_target=number[cut_of_target],
        asking=number[at[2] + np.arange(len(pauses))],
        asked=pauses["by"].to_numpy(),
        asked_ns=pauses["end_ns"].to_numpy(),
        rows=blocking.rows,
        inferred=blocking.inferred,
    )


def _full_queues(operations: Operations, latencies: Latencies) -> tuple[pd.DataFrame, Int]:
    """Launches into a full queue as cuts, and the operation that each waits for: the last to end by then."""
    full = latencies.full
    done = operations.done[full]
    room = np.maximum(operations.ended_by(done), 0)
    columns = {"thread": operations.by[full], "start": operations.begun[full], "end": done}
    room_ns = int(np.median(done - operations.end[room])) if len(full) else 0
    return pd.DataFrame({**columns, "cost": latencies.call_ns, "tail": room_ns}), room


def _blocking_calls(program: Program, latencies: Latencies) -> _Blocking:
    """Blocking calls with the operations that they wait for."""
    operations, calls, rows = program.operations, program.calls, program.blocking
    of_device, of_event = matching(calls.names, _OF_DEVICE)[rows], matching(calls.names, _OF_EVENT)[rows]
    last = _last_launched(operations, calls.start[rows])
    own = _own_copies(program)
    awaited = np.where(own >= 0, own, _awaited(program, last, of_event))
    # A call that did not wait, and might in another schedule: for what was launched last.
    default = np.where(of_event, -1, _latest(last, last >= 0, operations.begun[last]))
    target = np.where(awaited >= 0, awaited, default)
    cuts, inferred = _costs(program, latencies, awaited, own)
    keep = np.flatnonzero(target >= 0)
    single, wide = np.flatnonzero(~of_device[keep]), np.flatnonzero(of_device[keep])
    stream, call = _all_streams(program, rows[keep[wide]], last[:, keep[wide]])
    targets = np.append(target[keep[single]], last[stream, keep[wide[call]]])
    return _Blocking(cuts.iloc[keep], rows[keep], targets, np.append(single, wide[call]), inferred)


def _costs(program: Program, latencies: Latencies, awaited: Int, own: Int) -> tuple[pd.DataFrame, int]:
    """Blocking calls as cuts: what each takes before it waits, and after; and how many waits were inferred."""
    calls, rows = program.calls, program.blocking
    start, end = calls.start[rows], calls.end[rows]
    returned = end - program.operations.end[awaited]
    copies = own >= 0
    # A call that does more than wait, and returns long after the GPU was done, took its time for something else.
    waited = (awaited >= 0) & (matching(calls.names, _ONLY_WAITS)[rows] | copies | (returned <= _AFTER_NS))
    inferred = waited & ~copies
    return_ns = int(np.median(returned[inferred])) if inferred.any() else _RETURN_NS
    cost = end - start
    quick_ns = _CALL_NS if waited.all() else min(int(np.median(cost[~waited])), _QUICK_NS)
    cost = np.where(waited, np.minimum(quick_ns, cost), cost)
    # The CPU's part of a copy from pageable memory lies before it: staging.
    cost = np.where(copies & program.staged[own], latencies.ready[own] - start, cost)
    # After its copy a call may still have to empty the staging buffer.
    tail = np.where(copies, np.maximum(returned, 0), return_ns)
    columns = {"thread": calls.thread[rows], "start": start, "end": end, "cost": cost, "tail": tail, "copy": own}
    return pd.DataFrame(columns).assign(blocks=True), int(inferred.sum())


def _last_launched(operations: Operations, start: Int) -> Int:
    """Per stream and call: the last operation launched before the call, -1 for none."""
    linked = np.flatnonzero(operations.linked)
    last = []
    for stream in np.split(linked, np.flatnonzero(np.diff(operations.stream[linked])) + 1):
        # In the order of the stream; a launch by another thread may have begun a little earlier.
        begun = np.maximum.accumulate(operations.begun[stream])
        last.append(np.append(stream, -1)[np.searchsorted(begun, start) - 1])
    return np.stack(last)


def _latest(last: Int, fits: Bool, time: Int) -> Int:
    """Per call: of the streams that fit, the operation of the latest time, -1 where none does."""
    best = np.argmax(np.where(fits, time, NEVER), axis=0)
    return np.where(fits.any(axis=0), last[best, np.arange(last.shape[1])], -1)


def _awaited(program: Program, last: Int, of_event: Bool) -> Int:
    """The operation that each call waited for: the last to drain, first of its thread's; -1 for none."""
    operations, calls, rows = program.operations, program.calls, program.blocking
    start, end, thread = calls.start[rows], calls.end[rows], calls.thread[rows]
    ended = operations.end[last]
    drained = (last >= 0) & (operations.process[last] == thread >> 24) & (ended > start) & (ended <= end + 1_000)
    own = drained & (operations.by[last] == thread) & (ended > end - _AFTER_NS)
    awaited = _latest(last, np.where(own.any(axis=0), own, drained), ended)
    # An event may lie before the end of its stream.
    events = np.flatnonzero(of_event & (awaited < 0))
    before = operations.ended_by(end[events])
    hit = (before >= 0) & (operations.end[before] > start[events])
    hit &= operations.process[before] == thread[events] >> 24
    awaited[events[hit]] = before[hit]
    return awaited


def _own_copies(program: Program) -> Int:
    """The copy that each blocking call returns with, -1 for none."""
    copies = np.flatnonzero(program.own_copy)
    by_row = pd.Series(copies, program.operations.launch[copies])
    return np.asarray(by_row.reindex(program.blocking, fill_value=-1))


def _all_streams(program: Program, rows: Int, last: Int) -> tuple[Int, Int]:
    """Streams that calls which wait for a device wait for, where that is news since the thread's last such call."""
    thread, device = program.calls.thread[rows], _device_of(program, rows)
    owned = (last >= 0) & (program.operations.process[last] == thread >> 24)
    fits = owned & ((device == -1) | (device == program.operations.device[last]))
    order = np.lexsort((device, thread))
    same = (np.diff(thread[order]) == 0) & (np.diff(device[order]) == 0)
    ordered = last[:, order]
    fits[:, order[1:]] &= ~(same & (ordered[:, 1:] == ordered[:, :-1]))
    stream, call = np.nonzero(fits)
    return stream, call


def _device_of(program: Program, rows: Int) -> Int:
    """The device that a thread gave work last before each call, which the call means; -1 where there is only one."""
    operations, calls = program.operations, program.calls
    if (operations.device == operations.device[0]).all():
        return np.full(len(rows), -1)
    order = operations.by_launch
    thread = operations.by[order]
    at = place(thread, operations.begun[order], calls.thread[rows], calls.start[rows]) - 1
    return np.where((at >= 0) & (thread[at] == calls.thread[rows]), operations.device[order[at]], -1)
