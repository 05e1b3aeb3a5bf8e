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
from nsightkit.analysis.timeline.gaps.paint import CAUSE_OF_LABEL, EVIDENCE_KINDS, LABELS, TABLE_OF, Int
from nsightkit.analysis.timeline.gaps.threads import EAGER_NS, UNKNOWN, Threads
from nsightkit.analysis.timeline.steps import QUEUED_NS
from nsightkit.trace.model import process_of

#: Causes of idle time: all of those, and messages between processes, in which the CPU takes part.
CAUSES = (*(cause.slug for cause in causes.IDLE), "communication")
_CAUSE_OF_LABEL = np.array([CAUSES.index(cause) for cause in CAUSE_OF_LABEL.values()], np.int8)
_DISPATCH = LABELS.index("dispatch")
_QUIET = [LABELS.index("enclosed"), LABELS.index("silence")]
#: Labels that stay the cause although a blocking call was running as the device ran dry.
_STRONGER_THAN_WAITS = [LABELS.index(label) for label in ("profiler", "once", "compile", "data", "messages")]
_CALL = EVIDENCE_KINDS.index("call")
_QUEUED = CAUSES.index("queued")
_SYNCHRONIZATION = CAUSES.index("synchronization")
#: Before all times of a trace.
_NEVER = -(2**62)


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """Gaps whose ends one thread launched, after another (or no other) thread had fed the device.

    The time of a gap, from left to right; any of its parts may be empty::

        dry            handed over         launch_begun      launch_returned             end
         |                  |                    |                  |                     |
         | previous_thread  | launching_thread: its own time, then  | the launched work   |
         | is asked         | its launching call; it is asked       | waits in the queue  |

    Parameters
    ----------
    launching_thread : int
        That launched the operations which end the gaps.
    previous_thread : int
        The thread that fed the device before, if it is another; -1 for none.
    dry, end : ndarray of int
        When each device ran dry, and when it had work again.
    launch : ndarray of int
        Rows of the launching calls (-1: unknown).
    launch_begun, launch_returned : ndarray of int
        When they began and returned, clipped to the gap.
    """

    launching_thread: int
    previous_thread: int
    dry: Int
    end: Int
    launch: Int
    launch_begun: Int
    launch_returned: Int


#: A thread that is asked about each gap, from when to when.
_Asked = tuple[int, Int, Int]


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
        ``cause`` as an index into `CAUSES`, and its evidence: ``source``, an index into `EVIDENCE_KINDS`, and
        ``source_row``.
    """
    launches = _launches(threads, gaps, launched_by)
    cause = np.full(len(gaps), -1, np.int8)
    source = np.zeros(len(gaps), np.int8)
    source_row = np.full(len(gaps), -1, np.int32)
    columns = ["dry", "end", "launch", "launch_begun", "launch_returned"]
    rows_of_group: dict[Any, Any] = launches.groupby(["launching_thread", "previous_thread"]).indices
    for (launching_thread, previous_thread), rows in rows_of_group.items():
        in_group = launches.iloc[rows]
        group = _Group(launching_thread, previous_thread, *(in_group[column].to_numpy() for column in columns))
        cause[rows], source[rows], source_row[rows] = _causes_of_group(threads, group)
        threads.forget()
    return pd.DataFrame({"cause": cause, "source": source, "source_row": source_row})


def _launches(threads: Threads, gaps: pd.DataFrame, launched_by: int | None) -> pd.DataFrame:
    """Find who launched the end of each gap and when, and who fed the device before: the columns of a `_Group`."""
    dry = gaps["start_ns"].to_numpy()
    end = gaps["end_ns"].to_numpy()
    launch = gaps["launch"].to_numpy()
    launch_before = gaps["before"].to_numpy()
    calls = threads.trace.table("calls", ["start_ns", "end_ns", "thread"])
    thread_of_call = calls["thread"].to_numpy()
    with_launch = np.flatnonzero(launch >= 0)
    known_launch = launch[with_launch]
    # An unknown launch counts as one at the very end of the gap, by a thread of which nothing was recorded.
    begun = end.copy()
    returned = end.copy()
    begun[with_launch] = np.clip(calls["start_ns"].to_numpy()[known_launch], dry[with_launch], end[with_launch])
    returned[with_launch] = np.clip(calls["end_ns"].to_numpy()[known_launch], dry[with_launch], end[with_launch])
    launching = (gaps["process"].to_numpy() << 24) + UNKNOWN
    if launched_by is not None:
        launching[:] = launched_by
    launching[with_launch] = thread_of_call[known_launch]
    previous = np.full(len(gaps), -1, np.int64)
    with_both = np.flatnonzero((launch >= 0) & (launch_before >= 0))
    previous[with_both] = thread_of_call[launch_before[with_both]]
    previous[(previous == launching) | (process_of(previous) != process_of(launching))] = -1
    columns = {"launching_thread": launching, "previous_thread": previous, "dry": dry, "end": end, "launch": launch}
    return pd.DataFrame({**columns, "launch_begun": begun, "launch_returned": returned})


def _causes_of_group(threads: Threads, group: _Group) -> tuple[Int, Int, Int]:
    """Decide the cause of each gap, and the kind and row of the event that is its evidence."""
    handed_over = _handed_over(threads, group)
    asked = [(group.launching_thread, handed_over, group.launch_returned)]
    if group.previous_thread != -1:
        asked.append((group.previous_thread, group.dry, handed_over))
    label = _largest_label(threads, group, asked)
    cause = _CAUSE_OF_LABEL[label]
    kind, row = _evidence(threads, group, label, asked)

    # Synchronization overrules most labels: a blocking call held the launch back.
    blocking_call = _blocking_calls(threads, group, handed_over)
    is_synchronization = (blocking_call >= 0) & ~np.isin(label, _STRONGER_THAN_WAITS)
    cause[is_synchronization] = _SYNCHRONIZATION
    row[is_synchronization] = blocking_call[is_synchronization]

    # Queued overrules all: most of the gap passed after its launch had returned.
    queued_ns = group.end - group.launch_returned
    is_queued = (queued_ns > QUEUED_NS) & (2 * queued_ns >= group.end - group.dry)
    cause[is_queued] = _QUEUED
    row[is_queued] = group.launch[is_queued]

    kind[is_synchronization | is_queued] = _CALL
    return cause, kind, row


def _largest_label(threads: Threads, group: _Group, asked: list[_Asked]) -> Int:
    """Find the label that holds most of each gap, in the time that each thread is asked about."""
    label_ns = np.zeros((len(LABELS), len(group.dry)), np.int64)
    for thread, start, end in asked:
        label_ns += threads.paint(thread).shares(start, end)
    # Of a thread with recorded calls, a silence as short as dispatch is dispatch.
    is_known = (group.launching_thread & UNKNOWN) != UNKNOWN
    if is_known:
        quiet_ns = label_ns[_QUIET].sum(axis=0)
        is_short = quiet_ns <= EAGER_NS
        label_ns[_DISPATCH] += np.where(is_short, quiet_ns, 0)
        label_ns[_QUIET] *= ~is_short
    largest: Int = np.argmax(label_ns, axis=0)
    if is_known:
        largest[label_ns.max(axis=0) == 0] = _DISPATCH
    return largest


def _handed_over(threads: Threads, group: _Group) -> Int:
    """When the previous thread ended its last call, if after the launching thread's last one; else when the gap began.

    Only calls before the launch count, and the moment is clipped to the gap.
    """
    if group.previous_thread == -1:
        return group.dry
    launching_until = _end_of_last_call(threads, group.launching_thread, group.launch_begun)
    previous_until = _end_of_last_call(threads, group.previous_thread, group.launch_begun)
    in_gap = np.clip(previous_until, group.dry, group.launch_begun)
    return np.where(previous_until > launching_until, in_gap, group.dry)


def _end_of_last_call(threads: Threads, thread: int, time: Int) -> Int:
    """When the last call that a thread began before each time ended; `_NEVER` if it had begun none."""
    calls = threads.calls(thread)
    return _value_before(calls.start, calls.end, time, otherwise=_NEVER)


def _value_before(moments: Int, values: Int, time: Int, otherwise: int) -> Int:
    """Pick the value of the last of some sorted moments before each time; `otherwise` where none is before."""
    last = np.searchsorted(moments, time) - 1
    picked = np.full(len(time), otherwise)
    # Indexed by `last` first: `values` may be as long as the trace, and is not copied whole.
    picked[last >= 0] = values[last[last >= 0]]
    return picked


def _evidence(threads: Threads, group: _Group, label: Int, asked: list[_Asked]) -> tuple[Int, Int]:
    """Find the kind and row of each gap's evidence: the launch for dispatch, else the longest event with the label.

    Of several names with that label, the one with most time in the gap counts.
    """
    kind = np.zeros(len(label), np.int8)
    row = np.full(len(label), -1, np.int64)
    is_dispatch = label == _DISPATCH
    kind[is_dispatch] = _CALL
    row[is_dispatch] = group.launch[is_dispatch]
    other_gaps = np.flatnonzero(~is_dispatch)
    pieces = []
    for thread, start, end in asked:
        paint = threads.paint(thread)
        pieces.append(paint.overlaps(start[other_gaps], end[other_gaps], label[other_gaps]))
    table = pd.concat(pieces, ignore_index=True)
    table["name"] = _name_codes(threads, table)
    table["of_name_ns"] = table.groupby(["window", "kind", "name"], sort=False)["overlap_ns"].transform("sum")
    longest = table.sort_values(["of_name_ns", "overlap_ns"]).drop_duplicates("window", keep="last")
    gap = other_gaps[longest["window"]]
    kind[gap] = longest["kind"]
    row[gap] = longest["row"]
    return kind, row


def _name_codes(threads: Threads, pieces: pd.DataFrame) -> Int:
    """Number the name of each piece's event, counted within its kind; 0 for kinds without names."""
    code = np.zeros(len(pieces), np.int64)
    for kind in np.unique(pieces["kind"]).tolist():
        table = TABLE_OF.get(EVIDENCE_KINDS[kind])
        if table is not None and table != "memops":
            pieces_of_kind = np.flatnonzero(pieces["kind"] == kind)
            names = threads.trace.table(table, ["name"])["name"]
            code[pieces_of_kind] = names.cat.codes.to_numpy()[pieces["row"].to_numpy()[pieces_of_kind]]
    return code


def _blocking_calls(threads: Threads, group: _Group, handed_over: Int) -> Int:
    """Find the blocking call that a thread was in as the device ran dry; -1 without one, or if it is not the cause.

    It is the cause if the thread, without its waits since its last launch, would have launched early enough to close at
    least half of the gap. A short wait ahead of longer CPU work is not.
    """
    rows = np.full(len(handed_over), -1, np.int64)
    gap_ns = group.end - group.dry
    # The previous thread is asked up to its last call, the launching thread up to its launch.
    for thread, until in ((group.previous_thread, handed_over), (group.launching_thread, group.launch_begun)):
        blocking = threads.blocking(thread)
        if not len(blocking):
            continue
        # A nanosecond before the device ran dry: a call that returns at that very moment was waiting for it.
        running = blocking.innermost_at(group.dry - 1)
        waiting_gaps = np.flatnonzero((running >= 0) & (until > group.dry))
        call = running[waiting_gaps]
        launches = threads.launch_starts(thread)
        # Without a launch before, from the thread's first blocking call on.
        last_launch = _value_before(launches, launches, blocking.start[call], otherwise=blocking.start[0])
        # By so much earlier the thread would have launched.
        waited_ns = blocking.covered(last_launch, until[waiting_gaps])
        is_enough = 2 * waited_ns >= gap_ns[waiting_gaps]
        rows[waiting_gaps[is_enough]] = blocking.row[call[is_enough]]
    return rows
