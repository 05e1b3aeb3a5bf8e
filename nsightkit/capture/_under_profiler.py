"""Child process of :func:`nsightkit.capture.torch_profiler.profile_command`: one program under the profiler."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from nsightkit.capture.torch_profiler import profiler


def _main() -> None:
    job = json.loads(sys.argv[1])
    arguments: list[str] = job["arguments"]
    by_name = arguments[0] == "-m"
    sys.argv = arguments[1:] if by_name else list(arguments)
    # What `python script.py` and `python -m module` put first on the path.
    sys.path[0] = str(Path.cwd()) if by_name else str(Path(arguments[0]).absolute().parent)
    running = profiler(record_shapes=job["record_shapes"])
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
        running.export_chrome_trace(part)
        os.replace(part, job["output"])  # noqa: PTH105 - both are strings from the job


if __name__ == "__main__":
    _main()
