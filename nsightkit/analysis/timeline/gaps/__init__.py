"""Why the GPU was idle: every gap of a device, with exactly one cause and the evidence for it.

A gap is judged from the thread that launched the operation which ends it: what was that thread doing between the moment
the device ran dry and the moment the launch had returned? Each moment of its time has one label (``threads``). Two
causes are counterfactual and come first: `queued` and `synchronization`. Else the label that holds most of the wait
names the cause. Work that changes threads is followed: up to its last CUDA call the thread that fed the device before
is asked.

Rows count in the tables of ``trace.whole``, the trace without its filters; -1 means none. What `memoised`
functions return must not be changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core.causes import IDLE
from nsightkit.analysis.core.intervals import chunks, gpu_intervals, idle_intervals, launches_of, selected, span_ns
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps.threads import (
    CAUSE_OF_LABEL,
    DISPATCH,
    EAGER_NS,
    EVIDENCE_KINDS,
    LABELS,
    TABLE_OF,
    UNKNOWN,
    Int,
    Threads,
)
from nsightkit.analysis.timeline.steps import QUEUED_NS
from nsightkit.trace.model import GPU_TABLES, Trace, memoised, process_of

#: What the rules look at; one pass a table.
_GPU_COLUMNS = ["start_ns", "end_ns", "device", "process", "correlation"]
_CPU_COLUMNS = ["start_ns", "end_ns", "thread", "name"]
_COLUMNS = {
    "kernels": _GPU_COLUMNS,
    "memops": [*_GPU_COLUMNS, "kind", "src_kind", "dst_kind"],
    "graphs": _GPU_COLUMNS,
    "calls": [*_CPU_COLUMNS, "correlation"],
    "ranges": [*_CPU_COLUMNS, "process", "domain"],
    "ops": _CPU_COLUMNS,
    "os_calls": _CPU_COLUMNS,
    "overhead": _CPU_COLUMNS,
}


def summary(trace: Trace, min_ns: int = 0) -> pd.DataFrame:
    """Sum idle time by cause.

    Parameters
    ----------
    trace : Trace
    min_ns : int
        Leave out gaps shorter than this.

    Returns
    -------
    DataFrame
        ``cause, count, total_ns, share_of_span``, by falling ``total_ns``; the share is of the sum of the devices'
        spans. Without `min_ns` and without a filter on the trace the totals sum to the idle time.
    """
    gaps = _selected_gaps(trace, min_ns)
    length = gaps["end_ns"] - gaps["start_ns"]
    table = length.groupby(gaps["cause"]).agg(["size", "sum"]).reset_index()
    table.columns = pd.Index(["cause", "count", "total_ns"])
    table["cause"] = np.array(CAUSES, object)[table["cause"]]
    table["share_of_span"] = table["total_ns"] / max(span_ns(trace), 1)
    return table.sort_values("total_ns", ascending=False, ignore_index=True)


def find(trace: Trace, min_ns: int = 0) -> pd.DataFrame:
    """List each gap with its cause and evidence.

    Parameters
    ----------
    trace : Trace
    min_ns : int
        As in :func:`summary`.

    Returns
    -------
    DataFrame
        ``device, start_ns, end_ns, duration_ns, cause, evidence``, by device and time. ``evidence`` is a dict:
        ``kind`` (call, range, op, os_call, copy, overhead, sample or none), ``name, start_ns, end_ns, thread``
        (``device`` for a copy) of the deciding event, and ``ended_by`` (the operation that ended the gap).
    """
    gaps = _selected_gaps(trace, min_ns)
    named = _with_names(trace.whole, gaps)
    table = named[["device", "start_ns", "end_ns"]].copy()
    table["duration_ns"] = table["end_ns"] - table["start_ns"]
    table["cause"] = named["cause"].astype(object)
    table["evidence"] = np.array(_evidence_records(trace.whole, gaps, named), dtype=object)
    return table


def causes(trace: Trace) -> pd.DataFrame:
    """List each gap with its cause and the name of the deciding event: :func:`find` as plain columns.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        ``device, start_ns, end_ns, cause, kind, name, row``, by device and time; ``cause, kind, name`` are categories.
        ``row`` counts in the event's table of ``trace.whole``; -1, with an empty name, where no event decided.
    """
    return _with_names(trace.whole, _selected_gaps(trace))


@memoised
def in_window(trace: Trace) -> pd.DataFrame:
    """Give the idle time of the window that the steps cover, with its causes: gaps, and what lies at the window's ends.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        As :func:`nsightkit.analysis.timeline.gaps.causes` gives gaps, which are cut at the window's ends. Gaps are of
        every device, whichever process used it, ends are of the devices that worked in the window. Without steps all
        gaps, uncut.
    """
    windows = steps.windows(trace)
    if windows.empty:
        return causes(trace)
    begin = int(windows["begin_ns"].iloc[0])
    end = int(windows["end_ns"].iloc[-1])
    gaps = _selected_gaps(trace)
    gaps = gaps[(gaps["end_ns"] > begin) & (gaps["start_ns"] < end)]
    gaps = gaps.assign(start_ns=gaps["start_ns"].clip(lower=begin), end_ns=gaps["end_ns"].clip(upper=end))
    ends = _idle_at_ends(trace, begin, end, int(windows["thread"].iloc[0]))
    return _with_names(trace.whole, pd.concat([gaps, ends], ignore_index=True))


def memop_name(kind: str) -> str:
    """Call a copy or memset what Nsight Systems calls it.

    Parameters
    ----------
    kind : str
        As in the table ``memops`` of a trace: ``HtoD``, ``memset``, ….
    """
    if kind == "memset":
        return kind
    return f"memcpy {kind}"


def _with_names(whole: Trace, gaps: pd.DataFrame) -> pd.DataFrame:
    """Replace numbers by words: from the columns of :func:`_gaps_of_whole` to those of :func:`causes`."""
    source = gaps["source"].to_numpy()
    row = gaps["source_row"].to_numpy()
    name = np.full(len(gaps), "", object)
    # From 1: kind 0 is "none", which has no table.
    for kind, table in enumerate(TABLE_OF.values(), 1):
        gaps_of_kind = np.flatnonzero((source == kind) & (row >= 0))
        if len(gaps_of_kind):  # reading the names of samples is expensive
            name[gaps_of_kind] = names_of(whole, table, row[gaps_of_kind])
    named = gaps[["device", "start_ns", "end_ns"]].copy()
    named["cause"] = pd.Categorical.from_codes(gaps["cause"], pd.Index(CAUSES))
    named["kind"] = pd.Categorical.from_codes(source, pd.Index(EVIDENCE_KINDS))
    named["name"] = pd.Categorical(name)
    named["row"] = row
    return named


def _selected_gaps(trace: Trace, min_ns: int = 0) -> pd.DataFrame:
    """The gaps of a trace or of a selection, of `min_ns` or longer, in the columns of :func:`_gaps_of_whole`."""
    gaps = _gaps_of_whole(trace.whole)
    keep = (gaps["end_ns"] - gaps["start_ns"] >= min_ns).to_numpy(copy=True)
    if trace is not trace.whole:
        # Gaps that end with a selected operation, but not with the first one of its device: that gap lies before the
        # selection.
        first_ns = gpu_intervals(trace).groupby("device")["start_ns"].min()
        keep &= selected(trace, gaps["table"], gaps["row"])
        keep &= (gaps["end_ns"] > gaps["device"].map(first_ns)).to_numpy()
    if keep.all():
        return gaps
    return gaps[keep].reset_index(drop=True)


@memoised
def _gaps_of_whole(whole: Trace) -> pd.DataFrame:
    """Find all gaps and decide their causes: ``device, start_ns, end_ns, table, row, cause, source, source_row``.

    ``table`` and ``row`` are of the operation that ended the gap (:func:`gpu_intervals`), the others as from
    :func:`decide`.
    """
    whole.prefetch(_COLUMNS)
    ops = gpu_intervals(whole, "process")
    gaps = idle_intervals(whole, ops)
    table = ops["table"].to_numpy()
    row = ops["row"].to_numpy()
    after = gaps.pop("after").to_numpy()
    gaps["table"] = table[after]
    gaps["row"] = row[after]
    gaps["process"] = ops["process"].to_numpy()[after]
    del ops  # as large as the trace
    threads = Threads(whole)
    answers = []
    # Without gaps there is one empty chunk, for the columns of its answer.
    for chunk in chunks(max(len(after), 1)):
        part = gaps.iloc[chunk].reset_index(drop=True)
        part["launch"] = launches_of(whole, part["table"], part["row"]).astype(np.int32)
        part["before"] = np.int32(-1)
        if threads.has_several_threads:
            # By device and start, the operation before the end of a gap is the last to start before the gap.
            before = after[chunk] - 1
            part["before"] = launches_of(whole, table[before], row[before]).astype(np.int32)
        answers.append(_decide_causes(threads, part))
    del gaps["process"]
    for column in ("cause", "source", "source_row"):
        gaps[column] = np.concatenate([answer.pop(column).to_numpy() for answer in answers])
    return gaps


def _idle_at_ends(trace: Trace, begin: int, end: int, steps_ran_on: int) -> pd.DataFrame:
    """Give causes to the idle time at the ends of a window, by the rules for gaps.

    It lies before a device's first operation and after its last one; the rest are gaps. What lies after the last one
    is judged as if a launch of the thread on which the steps ran ended it when the window ends. So is what lies before
    a first one whose launch is unknown. That thread stands for those of other processes, too.
    """
    ops = gpu_intervals(trace, "process")
    inside = ops[(ops["end_ns"] > begin) & (ops["start_ns"] < end)]
    ops = ops[ops["device"].isin(inside["device"])]  # with operations outside of the window: between those are gaps
    first = ops.drop_duplicates("device")
    first = first.assign(launch=launches_of(trace, first["table"], first["row"]), before=-1)
    last_ns = ops.groupby("device")["end_ns"].max().to_numpy()
    before_first = first.assign(start_ns=begin, end_ns=first["start_ns"])
    after_last = first.assign(start_ns=last_ns, end_ns=end, launch=-1)
    ends = pd.concat([before_first, after_last])
    ends = ends[ends["start_ns"] < ends["end_ns"]].sort_values("device", kind="stable", ignore_index=True)
    threads = Threads(trace)
    launched_by = None  # a thread without CUDA calls launched nothing
    if len(threads.calls(steps_ran_on)):
        launched_by = steps_ran_on
    return ends.join(_decide_causes(threads, ends, launched_by))


def _evidence_records(whole: Trace, gaps: pd.DataFrame, named: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """Describe the deciding event of each gap and the operation that ended the gap, as :func:`find` has them.

    `gaps` has the columns of :func:`_gaps_of_whole`, `named` those of :func:`causes` for the same gaps.
    """
    evidence = named[["kind", "name"]].to_dict("records")
    for kind, table in TABLE_OF.items():
        place = "thread"
        if table in GPU_TABLES:
            place = "device"
        rows = named.loc[(named["kind"] == kind) & (named["row"] >= 0), "row"]
        if len(rows):
            events = whole.table(table, ["start_ns", "end_ns", place]).iloc[rows]
            for gap, event in zip(rows.index, events.to_dict("records"), strict=True):
                evidence[gap] |= event
    for number, table in enumerate(GPU_TABLES):
        rows = gaps.loc[gaps["table"] == number, "row"]
        for gap, name in zip(rows.index, names_of(whole, table, rows.to_numpy()), strict=True):
            evidence[gap]["ended_by"] = name
    return evidence


def names_of(whole: Trace, table: str, rows: Int) -> pd.Categorical[str]:
    """Give the names of some events.

    Parameters
    ----------
    whole : Trace
    table : str
        Of the trace's tables.
    rows : ndarray of int
        Of the events in `table`.

    Returns
    -------
    Categorical of str
        Copies and memsets as :func:`memop_name` calls them.
    """
    if table == "graphs":
        return pd.Categorical(["graph replay"] * len(rows))
    if table == "memops":
        kinds = whole.table(table, ["kind"])["kind"].iloc[rows]
        return pd.Categorical(kinds.astype(str).map(memop_name))
    return pd.Categorical(whole.table(table, ["name"])["name"].iloc[rows].astype(str))


# ---------------------------------------------------------------- rules


#: Causes of idle time: all of those, and messages between processes, in which the CPU takes part.
CAUSES = (*(cause.slug for cause in IDLE), "communication")
_CAUSE_OF_LABEL = np.array([CAUSES.index(cause) for cause in CAUSE_OF_LABEL.values()], np.int8)
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


def _decide_causes(threads: Threads, gaps: pd.DataFrame, launched_by: int | None = None) -> pd.DataFrame:
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
    launches = _launches_of_gaps(threads, gaps, launched_by)
    cause = np.full(len(gaps), -1, np.int8)
    source = np.zeros(len(gaps), np.int8)
    source_row = np.full(len(gaps), -1, np.int32)
    fields = ["dry", "end", "launch", "launch_begun", "launch_returned"]  # of a `_Group`, in order
    rows_of_group: dict[Any, Any] = launches.groupby(["launching_thread", "previous_thread"]).indices
    for (launching_thread, previous_thread), rows in rows_of_group.items():
        in_group = launches.iloc[rows]
        group = _Group(launching_thread, previous_thread, *(in_group[field].to_numpy() for field in fields))
        cause[rows], source[rows], source_row[rows] = _causes_of_group(threads, group)
        threads.forget()  # bounds the memory of what it memoised for each thread
    return pd.DataFrame({"cause": cause, "source": source, "source_row": source_row})


def _launches_of_gaps(threads: Threads, gaps: pd.DataFrame, launched_by: int | None) -> pd.DataFrame:
    """Find who launched the end of each gap and when, and who fed the device before: the columns of a `_Group`.

    `launched_by` is the thread that is assumed to have launched where no launch was recorded, None for an unknown one.
    """
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
    """Decide the cause of each gap, and the kind and row of the event that is its evidence.

    :class:`_Group` draws the moments of a gap (`dry`, `handed_over`, …) and which thread is asked between them.
    """
    handed_over = _handed_over(threads, group)
    asked = [(group.launching_thread, handed_over, group.launch_returned)]
    if group.previous_thread != -1:
        asked.append((group.previous_thread, group.dry, handed_over))
    label = _largest_label(threads, group, asked)
    cause = _CAUSE_OF_LABEL[label]
    kind, row = _evidence_of_group(threads, group, label, asked)

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
    """Find the label that holds most of each gap, in the time that each thread is asked about.

    Of labels that hold as much, the first in `LABELS` counts.
    """
    label_ns = np.zeros((len(LABELS), len(group.dry)), np.int64)
    for thread, start, end in asked:
        label_ns += threads.paint(thread).shares(start, end)
    # Of a thread with recorded calls, a silence as short as dispatch is dispatch.
    is_known = (group.launching_thread & UNKNOWN) != UNKNOWN
    if is_known:
        quiet_ns = label_ns[_QUIET].sum(axis=0)
        is_short = quiet_ns <= EAGER_NS
        label_ns[DISPATCH] += np.where(is_short, quiet_ns, 0)
        label_ns[_QUIET] *= ~is_short
    largest: Int = np.argmax(label_ns, axis=0)
    # All are 0 where the launch had returned before the device ran dry: to start launched work takes time, too.
    if is_known:
        largest[label_ns.max(axis=0) == 0] = DISPATCH
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


def _evidence_of_group(threads: Threads, group: _Group, label: Int, asked: list[_Asked]) -> tuple[Int, Int]:
    """Find the kind and row of each gap's evidence: the launch for dispatch, else the longest event with the label.

    Of several names with that label, the one with most time in the gap counts.
    """
    kind = np.zeros(len(label), np.int8)
    row = np.full(len(label), -1, np.int64)
    is_dispatch = label == DISPATCH
    kind[is_dispatch] = _CALL
    row[is_dispatch] = group.launch[is_dispatch]
    other_gaps = np.flatnonzero(~is_dispatch)
    # Pieces of a gap's time that have its label: window (position in `other_gaps`), kind, row, overlap_ns.
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
        if table is not None and table != "memops":  # copies have no names
            pieces_of_kind = np.flatnonzero(pieces["kind"] == kind)
            names = threads.trace.table(table, ["name"])["name"]
            code[pieces_of_kind] = names.cat.codes.to_numpy()[pieces["row"].to_numpy()[pieces_of_kind]]
    return code


def _blocking_calls(threads: Threads, group: _Group, handed_over: Int) -> Int:
    """Find the blocking call that a thread was in as the device ran dry; -1 without one, or if it is not the cause.

    It is the cause if the thread, without its waits since its last launch, would have launched early enough to close at
    least half of the gap. A short wait ahead of longer CPU work is not. Of two threads' calls, the launching thread's
    counts.
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
