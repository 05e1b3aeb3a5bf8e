"""The terms of a replay: the change, the answer, and the few helpers that its stages share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "HELD_NS",
    "NEVER",
    "Change",
    "Played",
    "Unplayable",
    "median",
]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]
#: Start and end of disjoint intervals.
Union = tuple[Int, Int]

NEVER = np.int64(np.iinfo(np.int64).min // 4)
#: An operation that waited longer than this in its stream, with no recorded reason, waited for unrecorded work.
HELD_NS = 20_000


class Unplayable(Exception):
    """No schedule can be made of a trace; the message says why."""


def median(values: Int, otherwise: int) -> int:
    """The median of some values, or a typical one where there are none."""
    if len(values):
        return int(np.median(values))
    return otherwise


@dataclasses.dataclass
class Change:
    """What is different in a replay; a field left out stays as recorded.

    Parameters
    ----------
    away : dict of int to list of (ndarray, ndarray)
        Per thread: intervals that fall away, ns on the trace's clock.
    waits : bool
        Whether blocking calls wait.
    arrivals : bool
        Whether batches that others prepare have to be waited for.
    less_ns : ndarray of int64 or 0
        How much less time each operation takes.
    aside : ndarray of bool or False
        Operations that run on a separate stream, for which nothing waits before the step ends.
    """

    away: dict[int, list[Union]] = dataclasses.field(default_factory=dict)
    waits: bool = True
    arrivals: bool = True
    less_ns: Int | int = 0
    aside: Bool | bool = False

    def take(self, thread: int, start: Int, end: Int) -> None:
        """Take time of a thread away.

        Parameters
        ----------
        thread : int
        start, end : ndarray of int64
        """
        self.away.setdefault(thread, []).append((start, end))

    def moved(self, count: int) -> Bool:
        """Which of so many operations are moved aside."""
        return np.zeros(count, bool) | self.aside


@dataclasses.dataclass(frozen=True)
class Played:
    """When things ended in a replay, ns since the window's start: the window, and each step."""

    wall_ns: int
    steps_ns: Int

    @property
    def each_ns(self) -> Int:
        """How long each step took."""
        return np.diff(self.steps_ns, prepend=0)
