"""Idle time at the ends of a window: before a device's first operation in it, and after its last."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nsightkit.analysis.core.intervals import gpu_intervals, launches_of
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps import causes
from nsightkit.analysis.timeline.gaps.facts import EVIDENCE, TABLE_OF, UNDECIDED, Elsewhere, Gaps, Group
from nsightkit.analysis.timeline.gaps.rules import CAUSES, decide
from nsightkit.analysis.timeline.gaps.threads import Threads
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
        As :func:`nsightkit.analysis.timeline.gaps.causes` gives gaps, which are cut at the window's ends. Without steps
        just those.
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
        As :func:`nsightkit.analysis.timeline.gaps.causes` gives gaps.
    """
    ops = gpu_intervals(trace)
    inside = (ops["end_ns"] > begin) & (ops["start_ns"] < end)
    judge = _Judge(trace)
    rows = []
    for device in ops.loc[inside, "device"].unique().tolist():
        mine = ops[ops["device"] == device]  # with what lies outside: up to there it is a gap
        first, last = (mine.iloc[[at]] for at in (mine["start_ns"].argmin(), mine["end_ns"].argmax()))
        started, ended = int(first["start_ns"].iloc[0]), int(last["end_ns"].iloc[0])
        if started > begin:
            launch = int(launches_of(trace, first["table"], first["row"])[0])
            rows.append((device, begin, started, *judge.of(device, begin, started, first, launch, thread)))
        if ended < end:
            rows.append((device, ended, end, *judge.of(device, ended, end, last, -1, thread)))
    return pd.DataFrame(rows, columns=["device", "start_ns", "end_ns", "cause", "kind", "name", "row"])


class _Judge:
    """The rules for gaps, for one gap at a time."""

    def __init__(self, trace: Trace) -> None:
        self._whole = trace.whole
        self._threads, self._elsewhere = Threads(self._whole), Elsewhere(self._whole)

    def of(
        self, device: int, start: int, end: int, op: pd.DataFrame, launch: int, thread: int
    ) -> tuple[str, str, str, int]:
        """Cause, kind of evidence, its name and row; without a launch, as if `thread` launched at the end."""
        whole = self._whole
        row = int(op["table"].iloc[0]), int(op["row"].iloc[0])
        gap = Gaps(*(np.array([v]) for v in (device, start, end, *row, launch, UNDECIDED, 0, -1)))
        begun, done = end, end
        if launch >= 0:
            calls = whole.table("calls", ["start_ns", "end_ns", "thread"])
            begun, done, thread = (int(calls[column].iloc[launch]) for column in calls)
        if len(self._threads.calls(thread)):
            times = np.array([begun]), np.array([done])
            decide(Group(gap, self._threads, self._elsewhere, thread >> 24, thread, None, *times))
        if gap.cause[0] == UNDECIDED:
            return "unknown", "none", "", -1
        kind, at = EVIDENCE[int(gap.source[0])], int(gap.source_row[0])
        if kind not in TABLE_OF or at < 0:
            return CAUSES[int(gap.cause[0])], kind, "", at
        column = "kind" if TABLE_OF[kind] == "memops" else "name"
        return CAUSES[int(gap.cause[0])], kind, str(whole.table(TABLE_OF[kind], [column])[column].iloc[at]), at
