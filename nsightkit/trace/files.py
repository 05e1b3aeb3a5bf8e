"""Files: written so that one is either the old one or the whole new one; and how to read big ones quickly."""

from __future__ import annotations

import gc
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from nsightkit.errors import TraceError, UsageError, reading

__all__ = ["drafted", "replacing", "require_regular", "uncollected", "user_cache"]


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise TraceError unless the path is a regular file (after following links).

    Opening a FIFO waits for a writer, and a device may never end.

    Parameters
    ----------
    path : path-like
    """
    with reading(path):
        mode = Path(path).stat().st_mode
    if stat.S_ISDIR(mode):
        raise TraceError(path, "is a folder", "give a file")
    if not stat.S_ISREG(mode):
        raise TraceError(path, "is not a regular file", "give a file that holds the data itself")


@contextmanager
def drafted(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a place beside `path` for a new file or folder, which takes the place of `path` when all is written.

    Parameters
    ----------
    path : path-like
        An existing file is replaced; a folder only by a folder.

    Yields
    ------
    Path
        Of the same suffix; nothing is there. What goes wrong leaves `path` as it was and nothing else behind.

    Raises
    ------
    UsageError
        It cannot be written.
    """
    path = Path(path)
    try:
        # Of a plain name, whatever that of `path`: some programs expand %h in what they are to write.
        with tempfile.TemporaryDirectory(prefix=".nsightkit-", dir=path.absolute().parent) as beside:
            draft = Path(beside) / f"new{path.suffix}"
            yield draft
            with ExitStack() as undo:
                if draft.is_dir() and path.is_dir() and not path.is_symlink():
                    old = path.replace(draft.with_name("old"))  # goes with the folder it is put into
                    undo.callback(old.replace, path)
                draft.replace(path)
                undo.pop_all()
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new file, which takes the place of `path` when all is written.

    Parameters
    ----------
    path : path-like
        As of :func:`drafted`.

    Yields
    ------
    binary file
    """
    with drafted(path) as draft, draft.open("wb") as file:
        yield file


@contextmanager
def uncollected() -> Iterator[None]:
    """Make millions of containers without a cycle: the collector would look through all of them, for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def user_cache() -> Path:
    """Where nsightkit keeps what it makes and cannot leave beside a trace."""
    usual = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "nsightkit"
