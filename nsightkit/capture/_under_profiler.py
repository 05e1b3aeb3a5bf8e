"""Run one program under the profiler: the child process of :func:`nsightkit.capture.torch_profiler.profile_command`.

Run as a file, by the program's own interpreter: it needs only torch and the standard library.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any


def profiler(**options: Any) -> Any:
    """Make a ``torch.profiler.profile`` of CPU and GPU, with synchronization events where torch can record them.

    Parameters
    ----------
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
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        # Private API whose arguments change between versions. Without it the trace has synchronizing *calls* only.
        with contextlib.suppress(ImportError, AttributeError, TypeError):
            from torch._C._profiler import _ExperimentalConfig

            options["experimental_config"] = _ExperimentalConfig(enable_cuda_sync_events=True)
    return profile(activities=activities, **options)


def _run_under_profiler() -> None:
    """Run a program under the profiler, as its own ``__main__``, and write the trace.

    The job is the only argument, JSON with the trace's path, the profiler's options and the program's words.
    """
    job = json.loads(sys.argv[1])
    arguments = job["arguments"]
    draft = Path(f"{job['output']}.part.json")
    running = profiler(**job["options"])
    running.start()
    try:
        # Arguments and import path as `python -m module` and `python script.py` set them.
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = str(Path(arguments[0]).absolute().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        # Also after an exception or sys.exit(): the trace of a program that fails late is worth reading.
        running.stop()
        running.export_chrome_trace(str(draft))
        # Not by torch, which compresses line by line and needs 10x the time.
        with draft.open("rb") as plain, gzip.open(f"{draft}.gz", "wb", compresslevel=6) as compressed:
            shutil.copyfileobj(plain, compressed, 1_000_000)  # 1 MB at a time
        draft.unlink()
        Path(f"{draft}.gz").replace(job["output"])


if __name__ == "__main__":
    _run_under_profiler()
