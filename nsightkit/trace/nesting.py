"""Nesting of intervals on their threads, without a loop over events."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]


def nesting(
    thread: npt.ArrayLike,
    start: npt.ArrayLike,
    end: npt.ArrayLike,
    tolerance: int = 0,
    alone: npt.NDArray[np.bool_] | bool = False,
) -> tuple[npt.NDArray[np.int32], _Ints]:
    """Depth and enclosing interval of each interval, among those of its thread.

    The parent of an interval is the innermost one on its thread that began no later and is still open
    until its end. Equal intervals nest in row order. Intervals that cross (which push/pop ranges cannot)
    are siblings, and what begins after the crossing belongs to the later one.

    Parameters
    ----------
    thread : array-like of int, shape (n,)
        Intervals nest only within one value of it.
    start, end : array-like of int, shape (n,)
        In any order; ``end >= start``.
    tolerance : int, default 0
        By how much, in the unit of `start`, a child may outlive its parent and still count as nested: traces
        with times rounded to microseconds need 1000 ns.
    alone : ndarray of bool, shape (n,), default False
        Intervals without parent and children.

    Returns
    -------
    level : ndarray of int32, shape (n,)
        0 for an outermost interval.
    parent : ndarray of int64, shape (n,)
        Row of the enclosing interval, -1 for none.
    """
    # Those that stand alone get a thread each, of numbers that no thread has.
    apart = np.iinfo(np.int64).min + np.arange(np.size(thread))
    thread = np.where(alone, apart, np.asarray(thread, dtype=np.int64))
    start = np.asarray(start, dtype=np.int64)
    end = np.asarray(end, dtype=np.int64)
    order = np.lexsort((-end, start, thread))
    enclosing = _previous_reaching(thread[order], start[order], end[order], tolerance)

    # Position 0 is the root of everything, position k + 1 the k-th interval in sorted order. The number of
    # hops to the root, by pointer doubling: logarithmic in the deepest level.
    level = np.ones(len(enclosing), np.int32)
    level[0] = 0
    jump = enclosing
    while (more := level[jump]).any():
        level += more
        jump = jump[jump]

    parent = np.empty(len(start), np.int64)
    depth = np.empty(len(start), np.int32)
    parent[order] = np.concatenate(([-1], order))[enclosing[1:]]
    depth[order] = level[1:] - 1
    return depth, parent


def _previous_reaching(thread: _Ints, start: _Ints, end: _Ints, tolerance: int) -> _Ints:
    """Position (1-based, 0 for none) of the nearest earlier interval on the thread that reaches far enough.

    Everything between an interval and its candidate ends before the interval's own end, so when a candidate does
    not reach, its own candidate is the next to try, settled or not: runs of siblings are skipped in doubling steps.
    """
    reach = np.concatenate(([np.iinfo(np.int64).max], end))
    # An interval that merely outlives the tolerance must still be open when this one begins.
    need = np.maximum(end - tolerance, start + (end > start))
    candidate = np.arange(-1, len(start)).clip(0)
    candidate[2:][thread[1:] != thread[:-1]] = 0
    active = np.flatnonzero(reach[candidate[1:]] < need) + 1
    while len(active):
        hop = candidate[candidate[active]]
        candidate[active] = hop
        active = active[reach[hop] < need[active - 1]]
    return candidate
