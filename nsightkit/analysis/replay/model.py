"""What all stages of a replay share: the change, the result, the types, and a few constants."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]
# Starts and ends of disjoint intervals, in ns on the trace's clock.
Intervals = tuple[Int, Int]

#: A time before every other, for what did not happen; a quarter of the smallest number, so that sums do not overflow.
NEVER = np.int64(np.iinfo(np.int64).min // 4)
#: Delays longer than this that nothing recorded explains are waits for something else, not noise of the latencies.
UNEXPLAINED_NS = 20_000


class Unplayable(Exception):
    """No schedule can be made of a trace; the message says why."""


def median(values: Int, otherwise: int) -> int:
    """Give the median of some values, or `otherwise` for an empty list."""
    if len(values):
        return int(np.median(values))
    return otherwise


@dataclasses.dataclass
class Change:
    """What is different in a replay; a field left out stays as recorded.

    Parameters
    ----------
    removed : dict of int to list of (ndarray, ndarray)
        Per CPU thread: starts and ends of intervals that take no time in the replay, ns on the trace's clock.
    waits : bool
        Whether blocking calls wait for the GPU.
    arrivals : bool
        Whether a thread waits for batches that other threads or processes prepare.
    less_ns : ndarray of int64 or 0
        How much less time each operation takes; negative where it takes more.
    aside : ndarray of bool or False
        Operations that run on a separate stream, for which nothing waits before the step ends.
    """

    removed: dict[int, list[Intervals]] = dataclasses.field(default_factory=dict)
    waits: bool = True
    arrivals: bool = True
    less_ns: Int | int = 0
    aside: Bool | bool = False

    def remove(self, thread: int, start: Int, end: Int) -> None:
        """Let some time of a thread take no time in the replay.

        Parameters
        ----------
        thread : int
        start, end : ndarray of int64
            Intervals, ns on the trace's clock; they may overlap.
        """
        self.removed.setdefault(thread, []).append((start, end))

    def aside_mask(self, count: int) -> Bool:
        """Flag the operations that are moved aside, of `count` in all."""
        return np.broadcast_to(self.aside, count)


@dataclasses.dataclass(frozen=True)
class Played:
    """The result of a replay: when the window, and each step in it, ended, in ns since the window's start."""

    wall_ns: int
    steps_ns: Int

    @property
    def step_durations_ns(self) -> Int:
        """How long each step took, from the end of the one before."""
        return np.diff(self.steps_ns, prepend=0)
