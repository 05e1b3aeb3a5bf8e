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
from nsightkit.table import rows_of
from nsightkit.trace.model import Trace

#: Rows of a table; a line below it counts the others.
_MOST_ROWS = 500
_LONGEST_GAPS = 100
#: Columns of each trace, where several are compared.
_COMPARED = 3
_Row = dict[str, Any]


class Section(NamedTuple):
    """A question, and how its answer is shown.

    Attributes
    ----------
    name : str
        Of the section within the page.
    title, lead : str
        What it is about, and how to read it.
    ask : callable
        The answer for a trace.
    needs : str
        The table that the answer needs.
    measures : tuple of str
        Columns to show. The first orders the rows that several traces have.
    keys : tuple of str
        Columns that identify a row; rows of several traces are joined on them.
    length : str
        Of rows without keys: the column with their duration. The timeline can show them, and each trace has its
        table.
    """

    name: str
    title: str
    lead: str
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
        gaps.summary,
        "kernels",
        ("total_ns", "share_of_span", "count"),
        ("cause",),
    ),
    Section(
        "gaps",
        "The longest gaps",
        "What the CPU was doing while the GPU had nothing to do, and the operation that ended the gap.",
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
        partial(kernels.summary, by="category"),
        "kernels",
        ("total_ns", "share", "count", "mean_ns", "median_ns"),
        ("name",),
    ),
    Section(
        "kernels",
        "Kernels by name",
        "Where the GPU's time went. A kernel's mean above its median points at a few long launches.",
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
        steps.summary,
        "ranges",
        ("step", "start_ns", "wall_ns", "busy_ns", "idle_ns", "outlier", "phase", "tokens", "sequences"),
        length="wall_ns",
    ),
    Section(
        "memops",
        "Copies and memsets",
        "What was moved, between which kinds of memory, and how fast.",
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
        calls.summary,
        "calls",
        ("total_ns", "count", "median_ns", "mean_ns", "min_ns", "max_ns"),
        ("name",),
    ),
    Section(
        "os",
        "Calls of the operating system",
        "Time threads spent in the operating system, mostly waiting.",
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
        _speed_of_light,
        "kernels",
        ("time_ns", "sol_datasheet", "count", "impossible"),
        ("name", "flops", "bound"),
    ),
)


class Listing(NamedTuple):
    """A table of a section: columns that name a row, then each measure, of each trace where several are compared."""

    sides: list[Side]
    keys: list[str]
    measures: list[str]
    rows: list[list[_Row]]  # one of each trace, empty where it has none
    hidden: int  # further rows


def listings(section: Section, sides: Sequence[Side]) -> list[Listing]:
    """Ask a section's question.

    Parameters
    ----------
    section : Section
    sides : sequence of Side
        Those that recorded what the answer needs.

    Returns
    -------
    list of Listing
        One for each trace where rows are moments, else one; none where no trace has rows.
    """
    answers: list[tuple[Side, list[_Row]]] = []
    for side in sides:
        rows = list(rows_of(section.ask(side.trace)))
        if rows:
            answers.append((side, rows))
    if section.keys and answers:
        return [_listing(section, [side for side, _ in answers], _compared(section, answers))]
    return [_listing(section, [side], [[row] for row in rows]) for side, rows in answers]


def _compared(section: Section, answers: Sequence[tuple[Side, list[_Row]]]) -> list[list[_Row]]:
    """The rows of all traces, side by side where their keys are the same."""
    by_key: dict[tuple[Any, ...], list[_Row]] = {}
    for number, (_, rows) in enumerate(answers):
        for row in rows:
            key = tuple(row[name] for name in section.keys)
            group = by_key.setdefault(key, [{} for _ in answers])
            group[number] = row
    first = section.measures[0]
    return sorted(by_key.values(), key=lambda group: -max(row.get(first) or 0 for row in group))


def _listing(section: Section, sides: list[Side], rows: list[list[_Row]]) -> Listing:
    measures = section.measures
    if section.keys and len(sides) > 1:
        measures = measures[:_COMPARED]
    hidden = max(len(rows) - _MOST_ROWS, 0)
    return Listing(sides, _filled(section.keys, rows), _filled(measures, rows), rows[:_MOST_ROWS], hidden)


def _filled(names: Sequence[str], rows: list[list[_Row]]) -> list[str]:
    """The columns that hold something: some text, some flag, more than device 0."""
    filled = []
    for name in names:
        if any(row.get(name) for group in rows for row in group):
            filled.append(name)
    return filled
