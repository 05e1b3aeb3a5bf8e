"""Time a function on the device's own clock: warm-up, repetitions, and every sample kept."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

__all__ = ["time_calls", "time_prepared"]

_Prepared = TypeVar("_Prepared")


def time_calls(function: Callable[[], object], *, warmup: int, repetitions: int, device: str) -> np.ndarray:
    """Time calls of a function, one after the other.

    On a GPU an event is recorded between any two calls, and the CPU waits only once, at the end: the measurement does
    not stop the CPU from running ahead, which is how the function runs in earnest. A sample is therefore the time
    between two calls on the GPU's time line, idle time included, with a resolution of about 500 ns. On a CPU it is wall
    time.

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
    for _ in range(warmup):
        function()

    def calls(mark: Callable[[], None]) -> None:
        mark()
        for _ in range(repetitions):
            function()
            mark()

    return _between_marks(calls, repetitions + 1, device)


def time_prepared(
    prepare: Callable[[], _Prepared], function: Callable[[_Prepared], object], *, repetitions: int, device: str
) -> np.ndarray:
    """Time calls of a function that uses up what it is given, such as a backward pass its graph.

    As :func:`time_calls`, but what prepares each call is left out of the samples. There is no warm-up.

    Parameters
    ----------
    prepare : callable
        Makes what one call takes.
    function : callable
        What it gives is dropped.
    repetitions : int
    device : str
        ``"cpu"`` or a CUDA device.

    Returns
    -------
    ndarray of int64, shape (repetitions,)
        Nanoseconds.

    Raises
    ------
    ValueError
        `repetitions` is not positive.
    """

    def calls(mark: Callable[[], None]) -> None:
        for _ in range(repetitions):
            prepared = prepare()
            mark()
            function(prepared)
            mark()
            del prepared

    return _between_marks(calls, 2 * repetitions, device)[::2]


def _between_marks(run: Callable[[Callable[[], None]], None], marks: int, device: str) -> np.ndarray:
    """Run a function that marks moments, and give the nanoseconds between them."""
    if marks < 2:
        raise ValueError("repetitions must be at least 1")
    if not device.startswith("cuda"):
        times: list[int] = []
        run(lambda: times.append(time.perf_counter_ns()))
        return np.diff(np.array(times, np.int64))
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(marks)]  # type: ignore[no-untyped-call]
        following = iter(events)
        run(lambda: next(following).record())
        torch.cuda.synchronize()
        # elapsed_time is float32 milliseconds: differences of neighbours, not of sums, keep its digits.
        return np.array([round(a.elapsed_time(b) * 1e6) for a, b in itertools.pairwise(events)], np.int64)
