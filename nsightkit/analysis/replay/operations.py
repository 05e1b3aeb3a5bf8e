"""The first stage of a replay: what ran on the devices, who launched it, and which of its calls block."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.replay.model import NEVER, Bool, Int, Unplayable, kinds_of
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps.names import BLOCKING, UNIFIED
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["Calls", "Operations", "Program", "read"]

#: Operations that start before their launch by no more than this show that two clocks differ, but for this share.
_CLOCK_NS, _SURE = 100_000, 0.999
#: Operations of one stream run one after another; where they overlap for more than this share, streams are not known.
_OVERLAP = 0.02
#: Work whose launch was not recorded, as a share of all GPU work, above which no schedule can be made.
_UNLINKED = 0.1
#: Most launching threads, each of which may wait for any other; and most pairs of a stream and a call that may wait.
_MOST_THREADS, _MOST_PAIRS = 256, 50_000_000
_GPU_COLUMNS = ("start_ns", "end_ns", "device", "process", "stream", "correlation")
_COLUMNS = {
    "kernels": (*_GPU_COLUMNS, "name", "collective"),
    "memops": (*_GPU_COLUMNS, "kind", "src_kind", "dst_kind"),
    "graphs": _GPU_COLUMNS,
    "calls": ("start_ns", "end_ns", "thread", "correlation", "name"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Operations:
    """What is scheduled, by stream and time; what one call launched together is one operation.

    Parameters
    ----------
    start, end, device, stream, process, table, row : ndarray
        When and where each ran; streams are numbered over all devices, `row` counts in the whole trace.
    launch, begun, done, by : ndarray
        Row, start, end and thread of the launching calls; -1, `NEVER`, `NEVER` and -1 where none was recorded.
    before : ndarray of int64
        When the operation before each one in its stream had ended.
    device_before : ndarray of int64
        When everything that began before each one on its device had ended.
    released_ns : ndarray of int64
        Per stream: what no operation of it can come before, `earliest_ns` on a stream that a change makes. What a
        selection leaves out happened when it did.
    parts : DataFrame
        ``table, row, operation``: the events of the trace that the operations are made of.
    shift_ns : int
        How far the devices' clock had to be moved.
    """

    start: Int
    end: Int
    device: Int
    stream: Int
    process: Int
    table: Int
    row: Int
    launch: Int
    begun: Int
    done: Int
    by: Int
    before: Int
    device_before: Int
    released_ns: Int
    earliest_ns: int
    parts: pd.DataFrame
    shift_ns: int

    @functools.cached_property
    def linked(self) -> Bool:
        """Which operations have a recorded launch."""
        return self.launch >= 0

    @functools.cached_property
    def first(self) -> Bool:
        """Which operations are the first of their stream."""
        return np.append(True, self.stream[1:] != self.stream[:-1])

    @functools.cached_property
    def by_end(self) -> Int:
        """Positions by end."""
        return np.argsort(self.end, kind="stable")

    @functools.cached_property
    def by_launch(self) -> Int:
        """Positions of the linked ones in the order in which threads launched them, thread by thread."""
        linked = np.flatnonzero(self.linked)
        return linked[np.lexsort((self.begun[linked], self.by[linked]))]

    def ended_by(self, times: Int) -> Int:
        """The operation that ended last by each time, -1 where none had."""
        at = np.searchsorted(self.end[self.by_end], times, side="right") - 1
        return np.where(at >= 0, self.by_end[at], -1)


@dataclasses.dataclass(frozen=True, eq=False)
class Calls:
    """All CUDA calls of the trace, by row."""

    start: Int
    end: Int
    thread: Int
    names: pd.Series


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The recorded program: its operations, its calls and its steps.

    Parameters
    ----------
    trace : Trace
    operations : Operations
    calls : Calls
    own_copy : ndarray of bool
        Copies whose call returns only when they are done.
    staged : ndarray of bool
        Copies from pageable memory to a device.
    threads : ndarray of int64
        The launching threads, and the steps' thread.
    blocking : ndarray of int64
        Rows of the calls that wait for the GPU, by start.
    steps : DataFrame
        As :func:`nsightkit.analysis.timeline.steps.windows` gives them.
    main, process : int
        Thread and process of the steps, `NEVER` without steps.
    begin_ns : int
        From when on a change takes time away.
    """

    trace: Trace
    operations: Operations
    calls: Calls
    own_copy: Bool
    staged: Bool
    threads: Int
    blocking: Int
    steps: pd.DataFrame
    main: int
    process: int
    begin_ns: int

    @functools.cached_property
    def collective(self) -> Bool:
        """Which operations are collectives."""
        table = self.trace.whole.table("kernels", ["name", "collective"])
        talks = (categorize(table["name"]) == "communication") | (table["collective"] != "").to_numpy()
        kernels = self.operations.table == GPU_TABLES.index("kernels")
        collective = np.zeros(len(kernels), bool)
        collective[kernels] = talks[self.operations.row[kernels]]
        return collective

    @functools.cached_property
    def in_step(self) -> Int:
        """The step that each operation was launched in, -1 for none."""
        number = steps.number(self.steps.assign(end_ns=self.steps["cpu_end_ns"]), self.operations.begun)
        return np.where(self.operations.process == self.process, number, -1).astype(np.int32)

    @functools.cached_property
    def by_others(self) -> Bool:
        """Operations of the steps' process that another thread than the steps' launched."""
        operations = self.operations
        others = operations.linked & (operations.process == self.process) & (operations.by != self.main)
        return np.asarray(others)


def read(trace: Trace) -> Program:
    """Read a trace.

    Parameters
    ----------
    trace : Trace
        Selected or whole; the selection is replayed.

    Returns
    -------
    Program

    Raises
    ------
    Unplayable
    """
    trace.prefetch(_COLUMNS)
    whole = trace.whole
    columns = whole.table("calls", ["start_ns", "end_ns", "thread", "name"])
    start, end, thread = (columns[name].to_numpy() for name in ("start_ns", "end_ns", "thread"))
    calls = Calls(start, end, thread, columns["name"])
    operations = _operations(trace, calls)
    blocks = matching(calls.names, BLOCKING)
    own_copy, staged = _copies(whole, operations, blocks)
    blocks[operations.launch[own_copy]] = True
    windows = steps.windows(trace)
    main = process = begin_ns = int(NEVER)
    if len(windows):
        main, process, begin_ns = (int(windows[name].iloc[0]) for name in ("thread", "process", "start_ns"))
    elif trace is not whole:
        begin_ns = int(operations.begun[operations.linked].min())
    threads = np.union1d(kinds_of(operations.by[operations.linked]), windows["thread"])
    if len(threads) > _MOST_THREADS:
        raise Unplayable(f"{len(threads):,} threads launched its work")
    blocks &= _selected_calls(trace, operations)
    blocking = _outermost(calls, np.flatnonzero(blocks & np.isin(calls.thread, threads)))
    if len(blocking) * len(operations.released_ns) > _MOST_PAIRS:
        raise Unplayable(f"{len(blocking):,} calls may wait for {len(operations.released_ns):,} streams")
    return Program(trace, operations, calls, own_copy, staged, threads, blocking, windows, main, process, begin_ns)


def _selected_calls(trace: Trace, operations: Operations) -> Bool:
    """Calls that a selection keeps, or whose operations it keeps."""
    mask = trace.mask("calls")
    if mask is None:
        return np.ones(trace.whole.size("calls"), bool)
    selected = mask.copy()
    selected[operations.launch[operations.linked]] = True
    return selected


def _operations(trace: Trace, calls: Calls) -> Operations:
    every = _every(trace.whole)
    shift_ns = _behind_launches(every, calls)
    every[["start_ns", "end_ns"]] += shift_ns
    reach = every.groupby("device")["end_ns"].cummax()
    every["device_before"] = reach.groupby(every["device"]).shift(fill_value=NEVER)
    chosen = every[intervals.selected(trace, every["table"], every["row"])]
    if chosen.empty:
        raise Unplayable("there is no GPU work")
    chosen = chosen.sort_values("stream", kind="stable", ignore_index=True)  # by device and start already
    ops, part_of = _joined(chosen)
    ops = ops.rename(columns={"start_ns": "start", "end_ns": "end"})
    first = ~ops["stream"].duplicated()
    _check_streams(chosen, ops, first.to_numpy())
    ops = _with_launches(ops, calls)
    released_ns, earliest_ns = np.full(int(every["stream"].max()) + 1, NEVER), int(NEVER)
    if trace is not trace.whole:
        earliest_ns = int(ops["start"].min())
        _release(released_ns, every, ops[first].set_index("stream")["start"])
    ops["before"] = np.where(first, released_ns[ops["stream"]], ops["end"].shift(fill_value=0))
    return Operations(
        **{str(column): values.to_numpy() for column, values in ops.items()},
        released_ns=released_ns,
        earliest_ns=earliest_ns,
        parts=chosen[["table", "row"]].assign(operation=part_of),
        shift_ns=shift_ns,
    )


def _with_launches(ops: pd.DataFrame, calls: Calls) -> pd.DataFrame:
    """Add when each operation was launched, and by which thread."""
    launch = ops["launch"].to_numpy()
    linked = launch >= 0
    return ops.assign(
        begun=np.where(linked, calls.start[launch], NEVER),
        done=np.where(linked, calls.end[launch], NEVER),
        by=np.where(linked, calls.thread[launch], -1),
    )


def _release(released_ns: Int, every: pd.DataFrame, begins: pd.Series) -> None:
    """Note when the work before a selection had ended on each of its streams, which begin at some times."""
    earlier = every[every["start_ns"] < every["stream"].map(begins)].groupby("stream")["end_ns"].max()
    released_ns[earlier.index] = np.minimum(earlier, begins[earlier.index])


def _every(whole: Trace) -> pd.DataFrame:
    """All events of the devices, with their launches and numbered streams."""
    every = intervals.gpu_intervals(whole, "process", "stream", "correlation")
    # Pages of managed memory move when they are touched: they are in no stream, and kernels wait for them.
    moves = matching(whole.table("memops", ["kind"])["kind"], UNIFIED)
    if moves.any():
        pages = (every["table"] == GPU_TABLES.index("memops")).to_numpy(copy=True)
        pages[pages] = moves[every["row"].to_numpy()[pages]]
        every = every[~pages].reset_index(drop=True)
    every["launch"] = intervals.launch_of(whole, every["process"], every.pop("correlation")).astype(np.int32)
    every["stream"] = every.groupby(["process", "device", "stream"]).ngroup().astype(np.int32)
    return every


def _behind_launches(every: pd.DataFrame, calls: Calls) -> int:
    """How far the devices' clock runs ahead of the CPU's: nothing starts before it is launched."""
    launch = every["launch"].to_numpy()
    linked = launch >= 0
    early = calls.start[launch[linked]] - every["start_ns"].to_numpy()[linked]
    early = early[early < _CLOCK_NS]
    if not len(early):
        return 0
    return max(int(np.quantile(early, _SURE, method="lower")), 0)


def _joined(ops: pd.DataFrame) -> tuple[pd.DataFrame, Int]:
    """Join what one call launched, from the first start to the last end; also number the operation of each event."""
    launch = ops["launch"].to_numpy()
    together = (launch >= 0) & (np.bincount(launch + 1)[launch + 1] > 1)
    if not together.any():
        return ops, np.arange(len(ops), dtype=np.int32)
    several = ops[together].sort_values("start_ns", kind="stable")
    heads = several["launch"].drop_duplicates()
    keep = ~together
    keep[heads.index] = True
    number = np.cumsum(keep) - 1
    number[together] = pd.Series(number[heads.index], heads)[launch[together]]
    ends = several.groupby("launch")["end_ns"].max()
    ops = ops.assign(end_ns=ops["end_ns"].mask(together, ops["launch"].map(ends)).astype(np.int64))
    return ops[keep].reset_index(drop=True), number


def _check_streams(events: pd.DataFrame, ops: pd.DataFrame, first: Bool) -> None:
    """Refuse work without launches, and streams whose operations overlap."""
    stream, linked = ops["stream"].to_numpy(), (ops["launch"] >= 0).to_numpy()
    lasting = (ops["end"] - ops["start"]).to_numpy()
    # The first operations of a stream may have been launched before the recording began; a later one is lost.
    lost = ~linked & (np.maximum.accumulate(np.where(linked, stream, -1)) == stream)
    recorded_ns = int((events["end_ns"] - events["start_ns"]).sum())
    if lasting[lost].sum() > _UNLINKED * recorded_ns or not linked.any():
        raise Unplayable("the calls that launched the GPU's work were not recorded")
    overlap = ops["end"].to_numpy()[:-1] - ops["start"].to_numpy()[1:]
    overlap = np.where(first[1:], 0, overlap).clip(0)
    if overlap.sum() > _OVERLAP * lasting.sum():
        raise Unplayable("operations of one stream overlap: their order is unknown")


def _copies(whole: Trace, operations: Operations, blocks: Bool) -> tuple[Bool, Bool]:
    """Copies whose call returns only when they are done, and those from pageable memory."""
    own_copy, staged = np.zeros((2, len(operations.start)), bool)
    at = np.flatnonzero((operations.table == GPU_TABLES.index("memops")) & operations.linked)
    kinds = whole.table("memops", ["kind", "src_kind", "dst_kind"]).iloc[operations.row[at]]
    pageable = ((kinds["src_kind"] == "pageable") | (kinds["dst_kind"] == "pageable")).to_numpy()
    returns = operations.end[at] <= operations.done[at] + 1_000
    own_copy[at] = returns & (pageable | blocks[operations.launch[at]])
    staged[at] = pageable & (kinds["kind"] != "DtoH").to_numpy()
    return own_copy, staged


def _outermost(calls: Calls, rows: Int) -> Int:
    """Of a runtime's call and the driver's inside it, or of one that was recorded twice, the outer one."""
    rows = rows[np.lexsort((-calls.end[rows], calls.start[rows]))]
    thread = calls.thread[rows]
    reach: Any = pd.Series(calls.end[rows]).groupby(thread).cummax()
    return np.asarray(rows[calls.end[rows] > reach.groupby(thread).shift(fill_value=NEVER).to_numpy()])
