"""Sample the GPU utilisation that NVML reports, which is what ``nvidia-smi`` shows."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["sample"]


def sample(function: Callable[[], object], duration_s: float, period_s: float = 0.1) -> list[int]:
    """Call a function again and again, and read the current GPU's utilisation meanwhile.

    Parameters
    ----------
    function : callable
    duration_s : float
        NVML averages over up to a second, so less than three seconds show little.
    period_s : float

    Returns
    -------
    list of int
        Percent, without the first second; empty when nothing here can read it.
    """
    import torch

    read = _reader(torch)
    found: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(period_s):
            value = read()
            if value is not None and time.perf_counter() > start + 1:
                found.append(value)

    start = time.perf_counter()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        while time.perf_counter() < start + duration_s:
            for _ in range(10):
                function()
            torch.cuda.synchronize()  # or the CPU would queue minutes of work in these seconds
    finally:
        done.set()
        watcher.join(timeout=10)
    return found


def _reader(torch: Any) -> Callable[[], int | None]:
    with contextlib.suppress(Exception):  # needs pynvml, and a driver that answers
        torch.cuda.utilization()
        return lambda: int(torch.cuda.utilization())
    # nvidia-smi counts all GPUs, torch those it may use: the UUID is the same for both.
    uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    which = [f"--id=GPU-{uuid.removeprefix('GPU-')}"] if uuid else []
    command = ["nvidia-smi", *which, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]

    def read() -> int | None:
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
            return int(said.split()[0])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return None

    return read
