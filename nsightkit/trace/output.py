"""Where a result may be written: over nothing, or over what a person said may go."""

from __future__ import annotations

import os
from pathlib import Path

from nsightkit.errors import UsageError
from nsightkit.trace.model import TABLES

__all__ = ["require_free", "require_free_folder"]


def require_free(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise UsageError unless a file may be written there.

    Parameters
    ----------
    path : path-like
    overwrite : bool
        An existing file may be replaced. A folder, a link or a device never is.
    """
    path = Path(path)
    if not _is_there(path):
        return
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; give a file name")
    if not path.is_file():
        raise UsageError(f"{path}: is not a regular file; give another name")
    if not overwrite:
        raise UsageError(f"{path}: exists; give another name or --overwrite")


#: The files of a folder that `convert` wrote.
_STORED = {"trace.json", *(f"{table}.parquet" for table in TABLES)}


def require_free_folder(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise UsageError unless a folder of tables may be written there.

    Parameters
    ----------
    path : path-like
        Nothing, or an empty folder.
    overwrite : bool
        A folder that `convert` wrote may be replaced, if it holds nothing else.
    """
    path = Path(path)
    if not _is_there(path):
        return
    if not path.is_dir():
        raise UsageError(f"{path}: is a file; give another name for the folder")
    entries = sorted(path.iterdir())
    if not entries:
        return
    foreign = [entry.name for entry in entries if entry.name not in _STORED or not _is_plain_file(entry)]
    if foreign:
        raise UsageError(f"{path}: holds what nsightkit did not write ({foreign[0]}); give another name")
    if not (path / "trace.json").exists():
        raise UsageError(f"{path}: is a folder of something else; give another name")
    if not overwrite:
        raise UsageError(f"{path}: exists; give another name or --overwrite")


def _is_there(path: Path) -> bool:
    """Whether a result would replace something; raises UsageError for a link, and where nothing can be."""
    try:
        has_folder = path.absolute().parent.is_dir()
        is_link = path.is_symlink()
        is_there = path.exists()
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
    if not has_folder:
        raise UsageError(f"{path}: its folder does not exist; make it first")
    if is_link:
        raise UsageError(f"{path}: is a link; give another name")
    return is_there


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
