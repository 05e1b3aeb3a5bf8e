"""What a replay is asked and what it answers, and the few things that its parts share."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

__all__ = ["HELD_NS", "MOST_CUTS", "NEVER", "Bool", "Change", "Cuts", "Float", "Int", "Played", "kinds_of", "place"]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]
Float = npt.NDArray[np.floating[Any]]

NEVER = np.int64(np.iinfo(np.int64).min // 4)
#: Of more launches into a full queue than this, only some are walked; the others follow them.
MOST_CUTS = 20_000
#: What waited in its stream for longer than this, and for nothing that was recorded, was held up by other work.
HELD_NS = 20_000


def kinds_of(values: Any) -> Int:
    """The few values that many have, in order: a hash of each would cost more than all the rest."""
    return np.sort(pd.unique(np.asarray(values))).astype(np.int64)


def place(threads: Int, times: Int, thread: Int, time: Int, side: Literal["left", "right"] = "left") -> Int:
    """Where moments of some threads belong among times that are in order of thread and time."""
    out = np.zeros(len(thread), np.int32)
    for one in kinds_of(thread).tolist():
        mine = thread == one
        low, high = (int(np.searchsorted(threads, one, end)) for end in ("left", "right"))
        out[mine] = low + np.searchsorted(times[low:high], time[mine], side=side)
    return out


@dataclasses.dataclass(frozen=True)
class Cuts:
    """The moments at which a thread's delay changes, by thread and time.

    Each opens a *slot*: until its next cut all that the thread does is early or late by the same delay. A first cut,
    at `NEVER`, has no delay.

    Parameters
    ----------
    thread, start, end : ndarray of int64
    cost, tail : ndarray of int64
        What a cut takes of its own, and after what it waits for.
    copy : ndarray of int64
        The copy that it returns with, -1 for none.
    arrival : ndarray of int64
        When the batch that it waits for is there.
    blocks, frees : ndarray of bool
        Whether it is a call that waits for the GPU; and whether it frees memory, for which it waits under any change.
    """

    thread: Int
    start: Int
    end: Int
    cost: Int
    tail: Int
    copy: Int
    arrival: Int
    blocks: Bool
    frees: Bool

    def slot(self, thread: Int, time: Int) -> Int:
        """The slot that threads are in at some times, -1 where there is not any thread."""
        return place(self.thread, self.end, thread, time, side="right") - 1


@dataclasses.dataclass(frozen=True)
class Change:
    """What is different in a replay; a field left out stays as recorded.

    Parameters
    ----------
    away : dict of int to (ndarray, ndarray)
        Per thread: disjoint, sorted intervals of its own time that fall away, ns on the trace's clock.
    waits : bool
        Whether blocking calls wait.
    arrivals : bool
        Whether batches that others prepare have to be waited for.
    hand_overs : bool
        Whether threads wait for each other.
    durations_ns : ndarray of int64, optional
        Durations of the operations, in the order of ``Schedule.start``.
    aside : ndarray of bool, optional
        Operations that run on a stream of their own, for which nothing waits before the step ends.
    """

    away: dict[int, tuple[Int, Int]] = dataclasses.field(default_factory=dict)
    waits: bool = True
    arrivals: bool = True
    hand_overs: bool = True
    durations_ns: Int | None = None
    aside: Bool | None = None


@dataclasses.dataclass(frozen=True)
class Played:
    """When things ended in a replay, ns since the window's start: the window, and each step.

    `crowded_ns` is kernel time that other kernels newly run beside, where nothing says how much that slows them down.
    """

    wall_ns: int
    steps_ns: Int
    crowded_ns: int = 0

    @property
    def each_ns(self) -> Int:
        """How long each step took."""
        return np.diff(self.steps_ns, prepend=0)
