"""A part of a trace: one device, the inside of a range, a time window, the last steps.

Each filter gives masks by table, with one flag for each row of the whole trace's table. A table without a mask stays
whole.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.ranges import innermost_ranges_around
from nsightkit.errors import UsageError
from nsightkit.text import compiled, matching
from nsightkit.trace.model import GPU_TABLES, TABLES, Trace

T = TypeVar("T", bound=Trace)

_Mask = npt.NDArray[np.bool_]
_DEVICE_TABLES = tuple(table for table, columns in TABLES.items() if "device" in columns)
_CPU_TABLES = tuple(table for table in TABLES if table not in _DEVICE_TABLES)


def select(
    trace: T,
    device: int | None = None,
    within: str | None = None,
    time_ns: tuple[int | None, int | None] | None = None,
    last_steps: int | None = None,
) -> T:
    """Keep only some of a trace's events; filters combine (each must hold).

    Nothing is cut: an event is kept whole or dropped. ``whole`` of the result still gives all events,
    so a kernel keeps its launch, and a range its parents, when those were filtered out.

    Parameters
    ----------
    trace : Trace
    device : int, optional
        Only GPU operations of this device. What the CPU did stays.
    within : str, optional
        Regular expression, searched in range names. Keeps the GPU operations launched inside a matching
        range of the same process: on the range's own thread, or on a thread without own ranges (PyTorch
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
    filters = []
    if device is not None:
        filters.append(_masks_on_device(trace, device))
    if time_ns is not None:
        filters.append(_masks_in_window(trace, *time_ns))
    if within is not None:
        filters.append(_masks_in_ranges(trace, within))
    if last_steps is not None:
        filters.append(_masks_in_last_steps(trace, last_steps))
    selection = trace
    for masks in filters:
        combined = {}
        for table in TABLES:
            # What the trace already leaves out, and what this filter does; None leaves nothing out.
            conditions = [mask for mask in (selection.mask(table), masks.get(table)) if mask is not None]
            if conditions:
                combined[table] = np.logical_and.reduce(conditions)
        selection = selection.masked(combined)
    return selection


def _masks_on_device(trace: Trace, device: int) -> dict[str, _Mask]:
    """Flag the operations of a device, in each table that names devices."""
    masks = {}
    known_devices: set[int] = set()
    for table in _DEVICE_TABLES:
        if trace.whole.size(table):
            devices = trace.whole.table(table, ["device"])["device"]
            masks[table] = (devices == device).to_numpy()
            if table in GPU_TABLES:
                known_devices.update(devices.unique().tolist())
    if device not in known_devices:
        known = ", ".join(map(str, sorted(known_devices))) or "no GPU operations"
        raise UsageError(f"--device: the trace has no device {device}; it has {known}")
    return masks


def _masks_in_window(trace: Trace, begin: int | None, end: int | None) -> dict[str, _Mask]:
    """Flag the events that start in a window."""
    if begin is not None and end is not None and end <= begin:
        raise UsageError(f"--time: the window ends at {end} ns, which is not after its start at {begin} ns")
    masks = {}
    for table in TABLES:
        if trace.whole.size(table):
            start = trace.whole.table(table, ["start_ns"])["start_ns"].to_numpy()
            mask = np.ones(len(start), bool)
            if begin is not None:
                mask &= start >= begin
            if end is not None:
                mask &= start < end
            masks[table] = mask
    return masks


def _masks_in_ranges(trace: Trace, within: str) -> dict[str, _Mask]:
    """Flag what was launched, or ran, inside ranges of a name."""
    if not trace.whole.recorded("ranges"):
        raise UsageError("--within: the trace recorded no ranges (NVTX or record_function)")
    ranges = trace.whole.table("ranges", ["name", "start_ns", "end_ns", "process"])
    is_match = matching(ranges["name"], compiled(within, "--within"))
    if not is_match.any():
        most_frequent = ranges["name"].astype("str").value_counts().index[:3]
        known = ", ".join(repr(name) for name in most_frequent) or "no ranges"
        raise UsageError(f"--within: no range matches {within!r}; there are {known}")
    windows = ranges[is_match]
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"])
    is_launch_inside = innermost_ranges_around(trace, windows, calls) >= 0
    return _masks_inside(trace, windows, is_launch_inside)


def _masks_in_last_steps(trace: Trace, count: int) -> dict[str, _Mask]:
    """Flag what was launched, or ran, in the last steps."""
    if count < 1:
        raise UsageError(f"--last-steps must be at least 1, not {count}")
    windows = steps.find(trace.whole).tail(count)
    if windows.empty:
        raise UsageError(
            "--last-steps: the trace has no step ranges (ProfilerStep#N, or ranges with 'step' in their name)"
        )
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "process"])
    return _masks_inside(trace, windows, _is_in_windows(windows, calls))


def _masks_inside(trace: Trace, windows: pd.DataFrame, is_launch_inside: _Mask) -> dict[str, _Mask]:
    """Flag the CPU events inside some windows of processes, and the GPU operations that the flagged calls launched.

    `is_launch_inside` has a flag for each row of ``calls``.
    """
    whole = trace.whole
    masks = {}
    for table in _CPU_TABLES:
        if whole.size(table):
            masks[table] = _is_in_windows(windows, whole.table(table, ["start_ns", "end_ns", "process"]))
    is_launch_inside = np.append(is_launch_inside, False)  # the last is for an unknown launch, -1
    for table in _DEVICE_TABLES:
        if whole.size(table):
            ids = whole.table(table, ["process", "correlation"])
            masks[table] = is_launch_inside[intervals.launch_of(whole, ids["process"], ids["correlation"])]
    return masks


def _is_in_windows(windows: pd.DataFrame, events: pd.DataFrame) -> _Mask:
    """Flag the events inside a window of their process."""
    is_inside = np.zeros(len(events), bool)
    process_of_event = events["process"].to_numpy()
    for process, own_windows in windows.groupby("process"):
        rows = np.flatnonzero(process_of_event == process)
        is_inside[rows] = _is_in_union(own_windows, events.iloc[rows])
    return is_inside


def _is_in_union(windows: pd.DataFrame, events: pd.DataFrame) -> _Mask:
    """Flag the events inside the union of some windows."""
    begin, end = intervals.merge(windows["start_ns"], windows["end_ns"])
    last_begun = np.searchsorted(begin, events["start_ns"], side="right") - 1
    end = np.append(end, 0)  # for windows without length, which `merge` drops: then `last_begun` is -1
    return (last_begun >= 0) & (events["end_ns"].to_numpy() <= end[last_begun])
