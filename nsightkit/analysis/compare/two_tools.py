"""The same program profiled by two tools: one table of figures, by one set of rules, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from nsightkit.analysis.timeline import kernels, overview, phases, selection, steps
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace

__all__ = ["compare"]

#: Figures of a step and of a phase, and what each depends on.
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
_KEYS = ["group", "name", "figure", "clock"]


def compare(traces: Mapping[str, Trace], match: str = phases.PHASES, top: int | None = None) -> pd.DataFrame:
    """Put the figures of a mean step side by side, as two traces of one program have them.

    Only work launched in the steps counts, so a tool that also caught what came before or after them does not differ
    for that. All figures are sums over the steps divided by their number, so captures of different length compare.

    Parameters
    ----------
    traces : mapping of str to Trace
        Two traces; the keys name their columns.
    match : str
        Regular expression of the phases' names; default those of a training step.
    top : int, optional
        How many categories of kernels to keep, the longest of the first trace. Default: all.

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
            ``GPU`` or ``CPU``. Each profiler slows the CPU in its own way; a kernel takes as long with one as with the
            other. ``both`` for ``span_ns`` and ``idle_ns``: the GPU's time, waits for the CPU included.
        ``difference``
            The second over the first, less 1. NaN where one has no such figure, or the first is 0 and the second is
            not.

        A figure is NaN where its trace recorded nothing of that kind, and left out where neither did.

    Raises
    ------
    UsageError
        A trace has no steps, or `match` is malformed.
    """
    columns = [_figures(name, trace, match) for name, trace in traces.items()]
    table = pd.concat(columns, axis=1).dropna(how="all")
    # A category that only one trace has ran no kernel in the other, if that recorded any.
    is_category = table.index.get_level_values("group") == "category"
    for name, trace in traces.items():
        if trace.recorded("kernels"):
            table.loc[is_category, name] = table.loc[is_category, name].fillna(0.0)
    was, now = (table[name] for name in traces)
    table["difference"] = (now / was - 1).where(was != 0).mask(was == now, 0.0)
    table = table.reset_index()
    categories = table.loc[table["group"] == "category", "name"].unique()
    dropped = categories[:0] if top is None else categories[top:]
    is_dropped = (table["group"] == "category") & table["name"].isin(dropped)
    return table[~is_dropped].reset_index(drop=True)


def _figures(name: str, trace: Trace, match: str) -> pd.Series:
    """Figures of a mean step, by group, name, figure and clock."""
    windows = steps.find(trace)
    if windows.empty:
        raise UsageError(f"{name}: the trace has no steps (ProfilerStep#N, or ranges with 'step' in their name)")
    inside = selection.select(trace, last_steps=len(windows))
    step: dict[str, Any] = {"wall_ns": (windows["end_ns"] - windows["start_ns"]).sum()}
    if inside.recorded("memops"):
        step["memop_count"] = inside.size("memops")
    categories = []
    if inside.recorded("kernels"):
        step = overview.summary(inside) | step
        categories = kernels.summary(inside, by="category").to_dict("records")
    rows: list[tuple[Any, ...]] = []
    for figure, clock in _OF_STEP.items():
        rows.append(("step", "step", figure, clock, step.get(figure)))
    for phase in phases.summary(inside, match).to_dict("records"):
        for figure, clock in _OF_PHASE.items():
            rows.append(("phase", phase["phase"], figure, clock, phase[figure]))
    for category in categories:
        rows.append(("category", category["name"], "gpu_ns", "GPU", category["total_ns"]))
        rows.append(("category", category["name"], "kernel_count", "GPU", category["count"]))
    table = pd.DataFrame(rows, columns=[*_KEYS, name]).set_index(_KEYS)
    return pd.to_numeric(table[name], errors="coerce").astype("float64") / len(windows)
