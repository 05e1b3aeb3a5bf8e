"""One rank's trace, reduced to what is needed of it beside those of the other ranks."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.ranks import collectives as communication
from nsightkit.analysis.ranks import time_spent
from nsightkit.analysis.timeline import overview, steps
from nsightkit.trace import load
from nsightkit.trace.model import TABLES, Trace

__all__ = ["Look", "look"]

#: A rank's collectives beyond this are left out, so that what is kept of each rank stays small.
_MOST_COLLECTIVES = 50_000


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
        :func:`nsightkit.analysis.ranks.collectives.spent` and those of :func:`nsightkit.analysis.ranks.time_spent.of`.
        One row, -1, for the whole trace where it has no steps.
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
        steps=windows.join([communication.spent(trace, start, end, found), time_spent.of(trace, start, end)]),
        notes=notes,
    )


def _integer(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number < 1 << 31 else None


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
