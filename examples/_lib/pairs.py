"""Two programs captured alternately: what differs between them, and in words (page 20)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from nsightkit.analysis.compare import baseline, check, diff
from nsightkit.analysis.compare import runs as run_metrics
from nsightkit.analysis.compare.diff import Comparison

if TYPE_CHECKING:
    from nsightkit.guide import Measurement

_AGREED = {
    "no change": "agree within the noise of their steps",
    "inconclusive": "have too few steps each to be distinguished",
    "faster": "differ by more than their steps do",
    "slower": "differ by more than their steps do",
}
_OUTCOME = {
    "faster": "the change made a step faster",
    "slower": "the change made a step slower",
    "no change": "no change of the step time is beyond the noise",
    "inconclusive": "the steps are too few to judge their time",
}


def changed(found: Comparison) -> pd.DataFrame:
    """List figures, causes, kernels and ranges of a comparison, one below the other.

    Parameters
    ----------
    found : Comparison
    """
    tables = found.tables
    parts = [
        tables["figures"],
        tables["gaps"].rename(columns={"cause": "name"}),
        tables["kernels"].head(5),
        tables["ranges"].head(5),
    ]
    rows = pd.concat([part.astype(object) for part in parts if len(part)])
    largest = rows[["before_ns", "after_ns"]].max(axis=1)
    rows = rows[largest >= 0.01 * largest.iloc[0]]
    names = rows["name"].str.removesuffix("_ns").str.split("#").str[0]
    return rows.assign(name=names).reset_index(drop=True)


def alternating(runs: Mapping[str, Measurement]) -> Comparison:
    """Compare ``before`` and ``after``, with a second capture of each.

    Parameters
    ----------
    runs : mapping of str to Measurement
        ``before``, ``after``, ``again``, ``after again``.
    """
    return diff.compare(
        runs["before"].trace,
        runs["after"].trace,
        also_before=[runs["again"].trace],
        also_after=[runs["after again"].trace],
    )


def answer(runs: Mapping[str, Measurement], found: Comparison) -> str:
    """Say whether two captures of one program agree, what the change did, and what a gate makes of undoing it.

    Parameters
    ----------
    runs : mapping of str to Measurement
    found : Comparison
        Of :func:`alternating`.
    """
    before, again = runs["before"], runs["again"]
    same = diff.compare(before.trace, again.trace).summary()["outcome"]
    samples = [runs[name].values("step_ns") for name in ("after", "after again")]
    kept = baseline.make([run_metrics.of_samples({"step_ns": steps}) for steps in samples])
    slower = run_metrics.of_samples({"step_ns": again.values("step_ns")})
    [gate] = check.compare(kept, [slower])["gates"]
    apart = again.median("step_ns") / before.median("step_ns") - 1
    summary, wall = found.summary(), found.tables["figures"].iloc[0]
    moved = found.tables["kernels"]["significance"] == "changed"
    predicted = before.trace.whatif("no-input-wait")["speedup"].iloc[0]
    by_replay = f"{1 / predicted - 1:+.1%}" if pd.notna(predicted) else "unknown"
    return (
        f"two captures of one program {_AGREED[same]} ({apart:+.1%} without a profiler); "
        f"{_OUTCOME[summary['outcome']]} ({wall['change']:+.1%}; the replay predicted {by_replay}). {moved.sum()} of "
        f"{len(moved)} kernels changed by more than noise. {summary['bottleneck']['text']} The gate reports the step "
        f"without workers as: {gate['status']} ({gate['ratio'] - 1:+.0%})."
    )
