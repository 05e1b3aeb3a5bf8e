"""One capture cut into its steps: every sum as a whole, and as its part in each step.

What is launched in a step is that step's work, whenever the GPU got to it. Idle time is a step's where it lies between
the end of the step before and its own (:func:`nsightkit.analysis.timeline.steps.windows`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.compare import match as pairing
from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import CATEGORIES, categorize
from nsightkit.analysis.timeline import gaps, memops, operators, overview, ranges, steps
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["GRAPHS", "NO_OPERATOR", "Capture", "Sum"]

Int = npt.NDArray[np.integer[Any]]
Float = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

#: Row of graph replays, whose kernels were not recorded, among the categories of kernels.
GRAPHS = "CUDA graphs"
#: Row of kernels that no operator launched.
NO_OPERATOR = "(no operator)"
#: More names of ranges than this are the same names with numbers in them.
_MOST_NAMES = 1000
#: Launches of one name may be of several sizes, in turn: so many stretches of them have a bit of each.
_STRETCHES = 30
_KINDS = ["kind", "src_kind", "dst_kind"]


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """The durations of the events that have one label.

    Parameters
    ----------
    count : int or None
        How many events; None where a count means nothing.
    total_ns : int
        Of all of them, in steps or not.
    steps : ndarray of float
        The sum in each step; empty where steps are not known.
    """

    count: int | None
    total_ns: int
    steps: Float


#: By label.
Sums = dict[Hashable, Sum]


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
        """Sum events by their `code`, a position in `labels`; the `time` of each says which step it is of."""
        step, shape = steps.number(self.windows, time), (len(self.windows), len(labels))
        inside = (step * shape[1] + code)[step >= 0]
        # Exact up to 2**53: 104 days of nanoseconds.
        each = np.bincount(inside, duration[step >= 0], shape[0] * shape[1]).reshape(shape).astype(np.float64)
        totals = np.zeros(len(labels), np.int64)
        np.add.at(totals, code, duration)  # exact in 64 bits, unlike a weighted bincount
        counts = np.bincount(code, minlength=len(labels))
        return dict(zip(labels, map(Sum, counts.tolist(), totals.tolist(), each.T), strict=True))

    def _by_name(self, names: Any, duration: Int, time: Int, absent: str = "") -> Sums:
        """Sum events by a categorical."""
        used, code = np.unique(names.codes, return_inverse=True)
        return self._sums([absent if u < 0 else str(names.categories[u]) for u in used.tolist()], code, duration, time)

    def _by_columns(self, events: pd.DataFrame, columns: list[str], duration: Int, time: Int) -> Sums:
        """Sum events by several categoricals: a label is a tuple of texts."""
        by = events.groupby(columns, observed=True, dropna=False)
        labels = [tuple("" if pd.isna(part) else str(part) for part in label) for label in by.size().index]
        return self._sums(labels, by.ngroup().to_numpy(), duration, time)

    def _work(self, table: str) -> tuple[Int, Int]:
        """How long each operation of a GPU table took, and when it was launched."""
        duration = self.trace.table(table, ["duration_ns"])["duration_ns"].to_numpy()
        return duration, intervals.launched(self.trace, table)

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
            main = int((outer["end_ns"] - outer["start_ns"]).groupby(outer["thread"]).sum().sort_values().index[-1])
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
        by: list[dict[Any, str]] = []
        for rows, table in ((self._operator, "ops"), (self._range, "ranges")):
            launcher = self.trace.whole.table(table, ["name"])["name"].array.take(rows, allow_fill=True)
            most = events.assign(by=launcher).groupby(["name", "by"], observed=True)["duration_ns"].sum().reset_index()
            most = most.sort_values("duration_ns", kind="stable").drop_duplicates("name", keep="last")
            by.append(most.set_index(most["name"].astype(str))["by"].astype(str).map(pairing.plain_range).to_dict())
        kinds = categorize(pd.Series(list(names), dtype="str"))
        return [
            pairing.Kernel(name, str(kind), by[0].get(name), by[1].get(name))
            for name, kind in zip(names, kinds, strict=True)
        ]

    # -- tables

    def kernels(self) -> Sums:
        """Sum kernels by name."""
        return self._by_name(self.trace.table("kernels", ["name"])["name"].array, *self._work("kernels"))

    @functools.cached_property
    def _launches(self) -> dict[Hashable, Float]:
        by = self.trace.table("kernels", ["name", "duration_ns"]).groupby("name", observed=True)["duration_ns"]
        return {str(name): each.to_numpy(np.float64) for name, each in by}

    def launches(self, names: Sequence[Hashable]) -> Float:
        """Say of each stretch of the launches of some kernels what all of them would take if they were like it."""
        each: Float = np.concatenate([np.zeros(0), *(self._launches.get(name, ()) for name in names)])
        stretches = np.array_split(each, min(len(each), _STRETCHES) or 1)
        return len(each) * np.array([stretch.mean() for stretch in stretches if len(stretch)])

    def categories(self) -> Sums:
        """Sum kernels by category, and graph replays, whose kernels were not recorded."""
        of_kernels = categorize(self.trace.table("kernels", ["name"])["name"]).codes
        code = np.append(of_kernels, np.full(self.trace.size("graphs"), len(CATEGORIES)))
        both = zip(self._work("kernels"), self._work("graphs"), strict=True)
        return self._sums([*CATEGORIES, GRAPHS], code, *map(np.concatenate, both))

    def memops(self) -> Sums:
        """Sum copies and memsets by direction and the kinds of memory."""
        return self._by_columns(self.trace.table("memops", _KINDS), _KINDS, *self._work("memops"))

    @functools.cached_property
    def moved_bytes(self) -> dict[Hashable, int]:
        """Sum bytes by direction and the kinds of memory."""
        table = memops.summary(self.trace)
        return dict(zip(table[_KINDS].itertuples(index=False, name=None), table["bytes"].tolist(), strict=True))

    def operators(self, clock: str) -> Sums:
        """Sum the kernels that operators launched (clock "GPU"), or the operators' own times on the CPU ("CPU")."""
        if clock == "CPU":
            own = operators.own(self.trace)
            return self._by_name(own["name"].array, own["duration_ns"].to_numpy(), own["start_ns"].to_numpy())
        names = self.trace.whole.table("ops", ["name"])["name"].array
        return self._by_name(names.take(self._operator, allow_fill=True), *self._work("kernels"), NO_OPERATOR)

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

        named, labels = pd.factorize(pd.Index([label(str(name)) for name in names.categories], dtype=object))
        each = each.assign(name=pd.Categorical.from_codes(np.append(named, -1)[names.codes], labels))
        duration = each["total_ns" if clock == "CPU" else "gpu_ns"].to_numpy()
        return self._by_columns(each, ["domain", "name"], duration, each["start_ns"].to_numpy())

    def gaps(self) -> Sums:
        """Sum idle time by cause."""
        found: Sums = {}
        steps = self.timed["start_ns"], self.timed["end_ns"]
        for cause, mine in gaps.causes(self.trace).groupby("cause", observed=True):
            # Gaps of several devices overlap.
            each = (intervals.Coverage(own["start_ns"], own["end_ns"]).of(*steps) for _, own in mine.groupby("device"))
            inside = np.sum([np.zeros(len(self.windows)), *each], axis=0)
            found[str(cause)] = Sum(len(mine), int((mine["end_ns"] - mine["start_ns"]).sum()), inside)
        return found

    def spanned(self) -> Bool:
        """Find the ordinary steps between the first operation and the last: idle time elsewhere has no cause."""
        bounds = [time for device in self.overview["devices"] for time in (device["start_ns"], device["end_ns"])] or [0]
        inside = (self.timed["start_ns"] >= min(bounds)) & (self.timed["end_ns"] <= max(bounds))
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
        dict of str to Sum
        """
        each: dict[str, Any] = {
            name: Sum(None, self.overview[name], np.zeros(0)) for name in ("wall_ns", "busy_ns", "idle_ns")
        }
        if unit == "step" and len(self.windows):
            wall = self.timed["wall_ns"]
            # A selection without its steps' own ranges says nothing of how busy they were.
            known = ("busy_ns", "idle_ns") if self._own_windows and self.timed["busy_ns"].notna().all() else ()
            each = {name: Sum(None, self.overview[name], self.timed[name].to_numpy(np.float64)) for name in known}
            each = {"wall_ns": Sum(len(wall), int(wall.sum()), wall.to_numpy(np.float64))} | each
        return {name: of for name, of in each.items() if of.total_ns is not None} | self.work()

    def work(self) -> Sums:
        """Sum the GPU's work by kind, where that was recorded."""
        found: Sums = {}
        for name, table in zip(("kernel_ns", "memop_ns", "graph_ns"), GPU_TABLES, strict=True):
            if self.trace.recorded(table):
                found |= self._sums([name], np.zeros(self.trace.size(table), np.intp), *self._work(table))
        return found

    @functools.cached_property
    def outside(self) -> float:
        """Share of the GPU's work that was launched outside of steps; 0 in a capture without steps."""
        work = self.work().values() if len(self.windows) else ()
        whole = sum(kind.total_ns for kind in work)
        return (whole - sum(int(kind.steps.sum()) for kind in work)) / whole if whole else 0.0


def _windows(trace: Trace, match: str | None) -> tuple[pd.DataFrame, pd.DataFrame, bool]:
    """Where steps launch, how long they take, and whether they are the selection's own (else those that it touches)."""
    found, timed = steps.find(trace, match), steps.summary(trace, match)
    own = len(found) > 0 or trace is trace.whole
    if not own:
        # A filter such as --within leaves the steps' own ranges out: take the steps that something selected lies in.
        found, timed = steps.find(trace.whole, match), steps.summary(trace.whole, match)
        moments = [trace.table(table, ["start_ns"])["start_ns"] for table in ("ranges", "calls", "ops")]
        touched = np.unique(steps.number(found, np.concatenate(moments)))
        found, timed = (table.iloc[touched[touched >= 0]].reset_index(drop=True) for table in (found, timed))
    return found, timed.assign(end_ns=timed["start_ns"] + timed["wall_ns"]), own
