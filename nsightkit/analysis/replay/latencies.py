"""Latencies between launches and operations: constants of a trace, not what was recorded of each."""

from __future__ import annotations

import dataclasses

import numpy as np

from nsightkit.analysis.replay.model import HELD_NS, MOST_CUTS, Bool, Int, Union, kinds_of
from nsightkit.analysis.replay.operations import Program

__all__ = ["SLOW_CALL", "Latencies", "read"]

#: Latencies for traces without an example, ns: typical of CUDA devices.
_START_NS, _NEXT_NS, _CALL_NS = 3_000, 1_000, 4_000
#: A launch into a full queue: so many operations wait already, and the call takes so many times its median.
_DEEP, SLOW_CALL, _SLOW_NS = 500, 10, 20_000
#: An operation lay in the queue if the one before it ended this much later than its launch.
_QUEUED_NS = 10_000
#: Samples enough for a median.
_ENOUGH = 200_000


@dataclasses.dataclass(frozen=True, eq=False)
class Latencies:
    """When launches reach the device, and what lies between operations.

    Parameters
    ----------
    ready : ndarray of int64
        When each operation could start for its launch's sake.
    gap : ndarray of int32
        From the operation before each one in its queue to its start.
    call_ns : int
        What a launch call takes.
    full : ndarray of int64
        Operations whose launches waited for room in the queue, by launch; some of very many.
    passive : dict of int to (ndarray, ndarray)
        Per thread, time in which it only waited for that.
    """

    ready: Int
    gap: Int
    call_ns: int
    full: Int
    passive: dict[int, Union]


def read(program: Program) -> Latencies:
    """Estimate the latencies of a program.

    Parameters
    ----------
    program : Program

    Returns
    -------
    Latencies
    """
    operations = program.operations
    linked, start, begun, done = operations.linked, operations.start, operations.begun, operations.done
    meanwhile = program.staged & (start < done)  # staged piece by piece
    ready, gap = _by_kind(program, meanwhile)
    took, launched = done - begun, linked & ~program.own_copy
    call_ns = int(np.median(took[launched])) if launched.any() else _CALL_NS
    slow = launched & (took > SLOW_CALL * call_ns)
    ready = _settled(program, ready, meanwhile, slow, call_ns)
    full = _into_full_queues(program, np.flatnonzero(slow & (took > _SLOW_NS)))
    passive = {}
    for thread in program.threads.tolist():
        own = full[operations.by[full] == thread]
        passive[thread] = begun[own] + call_ns, done[own]
    full = full[:: 1 + len(full) // MOST_CUTS]
    return Latencies(ready, gap, call_ns, full, passive)


def _settled(program: Program, ready: Int, meanwhile: Bool, slow: Bool, call_ns: int) -> Int:
    """When operations could start, where the latency of their kind does not apply."""
    operations, ready = program.operations, ready.copy()
    linked, start, begun, done = operations.linked, operations.start, operations.begun, operations.done
    # Of an operation behind a call that takes its time, the call's end says more.
    ready[slow] = np.maximum(ready[slow], np.minimum(done[slow], start[slow]))
    # The CPU stages pageable memory itself: until the copy begins or, where that had to wait, at the copy's pace.
    behind = meanwhile & (operations.before > start - 2 * _START_NS)
    ready[meanwhile] = start[meanwhile]
    ready[behind] = np.minimum(begun + call_ns + operations.end - start, start)[behind]
    # Launched before the recording began: only its place in the stream counts.
    ready[~linked] = start.min()
    lost = ~linked & operations.first
    ready[lost] = start[lost]
    return ready


def _by_kind(program: Program, meanwhile: Bool) -> tuple[Int, Int]:
    """Medians of each kind of operation: from its launch to its start on an idle device, and from one to the next."""
    operations = program.operations
    linked, start, begun, done = operations.linked, operations.start, operations.begun, operations.done
    idle = linked & (operations.device_before < begun) & ~meanwhile
    queued = linked & ~operations.first & (done + _QUEUED_NS < operations.before)
    ready = np.where(program.own_copy, begun + _CALL_NS, done) + _START_NS
    gap = np.full(len(start), _NEXT_NS, np.int32)
    kinds = 8 * operations.table + 4 * meanwhile + 2 * program.staged + program.own_copy
    for kind in kinds_of(kinds).tolist():
        of_kind = kinds == kind
        samples = _some(of_kind & idle)
        if len(samples):
            # Ignore the end of a call that returns after its copy, and the start of a call that stages it.
            edges = [done, begun]
            if kind & 1:
                edges = [begun]
            elif kind & 2:
                edges = [done]
            edge, late_ns = _steadiest(edges, start, samples)
            np.add(edge, late_ns, out=ready, where=of_kind & linked)
        samples = _some(of_kind & queued)
        between = start[samples] - operations.before[samples]
        between = between[between <= HELD_NS]
        if len(between):
            gap[of_kind] = int(np.median(between))
    return ready, gap


def _steadiest(edges: list[Int], start: Int, samples: Int) -> tuple[Int, int]:
    """The edge of the launch calls that operations follow with the steadiest delay, and the median delay."""
    best = None
    for edge in edges:
        late = start[samples] - edge[samples]
        median = np.median(late)
        spread = float(np.median(np.abs(late - median)))
        if best is None or spread < best[0]:
            best = spread, edge, int(median)
    assert best is not None
    return best[1], best[2]


def _into_full_queues(program: Program, slow: Int) -> Int:
    """Slow launches that found hundreds of operations in the queue, by time."""
    operations = program.operations
    if len(slow):
        launches, ends = np.sort(operations.begun[operations.linked]), np.sort(operations.end)
        waiting = np.searchsorted(launches, operations.begun[slow]) - np.searchsorted(ends, operations.begun[slow])
        slow = slow[waiting >= _DEEP]
    return slow[np.argsort(operations.begun[slow], kind="stable")]


def _some(mask: Bool) -> Int:
    """Enough of the chosen positions for a median."""
    rows = np.flatnonzero(mask)
    return rows[:: 1 + len(rows) // _ENOUGH]
