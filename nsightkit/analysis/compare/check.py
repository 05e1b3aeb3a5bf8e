"""Whether a program has become slower: some runs of it against a baseline of earlier ones.

A change counts when it exceeds the tolerance *and* noise, by the rule that ``diff`` uses too
(:func:`nsightkit.analysis.core.noise.judge`): the spread of the steps of a run, and the spread of runs where a side has
several. With one run per side the latter is unknown, and only the tolerance covers it.

The intervals of all metrics hold together at 99%: each has its share of the one per cent, so the fewer metrics there
are, the smaller the changes that count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nsightkit.analysis.compare.baseline import Baseline, require_alike
from nsightkit.analysis.compare.runs import Run, unit_of
from nsightkit.analysis.compare.samples import judge, ordinary
from nsightkit.analysis.core import noise
from nsightkit.errors import UsageError
from nsightkit.text import Json

#: Confidence that no unchanged metric of a run is called changed.
CONFIDENCE = 0.99
#: A metric may grow by this share.
TOLERANCE = 0.05
#: The tolerance for a kernel that Nsight Compute measured in one launch: single launches differ by some percent.
_SINGLE_LAUNCH_TOLERANCE = 0.10
#: Lists of the answer, and the status of the metrics in each.
_STATUS_OF_LIST = {
    "regressions": "regression",
    "improvements": "improvement",
    "missing": "missing",
    "undecided": "inconclusive",
}
#: A smaller time or amount counts as 0, and has no ratio.
_LEAST_AMOUNT = 1e-9

#: The samples of one metric in each run.
_Runs = Sequence[Any]


def compare(baseline: Baseline, runs: Sequence[Run], tolerance: float = TOLERANCE) -> Json:
    """Compare runs of a program with a baseline.

    Parameters
    ----------
    baseline : Baseline
    runs : sequence of Run
        Several are judged together.
    tolerance : float
        0.05 is 5%; a metric of the baseline may have its own.

    Returns
    -------
    dict
        ``passed``, False where ``regressions``, ``missing`` or ``undecided`` holds a metric; ``decided``, False where
        ``undecided`` does; ``tolerance``, ``runs``, ``baseline_runs``, ``notes``; lists of metrics:

        ``regressions``, ``improvements``
            Those that changed.
        ``missing``
            Those that one of the runs lacks: a failure.
        ``undecided``
            Those that are worse by more than the tolerance, but within noise.
        ``gates``
            All that were measured.
        ``new``
            Names in the first run that the baseline lacks.

        Each has ``metric, unit, status`` (``ok``, ``regression``, ``improvement``, ``inconclusive``, ``missing``),
        ``before`` and ``after`` (medians, without outliers), ``ratio`` with its interval ``low`` to ``high``,
        ``limit`` (the ratio from which it would count), ``tolerance`` and ``samples`` (of both sides); None is unknown.

    Raises
    ------
    UsageError
        The runs are of another kind than the baseline or of other conditions, no metric can fail, or the tolerance is
        below 0.
    """
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"--tolerance: {tolerance:g} is not a share from 0 on; 0.05 is 5%")
    require_alike(baseline, runs)
    gated = {name: kept for name, kept in baseline.metrics.items() if kept.gate}
    if not gated:
        raise UsageError("no metric of the baseline can fail: set gate to true for one, or replace it with --update")
    # The times, which have intervals, share the chance of error.
    time_count = [unit_of(name) for name in gated].count("ns")
    confidence = 1 - (1 - CONFIDENCE) / max(time_count, 1)
    rows = []
    for name, kept in gated.items():
        measured = [run.metrics[name] for run in runs if name in run.metrics]
        row: Json = dict.fromkeys(("after", "ratio", "low", "high", "limit"))
        row |= {
            "metric": name,
            "unit": unit_of(name),
            "status": "missing",
            "before": _median(ordinary(kept.runs)),
            "tolerance": tolerance if kept.tolerance is None else kept.tolerance,
            "samples": [sum(map(len, kept.runs)), sum(map(len, measured))],
        }
        rows.append(row)
        if len(measured) == len(runs):
            row["after"] = _median(ordinary(measured))
            change = _change(kept.runs, measured, row["unit"], confidence)
            if baseline.of == "ncu" and math.isinf(change.noise):
                # Too few launches to tell a change from noise, which under Nsight Compute is small: the tolerance does.
                change = noise.Change(change.value, noise=0)
                row["tolerance"] = max(row["tolerance"], _SINGLE_LAUNCH_TOLERANCE)
            _set_status(row, change)
    lists = {}
    for key, status in _STATUS_OF_LIST.items():
        lists[key] = [row for row in rows if row["status"] == status]
    notes = []
    if baseline.of != "ncu" and max(baseline.run_count, len(runs)) == 1:
        notes.append(f"{noise.ONE_RUN} Add runs to the baseline with --add.")
    return {
        "passed": not (lists["regressions"] or lists["missing"] or lists["undecided"]),
        "decided": not lists["undecided"],
        "tolerance": tolerance,
        "runs": len(runs),
        "baseline_runs": baseline.run_count,
        **lists,
        "gates": [row for row in rows if row["status"] != "missing"],
        "new": sorted(runs[0].metrics.keys() - baseline.metrics.keys()),
        "notes": notes,
    }


def _change(before: _Runs, after: _Runs, unit: str, confidence: float) -> noise.Change:
    """Measure the change of a metric, in its unit, and how much of it noise explains."""
    if unit == "ns":
        return judge(before, after, confidence)
    # Bytes and counts are the same in every run: a change lies beyond all samples of the baseline, up or down.
    samples = np.concatenate(before)
    before_median = _median(before)
    value = _median(after) - before_median
    noise_amount = samples.max() - before_median if value > 0 else before_median - samples.min()
    return noise.Change(value, noise=float(noise_amount))


def _set_status(row: Json, change: noise.Change) -> None:
    """Judge a change by the tolerance and by noise: set the status and the ratios of a row of :func:`compare`."""
    before = row["before"]
    highest_ratio = 1 + row["tolerance"]
    # From 0 no ratio can be formed: any amount is worse.
    is_worse = row["after"] > 0
    is_better = False
    if before >= _LEAST_AMOUNT:
        ratio = 1 + change.value / before
        is_worse = ratio > highest_ratio
        is_better = ratio < 1 / highest_ratio
        limit = max(highest_ratio, 1 + change.noise / before)
        ratios = {"ratio": ratio, "low": 1 + change.low / before, "high": 1 + change.high / before, "limit": limit}
        # What is infinite, without an interval, stays None.
        row |= {key: value for key, value in ratios.items() if math.isfinite(value)}
    is_sure = abs(change.value) > change.noise
    # Only times are uncertain. Bytes and counts up to the baseline's highest were in order then, and are now.
    row["status"] = "ok"
    if is_worse and is_sure:
        row["status"] = "regression"
    elif is_worse and row["unit"] == "ns":
        row["status"] = "inconclusive"
    elif is_better and is_sure:
        row["status"] = "improvement"


def _median(runs: _Runs) -> float:
    """The median of all samples, rounded from 1 on: to whole ns, bytes or counts."""
    median = float(np.median(np.concatenate(runs)))
    if median >= 1:
        return round(median)
    return median
