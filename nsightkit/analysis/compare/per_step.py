"""One capture cut into its steps: every sum as a whole, and as its part in each step.

What is launched in a step is that step's work, whenever the GPU got to it. Idle time is a step's where it lies between
the end of the step before and its own (:func:`nsightkit.analysis.timeline.steps.windows`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.compare import match as pairing
from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import CATEGORIES, categorize
from nsightkit.analysis.timeline import gaps, memops, operators, overview, ranges, steps
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["GRAPHS", "NO_OPERATOR", "Capture", "Sums"]

Int = npt.NDArray[np.integer[Any]]
Float = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

#: Row of graph replays, whose kernels were not recorded, among the categories of kernels.
GRAPHS = "CUDA graphs"
#: Row of kernels that no operator launched.
NO_OPERATOR = "(no operator)"
#: More names of ranges than this are the same names with numbers in them.
_MOST_NAMES = 1000
_KINDS = ["kind", "src_kind", "dst_kind"]


@dataclasses.dataclass
class Sums:
    """Durations of events by label: how many, exact sums, and the sum in each step.

    Parameters
    ----------
    labels, counts, totals : list
        A count that means nothing is None.
    of : callable
        Sums some labels, given by their positions, in each step: an array of floats, empty where steps are not known.
    judged : ndarray of bool, optional
        Which steps say how much the sums vary, where those are others than the capture's ordinary ones.
    """

    labels: list[Hashable]
    counts: list[int | None]
    totals: list[int]
    of: Callable[[Sequence[int]], Float]
    judged: Bool | None = None


def _summed(labels: Sequence[Hashable], code: Int, duration: Int, step: Int, steps: int) -> Sums:
    """Sum events by their `code`, a position in `labels`; `step` is -1 for those in no step."""
    n = len(labels)
    totals = np.zeros(n, np.int64)
    np.add.at(totals, code, duration)  # exact in 64 bits, unlike a weighted bincount
    inside = np.flatnonzero(step >= 0)
    order = inside[np.argsort(code[inside], kind="stable")]
    bounds, step, duration = np.searchsorted(code[order], np.arange(n + 1)), step[order], duration[order]

    def of(rows: Sequence[int]) -> Float:
        found = np.zeros(steps)
        for part in (slice(bounds[row], bounds[row + 1]) for row in rows):
            found += np.bincount(step[part], weights=duration[part], minlength=steps)
        return found

    return Sums(list(labels), np.bincount(code, minlength=n).tolist(), totals.tolist(), of)


def _given(rows: Sequence[tuple[str, int | None, int, Float]], steps: int, judged: Bool) -> Sums:
    """Sums whose value in each step was worked out elsewhere: label, count, total, samples."""

    def of(positions: Sequence[int]) -> Float:
        return np.asarray(np.sum([rows[position][3] for position in positions] or [np.zeros(steps)], axis=0))

    return Sums([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], of, judged)


class Capture:
    """A trace with its steps.

    Parameters
    ----------
    trace : Trace
        Whole, or selected from.
    match : str, optional
        Regular expression of the steps' names.
    count : int, optional
        How many steps it holds, where no ranges say so.

    Attributes
    ----------
    overview : dict
        What :func:`nsightkit.analysis.timeline.overview.summary` says of the trace.
    windows : DataFrame
        Where work is launched in steps: as :func:`nsightkit.analysis.timeline.steps.find` has them; empty where there
        are none.
    timed : DataFrame
        How long steps take: as :func:`nsightkit.analysis.timeline.steps.summary` has them, with ``end_ns``.
    steps : int or None
        How many steps; None where the trace does not show it.
    ordinary : ndarray of bool
        Steps that do not stand out: a stall every now and then is not noise.
    """

    def __init__(self, trace: Trace, match: str | None = None, count: int | None = None) -> None:
        self.trace = trace
        self.overview = overview.summary(trace)
        self.windows, self.timed, self._own_windows = _windows(trace, match)
        self.steps = len(self.windows) or count
        self.ordinary: Bool = ~self.timed["outlier"].to_numpy(bool)

    def _sums(self, labels: Sequence[Hashable], code: Int, duration: Int, time: Int) -> Sums:
        return _summed(labels, code.astype(np.int64), duration, steps.number(self.windows, time), len(self.windows))

    def _sums_of(self, names: Any, duration: Int, time: Int, absent: str = "") -> Sums:
        """Sums by a categorical."""
        used, code = np.unique(names.codes, return_inverse=True)
        return self._sums([absent if u < 0 else str(names.categories[u]) for u in used.tolist()], code, duration, time)

    def _durations(self, table: str) -> Int:
        return self.trace.table(table, ["duration_ns"])["duration_ns"].to_numpy()

    # -- what launched what

    @functools.cached_property
    def _operator(self) -> Int:
        """Row of the operator that launched each kernel, -1 for none."""
        return self._around(self.trace.whole.table("ops", ["start_ns", "end_ns", "thread"]))

    @functools.cached_property
    def _range(self) -> Int:
        """Row of the innermost range, steps apart, that each kernel was launched in, -1 for none."""
        rows = self.trace.whole.table("ranges", ["start_ns", "end_ns", "thread", "name"])
        names = rows["name"].cat
        telling = [pairing.plain_range(str(name)) not in self.step_kinds for name in names.categories]
        return self._around(rows, np.array([*telling, False])[names.codes.to_numpy()])

    def _around(self, outer: pd.DataFrame, chosen: Bool | None = None) -> Int:
        kernels = self.trace.table("kernels", ["process", "correlation"])
        launch = intervals.launch_of(self.trace, kernels["process"], kernels["correlation"])
        used, which = np.unique(launch[launch >= 0], return_inverse=True)
        mine = self.trace.whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[used]
        if chosen is not None and len(outer):
            # Autograd's threads have no ranges: what they launch belongs to what is open on the thread they work for.
            length = outer["end_ns"] - outer["start_ns"]
            main = int(length.groupby(outer["thread"]).sum().sort_values().index[-1])
            thread = mine["thread"].to_numpy(np.int64)
            own = np.isin(thread, np.unique(outer["thread"].to_numpy(np.int64)))
            mine = mine.assign(thread=np.where(own | (thread >> 24 != main >> 24), thread, main))
        found = np.full(len(launch), -1, np.int64)
        found[launch >= 0] = intervals.enclosing(mine, outer, chosen)[which]
        return found

    def launchers(self, names: Sequence[str]) -> list[pairing.Kernel]:
        """Say of each kernel what it is and what launched most of its time.

        Parameters
        ----------
        names : sequence of str

        Returns
        -------
        list of nsightkit.analysis.compare.match.Kernel
        """
        events = self.trace.table("kernels", ["name", "duration_ns"])
        by: list[dict[str, str]] = []
        for rows, table in ((self._operator, "ops"), (self._range, "ranges")):
            launcher = self.trace.whole.table(table, ["name"])["name"].array.take(rows, allow_fill=True)
            frame = pd.DataFrame({"name": events["name"].array, "by": launcher, "ns": events["duration_ns"].to_numpy()})
            most = frame.groupby(["name", "by"], observed=True)["ns"].sum().reset_index()
            most = most.sort_values("ns", kind="stable").drop_duplicates("name", keep="last")
            by.append(
                {str(name): pairing.plain_range(str(one)) for name, one in zip(most["name"], most["by"], strict=True)}
            )
        kinds = categorize(pd.Series(list(names), dtype="str"))
        return [
            pairing.Kernel(name, str(kind), by[0].get(name), by[1].get(name))
            for name, kind in zip(names, kinds, strict=True)
        ]

    # -- tables

    def kernels(self) -> Sums:
        """Sum kernels by name."""
        names = self.trace.table("kernels", ["name"])["name"].array
        return self._sums_of(names, self._durations("kernels"), intervals.launched(self.trace, "kernels"))

    def categories(self) -> Sums:
        """Sum kernels by category, and graph replays, whose kernels were not recorded."""
        code = categorize(self.trace.table("kernels", ["name"])["name"]).codes
        both = ("kernels", "graphs")
        return self._sums(
            [*CATEGORIES, GRAPHS],
            np.append(code, np.full(self.trace.size("graphs"), len(CATEGORIES))),
            np.concatenate([self._durations(table) for table in both]),
            np.concatenate([intervals.launched(self.trace, table) for table in both]),
        )

    def memops(self) -> Sums:
        """Sum copies and memsets by direction and the kinds of memory."""
        by = self.trace.table("memops", _KINDS).groupby(_KINDS, observed=True, dropna=False)
        labels = [tuple("" if pd.isna(kind) else str(kind) for kind in kinds) for kinds in by.size().index]
        code, launched = by.ngroup().to_numpy(), intervals.launched(self.trace, "memops")
        return self._sums(labels, code, self._durations("memops"), launched)

    def moved_bytes(self) -> dict[Hashable, int]:
        """Sum bytes by direction and the kinds of memory."""
        table = memops.summary(self.trace)
        return dict(zip(table[_KINDS].itertuples(index=False, name=None), table["bytes"].tolist(), strict=True))

    def operators(self, clock: str) -> Sums:
        """Sum the kernels that operators launched (clock "GPU"), or the operators' own times on the CPU ("CPU")."""
        if clock == "CPU":
            own = operators.own(self.trace)
            return self._sums_of(own["name"].array, own["duration_ns"].to_numpy(), own["start_ns"].to_numpy())
        names = self.trace.whole.table("ops", ["name"])["name"].array
        taken = names.take(self._operator, allow_fill=True)
        launched = intervals.launched(self.trace, "kernels")
        return self._sums_of(taken, self._durations("kernels"), launched, NO_OPERATOR)

    @functools.cached_property
    def step_kinds(self) -> set[str]:
        """Names of steps without their numbers."""
        return {pairing.plain_range(str(name)) for name in self.windows["step"]}

    @functools.cached_property
    def _instances(self) -> pd.DataFrame:
        return ranges.instances(self.trace)

    def ranges(self, clock: str) -> Sums:
        """Sum ranges by domain and name, on the "CPU" or the "GPU"; steps without their numbers."""
        each = self._instances
        names = each["name"].cat
        many = len(names.categories) > _MOST_NAMES

        def label(name: str) -> str:
            plain = pairing.plain_range(name)
            return plain if many or plain in self.step_kinds else name

        named, labels = pd.factorize(np.array([*map(label, map(str, names.categories)), ""], dtype=object))
        domains = each["domain"].cat
        packed = (domains.codes.to_numpy(np.int64) + 1) * len(labels) + named[names.codes.to_numpy()]
        used, code = np.unique(packed, return_inverse=True)
        spoken = ["", *map(str, domains.categories)]
        pairs = [(spoken[u // len(labels)], str(labels[u % len(labels)])) for u in used.tolist()]
        duration = each["total_ns" if clock == "CPU" else "gpu_ns"].to_numpy()
        return self._sums(pairs, code, duration, each["start_ns"].to_numpy())

    def gaps(self) -> Sums:
        """Sum idle time by cause."""
        found = gaps.causes(self.trace)
        start, end = self.timed["start_ns"], self.timed["end_ns"]
        rows = []
        for cause, mine in found.groupby("cause", observed=True):
            # Of one device after the other: gaps of several overlap.
            covered = [intervals.Coverage(own["start_ns"], own["end_ns"]) for _, own in mine.groupby("device")]
            inside: Float = np.asarray(sum(one.of(start, end) for one in covered), np.float64)
            rows.append((str(cause), len(mine), int((mine["end_ns"] - mine["start_ns"]).sum()), inside))
        return _given(rows, len(self.windows), self._spanned())

    def _spanned(self) -> Bool:
        """Ordinary steps between the first operation and the last: idle time elsewhere has no cause."""
        devices = self.overview["devices"]
        first, last = min((d["start_ns"] for d in devices), default=0), max((d["end_ns"] for d in devices), default=0)
        inside = (self.timed["start_ns"] >= first) & (self.timed["end_ns"] <= last)
        spanned: Bool = self.ordinary & inside.to_numpy(bool)
        return spanned if spanned.any() else self.ordinary

    def figures(self, unit: str) -> Sums:
        """Say how long it took, how busy the GPU was, and the sums by kind of work.

        Parameters
        ----------
        unit : {"step", "trace"}
            Whether ``wall_ns`` is the steps' time, or the time from the first operation to the last.

        Returns
        -------
        Sums
        """
        rows: list[tuple[str, int | None, int, Float]] = []
        wall, busy = self.timed["wall_ns"], ("busy_ns", "idle_ns")
        if unit == "step" and len(self.windows):
            rows.append(("wall_ns", len(wall), int(wall.sum()), wall.to_numpy(np.float64)))
            # A selection without its steps' own ranges says nothing of how busy they were.
            known = self._own_windows and bool(self.timed["busy_ns"].notna().all())
            rows += [(c, None, self.overview[c], self.timed[c].to_numpy(np.float64)) for c in busy if known]
        else:
            whole = {name: self.overview[name] for name in ("wall_ns", *busy)}
            rows += [(name, None, ns, np.zeros(0)) for name, ns in whole.items() if ns is not None]
        for name, table in zip(("kernel_ns", "memop_ns", "graph_ns"), GPU_TABLES, strict=True):
            if self.trace.recorded(table):
                duration, launched = self._durations(table), intervals.launched(self.trace, table)
                every = self._sums([name], np.zeros_like(duration), duration, launched)
                rows.append((name, len(duration), int(duration.sum()), every.of([0])))
        return _given(rows, len(self.windows), self.ordinary)

    def outside_ns(self) -> int:
        """Sum the GPU's work that was launched in no step; 0 where there are no steps."""
        lost = 0
        for table in GPU_TABLES if len(self.windows) else ():
            step = steps.number(self.windows, intervals.launched(self.trace, table))
            lost += int(self._durations(table)[step < 0].sum())
        return lost


def _windows(trace: Trace, match: str | None) -> tuple[pd.DataFrame, pd.DataFrame, bool]:
    """Where steps launch, how long they take, and whether they are the selection's own (else those that it touches)."""
    found = steps.find(trace, match)
    own = len(found) > 0 or trace is trace.whole
    source = trace if own else trace.whole
    if not own:
        found = steps.find(source, match)
    timed = steps.summary(source, match)
    timed = timed.assign(end_ns=timed["start_ns"] + timed["wall_ns"])
    if own or not len(found):
        return found, timed, own
    # A filter such as --within leaves the steps' own ranges out: take the steps that something selected lies in.
    begin, until = found["start_ns"].to_numpy(), found["end_ns"].to_numpy()
    touched = np.zeros(len(found), bool)
    for table in ("ranges", "calls", "ops"):
        start = trace.table(table, ["start_ns"])["start_ns"].to_numpy()
        at = np.searchsorted(begin, start, side="right") - 1
        touched[np.unique(at[(at >= 0) & (start < until[np.maximum(at, 0)])])] = True
    return found[touched].reset_index(drop=True), timed[touched].reset_index(drop=True), False
