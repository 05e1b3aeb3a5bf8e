"""The errors nsightkit raises on purpose, and what it prints on stderr.

Each error names the file (or argument) at fault, what is wrong with it, and the remedy. The command line prints it as
one line and exits with 2. Any other exception counts as a bug in nsightkit (exit code 3), so where a file is read,
:func:`reading` turns a library's exception over a damaged file into one of these errors.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import stat
import sys
import traceback
import unicodedata
from collections.abc import Iterator
from pathlib import Path

#: A path, as :func:`open` takes it.
AnyPath = str | os.PathLike[str]
#: `sqlite3.SQLITE_FULL`, without a library that few commands need.
_SQLITE_FULL = 13


class NsightkitError(Exception):
    """Base of every error that is the input's or the environment's fault, not ours."""

    def __str__(self) -> str:
        return plain(super().__str__())  # it may name a file, and quote what is in it


class UsageError(NsightkitError):
    """An argument that cannot be honoured (an unknown GPU, a malformed time window, a bad regular expression)."""


class TraceError(NsightkitError):
    """A file that cannot be read as a trace.

    Parameters
    ----------
    path : path-like
        The file or folder at fault.
    problem : str
        What is wrong with it, in one clause.
    remedy : str
        What the reader can do about it, in one clause.
    """

    def __init__(self, path: AnyPath, problem: str, remedy: str) -> None:
        self.path = os.fspath(path)
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{self.path}: {problem}; {remedy}")

    def __reduce__(self) -> tuple[type[TraceError], tuple[str, str, str]]:
        # Worker processes send errors back: by default, pickle would pass the whole message as the only argument.
        return type(self), (self.path, self.problem, self.remedy)


def require_amount(name: str, value: float | None) -> None:
    """Refuse an amount that is not above 0 and finite.

    Parameters
    ----------
    name : str
        Of the option or argument, for the message.
    value : float or None
        The amount; None, for an option that was not given, is accepted.

    Raises
    ------
    UsageError
    """
    if value is not None and not 0 < value < math.inf:
        raise UsageError(f"{name} must be above 0 and finite, not {value:g}")


@contextlib.contextmanager
def reading(
    path: AnyPath | None,
    problem: str = "cannot be read as a trace",
    remedy: str = "export or capture it again; NSIGHTKIT_DEBUG=1 shows where it failed",
) -> Iterator[None]:
    """Turn a library's exceptions over a damaged or locked file into an error that names the file.

    Parameters
    ----------
    path : path-like, optional
        What is read; None for a trace without a file.
    problem, remedy : str
        As in :class:`TraceError`; the exception's own words are added to `problem` in parentheses. Errors of the
        operating system get their own problem and remedy.
    """
    try:
        yield
    except (NsightkitError, MemoryError):
        raise
    except Exception as error:
        if _is_of_a_full_disk(error):  # reading writes a cache or an export: the file is not at fault
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        if isinstance(error, FileNotFoundError):
            problem = "no such file"
            remedy = "check the path"
        elif isinstance(error, IsADirectoryError):
            problem = "is a folder"
            remedy = "give a file"
        elif isinstance(error, OSError) and error.strerror:  # pyarrow's of a damaged file has none
            problem = f"cannot be read ({error.strerror})"
            remedy = "check its permissions and the disk"
        else:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            problem += f" ({words[:160].rstrip(': ')})"  # no colon after the name of an exception without a message
        raise TraceError(path or "trace", problem, remedy) from error


def require_regular(path: Path) -> None:
    """Raise TraceError unless the path is a regular file (after following links).

    Opening a FIFO blocks until a writer comes, and reading a device may never end.

    Parameters
    ----------
    path : Path
    """
    with reading(path):
        mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise TraceError(path, "is a folder", "give a file")
    if not stat.S_ISREG(mode):
        raise TraceError(path, "is not a regular file", "give a file that holds the data itself")


def in_words(error: Exception) -> tuple[str, int]:
    """Turn an exception into a message and an exit code.

    Parameters
    ----------
    error : Exception

    Returns
    -------
    str
        Whose fault it is, and the remedy.
    int
        2 for the input or the environment, 3 for a bug in nsightkit.
    """
    if isinstance(error, NsightkitError):
        return str(error), 2
    if _is_of_a_full_disk(error):
        return f"the output cannot be written ({os.strerror(errno.ENOSPC)}); make room, or choose another place", 2
    if isinstance(error, MemoryError):
        return "this does not fit in memory; look at a part of it, or at a machine with more memory", 2
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("nsightkit"):
        name = error.name.partition(".")[0]
        return f"{name} is not installed, and this needs it: pip install {name}", 2
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    problem = f"internal error, a bug in nsightkit ({type(error).__name__}: {error}, at {place})"
    return f"{problem}; please report this line where you got nsightkit; NSIGHTKIT_DEBUG=1 shows the traceback", 3


def _is_of_a_full_disk(error: Exception) -> bool:
    """Whether an exception means that a disk is full or a quota used up."""
    if getattr(error, "sqlite_errorcode", None) == _SQLITE_FULL:
        return True
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


# ---------------------------------------------------------------- text on stderr


def plain(text: object) -> str:
    r"""Write text on one line; what a terminal or a page would obey or hide stands there as an escape.

    Parameters
    ----------
    text : object
        From anywhere: a name in a trace, the name of a file, another program's message.

    Examples
    --------
    >>> plain("step\n\x1b[31m1")
    'step\\n\\x1b[31m1'
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(c if is_visible(c) else c.encode("unicode_escape").decode() for c in line)


def is_visible(character: str) -> bool:
    """Whether a character shows itself, or is a space of any width."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


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
    """Show on a terminal's stderr what is being done, in place of what was shown before; nothing on other stderr.

    Parameters
    ----------
    text : str
        Empty when all is done.
    """
    if sys.stderr.isatty():
        room = shutil.get_terminal_size().columns - 1
        # To the beginning of the line, which is erased.
        print(f"\r\x1b[2K{plain(text)[:room]}", end="", file=sys.stderr, flush=True)
