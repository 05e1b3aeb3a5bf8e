"""Files: written so that one is either the old one or the whole new one; and how to read big ones quickly."""

from __future__ import annotations

import errno
import gc
import os
import re
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nsightkit.errors import TraceError, UsageError, reading

__all__ = [
    "drafted",
    "is_private",
    "make_private",
    "remove_folder",
    "replacing",
    "require_regular",
    "uncollected",
    "user_cache",
    "user_secret",
]

#: A draft beside the file that it will become, and what is in it before it does.
_DRAFT = re.compile(r"\.nsightkit-[a-z0-9_]{8}")
_DRAFTED = re.compile(r"new[\w.-]*")
#: No draft is written for so long.
_DRAFT_SECONDS = 24 * 3600
_SECRET_BYTES = 32


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
        Of the same suffix; nothing is there. What goes wrong leaves `path` as it was and nothing else behind. The
        draft of a process that was killed stays; it is removed when another is made in its folder a day later.

    Raises
    ------
    UsageError
        It cannot be written.
    """
    path = Path(path)
    _remove_drafts(path.absolute().parent)
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


def user_secret() -> bytes:
    """Read the key in the user's cache folder that tells what this user's nsightkit wrote; make it when absent.

    Returns
    -------
    bytes

    Raises
    ------
    OSError, UsageError
        The folder is another user's, or cannot be written.
    """
    folder = user_cache()
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_private(folder)
    file = folder / "key"
    with suppress(OSError):
        state = file.lstat()
        open_to_others = os.name == "posix" and state.st_mode & 0o077
        if _is_plain(state) and state.st_size == _SECRET_BYTES and not open_to_others:
            return file.read_bytes()
    with replacing(file) as stream:
        Path(stream.name).chmod(0o600)
        stream.write(secrets.token_bytes(_SECRET_BYTES))
    return file.read_bytes()


# -- what is ours -----------------------------------------------------------------------------------------------
#
# Archives and clones hold folders of any name, and links. What is removed or trusted by its name alone may be
# somebody's home.


def is_private(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a folder of this user, not a link to one, and nobody else may write to it.

    Parameters
    ----------
    folder : path-like
    """
    try:
        state = Path(folder).lstat()
    except OSError:
        return False
    shared = os.name == "posix" and state.st_mode & 0o022
    return stat.S_ISDIR(state.st_mode) and _is_ours(state) and not shared


def make_private(folder: str | os.PathLike[str]) -> None:
    """Make a folder that only this user may read, unless it is there.

    Parameters
    ----------
    folder : path-like

    Raises
    ------
    OSError
        It cannot be made, or what is there is not private.
    """
    with suppress(FileExistsError):
        Path(folder).mkdir(0o700)
    if not is_private(folder):
        raise PermissionError(errno.EPERM, "not a private folder of this user", os.fspath(folder))


def remove_folder(folder: str | os.PathLike[str], names: re.Pattern[str]) -> None:
    """Remove a private folder that holds nothing but files of this user with certain names; leave any other.

    Parameters
    ----------
    folder : path-like
    names : Pattern
        Must match a whole name.
    """
    folder = Path(folder)
    if not is_private(folder):
        return
    _remove_drafts(folder)
    with suppress(OSError):
        files = list(folder.iterdir())
        for file in files:
            if not (names.fullmatch(file.name) and _is_plain(file.lstat())):
                return
        for file in files:
            file.unlink()
        folder.rmdir()


def _remove_drafts(folder: Path) -> None:
    """Remove the drafts that killed processes left in a folder."""
    with suppress(OSError):
        drafts = [entry for entry in folder.iterdir() if _DRAFT.fullmatch(entry.name)]
        for draft in drafts:
            with suppress(OSError):
                _remove_draft(draft)


def _remove_draft(draft: Path) -> None:
    """Remove a draft that nobody has written to for a day, if it holds nothing but a new file or a folder of files.

    One that also holds the folder that was to be replaced stays: that may be the only copy.
    """
    if not is_private(draft):
        return
    folders = [draft]
    files: list[Path] = []
    for entry in draft.iterdir():
        if not _DRAFTED.fullmatch(entry.name):
            return
        if stat.S_ISDIR(entry.lstat().st_mode):
            folders.append(entry)
            files += entry.iterdir()
        else:
            files.append(entry)
    if not all(_is_plain(file.lstat()) for file in files):
        return
    if time.time() - max(path.lstat().st_mtime for path in [*folders, *files]) < _DRAFT_SECONDS:
        return
    for file in files:
        file.unlink()
    for folder in reversed(folders):
        folder.rmdir()


def _is_ours(state: os.stat_result) -> bool:
    return os.name != "posix" or state.st_uid == os.geteuid()


def _is_plain(state: os.stat_result) -> bool:
    """Whether it is a regular file of this user, not a link to one."""
    return stat.S_ISREG(state.st_mode) and _is_ours(state)
