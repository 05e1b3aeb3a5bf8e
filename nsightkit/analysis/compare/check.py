"""Has it become slower? Runs of a program against a baseline of earlier ones.

A change counts when it exceeds the tolerance *and* noise (:func:`nsightkit.analysis.core.noise.judge`, which ``diff``
uses too): the spread of the steps inside the runs, and what runs differ by where a side has several. With one run on
each side that is not known, and the tolerance stands for it alone.

The intervals of all metrics that can fail hold together with 99 %: each has its share of the one per cent. That is why
few metrics gate, and the others only inform.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nsightkit.analysis.compare.baseline import Baseline, Kept
from nsightkit.analysis.compare.runs import CONDITIONS, DECISIVE, EXACT, SMALLEST, Metric, Run
from nsightkit.analysis.core import noise
from nsightkit.analysis.timeline.steps import outliers
from nsightkit.errors import UsageError

__all__ = ["CONFIDENCE", "TOLERANCE", "compare"]

#: That nothing is called changed in a run in which nothing changed.
CONFIDENCE = 0.99
#: How much slower is too slow.
TOLERANCE = 0.05

#: Two kernel times of Nsight Compute with one launch each differ by some percent; beyond this they count as different.
_SINGLE_LAUNCH = 0.10

#: Of each run.
Samples = Sequence[Sequence[float] | npt.NDArray[np.float64]]


def compare(
    baseline: Baseline, runs: Sequence[Run], tolerance: float = TOLERANCE, *, other_conditions: bool = False
) -> dict[str, Any]:
    """Compare runs of a program with a baseline.

    Parameters
    ----------
    baseline : Baseline
    runs : sequence of Run
        Several are taken together: what they share is the change.
    tolerance : float
        0.05 is 5 %; a metric of the baseline may have its own.
    other_conditions : bool
        Compare also where GPU, tool or the chosen part of the trace differ.

    Returns
    -------
    dict
        ``passed``; ``decided``, False where something that gates seems worse and noise does not let one say so;
        ``tolerance``, ``confidence``, ``runs``, ``baseline_runs``; lists of metrics:

        ``regressions``, ``improvements``
            Those that gate and changed.
        ``missing``
            Those that gate and were not measured, in one of the runs at least: a failure, no zero.
        ``undecided``
            Those that gate and are worse by more than the tolerance, and by less than noise explains.
        ``gates``
            All that gate and were measured.
        ``informing``
            Those that do not gate and changed, the largest times first, and then those that may have.
        ``new``
            Those that the baseline lacks.

        Each has ``metric, unit, direction, gate, status`` (``ok``, ``regression``, ``improvement``, ``changed`` where
        neither direction is better, ``inconclusive``, ``missing``), ``before`` and ``after`` (medians), ``ratio`` with
        its interval ``low``, ``high``, ``limit`` (the ratio beyond which it would count), ``tolerance``, ``samples``
        and ``runs`` (of both sides) and ``reason``; None is not known. Also ``conditions`` that differ (``name,
        baseline, now, decisive``) and ``notes``, a sentence each.

    Raises
    ------
    UsageError
        The runs are of another kind than the baseline, or of conditions that cannot be compared; nothing in it gates;
        the tolerance is below 0.
    """
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"--tolerance: {tolerance:g} is not a share from 0 on; 0.05 is 5 %")
    gating = [kept for kept in baseline.metrics.values() if kept.gate]
    if not gating:
        raise UsageError("no metric of the baseline can fail: set gate to true for one, or write it anew with --update")
    conditions = _conditions(baseline, runs, other_conditions)
    noisy = sum(kept.unit not in EXACT for kept in gating)
    confidence = 1 - (1 - CONFIDENCE) / max(noisy, 1)
    rows = [_row(name, baseline, runs, tolerance, confidence) for name in baseline.metrics]
    gates = [row for row in rows if row["gate"] and row["status"] != "missing"]
    missing = [row for row in rows if row["gate"] and row["status"] == "missing"]
    regressions = [row for row in gates if row["status"] in ("regression", "changed")]
    undecided = [row for row in gates if row["status"] == "inconclusive"]
    return {
        "passed": not (regressions or missing or undecided),
        "decided": not undecided,
        "tolerance": tolerance,
        "confidence": CONFIDENCE,
        "runs": len(runs),
        "baseline_runs": baseline.runs,
        "regressions": regressions,
        "improvements": [row for row in gates if row["status"] == "improvement"],
        "missing": missing,
        "undecided": undecided,
        "gates": gates,
        "informing": _informing(rows),
        "new": _new(baseline, runs),
        "conditions": conditions,
        "notes": list(_notes(baseline, runs, gates)),
    }


def _conditions(baseline: Baseline, runs: Sequence[Run], other_conditions: bool) -> list[dict[str, Any]]:
    """List the conditions that differ, and refuse those that cannot be compared."""
    if not runs:
        raise UsageError("no runs to compare")
    rows: list[dict[str, Any]] = []
    for run in runs:
        if run.of != baseline.of:
            raise UsageError(f"the baseline is of {baseline.of}, and this is a run of {run.of}; they share no metrics")
        for name in CONDITIONS:
            was, now = baseline.conditions.get(name), run.conditions.get(name)
            # What one side does not name may be the same. A selection that is not named is the whole trace.
            unknown = name != "selection" and None in (was, now)
            row = {"name": name, "baseline": was, "now": now, "decisive": name in DECISIVE and not unknown}
            if was != now and name != "command" and row not in rows:
                rows.append(row)
    differing = [
        f"{row['name']}: {row['baseline'] or 'none'}, now {row['now'] or 'none'}" for row in rows if row["decisive"]
    ]
    if differing and not other_conditions:
        raise UsageError(
            f"the baseline holds for other conditions ({'; '.join(differing)}); give --allow-other-conditions to "
            "compare all the same, or --update to replace it"
        )
    return rows


def _informing(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What changed and does not gate: times before the rest, and the largest first."""
    informing = []
    for row in rows:
        # What noise may explain is not information, unless there is nothing to judge it by.
        known = row["status"] != "inconclusive" or row["limit"] is None
        if not row["gate"] and row["status"] != "ok" and known:
            informing.append(row)
    informing.sort(key=lambda row: -abs((row["after"] or 0.0) - row["before"]))
    return sorted(informing, key=lambda row: (row["unit"] != "ns", row["status"] == "inconclusive"))


def _new(baseline: Baseline, runs: Sequence[Run]) -> list[dict[str, Any]]:
    new: dict[str, Metric] = {}
    for run in runs:
        new |= {name: metric for name, metric in run.metrics.items() if metric.kept}
    rows = []
    for name in sorted(new.keys() - baseline.metrics.keys()):
        metric = new[name]
        after = _shown(_median([metric.samples]), metric.unit)
        rows.append({"metric": name, "unit": metric.unit, "gate": metric.gate, "after": after})
    return rows


# ---------------------------------------------------------------- one metric


def _row(name: str, baseline: Baseline, runs: Sequence[Run], tolerance: float, confidence: float) -> dict[str, Any]:
    kept = baseline.metrics[name]
    metrics = [run.metrics[name] for run in runs if name in run.metrics]
    after = [metric.samples for metric in metrics]
    row: dict[str, Any] = {
        "metric": name,
        "unit": kept.unit,
        "direction": kept.direction,
        "gate": kept.gate,
        "status": "missing",
        "before": _shown(_median(kept.runs), kept.unit),
        "after": None,
        "ratio": None,
        "low": None,
        "high": None,
        "limit": None,
        "tolerance": tolerance if kept.tolerance is None else kept.tolerance,
        "samples": [sum(map(len, kept.runs)), sum(map(len, after))],
        "runs": [len(kept.runs), len(after)],
        "reason": None,
    }
    lacking = [run for run in runs if name not in run.metrics]
    if lacking and (kept.gate or not metrics):
        row["reason"] = _why_absent(lacking[0], name)
        if len(runs) > 1:
            row["reason"] += f", in {len(lacking)} of {len(runs)} runs"
    elif any(metric.unit != kept.unit for metric in metrics):
        row["reason"] = f"the baseline has it in {kept.unit}"
    else:
        row["after"] = _shown(_median(after), kept.unit)
        if kept.unit in EXACT:
            row |= _judge_exact(kept, after, row["tolerance"])
        else:
            row |= _judge_noisy(kept, after, row["tolerance"], confidence, one_launch=baseline.of == "ncu")
    return row


def _why_absent(run: Run, name: str) -> str:
    for start, why in run.absent.items():
        if name.startswith(start):
            return why
    return "not measured"


def _judge_exact(kept: Kept, after: Samples, tolerance: float) -> dict[str, Any]:
    """Judge what is the same in each run: a change lies outside of all that the baseline ever saw."""
    was, now = _median(kept.runs), _median(after)
    seen = np.concatenate(kept.runs)
    up = now > max(was * (1 + tolerance), seen.max())
    down = now < min(was / (1 + tolerance), seen.min())
    limit = 1 / (1 + tolerance) if kept.direction == "higher" else 1 + tolerance
    return {"status": _status(kept.direction, up, down, sure=True), "ratio": now / was if was else None, "limit": limit}


def _judge_noisy(
    kept: Kept, after: Samples, tolerance: float, confidence: float, *, one_launch: bool
) -> dict[str, Any]:
    """Judge what varies: a change exceeds the tolerance, and noise."""
    was = _median(kept.runs)
    first, second = _ordinary(kept.runs), _ordinary(after)
    whole = [*kept.runs, *after]
    left_out = sum(map(len, first + second)) < sum(map(len, whole))
    change = noise.judge(first, second, confidence, left_out=left_out)
    sure = change.word == noise.CHANGED
    if was < SMALLEST:  # no ratio to nothing: what is there now is more
        return {"status": _status(kept.direction, _median(after) > 0, False, sure=sure)}
    ratio = 1 + change.value / was
    least, reason = 0.0, None
    if change.noise is not None:
        least = change.noise / was
    elif one_launch:
        # One launch is what most reports have of a kernel; its time is not a step's, which waits for who knows what.
        sure, tolerance = True, max(tolerance, _SINGLE_LAUNCH)
        reason = f"few launches: what differs by less than {100 * tolerance:.0f} % counts as the same"
    else:
        reason = "too few samples"
    limit = max(1 + tolerance, 1 + least)
    if kept.direction == "higher":
        limit = max(min(1 / (1 + tolerance), 1 - least), 0.0)
    return {
        "status": _status(kept.direction, ratio > 1 + tolerance, ratio < 1 / (1 + tolerance), sure=sure),
        "ratio": ratio,
        "low": None if change.low is None else 1 + change.low / was,
        "high": None if change.high is None else 1 + change.high / was,
        "limit": None if reason and not one_launch else limit,
        "tolerance": tolerance,
        "reason": reason,
    }


def _ordinary(runs: Samples) -> list[npt.NDArray[np.float64]]:
    """Leave out the steps of each run that stand out: they are not what the run is like."""
    ordinary = []
    for run in runs:
        samples = np.asarray(run, dtype=np.float64)
        ordinary.append(samples[~outliers(samples)])
    return ordinary


def _status(direction: str, up: bool, down: bool, *, sure: bool) -> str:
    if not up and not down:
        return "ok"
    worse = direction == "neither" or up == (direction == "lower")
    if not sure:
        return "inconclusive" if worse else "ok"
    if direction == "neither":
        return "changed"
    return "regression" if worse else "improvement"


def _median(runs: Samples) -> float:
    return float(np.median(np.concatenate(runs)))


def _shown(value: float, unit: str) -> float:
    """Give times in whole nanoseconds, and other whole numbers as such."""
    return round(value) if unit == "ns" or value == int(value) else value


# ---------------------------------------------------------------- what else to say


def _notes(baseline: Baseline, runs: Sequence[Run], gates: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    timed = [row for row in gates if row["unit"] not in EXACT]
    for reason in dict.fromkeys(row["reason"] for row in timed if row["reason"]):
        names = [row["metric"] for row in timed if row["reason"] == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more}: {reason}"
    for row in gates:
        if row["metric"] == "trace/kernel_count" and row["status"] != "ok":
            yield (
                f"The traces have no steps and hold different amounts of work, {row['before']:,} and {row['after']:,} "
                "kernels: their times do not compare. --match names the ranges that are steps."
            )
    if timed and baseline.of != "ncu" and max(baseline.runs, len(runs)) == 1:
        yield f"{noise.ONE_RUN} The tolerance alone stands for them; more runs in the baseline (--add) would tell."
    for row in timed:
        seen = max(row["limit"], 1 / row["limit"]) if row["limit"] else 1.0
        if seen - 1 > 2 * row["tolerance"]:
            yield f"{row['metric']}: what changes by less than {100 * (seen - 1):.0f} % is within noise here"
