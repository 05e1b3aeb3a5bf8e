"""One capture cut into its steps: every sum as a whole, and as its part in each step.

What is launched in a step is that step's work, whenever the GPU got to it. Idle time is a step's where it lies between
the end of the step before and its own (:func:`nsightkit.analysis.timeline.steps.windows`).
"""

from __future__ import annotations

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


class Sums:
    """Durations of events by label: how many, exact sums, and the sum in each step.

    Parameters
    ----------
    labels : sequence
    code : ndarray of int, shape (n,)
        Position in `labels` of each event.
    duration : ndarray of int, shape (n,)
    step : ndarray of int, shape (n,), or None
        Step of each event, -1 for none; None where steps are not known.
    steps : int
        How many steps there are.

    Attributes
    ----------
    labels, counts, totals : list
    judged : ndarray of bool or None
        Which steps say how much the sums vary, where those are others than the capture's ordinary ones.
    """

    def __init__(self, labels: Sequence[Hashable], code: Int, duration: Int, step: Int | None, steps: int) -> None:
        n = len(labels)
        totals = np.zeros(n, np.int64)
        np.add.at(totals, code, duration)  # exact in 64 bits, unlike a weighted bincount
        self.labels: list[Hashable] = list(labels)
        self.counts: list[int | None] = np.bincount(code, minlength=n).tolist()
        self.totals: list[int] = totals.tolist()
        self.judged: Bool | None = None
        self._steps = steps if step is not None else 0
        if step is not None:
            inside = np.flatnonzero(step >= 0)
            order = inside[np.argsort(code[inside], kind="stable")]
            self._bounds = np.searchsorted(code[order], np.arange(n + 1))
            self._step, self._duration = step[order], duration[order]

    def of(self, rows: Sequence[int]) -> Float:
        """Sum some labels in each step.

        Parameters
        ----------
        rows : sequence of int
            Positions in `labels`.

        Returns
        -------
        ndarray of float64, shape (steps,)
            Empty where steps are not known.
        """
        found = np.zeros(self._steps)
        for row in rows if self._steps else ():
            part = slice(self._bounds[row], self._bounds[row + 1])
            found += np.bincount(self._step[part], weights=self._duration[part], minlength=self._steps)
        return found


class _Given(Sums):
    """Figures whose value in each step was worked out elsewhere."""

    def __init__(self, steps: int, judged: Bool | None = None) -> None:
        self.labels, self.counts, self.totals = [], [], []
        self.judged = judged
        self._steps = steps
        self._samples: list[Float] = []

    def add(self, label: str, count: int | None, total: int, samples: Float) -> None:
        self.labels.append(label)
        self.counts.append(count)
        self.totals.append(total)
        self._samples.append(samples)

    def of(self, rows: Sequence[int]) -> Float:
        found = [self._samples[row] for row in rows]
        return np.sum(found, axis=0) if found else np.zeros(self._steps)


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
        How many steps; None where nobody knows.
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
        step = steps.number(self.windows, time) if len(self.windows) else None
        return Sums(labels, code.astype(np.int64), duration, step, len(self.windows))

    def _sums_of(self, names: Any, duration: Int, time: Int, absent: str = "") -> Sums:
        """Sums by a categorical."""
        used, code = np.unique(names.codes, return_inverse=True)
        return self._sums([absent if u < 0 else str(names.categories[u]) for u in used.tolist()], code, duration, time)

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
            named = rows >= 0
            launcher = self.trace.whole.table(table, ["name"])["name"].cat
            frame = pd.DataFrame(
                {
                    "name": events["name"].cat.codes.to_numpy()[named],
                    "by": launcher.codes.to_numpy()[rows[named]],
                    "ns": events["duration_ns"].to_numpy()[named],
                }
            )
            most = frame.groupby(["name", "by"])["ns"].sum().reset_index().sort_values("ns", kind="stable")
            most = most.drop_duplicates("name", keep="last")
            pairs = zip(most["name"].tolist(), most["by"].tolist(), strict=True)
            kernel = events["name"].cat.categories
            by.append({str(kernel[n]): pairing.plain_range(str(launcher.categories[b])) for n, b in pairs})
        kinds = categorize(pd.Series(list(names), dtype="str"))
        return [
            pairing.Kernel(name, str(kind), by[0].get(name), by[1].get(name))
            for name, kind in zip(names, kinds, strict=True)
        ]

    # -- tables

    def kernels(self) -> Sums:
        """Sum kernels by name."""
        events = self.trace.table("kernels", ["name", "duration_ns"])
        return self._sums_of(
            events["name"].array, events["duration_ns"].to_numpy(), intervals.launched(self.trace, "kernels")
        )

    def categories(self) -> Sums:
        """Sum kernels by category, and graph replays, whose kernels were not recorded."""
        events = self.trace.table("kernels", ["name", "duration_ns"])
        graphs = self.trace.table("graphs", ["duration_ns"])["duration_ns"].to_numpy()
        return self._sums(
            [*CATEGORIES, GRAPHS],
            np.concatenate([categorize(events["name"]).codes, np.full(len(graphs), len(CATEGORIES))]),
            np.concatenate([events["duration_ns"].to_numpy(), graphs]),
            np.concatenate([intervals.launched(self.trace, "kernels"), intervals.launched(self.trace, "graphs")]),
        )

    def memops(self) -> Sums:
        """Sum copies and memsets by direction and the kinds of memory."""
        events = self.trace.table("memops", [*_KINDS, "duration_ns"])
        by = events.groupby(_KINDS, observed=True, dropna=False)
        code = by.ngroup().to_numpy()
        labels = [tuple("" if pd.isna(kind) else str(kind) for kind in kinds) for kinds in by.size().index]
        return self._sums(labels, code, events["duration_ns"].to_numpy(), intervals.launched(self.trace, "memops"))

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
        duration = self.trace.table("kernels", ["duration_ns"])["duration_ns"].to_numpy()
        return self._sums_of(taken, duration, intervals.launched(self.trace, "kernels"), NO_OPERATOR)

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
        code, device = found["cause"].cat.codes.to_numpy(), found["device"].to_numpy()
        start, end = found["start_ns"].to_numpy(), found["end_ns"].to_numpy()
        sums = _Given(len(self.windows), self._spanned())
        for number, cause in enumerate(gaps.CAUSES):
            mine = code == number
            inside = np.zeros(len(self.windows))
            for one in np.unique(device[mine]).tolist():
                here = mine & (device == one)
                covered = intervals.Coverage(start[here], end[here])
                inside += covered.of(self.timed["start_ns"], self.timed["end_ns"])
            if mine.any():
                sums.add(cause, int(mine.sum()), int((end - start)[mine].sum()), inside)
        return sums

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
        sums, none = _Given(len(self.windows), self.ordinary), np.zeros(0)
        if unit == "step" and len(self.windows):
            wall = self.timed["wall_ns"].to_numpy(np.float64)
            sums.add("wall_ns", len(wall), int(wall.sum()), wall)
            # A selection without its steps' own ranges says nothing of how busy they were.
            known = self._own_windows and bool(self.timed["busy_ns"].notna().all())
            for name in ("busy_ns", "idle_ns") if known else ():
                sums.add(name, None, self.overview[name], self.timed[name].to_numpy(np.float64))
        else:
            for name in ("wall_ns", "busy_ns", "idle_ns"):
                if self.overview[name] is not None:
                    sums.add(name, None, self.overview[name], none)
        for name, table in zip(("kernel_ns", "memop_ns", "graph_ns"), GPU_TABLES, strict=True):
            if self.trace.recorded(table):
                duration = self.trace.table(table, ["duration_ns"])["duration_ns"].to_numpy()
                every = self._sums(
                    [name], np.zeros(len(duration), np.int64), duration, intervals.launched(self.trace, table)
                )
                sums.add(name, len(duration), int(duration.sum()), every.of([0]))
        return sums

    def outside_ns(self) -> int:
        """Sum the GPU's work that was launched in no step; 0 where there are no steps."""
        lost = 0
        for table in GPU_TABLES if len(self.windows) else ():
            step = steps.number(self.windows, intervals.launched(self.trace, table))
            lost += int(self.trace.table(table, ["duration_ns"])["duration_ns"].to_numpy()[step < 0].sum())
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
