"""The steps of a run: how long each took, how much of it the GPU was busy, and which stand out."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis import intervals
from nsightkit.analysis.names import compiled
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["divided", "find", "launched_in", "number", "on_gpu", "outliers", "summary", "window", "windows"]

_PROFILER_STEP = re.compile(r"^ProfilerStep#\d+$")
_STEP = re.compile(r"(^|[^a-z])step([^a-z]|$)", re.IGNORECASE)
# Parts of a step that have "step" in their names: `Optimizer.step#AdamW.step`, `lr_scheduler.step`.
_PART = re.compile(r"optim|sched|zero_grad", re.IGNORECASE)

#: What launches nothing is a stub that the profiler left, not a step, below this share of the median of those that do.
_STUB = 0.1
#: A step is an outlier beyond so many robust standard deviations from the median (Iglewicz and Hoaglin, 1993) ...
_ROBUST_Z = 3.5
#: ... and so far from it in relation to it: steps that vary by nanoseconds have no outliers worth a look.
_RELATIVE = 0.05
#: Fewer steps than this have no median to be far from.
_ENOUGH = 4
#: Scales the median absolute deviation to the standard deviation of a normal distribution.
_MAD_TO_SIGMA = 1.4826


def find(trace: Trace, match: str | None = None) -> pd.DataFrame:
    """Find the step ranges of a run.

    A step is an outermost range named ``ProfilerStep#N`` or, where there is none, one with the word *step* in
    its name (``train_step``, ``step 3``; not an optimizer's or a scheduler's), or one that `match`
    finds. Without `match`, names that differ only in their numbers count as one kind of step, and the
    kind with the largest total time is meant. All steps are taken from one thread, the one with the
    largest total. A step's window lasts until the next one starts, so that steps add up to the whole;
    that of the last one ends with its range. A range in which nothing was launched, and that is shorter than a tenth
    of the median of those that launched something, is a stub that the profiler left at the edge of the capture.

    Parameters
    ----------
    trace : Trace
    match : str, optional
        Regular expression, searched in range names.

    Returns
    -------
    DataFrame
        ``step`` (the range's name), ``start_ns``, ``end_ns`` (of the window, on the CPU), ``process``, ``thread``; in
        order of time.

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    ranges = trace.table("ranges", ["name", "start_ns", "end_ns", "process", "thread"])
    names = ranges["name"].cat.categories
    if match is not None:
        pattern = compiled(match, "--match")
        kinds = ["" if pattern.search(str(n)) else None for n in names]
    else:
        kinds = ["ProfilerStep" if _PROFILER_STEP.match(str(n)) else None for n in names]
        if not any(kinds):
            kinds = [
                re.sub(r"\d+", "#", str(n)) if _STEP.search(str(n)) and not _PART.search(str(n)) else None
                for n in names
            ]
    kind_of_name, _ = pd.factorize(np.array([*kinds, None], dtype=object))
    kind = kind_of_name[ranges["name"].cat.codes.to_numpy()]
    steps = ranges[kind >= 0].assign(kind=kind[kind >= 0]).sort_values("start_ns", kind="stable")
    if not len(steps):
        numbers = {c: np.empty(0, np.int64) for c in ("start_ns", "end_ns", "process", "thread")}
        return pd.DataFrame({"step": np.empty(0, object), **numbers})
    # The kind of step, and the thread, that most of the time was spent in.
    for column in ("kind", "thread"):
        time = (steps["end_ns"] - steps["start_ns"]).groupby(steps[column], sort=False).sum()
        steps = steps[steps[column] == time.idxmax()]
    steps = steps.assign(step=steps["name"].astype(object))[["step", "start_ns", "end_ns", "process", "thread"]]
    reach = steps["end_ns"].cummax().to_numpy()
    outermost = np.append(True, steps["end_ns"].to_numpy()[1:] > reach[:-1])
    steps = steps[outermost].reset_index(drop=True)
    steps = steps[~_stubs(trace, steps)].reset_index(drop=True)
    return steps.assign(end_ns=np.append(steps["start_ns"].to_numpy()[1:], steps["end_ns"].iloc[-1]))


def _stubs(trace: Trace, ranges: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Say which step ranges, in order of time, are no more than what the profiler left of one."""
    length = (ranges["end_ns"] - ranges["start_ns"]).to_numpy()
    if not (length < _STUB * length.max()).any():  # nearly always: no need to read who launched what
        return np.zeros(len(ranges), bool)
    # Of the whole trace: a step that launched nothing on the device that is looked at is a step.
    mine = [launched_in(trace.whole, table, ranges) for table in GPU_TABLES if trace.whole.size(table)]
    launched = np.bincount(np.concatenate([np.empty(0, np.intp), *mine]) + 1, minlength=len(ranges) + 1)[1:] > 0
    return ~launched & (length < _STUB * np.median(length[launched])) if launched.any() else launched


def windows(trace: Trace, match: str | None = None) -> pd.DataFrame:
    """Find the steps of a run, on the CPU and up to the end of their work on the GPU.

    Step k begins with its range, and its part on the CPU lasts until the next one's range begins (:func:`find`). It
    ends at E(k), the latest of E(k - 1), the end of its part on the CPU, and the end of the GPU work launched in that
    part by the step's process, on whatever thread. From E(k - 1) to E(k) passes what the step takes, whichever of
    CPU and GPU is behind; the first one's time begins with its range.

    Parameters
    ----------
    trace : Trace
        Whole, or a selection: then its own ranges and its own GPU work count.
    match : str, optional
        Regular expression, searched in range names; what it finds are the steps.

    Returns
    -------
    DataFrame
        ``step, start_ns, cpu_end_ns, end_ns, process, thread``, in order of time; ``end_ns`` is E(k).

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    found = find(trace, match)
    end = found["end_ns"].to_numpy().copy()
    for table in GPU_TABLES if len(found) else ():
        if trace.size(table):
            mine = launched_in(trace, table, found)
            np.maximum.at(end, mine[mine >= 0], trace.table(table, ["end_ns"])["end_ns"].to_numpy()[mine >= 0])
    found = found.rename(columns={"end_ns": "cpu_end_ns"}).assign(end_ns=np.maximum.accumulate(end))
    return found[["step", "start_ns", "cpu_end_ns", "end_ns", "process", "thread"]]


def window(trace: Trace) -> tuple[int, int] | None:
    """Find the window that the steps cover: from the first one's beginning to the end of the last one's work.

    Parameters
    ----------
    trace : Trace

    Returns
    -------
    begin, end : int
        Nanoseconds on the trace's clock. None where there are no steps.
    """
    found = windows(trace)
    return (int(found["start_ns"].iloc[0]), int(found["end_ns"].iloc[-1])) if len(found) else None


def number(windows: pd.DataFrame, time_ns: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Say which step moments lie in.

    Parameters
    ----------
    windows : DataFrame
        ``start_ns`` and ``end_ns`` of steps in order of time, as :func:`find` gives them.
    time_ns : array_like of int

    Returns
    -------
    ndarray of intp
        Row of `windows`; -1 for a moment in none of them.
    """
    time = np.asarray(time_ns, np.int64)
    if not len(windows):
        return np.full(len(time), -1, np.intp)
    start, end = (windows[c].to_numpy() for c in ("start_ns", "end_ns"))
    at = np.searchsorted(start, time, side="right") - 1
    return np.where((at >= 0) & (time < end[np.maximum(at, 0)]), at, -1)


def on_gpu(trace: Trace, windows: pd.DataFrame) -> pd.DataFrame | None:
    """Cut time into steps where the GPU begins with a step's work, not where the CPU does.

    The CPU runs ahead, and a short program never has to wait: its windows on the CPU's clock then say how quickly
    work is launched. From the first operation of one step to the first of the next passes what a step takes,
    whichever of the two is behind.

    Parameters
    ----------
    trace : Trace
    windows : DataFrame
        Steps on the CPU's clock, as :func:`find` gives them.

    Returns
    -------
    DataFrame or None
        ``start_ns`` and ``end_ns``; the last one ends with its last operation. None where a step launched nothing,
        or began on the GPU before the one before it did.
    """
    first = np.full(len(windows), np.iinfo(np.int64).max)
    end = np.iinfo(np.int64).min
    for table in GPU_TABLES:
        if not trace.size(table):
            continue
        mine = launched_in(trace, table, windows)
        rows = trace.table(table, ["start_ns", "end_ns"])
        np.minimum.at(first, mine[mine >= 0], rows["start_ns"].to_numpy()[mine >= 0])
        end = rows["end_ns"].to_numpy()[mine == len(windows) - 1].max(initial=end)
    edges = np.append(first, end)
    # Compared, not subtracted: what was never set is at the end of what 64 bits hold.
    if not len(windows) or (edges[1:] <= edges[:-1]).any():
        return None
    return pd.DataFrame({"start_ns": edges[:-1], "end_ns": edges[1:]})


def launched_in(trace: Trace, table: str, windows: pd.DataFrame) -> npt.NDArray[np.intp]:
    """Say which step each operation of a GPU table was launched in.

    Parameters
    ----------
    trace : Trace
    table : {"kernels", "memops", "graphs"}
    windows : DataFrame
        Steps on the CPU's clock, as :func:`find` gives them.

    Returns
    -------
    ndarray of intp
        Row of `windows`; -1 for what was launched in none, or by another process.
    """
    step = number(windows, intervals.launched(trace, table))
    process = trace.table(table, ["process"])["process"].to_numpy()
    if len(windows):
        ours = process == windows["process"].iloc[0]
        # No process at all: nothing says whose it was.
        step = np.where(ours | ~ours.any(), step, -1)
    return step


def divided(trace: Trace, windows: pd.DataFrame, process: int) -> pd.DataFrame:
    """Divide windows into the time in which the GPU worked, and the rest.

    Parameters
    ----------
    trace : Trace
    windows : DataFrame
        ``start_ns`` and ``end_ns``, on any clock of the trace: of the CPU's steps or of :func:`on_gpu`.
    process : int
        Whose devices count.

    Returns
    -------
    DataFrame
        ``wall_ns, busy_ns, idle_ns``: with several devices sums over them. The last two are NA where no GPU table was
        recorded.
    """
    start, end = (windows[c].to_numpy() for c in ("start_ns", "end_ns"))
    wall = end - start
    busy = pd.array([pd.NA] * len(windows), dtype="Int64")
    idle = busy.copy()
    if len(windows) and any(trace.recorded(t) for t in GPU_TABLES):
        devices = _devices(trace, process)
        ops = intervals.gpu_intervals(trace)
        total = np.zeros(len(windows), np.int64)
        for device in devices:
            mine = ops[ops["device"] == device]
            total += intervals.Coverage(mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy()).of(start, end)
        busy = pd.array(total, dtype="Int64")
        idle = pd.array(max(len(devices), 1) * wall - total, dtype="Int64")
    return pd.DataFrame({"wall_ns": wall, "busy_ns": busy, "idle_ns": idle})


def summary(trace: Trace, match: str | None = None) -> pd.DataFrame:
    """Measure wall, busy and idle time of each step.

    Steps are windows on the CPU's clock (:func:`find`). ``busy_ns`` is the part of the window in which the
    GPU worked, whoever launched the work: the CPU runs ahead, so a window holds some of the previous
    step's GPU work and leaves some of its own to the next. That is what makes the sum over steps right.
    The last step has no next one to leave work to: its window lasts until the GPU has finished what was
    launched in it (PyTorch's TensorBoard plug-in counts so, too).

    Parameters
    ----------
    trace : Trace
    match : str, optional
        Regular expression, searched in range names; what it finds are the steps.

    Returns
    -------
    DataFrame
        ``step, start_ns, wall_ns, busy_ns, idle_ns, outlier``, in order of time. ``busy_ns`` is the union of GPU
        operations clipped to the window; with several devices (those the steps' process used) it is the sum over
        them, and ``idle_ns`` is devices times ``wall_ns`` less it. Both are NA where no GPU table was recorded.
        ``outlier``: the wall time is more than 3.5 robust standard deviations (of the median absolute
        deviation) and more than 5 % off the median of all steps; the first step is judged like any other, and
        with fewer than four steps there is none.

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    steps = find(trace, match)
    if len(steps):
        start, end, process = (int(steps[c].iloc[-1]) for c in ("start_ns", "end_ns", "process"))
        steps.loc[len(steps) - 1, "end_ns"] = max(end, _last_end(trace, start, end, process))
    parts = divided(trace, steps, int(steps["process"].iloc[0]) if len(steps) else 0)
    return pd.DataFrame(
        {
            "step": steps["step"],
            "start_ns": steps["start_ns"],
            **parts,
            "outlier": outliers(parts["wall_ns"].to_numpy()),
        }
    )


def _last_end(trace: Trace, start: int, end: int, process: int) -> int:
    """End of the last GPU operation that the process launched in a window; its start where there is none."""
    last = start
    for table in GPU_TABLES:
        ops = trace.table(table, ["process", "correlation", "end_ns"])
        ops = ops[(ops["process"] == process) & (ops["end_ns"] > end)]
        launch = intervals.launch_of(trace, ops["process"], ops["correlation"])
        launched = trace.whole.table("calls", ["start_ns"])["start_ns"].to_numpy()[launch[launch >= 0]]
        ends = ops["end_ns"].to_numpy()[launch >= 0]
        last = max([last, *ends[(launched >= start) & (launched < end)].tolist()])
    return last


def _devices(trace: Trace, process: int) -> list[int]:
    """Devices that the process used; all of them where no GPU operation says whose it was."""
    found = pd.concat([trace.table(t, ["device", "process"]).drop_duplicates() for t in GPU_TABLES])
    mine = found[found["process"] == process]
    return sorted({int(d) for d in (mine if len(mine) else found)["device"]})


def outliers(wall: np.ndarray) -> np.ndarray:
    """Say which of some times stand out, as :func:`summary` does.

    Parameters
    ----------
    wall : ndarray of int or float, shape (n,)

    Returns
    -------
    ndarray of bool, shape (n,)
    """
    if len(wall) < _ENOUGH:
        return np.zeros(len(wall), bool)
    median = np.median(wall)
    off = np.abs(wall - median)
    sigma = _MAD_TO_SIGMA * np.median(off)
    return np.asarray((off > _ROBUST_Z * sigma) & (off > _RELATIVE * median))
