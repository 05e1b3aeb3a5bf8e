"""Processes in which a program is watched, and whether they can use a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import nsightkit
from nsightkit.errors import NsightkitError
from nsightkit.trace.programs import descendants, dying_with_parent, end, run, said, tail

__all__ = [
    "IMPORTED", "ask_child", "child_environment", "fork_child", "gpu_name", "has_driver", "has_gpu", "main",
    "start_child", "starter",
]  # fmt: skip

#: What the process that others are forked from imports. Optimizers import torch._dynamo, which takes as long as torch.
#: Nothing here may ask for a GPU when it is imported, or no fork could use one; torch._inductor would also start
#: processes.
IMPORTED = [
    *("torch._dynamo", "torch.profiler", "triton", "nsightkit.capture.memory", "nsightkit.workloads.lm"),
    *("nsightkit.investigations.child", "nsightkit.investigations.sweep_column"),
    "nsightkit.investigations.ways_to_measure",
]
#: A process starts with settings of this whole one, so threads take turns.
_STARTING = threading.Lock()
#: Of Linux's prctl: processes whose parent has ended get this process as their parent.
_ADOPT = 36


@functools.cache
def gpu_name() -> str | None:
    """Name of the GPU that torch uses here.

    It asks once, in a process of its own, so that this one never holds a CUDA context, and does not ask where there is
    no driver.

    Returns
    -------
    str or None
        None if torch cannot use a GPU.
    """
    question = "import torch; print('GPU', torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    # The first import of torch on a machine reads gigabytes of libraries.
    answer = tail(said(sys.executable, "-c", question, timeout_s=300.0), 1) if has_driver() else ""
    return answer.removeprefix("GPU ") if answer.startswith("GPU ") else None


def has_gpu() -> bool:
    """Whether torch can use a CUDA GPU here: :func:`gpu_name`.

    Returns
    -------
    bool
    """
    return gpu_name() is not None


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed here; a GPU cannot be used without it."""
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
    """Run ``main(**job)`` of a module in a fresh interpreter.

    Parameters
    ----------
    module : str
    job : mapping
        JSON values. What ``main`` gives is written to the file ``job["result"]``, if there is such a name.
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
    return run([sys.executable, "-m", __name__, module, json.dumps(job)], timeout_s, env=child_environment())


def fork_child(module: str, job: Mapping[str, Any], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run ``main(**job)`` of a module in a process forked from one that has imported torch and has done nothing else.

    It is as good as a fresh interpreter and starts in a fraction of the time. Not for use under nsys, which does not
    follow processes that are only forked. The process can use a GPU, because the one that it is forked from never does.
    When this process dies, so does the new one, with all that it started. It takes, gives and raises what
    :func:`start_child` does, and is the same on systems other than Linux.
    """
    if sys.platform != "linux":
        return start_child(module, job, timeout_s)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory(prefix="nsightkit-") as scratch:
        log = Path(scratch, "log.txt")
        log.touch()
        process = context.Process(target=_forked_main, args=(module, job, child_environment(), Path.cwd(), log))
        # multiprocessing would import the program that asks, and a page would measure its parts again; and it would use
        # the method that joblib sets where several pages are built at once, which the new process does not know.
        with _STARTING:
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
    bind = dying_with_parent()
    worker = os.fork()
    if worker:
        _guard(worker)
    assert bind is not None  # this is Linux
    bind()
    # A DataLoader starts its workers as in a program that is started by hand, not from one more process that imports
    # torch for each of them.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    _do(module, **job)


def _do(module: str, *, result: str | None = None, **job: Any) -> None:
    """Do a job, and write what it gives."""
    main = importlib.import_module(module).main
    gc.freeze()  # workloads collect between their cells: to go through all that is imported takes longer than a cell
    found = main(**job)
    if result is not None:
        Path(result).write_text(json.dumps(found), encoding="utf-8")


def _guard(worker: int) -> NoReturn:
    """Wait for a child and end as it does; if the process that asked for it dies first, end all that the child started.

    The kernel would end the child, but not the programs that the child started, nor what these started.
    """
    ctypes.CDLL(None).prctl(_ADOPT, 1)
    asking = multiprocessing.parent_process()
    assert asking is not None
    ending = threading.Lock()

    def watch() -> None:
        multiprocessing.connection.wait([asking.sentinel])
        with ending:
            while below := descendants(os.getpid()):
                for each in below:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
                time.sleep(0.01)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    with ending:
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)


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
        It has a function ``main``, which takes the job's values by name and gives JSON values.
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
        It left no result; one line says why, with the end of what it wrote. All that it wrote is a note on the
        exception.
    """
    with tempfile.TemporaryDirectory(prefix="nsightkit-", ignore_cleanup_errors=True) as folder:
        result = Path(folder, "result.json")
        try:
            done = start(module, {**job, "result": str(result)}, timeout_s)
        except subprocess.TimeoutExpired as late:
            error = NsightkitError(
                f"not done within {timeout_s:g} s; it last said: {tail(late.output, 3) or 'nothing'}"
            )
            error.add_note(str(late.output))
            raise error from late
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(result.read_text(encoding="utf-8")))
    torchless = "No module named 'torch'" in done.stdout
    hint = "install torch first (pip install 'nsightkit[torch]'); " if torchless else ""
    killed = "killed; the machine probably ran out of memory" if done.returncode == -9 else ""
    error = NsightkitError(killed or f"{hint}exit code {done.returncode}: {tail(done.stdout, 4)}")
    error.add_note(done.stdout)
    raise error


@functools.cache
def starter() -> Callable[[str, Mapping[str, Any], float], subprocess.CompletedProcess[str]]:
    """Give :func:`fork_child` where a forked process can use the GPU, else :func:`start_child`.

    It is tried once: no part need be lost to a library that asks for the GPU when it is imported.
    """
    with contextlib.suppress(NsightkitError):
        ask_child("nsightkit.capture.children", {}, 60.0, fork_child)
        return fork_child
    return start_child


def main() -> dict[str, Any]:
    """Use the GPU in this process.

    Returns
    -------
    dict
        Nothing, if it worked.
    """
    import torch

    torch.cuda.synchronize()
    return {}


if __name__ == "__main__":
    _do(sys.argv[1], **json.loads(sys.argv[2]))
