"""Per-step figures of a capture: every sum over the whole capture, and its part in each step.

What is launched in a step is that step's work, whenever the GPU got to it. Idle time is a step's where it lies between
the end of the step before and its own (:func:`nsightkit.analysis.timeline.steps.windows`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.compare.match import plain_range
from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import CATEGORIES, categorize
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.timeline import gaps, operators, overview, ranges, steps
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["COPY_COLUMNS", "GRAPHS", "NO_OPERATOR", "Figure", "Figures", "Samples", "samples"]

Int = npt.NDArray[np.integer[Any]]
Float = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

#: Row of graph replays, whose kernels were not recorded, among the categories of kernels.
GRAPHS = "CUDA graphs"
#: Row of kernels that no operator launched.
NO_OPERATOR = "(no operator)"
#: What tells copies apart.
COPY_COLUMNS = ["kind", "src_kind", "dst_kind"]
#: More names of ranges than this are the same names with numbers in them.
_MOST_NAMES = 1000
#: Launches of one name may be of several sizes, in turn: so many stretches of them have a bit of each.
_STRETCHES = 30


@dataclasses.dataclass(frozen=True, eq=False)
class Figure:
    """A sum of what has one label.

    Parameters
    ----------
    count : int or None
        How many events; None where a count means nothing.
    total : int
        Of all of them, in steps or not: ns, or bytes.
    steps : ndarray of float
        The sum in each step; empty where there are no steps.
    """

    count: int | None
    total: int
    steps: Float


#: By label.
Figures = dict[Hashable, Figure]


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """A capture with its steps; each method is a table of per-step figures.

    Parameters
    ----------
    trace : Trace
    overview : dict
        What :func:`nsightkit.analysis.timeline.overview.summary` says of the trace.
    windows : DataFrame
        The steps, as :func:`nsightkit.analysis.timeline.steps.windows` has them; empty where there are none.
    times : DataFrame
        ``wall_ns, busy_ns, idle_ns`` of each step; the last two NA where they are not known.
    count : int or None
        How many steps; None where the trace does not show it.
    """

    trace: Trace
    overview: dict[str, Any]
    windows: pd.DataFrame
    times: pd.DataFrame
    count: int | None

    @property
    def ordinary(self) -> Bool:
        """Steps that do not stand out: a stall now and then is not noise."""
        return ~steps.outliers(self.times["wall_ns"].to_numpy())

    @property
    def spanned(self) -> Bool:
        """Ordinary steps between the first operation and the last: idle time elsewhere has no cause."""
        devices = self.overview["devices"]
        first = min((device["start_ns"] for device in devices), default=0)
        last = max((device["end_ns"] for device in devices), default=0)
        inside = (self.windows["begin_ns"] >= first) & (self.windows["end_ns"] <= last)
        spanned = self.ordinary & inside.to_numpy(bool)
        return spanned if spanned.any() else self.ordinary

    @property
    def step_kinds(self) -> set[str]:
        """Names of steps without their numbers."""
        return {plain_range(str(name)) for name in self.windows["step"]}

    def whole(self) -> Figures:
        """Time from the first operation to the last, and how much of it the GPU was busy and idle."""
        figures: Figures = {}
        for name in ("wall_ns", "busy_ns", "idle_ns"):
            if self.overview[name] is not None:
                figures[name] = Figure(None, self.overview[name], np.zeros(0))
        return figures

    def wall(self) -> Figures:
        """Time of each step, and how much of it the GPU was busy and idle; the totals of these are the capture's."""
        wall = self.times["wall_ns"]
        figures: Figures = {"wall_ns": Figure(len(wall), int(wall.sum()), wall.to_numpy(np.float64))}
        for name in ("busy_ns", "idle_ns"):
            times, total = self.times[name], self.overview[name]
            if total is not None and times.notna().all():
                figures[name] = Figure(None, total, times.to_numpy(np.float64))
        return figures

    def work(self) -> Figures:
        """The GPU's work by kind, where that was recorded."""
        figures: Figures = {}
        for name, table in zip(("kernel_ns", "memop_ns", "graph_ns"), GPU_TABLES, strict=True):
            if self.trace.recorded(table):
                figures |= self._launched(table, [name], np.zeros(self.trace.size(table), np.intp))
        return figures

    def kernels(self) -> Figures:
        """Kernels by name."""
        return self._by_name(self.trace.table("kernels", ["name"])["name"].array)

    def kernel_counts(self) -> Float:
        """How many kernels each step launched."""
        step = steps.launched_in(self.trace, "kernels", self.windows)
        return np.bincount(step[step >= 0], minlength=len(self.windows)).astype(np.float64)

    def categories(self) -> Figures:
        """Kernels by category, and graph replays, whose kernels were not recorded."""
        categories = categorize(self.trace.table("kernels", ["name"])["name"])
        replays = self._launched("graphs", [GRAPHS], np.zeros(self.trace.size("graphs"), np.intp))
        return self._launched("kernels", CATEGORIES, categories.codes) | replays

    def copies(self, column: str = "duration_ns") -> Figures:
        """Durations, or bytes, of copies and memsets, by direction and the kinds of memory."""
        events = self.trace.table("memops", [*COPY_COLUMNS, column])
        labels, code = _coded(events, COPY_COLUMNS)
        return self._launched("memops", labels, code, column)

    def operators(self, clock: str) -> Figures:
        """The kernels that operators launched (clock "GPU"), or the operators' own times on the CPU ("CPU")."""
        if clock == "GPU":
            return self._by_name(launching_operators(self.trace), absent=NO_OPERATOR)
        own = operators.own(self.trace)
        labels, code = _coded(own, ["name"])
        step = self._step_of(own["start_ns"])
        return _summed([label[0] for label in labels], code, own["duration_ns"].to_numpy(), step, len(self.windows))

    def ranges(self, clock: str) -> Figures:
        """Ranges by domain and name, on the "CPU" or the "GPU"; steps without their numbers."""
        instances = ranges.instances(self.trace)
        names = instances["name"].cat
        many = len(names.categories) > _MOST_NAMES
        shown = []
        for name in names.categories.astype(str):
            plain = plain_range(name)
            shown.append(plain if many or plain in self.step_kinds else name)
        code, unique = pd.factorize(np.array(shown, dtype=object))
        name = pd.Categorical.from_codes(np.append(code, -1)[names.codes], unique)
        labels, code = _coded(instances.assign(name=name), ["domain", "name"])
        duration = instances["total_ns" if clock == "CPU" else "gpu_ns"].to_numpy()
        return _summed(labels, code, duration, self._step_of(instances["start_ns"]), len(self.windows))

    def gaps(self) -> Figures:
        """Idle time by cause."""
        figures: Figures = {}
        for cause, idle in gaps.causes(self.trace).groupby("cause", observed=True):
            inside = np.zeros(len(self.windows))
            # Gaps of several devices overlap.
            for _, of_device in idle.groupby("device"):
                covered = intervals.Coverage(of_device["start_ns"], of_device["end_ns"])
                inside += covered.of(self.windows["begin_ns"], self.windows["end_ns"])
            figures[str(cause)] = Figure(len(idle), int((idle["end_ns"] - idle["start_ns"]).sum()), inside)
        return figures

    def outside(self) -> float:
        """Share of the GPU's work that was launched outside of steps; 0 in a capture without steps."""
        figures = self.work().values()
        total = sum(figure.total for figure in figures)
        if not total or not len(self.windows):
            return 0.0
        return 1 - sum(float(figure.steps.sum()) for figure in figures) / total

    def stretches(self, names: Iterable[Hashable]) -> Float:
        """What some kernels' launches would take if all were like those of one stretch, for each stretch of them."""
        kernels = self.trace.table("kernels", ["name", "duration_ns"])
        duration = kernels.loc[kernels["name"].isin(list(names)), "duration_ns"].to_numpy(np.float64)
        if not len(duration):
            return duration
        stretches = np.array_split(duration, min(len(duration), _STRETCHES))
        return len(duration) * np.array([stretch.mean() for stretch in stretches])

    def _by_name(self, names: Any, absent: str = "") -> Figures:
        """Kernels by a categorical, a name each."""
        used, code = np.unique(names.codes, return_inverse=True)
        labels = [absent if position < 0 else str(names.categories[position]) for position in used.tolist()]
        return self._launched("kernels", labels, code)

    def _launched(self, table: str, labels: Sequence[Hashable], code: Int, column: str = "duration_ns") -> Figures:
        """Sum a column of a GPU table by `code`, a position in `labels`."""
        values = self.trace.table(table, [column])[column].to_numpy()
        step = steps.launched_in(self.trace, table, self.windows)
        return _summed(labels, code, values, step, len(self.windows))

    def _step_of(self, start_ns: pd.Series) -> Int:
        """Which step something on the CPU began in, -1 for none."""
        return steps.number(self.windows.assign(end_ns=self.windows["cpu_end_ns"]), start_ns)


def samples(trace: Trace, match: str | None = None, count: int | None = None) -> Samples:
    """Cut a capture into its steps.

    Parameters
    ----------
    trace : Trace
        Whole, or selected from.
    match : str, optional
        Regular expression of the steps' names.
    count : int, optional
        How many steps it holds, where no ranges say so.

    Returns
    -------
    Samples

    Raises
    ------
    UsageError
        `match` is not a regular expression.
    """
    windows = steps.windows(trace, match)
    whole_steps = len(windows) > 0 or trace is trace.whole
    if not whole_steps:
        # A filter such as --within leaves the steps' own ranges out: take the steps that something selected lies in.
        windows = steps.windows(trace.whole, match)
        moments = [trace.table(table, ["start_ns"])["start_ns"] for table in ("ranges", "calls", "ops")]
        touched = np.unique(steps.number(windows.assign(end_ns=windows["cpu_end_ns"]), np.concatenate(moments)))
        windows = windows.iloc[touched[touched >= 0]].reset_index(drop=True)
    process = int(windows["process"].iloc[0]) if len(windows) else 0
    times = steps.divided(trace, steps.timed(windows), process)
    if not whole_steps:
        times["idle_ns"] = pd.NA  # what was left out may have run meanwhile
    return Samples(trace, overview.summary(trace), windows, times, len(windows) or count)


def _coded(events: pd.DataFrame, columns: list[str]) -> tuple[list[Hashable], Int]:
    """Give the texts that occur together in some columns, and which of them each row has."""
    groups = events.groupby(columns, observed=True, dropna=False)
    labels: list[Hashable] = []
    for label in groups.size().index:
        parts = label if isinstance(label, tuple) else (label,)
        labels.append(tuple("" if pd.isna(part) else str(part) for part in parts))
    return labels, groups.ngroup().to_numpy()


def _summed(labels: Sequence[Hashable], code: Int, values: Int, step: Int, count: int) -> Figures:
    """Sum values by their `code`, a position in `labels`, and by `step`, -1 for none of the `count`."""
    inside = step >= 0
    cell = (step * len(labels) + code)[inside]
    # Exact up to 2**53: 104 days of nanoseconds.
    sums = np.bincount(cell, values[inside], count * len(labels)).reshape(count, len(labels))
    totals = np.zeros(len(labels), np.int64)
    np.add.at(totals, code, values)  # exact in 64 bits, unlike a weighted bincount
    counts = np.bincount(code, minlength=len(labels))
    figures: Figures = {}
    for position, label in enumerate(labels):
        figures[label] = Figure(int(counts[position]), int(totals[position]), sums[:, position].astype(np.float64))
    return figures


@kept
def launching_operators(trace: Trace) -> pd.Categorical[str]:
    """Name the operator that launched each kernel; no name where none did.

    Parameters
    ----------
    trace : Trace
    """
    kernels = trace.table("kernels", ["process", "correlation"])
    call = intervals.launch_of(trace, kernels["process"], kernels["correlation"])
    used, position = np.unique(call[call >= 0], return_inverse=True)
    calls = trace.whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[used]
    around = intervals.enclosing(calls, trace.whole.table("ops", ["start_ns", "end_ns", "thread"]))
    row = np.full(len(call), -1, np.int64)
    row[call >= 0] = around[position]
    names: pd.Categorical[str] = trace.whole.table("ops", ["name"])["name"].array.take(row, allow_fill=True)
    return names


def main_operators(trace: Trace) -> dict[str, str]:
    """Say which operator launched most of the time of each kernel's name.

    Parameters
    ----------
    trace : Trace
    """
    events = trace.table("kernels", ["name", "duration_ns"]).assign(operator=launching_operators(trace))
    time = events.groupby(["name", "operator"], observed=True)["duration_ns"].sum().reset_index()
    time = time.sort_values("duration_ns", kind="stable").drop_duplicates("name", keep="last")
    return dict(zip(time["name"].astype(str), time["operator"].astype(str), strict=True))
