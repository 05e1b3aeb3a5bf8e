"""Threads that wait for each other, and for data that other threads or processes prepare."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.model import HELD_NS, NEVER, Bool, Int
from nsightkit.analysis.replay.operations import Program
from nsightkit.analysis.timeline.gaps.paint import Track, together
from nsightkit.analysis.timeline.gaps.threads import Threads
from nsightkit.trace.model import process_of

__all__ = ["waits_for_data", "waits_for_threads"]

#: A thread that waits for another is silent for this many times the usual time between two of its calls.
_PAUSE = 3
#: Pauses around what was handed over are longer than those in it, on average by this factor.
_LONGER = 1.5
#: Pauses whose lengths differ by less than this factor are alike.
_ALIKE = 1.15
#: A thread that is woken goes on at most this long after what woke it.
_WAKE_NS = 500_000
#: OS calls that wait for another thread or process; and the ranges in which PyTorch waits for its loader's workers.
_FOR_OTHERS = re.compile(r"poll|select|futex|sem_|pthread_cond|epoll|recv|accept|sigwait|^wait")
_WORKERS = re.compile(r"_MultiProcessing")
#: Loader workers set the pace if the waits for them take at least one part in so many of the time.
_LIMITS = 10


def waits_for_threads(program: Program, facts: Threads) -> pd.DataFrame:
    """Silences of a thread that another one ended: it handed work over, or was done with what was handed to it.

    Parameters
    ----------
    program : Program
    facts : Threads

    Returns
    -------
    DataFrame
        ``thread, start, end, asked``: times, and the other thread.
    """
    calls = _calls_that_count(program)
    paces = [_pace(track) for track in calls.values() if len(track) > 1]
    pause = max(_PAUSE * min(paces, default=0.0), HELD_NS)
    parts = [pd.DataFrame(columns=["thread", "start", "end", "asked"], dtype=np.int64)]
    for thread, own in calls.items():
        others = {other: calls[other] for other in calls if other != thread and process_of(other) == process_of(thread)}
        if others:
            start, end = _silences(facts, thread, own, others, pause)
            by = _woken_by(facts, start, end, others, pause, program.main)
            silences = pd.DataFrame({"thread": thread, "start": start, "end": end, "asked": by})
            parts.append(silences[by >= 0])
    pauses = pd.concat(parts, ignore_index=True)
    if len(program.steps) > 1:
        # In several steps, once is chance.
        pauses = pauses[pauses.duplicated(["thread", "asked"], keep=False)]
    return pauses


def _calls_that_count(program: Program) -> dict[int, Track]:
    """Launches and blocking calls of each thread that has any, by start; the steps' thread also ends its last step."""
    calls = program.calls
    rows = np.union1d(program.launch[program.linked], program.blocking)
    table = pd.DataFrame({"thread": calls.thread[rows], "start": calls.start[rows], "end": calls.end[rows]})
    if (table["thread"] == program.main).any():
        # A thread that waits for others in the end has no call after that, but its last step ends.
        over = program.steps["cpu_end_ns"].iloc[-1]
        table.loc[len(table)] = [program.main, over, over]
    table = table.sort_values("start", kind="stable")
    tracks = {}
    for thread in np.unique(table["thread"]).tolist():
        own = table[table["thread"] == thread]
        tracks[thread] = Track(own["start"].to_numpy(), own["end"].to_numpy(), own.index.to_numpy())
    return tracks


def _pace(calls: Track) -> float:
    """The usual time from one call to the next."""
    if len(calls) > 1:
        return float(np.median(np.diff(calls.start)))
    return 0.0


def _silences(facts: Threads, thread: int, own: Track, others: dict[int, Track], pause: float) -> tuple[Int, Int]:
    """Times longer than a pause without an event of the thread."""
    # Named work is not a silence; a range in which another thread is at work may be.
    begun, done = facts.when(thread, ["work"], ["range", "op", "os_call"])
    handed = np.zeros(len(begun), bool)
    for track in others.values():
        handed |= _fills(track, begun, done, pause)
    handed &= 2 * facts.sleeps(thread).covered(begun, done) < done - begun
    acted, rested = intervals.union(
        (own.start, np.maximum(own.end, own.start + 1)),
        (begun[~handed], done[~handed]),
        facts.when(thread, ["work"], ["call"]),
        facts.when(thread, ["data", "once", "compile", "messages", "profiler"]),
    )
    start = np.append(NEVER, rested[:-1])
    long = acted - start > pause
    return start[long], acted[long]


def _woken_by(facts: Threads, start: Int, end: Int, others: dict[int, Track], pause: float, main: int) -> Int:
    """The thread that ended each silence, -1 for none; of several the steps' thread, or the most frequent."""
    hits = {}
    often = {}
    for other, track in others.items():
        fills = _fills(track, start, end, pause)
        hits[other] = fills | _acted(facts, other, start, end)
        often[other] = other == main, hits[other].sum() + fills.sum()
    # A thread also pauses without being woken: silences that last about as long may be its own.
    lasting = end - start
    is_woken = np.any(list(hits.values()), axis=0)
    alone = np.sort(lasting[(start > NEVER) & ~is_woken])
    ordinary = np.searchsorted(alone, lasting / _ALIKE) < np.searchsorted(alone, lasting * _ALIKE)
    by = np.full(len(end), -1, np.int64)
    for other in sorted(often, key=often.__getitem__):
        by[hits[other] & ~ordinary] = other
    return by


def _fills(calls: Track, start: Int, end: Int, pause: float) -> Bool:
    """Whether each window holds all calls between two pauses, and they take up half of it.

    A thread that works in short bursts pauses inside the window as it does around it, and one that works slowly makes
    no pause between two calls at its own pace.
    """
    pause = max(pause, _PAUSE * _pace(calls))
    # Silences ahead of each call, and behind the last one.
    ahead_ns = np.append(calls.start, -NEVER) - np.append(NEVER, calls.end)
    is_pause = ahead_ns > pause
    pauses = np.cumsum(is_pause)
    paused_ns = np.cumsum(ahead_ns * is_pause)
    first = np.searchsorted(calls.start, start)
    beyond = np.searchsorted(calls.start, end)
    last = beyond - 1  # where there is no call in a window, this and the first are of no meaning
    inside_ns = paused_ns[last] - paused_ns[first]
    usual_ns = inside_ns / np.maximum(pauses[last] - pauses[first], 1)
    around_ns = np.minimum(ahead_ns[first], ahead_ns[beyond])
    alone = (around_ns > pause) & (around_ns > _LONGER * usual_ns)
    active_ns = calls.end[last] - calls.start[np.minimum(first, last)] - inside_ns
    return np.asarray((beyond > first) & alone & (2 * active_ns >= end - start))


def _acted(facts: Threads, thread: int, start: Int, end: Int) -> Bool:
    """Whether anything that was recorded of a thread began or ended in each window, shortly before that ended.

    Before its first call a thread has nothing to do: any thread active before that may have begun its work.
    """
    edges: list[Int] = [np.full(1, NEVER)]
    for table in ("calls", "ops", "ranges", "os_calls"):
        track = facts.events(table, thread)
        edges += [track.start, track.end]
    times = np.sort(np.concatenate(edges))
    latest = times[np.searchsorted(times, end) - 1]
    return np.asarray((latest > start) & ((start == NEVER) | (end - latest <= _WAKE_NS)))


def waits_for_data(program: Program, facts: Threads) -> pd.DataFrame:
    """Waits for data that others prepare at their pace: a batch arrives when it is ready.

    An OS call that waits for another process, or the name of PyTorch's loader with workers, shows it. Else a wait is
    the thread's own time: it begins to load when it asks.

    Parameters
    ----------
    program : Program
    facts : Threads

    Returns
    -------
    DataFrame
        ``thread, start, end``.
    """
    parts = [pd.DataFrame(columns=["thread", "start", "end"], dtype=np.int64)]
    for thread in program.threads.tolist():
        start, end = facts.when(thread, ["data"])
        lasting = end - start
        shown = together(
            facts.named("os_calls", thread, _FOR_OTHERS),
            facts.named("ranges", thread, _WORKERS),
            facts.named("ops", thread, _WORKERS),
        )
        long = (2 * shown.covered(start, end) >= lasting) & (lasting >= HELD_NS) & (start >= program.begin_ns)
        # With few and short waits, batches lie ready, and their pace is unknown.
        if len(start) and _LIMITS * lasting[long].sum() >= end[-1] - start[0]:
            parts.append(pd.DataFrame({"thread": thread, "start": start[long], "end": end[long]}))
    return pd.concat(parts, ignore_index=True)
