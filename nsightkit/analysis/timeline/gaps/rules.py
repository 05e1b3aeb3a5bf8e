"""The cause of a gap, from the thread that launched the operation which ends it.

Two causes are counterfactual and come first: `queued` and `synchronization`. Else the label with the largest share of
the time from "the device ran dry" to "the launch had returned" names the cause
(:mod:`nsightkit.analysis.timeline.gaps.paint`). Work that changes threads is followed: up to its last CUDA call the
thread that fed the device before is asked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core import causes
from nsightkit.analysis.timeline.gaps.paint import CAUSE_OF_LABEL, EVIDENCE, LABELS, TABLE_OF, Int
from nsightkit.analysis.timeline.gaps.threads import EAGER_NS, UNKNOWN, Threads
from nsightkit.analysis.timeline.steps import QUEUED_NS
from nsightkit.trace.model import process_of

__all__ = ["CAUSES", "decide"]

#: Causes of idle time: all of those, and messages between processes, in which the CPU takes part.
CAUSES = (*(cause.slug for cause in causes.IDLE), "communication")
_OF_LABEL = np.array([CAUSES.index(cause) for cause in CAUSE_OF_LABEL.values()], np.int8)
_DISPATCH = LABELS.index("dispatch")
_QUIET = [LABELS.index("enclosed"), LABELS.index("silence")]
#: Labels that stay the cause although a blocking call was running as the device ran dry.
_SETTLED = [LABELS.index(label) for label in ("profiler", "once", "compile", "data", "messages")]
_CALL = EVIDENCE.index("call")
_QUEUED = CAUSES.index("queued")
_SYNCHRONIZATION = CAUSES.index("synchronization")
_NEVER = -(2**62)


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """Gaps that end with launches of one thread.

    Parameters
    ----------
    thread : int
        That launched the operations which end the gaps.
    other : int
        The thread that fed the device before, if it is not the same; -1 for none.
    dry, end : ndarray of int
        When each device ran dry, and when it had work again.
    launch : ndarray of int
        Rows of the launching calls (-1: unknown).
    begun, returned : ndarray of int
        When they began and returned, within the gap.
    """

    thread: int
    other: int
    dry: Int
    end: Int
    launch: Int
    begun: Int
    returned: Int


#: A thread that is asked about each gap, from when to when.
_Part = tuple[int, Int, Int]


def decide(threads: Threads, gaps: pd.DataFrame, launched_by: int | None = None) -> pd.DataFrame:
    """Give each gap its cause.

    Parameters
    ----------
    threads : Threads
    gaps : DataFrame
        ``start_ns, end_ns``; ``process`` and ``launch`` of the operation that ends the gap, and the launch of the
        operation ``before`` the gap (-1: unknown).
    launched_by : int, optional
        The thread to ask where the launch is unknown.

    Returns
    -------
    DataFrame
        ``cause`` as an index into `CAUSES`, and its evidence: ``source``, an index into `EVIDENCE`, and ``source_row``.
    """
    asked = _launching(threads, gaps, launched_by)
    cause = np.full(len(gaps), -1, np.int8)
    source = np.zeros(len(gaps), np.int8)
    row = np.full(len(gaps), -1, np.int32)
    columns = ["dry", "end", "launch", "begun", "returned"]
    places: dict[Any, Any] = asked.groupby(["thread", "other"]).indices
    for (thread, other), at in places.items():
        own = asked.iloc[at]
        group = _Group(thread, other, *(own[column].to_numpy() for column in columns))
        cause[at], source[at], row[at] = _of_group(threads, group)
        threads.forget()
    return pd.DataFrame({"cause": cause, "source": source, "source_row": row})


def _launching(threads: Threads, gaps: pd.DataFrame, launched_by: int | None) -> pd.DataFrame:
    """Who launched the end of each gap and when, and the ``other`` thread that fed the device before, -1 for none."""
    dry = gaps["start_ns"].to_numpy()
    end = gaps["end_ns"].to_numpy()
    launch = gaps["launch"].to_numpy()
    before = gaps["before"].to_numpy()
    calls = threads.trace.table("calls", ["start_ns", "end_ns", "thread"])
    called = calls["thread"].to_numpy()
    known = np.flatnonzero(launch >= 0)
    begun = end.copy()
    returned = end.copy()
    begun[known] = np.clip(calls["start_ns"].to_numpy()[launch[known]], dry[known], end[known])
    returned[known] = np.clip(calls["end_ns"].to_numpy()[launch[known]], dry[known], end[known])
    thread = (gaps["process"].to_numpy() << 24) + UNKNOWN
    if launched_by is not None:
        thread[:] = launched_by
    thread[known] = called[launch[known]]
    other = np.full(len(gaps), -1, np.int64)
    fed = np.flatnonzero((launch >= 0) & (before >= 0))
    other[fed] = called[before[fed]]
    other[(other == thread) | (process_of(other) != process_of(thread))] = -1
    columns = {"thread": thread, "other": other, "dry": dry, "end": end}
    return pd.DataFrame({**columns, "launch": launch, "begun": begun, "returned": returned})


def _of_group(threads: Threads, group: _Group) -> tuple[Int, Int, Int]:
    """Cause, kind and row of evidence of each gap."""
    handed = _handed_over(threads, group)
    parts = [(group.thread, handed, group.returned)]
    if group.other != -1:
        parts.append((group.other, group.dry, handed))
    shares = np.zeros((len(LABELS), len(handed)), np.int64)
    for thread, start, end in parts:
        shares += threads.paint(thread).shares(start, end)
    label = _largest(shares, is_known=group.thread & UNKNOWN != UNKNOWN)
    cause = _OF_LABEL[label]
    kind, row = _evidence(threads, group, label, parts)

    waits = _synchronization(threads, group, handed)
    waited = (waits >= 0) & ~np.isin(label, _SETTLED)
    cause[waited] = _SYNCHRONIZATION
    row[waited] = waits[waited]
    lay = group.end - group.returned
    queued = (lay > QUEUED_NS) & (2 * lay >= group.end - group.dry)
    cause[queued] = _QUEUED
    row[queued] = group.launch[queued]
    kind[waited | queued] = _CALL
    return cause, kind, row


def _largest(shares: Int, is_known: bool) -> Int:
    """The label that holds most of each wait; of a known thread, a silence as short as dispatch is dispatch."""
    if is_known:
        quiet = shares[_QUIET].sum(axis=0)
        short = quiet <= EAGER_NS
        shares[_DISPATCH] += np.where(short, quiet, 0)
        shares[_QUIET] *= ~short
    largest: Int = np.argmax(shares, axis=0)
    if is_known:
        largest[shares.max(axis=0) == 0] = _DISPATCH
    return largest


def _handed_over(threads: Threads, group: _Group) -> Int:
    """When the thread that fed the device before made its last call, if it was at work until the gap or in it."""
    if group.other == -1:
        return group.dry
    here = _last_call(threads, group.thread, group.begun)
    there = _last_call(threads, group.other, group.begun)
    return np.where(there > here, np.clip(there, group.dry, group.begun), group.dry)


def _last_call(threads: Threads, thread: int, time: Int) -> Int:
    """When the last call that a thread began before each time ended."""
    calls = threads.calls(thread)
    return _latest(calls.start, calls.end, time, _NEVER)


def _latest(moments: Int, values: Int, time: Int, otherwise: int) -> Int:
    """The value of the last moment before each time; no array as long as the trace is copied for it."""
    last = np.searchsorted(moments, time) - 1
    latest = np.full(len(time), otherwise)
    latest[last >= 0] = values[last[last >= 0]]
    return latest


def _evidence(threads: Threads, group: _Group, label: Int, parts: list[_Part]) -> tuple[Int, Int]:
    """Kind and row of the longest event of the name that holds most of the label's time."""
    kind = np.zeros(len(label), np.int8)
    row = np.full(len(label), -1, np.int64)
    dispatch = label == _DISPATCH
    kind[dispatch] = _CALL
    row[dispatch] = group.launch[dispatch]
    named = np.flatnonzero(~dispatch)
    pieces = []
    for thread, start, end in parts:
        paint = threads.paint(thread)
        pieces.append(paint.overlaps(start[named], end[named], label[named]))
    table = pd.concat(pieces, ignore_index=True)
    key = ["window", "kind", _names(threads, table)]
    table["of_name_ns"] = table.groupby(key, sort=False)["overlap_ns"].transform("sum")
    longest = table.sort_values(["of_name_ns", "overlap_ns"]).drop_duplicates("window", keep="last")
    gap = named[longest["window"]]
    kind[gap] = longest["kind"]
    row[gap] = longest["row"]
    return kind, row


def _names(threads: Threads, pieces: pd.DataFrame) -> Int:
    """A number for the name of each piece, among those of its kind."""
    code = np.zeros(len(pieces), np.int64)
    for kind in np.unique(pieces["kind"]).tolist():
        table = TABLE_OF.get(EVIDENCE[kind])
        if table is not None and table != "memops":
            at = np.flatnonzero(pieces["kind"] == kind)
            code[at] = threads.trace.table(table, ["name"])["name"].cat.codes.to_numpy()[pieces["row"].to_numpy()[at]]
    return code


def _synchronization(threads: Threads, group: _Group, handed: Int) -> Int:
    """Rows of the calls in which a thread waited as the device ran dry, -1 where that is not the cause.

    Without the wait the thread would have launched in time to close half of the gap, or more. The CPU time until its
    next launch counts with the wait. A wait ahead of longer work of the CPU is not the cause of that work.
    """
    rows = np.full(len(handed), -1, np.int64)
    gap_ns = group.end - group.dry
    # The thread that fed the device before is asked up to its last call, the launching thread up to its launch.
    for thread, until in ((group.other, handed), (group.thread, group.begun)):
        blocking = threads.blocking(thread)
        if not len(blocking):
            continue
        # A nanosecond before the device ran dry: a call that returns at that very moment was waiting for it.
        waiting = blocking.innermost_at(group.dry - 1)
        at = np.flatnonzero((waiting >= 0) & (until > group.dry))
        call = waiting[at]
        launches = threads.fed(thread)
        last_launch = _latest(launches, launches, blocking.start[call], blocking.start[0])
        waited_ns = blocking.covered(last_launch, until[at])
        is_enough = 2 * waited_ns >= gap_ns[at]
        rows[at[is_enough]] = blocking.row[call[is_enough]]
    return rows
