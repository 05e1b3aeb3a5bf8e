"""Threads that wait for each other, or for data that other threads or processes prepare.

A *silence* of a thread is a time in which it makes no CUDA call and no named work of its own was recorded.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.model import NEVER, UNEXPLAINED_NS, Bool, Int
from nsightkit.analysis.replay.operations import Program
from nsightkit.analysis.timeline.gaps.threads import Threads, Track, together
from nsightkit.trace.model import process_of

#: A silence counts as a pause from this many times the usual time between two calls of a thread.
_PAUSE_FACTOR = 3
#: Another thread's calls are work that was handed to it if the pauses around them are this much longer than the average
#: pause between them.
_LONGER_FACTOR = 1.5
#: Silences whose lengths differ by less than this factor are alike.
_ALIKE_FACTOR = 1.15
#: A thread that another one wakes goes on at most this long after that one's last recorded event, or after this part of
#: its silence: what happens for the first time, such as a first backward pass, takes longer.
_WAKE_NS = 500_000
_WAKE_DIVISOR = 100
#: OS calls that wait for another thread or process; and the ranges in which PyTorch waits for its loader's workers.
_FOR_OTHERS = re.compile(r"poll|select|futex|sem_|pthread_cond|epoll|recv|accept|sigwait|^wait")
_WORKERS = re.compile(r"_MultiProcessing")
#: Loader workers set the pace if the waits for them take a tenth of the time or more, from the first to the last load.
_PACE_DIVISOR = 10


def waits_for_threads(program: Program, facts: Threads) -> pd.DataFrame:
    """Find the silences of a thread that another one ended: that handed work to it, or was done with work it was given.

    Parameters
    ----------
    program : Program
    facts : Threads
        What each thread did.

    Returns
    -------
    DataFrame
        ``thread, start, end, other_thread``: the silent thread, its silence in ns on the trace's clock, and the thread
        that ended it.
    """
    tracks = _gpu_calls_by_thread(program)
    intervals_ns = [_usual_interval_ns(calls) for calls in tracks.values() if len(calls) > 1]
    # The busiest thread sets the scale: the usual interval of a thread that often waits includes its waits.
    pause_ns = max(_PAUSE_FACTOR * min(intervals_ns, default=0.0), UNEXPLAINED_NS)
    # The empty table is for the columns of an answer without pauses.
    parts = [pd.DataFrame(columns=["thread", "start", "end", "other_thread"], dtype=np.int64)]
    for thread, calls in tracks.items():
        process = process_of(thread)
        others = {other: tracks[other] for other in tracks if other != thread and process_of(other) == process}
        if others:
            start, end = _long_silences(facts, thread, calls, others, pause_ns)
            woken_by = _woken_by(facts, start, end, others, pause_ns, program.step_thread)
            silences = pd.DataFrame({"thread": thread, "start": start, "end": end, "other_thread": woken_by})
            parts.append(silences[woken_by >= 0])
    pauses = pd.concat(parts, ignore_index=True)
    if len(program.steps) > 1:
        # Threads that work together do so in every step: a pair of threads that occurs once is chance.
        pauses = pauses[pauses.duplicated(["thread", "other_thread"], keep=False)]
    return pauses


def _gpu_calls_by_thread(program: Program) -> dict[int, Track]:
    """List each thread's launches and blocking calls, by start; the steps' thread also has the end of its last step.

    The tracks' `row` has no meaning.
    """
    calls = program.calls
    rows = np.union1d(program.launch_row[program.has_launch], program.blocking_calls)
    table = pd.DataFrame({"thread": calls.thread[rows], "start": calls.start[rows], "end": calls.end[rows]})
    if (table["thread"] == program.step_thread).any():
        # A thread that waits for others until its last step ends makes no call after that: let the end count as one.
        last_step_end = program.steps["cpu_end_ns"].iloc[-1]
        table.loc[len(table)] = [program.step_thread, last_step_end, last_step_end]
    table = table.sort_values("start", kind="stable")
    tracks = {}
    for thread in np.unique(table["thread"]).tolist():
        of_thread = table[table["thread"] == thread]
        tracks[thread] = Track(of_thread["start"].to_numpy(), of_thread["end"].to_numpy(), of_thread.index.to_numpy())
    return tracks


def _usual_interval_ns(calls: Track) -> float:
    """The median time from the start of one call to the start of the next; 0 with fewer than two calls."""
    if len(calls) > 1:
        return float(np.median(np.diff(calls.start)))
    return 0.0


def _long_silences(
    facts: Threads, thread: int, calls: Track, others: dict[int, Track], pause_ns: float
) -> tuple[Int, Int]:
    """Find the silences of a thread that are longer than `pause_ns`: their starts and ends, in order.

    The first begins at `NEVER`, as the thread did nothing before it; the time after its last activity is none, as
    nobody woke it again. `calls` are the thread's own, `others` those of other threads.
    """
    # Named work is not a silence, unless another thread works during most of it: then it may be a wait for that one.
    work_start, work_end = facts.when(thread, ["work"], ["range", "op", "os_call"])
    is_handed_over = np.zeros(len(work_start), bool)
    for other_calls in others.values():
        is_handed_over |= _holds_a_burst(other_calls, work_start, work_end, pause_ns)
    # A thread that mostly calls sleep pauses by itself, and does not wait for another.
    is_handed_over &= 2 * facts.sleeps(thread).covered(work_start, work_end) < work_end - work_start
    active_start, active_end = intervals.union(
        (calls.start, np.maximum(calls.end, calls.start + 1)),  # a call of no length is activity, too
        (work_start[~is_handed_over], work_end[~is_handed_over]),
        facts.when(thread, ["work"], ["call"]),
        facts.when(thread, ["data", "once", "compile", "messages", "profiler"]),
    )
    # A silence lasts from the end of one active time to the start of the next.
    start = np.append(NEVER, active_end[:-1])
    is_long = active_start - start > pause_ns
    return start[is_long], active_start[is_long]


def _woken_by(facts: Threads, start: Int, end: Int, others: dict[int, Track], pause_ns: float, step_thread: int) -> Int:
    """Give the thread that ended each silence, -1 for none; of several the steps' thread, else the most frequent.

    `others` are the calls of the threads that may have.
    """
    may_have_woken = {}
    priority = {}
    for other, calls in others.items():
        holds_a_burst = _holds_a_burst(calls, start, end, pause_ns)
        may_have_woken[other] = holds_a_burst | _acted_just_before(facts, other, start, end)
        # A burst of calls within the silence is the better evidence: it counts twice.
        priority[other] = other == step_thread, may_have_woken[other].sum() + holds_a_burst.sum()
    # A thread also pauses without being woken. Silences that last about as long as such a pause may be its own pauses.
    duration_ns = end - start
    is_woken = np.any(list(may_have_woken.values()), axis=0)
    own_pauses_ns = np.sort(duration_ns[(start > NEVER) & ~is_woken])
    # Whether an own pause is about as long as each silence: if the searches differ, one lies between the two limits.
    is_like_own = np.searchsorted(own_pauses_ns, duration_ns / _ALIKE_FACTOR) < np.searchsorted(
        own_pauses_ns, duration_ns * _ALIKE_FACTOR
    )
    woken_by = np.full(len(end), -1, np.int64)
    for other in sorted(priority, key=priority.__getitem__):  # the highest priority last, over the others
        woken_by[may_have_woken[other] & ~is_like_own] = other
    return woken_by


def _holds_a_burst(calls: Track, start: Int, end: Int, pause_ns: float) -> Bool:
    """Whether each window holds a whole burst of calls, with a pause before and after it, that takes up half of it.

    Such a burst, in the silence of another thread, is work that this thread was handed. A thread that works in several
    short bursts pauses inside the window too, but shorter than around it.
    """
    # What is a pause also depends on the thread's own pace.
    pause_ns = max(pause_ns, _PAUSE_FACTOR * _usual_interval_ns(calls))
    # The silence ahead of each call and, as the last element, behind the last call.
    ahead_ns = np.append(calls.start, -NEVER) - np.append(NEVER, calls.end)
    is_pause = ahead_ns > pause_ns
    # Up to and including the one ahead of each call: how many pauses, and how long they are together.
    pause_count = np.cumsum(is_pause)
    paused_ns = np.cumsum(ahead_ns * is_pause)
    first = np.searchsorted(calls.start, start)
    beyond = np.searchsorted(calls.start, end)
    last = beyond - 1  # in a window without calls, first and last mean nothing: the result leaves it out
    # The pauses ahead of the calls after the first one, up to the last one.
    inside_ns = paused_ns[last] - paused_ns[first]
    average_inside_ns = inside_ns / np.maximum(pause_count[last] - pause_count[first], 1)
    around_ns = np.minimum(ahead_ns[first], ahead_ns[beyond])
    is_apart = (around_ns > pause_ns) & (around_ns > _LONGER_FACTOR * average_inside_ns)
    active_ns = calls.end[last] - calls.start[np.minimum(first, last)] - inside_ns
    return np.asarray((beyond > first) & is_apart & (2 * active_ns >= end - start))


def _acted_just_before(facts: Threads, thread: int, start: Int, end: Int) -> Bool:
    """Whether a recorded event of the thread began or ended in each window, shortly before the window's end.

    A window from `NEVER` lies before a thread's first call, when it had nothing to do: there, an event at any time
    counts, as any thread may have started its work.
    """
    edges: list[Int] = [np.full(1, NEVER)]  # so that there is an edge before every time
    for table in ("calls", "ops", "ranges", "os_calls"):
        track = facts.events(table, thread)
        edges += [track.start, track.end]
    times = np.sort(np.concatenate(edges))
    latest = times[np.searchsorted(times, end) - 1]
    wake_ns = np.maximum(_WAKE_NS, (end - start) // _WAKE_DIVISOR)
    return np.asarray((latest > start) & ((start == NEVER) | (end - latest <= wake_ns)))


def waits_for_data(program: Program, facts: Threads) -> pd.DataFrame:
    """Find the waits for data that others prepare at their own pace: a batch arrives when it is ready.

    An OS call that waits for another process shows such a wait, as does a range of PyTorch's loader with workers. Other
    waits for data are the thread's own time: loading begins when the thread asks for it.

    Parameters
    ----------
    program : Program
    facts : Threads
        What each thread did.

    Returns
    -------
    DataFrame
        ``thread, start, end``, in ns on the trace's clock.
    """
    parts = [pd.DataFrame(columns=["thread", "start", "end"], dtype=np.int64)]  # for an answer without waits
    for thread in program.threads.tolist():
        start, end = facts.when(thread, ["data"])
        duration_ns = end - start
        for_others = together(
            facts.named("os_calls", thread, _FOR_OTHERS),
            facts.named("ranges", thread, _WORKERS),
            facts.named("ops", thread, _WORKERS),
        )
        is_for_others = 2 * for_others.covered(start, end) >= duration_ns
        is_wait = is_for_others & (duration_ns >= UNEXPLAINED_NS) & (start >= program.changes_from_ns)
        # With few and short waits, batches lie ready, and their pace is unknown: all waits stay the thread's own time.
        if len(start) and _PACE_DIVISOR * duration_ns[is_wait].sum() >= end[-1] - start[0]:
            parts.append(pd.DataFrame({"thread": thread, "start": start[is_wait], "end": end[is_wait]}))
    return pd.concat(parts, ignore_index=True)
