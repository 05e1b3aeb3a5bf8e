"""Facts about gaps: when the device ran dry, who launched what ended it, who fed the device before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.timeline.gaps.threads import EVENT_WAIT, Threads
from nsightkit.analysis.timeline.steps import QUEUED_NS
from nsightkit.trace.model import GPU_TABLES

__all__ = ["EVIDENCE", "TABLE_OF", "Group", "groups"]

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
    "sample": "samples",
}
EVIDENCE = ("none", *TABLE_OF)
UNDECIDED = -1
_NEVER = -(2**62)


@dataclasses.dataclass(eq=False)
class Group:
    """Gaps that end with launches of one thread, with what the rules ask about them and what they decide.

    Parameters
    ----------
    threads : Threads
    process : int
    thread : int
        That launched the operations which end the gaps; -1 where no launch was recorded.
    other : int
        The thread that fed the device before, if it is not the same; -1 for none.
    device : ndarray of int
    dry, end : ndarray of int
        When the device ran dry, and when it had work again.
    launch : ndarray of int
        Rows of the launching calls; -1 where they are not known.
    begun, done : ndarray of int
        When those calls began and returned.
    """

    threads: Threads
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
        self.cause = np.full(len(self.dry), UNDECIDED, np.int8)
        #: evidence, as a kind (index into `EVIDENCE`) and a row in its table
        self.source, self.source_row = np.zeros(len(self.dry), np.int8), np.full(len(self.dry), -1, np.int32)
        #: when the launch began, within the gap
        self.until = np.clip(self.begun, self.dry, self.end)
        #: whether `other` was at work until the gap, or in it, and when it passed the work on
        self.handed, self.over = np.zeros(len(self.dry), bool), self.dry
        if self.other != -1:
            # Ends of the last calls that each of them began before.
            here, there = (
                np.append(calls.end, _NEVER)[np.searchsorted(calls.start, self.begun) - 1]
                for calls in map(self.threads.calls, (self.thread, self.other))
            )
            self.handed = there > here
            self.over = np.where(self.handed, np.clip(there, self.dry, self.until), self.dry)

    def undecided(self, left: Int | None = None) -> Int:
        """Positions of gaps that no rule has decided yet, of all or of some."""
        left = np.arange(len(self.cause)) if left is None else left
        return np.asarray(left[self.cause[left] == UNDECIDED])

    def asked(self, left: Int) -> Iterator[tuple[int, Int]]:
        """The threads to ask, each with the undecided gaps to ask about: who launched, then who handed over."""
        if self.thread != -1:
            yield self.thread, self.undecided(left)
            if self.handed[left].any():
                yield self.other, self.undecided(left[self.handed[left]])

    def decide(self, at: Int, cause: int, kind: str, rows: Int | int) -> None:
        """Set the cause of some gaps, and its evidence."""
        self.cause[at], self.source[at], self.source_row[at] = cause, EVIDENCE.index(kind), rows

    def queued(self, left: Int) -> Int:
        """How long operations lay in the queue of an idle device, their launches having returned."""
        return np.asarray(self.end[left] - np.clip(self.done[left], self.dry[left], self.end[left]))

    def waited_for(self, left: Int) -> tuple[Int, Int]:
        """What each operation waited for on another device of its process: index into `EVIDENCE`, 0 for nothing; row.

        That is an operation which ended just before this one began, if it alone ran through half of the gap, or if a
        wait for an event was called between the launch and the one before it.
        """
        kind, rows = np.zeros(len(left), np.int8), np.full(len(left), -1, np.int64)
        waits, calls = self.threads.named("calls", self.thread, EVENT_WAIT).start, self.threads.launches(self.thread)
        if not self.threads.several_devices:
            return kind, rows
        work = self.threads.work_by_end(self.process)
        at = np.searchsorted(work.end, self.end[left], side="right") - 1
        here = np.flatnonzero(at >= 0)
        here = here[work.device[at[here]] == self.device[left[here]]]
        at[here] = work.elsewhere[at[here]]
        # Something that ended just before.
        mine = np.flatnonzero(at >= 0)
        at, gap = at[mine], left[mine]
        just = (self.end[gap] - work.end[at] <= QUEUED_NS) & (work.end[at] > self.dry[gap])
        alone = 2 * (work.end[at] - np.maximum(work.start[at], self.dry[gap])) >= self.end[gap] - self.dry[gap]
        if len(waits):
            since = np.append(0, calls)[np.searchsorted(calls, self.begun[gap])]
            alone |= np.searchsorted(waits, self.begun[gap]) > np.searchsorted(waits, since)
        at, mine = at[just & alone], mine[just & alone]
        of = np.array(GPU_TABLES)[work.table[at]]
        kind[mine] = np.where(of == "memops", EVIDENCE.index("copy"), EVIDENCE.index("kernel"))
        rows[mine] = np.where(of == "graphs", -1, work.row[at])
        return kind, rows


def groups(
    threads: Threads, gaps: Mapping[str, Int], before: Int | None = None, launched_by: int = -1
) -> Iterator[tuple[Int, Group]]:
    """Gaps by the thread that ended them, and the one that fed the device before.

    Parameters
    ----------
    threads : Threads
    gaps : mapping of str to ndarray of int
        ``device, start_ns, end_ns``; ``table`` and ``row`` of the operation that ends the gap, and its ``launch``.
    before : ndarray of int, optional
        The launch of the operation before each gap; -1 where that is not known.
    launched_by : int
        The thread to ask where the launch is not known; -1 for none.

    Yields
    ------
    ndarray of int
        Positions in `gaps`.
    Group
    """
    device, start, end, launch = (gaps[column] for column in ("device", "start_ns", "end_ns", "launch"))
    known = launch >= 0
    begun, done, thread = end.copy(), end.copy(), np.full(len(launch), launched_by, np.int64)
    calls = threads.trace.table("calls", ["start_ns", "end_ns", "thread"])
    begun[known], done[known], thread[known] = (calls[c].to_numpy()[launch[known]] for c in calls.columns)
    process = thread >> 24
    for number, name in enumerate(GPU_TABLES):
        mine = np.flatnonzero((thread == -1) & (gaps["table"] == number))
        process[mine] = threads.trace.table(name, ["process"])["process"].to_numpy()[gaps["row"][mine]]
    other = np.full(len(launch), -1, np.int64)
    if before is not None:
        fed_by = calls["thread"].to_numpy()[before]
        other = np.where(known & (before >= 0) & (fed_by != thread) & (fed_by >> 24 == process), fed_by, -1)
    by = pd.DataFrame({"process": process, "thread": thread, "other": other}).groupby(["process", "thread", "other"])
    for at in map(np.asarray, by.indices.values()):
        of, one, by_other = (int(values[at[0]]) for values in (process, thread, other))
        yield at, Group(threads, of, one, by_other, *(v[at] for v in (device, start, end, launch, begun, done)))
