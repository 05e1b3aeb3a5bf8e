"""The segments of a schedule: between two moments that are waited for, a stream's operations reduce to one line."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pandas as pd

from nsightkit.analysis.replay.model import MOST_CUTS, Bool, Int
from nsightkit.analysis.replay.stages import Stages

__all__ = ["Layout", "lay_out"]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Segments of the streams: runs of operations launched in one slot, with no wait in between.

    Parameters
    ----------
    order : ndarray of int32
        Operations by stream, those moved aside on new streams at the end.
    head, tail : ndarray of int64
        First and last place of each segment in `order`.
    stream, slot : ndarray of int
        Of each segment.
    opens : ndarray of bool
        Whether it is the first of its stream.
    waiting, awaited : ndarray of int64
        Segments that wait for others.
    target, cut_of_target : ndarray of int64
        Segments that cuts wait for, and those cuts.
    crosses : ndarray of bool
        Whether another thread launched the target: then the wait depends on what that has launched by then.
    meeting : ndarray of int64
        Segments of the collectives' operations.
    ends_step, step_ended : ndarray of int64
        Segments that end a step, and the steps.
    beside, beside_operation : ndarray of int64
        Segments that other threads launched, which belong to the step that they are launched in; their last operations.
    """

    order: Int
    head: Int
    tail: Int
    stream: Int
    slot: Int
    opens: Bool
    waiting: Int
    awaited: Int
    target: Int
    cut_of_target: Int
    crosses: Bool
    meeting: Int
    ends_step: Int
    step_ended: Int
    beside: Int
    beside_operation: Int


def lay_out(schedule: Stages, aside: Bool | None = None) -> Layout:
    """Cut the streams into segments.

    Parameters
    ----------
    schedule : Stages
    aside : ndarray of bool, optional
        Operations moved to a new stream, one per device.

    Returns
    -------
    Layout
    """
    number: Int = np.arange(len(schedule.lasting), dtype=np.int32)
    order, stream = number, schedule.operations.stream
    waiting, awaited = schedule.waits.waiting, schedule.waits.awaited
    target, cut_of_target = schedule.cuts.target, schedule.cuts.cut_of_target
    if aside is not None:
        order, stream = _moved(schedule, aside)
        # Nothing waits for operations moved aside.
        kept = ~aside[waiting] & ~aside[awaited]
        waiting, awaited = waiting[kept], awaited[kept]
        target, cut_of_target = _targets_without(schedule, aside)
    position = np.empty_like(number)
    position[order] = number
    meeting = position[schedule.gathered.operation]
    places = _Places(order, stream, position[waiting], position[awaited], position[target], meeting)
    layout = _segments(schedule, places, cut_of_target)
    if aside is None:
        return layout
    new = layout.stream > schedule.operations.stream[-1]
    return _joined_at_steps(layout, new, schedule.program.in_step[order])


class _Places(NamedTuple):
    """Operations and their streams by place, and the places of what waits and is awaited."""

    order: Int
    stream: Int
    waiting: Int
    awaited: Int
    target: Int
    meeting: Int


def _segments(schedule: Stages, places: _Places, cut_of_target: Int) -> Layout:
    order, stream = places.order, places.stream
    by, in_step = schedule.operations.by[order], schedule.program.in_step[order]
    by_others = schedule.program.by_others[order]
    slots = schedule.slot[order]
    cuts = schedule.cuts
    crosses = (by[places.target] != cuts.thread[cut_of_target]) & cuts.blocks[cut_of_target]
    first = np.append(True, stream[1:] != stream[:-1])
    ends_step = np.append(first[1:] | (in_step[1:] != in_step[:-1]), True) & (in_step >= 0)
    beside = np.union1d(_some(np.flatnonzero(by_others)), np.flatnonzero(by_others & ends_step))
    among = _some(np.flatnonzero(np.isin(stream, stream[places.target[crosses]])))
    # A segment ends where something asks when it is done.
    needed = first | ends_step
    for asked in (places.awaited, places.target, among, beside, places.meeting):
        needed[asked] = True
    breaks = _breaks(slots, first, needed)
    breaks[places.waiting] = breaks[places.meeting] = True
    head, segment = np.flatnonzero(breaks), np.cumsum(breaks, dtype=np.int32) - 1
    ends = np.flatnonzero(ends_step & ~by_others)
    return Layout(
        order=order,
        head=head,
        tail=np.append(head[1:], len(stream)) - 1,
        stream=stream[head],
        # Operations without a recorded launch stay in the segment around them: only their order counts.
        slot=slots[head],
        opens=first[head],
        waiting=segment[places.waiting],
        awaited=segment[places.awaited],
        target=segment[places.target],
        cut_of_target=cut_of_target,
        crosses=crosses,
        meeting=segment[places.meeting],
        ends_step=segment[ends],
        step_ended=in_step[ends],
        beside=segment[beside],
        beside_operation=order[beside],
    )


def _breaks(slots: Int, first: Bool, needed: Bool) -> Bool:
    """Where segments begin: behind needed ends, and where a launch comes from another slot."""
    breaks = first.copy()
    changed = (slots[1:] != slots[:-1]) & (slots[1:] >= 0)
    breaks[1:] |= changed | needed[:-1]
    return breaks


def _some(places: Int) -> Int:
    """Enough of many places."""
    return places[:: 1 + len(places) // MOST_CUTS]


def _moved(schedule: Stages, aside: Bool) -> tuple[Int, Int]:
    """Operations by stream, with one new stream per device at the end, in order of time; and each one's stream."""
    operations = schedule.operations
    device = pd.factorize(operations.device)[0].astype(np.int32)
    stream = np.where(aside, device + operations.stream[-1] + np.int32(1), operations.stream)
    time = np.where(aside, operations.start, 0)
    order = np.lexsort((time, stream)).astype(np.int32)
    return order, stream[order]


def _targets_without(schedule: Stages, aside: Bool) -> tuple[Int, Int]:
    """What cuts wait for if nothing waits for operations moved aside, but for those before them in their stream."""
    operations, cuts, program = schedule.operations, schedule.cuts, schedule.program
    number = np.arange(len(operations.start), dtype=np.int32)
    last = np.maximum.accumulate(np.where(aside, np.int32(-1), number))
    last[(last >= 0) & (operations.stream[last] != operations.stream)] = -1
    # A launch into a full queue waits for its room all the same.
    cut = cuts.cut_of_target
    target = np.where(cuts.blocks[cut], last[cuts.target], cuts.target)
    # The call of a copy from pageable memory no longer waits for it; a read-back needs what stood before the copy.
    copies = (cuts.copy[cut] >= 0) & aside[cuts.target] & program.staged[cuts.target]
    waits = (target >= 0) & ~copies
    return target[waits], cut[waits]


def _joined_at_steps(layout: Layout, aside: Bool, in_step: Int) -> Layout:
    """Let a step's work wait for what was moved aside in the step before."""
    moved = pd.Series(np.flatnonzero(aside), in_step[layout.tail[aside]]).groupby(level=0).last()
    begins = pd.DataFrame({"stream": layout.stream, "step": in_step[layout.head]})[~aside]
    begins = begins[begins["step"] > 0].drop_duplicates()
    before = (begins["step"] - 1).map(moved).dropna().astype(np.int64)
    waiting, awaited = np.append(layout.waiting, before.index), np.append(layout.awaited, before)
    return dataclasses.replace(layout, waiting=waiting, awaited=awaited)
