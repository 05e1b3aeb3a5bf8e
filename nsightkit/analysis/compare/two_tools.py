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

_KEYS = ["group", "name", "figure", "clock"]
#: Figures of a step and of a phase, and whose doing they are.
_OF_STEP = {
    "wall_ns": "CPU", "span_ns": "both", "busy_ns": "GPU", "idle_ns": "both",
    "kernel_ns": "GPU", "kernel_count": "GPU", "memop_ns": "GPU", "memop_count": "GPU",
}  # fmt: skip
_OF_PHASE = {"gpu_ns": "GPU", "kernel_count": "GPU", "cpu_ns": "CPU"}
#: Figures of a category, and the columns of :func:`nsightkit.analysis.timeline.kernels.summary` they are from.
_OF_CATEGORY = {"gpu_ns": "total_ns", "kernel_count": "count"}


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
    first, second = (column.index for column in figures.values())
    table = pd.concat(figures, axis=1).reindex([*first, *second.difference(first, sort=False)])
    # A kind of kernel that only one trace has ran no kernel in the other, if that recorded any.
    kinds = table.index.get_level_values("group") == "category"
    for name, trace in traces.items():
        if trace.recorded("kernels"):
            table.loc[kinds, name] = table.loc[kinds, name].fillna(0.0)
    one, other = (table[name] for name in traces)
    difference = (other / one - 1).where(one != 0).mask(one == other, 0.0)
    table = table.assign(difference=difference).dropna(how="all").reset_index()
    category = table["group"] == "category"
    return table[~category | table["name"].isin(table.loc[category, "name"].unique()[:top])].reset_index(drop=True)


def _figures(name: str, trace: Trace, match: str, rule: Rule) -> pd.Series:
    """Figures of a mean step, by group, name, figure and clock."""
    found = steps.find(trace)
    if not len(found):
        raise UsageError(f"{name}: the trace has no steps (ProfilerStep#N, or ranges with 'step' in their name)")
    mine = selection.select(trace, last_steps=len(found))
    on_gpu = mine.recorded("kernels")
    step = overview.summary(mine) if on_gpu else dict.fromkeys(_OF_STEP)
    step["wall_ns"] = int((found["end_ns"] - found["start_ns"]).sum())
    step["memop_count"] = mine.size("memops") if mine.recorded("memops") else None
    rows = {("step", "step", figure, clock): step[figure] for figure, clock in _OF_STEP.items()}
    for row in phases.summary(mine, match, rule).to_dict("records"):
        rows |= {("phase", row["phase"], figure, clock): row[figure] for figure, clock in _OF_PHASE.items()}
    for row in kernels.summary(mine, by="category").to_dict("records") if on_gpu else ():
        rows |= {("category", row["name"], figure, "GPU"): row[column] for figure, column in _OF_CATEGORY.items()}
    table = pd.Series(rows, dtype=object).rename_axis(_KEYS)
    return pd.to_numeric(table.where(table.notna(), np.nan)).astype("float64") / len(found)
