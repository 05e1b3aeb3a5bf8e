"""The tables of a report: which questions it asks, and how an answer about several traces is laid side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.timeline import gaps
from nsightkit.errors import UsageError
from nsightkit.questions import QUESTIONS
from nsightkit.report.elements import Markup, scrolled, shown, tag
from nsightkit.report.elements import section as html_section
from nsightkit.table import Table, column_of, rows_of
from nsightkit.trace.model import Trace

#: Rows of a table; the rest is summed up in a line below it.
_MOST_ROWS = 500
#: Rows that are there before a reader asks for the others.
_FIRST_ROWS = 12
_LONGEST_GAPS = 100


@dataclasses.dataclass(frozen=True)
class Section:
    """A question, and how its answer is shown.

    Attributes
    ----------
    name : str
        Of the section within the page.
    title, lead : str
        What it is about, and how to read it.
    asked : str
        Its question in :mod:`nsightkit.questions`.
    compared : tuple of str
        Columns that have a column a trace where there are several; the first one is summed over rows that are left out.
    keys : tuple of str
        Columns that say what a row is about; rows of several traces meet by them. Without any, rows are moments that
        the timeline can show, and each trace has a table of its own.
    options : mapping
        Of the question.
    by : str
        The column whose largest values come first where traces are compared, if it is not the first one.
    needs : tuple of str
        Tables that the answer needs.
    hidden : tuple of str, optional
        Columns that are left out, where they are not those that the question hides.
    """

    name: str
    title: str
    lead: str
    asked: str
    compared: tuple[str, ...]
    keys: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    by: str = ""
    needs: tuple[str, ...] = ()
    hidden: tuple[str, ...] | None = None

    def ask(self, trace: Trace) -> pd.DataFrame | None:
        """The answer; None where the trace does not hold what the question needs."""
        if not all(trace.recorded(table) for table in self.needs):
            return None
        if self.name == "gaps":
            return _longest_gaps(trace)
        try:
            found: pd.DataFrame = QUESTIONS[self.asked](trace, **self.options)
        except UsageError:
            return pd.DataFrame()  # no datasheet of a card that the trace does not name
        return found


def _longest_gaps(trace: Trace) -> pd.DataFrame:
    lengths = intervals.idle_intervals(trace)
    lasting = (lengths["end_ns"] - lengths["start_ns"]).nlargest(_LONGEST_GAPS)
    found = gaps.find(trace, min_ns=int(lasting.min()) if len(lasting) else 0).nlargest(_LONGEST_GAPS, "duration_ns")
    return found[["start_ns", "duration_ns", "device", "cause", "evidence"]]


SECTIONS = (
    Section(
        "idle",
        "Why the GPU was idle",
        "An idle gap is time in which no kernel, copy or graph ran on the device. Each gap has one cause, so the "
        "causes add up to the idle time.",
        "gaps",
        ("total_ns", "share_of_span", "count"),
        ("cause",),
        needs=("kernels",),
    ),
    Section(
        "gaps",
        "The longest gaps",
        "What the CPU was doing while the GPU had nothing to do, and the operation that ended the gap.",
        "gaps",
        ("duration_ns",),
        needs=("kernels",),
    ),
    Section(
        "categories",
        "Kernels by kind of work",
        "What kernels were built for, by their names. Times are summed, so kernels that overlap count each in full; "
        "the share is of all kernel time.",
        "kernels",
        ("total_ns", "share", "count"),
        ("name",),
        {"by": "category"},
        needs=("kernels",),
    ),
    Section(
        "kernels",
        "Kernels by name",
        "Where the GPU's time went. A kernel's mean above its median points at a few long launches.",
        "kernels",
        ("total_ns", "share", "count", "median_ns"),
        ("name", "category"),
        needs=("kernels",),
    ),
    Section(
        "ranges",
        "Ranges",
        "What the program named with NVTX or record_function. Total and exclusive are CPU time, which for asynchronous "
        "work is the time to launch it; GPU is the union of the work launched inside (rule: window), GPU span its "
        "first start to last end.",
        "ranges",
        ("total_ns", "gpu_ns", "count"),
        ("name", "domain"),
        by="gpu_ns",
        needs=("ranges",),
    ),
    Section(
        "steps",
        "Steps",
        "One row a step, from the end of the one before it to its own, work on the GPU included. Busy is the part of "
        "it in which the GPU worked.",
        "steps",
        ("wall_ns",),
        needs=("ranges",),
    ),
    Section(
        "memops",
        "Copies and memsets",
        "What was moved, between which kinds of memory, and how fast.",
        "memops",
        ("total_ns", "bytes", "gb_per_s"),
        ("kind", "src_kind", "dst_kind"),
        needs=("memops",),
    ),
    Section(
        "calls",
        "CUDA calls",
        "Time the CPU spent in the CUDA API. A long launch call often means that the queue was full; a long "
        "synchronisation that the CPU waited for the GPU.",
        "calls",
        ("total_ns", "count", "median_ns"),
        ("name",),
        needs=("calls",),
    ),
    Section(
        "os",
        "Calls of the operating system",
        "Time threads spent in the operating system, most of it waiting.",
        "calls",
        ("total_ns", "count", "median_ns"),
        ("name",),
        {"os": True},
        needs=("os_calls",),
    ),
    Section(
        "sol",
        "Against the speed of light",
        "Operators whose shapes were recorded: the least time that the card's datasheet allows them, as a share of the "
        "time they took.",
        "sol",
        ("time_ns", "sol_datasheet", "count"),
        ("name", "bound"),
        hidden=("bytes", "intensity", "sol_measured", "flops"),
        needs=("kernels",),
    ),
)


def draw(section: Section, answers: Mapping[str, pd.DataFrame | None], sources: Mapping[str, str]) -> Markup | None:
    """Draw a section's table.

    Parameters
    ----------
    section : Section
    answers : mapping of str to DataFrame or None
        By trace; None where the trace does not hold what the question needs.
    sources : mapping of str to str
        A line on where each trace is from.

    Returns
    -------
    Markup or None
        None where no trace holds anything of it.
    """
    there = {label: frame for label, frame in answers.items() if frame is not None}
    filled = {label: frame for label, frame in there.items() if len(frame)}
    if not there or (section.asked == "sol" and not filled):
        return None  # shapes are seldom recorded, and few cards have a datasheet here
    parts: list[Markup] = [tag("p", section.lead, class_="lead")]
    nothing, of = tag("p", _empty(there.values()), class_="remark"), letters(answers)
    if len(there) < len(answers):
        absent = ", ".join(label for label in answers if label not in there)
        parts.append(tag("p", f"Not recorded in {absent}.", class_="remark"))
    if not filled:
        parts.append(nothing)
    elif section.keys and len(answers) > 1:
        parts += [_several(section, filled, of), source_line({label: sources[label] for label in filled}, of)]
    else:
        for label, frame in there.items():
            if len(answers) > 1:
                parts.append(tag("h3", tag("span", of[label], class_="letter"), label))
            table = _one(section, frame, list(answers).index(label)) if len(frame) else nothing
            parts += [table, source_line({label: sources[label]}, of)]
    return html_section(section.name, section.title, *parts)


def _empty(answers: Iterable[pd.DataFrame]) -> str:
    """The text in place of empty tables."""
    empty = next((answer.about.empty for answer in answers if isinstance(answer, Table)), "no gaps")
    return f"The trace has {empty.partition(' (')[0]}."


def letters(labels: Iterable[str]) -> dict[str, str]:
    """Give each trace a letter: a file's name is wider than most columns.

    Parameters
    ----------
    labels : iterable of str
    """
    return {label: chr(ord("A") + i) if i < 26 else f"{i + 1}" for i, label in enumerate(labels)}


def source_line(sources: Mapping[str, str], of: Mapping[str, str], name: str = "p") -> Markup:
    """Say below a figure where its traces are from.

    Parameters
    ----------
    sources : mapping of str to str
        A line for each trace.
    of : mapping of str to str
        The traces' letters.
    name : str
        Of the element.
    """
    same: dict[str, list[str]] = {}
    for label, source in sources.items():
        same.setdefault(source, []).append(of[label])
    lines = [f"{', '.join(which)}: {source}" for source, which in same.items()] if len(sources) > 1 else list(same)
    return tag(name, "; ".join(lines), class_="source")


def _one(section: Section, frame: pd.DataFrame, number: int) -> Markup:
    hidden = frame.about.hidden if isinstance(frame, Table) else ()
    if section.hidden is not None:
        hidden = section.hidden
    columns = [str(c) for c in frame.columns if c not in hidden and not _says_nothing(str(c), frame[c])]
    words = {c for c in columns if column_of(c).is_text or any(isinstance(v, str) for v in frame[c])}
    placed = not section.keys
    head = tag("tr", [_header(c, words=c in words) for c in columns], _header("timeline") if placed else None)
    body = [
        tag("tr", [_cell(c, row[c]) for c in columns], _button(number, row, section.compared[0]) if placed else None)
        for row in rows_of(frame.head(_MOST_ROWS))
    ]
    return _table(section, [head], body, frame[section.compared[0]].tolist()[_MOST_ROWS:])


def _several(section: Section, answers: Mapping[str, pd.DataFrame], of: Mapping[str, str]) -> Markup:
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}  # by key, then by trace
    for label, frame in answers.items():
        for row in rows_of(frame):
            rows.setdefault(tuple(row[k] for k in section.keys), {}).setdefault(label, row)
    by = section.by or section.compared[0]
    ordered = sorted(rows, key=lambda key: -max(row[by] or 0 for row in rows[key].values()))
    keep = [(i, k) for i, k in enumerate(section.keys) if not _says_nothing(k, pd.Series([key[i] for key in ordered]))]
    head = [
        tag(
            "tr",
            [_header(k, rows=2) for _, k in keep],
            [tag("th", column_of(c).heading, colspan=len(answers), scope="colgroup") for c in section.compared],
        ),
        tag("tr", [_header(c, of[label], label) for c in section.compared for label in answers]),
    ]
    body = [
        tag(
            "tr",
            [_cell(k, key[i]) for i, k in keep],
            [_cell(c, rows[key].get(label, {}).get(c)) for c in section.compared for label in answers],
        )
        for key in ordered[:_MOST_ROWS]
    ]
    left = [row[section.compared[0]] for key in ordered[_MOST_ROWS:] for row in rows[key].values()]
    return _table(section, head, body, left)


def _says_nothing(column: str, values: pd.Series[Any]) -> bool:
    """Whether a column is the same nothing in each row."""
    if column == "device":
        return bool(values.nunique() <= 1)
    if column in {"impossible", "outlier"}:
        return not values.any()
    return column_of(column).is_text and bool((values.isna() | (values.astype(str) == "")).all())


def _header(
    column: str, letter: str | None = None, label: str | None = None, *, rows: int | None = None, words: bool = False
) -> Markup:
    text = column_of(column).heading
    words = words or column_of(column).is_text or column == "timeline"
    return tag(
        "th",
        text if letter is None else letter,
        scope="col",
        rowspan=rows,
        class_=None if words else "number",
        aria_label=None if label is None else f"{text}, {label}",
        data_sort=None if column in ("timeline", "evidence") else "text" if words else "number",
    )


def _cell(column: str, value: Any) -> Markup:
    if column in ("name", "step", "cause", "kind"):
        full, brief = shown(value), shown(column_of(column).text(value))
        # The whole name tells two instances of a template apart; the short one is what a reader looks for.
        said = (full or "(no name)",) if full == brief else (brief, " ", tag("small", full))
        kind = {"name": "name", "step": "name", "cause": "cause"}.get(column)
        return tag("th", *said, scope="row", class_=kind)
    text = column_of(column).text(value).strip()
    if column_of(column).is_text or isinstance(value, str):
        return tag("td", shown(text), class_="mark" if column == "outlier" else None)
    bar: Markup | None = None
    if value is not None and (column.startswith("share") or column == "sol_datasheet"):
        width = f"{100 * min(max(float(value), 0.0), 1.0):.1f}%"
        bar = tag("svg", tag("rect", width=width, height="100%"), class_="bar", aria_hidden="true", focusable="false")
    order = "" if value is None else str(int(value)) if isinstance(value, int) else f"{float(value):.6g}"
    return tag("td", bar, text, class_="number", data_v=order)


def _button(number: int, row: Mapping[str, Any], length: str) -> Markup:
    start = row["start_ns"]
    what = f"{column_of('start_ns').heading} {column_of('start_ns').text(start)}"
    return tag(
        "td",
        tag("button", "Show", type="button", class_="reveal", data_trace=number, data_start=start,
            data_end=start + row[length], aria_label=f"Show in the timeline: {what}", hidden=True),
    )  # fmt: skip


def _table(section: Section, head: list[Markup], body: list[Markup], rest: list[Any]) -> Markup:
    table = scrolled(section.title, head, body, data_first=_FIRST_ROWS, data_what=section.title)
    amount = f"{column_of(section.compared[0]).heading} together {column_of(section.compared[0]).text(sum(rest))}"
    text = f"{len(rest):,} further rows are not on this page ({amount}); the command line lists all."
    return tag("div", table, tag("p", text, class_="remark") if rest else None, class_="listing")
