"""Where a result may be written: over nothing, or over what a person said may go."""

from __future__ import annotations

import os
from pathlib import Path

from nsightkit.errors import UsageError

__all__ = ["is_taken", "require_free"]


def require_free(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise UsageError unless a file may be written there.

    Parameters
    ----------
    path : path-like
    overwrite : bool
        An existing file may be replaced. A folder, a link or a device never is.
    """
    path = Path(path)
    if not is_taken(path):
        return
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; give a file name")
    if not path.is_file():
        raise UsageError(f"{path}: is not a regular file; give another name")
    if not overwrite:
        raise UsageError(f"{path}: exists; give another name or --overwrite")


def is_taken(path: Path) -> bool:
    """Whether a result would replace something; raises UsageError for a link, and where nothing can be.

    Parameters
    ----------
    path : Path
    """
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
