"""The first stage of a replay: what ran on the devices, who launched it, and which of its calls block."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.replay.model import NEVER, Bool, Int, Unplayable
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps.threads import BLOCKING, UNIFIED
from nsightkit.trace.model import GPU_TABLES, Trace, process_of

__all__ = ["Calls", "Program", "read"]

#: Work whose launch was not recorded, as a share of all GPU work, above which no schedule can be made.
_UNLINKED = 0.1
#: Most launching threads, each of which may wait for any other; and most pairs of a stream and a call that may wait.
_MOST_THREADS = 256
_MOST_PAIRS = 50_000_000
_KERNELS = GPU_TABLES.index("kernels")
_MEMOPS = GPU_TABLES.index("memops")


@dataclasses.dataclass(frozen=True, eq=False)
class Calls:
    """All CUDA calls of the trace, by row."""

    start: Int
    end: Int
    thread: Int
    names: pd.Series


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The recorded program: the GPU's operations by stream and time, the calls, and the steps.

    What one call launched together is one operation.

    Parameters
    ----------
    trace : Trace
    calls : Calls
    start, end, device, stream, process, table, row : ndarray
        When and where each operation ran; streams are numbered over all devices, `row` counts in the whole trace.
    launch, begun, done, by : ndarray
        Row, start, end and thread of the launching calls; -1, `NEVER`, `NEVER` and -1 where none was recorded.
    before : ndarray of int64
        When the operation before each one in its stream had ended; of a stream's first, also one not selected.
    device_before : ndarray of int64
        When everything that began before each one on its device had ended.
    own_copy : ndarray of bool
        Copies whose call returns only when they are done.
    staged : ndarray of bool
        Copies from pageable memory to a device.
    parts : DataFrame
        ``table, row, operation``: the events of the trace that the operations are made of.
    threads : ndarray of int64
        The launching threads, and the steps' thread.
    blocking : ndarray of int64
        Rows of the calls that wait for the GPU, by start.
    steps : DataFrame
        As :func:`nsightkit.analysis.timeline.steps.windows` gives them.
    main : int
        Thread of the steps, `NEVER` without steps.
    begin_ns : int
        From when on a change takes time away.
    """

    trace: Trace
    calls: Calls
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
    own_copy: Bool
    staged: Bool
    parts: pd.DataFrame
    threads: Int
    blocking: Int
    steps: pd.DataFrame
    main: int
    begin_ns: int

    @functools.cached_property
    def lasting(self) -> Int:
        """How long each operation lasted."""
        return self.end - self.start

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
    def collective(self) -> Bool:
        """Which operations are collectives."""
        kernels = self.trace.whole.table("kernels", ["name", "collective"])
        talks = (categorize(kernels["name"]) == "communication") | (kernels["collective"] != "").to_numpy()
        return np.asarray((self.table == _KERNELS) & np.isin(self.row, np.flatnonzero(talks)))

    @functools.cached_property
    def in_step(self) -> Int:
        """The step that each operation was launched in, -1 for none."""
        number = steps.number(self.steps.assign(end_ns=self.steps["cpu_end_ns"]), self.begun)
        return np.where(self.process == process_of(self.main), number, -1).astype(np.int32)


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
    frame = trace.whole.table("calls", ["start_ns", "end_ns", "thread", "name"])
    calls = Calls(frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy(), frame["thread"].to_numpy(), frame["name"])
    ops, parts = _operations(trace, calls)
    linked = ops[ops["launch"] >= 0]
    windows = steps.windows(trace)
    main = begin_ns = int(NEVER)
    if len(windows):
        main = int(windows["thread"].iloc[0])
        begin_ns = int(windows["start_ns"].iloc[0])
    elif trace is not trace.whole:
        begin_ns = int(linked["begun"].min())
    threads = np.union1d(linked["by"].unique(), windows["thread"])
    if len(threads) > _MOST_THREADS:
        raise Unplayable(f"{len(threads):,} threads launched its work")
    blocking = _blocking(trace, calls, linked, threads)
    lines = linked.groupby(["stream", "by"]).ngroups
    if len(blocking) * lines > _MOST_PAIRS:
        raise Unplayable(f"{len(blocking):,} calls may wait for {lines:,} streams")
    columns = {str(column): values.to_numpy() for column, values in ops.items()}
    return Program(
        trace=trace,
        calls=calls,
        **columns,
        parts=parts,
        threads=threads,
        blocking=blocking,
        steps=windows,
        main=main,
        begin_ns=begin_ns,
    )


def _operations(trace: Trace, calls: Calls) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The operations with their launches, and their parts."""
    events = _events(trace.whole)
    reach = events.groupby("device")["end"].cummax()
    events["device_before"] = reach.groupby(events["device"]).shift(fill_value=NEVER)
    events["before"] = events.groupby("stream")["end"].shift(fill_value=NEVER)
    events = events[intervals.selected(trace, events["table"], events["row"])]
    if events.empty:
        raise Unplayable("there is no GPU work")
    ops, parts = _joined(events)
    _check(ops)
    launch = ops["launch"].to_numpy()
    ops["begun"] = np.where(launch >= 0, calls.start[launch], NEVER)
    ops["done"] = np.where(launch >= 0, calls.end[launch], NEVER)
    ops["by"] = np.where(launch >= 0, calls.thread[launch], -1)
    _mark_copies(trace.whole, ops, matching(calls.names, BLOCKING))
    return ops, parts


def _blocking(trace: Trace, calls: Calls, linked: pd.DataFrame, threads: Int) -> Int:
    """Rows of the calls of some threads that wait for the GPU, by start."""
    blocks = matching(calls.names, BLOCKING)
    blocks[linked["launch"][linked["own_copy"]]] = True
    selected = trace.mask("calls")
    if selected is not None:
        selected = selected.copy()
        selected[linked["launch"]] = True
        blocks &= selected
    rows = np.flatnonzero(blocks & np.isin(calls.thread, threads))
    rows = rows[np.lexsort((-calls.end[rows], calls.start[rows]))]
    # Of a runtime's call and the driver's inside it, or of one that was recorded twice, the outer one.
    return rows[intervals.uncovered(calls.start[rows], calls.end[rows], calls.thread[rows]) > 0]


def _events(whole: Trace) -> pd.DataFrame:
    """All events of the devices, by device and start, with their launches and numbered streams."""
    events = intervals.gpu_intervals(whole, "process", "stream", "correlation")
    # Pages of managed memory move when they are touched: they are in no stream, and kernels wait for them.
    moves = np.flatnonzero(matching(whole.table("memops", ["kind"])["kind"], UNIFIED))
    if len(moves):
        pages = (events["table"] == _MEMOPS) & events["row"].isin(moves)
        events = events[~pages].reset_index(drop=True)
    events["launch"] = intervals.launch_of(whole, events["process"], events.pop("correlation")).astype(np.int32)
    events["stream"] = events.groupby(["process", "device", "stream"]).ngroup().astype(np.int32)
    return events.rename(columns={"start_ns": "start", "end_ns": "end"})


def _joined(events: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Join what one call launched, from the first start to the last end; give operations by stream, and their parts."""
    launch = events["launch"].to_numpy()
    alone = -1 - np.arange(len(events))
    number, _ = pd.factorize(np.where(launch >= 0, launch, alone))
    heads = ~pd.Series(number).duplicated().to_numpy()
    ops = events[heads].reset_index(drop=True)
    ops["end"] = events["end"].groupby(number).max()
    ops = ops.sort_values("stream", kind="stable")
    parts = events[["table", "row"]].assign(operation=np.argsort(ops.index)[number])
    ops = ops.reset_index(drop=True)
    first = ~ops["stream"].duplicated()
    ops["before"] = ops["before"].where(first, ops["end"].shift(fill_value=NEVER))
    return ops, parts


def _check(ops: pd.DataFrame) -> None:
    """Refuse work without launches."""
    lasting = ops["end"] - ops["start"]
    linked = ops["launch"] >= 0
    # The first operations of a stream may have been launched before the recording began; a later one is lost.
    lost = ~linked & linked.groupby(ops["stream"]).cummax()
    if lasting[lost].sum() > _UNLINKED * lasting.sum() or not linked.any():
        raise Unplayable("the calls that launched the GPU's work were not recorded")


def _mark_copies(whole: Trace, ops: pd.DataFrame, blocks: Bool) -> None:
    """Mark copies whose call returns only when they are done, and those from pageable memory."""
    ops["own_copy"] = ops["staged"] = False
    copies = ops[(ops["table"] == _MEMOPS) & (ops["launch"] >= 0)]
    kinds = whole.table("memops", ["kind", "src_kind", "dst_kind"]).iloc[copies["row"]]
    pageable = ((kinds["src_kind"] == "pageable") | (kinds["dst_kind"] == "pageable")).to_numpy()
    returns = copies["end"] <= copies["done"] + 1_000
    ops.loc[copies.index, "own_copy"] = returns & (pageable | blocks[copies["launch"]])
    ops.loc[copies.index, "staged"] = pageable & (kinds["kind"] != "DtoH").to_numpy()
