"""Interval arithmetic under every analysis: unions, coverage, busy and idle time, who launched what.

All functions work on whole columns; none loops over events.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from nsightkit.analysis.core.kept import kept
from nsightkit.trace.model import GPU_TABLES, Trace, process_of
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
]

Int = NDArray[np.int64]

#: Rows looked at together; bounds memory.
_CHUNK = 1 << 18
_EARLIEST = np.iinfo(np.int64).min


def _whole(values: ArrayLike) -> Int:
    return np.asarray(values, np.int64)


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


def merge(start: ArrayLike, end: ArrayLike) -> tuple[Int, Int]:
    """The union of intervals as disjoint, sorted intervals; touching ones become one.

    Parameters
    ----------
    start, end : array_like of int
        Bounds, in any order of rows. Empty intervals (``end <= start``) are dropped.

    Returns
    -------
    start, end : ndarray of int64
    """
    starts = _whole(start)
    ends = _whole(end)
    is_ordered = (starts[1:] >= starts[:-1]).all() and (ends > starts).all()
    if not is_ordered:
        rows = np.flatnonzero(ends > starts)
        rows = rows[np.argsort(starts[rows], kind="stable")]  # near-linear: exports are runs of ordered rows
        starts = starts[rows]
        ends = ends[rows]
    reach = np.maximum.accumulate(ends)
    apart = starts[1:] > reach[:-1]
    is_first = np.append(True, apart)[: len(starts)]
    is_last = np.append(apart, True)[: len(starts)]
    return starts[is_first], reach[is_last]


def union(*parts: tuple[ArrayLike, ArrayLike]) -> tuple[Int, Int]:
    """The union of several sets of intervals.

    Parameters
    ----------
    *parts : tuple of array_like of int
        Starts and ends of each set; one at least.

    Returns
    -------
    start, end : ndarray of int64
        Disjoint and sorted.
    """
    starts, ends = zip(*parts, strict=True)
    return merge(np.concatenate(starts), np.concatenate(ends))


def uncovered(start: ArrayLike, end: ArrayLike, key: ArrayLike) -> Int:
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
    rows = pd.DataFrame({"start": _whole(start), "end": _whole(end), "key": np.asarray(key)})
    rows = rows.sort_values(["key", "start"], kind="stable")
    reach = rows.groupby("key")["end"].cummax()
    before = reach.groupby(rows["key"]).shift(fill_value=_EARLIEST)
    added = rows["end"] - rows["start"].clip(lower=before)
    return added.clip(lower=0).sort_index().to_numpy()


class Coverage:
    """How much of any window a set of intervals covers, each answer in O(log n).

    Parameters
    ----------
    start, end : array_like of int
        The intervals; they may overlap.

    Attributes
    ----------
    start, end : ndarray of int64
        Their union, disjoint and sorted.
    length : int
        Of the union.
    """

    def __init__(self, start: ArrayLike, end: ArrayLike) -> None:
        self.start, self.end = merge(start, end)
        self._until = np.append(_EARLIEST, self.end)
        self._before = np.append(0, np.cumsum(self.end - self.start))
        self.length = int(self._before[-1])

    def before(self, t: Int) -> Int:
        """Covered length before each moment.

        Parameters
        ----------
        t : ndarray of int64

        Returns
        -------
        ndarray of int64
        """
        begun = np.searchsorted(self.start, t, side="right")
        # Of the intervals that have begun, all count in whole but the last one, of which a part may lie after `t`.
        after = np.maximum(self._until[begun], t) - t
        covered: Int = self._before[begun] - after
        return covered

    def of(self, start: ArrayLike, end: ArrayLike) -> Int:
        """Covered length of each window.

        Parameters
        ----------
        start, end : array_like of int
            Windows; one with ``end <= start`` has length 0.

        Returns
        -------
        ndarray of int64
        """
        s = _whole(start)
        e = np.maximum(_whole(end), s)
        return self.before(e) - self.before(s)


def common(
    one: tuple[ArrayLike, ArrayLike], other: tuple[ArrayLike, ArrayLike], *, outside: bool = False
) -> tuple[Int, Int]:
    """The parts of some intervals inside others, or outside them.

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
    # No bound lies between two that follow each other: what is there lies wholly inside, or wholly outside.
    bounds = np.sort(np.concatenate([start, end, low, high]), kind="stable")
    keep = _inside(bounds, start, end) & (_inside(bounds, low, high) != outside)
    kept_from = np.flatnonzero(keep)
    return merge(bounds[kept_from], bounds[kept_from + 1])


def _inside(moments: Int, start: Int, end: Int) -> NDArray[np.bool_]:
    """Which moments lie in one of some disjoint, sorted intervals."""
    begun = np.searchsorted(start, moments, side="right")
    ended = np.searchsorted(end, moments, side="right")
    return begun > ended


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
    parts = []
    for number, name in enumerate(GPU_TABLES):
        part = trace.table(name, columns)
        parts.append(part.assign(table=np.int8(number), row=np.arange(len(part), dtype=np.int32)))
    # Column by column: pandas takes three times as long, and copies all columns before the first is done with.
    ops = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
    order = np.lexsort((ops["start_ns"], ops["device"])).astype(np.int32)
    for column in ops:
        ops[column] = ops[column][order]
    return pd.DataFrame(ops, copy=False)


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
    rows = []
    for device, ops in gpu_intervals(trace).groupby("device"):
        computing = ops[ops["table"] != GPU_TABLES.index("memops")]
        busy_ns = Coverage(ops["start_ns"], ops["end_ns"]).length
        compute_ns = Coverage(computing["start_ns"], computing["end_ns"]).length
        rows.append((device, ops["start_ns"].min(), ops["end_ns"].max(), busy_ns, compute_ns))
    table = pd.DataFrame(rows, columns=["device", "span_start_ns", "span_end_ns", "busy_ns", "compute_ns"])
    table["span_ns"] = table["span_end_ns"] - table["span_start_ns"]
    table["idle_ns"] = table["span_ns"] - table["busy_ns"]
    return table


def span_ns(trace: Trace) -> int:
    """Sum of the devices' spans: :func:`busy` without ordering the operations.

    Parameters
    ----------
    trace : Trace
    """
    bounds = {"start_ns": "min", "end_ns": "max"}
    parts = []
    for name in GPU_TABLES:
        ops = trace.table(name, ["device", *bounds])
        parts.append(ops.groupby("device").agg(bounds))
    spans = pd.concat(parts).groupby("device").agg(bounds)
    return int((spans["end_ns"] - spans["start_ns"]).sum())


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
    device = ops["device"].to_numpy()
    start = ops["start_ns"].to_numpy()
    reach = ops.groupby("device")["end_ns"].cummax().to_numpy()
    after = np.flatnonzero((start[1:] > reach[:-1]) & (device[1:] == device[:-1])) + 1
    columns = {"device": device[after], "start_ns": reach[after - 1], "end_ns": start[after]}
    return pd.DataFrame({**columns, "after": after.astype(np.int32)}, copy=False)


def launch_of(trace: Trace, process: ArrayLike, correlation: ArrayLike) -> Int:
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
    correlations = _whole(correlation)
    known, rows = _launches(trace.whole)
    if not len(known):
        return np.full(len(correlations), -1, np.int64)
    wanted = _identity(process, correlations)
    place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    # Correlation 0 is that of calls and operations without an id: it joins nothing.
    is_known = (known[place] == wanted) & (correlations != 0)
    return np.where(is_known, rows[place], -1)


@kept
def _launches(whole: Trace) -> tuple[Int, Int]:
    """The identities of calls in order, and the row of the outermost call of each."""
    calls = whole.table("calls", ["thread", "correlation", "start_ns", "end_ns"])
    key = _identity(process_of(calls["thread"].to_numpy()), calls["correlation"])
    rows = np.lexsort((-calls["end_ns"].to_numpy(), calls["start_ns"].to_numpy(), key)).astype(np.int32)
    key = key[rows]
    is_first = np.append(True, key[1:] != key[:-1])[: len(key)]
    return key[is_first], rows[is_first]


def _identity(process: ArrayLike, correlation: ArrayLike) -> Int:
    """One number for a process and a correlation id, which has 32 bits in CUDA's traces."""
    # An odd factor, so that wider ids of two processes meet by chance only.
    return _whole(process) * ((1 << 40) + 15) + _whole(correlation)


def launches_of(trace: Trace, table: ArrayLike, row: ArrayLike) -> Int:
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
    tables = np.asarray(table)
    rows = np.asarray(row)
    launch = np.full(len(rows), -1, np.int64)
    for number, name in enumerate(GPU_TABLES):
        places = np.flatnonzero(tables == number)
        if len(places):
            operations = trace.table(name, ["process", "correlation"]).iloc[rows[places]]
            launch[places] = launch_of(trace, operations["process"], operations["correlation"])
    return launch


def selected(trace: Trace, table: ArrayLike, row: ArrayLike) -> NDArray[np.bool_]:
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
    tables = np.asarray(table)
    rows = np.asarray(row)
    keep = np.ones(len(rows), bool)
    for number, name in enumerate(GPU_TABLES):
        mask = trace.mask(name)
        if mask is not None:
            is_here = tables == number
            keep[is_here] = mask[rows[is_here]]
    return keep


def enclosing(inner: pd.DataFrame, outer: pd.DataFrame, chosen: NDArray[np.bool_] | None = None) -> Int:
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
    rows = outer[["thread", "start_ns", "end_ns"]].reset_index(drop=True)
    asking = inner[["thread", "start_ns", "end_ns"]].reset_index(drop=True)
    # By how much a call may seem to outlive its operator: old versions of PyTorch round to microseconds.
    has_nanoseconds = (rows["start_ns"] % 1000).any() or (asking["start_ns"] % 1000).any()
    tolerance = 1000
    if has_nanoseconds:
        tolerance = 0
    _, above = nesting(rows["thread"], rows["start_ns"], rows["end_ns"], tolerance)
    # The last to begin, the shortest of several; from there outwards.
    order = rows.sort_values(["start_ns", "end_ns"], ascending=[True, False], kind="stable").rename_axis("row")
    starts = asking.drop(columns="end_ns").sort_values("start_ns")
    latest = pd.merge_asof(starts, order[["thread", "start_ns"]].reset_index(), on="start_ns", by="thread")
    around = np.full(len(asking), -1)
    around[starts.index] = latest["row"].fillna(-1)
    is_long = asking["end_ns"] > asking["start_ns"]
    until = np.asarray(np.maximum(asking["end_ns"] - tolerance, asking["start_ns"] + is_long))
    end = rows["end_ns"].to_numpy()
    is_chosen = np.ones(len(rows), bool) if chosen is None else chosen
    climbing = np.flatnonzero(around >= 0)
    while len(climbing):
        candidate = around[climbing]
        fits = is_chosen[candidate] & (end[candidate] >= until[climbing])
        climbing = climbing[~fits]
        around[climbing] = above[candidate[~fits]]
        climbing = climbing[around[climbing] >= 0]
    return around


def innermost(inner: pd.DataFrame, outer: pd.DataFrame) -> Int:
    """Find the innermost interval of one table around each of another, on any thread.

    Parameters
    ----------
    inner, outer : DataFrame
        As for :func:`enclosing`.

    Returns
    -------
    ndarray of int64
        As from :func:`enclosing`.
    """
    return enclosing(inner.assign(thread=0), outer.assign(thread=0))


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
    return np.where(launch >= 0, calls[launch], _EARLIEST)
