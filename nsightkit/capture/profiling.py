"""What captures under nsys, ncu and torch.profiler share: their files, options, runs and results."""

from __future__ import annotations

import dataclasses
import difflib
import os
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from nsightkit.errors import NsightkitError, UsageError
from nsightkit.trace.programs import run, tail

__all__ = ["Captured", "checked", "did_you_mean", "ended", "target", "unexpanded", "watch"]


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


def unexpanded(path: Path) -> str:
    """Keep nsys and ncu from expanding %h, %p, %n and %q{...} in a file's name.

    Parameters
    ----------
    path : Path
    """
    return str(path).replace("%", "%%")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest names that are near to a wrong one, as the end of a message.

    Parameters
    ----------
    name : str
    known : iterable of str

    Examples
    --------
    >>> did_you_mean("--ouput", ["--output", "--trace"])
    '; did you mean --output?'
    """
    near = difflib.get_close_matches(name, sorted(known), n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def checked(extra: Sequence[str], program: Path, known: Collection[str], ours: Mapping[str, str]) -> list[str]:
    """Check further options of a profiler: a wrong one costs the whole run, for the program never starts.

    Parameters
    ----------
    extra : sequence of str
    program : Path
    known : collection of str
        Options that it has, with their dashes.
    ours : mapping of str to str
        Options that nsightkit sets itself, each with the argument to give instead; empty where there is not any.

    Raises
    ------
    UsageError
        An option that it lacks, or one that is not the caller's.
    """
    for option in extra:
        name = option.partition("=")[0] if option.startswith("--") else option[:2]
        if name in ours:
            instead = f"; give the argument {ours[name]} instead" if ours[name] else ""
            raise UsageError(f"{name} is set by nsightkit{instead}")
        if name not in known:
            raise UsageError(f"{program} has no option {name}{did_you_mean(name, known)}")
    return list(extra)


def ended(returncode: int) -> list[str]:
    """Note that a program failed, if it did.

    Parameters
    ----------
    returncode : int
    """
    return [f"the program ended with exit code {returncode}"] if returncode else []


def watch(
    ran: list[str],
    timeout_s: float,
    *,
    tool: str,
    result: str,
    advice: str,
    env: dict[str, str] | None,
    show: bool,
    interrupt_s: float,
) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """Run a profiler, and interrupt it when the time is up: it then ends the program and writes what it has.

    Parameters
    ----------
    ran : list of str
    timeout_s : float
    tool, result, advice : str
        For messages: the profiler, what it writes, and what to do when it did not end.
    env : dict, optional
    show : bool
    interrupt_s : float
        How long it may take to end.

    Returns
    -------
    notes : list of str
    done : CompletedProcess

    Raises
    ------
    NsightkitError
        It cannot be started, or did not end.
    """
    start = time.monotonic()
    try:
        done = run(ran, timeout_s, env=env, show=show, interrupt_s=interrupt_s)
    except subprocess.TimeoutExpired as error:
        raise NsightkitError(
            f"{tool} was not done within {timeout_s:g} s and did not obey an interruption ({tail(error.output, 3)}); "
            f"{advice}"
        ) from error
    except OSError as error:
        raise NsightkitError(f"{ran[0]}: cannot be started ({error.strerror})") from error
    late = time.monotonic() - start >= timeout_s
    return [f"the program was interrupted after {timeout_s:g} s; the {result} ends there"] if late else [], done
