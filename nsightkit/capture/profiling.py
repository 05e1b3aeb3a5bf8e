"""Shared by captures under nsys, ncu and torch.profiler: options, files, runs and results."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nsightkit.errors import AnyPath, NsightkitError, UsageError
from nsightkit.trace.files import require_free
from nsightkit.trace.programs import run

#: Options of the tools that nsightkit sets itself.
_RESERVED = ("--output", "--export", "--log-file", "--force-overwrite")
#: How long an interrupted profiler may take to write its report.
_INTERRUPT_S = 120.0
#: Stands for no time limit: longer waits overflow in the operating system's call.
_WEEK_S = 604_800.0


class Captured(NamedTuple):
    """The result of a capture.

    Parameters
    ----------
    trace : Path
        What :func:`nsightkit.load` reads.
    report : Path
        The tool's own report.
    ran : list of str
        The command that was run.
    returncode : int
        Exit code of the profiled program; a program that fails still leaves a trace.
    notes : list of str
        Warnings and hints, one sentence each.
    """

    trace: Path
    report: Path
    ran: list[str]
    returncode: int
    notes: list[str]


# -- options -----------------------------------------------------------------------------------------------------


def parse_options(arguments: Sequence[str], short_names: Mapping[str, str]) -> dict[str, str]:
    """Read a tool's options by name; values with no option before them are left out.

    Parameters
    ----------
    arguments : sequence of str
        ``--name=value``, ``--name value``, ``-n value``, ``-nvalue`` or ``--name``.
    short_names : mapping of str to str
        Short option to long one.

    Examples
    --------
    >>> parse_options(["-c", "nvtx", "--nvtx-capture=step", "--nvtx"], {"-c": "--capture-range"})
    {'--capture-range': 'nvtx', '--nvtx-capture': 'step', '--nvtx': ''}
    """
    values: dict[str, str] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, _, value = word.partition("=")
        elif word.startswith("-"):
            name = short_names.get(word[:2], word[:2])
            value = word[2:]
        else:
            value = word  # of the option before it
        values[name] = value
    values.pop("", None)  # the value that no option came before, if there was one
    return values


def options_with_defaults(
    arguments: Sequence[str], user_options: Mapping[str, str], defaults: Mapping[str, str], help_text: str
) -> list[str]:
    """Put a tool's options together: our defaults, then the user's own.

    Parameters
    ----------
    arguments : sequence of str
        The user's options, unchanged in the result.
    user_options : mapping
        The same, from :func:`parse_options`.
    defaults : mapping of str to str
        Left out if the user gives the same option, or the installed version lacks it.
    help_text : str
        Help of the installed version.

    Raises
    ------
    UsageError
        An option that nsightkit has to set itself.
    """
    for name in _RESERVED:
        if name in user_options:
            raise UsageError(f"{name} is set by nsightkit; its own --output and --overwrite take its place")
    our_options = [
        f"{name}={value}" for name, value in defaults.items() if name not in user_options and name in help_text
    ]
    return [*our_options, *arguments]


# -- files and runs ----------------------------------------------------------------------------------------------


def unexpanded(path: Path) -> str:
    """Double each % of a file's name: nsys and ncu would expand %h (host), %p (process), %n and %q{VARIABLE}."""
    return str(path).replace("%", "%%")


def checked_output(output: AnyPath, suffix: str, *, overwrite: bool) -> Path:
    """Complete the name of a capture, and check before anything runs that it is free.

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
        The file exists, or its folder does not.
    """
    path = Path(output).absolute()
    if not path.name.endswith(suffix):
        path = path.with_name(path.name + suffix)
    require_free(path, overwrite=overwrite)
    return path


def run_profiler(
    command: list[str], timeout_s: float | None, env: dict[str, str] | None = None
) -> tuple[int, list[str]]:
    """Run a profiler, and interrupt it when the time is up, so that it writes its report.

    Parameters
    ----------
    command : list of str
    timeout_s : float or None
    env : dict, optional
        The whole environment; the present one when omitted.

    Returns
    -------
    returncode : int
    notes : list of str
        Whether the program was interrupted or failed.

    Raises
    ------
    NsightkitError
        It cannot be started, or ignored the interrupt.
    """
    limit_s = _WEEK_S if timeout_s is None else timeout_s
    start = time.monotonic()
    try:
        # At the limit the command is first interrupted, as by Ctrl-C, so that the profiler writes what it has.
        finished = run(command, limit_s, env=env, show=True, interrupt_s=_INTERRUPT_S)
    except subprocess.TimeoutExpired as error:
        problem = f"{command[0]} was not done within {limit_s:g} s and ignored an interrupt"
        raise NsightkitError(f"{problem}; profile fewer steps, or allow more time") from error
    except OSError as error:
        raise NsightkitError(f"{command[0]}: cannot be started ({error.strerror})") from error
    notes = []
    if time.monotonic() - start >= limit_s:
        notes.append(f"the program was interrupted after {limit_s:g} s; the trace ends there")
    if finished.returncode:
        notes.append(f"the program ended with exit code {finished.returncode}; its trace is kept")
    return finished.returncode, notes
