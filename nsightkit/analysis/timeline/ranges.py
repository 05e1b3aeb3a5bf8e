"""What each annotated range cost: CPU time, inclusive and exclusive, and the GPU work launched inside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import LOADER_RANGE, OPERATOR_RANGE, compiled, matching
from nsightkit.errors import UsageError
from nsightkit.trace.model import GPU_TABLES, LAUNCHES, Trace, process_of

__all__ = ["COLLECTIVE_RANGE", "COLUMNS", "around", "attributable", "holders", "instances", "summary"]

Int = npt.NDArray[np.int64]
Rule = Literal["window", "thread"]

_GPU_COLUMNS = ["gpu_ns", "gpu_span_ns", "kernel_count"]
COLUMNS = ["name", "domain", "count", "total_ns", "exclusive_ns", "median_ns", *_GPU_COLUMNS, "rule"]

#: (range, operation) pairs looked at together; bounds memory.
_PAIRS = 1_000_000

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
    """Ranges by name and domain.

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
        ``window`` adds what threads without own ranges (:func:`holders`) launch while the range is open,
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
    known = attributable(trace, rule)
    each = instances(trace, rule)
    if match is not None:
        each = each[matching(each["name"], compiled(match, "match"))]
    by = each.groupby(["name", "domain"], observed=True, sort=False)
    table = by[["total_ns", "exclusive_ns", *_GPU_COLUMNS]].sum()
    table["count"] = by.size()
    table["median_ns"] = by["total_ns"].median()
    table["rule"] = rule
    table = table.reset_index().astype({"name": "str", "domain": "str"})
    if not known:
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
    """Every instance of the ranges that :func:`summary` adds up.

    Parameters
    ----------
    trace : Trace
    rule : {"window", "thread"}

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
    ranges[_GPU_COLUMNS] = _gpu_figures(trace, rule)
    selected = trace.mask("ranges")
    if selected is not None:
        ranges = ranges[selected]
    if rule == "thread":
        ranges = ranges[(ranges["thread"] == ranges["end_thread"]) & (ranges["name"] != "")]
    return ranges.drop(columns="end_thread").reset_index(drop=True)


def holders(trace: Trace, row: Int, thread: Int, rule: Rule = "window") -> Iterator[tuple[Int, Int]]:
    """Pair ranges with the launches that they may hold while they are open.

    A range may hold what its own thread launches. By the rule ``window`` a range that the program opened may also hold
    what the threads of its process without own ranges launch. A thread has none if all its outermost
    ranges are those of operators and libraries (data-parallel training annotates its collectives on autograd's thread)
    or are inside an operator of autograd's engine (annotations of a custom backward).

    Parameters
    ----------
    trace : Trace
    row : ndarray of int
        Rows of ``trace.whole.ranges``.
    thread : ndarray of int
        The thread of each launch.
    rule : {"window", "thread"}

    Yields
    ------
    ndarray of int
        Positions in `row`, ascending.
    ndarray of int
        Positions in `thread`, ascending: each of these launches may be inside each of those ranges.
    """
    range_thread = trace.whole.table("ranges", ["thread"])["thread"].to_numpy()
    yield from _alike(range_thread[row], thread)
    if rule == "window":
        own = _own(trace.whole)
        opened = np.flatnonzero(own[row])
        bare = np.flatnonzero(~np.isin(thread, range_thread[own]))
        for ranges, launches in _alike(process_of(range_thread[row][opened]), process_of(thread[bare])):
            yield opened[ranges], bare[launches]


def _alike(column: Int, other: Int) -> Iterator[tuple[Int, Int]]:
    """Positions in two columns of each value that is in both."""
    places = pd.Series(column).groupby(column).indices
    others = pd.Series(other).groupby(other).indices
    for value, positions in places.items():
        if value in others:
            yield np.asarray(positions), np.asarray(others[value])


def around(trace: Trace, ranges: pd.DataFrame, calls: pd.DataFrame, rule: Rule = "window") -> Int:
    """Find the innermost of some ranges in which each call lies.

    Parameters
    ----------
    trace : Trace
    ranges : DataFrame
        ``start_ns, end_ns`` of rows of ``trace.whole.ranges``, by their row.
    calls : DataFrame
        ``start_ns, end_ns, thread``.
    rule : {"window", "thread"}

    Returns
    -------
    ndarray of int64
        Position in `ranges` for each call, -1 for none.
    """
    begun = np.append(ranges["start_ns"].to_numpy(), np.iinfo(np.int64).min)
    position = np.full(len(calls), -1, np.int64)
    for candidates, launches in holders(trace, ranges.index.to_numpy(), calls["thread"].to_numpy(), rule):
        inner = intervals.innermost(calls.iloc[launches], ranges.iloc[candidates])
        inner = np.append(candidates, -1)[inner]
        known = position[launches]
        position[launches] = np.where(begun[inner] > begun[known], inner, known)
    return position


@kept
def _own(whole: Trace) -> npt.NDArray[np.bool_]:
    """Which ranges are the program's own: those on threads with ranges of their own, but not a library's."""
    ranges = whole.table("ranges", ["start_ns", "end_ns", "thread", "name", "domain", "level"])
    library = matching(ranges["name"], OPERATOR_RANGE, COLLECTIVE_RANGE, LOADER_RANGE)
    library |= matching(ranges["domain"], _LIBRARY_DOMAIN, LOADER_RANGE)
    outermost = ranges[(ranges["level"] == 0).to_numpy() & ~library]
    outermost = outermost[~outermost["thread"].isin(_pool(whole, outermost))]
    ops = whole.table("ops", ["start_ns", "end_ns", "thread", "name"])
    nodes = ops[matching(ops["name"], _AUTOGRAD)]
    of_program = intervals.enclosing(outermost, nodes) < 0
    threads = outermost["thread"][of_program].unique()
    return np.asarray(~library & ranges["thread"].isin(threads).to_numpy())


def _pool(whole: Trace, outermost: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Threads of a pool: they launch nothing, and other such threads have outermost ranges of the same names."""
    calls = whole.table("calls", ["thread", "name"])
    launching = calls["thread"][matching(calls["name"], LAUNCHES)].unique()
    idle = outermost[~outermost["thread"].isin(launching)]
    alone = idle.groupby("name", observed=True)["thread"].transform("nunique") == 1
    return np.setdiff1d(idle["thread"], idle["thread"][alone])


def _exclusive_ns(whole: Trace) -> Int:
    """Own time of each range: its duration minus that of its children on the same thread."""
    ranges = whole.table("ranges", ["start_ns", "end_ns", "duration_ns", "parent"])
    own_ns = ranges["duration_ns"].to_numpy(copy=True)
    children = ranges[ranges["parent"] >= 0]
    parent = children["parent"].to_numpy()
    until = np.minimum(children["end_ns"].to_numpy(), ranges["end_ns"].to_numpy()[parent])
    np.subtract.at(own_ns, parent, until - children["start_ns"].to_numpy())
    return own_ns


def _operations(trace: Trace, rule: Rule) -> pd.DataFrame:
    """GPU operations by launch: ``start_ns, end_ns, kernel``; of the launch ``begun, done, thread``."""
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
    table["kernel"] = ops["table"].to_numpy() == GPU_TABLES.index("kernels")
    table["begun"] = calls["start_ns"].to_numpy()
    table["done"] = calls["end_ns"].to_numpy()
    table["thread"] = calls["thread"].to_numpy()
    return table.sort_values("begun", kind="stable", ignore_index=True)


@kept
def _gpu_figures(trace: Trace, rule: Rule) -> pd.DataFrame:
    """What the GPU work of each range of the whole trace comes to."""
    ops = _operations(trace, rule)
    begun = ops["begun"].to_numpy()
    done = ops["done"].to_numpy()
    ranges = trace.whole.table("ranges", ["start_ns", "end_ns"])
    start = ranges["start_ns"].to_numpy()
    end = ranges["end_ns"].to_numpy()
    # Blocks of launches that begin in a range: the range, and from where to where in `members`.
    members = [np.empty(0, np.int64)]
    blocks = [np.empty((3, 0), np.int64)]
    before = 0
    for candidates, launches in holders(trace, np.arange(len(ranges)), ops["thread"].to_numpy(), rule):
        low = before + np.searchsorted(begun[launches], start[candidates], side="left")
        high = before + np.searchsorted(begun[launches], end[candidates], side="right")
        blocks.append(np.stack((candidates, low, high)))
        members.append(launches)
        before += len(launches)
    member = np.concatenate(members)
    block = pd.DataFrame(np.concatenate(blocks, axis=1).T, columns=["range", "low", "high"])
    block["pairs"] = block["high"] - block["low"]
    block = block[block["pairs"] > 0].sort_values("range", kind="stable")
    # A range's blocks stay together.
    part = block["pairs"].cumsum() // _PAIRS
    part = part.groupby(block["range"]).transform("first")
    figures = pd.DataFrame(0, ranges.index, _GPU_COLUMNS, dtype=np.int64)
    for _, some in block.groupby(part):
        pairs = _pairs(some, member)
        pairs = pairs[done[pairs["row"]] <= end[pairs["range"]]]
        sums = _sums(pairs, ops)
        figures.loc[sums.index] = sums
    return figures


def _pairs(blocks: pd.DataFrame, member: Int) -> pd.DataFrame:
    """Each range with each operation that was launched in it: ``range`` and ``row``."""
    count = blocks["pairs"].to_numpy()
    first = np.cumsum(count) - count
    shift = np.repeat(blocks["low"].to_numpy() - first, count)
    owner = np.repeat(blocks["range"].to_numpy(), count)
    return pd.DataFrame({"range": owner, "row": member[shift + np.arange(len(owner))]})


def _sums(pairs: pd.DataFrame, ops: pd.DataFrame) -> pd.DataFrame:
    """Union, span and kernels of each range's operations."""
    owner = pairs["range"].to_numpy()
    work = ops.iloc[pairs["row"]]
    work = work.assign(gpu_ns=intervals.uncovered(work["start_ns"], work["end_ns"], owner))
    by = work.groupby(owner)
    sums = by[["gpu_ns"]].sum()
    sums["gpu_span_ns"] = by["end_ns"].max() - by["start_ns"].min()
    sums["kernel_count"] = by["kernel"].sum()
    return sums
