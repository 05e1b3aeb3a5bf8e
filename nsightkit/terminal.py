"""What a command says: its answer in the format asked for on stdout, all else in lines on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from nsightkit import show

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Format", "bar", "note", "one_line", "printing", "progress", "write"]

Format = Literal["table", "csv", "json"]


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
            show.write_json(_ready(document), out)
        elif chosen == "csv":
            listed = _ready(document if rows is None else rows)
            listed = [listed] if isinstance(listed, Mapping) else listed
            show.write_csv(columns or (list(listed[0]) if listed else []), listed, out)
        else:
            from rich.console import Console

            table(Console(file=out, highlight=False, markup=False, emoji=False))


def _ready(document: Any) -> Any:
    """Values as JSON knows them; what comes row by row is long, and has been made so."""
    return show.ready(document) if isinstance(document, Mapping | list) else document


@contextlib.contextmanager
def printing() -> Iterator[Any]:
    """Give stdout, to a reader that may leave early (``| head``), as UTF-8."""
    try:
        yield show.utf8(sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more when it exits; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: object) -> str:
    """Make a message one line of printable text, whatever a file's name holds."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def note(text: str) -> None:
    """Say something beside the answer."""
    print(f"nsightkit: {one_line(text)}", file=sys.stderr)


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show on a terminal's stderr that something goes on."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(one_line(text)) + " …"):
        yield


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
        yield lambda done, text: shown.update(task, completed=done, description=escape(text))
