"""A part of a trace: one device, the inside of a range, a time window, the last steps."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.names import compiled, matching
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.ranges import holds
from nsightkit.errors import UsageError
from nsightkit.trace.model import GPU_TABLES, TABLES, Trace

T = TypeVar("T", bound=Trace)

__all__ = ["select"]

_Mask = npt.NDArray[np.bool_]
_DEVICE_TABLES = tuple(t for t, columns in TABLES.items() if "device" in columns)
_CPU_TABLES = tuple(t for t in TABLES if t not in _DEVICE_TABLES)


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
    chosen = trace
    if device is not None:
        chosen = _and(chosen, _on_device(trace, device))
    if time_ns is not None:
        chosen = _and(chosen, _in_window(trace, *time_ns))
    if within is not None:
        chosen = _and(chosen, _inside(trace, _matching_ranges(trace, within)))
    if last_steps is not None:
        chosen = _and(chosen, _inside(trace, _last_steps(trace, last_steps)))
    return chosen


def _and(trace: T, masks: dict[str, _Mask]) -> T:
    old = {t: trace.mask(t) for t in TABLES}
    both = {t: m if (o := old[t]) is None else m & o for t, m in masks.items()}
    return trace.masked({t: m for t, m in (old | both).items() if m is not None})


def _on_device(trace: Trace, device: int) -> dict[str, _Mask]:
    whole = trace.whole
    columns = {t: whole.table(t, ["device"])["device"].to_numpy() for t in _DEVICE_TABLES if whole.size(t)}
    present = sorted({int(d) for t, c in columns.items() if t in GPU_TABLES for d in np.unique(c)})
    if device not in present:
        have = f"it has {', '.join(map(str, present))}" if present else "it has no GPU operations"
        raise UsageError(f"--device: the trace has no device {device}; {have}")
    return {t: c == device for t, c in columns.items()}


def _in_window(trace: Trace, begin: int | None, end: int | None) -> dict[str, _Mask]:
    if begin is not None and end is not None and end <= begin:
        raise UsageError(f"--time: the window ends at {end} ns, which is not after its start at {begin} ns")
    masks = {}
    for table in TABLES:
        if trace.whole.size(table):
            start = trace.whole.table(table, ["start_ns"])["start_ns"].to_numpy()
            masks[table] = np.full(len(start), True) if begin is None else start >= begin
            if end is not None:
                masks[table] &= start < end
    return masks


class _Windows:
    """Disjoint windows of each process; and the rows of the ranges that they come from, where they hold by thread."""

    def __init__(
        self,
        start: npt.NDArray[np.int64],
        end: npt.NDArray[np.int64],
        process: npt.NDArray[np.int64],
        row: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.start, self.end, self.row = start, end, row
        self.by_process = {
            int(p): intervals.merge(*(c[process == p] for c in (start, end))) for p in np.unique(process)
        }


def _matching_ranges(trace: Trace, within: str) -> _Windows:
    pattern = compiled(within, "--within")
    whole = trace.whole
    if not whole.recorded("ranges"):
        raise UsageError("--within: the trace recorded no ranges (NVTX or record_function)")
    ranges = whole.table("ranges", ["name", "start_ns", "end_ns", "process"])
    hit = matching(ranges["name"], pattern)
    if not hit.any():
        known = ranges["name"].value_counts(sort=True)
        some = ", ".join(repr(str(n)) for n in known.index[known.to_numpy() > 0][:3])
        raise UsageError(f"--within: no range matches {within!r}; there are {some or 'no ranges at all'}")
    found = ranges[hit]
    start, end, process = (found[c].to_numpy() for c in ("start_ns", "end_ns", "process"))
    return _Windows(start, end, process, np.flatnonzero(hit))


def _last_steps(trace: Trace, count: int) -> _Windows:
    if count < 1:
        raise UsageError(f"--last-steps: {count} is not a number of steps")
    found = steps.find(trace.whole)
    if not len(found):
        raise UsageError(
            "--last-steps: the trace has no step ranges (ProfilerStep#N, or ranges with 'step' in their name)"
        )
    found = found.tail(count)
    return _Windows(*(found[c].to_numpy() for c in ("start_ns", "end_ns", "process")))


def _inside(trace: Trace, windows: _Windows) -> dict[str, _Mask]:
    """Flag the GPU operations launched in the windows, and the CPU events that lie in them."""
    whole = trace.whole
    masks: dict[str, _Mask] = {}
    for table in _CPU_TABLES:
        if not whole.size(table):
            continue
        rows = whole.table(table, ["start_ns", "end_ns", "process"])
        start, end, process = (rows[c].to_numpy() for c in rows)
        masks[table] = np.zeros(len(rows), bool)
        for one, window in windows.by_process.items():
            masks[table] |= (process == one) & _contained(window, start, end)
    for table in _DEVICE_TABLES:
        if not whole.size(table):
            continue
        rows = whole.table(table, ["process", "correlation"])
        launch = intervals.launch_of(whole, rows["process"], rows["correlation"])
        masks[table] = np.zeros(len(rows), bool)
        known = np.flatnonzero(launch >= 0)
        calls = whole.table("calls", ["start_ns", "end_ns", "process", "thread"])
        start, end, process, thread = (calls[c].to_numpy()[launch[known]] for c in calls)
        hit = np.zeros(len(known), bool)
        for one, window in windows.by_process.items():
            hit |= (process == one) & _contained(window, start, end)
        if windows.row is not None:
            for one in np.unique(thread[hit]).tolist():
                mine, may = np.flatnonzero(hit & (thread == one)), holds(trace, windows.row, one)
                window = intervals.merge(windows.start[may], windows.end[may])
                hit[mine] = _contained(window, start[mine], end[mine])
        masks[table][known] = hit
    return masks


def _contained(
    window: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    start: npt.NDArray[np.int64],
    end: npt.NDArray[np.int64],
) -> _Mask:
    begin, finish = window
    if not len(begin):
        return np.zeros(len(start), bool)
    at = np.searchsorted(begin, start, side="right") - 1
    return np.asarray((at >= 0) & (end <= finish[at]))
