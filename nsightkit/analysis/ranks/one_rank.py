"""One rank's trace, reduced to what is needed of it beside those of the other ranks.

Ranks are compared by an account of what windows of their time were spent on, in parts that add up. With GPU work, a
device's time is divided among kernels by category, copies, communication and idle time by cause. What
goes on at once counts once: for computing before copying before communicating, and of two kernels for the one that
began first. Without, it is the time of the thread that makes the steps, among its outermost ranges.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.categories import CATEGORIES, categorize
from nsightkit.analysis.core.intervals import Coverage, Int, uncovered, union
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
_NUMBERED = re.compile(r"\d+")


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
    trace = source if isinstance(source, Trace) else load(source, cache=cache)
    file = (source.path or "trace") if isinstance(source, Trace) else os.fspath(source)
    kernels = trace.table("kernels", ["process", "device"])
    owners = kernels.groupby("process")["device"].min().sort_values(kind="stable").index.tolist()
    if len(owners) < 2:
        return [_look(trace, file, None)]
    process_of = {
        table: trace.whole.table(table, ["process"])["process"] for table in TABLES if "process" in TABLES[table]
    }
    return [
        _look(trace.masked({table: (of == process).to_numpy() for table, of in process_of.items()}), file, process)
        for process in owners
    ]


def _look(trace: Trace, file: str, process: int | None) -> Look:
    notes = list(trace.meta.notes)
    figures = overview.summary(trace)
    found = communication.collectives(trace)
    if len(found) > _MOST_COLLECTIVES:
        notes.append(f"Of {len(found):,} collectives the first {_MOST_COLLECTIVES:,} were looked at.")
        found = found[:_MOST_COLLECTIVES]
    windows = _windows(trace)
    start = windows["start_ns"]
    end = start + windows["wall_ns"]
    launched = steps.number(windows.assign(end_ns=end), found["launch_ns"])
    found = found.assign(step=np.append(windows["step"], -1)[launched])
    # Of a capture of several ranks it says who started it, at best.
    said = trace.meta.distributed if process is None else {}
    return Look(
        file=file,
        process=process,
        rank=_integer(said.get("rank")),
        world_size=_integer(said.get("world_size")),
        t0_ns=int(trace.t0_ns),
        tool=trace.meta.tool,
        devices=[int(device["device"]) for device in figures["devices"]],
        figures={c: figures[c] for c in ("span_ns", "busy_ns", "idle_ns")} | communication.totals(trace),
        collectives=found,
        steps=windows.join([communication.spent(trace, start, end, found), time_spent(trace, start, end)]),
        notes=notes,
    )


def _integer(value: Any) -> int | None:
    try:
        return number if 0 <= (number := int(value)) < 1 << 31 else None
    except (TypeError, ValueError):
        return None


def _windows(trace: Trace) -> pd.DataFrame:
    """Steps with their numbers; the whole trace, as step -1, where it has none."""
    found = steps.summary(trace)
    if not len(found):
        busy = [int(t) for d in overview.summary(trace)["devices"] for t in (d["start_ns"], d["end_ns"])]
        begin, end = (min(busy), max(busy)) if busy else overview.captured_window(trace)
        return pd.DataFrame({"step": [-1], "start_ns": [begin], "wall_ns": [end - begin]})
    numbers = [re.search(r"(\d{1,15})\D*$", str(name)) for name in found["step"]]
    known = [int(match[1]) for match in numbers if match]
    unique = len(known) == len(found) == len(set(known))
    return found[["start_ns", "wall_ns"]].assign(step=known if unique else np.arange(len(found)))


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
        One row a window. Columns ``time: …`` in nanoseconds: ``time: kernels of GEMM`` and the like,
        ``time: CUDA graphs``, ``time: copies``, ``time: communication``, ``time: idle, input-pipeline`` and the like,
        ``time: before or after all GPU work``; their sum is the windows' length times the number of devices.
        ``count: kernels of GEMM`` and the like, how many began. Without GPU work ``time: range NAME`` and
        ``time: in no range``, whose sum is the windows' length.
    """
    low, high = np.asarray(start, np.int64), np.asarray(end, np.int64)
    on_gpu = any(trace.size(table) for table in ("kernels", "memops", "graphs"))
    out = _of_gpu(trace, low, high) if on_gpu else _of_thread(trace, low, high)
    return pd.DataFrame(out, index=pd.RangeIndex(len(low)))


def _of_gpu(trace: Trace, low: Int, high: Int) -> dict[str, Int]:
    bounds = ["device", "start_ns", "end_ns"]
    kernels = trace.table("kernels", [*bounds, "name"])
    graphs, copies, idle = trace.table("graphs", bounds), trace.table("memops", bounds), gaps.causes(trace)
    labels = [*(f"kernels of {category}" for category in CATEGORIES), "CUDA graphs"]
    counted = [label for label in labels[:-1] if label != "kernels of communication"]
    codes: Int = np.concatenate([categorize(kernels["name"]).codes, np.full(len(graphs), len(labels) - 1, np.int8)])
    work = pd.concat([kernels[bounds], graphs]).assign(what=pd.Categorical.from_codes(codes, pd.Index(labels)))
    talking = (work["what"] == "kernels of communication").to_numpy()
    work, talk = work[~talking], work[talking]
    # What each operation adds to those that began before it.
    work = work.assign(fresh_ns=work["end_ns"] - uncovered(work["start_ns"], work["end_ns"], work["device"]))
    spent = [*counted, "CUDA graphs", "copies", "communication", *(f"idle, {cause}" for cause in gaps.CAUSES)]
    columns = [*(f"{TIME}{what}" for what in spent), *(f"{COUNT}{what}" for what in counted)]
    out = {column: np.zeros(len(low), np.int64) for column in columns}
    for parts, begin in ((work, "fresh_ns"), (idle.assign(what="idle, " + idle["cause"].astype(str)), "start_ns")):
        for (_, what), rows in parts.groupby(["device", "what"], observed=True):
            out[TIME + str(what)] += Coverage(rows[begin], rows["end_ns"]).of(low, high)
    for what, rows in work[work["what"].isin(counted)].groupby("what", observed=True):
        begun = np.sort(rows["start_ns"].to_numpy())
        out[COUNT + str(what)] += np.searchsorted(begun, high) - np.searchsorted(begun, low)
    devices = sorted({int(d) for frame in (kernels, graphs, copies) for d in pd.unique(frame["device"])})
    for device in devices:
        mine = [frame[frame["device"] == device] for frame in (work, copies, talk)]
        bounds_of = [(rows["start_ns"], rows["end_ns"]) for rows in mine]
        computed, moved, all_of_it = (Coverage(*union(*bounds_of[:n])).of(low, high) for n in (1, 2, 3))
        out[f"{TIME}copies"] += moved - computed
        out[WAITING] += all_of_it - moved
    rest = (high - low) * max(len(devices), 1) - sum(out[f"{TIME}{what}"] for what in spent)
    return out | {f"{TIME}before or after all GPU work": rest}


def _of_thread(trace: Trace, low: Int, high: Int) -> dict[str, Int]:
    """Among the outermost ranges, other than steps, of the thread with the most time in ranges of its own."""
    ranges = trace.table("ranges", ["start_ns", "end_ns", "thread", "name", "parent"])
    ranges = ranges[ranges["thread"].isin(threads_with_ranges(trace)).to_numpy()]
    length = ranges["end_ns"] - ranges["start_ns"]
    longest = length.groupby(ranges["thread"]).sum().sort_values(kind="stable", ascending=False).index[:1]
    outer = ranges[ranges["thread"].isin(longest) & ~ranges["name"].isin(set(steps.find(trace)["step"]))]
    # In no range but a step.
    outer = outer[~outer["parent"].isin(outer.index)]
    # ``epoch 1``, ``epoch 2`` are one thing to spend time on.
    name = outer["name"].astype("str").map(lambda text: _NUMBERED.sub("#", text))
    total = length[outer.index].groupby(name).sum().sort_values(ascending=False)
    out: dict[str, Int] = {}
    for one in total.index[:_MOST_NAMES]:
        some = outer[name == one]
        out[f"{TIME}range {one}"] = Coverage(some["start_ns"], some["end_ns"]).of(low, high)
    out[f"{TIME}in no range"] = high - low - sum(out.values(), np.zeros(len(low), np.int64))
    return out
