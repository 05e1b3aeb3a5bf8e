"""Latencies between launches and operations: constants of a trace, not what was recorded of each."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from nsightkit.analysis.replay.model import HELD_NS, Bool, Int, Union, median
from nsightkit.analysis.replay.operations import Program

__all__ = ["SLOW_CALL", "Latencies", "read"]

#: Latencies for traces without an example, ns: typical of CUDA devices.
_START_NS, _NEXT_NS, _CALL_NS = 3_000, 1_000, 4_000
#: A launch into a full queue: so many operations wait already, and the call takes so many times its median.
_DEEP, SLOW_CALL, _SLOW_NS = 500, 10, 20_000
#: Of more launches into a full queue than this, only some are walked; the others follow them.
_MOST_CUTS = 20_000
#: An operation lay in the queue if the one before it ended this much later than its launch.
_QUEUED_NS = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class Latencies:
    """When launches reach the device, and what lies between operations.

    Parameters
    ----------
    ready : ndarray of int64
        When each operation could start for its launch's sake.
    gap : ndarray of int64
        From the operation before each one in its queue to its start.
    call_ns : int
        What a launch call takes.
    full : ndarray of int64
        Operations whose launches waited for room in a full queue; some of very many.
    passive : dict of int to (ndarray, ndarray)
        Per thread: time in which it only waited for that.
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
    begun = program.begun
    done = program.done
    launched = program.linked & ~program.own_copy
    took = done - begun
    call_ns = median(took[launched], _CALL_NS)
    slow = launched & (took > SLOW_CALL * call_ns)
    ready, gap = _ready(program, slow, call_ns)
    # Slow launches that found hundreds of operations in the queue.
    full = np.flatnonzero(slow & (took > _SLOW_NS))
    launched_before = np.searchsorted(np.sort(begun[program.linked]), begun[full])
    ended_before = np.searchsorted(program.end[program.by_end], begun[full])
    full = full[launched_before - ended_before >= _DEEP]
    passive = {}
    for thread in program.threads.tolist():
        own = full[program.by[full] == thread]
        passive[thread] = begun[own] + call_ns, done[own]
    return Latencies(ready, gap, call_ns, full[:: 1 + len(full) // _MOST_CUTS], passive)


def _ready(program: Program, slow: Bool, call_ns: int) -> tuple[Int, Int]:
    """When operations could start, and the gap behind the one before each in its queue: medians of its kind."""
    linked = program.linked
    start = program.start
    begun = program.begun
    done = program.done
    own_copy = program.own_copy
    before = program.before
    meanwhile = program.staged & (start < done)  # staged piece by piece
    kind = 8 * program.table + 4 * meanwhile + 2 * program.staged + own_copy
    idle = linked & (program.device_before < begun) & ~meanwhile
    queued = linked & ~program.first & (done + _QUEUED_NS < before) & (start - before <= HELD_NS)
    gap = _medians(start - before, kind, queued, _NEXT_NS)
    edge = np.where(own_copy, begun, done)  # a call that returns after its copy ends too late
    ready = edge + _medians(start - edge, kind, idle, _START_NS)
    # Of an operation behind a call that takes its time, the call's end says more.
    ready[slow] = np.maximum(ready[slow], np.minimum(done[slow], start[slow]))
    # The CPU stages pageable memory itself: until the copy begins or, where that had to wait, at the copy's pace.
    ready[meanwhile] = start[meanwhile]
    behind = meanwhile & (before > start - 2 * _START_NS)
    ready[behind] = np.minimum(begun + call_ns + program.lasting, start)[behind]
    # Launched before the recording began: only its place in the stream counts.
    ready[~linked] = start.min()
    lost = ~linked & program.first
    ready[lost] = start[lost]
    return ready, gap


def _medians(values: Int, kind: Int, sample: Bool, otherwise: int) -> Int:
    """The median of the sampled values of its kind, for each operation."""
    medians = pd.Series(values[sample]).groupby(kind[sample]).median()
    return medians.reindex(kind, fill_value=otherwise).to_numpy().astype(np.int64)
