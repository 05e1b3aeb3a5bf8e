"""What each annotated range cost: CPU time, inclusive and exclusive, and the GPU work launched inside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.intervals import launch_of
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import LOADER_RANGE, OPERATOR_RANGE, compiled, matching
from nsightkit.errors import UsageError
from nsightkit.trace.model import GPU_TABLES, LAUNCHES, Trace

__all__ = [
    "COLLECTIVE_RANGE",
    "COLUMNS",
    "attributable",
    "exclusive_ns",
    "holders",
    "instances",
    "summary",
    "threads_with_ranges",
]

Int = npt.NDArray[np.int64]
Rule = Literal["window", "thread"]

COLUMNS = [
    "name",
    "domain",
    "count",
    "total_ns",
    "exclusive_ns",
    "median_ns",
    "gpu_ns",
    "gpu_span_ns",
    "kernel_count",
    "rule",
]

#: What attribution looks at; one pass a table.
_COLUMNS = {
    "kernels": ["start_ns", "end_ns", "process", "correlation"],
    "memops": ["start_ns", "end_ns", "process", "correlation"],
    "graphs": ["start_ns", "end_ns", "process", "correlation"],
    "calls": ["start_ns", "end_ns", "thread", "correlation"],
    "ranges": ["start_ns", "end_ns", "process", "thread", "end_thread", "name", "domain", "level", "parent"],
}
#: What the GPU work of a range comes to.
_FIGURES = ("gpu_ns", "gpu_span_ns", "gpu_start_ns", "gpu_end_ns", "kernel_count", "op_count")
#: (range, operation) pairs looked at together; bounds memory.
_PAIRS = 1_000_000

#: Ranges that a library makes for a collective, wherever the program's work happens to run: ``nccl:all_reduce`` of
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
        ``thread`` is nsys's own: the launching call lies inside the range on the same thread. ``window``
        adds what threads without ranges of their own (:func:`threads_with_ranges`) launch while the range is
        open, because autograd launches the backward pass from a thread of its own.
        ``thread`` also copies the rest of nsys's rules: ranges that end on another thread and unnamed
        ones are left out, graph replays do not count.

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
    # Small, and all that a second look needs.
    out = trace.derived(f"range-names-{rule}", lambda: _by_name(trace, rule))
    if match is not None:
        out = out[matching(out["name"], compiled(match, "match"))]
    if not known:
        out = out.assign(
            **dict.fromkeys(("gpu_ns", "gpu_span_ns", "kernel_count"), pd.array([pd.NA], "Int64").repeat(len(out)))
        )
    out = out.assign(name=out["name"].astype("str"), domain=out["domain"].astype("str"), rule=rule)
    return out.sort_values(["total_ns", "name"], ascending=[False, True], ignore_index=True)[COLUMNS]


def _by_name(trace: Trace, rule: Rule) -> pd.DataFrame:
    each = instances(trace, rule=rule)
    return (
        each.groupby(["name", "domain"], observed=True, sort=False)
        .agg(
            count=("total_ns", "size"),
            total_ns=("total_ns", "sum"),
            exclusive_ns=("exclusive_ns", "sum"),
            median_ns=("total_ns", "median"),
            gpu_ns=("gpu_ns", "sum"),
            gpu_span_ns=("gpu_span_ns", "sum"),
            kernel_count=("kernel_count", "sum"),
        )
        .reset_index()
    )


def attributable(trace: Trace, rule: Rule) -> bool:
    """Say whether a trace recorded what tells in which range GPU work was launched.

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
        exclusive_ns, gpu_ns, gpu_span_ns, gpu_start_ns, gpu_end_ns, kernel_count, op_count``; the last six are
        0 without GPU work.
    """
    figures = trace.derived(f"ranges-{rule}", lambda: _gpu_figures(trace, rule))
    ranges = trace.whole.table("ranges", ["start_ns", "end_ns", "process", "thread", "end_thread", "name", "domain"])
    selected = trace.mask("ranges")
    keep = np.ones(len(ranges), bool) if selected is None else selected
    if rule == "thread":
        keep = keep & (ranges["thread"] == ranges["end_thread"]).to_numpy() & (ranges["name"] != "").to_numpy()
    chosen = ranges[keep] if not keep.all() else ranges
    return pd.DataFrame(
        {
            "row": np.flatnonzero(keep),
            **chosen[["name", "domain", "start_ns", "end_ns", "process", "thread"]].reset_index(drop=True),
            "total_ns": (chosen["end_ns"] - chosen["start_ns"]).to_numpy(),
            "exclusive_ns": exclusive_ns(trace.whole)[keep],
            **{column: figures[column].to_numpy()[keep] for column in figures},
        },
        copy=False,
    )


def threads_with_ranges(trace: Trace) -> frozenset[int]:
    """Find the threads on which the program opened ranges of its own, whatever was selected from the trace.

    The work of any other thread belongs to ranges of these, by the rule ``window``. A thread is not one of them if all
    its outermost ranges are those of operators and libraries (data-parallel training annotates its collectives on
    autograd's thread) or lie in an operator of autograd's engine (whatever the backward of a function annotates).

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    frozenset of int
    """
    thread = trace.whole.table("ranges", ["thread"])["thread"].to_numpy()
    return frozenset(np.unique(thread[_own(trace.whole)]).tolist())


def holders(trace: Trace, row: Int, thread: Int, rule: Rule = "window") -> Iterator[tuple[Int, Int]]:
    """Pair ranges with the launches that they may hold while they are open.

    A range may hold what its own thread launches. By the rule ``window`` a range that the program opened may also hold
    what those threads of its process launch that have no ranges of their own.

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
        Positions in `thread`, ascending: each of these launches may lie in each of those ranges.
    """
    range_thread = trace.whole.table("ranges", ["thread"])["thread"].to_numpy()
    yield from _alike(range_thread[row], thread)
    if rule == "window":
        own = _own(trace.whole)
        opened, bare = np.flatnonzero(own[row]), np.flatnonzero(~np.isin(thread, range_thread[own]))
        for ranges, launches in _alike(range_thread[row][opened] >> 24, thread[bare] >> 24):
            yield opened[ranges], bare[launches]


def _alike(column: Int, other: Int) -> Iterator[tuple[Int, Int]]:
    """Positions in two columns of each value that stands in both."""
    places: dict[Any, Any] = pd.Series(column).groupby(column).indices
    others: dict[Any, Any] = pd.Series(other).groupby(other).indices
    for value, at in places.items():
        if value in others:
            yield at, others[value]


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
    workers = outermost[outermost["thread"].isin(nodes["thread"])]
    outermost = outermost.drop(workers.index[intervals.enclosing(workers, nodes) >= 0])
    return np.asarray(~library & ranges["thread"].isin(outermost["thread"]).to_numpy())


def _pool(whole: Trace, outermost: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Threads of a pool: they launch nothing, and other such threads have outermost ranges of the same names."""
    calls = whole.table("calls", ["thread", "name"])
    launching = calls["thread"][matching(calls["name"], LAUNCHES)].unique()
    idle = outermost[~outermost["thread"].isin(launching)]
    alone = idle.groupby("name", observed=True)["thread"].transform("nunique") == 1
    return np.setdiff1d(idle["thread"], idle["thread"][alone])


def exclusive_ns(trace: Trace) -> Int:
    """Own time of each range: its duration minus that of its children on the same thread.

    Parameters
    ----------
    trace : Trace
        The whole one.

    Returns
    -------
    ndarray of int64
        One value a row of ``trace.ranges``. Over the ranges of one thread these sum to the time that
        thread spent inside any range.
    """
    ranges = trace.table("ranges", ["start_ns", "end_ns", "parent"])
    start, end, parent = (ranges[c].to_numpy() for c in ("start_ns", "end_ns", "parent"))
    child = np.flatnonzero(parent >= 0)
    above = parent[child]
    inside = np.minimum(end[child], end[above]) - start[child]
    # Float sums are exact here: a parent's children last less than 2**53 ns, 104 days.
    return np.asarray(end - start - np.bincount(above, weights=inside, minlength=len(end)).astype(np.int64))


def _operations(trace: Trace, rule: Rule) -> dict[str, npt.NDArray[Any]]:
    """GPU operations with a recorded launch, by launch: start, end, whether a kernel; when and where launched."""
    ops = intervals.gpu_intervals(trace, "process", "correlation")
    launch = launch_of(trace, ops["process"], ops["correlation"])
    counts = (
        attributable(trace, rule)
        & (launch >= 0)
        & ((rule == "window") | (ops["table"] != GPU_TABLES.index("graphs")).to_numpy())
    )
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[launch[counts]]
    begun, done, thread = (calls[c].to_numpy() for c in calls)
    start, end = (ops[c].to_numpy()[counts] for c in ("start_ns", "end_ns"))
    kernel = ops["table"].to_numpy()[counts] == GPU_TABLES.index("kernels")
    order = np.argsort(begun, kind="stable")
    found = {"start": start, "end": end, "kernel": kernel, "begun": begun, "done": done, "thread": thread}
    return {name: column[order] for name, column in found.items()}


def _gpu_figures(trace: Trace, rule: Rule) -> pd.DataFrame:
    """What the GPU work of each range of the whole trace comes to."""
    trace.whole.prefetch(_COLUMNS)
    ops = _operations(trace, rule)
    ranges = trace.whole.table("ranges", ["start_ns", "end_ns"])
    range_start, range_end = (ranges[c].to_numpy() for c in ranges)
    figures = np.zeros((len(_FIGURES), len(ranges)), np.int64)
    # Operations by who may hold them, and blocks of these: a range, and the positions of what was launched in it.
    order, blocks, before = [np.empty(0, np.intp)], [np.empty((3, 0), np.int64)], 0
    ends = None
    for candidates, mine in holders(trace, np.arange(len(ranges)), ops["thread"], rule):
        begun, done = ops["begun"][mine], ops["done"][mine]
        if (done[1:] < done[:-1]).any():
            # Launches of several threads overlap: some of those that began in a range may end behind it.
            done, ends = begun, range_end
        low = np.searchsorted(begun, range_start[candidates], side="left")
        high = np.searchsorted(done, range_end[candidates], side="right")
        some = high > low
        blocks.append(np.stack((candidates[some], before + low[some], before + high[some])))
        order.append(mine)
        before += len(mine)
    members, block = np.concatenate(order), np.concatenate(blocks, axis=1)
    block = block[:, np.argsort(block[0], kind="stable")]
    heads = np.flatnonzero(np.diff(block[0], prepend=-1))
    pairs = np.cumsum(block[2] - block[1])[heads] // _PAIRS
    for part in np.split(block, heads[1:][np.diff(pairs) > 0], axis=1):
        if part.size:
            _add_up(figures, part, members, ops, ends)
    return pd.DataFrame(dict(zip(_FIGURES, figures, strict=True)), copy=False)


def _add_up(figures: Int, blocks: Int, members: Int, ops: dict[str, npt.NDArray[Any]], ends: Int | None = None) -> None:
    """Figures of some ranges: each block is a range, and from and to where `members` were launched inside it.

    Where the ends of all ranges are given, launches that outlast theirs do not count.
    """
    ranges, low, high = blocks
    count = high - low
    which = np.repeat(np.arange(len(count)), count)
    rows = members[np.arange(len(which)) - (np.cumsum(count) - count - low)[which]]
    owner = ranges[which]
    if ends is not None:
        inside = ops["done"][rows] <= ends[owner]
        owner, rows = owner[inside], rows[inside]
    if not len(rows):
        return
    start, end, kernel = (ops[column][rows] for column in ("start", "end", "kernel"))
    same = owner[1:] == owner[:-1]
    if (same & (start[1:] < start[:-1])).any():
        order = np.lexsort((start, owner))
        start, end, kernel = start[order], end[order], kernel[order]
    heads = np.flatnonzero(np.append(True, ~same))
    first, last = start[heads], np.maximum.reduceat(end, heads)
    covered = np.add.reduceat(end - start, heads)
    if (same & (start[1:] < end[:-1])).any():
        covered = np.add.reduceat(intervals.uncovered(start, end, owner), heads)
    kernels, operations = np.add.reduceat(kernel.astype(np.int64), heads), np.diff(heads, append=len(end))
    figures[:, owner[heads]] = covered, last - first, first, last, kernels, operations
