"""The installed ``ncu``: where it is, which version, what it says of itself, and the export of its reports.

Nothing here needs a GPU.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
from pathlib import Path

from nsightkit.errors import TraceError
from nsightkit.trace._process import ask, find_program, run, version_of

__all__ = ["answer", "export", "export_command", "find", "version"]

# Where NVIDIA's installers and containers put it when it is not on the PATH.
_FOLDERS = (
    "/usr/local/cuda*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
    "/usr/local/cuda*/nsight-compute-*/ncu",
    "/usr/lib/nsight-compute/ncu",
)


def find() -> Path | None:
    """Where ``ncu`` is.

    Looks at the environment variable ``NSIGHTKIT_NCU``, then at the ``PATH``, then where NVIDIA's installers put it,
    the newest first. It does not start the program.

    Returns
    -------
    Path or None

    Raises
    ------
    UsageError
        ``NSIGHTKIT_NCU`` names something that is not a program.
    """
    return find_program("ncu", "NSIGHTKIT_NCU", _FOLDERS)


@functools.lru_cache(maxsize=32)
def answer(ncu: Path, *arguments: str) -> str:
    """Ask an ncu about itself.

    Parameters
    ----------
    ncu : Path
    *arguments : str
        Such as ``--help`` or ``--list-sections``.

    Returns
    -------
    str
        What it says.

    Raises
    ------
    NsightkitError
        It does not start, or hangs.
    """
    return ask(ncu, "ncu", *arguments)


@functools.lru_cache(maxsize=32)
def version(ncu: Path) -> str:
    """Ask an ncu for its version.

    Parameters
    ----------
    ncu : Path

    Returns
    -------
    str
        Such as ``2025.3.1.0``.

    Raises
    ------
    NsightkitError
        It does not start, hangs, or says no version.
    """
    return version_of(ncu, "ncu")


def export_command(report: str | os.PathLike[str], ncu: str = "ncu") -> list[str]:
    """Spell the command that prints a report as CSV.

    Parameters
    ----------
    report : path-like
    ncu : str

    Returns
    -------
    list of str
        Of the raw page, a column a metric, in units that fit each column: counted values then have six decimals, and
        two in base units.
    """
    return [ncu, f"--import={os.fspath(report)}", "--page=raw", "--csv", "--print-units=auto"]


def export(report: str | os.PathLike[str], ncu: Path, *, timeout_s: float = 600.0) -> str:
    """Print a report as CSV.

    Parameters
    ----------
    report : path-like
    ncu : Path
    timeout_s : float

    Returns
    -------
    str
        What ncu printed: the raw page, or why there is none.

    Raises
    ------
    TraceError
        It does not start, or took too long. The remedy is a command to run.
    """
    by_hand = f"run it by hand: {shlex.join(export_command(report))}"
    try:
        return run(export_command(Path(report).absolute(), str(ncu)), timeout_s).stdout
    except subprocess.TimeoutExpired as error:
        raise TraceError(report, f"{ncu} did not export it within {timeout_s:g} s", by_hand) from error
    except OSError as error:
        raise TraceError(report, f"{ncu} cannot be started to export it ({error.strerror})", by_hand) from error
