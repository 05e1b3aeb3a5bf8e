"""The gain of a change: the recorded run, replayed with it.

Each change takes away exactly what one cause names. What that gains is not the time it took: something else may hold
the run up next. So the whole schedule is replayed (:mod:`nsightkit.analysis.replay`), and the answer carries the
error of the unchanged replay. Above 5% nothing is predicted.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import Expression, compiled, matching
from nsightkit.analysis.replay.model import Change, Int, Played, Unplayable
from nsightkit.analysis.replay.schedule import Schedule, read
from nsightkit.analysis.timeline import gaps
from nsightkit.errors import UsageError
from nsightkit.safe import Json
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["CHANGES", "COLUMNS", "MOST_ERROR", "STANDARD", "WhatIf", "asked", "plain", "rows"]

#: Changes that a program's author can make with an ordinary amount of work, and that any trace can be asked about.
STANDARD = ("no-input-wait", "no-sync", "free-launches", "overlap-copies", "overlap-communication")
#: Every named change, with its effect.
CHANGES = {
    "no-input-wait": "the launching threads never wait for data",
    "no-sync": "no call waits for the GPU",
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
#: The painted label that a change takes away.
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
#: Dispatch between two launches when launches are free.
_LAUNCH_NS = 3_000
#: A number in a name; digits between letters again and again are a hash, in which they count.
_NUMBER = re.compile(r"(?P<hash>(?<![A-Za-z0-9])(?=[A-Za-z0-9]{8})[A-Za-z]*(?:\d+[A-Za-z]+){2,}\d+[A-Za-z0-9]*)|\d+")
#: Changes with smaller gains get no row.
_WORTH = 0.002


def plain(name: str) -> str:
    """Give the name that events share which differ in a number only.

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
    return _NUMBER.sub(lambda number: number.group() if number.lastgroup else "*", name)


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
        The window as it was recorded: the steps, or without steps from the first operation to the last.
    error : float or None
        Of the unchanged replay.
    refused : str or None
        Why nothing is predicted.
    inferred : int
        How many waits the recording does not name.
    held_ns : int
        How long operations waited for work that the trace does not contain.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.memo: dict[Any, Any] = {}
        self.schedule: Schedule | None = None
        self.wall_ns: int | None = None
        self.error: float | None = None
        self.refused: str | None = None
        self.inferred = 0
        self.held_ns = 0
        try:
            schedule = read(trace)
        except Unplayable as reason:
            self.refused = str(reason)
            return
        self.schedule = schedule
        self.wall_ns = schedule.recorded.wall_ns
        self.error = schedule.error
        self.inferred = schedule.streams.inferred + schedule.cuts.inferred
        self.held_ns = int(schedule.streams.held_ns.sum())
        if self.error > MOST_ERROR:
            self.refused = (
                f"replaying the unchanged trace is {100 * self.error:.1f}% off the recording: "
                "something that was not recorded decides its times"
            )

    @property
    def playable(self) -> Schedule:
        """The schedule, where there is one."""
        assert self.schedule is not None
        return self.schedule

    @kept
    def played(self, *changes: str) -> Played:
        """Play the run with changes, all of them together.

        Parameters
        ----------
        *changes : str
            As :func:`asked` gives them.

        Returns
        -------
        Played
        """
        change = Change()
        for name in changes:
            self._add(name, change)
        return self.playable.play(change)

    def row(self, *changes: str) -> Json:
        """One row of the answer.

        Parameters
        ----------
        *changes : str

        Returns
        -------
        dict
            ``change, wall_ns, predicted_ns, speedup, replay_error``.
        """
        left = 1 - self.saved(*changes)
        return {
            "change": " + ".join(changes),
            "wall_ns": self.wall_ns,
            "predicted_ns": round((self.wall_ns or 0) * left),
            "speedup": 1 / left,
            "replay_error": self.error,
        }

    def saved(self, *changes: str) -> float:
        """The share of the wall time that changes save together.

        Parameters
        ----------
        *changes : str

        Returns
        -------
        float
        """
        # Where the replay's constants are wrong, they are wrong in both.
        after_ns = max(self.played(*changes).wall_ns, 1)
        return 1 - after_ns / max(self.playable.unchanged.wall_ns, 1)

    def _add(self, name: str, change: Change) -> None:
        """Add the change of a name, as :func:`asked` gives it, to what a replay changes."""
        key, _, argument = name.partition(":")
        schedule = self.playable
        threads = schedule.program.threads.tolist()
        # Two keys take away a label and change something else as well: both conditions are tried.
        if key in _LABEL_OF:
            for thread in threads:
                change.take(thread, *schedule.facts.when(thread, [_LABEL_OF[key]]))
        if key == "no-input-wait":
            change.arrivals = False
        elif key == "no-sync":
            change.waits = False
        elif key == "overlap-communication":
            change.aside = change.aside | schedule.program.collective
        elif key == "free-launches":
            idle = gaps.causes(self.trace)
            late = idle.loc[idle["cause"] == "launch-overhead", "row"].to_numpy()
            for thread in threads:
                change.take(thread, *schedule.dispatch(thread, _LAUNCH_NS, late))
        elif key == "overlap-copies":
            _overlap_copies(schedule, change)
        elif key == "no-cpu-work":
            sampled = not argument and "sample" in set(self._cpu_work["kind"])
            _take_work(schedule, change, {plain(argument)} if argument else set(self.work), sampled)
        elif key == "equal-ranks":
            change.less_ns = change.less_ns + _evened(schedule)
        elif key == "scale":
            pattern, _, factor = argument.rpartition("=")
            change.less_ns = change.less_ns + _scaled(schedule, compiled(pattern, "--scale"), float(factor))
        elif key == "without":
            without = compiled(argument, "--without")
            change.less_ns = change.less_ns + _scaled(schedule, without, 0.0)
            for thread in threads:
                for table in ("ranges", "ops"):
                    events = schedule.facts.named(table, thread, without)
                    change.take(thread, events.start, events.end)

    @property
    @kept
    def _cpu_work(self) -> pd.DataFrame:
        """Gaps with named CPU work as their cause."""
        idle = gaps.in_window(self.trace)
        return idle[(idle["cause"] == "cpu-work").to_numpy() & (idle["name"] != "").to_numpy()]

    @property
    @kept
    def work(self) -> dict[str, int]:
        """Named CPU work that gaps have as their cause, by :func:`plain` name: idle time in ns, the largest first."""
        idle = self._cpu_work
        lost_ns = (idle["end_ns"] - idle["start_ns"]).groupby(idle["name"].astype(str).map(plain)).sum()
        return {str(name): int(ns) for name, ns in lost_ns.sort_values(ascending=False).items()}


def _evened(schedule: Schedule) -> Int:
    """How much less time operations take if each device has the same share of the work."""
    program = schedule.program
    works = (program.table == GPU_TABLES.index("kernels")) & ~program.collective
    work = pd.Series(np.where(works, program.lasting, 0)).groupby(program.device)
    less = program.lasting * (1 - work.sum().mean() / work.transform("sum").clip(lower=1))
    return np.where(works, less, 0).astype(np.int64)


def _take_work(schedule: Schedule, change: Change, wanted: set[str], sampled: bool) -> None:
    """Take away the painted work of the launching threads inside events of some names, and inside all samples.

    A sample names the innermost function, one of many that a piece of work calls.
    """
    parts = []
    for table in ("ranges", "ops", "calls", "os_calls", "samples"):
        events = schedule.program.trace.whole.table(table, ["start_ns", "end_ns", "thread", "name"])
        is_wanted = events["name"].map(plain).isin(wanted)
        if sampled and table == "samples":
            is_wanted[:] = True
        parts.append(events[is_wanted])
    named = pd.concat(parts)
    for thread in schedule.program.threads.tolist():
        own = named[named["thread"] == thread]
        work = schedule.facts.when(thread, ["work", "enclosed"])
        change.take(thread, *intervals.common(work, (own["start_ns"], own["end_ns"])))


def _scaled(schedule: Schedule, pattern: Expression, factor: float) -> Int:
    """How much less time operations take if those of some names take another time."""
    whole = schedule.program.trace.whole
    parts = schedule.program.parts
    less = np.zeros(len(schedule.program.lasting))
    for number, name in enumerate(("kernels", "memops")):
        events = parts[parts["table"] == number]
        events = events[matching(pd.Series(gaps.names_of(whole, name, events["row"].to_numpy())), pattern)]
        taken = whole.table(name, ["duration_ns"])["duration_ns"].to_numpy()[events["row"]]
        np.add.at(less, events["operation"], taken * (1 - factor))
    return less.astype(np.int64)


def _overlap_copies(schedule: Schedule, change: Change) -> None:
    """Move copies aside, and take their staging away: as from pinned memory."""
    program = schedule.program
    calls = schedule.program.calls
    kinds = program.trace.whole.table("memops", ["kind"])["kind"]
    moving = np.flatnonzero(~kinds.isin(["memset", "DtoD"]))  # which the device does by itself
    copies = (program.table == GPU_TABLES.index("memops")) & np.isin(program.row, moving)
    for thread in program.threads.tolist():
        call = program.launch[program.staged & copies & (program.by == thread)]
        begun = np.minimum(calls.start[call] + schedule.streams.call_ns, calls.end[call])
        change.take(thread, begun, calls.end[call])
    # A copy that mostly queued behind work that the trace does not contain stays where that work is.
    change.aside = change.aside | (copies & (schedule.streams.held_ns <= program.lasting))


def asked(changes: Sequence[str] = (), without: str | None = None, scale: str | None = None) -> list[str]:
    """Check what is asked for, and give all of it in one form.

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
        known, _, what = change.partition(":")
        if known not in CHANGES or (what and known != "no-cpu-work"):
            raise UsageError(f"{change!r} is not a change; there are {', '.join(CHANGES)}")
    names = list(dict.fromkeys(changes))
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


def rows(replay: WhatIf, wanted: Sequence[str] = ()) -> list[Json]:
    """Predict what changes would gain that :func:`asked` has checked.

    Parameters
    ----------
    replay : WhatIf
    wanted : sequence of str

    Returns
    -------
    list of dict
        ``change, wall_ns, predicted_ns, speedup, replay_error``, the largest gain first, and all of several together
        last. Where nothing can be predicted, a row for each requested change, with None for unknown values.
    """
    if replay.refused is not None:
        unknown = dict.fromkeys(("predicted_ns", "speedup"))
        return [{"change": c, "wall_ns": replay.wall_ns, **unknown, "replay_error": replay.error} for c in wanted]
    table = [replay.row(change) for change in wanted or STANDARD]
    table.sort(key=operator.itemgetter("speedup"), reverse=True)
    if not wanted:
        return [row for row in table if row["speedup"] >= 1 + _WORTH]
    if len(wanted) > 1:
        table.append(replay.row(*wanted))
    return table
