"""Processes for smoke runs that need not import torch again: each is forked from one that has done nothing else.

A page of the guide measures its parts in processes of their own, and importing torch takes a smoke run's process longer
than what it measures. What is forked shares no state with the one before: the first process never runs a workload. Only
for runs on a CPU, on Linux: CUDA does not survive a fork, and recordings are made in interpreters of their own.

Run as ``python -m nsightkit.investigations.forked``; jobs come as JSON, a line each.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from nsightkit.trace._process import end

__all__ = ["run", "supported"]

#: So long may it take to import torch.
_START_S = 120.0


def supported() -> bool:
    """Whether processes can be forked so here.

    Returns
    -------
    bool
    """
    return sys.platform == "linux"


def run(job: str, timeout_s: float, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a job of :mod:`nsightkit.investigations.child` in a forked process.

    Parameters
    ----------
    job : str
        JSON.
    timeout_s : float
    env : mapping
        The whole environment of the process.

    Returns
    -------
    CompletedProcess
        ``stdout`` holds both streams.

    Raises
    ------
    subprocess.TimeoutExpired
        ``output`` holds what it had written; it has ended, and what it started.
    OSError
        No process can be had so: start an interpreter instead.
    """
    return _first(env.get("PYTHONPATH", "")).run(job, timeout_s, dict(env))


@functools.cache
def _first(python_path: str) -> _First:
    return _First(python_path)


class _First:
    """The process that is forked from, seen from the one that asks."""

    def __init__(self, python_path: str) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": python_path},
                start_new_session=True,
            )
        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()  # without anybody to ask, it ends
        self._process.wait()

    def run(self, job: str, timeout_s: float, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        with self._lock, tempfile.TemporaryDirectory(prefix="nsightkit-") as folder:
            log = Path(folder, "log.txt")
            asked = json.dumps({"job": job, "env": env, "cwd": str(Path.cwd()), "log": str(log)})
            self._socket.settimeout(_START_S)
            self._socket.sendall(asked.encode() + b"\n")
            pid = self._number(_START_S)
            try:
                code = self._number(timeout_s)
            except TimeoutError:
                end(pid)
                self._number(_START_S)
                raise subprocess.TimeoutExpired(job, timeout_s, output=_text(log)) from None
            except BaseException:
                end(pid)
                raise
            return subprocess.CompletedProcess([job], code, _text(log), "")

    def _number(self, timeout_s: float) -> int:
        """Read a line; it comes in one piece, or not at all."""
        self._socket.settimeout(timeout_s)
        found = b""
        while not found.endswith(b"\n"):
            read = self._socket.recv(1)
            if not read:
                raise BrokenPipeError("the process to fork from has ended")
            found += read
        return int(found)


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.is_file() else ""


def _serve() -> dict[str, Any] | None:
    """Fork for each job; gives the job in the forked process, and None here when the asking process has ended."""
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            return _settle(asked)
        os.write(1, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(status))
    return None


def _settle(asked: dict[str, Any]) -> dict[str, Any]:
    """Make the forked process one of its own: session, environment, folder and streams."""
    os.setsid()
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    with open(os.devnull, "rb") as nothing, open(asked["log"], "ab") as log:  # noqa: PTH123
        for stream, descriptor in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(stream.fileno(), descriptor)
    job: dict[str, Any] = json.loads(asked["job"])
    return job


def _leave(code: int) -> NoReturn:
    """End a forked process as an interpreter ends, but for taking torch down, which takes longer than many a job."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # as the processes of multiprocessing do
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    from nsightkit.investigations import child

    with contextlib.suppress(ImportError):  # the forked process says what is missing
        import torch._dynamo  # optimizers import it, and it takes as long as torch itself
        import torch.profiler  # noqa: F401
    taken = _serve()
    if taken is not None:
        status = 1
        try:
            child.main(**taken)
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            traceback.print_exc()
        _leave(status)
