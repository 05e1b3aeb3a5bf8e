"""The segments of a schedule: between two moments that are waited for, a stream's operations reduce to one line."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pandas as pd

from nsightkit.analysis.replay.cuts import Cuts
from nsightkit.analysis.replay.model import Bool, Int
from nsightkit.analysis.replay.operations import Program
from nsightkit.analysis.replay.streams import Gathered, Streams
from nsightkit.analysis.timeline.gaps.threads import Threads

__all__ = ["Layout", "Stages", "lay_out"]


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """What the stages of reading found: all that a replay needs.

    Parameters
    ----------
    program : Program
    facts : Threads
        What each thread did.
    streams : Streams
    gathered : Gathered
    cuts : Cuts
    """

    program: Program
    facts: Threads
    streams: Streams
    gathered: Gathered
    cuts: Cuts

    @property
    def inferred(self) -> int:
        """How many waits the recording does not name."""
        return self.streams.inferred + self.cuts.inferred

    @functools.cached_property
    def slot(self) -> Int:
        """The slot that each operation was launched in, -1 where its launch was not recorded."""
        slot = self.cuts.slot(self.program.by, self.program.begun)
        return np.where(self.program.linked, slot, -1)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Segments of the streams: runs of operations launched in one slot, with no wait in between.

    Parameters
    ----------
    order : ndarray of int64
        Operations by stream, those moved aside on new streams at the end.
    head, tail : ndarray of int64
        First and last place of each segment in `order`.
    opens : ndarray of bool
        Whether a segment is the first of its stream.
    waiting, awaited : ndarray of int64
        Segments that wait for others.
    target : ndarray of int64
        Segments that cuts wait for, in the order of ``Cuts.target``; -1 where nothing is left to wait for.
    meeting : ndarray of int64
        Segments of the collectives' operations.
    ending : ndarray of int64
        Segments that end a step on their stream.
    """

    order: Int
    head: Int
    tail: Int
    opens: Bool
    waiting: Int
    awaited: Int
    target: Int
    meeting: Int
    ending: Int


def lay_out(schedule: Stages, aside: Bool) -> Layout:
    """Cut the streams into segments.

    Parameters
    ----------
    schedule : Stages
    aside : ndarray of bool
        Operations moved to a new stream, one per device.

    Returns
    -------
    Layout
    """
    program = schedule.program
    meeting = schedule.gathered.operation
    device, _ = pd.factorize(program.device)
    stream = np.where(aside, program.stream[-1] + 1 + device, program.stream)
    order = np.lexsort((program.start, stream))
    first = _changes(stream[order])
    step = program.in_step[order]
    last = np.append(first[1:] | _changes(step)[1:], True)
    waiting, awaited = _pairs(schedule, aside, stream, order)
    target = _targets(schedule, aside)
    # A segment ends where something asks when it is done, and begins where a launch comes from another slot.
    # Operations without a recorded launch stay in the segment around them: only their order counts.
    slot = schedule.slot[order]
    ends = first | last
    ends |= _among(awaited, order) | _among(target[target >= 0], order) | _among(meeting, order)
    begins = first | _among(waiting, order) | _among(meeting, order)
    begins |= _changes(slot) & (slot >= 0)
    begins[1:] |= ends[:-1]
    head = np.flatnonzero(begins)
    segment = np.empty(len(order), np.int64)
    segment[order] = np.cumsum(begins) - 1
    return Layout(
        order=order,
        head=head,
        tail=np.append(head[1:], len(order)) - 1,
        opens=first[head],
        waiting=segment[waiting],
        awaited=segment[awaited],
        target=np.where(target >= 0, segment[target], -1),
        meeting=segment[meeting],
        ending=segment[order[last & (step >= 0)]],
    )


def _changes(values: Int) -> Bool:
    """Where a value differs from the one before it; true of the first."""
    return np.append(True, values[1:] != values[:-1])


def _among(operations: Int, order: Int) -> Bool:
    """Per place: whether its operation is one of some."""
    flag = np.zeros(len(order), bool)
    flag[operations] = True
    return flag[order]


def _pairs(schedule: Stages, aside: Bool, stream: Int, order: Int) -> tuple[Int, Int]:
    """Operations that wait for others. Nothing waits for those moved aside but work of the steps after theirs."""
    program = schedule.program
    waiting = schedule.streams.waiting
    awaited = schedule.streams.awaited
    kept = ~aside[waiting] & ~aside[awaited]
    columns = {"operation": order, "stream": stream[order], "device": program.device[order]}
    ops = pd.DataFrame({**columns, "step": program.in_step[order]})
    moved = aside[order]
    ends = ops[moved].drop_duplicates(["device", "step"], keep="last").sort_values("step")
    begins = ops[~moved & (ops["step"] > 0)].drop_duplicates(["stream", "step"]).sort_values("step")
    ends = ends.drop(columns="stream").rename(columns={"operation": "end"})
    joined = pd.merge_asof(begins, ends, on="step", by="device", allow_exact_matches=False).dropna()
    waiting = np.append(waiting[kept], joined["operation"])
    return waiting, np.append(awaited[kept], joined["end"]).astype(np.int64)


def _targets(schedule: Stages, aside: Bool) -> Int:
    """What cuts wait for: instead of an operation moved aside for the one before it in its stream, -1 for none."""
    program = schedule.program
    cuts = schedule.cuts
    last = np.maximum.accumulate(np.where(aside, -1, np.arange(len(aside))))
    last[program.stream[last] != program.stream] = -1
    # The call of a copy from pageable memory no longer waits for it; a read-back needs what stood before the copy.
    own = (cuts.copy[cuts.cut] == cuts.target) & program.staged[cuts.target] & aside[cuts.target]
    return np.where(own, -1, last[cuts.target])
