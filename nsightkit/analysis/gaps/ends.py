"""Idle time at the ends of a window: before a device's first operation in it, and after its last."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nsightkit.analysis import steps
from nsightkit.analysis.gaps import causes
from nsightkit.analysis.gaps.facts import EVIDENCE, TABLE_OF, UNDECIDED, Elsewhere, Gaps, Group
from nsightkit.analysis.gaps.rules import CAUSES, decide
from nsightkit.analysis.gaps.threads import Threads
from nsightkit.analysis.intervals import gpu_intervals, launches_of
from nsightkit.trace.model import Trace

__all__ = ["in_window"]


def in_window(trace: Trace) -> pd.DataFrame:
    """Give the idle time of the window that the steps cover, with its causes: gaps, and what lies at the window's ends.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        As :func:`nsightkit.analysis.gaps.causes` gives gaps, which are cut at the window's ends. Without steps just
        those.
    """
    found, windows = causes(trace), steps.windows(trace)
    if not len(windows):
        return found
    begin, end = int(windows["begin_ns"].iloc[0]), int(windows["end_ns"].iloc[-1])
    found = found[(found["end_ns"] > begin) & (found["start_ns"] < end)]
    found = found.assign(start_ns=found["start_ns"].clip(lower=begin), end_ns=found["end_ns"].clip(upper=end))
    ends = _at_ends(trace, begin, end, int(windows["thread"].iloc[0]))
    texts = dict.fromkeys(("cause", "kind", "name"), object)
    found = pd.concat([found.astype(texts), ends.astype(texts)], ignore_index=True) if len(ends) else found
    return found.assign(**{name: found[name].astype("category") for name in texts})


def _at_ends(trace: Trace, begin: int, end: int, thread: int) -> pd.DataFrame:
    """Give causes to the idle time at the ends of a window, by the rules for gaps.

    A device that has nothing to do at the end is judged as if a launch ended its idle time when the window ends.

    Parameters
    ----------
    trace : Trace
    begin, end : int
        The window, ns.
    thread : int
        That the steps ran on: who would have launched at the window's end.

    Returns
    -------
    DataFrame
        As :func:`nsightkit.analysis.gaps.causes` gives gaps.
    """
    whole = trace.whole
    ops = gpu_intervals(trace)
    ops = ops[(ops["end_ns"] > begin) & (ops["start_ns"] < end)]
    threads, elsewhere = Threads(whole), Elsewhere(whole)
    rows = []
    for device, mine in ops.groupby("device"):
        first, last = mine.loc[mine["start_ns"].idxmin()], mine.loc[mine["end_ns"].idxmax()]
        for low, high, op, is_lead in ((begin, first["start_ns"], first, True), (last["end_ns"], end, last, False)):
            if high <= low:
                continue
            table, row = int(op["table"]), int(op["row"])
            launch = int(launches_of(trace, np.array([table]), np.array([row]))[0]) if is_lead else -1
            found = Gaps(*(np.array([v]) for v in (device, low, high, table, row, launch, UNDECIDED, 0, -1)))
            by, begun, done = thread, high, high
            if launch >= 0:
                call = whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[launch]
                begun, done, by = int(call["start_ns"]), int(call["end_ns"]), int(call["thread"])
            if len(threads.calls(by)) or is_lead:
                group = Group(found, threads, elsewhere, by >> 24, by, None, np.array([begun]), np.array([done]))
                decide(group)
            cause = CAUSES[int(found.cause[0])] if found.cause[0] != UNDECIDED else "unknown"
            kind, at = EVIDENCE[int(found.source[0])], int(found.source_row[0])
            name = ""
            if kind in TABLE_OF and at >= 0:
                column = "kind" if TABLE_OF[kind] == "memops" else "name"
                name = str(whole.table(TABLE_OF[kind], [column])[column].iloc[at])
            rows.append((device, int(low), int(high), cause, kind, name, at))
    return pd.DataFrame(rows, columns=["device", "start_ns", "end_ns", "cause", "kind", "name", "row"])
