"""A trace as a schedule: what each part takes alone, and what it waits for."""

from __future__ import annotations

import functools

import numpy as np

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay import cuts as stage_of_cuts
from nsightkit.analysis.replay import operations as stage_of_operations
from nsightkit.analysis.replay import streams as stage_of_streams
from nsightkit.analysis.replay.model import Change, Int, Played, Union
from nsightkit.analysis.replay.play import Layout, Stages, lay_out, play
from nsightkit.analysis.replay.streams import SLOW_CALL, collectives
from nsightkit.analysis.replay.waiting_threads import waits_for_data, waits_for_threads
from nsightkit.analysis.timeline.gaps.threads import Threads
from nsightkit.trace.model import Trace

__all__ = ["Schedule", "read"]


def read(trace: Trace) -> Schedule:
    """Read a trace as a schedule.

    Parameters
    ----------
    trace : Trace
        Selected or whole; the selection is replayed.

    Returns
    -------
    Schedule

    Raises
    ------
    Unplayable
        The trace does not record enough.
    """
    program = stage_of_operations.read(trace)
    facts = Threads(trace)
    pauses = waits_for_threads(program, facts)
    arrivals = waits_for_data(program, facts)
    streams = stage_of_streams.read(program)
    cuts = stage_of_cuts.read(program, streams, pauses, arrivals)
    return Schedule(program, facts, streams, collectives(program), cuts)


class Schedule(Stages):
    """A trace as a schedule; :func:`read` makes it."""

    @functools.cached_property
    def layout(self) -> Layout:
        """The segments, with nothing moved aside."""
        return lay_out(self, np.zeros(len(self.program.start), bool))

    @functools.cached_property
    def recorded(self) -> Played:
        """The window and its steps as they were recorded."""
        steps = self.program.steps
        if not len(steps):
            return Played(int(self.program.end.max() - self.program.start.min()), np.empty(0, np.int64))
        ends = (steps["end_ns"] - steps["begin_ns"].min()).to_numpy()
        return Played(int(ends[-1]), ends)

    @functools.cached_property
    def unchanged(self) -> Played:
        """The unchanged replay."""
        return self.play(Change())

    @property
    def error(self) -> float:
        """Largest deviation of the unchanged replay from the recording: of the window, or of any step."""
        ours = np.append(self.unchanged.wall_ns, self.unchanged.each_ns)
        recorded = np.append(self.recorded.wall_ns, self.recorded.each_ns)
        return float((np.abs(ours - recorded) / np.maximum(recorded, 1)).max())

    def play(self, change: Change) -> Played:
        """Play the schedule.

        Parameters
        ----------
        change : Change

        Returns
        -------
        Played
        """
        if np.any(change.aside):
            return play(self, lay_out(self, change.moved(len(self.program.start))), change)
        return play(self, self.layout, change)

    def dispatch(self, thread: int, launch_ns: int, late: Int) -> Union:
        """What dispatch between consecutive launches of a thread takes beyond a given time.

        Parameters
        ----------
        thread : int
        launch_ns : int
            The time that stays between the starts of two launches.
        late : ndarray of int
            Launches that came late for dispatch alone, even with other work since the launch before.

        Returns
        -------
        tuple of ndarray of int64
            Disjoint intervals.
        """
        launched = self.program.launch[self.program.by == thread]
        start = self.program.calls.start[launched]
        order = np.argsort(start, kind="stable")  # few runs, as a rule
        launched = launched[order]
        start = start[order]
        if len(start) < 2:
            return start[:0], start[:0]
        other = self.facts.dispatch_free(thread)
        between = np.diff(intervals.Coverage(*other).before(start))
        apart = np.diff(start) - between
        only = (apart > launch_ns) & ((between <= launch_ns) | np.isin(launched[1:], late))
        # Launches that follow each other as launches do, or in operators, have only dispatch between them.
        far = np.flatnonzero(only & (apart > SLOW_CALL * np.median(apart)))
        only[far] = 2 * self.facts.dispatch(thread).covered(start[far], start[far + 1]) >= apart[far]
        away = start[:-1][only] + launch_ns, start[1:][only]
        return intervals.common(away, other, outside=True)
