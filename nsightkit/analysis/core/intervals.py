"""Interval arithmetic under every analysis: unions, coverage, busy and idle time, who launched what.

All functions work on whole columns; none loops over events. Starts and ends are in nanoseconds; an interval holds its
start but not its end. ``trace.whole`` is the trace without its filters.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from nsightkit.trace.model import EVENT_TABLES, GPU_TABLES, Trace, memoised, nesting, process_of

Int = NDArray[np.int64]

#: 250,000 rows: their columns fit the caches of a CPU.
_ROWS_PER_CHUNK = 250_000
#: Before all times.
_EARLIEST = np.iinfo(np.int64).min


def _as_int64(values: ArrayLike) -> Int:
    """Make an array of 64-bit integers of a column or list."""
    return np.asarray(values, np.int64)


def chunks(n: int) -> Iterator[slice]:
    """Cut rows into pieces that fit the caches; an analysis that goes piece by piece needs memory for one piece only.

    Parameters
    ----------
    n : int
        How many rows there are.

    Yields
    ------
    slice
    """
    for low in range(0, n, _ROWS_PER_CHUNK):
        yield slice(low, min(low + _ROWS_PER_CHUNK, n))


def merge(start: ArrayLike, end: ArrayLike) -> tuple[Int, Int]:
    """Merge intervals into disjoint, sorted ones; touching ones become one.

    Parameters
    ----------
    start, end : array_like of int
        Bounds, in any order of rows. Empty intervals (``end <= start``) are dropped.

    Returns
    -------
    start, end : ndarray of int64
    """
    starts = _as_int64(start)
    ends = _as_int64(end)
    is_ordered = (starts[1:] >= starts[:-1]).all() and (ends > starts).all()
    if not is_ordered:
        rows = np.flatnonzero(ends > starts)
        rows = rows[np.argsort(starts[rows], kind="stable")]  # near-linear: exports are runs of ordered rows
        starts = starts[rows]
        ends = ends[rows]
    reach = np.maximum.accumulate(ends)
    # Where an interval starts after all before it have ended, one merged interval ends and the next begins.
    is_break = starts[1:] > reach[:-1]
    is_first = np.append(True, is_break)[: len(starts)]  # the slice is for no intervals
    is_last = np.append(is_break, True)[: len(starts)]
    return starts[is_first], reach[is_last]


def union(*parts: tuple[ArrayLike, ArrayLike]) -> tuple[Int, Int]:
    """Merge several sets of intervals into one.

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
    """Measure how much of each interval no earlier one with the same key covers: what it adds to their union.

    Parameters
    ----------
    start, end : array_like of int
        Bounds, in any order of rows.
    key : array_like of int
        Such as the device. Intervals with different keys do not cover each other.

    Returns
    -------
    ndarray of int64
        In the order of the rows; "earlier" is by start, then by row.
    """
    rows = pd.DataFrame({"start": _as_int64(start), "end": _as_int64(end), "key": np.asarray(key)})
    rows = rows.sort_values(["key", "start"], kind="stable")
    reach = rows.groupby("key")["end"].cummax()
    covered_until = reach.groupby(rows["key"]).shift(fill_value=_EARLIEST)
    added = rows["end"] - rows["start"].clip(lower=covered_until)
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
        # Both arrays are indexed by the number of intervals that have begun: the end of the last, the length of all.
        self._last_end = np.append(_EARLIEST, self.end)
        self._length_of_begun = np.append(0, np.cumsum(self.end - self.start))
        self.length = int(self._length_of_begun[-1])

    def before(self, t: Int) -> Int:
        """Measure the covered length before each moment.

        Parameters
        ----------
        t : ndarray of int64

        Returns
        -------
        ndarray of int64
        """
        begun_count = np.searchsorted(self.start, t, side="right")
        # The last interval that has begun may reach beyond `t`: take that part off again.
        beyond = np.maximum(self._last_end[begun_count], t) - t
        covered: Int = self._length_of_begun[begun_count] - beyond
        return covered

    def of(self, start: ArrayLike, end: ArrayLike) -> Int:
        """Measure the covered length of each window.

        Parameters
        ----------
        start, end : array_like of int
            Windows; one with ``end <= start`` has length 0.

        Returns
        -------
        ndarray of int64
        """
        starts = _as_int64(start)
        ends = np.maximum(_as_int64(end), starts)
        return self.before(ends) - self.before(starts)


def common(
    first: tuple[ArrayLike, ArrayLike], second: tuple[ArrayLike, ArrayLike], *, outside: bool = False
) -> tuple[Int, Int]:
    """Find the parts of the first intervals inside the second, or outside them.

    Parameters
    ----------
    first, second : tuple of ndarray of int64
        Starts and ends.
    outside : bool
        Find the parts outside.

    Returns
    -------
    start, end : ndarray of int64
        Disjoint and sorted.
    """
    start, end = merge(*first)
    second_start, second_end = merge(*second)
    # Between two neighbouring bounds nothing starts or ends: the state at a bound lasts up to the next one.
    bounds = np.sort(np.concatenate([start, end, second_start, second_end]), kind="stable")
    keep = _is_inside(bounds, start, end) & (_is_inside(bounds, second_start, second_end) != outside)
    kept_from = np.flatnonzero(keep)  # never the last bound, which ends the last interval
    return merge(bounds[kept_from], bounds[kept_from + 1])


def _is_inside(moments: Int, start: Int, end: Int) -> NDArray[np.bool_]:
    """Flag the moments inside one of some disjoint, sorted intervals; an end is outside."""
    begun_count = np.searchsorted(start, moments, side="right")
    ended_count = np.searchsorted(end, moments, side="right")
    return begun_count > ended_count


def expand_runs(first: Int, count: Int) -> tuple[Int, Int]:
    """List the members of runs of consecutive positions.

    Parameters
    ----------
    first, count : ndarray of int64
        Run i is ``first[i], first[i] + 1, ...``, `count[i]` positions.

    Returns
    -------
    run, position : ndarray of int64
        One element for each member: the run that it is in, and itself.
    """
    run = np.repeat(np.arange(len(count)), count)
    members_before = np.cumsum(count) - count
    return run, np.arange(len(run)) + (first - members_before)[run]


def gpu_intervals(trace: Trace, *more: str) -> pd.DataFrame:
    """List everything that makes a GPU busy: kernels, copies, memsets and graph replays.

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
    # Column by column: pandas needs 3x the time, and copies all columns before the first is done with.
    ops = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
    order = np.lexsort((ops["start_ns"], ops["device"])).astype(np.int32)
    for column in ops:
        ops[column] = ops[column][order]
    return pd.DataFrame(ops, copy=False)


def busy(trace: Trace) -> pd.DataFrame:
    """Measure busy and idle time of each device.

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
        compute_ops = ops[ops["table"] != GPU_TABLES.index("memops")]
        busy_ns = Coverage(ops["start_ns"], ops["end_ns"]).length
        compute_ns = Coverage(compute_ops["start_ns"], compute_ops["end_ns"]).length
        rows.append((device, ops["start_ns"].min(), ops["end_ns"].max(), busy_ns, compute_ns))
    table = pd.DataFrame(rows, columns=["device", "span_start_ns", "span_end_ns", "busy_ns", "compute_ns"])
    table["span_ns"] = table["span_end_ns"] - table["span_start_ns"]
    table["idle_ns"] = table["span_ns"] - table["busy_ns"]
    return table


def span_ns(trace: Trace) -> int:
    """Sum the devices' spans, as in :func:`busy`, but without ordering the operations.

    Parameters
    ----------
    trace : Trace
    """
    first_and_last = {"start_ns": "min", "end_ns": "max"}
    parts = []
    for name in GPU_TABLES:
        ops = trace.table(name, ["device", *first_and_last])
        parts.append(ops.groupby("device").agg(first_and_last))
    spans = pd.concat(parts).groupby("device").agg(first_and_last)
    return int((spans["end_ns"] - spans["start_ns"]).sum())


def idle_intervals(trace: Trace, intervals: pd.DataFrame | None = None) -> pd.DataFrame:
    """Find the idle intervals of each device between its first and last operation.

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
    # A gap ends with an operation that starts after all earlier ones of its device have ended.
    after = np.flatnonzero((start[1:] > reach[:-1]) & (device[1:] == device[:-1])) + 1
    columns = {"device": device[after], "start_ns": reach[after - 1], "end_ns": start[after]}
    return pd.DataFrame({**columns, "after": after.astype(np.int32)}, copy=False)


def launch_of(trace: Trace, process: ArrayLike, correlation: ArrayLike) -> Int:
    """Find the call that launched each operation.

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
    correlations = _as_int64(correlation)
    keys, rows = _outermost_calls(trace.whole)
    if not len(keys):
        return np.full(len(correlations), -1, np.int64)
    wanted = _call_key(process, correlations)
    # A key above all others would lie beyond the last place.
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    # Correlation 0 is that of calls and operations without an id: it joins nothing.
    is_known = (keys[place] == wanted) & (correlations != 0)
    return np.where(is_known, rows[place], -1)


@memoised
def _outermost_calls(whole: Trace) -> tuple[Int, NDArray[np.int32]]:
    """Find the distinct keys (:func:`_call_key`) of all calls, sorted, and the row of the outermost call with each.

    A runtime call and the driver call inside it carry the same id. The program made the outer one.
    """
    calls = whole.table("calls", ["thread", "correlation", "start_ns", "end_ns"])
    key = _call_key(process_of(calls["thread"].to_numpy()), calls["correlation"])
    # With equal keys, the first to start and the last to end comes first: the outermost.
    rows = np.lexsort((-calls["end_ns"].to_numpy(), calls["start_ns"].to_numpy(), key)).astype(np.int32)
    keys, outermost = np.unique(key[rows], return_index=True)
    return keys, rows[outermost]


def _call_key(process: ArrayLike, correlation: ArrayLike) -> Int:
    """Make one number of a process and a correlation id, which has 32 bits in CUDA's traces."""
    # An odd factor: ids with more bits, of two processes, coincide by chance only.
    return _as_int64(process) * ((1 << 40) + 15) + _as_int64(correlation)


def launches_of(trace: Trace, table: ArrayLike, row: ArrayLike) -> Int:
    """Find the calls that launched some operations of :func:`gpu_intervals`.

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
    """Flag the operations of a whole trace's :func:`gpu_intervals` that a selection keeps.

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
        Which rows of `outer` are meant; all when omitted. Positions in `outer` count the others, too.

    Returns
    -------
    ndarray of int64
        Position in `outer` for each row of `inner`, -1 where none is around it.
    """
    outers = outer[["thread", "start_ns", "end_ns"]].reset_index(drop=True)
    inners = inner[["thread", "start_ns", "end_ns"]].reset_index(drop=True)
    # By how much a call may seem to outlive its operator: old versions of PyTorch round to microseconds.
    has_nanoseconds = (outers["start_ns"] % 1000).any() or (inners["start_ns"] % 1000).any()
    tolerance_ns = 1000
    if has_nanoseconds:
        tolerance_ns = 0
    _, parent = nesting(outers["thread"], outers["start_ns"], outers["end_ns"], tolerance_ns)
    # Begin with the last outer interval to start before each inner one (of several at once, the shortest) ...
    order = outers.sort_values(["start_ns", "end_ns"], ascending=[True, False], kind="stable").rename_axis("row")
    starts = inners.drop(columns="end_ns").sort_values("start_ns")
    latest = pd.merge_asof(starts, order[["thread", "start_ns"]].reset_index(), on="start_ns", by="thread")
    around = np.full(len(inners), -1)
    around[starts.index] = latest["row"].fillna(-1)
    # An outer interval must reach the inner one's end, less the tolerance, and beyond its start if it takes time.
    takes_time = inners["end_ns"] > inners["start_ns"]
    must_reach = np.asarray(np.maximum(inners["end_ns"] - tolerance_ns, inners["start_ns"] + takes_time))
    end = outers["end_ns"].to_numpy()
    is_chosen = np.ones(len(outers), bool) if chosen is None else chosen
    # ... and climb to its parent until one fits, a level a round, all rows at once.
    climbing = np.flatnonzero(around >= 0)
    while len(climbing):
        candidate = around[climbing]
        fits = is_chosen[candidate] & (end[candidate] >= must_reach[climbing])
        climbing = climbing[~fits]
        around[climbing] = parent[candidate[~fits]]
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


def launch_times(trace: Trace, table: str) -> Int:
    """Find when each operation of a GPU table was launched.

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


def captured_window(trace: Trace) -> tuple[int, int]:
    """Find the first and last captured moment on the trace's clock.

    As the source states it, else from 0, the first event, to the end of the last event of any table, before any filter.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    begin, end : int
        Nanoseconds.
    """
    whole = trace.whole
    if whole.meta.window_ns is not None:
        begin, end = whole.meta.window_ns
        return begin - whole.t0_ns, end - whole.t0_ns
    last_end = 0
    for table in EVENT_TABLES:
        if whole.size(table):
            last_end = max(last_end, int(whole.table(table, ["end_ns"])["end_ns"].max()))
    return 0, last_end
