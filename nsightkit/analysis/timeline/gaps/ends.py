"""Idle time at the ends of a window: before a device's first operation in it, and after its last."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nsightkit.analysis.core.intervals import gpu_intervals, launches_of
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps import causes, named
from nsightkit.analysis.timeline.gaps.facts import Elsewhere, Group
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


def _at_ends(trace: Trace, begin: int, end: int, steps_ran_on: int) -> pd.DataFrame:
    """Give causes to the idle time at the ends of a window, by the rules for gaps.

    A device that has nothing to do at the end is judged as if a launch ended its idle time when the window ends.

    Parameters
    ----------
    trace : Trace
    begin, end : int
        The window, ns.
    steps_ran_on : int
        The thread that would have launched at the window's end.

    Returns
    -------
    DataFrame
        As :func:`nsightkit.analysis.timeline.gaps.causes` gives gaps.
    """
    ops = gpu_intervals(trace)
    inside = (ops["end_ns"] > begin) & (ops["start_ns"] < end)
    threads, elsewhere = Threads(trace), Elsewhere(trace.whole)
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"])
    rows = []
    for device in ops.loc[inside, "device"].unique().tolist():
        mine = ops[ops["device"] == device]  # with what lies outside: up to there it is a gap
        first, last = mine.iloc[[mine["start_ns"].argmin()]], int(mine["end_ns"].max())
        launch = int(launches_of(trace, first["table"], first["row"])[0])
        for dry, until, by in ((begin, int(first["start_ns"].iloc[0]), launch), (last, end, -1)):
            if dry >= until:
                continue
            begun, done, thread = (until, until, steps_ran_on) if by < 0 else calls.iloc[by].tolist()
            decided = CAUSES.index("unknown"), 0, -1
            if len(threads.calls(thread)):
                gap = (np.array([value]) for value in (device, dry, until, by, begun, done))
                group = Group(threads, elsewhere, thread >> 24, thread, -1, *gap)
                decide(group)
                decided = int(group.cause[0]), int(group.source[0]), int(group.source_row[0])
            rows.append((device, dry, until, *decided))
    columns = ["device", "start_ns", "end_ns", "cause", "source", "source_row"]
    return named(trace.whole, pd.DataFrame(rows, columns=columns, dtype=np.int64))
