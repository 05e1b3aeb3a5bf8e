"""The tables of a report: which questions it asks, and how answers about several traces come side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.timeline import calls, gaps, kernels, memops, ranges, steps
from nsightkit.errors import UsageError
from nsightkit.report.sides import Side
from nsightkit.safe import plain
from nsightkit.table import column_of, rows_of
from nsightkit.trace.model import Trace

#: Rows of a table; the rest is summed up in a line below it.
_MOST_ROWS = 500
_LONGEST_GAPS = 100
#: Columns of each trace, where several are compared.
_COMPARED = 3
#: Columns that name their row.
_NAMES = ("name", "step", "cause", "kind")
#: Columns that are left out where they hold nothing, as columns of text are.
_OPTIONAL = ("device", "impossible", "outlier", "phase", "tokens", "sequences", "gb_per_s")

_Row = dict[str, Any]


class Section(NamedTuple):
    """A question, and how its answer is shown.

    Attributes
    ----------
    name : str
        Of the section within the page.
    title, lead, empty : str
        What it is about, how to read it, and the text in place of an empty table; without text there is no section.
    ask : callable
        The answer for a trace.
    needs : str
        The table that the answer needs.
    measures : tuple of str
        Columns to show. The first is summed over rows that are left out, and orders the others.
    keys : tuple of str
        Columns that say what a row is about; rows of several traces meet by them.
    length : str
        Of rows without keys: they are moments, as long as this column, which the timeline can show, and each trace
        has a table of its own.
    """

    name: str
    title: str
    lead: str
    empty: str
    ask: Callable[[Trace], pd.DataFrame]
    needs: str
    measures: tuple[str, ...]
    keys: tuple[str, ...] = ()
    length: str = ""


def _longest_gaps(trace: Trace) -> pd.DataFrame:
    idle = intervals.idle_intervals(trace)
    lengths = (idle["end_ns"] - idle["start_ns"]).nlargest(_LONGEST_GAPS)
    shortest_ns = int(lengths.min()) if len(lengths) else 0
    return gaps.find(trace, min_ns=shortest_ns).nlargest(_LONGEST_GAPS, "duration_ns")


def _speed_of_light(trace: Trace) -> pd.DataFrame:
    try:
        return sol.summary(trace)
    except UsageError:
        return pd.DataFrame()  # no datasheet of a card that the trace does not name


SECTIONS = (
    Section(
        "idle",
        "Why the GPU was idle",
        "An idle gap is time in which no kernel, copy or graph ran on the device. Each gap has one cause, so the "
        "causes add up to the idle time.",
        "The trace has no gap between the first and the last operation of a GPU.",
        gaps.summary,
        "kernels",
        ("total_ns", "share_of_span", "count"),
        ("cause",),
    ),
    Section(
        "gaps",
        "The longest gaps",
        "What the CPU was doing while the GPU had nothing to do, and the operation that ended the gap.",
        "The trace has no gap between the first and the last operation of a GPU.",
        _longest_gaps,
        "kernels",
        ("start_ns", "duration_ns", "device", "cause", "evidence"),
        length="duration_ns",
    ),
    Section(
        "categories",
        "Kernels by kind of work",
        "What kernels were built for, by their names. Times are summed, so kernels that overlap count each in full; "
        "the share is of all kernel time.",
        "The trace has no kernels.",
        partial(kernels.summary, by="category"),
        "kernels",
        ("total_ns", "share", "count", "mean_ns", "median_ns"),
        ("name",),
    ),
    Section(
        "kernels",
        "Kernels by name",
        "Where the GPU's time went. A kernel's mean above its median points at a few long launches.",
        "The trace has no kernels.",
        kernels.summary,
        "kernels",
        ("total_ns", "share", "count", "mean_ns", "median_ns", "min_ns", "max_ns"),
        ("name", "category"),
    ),
    Section(
        "ranges",
        "Ranges",
        "What the program named with NVTX or record_function. Total and exclusive are CPU time, which for asynchronous "
        "work is the time to launch it; GPU is the union of the work launched inside (rule: window), GPU span its "
        "first start to last end.",
        "The trace has no ranges.",
        ranges.summary,
        "ranges",
        ("gpu_ns", "total_ns", "count", "exclusive_ns", "median_ns", "gpu_span_ns", "kernel_count"),
        ("name", "domain"),
    ),
    Section(
        "steps",
        "Steps",
        "One row a step, from the end of the one before it to its own, work on the GPU included. Busy is the part of "
        "it in which the GPU worked.",
        "The trace has no step ranges.",
        steps.summary,
        "ranges",
        ("step", "start_ns", "wall_ns", "busy_ns", "idle_ns", "outlier", "phase", "tokens", "sequences"),
        length="wall_ns",
    ),
    Section(
        "memops",
        "Copies and memsets",
        "What was moved, between which kinds of memory, and how fast.",
        "The trace has no copies or memsets.",
        memops.summary,
        "memops",
        ("total_ns", "bytes", "gb_per_s", "count"),
        ("kind", "src_kind", "dst_kind"),
    ),
    Section(
        "calls",
        "CUDA calls",
        "Time the CPU spent in the CUDA API. A long launch call often means that the queue was full; a long "
        "synchronisation that the CPU waited for the GPU.",
        "The trace has no calls.",
        calls.summary,
        "calls",
        ("total_ns", "count", "median_ns", "mean_ns", "min_ns", "max_ns"),
        ("name",),
    ),
    Section(
        "os",
        "Calls of the operating system",
        "Time threads spent in the operating system, most of it waiting.",
        "The trace has no calls.",
        partial(calls.summary, os=True),
        "os_calls",
        ("total_ns", "count", "median_ns", "mean_ns", "min_ns", "max_ns"),
        ("name",),
    ),
    Section(
        "sol",
        "Against the speed of light",
        "Operators whose shapes were recorded: the least time that the card's datasheet allows them, as a share of the "
        "time they took.",
        "",  # shapes are seldom recorded, and few cards have a datasheet here
        _speed_of_light,
        "kernels",
        ("time_ns", "sol_datasheet", "count", "impossible"),
        ("name", "flops", "bound"),
    ),
)


class Cell(NamedTuple):
    """A value as the page shows it."""

    column: str
    text: str
    full: str  # the whole name, where the text is a short one
    order: str | None  # what a number sorts by
    percent: float | None  # the length of a share's bar


class Line(NamedTuple):
    """A row, and the moment that it is about, if it is about one."""

    cells: list[Cell]
    start_ns: int = 0
    end_ns: int = 0


class Listing(NamedTuple):
    """A table of a section: columns that name a row, then each measure, of each trace where several are compared."""

    sides: list[Side]
    keys: list[str]
    measures: list[str]
    lines: list[Line]
    rest: str


def listings(section: Section, sides: Sequence[Side], is_brief: bool) -> list[Listing]:
    """Ask a section's question.

    Parameters
    ----------
    section : Section
    sides : sequence of Side
        Those that recorded what the answer needs.
    is_brief : bool
        Few columns of each trace.

    Returns
    -------
    list of Listing
        One for each trace where rows are moments, else one; none where no trace has rows.
    """
    filled: dict[Side, list[_Row]] = {}
    for side in sides:
        rows = list(rows_of(section.ask(side.trace)))
        if rows:
            filled[side] = rows
    if not filled:
        return []
    if section.keys:
        return [_compared(section, filled, is_brief)]
    return [_moments(section, side, rows) for side, rows in filled.items()]


def _compared(section: Section, answers: dict[Side, list[_Row]], is_brief: bool) -> Listing:
    """A row for what traces have in common."""
    by_key: dict[tuple[Any, ...], dict[Side, _Row]] = {}
    every: list[_Row] = []
    for side, rows in answers.items():
        every += rows
        for row in rows:
            key = tuple(row[name] for name in section.keys)
            by_key.setdefault(key, {})[side] = row
    keys = _filled(section.keys, every)
    measures = _filled(section.measures[: _COMPARED if is_brief else None], every)
    first = section.measures[0]
    groups = sorted(by_key.values(), key=lambda group: -max(row[first] or 0 for row in group.values()))
    lines = []
    for group in groups[:_MOST_ROWS]:
        named = next(iter(group.values()))
        cells = [_cell(name, named[name]) for name in keys]
        for name in measures:
            cells += [_cell(name, group.get(side, {}).get(name)) for side in answers]
        lines.append(Line(cells))
    rest = [row[first] for group in groups[_MOST_ROWS:] for row in group.values()]
    return Listing(list(answers), keys, measures, lines, _rest_text(first, rest))


def _moments(section: Section, side: Side, rows: list[_Row]) -> Listing:
    names = _filled(section.measures, rows)
    lines = []
    for row in rows[:_MOST_ROWS]:
        cells = [_cell(name, row[name]) for name in names]
        lines.append(Line(cells, row["start_ns"], row["start_ns"] + row[section.length]))
    rest = [row[section.length] for row in rows[_MOST_ROWS:]]
    return Listing([side], [], names, lines, _rest_text(section.length, rest))


def _filled(names: Sequence[str], rows: list[_Row]) -> list[str]:
    """The columns that tell something: some text, some flag, more than device 0."""
    kept = []
    for name in names:
        is_optional = name in _OPTIONAL or column_of(name).is_text
        if not is_optional or any(row[name] not in (None, "", False) for row in rows):
            kept.append(name)
    return kept


def _cell(name: str, value: Any) -> Cell:
    text = column_of(name).text(value).strip()
    if name in _NAMES:
        # The whole name tells two instances of a template apart; the short one is what a reader looks for.
        full = plain(value)
        return Cell(name, text or "(no name)", full if full != text else "", None, None)
    if column_of(name).is_text or isinstance(value, str):
        return Cell(name, text, "", None, None)
    if value is None:
        return Cell(name, text, "", "", None)
    percent = None
    if name.startswith(("share", "sol_")):
        percent = 100 * min(max(value, 0.0), 1.0)
    return Cell(name, text, "", str(value) if isinstance(value, int) else f"{value:.6g}", percent)


def _rest_text(name: str, values: list[Any]) -> str:
    if not values:
        return ""
    amount = f"{column_of(name).heading} together {column_of(name).text(sum(values))}"
    return f"{len(values):,} further rows are not on this page ({amount}); the command line lists all."
