"""Where a step's time goes, phase by phase, in sums that add up to the whole."""

from __future__ import annotations

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
#: The row of what lies in no phase.
UNATTRIBUTED = "(unattributed)"


def summary(trace: Trace, match: str = PHASES, rule: Rule = "window") -> pd.DataFrame:
    """Divide the steps' CPU time and the GPU's busy time among phases.

    Every GPU operation belongs to one phase, the one in which it was launched; where operations of two phases run
    at the same time, the moment counts for the one that began first. So the GPU column sums to the busy time, which
    adding up ``gpu_ns`` of :func:`nsightkit.analysis.timeline.ranges.summary` would not. CPU times are those of the
    phases' own thread: for asynchronous work the time it took to launch.

    Parameters
    ----------
    trace : Trace
    match : str
        Regular expression of the phases' names. Where such ranges nest, the outermost counts.
    rule : {"window", "thread"}
        Whose launches belong to a phase, as for ranges: ``thread`` leaves out the backward pass, which autograd
        launches from a thread of its own.

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
    chosen = _outermost(ranges[matching(ranges["name"], compiled(match, "match"))])
    selected = trace.mask("ranges")
    mine = chosen if selected is None else chosen[selected[chosen.index.to_numpy()]]
    cpu = (mine["end_ns"] - mine["start_ns"]).groupby(mine["name"].astype("str")).agg(count="size", cpu_ns="sum")
    gpu = _gpu(trace, chosen, rule) if recorded else pd.DataFrame(columns=["gpu_ns", "kernel_count"], dtype=np.int64)
    both = cpu.join(gpu, how="outer").reindex([*sorted({*cpu.index, *gpu.index} - {UNATTRIBUTED}), UNATTRIBUTED])
    both = both.fillna(0).astype({"count": "int64", "cpu_ns": "Int64", "gpu_ns": "int64", "kernel_count": "Int64"})
    found = steps.find(trace)
    step = intervals.Coverage(found["start_ns"], found["end_ns"])
    in_steps = int(step.of(mine["start_ns"], mine["end_ns"]).sum())
    wall = int((found["end_ns"] - found["start_ns"]).sum())
    both.loc[UNATTRIBUTED, ["count", "cpu_ns"]] = 0, wall - in_steps if len(found) else pd.NA
    phases = both.iloc[:-1].sort_values(["gpu_ns", "cpu_ns"], ascending=False, kind="stable")
    out: pd.DataFrame = pd.concat([phases, both.iloc[-1:]]).rename_axis("phase").reset_index()
    out["share_of_busy"] = out["gpu_ns"] / (out["gpu_ns"].sum() or np.nan)
    out = out.assign(rule=rule).astype({"phase": "str", "gpu_ns": "Int64"})
    if not recorded:
        out[["gpu_ns", "kernel_count"]] = pd.NA
    return out


def _outermost(ranges: pd.DataFrame) -> pd.DataFrame:
    """The ranges that lie in no other one of their thread; in order of thread and time."""
    order = np.lexsort((-ranges["end_ns"].to_numpy(), ranges["start_ns"].to_numpy(), ranges["thread"].to_numpy()))
    ordered = ranges.iloc[order]
    reach = ordered["end_ns"].groupby(ordered["thread"], sort=False).cummax().groupby(ordered["thread"]).shift()
    return ordered[(reach.isna() | (ordered["start_ns"] >= reach)).to_numpy()]


def _gpu(trace: Trace, phases: pd.DataFrame, rule: Rule) -> pd.DataFrame:
    """Busy time and kernels of each phase, ``gpu_ns`` and ``kernel_count``, by its name."""
    ops = intervals.gpu_intervals(trace)
    table, row = ops["table"].to_numpy(), ops["row"].to_numpy()
    owner = _phase_of_launch(trace, phases, intervals.launches_of(trace, table, row), rule)
    names = np.array([*phases["name"].astype("str"), UNATTRIBUTED], dtype=object)[owner]
    start, end, device = (ops[c].to_numpy() for c in ("start_ns", "end_ns", "device"))
    fresh = intervals.uncovered(start, end, device)
    each = pd.DataFrame({"gpu_ns": fresh, "kernel_count": table == GPU_TABLES.index("kernels")})
    return each.groupby(names).sum()


def _phase_of_launch(trace: Trace, phases: pd.DataFrame, launch: Int, rule: Rule) -> Int:
    """Position of the phase in which each call lies, -1 for none."""
    result = np.full(len(launch), -1, np.int64)
    known = np.flatnonzero(launch >= 0)
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"])
    begun, done, thread = (calls[c].to_numpy()[launch[known]] for c in ("start_ns", "end_ns", "thread"))
    # At -1 stands none, before and after all times.
    start, end = (np.append(phases[c].to_numpy(), np.iinfo(np.int64).min) for c in ("start_ns", "end_ns"))
    last = np.full(len(known), -1, np.int64)
    for mine, at in holders(trace, phases.index.to_numpy(), thread, rule):
        mine = mine[np.argsort(start[mine], kind="stable")]  # noqa: PLW2901 - in order of time
        phase = np.append(mine, -1)[np.searchsorted(start[mine], begun[at], side="right") - 1]
        last[at] = np.where(start[phase] > start[last[at]], phase, last[at])
    result[known] = np.where((end[last] >= done) & (end[last] > begun), last, -1)
    return result
