"""What changed between two captures, by how much, and whether that is more than noise.

Where both captures have steps, figures are per step, so captures of different length compare: the median over the
steps, without outliers. The rows also hold totals over whole captures, which add up to each trace's own.

Each row is judged by the rule that ``check`` uses too (:func:`nsightkit.analysis.core.noise.judge`): it *changed*,
stayed *within noise*, or is *inconclusive*. About five of a hundred unchanged rows seem changed at 95 %, so only rows
that also changed by a hundredth of a step are listed as changes, and the step time, the one question asked beforehand,
comes first.

Captures without steps have one figure of each kind, which is inconclusive. The exception is a kernel that both launched
equally often: its launches, in order, are cut into stretches, which serve as steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis import verdict
from nsightkit.analysis.compare import diff_words as words
from nsightkit.analysis.compare.match import pair, plain_kernel, plain_range
from nsightkit.analysis.compare.samples import Samples, judge, ordinary, samples
from nsightkit.analysis.core import noise
from nsightkit.analysis.core.categories import category_of
from nsightkit.trace.model import Trace

__all__ = ["COLUMNS", "SIDES", "TABLES", "Comparison", "compare", "summary"]

SIDES = ("before", "after")
#: Columns of every table: whole numbers, and figures that may be unknown.
_WHOLE = ["before_count", "after_count", "before_total_ns", "after_total_ns", "before_ns", "after_ns", "delta_ns"]
_UNSURE = ["low_ns", "high_ns", "change"]
#: Columns of every table, after the ones that name its rows.
COLUMNS = (*_WHOLE, *_UNSURE, "significance")
#: Columns that name the rows of each table; tables in the order in which people read them.
_NAMED = {
    "figures": ["name"],
    "kernels": ["name", "match", "category", "before_names", "after_names"],
    "ranges": ["name", "clock", "match"],
    "gaps": ["cause"],
}
TABLES = tuple(_NAMED)
#: What changed by less than this share of a step does not matter.
_LEAST_SHARE = 0.01
#: With more of the GPU's work launched outside the steps, they do not represent the whole.
_MOSTLY_OUTSIDE = 0.5
#: Launches of one name may take turns in size: each of so many stretches of them has a bit of each.
_STRETCHES = 30

Float = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Two captures, table by table; made by :func:`compare`.

    Parameters
    ----------
    before, after : sequence of Samples
        The captures of each side. Counts and totals are of the first.
    unit : {"step", "trace"}
        What ``before_ns``, ``after_ns`` and ``delta_ns`` are of: a step, or the whole capture.
    tables : dict of str to DataFrame
        ``figures``, ``kernels``, ``ranges``, ``gaps``, the largest change first. :data:`COLUMNS` follow the columns
        that name a row.
    """

    before: Sequence[Samples]
    after: Sequence[Samples]
    unit: str
    tables: dict[str, pd.DataFrame]

    @property
    def least_ns(self) -> float:
        """The smallest change that matters."""
        sizes = self.tables["figures"][["before_ns", "after_ns"]].head(1).to_numpy()
        return max(_LEAST_SHARE * float(sizes.max(initial=0)), 1.0)

    def changes(self) -> list[dict[Any, Any]]:
        """Rows of all tables that matter and are not within noise, the largest change first."""
        changes: list[dict[Any, Any]] = []
        for table, frame in self.tables.items():
            is_large = frame["delta_ns"].abs() >= self.least_ns
            rows = frame[is_large & (frame["significance"] != noise.WITHIN_NOISE)]
            changes += rows.assign(table=table).to_dict("records")
        return sorted(changes, key=lambda row: -abs(row["delta_ns"]))

    def summary(self) -> dict[str, Any]:
        """Give what :func:`summary` gives.

        Returns
        -------
        dict
        """
        facts: dict[str, Any] = {
            "changes": self.changes(),
            "unit": self.unit,
            "least_ns": self.least_ns,
            "before": words.described(self.before),
            "after": words.described(self.after),
        }
        for table, frame in self.tables.items():
            facts[table] = frame.to_dict("records")
        verdicts = [verdict.summary(self.before[0].trace), verdict.summary(self.after[0].trace)]
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
    first = [samples(trace, match) for trace in (before, *also_before)]
    second = [samples(trace, match) for trace in (after, *also_after)]
    unit = "step"
    for capture in first + second:
        if capture.windows.empty or capture.outside > _MOSTLY_OUTSIDE:
            unit = "trace"
    rows: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    for table, plain in (
        ("figures", str),
        ("kernels", plain_kernel),
        ("ranges CPU", str),
        ("ranges GPU", str),
        ("gaps", str),
    ):
        if all(table in capture.tables for capture in first + second):
            name, _, clock = table.partition(" ")
            for row in _rows(first, second, table, unit, plain):
                rows[name].append({**row, "clock": clock})
    tables = {table: _frame(table, rows[table]) for table in TABLES}
    return Comparison(first, second, unit, tables)


def summary(before: Trace, after: Trace, **options: Any) -> dict[str, Any]:
    """Summarize what changed between two captures.

    Parameters
    ----------
    before, after : Trace
    **options
        Of :func:`compare`.

    Returns
    -------
    dict
        ``headline``
            One sentence.
        ``outcome``
            ``faster``, ``slower``, ``no change`` (within noise, or too small to matter) or ``inconclusive``: of the
            step time, or of the time from the first GPU operation to the last. With one capture per side it holds for
            these two captures, not for the programs.
        ``where``
            Another sentence: the cause of idle time or the kernel that changed most. Empty where none did by a
            hundredth of a step.
        ``moved``
            Whether the bottleneck is another one (:mod:`nsightkit.analysis.verdict`); None where one of the captures
            does not show it. ``bottleneck`` has both, and a sentence.
        ``warnings``
            What makes the captures differ besides the change.
        ``changes``
            Rows of all tables that changed by a hundredth of a step or more (``least_ns``) and are not within noise,
            the largest first, each with its ``table``.
        ``unit``, ``before``, ``after``
            What figures are of, and facts about each side.
        ``figures``, ``kernels``, ``ranges``, ``gaps``
            The tables, as lists of rows with :data:`COLUMNS`. ``before_count`` and ``before_total_ns`` are of the whole
            capture, ``before_ns`` is the median over the steps, ``delta_ns`` the difference of the medians, ``low_ns``
            to ``high_ns`` the 95 % interval of the shift, ``change`` the difference relative to before, and
            ``significance`` *changed*, *within noise* or *inconclusive*. ``match`` is how names were paired
            (:mod:`nsightkit.analysis.compare.match`).

    Raises
    ------
    UsageError
        As for :func:`compare`.
    """
    return compare(before, after, **options).summary()


class _Amount(NamedTuple):
    """What some names add up to on one side."""

    number: int
    total_ns: int
    ns: int
    #: Samples of each capture; none without steps.
    runs: list[Float]


def _frame(table: str, rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Lay rows out as a table, with whole nanoseconds."""
    frame = pd.DataFrame(rows, columns=_NAMED[table] + list(COLUMNS))
    frame[_WHOLE] = frame[_WHOLE].astype("int64")
    frame[_UNSURE] = frame[_UNSURE].astype("float64")
    if table == "figures":
        return frame
    order = frame["delta_ns"].abs().sort_values(ascending=False, kind="stable").index
    return frame.loc[order].reset_index(drop=True)


def _rows(
    before: Sequence[Samples], after: Sequence[Samples], table: str, unit: str, plain: Callable[[str], Hashable]
) -> list[dict[str, Any]]:
    """Pair the names of a table, and judge each pair."""
    names = [_occurring(side[0].tables[table]) for side in (before, after)]
    step_names = before[0].windows["step"].tolist() + after[0].windows["step"].tolist()
    steps = {plain_range(str(name)) for name in step_names}
    rows = []
    for matched, was, now in pair(names[0], names[1], plain):
        name = (now or was)[0]
        if name in steps and not (was and now):
            continue  # steps of one side are not a part of the program that came or went
        first, second = _amount(before, table, was, unit), _amount(after, table, now, unit)
        if table == "kernels" and unit == "trace" and first.number == second.number:
            first = first._replace(runs=[_stretches(before[0].trace, was)])
            second = second._replace(runs=[_stretches(after[0].trace, now)])
        row = {"name": name, "cause": name, "match": matched, "before_names": was, "after_names": now}
        if table == "kernels":
            row["category"] = category_of(name)
        rows.append(row | _judged(first, second))
    return rows


def _occurring(table: pd.DataFrame) -> list[str]:
    """Names of what occurs by falling total, so that the first can name a group; figures as they are."""
    if "wall_ns" not in table.index:
        table = table[table["count"] > 0].sort_values("total", ascending=False, kind="stable")
    return [str(name) for name in table.index]


def _amount(captures: Sequence[Samples], table: str, names: Sequence[str], unit: str) -> _Amount:
    """Add up some names on one side."""
    sums = []
    for capture in captures:
        rows = capture.tables[table].reindex(list(names)).fillna(0)
        sums.append(rows.sum().to_numpy(np.float64))
    count, total = round(sums[0][0]), round(sums[0][1])
    if unit == "trace":
        return _Amount(count, total, total, [])
    runs = [figures[2:] for figures in sums]
    return _Amount(count, total, round(float(np.median(np.concatenate(ordinary(runs))))), runs)


def _stretches(trace: Trace, names: Sequence[str]) -> Float:
    """What all launches of a kernel would take if they were like those of one stretch, for each stretch of them."""
    kernels = trace.table("kernels", ["name", "duration_ns"])
    duration = kernels.loc[kernels["name"].isin(list(names)), "duration_ns"].to_numpy(np.float64)
    stretches = np.array_split(duration, min(len(duration), _STRETCHES))
    return len(duration) * np.array([stretch.mean() for stretch in stretches])


def _judged(before: _Amount, after: _Amount) -> dict[str, Any]:
    """Judge a figure of both sides."""
    delta = after.ns - before.ns
    change = noise.Change(delta)
    if before.runs and after.runs:
        change = judge(before.runs, after.runs)
    row: dict[str, Any] = {"delta_ns": delta, "significance": change.word}
    if change.word == noise.CHANGED and change.value * delta < 0:
        row["significance"] = noise.WITHIN_NOISE  # a few long launches lead the sum another way than most go
    if change.low is not None and change.high is not None:
        # The median of differences is not quite the difference of medians: the interval holds both. Nothing loses
        # more than all it had.
        row["low_ns"] = max(min(change.low, delta), -before.ns)
        row["high_ns"] = max(change.high, delta)
    if before.ns:
        row["change"] = delta / before.ns
    for side, amount in zip(SIDES, (before, after), strict=True):
        row[f"{side}_count"] = amount.number
        row[f"{side}_total_ns"] = amount.total_ns
        row[f"{side}_ns"] = amount.ns
    return row
