"""The baseline: the measurements of earlier runs, as a file that people read, edit and keep under version control.

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
from nsightkit.text import json_text
from nsightkit.trace.files import replacing

#: A baseline keeps so many runs, the latest.
MOST_RUNS = 20
#: So many samples are kept of a run: enough for the median and its interval, few enough to read.
_SAMPLES_PER_RUN = 40
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
    """The measurements of earlier runs, as the file has them.

    Parameters
    ----------
    format : int
        Version of the layout.
    of : {"trace", "bench", "ncu", "samples"}
        The kind of the runs.
    conditions : dict of str to str or None
        What the figures hold for, as :class:`nsightkit.analysis.compare.runs.Run` has it; None is unknown.
    metrics : dict of str to Kept
        By name, which ends in the unit.
    """

    format: Literal[2]
    of: Kind
    conditions: dict[str, str | None]
    metrics: Annotated[dict[str, Kept], msgspec.Meta(min_length=1)]

    @property
    def run_count(self) -> int:
        """How many runs it holds: a metric that was added later has fewer than the others."""
        return max(len(kept.runs) for kept in self.metrics.values())


def make(runs: Sequence[Run], before: Baseline | None = None, *, add: bool = False) -> Baseline:
    """Make a baseline of one or several runs.

    Parameters
    ----------
    runs : sequence of Run
        Of one kind and under the same conditions.
    before : Baseline, optional
        The one that the result replaces: gates and tolerances that people set in it stay.
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
        samples_of_runs = [run.metrics[name] for run in runs if name in run.metrics]
        if len(samples_of_runs) < len(runs):
            raise UsageError(f"{name} was measured in {len(samples_of_runs)} of {len(runs)} runs; leave the others out")
        metrics[name] = _kept_metric(samples_of_runs, old.get(name), add)
    # What the new runs do not know, such as the GPU, stays known.
    known = before.conditions if before and add else {}
    conditions = {name: value or known.get(name) for name, value in runs[0].conditions.items()}
    made = Baseline(2, runs[0].of, conditions, metrics)  # 2: the format
    require_alike(before if before and add else made, runs)
    return made


def _kept_metric(samples_of_runs: Sequence[Float], old: Kept | None, add: bool) -> Kept:
    """Make a baseline's metric of its samples in some runs, after those of the old one (`add`) or in their place."""
    kept = old or Kept(value=0, gate=True, tolerance=None, runs=())
    runs = list(kept.runs) if add else []
    for samples in samples_of_runs:
        # Seven digits: as many as a reader needs.
        runs.append(tuple(float(f"{sample:.7g}") for sample in np.sort(thinned(samples, _SAMPLES_PER_RUN))))
    runs = runs[-MOST_RUNS:]
    return msgspec.structs.replace(kept, value=float(np.median(np.concatenate(runs))), runs=tuple(runs))


def require_alike(baseline: Baseline, runs: Sequence[Run]) -> None:
    """Refuse runs of another kind than a baseline's, or made under other conditions.

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
                f"the baseline is of {baseline.of}, this run of {run.of}: they share no metrics; give files of one kind"
            )
        for name in ("gpu", "tool", "selection"):
            was = baseline.conditions.get(name)
            now = run.conditions.get(name)
            # An unknown GPU may be the same one; a selection that is not named is the whole trace.
            if was != now and (name == "selection" or (was and now)):
                raise UsageError(
                    f"these runs cannot be compared ({name}: {was or 'none'}, now {now or 'none'}); run under the same "
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
    # Write 5.0 as 5, and the numbers of each run on one line, so that a new run adds lines. Both expressions need a
    # line break, which no JSON string has.
    text = re.sub(r"\.0(?=,?\n)", "", text)
    text = re.sub(r"\[\n\s+([\d.,\s+e-]*?)\s*\n\s+\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    # A link stays a link: its target is replaced.
    with replacing(Path(path).resolve()) as file:
        file.write(f"{text}\n".encode())
