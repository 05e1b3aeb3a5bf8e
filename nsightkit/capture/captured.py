"""What a capture left behind, and where it is put."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from nsightkit.errors import UsageError

__all__ = ["Captured", "settle", "target"]


@dataclasses.dataclass(frozen=True)
class Captured:
    """The result of a capture.

    Parameters
    ----------
    trace : Path
        What :func:`nsightkit.load` reads.
    report : Path
        The tool's own report.
    traces : list of Path
        All traces, where one run gave several; `trace` is the first.
    ran : list of str
        The command that was run.
    returncode : int
        Exit code of the profiled program; a program that fails still leaves a trace.
    notes : list of str
        What a reader should know, a sentence each.
    """

    trace: Path
    report: Path
    traces: list[Path]
    ran: list[str]
    returncode: int
    notes: list[str]


def target(output: str | os.PathLike[str], suffix: str, *, overwrite: bool) -> Path:
    """Settle the name a capture will have before anything runs.

    Parameters
    ----------
    output : path-like
    suffix : str
        Added when `output` lacks it.
    overwrite : bool

    Returns
    -------
    Path
        Absolute.

    Raises
    ------
    UsageError
        It exists, or its folder does not and cannot be made.
    """
    path = Path(output).absolute()
    if not path.name.endswith(suffix):
        path = path.with_name(path.name + suffix)
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; give another name, or allow it to be overwritten")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give a file name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path.parent} cannot be made ({error.strerror}); give another name") from error
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path.parent} is not writable; give a name in a folder that is")
    return path


def settle(made: Path, destination: Path) -> None:
    """Move a finished file to its place in one step.

    Parameters
    ----------
    made, destination : Path
        On one file system.
    """
    made.replace(destination)
