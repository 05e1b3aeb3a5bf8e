"""The cause of a gap, from the thread that launched the operation which ends it.

Two causes are counterfactual and come first: `queued` and `synchronization`. Else the label with the largest share of
the time from "the device ran dry" to "the launch had returned" names the cause
(:mod:`nsightkit.analysis.timeline.gaps.paint`). Work that changes threads is followed: up to its last CUDA call the
thread that fed the device before is asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import causes
from nsightkit.analysis.timeline.gaps.paint import EVIDENCE, LABELS, TABLE_OF
from nsightkit.analysis.timeline.gaps.threads import EAGER_NS, Threads
from nsightkit.analysis.timeline.steps import QUEUED_NS
from nsightkit.trace.model import GPU_TABLES

__all__ = ["CAUSES", "decide"]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]

#: Causes of idle time: all of those, and messages between processes, in which the CPU takes part.
CAUSES = (*(cause.slug for cause in causes.IDLE), "communication")
_CAUSE_OF_LABEL = {
    "profiler": "profiler",
    "once": "start-up",
    "compile": "recompilation",
    "faults": "memory-transfer",
    "data": "input-pipeline",
    "staging": "memory-transfer",
    "messages": "communication",
    "work": "cpu-work",
    "dispatch": "launch-overhead",
    "enclosed": "cpu-work",
    "silence": "unknown",
}
_OF_LABEL = np.array([CAUSES.index(_CAUSE_OF_LABEL[label]) for label in LABELS], np.int8)
_DISPATCH = LABELS.index("dispatch")
_QUIET = [LABELS.index("enclosed"), LABELS.index("silence")]
#: Labels that stay the cause although a blocking call was running as the device ran dry.
_SETTLED = [LABELS.index(label) for label in ("profiler", "once", "compile", "data", "messages")]
_CALL = EVIDENCE.index("call")
_NEVER = -(2**62)


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """Gaps that end with launches of one thread.

    Parameters
    ----------
    process : int
    thread : int
        That launched the operations which end the gaps; -1 where no launch was recorded.
    other : int
        The thread that fed the device before, if it is not the same; -1 for none.
    dry, end : ndarray of int
        When each device ran dry, and when it had work again.
    launch : ndarray of int
        Rows of the launching calls (-1: unknown).
    begun, returned : ndarray of int
        When they began and returned, within the gap.
    """

    process: int
    thread: int
    other: int
    dry: Int
    end: Int
    launch: Int
    begun: Int
    returned: Int


class _Part(NamedTuple):
    """A thread that is asked about each gap, from when to when."""

    thread: int
    start: Int
    end: Int


def decide(
    threads: Threads, gaps: Mapping[str, Int], before: Int | None = None, launched_by: int = -1
) -> dict[str, Int]:
    """Give each gap its cause.

    Parameters
    ----------
    threads : Threads
    gaps : mapping of str to ndarray of int
        ``start_ns, end_ns``; ``table`` and ``row`` of the operation that ends the gap, and its ``launch``.
    before : ndarray of int, optional
        The launch of the operation before each gap; -1 for unknown.
    launched_by : int
        The thread to ask where the launch is unknown; -1 for none.

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


class _Launches(NamedTuple):
    """When the launches that end gaps began and returned, within the gap, and their threads and processes."""

    begun: Int
    returned: Int
    thread: Int
    process: Int


def _launches(threads: Threads, gaps: Mapping[str, Int], asked: int) -> _Launches:
    """The launches that end gaps; unknown ones get the thread `asked`."""
    dry, end, launch = gaps["start_ns"], gaps["end_ns"], gaps["launch"]
    known = np.flatnonzero(launch >= 0)
    calls = threads.trace.table("calls", ["start_ns", "end_ns", "thread"])
    columns = [end.copy(), end.copy(), np.full(len(launch), asked, np.int64)]
    for column, name in zip(columns, calls, strict=True):
        column[known] = calls[name].to_numpy()[launch[known]]
    begun, returned, thread = columns
    process = thread >> 24
    for number, name in enumerate(GPU_TABLES):
        unknown = np.flatnonzero((thread == -1) & (gaps["table"] == number))
        process[unknown] = threads.trace.table(name, ["process"])["process"].to_numpy()[gaps["row"][unknown]]
    return _Launches(np.clip(begun, dry, end), np.clip(returned, dry, end), thread, process)


def _groups(threads: Threads, gaps: Mapping[str, Int], before: Int | None, asked: int) -> Iterator[tuple[Int, _Group]]:
    """Group gaps by the thread that ended them and the thread that fed the device before."""
    launches, launch = _launches(threads, gaps, asked), gaps["launch"]
    other = np.full(len(launch), -1, np.int64)
    if before is not None:
        fed_by = threads.trace.table("calls", ["thread"])["thread"].to_numpy()[before]
        changed = (launch >= 0) & (before >= 0) & (fed_by != launches.thread) & (fed_by >> 24 == launches.process)
        other[changed] = fed_by[changed]
    keys = pd.DataFrame({"process": launches.process, "thread": launches.thread, "other": other})
    indices: dict[Any, Any] = keys.groupby(list(keys)).indices
    for key, at in indices.items():
        columns = (gaps["start_ns"], gaps["end_ns"], launch, launches.begun, launches.returned)
        of_process, thread, fed_before = map(int, key)
        yield np.asarray(at), _Group(of_process, thread, fed_before, *(column[at] for column in columns))


def _of_group(threads: Threads, group: _Group) -> tuple[Int, Int, Int]:
    """Cause, kind and row of evidence of each gap."""
    over = _handed_over(threads, group)
    parts = [_Part(group.thread, over, group.returned)]
    if group.other != -1:
        parts.append(_Part(group.other, group.dry, over))
    shares = np.zeros((len(LABELS), len(over)), np.int64)
    for part in parts:
        shares += threads.paint(part.thread, group.process).shares(part.start, part.end)
    label = _largest(shares, short_counts=group.thread != -1)
    cause = _OF_LABEL[label]
    kind, row = _evidence(threads, group, label, parts)

    waits = _synchronization(threads, group, over)
    waited = (waits >= 0) & ~np.isin(label, _SETTLED)
    cause[waited], kind[waited], row[waited] = CAUSES.index("synchronization"), _CALL, waits[waited]
    lay = group.end - group.returned
    queued = (lay > QUEUED_NS) & (2 * lay >= group.end - group.dry)
    cause[queued], kind[queued], row[queued] = CAUSES.index("queued"), _CALL, group.launch[queued]
    return cause, kind, row


def _largest(shares: Int, *, short_counts: bool) -> Int:
    """The label that holds most of each wait; of a known thread, a silence as short as dispatch is dispatch."""
    if short_counts:
        quiet = shares[_QUIET].sum(axis=0)
        short = quiet <= EAGER_NS
        shares[_DISPATCH] += np.where(short, quiet, 0)
        shares[_QUIET] *= ~short
    largest: Int = np.argmax(shares, axis=0)
    if short_counts:
        largest[shares.max(axis=0) == 0] = _DISPATCH
    return largest


def _handed_over(threads: Threads, group: _Group) -> Int:
    """When the thread that fed the device before made its last call, if it was at work until the gap or in it."""
    if group.other == -1:
        return group.dry
    ends = []
    for thread in (group.thread, group.other):
        calls = threads.calls(thread)
        last = np.searchsorted(calls.start, group.begun) - 1
        end = np.full(len(last), _NEVER)
        end[last >= 0] = calls.end[last[last >= 0]]
        ends.append(end)
    here, there = ends
    return np.where(there > here, np.clip(there, group.dry, group.begun), group.dry)


def _evidence(threads: Threads, group: _Group, label: Int, parts: list[_Part]) -> tuple[Int, Int]:
    """Kind and row of an event: of the name that holds most of the label's time, the longest event."""
    kind, row = np.zeros(len(label), np.int8), np.full(len(label), -1, np.int64)
    dispatch = label == _DISPATCH
    kind[dispatch], row[dispatch] = _CALL, group.launch[dispatch]
    named = np.flatnonzero(~dispatch)
    pieces = pd.concat([_pieces(threads, group.process, part, named, label) for part in parts], ignore_index=True)
    if pieces.empty:
        return kind, row
    names = _codes(threads, pieces["kind"].to_numpy(), pieces["row"].to_numpy())
    of_name = pieces["overlap_ns"].groupby([pieces["gap"], pieces["kind"], names]).transform("sum").to_numpy()
    order = np.lexsort((-pieces["overlap_ns"], -of_name, pieces["gap"]))
    best = pieces.iloc[order].drop_duplicates("gap")
    kind[best["gap"]], row[best["gap"]] = best["kind"], best["row"]
    return kind, row


def _pieces(threads: Threads, process: int, part: _Part, named: Int, label: Int) -> pd.DataFrame:
    """The painted pieces of some gaps that have the gap's label."""
    paint = threads.paint(part.thread, process)
    window, piece, overlap_ns = paint.overlaps(part.start[named], part.end[named], label[named])
    columns = {"gap": named[window], "kind": paint.kind[piece], "row": paint.row[piece], "overlap_ns": overlap_ns}
    return pd.DataFrame(columns)


def _codes(threads: Threads, kind: Int, row: Int) -> Int:
    """A number for the name of each event, within its kind."""
    codes = np.zeros(len(kind), np.int64)
    for number, table in enumerate(TABLE_OF.values(), 1):
        at = np.flatnonzero(kind == number)
        if len(at):
            names = threads.trace.table(table, ["kind" if table == "memops" else "name"]).iloc[:, 0]
            codes[at] = names.cat.codes.to_numpy()[row[at]]
    return codes


def _synchronization(threads: Threads, group: _Group, over: Int) -> Int:
    """Rows of the calls in which a thread waited as the device ran dry, -1 where that is not the cause.

    Without the wait the thread would have launched in time to close half of the gap, or more. The CPU time until its
    next launch counts with the wait. A wait ahead of longer work of the CPU is not the cause of that work.
    """
    rows = np.full(len(over), -1, np.int64)
    gap = group.end - group.dry
    for thread, until in ((group.other, over), (group.thread, group.begun)):
        if thread == -1 or not len(threads.blocking(thread)):
            continue
        blocking, gave = threads.blocking(thread), threads.gave_work(thread)
        # A nanosecond before the device ran dry: a call that returns at that very moment was waiting for it.
        at = blocking.open_at(group.dry - 1)
        hit = np.flatnonzero((at >= 0) & (until > group.dry))
        row = blocking.row[at[hit]]
        last = np.searchsorted(gave, blocking.start[at[hit]]) - 1
        since = np.full(len(last), blocking.start[0])
        since[last >= 0] = gave[last[last >= 0]]
        enough = 2 * blocking.covered(since, until[hit]) >= gap[hit]
        # The upload that ends the gap is staging, not waiting.
        uploads = (row == group.launch[hit]) & threads.pageable("HtoD")[row]
        rows[hit[enough & ~uploads]] = row[enough & ~uploads]
    return rows
