"""Where threads wait: calls that block, pauses until another thread is done, batches that arrive."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pandas as pd

from nsightkit.analysis.core.names import matching
from nsightkit.analysis.replay.model import NEVER, Bool, Int, median
from nsightkit.analysis.replay.operations import Program
from nsightkit.analysis.replay.streams import Streams

__all__ = ["Cuts", "read"]

_OF_DEVICE = re.compile(r"(Device|Ctx|Context|Thread)Synchronize")
_OF_EVENT = re.compile(r"EventSynchronize")
_ONLY_WAITS = re.compile(r"Synchronize")
#: Latencies for traces without an example, ns: typical of CUDA devices.
_RETURN_NS = 6_000
_CALL_NS = 4_000
#: A call returns at most this long after what it waited for; and by so much its end may seem to lie before that.
_AFTER_NS = 25_000
_EARLY_NS = 1_000
#: What a cut has that does not wait for the GPU, nor for another thread, nor for a batch.
_PLAIN = {"cost": 0, "tail": 0, "copy": -1, "asked": -1, "is_full": 0, "is_batch": 0}


@dataclasses.dataclass(frozen=True, eq=False)
class Cuts:
    """The moments at which a thread's delay changes, by thread and time.

    Each opens a *slot*: until its next cut everything that the thread does is early or late by the same delay. A first
    cut, at `NEVER`, has no delay.

    Parameters
    ----------
    thread, start, end : ndarray of int64
    cost, tail : ndarray of int64
        What a call that waits for the GPU takes before it waits, and after.
    copy : ndarray of int64
        The copy that the call returns with, -1 for none.
    asked : ndarray of int64
        The thread that a cut waits for: until that has got to where it was when the cut ended; -1 for none.
    is_full, is_batch : ndarray of bool
        Launches into a full queue, and waits for a batch.
    target, cut : ndarray of int64
        Operations that cuts wait for, and the cuts.
    inferred : int
        Waits that the recording does not name.
    """

    thread: Int
    start: Int
    end: Int
    cost: Int
    tail: Int
    copy: Int
    asked: Int
    is_full: Bool
    is_batch: Bool
    target: Int
    cut: Int
    inferred: int

    def slot(self, thread: Int, time: Int) -> Int:
        """The slot that threads are in at some times, -1 for unknown threads."""
        slot = np.full(len(thread), -1)
        for number in np.unique(self.thread).tolist():
            of_thread = thread == number
            low, high = np.searchsorted(self.thread, (number, number + 1))
            slot[of_thread] = low - 1 + np.searchsorted(self.end[low:high], time[of_thread], side="right")
        return slot


def read(program: Program, streams: Streams, pauses: pd.DataFrame, arrivals: pd.DataFrame) -> Cuts:
    """Collect the cuts of all threads.

    Parameters
    ----------
    program : Program
    streams : Streams
    pauses, arrivals : DataFrame
        As :mod:`nsightkit.analysis.replay.waiting_threads` gives them.

    Returns
    -------
    Cuts
    """
    opening = pd.DataFrame({"thread": program.threads, "start": NEVER, "end": NEVER})
    blocking, targets, inferred = _blocking(program, streams, pauses)
    queue, room = _full_queue(program, streams)
    cuts = pd.concat([opening, blocking, queue, pauses, arrivals.assign(is_batch=1)], ignore_index=True)
    cuts = cuts.fillna(_PLAIN).astype(np.int64).sort_values(["thread", "end"], kind="stable")
    # Where each of the calls stands now.
    position = np.argsort(cuts.index)[len(opening) :]
    waits = np.append(targets["call"], len(blocking) + np.arange(len(room)))
    cuts = cuts.astype({"is_full": bool, "is_batch": bool})
    columns = {str(column): values.to_numpy() for column, values in cuts.items()}
    target = np.append(targets["target"], room)
    return Cuts(**columns, target=target, cut=position[waits], inferred=inferred)


def _full_queue(program: Program, streams: Streams) -> tuple[pd.DataFrame, Int]:
    """Launches into a full queue, and the operation each waits for: the last to end before the call returned."""
    full = streams.full
    done = program.done[full]
    ended = np.searchsorted(program.end[program.by_end], done, side="right")
    room = program.by_end[np.maximum(ended - 1, 0)]
    queue = pd.DataFrame({"thread": program.by[full], "start": program.begun[full], "end": done})
    tail = median(done - program.end[room], 0)
    return queue.assign(cost=streams.call_ns, tail=tail, is_full=1), room


def _blocking(program: Program, streams: Streams, pauses: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    """Calls that wait for the GPU; the ``target`` of each ``call``, by position; and how many waits were inferred."""
    rows = program.blocking
    calls = program.calls
    last = _last_launched(program, pauses)
    copy = _own_copies(program)
    awaited = np.where(copy >= 0, copy, _awaited(program, last))
    targets = _targets(program, last, awaited)
    table = pd.DataFrame({"thread": calls.thread[rows], "start": calls.start[rows], "end": calls.end[rows]})
    table["copy"] = copy
    inferred = _cost(program, streams, table, awaited)
    # A call that waits for nothing is as any other.
    waits, targets["call"] = np.unique(targets["call"], return_inverse=True)
    return table.iloc[waits], targets, inferred


def _cost(program: Program, streams: Streams, table: pd.DataFrame, awaited: Int) -> int:
    """Note what blocking calls take before they wait, and after; give how many waits were inferred."""
    copy = table["copy"].to_numpy()
    lasting = (table["end"] - table["start"]).to_numpy()
    returned = table["end"].to_numpy() - program.end[awaited]
    is_copy = copy >= 0
    only_waits = matching(program.calls.names, _ONLY_WAITS)[program.blocking]
    # A call that does more than wait, and returns long after the GPU was done, took its time for something else.
    waited = (awaited >= 0) & (only_waits | is_copy | (returned <= _AFTER_NS))
    quick_ns = median(lasting[~waited], _CALL_NS)
    cost = np.where(waited, np.minimum(quick_ns, lasting), lasting)
    # The CPU's part of a copy from pageable memory lies before it: staging.
    staged_ns = streams.ready[copy] - table["start"]
    table["cost"] = np.where(is_copy & program.staged[copy], staged_ns, cost)
    # After its copy a call may still have to empty the staging buffer.
    inferred = waited & ~is_copy
    table["tail"] = np.where(is_copy, np.maximum(returned, 0), median(returned[inferred], _RETURN_NS))
    return int(inferred.sum())


def _last_launched(program: Program, pauses: pd.DataFrame) -> Int:
    """Per stream and its launching thread, and per blocking call: the last operation launched before, -1 for none.

    A call waits for the work of its thread, and of those that hand over to it: others go on at their own pace.
    """
    calls = program.calls
    rows = program.blocking
    handed = pauses[["thread", "asked"]].drop_duplicates()
    linked = np.flatnonzero(program.linked)
    ops = pd.DataFrame({"stream": program.stream[linked], "by": program.by[linked]}, linked)
    last = []
    for (_, by), group in ops.groupby(["stream", "by"]):
        launched = group.index.to_numpy()
        related = [by, *handed.loc[handed["asked"] == by, "thread"]]
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
    end = calls.end[rows]
    ended = program.end[last]
    drained = (last >= 0) & (ended > calls.start[rows]) & (ended <= end + _EARLY_NS)
    own = drained & (program.by[last] == calls.thread[rows]) & (ended > end - _AFTER_NS)
    return _latest(last, np.where(own.any(axis=0), own, drained), ended)


def _own_copies(program: Program) -> Int:
    """The copy that each blocking call returns with, -1 for none."""
    copies = np.flatnonzero(program.own_copy)
    by_row = pd.Series(copies, program.launch[copies])
    return np.asarray(by_row.reindex(program.blocking, fill_value=-1))


def _targets(program: Program, last: Int, awaited: Int) -> pd.DataFrame:
    """Operations that blocking calls wait for, ``target``, and the position of each one's ``call``."""
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
    of_calls = pd.DataFrame({"target": target[single], "call": single})
    of_waits = pd.DataFrame({"target": launched[line, call], "call": wide[call]})
    return pd.concat([of_calls, of_waits], ignore_index=True)
