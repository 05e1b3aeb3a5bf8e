"""Interval arithmetic under every analysis: unions, coverage, busy and idle time, who launched what.

All functions work on whole columns; none loops over events.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.kept import kept
from nsightkit.trace.model import GPU_TABLES, Trace
from nsightkit.trace.nesting import nesting

__all__ = [
    "Coverage",
    "busy",
    "chunks",
    "common",
    "enclosing",
    "gpu_intervals",
    "idle_intervals",
    "innermost",
    "launch_of",
    "launched",
    "launches_of",
    "merge",
    "selected",
    "uncovered",
    "union",
    "union_length",
]

Int = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]

#: Rows looked at together; bounds memory.
_CHUNK = 1 << 18


def chunks(n: int) -> Iterator[slice]:
    """Cut rows into pieces that fit the caches: what is worked out piece by piece costs memory for one piece.

    Parameters
    ----------
    n : int

    Yields
    ------
    slice
    """
    for low in range(0, n, _CHUNK):
        yield slice(low, min(low + _CHUNK, n))


def merge(start: npt.ArrayLike, end: npt.ArrayLike) -> tuple[Int, Int]:
    """The union of intervals as disjoint, sorted intervals; touching ones become one.

    Parameters
    ----------
    start, end : array_like of int
        Bounds, in any order of rows. Empty intervals (``end <= start``) are dropped.

    Returns
    -------
    start, end : ndarray of int64
    """
    s, e = np.asarray(start, np.int64), np.asarray(end, np.int64)
    keep = e > s
    if not keep.all():
        s, e = s[keep], e[keep]
    if (s[1:] < s[:-1]).any():
        # Exports are runs of ordered rows, which the stable sort merges in near-linear time.
        order = np.argsort(s, kind="stable")
        s, e = s[order], e[order]
    reach = np.maximum.accumulate(e)
    apart = s[1:] > reach[:-1]
    return (s, e) if apart.all() else (s[np.append(True, apart)], reach[np.append(apart, True)])


def union(*parts: tuple[npt.ArrayLike, npt.ArrayLike]) -> tuple[Int, Int]:
    """The union of several sets of intervals.

    Parameters
    ----------
    *parts : tuple of array_like of int
        Starts and ends of each set.

    Returns
    -------
    start, end : ndarray of int64
        Disjoint and sorted.
    """
    some = [part for part in parts if np.size(part[0])] or [*parts[:1]]
    if len(some) == 1:  # most often: no copy of it
        return merge(*some[0])
    start, end = (np.concatenate([np.asarray(part[side], np.int64) for part in some]) for side in (0, 1))
    return merge(start, end)


def uncovered(start: npt.ArrayLike, end: npt.ArrayLike, key: npt.ArrayLike) -> Int:
    """How much of each interval no earlier one with the same key covers: what it adds to their union.

    Parameters
    ----------
    start, end : array_like of int
        Bounds, in any order of rows.
    key : array_like of int

    Returns
    -------
    ndarray of int64
        In the order of the rows.
    """
    s, e, k = np.asarray(start, np.int64), np.asarray(end, np.int64), np.asarray(key)
    order = np.lexsort((s, k))
    ordered = pd.Series(e[order]).groupby(k[order])
    before = ordered.cummax().groupby(k[order]).shift(fill_value=np.iinfo(np.int64).min).to_numpy()
    out = np.empty(len(s), np.int64)
    out[order] = np.maximum(e[order] - np.maximum(s[order], before), 0)
    return out


def union_length(start: npt.ArrayLike, end: npt.ArrayLike) -> int:
    """Length of the union of intervals.

    Parameters
    ----------
    start, end : array_like of int

    Returns
    -------
    int
        In the unit of the bounds.
    """
    s, e = merge(start, end)
    return int((e - s).sum())


class Coverage:
    """How much of any window a set of intervals covers, each answer in O(log n).

    Parameters
    ----------
    start, end : array_like of int
        The intervals; they may overlap.
    """

    def __init__(self, start: npt.ArrayLike, end: npt.ArrayLike) -> None:
        self.start, self.end = merge(start, end)
        self._before = np.concatenate(([0], np.cumsum(self.end - self.start)))

    def before(self, t: Int) -> Int:
        """Covered length before each moment.

        Parameters
        ----------
        t : ndarray of int64

        Returns
        -------
        ndarray of int64
        """
        if np.size(t) > _CHUNK:
            return np.concatenate([self.before(t[mine]) for mine in chunks(len(t))])
        i = np.searchsorted(self.start, t, side="right")
        covered = self._before[i]
        if len(self.start):
            last = np.maximum(i - 1, 0)
            covered = covered - np.where(i > 0, np.maximum(self.end[last] - t, 0), 0)
        return np.asarray(covered, np.int64)

    def of(self, start: npt.ArrayLike, end: npt.ArrayLike) -> Int:
        """Covered length of each window.

        Parameters
        ----------
        start, end : array_like of int
            Windows; one with ``end <= start`` has length 0.

        Returns
        -------
        ndarray of int64
        """
        s = np.asarray(start, np.int64)
        e = np.maximum(np.asarray(end, np.int64), s)
        return self.before(e) - self.before(s)


def common(
    one: tuple[npt.ArrayLike, npt.ArrayLike], other: tuple[npt.ArrayLike, npt.ArrayLike], *, outside: bool = False
) -> tuple[Int, Int]:
    """The parts of some intervals that lie in others, or outside them.

    Parameters
    ----------
    one, other : tuple of ndarray of int64
        Starts and ends.
    outside : bool
        Give what of `one` lies outside `other`.

    Returns
    -------
    start, end : ndarray of int64
        Disjoint and sorted.
    """
    start, end = merge(*one)
    low, high = merge(*other)
    if outside:
        low, high = np.append(np.iinfo(np.int64).min, high), np.append(low, np.iinfo(np.int64).max)
    # Of each interval, the first of the others that reaches into it, and how many do.
    first = np.searchsorted(high, start, side="right")
    count = np.maximum(np.searchsorted(low, end) - first, 0)
    mine = np.repeat(np.arange(len(start)), count)
    theirs = np.arange(len(mine)) - np.repeat(np.cumsum(count) - count - first, count)
    return merge(np.maximum(start[mine], low[theirs]), np.minimum(end[mine], high[theirs]))


def gpu_intervals(trace: Trace, *more: str) -> pd.DataFrame:
    """Everything that makes a GPU busy: kernels, copies, memsets and graph replays.

    Parameters
    ----------
    trace : Trace
    *more : str
        Further columns that all of these tables have.

    Returns
    -------
    DataFrame
        Columns ``device``, ``start_ns``, ``end_ns``, ``table`` (index into ``GPU_TABLES``), ``row`` (row in that
        table) and those asked for, ordered by device, then start.
    """
    columns = ["device", "start_ns", "end_ns", *more]
    trace.prefetch(dict.fromkeys(GPU_TABLES, columns))
    parts = [
        trace.table(name, columns).assign(table=np.int8(number), row=np.arange(trace.size(name), dtype=np.int32))
        for number, name in enumerate(GPU_TABLES)
    ]
    ops = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    order = np.lexsort((ops["start_ns"], ops["device"]))  # near-linear: exports are runs of ordered rows
    return ops if (order[1:] > order[:-1]).all() else ops.take(order).reset_index(drop=True)


def _devices(device: Int) -> list[slice]:
    """The rows of each device, of which there may be millions: views, and no copies."""
    cuts = np.flatnonzero(np.diff(device)) + 1
    return [slice(low, high) for low, high in itertools.pairwise([0, *cuts.tolist(), len(device)]) if high > low]


def busy(trace: Trace) -> pd.DataFrame:
    """Busy and idle time of each device.

    Busy is the length of the union over all streams of kernel, copy, memset and graph intervals; the
    span runs from the first start to the last end of those; idle is span minus busy.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    DataFrame
        One row a device: ``device, span_start_ns, span_end_ns, span_ns, busy_ns, idle_ns, compute_ns``
        (the union of kernels and graph replays alone).
    """
    ops = gpu_intervals(trace)
    device, start, end, table = (ops[c].to_numpy() for c in ("device", "start_ns", "end_ns", "table"))
    computes = table != GPU_TABLES.index("memops")
    rows = []
    for mine in _devices(device):
        first, last, works = int(start[mine][0]), int(end[mine].max()), computes[mine]
        union = union_length(start[mine], end[mine])
        compute = union if works.all() else union_length(start[mine][works], end[mine][works])
        rows.append((int(device[mine][0]), first, last, last - first, union, last - first - union, compute))
    return pd.DataFrame(
        rows, columns=["device", "span_start_ns", "span_end_ns", "span_ns", "busy_ns", "idle_ns", "compute_ns"]
    )


def idle_intervals(trace: Trace, intervals: pd.DataFrame | None = None) -> pd.DataFrame:
    """The idle intervals of each device between its first and last operation.

    Parameters
    ----------
    trace : Trace
    intervals : DataFrame, optional
        What :func:`gpu_intervals` returned, if it is at hand.

    Returns
    -------
    DataFrame
        ``device, start_ns, end_ns, after`` with ``after`` the position in `intervals` of the operation
        that ends the gap (the first to start when several start at once); ordered by device, then time.
        The lengths sum to the idle time.
    """
    ops = gpu_intervals(trace) if intervals is None else intervals
    device, start = (ops[c].to_numpy() for c in ("device", "start_ns"))
    reach = ops["end_ns"].to_numpy(copy=True)
    for mine in _devices(device):
        np.maximum.accumulate(reach[mine], out=reach[mine])
    after = np.flatnonzero((start[1:] > reach[:-1]) & (device[1:] == device[:-1])) + 1
    columns = {"device": device[after], "start_ns": reach[after - 1], "end_ns": start[after], "after": after}
    return pd.DataFrame(columns, copy=False)


def launch_of(trace: Trace, process: npt.ArrayLike, correlation: npt.ArrayLike) -> Int:
    """The call that launched each operation.

    Joined by correlation id *and* process: ids collide between processes. Where a runtime call and
    the driver call inside it carry the same id, the outer one is meant.

    Parameters
    ----------
    trace : Trace
    process, correlation : array_like of int
        Columns of a GPU table (or any selection of its rows).

    Returns
    -------
    ndarray of int64
        Row in ``trace.whole``'s ``calls``; -1 where the launch was not recorded.
    """
    wanted = np.asarray(process, np.int64), np.asarray(correlation, np.int64)
    whole, found = trace.whole, np.full(len(wanted[0]), -1, np.int64)
    if not whole.size("calls"):
        return found
    launches = kept(_Launches)(whole)
    for mine in chunks(len(found)):
        found[mine] = launches.of(*(column[mine] for column in wanted))
    return found


def launches_of(trace: Trace, table: npt.ArrayLike, row: npt.ArrayLike) -> Int:
    """The calls that launched some operations of :func:`gpu_intervals`.

    Parameters
    ----------
    trace : Trace
        The one the operations were taken from.
    table, row : array_like of int
        Columns of :func:`gpu_intervals`, or any selection of its rows.

    Returns
    -------
    ndarray of int64
        As from :func:`launch_of`.
    """
    which, rows = np.asarray(table), np.asarray(row)
    launch = np.full(len(rows), -1, np.int64)
    for number, name in enumerate(GPU_TABLES):
        mine = np.flatnonzero(which == number)
        if len(mine):
            frame = trace.table(name, ["process", "correlation"])
            launch[mine] = launch_of(trace, *(frame[c].to_numpy()[rows[mine]] for c in frame))
    return launch


def selected(trace: Trace, table: npt.ArrayLike, row: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which operations of a whole trace's :func:`gpu_intervals` a selection keeps.

    Parameters
    ----------
    trace : Trace
        The selection.
    table, row : array_like of int
        Columns of :func:`gpu_intervals`, or any selection of its rows.

    Returns
    -------
    ndarray of bool
    """
    which, rows = np.asarray(table), np.asarray(row)
    keep = np.ones(len(rows), bool)
    for number, name in enumerate(GPU_TABLES):
        if (mask := trace.mask(name)) is not None:
            keep[which == number] = mask[rows[which == number]]
    return keep


def enclosing(inner: pd.DataFrame, outer: pd.DataFrame, chosen: npt.NDArray[np.bool_] | None = None) -> Int:
    """Find the innermost interval of one table around each of another, on the same thread.

    Parameters
    ----------
    inner, outer : DataFrame
        Columns ``start_ns``, ``end_ns`` and ``thread``, in any order of rows; such as calls, and the operators or
        ranges that made them.
    chosen : ndarray of bool, optional
        Which rows of `outer` are meant; all when omitted.

    Returns
    -------
    ndarray of int64
        Position in `outer` for each row of `inner`, -1 where none is around it.
    """
    columns = ["start_ns", "end_ns", "thread"]
    both = pd.concat([outer[columns], inner[columns]], ignore_index=True)
    # Old versions of PyTorch round to microseconds: a call may seem to outlive its operator.
    rounded = not (both["start_ns"].to_numpy() % 1000).any()
    _, above = nesting(both["thread"], both["start_ns"], both["end_ns"], tolerance=1000 if rounded else 0)
    counts = np.zeros(len(both), bool)
    counts[: len(outer)] = True if chosen is None else chosen
    at = above[len(outer) :]
    while True:  # as often as the outer ones nest
        climb = (at >= 0) & ~counts[np.maximum(at, 0)]
        if not climb.any():
            return np.asarray(at)
        at = np.where(climb, above[np.maximum(at, 0)], at)


def innermost(inner: pd.DataFrame, outer: pd.DataFrame) -> Int:
    """Find the innermost interval of one table around each of another, whatever their threads.

    Parameters
    ----------
    inner, outer : DataFrame
        Columns ``start_ns`` and ``end_ns``, in any order of rows.

    Returns
    -------
    ndarray of int64
        Position in `outer` for each row of `inner`, -1 where none is around it.
    """
    start, end = (inner[column].to_numpy() for column in ("start_ns", "end_ns"))
    low, high = (outer[column].to_numpy() for column in ("start_ns", "end_ns"))
    order = np.lexsort((-high, low))
    low, high = low[order], high[order]
    _, above = nesting(np.zeros(len(low), np.int64), low, high)
    rounded = not (start % 1000).any() and not (low % 1000).any()  # as in enclosing
    need = np.maximum(end - (1000 if rounded else 0), start + (end > start))
    at = np.searchsorted(low, start, side="right") - 1
    left = np.flatnonzero(at >= 0)
    while len(left):  # as often as the outer ones nest
        left = left[high[at[left]] < need[left]]
        at[left] = above[at[left]]
        left = left[at[left] >= 0]
    return np.append(order, -1)[at]


def launched(trace: Trace, table: str) -> Int:
    """When each operation of a GPU table was launched.

    Parameters
    ----------
    trace : Trace
    table : {"kernels", "memops", "graphs"}

    Returns
    -------
    ndarray of int64
        Start of the launching call. Where calls were recorded, but not that one, the operation was launched before the
        capture began: the least of all times. Without any calls, the operation's own start.
    """
    rows = trace.table(table, ["start_ns", "process", "correlation"])
    calls = trace.whole.table("calls", ["start_ns"])["start_ns"].to_numpy()
    if not len(calls):
        return rows["start_ns"].to_numpy()
    launch = launch_of(trace, rows["process"], rows["correlation"])
    return np.where(launch >= 0, calls[np.maximum(launch, 0)], np.iinfo(np.int64).min)


class _Launches:
    """Rows of the outermost calls by process and correlation id."""

    def __init__(self, whole: Trace) -> None:
        calls = whole.table("calls", ["thread", "correlation"])
        process, ids = calls["thread"].to_numpy() >> 24, calls["correlation"].to_numpy()
        self._processes = np.sort(pd.unique(process))
        self._low, self._ids, self._places = int(ids.min()), None, None
        self._width = int(ids.max()) - self._low + 1
        most = 8 * len(ids) + 1_000_000
        if self._width * len(self._processes) > most:
            # Too sparse for a table: number the ids first.
            self._ids = np.unique(ids)
            ids = np.searchsorted(self._ids, ids)
            self._low, self._width = 0, len(self._ids)
        place = np.searchsorted(self._processes, process) * self._width + (ids - self._low)
        size = self._width * len(self._processes)
        if size > most:
            # Still: as many processes as calls. Number the pairs.
            self._places = np.unique(place)
            place, size = np.searchsorted(self._places, place), len(self._places)
        row = np.arange(len(ids), dtype=np.int32)
        self._row = np.full(size, -1, np.int32)
        self._row[place] = row
        shared = np.zeros(len(self._row), bool)
        shared[place[self._row[place] != row]] = True
        among = np.flatnonzero(shared[place])
        times = whole.table("calls", ["start_ns", "end_ns"])
        start, end = (times[c].to_numpy()[among] for c in times)
        inner_first = among[np.lexsort((end, -start))]  # written last wins: earliest start, then latest end
        self._row[place[inner_first]] = row[inner_first]

    def of(self, process: Int, asked: Int) -> Int:
        at = np.minimum(np.searchsorted(self._processes, process), len(self._processes) - 1)
        known = (asked != 0) & (self._processes[at] == process)
        if self._ids is not None:
            number = np.minimum(np.searchsorted(self._ids, asked), len(self._ids) - 1)
            known &= self._ids[number] == asked
            asked = number
        place = asked - self._low
        known &= (place >= 0) & (place < self._width)
        place = np.where(known, at * self._width + place, 0)
        if self._places is not None:
            number = np.minimum(np.searchsorted(self._places, place), len(self._places) - 1)
            known &= self._places[number] == place
            place = np.where(known, number, 0)
        return np.where(known, self._row[place], -1)
