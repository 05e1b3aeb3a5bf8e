"""The changes between two captures: how large each is, and whether it is more than noise.

Where both captures have steps, figures are per step, so captures of different length compare: the median over the
steps, without outliers. The rows also hold totals over whole captures, which add up to each trace's own.

Each row is judged by the rule that ``check`` uses too (:func:`nsightkit.analysis.core.noise.judge`): it *changed*,
stayed *within noise*, or is *inconclusive*. The times of the step are judged at 95%. There are many other rows, so
each is judged at 99%, and what changed by less than a hundredth of a step counts as noise. Captures without steps have
one figure of each kind, which is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nsightkit.analysis import verdict
from nsightkit.analysis.compare import diff_words as words
from nsightkit.analysis.compare.match import pair, plain_kernel
from nsightkit.analysis.compare.samples import Samples, judge, ordinary, samples, tables
from nsightkit.analysis.core import noise
from nsightkit.analysis.core.categories import category_of
from nsightkit.text import Json
from nsightkit.trace.model import Trace

#: Columns of every table, after its name columns.
COLUMNS = (
    "before_count",
    "after_count",
    "before_total_ns",
    "after_total_ns",
    "before_ns",
    "after_ns",
    "delta_ns",
    "low_ns",
    "high_ns",
    "change",
    "significance",
)
#: Columns that name the rows of each table; tables in the order in which people read them.
_NAME_COLUMNS = {
    "figures": ["name"],
    "kernels": ["name", "match", "category", "before_names", "after_names"],
    "memops": ["name"],
    "ranges": ["name", "clock", "match"],
    "gaps": ["cause"],
}
#: The tables of a capture that a table shows, where it is not the one of the same name.
_CAPTURE_TABLES = {"ranges": ["ranges CPU", "ranges GPU"]}
#: Changes by less than this share of a step count as noise.
_LEAST_SHARE = 0.01

Float = NDArray[np.float64]
#: The tables of one capture (:func:`nsightkit.analysis.compare.samples.tables`).
Capture = Mapping[str, pd.DataFrame]


class Comparison(NamedTuple):
    """Two captures, table by table; made by :func:`compare`.

    Parameters
    ----------
    before, after : sequence of Samples
        The captures of each side. Counts and totals are of the first.
    unit : {"step", "trace"}
        What ``before_ns``, ``after_ns`` and ``delta_ns`` are of: a step, or the whole capture.
    least_ns : float
        The smallest change that matters.
    tables : dict of str to DataFrame
        ``figures``, ``kernels``, ``memops``, ``ranges``, ``gaps``, the largest change first. :data:`COLUMNS` follow the
        columns that name a row.
    """

    before: Sequence[Samples]
    after: Sequence[Samples]
    unit: str
    least_ns: float
    tables: dict[str, pd.DataFrame]

    def summary(self) -> Json:
        """Summarize what changed.

        Returns
        -------
        dict
            ``headline``
                One sentence.
            ``outcome``
                ``faster``, ``slower``, ``no change`` (within noise, or too small to matter) or ``inconclusive``: of the
                step time, or of the time from the first GPU operation to the last. With one capture per side it holds
                for these two captures, not for the programs.
            ``moved``
                Whether the bottleneck is another one (:mod:`nsightkit.analysis.verdict`); None where one of the
                captures does not show it. ``bottleneck`` has both, and a sentence.
            ``warnings``
                What makes the captures differ besides the change.
            ``changes``
                Rows of all tables that changed or are inconclusive, by a hundredth of a step or more (``least_ns``),
                the largest first, each with its ``table``.
            ``unit``, ``before``, ``after``
                What figures are of, and facts about each side.
            ``figures``, ``kernels``, ``memops`` (copies and memsets by kind), ``ranges``, ``gaps``
                The tables, as lists of rows with :data:`COLUMNS`. ``before_count`` and ``before_total_ns`` are of the
                whole capture, ``before_ns`` is the median over the steps, ``delta_ns`` the difference of the medians,
                ``low_ns`` to ``high_ns`` the interval of the shift (95% for ``figures``, else 99%), ``change`` the
                difference relative to before, and ``significance`` *changed*, *within noise* or *inconclusive*.
                ``match`` is how names were paired (:mod:`nsightkit.analysis.compare.match`).
        """
        facts: Json = {
            "unit": self.unit,
            "least_ns": self.least_ns,
            "before": words.facts_of_side(self.before),
            "after": words.facts_of_side(self.after),
        }
        changes = []
        for table, frame in self.tables.items():
            facts[table] = frame.to_dict("records")
            for row in facts[table]:
                if abs(row["delta_ns"]) >= self.least_ns and row["significance"] != noise.WITHIN_NOISE:
                    changes.append({"table": table, **row})
        facts["changes"] = sorted(changes, key=lambda row: -abs(row["delta_ns"]))
        verdicts = [verdict.summary(captures[0].trace) for captures in (self.before, self.after)]
        return words.sentences(facts, self.tables["kernels"], verdicts) | facts


def compare(
    before: Trace,
    after: Trace,
    *,
    also_before: Sequence[Trace] = (),
    also_after: Sequence[Trace] = (),
    match: str | None = None,
) -> Comparison:
    """Compare two captures, table by table.

    Parameters
    ----------
    before, after : Trace
        Whole, or selected from (:func:`nsightkit.analysis.timeline.selection.select`).
    also_before, also_after : sequence of Trace
        More captures of the same two programs. Their steps are pooled with those of the first, and how far captures of
        one program differ widens the intervals. Counts and totals are those of `before` and `after`.
    match : str, optional
        Regular expression of the steps' names.

    Returns
    -------
    Comparison

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    captures_before = [samples(trace, match) for trace in (before, *also_before)]
    captures_after = [samples(trace, match) for trace in (after, *also_after)]
    has_steps = all(len(capture.windows) for capture in captures_before + captures_after)
    tables_before = [tables(capture) for capture in captures_before]
    tables_after = [tables(capture) for capture in captures_after]
    least_ns = 1.0
    compared = {}
    for table, name_columns in _NAME_COLUMNS.items():
        rows = []
        for capture_table in _CAPTURE_TABLES.get(table, [table]):
            rows += _rows_of_table(tables_before, tables_after, capture_table, has_steps)
        if table != "figures":
            rows.sort(key=lambda row: -abs(row["delta_ns"]))
        elif rows:
            # The first table, and its first row is the time of a step: it sets the limit for all tables.
            least_ns = max(_LEAST_SHARE * max(rows[0]["before_ns"], rows[0]["after_ns"]), least_ns)
        for row in rows:
            if row["significance"] == noise.CHANGED and abs(row["delta_ns"]) < least_ns:
                row["significance"] = noise.WITHIN_NOISE
        compared[table] = pd.DataFrame(rows, columns=[*name_columns, *COLUMNS])
    return Comparison(captures_before, captures_after, "step" if has_steps else "trace", least_ns, compared)


def _rows_of_table(before: Sequence[Capture], after: Sequence[Capture], table: str, has_steps: bool) -> list[Json]:
    """Pair the names of a table of captures, and judge each pair; no rows where a capture lacks the table.

    `before` and `after` are the captures of each side; the names of the first one of each are paired.
    """
    if not all(table in capture for capture in (*before, *after)):
        return []
    plain = plain_kernel if table == "kernels" else str
    pairs = pair(_occurring_names(before[0], table), _occurring_names(after[0], table), plain)
    # For each capture an array with a row per pair: count, total, and the sum in each step.
    sums_before = [_sums_by_group(capture[table], [names.before for names in pairs]) for capture in before]
    sums_after = [_sums_by_group(capture[table], [names.after for names in pairs]) for capture in after]
    confidence = 0.95 if table == "figures" else 0.99  # of many rows some would change by chance
    rows = []
    for number, (matched, names_before, names_after) in enumerate(pairs):
        name = (names_after or names_before)[0]
        # The name columns of all tables: each table takes its own. "ranges CPU" has the clock "CPU".
        row = {"name": name, "cause": name, "match": matched, "before_names": names_before, "after_names": names_after}
        row |= {"category": category_of(name), "clock": table.rpartition(" ")[2]}
        sides = [sums[number] for sums in sums_before], [sums[number] for sums in sums_after]
        rows.append(row | _judged(*sides, confidence if has_steps else None))
    return rows


def _occurring_names(capture: Capture, table: str) -> list[str]:
    """List the names that occur in a table, the largest total first: of several that pair up, the first names the row.

    Figures keep their order, as the first is the time of a step.
    """
    frame = capture[table]
    if table != "figures":
        frame = frame[frame["count"] > 0].sort_values("total", ascending=False, kind="stable")
    return frame.index.tolist()


def _sums_by_group(frame: pd.DataFrame, groups: Sequence[Sequence[str]]) -> Float:
    """Add up a table of a capture over each group of names: a row per group with its count, its total, each step's."""
    group_of = {}
    for number, names in enumerate(groups):
        group_of.update(dict.fromkeys(names, number))
    # A side may have several captures, and the groups are made of the names of its first one: a name that only another
    # one has is in no group, and left out.
    sums = frame.groupby(frame.index.map(group_of)).sum()
    return sums.reindex(range(len(groups)), fill_value=0).to_numpy(np.float64)


def _judged(before: Sequence[Float], after: Sequence[Float], confidence: float | None) -> Json:
    """Judge how one row of :func:`_sums_by_group` changed between two sides, each of one or more captures.

    Counts and totals are those of the first capture of each side; medians and the interval are of the steps of all
    captures. Without steps `confidence` is None, and the totals are compared.
    """
    # The first two numbers of a row are the count and the total, the others its samples: one per step.
    count_before, total_before_ns = before[0][:2]
    count_after, total_after_ns = after[0][:2]
    if confidence is None:
        before_ns = round(total_before_ns)
        after_ns = round(total_after_ns)
        change = noise.Change(after_ns - before_ns)  # of one number on each side: it has no interval
    else:
        samples_before = [sums[2:] for sums in before]
        samples_after = [sums[2:] for sums in after]
        before_ns = _median(samples_before)
        after_ns = _median(samples_after)
        change = judge(samples_before, samples_after, confidence)
    delta_ns = after_ns - before_ns
    low_ns = high_ns = math.nan
    if math.isfinite(change.high):
        # The median of differences is not quite the difference of medians: the interval holds both. Nothing loses
        # more than all it had.
        low_ns = max(min(change.low, float(delta_ns)), -float(before_ns))
        high_ns = max(change.high, float(delta_ns))
    significance = change.word
    if significance == noise.CHANGED and change.value * delta_ns < 0:
        # A few long steps moved the medians against the change of most steps: their direction is not certain.
        significance = noise.WITHIN_NOISE
    return {
        "before_count": round(count_before),
        "after_count": round(count_after),
        "before_total_ns": round(total_before_ns),
        "after_total_ns": round(total_after_ns),
        "before_ns": before_ns,
        "after_ns": after_ns,
        "delta_ns": delta_ns,
        "low_ns": low_ns,
        "high_ns": high_ns,
        "change": delta_ns / before_ns if before_ns else math.nan,
        "significance": significance,
    }


def _median(runs: Sequence[Float]) -> int:
    """The median of the samples of all runs, without outliers, in whole ns."""
    return round(float(np.median(np.concatenate(ordinary(runs)))))
