"""What a change would gain: the recorded run, played again with it.

Each change takes away exactly what one cause names. What that gains is not the time it took: something else may hold
the run up next. So the whole schedule is played again (:mod:`nsightkit.analysis.replay`), and the answer carries the
error of the unchanged replay. Above 5 % nothing is predicted.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.core.names import Expression, compiled, matching
from nsightkit.analysis.replay import Change, Played, Schedule
from nsightkit.analysis.timeline import gaps
from nsightkit.analysis.timeline.gaps import in_window
from nsightkit.analysis.timeline.gaps.facts import TABLE_OF
from nsightkit.errors import UsageError
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["CHANGES", "COLUMNS", "MOST_ERROR", "STANDARD", "UNKNOWN", "WhatIf", "asked", "plain", "rows", "summary"]

Int = npt.NDArray[np.integer[Any]]
Union = tuple[Int, Int]

#: Changes that a program's author can make with an ordinary amount of work, and that any trace can be asked about.
STANDARD = ("no-input-wait", "no-sync", "free-launches", "overlap-copies", "overlap-communication")
#: Every change with a name, and what it does.
CHANGES = {
    "no-input-wait": "the launching threads never wait for data",
    "no-sync": "no call waits for the GPU",
    "free-launches": "launches with only dispatch between them follow each other by 3 µs",
    "overlap-copies": "copies run beside the kernels, and only the step's end waits for them",
    "overlap-communication": "collectives run beside the other kernels, and only the step's end waits for them",
    "no-cpu-work": "work on the CPU that keeps the GPU waiting takes no time; no-cpu-work:NAME: only that of this name",
    "no-start-up": "what happens once (loading, compiling, capturing) takes no time",
    "no-profiler": "the profiler takes no time for itself",
    "equal-ranks": "all devices have the same amount of work, so that none waits for another in a collective",
}
#: What each row of the answer holds.
COLUMNS = ("change", "wall_ns", "predicted_ns", "speedup", "replay_error")
#: Why a single change is not predicted.
UNKNOWN = "kernels would run at the same time as they never did in this trace, and how fast they run then is not known"
#: Above this deviation of the unchanged replay nothing is predicted.
MOST_ERROR = 0.05
#: Dispatch between two launches when launches cost next to nothing.
_LAUNCH_NS = 3_000
#: Kernel time, as a share of the whole, that newly runs beside other kernels: above it nothing is predicted.
_CROWDED = 0.1
#: A number in a name; digits between letters again and again are a hash, in which they count.
_NUMBER = re.compile(r"(?P<hash>(?<![A-Za-z0-9])(?=[A-Za-z0-9]{8})[A-Za-z]*(?:\d+[A-Za-z]+){2,}\d+[A-Za-z0-9]*)|\d+")
#: Changes below this gain are not worth a row of their own.
_WORTH = 0.002
#: Times stay within 64 bits up to it; and the most digits of a factor.
_LARGEST_FACTOR, _LONGEST_FACTOR = 1000, 20


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
    return _NUMBER.sub(lambda found: found.group() if found.lastgroup else "*", name)


class WhatIf:
    """Changes to one trace, each played when it is asked for.

    Parameters
    ----------
    trace : Trace

    Attributes
    ----------
    schedule : Schedule
    wall_ns : int
        The window as it was recorded: the steps, or without steps from the first operation to the last.
    refused : str or None
        Why nothing is predicted.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.schedule = Schedule(trace)
        self.refused = self.schedule.unplayable
        self.wall_ns = None if self.refused else self.schedule.recorded.wall_ns
        self.error = None if self.refused else self.schedule.error
        if self.error is not None and self.error > MOST_ERROR:
            self.refused = (
                f"played again without a change, the trace comes out {100 * self.error:.1f} % off: "
                "something that it does not record decides its times"
            )
        self.memo: dict[Any, Any] = {}

    @kept
    def played(self, *changes: str) -> Played:
        """Play the run with changes, all of them together.

        Parameters
        ----------
        *changes : str
            As :func:`summary` takes them.

        Returns
        -------
        Played
        """
        together, schedule = self._together([self._change(change) for change in changes]), self.schedule
        return schedule.unchanged if schedule.is_untouched(together) else schedule.play(together)

    def row(self, *changes: str) -> dict[str, Any]:
        """One row of the answer.

        Parameters
        ----------
        *changes : str

        Returns
        -------
        dict
            ``change, wall_ns, predicted_ns, speedup, replay_error``. What is predicted is None where kernels would run
            at the same time for long, and nothing in the trace says how fast they run then.
        """
        after = self.played(*changes)
        # What the constants of the replay get wrong, they get wrong in both.
        share = max(after.wall_ns, 1) / max(self.schedule.unchanged.wall_ns, 1)
        known = _is_known(after)
        return {
            "change": " + ".join(changes),
            "wall_ns": self.wall_ns,
            "predicted_ns": round((self.wall_ns or 0) * share) if known else None,
            "speedup": 1 / share if known else None,
            "replay_error": self.error,
        }

    def saved(self, change: str) -> float:
        """The share of the wall time that a change saves; where that is not known, what it saves at least.

        Parameters
        ----------
        change : str

        Returns
        -------
        float
        """
        after = self.played(change)
        lost_ns = 0 if _is_known(after) else after.crowded_ns
        return 1 - (after.wall_ns + lost_ns) / max(self.schedule.unchanged.wall_ns, 1)

    def _together(self, changes: Sequence[Change]) -> Change:
        lasting, nothing = self.schedule.end - self.schedule.start, ((), ())
        other = [change.durations_ns - lasting for change in changes if change.durations_ns is not None]
        aside = [change.aside for change in changes if change.aside is not None]
        return Change(
            away=self._each(lambda thread: intervals.union(*(change.away.get(thread, nothing) for change in changes))),
            waits=all(change.waits for change in changes),
            arrivals=all(change.arrivals for change in changes),
            durations_ns=np.maximum(lasting + sum(other), 0) if other else None,
            aside=np.logical_or.reduce(aside) if aside else None,
        )

    # -- what each change takes away

    def _each(self, of: Callable[[int], Union]) -> dict[int, Union]:
        return {thread: of(thread) for thread in self.schedule.threads.tolist()}

    def _change(self, name: str) -> Change:
        known, _, what = name.partition(":")
        expression, _, factor = what.rpartition("=")
        schedule, facts = self.schedule, self.schedule.facts
        made: dict[str, Callable[[], Change]] = {
            "no-input-wait": lambda: Change(away=self._each(facts.input_waits), arrivals=False),
            "no-sync": lambda: Change(waits=False),
            "free-launches": self._freed_launches,
            "overlap-copies": self._overlapped_copies,
            "overlap-communication": lambda: Change(aside=schedule.collective),
            "no-cpu-work": lambda: Change(away=self._work_of({plain(what)} if what else set(self.work))),
            "no-start-up": lambda: Change(away=self._each(facts.one_offs)),
            "no-profiler": lambda: Change(away=self._each(facts.profiler_time)),
            "equal-ranks": lambda: Change(durations_ns=self._even()),
            "without": lambda: self._without(compiled(what, "--without")),
            "scale": lambda: Change(durations_ns=self._scaled(compiled(expression, "--scale"), float(factor))),
        }
        return made[known]()

    def _freed_launches(self) -> Change:
        found = gaps.causes(self.trace)
        late = found.loc[found["cause"] == "launch-overhead", "row"].to_numpy()
        return Change(away=self.schedule.dispatch(self.schedule.facts.dispatch_free, _LAUNCH_NS, late))

    def _even(self) -> Int:
        """Durations if each device had the same share of the work."""
        schedule = self.schedule
        works = (schedule.table == GPU_TABLES.index("kernels")) & ~self.schedule.collective
        lasting = schedule.end - schedule.start
        device = pd.factorize(schedule.device, sort=True)[0]
        each = np.bincount(device, np.where(works, lasting, 0))
        factor = each.mean() / np.maximum(each, 1)
        return np.asarray(np.where(works, lasting * factor[device], lasting), np.int64)

    @functools.cached_property
    def work(self) -> dict[str, int]:
        """Named CPU work that gaps have as their cause, by :func:`plain` name: idle time in ns, the largest first."""
        found = in_window(self.trace)
        mine = found[(found["cause"] == "cpu-work").to_numpy() & (found["name"] != "").to_numpy()]
        idle = (mine["end_ns"] - mine["start_ns"]).groupby(mine["name"].astype(str).map(plain)).sum()
        return {str(name): int(ns) for name, ns in idle.sort_values(ascending=False).items()}

    def _work_of(self, wanted: set[str]) -> dict[int, Union]:
        """Work of the launching threads that has one of some names, and gaps that have one of them as their cause."""
        named = self.schedule.when(lambda name: plain(name) in wanted, "ranges", "ops")
        called = self.schedule.when(lambda name: plain(name) in wanted, "calls")
        found = in_window(self.trace)
        found = found[(found["cause"] == "cpu-work") & found["kind"].isin(["range", "op", "sample"])]
        found = found[found["name"].astype(str).map(plain).isin(wanted)]
        thread = np.empty(len(found), np.int64)
        for kind in found["kind"].unique():
            mine = (found["kind"] == kind).to_numpy()
            threads = self.trace.whole.table(TABLE_OF[kind], ["thread"])["thread"].to_numpy()
            thread[mine] = threads[found["row"].to_numpy(np.int64)[mine]]
        sampled = (found["kind"] == "sample").to_numpy()
        start, end = found["start_ns"].to_numpy(np.int64), found["end_ns"].to_numpy(np.int64)

        def each(one: int) -> Union:
            facts = self.schedule.facts
            own, calls = facts.own_work(one), facts.calls(one)
            # In a range around more than that work, such as a step, the thread was at work without a name of its own.
            covered = intervals.Coverage(*own).of(start, end)
            mine = (thread == one) & (2 * covered < end - start) & ~sampled
            unnamed = start[mine], end[mine]
            if (mine := (thread == one) & sampled).any():
                samples = facts.samples(one)
                seen = intervals.common((start[mine], end[mine]), (samples.start, samples.end))
                unnamed = intervals.union(unnamed, seen)
            unnamed = intervals.common(unnamed, (calls.start, calls.end), outside=True)
            every = intervals.union(intervals.common(named[one], own), called[one], unnamed)
            other = intervals.union(facts.one_offs(one), facts.profiler_time(one))  # which other causes have
            return intervals.common(every, other, outside=True)

        return self._each(each)

    def _without(self, pattern: Expression) -> Change:
        """GPU operations that take no time, and ranges and operators of the launching threads that do not either."""
        away = self.schedule.when(pattern.search, "ranges", "ops")
        return Change(away=away, durations_ns=self._scaled(pattern, 0.0))

    def _scaled(self, pattern: Expression, factor: float) -> Int:
        """Durations where operations of some names take another time."""
        schedule = self.schedule
        table, row, operation = (schedule.parts[column].to_numpy() for column in schedule.parts)
        less = np.zeros(len(row))
        for number, name in enumerate(("kernels", "memops")):
            mine = np.flatnonzero(table == number)
            taken = self.trace.whole.table(name, ["duration_ns"])["duration_ns"].to_numpy()[row[mine]]
            meant = matching(pd.Series(gaps.names_of(self.trace.whole, name, row[mine])), pattern)
            less[mine] = np.where(meant, taken * (1 - factor), 0)
        lasting = schedule.end - schedule.start
        return np.asarray(np.maximum(lasting - np.bincount(operation, less, len(lasting)).astype(np.int64), 0))

    def _overlapped_copies(self) -> Change:
        schedule = self.schedule
        copies: npt.NDArray[np.bool_] = schedule.table == GPU_TABLES.index("memops")
        kinds = self.trace.whole.table("memops", ["kind"])["kind"].iloc[schedule.row[copies]]
        copies[copies] = ~kinds.isin(["memset", "DtoD"])  # which the device does by itself
        # From pinned memory nothing has to be staged.
        call = schedule.launch[schedule.staged & copies]
        done, thread = schedule.call_end[call], schedule.call_thread[call]
        begun = np.minimum(schedule.call_start[call] + schedule.call_ns, done)
        away = self._each(lambda one: intervals.merge(begun[thread == one], done[thread == one]))
        # What mostly queued behind work that the trace does not contain stays where that work is.
        return Change(aside=copies & (schedule.held_ns <= schedule.end - schedule.start), away=away)


def _is_known(after: Played) -> bool:
    """Whether little of a replay runs beside other kernels in a way that the trace says nothing about."""
    return after.crowded_ns <= _CROWDED * after.wall_ns


def asked(changes: Sequence[str] = (), without: str | None = None, scale: str | None = None) -> list[str]:
    """Check what is asked for, and give all of it in one form.

    Parameters
    ----------
    changes : sequence of str
        Keys of :data:`CHANGES`, or ``no-cpu-work:NAME``.
    without : str, optional
        Regular expression: GPU operations, ranges and operators of these names take no time.
    scale : str, optional
        ``REGEX=F``: GPU operations of these names take F times as long.

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
    found = list(dict.fromkeys(changes))
    if without is not None:
        compiled(without, "--without")
        found.append(f"without:{without}")
    if scale is not None:
        pattern, sign, factor = scale.rpartition("=")
        compiled(pattern, "--scale")
        if not sign or len(factor) > _LONGEST_FACTOR or not re.fullmatch(r"\d*\.?\d+", factor):
            raise UsageError(f"--scale: {scale!r} is not of the form REGEX=F, with a factor such as 0.5")
        if float(factor) > _LARGEST_FACTOR:
            raise UsageError(f"--scale: the factor is above {_LARGEST_FACTOR:,}; give one such as 0.5")
        found.append(f"scale:{scale}")
    return found


def summary(
    trace: Trace, changes: Sequence[str] = (), without: str | None = None, scale: str | None = None
) -> list[dict[str, Any]]:
    """Predict what changes would gain.

    Parameters
    ----------
    trace : Trace
        Whole or a selection, of which only its own part changes.
    changes, without, scale
        As :func:`asked` takes them. Without any, those of :data:`STANDARD` that gain anything. Several: each
        alone, then all together.

    Returns
    -------
    list of dict
        As :func:`rows` gives them.

    Raises
    ------
    UsageError
        An unknown change, or a malformed expression or factor.
    """
    wanted = asked(changes, without, scale)
    return rows(WhatIf(trace), wanted)


def rows(played: WhatIf, wanted: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Predict what changes would gain that :func:`asked` has checked.

    Parameters
    ----------
    played : WhatIf
    wanted : sequence of str

    Returns
    -------
    list of dict
        ``change, wall_ns, predicted_ns, speedup, replay_error``, the largest gain first, and all of several together
        last. Where nothing can be predicted, a row for each change that was asked for, with None for what is not known.
    """
    if played.refused is not None:
        unknown = dict.fromkeys(("predicted_ns", "speedup"))
        return [{"change": c, "wall_ns": played.wall_ns, **unknown, "replay_error": played.error} for c in wanted]
    found = [played.row(change) for change in wanted or STANDARD]
    found.sort(key=lambda row: -(row["speedup"] or 0))
    if not wanted:
        return [row for row in found if row["speedup"] is None or row["speedup"] >= 1 + _WORTH]
    return found + ([played.row(*wanted)] if len(wanted) > 1 else [])
