"""The moments at which threads wait: for the GPU, for another thread, or for a batch of data."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pandas as pd

from nsightkit.analysis.replay.model import NEVER, Bool, Int, median
from nsightkit.analysis.replay.operations import Program
from nsightkit.analysis.replay.streams import Streams
from nsightkit.text import matching

#: Calls that wait for all streams of a device, that wait for an event, and that do nothing but wait.
_OF_DEVICE = re.compile(r"(Device|Ctx|Context|Thread)Synchronize")
_OF_EVENT = re.compile(r"EventSynchronize")
_ONLY_WAITS = re.compile(r"Synchronize")
#: Latencies for traces without an example, typical of CUDA devices: from the end of the awaited work to the return of
#: the call, and of a blocking call that finds nothing to wait for.
_RETURN_NS = 6_000
_CALL_NS = 4_000
#: A call returns at most this long after what it waited for; and by so much its end may seem to lie before that.
_AFTER_NS = 25_000
_EARLY_NS = 1_000
#: The value of each column in the cuts that it does not concern.
_DEFAULTS = {
    "before_wait_ns": 0,
    "after_wait_ns": 0,
    "copy": -1,
    "other_thread": -1,
    "is_full_queue": 0,
    "is_batch": 0,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Cuts:
    """The moments at which a thread's delay changes, by thread and time.

    Each opens a *slot*, which has the cut's number: from its end to the end of the thread's next cut everything that
    the thread does is early or late by the same delay. A thread's first cut, at `NEVER`, has no delay. Arrays have one
    element per cut, except in the pairs.

    Parameters
    ----------
    thread, start, end : ndarray of int64
        When the recorded thread waited, ns on the trace's clock.
    before_wait_ns, after_wait_ns : ndarray of int64
        What a call that waits for the GPU takes before it waits, and from the end of the awaited work to its return.
    copy : ndarray of int64
        Position of the operation that is the call's own copy, with whose end it returns; -1 for none.
    other_thread : ndarray of int64
        The thread that a cut waits for: until that has got to where it was when the cut ended; -1 for none.
    is_full_queue, is_batch : ndarray of bool
        Launches into a full queue, and waits for a batch.
    target, waiting_cut : ndarray of int64
        Pairs: cut ``waiting_cut[i]`` waits for operation ``target[i]``.
    inferred : int
        How many waits the recording does not name.
    """

    thread: Int
    start: Int
    end: Int
    before_wait_ns: Int
    after_wait_ns: Int
    copy: Int
    other_thread: Int
    is_full_queue: Bool
    is_batch: Bool
    target: Int
    waiting_cut: Int
    inferred: int

    def slot_at(self, thread: Int, time: Int) -> Int:
        """Find the slot that each thread is in at each time, ns on the trace's clock; -1 for unknown threads.

        A slot lasts from the end of one of the thread's cuts to the end of its next one. It has the former's number.
        """
        slot = np.full(len(thread), -1)
        for number in np.unique(self.thread).tolist():
            of_thread = thread == number
            low, high = np.searchsorted(self.thread, (number, number + 1))
            # The last of the thread's cuts, low to high, that ended by then.
            slot[of_thread] = low - 1 + np.searchsorted(self.end[low:high], time[of_thread], side="right")
        return slot


def read(program: Program, streams: Streams, pauses: pd.DataFrame, arrivals: pd.DataFrame) -> Cuts:
    """Collect the cuts of all threads.

    Parameters
    ----------
    program : Program
    streams : Streams
    pauses, arrivals : DataFrame
        Waits for other threads and for data, as ``waits_for_threads`` and ``waits_for_data`` in
        :mod:`nsightkit.analysis.replay.waiting_threads` give them.

    Returns
    -------
    Cuts
    """
    opening = pd.DataFrame({"thread": program.threads, "start": NEVER, "end": NEVER})
    blocking, targets, inferred = _blocking_cuts(program, streams, pauses)
    full_queue, room_makers = _full_queue_cuts(program, streams)
    cuts = pd.concat([opening, blocking, full_queue, pauses, arrivals.assign(is_batch=1)], ignore_index=True)
    cuts = cuts.fillna(_DEFAULTS).astype(np.int64).sort_values(["thread", "end"], kind="stable")
    # The index still holds the rows before sorting: where each row after `opening` stands now, `blocking` first.
    position = np.argsort(cuts.index)[len(opening) :]
    # Pairs of a waiting row and its target: as in `targets`, then each launch into a full queue with its room maker.
    waiting = np.append(targets["call"], len(blocking) + np.arange(len(room_makers)))
    cuts = cuts.astype({"is_full_queue": bool, "is_batch": bool})
    columns = {str(column): values.to_numpy() for column, values in cuts.items()}
    target = np.append(targets["target"], room_makers)
    return Cuts(**columns, target=target, waiting_cut=position[waiting], inferred=inferred)


def _full_queue_cuts(program: Program, streams: Streams) -> tuple[pd.DataFrame, Int]:
    """List the launches into a full queue as cuts, and the operation whose end made room for each.

    That is the last to end before the call returned. Apart from its wait, such a call takes as long as any launch. The
    table lacks columns of :class:`Cuts`, which take their `_DEFAULTS`.
    """
    full_queue_ops = streams.full_queue_ops
    end = program.launch_end[full_queue_ops]
    ended_count = np.searchsorted(program.end[program.order_by_end], end, side="right")
    room_makers = program.order_by_end[np.maximum(ended_count - 1, 0)]
    cuts = pd.DataFrame(
        {
            "thread": program.launch_thread[full_queue_ops],
            "start": program.launch_start[full_queue_ops],
            "end": end,
            "before_wait_ns": streams.call_ns,
            "after_wait_ns": median(end - program.end[room_makers], otherwise=0),
            "is_full_queue": 1,
        }
    )
    return cuts, room_makers


def _blocking_cuts(program: Program, streams: Streams, pauses: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    """List the calls that wait for the GPU as cuts, what each waits for, and how many of these waits were inferred.

    The first table lacks columns of :class:`Cuts`, which take their `_DEFAULTS`. The second holds a row for each
    operation that a call waits for: ``target``, the operation's position, and ``call``, the call's position in the
    first table.
    """
    rows = program.blocking_calls
    calls = program.calls
    last = _last_launched(program, pauses)
    copy = _own_copies(program)
    # What each call waited for in the recording; `targets` also holds what it might wait for in another schedule.
    awaited = np.where(copy >= 0, copy, _infer_awaited(program, last))
    targets = _possible_targets(program, last, awaited)
    before_ns, after_ns, is_inferred = _times_around_wait(program, streams, copy, awaited)
    cuts = pd.DataFrame(
        {
            "thread": calls.thread[rows],
            "start": calls.start[rows],
            "end": calls.end[rows],
            "before_wait_ns": before_ns,
            "after_wait_ns": after_ns,
            "copy": copy,
        }
    )
    # Drop the calls without a target, which are like any other call, and renumber the others in `targets` to match.
    with_target, targets["call"] = np.unique(targets["call"], return_inverse=True)
    return cuts.iloc[with_target], targets, int(is_inferred.sum())


def _times_around_wait(program: Program, streams: Streams, copy: Int, awaited: Int) -> tuple[Int, Int, Bool]:
    """Estimate what each blocking call takes before and after its wait in ns, and flag those whose wait is inferred.

    `copy` is the call's own copy, `awaited` the operation that it waited for in the recording; -1 for none.
    """
    rows = program.blocking_calls
    start = program.calls.start[rows]
    end = program.calls.end[rows]
    duration_ns = end - start
    after_target_ns = end - program.end[awaited]  # means nothing where `awaited` is -1: has_waited is False there
    has_copy = copy >= 0
    only_waits = matching(program.calls.names, _ONLY_WAITS)[rows]
    # A call that does more than wait, and returns long after the GPU was done, took its time for something else.
    has_waited = (awaited >= 0) & (only_waits | has_copy | (after_target_ns <= _AFTER_NS))
    quick_ns = median(duration_ns[~has_waited], otherwise=_CALL_NS)
    before_ns = np.where(has_waited, np.minimum(quick_ns, duration_ns), duration_ns)
    # The CPU's part of a copy from pageable memory, staging, lies before the copy is ready to start.
    staging_ns = streams.ready[copy] - start
    before_ns = np.where(has_copy & program.is_staged_copy[copy], staging_ns, before_ns)
    # After an inferred wait, one constant. After its own copy, what it took: it may have to empty the staging buffer.
    is_inferred = has_waited & ~has_copy
    return_ns = median(after_target_ns[is_inferred], otherwise=_RETURN_NS)
    return before_ns, np.where(has_copy, np.maximum(after_target_ns, 0), return_ns), is_inferred


def _last_launched(program: Program, pauses: pd.DataFrame) -> Int:
    """For each blocking call (columns), find the last operation launched before it into each stream (rows); -1: none.

    A stream has a row for each thread that launches into it. A call waits for the work of its own thread, and of those
    that its thread has ever waited for in `pauses`: others go on at their own pace.
    """
    calls = program.calls
    blocking = program.blocking_calls  # rows of calls
    partners = pauses[["thread", "other_thread"]].drop_duplicates()
    has_launch = np.flatnonzero(program.has_launch)
    columns = {"stream": program.stream[has_launch], "launch_thread": program.launch_thread[has_launch]}
    last = []
    for (_, launch_thread), group in pd.DataFrame(columns, has_launch).groupby(["stream", "launch_thread"]):
        launched = group.index.to_numpy()  # by start, so by launch: a stream keeps the order of a thread's launches
        may_wait = [launch_thread, *partners.loc[partners["other_thread"] == launch_thread, "thread"]]
        # For a call before all launches the place is -1, which picks the -1 at the end.
        place = np.searchsorted(program.launch_start[launched], calls.start[blocking]) - 1
        last_before = np.append(launched, -1)[place]
        is_waiting = np.isin(calls.thread[blocking], may_wait)
        last.append(np.where(is_waiting, last_before, -1))
    return np.stack(last)


def _latest_fitting(last: Int, fits: Bool, time: Int) -> Int:
    """Choose for each call (column of `last`) the operation that fits with the latest `time`; -1 where none fits.

    `fits` and `time` are of each element of `last`.
    """
    best = np.argmax(np.where(fits, time, NEVER), axis=0)
    return np.where(fits.any(axis=0), last[best, np.arange(last.shape[1])], -1)


def _infer_awaited(program: Program, last: Int) -> Int:
    """Infer the operation that each blocking call waited for in the recording, -1 for none.

    It is the one of `last` (:func:`_last_launched`) that ended last during the call. One that the calling thread
    launched goes first, if the call returned just after it.
    """
    calls = program.calls
    rows = program.blocking_calls
    call_end = calls.end[rows]
    op_end = program.end[last]
    ended_in_call = (last >= 0) & (op_end > calls.start[rows]) & (op_end <= call_end + _EARLY_NS)
    is_own = ended_in_call & (program.launch_thread[last] == calls.thread[rows]) & (op_end > call_end - _AFTER_NS)
    return _latest_fitting(last, np.where(is_own.any(axis=0), is_own, ended_in_call), op_end)


def _own_copies(program: Program) -> Int:
    """Find the position of the copy that each blocking call makes, and with whose end it returns; -1 for none."""
    copies = np.flatnonzero(program.is_blocking_copy)
    by_row = pd.Series(copies, program.launch_row[copies])
    return np.asarray(by_row.reindex(program.blocking_calls, fill_value=-1))


def _possible_targets(program: Program, last: Int, awaited: Int) -> pd.DataFrame:
    """List the operations that blocking calls wait for, or might wait for in another schedule.

    `last` is of :func:`_last_launched`, `awaited` what each call waited for in the recording. The result holds
    ``target``, an operation's position, and ``call``, a position in ``program.blocking_calls``.
    """
    calls = program.calls
    rows = program.blocking_calls
    of_device = matching(calls.names, _OF_DEVICE)[rows]
    of_event = matching(calls.names, _OF_EVENT)[rows]
    # A call that did not wait may, in another schedule, wait for the last launch. For an event's call, that is unknown.
    latest = _latest_fitting(last, last >= 0, program.launch_start[last])
    target = np.where((awaited < 0) & ~of_event, latest, awaited)
    single_waits = np.flatnonzero((target >= 0) & ~of_device)
    # A wait for a device is one for all its streams with work since the thread's last such wait.
    device_waits = np.flatnonzero(of_device)
    device_waits = device_waits[np.argsort(calls.thread[rows[device_waits]], kind="stable")]  # by thread, then start
    thread = calls.thread[rows[device_waits]]
    launched = last[:, device_waits]
    # It waits for the device of the thread's own last launch; a thread without any waits for all devices.
    own_latest = _latest_fitting(launched, program.launch_thread[launched] == thread, program.launch_start[launched])
    is_target = (launched >= 0) & ((program.device[launched] == program.device[own_latest]) | (own_latest < 0))
    # A row's launch is new if the column before it, the thread's previous wait, has another one.
    is_target[:, 1:] &= (launched[:, 1:] != launched[:, :-1]) | (thread[1:] != thread[:-1])
    stream_row, column = np.nonzero(is_target)
    single_targets = pd.DataFrame({"target": target[single_waits], "call": single_waits})
    device_targets = pd.DataFrame({"target": launched[stream_row, column], "call": device_waits[column]})
    return pd.concat([single_targets, device_targets], ignore_index=True)
