"""Processes in which a program is watched, and whether they can use a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

from nsightkit.trace._process import run, tail

__all__ = ["child_environment", "has_gpu"]


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
        ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")
        return tail(run([sys.executable, "-c", question], 120.0).stdout, 1) == "True"
    return False


def child_environment() -> dict[str, str]:
    """Give this process's environment, with this very nsightkit importable in a child.

    Returns
    -------
    dict of str to str
    """
    import nsightkit

    folders = [str(Path(nsightkit.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
