"""The rules that give a gap its cause, in order: the first that holds decides.

Each is a function that finds, among gaps which no earlier rule decided, those in which it holds, and the event that
shows it. Its docstring is the rule. *The thread* is the one that launched the operation which ends the gap; work that
changes threads is followed: up to its last CUDA call the thread that fed the device before is asked as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from nsightkit.analysis.timeline.gaps.facts import EVIDENCE, TABLE_OF, Bool, Group, Int, groups
from nsightkit.analysis.timeline.gaps.threads import EAGER_NS, Threads, Track, together
from nsightkit.analysis.timeline.steps import QUEUED_NS
from nsightkit.trace.model import Trace

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
Found: TypeAlias = Iterator[tuple[Int, str, Int | int]]


def profiler(group: Group, left: Int) -> Found:
    """The profiler's own work covers at least half of the gap, on whatever thread of the process.

    What the driver loads, and a command buffer that is full, are not its work.
    """
    track = group.threads.profiler(group.process)
    hit = left[_filled(track, group.dry[left], group.end[left])]
    yield hit, "overhead", _during(track, group.dry[hit], group.end[hit])


def start_up(group: Group, left: Int) -> Found:
    """Something that happens once covers at least half of the gap.

    That is: code is loaded, a compiler runs or is waited for, a graph is captured, a communicator is set up, or a call
    that launches, allocates, frees, registers memory or asks for a device's properties takes ten times the median of
    its name and at least 1 ms. Launches of a kernel that was not launched before do not count for that median. What
    takes that long again and again, throughout the run, is not done once.
    """
    for thread, asked in group.asked(left):
        tracks = group.threads.once(thread)
        mine = asked[_filled(together(*(t for _, t in tracks)), group.dry[asked], group.end[asked])]
        most = np.argmax([track.covered(group.dry[mine], group.end[mine]) for _, track in tracks], axis=0)
        for number, (kind, track) in enumerate(tracks):
            hit = mine[most == number]
            yield hit, kind, _during(track, group.dry[hit], group.end[hit])


def queued(group: Group, left: Int) -> Found:
    """The launch had returned, and for half of the gap or more, and longer than 20 µs, the operation lay in the queue.

    Nothing recorded explains the wait: neither a copy nor a kernel on another device that ended just before.
    """
    lay = group.queued(left)
    left = left[(lay > QUEUED_NS) & _half(lay, group.end[left] - group.dry[left])]
    left = left[group.waited_for(left)[0] == 0]
    yield left, "call", group.launch[left]


def input_pipeline(group: Group, left: Int) -> Found:
    """Half of the time from "the device ran dry" to "the launch began", or more, went to loading data.

    That is time in ranges and operators of data loading, by name, and in waits in the operating system other than
    sleeps, outside CUDA calls and outside ranges that are named for something else. A worker that merely waits to be
    handed work is not waiting for data.
    """
    for thread, asked in group.asked(left):
        named, (waits, _) = group.threads.data(thread), group.threads.waits(thread)
        start, end = group.dry[asked], group.until[asked]
        loads = together(*(track for _, track in named))
        covered = together(loads, waits).covered(start, end)
        # While work passes between threads, a wait for the other thread is not a wait for data: here one that began
        # before the hand-over, there one that outlasts the launch.
        handed = np.flatnonzero(group.handed[asked])
        at = waits.open_at((group.over if thread == group.thread else group.begun)[asked[handed]])
        handed, at = handed[at >= 0], at[at >= 0]
        low = np.maximum(waits.start[at], start[handed])
        high = np.maximum(np.minimum(waits.end[at], end[handed]), low)
        covered[handed] -= high - low - loads.covered(low, high)
        mine = asked[(covered > 0) & _half(covered, end - start)]
        for kind, track in (*named, ("os_call", waits)):
            rest = group.undecided(mine)
            hit = rest[track.covered(group.dry[rest], group.until[rest]) > 0]
            yield hit, kind, _during(track, group.dry[hit], group.until[hit])


def synchronization(group: Group, left: Int) -> Found:
    """The device ran dry while the thread waited for it, and without the wait half of the gap would have closed.

    A blocking call (of a stream, a device, an event; a blocking copy, ``.item()``) was running at that moment, and the
    thread, had it not waited since its launch before, would have launched in time. The CPU time until its next launch
    counts with the wait. A wait ahead of longer work of the CPU is not the cause of that work, nor of what follows when
    memory is freed, which has to wait for an idle device whatever went before: what a call that frees does once the
    device is idle is its own work.
    """
    for thread, mine in group.asked(left):
        blocking, gave = group.threads.blocking(thread), group.threads.gave_work(thread)
        if not len(blocking):
            continue
        until = group.until if thread == group.thread else group.over
        # A nanosecond before the device ran dry: a call that returns at that very moment was waiting for it.
        at = blocking.open_at(group.dry[mine] - 1)
        late = (at >= 0) & (until[mine] > group.dry[mine])
        hit, at = mine[late], at[late]
        last = np.searchsorted(gave, blocking.start[at]) - 1
        since = np.full(len(at), blocking.start[0])
        since[last >= 0] = gave[last[last >= 0]]
        gap = group.end[hit] - group.dry[hit]
        yes = _half(blocking.covered(since, until[hit]), gap)
        frees = group.threads.frees(thread)
        freed = np.append(frees.start, np.iinfo(np.int64).max)[np.searchsorted(frees.end, group.dry[hit], side="right")]
        yes &= _half(np.minimum(freed, until[hit]) - group.dry[hit], gap) | (freed >= until[hit])
        # The upload that ends the gap is staging, not waiting.
        row = blocking.row[at]
        yes &= ~((row == group.launch[hit]) & group.threads.pageable("HtoD")[row])
        yield hit[yes], "call", row[yes]


def memory_transfer(group: Group, left: Int) -> Found:
    """The thread sat in a copy call that staged pageable memory, for at least half of the gap.

    Or the operation waited for a copy on another device of its process, which ended just before it began.
    """
    staging = group.threads.staging(group.thread)
    hit = left[_filled(staging, group.dry[left], group.end[left])]
    yield hit, "call", _during(staging, group.dry[hit], group.end[hit])
    early = left = group.undecided(left)
    if group.thread != -1:
        # Launched in the first half of the gap: the rest of it was not for the CPU to end.
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
    launch, until = group.launch, group.until
    quick = left[(until[left] <= group.dry[left]) & (group.queued(left) <= QUEUED_NS)]
    yield quick, "call", launch[quick]

    # The launch itself, which returned in the second half of the gap, or later.
    left = group.undecided(left)
    done = np.minimum(group.done[left], group.end[left])
    itself = left[_half(done - until[left], group.end[left] - group.dry[left])]
    yield itself, "call", launch[itself]

    left = group.undecided(left)
    left = left[until[left] > group.dry[left]]
    for _, _, hit, _, _ in _work(group, left):
        left = np.setdiff1d(left, hit, assume_unique=True)
    begins = min(int(group.threads.calls(thread).start[0]) for thread, _ in group.asked(left))
    left = left[group.begun[left] > begins]
    window = until[left] - group.dry[left]
    yes = window <= EAGER_NS
    slow = np.flatnonzero(~yes)
    if len(slow):
        start, end = group.dry[left[slow]], until[left[slow]]
        ops, calls = group.threads.dispatch(group.thread), group.threads.calls(group.thread)
        yes[slow] = _half(together(ops, calls).covered(start, end), window[slow])
    yield left[yes], "call", launch[left[yes]]


def cpu_work(group: Group, left: Int) -> Found:
    """Other recorded activity of the CPU fills at least half of the time until the launch.

    It is named by its innermost range or operator. A sleep is work of the program's own choice. Where nothing else was
    recorded, samples of the running thread count if they cover half of the gap. The function that most of them were in
    names it.
    """
    left = left[group.until[left] > group.dry[left]]
    for kind, track, hit, start, end in _work(group, left):
        yield hit, kind, _during(track, start[hit], end[hit], innermost=True)
    for thread, mine in group.asked(left):
        activity = [(kind, group.threads.events(TABLE_OF[kind], thread)) for kind in ("op", "range")]
        start, end = group.dry[mine], group.until[mine]
        by_op, by_range = (_filled(track, start, end) for _, track in activity)
        # Both: the one that began last lies in the other.
        both = np.flatnonzero(by_op & by_range)
        inner = [track.innermost_at((start[both] + end[both]) // 2) for _, track in activity]
        begun = [np.where(at >= 0, track.start[at], -1) for (_, track), at in zip(activity, inner, strict=True)]
        by_op[both] = begun[0] >= begun[1]
        for (kind, track), yes in zip(activity, (by_op, by_range & ~by_op), strict=True):
            hit = mine[yes]
            yield hit, kind, _during(track, start[yes], end[yes], innermost=True)
    for thread, mine in group.asked(left):
        if not len(mine):
            continue
        track = group.threads.samples(thread)
        hit = mine[_half(track.covered(group.dry[mine], group.until[mine]), group.end[mine] - group.dry[mine])]
        if len(hit):
            at, row = _commonest(group.threads.trace, track, group.dry[hit], group.until[hit])
            yield hit[at], "sample", row


def unknown(group: Group, left: Int) -> Found:
    """None of the above. What an operation waited for on another device is named where it is known."""
    lay = left if group.thread == -1 else left[group.queued(left) > QUEUED_NS]
    kind, row = group.waited_for(lay)
    kernel = (kind == EVIDENCE.index("kernel")) & (row >= 0)
    yield lay[kernel], "kernel", row[kernel]
    yield group.undecided(left), "none", -1


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


def decide(threads: Threads, gaps: Mapping[str, Int], **asked: Any) -> dict[str, Int]:
    """Give each gap its cause.

    Parameters
    ----------
    threads : Threads
    gaps : mapping of str to ndarray of int
    **asked
        As for :func:`nsightkit.analysis.timeline.gaps.facts.groups`.

    Returns
    -------
    dict of str to ndarray of int
        ``cause`` as an index into `CAUSES`, and its evidence: ``source``, an index into `EVIDENCE`, and ``source_row``.
    """
    n = len(gaps["launch"])
    found: dict[str, Int] = {
        "cause": np.empty(n, np.int8),
        "source": np.empty(n, np.int8),
        "source_row": np.empty(n, np.int32),
    }
    for at, group in groups(threads, gaps, **asked):
        for number, rule in enumerate(RULES):
            if len(left := group.undecided()):
                for mine, kind, rows in rule(group, left):
                    group.decide(mine, number, kind, rows)
        for column, values in found.items():
            values[at] = getattr(group, column)
        threads.forget()
    return found


# --- what the rules share ---


def _half(covered: Int, of: Int) -> Bool:
    return np.asarray(2 * covered >= of)


def _filled(track: Track, start: Int, end: Int) -> Bool:
    """Whether events cover half of each window."""
    return _half(track.covered(start, end), end - start)


def _during(track: Track, start: Int, end: Int, innermost: bool = False) -> Int:
    """Row of the event that was open in the middle of each window, else of the last that began in it.

    Of several the longest, or the innermost that covers half of the window: any that does is open in its middle.
    """
    at = (track.innermost_at if innermost else track.open_at)((start + end) // 2)
    inner, climbing = at.copy(), np.flatnonzero(at >= 0) if innermost else np.empty(0, np.intp)
    while len(climbing):
        here, low, high = inner[climbing], start[climbing], end[climbing]
        part = np.minimum(track.end[here], high) - np.maximum(track.start[here], low)
        climbing = climbing[2 * part < high - low]
        inner[climbing] = track.parent[inner[climbing]]
        climbing = climbing[inner[climbing] >= 0]
    at = np.where(inner >= 0, inner, at)
    last = np.maximum(np.searchsorted(track.start, end) - 1, 0)
    return track.row[np.where(at >= 0, at, last)]


def _commonest(trace: Trace, track: Track, start: Int, end: Int) -> tuple[Int, Int]:
    """Windows in which samples with a name begin, and for each the row of one with the commonest name."""
    low, high = np.searchsorted(track.start, start), np.searchsorted(track.start, end)
    window = np.repeat(np.arange(len(start)), high - low)
    row = track.row[np.arange(len(window)) + np.repeat(high - np.cumsum(high - low), high - low)]
    name = trace.table("samples", ["name"])["name"].iloc[row]
    begun = pd.DataFrame({"window": window, "name": name.cat.codes.to_numpy(), "row": row})[(name != "").to_numpy()]
    each = begun.groupby(["window", "name"])["row"].agg(["size", "first"]).reset_index("window")
    most = each.sort_values("size", kind="stable").drop_duplicates("window", keep="last")
    return most["window"].to_numpy(), most["first"].to_numpy()


def _work(group: Group, left: Int) -> Iterator[tuple[str, Track, Int, Int, Int]]:
    """Work of a thread's own that fills the wait for a launch.

    Its kind and track, the gaps that it fills, and the part of each gap in which the thread was asked.
    """
    threads = group.threads
    for thread, mine in group.asked(left):
        here = thread == group.thread
        start = np.where(group.handed, group.over, group.dry) if here else group.dry
        end = group.until if here else group.over
        for kind, track in (
            *threads.lone(thread),
            ("call", threads.other_calls(thread)),
            ("range", threads.waits(thread)[1]),
            ("os_call", threads.sleeps(thread)),
        ):
            if len(track):
                at = group.undecided(mine)
                # Half of the whole wait, not only of a thread's part of it.
                wait = np.maximum(np.minimum(end[at], group.end[at]) - group.dry[at], 1)
                fills = _half(track.covered(start[at], end[at]), wait) & (end[at] > start[at])
                yield kind, track, at[fills], start, end
