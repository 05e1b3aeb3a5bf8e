"""The cause of a gap, from the thread that launched the operation which ends it.

Two causes are asked for first, for they are about what would have been otherwise: `queued` and `synchronization`. Else
the label with the largest share of the time from "the device ran dry" to "the launch had returned" names the cause
(:mod:`nsightkit.analysis.timeline.gaps.paint`). Work that changes threads is followed: up to its last CUDA call the
thread that fed the device before is asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import causes
from nsightkit.analysis.timeline.gaps.facts import EVIDENCE, TABLE_OF
from nsightkit.analysis.timeline.gaps.names import FREES
from nsightkit.analysis.timeline.gaps.paint import LABELS
from nsightkit.analysis.timeline.gaps.threads import EAGER_NS, Threads
from nsightkit.analysis.timeline.steps import QUEUED_NS
from nsightkit.trace.model import GPU_TABLES

__all__ = ["CAUSES", "decide"]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]

CAUSES = tuple(cause.slug for cause in causes.IDLE)
_CAUSE_OF_LABEL = {
    "profiler": "profiler",
    "once": "start-up",
    "data": "input-pipeline",
    "staging": "memory-transfer",
    "work": "cpu-work",
    "dispatch": "launch-overhead",
    "around": "cpu-work",
    "silence": "unknown",
}
_NEVER = -(2**62)


@dataclasses.dataclass(eq=False)
class _Group:
    """Gaps that end with launches of one thread.

    Parameters
    ----------
    process : int
    thread : int
        That launched the operations which end the gaps; -1 where no launch was recorded.
    other : int
        The thread that fed the device before, if it is not the same; -1 for none.
    device, dry, end : ndarray of int
        When each device ran dry, and when it had work again.
    launch, begun, done : ndarray of int
        Rows of the launching calls (-1: not known), and when they began and returned.
    """

    process: int
    thread: int
    other: int
    device: Int
    dry: Int
    end: Int
    launch: Int
    begun: Int
    done: Int

    def __post_init__(self) -> None:
        #: when the launch began and had returned, within the gap
        self.until = np.clip(self.begun, self.dry, self.end)
        self.returned = np.clip(self.done, self.dry, self.end)
        self.gap = self.end - self.dry


def decide(
    threads: Threads, gaps: Mapping[str, Int], before: Int | None = None, launched_by: int = -1
) -> dict[str, Int]:
    """Give each gap its cause.

    Parameters
    ----------
    threads : Threads
    gaps : mapping of str to ndarray of int
        ``device, start_ns, end_ns``; ``table`` and ``row`` of the operation that ends the gap, and its ``launch``.
    before : ndarray of int, optional
        The launch of the operation before each gap; -1 where that is not known.
    launched_by : int
        The thread to ask where the launch is not known; -1 for none.

    Returns
    -------
    dict of str to ndarray of int
        ``cause`` as an index into `CAUSES`, and its evidence: ``source``, an index into `EVIDENCE`, and ``source_row``.
    """
    n = len(gaps["launch"])
    cause = np.full(n, -1, np.int8)
    source, row = np.zeros(n, np.int8), np.full(n, -1, np.int32)
    for at, group in _groups(threads, gaps, before, launched_by):
        cause[at], source[at], row[at] = _of_group(threads, group)
        threads.forget()
    return {"cause": cause, "source": source, "source_row": row}


def _groups(threads: Threads, gaps: Mapping[str, Int], before: Int | None, asked: int) -> Iterator[tuple[Int, _Group]]:
    """Gaps, by position, by the thread that ended them and the one that fed the device before."""
    device, start, end, launch = (gaps[column] for column in ("device", "start_ns", "end_ns", "launch"))
    known = launch >= 0
    begun, done, thread = end.copy(), end.copy(), np.full(len(launch), asked, np.int64)
    calls = threads.trace.table("calls", ["start_ns", "end_ns", "thread"])
    begun[known] = calls["start_ns"].to_numpy()[launch[known]]
    done[known] = calls["end_ns"].to_numpy()[launch[known]]
    thread[known] = calls["thread"].to_numpy()[launch[known]]
    process = thread >> 24
    for number, name in enumerate(GPU_TABLES):
        unknown = np.flatnonzero((thread == -1) & (gaps["table"] == number))
        process[unknown] = threads.trace.table(name, ["process"])["process"].to_numpy()[gaps["row"][unknown]]
    other = np.full(len(launch), -1, np.int64)
    if before is not None:
        fed_by = calls["thread"].to_numpy()[before]
        changed = known & (before >= 0) & (fed_by != thread) & (fed_by >> 24 == process)
        other[changed] = fed_by[changed]
    by = pd.DataFrame({"process": process, "thread": thread, "other": other}).groupby(["process", "thread", "other"])
    columns = (device, start, end, launch, begun, done)
    indices: dict[Any, Any] = by.indices
    for key, at in indices.items():
        of_process, of_thread, of_other = map(int, key)
        yield np.asarray(at), _Group(of_process, of_thread, of_other, *(column[at] for column in columns))


def _of_group(threads: Threads, group: _Group) -> tuple[Int, Int, Int]:
    """Cause, kind and row of evidence of each gap."""
    over = _handed_over(threads, group)
    parts = [(group.thread, over, group.returned)]
    if group.other != -1:
        parts.append((group.other, group.dry, over))
    shares = np.zeros((len(LABELS), len(over)), np.int64)
    for thread, start, end in parts:
        shares += threads.paint(thread, group.process).shares(start, end)
    label = np.argmax(shares, axis=0) if group.thread == -1 else _largest(shares)
    cause = np.array([CAUSES.index(_CAUSE_OF_LABEL[name]) for name in LABELS], np.int8)[label]
    kind, row = np.zeros(len(label), np.int8), np.full(len(label), -1, np.int64)
    dispatch = label == LABELS.index("dispatch")
    kind[dispatch], row[dispatch] = EVIDENCE.index("call"), group.launch[dispatch]
    _name(threads, group, label, parts, kind, row)

    waits = _synchronization(threads, group, over)
    settled = np.isin(label, [LABELS.index(name) for name in ("profiler", "once", "data")])
    waited = (waits >= 0) & ~settled
    cause[waited], kind[waited] = CAUSES.index("synchronization"), EVIDENCE.index("call")
    row[waited] = waits[waited]
    lay = group.end - group.returned
    queued = (lay > QUEUED_NS) & (2 * lay >= group.gap)
    cause[queued], kind[queued] = CAUSES.index("queued"), EVIDENCE.index("call")
    row[queued] = group.launch[queued]
    if threads.several_devices and queued.any():
        held_up, table, awaited = _elsewhere(threads, group, np.flatnonzero(queued))
        # A copy is a transfer; no cause covers a kernel.
        for event, name in (("kernel", "unknown"), ("copy", "memory-transfer"), ("none", "unknown")):
            of = table == GPU_TABLES.index(TABLE_OF.get(event, "graphs"))
            cause[held_up[of]], kind[held_up[of]] = CAUSES.index(name), EVIDENCE.index(event)
            row[held_up[of]] = awaited[of]
    return cause, kind, row


def _largest(shares: Int) -> Int:
    """The label that holds most of each wait; silence as short as dispatch is that."""
    quiet = [LABELS.index("around"), LABELS.index("silence")]
    short = shares[quiet].sum(axis=0) <= EAGER_NS
    shares[LABELS.index("dispatch"), short] += shares[quiet].sum(axis=0)[short]
    for label in quiet:
        shares[label, short] = 0
    largest: Int = np.argmax(shares, axis=0)
    largest[shares.max(axis=0) == 0] = LABELS.index("dispatch")
    return largest


def _handed_over(threads: Threads, group: _Group) -> Int:
    """When the thread that fed the device before made its last call, where it was at work until the gap or in it."""
    if group.other == -1:
        return group.dry
    ends = []
    for thread in (group.thread, group.other):
        calls = threads.calls(thread)
        ends.append(np.append(calls.end, _NEVER)[np.searchsorted(calls.start, group.begun) - 1])
    here, there = ends
    return np.where(there > here, np.clip(there, group.dry, group.until), group.dry)


def _name(threads: Threads, group: _Group, label: Int, parts: list[Any], kind: Int, row: Int) -> None:
    """Take as evidence the name that holds most of the label's time, and of its events the one that does."""
    found = []
    named = np.flatnonzero(label != LABELS.index("dispatch"))
    for thread, start, end in parts:
        paint = threads.paint(thread, group.process)
        window, piece, overlap_ns = paint.overlaps(start[named], end[named], label[named])
        columns = {"gap": named[window], "kind": paint.kind[piece], "row": paint.row[piece], "overlap_ns": overlap_ns}
        found.append(pd.DataFrame(columns))
    pieces = pd.concat(found, ignore_index=True)
    if pieces.empty:
        return
    pieces["name"] = 0
    for number in pieces["kind"].unique().tolist():
        if number:
            of_kind = (pieces["kind"] == number).to_numpy()
            names = threads.trace.table(TABLE_OF[EVIDENCE[number]], ["name"])["name"].cat.codes.to_numpy()
            pieces.loc[of_kind, "name"] = names[pieces.loc[of_kind, "row"].to_numpy()]
    pieces["of_name_ns"] = pieces.groupby(["gap", "kind", "name"])["overlap_ns"].transform("sum")
    pieces = pieces.sort_values(["gap", "of_name_ns", "overlap_ns"], ascending=[True, False, False], kind="stable")
    best = pieces.drop_duplicates("gap")
    kind[best["gap"]], row[best["gap"]] = best["kind"], best["row"]


def _half(covered: Int, of: Int) -> Bool:
    return np.asarray(2 * covered >= of)


def _synchronization(threads: Threads, group: _Group, over: Int) -> Int:
    """Rows of the calls in which a thread waited as the device ran dry, -1 where that is not the cause.

    Without the wait the thread would have launched in time to close half of the gap, or more. The CPU time until its
    next launch counts with the wait. A wait ahead of longer work of the CPU is not the cause of that work, nor of what
    follows when memory is freed, which has to wait for an idle device whatever went before.
    """
    rows = np.full(len(over), -1, np.int64)
    for thread, until in ((group.other, over), (group.thread, group.until)):
        if thread == -1 or not len(threads.blocking(thread)):
            continue
        blocking, gave = threads.blocking(thread), threads.gave_work(thread)
        # A nanosecond before the device ran dry: a call that returns at that very moment was waiting for it.
        at = blocking.open_at(group.dry - 1)
        hit = np.flatnonzero((at >= 0) & (until > group.dry))
        at = at[hit]
        last = np.searchsorted(gave, blocking.start[at])
        since = np.append(blocking.start[0], gave)[last]
        dry, end, gap = group.dry[hit], until[hit], group.gap[hit]
        yes = _half(blocking.covered(since, end), gap)
        frees = threads.named("calls", thread, FREES)
        freed = np.append(frees.start, np.iinfo(np.int64).max)[np.searchsorted(frees.end, dry, side="right")]
        yes &= _half(np.minimum(freed, end) - dry, gap) | (freed >= end)
        # The upload that ends the gap is staging, not waiting.
        row = blocking.row[at]
        yes &= ~((row == group.launch[hit]) & threads.pageable("HtoD")[row])
        rows[hit[yes]] = row[yes]
    return rows


def _elsewhere(threads: Threads, group: _Group, queued: Int) -> tuple[Int, Int, Int]:
    """Queued operations that waited for work on another device of their process, its table and its row.

    It ran through half of the gap, and ended just before they began.
    """
    work = threads.work_by_end(group.process)
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    # What ends within a gap of a device ran on another one.
    at = np.searchsorted(end, group.end[queued]) - 1
    ran = end[at] - np.maximum(start[at], group.dry[queued])
    just = (at >= 0) & _half(ran, group.gap[queued]) & (group.end[queued] - end[at] <= QUEUED_NS)
    return queued[just], work["table"].to_numpy()[at[just]], work["row"].to_numpy()[at[just]]
