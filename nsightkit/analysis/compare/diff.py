"""What changed between two captures, by how much, and whether that is more than noise.

Figures are those of a step where both captures have steps, so that captures of different length compare: the median
of the steps that do not stand out (:mod:`nsightkit.analysis.compare.samples`). Sums over whole captures stand beside
them and are exact: the rows of a table add up to what the trace holds.

Each row is judged by one rule (:func:`nsightkit.analysis.core.noise.judge`): it *changed*, stayed *within noise*, or is
*inconclusive*, for too few steps. A row counts as a change of the program where it also is large enough to matter,
a hundredth of a step by default. Of a hundred rows that did not change about five seem to have; so only those large
enough are listed as changes, and the time of a step, which is the one question asked beforehand, comes first.

Captures without steps have one figure of each kind, which is inconclusive. The exception is a kernel that both launched
as often: stretches of its launches stand for steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis import verdict
from nsightkit.analysis.compare import diff_words as words
from nsightkit.analysis.compare import match as pairing
from nsightkit.analysis.compare.diff_words import SIDES, percent, signed
from nsightkit.analysis.compare.samples import COPY_COLUMNS, Figures, Samples, main_operators, samples
from nsightkit.analysis.core import noise
from nsightkit.analysis.core.categories import category_of
from nsightkit.analysis.timeline import operators
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace

__all__ = ["COLUMNS", "SIDES", "TABLES", "Comparison", "compare", "percent", "signed", "summary"]

#: Columns that every table has after those that name its rows.
COLUMNS = (
    *("before_count", "after_count", "before_total_ns", "after_total_ns"),
    *("before_ns", "after_ns", "delta_ns", "low_ns", "high_ns", "change"),
    *("mean_delta_ns", "between_ns", "significance"),
)
#: Columns that name the rows of each table; tables in the order in which people read them.
_NAMED = {
    "figures": ("name",),
    "kernels": ("name", "match", "category", "operator", "before_names", "after_names"),
    "categories": ("name",),
    "operators": ("name", "clock", "category"),
    "ranges": ("name", "domain", "clock", "match"),
    "gaps": ("cause",),
    "memops": (*COPY_COLUMNS, "before_bytes", "after_bytes"),
}
TABLES = tuple(_NAMED)
#: Of the GPU's time, launched in no step: beyond this, steps cannot stand for the whole.
_MOSTLY_OUTSIDE = 0.5


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Two captures, table by table; made by :func:`compare`.

    Parameters
    ----------
    before, after : sequence of Samples
        The captures of each side. Counts, totals and circumstances are of the first.
    unit : {"step", "trace"}
        What ``before_ns``, ``after_ns`` and ``delta_ns`` are of: a step, where all captures hold steps, or all of it.
    confidence, min_share : float
    tables : dict of str to DataFrame
        ``figures``, ``kernels``, ``categories``, ``operators``, ``ranges``, ``gaps``, ``memops``, the largest change
        first. After the columns that name a row come :data:`COLUMNS`.
    """

    before: Sequence[Samples]
    after: Sequence[Samples]
    unit: str
    confidence: float
    min_share: float
    tables: dict[str, pd.DataFrame]

    def changes(self) -> list[dict[Any, Any]]:
        """Rows of all tables that changed enough to matter, and are not within noise: the largest first."""
        sizes = self.tables["figures"][["before_ns", "after_ns"]].head(1).to_numpy()
        least_ns = max(self.min_share * float(sizes.max(initial=0)), 1)
        changes: list[dict[Any, Any]] = []
        for table, frame in self.tables.items():
            large = frame["delta_ns"].abs() >= least_ns
            rows = frame[large & (frame["significance"] != noise.WITHIN_NOISE)].to_dict("records")
            changes += [{"table": table, **row} for row in rows]
        return sorted(changes, key=lambda row: -abs(row["delta_ns"]))

    def summary(self) -> dict[str, Any]:
        """Give what :func:`summary` gives.

        Returns
        -------
        dict
        """
        facts = {
            "changes": self.changes(),
            "unit": self.unit,
            "confidence": self.confidence,
            "min_share": self.min_share,
            "judged_steps": [_judged(self.before), _judged(self.after)],
            "before": words.described(self.before[0]),
            "after": words.described(self.after[0]),
            **{table: frame.to_dict("records") for table, frame in self.tables.items()},
        }
        verdicts = [verdict.summary(self.before[0].trace), verdict.summary(self.after[0].trace)]
        return words.sentences(facts, verdicts) | facts


def _judged(captures: Sequence[Samples]) -> int:
    """How many steps of a side say what is noise: those that do not stand out."""
    return sum(int(capture.ordinary.sum()) for capture in captures)


def compare(
    before: Trace,
    after: Trace,
    *,
    also_before: Sequence[Trace] = (),
    also_after: Sequence[Trace] = (),
    match: str | tuple[str | None, str | None] | None = None,
    steps: tuple[int | None, int | None] = (None, None),
    confidence: float = 0.95,
    min_share: float = 0.01,
) -> Comparison:
    """Compare two captures, table by table.

    Parameters
    ----------
    before, after : Trace
        Whole, or selected from (:func:`nsightkit.analysis.timeline.selection.select`).
    also_before, also_after : sequence of Trace
        Further captures of the same two programs. Their steps are pooled with those of the first, and what captures
        of one program differ by tells a change from another run. Counts and totals are those of `before` and `after`.
    match : str or tuple of str, optional
        Regular expression of the steps' names, one for both sides or one for each.
    steps : tuple of int
        How many steps each side holds, where no ranges say so. There is no interval then.
    confidence : float
    min_share : float
        What changes by less than this share of a step does not matter.

    Returns
    -------
    Comparison

    Raises
    ------
    UsageError
        An argument out of its range, or `match` is not a regular expression.
    """
    if not 0 < confidence < 1:
        raise UsageError(f"a confidence lies between 0 and 1, not {confidence:g}")
    if not 0 <= min_share < 1:
        raise UsageError(f"a smallest share lies between 0 and 1, not {min_share:g}")
    for count in steps:
        if count is not None and count < 1:
            raise UsageError(f"{count} is not a number of steps")
    patterns = match if isinstance(match, tuple) else (match, match)
    first = [samples(trace, patterns[0], steps[0]) for trace in (before, *also_before)]
    second = [samples(trace, patterns[1], steps[1]) for trace in (after, *also_after)]
    unit = "step"
    for capture in (*first, *second):
        if not capture.count or capture.outside > _MOSTLY_OUTSIDE:
            unit = "trace"
    comparison = Comparison(first, second, unit, confidence, min_share, {})
    for table in TABLES:
        comparison.tables[table] = _frame(table, _rows(comparison, table))
    return comparison


def summary(before: Trace, after: Trace, **options: Any) -> dict[str, Any]:
    """Say what changed between two captures.

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
            ``faster``, ``slower``, ``no change`` (within noise, or too small to matter), or ``inconclusive``: of a
            step's time, or of the time from first operation to last. With one capture a side it is said of these two
            captures, not of the programs.
        ``where``
            Another sentence: how idle and busy time changed, and which causes and kinds of kernels most. Empty where
            nothing did by a hundredth of a step.
        ``moved``
            Whether the bottleneck is another one (:mod:`nsightkit.analysis.verdict`); None where one of the captures
            does not show it. ``bottleneck`` says it in words, with both.
        ``warnings``
            What differs between the captures besides the change, and what they do not show. Different cards come first.
        ``changes``
            Rows of all tables that changed by a hundredth of a step (`min_share`) or more, and are not within noise:
            the largest first, each with its ``table``.
        ``unit``, ``confidence``, ``before``, ``after``
            What figures are of, and what is known of each side.
        ``figures``, ``kernels``, ``categories``, ``operators``, ``ranges``, ``gaps``, ``memops``
            The tables, as lists of rows with :data:`COLUMNS`. ``before_count`` and ``before_total_ns`` are of the whole
            capture; ``before_ns`` is the median of the ordinary steps, ``delta_ns`` the difference of the medians,
            ``low_ns`` to ``high_ns`` the interval of the shift, ``change`` the difference by what was before,
            ``mean_delta_ns`` the difference of the means over all steps, ``between_ns`` what captures of one program
            differ by, ``significance`` one of *changed*, *within noise*, *inconclusive*. ``match`` says how kernels or
            ranges were paired (:mod:`nsightkit.analysis.compare.match`).

    Raises
    ------
    UsageError
        As for :func:`compare`.
    """
    return compare(before, after, **options).summary()


# ---------------------------------------------------------------- tables


@dataclasses.dataclass(frozen=True)
class _Held:
    """What some labels add up to on one side."""

    count: int | None
    total_ns: int
    ns: int
    mean_ns: float
    #: In the ordinary steps of each capture; nothing without steps.
    runs: Sequence[npt.NDArray[np.float64]]


def _frame(table: str, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=[*_NAMED[table], *COLUMNS])
    for column in frame.columns.astype(str):
        if column in ("low_ns", "high_ns", "change", "mean_delta_ns", "between_ns"):
            frame[column] = frame[column].astype("float64")
        elif column.endswith("_ns"):
            frame[column] = frame[column].astype("int64")
        elif column.endswith(("_count", "_bytes")):
            frame[column] = frame[column].astype("Int64")
    if table == "figures":
        return frame
    size = frame[["delta_ns", "mean_delta_ns"]].abs().max(axis=1)
    return frame.loc[size.sort_values(ascending=False, kind="stable").index].reset_index(drop=True)


def _rows(comparison: Comparison, table: str) -> list[dict[str, Any]]:
    """Build the rows of a table, of each clock that every capture recorded."""
    before = [_figures(capture, comparison.unit) for capture in comparison.before]
    after = [_figures(capture, comparison.unit) for capture in comparison.after]
    left_out = any(not capture.ordinary.all() for capture in (*comparison.before, *comparison.after))
    rows = []
    for key in (table, f"{table} CPU", f"{table} GPU"):
        if not all(key in figures for figures in (*before, *after)):
            continue
        of_before, of_after = [figures[key] for figures in before], [figures[key] for figures in after]
        for how, was, now in _paired(comparison, table, of_before, of_after):
            first = _held(comparison.before, of_before, was, comparison.unit, spanned=table == "gaps")
            second = _held(comparison.after, of_after, now, comparison.unit, spanned=table == "gaps")
            if table == "kernels" and comparison.unit == "trace" and first.count == second.count:
                first = dataclasses.replace(first, runs=[comparison.before[0].stretches(was)])
                second = dataclasses.replace(second, runs=[comparison.after[0].stretches(now)])
            row = _named(comparison, table, how, was, now)
            rows.append({**row, "clock": key[-3:], **_judged_row(first, second, comparison.confidence, left_out)})
    return rows


def _figures(capture: Samples, unit: str) -> dict[str, Figures]:
    """Figures by table; those of the whole, of steps or of the capture, are a table too."""
    in_steps = unit == "step" and len(capture.windows) > 0
    whole = capture.figures["steps" if in_steps else "whole"] | capture.figures["work"]
    return capture.figures | {"figures": whole}


def _held(
    captures: Sequence[Samples], figures: Sequence[Figures], labels: Sequence[Hashable], unit: str, *, spanned: bool
) -> _Held:
    first = [figures[0][label] for label in labels if label in figures[0]]
    total = sum(figure.total for figure in first)
    counts = [figure.count for figure in first]
    count = None if None in counts else sum(number or 0 for number in counts)
    if unit == "trace" or not all(len(capture.windows) for capture in captures):
        mean = total / (captures[0].count or 1) if unit == "step" else float(total)
        return _Held(count, total, round(mean), mean, [])
    whole, ordinary = [], []
    for capture, of_capture in zip(captures, figures, strict=True):
        nothing = np.zeros(len(capture.windows))
        steps = sum((of_capture[label].steps for label in labels if label in of_capture), nothing)
        whole.append(steps)
        ordinary.append(steps[capture.spanned if spanned else capture.ordinary])
    middle = float(np.median(np.concatenate(ordinary)))
    return _Held(count, total, round(middle), float(np.concatenate(whole).mean()), ordinary)


def _judged_row(before: _Held, after: _Held, confidence: float, left_out: bool) -> dict[str, Any]:
    """Judge a figure of both sides."""
    delta = after.ns - before.ns
    change = noise.Change(delta)
    if before.runs and after.runs:
        change = noise.judge(before.runs, after.runs, confidence, left_out=left_out)
    word = change.word
    if word == noise.CHANGED and change.value * delta < 0:
        word = noise.WITHIN_NOISE  # a few long launches lead all of them another way than the middle
    return {
        "before_count": before.count,
        "after_count": after.count,
        "before_total_ns": before.total_ns,
        "after_total_ns": after.total_ns,
        "before_ns": before.ns,
        "after_ns": after.ns,
        "delta_ns": delta,
        # The middle of the differences is not quite the difference of the middles; the interval holds both. Nothing
        # can lose more than all it had.
        "low_ns": None if change.low is None else max(min(change.low, delta), -before.ns),
        "high_ns": None if change.high is None else max(change.high, delta),
        "change": delta / before.ns if before.ns else None,
        "mean_delta_ns": after.mean_ns - before.mean_ns,
        "between_ns": change.between,
        "significance": word,
    }


# ---------------------------------------------------------------- which row of one side is which of the other


#: How a row was paired, and its labels before and after.
_Pair = tuple[str, list[Any], list[Any]]


def _paired(comparison: Comparison, table: str, before: Sequence[Figures], after: Sequence[Figures]) -> list[_Pair]:
    """Pair the labels of both sides: by name, kernels and ranges by looser names too."""
    if table == "figures":
        # What every capture has; graph replays only where there are any.
        labels = [label for label in before[0] if all(label in figures for figures in (*before, *after))]
        if "graph_ns" in labels and not before[0]["graph_ns"].total and not after[0]["graph_ns"].total:
            labels.remove("graph_ns")
        return [("name", [label], [label]) for label in labels]
    was, now = _by_time(before[0]), _by_time(after[0])
    rounds: list[tuple[str, Callable[[Any], Hashable]]] = [("name", lambda label: label)]
    if table == "ranges":
        rounds.append(("normalised", lambda label: (label[0], pairing.plain_range(label[1]).casefold())))
    if table == "kernels":
        pairings = pairing.pair(_described(comparison.before[0], was), _described(comparison.after[0], now))
    else:
        pairings = pairing.in_rounds(was, now, rounds)
    step_kinds = comparison.before[0].step_kinds | comparison.after[0].step_kinds
    pairs: list[_Pair] = []
    for how, first, second in pairings:
        pair = (how, [was[position] for position in sorted(first)], [now[position] for position in sorted(second)])
        # Steps that only one side has are told of; they are not a part of the program that went or came.
        one_sided = how in ("appeared", "disappeared")
        if not (table == "ranges" and one_sided and (pair[1] or pair[2])[0][1] in step_kinds):
            pairs.append(pair)
    return pairs


def _by_time(figures: Figures) -> list[Any]:
    """Labels of what occurs, by falling time, so that the first of a group stands for the others."""
    labels = [label for label, figure in figures.items() if figure.count]
    return sorted(labels, key=lambda label: -figures[label].total)


def _described(capture: Samples, names: Sequence[str]) -> list[pairing.Kernel]:
    launched_by = main_operators(capture.trace)
    return [pairing.Kernel(name, category_of(name), launched_by.get(name)) for name in names]


def _named(comparison: Comparison, table: str, how: str, was: Sequence[Any], now: Sequence[Any]) -> dict[str, Any]:
    """Name a row by its first label; other columns say what it is."""
    label = (now or was)[0]
    if table == "gaps":
        return {"cause": label}
    if table == "ranges":
        return {"name": label[1], "domain": label[0], "match": how}
    if table == "operators":
        return {"name": label, "category": operators.category_of(label)}
    if table == "memops":
        moved = [_moved_bytes(capture, label) for capture in (comparison.before[0], comparison.after[0])]
        return dict(zip(_NAMED["memops"], (*label, *moved), strict=True))
    if table == "kernels":
        launched_by = main_operators(comparison.before[0].trace) | main_operators(comparison.after[0].trace)
        named = {"match": how, "category": category_of(label), "operator": launched_by.get(label)}
        return {"name": label, **named, "before_names": list(was), "after_names": list(now)}
    return {"name": label}


def _moved_bytes(capture: Samples, label: Hashable) -> Any:
    """How much was copied; nothing copies 0 bytes, so that says that it was not recorded."""
    moved = capture.figures["bytes"].get(label)
    return 0 if moved is None else moved.total or pd.NA
