"""Threads that wait for each other, and for data that other threads or processes prepare."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.model import HELD_NS, NEVER, Bool, Int, Union
from nsightkit.analysis.replay.operations import Program
from nsightkit.analysis.timeline.gaps.paint import Track
from nsightkit.analysis.timeline.gaps.threads import Threads
from nsightkit.trace.model import Trace

__all__ = ["named_times", "waits_for_data", "waits_for_threads"]

#: A thread that waits for another is silent for this many times the usual time between two of its calls.
_PAUSE = 3
#: Threads that alternate this often hand over to each other.
_TURNS = 3
#: Threads may have woken another about as often if their counts differ by less than this factor.
_ABOUT = 0.8
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


@dataclasses.dataclass(frozen=True, eq=False)
class _Silences:
    """Long silences of a thread, and when it was at work before and after them."""

    thread: int
    start: Int
    end: Int


def named_times(trace: Trace, threads: Int, chosen: Callable[[str], Any], *tables: str) -> dict[int, Union]:
    """When events whose name is chosen were open on each of some threads."""
    chosen_rows = []
    for table in tables:
        rows = trace.whole.table(table, ["start_ns", "end_ns", "thread", "name"])
        names = rows.pop("name")
        wanted = [name for name in names.cat.categories if chosen(str(name))]
        chosen_rows.append(rows[names.isin(wanted).to_numpy()])
    start, end, thread = (column.to_numpy() for _, column in pd.concat(chosen_rows).items())
    times: dict[int, Union] = {}
    for number in threads.tolist():
        of_thread = thread == number
        times[number] = intervals.merge(start[of_thread], end[of_thread])
    return times


def waits_for_threads(program: Program, facts: Threads) -> pd.DataFrame:
    """Silences of a thread that another one ended: it handed work over, or was done with what was handed to it.

    Parameters
    ----------
    program : Program
    facts : Threads

    Returns
    -------
    DataFrame
        ``thread, start_ns, end_ns, by``.
    """
    calls = _calls_that_count(program)
    paces = [float(np.median(np.diff(track.start))) for track in calls.values() if len(track) > 1]
    pause = max(_PAUSE * min(paces, default=0.0), HELD_NS)
    waits = {thread: intervals.Coverage(*facts.input_waits(thread)) for thread in calls}
    found = [pd.DataFrame(columns=["thread", "start_ns", "end_ns", "by"], dtype=np.int64)]
    for thread in calls:
        others = {other: calls[other] for other in calls if other != thread and other >> 24 == thread >> 24}
        if not others:
            continue
        silences = _silences(facts, thread, calls, others, pause)
        by = _woken_by(facts, silences, others, waits, pause, program.main)
        columns = {"thread": thread, "start_ns": silences.start, "end_ns": silences.end, "by": by}
        found.append(pd.DataFrame(columns)[by >= 0])
    pauses = pd.concat(found, ignore_index=True)
    # Once is chance.
    again = pauses.duplicated(["thread", "by"], keep=False)
    return pauses[again].reset_index(drop=True)


def _calls_that_count(program: Program) -> dict[int, Track]:
    """Launches and blocking calls of each thread that has any, by start; the steps' thread also ends its last step."""
    calls = program.calls
    counts = np.zeros(len(calls.start), bool)
    counts[program.launch[program.linked]] = counts[program.blocking] = True
    rows = np.flatnonzero(counts)
    rows = rows[np.argsort(calls.start[rows], kind="stable")]
    tracks = {}
    for thread in program.threads.tolist():
        own = rows[calls.thread[rows] == thread]
        start, end = calls.start[own], calls.end[own]
        if not len(own):
            continue
        if thread == program.main:
            # A thread that waits for others in the end has no call after that, but its last step ends.
            over = int(program.steps["cpu_end_ns"].iloc[-1])
            start, end, own = np.append(start, over), np.append(end, over), np.append(own, -1)
        tracks[thread] = Track(start, end, own)
    return tracks


def _silences(
    facts: Threads, thread: int, calls: dict[int, Track], others: dict[int, Track], pause: float
) -> _Silences:
    """Times longer than a pause without an event of the thread."""
    # Named work is not a silence; a range in which another thread is at work may be.
    begun, done = facts.own_work(thread)
    handed = _any([_fills(track, begun, done, pause) for track in others.values()])
    handed &= 2 * facts.sleeps(thread).covered(begun, done) < done - begun
    own = calls[thread]
    acted, rested = intervals.union(
        (own.start, np.maximum(own.end, own.start + 1)),
        (begun[~handed], done[~handed]),
        # A worker that waits to be handed work is not waiting for data.
        intervals.common(facts.input_waits(thread), facts.thread_waits(thread), outside=True),
        facts.when(thread, ["work"], ["call"]),
        facts.once(thread),
        facts.compiling(thread),
        facts.messages(thread),
        facts.profiler(thread),
    )
    start, end = np.append(NEVER, rested[:-1]), acted
    long = end - start > pause
    return _Silences(thread, start[long], end[long])


def _woken_by(
    facts: Threads,
    silences: _Silences,
    others: dict[int, Track],
    waits: dict[int, intervals.Coverage],
    pause: float,
    main: int,
) -> npt.NDArray[np.int64]:
    """The thread that ended each silence, -1 for none."""
    start, end = silences.start, silences.end
    fills = {t: _fills(track, start, end, pause) | _alternates(track, start, end) for t, track in others.items()}
    acts = {t: _acted(facts, t, start, end) for t in others}
    ordinary = _ordinary(silences, _any([*acts.values(), *fills.values()]))
    # A thread that is silent while another waits for data, until that has it, waits for the same.
    hits = {t: (fills[t] | acts[t]) & (~ordinary | _end_with(waits[t], start, end)) for t in others}
    # Of several candidates the most frequent; of about equally frequent ones the steps' thread.
    often = {t: int(hits[t].sum() + fills[t].sum()) for t in others}
    most = _ABOUT * max(often.values())
    by = np.full(len(end), -1, np.int64)
    for other in sorted(others, key=lambda t: (often[t] >= most, often[t] >= most and t == main, often[t])):
        by[hits[other]] = other
    return by


def _ordinary(silences: _Silences, woken: Bool) -> Bool:
    """Whether a thread also pauses for about as long without being woken."""
    lasting = silences.end - silences.start
    alone = np.sort(lasting[(silences.start > NEVER) & ~woken])
    low, high = np.searchsorted(alone, lasting / _ALIKE), np.searchsorted(alone, lasting * _ALIKE)
    return np.asarray(low < high)


def _any(masks: list[Bool]) -> Bool:
    return np.asarray(np.logical_or.reduce(masks))


def _fills(calls: Track, start: Int, end: Int, pause: float) -> Bool:
    """Whether each window holds all calls between two pauses, and they take up half of it.

    A thread that works in short bursts pauses inside the window as it does around it.
    """
    low, high = np.searchsorted(calls.start, start), np.searchsorted(calls.start, end)
    first, last = np.minimum(low, len(calls) - 1), np.maximum(high - 1, 0)
    before, after = np.append(NEVER, calls.end)[low], np.append(calls.start, -NEVER)[high]
    gaps = np.append(0, calls.start[1:] - calls.end[:-1])
    silent_ns, pauses = np.cumsum(np.where(gaps > pause, gaps, 0)), np.cumsum(gaps > pause)
    inside_ns = silent_ns[last] - silent_ns[first]
    inside: Int = pauses[last] - pauses[first]
    around_ns = np.minimum(calls.start[first] - before, after - calls.end[last])
    alone = (around_ns > pause) & (around_ns > _LONGER * inside_ns / np.maximum(inside, 1))
    active_ns = calls.end[last] - calls.start[first] - inside_ns
    return np.asarray((high > low) & alone & (2 * active_ns >= end - start))


def _alternates(calls: Track, start: Int, end: Int) -> Bool:
    """Whether each window holds calls, if it is windows that hold all calls: two threads that take turns."""
    low, high = np.searchsorted(calls.start, start), np.searchsorted(calls.start, end)
    turns = high > low
    outside = low[1:] > high[:-1]
    return np.asarray(turns & (not outside.any()) & (int(turns.sum()) >= _TURNS))


def _acted(facts: Threads, thread: int, start: Int, end: Int) -> Bool:
    """Whether anything that was recorded of a thread began or ended in each window, shortly before that ended.

    Before its first call a thread has nothing to do: any thread active before that may have begun its work.
    """
    latest = np.full(len(end), NEVER)
    for table in ("calls", "ops", "ranges", "os_calls"):
        track = facts.events(table, thread)
        edges = [track.start]
        if table != "ops":
            edges.append(np.sort(track.end))
        for edge in edges:
            latest = np.maximum(latest, np.append(NEVER, edge)[np.searchsorted(edge, end)])
    return np.asarray((latest > start) & ((start == NEVER) | (end - latest <= _WAKE_NS)))


def _end_with(waits: intervals.Coverage, start: Int, end: Int) -> Bool:
    """Whether waits take up most of each window, and the last of them ends shortly before it does."""
    at = np.searchsorted(waits.end, end, side="right") - 1
    got = np.append(waits.end, NEVER)[at]
    return np.asarray((got > start) & (end - got <= _WAKE_NS) & (2 * waits.of(start, end) >= end - start))


def waits_for_data(program: Program, facts: Threads, pauses: pd.DataFrame) -> pd.DataFrame:
    """Waits for data that others prepare at their pace: a batch arrives when it is ready.

    An OS call that waits for another process, or the name of PyTorch's loader with workers, shows it. Else a wait is
    the thread's own time: it begins to load when it asks.

    Parameters
    ----------
    program : Program
    facts : Threads
    pauses : DataFrame
        As :func:`waits_for_threads` gives them.

    Returns
    -------
    DataFrame
        ``thread, start_ns, end_ns``.
    """
    for_others = named_times(program.trace, program.threads, _FOR_OTHERS.search, "os_calls")
    workers = named_times(program.trace, program.threads, _WORKERS.search, "ranges", "ops")
    found = [pd.DataFrame(columns=["thread", "start_ns", "end_ns"], dtype=np.int64)]
    for thread in program.threads.tolist():
        start, end = facts.input_waits(thread)
        lasting = end - start
        waits = intervals.Coverage(*intervals.union(for_others[thread], workers[thread]))
        own = pauses[pauses["thread"] == thread]
        handed = intervals.Coverage(own["start_ns"], own["end_ns"])
        long = (2 * waits.of(start, end) >= lasting) & (2 * handed.of(start, end) < lasting)
        long &= (lasting >= HELD_NS) & (start >= program.begin_ns)
        # With few and short waits, batches lie ready, and their pace is unknown.
        if len(start) and _LIMITS * lasting[long].sum() >= end[-1] - start[0]:
            found.append(pd.DataFrame({"thread": thread, "start_ns": start[long], "end_ns": end[long]}))
    return pd.concat(found, ignore_index=True)
