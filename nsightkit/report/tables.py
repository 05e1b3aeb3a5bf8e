"""The tables of a report (``sections.toml``), and how answers about several traces come side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pandas as pd

from nsightkit import questions
from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import gaps
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


class Section(msgspec.Struct, frozen=True):
    """A question, and how its answer is shown; ``sections.toml`` says what the fields are."""

    name: str
    title: str
    lead: str
    ask: str
    needs: str
    measures: list[str]
    options: dict[str, Any] = {}
    keys: list[str] = []
    length: str = ""


class _Sections(msgspec.Struct):
    section: list[Section]


SECTIONS = msgspec.toml.decode(Path(__file__).with_name("sections.toml").read_bytes(), type=_Sections).section


def _answer(section: Section, trace: Trace) -> list[_Row]:
    if section.ask == "longest gaps":
        idle = intervals.idle_intervals(trace)
        lengths = (idle["end_ns"] - idle["start_ns"]).nlargest(_LONGEST_GAPS)
        shortest_ns = 0
        if len(lengths):
            shortest_ns = int(lengths.min())
        frame = gaps.find(trace, min_ns=shortest_ns).nlargest(_LONGEST_GAPS, "duration_ns")
    else:
        try:
            frame = questions.QUESTIONS[section.ask](trace, **section.options)
        except UsageError:  # no datasheet of a card that the trace does not name
            frame = pd.DataFrame()
    return list(rows_of(frame))


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
        rows = _answer(section, side.trace)
        if rows:
            answers.append((side, rows))
    if not section.keys:
        return [_listing(section, [side], [[row] for row in rows]) for side, rows in answers]
    by_key: dict[tuple[Any, ...], list[_Row]] = {}
    for number, (_, rows) in enumerate(answers):
        for row in rows:
            key = tuple(row[name] for name in section.keys)
            group = by_key.setdefault(key, [{} for _ in answers])
            group[number] = row
    first = section.measures[0]
    groups = sorted(by_key.values(), key=lambda group: -max(row.get(first) or 0 for row in group))
    if groups:
        return [_listing(section, [side for side, _ in answers], groups)]
    return []


def _listing(section: Section, sides: list[Side], rows: list[list[_Row]]) -> Listing:
    measures = section.measures
    if len(sides) > 1:
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
