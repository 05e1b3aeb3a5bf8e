"""One rank's trace, reduced to small tables that can be compared with those of other ranks.

The tables divide each step into parts that add up. With GPU work these are kernels by category, graph replays, copies,
communication and idle time by cause; a moment with several of them counts for the first in this order. Without GPU work
they are the outermost ranges of the thread that makes the steps.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.categories import CATEGORIES, categorize
from nsightkit.analysis.core.intervals import Coverage, captured_window
from nsightkit.analysis.ranks import collectives as communication
from nsightkit.analysis.timeline import gaps, overview, steps
from nsightkit.errors import AnyPath
from nsightkit.trace import load
from nsightkit.trace.model import TABLES, Trace

#: Prefix of the columns of time spent.
TIME = "time: "
_DEVICE_AND_TIMES = ["device", "start_ns", "end_ns"]
#: A larger rank or number of ranks in a trace is damage.
_MOST_RANKS = 1_000_000
#: "rank_7", "worker3.1623143089861.pt", "global-rank=12", but not "local_rank1" or "crank2".
_RANK_IN_NAME = re.compile(r"(?i)(?<![a-z])(?<!local[-_. ])(?:global[-_. ]?)?(?:rank|worker)[-_. =]?(\d{1,6})(?!\d)")
_COMMUNICATION = "kernels of communication"
#: The time of a device by part, in order of precedence.
_PARTS = [f"kernels of {category}" for category in CATEGORIES if category != "communication"]
_PARTS += ["CUDA graphs", "copies", _COMMUNICATION]
_PARTS += [f"idle, {cause}" for cause in gaps.CAUSES]
#: In collectives a rank waits for others: it does not decide this time itself.
WAITING = TIME + _COMMUNICATION


@dataclasses.dataclass(frozen=True)
class Look:
    """Figures and small tables of one rank, without its events: the traces of all ranks need not fit into memory.

    Parameters
    ----------
    file : str
    process : int or None
        Of a capture that holds several ranks.
    rank : int or None
        As the trace has it, or the name of the file.
    world_size : int or None
    tool : str
    figures : dict
        ``span_ns, busy_ns, idle_ns`` of :func:`nsightkit.analysis.timeline.overview.summary`, and
        :func:`nsightkit.analysis.ranks.collectives.totals`.
    collectives : DataFrame
        :func:`nsightkit.analysis.ranks.collectives.collectives`, with the ``step`` in which it starts (-1: none).
    steps : DataFrame
        ``step`` (its number), ``wall_ns`` and the columns of
        :func:`nsightkit.analysis.ranks.one_rank.time_spent`. One row, -1, for a trace without steps.
    """

    file: str
    process: int | None
    rank: int | None
    world_size: int | None
    tool: str
    figures: dict[str, int | None]
    collectives: pd.DataFrame
    steps: pd.DataFrame


def look_at_ranks(source: AnyPath | Trace) -> list[Look]:
    """Reduce a trace to the figures and small tables of each rank in it.

    Parameters
    ----------
    source : path-like or Trace

    Returns
    -------
    list of Look
        One per process with GPU work, in the order of their GPUs: ranks of one node. One for a trace without.

    Raises
    ------
    TraceError
        The file cannot be read.
    """
    trace = source if isinstance(source, Trace) else load(source)
    file = str(trace.path or "trace")
    kernels = trace.table("kernels", ["process", "device"])
    first_device = kernels.groupby("process")["device"].min()
    if len(first_device) < 2:
        return [_look_at_rank(trace, file, None)]
    processes = first_device.sort_values(kind="stable").index.tolist()
    return [_look_at_rank(_of_process(trace, process), file, process) for process in processes]


def _of_process(trace: Trace, process: int) -> Trace:
    """The trace with the events of one process only: a recording of several ranks has a process for each."""
    masks = {}
    for table in TABLES:
        is_own = (trace.whole.table(table, ["process"])["process"] == process).to_numpy()
        selected = trace.mask(table)  # None: the trace has all rows of the whole one
        masks[table] = is_own if selected is None else is_own & selected
    return trace.masked(masks)


def _look_at_rank(trace: Trace, file: str, process: int | None) -> Look:
    """Reduce the trace of one rank; `process` where its capture holds several."""
    windows = _step_windows(trace)
    collectives = communication.collectives(trace)
    window_of_collective = steps.step_at(windows, collectives["start_ns"])
    # A collective outside all windows has -1, which takes the appended step -1.
    step = np.append(windows["step"], -1)[window_of_collective]
    parts = time_spent(trace, windows["start_ns"], windows["end_ns"])
    summary = overview.summary(trace)
    figures = {name: summary[name] for name in ("span_ns", "busy_ns", "idle_ns")}
    rank = None
    world_size = None
    # The environment and the name of a capture of several ranks are those of their launcher.
    if process is None:
        world_size = _rank_number(trace.meta.distributed.get("world_size"))
        rank = _rank_number(trace.meta.distributed.get("rank"))
        rank = rank_of(file) if rank is None else rank
    return Look(
        file=file,
        process=process,
        rank=rank,
        world_size=world_size,
        tool=trace.meta.tool,
        figures=figures | communication.totals(trace),
        collectives=collectives.assign(step=step),
        steps=windows[["step", "wall_ns"]].join(parts),
    )


def rank_of(path: AnyPath) -> int | None:
    """Find the rank in a file's name, or in that of its folder.

    Parameters
    ----------
    path : path-like
    """
    path = Path(path)
    match = _RANK_IN_NAME.search(path.name) or _RANK_IN_NAME.search(path.parent.name)
    return int(match[1]) if match else None


def _rank_number(value: Any) -> int | None:
    """A rank or a number of ranks from a trace; None for anything else that it holds in its place."""
    if isinstance(value, int) and 0 <= value < _MOST_RANKS:
        return value
    return None


def _step_windows(trace: Trace) -> pd.DataFrame:
    """The window of each step: ``step`` (0 is the trace's first), ``start_ns, wall_ns, end_ns``.

    Without steps the whole trace is one window, of step -1.
    """
    windows = steps.summary(trace)[["start_ns", "wall_ns"]].rename_axis("step").reset_index()
    if windows.empty:
        begin, end = captured_window(trace)
        windows = pd.DataFrame({"step": [-1], "start_ns": [begin], "wall_ns": [end - begin]})
    return windows.assign(end_ns=windows["start_ns"] + windows["wall_ns"])


# ---------------------------------------------------------------- the parts of a step


def time_spent(trace: Trace, start: npt.ArrayLike, end: npt.ArrayLike) -> pd.DataFrame:
    """Divide the time of some windows into parts.

    Parameters
    ----------
    trace : Trace
    start, end : array_like of int
        The windows.

    Returns
    -------
    DataFrame
        One row per window. Columns ``time: …`` in nanoseconds: ``kernels of GEMM`` and the like, ``CUDA graphs``,
        ``copies``, ``kernels of communication``, ``idle, input-pipeline`` and the like, ``time outside all GPU work``;
        they add up to the windows' length times the number of devices. Without GPU work ``time: range NAME`` and
        ``time: no range``, which add up to the windows' length.
    """
    starts = np.asarray(start, np.int64)
    ends = np.asarray(end, np.int64)
    work = _gpu_work_and_gaps(trace)
    rest_part = "time outside all GPU work"
    if not len(work):
        work = _outermost_ranges(trace)
        rest_part = "no range"
    parts = work["part"].cat.categories
    spent = pd.DataFrame(0, range(len(starts)), parts)
    for _, rows in work.groupby("device"):
        covered_ns = np.zeros(len(starts), np.int64)
        precedence = rows["part"].cat.codes  # 0 comes first
        for code in np.unique(precedence):
            # A part gets what it adds to the union of all parts before it.
            up_to_part = rows[precedence <= code]
            up_to_part_ns = Coverage(up_to_part["start_ns"], up_to_part["end_ns"]).of(starts, ends)
            spent[parts[code]] += up_to_part_ns - covered_ns
            covered_ns = up_to_part_ns
    spent[rest_part] = (ends - starts) * max(work["device"].nunique(), 1) - spent.sum(axis=1)
    return spent.add_prefix(TIME)


def _gpu_work_and_gaps(trace: Trace) -> pd.DataFrame:
    """Kernels, graph replays, copies and gaps, each with its ``part``, a categorical in order of precedence."""
    kernels = trace.table("kernels", [*_DEVICE_AND_TIMES, "name"])
    kernels["part"] = "kernels of " + pd.Series(categorize(kernels["name"]).astype(object))
    graphs = trace.table("graphs", _DEVICE_AND_TIMES).assign(part="CUDA graphs")
    copies = trace.table("memops", _DEVICE_AND_TIMES).assign(part="copies")
    idle = gaps.causes(trace)
    idle = idle.assign(part="idle, " + idle["cause"].astype(str))
    work = pd.concat([kernels, graphs, copies, idle])
    return work.assign(part=pd.Categorical(work["part"], _PARTS))


def _outermost_ranges(trace: Trace) -> pd.DataFrame:
    """The outermost ranges on the steps' thread, apart from the steps' own; ``part`` is a range's name.

    Without steps the table is empty.
    """
    step_ranges = steps.find(trace)
    ranges = trace.table("ranges", ["start_ns", "end_ns", "thread", "name", "parent"])
    ranges = ranges[ranges["thread"].isin(step_ranges["thread"]) & ~ranges["name"].isin(step_ranges["step"])]
    # Outermost: the parent, a row of the trace's ranges, is a step or nothing.
    ranges = ranges[~ranges["parent"].isin(ranges.index)]
    # ``epoch 1`` and ``epoch 2`` are one activity.
    part = "range " + ranges["name"].astype("str").str.replace(r"\d+", "#", regex=True)
    return ranges.assign(device=-1, part=part.astype("category"))
