"""The rules that give a gap its cause, in order: the first that holds decides.

Each is a function that finds, among gaps which no earlier rule decided, those in which it holds, and the event that
shows it. Its docstring is the rule. *The thread* is the one that launched the operation which ends the gap; work that
changes threads is followed: up to its last CUDA call the thread that fed the device before is asked as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from nsightkit.analysis.core.intervals import Coverage
from nsightkit.analysis.timeline.gaps.facts import EVIDENCE, QUEUED_NS, Bool, Group, Int
from nsightkit.analysis.timeline.gaps.threads import EAGER_NS, Track

__all__ = [
    "CAUSES",
    "RULES",
    "cpu_work",
    "decide",
    "input_pipeline",
    "launch_overhead",
    "memory_transfer",
    "profiler",
    "queued",
    "start_up",
    "synchronization",
    "unknown",
]

#: Positions of gaps, the kind of the evidence and its rows.
Found: TypeAlias = Iterator[tuple[Int, str, Int | None]]


def profiler(group: Group, left: Int) -> Found:
    """The profiler's own work covers at least half of the gap, on whatever thread of the process.

    What the driver loads, and a command buffer that is full, are not its work.
    """
    track = group.threads.profiler(group.process)
    if len(track):
        yes = _half(track.covered(group.dry[left], group.end[left]), group.end[left] - group.dry[left])
        yield left[yes], "overhead", _during(track, group.dry[left[yes]], group.end[left[yes]])


def start_up(group: Group, left: Int) -> Found:
    """Something that happens once covers at least half of the gap.

    That is: code is loaded, a compiler runs, a graph is captured, or a call that launches, allocates or frees takes ten
    times the median of its name and at least 1 ms.
    """
    for thread, mine in group.asked(left):
        tracks = [(kind, track) for kind, track in group.threads.once(thread) if len(track)]
        if tracks:
            yes = _half(_covered(tracks, group.dry[mine], group.end[mine]), group.end[mine] - group.dry[mine])
            yield from _largest(mine[yes], tracks, group.dry, group.end)


def queued(group: Group, left: Int) -> Found:
    """The launch had returned, and for half of the gap or more, and longer than 20 µs, the operation lay in the queue.

    Nothing recorded explains the wait: neither a copy nor a kernel on another device that ended just before.
    """
    if group.thread == -1:
        return
    lay = group.queued(left)
    left = left[(lay > QUEUED_NS) & _half(lay, group.end[left] - group.dry[left])]
    kind, _ = group.waited_for(left)
    left = left[kind == 0]
    yield left, "call", group.gaps.launch[left]


def input_pipeline(group: Group, left: Int) -> Found:
    """Half of the time from "the device ran dry" to "the launch began", or more, went to loading data.

    That is time in ranges and operators of data loading, by name, and in waits in the operating system other than
    sleeps, outside CUDA calls and outside ranges that are named for something else. A worker that merely waits to be
    handed work is not waiting for data.
    """
    for thread, mine in group.asked(left):
        waits = group.threads.waits(thread)
        tracks = [(kind, t) for kind, t in (*group.threads.data(thread), ("os_call", waits)) if len(t)]
        if not tracks or not len(mine):
            continue
        start, end = group.dry[mine], group.until[mine]
        covered = _covered(tracks, start, end)
        handed = group.handed[mine]
        if handed.any() and len(waits):
            # While work passes between threads, a wait for the other thread is not a wait for data: here one that
            # began before the hand-over, there one that outlasts the launch.
            at = waits.open_at((group.over if thread == group.thread else group.begun)[mine])
            low = np.maximum(waits.start[np.maximum(at, 0)], start)
            high = np.maximum(np.minimum(waits.end[np.maximum(at, 0)], end), low)
            named = [(kind, t) for kind, t in tracks if kind != "os_call"]
            excluded = high - low - (_covered(named, low, high) if named else 0)
            covered = covered - np.where(handed & (at >= 0), np.maximum(excluded, 0), 0)
        yes = (covered > 0) & _half(covered, end - start)
        yield from _named(group, mine[yes], tracks, group.dry, group.until)


def synchronization(group: Group, left: Int) -> Found:
    """The device ran dry while the thread waited for it, and without the wait half of the gap would have closed.

    A blocking call (of a stream, a device, an event; a blocking copy, ``.item()``) was running at that moment, and the
    thread, had it not waited since its launch before, would have launched in time. The CPU time until its next launch
    counts with the wait. A wait ahead of longer work of the CPU is not the cause of that work.
    """
    threads, gaps = group.threads, group.gaps
    for thread, mine in group.asked(left):
        blocking = threads.blocking(thread)
        if not len(blocking) or not len(mine):
            continue
        until = group.until if thread == group.thread else group.over
        # A nanosecond before the device ran dry: a call that returns at that very moment was waiting for it.
        at = blocking.open_at(group.dry[mine] - 1)
        late = (at >= 0) & (until[mine] > group.dry[mine])
        hit, at = mine[late], at[late]
        launches = threads.launches(thread)
        last = np.searchsorted(launches, blocking.start[at]) - 1
        since = np.full(len(at), blocking.start[0])
        since[last >= 0] = launches[last[last >= 0]]
        yes = _half(blocking.covered(since, until[hit]), group.end[hit] - group.dry[hit])
        # The upload that ends the gap is staging, not waiting.
        row = blocking.row[at]
        yes &= ~((row == gaps.launch[hit]) & threads.uploads()[row])
        yield hit[yes], "call", row[yes]


def memory_transfer(group: Group, left: Int) -> Found:
    """The thread sat in a copy call that staged pageable memory, for at least half of the gap.

    Or the operation waited for a copy on another device of its process, which ended just before it began.
    """
    if group.thread != -1:
        staging = group.threads.staging(group.thread)
        if len(staging):
            yes = _half(staging.covered(group.dry[left], group.end[left]), group.end[left] - group.dry[left])
            yield left[yes], "call", _during(staging, group.dry[left[yes]], group.end[left[yes]])
            left = left[~yes]
    # Launched in the first half of the gap, or not known when: the rest of it was not for the CPU to end.
    early = left
    if group.thread != -1:
        early = left[_half(group.end[left] - group.until[left], group.end[left] - group.dry[left])]
    kind, row = group.waited_for(early)
    copy = kind == EVIDENCE.index("copy")
    yield early[copy], "copy", row[copy]


def launch_overhead(group: Group, left: Int) -> Found:
    """Between two launches there were only launch calls of ordinary length, and framework operators.

    With nothing recorded in between, a silence of up to 0.5 ms counts as dispatch. So does what a device takes to start
    an operation that was launched before, up to 20 µs.
    """
    if group.thread == -1:
        return
    launch, until = group.gaps.launch, group.until
    before = until[left] <= group.dry[left]
    lay = group.queued(left)
    quick = left[before & (lay <= QUEUED_NS)]
    yield quick, "call", launch[quick]

    # The launch itself, which returned in the second half of the gap, or later.
    left = left[~before | (lay > QUEUED_NS)]
    done = np.minimum(group.done[left], group.end[left])
    itself = _half(done - until[left], group.end[left] - group.dry[left])
    yield left[itself], "call", launch[left[itself]]

    left = left[~itself & (until[left] > group.dry[left])]
    works = np.zeros(len(until), bool)
    for _, track, mine, start, end in _work(group, left):
        works[mine[_fills(group, mine, track, start, end)]] = True
    left = left[~works[left]]
    if not len(left):
        return
    threads = [thread for thread, _ in group.asked(left)]
    window = until[left] - group.dry[left]
    follows = group.begun[left] > min(int(group.threads.calls(t).start[0]) for t in threads)
    yes = (window <= EAGER_NS) & follows
    slow = np.flatnonzero(follows & ~yes)
    if len(slow):
        start, end = group.dry[left[slow]], until[left[slow]]
        ops, calls = group.threads.dispatch(group.thread), group.threads.calls(group.thread)
        yes[slow] = _half(ops.covered(start, end) + calls.covered(start, end), window[slow])
    yield left[yes], "call", launch[left[yes]]


def cpu_work(group: Group, left: Int) -> Found:
    """Other recorded activity of the CPU fills at least half of the time until the launch.

    It is named by its innermost range or operator. A sleep is work of the program's own choice.
    """
    left = left[group.until[left] > group.dry[left]]
    for kind, track, mine, start, end in _work(group, left):
        hit = mine[_fills(group, mine, track, start, end)]
        yield hit, kind, _innermost(track, start[hit], end[hit])
    for thread, mine in group.asked(left):
        tracks = [(kind, track) for kind, track in group.threads.activity(thread) if len(track)]
        window = group.until[mine] - group.dry[mine]
        found = [_half(track.covered(group.dry[mine], group.until[mine]), window) for _, track in tracks]
        if len(tracks) == 2 and found[0].any() and found[1].any():
            # Both: the one that began last lies in the other.
            middle = (group.dry[mine] + group.until[mine]) // 2
            begun = [
                np.where(at >= 0, t.start[np.maximum(at, 0)], -1) for _, t in tracks for at in [t.innermost_at(middle)]
            ]
            both = found[0] & found[1]
            found[0] &= ~both | (begun[0] >= begun[1])
            found[1] &= ~found[0]
        for (kind, track), yes in zip(tracks, found, strict=True):
            hit = mine[yes]
            yield hit, kind, _innermost(track, group.dry[hit], group.until[hit])


def unknown(group: Group, left: Int) -> Found:
    """None of these. What an operation waited for on another device is named where it is known."""
    lay = left if group.thread == -1 else left[group.queued(left) > QUEUED_NS]
    kind, row = group.waited_for(lay)
    kernel = (kind == EVIDENCE.index("kernel")) & (row >= 0)
    yield lay[kernel], "kernel", row[kernel]
    yield group.undecided(left), "none", None


RULES: tuple[Callable[[Group, Int], Found], ...] = (
    profiler,
    start_up,
    queued,
    input_pipeline,
    synchronization,
    memory_transfer,
    launch_overhead,
    cpu_work,
    unknown,
)
#: The causes are called what the rules are called.
CAUSES = tuple(rule.__name__.replace("_", "-") for rule in RULES)


def decide(group: Group) -> None:
    """Give each gap of a group its cause.

    Parameters
    ----------
    group : Group
    """
    for number, rule in enumerate(RULES):
        left = group.undecided()
        if not len(left):
            return
        for at, kind, rows in rule(group, left):
            group.decide(at, number, kind, rows)


# --- what the rules share ---


def _half(covered: Int, of: Int) -> Bool:
    half: Bool = 2 * covered >= of
    return half


def _covered(tracks: list[tuple[str, Track]], start: Int, end: Int) -> Int:
    """How much of each window the events of some tracks cover together."""
    if len(tracks) == 1:
        return tracks[0][1].covered(start, end)
    together = [np.concatenate([getattr(t, a) for _, t in tracks]) for a in ("start", "end")]
    return Coverage(*together).of(start, end)


def _during(track: Track, start: Int, end: Int) -> Int:
    """Row of the event that was open in the middle of each window, else of the last that began in it."""
    at = track.open_at((start + end) // 2)
    last = np.maximum(np.searchsorted(track.start, end, side="left") - 1, 0)
    return track.row[np.where(at >= 0, at, last)]


def _innermost(track: Track, start: Int, end: Int) -> Int:
    at = track.innermost_at((start + end) // 2)
    last = np.maximum(np.searchsorted(track.start, end, side="left") - 1, 0)
    return track.row[np.where(at >= 0, at, last)]


def _largest(at: Int, tracks: list[tuple[str, Track]], start: Int, end: Int) -> Found:
    """Gaps by the track that covers most of each."""
    if not len(at):
        return
    covered = np.stack([track.covered(start[at], end[at]) for _, track in tracks])
    best = covered.argmax(axis=0)
    for number, (kind, track) in enumerate(tracks):
        mine = at[best == number]
        if len(mine):
            yield mine, kind, _during(track, start[mine], end[mine])


def _named(group: Group, at: Int, tracks: list[tuple[str, Track]], start: Int, end: Int) -> Found:
    """Gaps by the first track that has an event in each."""
    for kind, track in tracks:
        at = group.undecided(at)
        overlaps = track.covered(start[at], end[at]) > 0
        yield at[overlaps], kind, _during(track, start[at[overlaps]], end[at[overlaps]])


def _work(group: Group, left: Int) -> Iterator[tuple[str, Track, Int, Int, Int]]:
    """What is work of a thread's own: kind, track, gaps to ask about, and each gap's part in which to look."""
    for thread, mine in group.asked(left):
        here = thread == group.thread
        start = np.where(group.handed, group.over, group.dry) if here else group.dry
        end = group.until if here else group.over
        threads = group.threads
        for kind, track in (
            *threads.lone(thread),
            ("call", threads.other_calls(thread)),
            ("range", threads.waits_in_work(thread)),
            ("os_call", threads.sleeps(thread)),
        ):
            if len(track):
                yield kind, track, group.undecided(mine), start, end


def _fills(group: Group, at: Int, track: Track, start: Int, end: Int) -> Bool:
    """Whether events cover half of the wait for a launch, the whole one, not only a thread's part of it."""
    window = np.maximum(np.clip(end[at], None, group.end[at]) - group.dry[at], 1)
    return _half(track.covered(start[at], end[at]), window) & (end[at] > start[at])
