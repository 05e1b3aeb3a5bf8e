"""Where a step's time goes, phase by phase, in sums that add up to the whole."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import steps
from nsightkit.analysis.timeline.ranges import Rule, attributable, innermost_ranges_around
from nsightkit.text import compiled, matching
from nsightkit.trace.model import GPU_TABLES, Trace, nesting

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
        ``(unattributed)``. ``cpu_ns`` sums to the length of the steps (:func:`nsightkit.analysis.timeline.steps.find`)
        where one thread opens phases, all within steps; NA in the last row of a trace without steps. The GPU columns
        are NA where no GPU work was recorded.

    Raises
    ------
    UsageError
        `match` is not a regular expression, or `rule` is unknown.
    """
    has_gpu_columns = attributable(trace, rule)
    ranges = trace.whole.table("ranges", ["start_ns", "end_ns", "thread", "name"])
    phases = ranges[matching(ranges["name"], compiled(match, "match"))].astype({"name": "str"})
    level, _ = nesting(phases["thread"], phases["start_ns"], phases["end_ns"])
    phases = phases[level == 0]  # the outermost
    is_selected = trace.mask("ranges")
    selected_phases = phases if is_selected is None else phases[is_selected[phases.index]]
    durations = (selected_phases["end_ns"] - selected_phases["start_ns"]).groupby(selected_phases["name"])
    cpu = pd.DataFrame({"count": durations.size(), "cpu_ns": durations.sum()})
    table = cpu.join(_gpu_work(trace, phases, rule), how="outer").fillna(0)
    table = table.sort_values(["gpu_ns", "cpu_ns"], ascending=False, kind="stable")
    unattributed_last = [*table.index.drop(UNATTRIBUTED), UNATTRIBUTED]
    table = table.loc[unattributed_last].astype("Int64").rename_axis("phase").reset_index()
    table.loc[table.index[-1], "cpu_ns"] = _outside_phases_ns(trace, selected_phases)
    busy_ns = int(table["gpu_ns"].sum())
    table["share_of_busy"] = table["gpu_ns"].astype("float64") / (busy_ns or np.nan)  # NaN without GPU work
    if not has_gpu_columns:
        table[["gpu_ns", "kernel_count"]] = pd.NA
    table["rule"] = rule
    return table.astype({"phase": "str", "count": "int64"})


def _outside_phases_ns(trace: Trace, phases: pd.DataFrame) -> int | None:
    """Measure the steps' time in which no phase is open; None without steps."""
    windows = steps.find(trace)
    if windows.empty:
        return None
    # Their union, as phases of several threads may be open at once.
    inside_ns = intervals.Coverage(phases["start_ns"], phases["end_ns"]).of(windows["start_ns"], windows["end_ns"])
    return int((windows["end_ns"] - windows["start_ns"]).sum()) - int(inside_ns.sum())


def _gpu_work(trace: Trace, phases: pd.DataFrame, rule: Rule) -> pd.DataFrame:
    """Sum busy time and kernels of each phase and of `UNATTRIBUTED`: ``gpu_ns`` and ``kernel_count`` by name.

    A moment with several operations of a device counts for the first of them to start.
    """
    ops = intervals.gpu_intervals(trace)
    launch = intervals.launches_of(trace, ops["table"], ops["row"])
    has_launch = launch >= 0
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[launch[has_launch]]
    phase = np.full(len(ops), -1, np.int64)
    phase[has_launch] = innermost_ranges_around(trace, phases, calls, rule)
    names = np.append(phases["name"].to_numpy(object), UNATTRIBUTED)[phase]  # the last is for no phase, -1
    work = pd.DataFrame({"gpu_ns": intervals.uncovered(ops["start_ns"], ops["end_ns"], ops["device"])})
    work["kernel_count"] = (ops["table"] == GPU_TABLES.index("kernels")).astype(int)
    sums = work.groupby(names).sum()
    with_unattributed = sums.index.union([UNATTRIBUTED])
    return sums.reindex(with_unattributed, fill_value=0)
