"""Has it become slower? Runs of a program against a baseline of earlier ones.

A change counts when it exceeds the tolerance *and* noise, by the rule that ``diff`` uses too
(:func:`nsightkit.analysis.core.noise.judge`): the spread of the steps of a run, and the spread of runs where a side has
several. With one run per side the latter is unknown, and only the tolerance covers it.

The intervals of all metrics that can fail hold together at 99 %: each has its share of the one per cent. That is why
few metrics gate, and the others only inform.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nsightkit.analysis.compare.baseline import Baseline, Kept, require_alike
from nsightkit.analysis.compare.runs import Run
from nsightkit.analysis.compare.samples import judge
from nsightkit.analysis.core import noise
from nsightkit.errors import UsageError

__all__ = ["CONFIDENCE", "TOLERANCE", "compare"]

#: Confidence that no unchanged metric of a run is called changed.
CONFIDENCE = 0.99
#: How much slower is too slow.
TOLERANCE = 0.05
#: Single launches under Nsight Compute differ by some percent; beyond this they count as different.
_SINGLE_LAUNCH = 0.10
_STATUSES = ("ok", "regression", "improvement", "inconclusive", "missing")
#: Below this, a time or an amount is nothing, and has no ratio.
_NOTHING = 1e-9

#: Of each run.
_Runs = Sequence[Any]


def compare(baseline: Baseline, runs: Sequence[Run], tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Compare runs of a program with a baseline.

    Parameters
    ----------
    baseline : Baseline
    runs : sequence of Run
        Several are judged together.
    tolerance : float
        0.05 is 5 %; a metric of the baseline may have its own.

    Returns
    -------
    dict
        ``passed``; ``decided``, False where a metric that can fail seems worse within noise; ``tolerance``, ``runs``,
        ``baseline_runs``, ``notes``; lists of metrics:

        ``regressions``, ``improvements``
            Those that can fail and changed.
        ``missing``
            Those that can fail and that one of the runs lacks: a failure.
        ``undecided``
            Those that can fail and are worse by more than the tolerance, but within noise.
        ``gates``
            All that can fail and were measured.
        ``informing``
            Those that cannot fail and changed, the largest change first.
        ``new``
            Those that can fail and that the baseline lacks.

        Each has ``metric, unit, gate, status`` (``ok``, ``regression``, ``improvement``, ``inconclusive``,
        ``missing``), ``before`` and ``after`` (medians), ``ratio`` with its interval ``low`` to ``high``, ``limit``
        (the ratio from which it would count), ``tolerance`` and ``samples`` (of both sides); None is unknown.

    Raises
    ------
    UsageError
        The runs are of another kind than the baseline or of other conditions, no metric can fail, or the tolerance is
        below 0.
    """
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"--tolerance: {tolerance:g} is not a share from 0 on; 0.05 is 5 %")
    require_alike(baseline, runs)
    units = [kept.unit for kept in baseline.metrics.values() if kept.gate]
    if not units:
        raise UsageError("no metric of the baseline can fail: set gate to true for one, or replace it with --update")
    confidence = 1 - (1 - CONFIDENCE) / max(units.count("ns"), 1)
    by_status: dict[str, list[dict[str, Any]]] = {status: [] for status in _STATUSES}
    gates, informing = [], []
    for name, kept in baseline.metrics.items():
        measured = [run.metrics[name].samples for run in runs if name in run.metrics]
        row = _row(name, kept, measured, tolerance)
        if len(measured) < len(runs):
            row["status"] = "missing"
        else:
            change = _change(kept, measured, confidence)
            if change.noise is None and baseline.of == "ncu":
                # Most reports hold one launch of a kernel, and its time is not a step's, which waits for many things.
                change = noise.Change(change.value, noise=0.0)
                row["tolerance"] = max(row["tolerance"], _SINGLE_LAUNCH)
            row |= _judged(row, change)
        if kept.gate:
            by_status[row["status"]].append(row)
            if row["status"] != "missing":
                gates.append(row)
        elif row["status"] in ("regression", "improvement"):
            informing.append(row)
    informing.sort(key=lambda row: -abs(row["after"] - row["before"]))
    new = []
    for name, metric in runs[0].metrics.items():
        if metric.gate and name not in baseline.metrics:
            new.append({"metric": name})
    notes = []
    if baseline.of != "ncu" and max(baseline.runs, len(runs)) == 1:
        notes.append(f"{noise.ONE_RUN} Add runs to the baseline with --add.")
    failing = by_status["regression"] + by_status["missing"] + by_status["inconclusive"]
    return {
        "passed": not failing,
        "decided": not by_status["inconclusive"],
        "tolerance": tolerance,
        "runs": len(runs),
        "baseline_runs": baseline.runs,
        "regressions": by_status["regression"],
        "improvements": by_status["improvement"],
        "missing": by_status["missing"],
        "undecided": by_status["inconclusive"],
        "gates": gates,
        "informing": informing,
        "new": new,
        "notes": notes,
    }


def _row(name: str, kept: Kept, after: _Runs, tolerance: float) -> dict[str, Any]:
    """Facts about one metric."""
    row: dict[str, Any] = dict.fromkeys(("after", "ratio", "low", "high", "limit"))
    if after:
        row["after"] = _median(after)
    if kept.tolerance is not None:
        tolerance = kept.tolerance
    return row | {
        "metric": name,
        "unit": kept.unit,
        "gate": kept.gate,
        "status": "ok",
        "before": _median(kept.runs),
        "tolerance": tolerance,
        "samples": [sum(map(np.size, kept.runs)), sum(map(np.size, after))],
    }


def _change(kept: Kept, after: _Runs, confidence: float) -> noise.Change:
    """Tell the change of a metric from noise."""
    if kept.unit == "ns":
        return judge(kept.runs, after, confidence)
    # Bytes and counts are the same in every run: a change lies beyond everything that the baseline saw.
    seen = np.concatenate(kept.runs)
    was = _median(kept.runs)
    value = _median(after) - was
    reach = float(seen.max() - was if value > 0 else was - seen.min())
    return noise.Change(value, noise=reach)


def _judged(row: Mapping[str, Any], change: noise.Change) -> dict[str, Any]:
    """Judge a change by the tolerance and by noise."""
    judged: dict[str, Any] = {}
    was, tolerance = row["before"], row["tolerance"]
    is_worse, is_better = row["after"] > 0, False
    if was >= _NOTHING:
        ratio = 1 + change.value / was
        is_worse, is_better = ratio > 1 + tolerance, ratio < 1 / (1 + tolerance)
        judged["ratio"] = ratio
        if change.low is not None and change.high is not None:
            judged["low"], judged["high"] = 1 + change.low / was, 1 + change.high / was
        if change.noise is not None:
            judged["limit"] = 1 + max(tolerance, change.noise / was)
    if change.word == noise.CHANGED:
        if is_worse:
            judged["status"] = "regression"
        elif is_better:
            judged["status"] = "improvement"
    elif is_worse and row["unit"] == "ns":
        judged["status"] = "inconclusive"
    return judged


def _median(runs: _Runs) -> float:
    """The median of all samples; whole numbers as such."""
    median = float(np.median(np.concatenate(runs)))
    return round(median) if median >= 1 else median
