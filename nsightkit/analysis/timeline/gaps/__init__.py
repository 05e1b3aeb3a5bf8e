"""Why the GPU was idle: every gap of a device, with exactly one cause and the evidence for it.

A gap is judged from the thread that launched the operation which ends it: what was that thread doing between the moment
the device ran dry and the moment the launch had returned? Its time is painted once (``paint``); the label that holds
most of the wait names the cause (``rules``).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core.intervals import chunks, gpu_intervals, idle_intervals, launches_of, selected, span_ns
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps.paint import EVIDENCE_KINDS, TABLE_OF, Int
from nsightkit.analysis.timeline.gaps.rules import CAUSES, decide
from nsightkit.analysis.timeline.gaps.threads import Threads
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["CAUSES", "causes", "find", "in_window", "memop_name", "names_of", "summary"]

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
    gaps = _gaps(trace, min_ns)
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
    gaps = _gaps(trace, min_ns)
    named = _with_names(trace.whole, gaps)
    table = named[["device", "start_ns", "end_ns"]].copy()
    table["duration_ns"] = table["end_ns"] - table["start_ns"]
    table["cause"] = named["cause"].astype(object)
    table["evidence"] = np.array(_evidence(trace.whole, gaps, named), dtype=object)
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
    return _with_names(trace.whole, _gaps(trace))


@kept
def in_window(trace: Trace) -> pd.DataFrame:
    """Give the idle time of the window that the steps cover, with its causes: gaps, and what lies at the window's ends.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        As :func:`nsightkit.analysis.timeline.gaps.causes` gives gaps, which are cut at the window's ends. Without steps
        just those.
    """
    windows = steps.windows(trace)
    if windows.empty:
        return causes(trace)
    begin = int(windows["begin_ns"].iloc[0])
    end = int(windows["end_ns"].iloc[-1])
    gaps = _gaps(trace)
    gaps = gaps[(gaps["end_ns"] > begin) & (gaps["start_ns"] < end)]
    gaps = gaps.assign(start_ns=gaps["start_ns"].clip(lower=begin), end_ns=gaps["end_ns"].clip(upper=end))
    ends = _at_ends(trace, begin, end, int(windows["thread"].iloc[0]))
    return _with_names(trace.whole, pd.concat([gaps, ends], ignore_index=True))


def memop_name(kind: str) -> str:
    """Call a copy or memset what Nsight Systems calls it.

    Parameters
    ----------
    kind : str
        Of the model's ``memops``.
    """
    if kind == "memset":
        return kind
    return f"memcpy {kind}"


def _with_names(whole: Trace, gaps: pd.DataFrame) -> pd.DataFrame:
    """Replace numbers by words: from the columns of :func:`_decide` to those of :func:`causes`."""
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


def _gaps(trace: Trace, min_ns: int = 0) -> pd.DataFrame:
    """The gaps of a trace or of a selection, of `min_ns` or longer, in the columns of :func:`_decide`."""
    gaps = _decide(trace.whole)
    keep = (gaps["end_ns"] - gaps["start_ns"] >= min_ns).to_numpy(copy=True)
    if trace is not trace.whole:
        # Gaps that end with a selected operation, but not with the first one of its device.
        first_ns = gpu_intervals(trace).groupby("device")["start_ns"].min()
        keep &= selected(trace, gaps["table"], gaps["row"])
        keep &= (gaps["end_ns"] > gaps["device"].map(first_ns)).to_numpy()
    if keep.all():
        return gaps
    return gaps[keep].reset_index(drop=True)


@kept
def _decide(whole: Trace) -> pd.DataFrame:
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
        answers.append(decide(threads, part))
    del gaps["process"]
    for column in ("cause", "source", "source_row"):
        gaps[column] = np.concatenate([answer.pop(column).to_numpy() for answer in answers])
    return gaps


def _at_ends(trace: Trace, begin: int, end: int, steps_ran_on: int) -> pd.DataFrame:
    """Give causes to the idle time at the ends of a window, by the rules for gaps.

    It lies before a device's first operation and after its last one; the rest are gaps. What lies after the last one
    is judged as if a launch of the thread on which the steps ran ended it when the window ends.
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
    launched_by = None
    if len(threads.calls(steps_ran_on)):
        launched_by = steps_ran_on
    return ends.join(decide(threads, ends, launched_by))


def _evidence(whole: Trace, gaps: pd.DataFrame, named: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """Describe the deciding event of each gap and the operation that ended the gap, as :func:`find` has them."""
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
    rows : ndarray of int

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
