"""Files: written so that one is either the old one or the whole new one, and refused where they are damaged."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nsightkit.errors import TraceError

__all__ = ["opened", "refusing", "replacing", "umask", "user_cache"]


@contextmanager
def opened(path: str | os.PathLike[str], instead: str) -> Iterator[BinaryIO]:
    """Open a file to read it; what cannot be read is an error that names the file.

    Parameters
    ----------
    path : path-like
    instead : str
        What to give instead of a folder.

    Yields
    ------
    binary file
    """
    try:
        with Path(path).open("rb") as file:
            yield file
    except FileNotFoundError:
        raise TraceError(path, "no such file", "check the path") from None
    except IsADirectoryError:
        raise TraceError(path, "is a folder", instead) from None
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror or error})", "check its permissions") from error


@contextmanager
def refusing(path: str | os.PathLike[str], problem: str, remedy: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn what a library raises on a damaged file into an error that names the file and a remedy.

    Parameters
    ----------
    path : path-like
    problem, remedy : str
        As :class:`~nsightkit.errors.TraceError` has them; the library's own words are added in parentheses.
    *kinds : type of Exception
        What is turned; the rest passes.
    """
    try:
        yield
    except kinds as error:
        detail = " ".join(str(error).split())[:160]
        raise TraceError(path, f"{problem} ({detail})", remedy) from error


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file beside `path`, which takes its place when all is written.

    Parameters
    ----------
    path : path-like
        An existing file is replaced.

    Yields
    ------
    binary file
        What goes wrong while it is open leaves `path` as it was and nothing else behind.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.absolute().parent)
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        draft.chmod(0o666 & ~umask())  # mkstemp made it private
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def umask() -> int:
    """Give the process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def user_cache() -> Path:
    """Where nsightkit keeps what it makes and cannot leave beside a trace."""
    usual = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "nsightkit"
