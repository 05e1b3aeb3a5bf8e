"""Has it become slower? Runs of a program against a baseline of earlier ones.

A change counts when it exceeds the tolerance *and* what noise explains, by the rule of
:mod:`nsightkit.analysis.core.noise` that ``diff`` shares: the spread of the steps inside the runs, and what runs differ
by where a side has several. With one run on each side that is not known, and the tolerance stands for it alone.

The intervals of all metrics that can fail hold together with 99 %: each has its share of the one per cent. That is why
few metrics gate, and the others only inform.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nsightkit.analysis.compare.baseline import Baseline, Kept
from nsightkit.analysis.compare.runs import CONDITIONS, DECISIVE, EXACT, Run, Samples
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
#: With so few samples that they have no interval, runs in place of steps must be at least so many beyond one a side.
_ENOUGH_RUNS = 2
#: Beyond what `exp` takes.
_LARGEST_LOG = 700.0


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
        neither direction is better, ``undecided``, ``missing``), ``before`` and ``after`` (medians), ``ratio`` with its
        interval ``low``, ``high``, ``limit`` (the ratio beyond which it would count), ``tolerance``, ``samples`` and
        ``runs`` (of both sides) and ``reason``; None is not known. Also ``conditions`` that differ (``name, baseline,
        now, decisive``) and ``notes``, a sentence each.

    Raises
    ------
    UsageError
        The runs are of another kind than the baseline, or of conditions that cannot be compared; nothing in it gates;
        the tolerance is below 0.
    """
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"--tolerance: {tolerance:g} is not a share from 0 on; 0.05 is 5 %")
    if not any(kept.gate for kept in baseline.metrics.values()):
        raise UsageError("no metric of the baseline can fail: set gate to true for one, or write it anew with --update")
    conditions = _differing_conditions(baseline, runs)
    differing = [row for row in conditions if row["decisive"]]
    if differing and not other_conditions:
        said = "; ".join(f"{row['name']}: {row['baseline'] or 'none'}, now {row['now'] or 'none'}" for row in differing)
        raise UsageError(
            f"the baseline holds for other conditions ({said}); give --allow-other-conditions to compare all the "
            "same, or --update to replace it"
        )
    noisy = sum(kept.gate and kept.unit not in EXACT for kept in baseline.metrics.values())
    confidence = 1 - (1 - CONFIDENCE) / max(noisy, 1)
    rows = [_row(name, kept, baseline.of, runs, tolerance, confidence) for name, kept in baseline.metrics.items()]

    found = {
        name: [row for row in rows if row["gate"] and row["status"] in statuses] for name, statuses in _GATING.items()
    }
    # What is undecided is not information, unless there was nothing of it before, or no second sample to judge it by.
    informing = [
        row
        for row in rows
        if not row["gate"] and row["status"] != "ok" and (row["status"] != "undecided" or row["limit"] is None)
    ]
    new = {name: metric for run in runs for name, metric in run.metrics.items() if metric.kept}
    return {
        "passed": not (found["regressions"] or found["missing"] or found["undecided"]),
        "decided": not found["undecided"],
        "tolerance": tolerance,
        "confidence": CONFIDENCE,
        "runs": len(runs),
        "baseline_runs": baseline.runs,
        **found,
        # Times before the rest, and the largest first.
        "informing": sorted(
            informing,
            key=lambda row: (
                row["unit"] != "ns",
                row["status"] == "undecided",
                -abs((row["after"] or 0.0) - row["before"]),
            ),
        ),
        "new": [
            {"metric": name, "unit": of.unit, "gate": of.gate, "after": _shown(_median([of.samples]), of.unit)}
            for name, of in sorted(new.items())
            if name not in baseline.metrics
        ],
        "conditions": conditions,
        "notes": list(_notes(baseline, runs, found["gates"])),
    }


#: Lists of metrics that gate, by what became of them.
_GATING = {
    "regressions": ("regression", "changed"),
    "improvements": ("improvement",),
    "missing": ("missing",),
    "undecided": ("undecided",),
    "gates": ("ok", "regression", "changed", "improvement", "undecided"),
}


def _differing_conditions(baseline: Baseline, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """List the conditions that differ; those of all runs."""
    if not runs:
        raise UsageError("no runs to compare")
    if other := [run.of for run in runs if run.of != baseline.of]:
        raise UsageError(f"the baseline is of {baseline.of}, and this is a run of {other[0]}; they share no metrics")
    both = dict.fromkeys((name, baseline.conditions[name], run.conditions[name]) for run in runs for name in CONDITIONS)
    return [
        # What one side does not say may be the same. A selection that is not said is the whole trace.
        {
            "name": name,
            "baseline": was,
            "now": now,
            "decisive": name in DECISIVE and (name == "selection" or None not in (was, now)),
        }
        for name, was, now in both
        if was != now and name != "command"
    ]


# ---------------------------------------------------------------- one metric


def _row(name: str, kept: Kept, of: str, runs: Sequence[Run], tolerance: float, confidence: float) -> dict[str, Any]:
    lacking = [run for run in runs if name not in run.metrics]
    metrics = [run.metrics[name] for run in runs if name in run.metrics]
    row: dict[str, Any] = {
        "metric": name,
        "unit": kept.unit,
        "direction": kept.direction,
        "gate": kept.gate,
        "status": "missing",
        "before": _shown(_median(kept.runs), kept.unit),
        **dict.fromkeys(("after", "ratio", "low", "high", "limit")),
        "tolerance": tolerance if kept.tolerance is None else kept.tolerance,
        "samples": [sum(map(len, kept.runs)), sum(len(metric.samples) for metric in metrics)],
        "runs": [len(kept.runs), len(metrics)],
        "reason": None,
    }
    if lacking and (kept.gate or not metrics):
        why = next((why for start, why in lacking[0].absent.items() if name.startswith(start)), "not measured")
        return row | {"reason": why if len(runs) == 1 else f"{why}, in {len(lacking)} of {len(runs)} runs"}
    if any(metric.unit != kept.unit for metric in metrics):
        return row | {"reason": f"the baseline has it in {kept.unit}"}
    after = tuple(metric.samples for metric in metrics)
    row |= {"status": "ok", "after": _shown(_median(after), kept.unit)}
    if kept.unit in EXACT:
        return row | _judge_exact(kept, after, row["tolerance"])
    return row | _judge_noisy(kept, after, of, row["tolerance"], confidence)


def _judge_exact(kept: Kept, after: Sequence[Samples], tolerance: float) -> dict[str, Any]:
    """Judge what is the same in each run: a change lies outside of all that the baseline ever saw."""
    was, now, most, seen = _median(kept.runs), _median(after), 1 + tolerance, np.concatenate(kept.runs)
    status = _status(kept.direction, now > max(was * most, seen.max()), now < min(was / most, seen.min()))
    limit = 1 / most if kept.direction == "higher" else most
    return {"status": status, "ratio": now / was if was else None, "limit": limit}


def _judge_noisy(kept: Kept, after: Sequence[Samples], of: str, tolerance: float, confidence: float) -> dict[str, Any]:
    """Judge what varies: a change exceeds the tolerance, and noise."""
    if not (was := _median(kept.runs)):  # no ratio to nothing: what is there now is more
        before, there = np.concatenate(kept.runs), np.concatenate(after)
        sure = noise.shift(before, there, confidence).excludes(0) or noise.apart(before, there)
        return {"status": _status(kept.direction, _median(after) > 0, False, sure=sure)}
    value, low, high, above, below = _change(kept.runs, after, was, confidence)
    reason = None
    if math.isinf(above) and of == "ncu":
        # One launch is what most reports have of a kernel; its time is not a step's, which waits for who knows what.
        above, below, tolerance = 1.0, 1.0, max(tolerance, _SINGLE_LAUNCH)
        reason = f"few launches: what differs by less than {100 * tolerance:.0f} % counts as the same"
    elif math.isinf(above):
        # The least number of which the most extreme order is rare enough to be beyond the confidence.
        least = next(n for n in range(2, 100) if math.comb(2 * n, n) * (1 - confidence) / 2 >= 1)
        reason = f"too few samples: it takes {least} on each side"
    up, down = value > 1 + tolerance, value < 1 / (1 + tolerance)
    limits = max(1 + tolerance, above), min(1 / (1 + tolerance), below)
    return {
        "status": _status(kept.direction, up, down, sure=value > above if up else value < below),
        "ratio": value,
        "low": low,
        "high": high,
        "limit": None if math.isinf(above) else limits[kept.direction == "higher"],
        "tolerance": tolerance,
        "reason": reason,
    }


def _change(before: Sequence[Samples], after: Sequence[Samples], was: float, confidence: float) -> tuple[Any, ...]:
    """How many times the baseline a metric is now, as ratios.

    The change; the ends of its interval, None for too few samples; and what would lie just outside of the noise, above
    and below 1: infinite, and 0, where nothing shows it.
    """
    positive = all(samples.min() > 0 for samples in (*before, *after))

    def scaled(values: Samples | Sequence[float]) -> Samples:
        # Logarithms make a ratio a difference. A sample of 0 has none: then shares of the baseline's median.
        return np.log(values) if positive else np.asarray(values) / was

    steps = noise.shift(scaled(np.concatenate(before)), scaled(np.concatenate(after)), confidence)
    middles = [[float(np.median(samples)) for samples in side] for side in (before, after)]
    between = noise.between_runs(scaled(middles[0]), scaled(middles[1]), confidence)
    found = noise.widened(steps, between)
    if found.low is None and between is not None and len(before) + len(after) - 2 >= _ENOUGH_RUNS:
        found = dataclasses.replace(found, low=found.value - between, high=found.value + between)
    # Beyond doubt inside the runs, and beyond what they differ by; steps that stand out are not what a run is like.
    clear = [scaled(np.concatenate([samples[~outliers(samples)] for samples in side])) for side in (before, after)]
    lacking, reach = noise.missing_distance(*clear), between or 0.0
    up, down = max(found.value + lacking[0], reach), max(lacking[1] - found.value, reach)
    if found.low is not None and found.high is not None:
        up, down = min(up, found.value - found.low), min(down, found.high - found.value)
    changes = (found.value, found.low, found.high, up, -down)
    return tuple(None if change is None else _ratio(change, positive) for change in changes)


def _ratio(change: float, logarithm: bool) -> float:
    """Write a change as a ratio, which may be infinite."""
    if math.isinf(change):
        return math.inf if change > 0 else 0.0
    return math.exp(min(change, _LARGEST_LOG)) if logarithm else max(1 + change, 0.0)


def _status(direction: str, up: bool, down: bool, *, sure: bool = True) -> str:
    worse = direction == "neither" or up == (direction == "lower")
    if not (up or down) or not (sure or worse):
        return "ok"
    worst = "changed" if direction == "neither" else "regression"
    return (worst if worse else "improvement") if sure else "undecided"


def _median(runs: Sequence[Samples]) -> float:
    return float(np.median(np.concatenate(runs)))


def _shown(value: float, unit: str) -> float:
    """Give times in whole nanoseconds, and other whole numbers as such."""
    return round(value) if unit == "ns" or value == int(value) else value


# ---------------------------------------------------------------- what else to say


def _notes(baseline: Baseline, runs: Sequence[Run], measured: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    timed = [row for row in measured if row["unit"] not in EXACT]
    for reason in dict.fromkeys(row["reason"] for row in timed if row["reason"]):
        metric, *more = (row["metric"] for row in timed if row["reason"] == reason)
        yield f"{metric}{f' and {len(more)} more' if more else ''}: {reason}"
    for row in measured:
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
