"""A part of a trace: one device, the inside of a range, a time window, the last steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.names import compiled, matching
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.ranges import holders
from nsightkit.errors import UsageError
from nsightkit.trace.model import GPU_TABLES, TABLES, Trace

T = TypeVar("T", bound=Trace)

__all__ = ["select"]

_Mask = npt.NDArray[np.bool_]
_DEVICE_TABLES = tuple(t for t, columns in TABLES.items() if "device" in columns)
_CPU_TABLES = tuple(t for t in TABLES if t not in _DEVICE_TABLES)


_TIMES = np.iinfo(np.int64)


def select(
    trace: T,
    device: int | None = None,
    within: str | None = None,
    time_ns: tuple[int | None, int | None] | None = None,
    last_steps: int | None = None,
) -> T:
    """Keep only some of a trace's events; filters combine (each must hold).

    Nothing is cut: an event is kept whole or not at all. ``whole`` of the result still gives all events,
    so a kernel keeps its launch, and a range its parents, when those were filtered out.

    Parameters
    ----------
    trace : Trace
    device : int, optional
        Only GPU operations of this device. What the CPU did stays.
    within : str, optional
        Regular expression, searched in range names. Keeps the GPU operations launched inside a matching
        range of the same process: on the range's own thread, or on a thread without ranges of its own (PyTorch
        launches ``backward`` from one); and what the process's CPU threads did inside.
    time_ns : tuple of int or None, optional
        Half-open window ``(a, b)`` on the trace's clock, None for an open side: events that start inside.
    last_steps : int, optional
        What was launched, and what the CPU did, in the last so many steps
        (:func:`nsightkit.analysis.timeline.steps.find`).

    Returns
    -------
    Trace
        `trace` itself when no filter was given.

    Raises
    ------
    UsageError
        A malformed expression, one that no range matches, a device or steps that the trace does not
        have, a window that ends before it starts.
    """
    given: tuple[tuple[Any, Callable[[Trace, Any], dict[str, _Mask]]], ...] = (
        (device, _on_device),
        (time_ns, _in_window),
        (within, _in_ranges),
        (last_steps, _in_last_steps),
    )
    chosen = trace
    for value, masks in given:
        if value is not None:
            old = {table: mask for table in TABLES if (mask := chosen.mask(table)) is not None}
            new = masks(trace, value)
            chosen = chosen.masked(old | {table: mask & old.get(table, True) for table, mask in new.items()})
    return chosen


def _on_device(trace: Trace, device: int) -> dict[str, _Mask]:
    whole = trace.whole
    columns = {t: whole.table(t, ["device"])["device"].to_numpy() for t in _DEVICE_TABLES if whole.size(t)}
    present = sorted({int(d) for t, c in columns.items() if t in GPU_TABLES for d in np.unique(c)})
    if device not in present:
        have = f"it has {', '.join(map(str, present))}" if present else "it has no GPU operations"
        raise UsageError(f"--device: the trace has no device {device}; {have}")
    return {t: c == device for t, c in columns.items()}


def _in_window(trace: Trace, window: tuple[int | None, int | None]) -> dict[str, _Mask]:
    begin, end = window
    if begin is not None and end is not None and end <= begin:
        raise UsageError(f"--time: the window ends at {end} ns, which is not after its start at {begin} ns")
    low, high = _TIMES.min if begin is None else begin, _TIMES.max if end is None else end
    starts = {t: trace.whole.table(t, ["start_ns"])["start_ns"] for t in TABLES if trace.whole.size(t)}
    return {table: start.between(low, high, inclusive="left").to_numpy() for table, start in starts.items()}


def _in_ranges(trace: Trace, within: str) -> dict[str, _Mask]:
    if not trace.whole.recorded("ranges"):
        raise UsageError("--within: the trace recorded no ranges (NVTX or record_function)")
    ranges = trace.whole.table("ranges", ["name", "start_ns", "end_ns", "process"])
    hit = matching(ranges["name"], compiled(within, "--within"))
    if not hit.any():
        known = ranges["name"].value_counts(sort=True)
        some = ", ".join(repr(str(n)) for n in known.index[known.to_numpy() > 0][:3])
        raise UsageError(f"--within: no range matches {within!r}; there are {some or 'no ranges at all'}")
    return _inside(trace, ranges[hit].assign(row=np.flatnonzero(hit)))


def _in_last_steps(trace: Trace, count: int) -> dict[str, _Mask]:
    if count < 1:
        raise UsageError(f"--last-steps: {count} is not a number of steps")
    found = steps.find(trace.whole)
    if not len(found):
        raise UsageError(
            "--last-steps: the trace has no step ranges (ProfilerStep#N, or ranges with 'step' in their name)"
        )
    return _inside(trace, found.tail(count))


def _inside(trace: Trace, windows: pd.DataFrame) -> dict[str, _Mask]:
    """Flag the GPU operations launched in some windows of processes, and the CPU events that lie in them.

    Windows that are ranges come with their ``row``: what a thread launched must lie in one that holds its launches.
    """
    whole = trace.whole
    events = {
        table: whole.table(table, ["start_ns", "end_ns", "process"]) for table in _CPU_TABLES if whole.size(table)
    }
    masks = {table: _in_process(windows, rows) for table, rows in events.items()}
    calls = whole.table("calls", ["start_ns", "end_ns", "process", "thread"])
    called = masks.get("calls", np.zeros(0, bool)).copy()
    if "row" in windows:
        rows = np.flatnonzero(called)
        held = np.zeros(len(rows), bool)
        for ranges, launches in holders(trace, windows["row"].to_numpy(), calls["thread"].to_numpy()[rows]):
            held[launches] |= _contained(windows.iloc[ranges], calls.iloc[rows[launches]])
        called[rows] = held
    for table in _DEVICE_TABLES:
        if whole.size(table):
            ids = whole.table(table, ["process", "correlation"])
            launch = intervals.launch_of(whole, ids["process"], ids["correlation"])
            masks[table] = np.append(called, False)[launch]  # -1, the last: its launch is not known
    return masks


def _in_process(windows: pd.DataFrame, events: pd.DataFrame) -> _Mask:
    hit = np.zeros(len(events), bool)
    processes = events.groupby("process").indices
    for process, mine in windows.groupby("process"):
        if process in processes:
            hit[processes[process]] = _contained(mine, events.iloc[processes[process]])
    return hit


def _contained(windows: pd.DataFrame, events: pd.DataFrame) -> _Mask:
    begin, end = intervals.merge(windows["start_ns"], windows["end_ns"])
    at = np.searchsorted(begin, events["start_ns"], side="right") - 1
    return (at >= 0) & (events["end_ns"].to_numpy() <= np.append(end, 0)[at])
