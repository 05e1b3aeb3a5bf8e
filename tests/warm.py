"""Python programs run in processes that need not import the libraries again: each is forked from one that has.

Importing PyTorch, pandas, matplotlib and Sphinx takes longer than what most of these programs do.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path

from nsightkit.capture.children import fork_child

__all__ = ["main", "run"]

_LIBRARIES = ["torch", "pandas", "matplotlib.pyplot", "sphinx.cmd.build", "sphinx_gallery.gen_gallery", "myst_nb"]
_SETTINGS = {"MPLBACKEND": "Agg"}  # matplotlib reads it when it is imported


def run(
    command: list[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m COMMAND`` in a folder: a module with its arguments.

    Code comes from where this process has it: `env` reaches the program, but its ``PYTHONPATH`` only what it starts.
    """
    os.environ |= _SETTINGS
    forkserver.set_forkserver_preload(_LIBRARIES)
    forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        job = {"command": command, "cwd": cwd, "env": dict(env), "streams": streams}
        done = fork_child(__name__, job, timeout_s)
        out, err = (stream.read_text(encoding="utf-8") for stream in streams)
        return subprocess.CompletedProcess(command, done.returncode, out, err)


def main(command: list[str], cwd: Path, env: Mapping[str, str], streams: list[Path]) -> None:
    """Be the program; called in the forked process."""
    os.environ.clear()
    os.environ |= env
    os.chdir(cwd)
    for path, descriptor in zip(streams, (1, 2), strict=True):
        with path.open("wb") as stream:
            os.dup2(stream.fileno(), descriptor)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    sys.stdout.flush()
