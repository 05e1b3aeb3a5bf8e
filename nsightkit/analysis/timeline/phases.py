"""Where a step's time goes, phase by phase, in sums that add up to the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.names import compiled, matching
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.ranges import Rule, attributable, holders
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["PHASES", "UNATTRIBUTED", "summary"]

Int = npt.NDArray[np.int64]

#: Phases of a training step as programs usually call them.
PHASES = r"(?i)^(data|data_?load(er)?|copy|to_device|forward|loss|backward|optimizer(_step)?|zero_grad)$"
#: The row of what is in no phase.
UNATTRIBUTED = "(unattributed)"


def summary(trace: Trace, match: str = PHASES, rule: Rule = "window") -> pd.DataFrame:
    """Divide the steps' CPU time and the GPU's busy time among phases.

    Every GPU operation belongs to one phase, the one in which it was launched; where operations of two phases run
    at the same time, the moment counts for the earlier of the two. So the GPU column sums to the busy time, which
    adding up ``gpu_ns`` of :func:`nsightkit.analysis.timeline.ranges.summary` would not. CPU times are those of the
    phases' own thread: for asynchronous work the time it took to launch.

    Parameters
    ----------
    trace : Trace
    match : str
        Regular expression of the phases' names. Where such ranges nest, the outermost counts.
    rule : {"window", "thread"}
        Whose launches belong to a phase, as for ranges: ``thread`` leaves out the backward pass, which autograd
        launches from another thread.

    Returns
    -------
    DataFrame
        ``phase, count, cpu_ns, gpu_ns, kernel_count, share_of_busy, rule``: the phases by falling ``gpu_ns``, then
        ``(unattributed)``. ``cpu_ns`` sums to the length of the steps (:func:`nsightkit.analysis.timeline.steps.find`),
        NA in the last row where the trace has none; the GPU columns are NA where none was recorded.

    Raises
    ------
    UsageError
        `match` is not a regular expression, or `rule` is unknown.
    """
    recorded = attributable(trace, rule)
    ranges = trace.whole.table("ranges", ["start_ns", "end_ns", "thread", "name"])
    phases = _outermost(ranges[matching(ranges["name"], compiled(match, "match"))])
    selected = trace.mask("ranges")
    shown = phases if selected is None else phases[selected[phases.index.to_numpy()]]
    length = (shown["end_ns"] - shown["start_ns"]).groupby(shown["name"].astype("str"))
    cpu = pd.DataFrame({"count": length.size(), "cpu_ns": length.sum()})
    gpu = pd.DataFrame(columns=["gpu_ns", "kernel_count"], dtype=np.int64)
    if recorded:
        gpu = _gpu(trace, phases, rule)
    table = cpu.join(gpu, how="outer").fillna(0).astype("int64")
    unattributed = table.reindex([UNATTRIBUTED], fill_value=0)
    table = table.drop(index=UNATTRIBUTED, errors="ignore")
    table = table.sort_values(["gpu_ns", "cpu_ns"], ascending=False, kind="stable")
    table = pd.concat([table, unattributed]).astype("Int64").rename_axis("phase").reset_index()
    table.loc[table.index[-1], "cpu_ns"] = _outside(trace, shown)
    table["share_of_busy"] = (table["gpu_ns"] / (table["gpu_ns"].sum() or np.nan)).astype("float64")
    if not recorded:
        table[["gpu_ns", "kernel_count"]] = pd.NA
    table["rule"] = rule
    return table.astype({"phase": "str", "count": "int64"})


def _outside(trace: Trace, phases: pd.DataFrame) -> Any:
    """Time of the steps outside of phases, on the CPU; NA without steps."""
    windows = steps.find(trace)
    if windows.empty:
        return pd.NA
    inside = intervals.Coverage(windows["start_ns"], windows["end_ns"]).of(phases["start_ns"], phases["end_ns"])
    return int((windows["end_ns"] - windows["start_ns"]).sum()) - int(inside.sum())


def _outermost(ranges: pd.DataFrame) -> pd.DataFrame:
    """The ranges inside no other range of their thread; in order of thread and time."""
    ordered = ranges.sort_values(["thread", "start_ns", "end_ns"], ascending=[True, True, False], kind="stable")
    reach = ordered.groupby("thread")["end_ns"].cummax().groupby(ordered["thread"]).shift()
    return ordered[reach.isna() | (ordered["start_ns"] >= reach)]


def _gpu(trace: Trace, phases: pd.DataFrame, rule: Rule) -> pd.DataFrame:
    """Busy time and kernels of each phase, ``gpu_ns`` and ``kernel_count``, by its name."""
    ops = intervals.gpu_intervals(trace)
    launch = intervals.launches_of(trace, ops["table"], ops["row"])
    owner = np.full(len(ops), -1, np.int64)
    owner[launch >= 0] = _phase_of_calls(trace, phases, launch[launch >= 0], rule)
    names = np.append(phases["name"].astype("str").to_numpy(object), UNATTRIBUTED)[owner]
    work = pd.DataFrame({"gpu_ns": intervals.uncovered(ops["start_ns"], ops["end_ns"], ops["device"])})
    work["kernel_count"] = ops["table"] == GPU_TABLES.index("kernels")
    return work.groupby(names).sum()


def _phase_of_calls(trace: Trace, phases: pd.DataFrame, launch: Int, rule: Rule) -> Int:
    """Position of the phase in which each call lies, -1 for none."""
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[launch]
    begun, done = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    # At -1 stands none, before and after all times.
    start = np.append(phases["start_ns"].to_numpy(), np.iinfo(np.int64).min)
    end = np.append(phases["end_ns"].to_numpy(), np.iinfo(np.int64).min)
    last = np.full(len(calls), -1, np.int64)
    for candidates, launches in holders(trace, phases.index.to_numpy(), calls["thread"].to_numpy(), rule):
        ordered = candidates[np.argsort(start[candidates], kind="stable")]
        at = np.searchsorted(start[ordered], begun[launches], side="right") - 1
        phase = np.append(ordered, -1)[at]
        later = start[phase] > start[last[launches]]
        last[launches] = np.where(later, phase, last[launches])
    return np.where((end[last] >= done) & (end[last] > begun), last, -1)
