"""The baseline: what earlier runs measured, as a file that people read, edit and keep under version control.

It holds no host, user, path or environment: only what :mod:`nsightkit.analysis.compare.runs` takes from a run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from nsightkit.analysis.compare.runs import Amount, Float, Kind, Run, decoded
from nsightkit.analysis.core.noise import thinned
from nsightkit.errors import AnyPath, TraceError, UsageError
from nsightkit.safe import json_text
from nsightkit.trace.files import replacing

__all__ = ["MOST_RUNS", "Baseline", "Kept", "make", "read", "require_alike", "write"]

#: A baseline remembers so many runs; older ones go.
MOST_RUNS = 20
#: Samples kept of a run: enough for the median and its interval, few enough to read.
_KEPT = 40
_REMEDY = "restore it from version control, or remove it and write a new one with --update"


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric of a baseline, as the file has it.

    Parameters
    ----------
    value : float
        The median of all samples, for a reader.
    gate : bool
        Whether it is checked; may be edited.
    tolerance : float or None
        Replaces the command's; may be edited.
    runs : tuple of tuple of float
        Samples of each run, sorted; the oldest run first.
    """

    value: Amount
    gate: bool
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=100)] | None
    runs: Annotated[tuple[Annotated[tuple[Amount, ...], msgspec.Meta(min_length=1)], ...], msgspec.Meta(min_length=1)]


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What earlier runs measured, as the file has it.

    Parameters
    ----------
    format : int
        Version of the layout.
    of : {"trace", "bench", "ncu", "samples"}
        What kind of runs.
    conditions : dict of str to str or None
        What the figures hold for; None is unknown.
    metrics : dict of str to Kept
    """

    format: Literal[2]
    of: Kind
    conditions: dict[str, str | None]
    metrics: Annotated[dict[str, Kept], msgspec.Meta(min_length=1)]

    @property
    def runs(self) -> int:
        """How many runs it holds."""
        return max(len(kept.runs) for kept in self.metrics.values())


def make(runs: Sequence[Run], before: Baseline | None = None, *, add: bool = False) -> Baseline:
    """Make a baseline of one or several runs.

    Parameters
    ----------
    runs : sequence of Run
        Of one kind and under the same conditions.
    before : Baseline, optional
        The one that is replaced: gates and tolerances that people set in it stay.
    add : bool
        Add the runs to those of `before`; the oldest go when there are more than :data:`MOST_RUNS`.

    Returns
    -------
    Baseline

    Raises
    ------
    UsageError
        The runs are not alike, or one lacks a metric.
    """
    old = before.metrics if before else {}
    metrics = dict(old) if add else {}
    for name in sorted(runs[0].metrics):
        measured = [run.metrics[name] for run in runs if name in run.metrics]
        if len(measured) < len(runs):
            raise UsageError(f"{name} was measured in {len(measured)} of {len(runs)} runs; leave the others out")
        metrics[name] = _kept(measured, old.get(name), add)
    made = Baseline(2, runs[0].of, runs[0].conditions, metrics)
    require_alike(before if before and add else made, runs)
    return made


def _kept(measured: Sequence[Float], old: Kept | None, add: bool) -> Kept:
    """Keep a metric's samples of some runs, with those of the baseline if they are added to it."""
    kept = old or Kept(0, True, None, ())
    runs = list(kept.runs) if add else []
    for samples in measured:
        # As many digits as a reader needs.
        runs.append(tuple(float(f"{sample:.7g}") for sample in np.sort(thinned(samples, _KEPT))))
    runs = runs[-MOST_RUNS:]
    return msgspec.structs.replace(kept, value=float(np.median(np.concatenate(runs))), runs=tuple(runs))


def require_alike(baseline: Baseline, runs: Sequence[Run]) -> None:
    """Refuse runs that are not what a baseline is of.

    Parameters
    ----------
    baseline : Baseline
    runs : sequence of Run

    Raises
    ------
    UsageError
        They are of another kind, or were made under other conditions.
    """
    for run in runs:
        if run.of != baseline.of:
            raise UsageError(
                f"a baseline of {baseline.of} and a run of {run.of} share no metrics; give files of one kind"
            )
        for name in ("gpu", "tool", "selection"):
            was = baseline.conditions.get(name)
            now = run.conditions.get(name)
            # An unknown GPU may be the same one; a selection that is not named is the whole trace.
            if was != now and (name == "selection" or (was and now)):
                raise UsageError(
                    f"these runs do not compare ({name}: {was or 'none'}, now {now or 'none'}); run under the same "
                    "conditions, or replace the baseline with --update"
                )


def read(path: AnyPath) -> Baseline:
    """Read a baseline.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    Baseline

    Raises
    ------
    TraceError
        It is absent or is not a baseline.
    """
    path = Path(path)
    if not path.exists():
        raise TraceError(path, "no such file", "make it with nsightkit check FILE --baseline NAME --update")
    return decoded(path, "a baseline of this version", Baseline, _REMEDY)


def write(baseline: Baseline, path: AnyPath) -> None:
    """Write a baseline; the file is replaced only when the new one is whole.

    Parameters
    ----------
    baseline : Baseline
    path : path-like

    Raises
    ------
    UsageError
        It cannot be written there.
    """
    text = json_text(msgspec.to_builtins(baseline), indent=2)
    # Whole numbers, and each run on a line, so that a new run adds lines. A JSON string has no line breaks.
    text = re.sub(r"\.0(?=,?\n)", "", text)
    text = re.sub(r"\[\n\s+([\d.,\s+e-]*?)\s*\n\s+\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    # A link stays a link: its target is replaced.
    with replacing(Path(path).resolve()) as file:
        file.write(f"{text}\n".encode())
