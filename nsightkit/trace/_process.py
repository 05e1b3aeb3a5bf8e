"""Run another program with a time limit that also holds for the programs it starts, and not beyond this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nsightkit.errors import NsightkitError, UsageError

__all__ = ["ask", "descendants", "dying_with_parent", "end", "find_program", "run", "said", "tail", "version_of"]

#: Of Linux's prctl: the signal a process gets when its parent dies.
_PARENT_DEATH_SIGNAL = 1


def run(
    command: Sequence[str],
    timeout_s: float,
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: dict[str, str] | None = None,
    show: bool = False,
    interrupt_s: float = 0.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command, never through a shell, and end all it started when the time is up.

    ``subprocess.run(timeout=...)`` ends only the first process: a profiler's agents and the profiled
    program would live on and hold the pipes open. On Linux the command dies with this process, however this one ends.

    Parameters
    ----------
    command : sequence of str
    timeout_s : float
    cwd : path-like, optional
    env : dict, optional
        The whole environment; the present one when omitted.
    show : bool
        Let the program write to this process's own stderr (both its streams), instead of keeping its output.
    interrupt_s : float
        When the time is up, first interrupt it (as Ctrl-C does) and give it so long to finish what it has.

    Returns
    -------
    CompletedProcess
        ``stdout`` holds both streams, empty with `show`; undecodable bytes are replaced. After an
        interruption that it obeyed, ``returncode`` is the program's own.

    Raises
    ------
    subprocess.TimeoutExpired
        ``output`` holds what it had written.
    FileNotFoundError, PermissionError
        The program cannot be started.
    """
    # 2: the descriptor, not sys.stderr, which a test or a notebook may have replaced by an object without one
    with subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=2 if show else subprocess.PIPE,
        stderr=2 if show else subprocess.STDOUT,
        cwd=cwd,
        env=env,
        start_new_session=True,
        text=True,
        errors="replace",
        preexec_fn=dying_with_parent(),  # noqa: PLW1509 - one call of the C library, looked up before the fork
    ) as process:
        try:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                if not interrupt_s:
                    raise
                process.send_signal(signal.SIGINT)
                output, _ = process.communicate(timeout=interrupt_s)
        except subprocess.TimeoutExpired:
            end(process.pid)
            output, _ = process.communicate()
            raise subprocess.TimeoutExpired(list(command), timeout_s, output=output) from None
        except BaseException:
            end(process.pid)
            raise
        return subprocess.CompletedProcess(list(command), process.returncode, output or "", "")


def said(*command: str, timeout_s: float = 20.0, env: dict[str, str] | None = None) -> str:
    """Give what a command prints on its standard output; nothing where it does not start, fails, or hangs.

    Parameters
    ----------
    *command : str
    timeout_s : float
    env : dict, optional
        The whole environment; the present one when omitted.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return str(subprocess.run(command, timeout=timeout_s, check=True, env=env, **pipes).stdout)
    return ""


def ask(program: str | os.PathLike[str], name: str, *arguments: str, timeout_s: float = 60.0) -> str:
    """Ask a program about itself.

    Parameters
    ----------
    program : path-like
    name : str
        What it is called.
    *arguments : str
        Such as ``--help``.
    timeout_s : float

    Returns
    -------
    str
        What it says.

    Raises
    ------
    NsightkitError
        It does not start, or hangs.
    """
    try:
        return run([os.fspath(program), *arguments], timeout_s).stdout
    except (subprocess.TimeoutExpired, OSError) as error:
        hangs = isinstance(error, subprocess.TimeoutExpired)
        why = f"gave no answer within {timeout_s:g} s" if hangs else f"does not start ({error})"
        raise NsightkitError(
            f"{program}: '{' '.join(arguments)}' {why}; set NSIGHTKIT_{name.upper()} to a working {name}"
        ) from error


def version_of(program: str | os.PathLike[str], name: str, timeout_s: float = 60.0) -> str:
    """Ask one of NVIDIA's tools for its version.

    Parameters
    ----------
    program : path-like
    name : str
        What it is called.
    timeout_s : float

    Returns
    -------
    str
        Such as ``2025.3.1.0``.

    Raises
    ------
    NsightkitError
        It does not start, hangs, or says no version.
    """
    answer = ask(program, name, "--version", timeout_s=timeout_s)
    if found := re.search(r"\b\d{4}(?:\.\d+)+", answer):
        return found[0]
    raise NsightkitError(
        f"{program}: said no version ({tail(answer, 2) or 'no word'}); set NSIGHTKIT_{name.upper()} to a working {name}"
    )


def dying_with_parent() -> Callable[[], None] | None:
    """Give what a forked child of this process calls to be killed when this process ends.

    Linux watches the thread that forks, not its process: that thread has to wait for the child.

    Returns
    -------
    callable or None
        None on other systems than Linux.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs would ignore it
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it was watched
            os._exit(1)

    return bind


def end(pid: int) -> None:
    """End a process and all below it; a profiler puts the profiled program into a session of its own.

    Parameters
    ----------
    pid : int
    """
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """All processes that a process started, and those that these started, without those that have ended.

    Parameters
    ----------
    pid : int
    """
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may itself hold blanks and parentheses; its state and its parent follow.
            state, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":
                parents[int(stat.parent.name)] = int(parent)
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def tail(text: str | bytes | None, lines: int = 6) -> str:
    """Give the last lines of a program's output, on one line, for an error message.

    Parameters
    ----------
    text : str or bytes, optional
    lines : int
    """
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    # a progress bar is one line with many carriage returns: what stands after the last one counts
    found = [line.rsplit("\r", 1)[-1].strip() for line in (text or "").splitlines()]
    return " | ".join([line for line in found if line][-lines:])


def find_program(name: str, variable: str, patterns: Sequence[str]) -> Path | None:
    """Find a program without starting it.

    Parameters
    ----------
    name : str
        As it is called on the ``PATH``.
    variable : str
        Environment variable that names another, and comes first.
    patterns : sequence of str
        Absolute glob patterns to try after the ``PATH``, in this order; of one pattern's, the newest.

    Returns
    -------
    Path or None

    Raises
    ------
    UsageError
        The variable names something that is not a program.
    """
    if named := os.environ.get(variable):
        path = Path(named).expanduser()
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise UsageError(f"{variable} is {named!r}, which is not a program; give the path of {name}, or unset it")
        return path
    if on_path := shutil.which(name):
        return Path(on_path)
    for pattern in patterns:
        if usable := [p for p in Path("/").glob(pattern.lstrip("/")) if p.is_file() and os.access(p, os.X_OK)]:
            return max(usable, key=lambda p: [int(n) for n in re.findall(r"\d+", str(p))])
    return None
