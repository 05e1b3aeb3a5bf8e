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
from nsightkit.analysis.core.categories import categorize
from nsightkit.analysis.core.kept import kept
from nsightkit.analysis.timeline import gaps, operators, overview, ranges, steps
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["COPY_COLUMNS", "GRAPHS", "NO_OPERATOR", "Figure", "Samples", "samples"]

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
Labels = Sequence[Hashable]


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """A capture, cut into its steps.

    Parameters
    ----------
    trace : Trace
    overview : dict
        What :func:`nsightkit.analysis.timeline.overview.summary` says of the trace.
    windows : DataFrame
        The steps, as :func:`nsightkit.analysis.timeline.steps.windows` has them, with ``wall_ns``, and ``outlier``
        where one stands out: a stall now and then is not noise. Empty where there are none.
    count : int or None
        How many steps; None where the trace does not show it.
    figures : dict
        By table, and by clock where it has two: the figures of what was recorded. ``steps`` and ``whole`` are the time
        of the steps, and from the first operation to the last; ``work`` is the GPU's by kind; ``kernels``,
        ``categories`` (with graph replays, whose kernels were not recorded), ``memops`` and ``bytes`` by direction and
        kinds of memory, ``gaps`` by cause, ``operators`` (GPU: the kernels they launched; CPU: their own times) and
        ``ranges`` by domain and name, steps without their numbers.
    """

    trace: Trace
    overview: dict[str, Any]
    windows: pd.DataFrame
    count: int | None
    figures: dict[str, Figures]

    @property
    def ordinary(self) -> Bool:
        """Steps that do not stand out."""
        return ~self.windows["outlier"].to_numpy(bool)

    @property
    def spanned(self) -> Bool:
        """Ordinary steps between the first operation and the last: idle time elsewhere has no cause."""
        devices = pd.DataFrame(self.overview["devices"], columns=["start_ns", "end_ns"])
        inside = (self.windows["begin_ns"] >= devices["start_ns"].min()) & (
            self.windows["end_ns"] <= devices["end_ns"].max()
        )
        spanned = self.ordinary & inside.to_numpy(bool)
        return spanned if spanned.any() else self.ordinary

    @property
    def step_kinds(self) -> set[str]:
        """Names of steps without their numbers."""
        return {plain_range(str(name)) for name in self.windows["step"]}

    @property
    def outside(self) -> float:
        """Share of the GPU's work that was launched outside of steps; 0 in a capture without steps."""
        total = sum(figure.total for figure in self.figures["work"].values())
        if not total or not len(self.windows):
            return 0.0
        return 1 - sum(float(figure.steps.sum()) for figure in self.figures["work"].values()) / total

    def stretches(self, names: Iterable[Hashable]) -> Float:
        """What some kernels' launches would take if all were like those of one stretch, for each stretch of them."""
        kernels = self.trace.table("kernels", ["name", "duration_ns"])
        duration = kernels.loc[kernels["name"].isin(list(names)), "duration_ns"].to_numpy(np.float64)
        if not len(duration):
            return duration
        stretches = np.array_split(duration, min(len(duration), _STRETCHES))
        return len(duration) * np.array([stretch.mean() for stretch in stretches])


def samples(trace: Trace, match: str | None = None, count: int | None = None) -> Samples:
    """Cut a capture into its steps, and add up what happened in each.

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
        touched = np.unique(_step_of(windows, np.concatenate(moments)))
        windows = windows.iloc[touched[touched >= 0]].reset_index(drop=True)
    process = int(windows["process"].iloc[0]) if len(windows) else 0
    times = steps.divided(trace, steps.timed(windows), process)
    if not whole_steps:
        times["idle_ns"] = pd.NA  # what was left out may have run meanwhile
    windows = windows.assign(wall_ns=times["wall_ns"], outlier=steps.outliers(times["wall_ns"].to_numpy()))
    whole = overview.summary(trace)
    figures = _figures(trace, windows) | {"steps": {}, "whole": {}}
    if len(windows):
        figures["steps"]["wall_ns"] = Figure(len(times), int(times["wall_ns"].sum()), times["wall_ns"].to_numpy(float))
    for name in ("wall_ns", "busy_ns", "idle_ns"):
        if whole[name] is not None:
            figures["whole"][name] = Figure(None, whole[name], np.zeros(0))
            if len(windows) and name != "wall_ns" and times[name].notna().all():
                figures["steps"][name] = Figure(None, whole[name], times[name].to_numpy(np.float64))
    return Samples(trace, whole, windows, len(windows) or count, figures)


def _figures(trace: Trace, windows: pd.DataFrame) -> dict[str, Figures]:
    """Add up every table that was recorded."""
    figures: dict[str, Figures] = {"work": {}}
    for name, table in zip(("kernel_ns", "memop_ns", "graph_ns"), GPU_TABLES, strict=True):
        if trace.recorded(table):
            everything = np.zeros(trace.size(table), np.intp)
            figures["work"] |= _launched(trace, windows, table, [name], everything)
    on_gpu, with_calls = trace.recorded("kernels"), trace.recorded("kernels") and trace.recorded("calls")
    if on_gpu:
        names = trace.table("kernels", ["name"])["name"]
        figures["kernels"] = _kernels_by(trace, windows, names.array)
        replays = np.zeros(trace.size("graphs"), np.intp)
        figures["categories"] = _kernels_by(trace, windows, categorize(names))
        figures["categories"] |= _launched(trace, windows, "graphs", [GRAPHS], replays)
        figures["gaps"] = _gaps(trace, windows)
    if trace.recorded("memops"):
        labels, code = _coded(trace.table("memops", COPY_COLUMNS), COPY_COLUMNS)
        figures["memops"] = _launched(trace, windows, "memops", labels, code)
        figures["bytes"] = _launched(trace, windows, "memops", labels, code, "bytes")
    # A framework's operators are recorded where there are any.
    if trace.recorded("ops") and trace.size("ops"):
        own = operators.own(trace)
        labels, code = _coded(own, ["name"])
        figures["operators CPU"] = _summed(
            labels, code, own["duration_ns"], _step_of(windows, own["start_ns"]), windows
        )
        if with_calls:
            figures["operators GPU"] = _kernels_by(trace, windows, launching_operators(trace), NO_OPERATOR)
    if trace.recorded("ranges"):
        figures["ranges CPU"] = _ranges(trace, windows, "total_ns")
        if with_calls:
            figures["ranges GPU"] = _ranges(trace, windows, "gpu_ns")
    return figures


def _kernels_by(trace: Trace, windows: pd.DataFrame, names: Any, absent: str = "") -> Figures:
    """Add up kernels by a categorical, a name each."""
    used, code = np.unique(names.codes, return_inverse=True)
    labels = [absent if position < 0 else str(names.categories[position]) for position in used.tolist()]
    return _launched(trace, windows, "kernels", labels, code)


def _launched(
    trace: Trace, windows: pd.DataFrame, table: str, labels: Labels, code: Int, column: str = "duration_ns"
) -> Figures:
    """Add up a column of a GPU table by `code`, a position in `labels`."""
    step = steps.launched_in(trace, table, windows)
    return _summed(labels, code, trace.table(table, [column])[column], step, windows)


def _gaps(trace: Trace, windows: pd.DataFrame) -> Figures:
    figures: Figures = {}
    for cause, idle in gaps.causes(trace).groupby("cause", observed=True):
        inside = np.zeros(len(windows))
        # Gaps of several devices overlap.
        for _, of_device in idle.groupby("device"):
            covered = intervals.Coverage(of_device["start_ns"], of_device["end_ns"])
            inside += covered.of(windows["begin_ns"], windows["end_ns"])
        figures[str(cause)] = Figure(len(idle), int((idle["end_ns"] - idle["start_ns"]).sum()), inside)
    return figures


def _ranges(trace: Trace, windows: pd.DataFrame, column: str) -> Figures:
    instances = ranges.instances(trace)
    names = instances["name"].cat.categories.astype(str)
    step_kinds = {plain_range(str(name)) for name in windows["step"]}
    shown = {}
    for name in names:
        plain = plain_range(name)
        shown[name] = plain if len(names) > _MOST_NAMES or plain in step_kinds else name
    labels, code = _coded(instances.assign(name=instances["name"].astype(str).map(shown)), ["domain", "name"])
    return _summed(labels, code, instances[column], _step_of(windows, instances["start_ns"]), windows)


def _step_of(windows: pd.DataFrame, start_ns: npt.ArrayLike) -> Int:
    """Which step something on the CPU began in, -1 for none."""
    return steps.number(windows.assign(end_ns=windows["cpu_end_ns"]), start_ns)


def _coded(events: pd.DataFrame, columns: list[str]) -> tuple[Labels, Int]:
    """Give what occurs together in some columns, and which of these labels each row has."""
    groups = events.groupby(columns, observed=True, dropna=False)
    labels: list[Hashable] = []
    keys: list[Any] = groups.size().index.tolist()
    for key in keys:
        parts = key if len(columns) > 1 else (key,)
        texts = ["" if pd.isna(part) else str(part) for part in parts]
        labels.append(tuple(texts) if len(columns) > 1 else texts[0])
    return labels, groups.ngroup().to_numpy()


def _summed(labels: Labels, code: Int, values: pd.Series, step: Int, windows: pd.DataFrame) -> Figures:
    """Add up values by their `code`, a position in `labels`, and by step, -1 for none."""
    inside = step >= 0
    cell = (step * len(labels) + code)[inside]
    # Exact up to 2**53: 104 days of nanoseconds.
    sums = np.bincount(cell, values.to_numpy()[inside], len(windows) * len(labels)).astype(np.float64)
    sums = sums.reshape(len(windows), len(labels))
    totals = np.zeros(len(labels), np.int64)
    np.add.at(totals, code, values.to_numpy())  # exact in 64 bits, unlike a weighted bincount
    counts = np.bincount(code, minlength=len(labels))
    figures: Figures = {}
    for position, label in enumerate(labels):
        figures[label] = Figure(int(counts[position]), int(totals[position]), sums[:, position])
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


@kept
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
