"""What changed between two captures, by how much, and whether that is more than noise.

Figures are those of a step where both captures have steps, so that captures of different length compare: the median
of the steps that do not stand out, and the interval of the shift from the steps of one capture to those of the other
(:mod:`nsightkit.analysis.core.noise`, :mod:`nsightkit.analysis.compare.per_step`). Sums over whole captures stand
beside them and are exact: the rows of a table add up to what the trace holds.

A row is judged by the size of what changed, against a step, and by noise (:mod:`nsightkit.analysis.core.noise`, whose
rule ``check`` shares). It is

``negligible``
    if it takes less than a hundredth of a step on both sides: whatever became of it, the step would not show it;
``cannot tell``
    where there are too few steps for an interval;
``within noise``
    if the change is not more than the steps' noise, and, where a side was captured more than once, than what captures
    of one program differ by;
``unsure``
    if it is by its own interval, and not among so many rows. Many rows are looked at, and some would seem to change by
    chance; so what is kept below 5 % is not the chance of each, but the share of false ones among those that are called
    more than noise (Benjamini and Hochberg, Journal of the Royal Statistical Society B 57, 1995), over the rows of all
    tables that are not negligible. The time of a step itself is the one question asked beforehand, and is judged alone.
    What lies further apart than the steps of either side spread (:func:`nsightkit.analysis.core.noise.apart`) is not
    unsure, among however many rows: a cause that was there in each step, and is gone;
``small``
    if it is more than noise, and less than a hundredth of a step: true, and it does not matter;
``exceeds step spread``
    if it is neither, and each side was captured once: how far captures of one program differ is not known then, and no
    stronger word is to be had;
``exceeds launch spread``
    if it is neither, of a kernel in captures without steps that launched it as often: what stretches of its launches
    take is held against their counterparts. Those of one run share its clock and its data: this is a weaker word;
``significant``
    if it is neither, and also exceeds what captures of one program differ by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis import verdict
from nsightkit.analysis.compare import match as pairing
from nsightkit.analysis.compare.per_step import Capture, Sums
from nsightkit.analysis.core import noise
from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.core.text import bytes_text, time_text
from nsightkit.analysis.timeline import operators
from nsightkit.errors import UsageError
from nsightkit.trace.model import Trace

__all__ = ["COLUMNS", "SIDES", "TABLES", "Comparison", "compare", "percent", "signed", "summary"]

Float = npt.NDArray[np.float64]
#: What a row is called, and its labels before and after.
_Group = tuple[Mapping[str, Any], Sequence[Hashable], Sequence[Hashable]]
#: Makes groups of the sums of each side's captures.
_Grouping = Callable[[Sequence[Sequence[Sums]]], Iterator[_Group]]

SIDES = ("before", "after")
#: Columns of each side.
_OF_SIDE = ("count", "total_ns", "ns")
#: Columns that every table has after those that name its rows.
COLUMNS = (
    *("before_count", "after_count", "before_total_ns", "after_total_ns"),
    *("before_ns", "after_ns", "delta_ns", "low_ns", "high_ns", "change"),
    *("mean_delta_ns", "between_ns", "significance"),
)
#: Columns that name the rows of each table.
_NAMED = {
    "figures": ("name",),
    "kernels": ("name", "match", "category", "operator", "before_names", "after_names"),
    "categories": ("name",),
    "operators": ("name", "clock", "category"),
    "ranges": ("name", "domain", "clock", "match"),
    "gaps": ("cause",),
    "memops": ("kind", "src_kind", "dst_kind", "before_bytes", "after_bytes"),
}
#: Every table, in the order in which people read them.
TABLES = tuple(_NAMED)
_SIGNIFICANT, _EXCEEDS, _UNSURE, _NOISE = "significant", "exceeds step spread", "unsure", "within noise"
_SMALL, _UNKNOWN, _NEGLIGIBLE, _LAUNCHES = "small", "cannot tell", "negligible", "exceeds launch spread"
#: What is more than noise, as far as that can be known.
_BEYOND = (_SIGNIFICANT, _EXCEEDS, _LAUNCHES)
#: What is left when steps that stand out are left out looks steadier than it is. Of noise with long tails, no change
#: was then called one in up to 12 % of simulated pairs; with the chance of error divided by this, in 2 to 7 %.
_LEFT_OUT = 3
#: All pairs of steps are formed for each row: of more steps than this, that many are taken.
_MOST_STEPS = 200
_ORDINARY = attrgetter("ordinary")


@dataclasses.dataclass(frozen=True)
class _Side:
    """A figure of one side: of its first capture how many and how long in all, and of all of them what a step takes."""

    count: int | None
    total_ns: int
    ns: int
    mean_ns: float
    #: In each step that says how much it varies; for kernels without steps, see Capture.launches.
    steps: Float
    #: The median of each capture's steps.
    captures: Sequence[float]


@dataclasses.dataclass(eq=False)
class _Row:
    """A figure of both sides, and what is said of its change."""

    named: Mapping[str, Any]
    before: _Side
    after: _Side
    left_out: bool
    #: Whether what varies are stretches of launches, each with its counterpart on the other side, and not steps.
    paired: bool = False
    significance: str = _NEGLIGIBLE

    @property
    def delta_ns(self) -> int:
        return self.after.ns - self.before.ns

    def between(self, confidence: float) -> float | None:
        """How far apart captures of one program may lie, where a side has several."""
        level = max(map(abs, (*self.before.captures, *self.after.captures)))
        before, after = (np.array(side.captures) / (level or 1) for side in (self.before, self.after))
        found = noise.between_runs(before, after, confidence)
        return None if found is None or not level else found * level

    def shift(self, confidence: float) -> noise.Estimate:
        """The change, with an interval where steps are known."""
        if not (len(self.before.steps) and len(self.after.steps)):
            return noise.Estimate(self.delta_ns, None, None, ())
        if self.paired:
            found = noise.median(self.after.steps - self.before.steps, confidence)
            if found.low is None or found.high is None:
                return found
            # A few long launches can lead all of them another way than the middle: then neither is sure.
            low, high = min(found.low, self.delta_ns), max(found.high, self.delta_ns)
            return dataclasses.replace(found, low=low, high=high)
        error = (1 - confidence) / (_LEFT_OUT if self.left_out else 1)
        return noise.widened(noise.shift(self.before.steps, self.after.steps, 1 - error), self.between(confidence))

    def apart(self, confidence: float) -> bool:
        """Whether what changed lies beyond doubt: apart from what was, and from what captures differ by."""
        return noise.apart(self.before.steps, self.after.steps) and abs(self.delta_ns) > (self.between(confidence) or 0)

    def written(self, confidence: float) -> dict[str, Any]:
        found, was, delta = self.shift(confidence), self.before.ns, self.delta_ns
        return {
            **self.named,
            **{f"{side}_{of}": getattr(getattr(self, side), of) for of in _OF_SIDE for side in SIDES},
            "delta_ns": delta,
            # The middle of the differences is not quite the difference of the middles; the interval holds both. Nothing
            # can lose more than all it had.
            "low_ns": None if found.low is None else max(min(found.low, delta), -was),
            "high_ns": None if found.high is None else max(found.high, delta),
            "change": delta / was if was else None,
            "mean_delta_ns": self.after.mean_ns - self.before.mean_ns,
            "between_ns": self.between(confidence),
            "significance": self.significance,
        }


class Comparison:
    """Two captures, table by table; made by :func:`compare`.

    Attributes
    ----------
    unit : {"step", "trace"}
        What ``before_ns``, ``after_ns`` and ``delta_ns`` are of: a step, where both captures hold steps, or all of it.
    steps : tuple of int or None
        How many steps `before` and `after` hold.
    judged : tuple of int
        How many steps of each side, further captures included, say what is noise: those that do not stand out.
    confidence, min_share : float
    reference_ns : int
        What sizes are measured against: a step, or the time from first operation to last.
    tables : dict of str to DataFrame
        ``figures``, ``kernels``, ``categories``, ``operators``, ``ranges``, ``gaps`` and ``memops``, the largest change
        first; each is also an attribute. After the columns that name a row come :data:`COLUMNS`.
    """

    def __init__(self, sides: Sequence[Sequence[Capture]], confidence: float, min_share: float) -> None:
        self._sides = sides
        #: The captures of which counts, totals and circumstances are given.
        self._firsts = [side[0] for side in sides]
        self.confidence, self.min_share = confidence, min_share
        every = [capture for side in sides for capture in side]
        self.unit = "step" if all(c.steps and c.outside <= _MOSTLY_OUTSIDE for c in every) else "trace"
        self.steps = tuple(capture.steps for capture in self._firsts)
        self.judged = tuple(sum(int(c.ordinary.sum()) for c in side) for side in sides)
        self._left_out = not all(c.ordinary.all() for c in every)
        operator = _by_label(lambda name: {"name": name, "category": operators.category_of(name)})
        rows: dict[str, list[_Row]] = {table: [] for table in TABLES}
        for table, make, needs, grouping in (
            ("figures", partial(Capture.figures, unit=self.unit), (), _figures),
            ("kernels", Capture.kernels, ("kernels",), self._same_kernels),
            ("categories", Capture.categories, ("kernels",), _by_label(lambda label: {"name": label})),
            ("operators", partial(Capture.operators, clock="GPU"), ("kernels", "calls", "ops"), operator),
            ("operators", partial(Capture.operators, clock="CPU"), ("ops",), operator),
            ("ranges", partial(Capture.ranges, clock="CPU"), ("ranges",), self._same_ranges),
            ("ranges", partial(Capture.ranges, clock="GPU"), ("ranges", "kernels", "calls"), self._same_ranges),
            ("gaps", Capture.gaps, ("kernels",), _by_label(lambda label: {"cause": label})),
            ("memops", Capture.memops, ("memops",), _by_label(self._copies)),
        ):
            # A framework's operators are recorded where there are any.
            if all(c.trace.recorded(t) and (t != "ops" or c.trace.size(t)) for c in every for t in needs):
                clock = {"clock": "GPU" if "kernels" in needs else "CPU"}
                rows[table] += self._rows(make, grouping, clock, Capture.spanned if table == "gaps" else _ORDINARY)
        self.reference_ns = max((max(row.before.ns, row.after.ns) for row in rows["figures"][:1]), default=0)
        self.least_ns = min_share * self.reference_ns
        self._judge(rows)
        self.tables = {
            table: _frame([row.written(confidence) for row in held], [*_NAMED[table], *COLUMNS], table != "figures")
            for table, held in rows.items()
        }
        vars(self).update(self.tables)

    def summary(self) -> dict[str, Any]:
        """Give what :func:`summary` gives.

        Returns
        -------
        dict
        """
        sides, described = self._firsts, [_described(side) for side in self._firsts]
        moved, bottleneck = _bottleneck(self, [verdict.summary(side.trace) for side in sides])
        outcome, headline = _headline(self)
        other_amount, cards = list(_other_amount(self)), [side["gpus"] for side in described]
        other_card = all(cards) and cards[0] != cards[1]
        limits = {"On different GPUs: ": other_card, "With different amounts of work: ": bool(other_amount)}
        changed = [{"table": table, **row} for table in self.tables for row in self._changed(table)]
        return {
            "headline": "".join([*(words for words, so in limits.items() if so), headline]),
            "outcome": outcome,
            "where": "" if other_amount else _where(self),
            "moved": moved,
            "bottleneck": bottleneck,
            "warnings": [
                *_circumstances(*described),
                *_about_steps(self, sides),
                *other_amount,
                *_several_gpus(*described),
                *([] if other_amount else _other_work(self)),
                *([] if other_card else _all_alike(self)),
                *_swapped(self),
                *_notes(*(side.trace.meta.notes for side in sides)),
            ],
            "changes": sorted(changed, key=lambda row: -abs(row["delta_ns"])),
            "unit": self.unit,
            "confidence": self.confidence,
            "min_share": self.min_share,
            **dict(zip(SIDES, described, strict=True)),
            **{table: frame.to_dict("records") for table, frame in self.tables.items()},
        }

    def _changed(self, table: str) -> list[dict[Any, Any]]:
        """Rows that changed enough to show, and by more than noise as far as that is known."""
        frame = self.tables[table]
        enough = frame["delta_ns"].abs() >= max(self.least_ns, 1)
        return frame[enough & frame["significance"].isin([*_BEYOND, _UNKNOWN])].to_dict("records")

    # -- rows

    def _rows(
        self,
        make: Callable[[Capture], Sums],
        grouping: _Grouping,
        clock: Mapping[str, str],
        judged: Callable[[Capture], npt.NDArray[np.bool_]],
    ) -> Iterator[_Row]:
        """Build a row for each group of labels; `judged` are the steps that say how much it varies."""
        sums = [[make(capture) for capture in side] for side in self._sides]
        steps = [[judged(capture) for capture in side] for side in self._sides]
        for named, *labels in grouping(sums):
            before, after = map(self._side, self._firsts, sums, steps, labels)
            paired = self.unit == "trace" and make is Capture.kernels and before.count == after.count
            if paired:
                before, after = (
                    dataclasses.replace(side, steps=capture.launches(names))
                    for side, capture, names in zip((before, after), self._firsts, labels, strict=True)
                )
            yield _Row({**clock, **named}, before, after, self._left_out, paired)

    def _side(
        self,
        first: Capture,
        sums: Sequence[Sums],
        judged: Sequence[npt.NDArray[np.bool_]],
        labels: Sequence[Hashable],
    ) -> _Side:
        """Sum what some labels hold in each capture of a side."""
        held = [[of[label] for label in labels if label in of] for of in sums]
        counts, total = [one.count for one in held[0]], sum(one.total_ns for one in held[0])
        count = None if None in counts else sum(n or 0 for n in counts)
        if self.unit == "trace" or not all(map(len, judged)):
            mean = total / ((first.steps or 1) if self.unit == "step" else 1)
            return _Side(count, total, round(mean), mean, np.zeros(0), [round(mean)])
        inside = [sum((one.steps for one in of), np.zeros(len(j))) for of, j in zip(held, judged, strict=True)]
        ordinary = [every[j] for every, j in zip(inside, judged, strict=True)]
        together = np.concatenate(ordinary)
        return _Side(
            count,
            total,
            round(float(np.median(together))),
            float(np.concatenate(inside).mean()),
            noise.thinned(together, _MOST_STEPS),
            [float(np.median(one)) for one in ordinary],
        )

    def _same_kernels(self, sums: Sequence[Sequence[Sums]]) -> Iterator[_Group]:
        firsts = [side[0] for side in sums]
        names = [list(map(str, of)) for of in firsts]
        differ = set(names[0]) != set(names[1])
        known = [
            capture.launchers(mine)
            if differ or capture.trace.size("ops") > 0
            else [pairing.Kernel(name, "") for name in mine]
            for capture, mine in zip(self._firsts, names, strict=True)
        ]
        operator = {kernel.name: kernel.operator for side in known for kernel in side if kernel.operator}
        every = list({*names[0], *names[1]})
        category = dict(zip(every, map(str, categorize(pd.Series(every, dtype="str"))), strict=True))
        for how, *rows in pairing.pair(known[0], known[1]):
            # By falling time, so that the first stands for the others.
            was, now = (
                sorted((mine[row] for row in found), key=lambda name, of=of: of[name].total_ns, reverse=True)  # type: ignore[misc]
                for mine, of, found in zip(names, firsts, rows, strict=True)
            )
            name = (now or was)[0]
            named = {"name": name, "match": how, "category": category[name], "operator": operator.get(name)}
            yield named | {"before_names": was, "after_names": now}, was, now

    def _same_ranges(self, sums: Sequence[Sequence[Sums]]) -> Iterator[_Group]:
        """Pair ranges, each a domain and a name: by name, then by the name without numbers."""
        sides: list[list[Any]] = [list(first) for first, *_ in sums]
        rounds: list[tuple[str, Callable[[Any], Hashable]]] = [
            ("name", lambda label: label),
            ("normalised", lambda label: (label[0], pairing.plain_range(label[1]).casefold())),
        ]
        kinds = set[str]().union(*(capture.step_kinds for capture in self._firsts))
        for how, *rows in pairing.in_rounds(sides[0], sides[1], rounds):
            was, now = ([side[row] for row in mine] for side, mine in zip(sides, rows, strict=True))
            domain, name = (now or was)[0]
            # Steps that only one side has are said to be so; they are not a part of the program that went or came.
            if (was and now) or name not in kinds:
                yield {"name": name, "domain": domain, "match": how}, was, now

    def _copies(self, kinds: Hashable) -> dict[str, Any]:
        moved = (capture.moved_bytes.get(kinds, 0) for capture in self._firsts)
        return dict(zip(_NAMED["memops"], (*kinds, *moved), strict=True))  # type: ignore[misc]

    # -- what is noise

    def _judge(self, rows: Mapping[str, Sequence[_Row]]) -> None:
        """Say of each row whether it changed by more than noise."""
        least, first = self.least_ns, set(rows["figures"][:1])
        every = [(row, table == "figures") for table, held in rows.items() for row in held]
        telling = [row for row, always in every if always or max(row.before.ns, row.after.ns) >= least]
        found = {row: row.shift(self.confidence) for row in telling}
        beyond = {row for row in telling if found[row].excludes(0)}
        among = sum(row not in first and found[row].low is not None for row in telling)
        before, sure = set[_Row](), beyond - first
        while sure != before:  # the more are accepted, the less sure each has to be
            level = 1 - (1 - self.confidence) * len(sure) / among
            before, sure = sure, {row for row in sure if row.shift(level).excludes(0)}
        several = any(len(side) > 1 for side in self._sides)
        most = _LAUNCHES if self.unit == "trace" else _SIGNIFICANT if several else _EXCEEDS
        for row in telling:
            apart = row.apart(self.confidence)
            if not apart and row not in beyond:
                row.significance = _UNKNOWN if found[row].low is None else _NOISE
            elif abs(row.delta_ns) < least:
                row.significance = _SMALL
            else:
                row.significance = most if apart or row in first | sure else _UNSURE


def _by_label(named: Callable[[Any], Mapping[str, Any]]) -> _Grouping:
    """Pair what has the same label on both sides."""

    def grouped(sums: Sequence[Sequence[Sums]]) -> Iterator[_Group]:
        held = [label for first, *_ in sums for label, of in first.items() if of.count != 0]
        return ((named(label), [label], [label]) for label in dict.fromkeys(held))

    return grouped


def _figures(sums: Sequence[Sequence[Sums]]) -> Iterator[_Group]:
    """Pair what every capture has; graph replays only where there are any."""
    for label in sums[0][0]:
        shown = label != "graph_ns" or any(first[label].total_ns for first, *_ in sums if label in first)
        if shown and all(label in of for side in sums for of in side):
            yield {"name": label}, [label], [label]


def _frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], ordered: bool) -> pd.DataFrame:
    dtypes = {
        "int64": [c for c in columns if c.endswith(("_total_ns", "before_ns", "after_ns", "delta_ns"))],
        "Int64": [c for c in columns if c.endswith(("_count", "_bytes"))],
        "float64": ("low_ns", "high_ns", "change", "mean_delta_ns", "between_ns"),
    }
    frame = pd.DataFrame(rows, columns=list(columns)).astype({c: dtype for dtype, of in dtypes.items() for c in of})
    size = frame[["delta_ns", "mean_delta_ns"]].abs().max(axis=1).sort_values(ascending=False, kind="stable")
    return frame.loc[size.index].reset_index(drop=True) if ordered else frame


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
        What takes less than this share of a step on both sides is negligible.

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
    if any(n is not None and n < 1 for n in steps):
        raise UsageError(f"{min(n for n in steps if n is not None)} is not a number of steps")
    patterns = match if isinstance(match, tuple) else (match, match)
    sides = [
        [Capture(trace, pattern, count) for trace in traces]
        for traces, pattern, count in zip(((before, *also_before), (after, *also_after)), patterns, steps, strict=True)
    ]
    return Comparison(sides, confidence, min_share)


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
            ``faster``, ``slower``, ``no change`` (or one too small to matter, or that may be noise), or
            ``cannot tell``: of a step's time, or of the time from first operation to last. With one capture a side it
            is said of these two captures, not of the programs.
        ``where``
            Another sentence: how idle and busy time changed, and which causes and kinds of kernels most. Empty where
            nothing did by a hundredth of a step.
        ``moved``
            Whether the bottleneck is another one (:mod:`nsightkit.analysis.verdict`); None where one of the captures
            does not say. ``bottleneck`` says it in words, with both.
        ``warnings``
            What differs between the captures besides the change, and what they do not show. Different cards come first.
        ``changes``
            Rows of all tables that changed by a hundredth of a step (`min_share`) or more, and by more than noise, if
            there are steps to judge that by: the largest first, each with its ``table``.
        ``unit``, ``confidence``, ``before``, ``after``
            What figures are of, and what is known of each side.
        ``figures``, ``kernels``, ``categories``, ``operators``, ``ranges``, ``gaps``, ``memops``
            The tables, as lists of rows with :data:`COLUMNS`. ``before_count`` and ``before_total_ns`` are of the whole
            capture; ``before_ns`` is the median of the ordinary steps, ``delta_ns`` the difference of the medians,
            ``low_ns`` to ``high_ns`` the interval of the shift, ``change`` the difference by what was before,
            ``mean_delta_ns`` the difference of the means over all steps, ``between_ns`` what captures of one program
            differ by. ``match`` says how kernels or ranges were paired (:mod:`nsightkit.analysis.compare.match`).

    Raises
    ------
    UsageError
        As for :func:`compare`.
    """
    return compare(before, after, **options).summary()


#: A change of all kernels alike, by more than this, is not of the program; fewer kernels than that are not all.
_CLOCK, _ALL = 0.02, 5
#: Of the GPU's time, launched in no step.
_OUTSIDE = 0.05
#: The same, where steps cannot stand for the whole.
_MOSTLY_OUTSIDE = 0.5
#: Launches of the kernels that both captures hold, in relation to each other: beyond this they did not do the same.
_AMOUNT = 0.05
#: So many times as much and more is written as a multiple.
_MULTIPLE = 10
#: Bytes that a step uploads, in relation to those of the other side.
_UPLOAD = 0.01


def percent(share: float) -> str:
    """Write a change.

    Parameters
    ----------
    share : float
        Of what was before; -0.5 is half of it gone. From ten times on it is written as a multiple.

    Examples
    --------
    >>> percent(-0.5), percent(8.99), percent(1180.9)
    ('-50.0 %', '+899.0 %', '1,182x')
    """
    return f"{100 * share:+.1f} %" if share < _MULTIPLE - 1 else f"{1 + share:,.{int(share < 99)}f}x"


def _described(side: Capture) -> dict[str, Any]:
    meta = side.trace.meta
    return {
        "name": Path(side.trace.path).name if side.trace.path else None,
        "gpus": list(dict.fromkeys(gpu.name for gpu in meta.gpus if gpu.name)),
        "device_count": len(side.overview["devices"]),
        "driver": meta.driver,
        "distributed": dict(meta.distributed),
        "steps": side.steps,
        "ordinary_steps": int(side.ordinary.sum()) if len(side.windows) else None,
        **{key: value for key, value in side.overview.items() if key != "devices"},
    }


def _headline(comparison: Comparison) -> tuple[str, str]:
    """Say in one word and in one sentence what became of the time."""
    row = next(iter(comparison.tables["figures"].to_dict("records")), {"before_ns": 0})
    if not row["before_ns"]:
        return "cannot tell", "There is no time to compare: one of the captures holds neither steps nor GPU work."
    what = "A step takes" if comparison.unit == "step" else "From the first operation to the last it takes"
    said = f"{what} {time_text(row['after_ns'])} instead of {time_text(row['before_ns'])}: {percent(row['change'])}"
    counts = f"{comparison.judged[0]} and {comparison.judged[1]} steps"
    if row["significance"] == _UNKNOWN:
        few = "one step on each side" if comparison.judged == (1, 1) else counts
        few = few if comparison.unit == "step" and min(comparison.judged) else "captures without steps"
        return "cannot tell", f"{said}; {few} cannot tell whether that is noise."
    low, high = (percent(row[end] / row["before_ns"]) for end in ("low_ns", "high_ns"))
    interval = "" if np.isnan(row["low_ns"]) else f"{100 * comparison.confidence:g} % interval {low} to {high}, "
    sure = f"{interval}of {counts}"
    if row["significance"] not in _BEYOND:
        if row["between_ns"] >= abs(row["delta_ns"]):  # NaN where each side was captured once
            sure += f"; captures of one program differ by up to {100 * row['between_ns'] / row['before_ns']:.0f} %"
        why = "Too little to matter" if row["significance"] == _SMALL else "Not beyond noise"
        return "no change", f"{why}: {said[0].lower()}{said[1:]} ({sure})."
    more, remark = "captures of one program differ by", ""
    if row["significance"] != _SIGNIFICANT:
        more, remark = "the steps of each run spread", f" {noise.ONE_RUN}"
    return "faster" if row["delta_ns"] < 0 else "slower", f"{said}, more than {more} ({sure}).{remark}"


#: So many names of what changed most are given.
_NAMED_FIRST = 2


def _where(comparison: Comparison) -> str:
    """Say where the time went: to idle or busy time, and of these to which cause or kernel."""
    changed, parts = comparison.tables["figures"].set_index("name")["delta_ns"], []
    for kind, table, name in (("idle", "gaps", "cause"), ("busy", "categories", "name")):
        delta = changed.get(f"{kind}_ns")
        named = [f"{row[name]} {signed(row['delta_ns'])}" for row in comparison._changed(table)[:_NAMED_FIRST]]
        if delta is not None and (named or abs(delta) >= max(comparison.least_ns, 1)):
            parts.append(f"GPU {kind} time {signed(delta)}" + (f" ({', '.join(named)})" if named else ""))
    return f"Where: {'; '.join(parts)}." if parts else ""


def signed(ns: float) -> str:
    """Write a change of a time.

    Parameters
    ----------
    ns : float
    """
    return f"{'+' if ns > 0 else ''}{time_text(ns)}"


def _bottleneck(comparison: Comparison, verdicts: Sequence[Mapping[str, Any]]) -> tuple[bool | None, dict[str, Any]]:
    kept = [{key: found[key] for key in ("bottleneck", "share_of_span", "confidence")} for found in verdicts]
    was, now = (found["bottleneck"] for found in kept)
    shares = [f"{100 * (found['share_of_span'] or 0):.1f} % of the time" for found in kept]
    sure = min((found["confidence"] for found in kept), key=["low", "medium", "high"].index)
    # Verdicts rest on these: the bottleneck may have moved if any of them changed by more than noise, or may have.
    figures, gaps = comparison.tables["figures"], comparison.tables["gaps"].set_index("cause")
    most = next(iter(comparison._changed("gaps")), {"cause": now})
    changes = {*figures["significance"], *gaps["significance"].reindex([was, now])}
    unknown, moved = "not-enough-data" in (was, now), was != now and not changes.isdisjoint([*_BEYOND, _UNKNOWN])
    doubt = " One of the verdicts is doubtful." if sure == "low" else ""
    other = ""
    if most["cause"] != now:
        before, after = (time_text(most[f"{side}_ns"]) for side in SIDES)
        other = f" What changed most of idle time is {most['cause']}: {before} before and {after} after."
    sentences = (  # the first that holds
        (unknown, f"Whether the bottleneck moved is not known: {was} before, {now} after."),
        (was == now, f"The bottleneck did not move: {was}, {shares[0]} before and {shares[1]} after.{other}"),
        (moved, f"The bottleneck moved from {was} ({shares[0]}) to {now} ({shares[1]}).{doubt}"),
        (True, f"The verdicts differ, {was} ({shares[0]}) and {now} ({shares[1]}), by no more than noise."),
    )
    said = next(sentence for holds, sentence in sentences if holds)
    return None if unknown else moved, {"before": kept[0], "after": kept[1], "confidence": sure, "text": said}


# ---------------------------------------------------------------- what to know besides


def _circumstances(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What was another thing than the program."""
    known = [{**side["distributed"], **{key: value or None for key, value in side.items()}} for side in (before, after)]
    said = []
    for what, key, remark in (
        ("GPUs", "gpus", "; times differ by the card, whatever changed in the program"),
        ("numbers of GPUs", "device_count", ""),
        ("tools", "tool", "; each slows the CPU down in its own way"),
        ("versions of the tool", "tool_version", ""),
        ("drivers", "driver", ""),
        ("world sizes", "world_size", ""),
        ("ranks", "rank", ""),
    ):
        one, other = (side.get(key) for side in known)
        if None not in (one, other) and one != other and (key != "tool_version" or before["tool"] == after["tool"]):
            words = [", ".join(value) if isinstance(value, list) else str(value) for value in (one, other)]
            said.append(f"Different {what}: {words[0]} before, {words[1]} after{remark}.")
    sides = {"before": (before, after), "after": (after, before)}
    only = {name: [t for t in one["missing"] if t not in other["missing"]] for name, (one, other) in sides.items()}
    return said + [
        f"The capture {name} did not record {', '.join(tables)}: what depends on that is not compared."
        for name, tables in only.items()
        if tables
    ]


def _about_steps(comparison: Comparison, sides: Sequence[Capture]) -> Iterator[str]:
    named = list(zip(SIDES, sides, strict=True))
    for (name, side), seems in zip(named, ("appeared", "disappeared"), strict=True):
        if replays := side.trace.size("graphs"):
            yield (
                f"The capture {name} holds {replays:,} CUDA-graph replays, {time_text(side.overview['graph_ns'])}, "
                f"without their kernels: what seems to have {seems} may run within them. What compares is the GPU's "
                "busy time; nsys profile --cuda-graph-trace=node records the kernels."
            )
    if comparison.unit == "trace":
        lacking = " and ".join(name for name, side in named if not side.steps)
        loose = " and ".join(f"{100 * side.outside:.0f} % {name}" for name, side in named)
        most = f"Most of the GPU's time was launched in no step ({loose})"
        yield (
            f"{f'No steps were found {lacking}' if lacking else most}: whole captures are compared, as if both did "
            "the same amount of work. Kernels launched as often are judged by their launches, which share a run's "
            "clock and data. --match names the ranges that are steps, --steps says how many there were."
        )
        return
    if sides[0].steps != sides[1].steps:
        yield f"{sides[0].steps} steps before and {sides[1].steps} after: times are those of a step."
    for name, side in named:
        wall, ordinary = side.timed["wall_ns"], side.ordinary
        if out := int((~ordinary).sum()):
            odd = "stands out and does" if out == 1 else "stand out and do"
            yield (
                f"{out} of {len(wall)} steps {name} {odd} not count as noise: the mean of all is "
                f"{time_text(wall.mean())}, the median of the others {time_text(wall[ordinary].median())}."
            )
        if side.outside > _OUTSIDE:
            yield f"{100 * side.outside:.0f} % of the GPU's time {name} was launched in no step and is not compared."


def _other_amount(comparison: Comparison) -> Iterator[str]:
    """Kernels of both captures that all run more often in one: of whole captures, one did more work."""
    table = comparison.tables["kernels"]
    both = table[(table["before_count"] > 0) & (table["after_count"] > 0)].sort_values("before_total_ns")
    if comparison.unit == "step" or not len(both):
        return
    was, now = (both[f"{side}_count"].to_numpy(np.float64) for side in SIDES)
    each = pd.Series(both["before_total_ns"].to_numpy(np.float64), now / was).sort_index(kind="stable").cumsum()
    low, high = each.index[np.searchsorted(each, each.iloc[-1] * np.array([0.25, 0.75]))]
    all_in_all = now.sum() / was.sum()  # a library that chose other kernels did not do more work
    if min(low, all_in_all) > 1 + _AMOUNT or max(high, all_in_all) < 1 / (1 + _AMOUNT):
        yield (
            f"The kernels that both captures hold ran {all_in_all:.2f} times as often after "
            f"({now.sum():,.0f} launches, {was.sum():,.0f} before): the captures hold different amounts of work, "
            "and their times do not compare."
        )


def _several_gpus(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    counts = dict.fromkeys((before["device_count"], after["device_count"]))
    if max(counts) > 1:
        held = " and ".join(map(str, counts))
        yield f"Busy and idle time, kernels and copies are sums over {held} GPUs; the wall time is not."


def _other_work(comparison: Comparison) -> Iterator[str]:
    """Copies of another size: the one trace that a batch of another size leaves everywhere."""
    who, steps = ("A step", comparison.steps) if comparison.unit == "step" else ("The program", (1, 1))
    table = comparison.tables["memops"]
    for kind, where in (("HtoD", "to the GPU"), ("DtoD", "within the GPU")):
        rows = table[table["kind"] == kind]
        if rows[["before_bytes", "after_bytes"]].isna().any(axis=None):
            continue
        (one, other), (was, now) = (
            [rows[f"{side}_{what}"].sum() / (n or 1) for side, n in zip(SIDES, steps, strict=True)]
            for what in ("bytes", "count")
        )
        # What is copied within the GPU differs with the program; only the same copies say something of their size.
        if abs(other - one) > _UPLOAD * max(one, other) and (kind == "HtoD" or was == now):
            said = f"{who} copies {bytes_text(one)} {where} before and {bytes_text(other)} after"
            yield f"{said}: its batch, its inputs or their precision may differ."
            return


def _all_alike(comparison: Comparison) -> Iterator[str]:
    """All kernels that run as often are slower, or faster, alike: a program does not do that."""
    table = comparison.tables["kernels"]
    each = table[(table["match"] == "name") & (table["before_ns"] > 0.001 * comparison.reference_ns)]
    counts, lasting = (
        each[[f"{side}_{what}" for side in SIDES]].to_numpy(np.float64) for what in ("count", "total_ns")
    )
    same = np.isclose(counts[:, 0] * (comparison.steps[1] or 1), counts[:, 1] * (comparison.steps[0] or 1))
    mean = lasting[same] / counts[same]
    low, middle, high = np.quantile(mean[:, 1] / mean[:, 0] - 1, [0.25, 0.5, 0.75]) if len(mean) >= _ALL else (0, 0, 0)
    if (low > _CLOCK or high < -_CLOCK) and high - low <= max(abs(middle) / 2, _CLOCK):
        yield (
            f"{len(mean)} kernels that run as often as before take another time, all alike: {percent(middle)} (the "
            f"middle half {percent(low)} to {percent(high)}). A clock, a power limit, another load or a batch of "
            "another size does that."
        )


def _swapped(comparison: Comparison) -> Iterator[str]:
    """Operators that run other kernels for about the same time: a library chose anew."""
    table = comparison.tables["kernels"]
    for operator, rows in table.groupby("operator", sort=False):
        delta = rows["delta_ns"]
        changed = delta[rows["significance"].isin(_BEYOND) & (delta.abs() >= comparison.least_ns)]
        if changed.min() < 0 < changed.max() and abs(delta.sum()) < changed.abs().max() / 2:
            was, now = (time_text(rows[f"{side}_ns"].sum()) for side in SIDES)
            yield f"{operator} runs other kernels, {was} before and {now} after in all: the library chose other ones."


def _notes(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    yield from (f"In both captures: {note}" for note in before if note in after)
    yield from (f"In the capture before: {note}" for note in before if note not in after)
    yield from (f"In the capture after: {note}" for note in after if note not in before)
