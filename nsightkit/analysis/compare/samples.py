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
from nsightkit.trace.model import Trace

__all__ = ["Samples", "cut", "judge", "ordinary", "samples"]

Float = npt.NDArray[np.float64]


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


def judge(before: Sequence[npt.ArrayLike], after: Sequence[npt.ArrayLike], confidence: float = 0.99) -> noise.Change:
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


def cut(trace: Trace, match: str | None = None) -> Samples:
    """Cut a capture into its steps, with the table ``figures`` alone.

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
    is_part = windows.empty and trace is not trace.whole
    if is_part:
        # A filter such as --within drops the steps' own ranges: take the steps in which something selected began.
        windows = steps.windows(trace.whole, match)
        starts = [trace.table(table, ["start_ns"])["start_ns"] for table in ("ranges", "calls", "ops")]
        touched = np.unique(_begun_in(windows, np.concatenate(starts)))
        windows = windows.iloc[touched[touched >= 0]].reset_index(drop=True)
    capture = Samples(trace, overview.summary(trace), windows, {})
    figures = _figures(capture)
    if is_part:
        # Other work, which the filter left out, may have run in what looks idle.
        figures = figures.drop(index="idle_ns", errors="ignore")
    capture.tables["figures"] = figures
    return capture


def samples(trace: Trace, match: str | None = None) -> Samples:
    """Cut a capture into its steps, and add up what happened in each.

    Parameters
    ----------
    trace, match
        As for :func:`cut`.

    Returns
    -------
    Samples

    Raises
    ------
    UsageError
        As for :func:`cut`.
    """
    capture = cut(trace, match)
    if trace.recorded("kernels"):
        kernels = trace.table("kernels", ["name", "duration_ns"])
        step = steps.launched_in(trace, "kernels", capture.windows)
        capture.tables["kernels"] = _summed(capture, kernels["name"], kernels["duration_ns"], step)
        capture.tables["gaps"] = _gaps(capture, match)
    if trace.recorded("ranges"):
        instances = ranges.instances(trace)
        names = instances["name"].map({name: plain_range(str(name)) for name in instances["name"].cat.categories})
        step = _begun_in(capture.windows, instances["start_ns"])
        capture.tables["ranges CPU"] = _summed(capture, names, instances["total_ns"], step)
        if trace.recorded("kernels") and trace.recorded("calls"):
            capture.tables["ranges GPU"] = _summed(capture, names, instances["gpu_ns"], step)
    return capture


def _figures(capture: Samples) -> pd.DataFrame:
    """Times of the whole: wall, busy and idle."""
    windows = capture.windows
    process = int(windows["process"].max()) if len(windows) else 0
    times = steps.divided(capture.trace, windows, process)
    table = times.astype("float64").T
    table.insert(0, "count", 0)
    table.insert(1, "total", pd.Series(capture.overview).reindex(table.index).astype("float64"))
    if len(windows):
        table["total"] = table["total"].fillna({"wall_ns": times["wall_ns"].sum()})
    return table.dropna()


def _gaps(capture: Samples, match: str | None) -> pd.DataFrame:
    """Add up idle time by cause; in steps also what lies before the first operation and after the last."""
    windows = capture.windows
    causes = gaps.causes(capture.trace)
    groups = (causes["end_ns"] - causes["start_ns"]).groupby(causes["cause"].astype(str))
    table = pd.DataFrame({"count": groups.size(), "total": groups.sum()})
    table = table.reindex(list(gaps.CAUSES), columns=["count", "total", *range(len(windows))], fill_value=0)
    idle = gaps.in_window(capture.trace) if match is None else causes
    for (cause, _), gap in idle.groupby(["cause", "device"], observed=True):
        covered = intervals.Coverage(gap["start_ns"], gap["end_ns"])
        table.loc[str(cause), list(range(len(windows)))] += covered.of(windows["begin_ns"], windows["end_ns"])
    return table


def _begun_in(windows: pd.DataFrame, start_ns: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Number of the step in which something on the CPU began; -1 for none."""
    return steps.number(windows.assign(end_ns=windows["cpu_end_ns"]), start_ns)


def _summed(capture: Samples, names: pd.Series, values: pd.Series, step: npt.ArrayLike) -> pd.DataFrame:
    """Add up values by name: their number, their total, and the sum in each step (-1: outside)."""
    groups = values.groupby(names, observed=True)
    table = pd.DataFrame({"count": groups.size(), "total": groups.sum()})
    in_steps = values.groupby([names, np.asarray(step)], observed=True).sum().unstack()
    table = table.join(in_steps.reindex(columns=range(len(capture.windows)))).fillna(0)
    table.index = table.index.astype(str)
    return table
