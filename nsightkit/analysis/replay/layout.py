"""The segments of a schedule: between two moments that are waited for, a stream's operations reduce to one line."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pandas as pd

from nsightkit.analysis.replay.model import Bool, Int
from nsightkit.analysis.replay.stages import Stages

__all__ = ["Layout", "lay_out"]


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
    target, call : ndarray of int64
        Segments that blocking calls wait for, and positions of these calls in ``Cuts.blocks``.
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
    call: Int
    meeting: Int
    ending: Int


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
    stream = schedule.program.stream
    waiting = schedule.waits.waiting
    awaited = schedule.waits.awaited
    target = schedule.cuts.target
    call = schedule.cuts.call
    order = np.arange(len(stream))
    if aside is not None:
        device, _ = pd.factorize(schedule.program.device)
        stream = np.where(aside, stream[-1] + 1 + device, stream)
        order = np.lexsort((np.where(aside, schedule.program.start, 0), stream))
        # Nothing waits for operations moved aside.
        kept = ~aside[waiting] & ~aside[awaited]
        waiting = waiting[kept]
        awaited = awaited[kept]
        target, call = _targets_without(schedule, aside)
    position = np.argsort(order)
    places = _Places(order, stream[order], position[waiting], position[awaited], position[target])
    return _segments(schedule, places, call, aside)


class _Places(NamedTuple):
    """Operations and their streams by place, and the places of what waits and is awaited."""

    order: Int
    stream: Int
    waiting: Int
    awaited: Int
    target: Int


def _segments(schedule: Stages, places: _Places, call: Int, aside: Bool | None) -> Layout:
    order, stream, waiting, awaited, target = places
    meeting = np.argsort(order)[schedule.gathered.operation]
    slot = schedule.slot[order]
    step = schedule.program.in_step[order]
    first = np.append(True, stream[1:] != stream[:-1])
    last = np.append(first[1:] | (step[1:] != step[:-1]), True)
    if aside is not None:
        joined, ended = _at_steps(step, last, aside[order], schedule.program.device[order])
        waiting = np.append(waiting, joined)
        awaited = np.append(awaited, ended)
    # A segment ends where something asks when it is done, and begins where a launch comes from another slot.
    # Operations without a recorded launch stay in the segment around them: only their order counts.
    ends = first | last
    ends[awaited] = ends[target] = ends[meeting] = True
    begins = first.copy()
    begins[1:] |= ends[:-1] | ((slot[1:] != slot[:-1]) & (slot[1:] >= 0))
    begins[waiting] = begins[meeting] = True
    head = np.flatnonzero(begins)
    segment = np.cumsum(begins) - 1
    return Layout(
        order=order,
        head=head,
        tail=np.append(head[1:], len(order)) - 1,
        opens=first[head],
        waiting=segment[waiting],
        awaited=segment[awaited],
        target=segment[target],
        call=call,
        meeting=segment[meeting],
        ending=segment[last & (step >= 0)],
    )


def _targets_without(schedule: Stages, aside: Bool) -> tuple[Int, Int]:
    """What calls wait for if nothing waits for operations moved aside, but for those before them in their stream."""
    program = schedule.program
    cuts = schedule.cuts
    last = np.maximum.accumulate(np.where(aside, -1, np.arange(len(aside))))
    last[program.stream[last] != program.stream] = -1
    target = last[cuts.target]
    # The call of a copy from pageable memory no longer waits for it; a read-back needs what stood before the copy.
    own = (cuts.copy[cuts.call] == cuts.target) & program.staged[cuts.target] & aside[cuts.target]
    waits = (target >= 0) & ~own
    return target[waits], cuts.call[waits]


def _at_steps(step: Int, last: Bool, moved: Bool, device: Int) -> tuple[Int, Int]:
    """Places where a step's work begins on a stream, and where what was moved aside before ends on its device.

    The arguments have a value for each place; `last` is true where a stream's work of a step ends.
    """
    is_first = np.append(True, last[:-1])
    begins = np.flatnonzero(is_first & (step > 0) & ~moved)
    # By device and step, as one number: the end before a begin is then that of the nearest earlier step.
    key = (device.astype(np.int64) << 32) + step
    ends = np.flatnonzero(last & moved)
    ends = ends[np.argsort(key[ends], kind="stable")]
    before = np.searchsorted(key[ends], key[begins], side="left") - 1
    # Where a device has no earlier end, this is one of the device before, or -1.
    on_device = (before >= 0) & (device[ends[before]] == device[begins])
    return begins[on_device], ends[before[on_device]]
