"""Has it become slower? Runs of a program against a baseline of earlier ones.

A change counts when it exceeds the tolerance *and* noise, by the rule that ``diff`` uses too
(:func:`nsightkit.analysis.core.noise.judge`): the spread of the steps of a run, and the spread of runs where a side has
several. With one run per side the latter is unknown, and only the tolerance covers it.

The intervals of all metrics hold together at 99%: each has its share of the one per cent. That is why there are few.
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
from nsightkit.safe import Json

__all__ = ["CONFIDENCE", "TOLERANCE", "compare"]

#: Confidence that no unchanged metric of a run is called changed.
CONFIDENCE = 0.99
#: How much slower is too slow.
TOLERANCE = 0.05
#: Single launches under Nsight Compute differ by some percent; beyond this they count as different.
_SINGLE_LAUNCH = 0.10
#: Lists of the answer, by the status of their metrics.
_LISTS = {
    "regressions": "regression",
    "improvements": "improvement",
    "missing": "missing",
    "undecided": "inconclusive",
}
#: Below this, a time or an amount is nothing, and has no ratio.
_NOTHING = 1e-9

#: Of each run.
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
        ``passed``; ``decided``, False where a metric seems worse within noise; ``tolerance``, ``runs``,
        ``baseline_runs``, ``notes``; lists of metrics:

        ``regressions``, ``improvements``
            Those that changed.
        ``missing``
            Those that one of the runs lacks: a failure.
        ``undecided``
            Those that are worse by more than the tolerance, but within noise.
        ``gates``
            All that were measured.
        ``new``
            Names that the baseline lacks.

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
    checked = {name: kept for name, kept in baseline.metrics.items() if kept.gate}
    if not checked:
        raise UsageError("no metric of the baseline can fail: set gate to true for one, or replace it with --update")
    times = [unit_of(name) for name in checked].count("ns")
    confidence = 1 - (1 - CONFIDENCE) / max(times, 1)
    rows = []
    for name, kept in checked.items():
        measured = [run.metrics[name] for run in runs if name in run.metrics]
        row: Json = dict.fromkeys(("after", "ratio", "low", "high", "limit"))
        row |= {"metric": name, "unit": unit_of(name), "status": "missing", "before": _median(ordinary(kept.runs))}
        row["tolerance"] = tolerance if kept.tolerance is None else kept.tolerance
        row["samples"] = [sum(map(len, kept.runs)), sum(map(len, measured))]
        rows.append(row)
        if len(measured) == len(runs):
            row["after"] = _median(ordinary(measured))
            change = _change(kept.runs, measured, row["unit"], confidence)
            if baseline.of == "ncu" and math.isinf(change.noise):
                # One launch is enough.
                change = noise.Change(change.value, noise=0)
                row["tolerance"] = max(row["tolerance"], _SINGLE_LAUNCH)
            _judge(row, change)
    lists = {}
    for key, status in _LISTS.items():
        lists[key] = [row for row in rows if row["status"] == status]
    notes = []
    if baseline.of != "ncu" and max(baseline.runs, len(runs)) == 1:
        notes.append(f"{noise.ONE_RUN} Add runs to the baseline with --add.")
    return {
        "passed": not (lists["regressions"] or lists["missing"] or lists["undecided"]),
        "decided": not lists["undecided"],
        "tolerance": tolerance,
        "runs": len(runs),
        "baseline_runs": baseline.runs,
        **lists,
        "gates": [row for row in rows if row["status"] != "missing"],
        "new": sorted(runs[0].metrics.keys() - baseline.metrics.keys()),
        "notes": notes,
    }


def _change(before: _Runs, after: _Runs, unit: str, confidence: float) -> noise.Change:
    """Tell the change of a metric from noise."""
    if unit == "ns":
        return judge(before, after, confidence)
    # Bytes and counts are the same in every run: a change lies beyond everything that the baseline saw.
    seen = np.concatenate(before)
    was = _median(before)
    value = _median(after) - was
    return noise.Change(value, noise=float(seen.max() - was if value > 0 else was - seen.min()))


def _judge(row: Json, change: noise.Change) -> None:
    """Judge a change by the tolerance and by noise."""
    was = row["before"]
    highest = 1 + row["tolerance"]
    is_worse = row["after"] > 0
    is_better = False
    if was >= _NOTHING:
        ratio = 1 + change.value / was
        is_worse = ratio > highest
        is_better = ratio < 1 / highest
        limit = max(highest, 1 + change.noise / was)
        ratios = {"ratio": ratio, "low": 1 + change.low / was, "high": 1 + change.high / was, "limit": limit}
        row |= {key: value for key, value in ratios.items() if math.isfinite(value)}
    is_sure = abs(change.value) > change.noise
    row["status"] = "ok"
    if is_worse and is_sure:
        row["status"] = "regression"
    elif is_worse and row["unit"] == "ns":
        row["status"] = "inconclusive"
    elif is_better and is_sure:
        row["status"] = "improvement"


def _median(runs: _Runs) -> float:
    """The median of all samples; whole numbers as such."""
    median = float(np.median(np.concatenate(runs)))
    if median >= 1:
        return round(median)
    return median
