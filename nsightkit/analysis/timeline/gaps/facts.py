"""Facts about gaps: when the device ran dry, who launched what ended it, who fed the device before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from nsightkit.analysis.timeline.gaps.threads import Threads, Track
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = [
    "EVIDENCE",
    "TABLE_OF",
    "Gaps",
    "Group",
    "groups",
]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]

#: The table that each kind of evidence is from.
TABLE_OF = {
    "call": "calls",
    "range": "ranges",
    "op": "ops",
    "os_call": "os_calls",
    "copy": "memops",
    "overhead": "overhead",
    "kernel": "kernels",
}
EVIDENCE = ("none", *TABLE_OF)
UNDECIDED = -1
#: What a device takes to start an operation that lies in its queue, at most.
QUEUED_NS = 20_000


@dataclasses.dataclass
class Gaps:
    """Gaps, column by column; evidence as a kind (index into `EVIDENCE`) and a row in its table."""

    device: Int
    start: Int
    end: Int
    table: Int  # of the operation that ends the gap, index into GPU_TABLES
    row: Int
    launch: Int  # row in calls, -1 unknown
    cause: Int
    source: Int
    source_row: Int

    def some(self, at: slice | Int) -> Gaps:
        """Some of the gaps; of a slice, views."""
        return Gaps(*(getattr(self, f.name)[at] for f in dataclasses.fields(self)))


class Group:
    """Gaps that end with launches of one thread, with what the rules ask about them.

    Parameters
    ----------
    gaps : Gaps
    threads : Threads
    elsewhere : Elsewhere
    process : int
    thread : int
        That launched the operations which end the gaps; -1 where no launch was recorded.
    other : int, optional
        The thread that fed the device before, if it is not the same.
    begun, done : ndarray of int
        When the launching calls began and returned.
    """

    def __init__(
        self,
        gaps: Gaps,
        threads: Threads,
        elsewhere: Elsewhere,
        process: int,
        thread: int,
        other: int | None,
        begun: Int,
        done: Int,
    ) -> None:
        self.threads, self.process, self.thread, self.other = threads, process, thread, other
        self._elsewhere = elsewhere
        self.gaps, self.begun, self.done = gaps, begun, done
        #: when the device ran dry, and when it had work again
        self.dry, self.end = gaps.start, gaps.end
        #: when the launch began, within the gap
        self.until = np.clip(begun, self.dry, self.end)
        #: whether `other` was at work until the gap, or in it, and when it passed the work on
        self.handed = np.zeros(len(begun), bool)
        self.over = self.dry
        if other is not None:
            last_here = _last_end(threads.calls(thread), begun)
            last_there = _last_end(threads.calls(other), begun)
            self.handed = last_there > last_here
            self.over = np.where(self.handed, np.clip(last_there, self.dry, self.until), self.dry)

    def undecided(self, left: Int | None = None) -> Int:
        """Positions of gaps that no rule has decided yet, of all or of some."""
        if left is None:
            left = np.arange(len(self.gaps.cause))
        undecided: Int = left[self.gaps.cause[left] == UNDECIDED]
        return undecided

    def asked(self, left: Int) -> Iterator[tuple[int, Int]]:
        """The threads to ask, each with the undecided gaps to ask about: who launched, then who handed over."""
        if self.thread != -1:
            yield self.thread, self.undecided(left)
            if self.other is not None and self.handed[left].any():
                yield self.other, self.undecided(left[self.handed[left]])

    def decide(self, at: Int, cause: int, kind: str, rows: Int | None) -> None:
        """Set the cause of some gaps, and its evidence."""
        self.gaps.cause[at] = cause
        self.gaps.source[at] = EVIDENCE.index(kind)
        if rows is not None:
            self.gaps.source_row[at] = rows

    def queued(self, left: Int) -> Int:
        """How long operations lay in the queue of an idle device, their launches having returned."""
        return np.asarray(self.end[left] - np.maximum(self.dry[left], np.minimum(self.done[left], self.end[left])))

    def waited_for(self, left: Int) -> tuple[Int, Int]:
        """What each operation waited for on another device of its process: index into `EVIDENCE`, 0 for nothing; row.

        That is an operation which ended just before this one began, if it alone ran through half of the gap, or if a
        wait for an event was called between the launch and the one before it.
        """
        kind, rows = np.zeros(len(left), np.int8), np.full(len(left), -1, np.int64)
        if not len(left) or not self._elsewhere.several:
            return kind, rows
        waits = np.empty(0, np.int64) if self.thread == -1 else self.threads.event_waits(self.thread).start
        calls = None if self.thread == -1 else self.threads.launches(self.thread)
        for device in np.unique(self.gaps.device[left]).tolist():
            mine = np.flatnonzero(self.gaps.device[left] == device)
            work = self._elsewhere.of(device, self.process)
            if not len(work):
                continue
            dry, end = self.dry[left[mine]], self.end[left[mine]]
            at = np.searchsorted(work.end, end, side="right") - 1
            last = np.maximum(at, 0)
            just = (at >= 0) & (end - work.end[last] <= QUEUED_NS) & (work.end[last] > dry)
            alone = 2 * (work.end[last] - np.maximum(work.start[last], dry)) >= end - dry
            if calls is not None and len(waits):
                begun = self.begun[left[mine]]
                i = np.searchsorted(calls, begun, side="left") - 1
                since = np.where(i >= 0, calls[np.maximum(i, 0)], 0)
                alone |= np.searchsorted(waits, begun) > np.searchsorted(waits, since)
            yes = just & alone
            hit = mine[yes]
            copies = work.table[last[yes]] == GPU_TABLES.index("memops")
            kernels = work.table[last[yes]] == GPU_TABLES.index("kernels")
            kind[hit] = np.where(copies, EVIDENCE.index("copy"), EVIDENCE.index("kernel"))
            rows[hit] = np.where(copies | kernels, work.row[last[yes]], -1)
        return kind, rows


@dataclasses.dataclass
class _Work:
    start: Int
    end: Int
    table: Int  # index into GPU_TABLES
    row: Int

    def __len__(self) -> int:
        return len(self.start)


class Elsewhere:
    """The work of other devices.

    Parameters
    ----------
    trace : Trace
        The whole one.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._of: dict[tuple[int, int], _Work] = {}
        columns = [trace.table(t, ["device"])["device"].to_numpy() for t in GPU_TABLES if trace.size(t)]
        #: whether more than one device had work
        self.several = any((c != columns[0][0]).any() for c in columns)

    def of(self, device: int, process: int) -> _Work:
        """Work of a process on all devices but one, by end."""
        if (device, process) not in self._of:
            parts = []
            for number, name in enumerate(GPU_TABLES):
                frame = self._trace.table(name, ["start_ns", "end_ns", "device", "process"])
                start, end, ran_on, of = (frame[c].to_numpy() for c in frame.columns)
                row = np.flatnonzero((ran_on != device) & (of == process))
                parts.append((start[row], end[row], np.full(len(row), number, np.int8), row))
            start, end, table, row = (np.concatenate(c) for c in zip(*parts, strict=True))
            order = np.argsort(end, kind="stable")
            self._of[device, process] = _Work(start[order], end[order], table[order], row[order])
        return self._of[device, process]


def groups(
    trace: Trace, gaps: Gaps, fed_by: Int, threads: Threads, elsewhere: Elsewhere
) -> Iterator[tuple[Int, Group]]:
    """Gaps by the thread that ended them, and the one that fed the device before.

    Parameters
    ----------
    trace : Trace
        The whole one.
    gaps : Gaps
    fed_by : ndarray of int
        The thread that launched the operation before each gap; -1 where that is not known.
    threads : Threads
    elsewhere : Elsewhere

    Yields
    ------
    ndarray of int
        Positions in `gaps`.
    Group
    """
    n = len(gaps.launch)
    thread, process = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    begun, done = gaps.end.copy(), gaps.end.copy()
    known = gaps.launch >= 0
    if known.any():
        calls = trace.table("calls", ["start_ns", "end_ns", "thread"])
        at = gaps.launch[known]
        begun[known], done[known], thread[known] = (calls[c].to_numpy()[at] for c in calls.columns)
        process[known] = thread[known] >> 24
    for number, name in enumerate(GPU_TABLES):
        mine = np.flatnonzero(~known & (gaps.table == number))
        if len(mine):
            process[mine] = trace.table(name, ["process"])["process"].to_numpy()[gaps.row[mine]]
    for one in np.unique(thread).tolist():
        mine = np.flatnonzero(thread == one)
        by = process[mine] if one == -1 else fed_by[mine]
        for other in np.unique(by).tolist():
            part = mine[by == other]
            of = other if one == -1 else one >> 24
            handed = one != -1 and other not in (one, -1) and other >> 24 == of
            yield (
                part,
                Group(gaps.some(part), threads, elsewhere, of, one, other if handed else None, begun[part], done[part]),
            )


_NEVER = -(2**62)


def _last_end(calls: Track, before: Int) -> Int:
    """End of the last call that began before each time; `_NEVER` where there is not any."""
    i = np.searchsorted(calls.start, before, side="left") - 1
    if not len(calls):
        return np.full(len(before), _NEVER, np.int64)
    return np.where(i >= 0, calls.end[np.maximum(i, 0)], _NEVER)
