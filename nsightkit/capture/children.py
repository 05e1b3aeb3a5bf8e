"""Processes in which a program is watched, and whether they can use a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import nsightkit
from nsightkit.errors import NsightkitError
from nsightkit.trace._process import end, run, tail

__all__ = ["ask_child", "child_environment", "fork_child", "has_driver", "has_gpu", "start_child"]

#: What the process that others are forked from imports. Optimizers import torch._dynamo, which takes as long as torch.
_IMPORTED = ["torch._dynamo", "torch.profiler", "nsightkit.capture.memory", "nsightkit.workloads.lm"]


def has_gpu() -> bool:
    """Whether torch can use a CUDA GPU here.

    It asks in a process of its own, so that this one never holds a CUDA context, and does not ask where there is
    no driver.

    Returns
    -------
    bool
    """
    question = "import torch; print(torch.cuda.is_available())"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return has_driver() and tail(run([sys.executable, "-c", question], 120.0).stdout, 1) == "True"
    return False


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed here, without which there is no GPU."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")
        return True
    return False


def child_environment() -> dict[str, str]:
    """Give this process's environment, with this very nsightkit importable in a child.

    Returns
    -------
    dict of str to str
    """
    folders = [str(Path(nsightkit.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def start_child(module: str, job: Mapping[str, Any], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE JOB`` in a fresh interpreter, with `job` as JSON.

    Parameters
    ----------
    module : str
    job : mapping
        JSON values.
    timeout_s : float

    Returns
    -------
    CompletedProcess
        ``stdout`` holds both streams.

    Raises
    ------
    subprocess.TimeoutExpired
        ``output`` holds what it had written; it has ended, and what it started.
    """
    return run([sys.executable, "-m", module, json.dumps(job)], timeout_s, env=child_environment())


def fork_child(module: str, job: Mapping[str, Any], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run ``main(**job)`` of a module in a process forked from one that has imported torch and has done nothing else.

    It is as good as a fresh interpreter and starts in a fraction of the time. Only for runs on a CPU, on Linux: CUDA
    does not survive a fork, and nsys does not see processes that are only forked. It takes, gives and raises what
    :func:`start_child` does.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with tempfile.TemporaryDirectory(prefix="nsightkit-") as scratch:
        log = Path(scratch, "log.txt")
        log.touch()
        process = context.Process(target=_forked_main, args=(module, job, child_environment(), Path.cwd(), log))
        # multiprocessing would import the program that asks, and a page would measure its parts again; and it would use
        # the method that joblib sets where several pages are built at once, which the new process does not know.
        program, method = sys.modules["__main__"], multiprocessing.get_start_method(allow_none=True)
        sys.modules["__main__"] = ModuleType("__main__")
        multiprocessing.set_start_method("forkserver", force=True)
        try:
            process.start()
        finally:
            sys.modules["__main__"] = program
            multiprocessing.set_start_method(method, force=True)
        try:
            process.join(timeout_s)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(module, timeout_s, output=log.read_text(errors="replace"))
        finally:
            if process.exitcode is None and process.pid is not None:
                end(process.pid)
                process.join()
        return subprocess.CompletedProcess([module], process.exitcode, log.read_text(errors="replace"), "")


def _forked_main(module: str, job: Mapping[str, Any], environment: dict[str, str], folder: Path, log: Path) -> None:
    """Give a forked process what one that is started has of its own: session, environment, folder and streams."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    importlib.import_module(module).main(**job)


def ask_child(
    module: str,
    job: Mapping[str, Any],
    timeout_s: float,
    start: Callable[[str, Mapping[str, Any], float], subprocess.CompletedProcess[str]] = start_child,
) -> dict[str, Any]:
    """Let a module do a job in a process of its own, and read the result.

    Parameters
    ----------
    module : str
        It has a function ``main``, which takes the job's values by name, and ``result``, the JSON file to write at the
        end.
    job : mapping
        JSON values.
    timeout_s : float
    start : {start_child, fork_child}
        How the process is started.

    Returns
    -------
    dict

    Raises
    ------
    NsightkitError
        It left no result; one line says why, with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="nsightkit-", ignore_cleanup_errors=True) as folder:
        result = Path(folder, "result.json")
        try:
            done = start(module, {**job, "result": str(result)}, timeout_s)
        except subprocess.TimeoutExpired as error:
            said = tail(error.output, 3) or "nothing"
            raise NsightkitError(f"not done within {timeout_s:g} s; it last said: {said}") from error
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(result.read_text(encoding="utf-8")))
    if done.returncode == -9:
        raise NsightkitError("killed; the machine probably ran out of memory")
    torchless = "No module named 'torch'" in done.stdout
    hint = "install torch first (pip install 'nsightkit[torch]'); " if torchless else ""
    raise NsightkitError(f"{hint}exit code {done.returncode}: {tail(done.stdout, 4)}")
