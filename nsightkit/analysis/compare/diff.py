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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis import verdict
from nsightkit.analysis.compare import diff_words as words
from nsightkit.analysis.compare import match as pairing
from nsightkit.analysis.compare.diff_words import SIDES, percent, signed
from nsightkit.analysis.compare.samples import COPY_COLUMNS, Figures, Samples, main_operators, samples
from nsightkit.analysis.core import noise
from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.timeline import memops, operators
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace

__all__ = ["COLUMNS", "SIDES", "TABLES", "Comparison", "compare", "percent", "signed", "summary"]

Float = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

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
    "memops": ("kind", "src_kind", "dst_kind", "before_bytes", "after_bytes"),
}
TABLES = tuple(_NAMED)
#: Of the GPU's time, launched in no step: beyond this, steps cannot stand for the whole.
_MOSTLY_OUTSIDE = 0.5


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Two captures, table by table; made by :func:`compare`.

    Parameters
    ----------
    figures, kernels, categories, operators, ranges, gaps, memops : DataFrame
        The largest change first. After the columns that name a row come :data:`COLUMNS`.
    before, after : Samples
        The two captures.
    unit : {"step", "trace"}
        What ``before_ns``, ``after_ns`` and ``delta_ns`` are of: a step, where both captures hold steps, or all of it.
    judged : tuple of int
        How many steps of each side, further captures included, say what is noise: those that do not stand out.
    confidence, min_share : float
    """

    figures: pd.DataFrame
    kernels: pd.DataFrame
    categories: pd.DataFrame
    operators: pd.DataFrame
    ranges: pd.DataFrame
    gaps: pd.DataFrame
    memops: pd.DataFrame
    before: Samples
    after: Samples
    unit: str
    judged: tuple[int, int]
    confidence: float
    min_share: float

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """How many steps `before` and `after` hold."""
        return self.before.count, self.after.count

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Every table by its name."""
        return {
            "figures": self.figures,
            "kernels": self.kernels,
            "categories": self.categories,
            "operators": self.operators,
            "ranges": self.ranges,
            "gaps": self.gaps,
            "memops": self.memops,
        }

    @property
    def least_ns(self) -> float:
        """What changed by less does not matter: a share of a step, or of the time from first operation to last."""
        sizes = self.figures[["before_ns", "after_ns"]].head(1).to_numpy()
        return self.min_share * float(sizes.max(initial=0))

    def changed(self, table: str) -> pd.DataFrame:
        """Rows that changed enough to matter, and by more than noise as far as that is known.

        Parameters
        ----------
        table : str
        """
        frame = self.tables[table]
        large = frame["delta_ns"].abs() >= max(self.least_ns, 1)
        return frame[large & (frame["significance"] != noise.WITHIN_NOISE)]

    def summary(self) -> dict[str, Any]:
        """Give what :func:`summary` gives.

        Returns
        -------
        dict
        """
        described = [_described(self.before), _described(self.after)]
        changes: list[dict[Any, Any]] = []
        for table in TABLES:
            changes += [{"table": table, **row} for row in self.changed(table).to_dict("records")]
        changes.sort(key=lambda row: -abs(row["delta_ns"]))
        facts = words.Facts(
            self.tables, changes, self.unit, self.judged, self.confidence, self.least_ns, described[0], described[1]
        )
        verdicts = [verdict.summary(side.trace) for side in (self.before, self.after)]
        moved, bottleneck = words.bottleneck(facts, verdicts)
        outcome, headline = words.headline(facts)
        return {
            "headline": headline,
            "outcome": outcome,
            "where": words.where(facts),
            "moved": moved,
            "bottleneck": bottleneck,
            "warnings": words.warnings(facts),
            "changes": changes,
            "unit": self.unit,
            "confidence": self.confidence,
            "min_share": self.min_share,
            "before": described[0],
            "after": described[1],
            **{table: frame.to_dict("records") for table, frame in self.tables.items()},
        }


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
    left_out = any(not capture.ordinary.all() for capture in (*first, *second))
    pair = _Pair(first, second, _unit([*first, *second]), confidence, left_out)
    frames = {table: _frame(table, rows) for table, rows in _tables(pair).items()}
    judged = tuple(sum(int(capture.ordinary.sum()) for capture in side) for side in (pair.before, pair.after))
    return Comparison(
        **frames,
        before=pair.before[0],
        after=pair.after[0],
        unit=pair.unit,
        judged=(judged[0], judged[1]),
        confidence=confidence,
        min_share=min_share,
    )


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


def _described(side: Samples) -> dict[str, Any]:
    """What is known of a capture."""
    meta = side.trace.meta
    names = [gpu.name for gpu in meta.gpus if gpu.name]
    wall = side.times["wall_ns"]
    described = {
        "name": Path(side.trace.path).name if side.trace.path else None,
        "gpus": list(dict.fromkeys(names)),
        "device_count": len(side.overview["devices"]),
        "driver": meta.driver,
        "distributed": dict(meta.distributed),
        "steps": side.count,
        "ordinary_steps": int(side.ordinary.sum()) if len(side.windows) else None,
        "mean_step_ns": float(wall.mean()) if len(wall) else None,
        "ordinary_step_ns": float(wall[side.ordinary].median()) if len(wall) else None,
        "outside_steps": side.outside(),
        "graph_replays": side.trace.size("graphs"),
        "notes": list(side.trace.meta.notes),
    }
    return described | {key: value for key, value in side.overview.items() if key != "devices"}


# ---------------------------------------------------------------- tables


@dataclasses.dataclass(frozen=True, eq=False)
class _Pair:
    """The captures of both sides; counts and totals are of the first of each."""

    before: Sequence[Samples]
    after: Sequence[Samples]
    unit: str
    confidence: float
    #: Whether steps that stand out were left out of any.
    left_out: bool

    def recorded(self, *tables: str) -> bool:
        """Whether every capture has recorded these tables; a framework's operators, where there are any."""
        for capture in (*self.before, *self.after):
            for table in tables:
                if not capture.trace.recorded(table) or (table == "ops" and not capture.trace.size(table)):
                    return False
        return True


def _unit(captures: Sequence[Samples]) -> str:
    """What figures are of: a step, where every capture has steps that can stand for it."""
    for capture in captures:
        if not capture.count or capture.outside() > _MOSTLY_OUTSIDE:
            return "trace"
    return "step"


class _Group(NamedTuple):
    """What a row is called, and the labels before and after that it adds up."""

    named: Mapping[str, Any]
    before: Sequence[Hashable]
    after: Sequence[Hashable]


class _Held(NamedTuple):
    """What some labels add up to on one side."""

    count: int | None
    total_ns: int
    ns: int
    mean_ns: float
    #: In the ordinary steps of each capture; nothing without steps.
    runs: Sequence[Float]


def _tables(pair: _Pair) -> dict[str, list[dict[str, Any]]]:
    tables: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    figures = _figures_of(pair, lambda capture: _whole_figures(capture, pair.unit))
    tables["figures"] = _rows(pair, figures, _figure_groups(figures))
    if pair.recorded("kernels"):
        figures = _figures_of(pair, Samples.kernels)
        tables["kernels"] = _rows(pair, figures, _kernel_groups(pair, figures), by_launches=pair.unit == "trace")
        figures = _figures_of(pair, Samples.categories)
        tables["categories"] = _rows(pair, figures, [_Group({"name": x}, [x], [x]) for x in _labels(figures)])
        figures = _figures_of(pair, Samples.gaps)
        groups = [_Group({"cause": label}, [label], [label]) for label in _labels(figures)]
        tables["gaps"] = _rows(pair, figures, groups, spanned=True)
    if pair.recorded("memops"):
        figures = _figures_of(pair, Samples.copies)
        tables["memops"] = _rows(pair, figures, _copy_groups(pair, figures))
    for clock, needs in (("GPU", ("kernels", "calls", "ops")), ("CPU", ("ops",))):
        if pair.recorded(*needs):
            figures = _figures_of(pair, lambda capture, clock=clock: capture.operators(clock))
            tables["operators"] += _rows(pair, figures, _operator_groups(figures, clock))
    for clock, needs in (("CPU", ("ranges",)), ("GPU", ("ranges", "kernels", "calls"))):
        if pair.recorded(*needs):
            figures = _figures_of(pair, lambda capture, clock=clock: capture.ranges(clock))
            tables["ranges"] += _rows(pair, figures, _range_groups(pair, figures, clock))
    return tables


#: Figures of each capture, of both sides.
_Both = tuple[list[Figures], list[Figures]]


def _figures_of(pair: _Pair, make: Callable[[Samples], Figures]) -> _Both:
    return [make(capture) for capture in pair.before], [make(capture) for capture in pair.after]


def _rows(
    pair: _Pair, figures: _Both, groups: Sequence[_Group], *, spanned: bool = False, by_launches: bool = False
) -> list[dict[str, Any]]:
    """Build a row for each group of labels."""
    rows = []
    for group in groups:
        before = _held(pair.before, figures[0], group.before, pair.unit, spanned=spanned)
        after = _held(pair.after, figures[1], group.after, pair.unit, spanned=spanned)
        if by_launches and before.count == after.count:
            before = before._replace(runs=[pair.before[0].stretches(group.before)])
            after = after._replace(runs=[pair.after[0].stretches(group.after)])
        rows.append({**group.named, **_row(pair, before, after)})
    return rows


def _held(
    captures: Sequence[Samples], figures: Sequence[Figures], labels: Sequence[Hashable], unit: str, *, spanned: bool
) -> _Held:
    first = [figures[0][label] for label in labels if label in figures[0]]
    total = sum(figure.total for figure in first)
    count: int | None = 0
    for figure in first:
        count = None if count is None or figure.count is None else count + figure.count
    if unit == "trace" or not all(len(capture.windows) for capture in captures):
        mean = total / (captures[0].count or 1) if unit == "step" else float(total)
        return _Held(count, total, round(mean), mean, [])
    whole, ordinary = [], []
    for capture, of_capture in zip(captures, figures, strict=True):
        steps = np.zeros(len(capture.windows))
        for label in labels:
            if label in of_capture:
                steps = steps + of_capture[label].steps
        whole.append(steps)
        ordinary.append(steps[capture.spanned if spanned else capture.ordinary])
    middle = float(np.median(np.concatenate(ordinary)))
    return _Held(count, total, round(middle), float(np.concatenate(whole).mean()), ordinary)


def _row(pair: _Pair, before: _Held, after: _Held) -> dict[str, Any]:
    """Judge a figure of both sides."""
    delta = after.ns - before.ns
    change = noise.Change(delta)
    if before.runs and after.runs:
        change = noise.judge(before.runs, after.runs, pair.confidence, left_out=pair.left_out)
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


def _frame(table: str, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=[*_NAMED[table], *COLUMNS])
    for column in frame:
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


# ---------------------------------------------------------------- which row of one side is which of the other


def _labels(figures: _Both) -> list[Hashable]:
    """Labels of what the first captures hold."""
    held: dict[Hashable, None] = {}
    for first in (figures[0][0], figures[1][0]):
        held |= {label: None for label, figure in first.items() if figure.count != 0}
    return list(held)


def _whole_figures(capture: Samples, unit: str) -> Figures:
    in_steps = unit == "step" and len(capture.windows) > 0
    return (capture.wall() if in_steps else capture.whole()) | capture.work()


def _figure_groups(figures: _Both) -> list[_Group]:
    """Pair what every capture has; graph replays only where there are any."""
    groups = []
    every = [*figures[0], *figures[1]]
    for label in every[0]:
        if all(label in of_capture for of_capture in every):
            replayed = any(side[0][label].total for side in figures)
            if label != "graph_ns" or replayed:
                groups.append(_Group({"name": label}, [label], [label]))
    return groups


def _kernel_groups(pair: _Pair, figures: _Both) -> list[_Group]:
    sides = []
    for capture, first in ((pair.before[0], figures[0][0]), (pair.after[0], figures[1][0])):
        names = [str(name) for name in first]
        launched_by = main_operators(capture.trace)
        kinds = categorize(pd.Series(names, dtype="str"))
        kernels = zip(names, kinds, strict=True)
        sides.append([pairing.Kernel(name, str(kind), launched_by.get(name)) for name, kind in kernels])
    groups = []
    for how, *positions in pairing.pair(*sides):
        was, now = ([side[position] for position in of_side] for side, of_side in zip(sides, positions, strict=True))
        # By falling time, so that the first stands for the others.
        was.sort(key=lambda kernel: -figures[0][0][kernel.name].total)
        now.sort(key=lambda kernel: -figures[1][0][kernel.name].total)
        first = (now or was)[0]
        named = {
            "name": first.name,
            "match": how,
            "category": first.category,
            "operator": first.operator or next((kernel.operator for kernel in was if kernel.name == first.name), None),
            "before_names": [kernel.name for kernel in was],
            "after_names": [kernel.name for kernel in now],
        }
        groups.append(_Group(named, named["before_names"], named["after_names"]))
    return groups


def _operator_groups(figures: _Both, clock: str) -> list[_Group]:
    groups = []
    for label in _labels(figures):
        named = {"name": label, "clock": clock, "category": operators.category_of(str(label))}
        groups.append(_Group(named, [label], [label]))
    return groups


def _range_groups(pair: _Pair, figures: _Both, clock: str) -> list[_Group]:
    """Pair ranges, each a domain and a name: by name, then by the name without numbers."""
    sides: list[list[Any]] = [list(figures[0][0]), list(figures[1][0])]
    rounds: list[tuple[str, Callable[[Any], Hashable]]] = [
        ("name", lambda label: label),
        ("normalised", lambda label: (label[0], pairing.plain_range(label[1]).casefold())),
    ]
    step_kinds = pair.before[0].step_kinds | pair.after[0].step_kinds
    groups = []
    for how, before, after in pairing.in_rounds(sides[0], sides[1], rounds):
        was = [sides[0][position] for position in before]
        now = [sides[1][position] for position in after]
        domain, name = (now or was)[0]
        # Steps that only one side has are told of; they are not a part of the program that went or came.
        if (was and now) or name not in step_kinds:
            groups.append(_Group({"name": name, "domain": domain, "clock": clock, "match": how}, was, now))
    return groups


def _copy_groups(pair: _Pair, figures: _Both) -> list[_Group]:
    moved = []
    for capture in (pair.before[0], pair.after[0]):
        copies = memops.summary(capture.trace)
        labels = copies[COPY_COLUMNS].itertuples(index=False, name=None)
        moved.append(dict(zip(labels, copies["bytes"], strict=True)))
    groups = []
    for label in _labels(figures):
        assert isinstance(label, tuple)
        named = dict(zip(COPY_COLUMNS, label, strict=True))
        named |= {"before_bytes": moved[0].get(label, 0), "after_bytes": moved[1].get(label, 0)}
        groups.append(_Group(named, [label], [label]))
    return groups
