"""The baseline: what earlier runs measured, as a file that people read, edit and keep under version control.

It holds no host, user, path or environment: only what :mod:`nsightkit.analysis.compare.runs` takes from a run.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

import nsightkit
from nsightkit.analysis.compare.runs import (
    CONDITIONS,
    DECISIVE,
    SMALLEST,
    Amount,
    Condition,
    Direction,
    Kind,
    Metric,
    Run,
    Unit,
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
#: Digits of what is not a whole number.
_DIGITS = 7
_REMEDY = "restore it from version control, or remove it and write it anew with --update"

_PRINTABLE = r"^[^\x00-\x1f\x7f]*\Z"
_Text = Annotated[str, msgspec.Meta(max_length=200, pattern=_PRINTABLE)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=240, pattern=_PRINTABLE)]
_Samples = Annotated[tuple[Amount, ...], msgspec.Meta(min_length=1, max_length=1000)]


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric of a baseline, as the file has it.

    Parameters
    ----------
    value : float
        The median of all samples, for a reader.
    unit : {"ns", "bytes", "count", "%", "per_s"}
    direction : {"lower", "higher", "neither"}
        Which is better; neither: any change is for the worse.
    gate : bool
        Whether a change for the worse fails; may be edited.
    tolerance : float or None
        In place of the one that the command is given; may be edited.
    runs : tuple of tuple of float
        Samples of each run in order of size, the oldest run first.
    """

    value: Amount
    unit: Unit
    direction: Direction
    gate: bool
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=100)] | None
    runs: Annotated[tuple[_Samples, ...], msgspec.Meta(min_length=1, max_length=MOST_RUNS)]


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What earlier runs measured, as the file has it.

    Parameters
    ----------
    format : int
        :data:`FORMAT`.
    nsightkit : str
        The version that wrote it.
    of : {"trace", "bench", "ncu", "samples"}
        What kind of runs.
    conditions : dict of str to str or None
        What the figures hold for; None is not known.
    metrics : dict of str to Kept
    """

    format: int
    nsightkit: str
    of: Kind
    conditions: dict[Condition, _Text | None]
    metrics: Annotated[dict[_Name, Kept], msgspec.Meta(min_length=1, max_length=10_000)]

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
    for run in runs:
        _require_alike(first.of, first.conditions, run)
    old: Mapping[str, Kept] = before.metrics if before else {}
    if before and add:
        _require_alike(before.of, before.conditions, first)
    measured: dict[str, list[Metric]] = {}
    for run in runs:
        for name, metric in run.metrics.items():
            if metric.kept or name in old:
                measured.setdefault(name, []).append(metric)
    metrics: dict[str, Kept] = {}
    for name, kept in old.items():
        if add and name not in measured:
            if kept.gate:
                raise UsageError(f"{name} is in the baseline and not in these runs, so they cannot be added to it")
            metrics[name] = kept
    for name, of_runs in measured.items():
        metrics[name] = _kept(of_runs, old.get(name), add)
        if metrics[name].gate and len(of_runs) < len(runs):
            raise UsageError(f"{name} was measured in {len(of_runs)} of {len(runs)} runs; leave out the others")
    if not any(kept.gate for kept in metrics.values()):
        raise UsageError("nothing in these runs can gate: they have no steps, and no work of a GPU")
    said = plain_text(command)
    if said is None and before:
        said = before.conditions.get("command")
    conditions = {name: first.conditions.get(name) for name in CONDITIONS} | {"command": said}
    return Baseline(FORMAT, nsightkit.__version__, first.of, conditions, dict(sorted(metrics.items())))


def _kept(of_runs: Sequence[Metric], old: Kept | None, add: bool) -> Kept:
    """Keep a metric's samples of some runs, with those of the baseline if they are added to it."""
    metric = of_runs[0]
    direction, gate, tolerance = metric.direction, metric.gate, None
    samples: list[tuple[float, ...]] = []
    # What was kept in another unit was something else. Of the same thing, what people set in it stays.
    if old and old.unit == metric.unit:
        direction, gate, tolerance = old.direction, old.gate, old.tolerance
        if add:
            samples += old.runs
    for one_run in of_runs:
        chosen = np.sort(thinned(one_run.samples, _KEPT if gate else _KEPT_OF_OTHERS))
        samples.append(tuple(_digits(sample) for sample in chosen.tolist()))
    samples = samples[-MOST_RUNS:]
    return Kept(_digits(_median(samples)), metric.unit, direction, gate, tolerance, tuple(samples))


def _median(runs: Sequence[Sequence[float]]) -> float:
    return float(np.median(np.concatenate(runs)))


def _digits(value: float) -> int | float:
    """As many digits as a reader needs; whole numbers as such."""
    kept = round(value) if value >= 10**_DIGITS else float(f"{value:.{_DIGITS}g}")
    return int(kept) if kept == int(kept) else kept


def _require_alike(of: str, conditions: Mapping[Condition, str | None], run: Run) -> None:
    if run.of != of:
        raise UsageError(f"runs of two kinds ({of} and {run.of}) make no baseline; give files of one kind")
    for name in DECISIVE:
        was, now = conditions.get(name), run.conditions.get(name)
        if was != now:
            both = f"{was or 'not said'} and {now or 'not said'}"
            raise UsageError(
                f"runs of two conditions make no baseline ({name}: {both}); give runs that were made alike"
            )


# ---------------------------------------------------------------- the file


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
    return parsed(path, "baseline", _MOST_BYTES, _REMEDY, _baseline)


def _baseline(text: str) -> Baseline:
    document = json.loads(text, object_pairs_hook=_distinct, parse_constant=_not_a_number)
    if not isinstance(document, dict) or "format" not in document or "metrics" not in document:
        raise ValueError("it has no format and metrics")
    if document["format"] is True or document["format"] != FORMAT:
        raise ValueError(f"its format is {plain_text(document['format'], 60)}, and this nsightkit reads {FORMAT}")
    baseline = msgspec.convert(document, Baseline)
    for name, kept in baseline.metrics.items():
        if not math.isclose(kept.value, _median(kept.runs), rel_tol=1e-6, abs_tol=SMALLEST):
            raise ValueError(f"{name}: its value is not the median of its samples, so one of them was edited")
    return baseline


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f'duplicate key "{plain_text(name, 60)}"')
        members[name] = value
    return members


def _not_a_number(name: str) -> None:
    raise ValueError(f"{name} is not a number")


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
    document = msgspec.to_builtins(baseline)
    for kept in document["metrics"].values():
        kept["value"] = _digits(kept["value"])
        kept["runs"] = [[_digits(sample) for sample in samples] for samples in kept["runs"]]
    text = json_text(document, indent=2)
    # Each run on a line, so that a new run adds lines. Lists of numbers only: no line break stands in a JSON string.
    text = re.sub(r"\[\n\s+([\d.,\s+e-]*?)\s*\n\s+\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    # A link stays a link: what it leads to is replaced.
    with replacing(Path(path).resolve()) as file:
        file.write(f"{text}\n".encode())
