"""Stdout and stderr: one answer on the first; remarks, errors and progress on the second."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from typing import TYPE_CHECKING, Literal

from nsightkit.errors import UsageError
from nsightkit.safe import plain

if TYPE_CHECKING:
    from nsightkit.table import Record, Table


Format = Literal["text", "csv", "json"]


def write(result: Table | Record | str, form: Format = "text") -> None:
    """Write an answer to stdout.

    Parameters
    ----------
    result : Table, Record or str
        Text goes out as it is.
    form : {"text", "csv", "json"}
    """
    if isinstance(result, str):
        text = result
    elif form == "text":
        text = _text_for_stdout(result)
    elif hasattr(result, form):
        text = getattr(result, form)()
    else:
        raise UsageError("--format csv: CSV is for tables, and this answer is not one; take json or text")
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # traces hold bytes that are not UTF-8
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader left early, such as head
        discard_stdout()
    except OSError as error:
        discard_stdout()
        raise UsageError(f"stdout: cannot be written ({error.strerror or error}); choose another place") from error


def _text_for_stdout(result: Table | Record) -> str:
    """Fit an answer to the terminal; a pipe or a log gets lines of one width."""
    if sys.stdout.isatty():
        return result.text(shutil.get_terminal_size().columns)
    width = os.environ.get("COLUMNS", "")
    if width.isdecimal() and int(width):
        return result.text(int(width))
    return result.text()


def discard_stdout() -> None:
    """Discard what is left for stdout: Python flushes it again at exit, which must not fail a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """Print a remark on stderr.

    Parameters
    ----------
    text : str
    """
    with contextlib.suppress(OSError):  # a closed stderr must not lose the answer
        progress("")
        print(f"nsightkit: {plain(text)}", file=sys.stderr)


def progress(text: str) -> None:
    """Show on a terminal's stderr what is being done, in place of what was shown before.

    Parameters
    ----------
    text : str
        Empty when all is done.
    """
    if sys.stderr.isatty():
        room = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[2K{plain(text)[:room]}", end="", file=sys.stderr, flush=True)
