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
    """Find the depth and the enclosing interval of each interval, among those of its thread.

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
    # An interval that stands alone gets a thread of its own, with a number from the lowest int64 on: no thread has it.
    own_thread = np.iinfo(np.int64).min + np.arange(np.size(thread))
    thread = np.where(alone, own_thread, np.asarray(thread, dtype=np.int64))
    start = np.asarray(start, dtype=np.int64)
    end = np.asarray(end, dtype=np.int64)
    # By thread, then start; of equal starts the longest first, as it holds the others.
    order = np.lexsort((-end, start, thread))
    enclosing = _previous_reaching(thread[order], start[order], end[order], tolerance)

    # Position 0 is the root of everything, position k + 1 the k-th interval in sorted order. Count the hops from each
    # to the root by pointer doubling: `hops` is how many lead to `ancestor`, and each round adds those from there on.
    # The number of rounds is logarithmic in the deepest level.
    hops = np.ones(len(enclosing), np.int32)
    hops[0] = 0
    ancestor = enclosing
    while (hops_from_ancestor := hops[ancestor]).any():
        hops += hops_from_ancestor
        ancestor = ancestor[ancestor]

    # From positions back to rows: position 0 is no parent (-1), position k + 1 is row order[k].
    row_at = np.concatenate(([-1], order))
    parent = np.empty(len(start), np.int64)
    level = np.empty(len(start), np.int32)
    parent[order] = row_at[enclosing[1:]]
    level[order] = hops[1:] - 1
    return level, parent


def _previous_reaching(thread: _Ints, start: _Ints, end: _Ints, tolerance: int) -> _Ints:
    """Find for each sorted interval the nearest earlier one on its thread that is open until its end.

    Returns positions, 1 for the first interval and 0 for none; position 0 itself holds 0.

    Everything between an interval and its candidate ends before the interval's own end, so when a candidate does
    not reach, its own candidate is the next to try, settled or not: runs of siblings are skipped in doubling steps.
    """
    end_at = np.concatenate(([np.iinfo(np.int64).max], end))  # by position: "none" encloses everything
    # The enclosing interval lasts until this one's end, less the tolerance, and in any case beyond its start.
    least_end = np.maximum(end - tolerance, start + (end > start))
    candidate = np.arange(-1, len(start)).clip(0)  # at first the position before
    candidate[2:][thread[1:] != thread[:-1]] = 0  # none for the first interval of a thread
    unsettled = np.flatnonzero(end_at[candidate[1:]] < least_end) + 1
    while len(unsettled):
        next_candidate = candidate[candidate[unsettled]]
        candidate[unsettled] = next_candidate
        unsettled = unsettled[end_at[next_candidate] < least_end[unsettled - 1]]
    return candidate
