"""Time a function on the device's own clock: warm-up, repetitions, and every sample kept."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np


def time_calls(function: Callable[[], object], *, warmup: int, repetitions: int, device: str) -> np.ndarray:
    """Time calls of a function, one after the other.

    On a GPU an event is recorded between any two calls, and the CPU waits only once, at the end: it may run ahead, as
    it does outside a measurement. A sample is the time between two calls on the GPU's timeline, idle time included,
    with a resolution of about 500 ns. On a CPU it is wall time.

    Parameters
    ----------
    function : callable
        Takes no argument.
    warmup : int
        Calls before the first sample: first uses of a kernel load it, allocate and autotune.
    repetitions : int
    device : str
        ``"cpu"`` or a CUDA device.

    Returns
    -------
    ndarray of int64, shape (repetitions,)
        Nanoseconds from the start of one call to the start of the next.

    Raises
    ------
    ValueError
        `repetitions` is not positive.
    """
    if repetitions < 1:
        raise ValueError("repetitions must be at least 1")
    for _ in range(warmup):
        function()
    if device == "cpu":
        times = [time.perf_counter_ns()]
        for _ in range(repetitions):
            function()
            times.append(time.perf_counter_ns())
        return np.diff(np.array(times, np.int64))
    import torch

    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            function()
            event.record()
        torch.cuda.synchronize()
        # elapsed_time is float32 milliseconds: differences of neighbours, not of sums, keep its digits.
        times = [round(before.elapsed_time(after) * 1e6) for before, after in itertools.pairwise(events)]
    return np.array(times, np.int64)
