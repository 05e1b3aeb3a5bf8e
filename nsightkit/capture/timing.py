"""Time a function on the device's own clock: warm-up, repetitions, and every sample kept."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

__all__ = ["Timing", "time_calls", "time_prepared"]

_Prepared = TypeVar("_Prepared")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Raw samples of a timed function.

    Parameters
    ----------
    samples_ns : ndarray of int64, shape (repetitions,)
        Time from the start of one call to the start of the next, on `clock`.
    warmup, repetitions : int
    clock : {"cuda-event", "perf_counter"}
        CUDA events have a resolution of about 500 ns.
    """

    samples_ns: np.ndarray
    warmup: int
    repetitions: int
    clock: str

    @property
    def median_ns(self) -> float:
        """Median of the samples."""
        return float(np.median(self.samples_ns))


def time_calls(
    function: Callable[[], object], *, warmup: int = 10, repetitions: int = 50, device: str | None = None
) -> Timing:
    """Time calls of a function, one after the other.

    On a GPU an event is recorded between any two calls, and the CPU waits only once, at the end: the
    measurement does not stop the CPU from running ahead, which is how the function runs in earnest. A
    sample is therefore the time between two calls on the GPU's time line, idle time included. On a CPU
    it is wall time.

    Parameters
    ----------
    function : callable
        Takes no argument.
    warmup : int
        Calls before the first sample: first uses of a kernel load it, allocate and autotune.
    repetitions : int
    device : str, optional
        ``"cpu"`` or a CUDA device; CUDA when there is one, by default.

    Returns
    -------
    Timing

    Raises
    ------
    ValueError
        `repetitions` is not positive.
    """
    if repetitions < 1:
        raise ValueError("repetitions must be at least 1")
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    for _ in range(warmup):
        function()
    if device.startswith("cuda"):
        return Timing(_cuda(function, repetitions, device), warmup, repetitions, "cuda-event")
    bounds = np.empty(repetitions + 1, np.int64)
    bounds[0] = time.perf_counter_ns()
    for i in range(repetitions):
        function()
        bounds[i + 1] = time.perf_counter_ns()
    return Timing(np.diff(bounds), warmup, repetitions, "perf_counter")


def _cuda(function: Callable[[], object], repetitions: int, device: str) -> np.ndarray:
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(repetitions + 1)
        ]
        events[0].record()
        for i in range(repetitions):
            function()
            events[i + 1].record()
        torch.cuda.synchronize()
        # elapsed_time is float32 milliseconds: differences of neighbours, not of sums, keep its digits.
        return np.array([round(a.elapsed_time(b) * 1e6) for a, b in itertools.pairwise(events)], np.int64)


def time_prepared(
    prepare: Callable[[], _Prepared], function: Callable[[_Prepared], object], *, repetitions: int, device: str
) -> Timing:
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
    Timing

    Raises
    ------
    ValueError
        `repetitions` is not positive.
    """
    if repetitions < 1:
        raise ValueError("repetitions must be at least 1")
    if not device.startswith("cuda"):
        samples = np.empty(repetitions, np.int64)
        for i in range(repetitions):
            prepared = prepare()
            start = time.perf_counter_ns()
            function(prepared)
            samples[i] = time.perf_counter_ns() - start
            del prepared
        return Timing(samples, 0, repetitions, "perf_counter")
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            for _ in range(repetitions)
        ]
        for begin, end in events:
            prepared = prepare()
            begin.record()
            function(prepared)
            end.record()
            del prepared
        torch.cuda.synchronize()
        samples = np.array([round(begin.elapsed_time(end) * 1e6) for begin, end in events], np.int64)
        return Timing(samples, 0, repetitions, "cuda-event")
