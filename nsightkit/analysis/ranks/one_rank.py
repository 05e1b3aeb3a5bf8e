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
from nsightkit.analysis.core.intervals import Coverage
from nsightkit.analysis.ranks import collectives as communication
from nsightkit.analysis.timeline import gaps, overview, steps
from nsightkit.errors import AnyPath
from nsightkit.trace import load
from nsightkit.trace.model import TABLES, Trace

__all__ = ["TIME", "WAITING", "Look", "look", "rank_of", "time_spent"]

#: Prefix of the columns of time spent.
TIME = "time: "
_BOUNDS = ["device", "start_ns", "end_ns"]
_MOST_RANKS = 1 << 20
_RANK = re.compile(r"(?i)(?<![a-z])(?<!local[-_. ])(?:global[-_. ]?)?(?:rank|worker)[-_. =]?(\d{1,6})(?!\d)")
_TALK = "kernels of communication"
#: The time of a device by part, in order of precedence.
_PARTS = [f"kernels of {category}" for category in CATEGORIES if category != "communication"]
_PARTS += ["CUDA graphs", "copies", _TALK]
_PARTS += [f"idle, {cause}" for cause in gaps.CAUSES]
#: In collectives a rank waits for others: it does not decide this time itself.
WAITING = TIME + _TALK


@dataclasses.dataclass(frozen=True)
class Look:
    """Figures and small tables of one rank, without its events.

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


def look(source: AnyPath | Trace) -> list[Look]:
    """Reduce a trace to its figures and small tables.

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
        return [_look(trace, file, None)]
    processes = first_device.sort_values(kind="stable").index.tolist()
    return [_look(_of_process(trace, process), file, process) for process in processes]


def _of_process(trace: Trace, process: int) -> Trace:
    masks = {}
    for table, columns in TABLES.items():
        if "process" in columns:
            masks[table] = (trace.whole.table(table, ["process"])["process"] == process).to_numpy()
    return trace.masked(masks)


def _look(trace: Trace, file: str, process: int | None) -> Look:
    windows = _windows(trace)
    collectives = communication.collectives(trace)
    step = steps.number(windows, collectives["start_ns"])
    parts = time_spent(trace, windows["start_ns"], windows["end_ns"])
    whole = overview.summary(trace)
    figures = {name: whole[name] for name in ("span_ns", "busy_ns", "idle_ns")}
    rank = None
    world_size = None
    # The environment and the name of a capture of several ranks are those of their launcher.
    if process is None:
        world_size = _number(trace.meta.distributed.get("world_size"))
        rank = _number(trace.meta.distributed.get("rank"))
        rank = rank_of(file) if rank is None else rank
    return Look(
        file=file,
        process=process,
        rank=rank,
        world_size=world_size,
        tool=trace.meta.tool,
        figures=figures | communication.totals(trace),
        collectives=collectives.assign(step=np.append(windows["step"], -1)[step]),
        steps=windows[["step", "wall_ns"]].join(parts),
    )


def rank_of(path: AnyPath) -> int | None:
    """Find the rank in a file's name, or in that of its folder.

    Parameters
    ----------
    path : path-like
    """
    path = Path(path)
    match = _RANK.search(path.name) or _RANK.search(path.parent.name)
    if match:
        return int(match[1])
    return None


def _number(value: Any) -> int | None:
    """A rank, or a number of ranks; None for anything else that a trace holds in its place."""
    if isinstance(value, int) and 0 <= value < _MOST_RANKS:
        return value
    return None


def _windows(trace: Trace) -> pd.DataFrame:
    """Steps with their numbers; the whole trace, as step -1, if it has none."""
    windows = steps.summary(trace)[["start_ns", "wall_ns"]].rename_axis("step").reset_index()
    if windows.empty:
        begin, end = overview.captured_window(trace)
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
    low = np.asarray(start, np.int64)
    high = np.asarray(end, np.int64)
    work = _gpu_work(trace)
    rest = "time outside all GPU work"
    if not len(work):
        work = _outermost_ranges(trace)
        rest = "no range"
    parts = work["part"].cat.categories
    spent = pd.DataFrame(0, range(len(low)), parts)
    for _, rows in work.groupby("device"):
        covered = np.zeros(len(low), np.int64)
        number = rows["part"].cat.codes
        for part in np.unique(number):
            so_far = rows[number <= part]
            until = Coverage(so_far["start_ns"], so_far["end_ns"]).of(low, high)
            spent[parts[part]] += until - covered
            covered = until
    spent[rest] = (high - low) * max(work["device"].nunique(), 1) - spent.sum(axis=1)
    return spent.add_prefix(TIME)


def _gpu_work(trace: Trace) -> pd.DataFrame:
    """Kernels, graph replays, copies and gaps, each with its part."""
    kernels = trace.table("kernels", [*_BOUNDS, "name"])
    kernels["part"] = "kernels of " + pd.Series(categorize(kernels["name"]).astype(object))
    graphs = trace.table("graphs", _BOUNDS).assign(part="CUDA graphs")
    copies = trace.table("memops", _BOUNDS).assign(part="copies")
    idle = gaps.causes(trace)
    idle = idle.assign(part="idle, " + idle["cause"].astype(str))
    work = pd.concat([kernels, graphs, copies, idle])
    return work.assign(part=pd.Categorical(work["part"], _PARTS))


def _outermost_ranges(trace: Trace) -> pd.DataFrame:
    """The outermost ranges inside the steps, on the steps' thread."""
    found = steps.find(trace)
    ranges = trace.table("ranges", ["start_ns", "end_ns", "thread", "name", "parent"])
    ranges = ranges[ranges["thread"].isin(found["thread"]) & ~ranges["name"].isin(found["step"])]
    ranges = ranges[~ranges["parent"].isin(ranges.index)]
    # ``epoch 1`` and ``epoch 2`` are one activity.
    part = "range " + ranges["name"].astype("str").str.replace(r"\d+", "#", regex=True)
    return ranges.assign(device=-1, part=part.astype("category"))
