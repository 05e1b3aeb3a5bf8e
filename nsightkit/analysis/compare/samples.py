"""The samples that ``diff`` and ``check`` judge: sums over a whole capture, and the part of each sum in each step.

Work launched in a step is that step's work, whenever the GPU got to it. Idle time is a step's where it lies between
the end of the step before and its own (:func:`nsightkit.analysis.timeline.steps.windows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nsightkit.analysis.compare.match import plain_range
from nsightkit.analysis.core import intervals, noise
from nsightkit.analysis.timeline import gaps, overview, ranges, steps
from nsightkit.text import Json
from nsightkit.trace.model import Trace

Float = NDArray[np.float64]
#: The columns of every table that hold sums over the whole capture; the columns after them are steps.
_SUMS = ["count", "total"]
#: The samples of one figure in one run, such as one per step.
Values = Sequence[float] | Float


class Samples(NamedTuple):
    """A capture, its steps, and the times of the whole.

    Parameters
    ----------
    trace : Trace
    match : str or None
        Regular expression of the steps' names, where one was given.
    overview : dict
        As :func:`nsightkit.analysis.timeline.overview.summary` gives it.
    windows : DataFrame
        The steps, as :func:`nsightkit.analysis.timeline.steps.windows` gives them; empty without steps.
    figures : DataFrame
        Times of the whole, one of :func:`tables`: ``wall_ns``, ``busy_ns`` and ``idle_ns``, as far as they are known.
    """

    trace: Trace
    match: str | None
    overview: Json
    windows: pd.DataFrame
    figures: pd.DataFrame


def ordinary(runs: Sequence[Values]) -> list[Float]:
    """Leave the outliers out of the samples of each run: only ordinary ones are compared, as a rare stall is not noise.

    Parameters
    ----------
    runs : sequence of sequence of float
        The samples of each run.

    Returns
    -------
    list of ndarray of float
        The remaining samples of each run.
    """
    kept = []
    for run in runs:
        values = np.asarray(run, np.float64)
        kept.append(values[~steps.outliers(values)])
    return kept


def judge(before: Sequence[Values], after: Sequence[Values], confidence: float) -> noise.Change:
    """Tell a change from noise by the samples that are not outliers (:func:`nsightkit.analysis.core.noise.judge`).

    Parameters
    ----------
    before, after : sequence of sequence of float
        The samples of each run.
    confidence : float
        Of the interval of the change, such as 0.95.
    """
    before_kept = ordinary(before)
    after_kept = ordinary(after)
    sample_count = sum(map(len, [*before, *after]))
    # Without its outliers a run looks steadier than it was: the rule asks for more.
    has_outliers = sum(map(len, before_kept + after_kept)) < sample_count
    return noise.judge(before_kept, after_kept, confidence, left_out=has_outliers)


def samples(trace: Trace, match: str | None = None) -> Samples:
    """Cut a capture into its steps.

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
    has_lost_steps = windows.empty and trace is not trace.whole
    if has_lost_steps:
        # A filter such as --within drops the steps' own ranges: take the steps in which something selected began.
        windows = steps.windows(trace.whole, match)
        starts = [trace.table(table, ["start_ns"])["start_ns"] for table in ("ranges", "calls", "ops")]
        step_numbers = np.setdiff1d(_begun_in(windows, np.concatenate(starts)), -1)  # distinct and in order
        windows = windows.iloc[step_numbers].reset_index(drop=True)
    totals = overview.summary(trace)
    figures = _figures(trace, windows, totals)
    if has_lost_steps:
        # Other work, which the filter left out, may have run in what looks idle.
        figures = figures.drop(index="idle_ns", errors="ignore")
    return Samples(trace, match, totals, windows, figures)


def tables(capture: Samples) -> dict[str, pd.DataFrame]:
    """Add up times by name over a capture, and over each of its steps.

    Parameters
    ----------
    capture : Samples

    Returns
    -------
    dict of str to DataFrame
        ``figures`` (times of the whole), ``kernels``, ``memops`` (by kind), ``gaps`` (by cause), ``ranges CPU``, and
        ``ranges GPU``, as far as they were recorded. Indexed by name, with ``count`` and ``total`` (ns) over the whole
        capture, and a column for each step with the sum in it, in ns.
    """
    trace = capture.trace
    windows = capture.windows
    result = {"figures": capture.figures}
    for table, column in (("kernels", "name"), ("memops", "kind")):
        if trace.recorded(table):
            events = trace.table(table, [column, "duration_ns"])
            step = steps.launched_in(trace, table, windows)
            result[table] = _summed_by_name(windows, events[column], events["duration_ns"], step)
    if trace.recorded("kernels"):
        result["gaps"] = _idle_by_cause(capture)
    if trace.recorded("ranges"):
        instances = ranges.instances(trace)
        names = instances["name"].map(plain_range)
        step = _begun_in(windows, instances["start_ns"])
        result["ranges CPU"] = _summed_by_name(windows, names, instances["total_ns"], step)
        if trace.recorded("kernels") and trace.recorded("calls"):
            result["ranges GPU"] = _summed_by_name(windows, names, instances["gpu_ns"], step)
    return result


def _figures(trace: Trace, windows: pd.DataFrame, totals: Json) -> pd.DataFrame:
    """Tabulate ``wall_ns``, ``busy_ns`` and ``idle_ns`` of the capture and of each step; drop what is unknown.

    `totals` is the capture's :func:`nsightkit.analysis.timeline.overview.summary`.
    """
    # All steps are of one process.
    times = steps.busy_and_idle(trace, windows, process=windows["process"].max())
    total = pd.Series(totals).reindex(times.columns).astype("float64")
    if len(windows):
        # Without GPU work only the steps have a wall time.
        total = total.fillna(times[["wall_ns"]].sum())
    # A table like those of kernels, ranges and gaps (`tables`); but nothing is counted here.
    table = pd.DataFrame({"count": 0, "total": total})
    return table.join(times.astype("float64").T).dropna()


def _idle_by_cause(capture: Samples) -> pd.DataFrame:
    """Make the table of idle time by cause (:func:`tables`). Its steps also count what lies before all gaps and after.

    A gap lies between two operations of a device; before its first one and after its last one a device is idle, too.
    """
    windows = capture.windows
    causes = gaps.causes(capture.trace)
    length = causes["end_ns"] - causes["start_ns"]
    table = length.groupby(causes["cause"].astype(str)).agg(["size", "sum"]).set_axis(_SUMS, axis=1)
    in_steps = pd.DataFrame(0, list(gaps.CAUSES), range(len(windows)))
    idle = causes
    if capture.match is None:
        # This is of the window of the usual steps. With `match` the steps are others, and only gaps are known.
        idle = gaps.in_window(capture.trace)
    for (cause, _), rows in idle.groupby(["cause", "device"], observed=True):
        covered = intervals.Coverage(rows["start_ns"], rows["end_ns"])
        in_steps.loc[str(cause)] += covered.of(windows["begin_ns"], windows["end_ns"])
    return table.reindex(in_steps.index, fill_value=0).join(in_steps)


def _begun_in(windows: pd.DataFrame, start_ns: pd.Series | Float) -> NDArray[np.intp]:
    """Find the step on whose part on the CPU each event began: the row of `windows`, -1 for none."""
    return steps.step_at(windows.assign(end_ns=windows["cpu_end_ns"]), start_ns)


def _summed_by_name(windows: pd.DataFrame, names: pd.Series, values: pd.Series, step: NDArray[np.intp]) -> pd.DataFrame:
    """Add up values by name: how many there are, their total, and the sum in each step.

    `step` is the number of each value's step, -1 for none.
    """
    table = values.groupby(names, observed=True).agg(["size", "sum"]).set_axis(_SUMS, axis=1)
    in_steps = values.groupby([names, step], observed=True).sum().unstack()
    # `reindex` drops -1, and adds the steps without values.
    table = table.join(in_steps.reindex(columns=range(len(windows)))).fillna(0)
    table.index = table.index.astype(str)
    return table
