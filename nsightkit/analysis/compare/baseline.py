"""The baseline: what earlier runs measured, as a file that people read, edit and keep under version control.

``baseline.schema.json`` beside this file describes it. It holds no host, user, path or environment: only what
:mod:`nsightkit.analysis.compare.runs` takes from a run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

import nsightkit
from nsightkit.analysis.compare.runs import (
    CONDITIONS,
    DECISIVE,
    KINDS,
    LARGEST,
    SMALLEST,
    UNITS,
    Direction,
    Metric,
    Run,
    Samples,
    parsed,
    plain_text,
)
from nsightkit.analysis.core.noise import thinned
from nsightkit.errors import TraceError, UsageError
from nsightkit.safe import json_text
from nsightkit.trace.files import replacing

__all__ = ["FORMAT", "MOST_RUNS", "Baseline", "Kept", "make", "read", "write"]

#: Version of the file's layout.
FORMAT = 1
#: A baseline remembers so many runs; older ones go.
MOST_RUNS = 20

#: Samples of a run that are kept: enough for the median and its interval, few enough to read. Those of a metric that
#: only informs are fewer.
_KEPT, _KEPT_OF_OTHERS = 40, 9
_MOST_BYTES = 16 << 20
_MOST_METRICS = 10_000
_MOST_SAMPLES = 1000
_LONGEST_NAME = 240
_LARGEST_TOLERANCE = 100.0
#: Digits of what is not a whole number.
_DIGITS = 7
_REMEDY = "restore it from version control, or remove it and write it anew with --update"


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """A metric of a baseline.

    Parameters
    ----------
    runs : tuple of ndarray of float
        Samples of each run, the oldest first.
    unit : str
        See :class:`nsightkit.analysis.compare.runs.Metric`.
    direction : {"lower", "higher", "neither"}
    gate : bool
    tolerance : float, optional
        In place of the one that the command is given.
    """

    runs: tuple[Samples, ...]
    unit: str
    direction: Direction = "lower"
    gate: bool = False
    tolerance: float | None = None


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What earlier runs measured.

    Parameters
    ----------
    of : str
        What kind of runs.
    conditions : mapping of str to str or None
    metrics : mapping of str to Kept
    """

    of: str
    conditions: Mapping[str, str | None]
    metrics: Mapping[str, Kept]

    @property
    def runs(self) -> int:
        """How many runs it holds."""
        return max(len(kept.runs) for kept in self.metrics.values())


def make(
    runs: Sequence[Run], before: Baseline | None = None, *, add: bool = False, command: str | None = None
) -> Baseline:
    """Make a baseline of one or several runs.

    Parameters
    ----------
    runs : sequence of Run
        Of one kind and under the same conditions.
    before : Baseline, optional
        The one that is replaced: what people set in it (gates, directions, tolerances, the command) stays.
    add : bool
        Add the runs to those of `before`, of which the oldest go when there are more than :data:`MOST_RUNS`.
    command : str, optional
        How the runs were made.

    Returns
    -------
    Baseline

    Raises
    ------
    UsageError
        The runs are not alike, one lacks a metric that gates in another, or there is nothing to gate.
    """
    first = runs[0]
    old = before.metrics if before else {}
    if before and add:
        _require_alike(before.of, before.conditions, first)
    measured: dict[str, list[Metric]] = {}
    for run in runs:
        _require_alike(first.of, first.conditions, run)
        for name, metric in run.metrics.items():
            if metric.kept or name in old:
                measured.setdefault(name, []).append(metric)
    made = {name: kept for name, kept in old.items() if add and name not in measured}
    if gating := [name for name, kept in made.items() if kept.gate]:
        raise UsageError(f"{gating[0]} is in the baseline and not in these runs, so they cannot be added to it")
    for name, metrics in measured.items():
        metric, of = metrics[0], old.get(name)
        # What was kept in another unit was something else. Of the same thing, what people set in it stays.
        if of is None or of.unit != metric.unit:
            of = Kept((), metric.unit, metric.direction, metric.gate)
        if of.gate and len(metrics) < len(runs):
            raise UsageError(f"{name} was measured in {len(metrics)} of {len(runs)} runs; leave out the others")
        new = [np.sort(thinned(metric.samples, _KEPT if of.gate else _KEPT_OF_OTHERS)) for metric in metrics]
        made[name] = dataclasses.replace(of, runs=tuple([*(of.runs if add else ()), *new][-MOST_RUNS:]))
    if not any(kept.gate for kept in made.values()):
        raise UsageError("nothing in these runs can gate: they have no steps, and no work of a GPU")
    command = plain_text(command) or (before.conditions["command"] if before else None)
    return Baseline(first.of, {**first.conditions, "command": command}, dict(sorted(made.items())))


def _require_alike(of: str, conditions: Mapping[str, str | None], run: Run) -> None:
    if run.of != of:
        raise UsageError(f"runs of two kinds ({of} and {run.of}) make no baseline; give files of one kind")
    for name in DECISIVE:
        if run.conditions[name] != conditions[name]:
            both = f"{conditions[name] or 'not said'} and {run.conditions[name] or 'not said'}"
            raise UsageError(
                f"runs of two conditions make no baseline ({name}: {both}); give runs that were made alike"
            )


# ---------------------------------------------------------------- reading


def read(path: str | os.PathLike[str]) -> Baseline:
    """Read a baseline, which anyone may have written.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    Baseline

    Raises
    ------
    TraceError
        It is absent or is not a baseline. One line says what is wrong with it.
    """
    path = Path(path)
    if not path.exists():
        raise TraceError(path, "no such file", "make it with nsightkit check FILE --baseline NAME --update")
    if not path.is_file():
        raise TraceError(path, "is not a regular file", "give the name of a baseline")
    decoded = partial(json.loads, object_pairs_hook=_distinct, parse_constant=_not_a_number)
    return parsed(path, "baseline", _MOST_BYTES, _REMEDY, lambda text: _baseline(decoded(text)))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, times in Counter(name for name, _ in pairs).items():
        _require(times == 1, f"{_shown(name)} stands in it twice")
    return dict(pairs)


def _not_a_number(name: str) -> None:
    _require(False, f"{name} is not a number")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _baseline(document: Any) -> Baseline:
    _require(isinstance(document, dict) and {"format", "metrics"} <= set(document), "it has no format and metrics")
    _require(
        document["format"] == FORMAT and not isinstance(document["format"], bool),
        f"its format is {_shown(document['format'])}, and this nsightkit knows {FORMAT}",
    )
    _keys(document, ("format", "nsightkit", "of", "conditions", "metrics"), "it")
    conditions, metrics = document["conditions"], document["metrics"]
    _require(
        isinstance(document["nsightkit"], str) and document["of"] in KINDS,
        f"it is of {_shown(document['of'])}, which is not one of {', '.join(KINDS)}",
    )
    _keys(conditions, CONDITIONS, "conditions")
    short = (value is None or (isinstance(value, str) and value == plain_text(value)) for value in conditions.values())
    _require(all(short), "a condition is neither short text nor null")
    _require(
        isinstance(metrics, dict) and 0 < len(metrics) <= _MOST_METRICS,
        f"it has no metrics, or more than {_MOST_METRICS}",
    )
    for name in metrics:
        plain = 0 < len(name) <= _LONGEST_NAME and plain_text(name, _LONGEST_NAME) == name
        _require(plain, f"{_shown(name)} is not a name of a metric")
    return Baseline(document["of"], conditions, {name: _metric(of, _shown(name)) for name, of in metrics.items()})


def _metric(metric: Any, name: str) -> Kept:
    _keys(metric, ("value", "unit", "direction", "gate", "tolerance", "runs"), name)
    unit, direction, gate, tolerance, runs = (metric[key] for key in ("unit", "direction", "gate", "tolerance", "runs"))
    _require(
        unit in UNITS and direction in get_args(Direction),
        f"{name} has the unit {_shown(unit)}, the direction {_shown(direction)}",
    )
    _require(isinstance(gate, bool), f"{name}: gate is neither true nor false")
    _require(
        tolerance is None or _number(tolerance, name) <= _LARGEST_TOLERANCE,
        f"{name}: a tolerance of {tolerance}; 0.05 is 5 %",
    )
    _require(
        isinstance(runs, list) and 0 < len(runs) <= MOST_RUNS,
        f"{name} has no runs, or more than {MOST_RUNS}",
    )
    _require(
        all(isinstance(samples, list) and 0 < len(samples) <= _MOST_SAMPLES for samples in runs),
        f"{name}: a run has no samples, or more than {_MOST_SAMPLES}",
    )
    kept = tuple(np.array([_number(sample, name) for sample in samples]) for samples in runs)
    _require(
        math.isclose(_number(metric["value"], name), _value(kept), rel_tol=1e-6),
        f"{name}: its value is not the median of its samples, so one of them was edited",
    )
    return Kept(kept, unit, direction, gate, tolerance)


def _keys(found: Any, wanted: Sequence[str], what: str) -> None:
    _require(isinstance(found, dict), f"{what} is not an object")
    lacking, strange = [name for name in wanted if name not in found], [name for name in found if name not in wanted]
    _require(not lacking, f"{what} lacks {', '.join(lacking)}")
    _require(not strange, f"{what} has {', '.join(map(_shown, strange))}, which means nothing here")


def _number(value: object, name: str) -> float:
    # A whole number of any length compares without overflow, and NaN with nothing.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LARGEST:
        return float(value) if value >= SMALLEST else 0.0
    raise ValueError(f"{name}: {_shown(value)} is not a number from 0 to {LARGEST:g}")


def _shown(value: object) -> str:
    """Quote something of a file in a message: short, and on one line."""
    text = value if isinstance(value, str) else type(value).__name__ if isinstance(value, (dict, list)) else repr(value)
    return repr(plain_text(text, 60) or "")


# ---------------------------------------------------------------- writing


def write(baseline: Baseline, path: str | os.PathLike[str]) -> None:
    """Write a baseline. The file is replaced when the new one is whole, and not touched before.

    Parameters
    ----------
    baseline : Baseline
    path : path-like

    Raises
    ------
    UsageError
        It cannot be written there.
    """
    # A link stays a link: what it leads to is replaced.
    with replacing(Path(path).resolve()) as file:
        file.write(_text(baseline).encode("utf-8"))


def _text(baseline: Baseline) -> str:
    """Lay a baseline out: keys in one order, and each run's samples on a line, so that a new run adds lines."""
    metrics = {}
    for name, kept in sorted(baseline.metrics.items()):
        runs = [[_digits(sample) for sample in samples.tolist()] for samples in kept.runs]
        said = {field: getattr(kept, field) for field in ("unit", "direction", "gate", "tolerance")}
        metrics[name] = {"value": _digits(_value(runs)), **said, "runs": runs}
    document = {
        "format": FORMAT,
        "nsightkit": nsightkit.__version__,
        "of": baseline.of,
        "conditions": dict(baseline.conditions),
        "metrics": metrics,
    }
    text = json_text(document, indent=2)
    # Lists of numbers only: a line break cannot stand in a JSON string.
    return re.sub(r"\[\n\s+([\d.,\s+e-]*?)\s*\n\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _value(runs: Sequence[Samples] | Sequence[list[float]]) -> float:
    return float(np.median(np.concatenate(runs)))


def _digits(value: float) -> int | float:
    kept = round(value) if value >= 10**_DIGITS else float(f"{value:.{_DIGITS}g}")
    return int(kept) if kept == int(kept) else kept
