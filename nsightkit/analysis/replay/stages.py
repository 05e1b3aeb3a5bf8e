"""The stages of a schedule, held together: what is laid out and replayed."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from nsightkit.analysis.replay.cuts import Cuts
from nsightkit.analysis.replay.latencies import Latencies
from nsightkit.analysis.replay.model import Int
from nsightkit.analysis.replay.operations import Program
from nsightkit.analysis.replay.streams import Gathered, StreamWaits
from nsightkit.analysis.timeline.gaps.threads import Threads

__all__ = ["Stages"]


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """What the stages of reading found: all that a replay needs.

    Parameters
    ----------
    program : Program
    facts : Threads
        What each thread did.
    latencies : Latencies
    waits : StreamWaits
    gathered : Gathered
    cuts : Cuts
    """

    program: Program
    facts: Threads
    latencies: Latencies
    waits: StreamWaits
    gathered: Gathered
    cuts: Cuts

    @property
    def inferred(self) -> int:
        """How many waits the recording does not name."""
        return self.waits.inferred + self.cuts.inferred

    @functools.cached_property
    def slot(self) -> Int:
        """The slot that each operation was launched in, -1 where its launch was not recorded."""
        slot = self.cuts.slot(self.program.by, self.program.begun)
        return np.where(self.program.linked, slot, -1)
