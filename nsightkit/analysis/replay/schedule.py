"""A trace as a schedule: how long each part takes by itself, and what it waits for."""

from __future__ import annotations

import functools

import numpy as np

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay import cuts as stage_of_cuts
from nsightkit.analysis.replay import operations as stage_of_operations
from nsightkit.analysis.replay import streams as stage_of_streams
from nsightkit.analysis.replay.model import Change, Int, Intervals, Played
from nsightkit.analysis.replay.play import Layout, Stages, lay_out, play
from nsightkit.analysis.replay.streams import SLOW_CALL, find_collectives
from nsightkit.analysis.replay.waiting_threads import waits_for_data, waits_for_threads
from nsightkit.analysis.timeline.gaps.threads import Threads
from nsightkit.trace.model import Trace


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
    return Schedule(program, facts, streams, find_collectives(program), cuts)


class Schedule(Stages):
    """A trace as a schedule, which can be replayed with changes; :func:`read` makes it."""

    @functools.cached_property
    def layout(self) -> Layout:
        """The segments of the streams, with no operation moved aside."""
        return lay_out(self, np.zeros(len(self.program.start), bool))

    @functools.cached_property
    def recorded(self) -> Played:
        """When the window and its steps ended in the recording; without steps, the window is all selected GPU work."""
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
        """The largest deviation of the unchanged replay from the recording, of the window or any step, as a share."""
        replayed_ns = np.append(self.unchanged.wall_ns, self.unchanged.step_durations_ns)
        recorded_ns = np.append(self.recorded.wall_ns, self.recorded.step_durations_ns)
        return float((np.abs(replayed_ns - recorded_ns) / np.maximum(recorded_ns, 1)).max())

    def play(self, change: Change) -> Played:
        """Replay the schedule with a change.

        Parameters
        ----------
        change : Change

        Returns
        -------
        Played
        """
        layout = self.layout
        if np.any(change.aside):
            layout = lay_out(self, change.aside_mask(len(self.program.start)))
        return play(self, layout, change)

    def dispatch_beyond(self, thread: int, launch_ns: int, late: Int) -> Intervals:
        """Find the time that dispatch between consecutive launches of a thread takes beyond `launch_ns`.

        Parameters
        ----------
        thread : int
        launch_ns : int
            The time that stays between the starts of two launches.
        late : ndarray of int
            Rows of launching calls for which the GPU waited, for dispatch more than anything else. There, dispatch
            counts even if the thread also did other work since the launch before.

        Returns
        -------
        tuple of ndarray of int64
            Starts and ends of disjoint intervals, ns on the trace's clock.
        """
        launch_row = self.program.launch_row[self.program.launch_thread == thread]
        start = self.program.calls.start[launch_row]
        order = np.argsort(start, kind="stable")  # stable: fast, as operations of a stream are mostly in order already
        launch_row = launch_row[order]
        start = start[order]
        if len(start) < 2:
            return start[:0], start[:0]
        dispatch_free = self.facts.dispatch_free(thread)
        # From each launch to the next: the time of dispatch, and of the thread's other work.
        dispatch_ns = np.diff(start) - np.diff(intervals.Coverage(*dispatch_free).before(start))
        other_ns = np.diff(intervals.Coverage(*self.facts.other_work(thread)).before(start))
        is_long = (dispatch_ns > launch_ns) & ((other_ns <= launch_ns) | np.isin(launch_row[1:], late))
        # Much dispatch between two launches, beside what is usual, is doubtful: operators that dispatch must fill half.
        far_apart = np.flatnonzero(is_long & (dispatch_ns > SLOW_CALL * np.median(dispatch_ns)))
        is_long[far_apart] = (
            2 * self.facts.dispatch(thread).covered(start[far_apart], start[far_apart + 1]) >= dispatch_ns[far_apart]
        )
        # From `launch_ns` after a launch to the next launch.
        beyond = start[:-1][is_long] + launch_ns, start[1:][is_long]
        return intervals.common(beyond, dispatch_free, outside=True)
