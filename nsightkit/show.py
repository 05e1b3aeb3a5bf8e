"""How answers are printed: tables for people, CSV and JSON for programs; all else is a line on stderr.

The machine formats carry exact values: times as integer nanoseconds, shares as 0 to 1, and null (an empty
field) for what is not known. Tables round, humanise, and shorten names. Text from a trace is hostile: no markup in it
is obeyed, control and invisible characters are written as escapes, and a CSV cell never begins as a formula does. JSON
decodes to the names as they are in the trace.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TextIO

from nsightkit.analysis.core.text import bytes_text, count_text, digits, short_name, time_text
from nsightkit.errors import UsageError
from nsightkit.safe import json_text, plain

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

__all__ = [
    "TABLE_ROWS",
    "Format",
    "bar",
    "bytes_text",
    "cell_text",
    "count_text",
    "discard_stdout",
    "header_text",
    "is_text",
    "note",
    "plain",
    "print_facts",
    "print_lines",
    "print_rows",
    "printing",
    "progress",
    "ready",
    "rows_of",
    "short_name",
    "time_text",
    "write",
    "write_csv",
    "write_json",
]

Format = Literal["table", "csv", "json"]

#: Rows of a table on a terminal; the machine formats list all.
TABLE_ROWS = 20

_BAR_CELLS = 8
_EIGHTHS = " ▏▎▍▌▋▊▉"


# ---------------------------------------------------------------- values


def rows_of(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Turn a table into one dict a row, of values that :func:`write_json` takes.

    Parameters
    ----------
    frame : DataFrame
    """
    columns = [str(c) for c in frame.columns]
    values = [
        series.tolist()
        if series.dtype.kind in "iub" and not series.hasnans
        else [ready(v, column.endswith("_ns")) for v in series.tolist()]
        for column, series in zip(columns, (frame[c] for c in columns), strict=True)
    ]
    for row in zip(*values, strict=True):
        yield dict(zip(columns, row, strict=True))


def ready(value: Any, whole: bool = False) -> Any:
    """Turn a value into what JSON knows: integer nanoseconds, None for what is not known.

    Parameters
    ----------
    value : object
        Numbers may be numpy's; what is nested is turned too.
    whole : bool
        Round a float to an integer (keys that end in ``_ns`` say so by themselves).
    """
    if isinstance(value, Mapping):
        return {str(k): ready(v, str(k).endswith("_ns")) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [ready(v, whole) for v in value]
    if not isinstance(value, (str, bytes)) and hasattr(value, "tolist"):  # numpy's scalars and arrays
        return ready(value.tolist(), whole)
    if isinstance(value, float):
        return None if not math.isfinite(value) else round(value) if whole else value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return None if type(value).__name__ in ("NAType", "NaTType") else str(value)


def write_json(result: Mapping[str, Any] | Iterable[Mapping[str, Any]], out: TextIO) -> None:
    """Write one JSON document; a list has a line for each element.

    Parameters
    ----------
    result : mapping, or iterable of mappings
        Of values as :func:`ready` makes them.
    out : text file
    """
    if isinstance(result, Mapping):
        out.write(json_text(result, indent=2) + "\n")
        return
    before = "["
    for row in result:
        out.write(f"{before}\n{json_text(row)}")
        before = ","
    out.write("[]\n" if before == "[" else "\n]\n")


def write_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], out: TextIO) -> None:
    """Write a header and a line for each row; what is not known is an empty field, what nests is JSON.

    Parameters
    ----------
    columns : sequence of str
    rows : iterable of mappings
        Of values as :func:`ready` makes them.
    out : text file
    """
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_csv_cell(row[c]) for c in columns])


#: What a spreadsheet takes for the beginning of a formula, in either width.
_FORMULA = re.compile(r"[=+@\uff1d\uff0b\uff20]|[-\uff0d](?!\d+(\.\d+)?$)")


def _csv_cell(value: Any) -> Any:
    """Write text so that neither a terminal nor a spreadsheet obeys it; numbers stay as they are."""
    if isinstance(value, (dict, list)):
        return json_text(value)
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if _FORMULA.match(text) else text


# ---------------------------------------------------------------- text


def _large_text(value: float) -> str:
    unit, size = next(((u, s) for u, s in (("T", 1e12), ("G", 1e9)) if value >= s), ("M", 1e6))
    return f"{digits(value / size)} {unit}"


def _percent_text(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _evidence_text(value: object) -> str:
    """Say in one line what a gap's evidence is: what ran, how long, and what ended the gap."""
    if not isinstance(value, Mapping):
        return "" if value is None else plain(value)
    start, end, next_one = (value.get(key) for key in ("start_ns", "end_ns", "ended_by"))
    lasting = time_text(end - start) if isinstance(start, int) and isinstance(end, int) else ""
    ended_by = f"→ {short_name(str(next_one))}" if next_one else ""
    return " ".join(plain(part) for part in (value.get("name"), lasting, ended_by) if part)


def _place_text(value: object) -> str:
    """Write a module's path or a function's file by its last parts."""
    parts = plain(value).split("/")
    return "/".join(["…", *parts[-3:]] if len(parts) > 3 else parts)


def _fitted(text: str, width: int) -> str:
    """Cut text in its middle to a number of terminal cells."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    tail = max((width - 1) // 3, 0)
    end = text[len(text) - tail :]
    while cell_len(end) > tail:
        end = end[1:]
    return f"{set_cell_size(text, max(width - 1 - cell_len(end), 0)).rstrip()}…{end}"


# ---------------------------------------------------------------- tables

_HEADERS = {
    "total_ns": "total",
    "exclusive_ns": "exclusive (CPU)",
    "mean_ns": "mean",
    "median_ns": "median",
    "min_ns": "min",
    "max_ns": "max",
    "std_ns": "std",
    "gpu_ns": "GPU",
    "gpu_span_ns": "GPU span",
    "kernel_count": "kernels",
    "share_of_span": "of span",
    "gb_per_s": "GB/s",
    "src_kind": "from",
    "dst_kind": "to",
    "start_ns": "start",
    "end_ns": "end",
    "span_ns": "span",
    "wall_ns": "wall",
    "busy_ns": "busy",
    "idle_ns": "idle",
    "state_bytes": "state",
    "activation_bytes": "activations",
    "logits_bytes": "logits",
    "peak_bytes": "peak",
    "fwd_flops": "FLOPs fwd",
    "train_flops": "FLOPs train",
    "first_step_ns": "first step",
    "tokens_per_s": "tokens/s",
    "peak_allocated_bytes": "allocated",
    "peak_reserved_bytes": "reserved",
    "mfu_datasheet": "MFU",
    "mfu_measured": "MFU (measured)",
    "tflops": "TFLOP/s",
    "clock_mhz": "at MHz",
    "sol_datasheet": "of datasheet",
    "sol_measured": "of ceiling",
    "time_ns": "time",
    "duration_ns": "duration",
    "sm_pct": "SM",
    "memory_pct": "memory",
    "dram_pct": "DRAM",
    "occupancy_pct": "occupancy",
    "occupancy_limiter": "limited by",
    "classification": "class",
    "step_ns": "step",
    "compute_ns": "computing",
    "communication_ns": "collectives",
    "exposed_ns": "exposed",
    "waited_ns": "waited",
    "wait_ns": "waiting",
    "late_ns": "late",
    "skew_ns": "skew",
    "transfer_ns": "transfer",
    "last_rank": "last",
    "bus_gb_per_s": "bus GB/s",
    "interval": "95 % interval",
    "predicted_ns": "predicted",
    "speedup": "gain",
    "top_kernels": "top kernel",
}
#: Dropped, in this order, where a terminal is too narrow for the names.
_EXPENDABLE = (
    "interval",
    *("batch", "peak_reserved_bytes", "first_step_ns"),
    *("std_ns", "min_ns", "rule", "median_ns", "max_ns", "domain", "mean_ns", "category", "end_ns"),
    *("clock_mhz", "fwd_flops", "logits_bytes", "impossible", "flops", "count", "top_kernels", "dram_pct"),
)
_LEFT = (
    *("name", "category", "cause", "kind", "src_kind", "dst_kind", "domain", "rule", "step", "evidence", "outlier"),
    *("config", "gpu", "unit", "accumulate", "mode", "precision", "status", "site", "bound", "note"),
    *("kernel", "occupancy_limiter", "classification", "group", "change", "phase", "top_kernels"),
)
_OPTIONAL = ("domain", "interval", "outlier", "src_kind", "dst_kind", "remedy", "detail", "note", "sol_measured")
_SHRINKING = ("name", "step", "evidence", "site", "kernel", "group", "change", "where")
_WRAPPING = ("check", "found", "remedy", "detail", "notes", "source")
_NAME_CELLS, _KERNEL_CELLS = 40, 30


#: How values are written, by what their column is called; the first that fits holds. Others go by their type.
_WRITTEN: tuple[tuple[re.Pattern[str], Callable[[Any], str]], ...] = tuple(
    (re.compile(names), write)
    for names, write in (
        ("share|share_of_span|(mfu|sol)_.*", lambda value: f"{_percent_text(value):>7}"),
        ("(start|end)_ns", lambda value: "-" if value is None else f"{value / 1e6:,.3f} ms"),
        (".*_ns", time_text),
        ("(.*_)?bytes", bytes_text),
        ("params|(.*_)?flops", _large_text),
        ("outlier", lambda value: "◀ outlier" if value else ""),
        ("evidence", _evidence_text),
        (".*_pct", lambda value: _percent_text(None if value is None else value / 100)),
        ("name|kernel", lambda value: short_name(str(value))),
        ("where", _place_text),
        ("top_kernels", lambda value: _fitted(short_name(value[0]), _KERNEL_CELLS) if value else ""),
        ("speedup", lambda value: "-" if value is None else f"{value:,.2f}x"),
    )
)


@lru_cache
def _writer(column: str) -> Callable[[Any], str]:
    return next((write for names, write in _WRITTEN if names.fullmatch(column)), _typed_text)


def _typed_text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) else digits(value)
    return "; ".join(plain(part) for part in value) if isinstance(value, list) else plain(value)


def cell_text(column: str, value: Any) -> str:
    """Write a value as a table shows it; the column's name says what it is.

    Parameters
    ----------
    column : str
    value : object
        As :func:`ready` makes it.
    """
    return _writer(column)(value)


def header_text(column: str) -> str:
    """Head a column for people.

    Parameters
    ----------
    column : str
    """
    return _HEADERS.get(column, column.replace("_", " "))


def is_text(column: str) -> bool:
    """Whether a column holds words, which line up at their left.

    Parameters
    ----------
    column : str
    """
    return column in (*_LEFT, *_SHRINKING, *_WRAPPING)


def _bar(share: float | None) -> str:
    full, rest = divmod(round(min(max(share or 0.0, 0.0), 1.0) * _BAR_CELLS * 8), 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(_BAR_CELLS)


def print_rows(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    total: int | None = None,
    title: str = "",
    note: str = "",
    empty: str = "nothing to list",
) -> None:
    """Print a table fitted to the terminal.

    Parameters
    ----------
    console : rich.console.Console
    columns : sequence of str
        Keys of the rows, in order; their names decide how values are written.
    rows : sequence of mappings
        Those to show.
    total : int, optional
        How many rows there are; what is not shown is said.
    title, note : str
        A line above and a line below.
    empty : str
        What to say when there are no rows.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    if title:
        console.print(Text(plain(title), style="bold"), soft_wrap=True)
    if not rows:
        console.print(Text(empty, style="dim"))
        return
    cells = {c: [cell_text(c, row[c]) for row in rows] for c in columns}
    kept = [c for c in columns if c not in _OPTIONAL or any(cells[c])]
    widths = {c: max(cell_len(header_text(c)), *map(cell_len, cells[c])) + 2 for c in kept}
    bars = next((c for c in ("share", "share_of_span") if c in cells and _draws(console)), None)
    if bars is not None:
        widths[bars] += _BAR_CELLS + 1

    def needed() -> int:
        return sum(min(widths[c], _NAME_CELLS + 2) if c in _SHRINKING else widths[c] for c in kept)

    for column in _EXPENDABLE:
        if column in kept and needed() > console.width:
            kept.remove(column)
    if bars is not None and needed() > console.width:
        widths[bars] -= _BAR_CELLS + 1
        bars = None
    room = console.width - sum(widths[c] for c in kept if c not in _SHRINKING)
    shared = _shared(room, {c: widths[c] for c in kept if c in _SHRINKING})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for column in kept:
        table.add_column(
            Text(header_text(column)),
            justify="left" if is_text(column) else "right",
            no_wrap=column not in _WRAPPING,
            overflow="fold",
            style="dim" if column in ("category", "domain", "rule") else "",
        )
    for i, row in enumerate(rows):
        line = []
        for column in kept:
            text = _fitted(cells[column][i], shared[column] - 2) if column in shared else cells[column][i]
            bar: list[Any] = [" ", (_bar(row[column]), "cyan")] if column == bars else []
            line.append(Text.assemble(text, *bar, style="yellow" if column == "outlier" else ""))
        table.add_row(*line)
    console.print(table)
    if total is not None and total > len(rows):
        console.print(Text(f"… {total - len(rows):,} more (--format csv or json lists all)", style="dim"))
    if note:
        console.print(Text(plain(note), style="dim"), soft_wrap=True)


def _shared(room: int, wanted: dict[str, int]) -> dict[str, int]:
    """Share the room between the columns that can shrink: none gets more than it wants."""
    widths: dict[str, int] = {}
    left = max(room, 8 * len(wanted))
    for n, column in enumerate(sorted(wanted, key=wanted.__getitem__)):
        widths[column] = min(wanted[column], left // (len(wanted) - n))
        left -= widths[column]
    return widths


def _draws(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def print_facts(console: Console, facts: Sequence[tuple[str, str, float | None]], *, title: str = "") -> None:
    """Print labelled values, with a bar where a value is a share.

    Parameters
    ----------
    console : rich.console.Console
    facts : sequence of (label, value, share)
    title : str
    """
    from rich.table import Table
    from rich.text import Text

    if title:
        console.print(Text(plain(title), style="bold"), soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for label, value, share in facts:
        parts: list[Any] = [] if share is None else [cell_text("share", share)]
        if parts and _draws(console):
            parts += [" ", (_bar(share), "cyan")]
        table.add_row(Text(label, style="dim"), Text(value), Text.assemble(*parts))
    console.print(table)


def print_lines(console: Console, lines: Iterable[object], style: str = "dim") -> None:
    """Print a line for each text, whatever it holds.

    Parameters
    ----------
    console : rich.console.Console
    lines : iterable
    style : str
    """
    for line in lines:
        console.print(plain(line), style=style)


# ---------------------------------------------------------------- stdout and stderr


def write(
    format: Format | None,  # noqa: A002 - the option's name
    document: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    table: Callable[[Console], None],
    columns: Sequence[str] | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
) -> None:
    """Write one answer.

    Parameters
    ----------
    format : {'table', 'csv', 'json'}, optional
    document : mapping or iterable of mapping
        What JSON holds.
    table : callable
        Prints the answer for people.
    columns : sequence of str, optional
        Of CSV; default: all of the first row.
    rows : iterable of mapping, optional
        What CSV holds; default: the document.
    """
    chosen = format or ("table" if sys.stdout.isatty() else "csv")
    with printing() as out:
        if chosen == "json":
            write_json(_ready(document), out)
        elif chosen == "csv":
            listed = _ready(document if rows is None else rows)
            listed = [listed] if isinstance(listed, Mapping) else listed
            write_csv(columns or (list(listed[0]) if listed else []), listed, out)
        else:
            from rich.console import Console

            class Terminal(Console):
                def on_broken_pipe(self) -> None:  # rich would end with 1, which is a check's answer
                    raise BrokenPipeError

            table(Terminal(file=out, highlight=False, markup=False, emoji=False))


def _ready(document: Any) -> Any:
    """Values as JSON knows them; what comes row by row is long, and has been made so."""
    return ready(document) if isinstance(document, Mapping | list) else document


@contextlib.contextmanager
def printing() -> Iterator[Any]:
    """Give stdout, to a reader that may leave early (``| head``), as UTF-8."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # traces hold bytes that are not UTF-8
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()
    except OSError as error:
        discard_stdout()
        raise UsageError(f"stdout: cannot be written ({error.strerror or error}); choose another place") from error


def discard_stdout() -> None:
    """Let what is left for stdout go nowhere: Python writes it once more when it exits, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """Say something beside the answer."""
    with contextlib.suppress(OSError):  # a stderr that takes no text is no reason to end without the answer
        print(f"nsightkit: {plain(text)}", file=sys.stderr)


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show on a terminal's stderr that something goes on, once it has for a second."""
    if not sys.stderr.isatty():
        yield
        return
    shown = contextlib.ExitStack()

    def show_it() -> None:
        from rich.console import Console
        from rich.markup import escape

        shown.enter_context(Console(stderr=True).status(escape(plain(text)) + " …"))

    timer = threading.Timer(1.0, show_it)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be about to show it
        shown.close()


@contextlib.contextmanager
def bar(total: int) -> Iterator[Callable[[int, str], None] | None]:
    """Show on a terminal's stderr how many of some measurements are done, and which is next."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total)
        yield lambda done, text: shown.update(task, completed=done, description=escape(plain(text)))
