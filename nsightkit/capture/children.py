"""Child processes that measure, and whether torch can use a GPU."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable

from nsightkit.errors import NsightkitError
from nsightkit.text import Json
from nsightkit.trace.programs import output_of, run, tail

#: Starts the line with a child's result, among the child's other output.
_RESULT_PREFIX = "nsightkit's child: "


@functools.cache
def gpu_name() -> str | None:
    """Name of the GPU that torch uses here.

    Asked once, in a child process, so that this process never holds a CUDA context.

    Returns
    -------
    str or None
        None if torch cannot use a GPU.
    """
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:  # no driver, without which torch need not be asked
        return None
    question = "import torch; print('GPU', torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    # The first import of torch on a machine reads gigabytes of libraries.
    last_line = tail(output_of(sys.executable, "-c", question, timeout_s=300.0), 1)
    if last_line.startswith("GPU "):  # without a GPU it is "GPU", as `tail` strips the blank
        return last_line.removeprefix("GPU ")
    return None


def has_gpu() -> bool:
    """Whether torch can use a CUDA GPU here: :func:`gpu_name`.

    Returns
    -------
    bool
    """
    return gpu_name() is not None


def child_environment() -> dict[str, str]:
    """Copy this process's environment, with all that this process can import importable in a child.

    Returns
    -------
    dict of str to str
    """
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def ask_child(module: str, job: Json, timeout_s: float) -> Json:
    """Run ``python -m MODULE``, give it a job, and read its result.

    A child process, so that this one holds no CUDA context, and a job that runs out of memory ends only itself.

    Parameters
    ----------
    module : str
        Its last call is :func:`run_as_child`, which prints the line that is read here.
    job : mapping
        JSON values.
    timeout_s : float

    Returns
    -------
    dict

    Raises
    ------
    NsightkitError
        It left no result; the message has its exit code and last lines.
    """
    try:
        finished = run([sys.executable, "-m", module, json.dumps(job)], timeout_s, env=child_environment())
    except subprocess.TimeoutExpired as error:
        last_lines = tail(error.output, 3) or "none"
        raise NsightkitError(f"not done within {timeout_s:g} s; its last lines: {last_lines}") from error
    for line in finished.stdout.splitlines():
        if line.startswith(_RESULT_PREFIX):
            return dict(json.loads(line.removeprefix(_RESULT_PREFIX)))
    if finished.returncode == -9:  # SIGKILL, which Linux sends when memory runs out
        raise NsightkitError("killed; the machine probably ran out of memory")
    hint = ""
    if "No module named 'torch'" in finished.stdout:  # `run` puts stderr there, too
        hint = "install torch first (pip install 'nsightkit[torch]'); "
    raise NsightkitError(f"{hint}exit code {finished.returncode}: {tail(finished.stdout, 4)}")


def run_as_child(main: Callable[..., Json]) -> None:
    """Be the child of :func:`ask_child`: call a function with the job that the parent gave, and print the result.

    The parent finds the line of the result among whatever else the job prints.

    Parameters
    ----------
    main : callable
        Takes the job's values by name, and returns JSON values.
    """
    values = main(**json.loads(sys.argv[1]))
    print(f"\n{_RESULT_PREFIX}{json.dumps(values)}", flush=True)
