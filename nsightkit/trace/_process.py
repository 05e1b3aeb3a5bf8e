"""Run another program with a time limit that also holds for the programs it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

__all__ = ["run", "tail"]


def run(
    command: Sequence[str],
    timeout_s: float,
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: dict[str, str] | None = None,
    show: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command, never through a shell, and end all it started when the time is up.

    ``subprocess.run(timeout=...)`` ends only the first process: a profiler's agents and the profiled
    program would live on and hold the pipes open.

    Parameters
    ----------
    command : sequence of str
    timeout_s : float
    cwd : path-like, optional
    env : dict, optional
        The whole environment; the present one when omitted.
    show : bool
        Let the program write to this process's own stderr (both its streams), instead of keeping its output.

    Returns
    -------
    CompletedProcess
        ``stdout`` holds both streams, empty with `show`; undecodable bytes are replaced.

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
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            output, _ = process.communicate()
            raise subprocess.TimeoutExpired(list(command), timeout_s, output=output) from None
        except BaseException:
            _end(process)
            raise
        return subprocess.CompletedProcess(list(command), process.returncode, output or "", "")


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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
