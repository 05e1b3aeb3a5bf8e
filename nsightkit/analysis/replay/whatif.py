"""The gain of a change: the recorded run, replayed with it.

Each change removes exactly the time that one cause names. The run does not gain all of that time, since another cause
may then delay it. So the whole schedule is replayed (:mod:`nsightkit.analysis.replay`), and the answer carries the
error of the unchanged replay. Above 5% nothing is predicted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.replay.model import Change, Int, Played, Unplayable
from nsightkit.analysis.replay.schedule import Schedule, read
from nsightkit.analysis.timeline import gaps
from nsightkit.errors import UsageError
from nsightkit.text import Expression, Json, compiled, matching
from nsightkit.trace.model import GPU_TABLES, Trace, memoised

#: Every named change, with its effect.
CHANGES = {
    "no-input-wait": "the launching threads never wait for data",
    "no-sync": "no call waits for the GPU; what is launched next on other streams waits there instead",
    "free-launches": "launches with only dispatch between them follow each other by 3 µs",
    "overlap-copies": "copies run beside the kernels, and only the step's end waits for them",
    "overlap-communication": "collectives run beside the other kernels, and only the step's end waits for them; "
    "messages of the host take no time",
    "no-cpu-work": "work on the CPU that keeps the GPU waiting takes no time; no-cpu-work:NAME: only that of this name",
    "no-start-up": "what happens once (loading, compiling, capturing) takes no time",
    "no-recompilation": "compiling again after the first steps takes no time",
    "no-profiler": "the profiler takes no time for itself",
    "equal-ranks": "all devices have the same amount of work, so that none waits for another in a collective",
}
#: The label of the threads' time (``LABELS`` in ``timeline.gaps.threads``) that a change removes.
_LABEL_OF = {
    "no-input-wait": "data",
    "no-start-up": "once",
    "no-recompilation": "compile",
    "no-profiler": "profiler",
    "overlap-communication": "messages",
}
#: What each row of the answer holds.
COLUMNS = ("change", "wall_ns", "predicted_ns", "speedup", "replay_error")
#: Above this deviation of the unchanged replay nothing is predicted.
MOST_ERROR = 0.05
#: The time from one launch to the next when launches are free.
_FREE_LAUNCH_NS = 3_000
#: A number in a name, or a whole hash (digits between letters again and again), in which numbers do not count anything.
_NUMBER = re.compile(r"(?P<hash>(?<![A-Za-z0-9])(?=[A-Za-z0-9]{8})[A-Za-z]*(?:\d+[A-Za-z]+){2,}\d+[A-Za-z0-9]*)|\d+")
#: Changes that save a smaller share of the wall time are left out.
_LEAST_GAIN = 0.005
#: So many names of CPU work, the largest, are tried as changes; each costs a replay.
_MOST_NAMES = 3


def plain(name: str) -> str:
    """Replace the numbers of a name by stars, so that names that differ in a number only are one.

    Parameters
    ----------
    name : str

    Examples
    --------
    >>> plain("ensure_layer_12_weights")
    'ensure_layer_*_weights'
    >>> plain("CompiledFxGraph f2k7ab3xq")
    'CompiledFxGraph f2k7ab3xq'
    """
    # A hash, the only named group, stays.
    return _NUMBER.sub(lambda match: match.group() if match.lastgroup else "*", name)


class WhatIf:
    """Changes to one trace, each replayed on request.

    Parameters
    ----------
    trace : Trace

    Attributes
    ----------
    schedule : Schedule or None
        None where no schedule can be made.
    wall_ns : int or None
        The length of the window as it was recorded: the steps or, without steps, from the first operation to the last.
    error : float or None
        How far the unchanged replay is off, as a share; None without a schedule.
    refused : str or None
        Why nothing is predicted; None where something is.
    inferred : int
        How many waits of the schedule the recording does not name.
    """

    # The values for a trace of which no schedule can be made.
    schedule: Schedule | None = None
    wall_ns: int | None = None
    error: float | None = None
    refused: str | None = None
    inferred = 0

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.memo: dict[Any, Any] = {}
        try:
            schedule = read(trace)
        except Unplayable as reason:
            self.refused = str(reason)
            return
        self.schedule = schedule
        self.wall_ns = schedule.recorded.wall_ns
        self.error = schedule.error
        self.inferred = schedule.streams.inferred + schedule.cuts.inferred
        if self.error > MOST_ERROR:
            self.refused = (
                f"replaying the unchanged trace is {100 * self.error:.1f}% off the recording: "
                "something that was not recorded decides its times"
            )

    @property
    def playable(self) -> Schedule:
        """The schedule; only to be used where there is one."""
        assert self.schedule is not None
        return self.schedule

    @memoised
    def played(self, *changes: str) -> Played:
        """Replay the run with some changes, all of them together.

        Parameters
        ----------
        *changes : str
            As :func:`checked_changes` gives them.

        Returns
        -------
        Played
        """
        change = Change()
        for name in changes:
            self._add_named(name, change)
        return self.playable.play(change)

    def row(self, *changes: str) -> Json:
        """Predict the run with some changes, all of them together, as one row of the answer.

        Parameters
        ----------
        *changes : str
            As :func:`checked_changes` gives them.

        Returns
        -------
        dict
            ``change, wall_ns, predicted_ns, speedup, replay_error``.
        """
        remaining = 1 - self.saved(*changes)
        return {
            "change": " + ".join(changes),
            "wall_ns": self.wall_ns,
            "predicted_ns": round((self.wall_ns or 0) * remaining),
            "speedup": 1 / remaining,
            "replay_error": self.error,
        }

    def saved(self, *changes: str) -> float:
        """Predict the share of the wall time that some changes save together.

        Parameters
        ----------
        *changes : str
            As :func:`checked_changes` gives them.

        Returns
        -------
        float
            From 0 to 1; negative where the run becomes slower.
        """
        # Replay against replay, not against the recording: where the replay's constants are wrong, they are so in both.
        after_ns = max(self.played(*changes).wall_ns, 1)
        return 1 - after_ns / max(self.playable.unchanged.wall_ns, 1)

    def _add_named(self, name: str, change: Change) -> None:
        """Add the change of a name, as :func:`checked_changes` gives it, to `change`."""
        key, _, argument = name.partition(":")
        schedule = self.playable
        threads = schedule.program.threads.tolist()
        # Two keys remove the time of a label and also do something below: so no elif.
        if key in _LABEL_OF:
            for thread in threads:
                change.remove(thread, *schedule.facts.when(thread, [_LABEL_OF[key]]))
        if key == "no-input-wait":
            change.arrivals = False
        elif key == "no-sync":
            change.waits = False
        elif key == "overlap-communication":
            change.aside = change.aside | schedule.program.is_collective
        elif key == "free-launches":
            idle = gaps.causes(self.trace)
            # The deciding event of such a gap is the call that launched what ended it.
            late_launches = idle.loc[idle["cause"] == "launch-overhead", "row"].to_numpy()
            for thread in threads:
                change.remove(thread, *schedule.dispatch_beyond(thread, _FREE_LAUNCH_NS, late_launches))
        elif key == "overlap-copies":
            _overlap_copies(schedule, change)
        elif key == "no-cpu-work":
            names = {plain(argument)} if argument else set(self.work)
            # Where samples are the evidence of a gap, all samples count as work: each names one of many functions.
            any_sample = not argument and "sample" in set(self._cpu_work_gaps["kind"])
            _remove_work(schedule, change, names, any_sample)
        elif key == "equal-ranks":
            change.less_ns = change.less_ns + _saved_by_equal_devices(schedule)
        elif key == "scale":
            pattern, _, factor = argument.rpartition("=")
            saved_ns = _saved_by_scaling(schedule, compiled(pattern, "--scale"), float(factor))
            change.less_ns = change.less_ns + saved_ns
            if not saved_ns.any() and float(factor) != 1:
                raise UsageError(f"--scale: no GPU operation matches {pattern!r}")
        elif key == "without":
            without = compiled(argument, "--without")
            saved_ns = _saved_by_scaling(schedule, without, 0.0)
            change.less_ns = change.less_ns + saved_ns
            is_matched = bool(saved_ns.any())
            for thread in threads:
                for table in ("ranges", "ops"):
                    events = schedule.facts.named(table, thread, without)
                    change.remove(thread, events.start, events.end)
                    is_matched |= len(events.start) > 0
            if not is_matched:
                raise UsageError(
                    f"--without: {argument!r} matches no GPU operation, and no range or operator of a launching thread"
                )

    @property
    @memoised
    def _cpu_work_gaps(self) -> pd.DataFrame:
        """The idle time with named CPU work as its cause, in the columns of :func:`gaps.causes`."""
        idle = gaps.in_window(self.trace)
        return idle[(idle["cause"] == "cpu-work").to_numpy() & (idle["name"] != "").to_numpy()]

    @property
    @memoised
    def work(self) -> dict[str, int]:
        """The CPU work that gaps have as their cause, by :func:`plain` name: idle time in ns, the largest first."""
        idle = self._cpu_work_gaps
        lost_ns = (idle["end_ns"] - idle["start_ns"]).groupby(idle["name"].astype(str).map(plain)).sum()
        return {str(name): int(ns) for name, ns in lost_ns.sort_values(ascending=False).items()}


def _saved_by_equal_devices(schedule: Schedule) -> Int:
    """Give the ns that each operation saves if all devices have the same amount of work; negative on light devices.

    Work is the time of kernels that are not collectives.
    """
    program = schedule.program
    is_work = (program.table == GPU_TABLES.index("kernels")) & ~program.is_collective
    # A device that only copies counts in the mean, with no work: it could take its part.
    work_ns_by_device = pd.Series(np.where(is_work, program.duration_ns, 0)).groupby(program.device)
    mean_ns = work_ns_by_device.sum().mean()
    saved_share = 1 - mean_ns / work_ns_by_device.transform("sum").clip(lower=1)
    return np.where(is_work, program.duration_ns * saved_share, 0).astype(np.int64)


def _remove_work(schedule: Schedule, change: Change, names: set[str], any_sample: bool) -> None:
    """Remove from the launching threads the time labelled as work inside events of some :func:`plain` names.

    With `any_sample` also inside all samples: a sample names the innermost function, one of many that a piece of work
    calls.
    """
    parts = []
    for table in ("ranges", "ops", "calls", "os_calls", "samples"):
        events = schedule.program.trace.whole.table(table, ["start_ns", "end_ns", "thread", "name"])
        is_wanted = events["name"].map(plain).isin(names)
        if any_sample and table == "samples":
            is_wanted[:] = True
        parts.append(events[is_wanted])
    wanted = pd.concat(parts)
    for thread in schedule.program.threads.tolist():
        of_thread = wanted[wanted["thread"] == thread]
        work = schedule.facts.when(thread, ["work", "enclosed"])
        change.remove(thread, *intervals.common(work, (of_thread["start_ns"], of_thread["end_ns"])))


def _saved_by_scaling(schedule: Schedule, pattern: Expression, factor: float) -> Int:
    """Give the ns that each operation saves if its kernels and copies of matching names take `factor` of their time."""
    program = schedule.program
    whole = program.trace.whole
    saved_ns = np.zeros(len(program.duration_ns))
    for number, table in enumerate(("kernels", "memops")):  # the first two of GPU_TABLES; the third has no names
        events = program.events[program.events["table"] == number]
        events = events[matching(pd.Series(gaps.names_of(whole, table, events["row"].to_numpy())), pattern)]
        duration_ns = whole.table(table, ["duration_ns"])["duration_ns"].to_numpy()[events["row"]]
        # An operation may have several events: their savings add up.
        np.add.at(saved_ns, events["operation"], duration_ns * (1 - factor))
    return saved_ns.astype(np.int64)


def _overlap_copies(schedule: Schedule, change: Change) -> None:
    """Add to `change` that copies to or from a device move aside, and that no call stages them: as in pinned memory."""
    program = schedule.program
    calls = program.calls
    kinds = program.trace.whole.table("memops", ["kind"])["kind"]
    copies = np.flatnonzero(~kinds.isin(["memset", "DtoD"]))  # what the device does by itself stays
    events = program.events
    is_copy_event = (events["table"] == GPU_TABLES.index("memops")) & events["row"].isin(copies)
    # Operations of nothing but copies: a graph that also holds kernels stays.
    is_copy = is_copy_event.groupby(events["operation"]).all().to_numpy()
    for thread in program.threads.tolist():
        staging_call = program.launch_row[program.is_staged_copy & is_copy & (program.launch_thread == thread)]
        # Without staging, the call takes no longer than any launch.
        launched = np.minimum(calls.start[staging_call] + schedule.streams.call_ns, calls.end[staging_call])
        change.remove(thread, launched, calls.end[staging_call])
    # A copy that mostly queued behind work that the trace does not contain stays where that work is.
    change.aside = change.aside | (is_copy & (schedule.streams.held_ns <= program.duration_ns))


def checked_changes(changes: Sequence[str] = (), without: str | None = None, scale: str | None = None) -> list[str]:
    """Check the requested changes, and write them in one form: ``KEY`` or ``KEY:ARGUMENT``.

    Parameters
    ----------
    changes : sequence of str
        Keys of :data:`CHANGES`, or ``no-cpu-work:NAME``.
    without : str, optional
        Regular expression: GPU operations, ranges and operators of these names take no time.
    scale : str, optional
        ``REGEX=F``: scale the duration of GPU operations of these names by F.

    Returns
    -------
    list of str
        Changes as :meth:`WhatIf.row` takes them.

    Raises
    ------
    UsageError
        An unknown change, or a malformed expression or factor.
    """
    for change in changes:
        key, _, argument = change.partition(":")
        if key not in CHANGES or (argument and key != "no-cpu-work"):
            raise UsageError(f"unknown change {change!r}; choose from {', '.join(CHANGES)}")
    names = list(dict.fromkeys(changes))  # each once
    if without is not None:
        compiled(without, "--without")
        names.append(f"without:{without}")
    if scale is not None:
        pattern, sign, factor = scale.rpartition("=")
        compiled(pattern, "--scale")
        if not sign or not re.fullmatch(r"\d{1,3}|\d{0,3}\.\d{1,9}", factor):
            raise UsageError(f"--scale: {scale!r} is not of the form REGEX=F, with a factor below 1000 such as 0.5")
        names.append(f"scale:{scale}")
    return names


def gaining(replay: WhatIf) -> list[str]:
    """List the changes that gain something, the largest gain first.

    Parameters
    ----------
    replay : WhatIf
        One that refuses nothing.

    Returns
    -------
    list of str
        Keys of :data:`CHANGES`, and ``no-cpu-work:NAME`` for the CPU work that most idle time waits for.
    """
    changes = list(CHANGES)
    if len(replay.work) > 1:
        # A range around a whole step names no work. If just one name is left, removing it is `no-cpu-work` itself.
        whole_steps = {plain(name) for name in replay.playable.program.steps["step"]}
        names = [name for name in replay.work if name not in whole_steps]
        changes += [f"no-cpu-work:{name}" for name in names[:_MOST_NAMES]]
    gainful = [change for change in changes if replay.saved(change) >= _LEAST_GAIN]
    return sorted(gainful, key=replay.saved, reverse=True)


def rows(replay: WhatIf, wanted: Sequence[str] = ()) -> list[Json]:
    """Predict the gain of each change, and of several together.

    Parameters
    ----------
    replay : WhatIf
    wanted : sequence of str
        As :func:`checked_changes` gives them; without any, all that gain something.

    Returns
    -------
    list of dict
        ``change, wall_ns, predicted_ns, speedup, replay_error``, the largest gain first, and all of several together
        last. Where nothing can be predicted, a row for each requested change, with None for unknown values.
    """
    if replay.refused is not None:
        unknown = {"wall_ns": replay.wall_ns, "predicted_ns": None, "speedup": None, "replay_error": replay.error}
        return [{"change": change, **unknown} for change in wanted]
    changes = sorted(wanted, key=replay.saved, reverse=True) or gaining(replay)
    table = [replay.row(change) for change in changes]
    if len(wanted) > 1:
        table.append(replay.row(*wanted))
    return table
