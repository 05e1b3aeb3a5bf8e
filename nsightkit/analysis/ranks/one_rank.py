"""One rank's trace, reduced to what is needed of it beside those of the other ranks.

Ranks are compared by an account of what windows of their time were spent on, in parts that add up. With GPU work, a
device's time is divided among kernels by category, copies, communication and idle time by cause. What
goes on at once counts once: for computing before copying before communicating, and of two kernels for the one that
began first. Without, it is the time of the thread that makes the steps, among its outermost ranges.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.categories import CATEGORIES, categorize
from nsightkit.analysis.core.intervals import Coverage, Int, uncovered
from nsightkit.analysis.ranks import collectives as communication
from nsightkit.analysis.timeline import gaps, overview, steps
from nsightkit.analysis.timeline.ranges import threads_with_ranges
from nsightkit.trace import load
from nsightkit.trace.model import TABLES, Trace

__all__ = ["COUNT", "TIME", "WAITING", "Look", "look", "time_spent"]

#: A rank's collectives beyond this are left out, so that what is kept of each rank stays small.
_MOST_COLLECTIVES = 50_000
#: Prefixes of the columns: time spent, and kernels that began.
TIME, COUNT = "time: ", "count: "
#: Time that the rank itself does not decide: in collectives it waits for others.
WAITING = f"{TIME}communication"
#: So many names of ranges, those with the most time, get a column of their own.
_MOST_NAMES = 24
#: A rank or a number of ranks beyond this is none.
_MOST_RANKS = 1 << 31
_BOUNDS = ["device", "start_ns", "end_ns"]
#: What the time of a device is divided among, and of which of that is counted how often it began.
_COUNTED = [f"kernels of {category}" for category in CATEGORIES if category != "communication"]
_SPENT = [*_COUNTED, "CUDA graphs", "copies", "communication", *(f"idle, {cause}" for cause in gaps.CAUSES)]


@dataclasses.dataclass(frozen=True)
class Look:
    """What is kept of one rank: figures and small tables, none of its events.

    Parameters
    ----------
    file : str
        Where it came from.
    process : int or None
        Of a capture that holds several ranks.
    rank : int or None
        As the trace says.
    world_size : int or None
    t0_ns : int
        The trace's time zero on its source's clock.
    tool : str
    devices : list of int
        That it used.
    figures : dict
        ``span_ns, busy_ns, idle_ns`` of :func:`nsightkit.analysis.timeline.overview.summary`, and
        :func:`nsightkit.analysis.ranks.collectives.totals`.
    collectives : DataFrame
        :func:`nsightkit.analysis.ranks.collectives.collectives`, with the number of the ``step`` each was launched in,
        -1 for none.
    steps : DataFrame
        ``step`` (its number), ``start_ns, wall_ns``, the columns of
        :func:`nsightkit.analysis.ranks.collectives.spent` and those of
        :func:`nsightkit.analysis.ranks.one_rank.time_spent`. One row, -1, for the whole trace where it has no steps.
    notes : list of str
    """

    file: str
    process: int | None
    rank: int | None
    world_size: int | None
    t0_ns: int
    tool: str
    devices: list[int]
    figures: dict[str, int | None]
    collectives: pd.DataFrame
    steps: pd.DataFrame
    notes: list[str]

    @property
    def name(self) -> str:
        """The file, and the process where it holds several."""
        return self.file if self.process is None else f"{self.file}#{self.process}"


def look(source: str | os.PathLike[str] | Trace, *, cache: bool | None = None) -> list[Look]:
    """Reduce a trace to what is needed of it beside the other ranks'.

    Parameters
    ----------
    source : path-like or Trace
    cache : bool, optional
        As for :func:`nsightkit.load`.

    Returns
    -------
    list of Look
        Several where several processes of a capture used GPUs: ranks of one node, in the order of their GPUs.

    Raises
    ------
    TraceError
        The file cannot be read.
    """
    if isinstance(source, Trace):
        trace, file = source, source.path or "trace"
    else:
        trace, file = load(source, cache=cache), os.fspath(source)
    kernels = trace.table("kernels", ["process", "device"])
    first_device = kernels.groupby("process")["device"].min()
    processes = first_device.sort_values(kind="stable").index.tolist()
    if len(processes) < 2:
        return [_look(trace, file, None)]
    return [_look(_of_process(trace, process), file, process) for process in processes]


def _of_process(trace: Trace, process: int) -> Trace:
    masks = {}
    for table, columns in TABLES.items():
        if "process" in columns:
            masks[table] = (trace.whole.table(table, ["process"])["process"] == process).to_numpy()
    return trace.masked(masks)


def _look(trace: Trace, file: str, process: int | None) -> Look:
    notes = list(trace.meta.notes)
    collectives = communication.collectives(trace)
    if len(collectives) > _MOST_COLLECTIVES:
        notes.append(f"Of {len(collectives):,} collectives the first {_MOST_COLLECTIVES:,} were looked at.")
        collectives = collectives[:_MOST_COLLECTIVES]
    windows = _windows(trace)
    start = windows["start_ns"]
    end = start + windows["wall_ns"]
    window_of_launch = steps.number(windows.assign(end_ns=end), collectives["launch_ns"])
    collectives = collectives.assign(step=np.append(windows["step"], -1)[window_of_launch])
    # The environment of a capture of several ranks is that of the program that started them, at best.
    distributed = trace.meta.distributed if process is None else {}
    figures = overview.summary(trace)
    return Look(
        file=file,
        process=process,
        rank=_count(distributed.get("rank")),
        world_size=_count(distributed.get("world_size")),
        t0_ns=int(trace.t0_ns),
        tool=trace.meta.tool,
        devices=[int(device["device"]) for device in figures["devices"]],
        figures={name: figures[name] for name in ("span_ns", "busy_ns", "idle_ns")} | communication.totals(trace),
        collectives=collectives,
        steps=windows.join([communication.spent(trace, start, end, collectives), time_spent(trace, start, end)]),
        notes=notes,
    )


def _count(value: Any) -> int | None:
    """A number of ranks; None for whatever else a trace holds in its place."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < _MOST_RANKS else None


def _windows(trace: Trace) -> pd.DataFrame:
    """Steps with their numbers; the whole trace, as step -1, where it has none."""
    table = steps.summary(trace)
    if not len(table):
        devices = overview.summary(trace)["devices"]
        if devices:
            begin = min(int(device["start_ns"]) for device in devices)
            end = max(int(device["end_ns"]) for device in devices)
        else:
            begin, end = overview.captured_window(trace)
        return pd.DataFrame({"step": [-1], "start_ns": [begin], "wall_ns": [end - begin]})
    numbers = table["step"].astype(str).str.extract(r"(\d{1,15})\D*$")[0]
    if numbers.isna().any() or numbers.astype(np.int64).duplicated().any():
        numbers = pd.Series(np.arange(len(table)))
    return table[["start_ns", "wall_ns"]].assign(step=numbers.to_numpy(np.int64))


# ---------------------------------------------------------------- what the time was spent on


def time_spent(trace: Trace, start: npt.ArrayLike, end: npt.ArrayLike) -> pd.DataFrame:
    """Divide the time of some windows among what it was spent on.

    Parameters
    ----------
    trace : Trace
    start, end : array_like of int
        The windows.

    Returns
    -------
    DataFrame
        One row per window. Columns ``time: …`` in nanoseconds: ``time: kernels of GEMM`` and the like,
        ``time: CUDA graphs``, ``time: copies``, ``time: communication``, ``time: idle, input-pipeline`` and the like,
        ``time: before or after all GPU work``; their sum is the windows' length times the number of devices.
        ``count: kernels of GEMM`` and the like, how many began. Without GPU work ``time: range NAME`` and
        ``time: in no range``, whose sum is the windows' length.
    """
    low, high = np.asarray(start, np.int64), np.asarray(end, np.int64)
    work, talk = _kernels(trace)
    copies = trace.table("memops", _BOUNDS)
    devices = pd.concat([work["device"], talk["device"], copies["device"]]).unique()
    if not len(devices):
        return _time_in_ranges(trace, low, high)
    idle = gaps.causes(trace)
    idle = idle.assign(what="idle, " + idle["cause"].astype(str))
    spent = pd.DataFrame(0, range(len(low)), [TIME + what for what in _SPENT])
    for device in devices:
        own_work, own_copies, own_talk, own_idle = (
            table[table["device"] == device] for table in (work, copies, talk, idle)
        )
        # What each operation adds to those that began before it.
        added = own_work["end_ns"] - uncovered(own_work["start_ns"], own_work["end_ns"], own_work["device"])
        for part in (own_work.assign(start_ns=added), own_idle):
            for what, rows in part.groupby("what", observed=True):
                spent[f"{TIME}{what}"] += Coverage(rows["start_ns"], rows["end_ns"]).of(low, high)
        computed = _covered([own_work], low, high)
        moved = _covered([own_work, own_copies], low, high)
        spent[f"{TIME}copies"] += moved - computed
        spent[WAITING] += _covered([own_work, own_copies, own_talk], low, high) - moved
    rest = (high - low) * len(devices) - spent.sum(axis=1)
    return spent.join(_begun(work, low, high)).assign(**{f"{TIME}before or after all GPU work": rest})


def _kernels(trace: Trace) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Kernels and graph replays that compute, each with ``what`` it is; and kernels that communicate."""
    kernels = trace.table("kernels", [*_BOUNDS, "name"])
    category = categorize(kernels["name"])
    kernels = kernels.assign(what=category.rename_categories(lambda name: f"kernels of {name}")).drop(columns="name")
    talks = np.asarray(category == "communication")
    graphs = trace.table("graphs", _BOUNDS).assign(what="CUDA graphs")
    kernels["what"] = kernels["what"].astype(object)
    return pd.concat([kernels[~talks], graphs]), kernels[talks]


def _covered(tables: list[pd.DataFrame], low: Int, high: Int) -> Int:
    """Length of the union of the intervals of some tables, in each window."""
    together = pd.concat(tables)
    return Coverage(together["start_ns"], together["end_ns"]).of(low, high)


def _begun(work: pd.DataFrame, low: Int, high: Int) -> pd.DataFrame:
    """How many kernels of each category began in each window."""
    counts = pd.DataFrame(0, range(len(low)), [COUNT + what for what in _COUNTED])
    for what, rows in work[work["what"] != "CUDA graphs"].groupby("what"):
        begun = np.sort(rows["start_ns"])
        counts[f"{COUNT}{what}"] = np.searchsorted(begun, high) - np.searchsorted(begun, low)
    return counts


def _time_in_ranges(trace: Trace, low: Int, high: Int) -> pd.DataFrame:
    """Among the outermost ranges, other than steps, of the thread with the most time in ranges of its own."""
    ranges = trace.table("ranges", ["start_ns", "end_ns", "thread", "name", "parent"])
    ranges = ranges[ranges["thread"].isin(threads_with_ranges(trace)).to_numpy()]
    ranges = ranges.assign(length=ranges["end_ns"] - ranges["start_ns"])
    by_thread = ranges.groupby("thread")["length"].sum().sort_values(kind="stable", ascending=False)
    ranges = ranges[ranges["thread"].isin(by_thread.index[:1])]
    ranges = ranges[~ranges["name"].isin(set(steps.find(trace)["step"]))]
    # In no range but a step.
    outer = ranges[~ranges["parent"].isin(ranges.index)]
    # ``epoch 1``, ``epoch 2`` are one thing to spend time on.
    name = outer["name"].astype("str").str.replace(r"\d+", "#", regex=True)
    by_name = outer.groupby(name)["length"].sum().sort_values(ascending=False)
    result = {}
    rest = high - low
    for what in by_name.index[:_MOST_NAMES]:
        rows = outer[name == what]
        inside = Coverage(rows["start_ns"], rows["end_ns"]).of(low, high)
        result[f"{TIME}range {what}"] = inside
        rest = rest - inside
    return pd.DataFrame(result, range(len(low))).assign(**{f"{TIME}in no range": rest})
