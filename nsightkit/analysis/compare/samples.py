"""Per-step figures of a capture: every sum over the whole capture, and its part in each step.

Work launched in a step is that step's work, whenever the GPU got to it. Idle time is a step's where it lies between
the end of the step before and its own (:func:`nsightkit.analysis.timeline.steps.windows`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.compare.match import plain_range
from nsightkit.analysis.core import intervals, noise
from nsightkit.analysis.timeline import gaps, overview, ranges, steps
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["Samples", "judge", "ordinary", "samples"]

Float = npt.NDArray[np.float64]

#: Figures of the GPU's work, by the table that holds it.
_WORK = dict(zip(GPU_TABLES, ("kernel_ns", "memop_ns", "graph_ns"), strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """A capture, cut into its steps.

    Parameters
    ----------
    trace : Trace
    overview : dict
        As :func:`nsightkit.analysis.timeline.overview.summary` gives it.
    windows : DataFrame
        The steps, as :func:`nsightkit.analysis.timeline.steps.windows` gives them; empty without steps.
    tables : dict of str to DataFrame
        ``figures`` (times of the whole), ``kernels``, ``gaps``, ``ranges CPU``, and ``ranges GPU``, as far as they
        were recorded. Indexed by name, with ``count`` and ``total`` over the whole capture, and a column of sums for
        each step.
    """

    trace: Trace
    overview: dict[str, Any]
    windows: pd.DataFrame
    tables: dict[str, pd.DataFrame]

    @property
    def outside(self) -> float:
        """Share of the GPU's work that was launched outside the steps; 0 without steps."""
        work = self.tables["figures"].reindex(list(_WORK.values())).fillna(0)
        total = float(work["total"].sum())
        if not total or self.windows.empty:
            return 0.0
        return 1 - float(work.iloc[:, 2:].to_numpy().sum()) / total


def ordinary(runs: Sequence[npt.ArrayLike]) -> list[Float]:
    """Leave the outliers out of the samples of each run: a stall now and then is not noise.

    Parameters
    ----------
    runs : sequence of array_like of float
    """
    kept = []
    for run in runs:
        values = np.asarray(run, np.float64)
        kept.append(values[~steps.outliers(values)])
    return kept


def judge(before: Sequence[npt.ArrayLike], after: Sequence[npt.ArrayLike], confidence: float = 0.95) -> noise.Change:
    """Tell a change from noise by the samples that are not outliers (:func:`nsightkit.analysis.core.noise.judge`).

    Parameters
    ----------
    before, after : sequence of array_like of float
        The samples of each run.
    confidence : float
    """
    first, second = ordinary(before), ordinary(after)
    left_out = sum(map(np.size, first + second)) < sum(map(np.size, (*before, *after)))
    return noise.judge(first, second, confidence, left_out=left_out)


def samples(trace: Trace, match: str | None = None) -> Samples:
    """Cut a capture into its steps, and add up what happened in each.

    Parameters
    ----------
    trace : Trace
        Whole, or selected from.
    match : str, optional
        Regular expression of the steps' names.

    Returns
    -------
    Samples

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    windows = steps.windows(trace, match)
    if windows.empty and trace is not trace.whole:
        # A filter such as --within drops the steps' own ranges: take the steps in which something selected began.
        windows = steps.windows(trace.whole, match)
        starts = [trace.table(table, ["start_ns"])["start_ns"] for table in ("ranges", "calls", "ops")]
        touched = np.unique(_begun_in(windows, np.concatenate(starts)))
        windows = windows.iloc[touched[touched >= 0]].reset_index(drop=True)
    whole = overview.summary(trace)
    tables = {"figures": _figures(trace, windows, whole)}
    if trace.recorded("kernels"):
        names = trace.table("kernels", ["name"])["name"]
        tables["kernels"] = _launched(trace, windows, "kernels", names)
        tables["gaps"] = _gaps(trace, windows, match)
    if trace.recorded("ranges"):
        instances = ranges.instances(trace)
        names = instances["name"].map({name: plain_range(str(name)) for name in instances["name"].cat.categories})
        step = _begun_in(windows, instances["start_ns"])
        tables["ranges CPU"] = _summed(names, instances["total_ns"], step, len(windows))
        if trace.recorded("kernels") and trace.recorded("calls"):
            tables["ranges GPU"] = _summed(names, instances["gpu_ns"], step, len(windows))
    return Samples(trace, whole, windows, tables)


def _figures(trace: Trace, windows: pd.DataFrame, whole: dict[str, Any]) -> pd.DataFrame:
    """Times of the whole: wall, busy and idle, and the GPU's work by kind."""
    process = int(windows["process"].iloc[0]) if len(windows) else 0
    times = steps.divided(trace, windows, process)
    totals = pd.Series({name: whole[str(name)] for name in times}, dtype="float64")
    if len(windows):
        totals = totals.fillna({"wall_ns": times["wall_ns"].sum()})
        if trace is not trace.whole and steps.windows(trace).empty:
            totals["idle_ns"] = np.nan  # other work, which the filter left out, may have run
    parts = [pd.DataFrame({"count": 0, "total": totals}).join(times.astype("float64").T).dropna()]
    for table, name in _WORK.items():
        if trace.recorded(table):
            everything = pd.Series(name, index=range(trace.size(table)), dtype="category")
            parts.append(_launched(trace, windows, table, everything).reindex([name], fill_value=0))
    return pd.concat(parts)


def _launched(trace: Trace, windows: pd.DataFrame, table: str, names: pd.Series) -> pd.DataFrame:
    """Add up the time of a GPU table by name."""
    duration = trace.table(table, ["duration_ns"])["duration_ns"]
    return _summed(names, duration, steps.launched_in(trace, table, windows), len(windows))


def _gaps(trace: Trace, windows: pd.DataFrame, match: str | None) -> pd.DataFrame:
    """Add up idle time by cause; in steps also what lies before the first operation and after the last."""
    causes = gaps.causes(trace)
    groups = (causes["end_ns"] - causes["start_ns"]).groupby(causes["cause"], observed=False)
    table = pd.DataFrame({"count": groups.size(), "total": groups.sum()})
    table.index = table.index.astype(str)
    table = table.reindex(list(gaps.CAUSES), columns=["count", "total", *range(len(windows))], fill_value=0)
    idle = gaps.in_window(trace) if match is None else causes
    for (cause, _), gap in idle.groupby(["cause", "device"], observed=True):
        covered = intervals.Coverage(gap["start_ns"], gap["end_ns"])
        table.loc[str(cause), list(range(len(windows)))] += covered.of(windows["begin_ns"], windows["end_ns"])
    return table


def _begun_in(windows: pd.DataFrame, start_ns: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Number of the step in which something on the CPU began; -1 for none."""
    return steps.number(windows.assign(end_ns=windows["cpu_end_ns"]), start_ns)


def _summed(names: pd.Series, values: pd.Series, step: npt.ArrayLike, count: int) -> pd.DataFrame:
    """Add up values by name: their number, their total, and the sum in each step (-1: outside)."""
    groups = values.groupby(names, observed=True)
    table = pd.DataFrame({"count": groups.size(), "total": groups.sum()})
    number = np.asarray(step, np.intp)
    chosen = number >= 0
    inside = values[chosen].groupby([names[chosen], number[chosen]], observed=True).sum().unstack()
    table = table.join(inside.reindex(columns=range(count))).fillna(0)
    table.index = table.index.astype(str)
    return table
