"""The tables of a report (``sections.toml``), and how answers about several traces come side by side."""

from __future__ import annotations

from collections import Counter
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
#: Rows of the table of the longest gaps.
_LONGEST_GAPS = 100
#: Measures of each trace, where several are compared: more do not fit the width of a page.
_MEASURES_COMPARED = 3
#: A row of an answer, by column.
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


def _answer_rows(section: Section, trace: Trace) -> list[_Row]:
    """Ask a section's question about one trace, and give the rows of its answer; none where it has no answer."""
    if section.ask == "longest gaps":  # all others are keys of QUESTIONS
        # Finding a gap's evidence takes long: leave out those shorter than the last of the longest.
        idle = intervals.idle_intervals(trace)
        longest = (idle["end_ns"] - idle["start_ns"]).nlargest(_LONGEST_GAPS)
        shortest_ns = int(longest.min()) if len(longest) else 0
        frame = gaps.find(trace, min_ns=shortest_ns).nlargest(_LONGEST_GAPS, "duration_ns")
    else:
        try:
            frame = questions.QUESTIONS[section.ask](trace, **section.options)
        except UsageError:  # no datasheet of a card that the trace does not name
            frame = pd.DataFrame()
    return list(rows_of(frame))


class Listing(NamedTuple):
    """A table of a section, about one trace or several side by side."""

    sides: list[Side]
    keys: list[str]  # the first columns, which name a row
    measures: list[str]  # the columns after them, once for each side
    rows: list[list[_Row]]  # for each row of the table, its row in the answer about each side, {} where that has none
    hidden: int  # how many rows are left out


def listings(section: Section, sides: Sequence[Side]) -> list[Listing]:
    """Ask a section's question about all traces, and lay the answers side by side where rows have keys.

    Parameters
    ----------
    section : Section
    sides : sequence of Side
        Those that recorded what the answer needs.

    Returns
    -------
    list of Listing
        One for all traces, with their rows matched by key, or, where rows have no keys, because they are moments such
        as gaps, one for each trace. Empty where no trace has rows.
    """
    answers: list[tuple[Side, list[_Row]]] = []
    for side in sides:
        rows = _answer_rows(section, side.trace)
        if rows:
            answers.append((side, rows))
    if not section.keys:  # each row of a table about one side is a list of one
        return [_listing(section, [side], [[row] for row in rows]) for side, rows in answers]
    rows_by_key: dict[tuple[Any, ...], list[_Row]] = {}
    for side_number, (_, rows) in enumerate(answers):
        repeats: Counter[Any] = Counter()  # rows so far with each key
        for row in rows:
            key = tuple(row[name] for name in section.keys)
            repeats[key] += 1
            # Rows of a trace may share a key, such as sums of a matrix by row and by column: the n-th match the n-th.
            rows_of_sides = rows_by_key.setdefault((*key, repeats[key]), [{} for _ in answers])
            rows_of_sides[side_number] = row
    # By the first measure, on the side that has most of it.
    first_measure = section.measures[0]
    joined = sorted(rows_by_key.values(), key=lambda rows: -max(row.get(first_measure) or 0 for row in rows))
    return [_listing(section, [side for side, _ in answers], joined)] if joined else []


def _listing(section: Section, sides: list[Side], rows: list[list[_Row]]) -> Listing:
    """Make a table for the page, without empty columns and rows beyond the limit; `rows` as in :class:`Listing`."""
    measures = section.measures
    if len(sides) > 1:
        measures = measures[:_MEASURES_COMPARED]
    return Listing(
        sides=sides,
        keys=_filled_columns(section.keys, rows),
        measures=_filled_columns(measures, rows),
        rows=rows[:_MOST_ROWS],
        hidden=max(len(rows) - _MOST_ROWS, 0),
    )


def _filled_columns(names: Sequence[str], rows: list[list[_Row]]) -> list[str]:
    """The columns that are not empty, False or 0 in all rows: the device is no column where all rows have GPU 0."""
    all_rows = [row for rows_of_traces in rows for row in rows_of_traces]
    return [name for name in names if any(row.get(name) for row in all_rows)]
