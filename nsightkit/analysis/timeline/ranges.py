"""What each annotated range cost: CPU time, inclusive and exclusive, and the GPU work launched inside it."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.intervals import launch_of
from nsightkit.analysis.core.names import OPERATOR_RANGE, compiled, matching
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace

__all__ = ["COLLECTIVE_RANGE", "COLUMNS", "exclusive_ns", "holds", "instances", "summary", "threads_with_ranges"]

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
#: Source files whose change makes kept figures stale.
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
    if trace is trace.whole and rule in ("window", "thread"):
        # Small, and all that a second look needs.
        out = trace.derived(f"range-names-{rule}", lambda: _by_name(trace, rule)).copy()
    else:
        out = _by_name(trace, rule)
    if match is not None:
        out = out[matching(out["name"], compiled(match, "match"))]
    if not _attributable(trace):
        for column in ("gpu_ns", "gpu_span_ns", "kernel_count"):
            out[column] = pd.array([pd.NA] * len(out), dtype="Int64")
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


def _attributable(trace: Trace) -> bool:
    return trace.recorded("calls") and trace.recorded("kernels")


def instances(trace: Trace, match: str | None = None, rule: Rule = "window") -> pd.DataFrame:
    """Every instance of the ranges that :func:`summary` adds up.

    Parameters
    ----------
    trace : Trace
    match : str, optional
    rule : {"window", "thread"}

    Returns
    -------
    DataFrame
        ``row`` (in ``trace.whole.ranges``), ``name, domain, start_ns, end_ns, process, thread, total_ns,
        exclusive_ns, gpu_ns, gpu_span_ns, gpu_start_ns, gpu_end_ns, kernel_count, op_count``; the last six are
        0 without GPU work.
    """
    if rule not in ("window", "thread"):
        raise UsageError(f"unknown rule {rule!r}; use window or thread")
    whole = trace.whole
    ranges = whole.table("ranges", ["start_ns", "end_ns", "process", "thread", "end_thread", "name", "domain"])
    keep = np.ones(len(ranges), bool)
    mask = trace.mask("ranges")
    if mask is not None:
        keep &= mask
    if match is not None:
        keep &= matching(ranges["name"], compiled(match, "match"))
    if rule == "thread":
        keep &= ranges["thread"].to_numpy() == ranges["end_thread"].to_numpy()
        keep &= (ranges["name"] != "").to_numpy()
    own = exclusive_ns(whole)
    if keep.all():
        row, chosen = np.arange(len(ranges)), ranges
    else:
        row = np.flatnonzero(keep)
        chosen, own = ranges.iloc[row].reset_index(drop=True), own[row]
    out = {
        "row": row,
        **{c: chosen[c] for c in ("name", "domain", "start_ns", "end_ns", "process", "thread")},
        "total_ns": (chosen["end_ns"] - chosen["start_ns"]).to_numpy(),
        "exclusive_ns": own,
    }
    return pd.DataFrame({**out, **_figures(trace, chosen, row, rule)}, copy=False)


def threads_with_ranges(trace: Trace) -> frozenset[int]:
    """Find the threads on which the program opened ranges of its own, whatever was selected from the trace.

    The work of any other thread belongs to ranges of these, by the rule ``window``. A thread is none of them if all its
    outermost ranges are those of operators and libraries (data-parallel training annotates its collectives on
    autograd's thread) or lie in an operator of autograd's engine (whatever the backward of a function annotates).

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    frozenset of int
    """
    return _own(trace.whole)[0]


def holds(trace: Trace, row: Int, thread: int) -> npt.NDArray[np.bool_]:
    """Flag the ranges that may hold what a thread launches while they are open, by the rule ``window``.

    Parameters
    ----------
    trace : Trace
    row : ndarray of int
        Rows of ``trace.whole.ranges``.
    thread : int
        The launching thread.

    Returns
    -------
    ndarray of bool
        Ranges of that very thread; and if it has none of its own, those that the program opened in its process.
    """
    own, program = _own(trace.whole)
    range_thread = trace.whole.table("ranges", ["thread"])["thread"].to_numpy()[row]
    mine = range_thread == thread
    if thread not in own:
        mine |= program[row] & (range_thread >> 24 == thread >> 24)
    return np.asarray(mine)


def _own(whole: Trace) -> tuple[frozenset[int], npt.NDArray[np.bool_]]:
    """Threads with ranges of their own, and which ranges are the program's own."""
    if "own ranges" not in whole.memo:
        ranges = whole.table("ranges", ["start_ns", "end_ns", "thread", "name", "domain", "level"])
        library = matching(ranges["name"], OPERATOR_RANGE, COLLECTIVE_RANGE) | matching(
            ranges["domain"], _LIBRARY_DOMAIN
        )
        outermost = ranges[(ranges["level"] == 0).to_numpy() & ~library]
        threads = outermost["thread"]
        if len(outermost) and whole.size("ops"):
            ops = whole.table("ops", ["start_ns", "end_ns", "thread", "name"])
            nodes = ops[matching(ops["name"], _AUTOGRAD)]
            workers = threads.isin(nodes["thread"]).to_numpy()
            inside = intervals.enclosing(outermost[workers], nodes) >= 0
            threads = pd.concat([threads[~workers], threads[workers][~inside]])
        own = frozenset(pd.unique(threads).tolist())
        whole.memo["own ranges"] = own, ~library & ranges["thread"].isin(own).to_numpy()
    found: tuple[frozenset[int], npt.NDArray[np.bool_]] = whole.memo["own ranges"]
    return found


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
    own = end - start
    child = np.flatnonzero(parent >= 0)
    if len(child):
        above = parent[child]
        inside = np.minimum(end[child], end[above]) - start[child]
        # Float sums are exact here: a parent's children last less than 2**53 ns, 104 days.
        own = own - np.bincount(above, weights=inside, minlength=len(own)).astype(np.int64)
    return np.asarray(own, np.int64)


def _operations(trace: Trace, rule: Rule) -> tuple[Int, Int, Int, Int, Int, npt.NDArray[np.bool_]]:
    """GPU operations with a recorded launch, by launch: start, end, launch start and end, thread, is kernel."""
    parts = []
    for table in ("kernels", "memops") if rule == "thread" else ("kernels", "memops", "graphs"):
        if not trace.size(table):
            continue
        frame = trace.table(table, ["start_ns", "end_ns", "process", "correlation"])
        launch = launch_of(trace, frame["process"].to_numpy(), frame["correlation"].to_numpy()).astype(np.int32)
        start, end = frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()
        known = launch >= 0
        if not known.all():
            start, end, launch = start[known], end[known], launch[known]
        parts.append((start, end, launch, np.full(len(start), table == "kernels")))
    if not parts:
        none = np.empty(0, np.int64)
        return none, none, none, none, none, np.empty(0, bool)
    columns = [np.concatenate(p) for p in zip(*parts, strict=True)]
    launch = columns.pop(2)
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"])
    begun = calls["start_ns"].to_numpy()[launch]
    if (begun[1:] < begun[:-1]).any():
        order = np.argsort(begun, kind="stable")
        begun, launch = begun[order], launch[order]
        for i, column in enumerate(columns):
            columns[i] = column[order]  # one at a time: the unordered one can go
    done, thread = (calls[c].to_numpy()[launch] for c in ("end_ns", "thread"))
    start, end, kernel = columns
    return start, end, begun, done, thread, kernel


def _figures(trace: Trace, chosen: pd.DataFrame, row: Int, rule: Rule) -> dict[str, Int]:
    """GPU figures of the chosen ranges; those of the whole trace are kept."""
    if trace is not trace.whole:
        return _gpu_figures(trace, chosen, row, rule)

    def of_all() -> pd.DataFrame:
        whole = trace.table("ranges", ["start_ns", "end_ns", "thread"])
        return pd.DataFrame(_gpu_figures(trace, whole, np.arange(len(whole)), rule), copy=False)

    kept = trace.derived(f"ranges-{rule}", of_all)
    if len(row) == len(kept):
        return {str(c): kept[c].to_numpy() for c in kept}
    return {str(c): kept[c].to_numpy()[row] for c in kept}


def _gpu_figures(trace: Trace, ranges: pd.DataFrame, row: Int, rule: Rule) -> dict[str, Int]:
    n = len(ranges)
    figures = {
        c: np.zeros(n, np.int64)
        for c in ("gpu_ns", "gpu_span_ns", "gpu_start_ns", "gpu_end_ns", "kernel_count", "op_count")
    }
    if not n or not _attributable(trace):
        return figures
    trace.whole.prefetch(_COLUMNS)
    start, end, begun, done, thread, kernel = _operations(trace, rule)
    if not len(start):
        return figures
    range_start, range_end, range_thread = (ranges[c].to_numpy() for c in ("start_ns", "end_ns", "thread"))
    totals = _Totals(figures, start, end, kernel)
    for one in np.unique(thread).tolist():
        mine = np.flatnonzero(thread == one)
        candidates = np.flatnonzero(range_thread == one if rule == "thread" else holds(trace, row, one))
        if not len(candidates):
            continue
        # Launches of one thread follow each other, so those inside a range are consecutive.
        launch_begin, launch_end = begun[mine], done[mine]
        if (launch_end[1:] < launch_end[:-1]).any():
            launch_end = np.maximum.accumulate(launch_end)  # nested twins only; their outer call was chosen
        low = np.searchsorted(launch_begin, range_start[candidates], side="left")
        high = np.searchsorted(launch_end, range_end[candidates], side="right")
        totals.add(candidates, mine, low, high)
    totals.finish()
    return figures


class _Totals:
    """Adds up, range by range, operations that may come from several threads.

    The union of a range's intervals cannot be added over threads. Ranges that one thread feeds (nearly all)
    are finished at once; the rest wait until all threads are known.
    """

    def __init__(self, figures: dict[str, Int], start: Int, end: Int, kernel: npt.NDArray[np.bool_]) -> None:
        self._figures = figures
        self._start, self._end, self._kernel = start, end, kernel
        self._blocks: list[tuple[Int, Int, Int, Int]] = []

    def add(self, ranges: Int, operations: Int, low: Int, high: Int) -> None:
        """Operations ``operations[low[k]:high[k]]`` were launched inside range ``ranges[k]``."""
        some = high > low
        self._blocks.append((ranges[some], operations, low[some], high[some]))

    def finish(self) -> None:
        fed = np.zeros(len(self._figures["gpu_ns"]), np.int32)
        for ranges, *_ in self._blocks:
            fed[ranges] += 1
        shared: list[tuple[Int, Int]] = []
        for ranges, operations, low, high in self._blocks:
            alone = fed[ranges] == 1
            self._in_chunks(ranges[alone], operations, low[alone], high[alone])
            if not alone.all():
                rows, which = _expand(low[~alone], high[~alone])
                shared.append((ranges[~alone][which], operations[rows]))
        if shared:
            owner = np.concatenate([s[0] for s in shared])
            member = np.concatenate([s[1] for s in shared])
            order = np.argsort(owner, kind="stable")
            owner, member = owner[order], member[order]
            cut = np.concatenate(([0], np.flatnonzero(owner[1:] != owner[:-1]) + 1, [len(owner)]))
            self._in_chunks(owner[cut[:-1]], member, cut[:-1], cut[1:])

    def _in_chunks(self, ranges: Int, operations: Int, low: Int, high: Int) -> None:
        filled = np.cumsum(high - low)
        at = 0
        while at < len(ranges):
            done = filled[at - 1] if at else 0
            upto = max(at + 1, int(np.searchsorted(filled, done + _PAIRS, side="right")))
            self._chunk(ranges[at:upto], operations, low[at:upto], high[at:upto])
            at = upto

    def _chunk(self, ranges: Int, operations: Int, low: Int, high: Int) -> None:
        rows, owner = _expand(low, high)
        members = operations[rows]
        start, end, kernel = self._start[members], self._end[members], self._kernel[members]
        same = owner[1:] == owner[:-1]
        if (same & (start[1:] < start[:-1])).any():
            order = np.lexsort((start, owner))
            start, end, kernel = start[order], end[order], kernel[order]
        heads = np.concatenate(([0], np.flatnonzero(~same) + 1))
        first, last = start[heads], np.maximum.reduceat(end, heads)
        covered = np.add.reduceat(end - start, heads)
        crowded = same & (start[1:] < end[:-1])
        if crowded.any():
            # Overlapping intervals: running maximum of the ends within each range. Ranks keep the key small.
            ranked = np.argsort(end, kind="stable")
            rank = np.empty(len(end), np.int64)
            rank[ranked] = np.arange(len(end))
            reach = end[ranked][np.maximum.accumulate(rank + owner * len(end)) - owner * len(end)]
            begins = np.concatenate(([True], ~same | (start[1:] > reach[:-1])))
            pieces = np.flatnonzero(begins)
            closes = np.concatenate((pieces[1:] - 1, [len(end) - 1]))
            covered = np.bincount(owner[pieces], weights=reach[closes] - start[pieces], minlength=len(ranges)).astype(
                np.int64
            )
        out = self._figures
        out["gpu_ns"][ranges] = covered
        out["gpu_span_ns"][ranges] = last - first
        out["gpu_start_ns"][ranges] = first
        out["gpu_end_ns"][ranges] = last
        out["kernel_count"][ranges] = np.add.reduceat(kernel.astype(np.int64), heads)
        out["op_count"][ranges] = high - low


def _expand(low: Int, high: Int) -> tuple[Int, Int]:
    """All positions of the blocks ``low[k]:high[k]``, and which block each belongs to."""
    count = high - low
    which = np.repeat(np.arange(len(count)), count)
    before = np.cumsum(count) - count
    return np.arange(len(which)) - before[which] + low[which], which
