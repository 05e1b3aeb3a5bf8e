"""The first stage of a replay: what ran on the devices, which calls launched it, and which calls wait for the GPU."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.replay.model import NEVER, Bool, Int, Unplayable
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.gaps.threads import BLOCKING, UNIFIED
from nsightkit.text import matching
from nsightkit.trace.model import GPU_TABLES, Trace, process_of

#: Share of the GPU time above which too much was launched by unrecorded calls to make a schedule.
_MOST_UNLAUNCHED = 0.1
#: Limits of time and memory: launching threads, each of which may wait for any other, and pairs of a blocking call and
#: a stream with one of its launching threads.
_MOST_THREADS = 256
_MOST_PAIRS = 50_000_000
#: A call that returns at most this long before the recorded end of its copy returns with it: timestamps are not exact.
_EARLY_RETURN_NS = 1_000
_KERNELS = GPU_TABLES.index("kernels")
_MEMOPS = GPU_TABLES.index("memops")


@dataclasses.dataclass(frozen=True, eq=False)
class Calls:
    """All CUDA calls of the whole trace, each at the position of its row; times in ns."""

    start: Int
    end: Int
    thread: Int
    names: pd.Series


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The recorded program: the GPU's operations by stream and time, the calls, and the steps.

    What one call launched together, such as a graph's kernels, is one operation. Arrays of operations have one element
    each, in order of stream and start, and other stages name an operation by its position in them. Times are ns on the
    trace's clock.

    Parameters
    ----------
    trace : Trace
    calls : Calls
    start, end, device, stream, process, table, row : ndarray
        When and where each operation ran; streams are numbered over all devices. `table` is a position in
        ``GPU_TABLES``, `row` the row there in the whole trace, of the operation's first event.
    launch_row, launch_start, launch_end, launch_thread : ndarray
        Row, start, end and thread of the launching call; -1, `NEVER`, `NEVER` and -1 where none was recorded.
    previous_end : ndarray of int64
        When the operation before each one in its stream ended; before a stream's first, one that was not selected
        counts. `NEVER` without one.
    device_busy_until : ndarray of int64
        When everything that began before each one on its device had ended; `NEVER` where nothing had begun.
    is_blocking_copy : ndarray of bool
        Copies whose call returns only when they are done.
    is_staged_copy : ndarray of bool
        Copies from pageable memory to a device, which the CPU stages in pinned memory.
    events : DataFrame
        ``table, row, operation``: the events of the trace, and the position of the operation that each is a part of.
    threads : ndarray of int64
        The launching threads, and the steps' thread.
    blocking_calls : ndarray of int64
        Rows of the calls that wait for the GPU, by start.
    steps : DataFrame
        As :func:`nsightkit.analysis.timeline.steps.windows` gives them.
    step_thread : int
        Thread of the steps, `NEVER` without steps.
    changes_from_ns : int
        Before this time a change has no effect: before the first step or, in a selection, the first selected launch.
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
    launch_row: Int
    launch_start: Int
    launch_end: Int
    launch_thread: Int
    previous_end: Int
    device_busy_until: Int
    is_blocking_copy: Bool
    is_staged_copy: Bool
    events: pd.DataFrame
    threads: Int
    blocking_calls: Int
    steps: pd.DataFrame
    step_thread: int
    changes_from_ns: int

    @functools.cached_property
    def duration_ns(self) -> Int:
        """How long each operation lasted."""
        return self.end - self.start

    @functools.cached_property
    def has_launch(self) -> Bool:
        """Whether the call that launched each operation was recorded."""
        return self.launch_row >= 0

    @functools.cached_property
    def is_first(self) -> Bool:
        """Whether each operation is the first of its stream."""
        return np.append(True, self.stream[1:] != self.stream[:-1])

    @functools.cached_property
    def order_by_end(self) -> Int:
        """The positions of the operations, in order of their ends."""
        return np.argsort(self.end, kind="stable")

    @functools.cached_property
    def is_collective(self) -> Bool:
        """Whether each operation is a kernel of a collective, by its name or its recorded description."""
        kernels = self.trace.whole.table("kernels", ["name", "collective"])
        communicates = (categorize(kernels["name"]) == "communication") | (kernels["collective"] != "").to_numpy()
        return np.asarray((self.table == _KERNELS) & np.isin(self.row, np.flatnonzero(communicates)))

    @functools.cached_property
    def launch_step(self) -> Int:
        """The row in `steps` of the step that each operation was launched in, -1 for none or another process's.

        A launch belongs to the step whose part on the CPU it falls into: up to ``cpu_end_ns``.
        """
        number = steps.step_at(self.steps.assign(end_ns=self.steps["cpu_end_ns"]), self.launch_start)
        return np.where(self.process == process_of(self.step_thread), number, -1).astype(np.int32)


def read(trace: Trace) -> Program:
    """Read the operations, the calls and the steps of a trace.

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
        It holds no GPU work, too much of it has no recorded launch, or too many threads or calls wait for each other.
    """
    frame = trace.whole.table("calls", ["start_ns", "end_ns", "thread", "name"])
    calls = Calls(frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy(), frame["thread"].to_numpy(), frame["name"])
    ops, events = _operations(trace, calls)
    launched = ops[ops["launch_row"] >= 0]
    windows = steps.windows(trace)
    step_thread = changes_from_ns = int(NEVER)
    if len(windows):
        step_thread = int(windows["thread"].iloc[0])
        changes_from_ns = int(windows["start_ns"].iloc[0])
    elif trace is not trace.whole:
        changes_from_ns = int(launched["launch_start"].min())
    threads = np.union1d(launched["launch_thread"].unique(), windows["thread"])
    if len(threads) > _MOST_THREADS:
        raise Unplayable(f"{len(threads):,} threads launched its work")
    blocking_calls = _blocking_calls(trace, calls, launched, threads)
    stream_count = launched.groupby(["stream", "launch_thread"]).ngroups  # once for each thread that launches into it
    if len(blocking_calls) * stream_count > _MOST_PAIRS:
        raise Unplayable(f"{len(blocking_calls):,} calls may wait for {stream_count:,} streams")
    columns = {str(column): values.to_numpy() for column, values in ops.items()}  # by the names of Program's fields
    return Program(
        trace=trace,
        calls=calls,
        **columns,
        events=events,
        threads=threads,
        blocking_calls=blocking_calls,
        steps=windows,
        step_thread=step_thread,
        changes_from_ns=changes_from_ns,
    )


def _operations(trace: Trace, calls: Calls) -> tuple[pd.DataFrame, pd.DataFrame]:
    """List the selected operations, with fields of ``Program`` as columns, and their events (``Program.events``)."""
    events = _gpu_events(trace.whole)
    # Before the selection: what a filter leaves out kept the device and the stream busy all the same.
    busy_until = events.groupby("device")["end"].cummax()
    events["device_busy_until"] = busy_until.groupby(events["device"]).shift(fill_value=NEVER)
    events["previous_end"] = events.groupby("stream")["end"].shift(fill_value=NEVER)
    events = events[intervals.selected(trace, events["table"], events["row"])]
    if events.empty:
        raise Unplayable("there is no GPU work")
    ops, events = _join_by_launch(events)
    _require_launches(ops)
    launch_row = ops["launch_row"].to_numpy()
    has_launch = launch_row >= 0
    ops["launch_start"] = np.where(has_launch, calls.start[launch_row], NEVER)
    ops["launch_end"] = np.where(has_launch, calls.end[launch_row], NEVER)
    ops["launch_thread"] = np.where(has_launch, calls.thread[launch_row], -1)
    _mark_copies(trace.whole, ops, matching(calls.names, BLOCKING))
    return ops, events


def _blocking_calls(trace: Trace, calls: Calls, launched: pd.DataFrame, threads: Int) -> Int:
    """Find the calls of `threads` that wait for the GPU: their rows, by start.

    `launched` holds the operations with a recorded launch, in the columns of ``Program``.
    """
    is_blocking = matching(calls.names, BLOCKING)
    # By their names, some of these calls do not block: copies of pageable memory with a name in Async.
    is_blocking[launched["launch_row"][launched["is_blocking_copy"]]] = True
    selected = trace.mask("calls")
    if selected is not None:
        selected = selected.copy()
        # A filter may keep an operation and drop its launch, as one that starts in the window but was launched before.
        selected[launched["launch_row"]] = True
        is_blocking &= selected
    rows = np.flatnonzero(is_blocking & np.isin(calls.thread, threads))
    # By start and, of calls that start together, the longest first: the outer before the inner.
    rows = rows[np.lexsort((-calls.end[rows], calls.start[rows]))]
    # Of a runtime's call and the driver's inside it, or of one that was recorded twice, keep the outer one: the inner
    # adds no time to the thread's calls before it.
    return rows[intervals.uncovered(calls.start[rows], calls.end[rows], calls.thread[rows]) > 0]


def _gpu_events(whole: Trace) -> pd.DataFrame:
    """List all events of the devices, by device and start, with their launches and with numbered streams.

    ``device, start, end, table, row, process, stream, launch_row``, as in ``Program``.
    """
    events = intervals.gpu_intervals(whole, "process", "stream", "correlation")
    # Leave out pages of managed memory. They move when a kernel touches them, in no stream, and are part of its time.
    page_moves = np.flatnonzero(matching(whole.table("memops", ["kind"])["kind"], UNIFIED))
    if len(page_moves):
        is_page_move = (events["table"] == _MEMOPS) & events["row"].isin(page_moves)
        events = events[~is_page_move].reset_index(drop=True)
    events["launch_row"] = intervals.launch_of(whole, events["process"], events.pop("correlation")).astype(np.int32)
    events["stream"] = events.groupby(["process", "device", "stream"]).ngroup().astype(np.int32)
    return events.rename(columns={"start_ns": "start", "end_ns": "end"})


def _join_by_launch(events: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Join the events that one call launched into one operation, from the first start to the last end.

    A call that launches a CUDA graph launches many kernels. They follow each other without further launches, so our
    replay moves them as one. Returns the operations by stream and start, each in the columns of its first event, and
    ``table, row, operation`` of each event.
    """
    launch_row = events["launch_row"].to_numpy()
    # Number the operations in order of their first events. Each event without a launch is one: its key is -1, -2, ...
    own_key = -1 - np.arange(len(events))
    number, _ = pd.factorize(np.where(launch_row >= 0, launch_row, own_key))
    is_first_event = ~pd.Series(number).duplicated().to_numpy()
    ops = events[is_first_event].reset_index(drop=True)
    ops["end"] = events["end"].groupby(number).max()
    ops = ops.sort_values("stream", kind="stable")
    # The index still holds the numbers: sorting it gives the place that each number has now.
    parts = events[["table", "row"]].assign(operation=np.argsort(ops.index)[number])
    ops = ops.reset_index(drop=True)
    is_first = ~ops["stream"].duplicated()
    # Now that operations are joined, the one before ends later. Before a stream's first, one left out still counts.
    ops["previous_end"] = ops["previous_end"].where(is_first, ops["end"].shift(fill_value=NEVER))
    return ops, parts


def _require_launches(ops: pd.DataFrame) -> None:
    """Refuse a trace in which the launches of much of the work were not recorded."""
    duration_ns = ops["end"] - ops["start"]
    has_launch = ops["launch_row"] >= 0
    # The first operations of a stream may have been launched before the recording began; a later one is lost.
    is_lost = ~has_launch & has_launch.groupby(ops["stream"]).cummax()
    if duration_ns[is_lost].sum() > _MOST_UNLAUNCHED * duration_ns.sum() or not has_launch.any():
        raise Unplayable("the calls that launched the GPU's work were not recorded")


def _mark_copies(whole: Trace, ops: pd.DataFrame, is_blocking: Bool) -> None:
    """Add the columns ``is_blocking_copy`` and ``is_staged_copy``; `is_blocking` flags calls that block by name."""
    ops["is_blocking_copy"] = ops["is_staged_copy"] = False
    copies = ops[(ops["table"] == _MEMOPS) & (ops["launch_row"] >= 0)]
    kinds = whole.table("memops", ["kind", "src_kind", "dst_kind"]).iloc[copies["row"]]
    is_pageable = ((kinds["src_kind"] == "pageable") | (kinds["dst_kind"] == "pageable")).to_numpy()
    returns_after_copy = copies["end"] <= copies["launch_end"] + _EARLY_RETURN_NS
    # A call blocks by its name or, even if that ends in Async, because it copies pageable memory.
    ops.loc[copies.index, "is_blocking_copy"] = returns_after_copy & (is_pageable | is_blocking[copies["launch_row"]])
    # The CPU fills a pinned buffer before such a copy to the device. On the way back (DtoH) it empties one afterwards.
    ops.loc[copies.index, "is_staged_copy"] = is_pageable & (kinds["kind"] != "DtoH").to_numpy()
