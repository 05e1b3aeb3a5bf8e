"""Results that print themselves: as text, HTML, CSV and JSON.

A :class:`Table` is a DataFrame that knows the unit of each column; a :class:`Record` is an answer that is one object.
Text is for people: rounded, with units, and with names shortened to what tells them apart. CSV and JSON carry exact
values: integer nanoseconds, shares from 0 to 1, and null for the unknown.

Text from a trace is hostile. Control and invisible characters become escapes, no markup is obeyed, and no CSV cell
begins like a formula. JSON decodes to the names as they are in the trace.
"""

from __future__ import annotations

import dataclasses
import html
import io
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import pandas as pd

from nsightkit.errors import plain
from nsightkit.text import Json, bytes_text, digits, json_text, read_toml, share_text, short_name, time_text

#: Rows that text and HTML show, unless more are asked for.
SHOWN_ROWS = 20
#: Line width in characters where no terminal gives one.
WIDTH = 100
#: Names are not shortened below this many characters, however narrow the terminal: they would all look alike.
_SHORTEST_NAME = 16
#: Characters of a bar that stands for a share of 1: beside labelled values, and in a table.
_LONG_BAR = 32
_SHORT_BAR = 8
#: Characters that fill 0 to 7 eighths of a cell.
_EIGHTHS = " ▏▎▍▌▋▊▉"


# ---------------------------------------------------------------- columns


@dataclasses.dataclass(frozen=True)
class Column:
    """What a column holds.

    Parameters
    ----------
    name : str
        Its key in a table, in CSV and in JSON.
    heading : str
        What text and pages call it, with the unit where a cell does not show it.
    unit : str
        A key of ``UNITS``, whose function writes the value.
    """

    name: str
    heading: str
    unit: str

    @property
    def side(self) -> Literal["left", "right"]:
        """The side on which cells are aligned: left for text, right for numbers."""
        return "left" if self.unit in _TEXT_UNITS else "right"

    def text(self, value: Any) -> str:
        """Write one value as people read it; None is a dash, or nothing in a column of marks or of several kernels."""
        if value is not None:
            return UNITS[self.unit](value)
        if self.unit in ("kernels", "outlier"):
            return ""
        return "-"


def _moment_text(value: float) -> str:
    """Write a time of the trace, in ns, as milliseconds."""
    return f"{value / 1e6:,.3f} ms"


def _large_text(value: float) -> str:
    """Write a large number with its prefix: M, G or T; below a million it is a fraction of M."""
    if not value:
        return "0"
    if value >= 1e12:
        return f"{digits(value / 1e12)} T"
    if value >= 1e9:
        return f"{digits(value / 1e9)} G"
    return f"{digits(value / 1e6)} M"


def _outlier_text(value: bool) -> str:
    """Mark an outlier."""
    return "◀ outlier" if value else ""


def _kernels_text(value: Sequence[str]) -> str:
    """Name the first of several kernels, which has the most time."""
    if not value:
        return ""
    return _cut_middle(short_name(value[0]), 24)


def _evidence_text(value: Json) -> str:
    """Name what ran in a gap, for how long, and what ended the gap.

    A range or an operator only says where in the code the program was: its length, which may be far longer than the
    gap, is left out.
    """
    parts = []
    if value.get("name"):
        parts.append(short_name(str(value["name"])))
    if value.get("end_ns") is not None and value.get("kind") not in ("range", "op"):
        parts.append(time_text(value["end_ns"] - value["start_ns"]))
    if value.get("ended_by"):
        kernel, _, _ = short_name(str(value["ended_by"])).partition("<")  # without its template arguments
        parts.append(f"→ {kernel}")
    return " ".join(parts)


def _any_text(value: Any) -> str:
    """Write a value that has no unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return digits(value)
    if isinstance(value, list):
        return "; ".join(plain(part) for part in value)
    return plain(value)


#: How values of each unit are written.
UNITS: dict[str, Callable[[Any], str]] = {
    "time": time_text,
    "moment": _moment_text,
    "bytes": bytes_text,
    "share": share_text,
    "percent": "{:.1f}%".format,
    "large": _large_text,
    "factor": "{:,.2f}x".format,
    "value": _any_text,
    "kernel": short_name,
    "kernels": _kernels_text,
    "place": _any_text,
    "evidence": _evidence_text,
    "outlier": _outlier_text,
    "word": _any_text,
    "sentence": _any_text,
}
#: Units of text, which is aligned left.
_TEXT_UNITS = ("kernel", "kernels", "place", "evidence", "outlier", "word", "sentence")
#: Units of names, which are shortened where a table is too wide; sentences are wrapped instead.
_SHORTENED_UNITS = ("kernel", "place", "evidence")
#: columns.toml: units and headings by column, and optional columns, which are hidden where no row has a value.
_COLUMNS = read_toml(__file__, "columns")
#: The units in columns.toml, by column.
_UNIT_OF = {name: unit for unit, names in _COLUMNS["units"].items() for name in names}
#: The column of bars, which is drawn beside a share.
_BAR = Column("bar", "", "word")


def column_of(name: str) -> Column:
    """Look up what a column holds; most names end in their unit.

    Parameters
    ----------
    name : str
    """
    heading = name
    unit = "value"
    for ending, unit_of_ending in (("_ns", "time"), ("_bytes", "bytes"), ("_pct", "percent")):
        if name.endswith(ending):
            heading = name.removesuffix(ending)
            unit = unit_of_ending
    heading = _COLUMNS["headings"].get(name, heading.replace("_", " "))
    return Column(name, heading, _UNIT_OF.get(name, unit))


# ---------------------------------------------------------------- values


def rows_of(frame: pd.DataFrame) -> Iterator[Json]:
    """Turn a table into one dict a row, of values that JSON takes.

    Parameters
    ----------
    frame : DataFrame
    """
    for row in frame.to_dict("records"):
        yield plain_value(row)


def plain_value(value: Any, key: str = "") -> Any:
    """Turn a value into what JSON knows, and what is nested in it.

    Parameters
    ----------
    value : object
        Numbers may be numpy's. Missing and non-finite values become None.
    key : str
        What it is called: a float under a name that ends in ``_ns`` is rounded to an integer.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain_value(member, str(name)) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(member, key) for member in value]
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return plain_value(value.tolist(), key)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        if key.endswith("_ns"):
            return round(value)
        return value
    if pd.isna(value):
        return None
    return str(value)


#: What a spreadsheet takes for the beginning of a formula: = + @ - and their full-width forms; not a negative number.
_FORMULA = re.compile(r"[=+@\uff1d\uff0b\uff20]|[-\uff0d](?!\d+(\.\d+)?$)")


def _csv_cell(value: Any) -> Any:
    """Write text so that neither a terminal nor a spreadsheet obeys it; numbers stay as they are."""
    if isinstance(value, dict | list):
        return json_text(value)
    if not isinstance(value, str):
        return value
    text = plain(value)
    if _FORMULA.match(text):  # a spreadsheet takes what begins with ' as text
        return f"'{text}"
    return text


# ---------------------------------------------------------------- results


@dataclasses.dataclass
class About:
    """What stands around a result.

    Parameters
    ----------
    title : str
        What was looked at.
    notes : sequence of str
        Lines below a table.
    remarks : sequence of str
        What to say beside the answer, such as what was not recorded.
    empty : str
        Text of a table without rows.
    hidden : sequence of str
        Columns that text leaves out.
    formats : mapping of str to str or callable
        How columns are written, in place of their unit.
    missing : str
        Text of an unknown value.
    top : int, optional
        How many rows were asked for.
    total : int
        How many rows there are before `top` cuts some off.
    not_recorded : list or dict
        Tables that the trace lacks, or of each side of a comparison.
    exit_code : int
        Of the command.
    """

    title: str = ""
    notes: Sequence[str] = ()
    remarks: Sequence[str] = ()
    empty: str = "nothing to list"
    hidden: Sequence[str] = ()
    formats: Mapping[str, str | Callable[[Any], object]] = dataclasses.field(default_factory=dict)
    missing: str = ""
    top: int | None = None
    total: int = 0
    not_recorded: Sequence[str] | Mapping[str, Sequence[str]] = ()
    exit_code: int = 0


class Printed:
    """A result that prints itself, part by part."""

    about: About

    def parts(self) -> Iterator[Part]:
        """Give what text consists of."""
        raise NotImplementedError

    def text(self, width: int = WIDTH) -> str:
        """Write the result for people.

        Parameters
        ----------
        width : int
            Of a line, in characters.
        """
        from rich.console import Console

        out = io.StringIO()
        # In a notebook rich would show what it prints there as well.
        console = Console(file=out, width=width, force_terminal=False, force_jupyter=False, color_system=None)
        for part in self.parts():
            console.print(_renderable(part, width), markup=False, highlight=False, emoji=False)
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        return "\n".join(lines).strip("\n") + "\n"

    def __repr__(self) -> str:
        return self.text().rstrip()


class Record(dict[str, Any], Printed):
    """An answer that is one object: data underneath.

    Parameters
    ----------
    values : mapping
    about : About
    """

    def __init__(self, values: Json, about: About) -> None:
        super().__init__(values)
        self.about = about

    __repr__ = Printed.__repr__  # not dict's

    def _repr_html_(self) -> str:
        return f'<pre style="font-size: 0.8em">{html.escape(self.text(88))}</pre>'  # as wide as a page of text

    def json(self) -> str:
        """Write one JSON object."""
        return json_text(plain_value(self), indent=2) + "\n"


class Table(pd.DataFrame, Printed):
    """A DataFrame that knows its units and prints itself; a selection from it is a plain DataFrame."""

    _metadata = ["about"]  # noqa: RUF012 - pandas reads it

    @classmethod
    def of(cls, rows: pd.DataFrame | Sequence[Json], top: int | None = None, **about: Any) -> Self:
        """Make a table of rows.

        Parameters
        ----------
        rows : DataFrame or sequence of mapping
        top : int, optional
            Only the first so many.
        **about
            As :class:`About` takes it.
        """
        if not isinstance(rows, pd.DataFrame):
            rows = pd.DataFrame(rows, dtype=object)  # else an unknown value would turn a column of integers into floats
        table = cls(rows[:top])
        table.about = About(**{"top": top, "total": len(rows), **about})  # the caller's own come last, and win
        return table

    __repr__ = Printed.__repr__  # not pandas'

    def parts(self) -> Iterator[Part]:
        """Give the title, the first rows, how many more there are, and the note."""
        if self.about.title:
            yield self.about.title
        if not self.about.total:
            yield self.about.empty
            return
        yield self._shown_columns()
        more = self.about.total - len(self.shown_rows())
        if more > 0:
            yield f"… {more:,} more (--top N shows more, --format json all)"
        yield from self.about.notes

    def shown_rows(self) -> list[Json]:
        """Give the rows that people see: as many as were asked for, else the first 20."""
        if self.about.top is None:
            return list(rows_of(self.head(SHOWN_ROWS)))
        return list(rows_of(self))  # `of` has left out the others

    def _shown_columns(self) -> Columns:
        """Give the columns that people see, each with the text of its cells; a share has a column of bars after it."""
        rows = self.shown_rows()
        columns = []
        for name in map(str, self.columns):
            values = [row[name] for row in rows]
            if name in self.about.hidden or (name in _COLUMNS["optional"] and not any(values)):
                continue
            column = column_of(name)
            # Text in a column without a unit is aligned left, as words are.
            if column.unit == "value" and any(isinstance(value, str) for value in values):
                column = dataclasses.replace(column, unit="word")
            columns.append((column, [self._cell_text(column, value) for value in values]))
            if name in ("share", "share_of_span"):
                columns.append((_BAR, [_bar_text(value, _SHORT_BAR) for value in values]))
        return columns

    def _cell_text(self, column: Column, value: Any) -> str:
        """Write one value as its column's format or unit has it."""
        if value is None:
            return self.about.missing or column.text(None)
        format_of_column = self.about.formats.get(column.name, column.text)
        if isinstance(format_of_column, str):
            return format_of_column.format(value)
        return str(format_of_column(value))

    def _repr_html_(self) -> str:
        rows = self.shown_rows()
        if not rows:
            return f"<p>{html.escape(plain(self.about.empty))}</p>"
        columns = []  # of HTML cells, the heading first; without bars
        for column, texts in self._shown_columns():
            if column is not _BAR:
                cells = [_html_cell("th", column, column.heading)]
                cells += [_html_cell("td", column, text) for text in texts]
                columns.append(cells)
        head, *body = ("".join(row) for row in zip(*columns, strict=True))
        more = self.about.total - len(rows)
        below = f"{more:,} more rows" if more > 0 else " ".join(self.about.notes)
        rows_html = f"<thead><tr>{head}</tr></thead><tbody><tr>{'</tr><tr>'.join(body)}</tr></tbody>"
        return f'<table class="dataframe">{rows_html}</table><p>{html.escape(plain(below))}</p>'

    def json(self) -> str:
        """Write one JSON list, with a line for each row."""
        lines = ",\n".join(map(json_text, rows_of(self)))
        if not lines:
            return "[]\n"
        return f"[\n{lines}\n]\n"

    def csv(self) -> str:
        """Write a header and all rows."""
        rows = pd.DataFrame(rows_of(self), columns=self.columns, dtype=object)
        return rows.map(_csv_cell).to_csv(index=False, lineterminator="\n")


def _html_cell(tag: str, column: Column, text: str) -> str:
    """Write a cell of an HTML table, ``th`` or ``td``."""
    return f'<{tag} style="text-align: {column.side}">{html.escape(plain(text))}</{tag}>'


# ---------------------------------------------------------------- text


@dataclasses.dataclass(frozen=True)
class Fact:
    """A labelled value, with a bar where it is a share.

    Parameters
    ----------
    label, value : str
    share : float, optional
    """

    label: str
    value: str = ""
    share: float | None = None


Columns = list[tuple[Column, list[str]]]
Part = str | list[Fact] | Columns


def _renderable(part: Any, width: int) -> Any:
    """Turn a part into what rich prints: a string into wrapped text, facts and columns into an aligned grid."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    if isinstance(part, str):
        indent = "  " if part.startswith("- ") else ""  # an item of a list
        return Text(textwrap.fill(plain(part), width, subsequent_indent=indent, break_on_hyphens=False))
    columns = part
    if isinstance(part[0], Fact):
        columns = _fact_columns(part, width)
    name_width = _name_width(columns, width)
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    grid.show_header = columns is part  # facts have no headings
    cells = []
    for column, texts in columns:
        wraps = column.unit == "sentence"
        grid.add_column(
            Text(column.heading),
            justify=column.side,
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
        )
        if column.unit in _SHORTENED_UNITS:
            cells.append(shortened(texts, name_width))
        else:
            cells.append(texts)
    for row in zip(*cells, strict=True):
        grid.add_row(*map(Text, row))
    return grid


def _fact_columns(facts: Sequence[Fact], width: int) -> Columns:
    """Lay facts out as three columns: labels, values, and shares with bars as long as a line of `width` allows."""
    labels = [plain(fact.label) for fact in facts]
    values = [plain(fact.value) for fact in facts]
    # 13: a share of 7 characters, a blank behind it, and the blanks around the columns.
    bar_cells = min(max(width - max(map(len, labels)) - max(map(len, values)) - 13, 0), _LONG_BAR)
    shares = [""] * len(facts)
    for number, fact in enumerate(facts):
        if fact.share is not None:
            shares[number] = f"{share_text(fact.share):>7} {_bar_text(fact.share, bar_cells)}"
    left = Column("", "", "word")
    right = Column("", "", "value")
    return [(left, labels), (right, values), (left, shares)]


def _name_width(columns: Columns, width: int) -> int:
    """Divide what the other columns leave of a line of `width` among those of names; gives the characters of a name."""
    from rich.cells import cell_len

    free = width - 2 * len(columns)  # blanks between columns
    name_columns = 0
    for column, texts in columns:
        if column.unit in _SHORTENED_UNITS:
            name_columns += 1
        else:
            free -= max(cell_len(text) for text in [column.heading, *texts])
    return max(free // max(name_columns, 1), _SHORTEST_NAME)


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Shorten names to a width so that names that differ in one place stay different.

    Parameters
    ----------
    names : sequence of str
    width : int
        Characters of a name.

    Examples
    --------
    >>> shortened(["kernel<float, 128, half>", "kernel<float, 128, bf16>", "copy"], 16)
    ['kernel<flo…half>', 'kernel<flo…bf16>', 'copy']
    >>> shortened(["kernel<half, float, 128, 128>", "kernel<half, bf16x, 128, 128>"], 20)
    ['kernel<ha…float, 12…', 'kernel<ha…bf16x, 12…']
    """
    names_by_cut: dict[str, list[str]] = {}
    for name in set(names):
        names_by_cut.setdefault(_cut_middle(name, width), []).append(name)
    head_width = width // 2 - 1
    rest_width = width - head_width - 1
    short = {}
    for cut, alike in names_by_cut.items():
        if len(alike) == 1:
            short[alike[0]] = cut
            continue
        # The cut fell on where these names differ: show their beginning, and what follows their common prefix.
        first_difference = len(os.path.commonprefix(alike))  # noqa: RUF071 - names, not paths
        for name in alike:
            rest = name[first_difference:]
            if len(rest) > rest_width:
                rest = f"{rest[: rest_width - 1]}…"
            short[name] = f"{name[:head_width]}…{rest}"
    return [short[name] for name in names]


def _cut_middle(name: str, width: int) -> str:
    """Cut a name in its middle to a width; a path keeps its last part, which identifies it."""
    if len(name) <= width:
        return name
    tail_width = width // 3
    if "/" in name:
        last_part_width = len(name) - name.rfind("/")  # with its slash
        # At least two thirds of the width; more for a whole last part, but room for the … stays.
        tail_width = min(max(2 * width // 3, last_part_width), width - 1)
    return f"{name[: width - 1 - tail_width]}…{name[len(name) - tail_width :]}"


def _bar_text(share: float | None, cells: int) -> str:
    """Draw a share as a bar, to an eighth of a character; a share of 1 fills all cells."""
    eighths = round(min(max(share or 0.0, 0.0), 1.0) * cells * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + _EIGHTHS[rest]).rstrip()
