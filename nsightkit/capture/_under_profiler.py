"""One program under the profiler: the child process of :func:`nsightkit.capture.torch_profiler.profile_command`.

Run as a file, by whatever interpreter the program has: it uses torch and the standard library alone.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

__all__ = ["export", "profiler"]


def export(running: Any, output: str) -> None:
    """Write what a profiler recorded, compressed when the name ends in ``.gz``.

    PyTorch compresses line by line, which takes longer than many a program that is profiled.

    Parameters
    ----------
    running : torch.profiler.profile
    output : str
    """
    plain = output.removesuffix(".gz")
    running.export_chrome_trace(plain)
    if plain != output:
        with Path(plain).open("rb") as source, gzip.open(output, "wb", compresslevel=6) as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        Path(plain).unlink()


def profiler(*, gpu: bool = True, **options: Any) -> Any:
    """Make a ``torch.profiler.profile`` with synchronisation events on, where torch can record them.

    Parameters
    ----------
    gpu : bool
        Watch the GPU, where there is one.
    **options
        Further arguments of ``torch.profiler.profile``.

    Returns
    -------
    torch.profiler.profile
        Not started.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if gpu and torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        # Private, and its arguments change between versions: without it only the synchronising *calls* are seen.
        with contextlib.suppress(ImportError, AttributeError, TypeError):
            from torch._C._profiler import _ExperimentalConfig

            options.setdefault("experimental_config", _ExperimentalConfig(enable_cuda_sync_events=True))
    return profile(activities=activities, **options)


def _main() -> None:
    job = json.loads(sys.argv[1])
    arguments: list[str] = job["arguments"]
    by_name = arguments[0] == "-m"
    sys.argv = arguments[1:] if by_name else list(arguments)
    # What `python script.py` and `python -m module` put first on the path.
    sys.path[0] = str(Path.cwd()) if by_name else str(Path(arguments[0]).absolute().parent)
    running = profiler(**job["options"])
    running.start()
    try:
        if by_name:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        # Also after an exception or sys.exit(): a program that fails late has a trace worth reading.
        running.stop()
        part = f"{job['output']}.part.json.gz"
        export(running, part)
        os.replace(part, job["output"])  # noqa: PTH105 - both are strings from the job


if __name__ == "__main__":
    _main()
