"""Check where a result may be written, write it all or leave the old one, and keep folders for one user only."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nsightkit.errors import UsageError

#: Length of the key that :func:`user_secret` keeps.
_SECRET_BYTES = 32


def is_same(path: Path, other: Path) -> bool:
    """Whether two paths lead to one file or folder that exists.

    Parameters
    ----------
    path, other : Path
    """
    with suppress(OSError):  # absent, or a name that no file can have
        return path.samefile(other)
    return False


def require_free(path: Path, *, overwrite: bool = False) -> None:
    """Raise UsageError unless a file may be written there.

    Parameters
    ----------
    path : Path
    overwrite : bool
        An existing file may be replaced. A folder, a link or a device never is.
    """
    if not is_output_taken(path):
        return
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; give a file name")
    if not path.is_file():
        raise UsageError(f"{path}: is not a regular file; give another name")
    if not overwrite:
        raise UsageError(f"{path}: exists; give another name or --overwrite")


def is_output_taken(path: Path) -> bool:
    """Whether a result at `path` would replace something; raises UsageError for a link and for an absent folder.

    Parameters
    ----------
    path : Path
    """
    # os.path answers False for a name that is too long, where Path raises: opening the file then reports it.
    if not os.path.isdir(path.absolute().parent):  # noqa: PTH112
        raise UsageError(f"{path}: its folder does not exist; make it first")
    if os.path.islink(path):  # noqa: PTH114
        raise UsageError(f"{path}: is a link; give another name")
    return os.path.lexists(path)


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Yield a place beside `path` for a new file or folder, which takes the place of `path` when all is written.

    Parameters
    ----------
    path : Path
        An existing file is replaced; a folder only by a folder.

    Yields
    ------
    Path
        Of the same suffix; nothing is there. A failure leaves `path` as it was and nothing else behind.

    Raises
    ------
    UsageError
        The draft or `path` cannot be written.
    """
    try:
        # A plain name, unlike `path`: some programs expand %h in the name of their output.
        with tempfile.TemporaryDirectory(prefix=".nsightkit-", dir=path.absolute().parent) as beside:
            draft = Path(beside) / f"new{path.suffix}"
            yield draft
            # A folder cannot replace one with files in it: move that into the temporary folder, which is removed at the
            # end, and back if the draft cannot take its place.
            with ExitStack() as undo:
                if draft.is_dir() and path.is_dir() and not path.is_symlink():
                    old = path.replace(draft.with_name("old"))
                    undo.callback(old.replace, path)
                draft.replace(path)
                undo.pop_all()  # the draft is in place: forget the way back
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, which takes the place of `path` when all is written.

    Parameters
    ----------
    path : Path
        As of :func:`drafted`.

    Yields
    ------
    binary file
    """
    with drafted(path) as draft, draft.open("wb") as file:
        yield file


def user_cache() -> Path:
    """Return the folder for this user's caches that cannot be kept beside a trace; it may be absent."""
    default = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "nsightkit"


def user_secret() -> bytes:
    """Read the secret key in the user's cache folder, or create it.

    Names of cache folders beside traces are hashes with this key, so another user cannot plant a cache that we read.

    Returns
    -------
    bytes

    Raises
    ------
    OSError, UsageError
        The folder is not private, or the key cannot be written.
    """
    folder = user_cache()
    folder.mkdir(0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    if stat.S_ISDIR(state.st_mode) and _is_ours(state):
        folder.chmod(0o700)  # it may have been created with the default mode
    make_private(folder)
    file = folder / "key"
    with suppress(OSError):
        state = file.lstat()
        is_open_to_others = os.name == "posix" and state.st_mode & 0o077
        if _is_own_file(state) and state.st_size == _SECRET_BYTES and not is_open_to_others:
            return file.read_bytes()
    with replacing(file) as stream:
        Path(stream.name).chmod(0o600)
        stream.write(secrets.token_bytes(_SECRET_BYTES))
    return file.read_bytes()  # another process may have written its own key since


# -- private folders --------------------------------------------------------------------------------------------
#
# An archive or a clone can bring folders of any name, and links: its name does not make a folder ours.


def is_private(folder: Path) -> bool:
    """Check that a path is a real folder, owned by this user and writable only for this user.

    Parameters
    ----------
    folder : Path
    """
    try:
        state = folder.lstat()
    except OSError:
        return False
    is_shared = os.name == "posix" and state.st_mode & 0o022
    return stat.S_ISDIR(state.st_mode) and _is_ours(state) and not is_shared


def make_private(folder: Path) -> None:
    """Create a folder that only this user can read; accept an existing private one.

    Parameters
    ----------
    folder : Path

    Raises
    ------
    OSError
        The folder cannot be created, or something else exists there.
    """
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    if not is_private(folder):
        raise PermissionError(errno.EPERM, "not a private folder", os.fspath(folder))


def remove_folder(folder: Path, names: re.Pattern[str]) -> None:
    """Remove a private folder if it contains only this user's regular files with matching names.

    Parameters
    ----------
    folder : Path
    names : Pattern
        Matches the whole name of a file.
    """
    if not is_private(folder):
        return
    with suppress(OSError):
        files = list(folder.iterdir())
        for file in files:
            if not (names.fullmatch(file.name) and _is_own_file(file.lstat())):
                return
        for file in files:
            file.unlink()
        folder.rmdir()


def _is_ours(state: os.stat_result) -> bool:
    """Check in a result of lstat that the file or folder is this user's."""
    return os.name != "posix" or state.st_uid == os.geteuid()


def _is_own_file(state: os.stat_result) -> bool:
    """Check in a result of lstat that it is a regular file of this user."""
    return stat.S_ISREG(state.st_mode) and _is_ours(state)
