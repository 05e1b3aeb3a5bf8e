"""The same run seen by two tools: one table of figures, by one set of rules, side by side."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from nsightkit.analysis.timeline import kernels, overview, phases, selection, steps
from nsightkit.analysis.timeline.ranges import Rule
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace

__all__ = ["compare"]

#: Figures of a step and of a phase, and whose doing they are.
_OF_STEP = {
    "wall_ns": "CPU",
    "span_ns": "both",
    "busy_ns": "GPU",
    "idle_ns": "both",
    "kernel_ns": "GPU",
    "kernel_count": "GPU",
    "memop_ns": "GPU",
    "memop_count": "GPU",
}
_OF_PHASE = {"gpu_ns": "GPU", "kernel_count": "GPU", "cpu_ns": "CPU"}


def compare(
    traces: Mapping[str, Trace], match: str | None = None, rule: Rule = "window", top: int | None = None
) -> pd.DataFrame:
    """Put the figures of a mean step beside each other, as two traces of one program have them.

    What was launched in the steps counts, and nothing else: a tool that also caught what came before or after
    them does not differ for that. All figures are sums over the steps, divided by their number, so captures of
    different length compare.

    Parameters
    ----------
    traces : mapping of str to Trace
        Two traces by the name their column will have.
    match : str, optional
        Regular expression of the phases' names; those of a training step when omitted
        (:data:`nsightkit.analysis.timeline.phases.PHASES`).
    rule : {"window", "thread"}
        Whose launches belong to a phase, as in :func:`nsightkit.analysis.timeline.phases.summary`.
    top : int, optional
        Only so many categories of kernels, those that take longest in the first trace.

    Returns
    -------
    DataFrame
        ``group, name, figure, clock``, a column for each trace, ``difference``.

        ``group``
            ``step``: the whole, named ``step``; ``phase``; ``category``: of kernels.
        ``figure``
            ``wall_ns`` (a step's window on the CPU), ``span_ns``, ``busy_ns``, ``idle_ns``, ``kernel_ns``,
            ``kernel_count``, ``memop_ns``, ``memop_count``; of a phase ``gpu_ns``, ``kernel_count``, ``cpu_ns``;
            of a category ``gpu_ns`` (sum of durations), ``kernel_count``.
        ``clock``
            ``GPU`` or ``CPU``: whose doing it is. A profiler slows the CPU down, each in its own way; a kernel
            takes as long with one as with the other. ``both`` for ``span_ns`` and ``idle_ns``: the GPU's time with
            its waiting for the CPU.
        ``difference``
            The second over the first, less 1. NaN where one has no such figure, or the first is 0 and the second
            is not.

        A figure is NaN where its trace recorded nothing of that kind, and left out where neither did.

    Raises
    ------
    UsageError
        Not two traces, or one without steps; `match` or `rule` is malformed.
    """
    if len(traces) != 2:
        raise UsageError(f"two traces can be compared, not {len(traces)}")
    figures = {name: _figures(name, trace, match or phases.PHASES, rule) for name, trace in traces.items()}
    first, second = figures.values()
    table = pd.concat(figures, axis=1).reindex([*first.index, *second.index.difference(first.index, sort=False)])
    # A kind of kernel that only one trace has ran no kernel in the other, if that recorded any.
    kinds = table.index.get_level_values("group") == "category"
    for name, trace in traces.items():
        if trace.recorded("kernels"):
            table.loc[kinds, name] = table.loc[kinds, name].fillna(0.0)
    was, now = (table[name] for name in traces)
    difference = (now / was - 1).where(was != 0)
    table["difference"] = difference.mask(was == now, 0.0)
    table = table.dropna(how="all").reset_index()
    category = table["group"] == "category"
    longest = table.loc[category, "name"].unique()[:top]
    return table[~category | table["name"].isin(longest)].reset_index(drop=True)


def _figures(name: str, trace: Trace, match: str, rule: Rule) -> pd.Series:
    """Figures of a mean step, by group, name, figure and clock."""
    windows = steps.find(trace)
    if not len(windows):
        raise UsageError(f"{name}: the trace has no steps (ProfilerStep#N, or ranges with 'step' in their name)")
    inside = selection.select(trace, last_steps=len(windows))
    rows: dict[tuple[str, str, str, str], float | None] = {}
    step = overview.summary(inside) if inside.recorded("kernels") else {}
    step["wall_ns"] = int((windows["end_ns"] - windows["start_ns"]).sum())
    if inside.recorded("memops"):
        step["memop_count"] = inside.size("memops")
    for figure, clock in _OF_STEP.items():
        rows["step", "step", figure, clock] = step.get(figure)
    for phase in phases.summary(inside, match, rule).to_dict("records"):
        for figure, clock in _OF_PHASE.items():
            rows["phase", phase["phase"], figure, clock] = phase[figure]
    if inside.recorded("kernels"):
        for category in kernels.summary(inside, by="category").to_dict("records"):
            rows["category", category["name"], "gpu_ns", "GPU"] = category["total_ns"]
            rows["category", category["name"], "kernel_count", "GPU"] = category["count"]
    series = pd.Series(rows, dtype=object).rename_axis(["group", "name", "figure", "clock"])
    return pd.to_numeric(series.where(series.notna(), np.nan)).astype("float64") / len(windows)
