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

    def calls(mark: Callable[[], None]) -> None:
        mark()
        for _ in range(repetitions):
            function()
            mark()

    samples_ns, clock = _between_marks(calls, repetitions + 1, device)
    return Timing(samples_ns, warmup, repetitions, clock)


def _between_marks(run: Callable[[Callable[[], None]], None], marks: int, device: str) -> tuple[np.ndarray, str]:
    """Run a function that marks moments, and give the nanoseconds between them and the clock that gave them."""
    if not device.startswith("cuda"):
        times: list[int] = []
        run(lambda: times.append(time.perf_counter_ns()))
        return np.diff(np.array(times, np.int64)), "perf_counter"
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(marks)]  # type: ignore[no-untyped-call]
        following = iter(events)
        run(lambda: next(following).record())
        torch.cuda.synchronize()
        # elapsed_time is float32 milliseconds: differences of neighbours, not of sums, keep its digits.
        elapsed = [round(a.elapsed_time(b) * 1e6) for a, b in itertools.pairwise(events)]
        return np.array(elapsed, np.int64), "cuda-event"


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

    def calls(mark: Callable[[], None]) -> None:
        for _ in range(repetitions):
            prepared = prepare()
            mark()
            function(prepared)
            mark()
            del prepared

    between_ns, clock = _between_marks(calls, 2 * repetitions, device)
    return Timing(between_ns[::2], 0, repetitions, clock)
