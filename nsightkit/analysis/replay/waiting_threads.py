"""Threads that wait for each other, and for data that somebody else prepares."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.model import HELD_NS, NEVER, Bool, Int
from nsightkit.analysis.timeline.gaps.threads import Track

if TYPE_CHECKING:
    from nsightkit.analysis.replay.schedule import Schedule

__all__ = ["waits_for_data", "waits_for_threads"]

#: A thread that waits for another is silent for this many times the usual time between two of its calls.
_PAUSE = 3
#: Threads that are at work in turns, this often, hand over to each other.
_TURNS = 3
#: Threads may have woken another about as often if their counts differ by less than this factor.
_ABOUT = 0.8
#: Pauses around what was handed over are longer than those in it, on average by this factor.
_LONGER = 1.5
#: Pauses whose lengths differ by less than this factor are alike.
_ALIKE = 1.15
#: Who is woken goes on at most this long after what woke it.
_WAKE_NS = 500_000
#: OS calls that wait for another thread or process; and the ranges in which PyTorch waits for its loader's workers.
_FOR_OTHERS = re.compile(r"poll|select|futex|sem_|pthread_cond|epoll|recv|accept|sigwait|^wait")
_WORKERS = re.compile(r"_MultiProcessing")
#: Who prepares batches sets the pace if the waits for them take at least one part in so many of the time.
_LIMITS = 10


def waits_for_threads(of: Schedule) -> pd.DataFrame:
    """Silences of a thread that another one ended: it handed work over, or was done with what was handed to it.

    Parameters
    ----------
    of : Schedule

    Returns
    -------
    DataFrame
        ``thread, start_ns, end_ns, by``.
    """
    facts = of.facts
    kept = np.zeros(len(of.call_start), bool)
    kept[of.launch[of.linked]] = kept[of.blocking] = True
    rows = np.flatnonzero(kept)
    rows = rows[np.argsort(of.call_start[rows], kind="stable")]
    by_thread = {thread: rows[of.call_thread[rows] == thread] for thread in of.threads.tolist()}
    calls = {t: Track(of.call_start[mine], of.call_end[mine], mine) for t, mine in by_thread.items() if len(mine)}
    if last := calls.get(of.main):
        # A thread that waits for others in the end has no call after that, but its last step ends.
        over = int(of.steps["cpu_end_ns"].iloc[-1])
        last.start, last.end = np.append(last.start, over), np.append(last.end, over)
    paces = [float(np.median(np.diff(c.start))) for c in calls.values() if len(c.start) > 1]
    pause = max(_PAUSE * min(paces, default=0.0), HELD_NS)
    waits = {t: intervals.Coverage(*facts.input_waits(t)) for t in calls}
    found = [pd.DataFrame(columns=["thread", "start_ns", "end_ns", "by"], dtype=np.int64)]
    for one, mine in calls.items():
        others = {t: c for t, c in calls.items() if t != one and t >> 24 == one >> 24}
        if not others:
            continue
        # What is named for something else is not a silence; a range in which another thread is at work may be.
        begun, done = facts.own_work(one)
        handed = np.logical_or.reduce([_fills(theirs, begun, done, pause) for theirs in others.values()])
        handed &= 2 * facts.sleeps(one).covered(begun, done) < done - begun
        acted, rested = intervals.union(
            (mine.start, np.maximum(mine.end, mine.start + 1)),
            (begun[~handed], done[~handed]),
            # A worker that waits to be handed work is not waiting for data.
            intervals.common((waits[one].start, waits[one].end), facts.thread_waits(one), outside=True),
            facts.one_offs(one),
            facts.profiler_time(one),
        )
        start, end = np.append(NEVER, rested[:-1]), acted
        long = end - start > pause
        start, end = start[long], end[long]
        # It pauses for about as long where nobody wakes it: such pauses are its own.
        fills = {t: _fills(c, start, end, pause) | _alternates(c, start, end) for t, c in others.items()}
        acts = {t: _woke(of, t, start, end) for t in others}
        woken = np.logical_or.reduce([*acts.values(), *fills.values()])
        alone = np.sort((end - start)[(start > NEVER) & ~woken])
        own = np.searchsorted(alone, (end - start) / _ALIKE) < np.searchsorted(alone, (end - start) * _ALIKE)
        # A thread that is silent while another waits for data, until that has it, waits for the same.
        hits = {t: (fills[t] | acts[t]) & (~own | _end_with(waits[t], start, end)) for t in others}
        # Where several may have, the one that may have the most often; of about as many, that of the steps.
        often = {t: int(hits[t].sum() + fills[t].sum()) for t in others}
        most = _ABOUT * max(often.values())
        by = np.full(len(end), -1, np.int64)
        for other in sorted(others, key=lambda t: (often[t] >= most, often[t] >= most and t == of.main, often[t])):
            by[hits[other]] = other
        found.append(pd.DataFrame({"thread": one, "start_ns": start, "end_ns": end, "by": by})[by >= 0])
    return pd.concat(found, ignore_index=True)


def _fills(calls: Track, start: Int, end: Int, pause: float) -> Bool:
    """Whether all calls between two pauses lie in each window, and take up half of it.

    A thread that works in short bursts of its own pauses inside the window as it does around it.
    """
    low, high = np.searchsorted(calls.start, start), np.searchsorted(calls.start, end)
    first, last = np.minimum(low, len(calls) - 1), np.maximum(high - 1, 0)
    before, after = np.append(NEVER, calls.end)[low], np.append(calls.start, -NEVER)[high]
    gaps = np.append(0, calls.start[1:] - calls.end[:-1])
    silent, times = (np.cumsum(np.where(gaps > pause, each, 0)) for each in (gaps, 1))
    inside, pauses = silent[last] - silent[first], times[last] - times[first]
    around = np.minimum(calls.start[first] - before, after - calls.end[last])
    alone = (around > pause) & (around > _LONGER * inside / np.maximum(pauses, 1))
    active = calls.end[last] - calls.start[first] - inside
    return np.asarray((high > low) & alone & (2 * active >= end - start))


def _alternates(calls: Track, start: Int, end: Int) -> Bool:
    """Whether each window holds calls, if it is windows that hold all calls: two threads that take turns."""
    low, high = np.searchsorted(calls.start, start), np.searchsorted(calls.start, end)
    turns = high > low
    outside = low[1:] > high[:-1]
    return np.asarray(turns & (not outside.any()) & (int(turns.sum()) >= _TURNS))


def _woke(of: Schedule, thread: int, start: Int, end: Int) -> Bool:
    """Whether anything that was recorded of a thread began or ended in each window, shortly before that ended.

    Before its first call a thread has nothing to do: whoever was at work before that began its work.
    """
    facts, latest = of.facts, np.full(len(end), NEVER)
    for table in ("calls", "ops", "ranges", "os_calls"):
        track = facts.events(table, thread)
        for edges in (track.start, np.sort(track.end))[: 1 if table == "ops" else 2]:
            latest = np.maximum(latest, np.append(NEVER, edges)[np.searchsorted(edges, end)])
    return np.asarray((latest > start) & ((start == NEVER) | (end - latest <= _WAKE_NS)))


def _end_with(waits: intervals.Coverage, start: Int, end: Int) -> Bool:
    """Whether waits take up most of each window, and the last of them ends shortly before it does."""
    at = np.searchsorted(waits.end, end, side="right") - 1
    got = np.append(waits.end, NEVER)[at]
    return np.asarray((got > start) & (end - got <= _WAKE_NS) & (2 * waits.of(start, end) >= end - start))


def waits_for_data(of: Schedule) -> pd.DataFrame:
    """Waits for data that somebody else prepares at a pace of its own: a batch is there when it is there.

    An OS call that waits for another process, or the name of PyTorch's loader with workers, says so. Else a wait is
    the thread's own time: it begins to load when it asks.

    Parameters
    ----------
    of : Schedule

    Returns
    -------
    DataFrame
        ``thread, start_ns, end_ns``.
    """
    for_others, workers = of.when(_FOR_OTHERS.search, "os_calls"), of.when(_WORKERS.search, "ranges", "ops")
    found = [pd.DataFrame(columns=["thread", "start_ns", "end_ns"], dtype=np.int64)]
    for thread in of.threads.tolist():
        start, end = of.facts.input_waits(thread)
        waits = intervals.Coverage(*intervals.union(for_others[thread], workers[thread]))
        long = (2 * waits.of(start, end) >= end - start) & (end - start >= HELD_NS) & (start >= of.begin_ns)
        mine = of.pauses[of.pauses["thread"] == thread]
        handed = intervals.Coverage(mine["start_ns"], mine["end_ns"])
        long &= 2 * handed.of(start, end) < end - start
        # Where waits are few and short, batches lie ready: nothing says how soon they could be.
        if len(start) and _LIMITS * (end[long] - start[long]).sum() >= end[-1] - start[0]:
            found.append(pd.DataFrame({"thread": thread, "start_ns": start[long], "end_ns": end[long]}))
    return pd.concat(found, ignore_index=True)
