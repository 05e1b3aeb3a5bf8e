"""What each annotated range cost: CPU time, inclusive and exclusive, and the GPU work launched inside it.

``trace.whole`` is the trace without its filters. What `memoised` functions return must not be changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.errors import UsageError
from nsightkit.text import LOADER_RANGE, OPERATOR_RANGE, compiled, matching
from nsightkit.trace.model import GPU_TABLES, LAUNCHES, Trace, memoised, process_of

Int = npt.NDArray[np.int64]
Rule = Literal["window", "thread"]

_GPU_COLUMNS = ["gpu_ns", "gpu_span_ns", "kernel_count"]
COLUMNS = ["name", "domain", "count", "total_ns", "exclusive_ns", "median_ns", *_GPU_COLUMNS, "rule"]

#: Pairs of a range and an operation that are in memory at once, roughly.
_MOST_PAIRS = 1_000_000

#: Ranges that a library makes for a collective, on any thread: ``nccl:all_reduce`` of
#: PyTorch, ``ncclAllReduce`` of NCCL.
COLLECTIVE_RANGE = re.compile(r"^(nccl|gloo|mpi|ucc|xccl|hccl):|^nccl[A-Z]|^MPI_")
#: Domains of libraries' ranges.
_LIBRARY_DOMAIN = re.compile(
    r"(?i)^(nccl|rccl|cccl|thrust|cub|mpi|ucx|nvshmem|cu(blas|blaslt|dnn|fft|rand|solver|sparse))$"
)
#: The operator in which autograd runs a node of the backward pass. What is annotated there is the node's doing.
_AUTOGRAD = re.compile(r"^autograd::engine::evaluate_function")


def summary(trace: Trace, match: str | None = None, rule: Rule = "window") -> pd.DataFrame:
    """Sum CPU and GPU time of ranges by name and domain.

    CPU time is what passed on the range's thread: for asynchronous work that is the time it took to
    *launch*. GPU figures cover the operations launched inside, found by correlation id and process;
    a CUDA-graph launch counts all its nodes.

    Parameters
    ----------
    trace : Trace
    match : str, optional
        Regular expression searched in the names.
    rule : {"window", "thread"}
        ``thread`` is nsys's own: the launching call lies inside the range on the same thread. It also copies the rest
        of nsys's rules: ranges that end on another thread and unnamed ones are left out, graph replays do not count.
        ``window`` adds what threads without own ranges (:func:`ranges_with_launches`) launch while the range is open,
        because autograd launches the backward pass from another thread.

    Returns
    -------
    DataFrame
        ``name, domain, count, total_ns, exclusive_ns, median_ns, gpu_ns, gpu_span_ns, kernel_count, rule``,
        by falling ``total_ns``. ``gpu_ns`` is the union of the operations' intervals, ``gpu_span_ns`` first
        start to last end (nsys calls it the projection), both summed over the instances. The GPU columns
        are NA where the trace recorded no GPU work or no calls to attribute it by.

    Raises
    ------
    UsageError
        `match` is not a regular expression, or `rule` is unknown.
    """
    has_gpu_columns = attributable(trace, rule)
    ranges = instances(trace, rule)
    if match is not None:
        ranges = ranges[matching(ranges["name"], compiled(match, "match"))]
    by_name = ranges.groupby(["name", "domain"], observed=True, sort=False)
    table = by_name[["total_ns", "exclusive_ns", *_GPU_COLUMNS]].sum()
    table["count"] = by_name.size()
    table["median_ns"] = by_name["total_ns"].median()
    table["rule"] = rule
    table = table.reset_index().astype({"name": "str", "domain": "str"})
    if not has_gpu_columns:
        table[_GPU_COLUMNS] = pd.NA
        table = table.astype(dict.fromkeys(_GPU_COLUMNS, "Int64"))
    return table.sort_values(["total_ns", "name"], ascending=[False, True], ignore_index=True)[COLUMNS]


def attributable(trace: Trace, rule: Rule) -> bool:
    """Check whether a trace recorded what attributes GPU work to ranges.

    Parameters
    ----------
    trace : Trace
    rule : {"window", "thread"}

    Returns
    -------
    bool

    Raises
    ------
    UsageError
        `rule` is unknown.
    """
    if rule not in ("window", "thread"):
        raise UsageError(f"unknown rule {rule!r}; use window or thread")
    return trace.recorded("calls") and trace.recorded("kernels")


def instances(trace: Trace, rule: Rule = "window") -> pd.DataFrame:
    """List the single ranges that :func:`summary` adds up.

    Parameters
    ----------
    trace : Trace
    rule : {"window", "thread"}
        As for :func:`summary`. With ``thread``, ranges without a name or that end on another thread are left out, as
        nsys does.

    Returns
    -------
    DataFrame
        ``row`` (in ``trace.whole.ranges``), ``name, domain, start_ns, end_ns, process, thread, total_ns,
        exclusive_ns, gpu_ns, gpu_span_ns, kernel_count``; the last three are 0 without GPU work.
    """
    columns = ["name", "domain", "start_ns", "end_ns", "process", "thread", "end_thread"]
    ranges = trace.whole.table("ranges", columns)
    ranges.insert(0, "row", np.arange(len(ranges)))
    ranges["total_ns"] = ranges["end_ns"] - ranges["start_ns"]
    ranges["exclusive_ns"] = _exclusive_ns(trace.whole)
    ranges[_GPU_COLUMNS] = _gpu_totals(trace, rule)
    is_selected = trace.mask("ranges")
    if is_selected is not None:
        ranges = ranges[is_selected]
    if rule == "thread":
        ranges = ranges[(ranges["thread"] == ranges["end_thread"]) & (ranges["name"] != "")]
    return ranges.drop(columns="end_thread").reset_index(drop=True)


def ranges_with_launches(
    trace: Trace, range_rows: Int, launch_threads: Int, rule: Rule = "window"
) -> Iterator[tuple[Int, Int]]:
    """Pair ranges with the launches that they may hold while they are open.

    A range may hold what its own thread launches. By the rule ``window`` a range that the program opened may also hold
    what the threads of its process without own ranges launch. A thread has none if all its outermost
    ranges are those of operators and libraries (data-parallel training annotates its collectives on autograd's thread)
    or are inside an operator of autograd's engine (annotations of a custom backward).

    Parameters
    ----------
    trace : Trace
    range_rows : ndarray of int
        Rows of ``trace.whole.ranges``.
    launch_threads : ndarray of int
        The thread of each launch.
    rule : {"window", "thread"}

    Yields
    ------
    ndarray of int
        Positions in `range_rows`, ascending.
    ndarray of int
        Positions in `launch_threads`, ascending: each of these launches may be inside each of those ranges.
    """
    all_range_threads = trace.whole.table("ranges", ["thread"])["thread"].to_numpy()
    range_threads = all_range_threads[range_rows]
    yield from _positions_of_equal_values(range_threads, launch_threads)
    if rule == "window":
        is_own = _is_own_range(trace.whole)
        own_ranges = np.flatnonzero(is_own[range_rows])
        # Launches of threads without own ranges.
        bare_launches = np.flatnonzero(~np.isin(launch_threads, all_range_threads[is_own]))
        range_processes = process_of(range_threads[own_ranges])
        launch_processes = process_of(launch_threads[bare_launches])
        for ranges, launches in _positions_of_equal_values(range_processes, launch_processes):
            yield own_ranges[ranges], bare_launches[launches]


def _positions_of_equal_values(left: Int, right: Int) -> Iterator[tuple[Int, Int]]:
    """For each value that is in both columns: its positions in `left`, and its positions in `right`."""
    left_positions = pd.Series(left).groupby(left).indices
    right_positions = pd.Series(right).groupby(right).indices
    for value, positions in left_positions.items():
        if value in right_positions:
            yield np.asarray(positions), np.asarray(right_positions[value])


def innermost_ranges_around(trace: Trace, ranges: pd.DataFrame, calls: pd.DataFrame, rule: Rule = "window") -> Int:
    """Find the innermost of some ranges in which each call lies.

    Parameters
    ----------
    trace : Trace
    ranges : DataFrame
        ``start_ns, end_ns`` of rows of ``trace.whole.ranges``, by their row.
    calls : DataFrame
        ``start_ns, end_ns, thread``.
    rule : {"window", "thread"}
        As for :func:`summary`: whether a call on a thread without own ranges may be inside a range of another thread.

    Returns
    -------
    ndarray of int64
        Position in `ranges` for each call, -1 for none.
    """
    # The last element is for position -1, here and below.
    begun = np.append(ranges["start_ns"].to_numpy(), np.iinfo(np.int64).min)
    position = np.full(len(calls), -1, np.int64)
    launch_threads = calls["thread"].to_numpy()
    for candidates, launches in ranges_with_launches(trace, ranges.index.to_numpy(), launch_threads, rule):
        candidate = intervals.innermost(calls.iloc[launches], ranges.iloc[candidates])
        new = np.append(candidates, -1)[candidate]
        # A call may be paired with its own thread's ranges and with the process's: the last to begin is innermost.
        old = position[launches]
        position[launches] = np.where(begun[new] > begun[old], new, old)
    return position


@memoised
def _is_own_range(whole: Trace) -> npt.NDArray[np.bool_]:
    """Flag the ranges that the program opened: no library's, on threads with own ranges.

    :func:`ranges_with_launches` explains own ranges. Ranges of a pool's threads are not own.
    """
    ranges = whole.table("ranges", ["start_ns", "end_ns", "thread", "name", "domain", "level"])
    is_library = matching(ranges["name"], OPERATOR_RANGE, COLLECTIVE_RANGE, LOADER_RANGE)
    is_library |= matching(ranges["domain"], _LIBRARY_DOMAIN, LOADER_RANGE)
    outermost = ranges[(ranges["level"] == 0).to_numpy() & ~is_library]
    outermost = outermost[~outermost["thread"].isin(_pool_threads(whole, outermost))]
    ops = whole.table("ops", ["start_ns", "end_ns", "thread", "name"])
    nodes = ops[matching(ops["name"], _AUTOGRAD)]
    is_outside_nodes = intervals.enclosing(outermost, nodes) < 0
    threads = outermost["thread"][is_outside_nodes].unique()
    return np.asarray(~is_library & ranges["thread"].isin(threads).to_numpy())


def _pool_threads(whole: Trace, outermost: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Find threads of a pool: they launch nothing, and other such threads have the same names of outermost ranges.

    Such ranges (of workers that decode images) are open at the same time as the training's own. They must not be taken
    for what holds the launches of another thread. `outermost` has the outermost ranges, without those of libraries.
    """
    calls = whole.table("calls", ["thread", "name"])
    launching = calls["thread"][matching(calls["name"], LAUNCHES)].unique()
    candidates = outermost[~outermost["thread"].isin(launching)]
    has_unshared_name = candidates.groupby("name", observed=True)["thread"].transform("nunique") == 1
    return np.setdiff1d(candidates["thread"], candidates["thread"][has_unshared_name])


def _exclusive_ns(whole: Trace) -> Int:
    """Own time of each range: its duration minus that of its children on the same thread."""
    ranges = whole.table("ranges", ["start_ns", "end_ns", "duration_ns", "parent"])
    own_ns = ranges["duration_ns"].to_numpy(copy=True)
    children = ranges[ranges["parent"] >= 0]
    parent = children["parent"].to_numpy()
    # A child may outlive its parent where the source rounds times.
    until = np.minimum(children["end_ns"].to_numpy(), ranges["end_ns"].to_numpy()[parent])
    np.subtract.at(own_ns, parent, until - children["start_ns"].to_numpy())
    return own_ns


def _launched_operations(trace: Trace, rule: Rule) -> pd.DataFrame:
    """GPU operations in the order of their launches: ``start_ns, end_ns, is_kernel``.

    Of the call that launched each: ``launch_begun``, ``launch_returned`` and ``thread``.
    """
    ops = intervals.gpu_intervals(trace, "process", "correlation")
    launch = intervals.launch_of(trace, ops["process"], ops["correlation"])
    is_counted = launch >= 0
    if rule == "thread":  # nsys's own, which leaves graph replays out
        is_counted &= (ops["table"] != GPU_TABLES.index("graphs")).to_numpy()
    if not attributable(trace, rule):
        is_counted[:] = False
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[launch[is_counted]]
    ops = ops[is_counted]
    table = pd.DataFrame({"start_ns": ops["start_ns"].to_numpy(), "end_ns": ops["end_ns"].to_numpy()})
    table["is_kernel"] = ops["table"].to_numpy() == GPU_TABLES.index("kernels")
    table["launch_begun"] = calls["start_ns"].to_numpy()
    table["launch_returned"] = calls["end_ns"].to_numpy()
    table["thread"] = calls["thread"].to_numpy()
    return table.sort_values("launch_begun", kind="stable", ignore_index=True)


@memoised
def _gpu_totals(trace: Trace, rule: Rule) -> pd.DataFrame:
    """Sum the GPU work launched in each range of the whole trace: the columns `_GPU_COLUMNS`, by row of the range."""
    ops = _launched_operations(trace, rule)
    ranges = trace.whole.table("ranges", ["start_ns", "end_ns"])
    range_end = ranges["end_ns"].to_numpy()
    launch_returned = ops["launch_returned"].to_numpy()
    # A block is `operations[low:high]`: the positions in `ops` of launches that begin in its range.
    blocks, operations = _blocks_of_ranges(trace, ranges, ops, rule)
    # Batches of about `_MOST_PAIRS` pairs. All blocks of a range go into one: its totals are assigned, not added.
    batch = blocks["pairs"].cumsum() // _MOST_PAIRS
    batch = batch.groupby(blocks["range"]).transform("first")
    totals = pd.DataFrame(0, ranges.index, _GPU_COLUMNS, dtype=np.int64)
    for _, in_batch in blocks.groupby(batch):
        block, position = intervals.expand_runs(in_batch["low"].to_numpy(), in_batch["pairs"].to_numpy())
        range_row = in_batch["range"].to_numpy()[block]
        operation = operations[position]
        # Only launches that also return within the range count.
        is_inside = launch_returned[operation] <= range_end[range_row]
        of_batch = _gpu_sums_by_range(ops.iloc[operation[is_inside]], range_row[is_inside])
        totals.loc[of_batch.index] = of_batch
    return totals


def _blocks_of_ranges(trace: Trace, ranges: pd.DataFrame, ops: pd.DataFrame, rule: Rule) -> tuple[pd.DataFrame, Int]:
    """List blocks of operations whose launches begin in a range: ``range, low, high, pairs``, and the operations.

    A block is ``operations[low:high]``, positions in `ops`, and ``pairs`` its length. A range may have several blocks.
    """
    launch_begun = ops["launch_begun"].to_numpy()
    start = ranges["start_ns"].to_numpy()
    end = ranges["end_ns"].to_numpy()
    operations = [np.empty(0, np.int64)]
    blocks = [np.empty((3, 0), np.int64)]
    before = 0  # how many operations are listed so far: `low` and `high` count on from there
    launch_threads = ops["thread"].to_numpy()
    for candidates, launches in ranges_with_launches(trace, np.arange(len(ranges)), launch_threads, rule):
        # Launches come in ascending order, and `ops` has the order in which they begin: these are sorted.
        begun = launch_begun[launches]
        low = before + np.searchsorted(begun, start[candidates], side="left")
        high = before + np.searchsorted(begun, end[candidates], side="right")
        blocks.append(np.stack((candidates, low, high)))
        operations.append(launches)
        before += len(launches)
    table = pd.DataFrame(np.concatenate(blocks, axis=1).T, columns=["range", "low", "high"])
    table["pairs"] = table["high"] - table["low"]
    table = table[table["pairs"] > 0].sort_values("range", kind="stable")
    return table, np.concatenate(operations)


def _gpu_sums_by_range(ops: pd.DataFrame, owner: Int) -> pd.DataFrame:
    """Sum operations by the range that owns each (its row, in `owner`): the columns `_GPU_COLUMNS`."""
    ops = ops.assign(gpu_ns=intervals.uncovered(ops["start_ns"], ops["end_ns"], owner))
    by_range = ops.groupby(owner)
    sums = by_range[["gpu_ns"]].sum()
    sums["gpu_span_ns"] = by_range["end_ns"].max() - by_range["start_ns"].min()
    sums["kernel_count"] = by_range["is_kernel"].sum()
    return sums
